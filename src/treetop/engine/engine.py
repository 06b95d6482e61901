"""The engine: turns plans into results."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from treetop.attention.phase import DenseAttention
from treetop.checks.host import PlanChecker, check_own_memory, check_padded, check_result
from treetop.checks.poison import poison
from treetop.engine.build import build_device, make_layout, read_draft_spec
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.device import Device
from treetop.engine.graphs import Eager, GraphSim, RoundLauncher
from treetop.engine.prefill import PrefillBatch, prefill
from treetop.engine.proof import prove_capacity
from treetop.engine.pure import Pure
from treetop.engine.rounds import RoundKey
from treetop.models.loader import Placement, compute_device, compute_dtype, resolve_folder
from treetop.models.spec import target_spec
from treetop.types.config import EngineConfig
from treetop.types.ids import NULL_PAGE, GroupName, PageId, Row
from treetop.types.messages import PrefillPlan, RoundPlan, RowResult, StepPlan, StepResult
from treetop.types.sampling import Choice
from treetop.types.tree import Accepted, DraftTree

Result = TypeVar("Result", Accepted, DraftTree)
Observer = Callable[[RoundPlan, DraftTree, Accepted], None]
"""Told of every round: its plan, trees and accepted paths, which it may keep."""


class Engine:
    """Owns device memory and runs steps. Raises UserError before any weight is read where it can."""

    def __init__(
        self, config: EngineConfig, pure: Pure | None = None, wrap: Callable[[Device], Device] | None = None
    ) -> None:
        """pure: with a fault in it, for tests. wrap: puts an instrument around the device, for tests and doctor.

        `observer` and `launcher` may be set between steps; `treetop trace` sets both.
        """
        self.config, pure = config, pure or Pure()
        self.observer: Observer | None = None
        self.model_path = resolve_folder(config.model)
        self.draft_path = None if config.draft is None else resolve_folder(config.draft)
        self.spec = target_spec(self.model_path)
        draft = None
        if self.draft_path is not None:
            draft = (self.draft_path, read_draft_spec(config, self.draft_path, self.spec))
        self.layout = make_layout(config, self.spec, draft[1] if draft is not None else None, pure.layout)
        device = compute_device(config.device)
        self.dtype = compute_dtype(config.dtype, device)
        place = Placement(self.dtype, device, self.layout.max_positions, config.load_format == "dummy")
        target = (self.model_path, self.spec)
        self.device, self._zones = build_device(config, pure, self.layout, target, draft, place)
        if wrap is not None:
            self.device = wrap(self.device)
        self.launcher: RoundLauncher = Eager(self.device)
        if config.graphs == "sim":
            self.launcher = GraphSim(self.device, self._keys())
        if config.graphs == "auto" and device.type == "cuda" and self.device.backend.capabilities.captures:
            self.launcher = CudaGraphs(self.device)
        self._plans = PlanChecker(self.layout)
        self.last_key: RoundKey | None = None
        self._last_rows = [0] * self.layout.max_requests  # what the row buffer holds
        with torch.inference_mode():
            self._start_up()

    def _keys(self) -> Iterator[RoundKey]:
        for bucket, shape, choice in product(self.layout.buckets, self.layout.shapes, Choice):
            yield RoundKey(bucket, shape, choice)

    def _start_up(self) -> None:
        if self.config.check_level >= 1:
            prove_capacity(self.device, self.launcher)
        if self.config.check_level >= 3:
            self.device.state.forget_pages(list(range(self.layout.max_requests)))
            for name in self.layout.token_groups:
                self._poison_pages((name, PageId(page)) for page in range(1, self.layout.num_pages[name]))

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Run one prefill step or one decode round. Zero rows are a legal batch."""
        level, state = self.config.check_level, self.device.state
        if level >= 1:
            self._plans.check(plan)
        if level >= 3:
            self._poison_pages(plan.freed)
            if isinstance(plan, PrefillPlan):
                state.forget_pages([setup.row for setup in plan.setups])
        state.apply_edits(plan.edits)
        if isinstance(plan, PrefillPlan):
            state.apply_setups(plan.setups)
            result = self._prefill(plan)
        else:
            result = self._round(plan)
        self.device.probes.raise_if_fired()
        if self._zones is not None:
            self._zones.check()
        if level >= 1:
            for row in result.rows:
                check_result(row, self.spec.vocab_size, self.layout.commit_width)
        return result

    @torch.inference_mode()
    def next_logits(self, ids: list[int]) -> Tensor:
        """The target's logits after `ids`, [vocab], computed densely and outside all state; for comparisons."""
        positions = torch.arange(len(ids))[None].to(self.device.buffers.rows.device)
        attend = DenseAttention(
            self.device.ops, self.dtype, self.spec.kv_heads, self.spec.head_dim**-0.5, self.spec.windows
        )
        target = self.device.target
        return target.logits(target.forward(self._ints([ids]), positions, attend).hidden[0, -1])

    def _prefill(self, plan: PrefillPlan) -> StepResult:
        chunks = plan.chunks
        rows = self._row_tensor(tuple(chunk.row for chunk in chunks))
        width = max((len(chunk.token_ids) for chunk in chunks), default=1)
        padding = len(rows) - len(chunks)
        tokens = [[*chunk.token_ids, *[0] * (width - len(chunk.token_ids))] for chunk in chunks]
        batch = PrefillBatch(
            rows=rows,
            tokens=self._ints(tokens + [[0] * width] * padding),
            query_len=self._ints([len(chunk.token_ids) for chunk in chunks] + [0] * padding),
            next_token=self._ints([-1 if c.next_token is None else c.next_token for c in chunks] + [0] * padding),
            bound=max((chunk.start + len(chunk.token_ids) for chunk in chunks), default=1),
            choice=plan.choice,
        )
        first, finite = prefill(self.device, batch)
        results = []
        for chunk, token, ok in zip(chunks, first.tolist(), finite.tolist(), strict=False):
            tokens_out = (token,) if chunk.next_token is None and ok else ()
            results.append(RowResult(chunk.row, tokens_out, ok))
        return StepResult(tuple(results))

    def _round(self, plan: RoundPlan) -> StepResult:
        rows = self._row_tensor(plan.rows)
        key = RoundKey(len(rows), plan.shape, plan.choice)
        self.last_key = key
        self.launcher.launch(key, plan.committed_bound)
        accepted = self._hand_out(self.device.buffers.accepted_of(key.bucket, key.shape))
        if self.observer is not None:
            self.observer(plan, self._hand_out(self.device.buffers.tree_of(key.bucket, key.shape)), accepted)
        counts = torch.stack([accepted.accept_len, accepted.finite.long()], dim=1)
        results = []
        for row, (accept_len, ok, *tokens) in zip(plan.rows, _to_host(counts, accepted.tokens), strict=False):
            results.append(RowResult(row, tuple(tokens[: accept_len + 1]) if ok else (), bool(ok)))
        return StepResult(tuple(results))

    def _hand_out(self, value: Result) -> Result:
        """Results that may be kept past the next round. At level 1 a view of the buffers is refused (sgl-23037)."""
        copies = {}
        for name in value.__dataclass_fields__:
            tensor: Tensor = getattr(value, name)
            copies[name] = self.device.pure.hand_out(tensor)
            if self.config.check_level >= 1:
                check_own_memory(name, copies[name], tensor)
        return replace(value, **copies)

    def _row_tensor(self, rows: tuple[Row, ...]) -> Tensor:
        """The row list in its buffer, padded with the dummy row to its bucket before anything else happens."""
        buffer, bucket = self.device.buffers.rows, self.layout.bucket_for(len(rows))
        padded = self.device.pure.pad_rows(rows, bucket, self.layout.dummy_row, self._last_rows)
        self._last_rows[:bucket] = padded
        if self.config.check_level >= 1:
            check_padded(padded, rows, self.layout)
        buffer[:bucket] = self._ints(padded)
        return buffer[:bucket]

    def _poison_pages(self, pages: Iterable[tuple[GroupName, PageId]]) -> None:
        """Level 3: NaN into pages that nobody owns; never into the null page."""
        size = self.layout.page_size
        for group, page in pages:
            assert page != NULL_PAGE
            poison(self.device.pools[group].data[:, page * size : (page + 1) * size])

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device.buffers.rows.device)


def _to_host(*columns: Tensor) -> list[list[int]]:
    """Integer columns [rows, ...] side by side, in one transfer."""
    values: list[list[int]] = torch.cat(columns, dim=1).tolist()
    return values
