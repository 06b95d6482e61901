"""Everything a step runs on: models, memory, a backend, guards. Built once, shared by the phases."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from treetop.attention.contract import AttentionBackend
from treetop.attention.layer import Attend, CausalAttention, ChosenKeys, LayerKV, TailAttention, TailColumns
from treetop.attention.ragged import RaggedAttention
from treetop.attention.recurrent import Recurrence, RecurrentLayer
from treetop.cache.pool import KVPool
from treetop.checks.probes import Probes
from treetop.drafts.protocol import Drafter, Extension, Nodes
from treetop.engine.buffers import RoundBuffers
from treetop.engine.state import RowState
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import moved, slots_of
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.commit import Paths
from treetop.kernels.tree.drawn import RoundOfRows
from treetop.kernels.tree.rows import DraftState, store
from treetop.models.target import LastTokens, Target, TargetOutput
from treetop.speculative.simulation import Simulation
from treetop.types.errors import CheckError
from treetop.types.ids import GroupName
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.phase import Phase
from treetop.types.tree import FlatNodes
from treetop.weights.adapted import Adapters

Prefix = tuple[Tensor, Tensor, int]
"""(rows, extent, bound) of a phase, as in `AttentionMetadata`."""


FEW_TOKENS = 128
"""Tokens of an extend of which a product takes about as long as of one, its weights': to leave some out is a launch
more in every round of few rows, and no gain."""


@dataclass(frozen=True, slots=True)
class TargetInput:
    """What the target's forward of a phase is given.

    rows: [rows] int64. tokens, positions: [rows, n] int64. last: see `Target.forward`.
    """

    rows: Tensor
    tokens: Tensor
    positions: Tensor
    attend: Attend
    last: LastTokens | None = None


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """target_layers, draft_layers: where the K/V that each layer reads live, by index; of the target's that attend.
    recurrent_layers: where the states of its others live.
    adapters, draft_adapters: beside the products of target and drafter, None without any.
    check_level: see `docs/testing.md`.
    simulation: what is accepted instead of what is right, for measuring.
    anchored: of the spec of the drafter's block.
    """

    layout: Layout
    check_level: int
    simulation: Simulation | None
    anchored: bool
    target: Target
    drafter: Drafter | None
    backend: AttentionBackend[Any, Any]
    ops: Ops
    pools: dict[GroupName, KVPool]
    state: RowState
    buffers: RoundBuffers
    target_layers: Mapping[int, LayerKV]
    draft_layers: Mapping[int, LayerKV]
    probes: Probes
    recurrent_layers: Mapping[int, RecurrentLayer] = field(default_factory=dict)
    adapters: Adapters | None = None
    draft_adapters: Adapters | None = None

    @property
    def target_groups(self) -> list[KVGroup]:
        return [group for group in self.layout.groups if group.is_attended]

    @property
    def draft_groups(self) -> list[KVGroup]:
        return [group for group in self.layout.groups if group.is_draft]

    @property
    def groups_read(self) -> list[KVGroup]:
        """The target's groups that the drafter's layers read, where these keep no K/V."""
        names = {layer.group for layer in self.draft_layers.values()}
        return [group for group in self.target_groups if group.name in names]

    def run_target(self, given: TargetInput) -> TargetOutput:
        """The target's forward of a phase's rows, each with its adapter; see `Target.forward`."""
        if self.adapters is not None:
            self.adapters.select(self.state.numbers["adapter"][given.rows], given.tokens.shape[1], self.ops)
        tells = self.layout.experts is not None
        return self.target.forward(given.tokens, given.positions, given.attend, tells, given.last)

    def draft_prefix(self, bucket: int, max_kv_len: int) -> Prefix:
        """Of the draft's K/V, what a batch's rows see: nothing where they are padding to the draft."""
        rows = self.buffers.draft_rows[:bucket]
        return rows, self.state.committed[rows], max_kv_len

    def select_for_draft(self, rows: Tensor, n: int) -> None:
        """The drafter's next forwards are of these rows, n tokens each, each with its adapter."""
        if self.draft_adapters is not None:
            self.draft_adapters.select(self.state.numbers["adapter"][rows], n, self.ops)

    def metadata(
        self,
        phase: Phase,
        group: KVGroup,
        prefix: Prefix,
        positions: Tensor,
        tail_positions: Tensor | None = None,
        mask: Tensor | None = None,
        flat: FlatNodes | None = None,
    ) -> AttentionMetadata:
        """Who sees what in a phase, of a group's layers; see `AttentionMetadata`."""
        table, (rows, kv_len, max_kv_len) = self.state.table_of(group.name), prefix
        if self.check_level >= 1 and table.group != group.name:
            raise CheckError(f"phase {phase}: layers of group {group.name} were given the page table of {table.group}")
        return AttentionMetadata(
            phase,
            table,
            rows,
            kv_len,
            max_kv_len,
            self.layout.page_size,
            positions,
            group.window,
            tail_positions,
            mask,
            group.chunked,
            flat=flat,
        )

    def plan(self, metadata: AttentionMetadata, begun: dict[GroupName, Any] | None = None) -> Any:
        """The backend's plan. begun: what it has made of the prefixes of this phase, for plans that share them."""
        begun, group = {} if begun is None else begun, metadata.table.group
        if group not in begun:
            begun[group] = self.backend.begin(metadata)
        return self.backend.plan(begun[group], metadata)

    def tail_attention(
        self,
        phase: Phase,
        layers: Mapping[int, LayerKV],
        tails: Mapping[GroupName, Tensor],
        plans: Mapping[GroupName, Any],
        columns: TailColumns,
        shape: SpecShape,
        recurrence: Recurrence | None = None,
    ) -> TailAttention:
        """Attention of a decode phase. Raises CheckError, at every check level, if its tail is wider than the buffer
        (sgl-27360).
        """
        for name in plans:
            have = tails[name].shape[2]
            if columns.width > have or columns.start > columns.width:
                raise CheckError(
                    f"tail of phase {phase}, group {name}, topk {shape.topk}, num_steps {shape.num_steps}, page size"
                    f" {self.layout.page_size}: need {columns.width} columns from {columns.start}, have {have}; the"
                    " layout sizes it by another formula than fills it"
                )
        rows = self.buffers.rows[: columns.rows]
        keys = ChosenKeys(self.backend, self.probes, phase, rows)
        return TailAttention(keys, layers, tails, plans, columns, rows, self.layout.dummy_row, recurrence)

    def ragged_attention(
        self, flat: FlatNodes, node_rows: Tensor, plans: Mapping[GroupName, Any], recurrence: Recurrence | None
    ) -> RaggedAttention:
        """Attention of a verification of flat nodes. node_rows: [N] int64, whose they are. Raises CheckError, at every
        check level, if they are more than the tail's buffer holds.
        """
        need, tails = len(flat.at), {}
        for name, tail in self.buffers.verify_tails.items():
            have = tail.shape[1] * tail.shape[2]
            if need > have:
                raise CheckError(
                    f"phase {Phase.VERIFY}, group {name}: {need} flat nodes, have {have} = rows * verify_tail entries"
                )
            tails[name] = tail.view(tail.shape[0], have, *tail.shape[3:])
        rows, dummy = self.buffers.rows[: len(flat.count)], self.layout.dummy_row
        keys = ChosenKeys(self.backend, self.probes, Phase.VERIFY, rows)
        return RaggedAttention(keys, self.target_layers, tails, plans, flat, node_rows != dummy, recurrence)

    def committed_attention(self, phase: Phase, prefix: Prefix, count: int) -> CausalAttention:
        """Attention of the drafter's layers that read the target's K/V: `count` queries a row see what is committed,
        as the last of these tokens does.
        """
        rows, committed, _ = prefix
        last = (committed - 1).clamp(min=0)[:, None].expand(-1, count).contiguous()
        plans = {g.name: self.plan(self.metadata(phase, g, prefix, last)) for g in self.groups_read}
        nowhere = torch.zeros_like(last)
        live = (rows != self.layout.dummy_row)[:, None].expand(-1, count)
        keys = ChosenKeys(self.backend, self.probes, phase, rows)
        return CausalAttention(keys, self.draft_layers, dict.fromkeys(plans, nowhere), plans, live)

    def commit(self, tails: Mapping[GroupName, Tensor], paths: Paths) -> None:
        """Copy each path's K/V from the tails to positions L .. of the pages."""
        for name, stored in tails.items():
            table = self.state.table_of(name).data
            pool, tail, page_size = moved(self.pools[name].data), moved(stored), self.layout.page_size
            check = self.check_level >= 3 and not _capturing()
            want = _tail_entries(tail, paths.source) if check else None
            self.ops.commit(pool, tail, table, page_size, paths)
            if want is not None:
                slots = slots_of(table, paths.rows, paths.positions, paths.kept, page_size)
                _check_committed(pool, want, slots, page_size)

    def extension(self, rows: Tensor, last: Tensor, n: int, lines: int | None = None) -> Extension:
        """What a draft extend of n tokens a row is asked. rows, last: [rows] int64. lines: the first ones, whose states
        are read; None for all.

        All states are made of few tokens, for products take as long of fewer; with adapters, whose products know the
        rows of all tokens; and where several ranks share a forward.
        """
        text, whole = self.state.text, self.draft_adapters is not None or not self.ops.alone
        alone = None if whole or len(rows) * n <= FEW_TOKENS else LastTokens(last[:lines], self.ops)
        asked = Extension(rows, last, alone=alone)
        return asked if text is None else replace(asked, text=text.tokens, past=text.past, owners=text.owners)

    def drawn_at(self, rows: Tensor) -> RoundOfRows:
        """What a simulation draws by, of a batch's rows [rows]."""
        state, dummy = self.state, self.layout.dummy_row
        seed, classes = state.numbers["seed"], state.numbers["classes"]
        return RoundOfRows(seed, state.committed, classes, rows, dummy, state.calibration.inv_temp)

    def propose(self, tokens: Tensor, state: Tensor, classes: Tensor, lines: Any = None) -> DraftState:
        """What a row keeps of roots, tokens [rows] and their states [rows, state_size]: these, and what is proposed.

        classes: [rows] int64, by which proposals are calibrated. lines: of the drafter's block.
        """
        assert self.drafter is not None
        inv_temp = InverseTemperature(self.state.calibration.inv_temp[0], classes)
        proposal = self.drafter.propose(Nodes(tokens, state, 0), self.layout.max_topk, inv_temp, lines)
        return DraftState(proposal.tokens, proposal.logprob, state)

    def extended(self, rows: Tensor, tokens: Tensor, state: Tensor, classes: Tensor) -> DraftState | None:
        """What a row keeps after an extend; None where DRAFT proposes, for which the states alone are kept.

        rows: [rows] int64. tokens, state, classes: as in `propose`.
        """
        assert self.drafter is not None
        if self.drafter.block is None:
            return self.propose(tokens, state, classes)
        assert self.state.draft is not None
        if state.shape[1]:
            store(self.state.draft.hidden, rows, rows != self.layout.dummy_row, state)
        return None


def _capturing() -> bool:
    """A graph is being captured, and nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _tail_entries(tail: Tensor, source: Tensor) -> Tensor:
    """What a commit has to copy: [layers, rows * n, *format]."""
    row = torch.arange(source.shape[0], device=source.device)[:, None]
    return tail.flatten(1, 2).index_select(1, (row * tail.shape[2] + source).reshape(-1))


def _check_committed(pool: Tensor, want: Tensor, slots: Tensor, page_size: int) -> None:
    """Level 3: every committed slot outside the null page holds its tail entry, bit for bit."""
    flat = slots.reshape(-1)
    kept = flat >= page_size
    if not torch.equal(want[:, kept].nan_to_num(), pool.index_select(1, flat[kept]).nan_to_num()):
        raise CheckError("commit: a committed slot does not hold the K/V of its node")
