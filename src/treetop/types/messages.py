"""What the scheduler tells the engine, and what comes back. Frozen, host data only, no tensors.

scheduler --StepPlan--> engine --StepResult--> scheduler

Up to `max_steps` plans are out at a time; the engine runs them, and the scheduler commits their results, in their
order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from treetop.types.ids import GroupName, PageId, Row
from treetop.types.kv_chunk import KVChunk
from treetop.types.layout import SpecShape
from treetop.types.routed_experts import TokenExperts
from treetop.types.sampling import SamplingMode, SamplingParams, TokenLogprobs
from treetop.types.verified_tree import VerifiedTree


@dataclass(frozen=True, slots=True)
class PageEdit:
    """Cells of `row`'s page table in `group`: each of `columns`, none twice, now holds the page at its place."""

    group: GroupName
    row: Row
    columns: tuple[int, ...]
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What changing a request's logits depends on: its tokens so far, those that would end it, and that never come."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    stop_ids: frozenset[int]
    never_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RowMask:
    """What may follow `row`'s root in this step: bit t % 8 of byte t // 8 of `allowed` for token t.

    forced: tokens of which each is the only one that may come behind those before it, as far as they are known.
    """

    row: Row
    allowed: bytes
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowTree:
    """The draft tree of a constrained row, on the host between a round's draft and its verification.

    tokens, parent: as in `DraftTree`.
    max_depth: that a node may have.
    """

    row: Row
    tokens: tuple[int, ...]
    parent: tuple[int, ...]
    max_depth: int


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """What may follow nodes of `row`'s tree.

    allowed: by node, as `RowMask.allowed`. The parent of each is among them. A node that is not, but for the root, is
        accepted by nobody.
    tree: the tree to verify, of as many nodes, if it is another than was asked about.
    source: of each of its nodes, the node that it was; of one that is new, the node that its branch hangs on.
    """

    row: Row
    allowed: Mapping[int, bytes]
    tree: RowTree | None = None
    source: tuple[int, ...] = ()


TreeMasks = Callable[[Sequence[RowTree]], Sequence[NodeMasks]]
"""The declared host step of a round: what may follow the nodes of its constrained rows' trees."""


@dataclass(frozen=True, slots=True)
class RowSetup:
    """A request moves into `row` with `committed` tokens already in the pages of every group: prefix_ids.

    history: only if its logits are changed. From here on the device counts the tokens itself.
    constrained: each step that gives it a token has a `RowMask` for it, and no draft of it is accepted but where nodes
        have masks.
    checkpoint: the slot with the states of recurrent layers after these tokens; None where it begins with nothing.
    adapter: the slot of its adapter; 0 for none.
    owner: whose texts it may draft from, a number made of the salt that parts the prefix cache; 0 for all that have
        none.
    drafts: else the draft reads none of its tokens, and its row is padding to the draft.
    """

    row: Row
    committed: int
    params: SamplingParams
    seed: int
    history: RowHistory | None = None
    prefix_ids: tuple[int, ...] = ()
    constrained: bool = False
    checkpoint: int | None = None
    adapter: int = 0
    owner: int = 0
    drafts: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `start .. start + len(token_ids)` of `row`.

    next_token is the prompt token after the chunk, or None for the last chunk, which samples it. The draft head needs
    it: its slot i holds (feature of token i, token i + 1) (sgl-26329).

    prompt_logprobs: how many of the best tokens' log-probabilities are asked for with those of the prompt tokens after
    each of these; None for no log-probabilities of them.

    keep: the slot that gets the states of recurrent layers after the chunk; None for none.

    experts_from: the request asks for the experts of its tokens, and has not been told of those from here on to the
        chunk's end; None if nothing is to be told.
    """

    row: Row
    start: int
    token_ids: tuple[int, ...]
    next_token: int | None
    prompt_logprobs: int | None = None
    keep: int | None = None
    experts_from: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterEdit:
    """A slot of the device has this adapter from now on. number: see `LoadLora`."""

    slot: int
    number: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill step: edits and setups are applied first.

    freed: pages given back since the last plan.
    logprobs, masks: see `RoundPlan`.
    min_batch_tokens: that ranks with shared experts exchange, at least, padding counted.
    packed, block: tokens of the batch that holds the chunks in blocks of so many: of a captured size, alone or in the
        forward of a round, or as many blocks as they take; 0 for a line for each chunk, as wide as the longest.
    no_draft: rows that are padding to the draft, the last ones. If all are, it may not run at all.
    """

    edits: tuple[PageEdit, ...]
    freed: tuple[tuple[GroupName, PageId], ...]
    setups: tuple[RowSetup, ...]
    chunks: tuple[Chunk, ...]
    choice: SamplingMode
    logprobs: tuple[int | None, ...] = ()
    masks: tuple[RowMask, ...] = ()
    min_batch_tokens: int = 0
    adapters: tuple[AdapterEdit, ...] = ()
    packed: int = 0
    block: int = 0
    no_draft: tuple[Row, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(chunk.row for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One decode round.

    freed: pages given back since the last plan.
    committed_bound: no row has more committed tokens when the round starts. With rounds out the host knows no better:
        each may commit up to S + 1.
    logprobs: how many of the best tokens' log-probabilities each row asks for, None for no log-probabilities at all; ()
        if no row asks.
    masks: of the constrained rows that get a token.
    min_rows: that the batch has at least, padding counted.
    catches_up: before the round its rows' deferred draft extends are run.
    no_draft: rows that are padding to the draft, for ever: it has no K/V of theirs, reads none of their tokens, and
        nothing is accepted for them. They come last.
    told_trees: rows whose requests ask for the trees that are verified for them.
    told_experts: rows whose requests ask for the experts of what they commit.
    """

    edits: tuple[PageEdit, ...]
    freed: tuple[tuple[GroupName, PageId], ...]
    rows: tuple[Row, ...]
    shape: SpecShape
    committed_bound: int
    choice: SamplingMode
    logprobs: tuple[int | None, ...] = ()
    masks: tuple[RowMask, ...] = ()
    min_rows: int = 0
    catches_up: bool = False
    no_draft: tuple[Row, ...] = ()
    told_trees: tuple[Row, ...] = ()
    told_experts: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A prefill step and a decode round of other rows, in one forward of the target: its weights are read once.

    Edits and setups of both are applied first; no cell is named twice. No row is in both. Its result holds the rows of
    the prefill, then those of the round.
    """

    prefill: PrefillPlan
    round: RoundPlan

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.prefill.rows, *self.round.rows)

    @property
    def edits(self) -> tuple[PageEdit, ...]:
        return (*self.round.edits, *self.prefill.edits)

    @property
    def freed(self) -> tuple[tuple[GroupName, PageId], ...]:
        return (*self.round.freed, *self.prefill.freed)


@dataclass(frozen=True, slots=True)
class Export:
    """Pack a KV chunk of `row` into staging slot `slot`. The last one has the row's record too."""

    row: Row
    slot: int
    chunk: KVChunk


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Pack computed tokens into staging slots, each slot once. freed: pages given back since the last plan."""

    edits: tuple[PageEdit, ...]
    freed: tuple[tuple[GroupName, PageId], ...]
    exports: tuple[Export, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(export.row for export in self.exports)


@dataclass(frozen=True, slots=True)
class Import:
    """Check what lies in staging slot `slot`, and unpack it into the pages of `row`.

    checksums: of each segment of the chunk on all ranks, as its exporter took them.
    """

    row: Row
    slot: int
    chunk: KVChunk
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Unpack staging slots into the pages of rows, each slot once.

    setups: of the rows whose last chunk this holds.

    What is not intact changes nothing that counts: no row's state, and of pages only what its request alone has.
    """

    edits: tuple[PageEdit, ...]
    freed: tuple[tuple[GroupName, PageId], ...]
    setups: tuple[RowSetup, ...]
    imports: tuple[Import, ...]
    adapters: tuple[AdapterEdit, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(each.row for each in self.imports)


class PageCopy(NamedTuple):
    """A page on the device and its copy on the host; of a group of states, slots."""

    group: GroupName
    page: PageId
    host_page: PageId


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """Copies between device and host, of one direction. freed: pages given back since the last plan.

    saves: pages that go to the host.
    fetches: pages on the host that come as far as the device's staging memory.
    unpacks: what the offload plan before this fetched, which goes into its pages.
    states: (slot, tokens) of the checkpoint of recurrent states that this completes on the device.
    """

    freed: tuple[tuple[GroupName, PageId], ...]
    saves: tuple[PageCopy, ...] = ()
    fetches: tuple[PageCopy, ...] = ()
    unpacks: tuple[PageCopy, ...] = ()
    states: tuple[int, int] | None = None
    edits: tuple[PageEdit, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return ()


WholePlan = PrefillPlan | RoundPlan | ExportPlan | ImportPlan | OffloadPlan
"""A step of one kind."""
StepPlan = WholePlan | MixedPlan


def parts_of_plan(plan: StepPlan) -> tuple[WholePlan, ...]:
    """The steps of one kind that a step consists of, in the order of its rows."""
    return (plan.prefill, plan.round) if isinstance(plan, MixedPlan) else (plan,)


def prefill_of(plan: StepPlan) -> PrefillPlan | None:
    """Of a step that has one."""
    return next((part for part in parts_of_plan(plan) if isinstance(part, PrefillPlan)), None)


def round_of(plan: StepPlan) -> RoundPlan | None:
    """Of a step that has one."""
    return next((part for part in parts_of_plan(plan) if isinstance(part, RoundPlan)), None)


ProposalCounts = tuple[Sequence[Sequence[Sequence[float]]], Sequence[Sequence[Sequence[float]]]]
"""What a calibration has counted, lately more: how often a proposal was looked at and chosen, by the class of requests,
its depth and its rank."""


class RowResult(NamedTuple):
    """What a step gave one row: the new tokens, the last of them the bonus; none after a chunk that is not the last.

    finite is False if the target's logits were not; the request fails alone.

    logprobs: of each token, for a row that asks.
    prompt_logprobs: of the prompt tokens from the chunk's second on, and of the one after it, if it asks.
    ranks: of each accepted draft among the proposals after its parent, the draft's favourite 0.
    tree: that was verified, for a row that asks.
    num_nodes: of that tree, where a budget has cut it; else 0.
    experts: of the tokens that a chunk tells of, or that a round has committed, from 0 on, for a row that asks.
    """

    row: Row
    tokens: tuple[int, ...]
    finite: bool
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ranks: tuple[int, ...] = ()
    tree: VerifiedTree | None = None
    num_nodes: int = 0
    experts: TokenExperts | None = None


class ImportResult(NamedTuple):
    """intact: every checksum agrees, and the last chunk's record fits the request.
    root: of a last chunk; None if not.

    The root is the token after the prompt, the first that the request gets.
    """

    intact: bool
    root: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, in the plan's order.

    digest: of what the step came to, which is the same on every rank.
    proposals: of a round of an engine that learns a calibration, where shapes are chosen by it.
    rows: of a prefill, a round, or both, in this order.
    exports: each export's checksums, of the chunk on all ranks.
    imports: of imports.
    intact: of an offload, whether all that came from the host is what was saved.
    """

    rows: tuple[RowResult, ...] = ()
    digest: int = 0
    exports: tuple[tuple[int, ...], ...] = ()
    imports: tuple[ImportResult, ...] = ()
    proposals: ProposalCounts | None = None
    intact: bool = True


def parts_of_result(plan: StepPlan, result: StepResult) -> tuple[StepResult, ...]:
    """What each of `parts_of_plan` gave. Only a round has proposals."""
    if not isinstance(plan, MixedPlan):
        return (result,)
    first = len(plan.prefill.chunks)
    return StepResult(result.rows[:first]), StepResult(result.rows[first:], proposals=result.proposals)
