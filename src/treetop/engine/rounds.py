"""A decode round: three functions of device state, one after another.

DRAFT   grow the tree                                  writes buffers.tree, buffers.places
VERIFY  target forward, accept, commit the path         writes buffers.accepted, buffers.features, pages
EXTEND  rebuild the draft's K/V, propose, finish        writes pages and row state
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.attention.contract import Queries
from treetop.attention.phase import Attend
from treetop.engine.device import Device, Tail
from treetop.kernels.commit import Paths
from treetop.kernels.rows import DraftState, RowTables
from treetop.spec.draft import Level, grow_tree
from treetop.spec.round_ops import feature_nodes
from treetop.types.errors import CheckError
from treetop.types.ids import DRAFT
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import Choice


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What a captured round is made for. Everything else is data in buffers."""

    bucket: int
    shape: SpecShape
    choice: Choice


PhaseFunction = Callable[[Device, RoundKey, int], None]
"""(device, key, bound): bound is a host number no row's committed length exceeds."""


def draft_phase(device: Device, key: RoundKey, bound: int) -> None:
    """Grow each row's tree from the proposals stored with it."""
    buffers, shape, ops, phase = device.buffers, key.shape, device.round_ops, Phase.DRAFT
    rows, k = buffers.rows[: key.bucket], key.shape.topk
    tree, places = buffers.tree_of(key.bucket, shape), buffers.places_of(key.bucket, shape)
    tables, at = _tables(device, rows, bound, k)
    roots = ops.start(tables, at, shape, tree, places)
    if shape.num_steps == 0:
        return
    assert device.head is not None
    prefix = device.begin(phase, DRAFT, rows, places.committed, bound)

    def attend(level: Level) -> Attend:
        queries, tail = level_tail(level)
        plans = device.plan({DRAFT: prefix}, {DRAFT: queries})
        return device.tail_attention(device.draft_layers, buffers.draft_tails, plans, tail)

    ops.select(grow_tree(device.head, roots, ops, attend), tree, places)


def level_tail(level: Level) -> tuple[Queries, Tail]:
    """What a draft level asks, and its tail: k columns for each level up to its own, which come last (sgl-27360)."""
    k, width = level.mask.shape[1:]
    queries = Queries(level.positions, level.all_positions[:, :width], level.mask)
    return queries, Tail(Phase.DRAFT, width - k, width)


def verify_phase(device: Device, key: RoundKey, bound: int) -> None:
    """One target forward over the trees; accept each row's path, commit its K/V and keep its features."""
    buffers, shape, ops, phase = device.buffers, key.shape, device.round_ops, Phase.VERIFY
    rows, tree = buffers.rows[: key.bucket], buffers.tree_of(key.bucket, key.shape)
    places, accepted = buffers.places_of(key.bucket, shape), buffers.accepted_of(key.bucket, shape)
    tokens = device.probes.index(tree.tokens, 0, device.target.spec.vocab_size, "tree_token", phase, rows)
    prefixes, queries = {}, {}
    for group in device.target_groups:
        prefixes[group.name] = device.begin(phase, group.name, rows, places.committed, bound)
        queries[group.name] = Queries(places.nodes, places.nodes, tree.mask, group.window)
    tail = Tail(phase, 0, shape.num_draft_tokens)
    plans = device.plan(prefixes, queries)
    attend = device.tail_attention(device.target_layers, buffers.verify_tails, plans, tail)
    output = device.target.forward(tokens, places.nodes, attend)
    logits = device.target.logits(output.hidden)
    if key.choice is Choice.GREEDY:
        chosen = ops.greedy(logits)
    else:
        chosen = device.choose(logits, rows, places.nodes, key.choice)
    device.accept(chosen, tree, accepted)
    device.commit(buffers.verify_tails, _paths(device, key, accepted.path))
    if device.head is None:
        ops.finish(device.state.tables, rows, device.layout.dummy_row, accepted, None)
    else:
        _probe_feature_nodes(device, rows, accepted.path, shape.num_draft_tokens)
        ops.features(buffers.features_of(key.bucket, shape), output.features, accepted.path)


def extend_phase(device: Device, key: RoundKey, bound: int) -> None:
    """Rebuild the draft's K/V of the accepted tokens from the target's features, propose what follows, and finish.

    S + 1 columns a row, causal; those past the path write to the null page.
    """
    assert device.head is not None
    buffers, shape, ops, phase = device.buffers, key.shape, device.round_ops, Phase.EXTEND
    width, rows = shape.commit_width, buffers.rows[: key.bucket]
    accepted, places = buffers.accepted_of(key.bucket, shape), buffers.places_of(key.bucket, shape)
    prefix = device.begin(phase, DRAFT, rows, places.committed, bound)
    causal = ops.extend_mask(width, rows.device).expand(key.bucket, -1, -1)
    plans = device.plan({DRAFT: prefix}, {DRAFT: Queries(places.path, places.path, causal)})
    attend = device.tail_attention(device.draft_layers, buffers.extend_tails, plans, Tail(phase, 0, width))
    fused = device.head.fuse(buffers.features_of(key.bucket, shape))
    device.probes.nan(fused, "features", phase, rows)
    hidden = device.head.forward(accepted.tokens, fused, places.path, attend)
    device.commit(buffers.extend_tails, _paths(device, key, None))
    draft = device.propose(hidden, accepted.accept_len)
    ops.finish(device.state.tables, rows, device.layout.dummy_row, accepted, draft)


ROUND: dict[Phase, PhaseFunction] = {
    Phase.DRAFT: draft_phase,
    Phase.VERIFY: verify_phase,
    Phase.EXTEND: extend_phase,
}


def phases_of(device: Device) -> dict[Phase, PhaseFunction]:
    """The phases of a round on this device, in order; without a head there is nothing to extend."""
    return {phase: run for phase, run in ROUND.items() if device.head is not None or phase is not Phase.EXTEND}


def run_phases(device: Device, key: RoundKey, bound: int) -> None:
    """A whole round, which is what a graph captures."""
    for run in phases_of(device).values():
        run(device, key, bound)


def _paths(device: Device, key: RoundKey, node: Tensor | None) -> Paths:
    """What the rows of a round commit. node: the tail entries of the columns, in order if None."""
    buffers, width = device.buffers, key.shape.commit_width
    places, accepted = buffers.places_of(key.bucket, key.shape), buffers.accepted_of(key.bucket, key.shape)
    rows = buffers.rows[: key.bucket]
    return Paths(rows, places.committed, accepted.accept_len, width, node, device.layout.dummy_row)


def _tables(device: Device, rows: Tensor, bound: int, k: int) -> tuple[RowTables, Tensor]:
    """The tables that trees of `k` branches start from, and where the batch's rows lie in them.

    With probes on they are copies of the batch's own rows, probed, so that a start in one launch reads nothing that a
    probe redirects.
    """
    state, probes, phase, vocab = device.state, device.probes, Phase.DRAFT, device.target.spec.vocab_size
    if state.draft is not None and state.draft.tokens.shape[1] < k:
        raise CheckError(f"proposals of a row: need {k}, have {state.draft.tokens.shape[1]} = max_topk")
    if not probes.enabled:
        return state.tables, rows
    root = probes.index(state.root[rows], 0, vocab, "root_token", phase, rows)
    committed = probes.index(state.committed[rows], 0, bound + 1, "committed", phase, rows)
    draft = None
    if state.draft is not None:
        tokens, logprob, hidden = state.draft.tokens[rows, :k], state.draft.logprob[rows, :k], state.draft.hidden[rows]
        tokens = probes.index(tokens, 0, vocab, "topk_token", phase, rows)
        probes.nan(logprob, "topk_logprob", phase, rows)
        probes.nan(hidden, "hidden", phase, rows)
        draft = DraftState(tokens, logprob, hidden)
    return RowTables(committed, root, draft), torch.arange(rows.shape[0], device=rows.device)


def _probe_feature_nodes(device: Device, rows: Tensor, path: Tensor, num_nodes: int) -> None:
    """Level 2: the features that extend is given are nodes of their own row's tree."""
    if device.probes.enabled:
        nodes = feature_nodes(path, num_nodes).view(path.shape)
        first = torch.arange(path.shape[0], device=path.device)[:, None] * num_nodes
        device.probes.index(nodes, first, first + num_nodes, "feature_node", Phase.VERIFY, rows)
