"""Everything a step runs on: models, memory, a backend, guards. Built once, shared by the phases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treetop.attention.contract import AttentionBackend, Queries, TableView
from treetop.attention.phase import LayerKV, TailAttention
from treetop.cache.pool import KVPool
from treetop.checks.probes import Probes
from treetop.engine.buffers import RoundBuffers
from treetop.engine.state import RowState
from treetop.kernels.accept import Drawn, Pieces
from treetop.kernels.commit import Paths
from treetop.kernels.kv import slots_of
from treetop.kernels.ops import Ops
from treetop.kernels.rows import DraftState
from treetop.models.eagle3 import Eagle3Head
from treetop.models.llama import Llama
from treetop.spec.round_ops import RoundOps
from treetop.spec.verify import greedy_choice
from treetop.types.errors import CheckError
from treetop.types.ids import GroupName
from treetop.types.layout import KVGroup, Layout
from treetop.types.phase import Phase
from treetop.types.sampling import Choice
from treetop.types.tree import Accepted, DraftTree


@dataclass(frozen=True, slots=True)
class Device:
    """target_layers, draft_layers: where each layer's K/V live. check_level: see `docs/testing.md`.
    simulate_accept_length: tokens every round emits instead of the right ones, for measuring speed.
    """

    layout: Layout
    check_level: int
    simulate_accept_length: int | None
    target: Llama
    head: Eagle3Head | None
    backend: AttentionBackend[Any, Any]
    ops: Ops
    round_ops: RoundOps
    pools: dict[GroupName, KVPool]
    state: RowState
    buffers: RoundBuffers
    target_layers: list[LayerKV]
    draft_layers: list[LayerKV]
    probes: Probes

    @property
    def target_groups(self) -> list[KVGroup]:
        return [group for group in self.layout.groups if not group.is_draft]

    @property
    def draft_groups(self) -> list[KVGroup]:
        return [group for group in self.layout.groups if group.is_draft]

    def begin(self, phase: Phase, group: GroupName, rows: Tensor, extent: Tensor, bound: int) -> Any:
        """The backend's view of the pages that a group's layers see: positions 0 .. extent."""
        table = self.state.table_of(group)
        if self.check_level >= 1 and table.group != group:
            raise CheckError(f"phase {phase}: layers of group {group} were given the page table of {table.group}")
        return self.backend.begin(TableView(phase, table, rows, extent, bound, self.layout.page_size))

    def tail_attention(
        self, layers: list[LayerKV], tails: Mapping[GroupName, Tensor], plans: Mapping[GroupName, Any], place: "Tail"
    ) -> TailAttention:
        """Attention of a decode phase. Raises CheckError if its tail is wider than the buffer (sgl-27360)."""
        if self.check_level >= 1:
            for name in plans:
                have = tails[name].shape[2]
                if place.width > have or place.start > place.width:
                    raise CheckError(
                        f"tail of phase {place.phase}, group {name}: need {place.width} columns from {place.start},"
                        f" have {have}; the layout sizes it by another formula than fills it"
                    )
        scale = head_scale(self.layout.group(layers[0].group))
        return TailAttention(self.backend, self.ops, layers, tails, plans, place.start, place.width, scale)

    def plan(self, prefixes: Mapping[GroupName, Any], queries: Mapping[GroupName, Queries]) -> dict[GroupName, Any]:
        return {name: self.backend.plan(prefixes[name], each) for name, each in queries.items()}

    def commit(self, tails: Mapping[GroupName, Tensor], paths: Paths) -> None:
        """Copy each path's K/V from the tails to positions L .. of the pages."""
        for name, tail in tails.items():
            table = self.state.table_of(name).data
            pool, page_size = self.pools[name].data, self.layout.page_size
            check = self.check_level >= 3 and not _capturing()
            want = _tail_entries(tail, paths.source) if check else None
            self.round_ops.commit(pool, tail, table, page_size, paths)
            if want is not None:
                slots = slots_of(table, paths.rows, paths.positions, paths.kept, page_size)
                _check_committed(pool, want, slots, page_size)

    def choose(self, logits: Tensor, rows: Tensor, positions: Tensor, how: Choice) -> Drawn:
        """The target's token after each node, and whether its logits there are finite. positions: of the nodes."""
        if how is Choice.GREEDY:
            return Drawn(*greedy_choice(logits))
        return self.round_ops.draw(logits, self.state.sampler, rows, positions, how is Choice.FILTER)

    def accept(self, chosen: Drawn | Pieces, tree: DraftTree, out: Accepted) -> None:
        """Follow the target's choices through each tree, or take the simulated length where there is a tree."""
        emitted = self.simulate_accept_length if out.path.shape[1] > 1 else None
        self.round_ops.accept(chosen, tree, out, None if emitted is None else emitted - 1)

    def propose(self, hidden: Tensor, index: Tensor) -> DraftState:
        """The proposals after one column of each row, and that column's state."""
        assert self.head is not None
        chosen = self.round_ops.pick(hidden, index)
        proposal = self.head.propose(chosen, self.layout.max_topk)
        return DraftState(proposal.tokens, proposal.logprob, chosen)


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a phase's new K/V go in its tail (`start`), and how many columns its queries see (`width`)."""

    phase: Phase
    start: int
    width: int


def head_scale(group: KVGroup) -> float:
    return float(group.head_dim**-0.5)


def _capturing() -> bool:
    """A graph is being captured, and nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _tail_entries(tail: Tensor, source: Tensor) -> Tensor:
    """What a commit has to copy: [layers, rows * n, 2, kv_heads, head_dim]."""
    row = torch.arange(source.shape[0], device=source.device)[:, None]
    return tail.flatten(1, 2).index_select(1, (row * tail.shape[2] + source).reshape(-1))


def _check_committed(pool: Tensor, want: Tensor, slots: Tensor, page_size: int) -> None:
    """Level 3: every committed slot outside the null page holds its tail entry, bit for bit."""
    flat = slots.reshape(-1)
    kept = flat >= page_size
    if not torch.equal(want[:, kept].nan_to_num(), pool.index_select(1, flat[kept]).nan_to_num()):
        raise CheckError("commit: a committed slot does not hold the K/V of its node")
