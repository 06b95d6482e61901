"""Device state by request row. The last row is the dummy request: null pages, nothing committed, for ever."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.drafts.protocol import DrafterSpec
from treetop.engine.buffers import Zeros, make_updates, state_dtype
from treetop.engine.row_record import RowRecord, record_fields
from treetop.kernels.kv import PageTable
from treetop.kernels.recurrent.states import LinearStates
from treetop.kernels.sampling.process import LogitsProcessors
from treetop.kernels.sampling.sampling import RowSamplingParams, SamplingMetadata
from treetop.kernels.tree.calibration import Calibration, class_of, make_calibration
from treetop.kernels.tree.deferred import DeferredPairs
from treetop.kernels.tree.row_text import NOTHING, PastTexts
from treetop.kernels.tree.rows import DraftState, RowTables
from treetop.types.ids import GroupName
from treetop.types.layout import Layout
from treetop.types.messages import PageEdit, RowSetup
from treetop.types.sampling import MAX_BIASES, Choice

_ANY_VOCABULARY = 2**31 - 1
"""A larger top-k means the same."""


@dataclass(frozen=True, slots=True)
class RowState:
    """Tables of `num_rows` rows, written in place, never rebound.

    page_tables: group -> its table, [num_rows, page_columns] int32.
    record: the tables of what a row hands over, of which committed and root [num_rows] int64 and draft are some.
    deferred: what the draft has yet to extend; None where all rounds extend.
    processors: None where no request may change its logits.
    text: of each row up to its root, [num_rows, width] int32, as `kernels.tree.row_text` has it; None where no
        drafter reads it.
    past: texts that rows held before; None where none are kept.
    undrafted: [num_rows] bool, rows of which no draft is accepted.
    classes: [num_rows] int64, by which a row's proposals are calibrated.
    calibration: of the pair; it is no row's.
    states: of recurrent layers, by group; {} without any.
    checkpoints: what is kept of them for other requests: a row is a slot, and nothing is pending.
    """

    page_tables: dict[GroupName, PageTable]
    record: RowRecord
    committed: Tensor
    root: Tensor
    seed: Tensor
    params: RowSamplingParams
    draft: DraftState | None
    deferred: DeferredPairs | None
    processors: LogitsProcessors | None
    text: Tensor | None
    past: PastTexts | None
    undrafted: Tensor
    classes: Tensor
    calibration: Calibration
    states: dict[GroupName, LinearStates]
    checkpoints: dict[GroupName, LinearStates]

    def table_of(self, group: GroupName) -> PageTable:
        """The page table that a group's layers read: their own (sgl-24617)."""
        return self.page_tables[group]

    def edit_columns(self, edits: Sequence[PageEdit]) -> list[list[int]]:
        """Page-table cells as columns of integers: row, column and page, three for each group."""
        columns: list[list[int]] = []
        for group in self.page_tables:
            mine = [edit for edit in edits if edit.group == group]
            columns += [[e.row for e in mine], [e.column for e in mine], [e.page for e in mine]]
        return columns

    def apply_edits(self, columns: Sequence[Tensor]) -> None:
        """Write page-table cells, each named once. columns: those of `edit_columns`, on the device."""
        for i, table in enumerate(self.page_tables.values()):
            row, column, page = columns[3 * i : 3 * i + 3]
            if len(row):
                table.data[row, column] = page.to(torch.int32)

    def apply_prefixes(self, setups: Sequence[RowSetup], columns: Sequence[Tensor]) -> None:
        """Write the text that requests move in with, from the prefix cache. columns: those of `prefix_columns`."""
        if self.text is not None:
            for setup, ids in zip(setups, columns, strict=True):
                self.text[setup.row, : len(ids)] = ids.to(self.text.dtype)

    def prefix_columns(self, setups: Sequence[RowSetup]) -> list[list[int]]:
        """The committed text of requests that move in, if any drafter reads it."""
        return [] if self.text is None else [list(setup.prefix_ids) for setup in setups]

    def forget_pages(self, rows: list[int]) -> None:
        """Level 3: fill the tables of rows about to be set up with what no page is."""
        for table in self.page_tables.values():
            table.data[rows] = torch.iinfo(torch.int32).min

    def apply_setups(self, columns: Sequence[Tensor]) -> None:
        """Move requests into rows: every per-request field is written, whatever the row held before.

        columns: those of `setup_columns`, on the device.
        """
        rows, *values = columns
        p = self.params
        if self.past is not None and self.text is not None:
            for row in rows.split(1):
                held = self.committed[row]
                self.past.keep(self.text[row][0], torch.where(held > 0, held + 1, 0))
        for table, value in zip((self.committed, self.seed, p.top_k, self.undrafted), values[:4], strict=True):
            table[rows] = value.to(table.dtype)
        for table, value in zip((p.temperature, p.top_p, p.min_p), values[4:], strict=True):
            table[rows] = value.view(torch.float64).to(table.dtype)
        self.classes[rows] = class_of(p.temperature[rows])
        if self.deferred is not None:
            self.deferred.count[rows] = 0

    @property
    def sampler(self) -> SamplingMetadata:
        """What rows choose by."""
        return SamplingMetadata(self.params, self.seed, self.processors)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """How tokens may have to be chosen."""
        return tuple(choice for choice in Choice if choice is not Choice.PROCESS or self.processors is not None)

    @property
    def tables(self) -> RowTables:
        """What a round reads at its start and writes at its end."""
        return RowTables(self.committed, self.root, self.classes, self.draft)


SETUP_COLUMNS = 8


def setup_columns(setups: Sequence[RowSetup]) -> list[list[int]]:
    """Requests that move in as columns of integers: row, committed, seed, top-k, whether no draft is accepted;
    temperature, top-p, min-p as bits.
    """
    params = [s.params for s in setups]
    return [
        [s.row for s in setups],
        [s.committed for s in setups],
        [s.seed for s in setups],
        [min(max(p.top_k, 0), _ANY_VOCABULARY) for p in params],
        [int(not p.speculative) for p in params],
        [_bits(p.temperature) for p in params],
        [_bits(p.top_p) for p in params],
        [_bits(p.min_p) for p in params],
    ]


def _bits(number: float) -> int:
    """The bits of a float64, as an int64."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


def make_state(
    layout: Layout,
    drafter: DrafterSpec | None,
    hidden: int,
    vocab_size: int | None,
    dtype: torch.dtype,
    zeros: Zeros,
    past_tokens: int = 0,
) -> RowState:
    """Zeroed tables; drafter None for plain decoding, vocab_size None where no logits are changed.

    hidden: of the target's states. past_tokens: of texts that rows held before, kept for a drafter that reads text.
    """
    n, long, real = layout.num_rows, torch.int64, torch.float32
    states = make_states(layout, n, layout.commit_width, dtype, zeros)
    by_row = {f"conv.{name}": each.conv.movedim(1, 0) for name, each in states.items()}
    by_row |= {f"state.{name}": each.state.movedim(1, 0) for name, each in states.items()}
    record = RowRecord.make(record_fields(layout, drafter, dtype), n, zeros, by_row)
    draft = text = deferred = past = None
    if drafter is not None:
        draft = DraftState(*(record.tables[name] for name in DraftState.__dataclass_fields__))
        if drafter.reads_text:
            text = zeros((n, layout.max_positions + 2), torch.int32)  # the root too, and one column for nothing
            if past_tokens:
                past = PastTexts(zeros((past_tokens + 1,), torch.int32), zeros((1,), long))
                past.tokens.fill_(NOTHING)
    if drafter is not None and layout.max_deferred:
        pairs, width = layout.max_deferred, len(drafter.aux_inputs) * hidden
        deferred = DeferredPairs(zeros((n,), long), zeros((n, pairs), long), zeros((n, pairs, width), dtype))
    top_p = zeros((n,), real)
    top_p.fill_(1.0)
    columns = layout.page_columns
    return RowState(
        page_tables={name: PageTable(name, zeros((n, columns), torch.int32)) for name in layout.token_groups},
        record=record,
        committed=record.tables["committed"],
        root=record.tables["root"],
        seed=zeros((n,), long),
        params=RowSamplingParams(zeros((n,), real), zeros((n,), long), top_p, zeros((n,), real)),
        draft=draft,
        deferred=deferred,
        processors=None if vocab_size is None else _make_processors(n, vocab_size, zeros),
        text=text,
        past=past,
        undrafted=zeros((n,), torch.bool),
        classes=zeros((n,), long),
        calibration=make_calibration(max(1, layout.commit_width - 1), layout.max_topk, zeros),
        states=states,
        checkpoints=make_states(layout, layout.checkpoints, 0, dtype, zeros),
    )


def make_states(layout: Layout, n: int, width: int, dtype: torch.dtype, zeros: Zeros) -> dict[GroupName, LinearStates]:
    """Zeroed states of `n` rows, of which `width` updates may be pending, by group. dtype: the engine's."""
    return {
        group.name: LinearStates(
            conv=zeros((group.num_layers, n, *group.conv_shape), dtype),
            state=zeros((group.num_layers, n, *group.state_shape), state_dtype(dtype)),
            pending=make_updates(group, (n, width), dtype, zeros),
            count=zeros((n,), torch.int64),
        )
        for group in layout.state_groups
    }


def state_tables(states: LinearStates) -> tuple[Tensor, ...]:
    """All that rows keep, [layers, num_rows, ...] each, but for how many updates are pending."""
    pending = states.pending
    return states.conv, states.state, pending.k, pending.d, pending.g


def _make_processors(n: int, vocab_size: int, zeros: Zeros) -> LogitsProcessors:
    words, biases = zeros((n, vocab_size), torch.int32), zeros((n, 1 + MAX_BIASES), torch.float32)
    presence, frequency, repetition = (zeros((n,), torch.float32) for _ in range(3))
    active, constrained = (zeros((n,), torch.bool) for _ in range(2))
    return LogitsProcessors(
        words, biases, presence, frequency, repetition, zeros((n,), torch.int64), active, constrained
    )
