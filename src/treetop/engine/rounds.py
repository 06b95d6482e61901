"""A decode round: three functions of device state, each the unit that a graph captures.

DRAFT   grow the tree                                  writes buffers.tree
VERIFY  target forward, accept, commit the path         writes buffers.accepted, buffers.features, pages
EXTEND  rebuild the draft's K/V, propose, finish        writes pages and row state
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.attention.contract import Queries
from treetop.attention.phase import Attend
from treetop.engine.buffers import copy_into
from treetop.engine.device import Device, Tail
from treetop.kernels.tree import root_tree
from treetop.models.eagle3 import Proposal
from treetop.spec.draft import Growth, Level, Seed, grow_tree
from treetop.spec.verify import accept, force
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
    rows, shape, k = device.buffers.rows[: key.bucket], key.shape, key.shape.topk
    state, probes, phase = device.state, device.probes, Phase.DRAFT
    root = probes.index(state.root[rows], 0, device.target.spec.vocab_size, "root_token", phase, rows)
    committed = probes.index(state.committed[rows], 0, bound + 1, "committed", phase, rows)
    if device.head is None or state.draft is None:
        copy_into(device.buffers.tree_of(key.bucket, shape), root_tree(root))
        return
    proposal = Proposal(state.draft.tokens[rows, :k], state.draft.logprob[rows, :k])
    tokens = probes.index(proposal.tokens, 0, device.target.spec.vocab_size, "topk_token", phase, rows)
    probes.nan(proposal.logprob, "topk_logprob", phase, rows)
    probes.nan(state.draft.hidden[rows], "hidden", phase, rows)
    seed = Seed(root, committed, Proposal(tokens, proposal.logprob), state.draft.hidden[rows])
    prefix = device.begin(phase, DRAFT, rows, committed, bound)

    def attend(level: Level) -> Attend:
        width = device.pure.draft_tail_width(level.index, shape)
        ahead = torch.arange(width, device=rows.device) // k  # a node of level i stands i positions on
        mask = F.pad(level.mask, (0, width - level.mask.shape[2]))
        plans = device.plan({DRAFT: prefix}, {DRAFT: Queries(level.positions, committed[:, None] + ahead, mask)})
        tail = Tail(phase, level.index * k, width)
        return device.tail_attention(device.draft_layers, device.buffers.draft_tails, plans, tail)

    growth = Growth(attend, device.pure.draft_positions, device.pure.next_level_mask)
    copy_into(device.buffers.tree_of(key.bucket, shape), grow_tree(device.head, seed, shape, growth))


def verify_phase(device: Device, key: RoundKey, bound: int) -> None:
    """One target forward over the trees; accept each row's path and commit its K/V."""
    buffers, shape, phase = device.buffers, key.shape, Phase.VERIFY
    rows, tree = buffers.rows[: key.bucket], buffers.tree_of(key.bucket, key.shape)
    committed = device.state.committed[rows]
    tokens = device.probes.index(tree.tokens, 0, device.target.spec.vocab_size, "tree_token", phase, rows)
    positions = committed[:, None] + tree.depth
    prefixes, queries = {}, {}
    for group in device.target_groups:
        prefixes[group.name] = device.begin(phase, group.name, rows, committed, bound)
        queries[group.name] = Queries(positions, positions, tree.mask, group.window)
    tail = Tail(phase, 0, shape.num_draft_tokens)
    plans = device.plan(prefixes, queries)
    attend = device.tail_attention(device.target_layers, buffers.verify_tails, plans, tail)
    output = device.target.forward(tokens, positions, attend)
    choice, finite = device.choose(device.target.logits(output.hidden), rows, positions + 1, key.choice)
    forced = device.simulate_accept_length
    if forced is None or shape.num_steps == 0:
        accepted = accept(tree, choice, finite, shape.commit_width)
    else:
        accepted = force(choice, finite, forced - 1, shape.commit_width)
    copy_into(buffers.accepted_of(key.bucket, shape), accepted)
    for buffer, feature in zip(buffers.features_of(key.bucket, shape), output.features, strict=True):
        buffer.copy_(feature)
    device.commit(buffers.verify_tails, rows, committed, accepted.path, _kept(device, rows, accepted.accept_len, shape))
    if device.head is None:
        _finish(device, rows, accepted.accept_len, accepted.bonus, None)


def extend_phase(device: Device, key: RoundKey, bound: int) -> None:
    """Rebuild the draft's K/V of the accepted tokens from the target's features, propose what follows, and finish.

    S + 1 columns a row, causal; those past the path write to the null page.
    """
    assert device.head is not None
    buffers, shape, phase = device.buffers, key.shape, Phase.EXTEND
    width, rows = shape.commit_width, buffers.rows[: key.bucket]
    accepted = buffers.accepted_of(key.bucket, shape)
    committed = device.state.committed[rows]
    columns = torch.arange(width, device=rows.device)
    positions = committed[:, None] + columns
    prefix = device.begin(phase, DRAFT, rows, device.pure.extend_extent(committed, width), bound)
    causal = device.pure.extend_mask(width, rows.device).expand(key.bucket, -1, -1)
    plans = device.plan({DRAFT: prefix}, {DRAFT: Queries(positions, positions, causal)})
    attend = device.tail_attention(device.draft_layers, buffers.extend_tails, plans, Tail(phase, 0, width))
    fused = device.head.fuse(_path_features(device, key, accepted.path))
    device.probes.nan(fused, "features", phase, rows)
    hidden = device.head.forward(accepted.tokens, fused, positions, attend)
    kept = _kept(device, rows, accepted.accept_len, shape)
    device.commit(buffers.extend_tails, rows, committed, columns.expand(key.bucket, -1), kept)
    draft = device.propose(hidden, accepted.accept_len)
    _finish(device, rows, accepted.accept_len, accepted.bonus, draft)


ROUND: dict[Phase, PhaseFunction] = {
    Phase.DRAFT: draft_phase,
    Phase.VERIFY: verify_phase,
    Phase.EXTEND: extend_phase,
}


def phases_of(device: Device) -> dict[Phase, PhaseFunction]:
    """The phases of a round on this device, in order; without a head there is nothing to extend."""
    return {phase: run for phase, run in ROUND.items() if device.head is not None or phase is not Phase.EXTEND}


def _path_features(device: Device, key: RoundKey, path: Tensor) -> tuple[Tensor, ...]:
    """Features of each path's nodes: [rows, S + 1, hidden] of each auxiliary layer."""
    num_nodes, rows = key.shape.num_draft_tokens, device.buffers.rows[: key.bucket]
    nodes = device.pure.feature_nodes(path, num_nodes).view(path.shape)
    first = torch.arange(key.bucket, device=path.device)[:, None] * num_nodes
    nodes = device.probes.index(nodes, first, first + num_nodes, "feature_node", Phase.EXTEND, rows).reshape(-1)
    features = device.buffers.features_of(key.bucket, key.shape)
    return tuple(f.reshape(-1, f.shape[2]).index_select(0, nodes).view(*path.shape, -1) for f in features)


def _kept(device: Device, rows: Tensor, accept_len: Tensor, shape: SpecShape) -> Tensor:
    """Columns of a live row's accepted path, root included. Returns [rows, S + 1] bool."""
    column = torch.arange(shape.commit_width, device=rows.device)
    return (column <= accept_len[:, None]) & (rows != device.layout.dummy_row)[:, None]


def _finish(
    device: Device, rows: Tensor, accept_len: Tensor, bonus: Tensor, draft: tuple[Proposal, Tensor] | None
) -> None:
    device.state.finish(rows, rows != device.layout.dummy_row, accept_len + 1, bonus, draft)
