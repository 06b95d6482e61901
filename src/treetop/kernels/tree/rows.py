"""State by request row: the tables a round reads at its start and writes at its end, and the end.

On a GPU the end is one launch; another picks the column that the next proposals come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl

_BLOCK = 1024
"""Elements of a hidden state that a program moves."""


@dataclass(frozen=True, slots=True)
class DraftState:
    """What a row's next tree grows from.

    tokens, logprob: [num_rows, max_topk].
    hidden: [num_rows, draft hidden].
    """

    tokens: Tensor
    logprob: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class RowTables:
    """committed, root: [num_rows] int64: tokens in the pages, and the token after them.
    classes: [num_rows] int64, by which proposals are calibrated.
    draft: None without a head.
    """

    committed: Tensor
    root: Tensor
    classes: Tensor
    draft: DraftState | None


def finish_reference(
    tables: RowTables, rows: Tensor, dummy_row: int, accept_len: Tensor, root: Tensor, draft: DraftState | None
) -> None:
    """The last operation of a step: `committed` grows by accept_len + 1, the root and the next proposals are stored.

    rows, accept_len, root: [rows] int64. draft: tokens, logprob [rows, k] and hidden [rows, draft hidden]; None without
    a head. The dummy row keeps its state, so that its duplicates in a padded batch all write what is there.
    """
    live = rows != dummy_row
    store(tables.committed, rows, live, tables.committed[rows] + (accept_len + 1))
    store(tables.root, rows, live, root)
    if draft is not None:
        assert tables.draft is not None
        store_draft(tables.draft, rows, live, draft)


def store_draft(table: DraftState, rows: Tensor, keep: Tensor, draft: DraftState) -> None:
    """The proposals of those rows for which `keep`, [rows] bool, holds. draft: as in `finish_reference`."""
    k = draft.tokens.shape[1]
    store(table.tokens[:, :k], rows, keep, draft.tokens)
    store(table.logprob[:, :k], rows, keep, draft.logprob)
    store(table.hidden, rows, keep, draft.hidden)


def store(table: Tensor, rows: Tensor, live: Tensor, value: Tensor) -> None:
    """value [rows, ...] of those rows for which `live`, [rows] bool, holds."""
    keep = live.view(-1, *[1] * (value.dim() - 1))
    table[rows] = torch.where(keep, value, table[rows])


def pick_reference(x: Tensor, index: Tensor) -> Tensor:
    """One column of each row. x: [rows, n, width], index: [rows] int64. Returns [rows, width]."""
    return x[torch.arange(x.shape[0], device=x.device), index]


def finish(
    tables: RowTables, rows: Tensor, dummy_row: int, accept_len: Tensor, root: Tensor, draft: DraftState | None,
    gpu: GpuTraits,
) -> None:  # fmt: skip
    """`finish_reference` in one launch."""
    state, new = tables.draft or _no_draft(tables), draft or _no_draft(tables)
    width = new.hidden.shape[1] if draft is not None else 0
    assert new.hidden.stride(1) == state.hidden.stride(1) == accept_len.stride(0) == root.stride(0) == 1
    k = new.tokens.shape[1]
    block = min(_BLOCK, lanes(width))
    _finish_kernel[(len(rows), max(1, -(-width // block)))](
        tables.committed, tables.root, state.tokens, state.logprob, state.hidden,
        rows, accept_len, root, new.tokens.contiguous(), new.logprob.contiguous(), new.hidden,
        dummy_row, state.tokens.stride(0), state.hidden.stride(0), new.hidden.stride(0),
        k=k, width=width, block_k=lanes(k), block=block, has_draft=draft is not None,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip


def _no_draft(tables: RowTables) -> DraftState:
    """Pointers for a kernel that uses none of them."""
    return DraftState(*[tables.root[:, None]] * 3)


@jit
def _finish_kernel(
    committed: Arg, root: Arg, tokens: Arg, logprob: Arg, hidden: Arg,
    rows: Arg, accept_len: Arg, new_root: Arg, new_tokens: Arg, new_logprob: Arg, new_hidden: Arg,
    dummy_row: Arg, token_row: Arg, hidden_row: Arg, new_hidden_row: Arg,
    k: constexpr, width: constexpr, block_k: constexpr, block: constexpr, has_draft: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One block of one row's hidden state a program, the first also the rest. Grid (rows, blocks)."""
    pdl_wait(overlap, early=True)
    item, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + item)
    if row != dummy_row:
        if part == 0:
            tl.store(committed + row, tl.load(committed + row) + tl.load(accept_len + item) + 1)
            tl.store(root + row, tl.load(new_root + item))
            if has_draft:
                branch = tl.arange(0, block_k)
                there = branch < k
                token = tl.load(new_tokens + item * k + branch, mask=there, other=0)
                score = tl.load(new_logprob + item * k + branch, mask=there, other=0.0)
                tl.store(tokens + row * token_row + branch, token, mask=there)
                tl.store(logprob + row * token_row + branch, score, mask=there)
        if has_draft:
            lane = part * block + tl.arange(0, block)
            inside = lane < width
            state = tl.load(new_hidden + item * new_hidden_row + lane, mask=inside, other=0.0)
            tl.store(hidden + row * hidden_row + lane, state, mask=inside)


def pick(x: Tensor, index: Tensor, gpu: GpuTraits) -> Tensor:
    """`pick_reference` in one launch. x: contiguous along its width."""
    rows, _, width = x.shape
    assert x.stride(2) == 1
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(_BLOCK, lanes(width))
    _pick_kernel[(rows, -(-width // block))](
        out, x, index, x.stride(0), x.stride(1), width,
        block=block, overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _pick_kernel(
    out: Arg, x: Arg, index: Arg, x_row: Arg, x_column: Arg, width: Arg, block: constexpr, overlap: constexpr
) -> None:
    """One block of one row a program. Grid (rows, blocks)."""
    pdl_wait(overlap, early=True)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * block + tl.arange(0, block)
    column = tl.load(index + row)
    value = tl.load(x + row * x_row + column * x_column + lane, mask=lane < width, other=0.0)
    tl.store(out + row * width + lane, value, mask=lane < width)
