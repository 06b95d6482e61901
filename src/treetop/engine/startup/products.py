"""How products with weights are taken.

On a CPU by timing, and a target's exactly where that was asked for; there on a GPU as a probe found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from treetop.checkpoints.loader import LoadContext
from treetop.engine.startup.plan import EnginePlan
from treetop.engine.startup.probed_products import probed_products
from treetop.engine.startup.weight_copies import CpuWeights, product_weights
from treetop.kernels.profile import TIES
from treetop.types.errors import ConfigError
from treetop.weights.cpu_products import (
    Call,
    ChosenProduct,
    Shape,
    choose_exact_products,
    choose_products,
    is_exact_from,
)
from treetop.weights.gpu_products import Probed


@dataclass(frozen=True, slots=True)
class Products:
    """By shape of a weight, of target and draft: the same but where the target's bits are exact.

    probed: the target's on a GPU, where its bits are exact.
    """

    target: Mapping[Shape, ChosenProduct]
    draft: Mapping[Shape, ChosenProduct]
    probed: Mapping[Shape, Probed] = field(default_factory=dict)

    @property
    def all(self) -> tuple[ChosenProduct, ...]:
        return (*self.target.values(), *(() if self.draft is self.target else self.draft.values()))

    def of_target(self, place: LoadContext) -> LoadContext:
        """Where the target computes."""
        return replace(place, products=self.target, probed=self.probed)

    def of_draft(self, place: LoadContext) -> LoadContext:
        """Where a draft does: it changes no token, whatever its bits."""
        return replace(place, products=self.draft, profile=TIES)


def products_of(engine_plan: EnginePlan) -> Products:
    """Nothing on a GPU unless bits are to be exact. Raises ConfigError where a machine's cannot be."""
    place, weights = engine_plan.place, engine_plan.weights
    if place.profile.products == "probed":
        needed = product_weights(engine_plan.target, None, place)
        return Products({}, {}, probed_products(needed, place.dtype, place.device))
    if place.profile.products == "fastest":
        timed = _timed(weights, place)
        return Products(timed, timed)
    sums = engine_plan.config.exact_sums
    target = choose_exact_products(weights.shapes[: weights.targets], weights.orders, sums, few=weights.few)
    return Products(_agreed(target, place), _timed(replace(weights, shapes=weights.shapes[weights.targets :]), place))


def _agreed(own: Mapping[Shape, ChosenProduct], place: LoadContext) -> Mapping[Shape, ChosenProduct]:
    """The first rank's exact calls, for all. Raises ConfigError on all ranks where one of them cannot take one.

    A row is to have the same bits on any rank, and what ranks compute alike is to be alike.
    """
    if place.parallel.size * place.expert_ranks.size == 1 or not own:
        return own
    every = list(Call)
    mine = torch.tensor([[every.index(each.calls[0]), each.least] for each in own.values()])
    first = place.expert_ranks.gather(place.parallel.gather(mine)[0])[0].tolist()
    told = {
        shape: each
        if (every[call], least) == (each.calls[0], each.least)
        else replace(each, calls=(every[call],) * len(each.calls), least=least, piece=0)
        for (shape, each), (call, least) in zip(own.items(), first, strict=True)
    }
    able = all(is_exact_from(shape, each.calls[0], each.least) for shape, each in told.items())
    if not place.expert_ranks.minimum(place.parallel.minimum(int(able))):
        raise ConfigError(
            "--exactness bits: products that are exact on the first rank are not on another; use --exactness ties"
        )
    return told


def _timed(weights: CpuWeights, place: LoadContext) -> dict[Shape, ChosenProduct]:
    """Calls differ in their last bits: all ranks take those of the first."""
    if not weights.shapes:
        return {}
    orders = place.expert_ranks.minimum(place.parallel.minimum(weights.orders))
    own = choose_products(weights.shapes, place.dtype, orders)
    every = list(Call)
    calls = torch.tensor([[every.index(call) for call in each.calls] for each in own.values()])
    first = place.expert_ranks.gather(place.parallel.gather(calls)[0])[0].tolist()
    return {
        shape: replace(each, calls=tuple(every[index] for index in row))
        for (shape, each), row in zip(own.items(), first, strict=True)
    }
