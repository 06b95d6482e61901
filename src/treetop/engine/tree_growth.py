"""DRAFT: trees grow from the proposals stored with rows, level by level, behind a drafter's block if it has one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend, TailColumns
from treetop.drafts.protocol import DraftBlock, Grower, Roots
from treetop.engine.model_runner import ModelRunner, Prefix
from treetop.kernels.tree.rows import DraftState, RowTables, store_draft
from treetop.speculative.draft import Level, grow_tree
from treetop.speculative.forced import Forced, force_roots, is_free
from treetop.types.errors import CheckError
from treetop.types.ids import GroupName
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase


def grow_trees(
    runner: ModelRunner, rows: Tensor, shape: SpecShape, max_kv_len: int, forced: Tensor | None = None
) -> None:
    """Grow each row's tree from the proposals stored with it. rows: [rows] int64. max_kv_len: as in `PhaseFunction`.

    forced: what must follow each root, as `Forced` has it; None if nothing is known of any.
    """
    buffers, ops, bucket, k = runner.buffers, runner.ops, len(rows), shape.topk
    prefix = runner.draft_prefix(bucket, max_kv_len) if shape.num_steps else None
    grower, lines = (None, None) if prefix is None else _grower(runner, rows, shape, prefix, forced)
    tree, places = buffers.tree_of(bucket, shape), buffers.places_of(bucket, shape)
    tables, places_of_rows = _tables_of_roots(runner, rows, max_kv_len, k)
    growth = buffers.growth_of(bucket, shape)
    frontier = ops.start(tables, places_of_rows, growth, tree, places, buffers.identity[:k, :k])
    if grower is not None and prefix is not None:
        attend = _level_attention(runner, prefix, places.committed, shape)
        runner.select_for_draft(rows, k)
        grow_tree(grower, growth, frontier, ops, attend, lines, runner.layout.lead)
        ops.select(growth, tree, places)
    flat = buffers.flat_of(bucket, shape)
    if flat is not None:
        ops.trim(tree, places, growth.chosen, buffers.draft_rows[:bucket], runner.layout.dummy_row, flat)


def _grower(
    runner: ModelRunner, rows: Tensor, shape: SpecShape, prefix: Prefix, forced: Tensor | None
) -> tuple[Grower, Any]:
    """What trees grow by, and the lines of its block, once rows keep the proposals that are to grow."""
    drafter, draft, simulation = runner.drafter, runner.state.draft, runner.simulation
    assert drafter is not None
    assert draft is not None
    lines = None if drafter.block is None else _opened(runner, drafter.block, rows, shape, prefix)
    grower: Grower = drafter
    if simulation is not None:
        grower = simulation.grower(drafter, draft.logprob, shape.topk, runner.ops, runner.drawn_at(rows))
    if forced is not None and not is_free(forced[:, 0]):  # a chain is known from its first on
        force_roots(draft, rows, rows != runner.layout.dummy_row, shape.topk, forced[:, 0])
        grower = Forced(grower, forced)
    return grower, lines


def _level_attention(
    runner: ModelRunner, prefix: Prefix, committed: Tensor, shape: SpecShape
) -> Callable[[Level], Attend]:
    """The attention of each level. committed: [rows] int64, where rows stand."""
    phase, begun = Phase.DRAFT, dict[GroupName, Any]()
    if runner.groups_read:
        beside = runner.committed_attention(phase, prefix, shape.topk)
        return lambda _: beside

    def attend(level: Level) -> Attend:
        tail_positions, mask, columns = level_tail(level, committed, runner.layout.lead)
        plans = {}
        for g in runner.draft_groups:
            metadata = runner.metadata(phase, g, prefix, level.positions, tail_positions, mask)
            plans[g.name] = runner.plan(metadata, begun)
        return runner.tail_attention(phase, runner.draft_layers, runner.buffers.draft_tails, plans, columns, shape)

    return attend


def _opened(runner: ModelRunner, block: DraftBlock, rows: Tensor, shape: SpecShape, prefix: Prefix) -> Any:
    """The drafter's block, from the roots on; rows keep what is proposed after these. Returns the block's lines."""
    state, buffers, width = runner.state, runner.buffers, runner.layout.block
    committed = state.committed[rows]
    root = runner.probes.index(state.root[rows], 0, runner.target.config.vocab_size, "root_token", Phase.DRAFT, rows)
    attend: Attend
    if runner.groups_read:
        attend = runner.committed_attention(Phase.DRAFT, prefix, width)
    else:
        seen_from = block_positions(committed, width, runner.anchored)
        plans = {}
        for g in runner.draft_groups:
            mask = buffers.blocks[g.name].expand(len(rows), -1, -1)
            plans[g.name] = runner.plan(runner.metadata(Phase.DRAFT, g, prefix, seen_from, seen_from, mask))
        columns, layers = TailColumns(len(rows), 0, width, width), runner.draft_layers
        attend = runner.tail_attention(Phase.DRAFT, layers, buffers.draft_tails, plans, columns, shape)
    assert state.draft is not None
    runner.select_for_draft(rows, width)
    opened = block.open(Roots(root, committed, state.draft.hidden[rows], shape.num_steps), attend)
    draft = runner.propose(root, opened.state, state.numbers["classes"][rows], opened.lines)
    store_draft(state.draft, rows, rows != runner.layout.dummy_row, draft)
    return opened.lines


def block_positions(committed: Tensor, width: int, anchored: bool) -> Tensor:
    """Where windows of a block's queries are counted from, [rows, width]: each one's own position, or the root's."""
    step = torch.arange(width, device=committed.device)
    return committed[:, None] + (torch.zeros_like(step) if anchored else step)


def level_tail(level: Level, committed: Tensor, lead: int) -> tuple[Tensor, Tensor, TailColumns]:
    """A draft level's tail: k columns for each level up to its own, which come last (sgl-27360).

    lead: columns before them, of the drafter's block from position `committed` [rows] on, which all nodes see. Returns
    the tail's positions [rows, width], its mask [rows, k, width] and its columns.
    """
    rows, k, width = level.mask.shape
    positions, mask = level.all_positions[:, :width], level.mask
    if lead:
        before = committed[:, None] + torch.arange(lead, device=committed.device)
        positions = torch.cat([before, positions], dim=1)
        mask = torch.cat([mask.new_ones((rows, k, lead)), mask], dim=2)
        width += lead
    return positions, mask, TailColumns(rows, width - k, k, width)


def _tables_of_roots(runner: ModelRunner, rows: Tensor, max_kv_len: int, k: int) -> tuple[RowTables, Tensor]:
    """The tables that trees of `k` branches start from, and where the batch's rows lie in them.

    With probes on they are copies of the batch's own rows, probed, so that a start in one launch reads nothing that a
    probe redirects.
    """
    state, probes, phase, vocab = runner.state, runner.probes, Phase.DRAFT, runner.target.config.vocab_size
    if state.draft is not None and state.draft.tokens.shape[1] < k:
        raise CheckError(f"proposals of a row: need {k}, have {state.draft.tokens.shape[1]} = max_topk")
    if not probes.enabled:
        return state.tables, rows
    root = probes.index(state.root[rows], 0, vocab, "root_token", phase, rows)
    committed = probes.index(state.committed[rows], 0, max_kv_len + 1, "committed", phase, rows)
    draft = None
    if state.draft is not None:
        tokens, logprob, hidden = state.draft.tokens[rows, :k], state.draft.logprob[rows, :k], state.draft.hidden[rows]
        tokens = probes.index(tokens, 0, vocab, "topk_token", phase, rows)
        probes.nan(logprob, "topk_logprob", phase, rows)
        probes.nan(hidden, "hidden", phase, rows)
        draft = DraftState(tokens, logprob, hidden)
    classes, places = state.numbers["classes"][rows], torch.arange(rows.shape[0], device=rows.device)
    return RowTables(committed, root, classes, draft), places
