"""Changing logits before a token is chosen: biases, penalties and tokens ruled out, exact along the paths of a tree.

The device knows each request's history as one 32-bit word a token of the vocabulary:

    bits 31 .. 12    how often the token is in the output
    bits 11 .. 3     where its bias lies in the row's list; 0 for none
    bits 2, 1, 0     it is never allowed; it would end the request; it is in the prompt

At a node of a tree the output is the committed one and the tokens on the path from the root to the node. A step ends by
counting what it emitted. Rows that ask for nothing, the dummy row among them, are not active, and their words are never
looked at.

Formulas: of penalties those of OpenAI's API reference and, for repetition, of Keskar et al., CTRL (arXiv:1909.05858),
section 4.1, with the order and the sign rule of Hugging Face and vLLM.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl
from treetop.types.tree import DraftTree

IN_PROMPT, ENDS, NEVER = 1, 2, 4
BIAS_SHIFT, COUNT_SHIFT = 3, 12
ONE = 1 << COUNT_SHIFT
"""What a word grows by when its token is emitted."""
MAX_COUNT = (1 << 32 - COUNT_SHIFT) - 1
"""Tokens of an output that can be counted."""
_BIAS_MASK = (1 << COUNT_SHIFT - BIAS_SHIFT) - 1
_BLOCK = 2048
"""Logits of a program."""


@dataclass(frozen=True, slots=True)
class LogitsProcessors:
    """How rows change their logits. A field that bears the name of an option holds that option of each row.

    words: [num_rows, vocab] int32, see above.
    biases: [num_rows, 512] float32, the first 0.
    presence_penalty, frequency_penalty, repetition_penalty: [num_rows] float32.
    may_end: [num_rows] int64, the position from which on a token may end the request.
    active: [num_rows] bool, rows that change logits; what a constraint rules out is in its masks.
    """

    words: Tensor
    biases: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    repetition_penalty: Tensor
    may_end: Tensor
    active: Tensor


def process_reference(
    logits: Tensor,
    processors: LogitsProcessors,
    rows: Tensor,
    positions: Tensor,
    tree: DraftTree,
    allowed: Tensor | None,
) -> Tensor:
    """The logits after each node as its row changes them: bias, repetition, frequency, presence, then what is ruled out

    logits: [rows, T, vocab], which stay as they are. processors: of all rows; `rows` [rows] picks. positions: [rows, T]
    int64, where the nodes stand. allowed: [rows, T, mask_words] int32, what may follow each node, bit t % 32 of word
    t // 32 for token t; None if any token may. Returns [rows, T, vocab], float64 like the logits or else float32; what
    is ruled out has -inf.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    some = concerned(processors.active[rows])
    is_written = allowed is None or len(some) > 0
    wide = logits.to(dtype, copy=is_written, memory_format=torch.contiguous_format)
    if len(some):
        part = DraftTree(*(getattr(tree, name)[some] for name in DraftTree.__dataclass_fields__))
        wide[some] = _processed(wide[some], processors, rows[some], positions[some], part)
    return wide if allowed is None else _within(wide, allowed)


def _within(logits: Tensor, allowed: Tensor) -> Tensor:
    """Another tensor of the logits [rows, T, vocab], -inf where `allowed` [rows, T, mask_words] rules a token out.

    On a CPU by a minimum, several times as fast as a choice by flags, whose branches are foretold badly. It is taken a
    row at a time, so that the caps are read while they are in the processor's cache.
    """
    vocab = logits.shape[2]
    if logits.device.type != "cpu":
        return torch.where(caps(allowed.flatten(0, 1), vocab).view(logits.shape) < 0, float("-inf"), logits)
    of_byte = caps_of_bytes(allowed.device).to(logits.dtype)
    within = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for row, is_held in enumerate((allowed != -1).flatten(1).any(dim=1).tolist()):
        if not is_held:
            within[row] = logits[row]
            continue
        most = caps(allowed[row], vocab, of_byte)
        capped = torch.minimum(logits[row], most, out=within[row])
        if bool(torch.isnan(capped.max())):
            torch.where(most < 0, most, capped, out=capped)  # a minimum lets NaN through
    return within


def caps(allowed: Tensor, vocab_size: int, of_byte: Tensor | None = None) -> Tensor:
    """Masks [n, mask_words] int32 as the largest logits there may be, [n, vocab] float32: inf for a token that may
    follow, else -inf.

    of_byte: `caps_of_bytes`, in the dtype that the result is to have, for who calls often.
    """
    table = caps_of_bytes(allowed.device) if of_byte is None else of_byte
    of_bytes = allowed.contiguous().view(torch.uint8).flatten().to(torch.int32)
    return table.index_select(0, of_bytes).view(len(allowed), 32 * allowed.shape[1])[:, :vocab_size]


def caps_of_bytes(device: torch.device) -> Tensor:
    """[256, 8] float32, those of a byte's tokens."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return torch.where(bits != 0, float("inf"), float("-inf"))


def concerned(flags: Tensor) -> Tensor:
    """The rows that are flagged, where looking is free; all elsewhere, which are not waited for. flags: [rows] bool."""
    return flags.nonzero()[:, 0] if flags.device.type == "cpu" else torch.arange(len(flags), device=flags.device)


def _processed(wide: Tensor, processors: LogitsProcessors, rows: Tensor, positions: Tensor, tree: DraftTree) -> Tensor:
    words = processors.words[rows][:, None]  # [rows, 1, vocab]

    def of_row(parameter: Tensor) -> Tensor:
        return parameter[rows][:, None, None].to(wide.dtype)

    on_path = tree.mask[:, :, 1:].to(torch.int32)  # the root is counted already
    count = (words >> COUNT_SHIFT & MAX_COUNT).repeat(1, wide.shape[1], 1)
    count.scatter_add_(2, tree.tokens[:, None, 1:].expand_as(on_path), on_path)
    bias = processors.biases[rows].gather(1, (words[:, 0] >> BIAS_SHIFT & _BIAS_MASK).to(torch.int64))
    value = wide + bias[:, None].to(wide.dtype)
    repetition, seen = of_row(processors.repetition_penalty), (count > 0) | (words & IN_PROMPT != 0)
    value = torch.where(seen, torch.where(value > 0, value / repetition, value * repetition), value)
    value = value - of_row(processors.frequency_penalty) * count
    value = value - of_row(processors.presence_penalty) * (count > 0)
    too_early = positions + 1 < processors.may_end[rows][:, None]
    ruled_out = (words & NEVER != 0) | ((words & ENDS != 0) & too_early[:, :, None])
    value = torch.where(ruled_out, float("-inf"), value)
    return torch.where(processors.active[rows][:, None, None], value, wide)


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits of a mask of the vocabulary."""
    return -(-vocab_size // 32)


def count_reference(processors: LogitsProcessors, rows: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
    """Count what a step emitted: the first `num_tokens` [rows] of the tokens [rows, w], of rows that are active."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    counted = (column < num_tokens[:, None]) & processors.active[rows][:, None]
    places = (rows[:, None].expand_as(tokens), torch.where(counted, tokens, 0))
    processors.words.index_put_(places, counted.to(torch.int32) * ONE, accumulate=True)


def process(
    logits: Tensor,
    processors: LogitsProcessors,
    rows: Tensor,
    positions: Tensor,
    tree: DraftTree,
    allowed: Tensor | None,
    gpu: GpuTraits,
) -> Tensor:
    """`process_reference` in one launch. logits: contiguous; float32 or narrower."""
    count, width, vocab = logits.shape
    assert logits.is_contiguous()
    assert rows.is_contiguous()
    assert tree.tokens.stride() == tree.parent.stride() == tree.depth.stride()
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, lanes(vocab))
    _process_kernel[(count * width, -(-vocab // block))](
        out, logits, processors.words, processors.biases, processors.presence_penalty, processors.frequency_penalty,
        processors.repetition_penalty, processors.may_end, processors.active.view(torch.uint8),
        rows, positions, tree.tokens, tree.parent, tree.depth, rows if allowed is None else allowed,
        vocab, width, processors.biases.stride(0), *positions.stride(), tree.tokens.stride(0),
        *((0, 0) if allowed is None else allowed.stride()[:2]),
        block=block, bias_shift=BIAS_SHIFT, bias_mask=_BIAS_MASK, count_shift=COUNT_SHIFT, count_mask=MAX_COUNT,
        in_prompt=IN_PROMPT, ends=ENDS, never=NEVER, has_allowed=allowed is not None,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _process_kernel(
    out: Arg, logits: Arg, words: Arg, biases: Arg, presences: Arg, frequencies: Arg, repetitions: Arg, may_ends: Arg,
    actives: Arg, rows: Arg, positions: Arg, tokens: Arg, parent: Arg, depth: Arg, allowed: Arg,
    vocab: Arg, width: Arg, bias_row: Arg, position_row: Arg, position_node: Arg, tree_row: Arg,
    allowed_row: Arg, allowed_node: Arg,
    block: constexpr, bias_shift: constexpr, bias_mask: constexpr, count_shift: constexpr, count_mask: constexpr,
    in_prompt: constexpr, ends: constexpr, never: constexpr, has_allowed: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of the vocabulary after one node a program. Grid (rows * T, blocks)."""
    pdl_wait(overlap, early=True)
    item = tl.program_id(0).to(tl.int64)
    at, node = item // width, item % width
    lane = tl.program_id(1) * block + tl.arange(0, block)
    there = lane < vocab
    value = tl.load(logits + item * vocab + lane, mask=there, other=0.0).to(tl.float32)
    row = tl.load(rows + at)
    if tl.load(actives + row) != 0:
        word = tl.load(words + row * vocab + lane, mask=there, other=0)
        count = (word >> count_shift) & count_mask
        line, step = at * tree_row, node
        for _ in range(tl.load(depth + line + node)):  # up to the root, which is counted already
            count += (lane == tl.load(tokens + line + step)).to(tl.int32)
            step = tl.load(parent + line + step)
        slot = (word >> bias_shift) & bias_mask
        value += tl.load(biases + row * bias_row + slot, mask=slot > 0, other=0.0)
        repetition = tl.load(repetitions + row)
        repeated = tl.where(value > 0, value / repetition, value * repetition)
        value = tl.where((count > 0) | ((word & in_prompt) != 0), repeated, value)
        value -= tl.load(frequencies + row) * count.to(tl.float32)
        value -= tl.load(presences + row) * (count > 0).to(tl.float32)
        position = tl.load(positions + at * position_row + node * position_node)
        early = position + 1 < tl.load(may_ends + row)
        ruled_out = ((word & never) != 0) | (((word & ends) != 0) & early)
        value = tl.where(ruled_out, float("-inf"), value)
    if has_allowed:
        mask = tl.load(allowed + at * allowed_row + node * allowed_node + (lane >> 5), mask=there, other=0)
        value = tl.where(((mask >> (lane & 31)) & 1) != 0, value, float("-inf"))
    tl.store(out + item * vocab + lane, value, mask=there)


def count(processors: LogitsProcessors, rows: Tensor, tokens: Tensor, num_tokens: Tensor, gpu: GpuTraits) -> None:
    """`count_reference` in one launch."""
    size, width = tokens.shape
    assert tokens.stride(1) == 1
    assert num_tokens.is_contiguous()
    _count_kernel[(size,)](
        processors.words, processors.active.view(torch.uint8), rows, tokens, num_tokens,
        processors.words.stride(0), tokens.stride(0),
        width=width, block=lanes(width), one=ONE, overlap=gpu.can_overlap, num_warps=1, **launch_options(gpu),
    )  # fmt: skip


@jit
def _count_kernel(
    words: Arg, actives: Arg, rows: Arg, tokens: Arg, num_tokens: Arg, word_row: Arg, token_row: Arg,
    width: constexpr, block: constexpr, one: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program; a path may have a token twice. Grid (rows,)."""
    pdl_wait(overlap, early=True)
    at = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + at)
    if tl.load(actives + row) != 0:
        column = tl.arange(0, block)
        emitted = (column < width) & (column < tl.load(num_tokens + at))
        token = tl.load(tokens + at * token_row + column, mask=emitted, other=0)
        tl.atomic_add(words + row * word_row + token, tl.full([block], one, tl.int32), mask=emitted)
