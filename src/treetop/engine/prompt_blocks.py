"""Prompts packed into blocks: in a captured round, or in a step of their own. A captured batch has a fixed size; one
that is launched kernel by kernel has as many blocks as its chunks take.

    chunks of a step       | prompt 7: 150 tokens            | prompt 2: 70 tokens |           blocks of 64, size 256
    blocks of the batch    | 7: its last 22, padded | 2: its last 6, padded | 7: first 64 | 7: next 64 |  a fifth: none

Each block is a line of the batch as a whole chunk is in a prefill launched alone, for K/V of all lines are in the pages
before any of them attends. The last block of each chunk comes first, so that line i holds what chunk i ends with; state
of rows is changed by these alone. A block of nobody is the dummy row's.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from treetop.types.errors import CheckError
from treetop.types.ids import Row
from treetop.types.layout import num_blocks
from treetop.types.messages import Chunk

_COLUMNS = 6
"""Of each block beside its tokens: rows, ends, offset, query_len, next_token and draft_rows of a `PrefillBatch`."""


class BlockLines(NamedTuple):
    """The tensors of a `PrefillBatch`, in their order, a block a line."""

    rows: Tensor
    ends: Tensor
    offset: Tensor
    tokens: Tensor
    query_len: Tensor
    next_token: Tensor
    draft_rows: Tensor


@dataclass(frozen=True, slots=True)
class PromptBuffers:
    """What a captured step is given of prompts, and what it found.

    inputs: [`num_numbers`] int64: columns [blocks] of a `PrefillBatch`, each aligned, then its tokens [blocks, width].
        A smaller batch uses the first.
    token: [blocks] int64. finite: [blocks] bool. Of the lines that end a prompt.
    """

    inputs: Tensor
    token: Tensor
    finite: Tensor

    def blocks_of(self, size: int, width: int) -> int:
        """Lines of a batch of `size` tokens in blocks of `width`. Raises CheckError where there are fewer."""
        blocks = size // width
        if size % width or not 0 < blocks <= len(self.token) or num_numbers(size, width) > len(self.inputs):
            raise CheckError(
                f"prompts in blocks: need {size} tokens in blocks of {width}, have {len(self.token)} blocks and"
                f" {len(self.inputs)} numbers; the layout sizes them by another formula than fills them"
            )
        return blocks

    def lines_of(self, size: int, width: int) -> "BlockLines":
        """The inputs of a batch of `size` tokens."""
        self.blocks_of(size, width)
        return block_lines(self.inputs, size, width)

    def write(self, size: int, width: int, numbers: Tensor) -> None:
        """numbers: those of `block_numbers`, on the device: all that a step reads."""
        self.blocks_of(size, width)
        self.inputs[: num_numbers(size, width)].copy_(numbers)

    def keep(self, token: Tensor, finite: Tensor) -> None:
        """What a round found. token, finite: [blocks]."""
        self.token[: len(token)].copy_(token)
        self.finite[: len(finite)].copy_(finite)

    def clear(self, size: int, width: int, dummy_row: int) -> None:
        """A batch of nobody."""
        self.inputs[: num_numbers(size, width)].zero_()
        lines = self.lines_of(size, width)
        for each in (lines.rows, lines.ends, lines.draft_rows):
            each.fill_(dummy_row)


def make_prompt_buffers(
    sizes: Sequence[tuple[int, int]], zeros: Callable[[tuple[int, ...], torch.dtype], Tensor]
) -> PromptBuffers:
    """For batches of so many tokens in blocks of so many. One is written, or cleared, before a step reads it."""
    blocks = max((size // width for size, width in sizes), default=0)
    return PromptBuffers(
        zeros((max((num_numbers(size, width) for size, width in sizes), default=0),), torch.int64),
        zeros((blocks,), torch.int64),
        zeros((blocks,), torch.bool),
    )


def num_numbers(size: int, width: int) -> int:
    """Inputs of a batch of `size` tokens."""
    return _COLUMNS * column_stride(size, width) + size // width * width


def column_stride(size: int, width: int) -> int:
    """Numbers from one column to the next: all begin at 16 bytes, as kernels that were compiled before expect them."""
    return size // width + size // width % 2


def block_lines(numbers: Tensor, size: int, width: int) -> BlockLines:
    """Those of a batch of `size` tokens. numbers: the first ones are `block_numbers`, on the device, int64."""
    blocks, stride = size // width, column_stride(size, width)
    columns = numbers[: _COLUMNS * stride].view(_COLUMNS, stride)[:, :blocks]
    tokens = numbers[_COLUMNS * stride : num_numbers(size, width)].view(blocks, width)
    rows, ends, offset, query_len, next_token, draft_rows = columns.unbind()
    return BlockLines(rows, ends, offset, tokens, query_len, next_token, draft_rows)


def block_numbers(
    chunks: Sequence[Chunk], size: int, width: int, dummy_row: int, no_draft: Collection[Row] = ()
) -> list[int]:
    """A step's chunks as `PromptBuffers.inputs` has them. no_draft: rows that are padding to the draft.

    Raises CheckError if they take more blocks than there are.
    """
    blocks = size // width
    need = sum(num_blocks(len(chunk.token_ids), width) for chunk in chunks)
    if need > blocks:
        raise CheckError(
            f"prompts in blocks: chunks of {[len(chunk.token_ids) for chunk in chunks]} tokens need {need} blocks of"
            f" {width}, have {blocks}"
        )
    ends, others = [], []
    for chunk in chunks:
        *before, last = range(0, len(chunk.token_ids), width)
        ends.append((chunk, last, chunk.row, chunk.next_token))
        others += [(chunk, start, dummy_row, chunk.token_ids[start + width]) for start in before]
    lines = [*ends, *others]
    unused = column_stride(size, width) - need
    padding, nobody = [0] * unused, [dummy_row] * unused
    parts = [chunk.token_ids[start : start + width] for chunk, start, _, _ in lines]
    return [
        *(chunk.row for chunk, *_ in lines), *nobody,
        *(owner for _, _, owner, _ in lines), *nobody,
        *(start for _, start, _, _ in lines), *padding,
        *map(len, parts), *padding,
        *(-1 if after is None else after for *_, after in lines), *padding,
        *(dummy_row if chunk.row in no_draft else chunk.row for chunk, *_ in lines), *nobody,
        *(token for part in parts for token in (*part, *[0] * (width - len(part)))), *[0] * (blocks - need) * width,
    ]  # fmt: skip
