"""The phases of a step, as functions of device state. Every shape is a bucket's; the batch is only a row list.

prefill:  target forward in the pages -> choose the first token -> draft forward in the pages -> finish
round:    grow the tree -> verify it -> commit the path -> draft extend -> finish
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetop.attention.contract import AttentionBackend, Queries, TableView
from treetop.attention.phase import Attend, CausalAttention, LayerKV, TailAttention
from treetop.cache.pool import KVPool
from treetop.engine.state import RowState, TailBuffers
from treetop.kernels.kv import commit_tail, slots_of
from treetop.kernels.tree import root_tree
from treetop.models.eagle3 import Eagle3Head, Proposal
from treetop.models.llama import Llama
from treetop.spec.draft import Level, Seed, grow_tree
from treetop.spec.verify import accept, greedy_choice, sampled_choice
from treetop.types.ids import DRAFT, GroupName
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.sampling import Choice
from treetop.types.tree import Accepted, DraftTree

Prefixes = Mapping[GroupName, Any]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """One prefill step on the device.

    rows: [rows] int64. tokens: [rows, n] int64, padded. query_len: [rows] int64, 0 for the dummy row. next_token:
    [rows] int64, the prompt token after the chunk; -1 for a prompt's last chunk. bound: no extent is larger.
    """

    rows: Tensor
    tokens: Tensor
    query_len: Tensor
    next_token: Tensor
    bound: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class RoundBatch:
    """One round on the device. rows, committed: [bucket] int64. prefixes: group -> the backend's view of the prefix."""

    rows: Tensor
    committed: Tensor
    prefixes: Prefixes
    shape: SpecShape
    choice: Choice


@dataclass(frozen=True, slots=True)
class Runner:
    """Models, memory and a backend, and the two things they do together."""

    layout: Layout
    target: Llama
    head: Eagle3Head | None
    backend: AttentionBackend[Any, Any]
    pools: dict[GroupName, KVPool]
    state: RowState
    tails: TailBuffers
    target_layers: list[LayerKV]
    draft_layers: list[LayerKV]

    # ---------------------------------------------------------------- a decode round

    def round(self, rows: Tensor, shape: SpecShape, bound: int, choice: Choice) -> tuple[DraftTree, Accepted]:
        """One round of `rows` [bucket] int64, padded with the dummy row. Every phase sees the same committed prefix."""
        live = rows != self.layout.dummy_row
        committed = self.state.committed[rows]
        prefixes = {name: self._begin(name, rows, committed, bound) for name in self.layout.token_groups}
        batch = RoundBatch(rows, committed, prefixes, shape, choice)
        tree = self._draft(batch)
        accepted, features = self._verify(batch, tree)
        kept = torch.arange(shape.commit_width, device=rows.device) <= accepted.accept_len[:, None]
        kept = kept & live[:, None]
        self._commit(self.tails.verify, batch, accepted.path, kept)
        draft = None
        if self.head is not None:
            draft = self._extend(batch, accepted, features, kept)
        self.state.finish(rows, live, accepted.accept_len + 1, accepted.bonus, draft)
        return tree, accepted

    def _draft(self, batch: RoundBatch) -> DraftTree:
        rows, committed, k = batch.rows, batch.committed, batch.shape.topk
        root = self.state.root[rows]
        if self.head is None or self.state.draft is None:
            return root_tree(root)
        state = self.state.draft
        proposal = Proposal(state.tokens[rows, :k], state.logprob[rows, :k])
        seed = Seed(root, committed, proposal, state.hidden[rows])

        def attend(level: Level) -> Attend:
            width = (level.index + 1) * k
            ahead = torch.arange(width, device=rows.device) // k  # a node of level i stands i positions on
            queries = {DRAFT: Queries(level.positions, committed[:, None] + ahead, level.mask)}
            return self._tail_attention(self.draft_layers, self.tails.draft, queries, batch.prefixes, level.index * k)

        return grow_tree(self.head, seed, batch.shape, attend)

    def _verify(self, batch: RoundBatch, tree: DraftTree) -> tuple[Accepted, tuple[Tensor, ...]]:
        """One target forward over the trees. Returns the accepted paths and the features of every node."""
        positions = batch.committed[:, None] + tree.depth
        groups = {place.group for place in self.target_layers}
        queries = {name: Queries(positions, positions, tree.mask, self.layout.group(name).window) for name in groups}
        attend = self._tail_attention(self.target_layers, self.tails.verify, queries, batch.prefixes, 0)
        output = self.target.forward(tree.tokens, positions, attend)
        logits = self.target.logits(output.hidden)
        choice, finite = self._choose(logits, batch.rows, positions + 1, batch.choice)
        return accept(tree, choice, finite, batch.shape.commit_width), output.features

    def _extend(
        self, batch: RoundBatch, accepted: Accepted, features: tuple[Tensor, ...], kept: Tensor
    ) -> tuple[Proposal, Tensor]:
        """Rebuild the draft's K/V of the accepted tokens from the target's features, and propose what follows.

        S + 1 columns a row, causal; those past the path write to the null page.
        """
        assert self.head is not None
        num_rows, width = accepted.path.shape
        columns = torch.arange(width, device=kept.device)
        positions = batch.committed[:, None] + columns
        causal = (columns[:, None] >= columns).expand(num_rows, -1, -1)
        queries = {DRAFT: Queries(positions, positions, causal)}
        attend = self._tail_attention(self.draft_layers, self.tails.extend, queries, batch.prefixes, 0)
        nodes = accepted.path[:, :, None]
        fused = self.head.fuse(tuple(f.gather(1, nodes.expand(-1, -1, f.shape[2])) for f in features))
        hidden = self.head.forward(accepted.tokens, fused, positions, attend)
        self._commit(self.tails.extend, batch, columns.expand(num_rows, -1), kept)
        return self._propose(hidden, accepted.accept_len)

    def _commit(self, tails: Mapping[GroupName, Tensor], batch: RoundBatch, source: Tensor, kept: Tensor) -> None:
        """Copy tail entries `source` to positions L .. of the pages; those not `kept` go to the null page."""
        positions = batch.committed[:, None] + torch.arange(source.shape[1], device=source.device)
        for name, tail in tails.items():
            slots = slots_of(self.state.page_tables[name], batch.rows, positions, kept, self.layout.page_size)
            commit_tail(self.pools[name].data, tail, source, slots)

    # ---------------------------------------------------------------- a prefill step

    def prefill(self, batch: PrefillBatch) -> tuple[Tensor, Tensor]:
        """Process one chunk a row. Returns the first new token of each row [rows], and finite [rows] bool."""
        rows, query_len = batch.rows, batch.query_len
        start = self.state.committed[rows]
        columns = torch.arange(batch.tokens.shape[1], device=rows.device)
        valid = columns < query_len[:, None]
        positions = torch.where(valid, start[:, None] + columns, 0)
        target = [group for group in self.layout.groups if not group.is_draft]
        attend = self._causal_attention(self.target_layers, target, batch, positions, valid)
        output = self.target.forward(batch.tokens, positions, attend)
        last = (query_len - 1).clamp(min=0)
        logits = self.target.logits(_pick(output.hidden, last)[:, None])
        choice, finite = self._choose(logits, rows, (start + query_len)[:, None], batch.choice)
        first = choice[:, 0]
        draft = None
        if self.head is not None:
            following = torch.where(batch.next_token >= 0, batch.next_token, first)
            shifted = torch.cat([batch.tokens[:, 1:], batch.tokens[:, :1]], dim=1)
            shifted = shifted.scatter(1, last[:, None], following[:, None])
            group = [self.layout.group(DRAFT)]
            attend = self._causal_attention(self.draft_layers, group, batch, positions, valid)
            hidden = self.head.forward(shifted, self.head.fuse(output.features), positions, attend)
            draft = self._propose(hidden, last)
        self.state.finish(rows, rows != self.layout.dummy_row, query_len, first, draft)
        return first, finite

    # ---------------------------------------------------------------- shared

    def _begin(self, group: GroupName, rows: Tensor, extent: Tensor, bound: int) -> Any:
        table = self.state.page_tables[group]
        return self.backend.begin(TableView(table, rows, extent, bound, self.layout.page_size))

    def _tail_attention(
        self,
        layers: list[LayerKV],
        tails: Mapping[GroupName, Tensor],
        queries: Mapping[GroupName, Queries],
        prefixes: Prefixes,
        start: int,
    ) -> TailAttention:
        plans = {name: self.backend.plan(prefixes[name], each) for name, each in queries.items()}
        return TailAttention(self.backend, layers, tails, plans, start, _scale(self.layout.group(layers[0].group)))

    def _causal_attention(
        self, layers: list[LayerKV], groups: list[KVGroup], batch: PrefillBatch, positions: Tensor, valid: Tensor
    ) -> CausalAttention:
        slots, plans = {}, {}
        extent = self.state.committed[batch.rows] + batch.query_len
        for group in groups:
            table = self.state.page_tables[group.name]
            slots[group.name] = slots_of(table, batch.rows, positions, valid, self.layout.page_size)
            prefix = self._begin(group.name, batch.rows, extent, batch.bound)
            plans[group.name] = self.backend.plan_causal(prefix, positions, group.window)
        return CausalAttention(self.backend, layers, slots, plans, _scale(groups[0]))

    def _choose(self, logits: Tensor, rows: Tensor, positions: Tensor, how: Choice) -> tuple[Tensor, Tensor]:
        """The target's token after each node; positions: of those tokens."""
        if how is Choice.GREEDY:
            return greedy_choice(logits)
        params = self.state.warp_params(rows)
        return sampled_choice(logits, params, self.state.seed[rows], positions, how is Choice.FILTER)

    def _propose(self, hidden: Tensor, index: Tensor) -> tuple[Proposal, Tensor]:
        """The proposals after one column of each row, and that column's state."""
        assert self.head is not None
        chosen = _pick(hidden, index)
        return self.head.propose(chosen, self.layout.max_topk), chosen


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """x: [rows, n, width], index: [rows] int64. Returns [rows, width]."""
    return x[torch.arange(x.shape[0], device=x.device), index]


def _scale(group: KVGroup) -> float:
    return float(group.head_dim**-0.5)
