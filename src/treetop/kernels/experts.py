# ruff: noqa: PLR0917 (kernels take what they touch as arguments)
"""Products with the experts that tokens were routed to, grouped: an expert's weights are read once for its tokens.

    act = activation(x @ gate.T, x @ up.T)          of each token and each of its experts
    y = sum over its experts of weight * (act @ down.T)

The reference goes from expert to expert. A kernel's program computes 64 or 128 lines for one tile of tokens of one
expert (`kernels.routing`), with the weight as the left operand: gates and ups of a product in turn, so that the
activation is its end. Few tokens are bound by how fast weights stream, so tiles are as small as tensor cores allow;
of many, tiles of one expert run side by side and find its weights in the cache. Each token and slot has outputs of its
own, parts that the next kernel adds up in their order: nothing depends on which program is first, and no token on
another. Weights are 16 or 32 bits, or MXFP4 and decoded in registers, whatever the number of tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from treetop.kernels.coded import CodedWeight
from treetop.kernels.coded import decode as decode_coded
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.exact import BY_ELEMENT, LIBRARY, Functions, linear_by_rows
from treetop.kernels.gate import Gate, activated, activated_reference
from treetop.kernels.mxfp4 import BLOCK, Mxfp4Weight, decode, decoded_quarters, unpack
from treetop.kernels.routing import Routes, RowProduct, Tiles, each_row
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, tl

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
    """gate_up: [experts, 2, inner, hidden], gates first; in MXFP4 for a GPU, gates and ups line by line in turn.
    down: [experts, hidden, inner]. Biases: [experts, 2, inner] and [experts, hidden]. Coded ones are for the reference.
    """

    gate_up: Tensor | Mxfp4Weight | CodedWeight
    down: Tensor | Mxfp4Weight | CodedWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation

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
    number, inner, _ = experts.size
    gate_up, down = _plain(experts.gate_up, x.dtype, inner), _plain(experts.down, x.dtype, None)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(number):
        chosen = routes.expert == expert
        weight = (routes.weight * chosen).sum(dim=-1, keepdim=True).to(total.dtype)
        tokens = chosen.any(dim=-1).nonzero()[:, 0] if x.device.type == "cpu" else None
        if tokens is not None and len(tokens) == 0:
            continue
        rows = x if tokens is None else x[tokens]
        bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert].flatten()
        gate, up = linear(rows, gate_up[expert].flatten(0, 1), bias).chunk(2, dim=-1)
        bias = None if experts.down_bias is None else experts.down_bias[expert]
        y = linear(experts.activation(gate, up, functions), down[expert], bias).to(total.dtype)
        if tokens is None:
            total += torch.where(chosen.any(dim=-1, keepdim=True), y * weight, 0)
        else:
            total.index_add_(0, tokens, y * weight[tokens])
    return total.to(x.dtype)[None]


def experts_by_rows(x: Tensor, routes: Routes, experts: Experts) -> Tensor:
    """`experts_reference` on a CPU in float32, where what a token gets has the same bits in any batch."""
    return experts_reference(x, routes, experts, linear_by_rows, BY_ELEMENT)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Coded experts, each decoded when it is asked for."""

    weight: CodedWeight
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Tensor:
        return decode_coded(self.weight.rows(expert, expert + 1))[0].to(self.dtype)


def _plain(weight: Tensor | Mxfp4Weight | CodedWeight, dtype: torch.dtype, inner: int | None) -> Tensor | _Decoding:
    """The weight as a tensor, or as one for each expert. inner: of gates and ups, which lie in turn in MXFP4."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, CodedWeight):
        return _Decoding(weight, dtype)
    whole = decode(unpack(weight), dtype)
    return whole if inner is None else whole.unflatten(1, (inner, 2)).transpose(1, 2)


# -------------------------------------------------------------------------------------------------------- the kernel

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
"""Of a first and a second product in MXFP4: of few tiles, of more, and of such that have many tokens each."""
_FEW_TILES = 8


def choose_grouped(tiles: Tiles, k: int, lines: int, gated: bool, packed: bool, size: int) -> GroupedLaunch:
    """The launch of a product with weights [experts, lines, k]. packed: MXFP4. size: bytes of a number of x.

    As `benchmarks/experts.py` measured with GPT-OSS-20B's and Qwen3-30B-A3B's shapes on an H200.
    """
    if size > 2:
        return GroupedLaunch(64, BLOCK if packed else 32, 1, 2, 4)
    if tiles.rows == 128:
        return GroupedLaunch(128, BLOCK if packed else 64, 1, 3, 8)
    if packed:
        kind = "long" if tiles.rows > 32 else "few" if len(tiles.expert) <= _FEW_TILES else "more"
        return _PACKED[kind][0 if gated else 1]
    splits = 1 if gated or lines * len(tiles.expert) > 64 * 512 or k < 1024 else 2
    return GroupedLaunch(64, BLOCK, splits, 4 if tiles.rows <= 32 else 3, 4)


def experts(x: Tensor, routes: Routes, experts: Experts, gpu: GpuTraits) -> Tensor:
    """`experts_reference` in two launches, in parts that add up to it: [top_k * splits, tokens, hidden].

    x: contiguous, float32 or 16 bits. Two calls give the same bits.
    """
    assert x.is_contiguous()
    assert routes.tiles is not None
    tokens, top_k = routes.expert.shape
    _, inner, hidden = experts.size
    launches = [
        choose_grouped(routes.tiles, k, lines, gated, isinstance(weight, Mxfp4Weight), x.element_size())
        for weight, k, lines, gated in (
            (experts.gate_up, hidden, 2 * inner, True),
            (experts.down, inner, hidden, False),
        )
    ]
    act = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device)
    _grouped(act, x, experts.gate_up, experts.gate_up_bias, routes, experts.activation, launches[0], gpu)
    dtype = torch.float32 if tokens <= _FEW else x.dtype
    parts = torch.empty((top_k * launches[1].splits, tokens, hidden), dtype=dtype, device=x.device)
    _grouped(parts, act, experts.down, experts.down_bias, routes, None, launches[1], gpu)
    return parts


def _grouped(
    out: Tensor, x: Tensor, weight: Tensor | Mxfp4Weight | CodedWeight, bias: Tensor | None, routes: Routes,
    activation: Activation | None, launch: GroupedLaunch, gpu: GpuTraits,
) -> None:  # fmt: skip
    """activation: of a first product, [assignments, inner]; None for a second, in parts [parts, tokens, hidden]."""
    tiles = routes.tiles
    assert tiles is not None
    assert not isinstance(weight, CodedWeight)
    gated, k, n = activation is not None, x.shape[1], out.shape[-1]
    tokens, top_k = routes.expert.shape
    packed = isinstance(weight, Mxfp4Weight)
    data, scales = (weight.words, weight.scales) if isinstance(weight, Mxfp4Weight) else (weight, weight)
    lines = 2 * n if gated else n
    assert data.is_contiguous()
    limit = None if activation is None else activation.limit
    blocks = -(-k // launch.block_k)
    share = -(-blocks // launch.splits) * launch.block_k
    _grouped_kernel[(len(tiles.expert) + 1, -(-lines // launch.block_n), launch.splits)](
        out, x, data, scales, data if bias is None else bias, tiles.order, tiles.expert, tiles.start, tiles.count,
        tiles.number, routes.expert, routes.weight, 0.0 if limit is None else limit, tokens, n, k, share,
        packed=packed, wide=isinstance(weight, Mxfp4Weight) and weight.wide, has_bias=bias is not None, gated=gated,
        kind=None if activation is None else activation.kind, limited=limit is not None, apart=routes.apart,
        top_k=top_k,
        block_m=tiles.rows, block_n=launch.block_n, block_k=launch.block_k, hopper=gpu.can_overlap,
        overlap=gpu.can_overlap, num_stages=launch.num_stages, num_warps=launch.num_warps, **launch_options(gpu),
    )  # fmt: skip


@jit
def _grouped_kernel(
    out: Arg, x: Arg, weight: Arg, scales: Arg, bias: Arg, order: Arg, tile_expert: Arg, tile_start: Arg,
    tile_count: Arg, number: Arg, expert_of: Arg, weight_of: Arg, limit: Arg, tokens: Arg, n: Arg, k: Arg, share: Arg,
    packed: constexpr, wide: constexpr, has_bias: constexpr, gated: constexpr, kind: constexpr, limited: constexpr,
    apart: constexpr, top_k: constexpr, block_m: constexpr, block_n: constexpr, block_k: constexpr, hopper: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """A block of lines for one tile over one share of k. Grid (most tiles + 1, lines / block_n, splits); the last
    writes zeros for padding, and for what another rank's experts compute.

    gated: x is [tokens, k], lines are a gate and an up in turn, out is [assignments, n] in the order of the tiles.
    Else: x is [assignments, k] in that order, out is [splits * top_k, tokens, n], times the weights of the routes.
    """
    pdl_wait(overlap, early=True)
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype: constexpr = x.dtype.element_ty
    line = block * block_n + tl.arange(0, block_n)
    lane = tl.arange(0, block_m)
    last = tl.num_programs(0) - 1
    if not gated and tile == last:
        if apart:
            _zero_elsewhere(out, expert_of, line, split, tokens, n, top_k, block_m)
        else:
            _zero_padding(out, expert_of, line, split, tokens, n, top_k, block_m)
    at = tl.minimum(tile, last - 1)  # asked for with the number of tiles, not after it
    expert = tl.load(tile_expert + at).to(tl.int64)
    place = tl.load(tile_start + at) + lane
    there = lane < tl.load(tile_count + at)
    if tile < tl.load(number):
        assignment = tl.load(order + place, mask=there, other=0)
        x_row = assignment // top_k if gated else place
        x_at = x + x_row.to(tl.int64)[:, None] * k
        if packed:
            total = _packed_product(
                x_at, weight, scales, expert, block, split, there, n, k, share, gated, block_m, block_n, wide, dtype,
                hopper,
            )  # fmt: skip
        else:
            total = _product(x_at, weight, expert, line, split, there, n, k, share, gated, block_m, block_n, block_k)
        if gated:
            output = block * (block_n // 2) + tl.arange(0, block_n // 2)
            halves = tl.permute(tl.reshape(total, [block_n // 2, 2, block_m]), [0, 2, 1])
            gate, up = tl.split(halves)
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
            total *= tl.load(weight_of + assignment, mask=there, other=0.0)[None, :]
            row = ((split * top_k + assignment % top_k) * tokens + assignment // top_k).to(tl.int64)
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
    out: Arg, expert_of: Arg, line: Arg, split: Arg, tokens: Arg, n: Arg, top_k: constexpr, block_m: constexpr
) -> None:
    """Zeros in the outputs of tokens without experts, of which no tile has any."""
    for first in range(0, tokens, block_m):
        token = first + tl.arange(0, block_m)
        padding = tl.load(expert_of + token * top_k, mask=token < tokens, other=0) < 0
        if tl.max(padding.to(tl.int32), 0) > 0:
            for slot in range(top_k):
                row = ((split * top_k + slot) * tokens + token).to(tl.int64)
                at = out + row[None, :] * n + line[:, None]
                zeros = tl.zeros([line.shape[0], block_m], out.dtype.element_ty)
                tl.store(at, zeros, mask=padding[None, :] & (line < n)[:, None])


@jit
def _zero_elsewhere(
    out: Arg, expert_of: Arg, line: Arg, split: Arg, tokens: Arg, n: Arg, top_k: constexpr, block_m: constexpr
) -> None:
    """As `_zero_padding`, of each assignment by itself."""
    for first in range(0, tokens * top_k, block_m):
        assignment = first + tl.arange(0, block_m)
        elsewhere = tl.load(expert_of + assignment, mask=assignment < tokens * top_k, other=0) < 0
        row = ((split * top_k + assignment % top_k) * tokens + assignment // top_k).to(tl.int64)
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


@jit
def _packed_product(
    x_at: Arg, words: Arg, scales: Arg, expert: Arg, block: Arg, split: Arg, there: Arg, n: Arg, k: Arg, share: Arg,
    gated: constexpr, block_m: constexpr, block_n: constexpr, wide: constexpr, dtype: constexpr, hopper: constexpr,
) -> Arg:  # fmt: skip
    """words, scales: as in `Mxfp4Weight`."""
    lines = 2 * n if gated else n
    tiles, blocks = (lines + 63) // 64, (k + 127) // 128
    line = block * block_n + tl.arange(0, block_n)
    tile = expert * tiles + tl.minimum(line // 64, tiles - 1)
    first = tile * blocks + split * share // 128
    at = first * 64 + line % 64
    lane = tl.arange(0, 32)
    column = split * share + lane
    end = tl.minimum((split + 1) * share, k)
    total = tl.zeros([block_n, block_m], tl.float32)
    for i in range(0, tl.cdiv(end - split * share, 128)):
        here = at + i * 64
        word = tl.load(words + here[:, None] * 32 + lane[None, :], eviction_policy="evict_first")
        scale = tl.load(scales + here)
        w0, w1, w2, w3 = decoded_quarters(word, scale, wide, dtype, hopper)
        total = _add_quarter(total, w0, x_at, column + i * 128, end, there)
        total = _add_quarter(total, w1, x_at, column + i * 128 + 32, end, there)
        total = _add_quarter(total, w2, x_at, column + i * 128 + 64, end, there)
        total = _add_quarter(total, w3, x_at, column + i * 128 + 96, end, there)
    return total


@jit
def _add_quarter(total: Arg, w: Arg, x_at: Arg, column: Arg, end: Arg, there: Arg) -> Arg:
    values = tl.load(x_at + column[None, :], mask=there[:, None] & (column < end)[None, :], other=0.0)
    return tl.dot(w, tl.trans(values), total, input_precision="ieee")
