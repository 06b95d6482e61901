"""A decode round: three functions of device state, one after another.

DRAFT   grow the tree                                  writes buffers.tree, buffers.places
VERIFY  target forward, accept, commit the path         writes buffers.accepted, buffers.features, pages
EXTEND  rebuild the draft's K/V, propose, finish        writes pages and row state
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend, TailColumns
from treetop.drafts.protocol import Extension
from treetop.engine.model_runner import ModelRunner
from treetop.kernels.commit import Paths, feature_nodes
from treetop.kernels.row_text import remember
from treetop.kernels.rows import DraftState, RowTables
from treetop.speculative.draft import Level, grow_tree
from treetop.speculative.verify import choose, logits_for, path_logprobs, withhold_drafts
from treetop.types.errors import CheckError
from treetop.types.ids import GroupName
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import Choice
from treetop.types.tree import copy_into


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What a captured round is made for. Everything else is data in buffers."""

    bucket: int
    shape: SpecShape
    choice: Choice


PhaseFunction = Callable[[ModelRunner, RoundKey, int], None]
"""(runner, key, bound): bound is a host number no row's committed length exceeds."""


def draft_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """Grow each row's tree from the proposals stored with it."""
    buffers, shape, ops, phase = runner.buffers, key.shape, runner.ops, Phase.DRAFT
    rows, k = buffers.rows[: key.bucket], key.shape.topk
    tree, places = buffers.tree_of(key.bucket, shape), buffers.places_of(key.bucket, shape)
    tables, at = _tables_of_roots(runner, rows, max_kv_len, k)
    roots = ops.start(tables, at, shape, tree, places, buffers.identity[:k, :k])
    if shape.num_steps == 0:
        return
    assert runner.drafter is not None
    prefix, begun = (rows, places.committed, max_kv_len), dict[GroupName, Any]()

    def attend(level: Level) -> Attend:
        tail_positions, mask, columns = level_tail(level)
        plans = {}
        for g in runner.draft_groups:
            metadata = runner.metadata(phase, g, prefix, level.positions, tail_positions, mask)
            plans[g.name] = runner.plan(metadata, begun)
        return runner.tail_attention(phase, runner.draft_layers, buffers.draft_tails, plans, columns, shape)

    ops.select(grow_tree(runner.drafter, roots, ops, attend), tree, places)


def level_tail(level: Level) -> tuple[Tensor, Tensor, TailColumns]:
    """A draft level's tail: k columns for each level up to its own, which come last (sgl-27360).

    Returns its positions [rows, width], its mask [rows, k, width] and its columns.
    """
    rows, k, width = level.mask.shape
    return level.all_positions[:, :width], level.mask, TailColumns(rows, width - k, k, width)


def verify_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """One target forward over the trees; accept each row's path, commit its K/V and keep its features."""
    buffers, shape, ops, phase = runner.buffers, key.shape, runner.ops, Phase.VERIFY
    rows, tree = buffers.rows[: key.bucket], buffers.tree_of(key.bucket, key.shape)
    places, accepted = buffers.places_of(key.bucket, shape), buffers.accepted_of(key.bucket, shape)
    tokens = runner.probes.index(tree.tokens, 0, runner.target.config.vocab_size, "tree_token", phase, rows)
    prefix, plans = (rows, places.committed, max_kv_len), {}
    for g in runner.target_groups:
        plans[g.name] = runner.plan(runner.metadata(phase, g, prefix, places.nodes, places.nodes, tree.mask))
    columns = TailColumns(key.bucket, 0, shape.num_draft_tokens, shape.num_draft_tokens)
    attend = runner.tail_attention(phase, runner.target_layers, buffers.verify_tails, plans, columns, shape)
    output = runner.target.forward(tokens, places.nodes, attend)
    logits = logits_for(runner.target, output.hidden, key.choice)
    chosen = choose(ops, logits, runner.state.sampler, rows, places.nodes, tree, key.choice)
    withhold_drafts(tree, runner.state.processors, rows, key.choice)
    ops.accept(chosen, tree, accepted, runner.forced(shape))
    if key.choice is Choice.LOGPROBS:
        found = buffers.logprobs_of(key.bucket, shape)
        copy_into(found, path_logprobs(ops, logits, accepted, found.ids.shape[2]))
    runner.count(rows, key.choice, accepted.tokens, accepted.accept_len)
    runner.commit(buffers.verify_tails, _paths(runner, key, accepted.path))
    if runner.drafter is None:
        ops.finish(runner.state.tables, rows, runner.layout.dummy_row, accepted.accept_len, accepted.bonus, None)
    elif output.aux_hidden:
        _probe_feature_nodes(runner, rows, accepted.path, shape.num_draft_tokens)
        ops.path_aux_hidden(buffers.aux_hidden_of(key.bucket, shape), output.aux_hidden, accepted.path)


def extend_phase(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """Rebuild the draft's K/V of the accepted tokens from the target's features, propose what follows, and finish.

    S + 1 columns a row, causal; those past the path write to the null page.
    """
    assert runner.drafter is not None
    buffers, shape, ops, phase = runner.buffers, key.shape, runner.ops, Phase.EXTEND
    width, rows = shape.commit_width, buffers.rows[: key.bucket]
    accepted, places = buffers.accepted_of(key.bucket, shape), buffers.places_of(key.bucket, shape)
    prefix, plans = (rows, places.committed, max_kv_len), {}
    causal = buffers.causal[:width, :width].expand(key.bucket, -1, -1)
    for g in runner.draft_groups:
        plans[g.name] = runner.plan(runner.metadata(phase, g, prefix, places.path, places.path, causal))
    columns = TailColumns(key.bucket, 0, width, width)
    attend = runner.tail_attention(phase, runner.draft_layers, buffers.extend_tails, plans, columns, shape)
    aux_hidden = buffers.aux_hidden_of(key.bucket, shape)
    runner.probes.nan(aux_hidden, "features", phase, rows)
    text, paths = runner.state.text, _paths(runner, key, None)
    if text is not None:
        remember(text, rows, places.path + 1, accepted.tokens, paths.kept)
    at = Extension(rows, accepted.accept_len, text)
    draft_state = runner.drafter.extend(accepted.tokens, aux_hidden, places.path, at, attend)
    runner.commit(buffers.extend_tails, paths)
    draft = runner.propose(draft_state)
    ops.finish(runner.state.tables, rows, runner.layout.dummy_row, accepted.accept_len, accepted.bonus, draft)


ROUND: dict[Phase, PhaseFunction] = {
    Phase.DRAFT: draft_phase,
    Phase.VERIFY: verify_phase,
    Phase.EXTEND: extend_phase,
}


def phases_of(runner: ModelRunner) -> dict[Phase, PhaseFunction]:
    """The phases of a round on this device, in order; without a drafter there is nothing to extend."""
    return {phase: run for phase, run in ROUND.items() if runner.drafter is not None or phase is not Phase.EXTEND}


def run_phases(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> None:
    """A whole round, which is what a graph captures."""
    for run in phases_of(runner).values():
        run(runner, key, max_kv_len)


def _paths(runner: ModelRunner, key: RoundKey, node: Tensor | None) -> Paths:
    """What the rows of a round commit. node: the tail entries of the columns, in order if None."""
    buffers, width = runner.buffers, key.shape.commit_width
    places, accepted = buffers.places_of(key.bucket, key.shape), buffers.accepted_of(key.bucket, key.shape)
    rows = buffers.rows[: key.bucket]
    return Paths(rows, places.committed, accepted.accept_len, width, node, runner.layout.dummy_row)


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
    return RowTables(committed, root, draft), torch.arange(rows.shape[0], device=rows.device)


def _probe_feature_nodes(runner: ModelRunner, rows: Tensor, path: Tensor, num_nodes: int) -> None:
    """Level 2: the features that extend is given are nodes of their own row's tree."""
    if runner.probes.enabled:
        nodes = feature_nodes(path, num_nodes).view(path.shape)
        first = torch.arange(path.shape[0], device=path.device)[:, None] * num_nodes
        runner.probes.index(nodes, first, first + num_nodes, "feature_node", Phase.VERIFY, rows)
