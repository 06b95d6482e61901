"""How products with weights are taken on a CPU: by timing, and a target's exactly where that was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from treetop.engine.weight_copies import CpuWeights
from treetop.models.loader import Placement
from treetop.weights.cpu_products import Call, ChosenProduct, Shape, choose_products


@dataclass(frozen=True, slots=True)
class Products:
    """By shape of a weight, of target and draft: the same but where the target's bits are exact."""

    target: Mapping[Shape, ChosenProduct]
    draft: Mapping[Shape, ChosenProduct]

    @property
    def all(self) -> tuple[ChosenProduct, ...]:
        return (*self.target.values(), *(() if self.draft is self.target else self.draft.values()))


def products_of(weights: CpuWeights, place: Placement) -> Products:
    """Empty on a GPU."""
    if not place.exact:
        timed = _timed(weights, place)
        return Products(timed, timed)
    target = choose_products(weights.shapes[: weights.targets], place.dtype, weights.orders, exact=True)
    return Products(target, _timed(replace(weights, shapes=weights.shapes[weights.targets :]), place))


def _timed(weights: CpuWeights, place: Placement) -> dict[Shape, ChosenProduct]:
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
