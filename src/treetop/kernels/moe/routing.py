"""Which experts a token goes to, with which weights, and which tokens come to an expert.

A router gives each token a logit an expert; its kind says how these become `top_k` experts and their weights. On a GPU
the products with experts want the tokens of an expert side by side, so the assignments (token, which of its experts)
are put in order by expert, then by token, and cut into tiles of one expert. All of it stays on the device: launches
have room for as many tiles as there can be, and those in excess end at once. A token that is nobody's has no expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.exact import BY_ELEMENT, LIBRARY, Functions, batch_invariant_linear
from treetop.kernels.sort_key import index_of, key_of
from treetop.kernels.tree.tree import stable_topk
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, gpu_traits, jit, lanes, power_of_two, tl

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


# ------------------------------------------------------------------------------------------------------- the kernels

_ONE_PROGRAM = 2**11
"""Tokens times experts, both as powers of two, up to which one program does all that comes after the logits."""
_BY_TOKEN = (256, 8192)
"""Above so many tokens, and up to so many assignments, a token is one warp's and each assignment finds its place by
looking at all others, where bits may depend on the number of tokens: fewer are as fast in programs of several."""
_MANY = 1024
"""Tokens up to which a router's product is cut for few rows, where bits may depend on how many there are."""
_LEFT = 128
"""Experts up to which each program of a first product compares all of them, to find its own; more take longer."""
_OWN = 32
"""Assignments that a program finds places for."""
_MAX_BLOCKS = 64
"""Blocks of tokens where there are more, of 4 to 64 tokens as long as that will do."""


def tile_rows(tokens: int, spec: RouterSpec, narrow: bool = False) -> int:
    """Assignments of a tile: about what an expert gets, from 16 to 128; or 8 of one token, if `narrow`."""
    if narrow and tokens == 1:
        return 8
    mean = tokens * spec.top_k / spec.num_experts
    return next((rows for maximum, rows in ((8, 16), (24, 32), (64, 64)) if mean <= maximum), 128)


def may_be_narrow(gpu: GpuTraits, batch_invariant: bool) -> bool:
    """Whether tiles may have 8 rows: on Hopper, where it was measured, and where a token need not have the same bits
    in any batch, for products of more rows may be other instructions."""
    return gpu.by_warp_groups and not gpu.has_tensor_memory and not batch_invariant


def most_tiles(tokens: int, rows: int, spec: RouterSpec) -> int:
    """Tiles of so many rows that there can be: each expert has at most one that is not full."""
    assignments = tokens * spec.top_k
    return min(assignments, spec.num_experts) + assignments // rows


def route(
    x: Tensor,
    router: Router,
    live: Tensor | None,
    gpu: GpuTraits,
    batch_invariant: bool = False,
    *,
    tells: bool = False,
) -> Routes:
    """`route_reference`, and the tiles: in two launches for few tokens, three for many. x, live: contiguous.

    batch_invariant: a token has the same bits in any batch: logits are sums without a cut, and programs have as many
        tokens
    whatever there are.
    """
    spec, tokens, options = router.spec, len(x), launch_options(gpu)
    narrow = router.narrow and may_be_narrow(gpu, batch_invariant)
    experts, rows = spec.num_experts, tile_rows(len(x), router.spec, narrow)
    assert x.is_contiguous()
    assert router.weight.is_contiguous()
    assert live is None or live.is_contiguous()
    by_token = not batch_invariant and tokens > _BY_TOKEN[0] and tokens * spec.top_k <= _BY_TOKEN[1]
    counts = torch.empty((1 if by_token else 0, experts), dtype=torch.int32, device=x.device)
    logits = _logits(x, router.weight, router.bias, gpu, batch_invariant, counts)
    expert = torch.empty((tokens, spec.top_k), dtype=torch.int32, device=x.device)
    weight = torch.empty((tokens, spec.top_k), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, spec.top_k), dtype=torch.int16, device=x.device) if tells else None
    shared = weight.new_empty(tokens) if router.gates_shared else None
    numbers = torch.empty((3, most_tiles(tokens, rows, spec)), dtype=torch.int32, device=x.device)
    order, number = torch.empty_like(expert).view(-1), numbers.new_empty(1)
    if router.leaves and tokens == 1 and not batch_invariant and _can_leave(router):
        tiles = Tiles(rows, order, numbers[0], numbers[1], numbers[2], number)
        return Routes(expert, weight, tiles, False, spec.of_inputs, chosen, left=LeftChoice(logits, live, spec))
    block, one = (1, False) if by_token else _tokens_of_a_program(tokens, experts, batch_invariant)
    blocks = 1 if one else -(-tokens // block)
    counts = counts if by_token else counts.new_empty((blocks, experts))
    choice = {
        "top_k": spec.top_k, "experts": experts, "block": block, "block_e": lanes(experts), "overlap": gpu.can_overlap,
        "num_warps": 1 if by_token else 4 if block * lanes(experts) <= 4096 else 8, **options,
    }  # fmt: skip
    placed = order, *numbers, number, counts, tokens, blocks, numbers.shape[1]
    sigmoid = spec.kind is RouterKind.SIGMOID
    _choose_kernel[(blocks,)](
        expert, weight, expert if chosen is None else chosen, logits,
        logits if router.correction is None else router.correction,
        logits if router.factor is None else router.factor, expert if live is None else live,
        weight if shared is None else shared, *placed, spec.scale, parts=len(logits),
        sigmoid=sigmoid, of_chosen=spec.kind is RouterKind.TOPK_SOFTMAX, renormalise=spec.renormalise,
        corrected=router.correction is not None, factored=router.factor is not None, masked=live is not None,
        groups=spec.groups, top_groups=spec.top_groups, group_best=spec.group_best, block_g=lanes(spec.groups),
        places=one, rows=rows, block_k=lanes(spec.top_k), first=router.here.start, stop=router.here.stop,
        computing=spec.with_weights, tells=tells, shares=shared is not None, by_token=by_token, **choice,
    )  # fmt: skip
    if by_token:
        assignments = tokens * spec.top_k
        _place_by_rank_kernel[(-(-assignments // _OWN),)](
            expert, order, *numbers, number, counts, assignments, numbers.shape[1], rows=rows, experts=experts,
            block_e=lanes(experts), own=_OWN, block=min(1024, max(_OWN, power_of_two(assignments))),
            overlap=gpu.can_overlap, num_warps=4, **options,
        )  # fmt: skip
    elif not one:
        _place_kernel[(blocks,)](expert, *placed, rows=rows, **choice)
    tile_expert, start, count = numbers
    tiles = Tiles(rows, order, tile_expert, start, count, number)
    return Routes(expert, weight, tiles, router.apart, spec.of_inputs, chosen, shared)


def _can_leave(router: Router) -> bool:
    """Whether a token's experts are those of its largest logits, all here and not many, and weights are of what they
    give."""
    spec = router.spec
    if spec.num_experts > _LEFT:
        return False
    more = router.correction is not None or router.factor is not None or router.gates_shared or spec.of_inputs
    return router.here == range(spec.num_experts) and spec.groups == 1 and not more


def _tokens_of_a_program(tokens: int, experts: int, batch_invariant: bool) -> tuple[int, bool]:
    """How many tokens a program chooses experts for, and whether there is one program, which places them too."""
    if batch_invariant:  # what a program adds up over experts, it adds up as its block is laid out among threads
        block = min(max(_ONE_PROGRAM // lanes(experts), 4), 64)
        return block, tokens <= block
    one = lanes(tokens) * lanes(experts) <= _ONE_PROGRAM
    return lanes(tokens) if one else min(max(power_of_two(-(-tokens // _MAX_BLOCKS)), 4), 64), one


def linear_uncut(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of x [rows, in] on a GPU, a row in the same bits in any batch, as routers have logits.

    The sum is rounded to the dtype of x before the bias is added.
    """
    nothing = torch.empty((0, 0), dtype=torch.int32, device=x.device)
    out = _logits(x.contiguous(), weight.contiguous(), None, gpu_traits(x.device), True, nothing)[0].to(x.dtype)
    return out if bias is None else out + bias


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, gpu: GpuTraits, batch_invariant: bool, zeros: Tensor
) -> Tensor:
    """A router's logits in parts [parts, tokens, experts] float32, which the next kernel adds up. zeros: [1 or 0, n],
    int32, which become 0."""
    tokens, hidden = x.shape
    experts, few = len(weight), tokens <= (64 if batch_invariant else _MANY)
    block_k = (256 if batch_invariant and x.element_size() == 2 else 64) if few else 32
    blocks = -(-hidden // block_k)
    splits = min(8, blocks) if few and not batch_invariant else 1
    share = -(-blocks // splits) * block_k
    splits = -(-hidden // share)
    block_m = max(16, power_of_two(min(tokens, 64)))
    parts = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    _logits_kernel[(-(-experts // 16), -(-tokens // block_m), splits)](
        parts, x, weight, x if bias is None else bias, zeros, tokens, hidden, share, experts,
        zeroed=zeros.numel(), block_z=lanes(max(zeros.numel(), 1)), has_bias=bias is not None,
        asks=lanes(-(-share // 64)) if gpu.can_overlap and few else 0,
        block_m=block_m, block_k=block_k, overlap=gpu.can_overlap,
        num_warps=4, num_stages=4, **launch_options(gpu),
    )  # fmt: skip
    return parts


@jit
def _logits_kernel(
    parts: Arg, x: Arg, weight: Arg, bias: Arg, zeros: Arg, tokens: Arg, hidden: Arg, share: Arg, experts: constexpr,
    zeroed: constexpr, block_z: constexpr, has_bias: constexpr, asks: constexpr, block_m: constexpr, block_k: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """Logits of 16 experts and a block of tokens over one share of the hidden state; the first adds the bias.

    Grid (experts / 16, tokens / block_m, splits).
    """
    expert = tl.program_id(0) * 16 + tl.arange(0, 16)
    if asks > 0:  # 64 numbers of 16 bits are a cache line
        at = tl.program_id(2) * share + tl.arange(0, asks) * 64
        ask_for(weight + tl.minimum(expert, experts - 1)[:, None] * hidden + tl.minimum(at, hidden - 1)[None, :])
    pdl_wait(overlap, early=True)
    token = tl.program_id(1) * block_m + tl.arange(0, block_m)
    split = tl.program_id(2)
    if zeroed > 0:  # noqa: SIM102 - one for the compiler, one of programs
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (split == 0):
            of = tl.arange(0, block_z)
            tl.store(zeros + of, tl.zeros([block_z], tl.int32), mask=of < zeroed)
    lane = split * share + tl.arange(0, block_k)
    end = tl.minimum((split + 1) * share, hidden)
    weight_at = weight + expert[:, None] * hidden
    x_at = x + token.to(tl.int64)[:, None] * hidden
    total = tl.zeros([block_m, 16], tl.float32)
    for i in range(0, share, block_k):
        inside = (lane + i < end)[None, :]
        w = tl.load(weight_at + (lane + i)[None, :], mask=(expert < experts)[:, None] & inside, other=0.0)
        values = tl.load(x_at + (lane + i)[None, :], mask=(token < tokens)[:, None] & inside, other=0.0)
        total = tl.dot(values, tl.trans(w), total, input_precision="ieee")
    if has_bias and split == 0:
        total += tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    at = parts + (split * tokens + token)[:, None].to(tl.int64) * experts + expert[None, :]
    tl.store(at, total, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


@jit
def _choose_kernel(
    expert_out: Arg, weight_out: Arg, chosen_out: Arg, logits: Arg, correction: Arg, factor: Arg, live: Arg,
    shared_out: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, counts: Arg,
    tokens: Arg, blocks: Arg, maximum: Arg, scale: Arg, parts: constexpr, sigmoid: constexpr, of_chosen: constexpr,
    renormalise: constexpr,
    corrected: constexpr, factored: constexpr, masked: constexpr, groups: constexpr, top_groups: constexpr,
    group_best: constexpr, block_g: constexpr, places: constexpr, rows: constexpr, block_k: constexpr,
    first: constexpr, stop: constexpr, computing: constexpr, tells: constexpr, shares: constexpr,
    by_token: constexpr, top_k: constexpr, experts: constexpr, block: constexpr, block_e: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Experts and weights of a block of tokens, and how many of them each expert gets. Grid (blocks,).

    logits: [parts, tokens, experts], or one line more if `shares`. counts: [blocks, experts]. first, stop: the experts
    that are here, numbered from 0; a token's others are -1, or -2 from `computing` on, which have no weights. tells:
    `chosen_out` has them as they are. places: there is one block, whose assignments are put in order too. by_token:
    counts [1, experts] are of all tokens, each added by its own program. Ties go to the smaller index, and NaN is above
    all numbers, so that experts are experts.
    """
    pdl_wait(overlap, early=True)
    token = tl.program_id(0) * block + tl.arange(0, block)
    expert = tl.arange(0, block_e)
    there = (token < tokens)[:, None] & (expert < experts)[None, :]
    lines: constexpr = experts + 1 if shares else experts
    at = token[:, None] * lines + expert[None, :]
    score = tl.load(logits + at, mask=there, other=0.0)
    for part in tl.static_range(1, parts):
        score += tl.load(logits + part * tokens * lines + at, mask=there, other=0.0)
    if shares:
        gate_at = logits + token * lines + experts
        gate = tl.load(gate_at, mask=token < tokens, other=0.0)
        for part in tl.static_range(1, parts):
            gate += tl.load(gate_at + part * tokens * lines, mask=token < tokens, other=0.0)
        tl.store(shared_out + token, tl.sigmoid(gate), mask=token < tokens)
    if not sigmoid:
        score = tl.where((expert < experts)[None, :], score, float("-inf"))
    peak = tl.max(score, 1)
    if sigmoid:
        score = tl.sigmoid(score)
    elif not of_chosen:
        score = tl.exp(score - peak[:, None])
        score = score / tl.sum(tl.where((expert < experts)[None, :], score, 0.0), 1)[:, None]
    choice = score
    if corrected:
        choice += tl.load(correction + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    if groups > 1:
        choice = _in_best_groups(choice, expert, experts, groups, top_groups, group_best, block, block_e, block_g)
    lowest: constexpr = -0x7FFFFFFFFFFFFFFF
    index = tl.broadcast_to(expert[None, :], [block, block_e])
    keys = tl.where((expert < experts)[None, :], key_of(choice, index), lowest)
    alive = token < tokens
    if masked:
        alive = alive & (tl.load(live + token, mask=alive, other=0) != 0)
    slot = tl.full([block, block_e], -1, tl.int32)
    lane = tl.arange(0, block_k)
    weights = tl.zeros([block, block_k], tl.float32)
    ids = tl.full([block, block_k], -1, tl.int32)
    if tells:
        all_ids = tl.full([block, block_k], -1, tl.int32)
    if factored:
        own_factor = tl.load(factor + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
        factors = tl.zeros([block, block_k], tl.float32)
    for i in tl.static_range(top_k):
        chosen = index_of(tl.max(keys, 1))
        is_chosen = index == chosen[:, None]
        weight = tl.sum(tl.where(is_chosen, score, 0.0), 1)
        if of_chosen:
            weight = tl.exp(weight - peak)
        weights = tl.where((lane == i)[None, :], weight[:, None], weights)
        if factored:
            own = tl.sum(tl.where(is_chosen, own_factor, 0.0), 1)
            factors = tl.where((lane == i)[None, :], own[:, None], factors)
        here = alive & (chosen >= first) & (chosen < stop)
        ids = tl.where((lane == i)[None, :] & here[:, None], (chosen - first)[:, None], ids)
        if computing < experts:
            ids = tl.where((lane == i)[None, :] & (alive & (chosen >= computing))[:, None], -2, ids)
        if tells:
            all_ids = tl.where((lane == i)[None, :], chosen[:, None], all_ids)
        slot = tl.where((index == (chosen - first)[:, None]) & here[:, None], i, slot)
        keys = tl.where(is_chosen, lowest, keys)
    if renormalise or of_chosen:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    if factored:
        weights = weights * factors
    own, stored = token[:, None] * top_k + lane[None, :], (token < tokens)[:, None] & (lane < top_k)[None, :]
    tl.store(weight_out + own, weights * scale, mask=stored)
    tl.store(expert_out + own, ids, mask=stored)
    if tells:
        tl.store(chosen_out + own, all_ids.to(tl.int16), mask=stored)
    count = tl.sum((slot >= 0).to(tl.int32), 0)
    if places:
        _write_order(order, slot, token, tl.zeros([block_e], tl.int32), count, top_k)
        _write_tiles(tile_expert, tile_start, tile_count, number, expert, count, tokens, maximum, rows)
    elif by_token:
        tl.atomic_add(counts + expert, count, mask=(count > 0) & (expert < experts), sem="relaxed")
    else:
        tl.store(counts + tl.program_id(0) * experts + expert, count, mask=expert < experts)


@jit
def ranks_of_one(
    logits: Arg, expert: Arg, parts: constexpr, sigmoid: constexpr, of_chosen: constexpr, experts: constexpr
) -> tuple[Arg, Arg, Arg]:
    """Of one token's experts [experts, up to a power of two] the score, the largest logit, and how many are better."""
    there = expert < experts
    score = tl.load(logits + expert, mask=there, other=0.0)
    for part in tl.static_range(1, parts):
        score += tl.load(logits + part * experts + expert, mask=there, other=0.0)
    if not sigmoid:
        score = tl.where(there, score, float("-inf"))
    peak = tl.max(score, 0)
    if sigmoid:
        score = tl.sigmoid(score)
    elif not of_chosen:
        score = tl.exp(score - peak)
        score = score / tl.sum(tl.where(there, score, 0.0), 0)
    lowest: constexpr = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(there, key_of(score, expert), lowest)
    rank = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
    return score, peak, tl.where(there, rank, experts)


@jit
def write_choice(
    expert_out: Arg, weight_out: Arg, chosen_out: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg,
    number: Arg, expert: Arg, score: Arg, peak: Arg, rank: Arg, alive: Arg, scale: Arg, of_chosen: constexpr,
    renormalise: constexpr, tells: constexpr, top_k: constexpr, block_k: constexpr,
) -> None:  # fmt: skip
    """Routes and tiles of one token, a tile each of its experts, best first."""
    lane = tl.arange(0, block_k)
    held, taken = rank[:, None] == lane[None, :], lane < top_k
    chosen = tl.sum(tl.where(held, expert[:, None], 0), 0)
    weights = tl.sum(tl.where(held, score[:, None], 0.0), 0)
    if of_chosen:
        weights = tl.exp(weights - peak)
    weights = tl.where(taken, weights, 0.0)
    if renormalise or of_chosen:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(weight_out + lane, weights * scale, mask=taken)
    tl.store(expert_out + lane, tl.where(alive, chosen, -1), mask=taken)
    if tells:
        tl.store(chosen_out + lane, chosen.to(tl.int16), mask=taken)
    tl.store(order + lane, lane, mask=taken)
    tl.store(tile_expert + lane, tl.where(alive, chosen, 0), mask=taken)
    tl.store(tile_start + lane, lane, mask=taken)
    tl.store(tile_count + lane, alive.to(tl.int32) + lane * 0, mask=taken)
    tl.store(number, tl.where(alive, top_k, 0))


@jit
def _in_best_groups(
    choice: Arg, expert: Arg, experts: constexpr, groups: constexpr, top_groups: constexpr, group_best: constexpr,
    block: constexpr, block_e: constexpr, block_g: constexpr,
) -> Arg:  # fmt: skip
    """choice [block, experts], -inf outside the groups whose best have the largest sum."""
    size: constexpr = experts // groups
    group = tl.arange(0, block_g)
    index = tl.broadcast_to(group[None, :], [block, block_g])
    sums = tl.full([block, block_g], float("-inf"), tl.float32)
    for g in tl.static_range(groups):
        own = tl.where((expert // size == g)[None, :], choice, float("-inf"))
        first = tl.max(own, 1)
        at = tl.min(tl.where(own == first[:, None], expert[None, :], block_e), 1)
        both = first
        if size > 1 and group_best > 1:
            both += tl.max(tl.where(expert[None, :] == at[:, None], float("-inf"), own), 1)
        sums = tl.where(index == g, both[:, None], sums)
    lowest: constexpr = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(group[None, :] < groups, key_of(sums, index), lowest)
    taken = tl.zeros([block, block_e], tl.int32)
    for _ in tl.static_range(top_groups):
        best = index_of(tl.max(keys, 1))
        taken = tl.where((expert // size)[None, :] == best[:, None], 1, taken)
        keys = tl.where(index == best[:, None], lowest, keys)
    return tl.where(taken != 0, choice, float("-inf"))


@jit
def _place_kernel(
    expert_in: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, counts: Arg,
    tokens: Arg, blocks: Arg, maximum: Arg, rows: constexpr, top_k: constexpr, experts: constexpr, block: constexpr,
    block_e: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Puts the assignments of a block of tokens in order; the first block's program writes the tiles.

    Grid (blocks,).
    """
    pdl_wait(overlap, early=True)
    mine = tl.program_id(0)
    expert = tl.arange(0, block_e)
    before = tl.zeros([block_e], tl.int32)
    total = tl.zeros([block_e], tl.int32)
    for first in range(0, blocks, 8):
        other = first + tl.arange(0, 8)[:, None]
        there = (other < blocks) & (expert < experts)[None, :]
        count = tl.load(counts + other * experts + expert[None, :], mask=there, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(other < mine, count, 0), 0)
    token = mine * block + tl.arange(0, block)
    slot = tl.full([block, block_e], -1, tl.int32)
    for i in tl.static_range(top_k):
        chosen = tl.load(expert_in + token * top_k + i, mask=token < tokens, other=-1)
        slot = tl.where(expert[None, :] == chosen[:, None], i, slot)
    _write_order(order, slot, token, before, total, top_k)
    if mine == 0:
        _write_tiles(tile_expert, tile_start, tile_count, number, expert, total, tokens, maximum, rows)


@jit
def _place_by_rank_kernel(
    expert_in: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, counts: Arg,
    assignments: Arg, maximum: Arg, rows: constexpr, experts: constexpr, block_e: constexpr, own: constexpr,
    block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Puts `own` assignments in order: behind all of lower experts, and those of the same one that come before.

    Writes the tiles that begin with one of them. Grid (assignments / own,).
    """
    pdl_wait(overlap, early=True)
    mine = tl.program_id(0) * own + tl.arange(0, own)
    of = tl.load(expert_in + mine, mask=mine < assignments, other=-1)
    rank = tl.zeros([own], tl.int32)
    for first in range(0, tl.minimum((tl.program_id(0) + 1) * own, assignments), block):
        other = first + tl.arange(0, block)
        its = tl.load(expert_in + other, mask=other < assignments, other=-1)
        rank += tl.sum(((its[None, :] == of[:, None]) & (other[None, :] < mine[:, None])).to(tl.int32), 1)
    expert = tl.arange(0, block_e)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    tiles = (count + rows - 1) // rows
    below = expert[None, :] < of[:, None]
    start = tl.sum(tl.where(below, count[None, :], 0), 1)
    tile = tl.sum(tl.where(below, tiles[None, :], 0), 1) + rank // rows
    there = of >= 0
    tl.store(order + start + rank, mine, mask=there)
    begins = there & (rank % rows == 0)
    total = tl.sum(tl.where(expert[None, :] == of[:, None], count[None, :], 0), 1)
    tl.store(tile_expert + tile, of, mask=begins)
    tl.store(tile_start + tile, start + rank, mask=begins)
    tl.store(tile_count + tile, tl.minimum(total - rank, rows), mask=begins)
    if tl.program_id(0) == 0:
        _end_tiles(tile_expert, tile_start, tile_count, number, tl.sum(tiles, 0), maximum)


@jit
def _write_order(order: Arg, slot: Arg, token: Arg, before: Arg, total: Arg, top_k: constexpr) -> None:
    """slot: [block, experts], which of a token's experts this is, -1 for none. before: of each expert, in blocks
    before this one; total: in all."""
    chosen = (slot >= 0).to(tl.int32)
    place = (tl.cumsum(total, 0) - total + before)[None, :] + tl.cumsum(chosen, 0) - 1
    tl.store(order + place, token[:, None] * top_k + slot, mask=slot >= 0)


@jit
def _write_tiles(
    tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, expert: Arg, count: Arg, tokens: Arg, maximum: Arg,
    rows: constexpr,
) -> None:  # fmt: skip
    """count: [experts], assignments of each."""
    start = tl.cumsum(count, 0) - count
    tiles = (count + rows - 1) // rows
    place = tl.cumsum(tiles, 0) - tiles
    for tile in range((tokens + rows - 1) // rows):  # an expert has a token once
        there = tile < tiles
        tl.store(tile_expert + place + tile, expert, mask=there)
        tl.store(tile_start + place + tile, start + tile * rows, mask=there)
        tl.store(tile_count + place + tile, tl.minimum(count - tile * rows, rows), mask=there)
    _end_tiles(tile_expert, tile_start, tile_count, number, tl.sum(tiles, 0), maximum)


@jit
def _end_tiles(tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, total: Arg, maximum: Arg) -> None:
    """How many tiles there are; those that are not there are zeros: they are read, and not used."""
    tl.store(number, total)
    for first in range(0, maximum, 128):
        at = first + tl.arange(0, 128)
        unused = (at >= total) & (at < maximum)
        tl.store(tile_expert + at, 0, mask=unused)
        tl.store(tile_start + at, 0, mask=unused)
        tl.store(tile_count + at, 0, mask=unused)
