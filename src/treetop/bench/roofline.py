"""The floor of a round: the bytes it cannot avoid to move and the operations it cannot avoid to do.

A forward streams its weights once, in the engine's dtype, reads the K/V of every row's context, writes the new K/V and
the logits; the floor is the larger of bytes over the copy bandwidth and operations over the matrix rate. Activations
count as free, and so does everything that is not a matrix product. A round is one verify, a draft's block, S - 1 draft
levels and one draft extend, as far as these are forwards of the draft (`drafts.protocol.Streamed`). Weights in another
format take less: that is the floor of the bytes really read. Of experts those that somebody chose are read once: as
many as were counted, or as choices at random give.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from treetop.bench.machine import Machine
from treetop.drafts.protocol import Drafter, DrafterSpec
from treetop.kernels.moe.routes import RouterSpec
from treetop.models.config import AttentionSpec
from treetop.models.registry import ExpertLayer, TargetSpec
from treetop.models.target import Target
from treetop.types.ids import STATE
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase
from treetop.weights.format import Packing, Product


@dataclass(frozen=True, slots=True)
class RoundWork:
    """Bytes moved and floating-point operations done."""

    bytes: float
    flop: float

    def without(self, saved: int) -> "RoundWork":
        """The same with fewer bytes."""
        return RoundWork(self.bytes - saved, self.flop)

    def plus(self, other: "RoundWork") -> "RoundWork":
        return RoundWork(self.bytes + other.bytes, self.flop + other.flop)

    def seconds(self, machine: Machine) -> float:
        return max(self.bytes / machine.bytes_per_s, self.flop / machine.flop_per_s)


@dataclass(frozen=True, slots=True)
class Case:
    """One round: `batch` rows, each with `context` committed tokens.

    element_size: bytes of a weight, and of a K but in FP8.
    fp8_kv, fp8_draft_kv: the target's K/V are in it, the draft's own.
    packing: of experts' quantized weights.
    """

    shape: SpecShape
    batch: int
    context: int
    element_size: int
    fp8_kv: bool = False
    packing: Packing = "none"
    fp8_draft_kv: bool = False


def round_floor(
    target: TargetSpec,
    draft: DrafterSpec | None,
    case: Case,
    machine: Machine,
    saved: Mapping[Phase, int] | None = None,
    distinct: Sequence[float] | None = None,
) -> dict[Phase, float]:
    """Seconds that each phase of a round takes at least. draft: None for plain decoding.

    saved: bytes of weights that a forward of a phase does not read, see `saved_bytes`. distinct: experts that the
    tokens of a verify chose in each layer that has any; None for choices at random.
    """
    shape, model, less = case.shape, target.config, {phase: (saved or {}).get(phase, 0) for phase in Phase}
    verify = forward_work([*model.attention.values()], target.streamed, case, shape.num_draft_tokens, model.vocab_size)
    for group in (spec.state(STATE, 1) for spec in model.recurrent.values()):  # states are read and written once
        moved = 2 * group.row_bytes(case.element_size) + group.stash_bytes(shape.num_draft_tokens, case.element_size)
        verify = verify.plus(RoundWork(case.batch * moved, 0))
    layers = target.expert_layers(_DTYPES[case.element_size], case.packing)
    verify = verify.plus(expert_work(layers, case.batch * shape.num_draft_tokens, distinct))
    floor = {Phase.DRAFT: 0.0, Phase.VERIFY: verify.without(less[Phase.VERIFY]).seconds(machine)}
    if draft is not None:
        reads = [model.layers[index].attention for index in draft.reads_target]
        floor[Phase.DRAFT] = sum(
            work.without(less[Phase.DRAFT]).seconds(machine) for work in _draft_forwards(draft, reads, case)
        )
        floor[Phase.EXTEND] = _extend_work(draft, case).without(less[Phase.EXTEND]).seconds(machine)
    return floor


def _draft_forwards(draft: DrafterSpec, reads: Sequence[AttentionSpec], case: Case) -> list[RoundWork]:
    """Each forward of DRAFT: the block's, then S - 1 levels. reads: layers of the target whose K/V a forward reads.

    Who runs no layer at a level makes the logits of all depths in the block; others there make the root's.
    """
    shape, read = case.shape, draft.streamed
    vocab = draft.vocab_size if read.output else 0  # without products there are no logits either
    forwards = list[RoundWork]()
    if draft.block is not None and shape.num_steps:
        opened = _forward_of(draft, reads, case, draft.block.width)
        forwards.append(opened.plus(_logits(read.output, vocab, case, 1 if read.in_levels else shape.num_steps)))
    if read.in_levels:
        level = _forward_of(draft, reads, case, shape.topk).plus(_logits(read.output, vocab, case, shape.topk))
        forwards += [level] * max(shape.num_steps - 1, 0)
    return forwards


def _forward_of(draft: DrafterSpec, reads: Sequence[AttentionSpec], case: Case, queries: int) -> RoundWork:
    """A draft's layers over `queries` tokens a row, and what it reads of the target's K/V."""
    seen = sum(layer.kv.numbers * _reach(layer, case) for layer in reads) * case.batch
    of_kv = 1 if case.fp8_kv else case.element_size
    own = _of_draft(case)
    return forward_work(draft.attention, draft.streamed.layers, own, queries, 0).plus(RoundWork(of_kv * seen, 0))


def _of_draft(case: Case) -> Case:
    return replace(case, fp8_kv=case.fp8_draft_kv)


def _logits(output: int, vocab: int, case: Case, tokens: int) -> RoundWork:
    """`tokens` logits a row. output: of the matrix, in numbers."""
    rows = case.batch * tokens
    return RoundWork(case.element_size * (output + rows * vocab), 2 * output * rows)


def _extend_work(draft: DrafterSpec, case: Case) -> RoundWork:
    """A forward over the accepted tokens, or K/V of them alone; without a block the last column of a row proposes."""
    shape, read, written = case.shape, draft.streamed, case.batch * case.shape.commit_width
    if not read.in_extend:
        kv = sum(layer.kv.numbers for layer in draft.attention)
        of_kv = 1 if case.fp8_draft_kv else case.element_size
        return RoundWork(case.element_size * read.fuse + of_kv * written * kv, 2 * read.fuse * written)
    extend = forward_work(draft.attention, read.layers + read.fuse, _of_draft(case), shape.commit_width, 0)
    if draft.block is not None:
        return extend
    return extend.plus(_logits(read.output, draft.vocab_size if read.output else 0, case, 1))


_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""Of the case's element sizes."""


def expert_work(layers: Sequence[ExpertLayer], tokens: int, distinct: Sequence[float] | None = None) -> RoundWork:
    """What the chosen experts of a forward of so many tokens take. distinct: as in `round_floor`."""
    counts = [distinct_at_random(layer.router, tokens) for layer in layers] if distinct is None else distinct
    moved = sum(count * layer.bytes for count, layer in zip(counts, layers, strict=True))
    return RoundWork(moved, sum(2 * tokens * layer.router.computing * layer.numbers for layer in layers))


def distinct_at_random(router: RouterSpec, tokens: int) -> float:
    """Experts with weights that somebody chooses, on average, where every choice is as likely as any other."""
    return router.with_weights * (1 - (1 - router.top_k / router.num_experts) ** tokens)


def saved_bytes(
    target: Target, drafter: Drafter | None, draft: DrafterSpec | None, shape: SpecShape, rows: int
) -> dict[Phase, int]:
    """Bytes of weights that a forward of each phase does not read, since they take fewer than in the engine's dtype.

    draft: what the drafter is. rows: of the batch, with its padding.
    """
    size = target.embedding.element_size()

    def saved(products: Iterable[Product], rows: int) -> int:
        return sum(size * each.numbers - each.read_bytes(rows) for each in products)

    found = {Phase.VERIFY: saved(target.products, rows * shape.num_draft_tokens)}
    if drafter is not None and draft is not None:
        made, read, of_path = drafter.products, draft.streamed, rows * shape.commit_width
        of_draft = rows * shape.topk if read.in_levels else of_path
        found[Phase.DRAFT] = saved([*made.layers, *made.output], of_draft)
        found[Phase.EXTEND] = saved([*(made.layers if read.in_extend else ()), *made.fuse], of_path)
        if draft.block is None:
            found[Phase.EXTEND] += saved(made.output, rows)
    return found


def _reach(layer: AttentionSpec, case: Case) -> int:
    """Committed tokens that a layer's queries see."""
    return case.context if layer.window is None else min(case.context, layer.window)


def forward_work(layers: Sequence[AttentionSpec], numbers: int, case: Case, queries: int, vocab: int) -> RoundWork:
    """One forward of `queries` tokens a row, each with `vocab` logits. numbers: of the weights that it streams."""
    tokens, size = case.batch * queries, case.element_size
    seen = [_reach(layer, case) for layer in layers]
    read = sum(layer.kv.numbers * length for layer, length in zip(layers, seen, strict=True))
    written = sum(layer.kv.numbers for layer in layers)
    of_kv = 1 if case.fp8_kv else size
    moved = size * (numbers + tokens * vocab) + of_kv * (case.batch * read + tokens * written)
    numbers_of = [layer.num_heads * (layer.head_dim + layer.kv.output_dim) for layer in layers]
    attention = sum(2 * each * length for each, length in zip(numbers_of, seen, strict=True))
    return RoundWork(moved, tokens * (2 * numbers + attention))
