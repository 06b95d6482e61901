"""Random inputs and sown buffers for the tests of a round's operations."""

import random
from dataclasses import dataclass, fields

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from support.oracles import float32
from treetop.kernels.tree.calibration import Calibration, make_calibration
from treetop.kernels.tree.grow import Children, TreeBuilder, make_growth
from treetop.kernels.tree.rows import DraftState, RowTables
from treetop.kernels.tree.tree import ancestor_mask
from treetop.types.layout import SpecShape
from treetop.types.sampling import CLASSES
from treetop.types.tree import Accepted, DraftTree, PathPositions
from treetop_debug.faults import FAULTS

CPU = torch.device("cpu")
FEW = settings(max_examples=15, deadline=None)
# Few values, so that ties are common: equal ones, both zeros, and impossible ones.
SCORES = [0.0, -0.0, float32(-0.1), -0.5, -0.5, -1.0, -30.0, float("-inf"), float("nan")]
VOCAB = 40
IN_KERNELS = [name for name, found in FAULTS.items() if any("_kernel" in each.target for each in found.patches)]
FULL_TREE = (130, 13)  # nodes and columns of buffers larger than any tree here


def sown(dtype: torch.dtype, *shape: int) -> Tensor:
    """Memory that held something else: NaN, true, or a number that is no index."""
    fill = {torch.bool: True, torch.int64: -(2**62)}.get(dtype, float("nan"))
    return torch.full(shape, fill, dtype=dtype)


@dataclass
class Buffers:
    """Buffers for more rows and larger trees than any test has."""

    tree: DraftTree
    places: PathPositions
    accepted: Accepted

    @classmethod
    def make(cls) -> "Buffers":
        (t, w), long = FULL_TREE, torch.int64
        wide = [sown(long, 6, t) for _ in range(3)]
        return cls(
            DraftTree(*wide, sown(torch.bool, 6, t, t), sown(torch.float32, 6, t)),
            PathPositions(sown(long, 6), sown(long, 6, t), sown(long, 6, w)),
            Accepted(
                sown(long, 6, w), sown(long, 6), sown(long, 6, w), sown(long, 6), sown(torch.bool, 6), sown(long, 6, t)
            ),
        )

    def of(self, rows: int, shape: SpecShape) -> tuple[DraftTree, PathPositions, Accepted]:
        t, w, tree, places, out = shape.num_draft_tokens, shape.commit_width, self.tree, self.places, self.accepted
        return (
            DraftTree(
                tree.tokens[:rows, :t],
                tree.parent[:rows, :t],
                tree.depth[:rows, :t],
                tree.mask[:rows, :t, :t],
                tree.logprob[:rows, :t],
            ),
            PathPositions(places.committed[:rows], places.nodes[:rows, :t], places.path[:rows, :w]),
            Accepted(
                out.path[:rows, :w],
                out.accept_len[:rows],
                out.tokens[:rows, :w],
                out.bonus[:rows],
                out.finite[:rows],
                out.choice[:rows, :t],
            ),
        )

    def tensors(self):
        for value in (self.tree, self.places, self.accepted):
            for field in fields(value):
                yield field.name, getattr(value, field.name)


def assert_same(got, want) -> None:
    """Equal bits in every field, NaN and -0.0 included."""
    pairs = zip(got.tensors(), want.tensors(), strict=True) if isinstance(got, Buffers) else (
        ((f.name, getattr(got, f.name)), (f.name, getattr(want, f.name))) for f in fields(got)
    )  # fmt: skip
    for (name, one), (_, other) in pairs:
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype, name
            torch.testing.assert_close(
                one, other, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name} {m}"
            )


@st.composite
def shapes(draw, smallest=1):
    k = draw(st.integers(1, 5))
    num_steps = draw(st.integers(smallest, 4))
    if num_steps == 0:
        return SpecShape(1, 0, 1)
    if k == 1:
        return SpecShape(1, num_steps, num_steps + 1)
    largest = 1 + k + (num_steps - 1) * k * k
    return SpecShape(k, num_steps, draw(st.one_of(st.just(2), st.just(largest), st.integers(2, largest))))


def random_calibration(rng: random.Random, depths: int, ranks: int) -> Calibration:
    """What may have been learned: shifts up and down, within their bounds."""
    calibration = make_calibration(depths, ranks, lambda size, dtype: torch.zeros(size, dtype=dtype))
    torch.manual_seed(rng.randrange(10**6))
    calibration.inv_temp.copy_(torch.rand(calibration.inv_temp.shape) * 3 + 0.1)
    calibration.logprob_bias.copy_(torch.rand(calibration.logprob_bias.shape) * 4 - 2)
    calibration.nodes.copy_(torch.rand(calibration.nodes.shape) * 9000)
    for table in (calibration.seen, calibration.chosen, calibration.predicted):
        table.copy_(torch.rand(table.shape) * 900)
    return calibration


def sown_growth(shape: SpecShape, rows: int, calibration: Calibration | None = None) -> TreeBuilder:
    """Candidates in memory that held something else; None is a calibration that has learned nothing."""
    if calibration is None:
        calibration = make_calibration(
            max(1, shape.num_steps), shape.topk, lambda size, dtype: torch.zeros(size, dtype=dtype)
        )
    return make_growth(shape, rows, calibration, lambda size, dtype: sown(dtype, *size))


def identity(shape: SpecShape) -> Tensor:
    return torch.eye(shape.topk, dtype=torch.bool)


def random_tables(rng: random.Random, max_topk: int, width: int, dtype=torch.float32) -> RowTables:
    """Five request rows and the dummy, wider than a tree needs."""
    scores = [sorted((rng.choice(SCORES) for _ in range(max_topk)), reverse=True) for _ in range(6)]
    torch.manual_seed(rng.randrange(10**6))
    return RowTables(
        torch.tensor([rng.randrange(90) for _ in range(5)] + [0]),
        torch.tensor([rng.randrange(VOCAB) for _ in range(6)]),
        torch.tensor([rng.randrange(CLASSES) for _ in range(6)]),
        DraftState(
            torch.tensor([rng.sample(range(VOCAB), max_topk) for _ in range(6)]),
            torch.tensor(scores),
            torch.randn(6, width).to(dtype),
        ),
    )


def random_children(rng: random.Random, rows: int, k: int, width: int, dtype=torch.float32) -> Children:
    scores = [[sorted((rng.choice(SCORES) for _ in range(k)), reverse=True) for _ in range(k)] for _ in range(rows)]
    torch.manual_seed(rng.randrange(10**6))
    return Children(
        torch.tensor([[rng.sample(range(VOCAB), k) for _ in range(k)] for _ in range(rows)]),
        torch.tensor(scores),
        torch.randn(rows, k, width).to(dtype),
    )


def random_tree(
    rng: random.Random, rows: int, shape: SpecShape, buffers: Buffers, vocab: int = VOCAB, alike: bool = False
) -> DraftTree:
    """Trees of which a target may agree with any part: siblings that differ, or may be alike."""
    tree = buffers.of(rows, shape)[0]
    for row in range(rows):
        parent, depth, token, taken = [0], [0], [rng.randrange(4)], set()
        while len(parent) < shape.num_draft_tokens:
            place = (rng.choice([i for i in range(len(parent)) if depth[i] < shape.num_steps]), rng.randrange(vocab))
            if alike or place not in taken:
                taken.add(place)
                parent.append(place[0])
                depth.append(depth[place[0]] + 1)
                token.append(place[1])
        tree.tokens[row], tree.parent[row], tree.depth[row] = map(torch.tensor, (token, parent, depth))
    tree.mask.copy_(ancestor_mask(tree.parent, shape.num_steps))
    tree.logprob.fill_(-1.0)
    return tree


def agreeing(rng: random.Random, tree: DraftTree) -> Tensor:
    """A target's choice after each node: mostly one of its children's tokens."""
    torch.manual_seed(rng.randrange(10**6))
    choice = torch.randint(0, VOCAB, tree.tokens.shape)
    for row, parents in enumerate(tree.parent.tolist()):
        for node, parent in enumerate(parents):
            if node and rng.random() < 0.7:
                choice[row, parent] = tree.tokens[row, node]
    return choice
