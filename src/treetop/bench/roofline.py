"""The floor of a round: the bytes it cannot avoid to move and the operations it cannot avoid to do.

A forward streams its weights once, in the engine's dtype (in 12 bits, as they may be kept too, they take less), reads
the K/V of every row's context, writes the new K/V and the logits; the floor is the larger of bytes over the copy
bandwidth and operations over the matrix rate. Activations count as free, and so does everything that is not a matrix
product. A round is one verify, S - 1 draft levels and one draft extend.
"""

from dataclasses import dataclass
from math import prod

from treetop.bench.machine import Machine
from treetop.models.eagle3 import Eagle3Head
from treetop.models.llama import Llama
from treetop.models.spec import Eagle3Spec, ModelSpec
from treetop.types.layout import SpecShape
from treetop.types.phase import Phase


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved and floating-point operations done."""

    bytes: float
    flop: float

    def seconds(self, machine: Machine) -> float:
        return max(self.bytes / machine.bytes_per_s, self.flop / machine.flop_per_s)


@dataclass(frozen=True, slots=True)
class Case:
    """One round: `batch` rows, each with `context` committed tokens; element_size: bytes of a weight and of a K."""

    shape: SpecShape
    batch: int
    context: int
    element_size: int


def round_floor(target: ModelSpec, head: Eagle3Spec | None, case: Case, machine: Machine) -> dict[Phase, float]:
    """Seconds that each phase of a round takes at least. head: None for plain decoding."""
    shape = case.shape
    verify = forward_work(target, target_parameters(target), case, shape.num_draft_tokens, target.vocab_size)
    floor = {Phase.DRAFT: 0.0, Phase.VERIFY: verify.seconds(machine)}
    if head is not None:
        parameters, fuse = head_parameters(head)
        level = forward_work(head.layer, parameters, case, shape.topk, head.draft_vocab_size)
        floor[Phase.DRAFT] = max(shape.num_steps - 1, 0) * level.seconds(machine)
        extend = forward_work(head.layer, parameters + fuse, case, shape.commit_width, 0)
        # Only the last column of a row proposes: one row of logits each, and of products with the output matrix.
        logits, silent = case.batch * head.draft_vocab_size, shape.commit_width - 1
        unused = 2 * head.layer.hidden_size * logits * silent
        extend = Work(extend.bytes + case.element_size * logits, extend.flop - unused)
        floor[Phase.EXTEND] = extend.seconds(machine)
    return floor


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
