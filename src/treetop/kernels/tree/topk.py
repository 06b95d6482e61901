"""Log-probabilities of the k best tokens of a row, ties by the smaller index: the draft head's proposals.

Reference: `log_softmax`, then `stable_topk`. On a GPU two launches read the logits once: a program a piece of a row
keeps its k best and its share of the normaliser, then a program a row merges the pieces.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sort_key import index_of, key_of, value_of
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.tree import stable_topk
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl

_PIECE = 1024
"""Logits of one program of the first launch."""
MOST = 16
"""The largest k of a draft's proposals; log-probabilities of outputs may be a few more."""


def top_logprobs_reference(
    logits: Tensor, k: int, offset: Tensor | None = None, inv_temp: InverseTemperature | None = None
) -> tuple[Tensor, Tensor]:
    """The k best tokens: log-probabilities [..., k] float32, best first, and tokens [..., k] int64.

    logits: [..., vocab]. offset: [vocab] int64, what to add to an index to make it a token; None is 0. inv_temp: of the
    rows, in as many lines each; None is 1.
    """
    logits = logits.to(torch.float32)
    if inv_temp is not None:
        lines = logits.numel() // logits.shape[-1]
        logits = logits * inv_temp.of_lines(lines).view(*logits.shape[:-1], 1)
    logprob = torch.log_softmax(logits, dim=-1).clamp(max=0)
    best, index = stable_topk(logprob, k)
    return best, index if offset is None else index + offset[index]


def top_logprobs(
    logits: Tensor, k: int, offset: Tensor | None, inv_temp: InverseTemperature | None = None, *, gpu: GpuTraits
) -> tuple[Tensor, Tensor]:
    """`top_logprobs_reference` in two launches, for small k; order and ties are those of the logits."""
    vocab = logits.shape[-1]
    flat = logits.reshape(-1, vocab)
    rows, pieces, slots = flat.shape[0], -(-vocab // _PIECE), lanes(k)
    key = torch.empty((rows, pieces, slots), dtype=torch.int64, device=logits.device)
    share = torch.empty((rows, pieces, 2), dtype=torch.float32, device=logits.device)
    best = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    token = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    table, classes = inv_temp or (share, token)
    per_row = 1 if inv_temp is None else rows // len(inv_temp.classes)
    _pieces_kernel[(rows, pieces)](
        flat, key, share, table, classes, flat.stride(0), vocab, per_row,
        k=k, slots=slots, piece=_PIECE, pieces=pieces, has_inv_temp=inv_temp is not None,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    _merge_kernel[(rows,)](
        key, share, best, token, token if offset is None else offset,
        k=k, slots=slots, pieces=pieces, block=lanes(pieces), has_offset=offset is not None,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    shape = (*logits.shape[:-1], k)
    return best.view(shape), token.view(shape)


@jit
def _pieces_kernel(
    logits: Arg, key: Arg, share: Arg, inv_temp: Arg, classes: Arg, row_stride: Arg, vocab: Arg, per_row: Arg,
    k: constexpr, slots: constexpr, piece: constexpr, pieces: constexpr, has_inv_temp: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The k best of one piece, and the maximum and sum of exponentials. Grid (rows, pieces)."""
    pdl_wait(overlap, early=True)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * piece + tl.arange(0, piece)
    x = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    if has_inv_temp:
        x *= tl.load(inv_temp + tl.load(classes + row // per_row))
    top = tl.max(x, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(share + (row * pieces + part) * 2, top)
    tl.store(share + (row * pieces + part) * 2 + 1, tl.sum(tl.exp(x - safe), 0))
    keys = tl.where(at < vocab, key_of(x, at), -0x7FFFFFFFFFFFFFFF)
    for i in tl.static_range(k):
        best = tl.max(keys, 0)
        tl.store(key + (row * pieces + part) * slots + i, best)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)


@jit
def _merge_kernel(
    key: Arg, share: Arg, best: Arg, token: Arg, offset: Arg,
    k: constexpr, slots: constexpr, pieces: constexpr, block: constexpr, has_offset: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The k best of the pieces' best, less the row's normaliser. Grid (rows,)."""
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block)
    there = part < pieces
    top = tl.load(share + (row * pieces + part) * 2, mask=there, other=float("-inf"))
    mass = tl.load(share + (row * pieces + part) * 2 + 1, mask=there, other=0.0)
    peak = tl.max(top, 0)
    normaliser = peak + tl.log(tl.sum(mass * tl.exp(top - peak), 0))
    lane = tl.arange(0, block * slots)
    known = (lane // slots < pieces) & (lane % slots < k)
    keys = tl.load(key + row * pieces * slots + lane, mask=known, other=-0x7FFFFFFFFFFFFFFF)
    for i in tl.static_range(k):
        first = tl.max(keys, 0)
        logprob = value_of(first) - normaliser
        tl.store(best + row * k + i, tl.where(logprob > 0.0, 0.0, logprob))  # NaN stays, for the probes
        index = index_of(first).to(tl.int64)
        if has_offset:
            index += tl.load(offset + index)
        tl.store(token + row * k + i, index)
        keys = tl.where(keys == first, -0x7FFFFFFFFFFFFFFF, keys)
