"""Level 1: plans and results are checked on the host before they reach the device, in time O(rows)."""

from collections.abc import Collection, Sequence

from treetop.types.errors import CheckError
from treetop.types.ids import Row
from treetop.types.kv_chunk import KVChunk
from treetop.types.layout import Layout
from treetop.types.messages import (
    Chunk,
    Export,
    ExportPlan,
    Import,
    ImportPlan,
    MixedPlan,
    OffloadPlan,
    PageEdit,
    RoundPlan,
    RowResult,
    RowSetup,
    StepPlan,
)


class PlanChecker:
    """Checks plans against a layout, each chunk against the one before it in its row, and what is exported of it."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._num_pages = layout, layout.num_pages
        self._expected: dict[Row, tuple[int, int]] = {}  # row -> (start, first token) of its next chunk
        self._filled: dict[Row, tuple[int, bool]] = {}  # row -> tokens that prefills have filled, and whether all
        self._kept: dict[int, int] = {}  # checkpoint of states -> tokens that they are of
        self._deferred: dict[Row, int] = {}  # row -> tokens that the draft has yet to extend
        self._no_draft: set[Row] = set()  # which are padding to the draft until others move in

    def check(self, plan: StepPlan) -> None:
        """Raise CheckError naming quantity, row, value and range if a plan cannot be run on this layout."""
        layout = self._layout
        layout.require("max_edits", sum(len(edit.columns) for edit in plan.edits))
        for edit in plan.edits:
            self._check_edit(edit)
        if isinstance(plan, MixedPlan):
            self._check_mixed(plan)
            return
        if isinstance(plan, RoundPlan):
            check_round(plan, layout)
            self._check_deferred(plan)
            return
        if isinstance(plan, ExportPlan | ImportPlan):
            self._check_kv_chunks(plan)
            return
        if isinstance(plan, OffloadPlan):
            self._check_copies(plan)
            return
        check_rows([chunk.row for chunk in plan.chunks], layout)
        check_rows([setup.row for setup in plan.setups], layout)
        if plan.packed and not layout.may_pack(plan.packed, plan.block):
            raise CheckError(
                f"prefill step: {plan.packed} tokens in blocks of {plan.block}, of batches {layout.packed_sizes}, or of"
                f" {layout.chunk} tokens in blocks of {layout.prefill_blocks}"
            )
        for setup in plan.setups:
            self._check_states(setup)
            self._deferred.pop(setup.row, None)
            (self._no_draft.discard if setup.drafts else self._no_draft.add)(setup.row)
            self._expected.pop(setup.row, None)
            self._filled[setup.row] = setup.committed, False
        self._check_drafting("prefill step", plan.rows, plan.no_draft)
        for chunk in plan.chunks:
            self._check_chunk(chunk)
            if chunk.keep is not None:
                _within("checkpoint of a chunk", chunk.row, chunk.keep, 0, layout.checkpoints - 1)
                self._kept[chunk.keep] = chunk.start + len(chunk.token_ids)

    def _check_mixed(self, plan: MixedPlan) -> None:
        """Both parts are steps that can be run, no row is in both, and no page-table cell is named twice."""
        if not self._layout.mixed:
            raise CheckError("mixed step: the layout has no room for one")
        check_rows(plan.rows, self._layout)
        cells = [(edit.group, edit.row, column) for edit in plan.edits for column in edit.columns]
        if len({*cells}) < len(cells):
            raise CheckError(f"mixed step: a page-table cell is named twice in {cells}")
        batch, sizes = (plan.prefill.packed, plan.prefill.block), self._layout.prompt_sizes
        if batch[0] and batch not in {(size, self._layout.prompt_block) for size in sizes}:
            raise CheckError(f"mixed step: {batch[0]} tokens in blocks of {batch[1]}, of batches of {sizes}")
        for part in (plan.prefill, plan.round):
            self.check(part)

    def _check_states(self, setup: RowSetup) -> None:
        """Where layers are recurrent, who begins behind tokens has their states, of exactly as many tokens."""
        if setup.checkpoint is not None:
            _within("checkpoint of a row", setup.row, setup.checkpoint, 0, self._layout.checkpoints - 1)
            length = self._kept.get(setup.checkpoint, 0)
            _within("tokens that a row's states are of", setup.row, length, setup.committed, setup.committed)
        elif self._layout.state_groups and setup.committed:
            raise CheckError(f"row {setup.row} begins behind {setup.committed} tokens without their states")

    def _check_edit(self, edit: PageEdit) -> None:
        table, last_row = f"page_table.{edit.group}", self._layout.max_requests - 1
        _within(f"{table} row", edit.row, edit.row, 0, last_row)
        for kind, values, end in (
            ("column", edit.columns, self._layout.page_columns),
            ("page", edit.pages, self._num_pages[edit.group]),
        ):
            for value in (min(values), max(values)):
                _within(f"{table} {kind}", edit.row, value, 0, end - 1)

    def _check_chunk(self, chunk: Chunk) -> None:
        """A chunk ends inside the context, and starts with the token that the chunk before it promised (sgl-26329)."""
        end = chunk.start + len(chunk.token_ids)
        _within("prefill extent", chunk.row, end, 1, self._layout.max_context)
        start, token = self._expected.pop(chunk.row, (chunk.start, chunk.token_ids[0]))
        _within("chunk start", chunk.row, chunk.start, start, start)
        _within("first token of a chunk, promised by the chunk before,", chunk.row, chunk.token_ids[0], token, token)
        if chunk.next_token is not None:
            self._expected[chunk.row] = (end, chunk.next_token)
        self._filled[chunk.row] = end, chunk.next_token is None

    def _check_drafting(self, step: str, rows: tuple[Row, ...], no_draft: tuple[Row, ...]) -> tuple[Row, ...]:
        """Rows without a draft are a step's last ones, and none of the others has lost its own. Returns the others."""
        drafting = rows[: len(rows) - len(no_draft)]
        if self._no_draft & {*drafting} or rows[len(drafting) :] != no_draft:
            raise CheckError(
                f"{step}: rows {list(no_draft)}, the last ones, have no draft, of {list(rows)}; of"
                f" {sorted(self._no_draft)} the draft has no K/V"
            )
        return drafting

    def _check_deferred(self, plan: RoundPlan) -> None:
        """A tree grows on rows that the draft has caught up with, and no row defers more than it has room for."""
        drafting = self._check_drafting("round", plan.rows, plan.no_draft)
        self._no_draft |= {*plan.no_draft}
        defers, deferred = self._layout.defers(plan.shape), self._deferred
        room = self._layout.max_deferred - 1 if defers else 0
        for row in drafting:
            before = 0 if plan.catches_up else deferred.get(row, 0)
            if before > room:
                _within("tokens that wait for draft extend", row, before, 0, room)
            deferred[row] = before + defers

    def _check_kv_chunks(self, plan: ExportPlan | ImportPlan) -> None:
        """No slot twice, chunks of what there is, and a row is set up with its last chunk, which holds its record."""
        layout, moved = self._layout, plan.exports if isinstance(plan, ExportPlan) else plan.imports
        slots = [each.slot for each in moved]
        if len(set(slots)) != len(slots):
            raise CheckError(f"a staging slot appears twice in {slots}")
        for each in moved:
            self._check_kv_chunk(each, each.chunk)
        if isinstance(plan, ImportPlan):
            last = [each.row for each in plan.imports if each.chunk.last]
            check_rows(last, layout)
            self._deferred.update(dict.fromkeys(last, 0))
            self._no_draft -= {*last}
            if [setup.row for setup in plan.setups] != last:
                raise CheckError(f"imports end in rows {last}, and rows {[s.row for s in plan.setups]} are set up")

    def _check_copies(self, plan: OffloadPlan) -> None:
        """No page of either side twice, and each of those that there are."""
        assert self._layout.host is not None, "there are no pages on the host"
        for copies in (plan.saves, plan.fetches, plan.unpacks):
            for side in (1, 2):
                pages = [(each.group, each[side]) for each in copies]
                if len(set(pages)) != len(pages):
                    raise CheckError(f"a page is copied twice in {pages}")
            for each in copies:
                if each.group in self._num_pages:
                    ends = self._num_pages[each.group], self._layout.host.num_pages[each.group]
                    _within(f"copied page of {each.group}", 0, each.page, 1, ends[0] - 1)
                    _within(f"copied page of {each.group} on the host", 0, each.host_page, 1, ends[1] - 1)
        if plan.states is not None:
            slot, tokens = plan.states
            self._kept[slot] = tokens

    def _check_kv_chunk(self, each: Export | Import, chunk: KVChunk) -> None:
        layout, row = self._layout, each.row
        _within("row", row, row, 0, layout.max_requests - 1)
        _within("staging slot", row, each.slot, 0, layout.disaggregation_slots - 1)
        _within("tokens of a KV chunk", row, chunk.count, 1, layout.slot_tokens)
        _within("start of a KV chunk", row, chunk.start, 0, chunk.total - chunk.count)
        _within("tokens of a request whose KV is transferred", row, chunk.total, 1, layout.max_context)
        if isinstance(each, Export):
            filled, whole = self._filled.get(row, (0, False))
            _within("end of an exported KV chunk, of what is prefilled,", row, chunk.end, 1, filled)
            if chunk.last and not whole:
                raise CheckError(f"exported KV chunk: row {row} has no record: its prompt is not prefilled to its end")


def check_padded(padded: Sequence[int], rows: Sequence[Row], layout: Layout) -> None:
    """A padded row list is the batch, then the dummy row only (sgl-23037)."""
    for row in padded[len(rows) :]:
        _within("padding of the row list", row, row, layout.dummy_row, layout.dummy_row)


def check_emitted(token_ids: Sequence[int], stop_ids: frozenset[int], reason: str | None, limit: int) -> None:
    """Nothing follows a stop token, no more than `limit` tokens are emitted, and the reason says which (sgl-33758)."""
    if stop_ids.isdisjoint(token_ids) and len(token_ids) <= limit:
        return
    last = len(token_ids) - 1
    for index, token in enumerate(token_ids):
        if token in stop_ids and (index != last or reason != "stop"):
            raise CheckError(f"emitted tokens: stop token {token} at {index} of {len(token_ids)}, reason {reason}")
    if len(token_ids) > limit:
        raise CheckError(f"emitted tokens: {len(token_ids)}, more than the {limit} that are left")


def check_continues(request_id: int, start: int, num_received: int) -> None:
    """New tokens of a request begin where those that its client has end: none comes twice, none is lost."""
    if start != num_received:
        raise CheckError(f"request {request_id}: tokens came from {start} on, its client has {num_received}")


def check_alive(replica: object, alive: Collection[object]) -> None:
    """A request is sent to a replica that is there."""
    if replica not in alive:
        raise CheckError(f"replica {replica} was chosen, which is not one of the {len(alive)} that are alive")


def check_cached(row: Row, num_cached: int, num_committed: int) -> None:
    """The prefix cache is given no token whose K/V are not committed."""
    _within("tokens for the prefix cache", row, num_cached, 0, num_committed)


def check_cells(edit: PageEdit, pages: Sequence[int] | None) -> None:
    """Page-table cells are to hold what their row's lease holds there.

    pages: the lease's, by column; None if no request has the row.
    """
    held = [] if pages is None else pages
    for column, page in zip(edit.columns, edit.pages, strict=True):
        if column >= len(held) or held[column] != page:
            raise CheckError(
                f"page_table.{edit.group} cell: row {edit.row}, column {column} is to hold page {page}, which the"
                " request in this row does not hold there"
            )


def check_round(plan: RoundPlan, layout: Layout) -> None:
    check_rows(plan.rows, layout)
    allowed = layout.shapes_at(layout.bucket_for(max(len(plan.rows), plan.min_rows)))
    if plan.shape not in allowed:
        raise CheckError(
            f"shape {plan.shape} of {len(plan.rows)} rows is not one of those that the layout has for them, {allowed}"
        )
    if not 0 <= plan.committed_bound <= layout.max_committed:
        raise CheckError(f"committed_bound {plan.committed_bound} lies outside [0, {layout.max_committed}]")


def check_rows(rows: Sequence[Row], layout: Layout) -> None:
    """Live rows are distinct and none is the dummy row."""
    if len(set(rows)) != len(rows):
        raise CheckError(f"a row appears twice in {list(rows)}")
    if rows and not 0 <= min(rows) <= max(rows) < layout.max_requests:
        for row in rows:
            _within("row", row, row, 0, layout.max_requests - 1)


def check_result(result: RowResult, vocab_size: int, commit_width: int) -> None:
    """What came back from the device is a legal result."""
    tokens = result.tokens
    if len(tokens) > commit_width:
        _within("number of tokens", result.row, len(tokens), 0, commit_width)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        for token in tokens:
            _within("token", result.row, token, 0, vocab_size - 1)


def _within(what: str, row: int, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise CheckError(f"{what}: row {row} has {value}, outside [{low}, {high}]")
