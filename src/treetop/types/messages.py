"""What the scheduler tells the engine, and what comes back. Frozen, host data only, no tensors.

scheduler --StepPlan--> engine --StepResult--> scheduler

Up to `max_in_flight` plans are out at a time; the engine runs them, and the scheduler commits their results, in their
order.
"""

from dataclasses import dataclass
from typing import NamedTuple

from treetop.types.ids import GroupName, PageId, Row
from treetop.types.layout import SpecShape
from treetop.types.sampling import Choice, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PageEdit:
    """Column `column` of `row`'s page table in `group` now holds `page`."""

    group: GroupName
    row: Row
    column: int
    page: PageId


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What changing a request's logits depends on: its tokens so far, and those that would end it."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class RowSetup:
    """A request moves into `row` with `committed` tokens already in the pages of every group: prefix_ids.

    history: only if `params` changes logits. From here on the device counts the tokens itself.
    """

    row: Row
    committed: int
    params: SamplingParams
    seed: int
    history: RowHistory | None = None
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `start .. start + len(token_ids)` of `row`.

    next_token is the prompt token after the chunk, or None for the last chunk, which samples it. The draft head needs
    it: its slot i holds (feature of token i, token i + 1) (sgl-26329).
    """

    row: Row
    start: int
    token_ids: tuple[int, ...]
    next_token: int | None


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill step: edits and setups are applied first. freed: pages given back since the last plan.

    logprobs: see `RoundPlan`. least_tokens: that ranks with shared experts exchange, at least, padding counted.
    """

    edits: tuple[PageEdit, ...]
    freed: tuple[tuple[GroupName, PageId], ...]
    setups: tuple[RowSetup, ...]
    chunks: tuple[Chunk, ...]
    choice: Choice
    logprobs: tuple[int | None, ...] = ()
    least_tokens: int = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(chunk.row for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One decode round. freed: pages given back since the last plan.

    committed_bound: no row has more committed tokens when the round starts. With rounds out the host knows no better:
    each may commit up to S + 1. logprobs: how many of the best tokens' log-probabilities each row asks for, None for no
    log-probabilities at all; () if no row asks. least_rows: that the batch has at least, padding counted.
    """

    edits: tuple[PageEdit, ...]
    freed: tuple[tuple[GroupName, PageId], ...]
    rows: tuple[Row, ...]
    shape: SpecShape
    committed_bound: int
    choice: Choice
    logprobs: tuple[int | None, ...] = ()
    least_rows: int = 0


StepPlan = PrefillPlan | RoundPlan


class RowResult(NamedTuple):
    """What a step gave one row: the new tokens, the last of them the bonus; none after a chunk that is not the last.

    finite is False if the target's logits were not; the request fails alone. logprobs: of each token, for a row that
    asks.
    """

    row: Row
    tokens: tuple[int, ...]
    finite: bool
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The rows of a step in the plan's order. digest: of what the step came to, which is the same on every rank."""

    rows: tuple[RowResult, ...]
    digest: int = 0
