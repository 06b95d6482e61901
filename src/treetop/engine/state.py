"""Device state by request row. The last row is the dummy request: null pages, nothing committed, for ever."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import torch
from torch import Tensor

from treetop.drafts.protocol import DrafterSpec
from treetop.engine.buffers import Zeros
from treetop.engine.features.deferral import RowDeferral
from treetop.engine.features.feature import AcceptedRound, NewRoots, RowFeature
from treetop.engine.features.learning import Learning
from treetop.engine.features.masks import GrammarMasks
from treetop.engine.features.processors import RowProcessors
from treetop.engine.features.sampling import RowNumbers
from treetop.engine.features.states import RowStates
from treetop.engine.features.text import RowText
from treetop.engine.row_record import RowRecord
from treetop.kernels.kv import PageTable
from treetop.kernels.sampling.sampling import SamplingMetadata
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import Calibration, make_calibration
from treetop.kernels.tree.deferred import DeferredPairs
from treetop.kernels.tree.rows import DraftState, RowTables
from treetop.types.ids import GroupName, Row
from treetop.types.layout import Layout, SpecShape
from treetop.types.messages import PageEdit, RowSetup
from treetop.types.parallel import SINGLE_RANK, Parallel
from treetop.types.sampling import CLASSES, SamplingMode, SamplingParams


@dataclass(frozen=True, slots=True)
class RowState:
    """Tables of `num_rows` rows, written in place, never rebound.

    page_tables: group -> its table, [num_rows, page_columns] int32.
    record: the tables of what a row hands over: committed, root, draft, and what features add.
    committed: [num_rows] int64, tokens whose K/V are in the pages of every group.
    root: [num_rows] int64, the token after them, whose K/V are in none.
    draft: with a drafter, what the next tree grows from.
    calibration: of the pair; it is no row's.
    features: what else rows keep, in the order in which a request moves in. What phases read is here by name, too:
    numbers, states: of recurrent layers, without groups if there are none.
    processors, masks, text, deferral, learning: None where they are off.
    """

    page_tables: dict[GroupName, PageTable]
    record: RowRecord
    committed: Tensor
    root: Tensor
    draft: DraftState | None
    calibration: Calibration
    numbers: RowNumbers
    states: RowStates
    processors: RowProcessors | None
    masks: GrammarMasks | None
    text: RowText | None
    deferral: RowDeferral | None
    learning: Learning | None
    features: tuple[RowFeature, ...]

    def table_of(self, group: GroupName) -> PageTable:
        """The page table that a group's layers read: their own (sgl-24617)."""
        return self.page_tables[group]

    def edit_columns(self, edits: Sequence[PageEdit]) -> list[list[int]]:
        """Page-table cells as columns of integers: row, column and page, three for each group."""
        columns: list[list[int]] = []
        for group in self.page_tables:
            mine = [edit for edit in edits if edit.group == group]
            rows = chain.from_iterable(repeat(edit.row, len(edit.columns)) for edit in mine)
            cells = (chain.from_iterable(each) for each in ([e.columns for e in mine], [e.pages for e in mine]))
            columns += [[*rows], *map(list, cells)]
        return columns

    def apply_edits(self, columns: Sequence[Tensor]) -> None:
        """Write page-table cells, each named once. columns: those of `edit_columns`, on the device."""
        for i, table in enumerate(self.page_tables.values()):
            row, column, page = columns[3 * i : 3 * i + 3]
            if len(row):
                table.data[row, column] = page.to(torch.int32)

    def forget_pages(self, rows: list[int]) -> None:
        """Level 3: fill the tables of rows about to be set up with what no page is."""
        for table in self.page_tables.values():
            table.data[rows] = torch.iinfo(torch.int32).min

    def setup_widths(self, layout: Layout) -> list[int]:
        """The most integers of each of `setup_columns`."""
        worst = RowSetup(Row(0), 0, SamplingParams(), 0, prefix_ids=(0,) * layout.max_context)
        return [len(column) for column in self.setup_columns([worst] * layout.max_requests)]

    def setup_columns(self, setups: Sequence[RowSetup]) -> list[Sequence[int]]:
        """Requests that move in as columns of integers: row, committed, and those of each feature."""
        own: list[Sequence[int]] = [[setup.row for setup in setups], [setup.committed for setup in setups]]
        return own + [column for feature in self.features for column in feature.columns(setups)]

    def move_in(self, setups: Sequence[RowSetup], columns: Sequence[Tensor], check_level: int) -> None:
        """Every field of the setups' rows is written, whatever the rows held before.

        columns: those of `setup_columns`, on the device.
        """
        if not setups:
            return
        rows, committed, *of_features = columns
        left = iter(of_features)
        for feature in self.features:
            if check_level >= 3:
                feature.forget(rows)
            feature.move_in(rows, setups, left)
        self.committed[rows] = committed

    def rooted(self, ops: Ops, of: NewRoots) -> None:
        """Roots are known that no round chose."""
        for feature in self.features:
            feature.rooted(ops, of)

    def accepted(self, ops: Ops, of: AcceptedRound) -> None:
        """A round's paths are known."""
        for feature in self.features:
            feature.accepted(ops, of)

    @property
    def written(self) -> list[Tensor]:
        """All that steps write but pages, rows first: zeros at a start, and the dummy row's for ever. Some twice."""
        return [*self.record.tables.values(), *(table for feature in self.features for table in feature.tables)]

    def grammar_masks_of(self, bucket: int, shape: SpecShape) -> GrammarMasks:
        """What the nodes of a batch's constrained rows are held to."""
        assert self.masks is not None, "the client is told that no logits can be changed"
        return self.masks.of(bucket, shape)

    @property
    def deferred(self) -> DeferredPairs | None:
        """What the draft has yet to extend; None where all rounds extend."""
        return None if self.deferral is None else self.deferral.pairs

    @property
    def sampler(self) -> SamplingMetadata:
        """What rows choose by."""
        processors = None if self.processors is None else self.processors.rows
        return SamplingMetadata(self.numbers.params, self.numbers["seed"], processors)

    @property
    def choices(self) -> tuple[SamplingMode, ...]:
        """How tokens may have to be chosen."""
        return tuple(
            choice for choice in SamplingMode if choice is not SamplingMode.PROCESS or self.processors is not None
        )

    @property
    def tables(self) -> RowTables:
        """What a round reads at its start and writes at its end."""
        return RowTables(self.committed, self.root, self.numbers["classes"], self.draft)


def make_state(
    layout: Layout,
    drafter: DrafterSpec | None,
    hidden: int,
    vocab_size: int | None,
    dtype: torch.dtype,
    zeros: Zeros,
    past_tokens: int = 0,
    *,
    learns: bool = False,
    classes: int = CLASSES,
    parallel: Parallel = SINGLE_RANK,
) -> RowState:
    """Zeroed tables; drafter None for plain decoding, vocab_size None where no logits are changed.

    hidden: of the target's states. past_tokens: of texts that rows held before, kept for a drafter that reads text.
    learns: rounds calibrate the drafter. classes: of requests, by which they do. parallel: the rank, whose record is
    that of all.
    """
    n, columns = layout.num_rows, layout.page_columns
    numbers, states = RowNumbers.make(n, zeros), RowStates.make(layout, dtype, zeros)
    committed, root = zeros((n,), torch.int64), zeros((n,), torch.int64)
    recorded = {"committed": committed, "root": root}
    calibration = make_calibration(max(1, layout.commit_width - 1), layout.max_topk, zeros, classes)
    processors = None if vocab_size is None else RowProcessors.make(numbers, vocab_size, zeros)
    masks = None if vocab_size is None else GrammarMasks.make(layout, vocab_size, zeros)
    draft = text = deferral = learning = None
    if drafter is not None:
        tokens, logprob = (zeros((n, layout.max_topk), kind) for kind in (torch.int64, torch.float32))
        draft = DraftState(tokens, logprob, zeros((n, drafter.state_size), drafter.state_dtype or dtype))
        recorded |= {"tokens": draft.tokens, "logprob": draft.logprob, "hidden": draft.hidden}
        if drafter.reads_text:
            text = RowText.make(layout, committed, past_tokens, zeros)
        if layout.max_deferred:
            deferral = RowDeferral.make(layout, len(drafter.aux_inputs) * hidden, dtype, zeros)
        if learns:
            learning = Learning(calibration, numbers, drafter.makes_logits)
    listed = (numbers, learning, processors, masks, text, deferral, states if states.groups else None)
    features: list[RowFeature] = [feature for feature in listed if feature is not None]
    shared = dict[str, tuple[int, ...]]()
    for feature in features:
        recorded |= feature.record
        shared |= feature.shared
    return RowState(
        page_tables={name: PageTable(name, zeros((n, columns), torch.int32)) for name in layout.token_groups},
        record=RowRecord(recorded, shared, parallel),
        committed=committed,
        root=root,
        draft=draft,
        calibration=calibration,
        numbers=numbers,
        states=states,
        processors=processors,
        masks=masks,
        text=text,
        deferral=deferral,
        learning=learning,
        features=tuple(features),
    )
