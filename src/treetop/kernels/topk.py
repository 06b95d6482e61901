# ruff: noqa: PLR0917 (kernels take what they touch as arguments)
"""Log-probabilities of the k best tokens of a row, ties by the smaller index: the draft head's proposals.

Reference: `log_softmax`, then `stable_topk`. On a GPU two launches read the logits once: a program a piece of a row
keeps its k best and its share of the normaliser, then a program a row merges the pieces.
"""

import torch
from torch import Tensor

from treetop.kernels.tree import stable_topk
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, tl

_PIECE = 1024
"""Logits of one program of the first launch."""


def top_logprobs_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits: [..., vocab]. Returns log-probabilities [..., k] float32, best first, and indices [..., k] int64."""
    logprob = torch.log_softmax(logits.to(torch.float32), dim=-1).clamp(max=0)
    return stable_topk(logprob, k)


def top_logprobs(logits: Tensor, k: int, gpu: GpuTraits) -> tuple[Tensor, Tensor]:
    """`top_logprobs_reference` in two launches, for k up to 16; order and ties are those of the logits."""
    vocab = logits.shape[-1]
    flat = logits.reshape(-1, vocab)
    rows, pieces, slots = flat.shape[0], -(-vocab // _PIECE), _power_of_two(k)
    value = torch.empty((rows, pieces, slots), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, pieces, slots), dtype=torch.int32, device=logits.device)
    share = torch.empty((rows, pieces, 2), dtype=torch.float32, device=logits.device)
    best = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    options = {"launch_pdl": True} if gpu.can_overlap else {}
    _pieces_kernel[(rows, pieces)](
        flat, value, index, share, flat.stride(0), vocab,
        k=k, slots=slots, piece=_PIECE, pieces=pieces, overlap=gpu.can_overlap, num_warps=4, **options,
    )  # fmt: skip
    _merge_kernel[(rows,)](
        value, index, share, best, where,
        k=k, slots=slots, pieces=pieces, block=_power_of_two(pieces), overlap=gpu.can_overlap, num_warps=4, **options,
    )  # fmt: skip
    shape = (*logits.shape[:-1], k)
    return best.view(shape), where.view(shape)


@jit
def _pieces_kernel(
    logits: Arg, value: Arg, index: Arg, share: Arg, row_stride: Arg, vocab: Arg,
    k: constexpr, slots: constexpr, piece: constexpr, pieces: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """The k best of one piece, and the maximum and sum of exponentials. Grid (rows, pieces)."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, piece)
    at = part * piece + lane
    x = tl.load(logits + row * row_stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(share + (row * pieces + part) * 2, top)
    tl.store(share + (row * pieces + part) * 2 + 1, tl.sum(tl.exp(x - safe), 0))
    for i in tl.static_range(k):
        first = tl.argmax(x, 0)
        tl.store(value + (row * pieces + part) * slots + i, tl.max(x, 0))
        tl.store(index + (row * pieces + part) * slots + i, part * piece + first)
        x = tl.where(lane == first, float("-inf"), x)


@jit
def _merge_kernel(
    value: Arg, index: Arg, share: Arg, best: Arg, where: Arg,
    k: constexpr, slots: constexpr, pieces: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Candidates lie by piece, then rank, so the first of equal values has the smallest index. Grid (rows,)."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, block)
    there = part < pieces
    top = tl.load(share + (row * pieces + part) * 2, mask=there, other=float("-inf"))
    mass = tl.load(share + (row * pieces + part) * 2 + 1, mask=there, other=0.0)
    peak = tl.max(top, 0)
    normaliser = peak + tl.log(tl.sum(mass * tl.exp(top - peak), 0))
    lane = tl.arange(0, block * slots)
    known = (lane // slots < pieces) & (lane % slots < k)
    x = tl.load(value + row * pieces * slots + lane, mask=known, other=float("-inf"))
    for i in tl.static_range(k):
        first = tl.argmax(x, 0)
        tl.store(best + row * k + i, tl.minimum(tl.max(x, 0) - normaliser, 0.0))
        tl.store(where + row * k + i, tl.load(index + row * pieces * slots + first).to(tl.int64))
        x = tl.where(lane == first, float("-inf"), x)


def _power_of_two(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()
