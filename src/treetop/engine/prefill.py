"""A prefill step: one chunk a row, K/V to the pages first, the first token of a prompt's last chunk sampled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.layer import CausalAttention, ChosenKeys, LayerKV
from treetop.attention.recurrent import ChunkRecurrence
from treetop.engine.features.feature import NewRoots, PromptLines
from treetop.engine.model_runner import ModelRunner, TargetInput
from treetop.engine.prompt_blocks import BlockLines
from treetop.engine.prompt_logprobs import PromptTokens, prompt_logprobs
from treetop.engine.recurrence import chunk_recurrence
from treetop.engine.routed_experts import keep_prompts
from treetop.kernels.kv import slots_of
from treetop.kernels.tree.rows import DraftState
from treetop.kernels.tree.tree import root_tree
from treetop.models.target import LastTokens, TargetOutput
from treetop.speculative.verify import choose, logits_for, path_logprobs
from treetop.types.layout import KVGroup, num_blocks
from treetop.types.messages import PrefillPlan
from treetop.types.phase import Phase
from treetop.types.sampling import MAX_LOGPROBS, SamplingMode
from treetop.types.tree import Accepted, PathLogprobs


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """One prefill step on the device.

    rows: [rows] int64.
    ends: [rows] int64, whose state changes: the row itself, or the dummy row where a line is not a chunk's last.
    offset: [rows] int64, tokens of the same row that other lines of the batch hold before these.
    tokens: [rows, n] int64, padded.
    query_len: [rows] int64, 0 for the dummy row.
    next_token: [rows] int64, the prompt token after the chunk; -1 for a prompt's last chunk.
    draft_rows: [rows] int64, the rows, but the dummy row for those that the draft has nothing of.
    max_kv_len: no extent is larger.
    exchanged: tokens that ranks with shared experts exchange, where these are more than the batch has.
    prompt: those of which log-probabilities are asked for.
    allowed: [rows, 1, words] int32, what may come first; see `process_reference`. None if any token may.
    ends_prompts: whether a line may end a prompt, whose first token is chosen then; else no logits are made, and no
        log-probabilities of a first token are asked for.
    num_drafting: lines, the first ones, that the draft may have to read, None for all; with none it does not run.
    num_ends: lines, the first ones, that end a chunk, None for all: of the others nothing is chosen or proposed, and
        their `ends` are the dummy row's.
    """

    rows: Tensor
    ends: Tensor
    offset: Tensor
    tokens: Tensor
    query_len: Tensor
    next_token: Tensor
    draft_rows: Tensor
    max_kv_len: int
    choice: SamplingMode
    exchanged: int = 0
    prompt: PromptTokens | None = None
    allowed: Tensor | None = None
    ends_prompts: bool = True
    num_drafting: int | None = None
    num_ends: int | None = None


def chunk_columns(plan: PrefillPlan, bucket: int) -> list[list[int]]:
    """A prefill's chunks as columns of integers: query_len and next_token of each row; place and id of each token."""
    chunks, width = plan.chunks, chunk_width(plan)
    padding = [0] * (bucket - len(chunks))
    return [
        [len(chunk.token_ids) for chunk in chunks] + padding,
        [-1 if chunk.next_token is None else chunk.next_token for chunk in chunks] + padding,
        [i * width + column for i, chunk in enumerate(chunks) for column in range(len(chunk.token_ids))],
        [token for chunk in chunks for token in chunk.token_ids],
    ]


def chunk_width(plan: PrefillPlan) -> int:
    return max((len(chunk.token_ids) for chunk in plan.chunks), default=1)


def make_batch(
    plan: PrefillPlan,
    row_lists: Tensor,
    columns: list[Tensor],
    prompt: list[Tensor],
    allowed: Tensor | None,
    bucket_for: Callable[[int], int],
) -> PrefillBatch:
    """row_lists: [2, bucket] int64, rows and draft rows. columns, prompt: those of `chunk_columns` and
    `prompt_columns`, on the device. bucket_for: lines of a batch of so many rows.
    """
    (rows, draft_rows), (query_len, next_token, place, ids) = row_lists, columns
    width = chunk_width(plan)
    max_kv_len = max((chunk.start + len(chunk.token_ids) for chunk in plan.chunks), default=1)
    tokens = rows.new_zeros(len(rows) * width).index_copy_(0, place, ids).view(len(rows), width)
    asked = PromptTokens(*prompt) if len(prompt[0]) else None
    sizes = max_kv_len, plan.choice, plan.min_batch_tokens
    ends = plan.choice is SamplingMode.LOGPROBS or any(chunk.next_token is None for chunk in plan.chunks)
    lines = rows, rows, torch.zeros_like(rows), tokens, query_len, next_token, draft_rows
    num_drafting = None
    if plan.no_draft and not plan.min_batch_tokens:  # else other ranks may wait for all
        drafting = len(plan.chunks) - len(plan.no_draft)
        num_drafting = bucket_for(drafting) if drafting else 0
    return PrefillBatch(*lines, *sizes, asked, allowed, ends, num_drafting)


def batch_of_blocks(plan: PrefillPlan, lines: BlockLines, max_kv_len: int, bucket: int) -> PrefillBatch:
    """Chunks in as many blocks as they take. bucket: rows that end one, padding included."""
    ends, num_drafting = any(chunk.next_token is None for chunk in plan.chunks), None
    if plan.no_draft:  # their chunks come last, and so do the blocks before the last ones, which come first
        drafting = plan.chunks[: len(plan.chunks) - len(plan.no_draft)]
        before = sum(num_blocks(len(chunk.token_ids), plan.block) - 1 for chunk in drafting)
        num_drafting = len(plan.chunks) + before if drafting else 0
    return PrefillBatch(
        *lines, max_kv_len, plan.choice, ends_prompts=ends, num_drafting=num_drafting,
        num_ends=min(bucket, len(lines.rows)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a chunk's tokens stand.

    positions: [rows, n], 0 where padded.
    valid: [rows, n] bool.
    kv_len: [rows].
    """

    positions: Tensor
    valid: Tensor
    kv_len: Tensor


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first new token of each row; after a chunk that is not a prompt's last it means nothing.

    token: [rows] int64.
    finite: [rows] bool.
    logprobs: of one column, if the batch asks for them.
    prompt: of the prompt tokens whose log-probabilities are asked for.
    """

    token: Tensor
    finite: Tensor
    logprobs: PathLogprobs | None
    prompt: PathLogprobs | None


def prefill(runner: ModelRunner, batch: PrefillBatch) -> FirstTokens:
    """Process one chunk a row."""
    begun = begin_prefill(runner, batch)
    last = _last_alone(runner, begun)
    output, logits = runner.run_target(replace(begun.given, last=last)), None
    if batch.ends_prompts:
        hidden = last_hidden(runner, begun, output) if last is None else output.hidden
        logits = logits_for(runner.target, hidden, batch.choice)
    return end_prefill(runner, begun, output, logits)


@dataclass(frozen=True, slots=True)
class BegunPrefill:
    """A prefill before the target's forward, and what it is given."""

    batch: PrefillBatch
    span: _Span
    given: TargetInput

    @property
    def last(self) -> Tensor:
        """Where each line's last token stands in it, [rows] int64."""
        return (self.batch.query_len - 1).clamp(min=0)

    @property
    def ends(self) -> int:
        """Lines, the first ones, that may end a chunk."""
        return len(self.batch.rows) if self.batch.num_ends is None else self.batch.num_ends


def begin_prefill(runner: ModelRunner, batch: PrefillBatch) -> BegunPrefill:
    """What the target is given of one chunk a row."""
    rows, query_len = batch.rows, batch.query_len
    start = runner.state.committed[rows] + batch.offset
    columns = torch.arange(batch.tokens.shape[1], device=rows.device)
    valid = columns < query_len[:, None]
    span = _Span(torch.where(valid, start[:, None] + columns, 0), valid, start + query_len)
    recurrence = chunk_recurrence(runner, rows, valid)
    attend = _attention(runner, runner.target_layers, runner.target_groups, batch, span, recurrence)
    return BegunPrefill(batch, span, TargetInput(rows, batch.tokens, span.positions, attend))


def _last_alone(runner: ModelRunner, begun: BegunPrefill) -> LastTokens | None:
    """Whose last hidden state is read; where no prompt ends one line stands in, and nobody reads it. None for all, as
    where log-probabilities of prompts or their experts are told, or adapters' products know the rows of all tokens.
    """
    if begun.batch.prompt is not None or runner.layout.experts is not None or runner.adapters is not None:
        return None
    return LastTokens(begun.last[: begun.ends if begun.batch.ends_prompts else 1], runner.ops)


def last_hidden(runner: ModelRunner, begun: BegunPrefill, output: TargetOutput) -> Tensor:
    """The target's state after the last token of each line that may end a chunk, [ends, 1, hidden]."""
    return runner.ops.pick(output.hidden[: begun.ends], begun.last[: begun.ends])[:, None]


def end_prefill(runner: ModelRunner, begun: BegunPrefill, output: TargetOutput, logits: Tensor | None) -> FirstTokens:
    """Sample first tokens, and have the draft read the chunks. output: of as many rows and tokens as the batch.

    logits: [ends, 1, vocab] of `last_hidden`; None where no prompt ends, of which nothing is proposed then either.
    """
    batch, span, ops, last = begun.batch, begun.span, runner.ops, begun.last[: begun.ends]
    rows, next_token, kv_len = (each[: begun.ends] for each in (batch.ends, batch.next_token, span.kv_len))
    keep_prompts(runner, output, batch.rows, span.positions, span.valid)
    first, finite, logprobs = next_token, torch.ones_like(rows, dtype=torch.bool), None
    if logits is not None:
        tree, accepted = root_tree(next_token), _one_column(rows)
        sampler, place = runner.state.sampler, (kv_len - 1)[:, None]
        chosen = choose(ops, logits, sampler, rows, place, tree, batch.choice, batch.allowed)
        ops.accept(chosen, tree, accepted, None)  # the root, whose choice is the bonus
        first, finite = accepted.bonus, accepted.finite
        if batch.choice is SamplingMode.LOGPROBS:
            logprobs = path_logprobs(ops, logits, chosen, accepted, min(MAX_LOGPROBS, logits.shape[2]))
    goes_on, draft = next_token >= 0, None
    following = torch.where(goes_on, next_token, first)
    prompt = PromptLines(batch.rows, span.positions, batch.tokens, span.valid)
    roots = NewRoots(batch.choice, rows, kv_len, following, -goes_on.to(torch.int64), prompt)
    runner.state.rooted(ops, roots)
    if runner.drafter is not None:
        count = len(batch.rows) if batch.num_drafting is None else batch.num_drafting
        if count:
            draft = _read_by_draft(runner, begun, output, following, logits is not None, count)
        else:
            draft = _no_proposals(runner, rows)
    ops.finish(runner.state.tables, rows, runner.layout.dummy_row, batch.offset[: begun.ends] + last, first, draft)
    asked = None if batch.prompt is None else prompt_logprobs(runner, output.hidden, batch.prompt)
    return FirstTokens(first, finite, logprobs, asked)


def _read_by_draft(
    runner: ModelRunner, begun: BegunPrefill, output: TargetOutput, following: Tensor, proposes: bool, count: int
) -> DraftState | None:
    """The draft reads the first `count` lines. following: [ends] int64, the token behind each that may end a chunk.
    proposes: it is to propose what comes next, which is nothing for the other lines.
    """
    batch, span, rows, last = begun.batch, begun.span, begun.batch.rows[:count], begun.last[:count]
    tokens, behind = batch.tokens[:count], torch.cat([following, batch.next_token[begun.ends :]])[:count]
    proposing = min(count, begun.ends)
    ends, following = batch.ends[:proposing], following[:proposing]
    shifted = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
    shifted = shifted.scatter(1, last[:, None], behind[:, None])
    drafts, positions = batch.draft_rows[:count] == rows, span.positions[:count]
    of_draft = _Span(positions, span.valid[:count] & drafts[:, None], span.kv_len[:count] * drafts)
    read = replace(batch, rows=batch.draft_rows[:count])
    attend = _attention(runner, runner.draft_layers, runner.draft_groups, read, of_draft)
    nothing = output.hidden.new_empty((*batch.tokens.shape, 0))  # a drafter may read none
    aux_hidden = torch.cat([stream[:count] for stream in (nothing, *output.aux_hidden)], dim=-1)
    # A line has the text of its row, if it ends no prompt, too.
    at = runner.extension(rows, last, tokens.shape[1], proposing if proposes else 1)
    runner.select_for_draft(rows, shifted.shape[1])
    assert runner.drafter is not None
    extended = runner.drafter.extend(shifted, aux_hidden, positions, at, attend)[:proposing]
    draft = runner.extended(ends, following, extended, runner.state.numbers["classes"][ends]) if proposes else None
    others = begun.ends - proposing
    if draft is None or not others:
        return draft
    return DraftState(*(F.pad(each, (0, 0, 0, others)) for each in (draft.tokens, draft.logprob, draft.hidden)))


def _no_proposals(runner: ModelRunner, rows: Tensor) -> DraftState | None:
    """In place of what former requests of rows [rows] left there, which would be told with this one's trees."""
    kept = runner.state.draft
    if kept is None:
        return None
    tables = kept.tokens, kept.logprob, kept.hidden
    return DraftState(*(table.new_zeros((len(rows), table.shape[1])) for table in tables))


def _one_column(rows: Tensor) -> Accepted:
    """Unwritten, for trees of a root alone. rows: [rows] int64."""
    column, wide = torch.empty_like(rows), torch.empty_like(rows)[:, None]
    finite = column.new_empty(len(rows), dtype=torch.bool)
    return Accepted(wide, column, torch.empty_like(wide), torch.empty_like(column), finite, torch.empty_like(wide))


def _attention(
    runner: ModelRunner,
    layers: Mapping[int, LayerKV],
    groups: list[KVGroup],
    batch: PrefillBatch,
    span: _Span,
    recurrence: ChunkRecurrence | None = None,
) -> CausalAttention:
    slots, plans = {}, {}
    for group in groups:
        table = runner.state.table_of(group.name).data
        slots[group.name] = slots_of(table, batch.rows, span.positions, span.valid, runner.layout.page_size)
        prefix = batch.rows, span.kv_len, batch.max_kv_len
        plans[group.name] = runner.plan(runner.metadata(Phase.PREFILL, group, prefix, span.positions))
    keys = ChosenKeys(runner.backend, runner.probes, Phase.PREFILL, batch.rows)
    return CausalAttention(keys, layers, slots, plans, _live(span.valid, batch.exchanged), recurrence)


def _live(valid: Tensor, exchanged: int) -> Tensor:
    """valid [rows, n], or as many tokens as are exchanged: those in excess of the batch's are nobody's."""
    return valid if exchanged <= valid.numel() else F.pad(valid.reshape(-1), (0, exchanged - valid.numel()))
