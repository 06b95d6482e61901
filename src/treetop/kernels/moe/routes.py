"""Which experts a token goes to, with which weights, by plain operations; and what says so.

A router gives each token a logit an expert; its kind says how these become `top_k` experts and their weights. A token
that is nobody's has no expert. `kernels.moe.routing` makes routes on a GPU, with tiles of an expert's tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.exact import BY_ELEMENT, LIBRARY, Functions, batch_invariant_linear
from treetop.kernels.tree.tree import stable_topk

RowProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`x @ weight.T + bias` for x [rows, in]."""


class RouterKind(StrEnum):
    """How logits become experts and weights.

    SOFTMAX: the k most likely, with their probabilities.
    TOPK_SOFTMAX: the k largest, softmax over these alone.
    SIGMOID: the k largest sigmoids, which are the weights.
    """

    SOFTMAX = "softmax"
    TOPK_SOFTMAX = "softmax of the chosen"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """renormalise: a token's weights are made to add up to 1.
    scale: then multiplied by this.
    bias: of the logits.
    correction: added to sigmoids or probabilities when experts are chosen, not in their weights.
    groups: parts of the experts, of which each token takes the `top_groups` whose `group_best` best experts have the
        largest sum. Source of groups and correction: DeepSeek-V3, arXiv:2412.19437, section 2.1.2; of groups by their
        best expert alone: DeepSeek-V2, arXiv:2405.04434, section 2.2.2.
    factors: each expert has a number that its weights are multiplied by in the end.
    of_inputs: weights multiply what experts read, not what they give.
    identity: so many of the experts, the last ones, have no weights: they give what they read (zero-computation
        experts). Source: LongCat-Flash, arXiv:2509.01322, section 2.1.
    least: added to the sum of a token's weights that they are divided by; kernels know the default alone.
    """

    num_experts: int
    top_k: int
    kind: RouterKind
    renormalise: bool = False
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: Literal[1, 2] = 2
    factors: bool = False
    of_inputs: bool = False
    identity: int = 0
    least: float = 1e-20

    @property
    def with_weights(self) -> int:
        """Experts that compute something."""
        return self.num_experts - self.identity

    @property
    def computing(self) -> float:
        """A token's experts with weights, on average, where every choice is as likely as any other."""
        return self.top_k * self.with_weights / self.num_experts


IDENTITY = -2
"""What routes have for an expert without weights."""


@dataclass(frozen=True, slots=True)
class Router:
    """weight: [experts, hidden].
    bias: [experts].
    correction, factor: [experts], float32 or float64.

    own: the experts that are here, where ranks share them; None for all that have weights. Routes number them from 0.
    gates_shared: the weight has one line more, the gate of the expert that all tokens take; there is no bias then.
    leaves: kernels of the products follow, which may choose one token's experts themselves (`Routes.left`).
    narrow: the products are in MXFP4, whose tiles have 8 rows of one token where that is faster (`tile_rows`).
    """

    spec: RouterSpec
    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    own: range | None = None
    factor: Tensor | None = None
    gates_shared: bool = False
    leaves: bool = False
    narrow: bool = False

    @property
    def here(self) -> range:
        return range(self.spec.with_weights) if self.own is None else self.own

    @property
    def apart(self) -> bool:
        """A token may have experts that are not here."""
        return self.own is not None or self.spec.identity > 0


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Tokens of a forward, as layers with experts see them.

    live: [tokens] bool, False for padding, of all ranks that share the experts; None if all are.
    chosen: takes what each layer's router chooses, [own tokens, top_k] int16, in the order of the layers; None where
        nobody asks.
    """

    live: Tensor | None = None
    chosen: list[Tensor] | None = None


ALL_LIVE = RoutedTokens()


@dataclass(frozen=True, slots=True)
class Tiles:
    """Assignments in the order of their experts, cut into tiles of one expert and at most `rows` assignments.

    order: [assignments] int32, token * top_k + which of its experts; those of padding are left out. expert, start,
    count: [most tiles] int32, where a tile lies in `order`; the first number[0] of them are there.
    """

    rows: int
    order: Tensor
    expert: Tensor
    start: Tensor
    count: Tensor
    number: Tensor


@dataclass(frozen=True, slots=True)
class Routes:
    """expert: [tokens, top_k] integers, -1 for padding and for another rank's experts, `IDENTITY` for one of those.
    weight: [tokens, top_k], float32 or float64.
    tiles: of a kernel.
    apart: some of a token's experts may be another rank's, or have no weights.
    of_inputs: see `RouterSpec`.
    chosen: [tokens, top_k] int16, the same among the experts of all ranks, those without weights too, best first; of
        padding what its numbers give. None where nobody asks.
    shared: [tokens], the weight of the expert that all tokens take, padding too, as `weight`; None if it is not with
        the others.
    left: the choice is the first product's, which writes expert, weight, tiles and chosen; None where it is made.
    """

    expert: Tensor
    weight: Tensor
    tiles: Tiles | None = None
    apart: bool = False
    of_inputs: bool = False
    chosen: Tensor | None = None
    shared: Tensor | None = None
    left: "LeftChoice | None" = None


@dataclass(frozen=True, slots=True)
class LeftChoice:
    """What one token's experts are chosen by. logits: [parts, 1, experts] float32. live: [1] bool, or None."""

    logits: Tensor
    live: Tensor | None
    spec: RouterSpec


def route_reference(
    x: Tensor,
    router: Router,
    live: Tensor | None,
    linear: RowProduct | None = None,
    functions: Functions = LIBRARY,
    *,
    tells: bool = False,
) -> Routes:
    """The experts of each token, and their weights. x: [tokens, hidden]; live: [tokens] bool, False for padding.

    linear: how logits are computed, `each_row` by default. tells: with `Routes.chosen`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if router.bias is None else router.bias.to(wide)
    logits = (linear or each_row)(x.to(wide), router.weight.to(wide), bias)
    shared = functions.sigmoid(logits[:, -1]) if router.gates_shared else None
    logits = logits[:, : router.spec.num_experts]
    expert, weight = choose_experts(logits, router.spec, router.correction, functions)
    if router.factor is not None:
        weight = weight * router.factor[expert]
    chosen = expert.to(torch.int16) if tells else None
    here = (expert >= router.here.start) & (expert < router.here.stop)
    elsewhere = torch.where(expert >= router.spec.with_weights, IDENTITY, -1) if router.spec.identity else -1
    expert = torch.where(here, expert - router.here.start, elsewhere)
    expert = expert if live is None else torch.where(live[:, None], expert, -1)
    return Routes(expert, weight, apart=router.apart, of_inputs=router.spec.of_inputs, chosen=chosen, shared=shared)


def batch_invariant_route(
    x: Tensor, router: Router, live: Tensor | None, linear: RowProduct = batch_invariant_linear, *, tells: bool = False
) -> Routes:
    """`route_reference` on a CPU in float32, where what a token gets has the same bits in any batch."""
    return route_reference(x, router, live, linear, BY_ELEMENT, tells=tells)


def each_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`; in float64 a row at a time, so that what it gives depends on no other row."""
    if x.dtype != torch.float64 or len(x) == 0:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


def choose_experts(
    logits: Tensor, spec: RouterSpec, correction: Tensor | None, functions: Functions = LIBRARY
) -> tuple[Tensor, Tensor]:
    """logits: [tokens, experts]. Returns experts [tokens, top_k] int64, best first, and weights."""
    if spec.kind is RouterKind.TOPK_SOFTMAX:
        best, expert = stable_topk(logits, spec.top_k)
        weight = torch.softmax(best, dim=-1)
    else:
        score = torch.softmax(logits, dim=-1) if spec.kind is RouterKind.SOFTMAX else functions.sigmoid(logits)
        choice = score if correction is None else score + correction
        _, expert = stable_topk(_within_groups(choice, spec), spec.top_k)
        weight = score.gather(1, expert)
    if spec.renormalise:
        weight = weight / (weight.sum(dim=-1, keepdim=True) + spec.least)
    return expert, weight * spec.scale


def _within_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """The scores by which experts are chosen, -inf outside a token's groups."""
    if spec.groups == 1:
        return choice
    grouped = choice.unflatten(1, (spec.groups, -1))
    best = grouped.topk(min(spec.group_best, grouped.shape[2]), dim=-1).values.sum(dim=-1)
    _, group = stable_topk(best, spec.top_groups)
    taken = torch.zeros_like(best, dtype=torch.bool).scatter_(1, group, True)
    inside: Tensor = grouped.masked_fill(~taken[..., None], float("-inf"))
    return inside.flatten(1)
