"""The engine: builds everything from a configuration, then turns plans into results."""

import torch
from torch import Tensor

from treetop.attention.phase import DenseAttention
from treetop.attention.torch_backend import TorchBackend
from treetop.cache.pool import make_pools
from treetop.checks.host import check_plan, check_result
from treetop.engine.runner import PrefillBatch, Runner
from treetop.engine.state import make_state, make_tails
from treetop.models.loader import Placement, compute_dtype, load_eagle3, load_target, read_eagle3_spec, resolve_folder
from treetop.models.spec import Eagle3Spec, ModelSpec, target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL, Row
from treetop.types.layout import PLAIN, KVGroup, Layout, plan_pages
from treetop.types.messages import PrefillPlan, RoundPlan, RowResult, StepPlan, StepResult


class Engine:
    """Owns device memory and runs steps. Raises UserError before any weight is read where it can."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.dtype = compute_dtype(config.dtype, self.device)
        self.model_path = resolve_folder(config.model)
        self.draft_path = None if config.draft is None else resolve_folder(config.draft)
        self.spec = target_spec(self.model_path)
        draft_spec = None
        if self.draft_path is not None:
            draft_spec = read_eagle3_spec(self.draft_path, self.spec, config.speculative_algorithm)
            _check_topk(config, draft_spec)
        self.layout = make_layout(config, self.spec, draft_spec)
        self.layout.validate()
        self._runner = self._build(draft_spec)

    def _build(self, draft_spec: Eagle3Spec | None) -> Runner:
        place = Placement(self.dtype, self.device, self.layout.max_positions)
        aux = draft_spec.aux_inputs if draft_spec is not None else ()
        target = load_target(self.model_path, self.spec, aux, place)
        head = None
        if draft_spec is not None and self.draft_path is not None:
            head = load_eagle3(self.draft_path, draft_spec, target, place)
        pools = make_pools(self.layout, self.dtype, self.device)
        hidden = None if draft_spec is None else draft_spec.layer.hidden_size
        return Runner(
            layout=self.layout,
            target=target,
            head=head,
            backend=TorchBackend(self.dtype),
            pools=pools,
            state=make_state(self.layout, hidden, self.dtype, self.device),
            tails=make_tails(self.layout, self.dtype, self.device),
            target_layers=pools[FULL].layers(),
            draft_layers=pools[DRAFT].layers() if head is not None else [],
        )

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Run one prefill step or one decode round. Zero rows are a legal batch."""
        if self.config.check_level >= 1:
            check_plan(plan, self.layout)
        state = self._runner.state
        state.apply_edits(plan.edits)
        if isinstance(plan, PrefillPlan):
            state.apply_setups(plan.setups)
            result = self._prefill(plan)
        else:
            result = self._round(plan)
        if self.config.check_level >= 1:
            for row in result.rows:
                check_result(row, self.spec.vocab_size, self.layout.commit_width)
        return result

    @torch.inference_mode()
    def next_logits(self, ids: list[int]) -> Tensor:
        """The target's logits after `ids`, [vocab], computed densely and outside all state; for comparisons."""
        positions = torch.arange(len(ids), device=self.device)[None]
        attend = DenseAttention(self.spec.head_dim**-0.5)
        target = self._runner.target
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
        first, finite = self._runner.prefill(batch)
        results = []
        for chunk, token, ok in zip(chunks, first.tolist(), finite.tolist(), strict=False):
            tokens_out = (token,) if chunk.next_token is None and ok else ()
            results.append(RowResult(chunk.row, tokens_out, ok))
        return StepResult(tuple(results))

    def _round(self, plan: RoundPlan) -> StepResult:
        rows = self._row_tensor(plan.rows)
        _, accepted = self._runner.round(rows, plan.shape, plan.committed_bound, plan.choice)
        columns = (accepted.tokens.tolist(), accepted.accept_len.tolist(), accepted.finite.tolist())
        results = []
        for row, tokens, accept_len, ok in zip(plan.rows, *columns, strict=False):
            results.append(RowResult(row, tuple(tokens[: accept_len + 1]) if ok else (), ok))
        return StepResult(tuple(results))

    def _row_tensor(self, rows: tuple[Row, ...]) -> Tensor:
        """The row list, padded with the dummy row to its bucket before anything else happens."""
        bucket = self.layout.bucket_for(len(rows))
        return self._ints([*rows, *[self.layout.dummy_row] * (bucket - len(rows))])

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def make_layout(config: EngineConfig, spec: ModelSpec, draft: Eagle3Spec | None) -> Layout:
    """The capacity algebra of a configuration and its models."""
    groups = [KVGroup(FULL, spec.num_layers, spec.kv_heads, spec.head_dim)]
    if draft is not None:
        groups.append(KVGroup(DRAFT, 1, draft.layer.kv_heads, draft.layer.head_dim))
    context = config.context_length or spec.max_positions
    if context > spec.max_positions:
        raise ConfigError(f"--context-length {context} exceeds the model's {spec.max_positions} positions")
    shapes = (PLAIN,) if config.shape == PLAIN else (PLAIN, config.shape)
    headroom = max(shape.commit_width for shape in shapes)
    pool_tokens = config.max_total_tokens or config.max_running_requests * (context + headroom + config.page_size)
    return Layout(
        shapes=shapes,
        page_size=config.page_size,
        max_requests=config.max_running_requests,
        max_context=context,
        chunk=config.chunked_prefill_size,
        groups=tuple(groups),
        num_pages=plan_pages(tuple(groups), config.page_size, pool_tokens),
    )


def _check_topk(config: EngineConfig, draft: Eagle3Spec) -> None:
    if config.speculative_eagle_topk > draft.draft_vocab_size:
        raise ConfigError(
            f"--speculative-eagle-topk {config.speculative_eagle_topk} exceeds the draft vocabulary of"
            f" {draft.draft_vocab_size}"
        )
