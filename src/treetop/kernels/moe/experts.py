"""Products with the experts that tokens were routed to, grouped: an expert's weights are read once for its tokens.

    act = activation(x @ gate.T, x @ up.T)          of each token and each of its experts
    y = sum over its experts of weight * (act @ down.T)

or, where weights are those of inputs (`Routes.of_inputs`), with weight * x in place of x and without it there.

The reference goes from expert to expert. A kernel's program computes 64 or 128 lines for one tile of tokens of one
expert (`kernels.moe.routing`), with the weight as the left operand: gates and ups of a product in turn, so that the
activation is its end. Few tokens are bound by how fast weights stream, so tiles are as small as tensor cores allow;
of many, tiles of one expert run side by side and find its weights in the cache. Each token and slot has outputs of its
own, parts that the next kernel adds up in their order: nothing depends on which program is first, and no token on
another. Weights are 16 or 32 bits, or coded in tiles and decoded in registers, whatever the number of tokens.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.exact import BY_ELEMENT, LIBRARY, Functions, batch_invariant_linear
from treetop.kernels.gate import Gate, activated, activated_reference
from treetop.kernels.gemm.quantized_weight import Numbers, QuantizedWeight, decode
from treetop.kernels.gemm.tiles import BLOCK, TiledWeight, apart, tile_arguments, tile_options, tile_product, untile
from treetop.kernels.moe.routes import LeftChoice, RouterKind, Routes, RowProduct, Tiles, each_row
from treetop.kernels.moe.routing import ranks_of_one, write_choice
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, jit_for_any, lanes, tl

LIMIT, ALPHA = 7.0, 1.702


@dataclass(frozen=True, slots=True)
class Activation:
    """Of gate and up: that of a gate, times up; or GPT-OSS's, both clamped at 7: (up + 1) * gate * sigmoid(1.702 gate).

    limit: the activated gate is at most so much, and up within as much on both sides of 0. None where nothing is cut.
    """

    kind: Gate | Literal["clamped"]
    limit: float | None = None

    SILU: ClassVar["Activation"]
    GELU: ClassVar["Activation"]
    CLAMPED: ClassVar["Activation"]

    def __call__(self, gate: Tensor, up: Tensor, functions: Functions = LIBRARY) -> Tensor:
        if self.kind == "clamped":
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
            return (up + 1) * gate * functions.sigmoid(ALPHA * gate)
        gate = activated_reference(gate, self.kind, functions)
        return gate * up if self.limit is None else gate.clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


Activation.SILU, Activation.GELU, Activation.CLAMPED = (
    Activation("silu"),
    Activation("gelu_tanh"),
    Activation("clamped"),
)


@dataclass(frozen=True, slots=True)
class Experts:
    """gate_up: [experts, 2, inner, hidden], gates first; in tiles [experts, 2 * inner, hidden], gates and ups in turn.
    down: [experts, hidden, inner]. Biases: [experts, 2, inner] and [experts, hidden].

    Coded ones that are not in tiles are for the reference. shared: gate_up [2 * inner, hidden] and down [hidden, inner]
    of the expert that all tokens take, in the same tiles; None where it is computed apart.
    """

    gate_up: Tensor | TiledWeight | QuantizedWeight
    down: Tensor | TiledWeight | QuantizedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    shared: tuple[TiledWeight, TiledWeight] | None = None

    @property
    def size(self) -> tuple[int, int, int]:
        """Experts, inner size, hidden size."""
        experts, hidden, inner = self.down.shape
        return experts, inner, hidden


def experts_reference(
    x: Tensor, routes: Routes, experts: Experts, linear: RowProduct = each_row, functions: Functions = LIBRARY
) -> Tensor:
    """The weighted sum of each token's experts, in x's dtype; padding gets 0.

    x: [tokens, hidden]. Returns parts [1, tokens, hidden]. On a CPU an expert that nobody chose takes no time;
    elsewhere every expert computes all tokens, for nothing may wait for the device.
    """
    number = experts.size[0]
    gate_up, down = _plain(experts.gate_up, x.dtype, gated=True), _plain(experts.down, x.dtype, gated=False)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(number):
        chosen = routes.expert == expert
        weight = (routes.weight * chosen).sum(dim=-1, keepdim=True).to(total.dtype)
        tokens = chosen.any(dim=-1).nonzero()[:, 0] if x.device.type == "cpu" else None
        if tokens is not None and len(tokens) == 0:
            continue
        rows = x if tokens is None else x[tokens]
        bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert].flatten()
        own = weight if tokens is None else weight[tokens]
        if routes.of_inputs:
            rows, own = rows * own.to(rows.dtype), torch.ones_like(own)
        gate, up = linear(rows, gate_up[expert].flatten(0, 1), bias).chunk(2, dim=-1)
        bias = None if experts.down_bias is None else experts.down_bias[expert]
        y = linear(experts.activation(gate, up, functions), down[expert], bias).to(total.dtype)
        if tokens is None:
            total += torch.where(chosen.any(dim=-1, keepdim=True), y * own, 0)
        else:
            total.index_add_(0, tokens, y * own)
    if experts.shared is not None:
        assert routes.shared is not None
        both, last = (decode(untile(each)).to(x.dtype) for each in experts.shared)
        gate, up = apart(linear(x, both, None), -1)
        total += linear(experts.activation(gate, up, functions), last, None) * routes.shared[:, None].to(total.dtype)
    return total.to(x.dtype)[None]


def batch_invariant_experts(
    x: Tensor, routes: Routes, experts: Experts, linear: RowProduct = batch_invariant_linear
) -> Tensor:
    """`experts_reference` on a CPU in float32, where what a token gets has the same bits in any batch."""
    return experts_reference(x, routes, experts, linear, BY_ELEMENT)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Quantized experts, each decoded when it is asked for. turned: gates and ups lie in turn."""

    weight: QuantizedWeight
    dtype: torch.dtype
    turned: bool

    def __getitem__(self, expert: int) -> Tensor:
        own = self.weight.rows(expert, expert + 1)
        lines = decode(own)[0]
        if own.scheme.scales == "e4m3":  # the factor of sums
            assert own.factor is not None
            lines = lines * own.factor[0]
        lines = lines.to(self.dtype)
        return lines.unflatten(0, (-1, 2)).transpose(0, 1) if self.turned else lines


def _plain(weight: Tensor | TiledWeight | QuantizedWeight, dtype: torch.dtype, gated: bool) -> Tensor | _Decoding:
    """The weight as a tensor, or as one for each expert."""
    if isinstance(weight, Tensor):
        return weight
    tiled = isinstance(weight, TiledWeight)
    return _Decoding(untile(weight) if isinstance(weight, TiledWeight) else weight, dtype, tiled and gated)


# -------------------------------------------------------------------------------------------------------- the kernel

_LINES_FIRST = 16
"""Rows of tiles up to which programs of one tile come one after another, of weights in 4-bit integers and in MXFP4,
and tiles that are not there at the end: between the others they leave some multiprocessors with less to do than others.
With more rows several tiles are of one expert, and those of the same lines come one after another. In FP8 and in 16
bits it gave nothing; in NVFP4 it was not measured."""
_FEW = 512
"""Tokens up to which parts are float32; of more, which move much memory, they have the dtype of x."""


@dataclass(frozen=True, slots=True)
class GroupedLaunch:
    """How a grouped product is cut: lines and columns of a block, splits of k, pipeline stages, warps."""

    block_n: int
    block_k: int
    splits: int
    num_stages: int
    num_warps: int


_PACKED = {
    "few": (GroupedLaunch(64, BLOCK, 1, 7, 2), GroupedLaunch(128, BLOCK, 6, 4, 4)),
    "more": (GroupedLaunch(64, BLOCK, 1, 4, 2), GroupedLaunch(128, BLOCK, 2, 4, 4)),
    "long": (GroupedLaunch(128, BLOCK, 1, 3, 4), GroupedLaunch(128, BLOCK, 1, 3, 4)),
}
"""Of a first and a second product with tiles: of few tokens, of more, and of many each. As measured in MXFP4."""
_FOUR_WARPS, _MORE_TILES = GroupedLaunch(64, BLOCK, 1, 4, 4), 32
"""Of a first product of more tiles than so many, of 16 rows, in FP8 on Hopper: of 8 to 60 tokens both products of a
model took 0.89 to 0.99 of the time with two warps, with the same bits. In NVFP4 they took 1.01 and 1.05, in W4A16 0.96
and 1.04; in MXFP4, since tiles come last in a grid, 1.05 to 1.09. Not under `bits`, whose probes have fewer tiles."""
_NARROW = GroupedLaunch(64, BLOCK, 1, 5, 2), GroupedLaunch(64, BLOCK, 4, 5, 2)
"""Of tiles of 8 rows, which one token has in MXFP4."""
_FEW_TILES = 16
_SHORT = 512
"""k of a second product that is not worth a cut: its programs are like a first one's. As measured in FP8 of
Qwen3-Next-80B-A3B's size."""
_BESIDE = GroupedLaunch(64, BLOCK, 1, 2, 4), GroupedLaunch(128, BLOCK, 1, 2, 4)
"""Of many tokens, a first product in FP8 and any second one, of which more than one program lies on a multiprocessor:
one alone, with 8 warps, stands still while it waits for its products. Measured in FP8 by block and in W4A16."""
_WHOLE = GroupedLaunch(64, BLOCK, 1, 7, 2)
"""Of a second product in MXFP4 whose k is not cut: as a first one of few tiles. Not measured."""


def choose_grouped(
    tiles: Tiles, k: int, lines: int, gated: bool, numbers: Numbers | None, size: int, whole: bool, gpu: GpuTraits,
) -> GroupedLaunch:  # fmt: skip
    """The launch of a product with weights [experts, lines, k]. numbers: of weights in tiles. size: bytes of a number
    of x. whole: k is not cut.

    As `benchmarks/experts.py` measured with GPT-OSS-20B's and Qwen3-30B-A3B's shapes on an H200.
    """
    packed = numbers is not None
    if size > 2:
        return GroupedLaunch(64, BLOCK if packed else 32, 1, 2, 4)
    if tiles.rows == 128:
        if packed and gpu.by_warp_groups and not gpu.has_tensor_memory and (not gated or numbers == "e4m3"):
            return _BESIDE[0 if gated else 1]
        return GroupedLaunch(128, BLOCK if packed else 64, 1, 3, 8)
    if packed:
        kind = "long" if tiles.rows > 32 else "few" if len(tiles.expert) <= _FEW_TILES else "more"
        launch = (_NARROW if tiles.rows == 8 else _PACKED[kind])[0 if gated else 1]
        hopper = gpu.by_warp_groups and not gpu.has_tensor_memory
        more = gated and not whole and tiles.rows == 16 and len(tiles.expert) > _MORE_TILES
        if more and hopper and numbers == "e4m3":
            return _FOUR_WARPS
        if kind != "long" and not gated and k <= _SHORT:
            launch = GroupedLaunch(64, BLOCK, 1, 6 if tiles.rows <= 16 else 4, 2)
        if kind == "long" and not gpu.by_warp_groups:  # what fits in registers where operands lie there too
            launch = replace(launch, num_warps=8)
        return _WHOLE if whole and launch.splits > 1 else launch
    splits = 1 if whole or gated or lines * len(tiles.expert) > 64 * 512 or k < 1024 else 2
    return GroupedLaunch(64, BLOCK, splits, 4 if tiles.rows <= 32 else 3, 4)


def experts(x: Tensor, routes: Routes, experts: Experts, gpu: GpuTraits, batch_invariant: bool = False) -> Tensor:
    """`experts_reference` in two launches, in parts that add up to it: [slots * splits, tokens, hidden], a slot for
    each of a token's experts and for the one that all take.

    x: contiguous, float32 or 16 bits. Two calls give the same bits. batch_invariant: so does a token in any batch: k is
        not
    cut, and parts are float32, whatever the number of tokens.
    """
    assert x.is_contiguous()
    assert routes.tiles is not None
    tokens, top_k = routes.expert.shape
    _, inner, hidden = experts.size
    launches = [
        choose_grouped(
            routes.tiles,
            k,
            lines,
            gated,
            weight.scheme.numbers if isinstance(weight, TiledWeight) else None,
            x.element_size(),
            batch_invariant,
            gpu,
        )
        for weight, k, lines, gated in (
            (experts.gate_up, hidden, 2 * inner, True),
            (experts.down, inner, hidden, False),
        )
    ]
    first, second = (None, None) if experts.shared is None else experts.shared
    slots = top_k if first is None else top_k + 1
    act = torch.empty((tokens * slots, inner), dtype=x.dtype, device=x.device)
    _grouped(act, x, experts.gate_up, experts.gate_up_bias, first, routes, experts.activation, launches[0], gpu)
    dtype = torch.float32 if batch_invariant or tokens <= _FEW else x.dtype
    parts = torch.empty((slots * launches[1].splits, tokens, hidden), dtype=dtype, device=x.device)
    _grouped(parts, act, experts.down, experts.down_bias, second, routes, None, launches[1], gpu)
    return parts


def _grouped(
    out: Tensor, x: Tensor, weight: Tensor | TiledWeight | QuantizedWeight, bias: Tensor | None,
    shared: TiledWeight | None, routes: Routes, activation: Activation | None, launch: GroupedLaunch, gpu: GpuTraits,
) -> None:  # fmt: skip
    """activation: of a first product, [assignments, inner]; None for a second, in parts [parts, tokens, hidden].

    shared: of the expert that all tokens take, whose tiles come first.
    """
    tiles = routes.tiles
    assert tiles is not None
    assert not isinstance(weight, QuantizedWeight)
    gated, k, n = activation is not None, x.shape[1], out.shape[-1]
    tokens, top_k = routes.expert.shape
    if isinstance(weight, TiledWeight):
        data, scale, factor, zero = tile_arguments(weight)
        coded = tile_options(weight, x.dtype, gpu)
        assert shared is None or tile_options(shared, x.dtype, gpu) == coded
    else:
        assert shared is None
        data = scale = factor = zero = weight
        coded = _NOT_CODED
    lines = 2 * n if gated else n
    assert data.is_contiguous()
    limit = None if activation is None else activation.limit
    blocks = -(-k // launch.block_k)
    share = -(-blocks // launch.splits) * launch.block_k
    of_all = (data, scale, factor, zero) if shared is None else tile_arguments(shared)
    shared_tiles = 0 if shared is None else -(-tokens // tiles.rows)
    left = routes.left if gated else None
    number, blocks_of_lines = shared_tiles + len(tiles.expert) + 1, -(-lines // launch.block_n)
    last = tiles.rows <= _LINES_FIRST and (coded["numbers"] == "int4" or coded["scales"] == "e8m0")
    grid = (launch.splits, blocks_of_lines, number) if last else (number, blocks_of_lines, launch.splits)
    _grouped_kernel[grid](
        out, x, data, scale, factor, zero, data if bias is None else bias, *of_all, tiles.order, tiles.expert,
        tiles.start, tiles.count, tiles.number, routes.expert, routes.weight,
        routes.weight if routes.shared is None else routes.shared, 0.0 if limit is None else limit, tokens, n, k, share,
        shared_tiles, *_left_arguments(routes, left), **_left_options(routes, left), **coded,
        shares=shared is not None, has_bias=bias is not None, gated=gated,
        kind=None if activation is None else activation.kind, limited=limit is not None, apart=routes.apart,
        weighted=gated == routes.of_inputs, tiles_last=last, top_k=top_k,
        block_m=tiles.rows, block_n=launch.block_n, block_k=launch.block_k,
        overlap=gpu.can_overlap, num_stages=launch.num_stages, num_warps=launch.num_warps, **launch_options(gpu),
    )  # fmt: skip


def _left_arguments(routes: Routes, left: LeftChoice | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """What a first product chooses one token's experts by."""
    if left is None:
        return routes.weight, routes.expert, routes.expert, 1.0
    live, chosen = (routes.expert if each is None else each for each in (left.live, routes.chosen))
    return left.logits, live, chosen, left.spec.scale


def _left_options(routes: Routes, left: LeftChoice | None) -> dict[str, object]:
    if left is None:
        return _NOT_LEFT
    spec = left.spec
    return {
        "chooses": True, "parts": len(left.logits), "sigmoid": spec.kind is RouterKind.SIGMOID,
        "of_chosen": spec.kind is RouterKind.TOPK_SOFTMAX, "renormalise": spec.renormalise,
        "masked": left.live is not None, "tells": routes.chosen is not None, "block_e": lanes(spec.num_experts),
        "block_s": lanes(spec.top_k), "experts": spec.num_experts,
    }  # fmt: skip


_NOT_LEFT: dict[str, object] = {
    "chooses": False, "parts": 1, "sigmoid": False, "of_chosen": False, "renormalise": False, "masked": False,
    "tells": False, "block_e": 2, "block_s": 2, "experts": 1,
}  # fmt: skip
_NOT_CODED: dict[str, object] = {
    "numbers": None, "scales": None, "form": None, "group": 0, "has_zero": False, "per": 1, "whole_blocks": False,
    "fast": False,
}  # fmt: skip


@jit_for_any("shared_tiles")
def _grouped_kernel(
    out: Arg, x: Arg, weight: Arg, scale: Arg, factor: Arg, zero: Arg, bias: Arg, shared_weight: Arg, shared_scale: Arg,
    shared_factor: Arg, shared_zero: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg,
    expert_of: Arg, weight_of: Arg, weight_of_all: Arg, limit: Arg, tokens: Arg, n: Arg, k: Arg, share: Arg,
    shared_tiles: Arg, logits: Arg, live: Arg, chosen_out: Arg, choice_scale: Arg,
    chooses: constexpr, parts: constexpr, sigmoid: constexpr, of_chosen: constexpr, renormalise: constexpr,
    masked: constexpr, tells: constexpr, block_e: constexpr, block_s: constexpr, experts: constexpr,
    numbers: constexpr, scales: constexpr, form: constexpr, group: constexpr, has_zero: constexpr, per: constexpr,
    whole_blocks: constexpr, fast: constexpr, shares: constexpr, has_bias: constexpr, gated: constexpr, kind: constexpr,
    limited: constexpr, apart: constexpr, weighted: constexpr, tiles_last: constexpr, top_k: constexpr,
    block_m: constexpr, block_n: constexpr, block_k: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """A block of lines for one tile over one share of k. Grid (shared tiles + most tiles + 1, lines / block_n, splits),
    or if `tiles_last` the other way round; the last tile writes zeros for padding, and for what another rank's experts
    compute.

    gated: x is [tokens, k], lines are a gate and an up in turn, out is [assignments, n] in the order of the tiles.
    Else: x is [assignments, k] in that order, out is [splits * slots, tokens, n]. weighted: times the weights of the
    routes, as if x of a gated one were. numbers: of a weight in tiles, or None. shares: the first tiles are all tokens,
    which go to the shared expert; behind the assignments of the others, and as the last slot. chooses: of one token,
    each program finds its tile's expert by the logits, and one writes what the router would have (`Routes.left`).
    """
    pdl_wait(overlap, early=True)
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last = tl.num_programs(0)
    if tiles_last:
        tile, split = split, tile
        last = tl.num_programs(2)
    tile -= shared_tiles
    last -= 1 + shared_tiles
    dtype: constexpr = x.dtype.element_ty
    slots: constexpr = top_k + 1 if shares else top_k
    line = block * block_n + tl.arange(0, block_n)
    lane = tl.arange(0, block_m)
    if not gated and tile == last:
        if apart:
            _zero_elsewhere(out, expert_of, line, split, tokens, n, top_k, slots, block_m)
        else:
            _zero_padding(out, expert_of, line, split, tokens, n, top_k, slots, block_m)
    at = tl.minimum(tile, last - 1)  # asked for with the number of tiles, not after it
    if shares:
        at = tl.maximum(at, 0)
    if chooses:
        every = tl.arange(0, block_e)
        score, peak, rank = ranks_of_one(logits, every, parts, sigmoid, of_chosen, experts)
        alive = tile >= 0
        if masked:
            alive = tl.load(live) != 0
        if tile == last:  # noqa: SIM102 - one for the compiler, one of programs
            if block == 0:
                write_choice(
                    expert_of, weight_of, chosen_out, order, tile_expert, tile_start, tile_count, number, every, score,
                    peak, rank, alive, choice_scale, of_chosen, renormalise, tells, top_k, block_s,
                )  # fmt: skip
        expert = tl.sum(tl.where(rank == at, every, 0), 0).to(tl.int64)
        place = at + lane
        count = 1
        tiles_there = tl.where(alive, top_k, 0)
    else:
        expert = tl.load(tile_expert + at).to(tl.int64)
        place = tl.load(tile_start + at) + lane
        count = tl.load(tile_count + at)
        tiles_there = tl.load(number)
    token = place
    if shares:
        first_token = (tile + shared_tiles) * block_m
        token = first_token + lane
        listed = lane < tl.where(tile < 0, 0, count)
        count = tl.where(tile < 0, tokens - first_token, count)
        place = tl.where(tile < 0, tokens * top_k + token, place)
        expert = tl.where(tile < 0, 0, expert)
        weight = tl.where(tile < 0, shared_weight, weight)
        scale = tl.where(tile < 0, shared_scale, scale)
        factor = tl.where(tile < 0, shared_factor, factor)
        zero = tl.where(tile < 0, shared_zero, zero)
    there = lane < count
    if tile < tiles_there:
        if chooses:
            assignment = tl.where(there, place, 0)
        elif shares:
            assignment = tl.load(order + place, mask=listed, other=0)
            assignment = tl.where(tile < 0, token * top_k, assignment)
        else:
            assignment = tl.load(order + place, mask=there, other=0)
        x_row = assignment // top_k if gated else place
        x_at = x + x_row.to(tl.int64)[:, None] * k
        if numbers is not None:
            tiles = ((2 * n if gated else n) + 63) // 64
            own = expert * tiles + tl.minimum(line // 64, tiles - 1)
            first, end = split * share // 128, tl.minimum((split + 1) * share, k)
            total = tile_product(
                x_at, there, weight, scale, factor, zero, own, line % 64, first, tl.cdiv(end, 128), k, numbers, scales,
                form, group, has_zero, per, whole_blocks, fast, block_m, block_n, dtype,
            )  # fmt: skip
        else:
            total = _product(x_at, weight, expert, line, split, there, n, k, share, gated, block_m, block_n, block_k)
        if gated:
            output = block * (block_n // 2) + tl.arange(0, block_n // 2)
            halves = tl.permute(tl.reshape(total, [block_n // 2, 2, block_m]), [0, 2, 1])
            gate, up = tl.split(halves)
            if weighted:
                route_weight = tl.load(weight_of + assignment, mask=there, other=0.0)[None, :]
                gate *= route_weight
                up *= route_weight
            if has_bias:
                bias_at = bias + expert * (2 * n) + output
                gate += tl.load(bias_at, mask=output < n, other=0.0).to(tl.float32)[:, None]
                up += tl.load(bias_at + n, mask=output < n, other=0.0).to(tl.float32)[:, None]
            value = _activated(gate, up, limit, kind, limited)
            out_at = out + place.to(tl.int64)[None, :] * n + output[:, None]
            tl.store(out_at, value.to(out.dtype.element_ty), mask=there[None, :] & (output < n)[:, None])
        else:
            if has_bias and split == 0:
                total += tl.load(bias + expert * n + line, mask=line < n, other=0.0).to(tl.float32)[:, None]
            slot = assignment % top_k
            if weighted:
                own_at = weight_of + assignment
                if shares:
                    own_at = tl.where(tile < 0, weight_of_all + token, own_at)
                total *= tl.load(own_at, mask=there, other=0.0)[None, :]
            if shares:
                slot = tl.where(tile < 0, top_k, slot)
            row = ((split * slots + slot) * tokens + assignment // top_k).to(tl.int64)
            out_at = out + row[None, :] * n + line[:, None]
            tl.store(out_at, total.to(out.dtype.element_ty), mask=there[None, :] & (line < n)[:, None])


@jit
def _activated(gate: Arg, up: Arg, limit: Arg, kind: constexpr, limited: constexpr) -> Arg:
    """`Activation`, in float32."""
    if kind == "clamped":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    gate = activated(gate, kind)
    if limited:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * up


@jit
def _zero_padding(
    out: Arg, expert_of: Arg, line: Arg, split: Arg, tokens: Arg, n: Arg, top_k: constexpr, slots: constexpr,
    block_m: constexpr,
) -> None:  # fmt: skip
    """Zeros in the outputs of tokens without experts, of which no tile has any."""
    for first in range(0, tokens, block_m):
        token = first + tl.arange(0, block_m)
        padding = tl.load(expert_of + token * top_k, mask=token < tokens, other=0) < 0
        if tl.max(padding.to(tl.int32), 0) > 0:
            for slot in range(top_k):
                row = ((split * slots + slot) * tokens + token).to(tl.int64)
                at = out + row[None, :] * n + line[:, None]
                zeros = tl.zeros([line.shape[0], block_m], out.dtype.element_ty)
                tl.store(at, zeros, mask=padding[None, :] & (line < n)[:, None])


@jit
def _zero_elsewhere(
    out: Arg, expert_of: Arg, line: Arg, split: Arg, tokens: Arg, n: Arg, top_k: constexpr, slots: constexpr,
    block_m: constexpr,
) -> None:  # fmt: skip
    """As `_zero_padding`, of each assignment by itself."""
    for first in range(0, tokens * top_k, block_m):
        assignment = first + tl.arange(0, block_m)
        elsewhere = tl.load(expert_of + assignment, mask=assignment < tokens * top_k, other=0) < 0
        row = ((split * slots + assignment % top_k) * tokens + assignment // top_k).to(tl.int64)
        at = out + row[None, :] * n + line[:, None]
        zeros = tl.zeros([line.shape[0], block_m], out.dtype.element_ty)
        tl.store(at, zeros, mask=elsewhere[None, :] & (line < n)[:, None])


@jit
def _product(
    x_at: Arg, weight: Arg, expert: Arg, line: Arg, split: Arg, there: Arg, n: Arg, k: Arg, share: Arg,
    gated: constexpr, block_m: constexpr, block_n: constexpr, block_k: constexpr,
) -> Arg:  # fmt: skip
    """weight: [experts, n or 2, n, k], the gates of an expert before its ups."""
    if gated:
        row, inside = (line % 2) * n + line // 2, line < 2 * n
        first = expert * 2 * n
    else:
        row, inside = line, line < n
        first = expert * n
    at = weight + (first + row)[:, None] * k
    lane = split * share + tl.arange(0, block_k)
    end = tl.minimum((split + 1) * share, k)
    total = tl.zeros([block_n, block_m], tl.float32)
    for i in range(0, share, block_k):
        valid = (lane + i < end)[None, :]
        w = tl.load(at + (lane + i)[None, :], mask=inside[:, None] & valid, other=0.0)
        values = tl.load(x_at + (lane + i)[None, :], mask=there[:, None] & valid, other=0.0)
        total = tl.dot(w, tl.trans(values), total, input_precision="ieee")
    return total
