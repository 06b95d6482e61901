"""The floor of a round: the bytes it cannot avoid to move and the operations it cannot avoid to do.

A forward streams its weights once, in the engine's dtype, reads the K/V of every row's context, writes the new K/V and
the logits; the floor is the larger of bytes over the copy bandwidth and operations over the matrix rate. Activations
count as free, and so does everything that is not a matrix product. A round is one verify, S - 1 draft levels and one
draft extend. Weights that are read in 12 bits take less: that is the floor of the bytes really read.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from treetop.bench.machine import Machine
from treetop.kernels.linear import FewRowsGated, FewRowsLinear
from treetop.models.eagle3 import Eagle3Head
from treetop.models.llama import Llama, LlamaLayer
from treetop.models.spec import Eagle3Spec, ModelSpec
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved and floating-point operations done."""

    bytes: float
    flop: float

    def without(self, saved: int) -> "Work":
        """The same with fewer bytes."""
        return Work(self.bytes - saved, self.flop)

    def seconds(self, machine: Machine) -> float:
        return max(self.bytes / machine.bytes_per_s, self.flop / machine.flop_per_s)


@dataclass(frozen=True, slots=True)
class Case:
    """One round: `batch` rows, each with `context` committed tokens; element_size: bytes of a weight and of a K."""

    shape: SpecShape
    batch: int
    context: int
    element_size: int


def round_floor(
    target: ModelSpec, head: Eagle3Spec | None, case: Case, machine: Machine, saved: Mapping[Phase, int] | None = None
) -> dict[Phase, float]:
    """Seconds that each phase of a round takes at least. head: None for plain decoding.

    saved: bytes of weights that a forward of a phase does not read, see `saved_bytes`.
    """
    shape, less = case.shape, {phase: (saved or {}).get(phase, 0) for phase in Phase}
    verify = forward_work(target, target_parameters(target), case, shape.num_draft_tokens, target.vocab_size)
    floor = {Phase.DRAFT: 0.0, Phase.VERIFY: verify.without(less[Phase.VERIFY]).seconds(machine)}
    if head is not None:
        parameters, fuse = head_parameters(head)
        level = forward_work(head.layer, parameters, case, shape.topk, head.draft_vocab_size)
        floor[Phase.DRAFT] = max(shape.num_steps - 1, 0) * level.without(less[Phase.DRAFT]).seconds(machine)
        extend = forward_work(head.layer, parameters + fuse, case, shape.commit_width, 0)
        # Only the last column of a row proposes: one row of logits each, and of products with the output matrix.
        logits, silent = case.batch * head.draft_vocab_size, shape.commit_width - 1
        unused = 2 * head.layer.hidden_size * logits * silent
        extend = Work(extend.bytes + case.element_size * logits, extend.flop - unused)
        floor[Phase.EXTEND] = extend.without(less[Phase.EXTEND]).seconds(machine)
    return floor


def saved_bytes(target: Llama, head: Eagle3Head | None, shape: SpecShape, rows: int) -> dict[Phase, int]:
    """Bytes of weights that a forward of each phase does not read, since it reads some in 12 bits.

    rows: of the batch, with its padding.
    """
    layers = [product for layer in target.layers for product in _products(layer)]
    saved = {Phase.VERIFY: _saved([*layers, target.lm_head], rows * shape.num_draft_tokens)}
    if head is not None:
        wide = [*_products(head), head.fuse_features]
        saved[Phase.DRAFT] = _saved([*_products(head), head.lm_head], rows * shape.topk)
        saved[Phase.EXTEND] = _saved(wide, rows * shape.commit_width) + _saved([head.lm_head], rows)
    return saved


def _products(layer: LlamaLayer | Eagle3Head) -> list[object]:
    """The products of a decoder layer."""
    return [layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down]


def _saved(products: Iterable[object], rows: int) -> int:
    few = (each for each in products if isinstance(each, FewRowsLinear | FewRowsGated))
    return sum(each.saved_bytes(rows) for each in few)


def forward_work(spec: ModelSpec, parameters: int, case: Case, queries: int, vocab: int) -> Work:
    """One forward of `queries` tokens a row, each with `vocab` logits."""
    tokens, size = case.batch * queries, case.element_size
    kv = 2 * spec.kv_heads * spec.head_dim * size  # bytes of a token in a layer
    seen = [case.context if window is None else min(case.context, window) for window in spec.windows]
    moved = size * parameters + case.batch * kv * sum(seen) + tokens * (kv * spec.num_layers + size * vocab)
    attention = 4 * spec.num_heads * spec.head_dim * sum(seen)
    return Work(moved, tokens * (2 * parameters + attention))


def target_parameters(spec: ModelSpec) -> int:
    """Parameters a target's forward streams: its layers and its output matrix; an embedding is looked up."""
    shapes = {name: shape for name, shape in Llama.shapes(spec).items() if len(shape) > 1}
    embedding = prod(shapes.pop("model.embed_tokens.weight"))
    return sum(prod(shape) for shape in shapes.values()) + (embedding if spec.tied_embeddings else 0)


def head_parameters(spec: Eagle3Spec) -> tuple[int, int]:
    """Parameters a draft level streams, and those that draft extend adds: the fusing of the target's features."""
    shapes = {name: prod(shape) for name, shape in Eagle3Head.shapes(spec).items() if len(shape) > 1}
    fuse = shapes.pop("fc.weight")
    return sum(shapes.values()), fuse
