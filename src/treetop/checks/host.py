"""Level 1: plans and results are checked on the host before they reach the device, in time O(rows)."""

from collections.abc import Iterable, Sequence

from treetop.types.errors import CheckError
from treetop.types.ids import Row
from treetop.types.layout import Layout
from treetop.types.messages import PageEdit, PrefillPlan, RoundPlan, RowResult, StepPlan


def check_plan(plan: StepPlan, layout: Layout) -> None:
    """Raise CheckError naming quantity, row, value and range if a plan cannot be run on this layout."""
    check_edits(plan.edits, layout)
    if isinstance(plan, PrefillPlan):
        check_rows([chunk.row for chunk in plan.chunks], layout)
        check_rows([setup.row for setup in plan.setups], layout)
        for chunk in plan.chunks:
            end = chunk.start + len(chunk.token_ids)
            _within("prefill extent", chunk.row, end, 1, layout.max_context)
    else:
        check_round(plan, layout)


def check_round(plan: RoundPlan, layout: Layout) -> None:
    check_rows(plan.rows, layout)
    if plan.shape not in layout.shapes:
        raise CheckError(f"shape {plan.shape} is not one of the layout's {layout.shapes}")
    if not 0 <= plan.committed_bound <= layout.max_context:
        raise CheckError(f"committed_bound {plan.committed_bound} lies outside [0, {layout.max_context}]")


def check_rows(rows: Sequence[Row], layout: Layout) -> None:
    """Live rows are distinct and none is the dummy row."""
    if len(set(rows)) != len(rows):
        raise CheckError(f"a row appears twice in {list(rows)}")
    for row in rows:
        _within("row", row, row, 0, layout.max_requests - 1)


def check_edits(edits: Iterable[PageEdit], layout: Layout) -> None:
    for edit in edits:
        _within(f"page_table.{edit.group} row", edit.row, edit.row, 0, layout.max_requests - 1)
        _within(f"page_table.{edit.group} column", edit.row, edit.column, 0, layout.page_columns - 1)
        _within(f"page_table.{edit.group} page", edit.row, edit.page, 0, layout.num_pages[edit.group] - 1)


def check_result(result: RowResult, vocab_size: int, commit_width: int) -> None:
    """What came back from the device is a legal result."""
    _within("number of tokens", result.row, len(result.tokens), 0, commit_width)
    for token in result.tokens:
        _within("token", result.row, token, 0, vocab_size - 1)


def _within(what: str, row: int, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise CheckError(f"{what}: row {row} has {value}, outside [{low}, {high}]")
