"""The small operations of a round, by device: PyTorch's own, or one Triton launch each.

Everything a round does besides the models' forwards and attention: gathering its rows, growing and selecting trees,
accepting, and writing what it leaves behind. Integers of both are equal bit for bit, scores are the same float32 sums.
"""

from typing import Protocol

import torch
from torch import Tensor

from treetop.kernels import accept as accepting
from treetop.kernels import commit as committing
from treetop.kernels import grow as growing
from treetop.kernels import rows as row_state
from treetop.kernels.accept import Drawn, Pieces
from treetop.kernels.commit import Paths
from treetop.kernels.draw import draw_tokens
from treetop.kernels.grow import Children, Frontier, Growth, empty_growth
from treetop.kernels.kv import commit_tail, slots_of
from treetop.kernels.rows import DraftState, Outcome, RowTables
from treetop.kernels.sampling import Sampler
from treetop.kernels.tree import next_level_mask, root_tree, select_tree, stable_topk, worst_if_nan_
from treetop.kernels.triton_guard import gpu_traits
from treetop.spec.verify import accept, force, greedy_choice, sampled_choice
from treetop.types.layout import SpecShape
from treetop.types.tree import Accepted, DraftTree, Places


class RoundOps(Protocol):
    """start: node 0 of the trees, where the rows stand, and the first frontier; a tree of one node is complete then.
    grow: record a frontier's children (those of level `level` + 1) and keep the k best. select: the rest of the trees.

    greedy: the target's choices from its logits [rows, T, vocab], in a form that `accept` takes. draw: the same by the
    rows' samplers, see `spec.verify.sampled_choice`. accept: follow them.
    forced: see `spec.verify.force`. commit: a group's K/V, from tail to pages. features: those of each path's nodes,
    side by side. pick: one column of each row. finish: the row tables after a round. extend_mask: [width, width] bool.
    filters_apart: whether a draw with filters is other work than one without.
    """

    filters_apart: bool

    def start(
        self, tables: RowTables, rows: Tensor, shape: SpecShape, tree: DraftTree, places: Places
    ) -> tuple[Growth, Frontier]: ...

    def grow(self, growth: Growth, level: int, frontier: Frontier, children: Children) -> Frontier: ...

    def select(self, growth: Growth, tree: DraftTree, places: Places) -> None: ...

    def greedy(self, logits: Tensor) -> Drawn | Pieces: ...

    def draw(self, logits: Tensor, sampler: Sampler, rows: Tensor, positions: Tensor, filtered: bool) -> Drawn: ...

    def accept(self, chosen: Drawn | Pieces, tree: DraftTree, out: Accepted, forced: int | None) -> None: ...

    def commit(self, pool: Tensor, tail: Tensor, page_table: Tensor, page_size: int, paths: Paths) -> None: ...

    def features(self, out: Tensor, streams: tuple[Tensor, ...], path: Tensor) -> None: ...

    def pick(self, x: Tensor, index: Tensor) -> Tensor: ...

    def finish(
        self, tables: RowTables, rows: Tensor, dummy_row: int, accepted: Accepted, draft: DraftState | None
    ) -> None: ...

    def extend_mask(self, width: int, device: torch.device) -> Tensor: ...


def draft_positions(committed: Tensor, level: int, k: int) -> Tensor:
    """Nodes of depth `level + 1` stand at `committed + level`: the draft runs one position behind its token.

    Returns [rows, k] int64. Source: sgl-25015, where they were one too far.
    """
    return (committed + level)[:, None].expand(-1, k)


def extend_mask(width: int, device: torch.device) -> Tensor:
    """Which of its own columns draft extend sees: causal, itself included. Returns [width, width] bool (sgl-26628)."""
    column = torch.arange(width, device=device)
    return column[:, None] >= column


def feature_nodes(path: Tensor, num_nodes: int) -> Tensor:
    """Rows of the flattened [rows * T, hidden] features that a path's nodes have. The stride is T (sgl-27545).

    path: [rows, S + 1] int64. Returns [rows * (S + 1)] int64.
    """
    row = torch.arange(path.shape[0], device=path.device)[:, None]
    return (row * num_nodes + path).reshape(-1)


class TorchRoundOps:
    """Any device, any dtype, any shape."""

    filters_apart = True  # they sort the vocabulary

    def start(
        self, tables: RowTables, rows: Tensor, shape: SpecShape, tree: DraftTree, places: Places
    ) -> tuple[Growth, Frontier]:
        k, n = shape.topk, rows.shape[0]
        committed, root = tables.committed[rows], tables.root[rows]
        places.committed.copy_(committed)
        torch.add(committed[:, None], torch.arange(shape.commit_width, device=rows.device), out=places.path)
        growth = empty_growth(shape, rows)
        if shape.num_steps == 0:
            copy_into(tree, root_tree(root))
            places.nodes.copy_(committed[:, None])
            return growth, Frontier(*[growth.scores] * 4)
        assert tables.draft is not None
        tree.tokens[:, 0] = root
        tokens, score = growth.tokens[:, :k], growth.scores[:, :k]
        tokens.copy_(tables.draft.tokens[rows, :k])
        score.copy_(tables.draft.logprob[rows, :k])
        worst_if_nan_(score)
        growth.parents[:, : k + 1] = torch.arange(-1, k, device=rows.device)
        levels = [draft_positions(committed, level, k) for level in range(shape.num_steps)]
        torch.cat(levels, dim=1, out=growth.positions)
        hidden = tables.draft.hidden[rows][:, None].expand(-1, k, -1)
        mask = torch.eye(k, dtype=torch.bool, device=rows.device).expand(n, k, k)
        return growth, Frontier(tokens, score, hidden, mask)

    def grow(self, growth: Growth, level: int, frontier: Frontier, children: Children) -> Frontier:
        k = frontier.tokens.shape[1]
        first = k + level * k**2
        scores = growth.scores[:, first : first + k**2]
        torch.add(frontier.score[:, :, None], children.logprob, out=scores.unflatten(1, (k, k)))
        worst_if_nan_(scores)
        tokens = children.tokens.flatten(1)
        growth.tokens[:, first : first + k**2] = tokens
        score, chosen = stable_topk(scores, k)
        group = 1 + (level + 1) * k  # the first below the new frontier
        torch.add(chosen, first, out=growth.parents[:, group : group + k])
        parent = chosen // k
        hidden = children.hidden
        return Frontier(
            tokens.gather(1, chosen),
            score,
            hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[2])),
            next_level_mask(frontier.mask, parent),
        )

    def select(self, growth: Growth, tree: DraftTree, places: Places) -> None:
        root = tree.tokens[:, 0]
        copy_into(tree, select_tree(root, growth.tokens, growth.scores, growth.parents, growth.shape))
        torch.add(places.committed[:, None], tree.depth, out=places.nodes)

    def greedy(self, logits: Tensor) -> Drawn:
        return Drawn(*greedy_choice(logits))

    def draw(self, logits: Tensor, sampler: Sampler, rows: Tensor, positions: Tensor, filtered: bool) -> Drawn:
        return Drawn(*sampled_choice(logits, sampler, rows, positions, filtered))

    def accept(self, chosen: Drawn | Pieces, tree: DraftTree, out: Accepted, forced: int | None) -> None:
        assert isinstance(chosen, Drawn)
        width = out.path.shape[1]
        if forced is None:
            copy_into(out, accept(tree, chosen.token, chosen.finite, width))
        else:
            copy_into(out, force(chosen.token, chosen.finite, forced, width))

    def commit(self, pool: Tensor, tail: Tensor, page_table: Tensor, page_size: int, paths: Paths) -> None:
        slots = slots_of(page_table, paths.rows, paths.positions, paths.kept, page_size)
        commit_tail(pool, tail, paths.source, slots)

    def features(self, out: Tensor, streams: tuple[Tensor, ...], path: Tensor) -> None:
        nodes = feature_nodes(path, streams[0].shape[1])
        committing.path_features_reference(out, streams, nodes)

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        return row_state.pick_reference(x, index)

    def finish(
        self, tables: RowTables, rows: Tensor, dummy_row: int, accepted: Accepted, draft: DraftState | None
    ) -> None:
        outcome = Outcome(accepted.accept_len + 1, accepted.bonus, draft)
        row_state.finish_reference(tables, rows, rows != dummy_row, outcome)

    def extend_mask(self, width: int, device: torch.device) -> Tensor:
        return extend_mask(width, device)


class TritonRoundOps:
    """A GPU, and shapes that `kernels.grow.fits` admits."""

    filters_apart = False

    def __init__(self, device: torch.device, max_topk: int, max_width: int) -> None:
        """max_topk, max_width: the widest masks asked for; they are constants, made here and never in a graph."""
        self._gpu = gpu_traits(device)
        self._identity = torch.eye(max_topk, dtype=torch.bool, device=device)
        self._causal = extend_mask(max_width, device)

    def start(
        self, tables: RowTables, rows: Tensor, shape: SpecShape, tree: DraftTree, places: Places
    ) -> tuple[Growth, Frontier]:
        growth = empty_growth(shape, rows)
        identity = self._identity[: shape.topk, : shape.topk]
        return growth, growing.start(tables, rows, growth, tree, places, identity)

    def grow(self, growth: Growth, level: int, frontier: Frontier, children: Children) -> Frontier:
        return growing.grow(growth, level, frontier, children, self._gpu)

    def select(self, growth: Growth, tree: DraftTree, places: Places) -> None:
        growing.select(growth, tree, places, self._gpu)

    def greedy(self, logits: Tensor) -> Pieces:
        return accepting.best_of_pieces(logits, self._gpu)

    def draw(self, logits: Tensor, sampler: Sampler, rows: Tensor, positions: Tensor, filtered: bool) -> Drawn:
        return Drawn(*draw_tokens(logits, sampler, rows, positions, self._gpu))

    def accept(self, chosen: Drawn | Pieces, tree: DraftTree, out: Accepted, forced: int | None) -> None:
        accepting.accept(chosen, tree, out, forced, self._gpu)

    def commit(self, pool: Tensor, tail: Tensor, page_table: Tensor, page_size: int, paths: Paths) -> None:
        committing.commit(pool, tail, page_table, page_size, paths, self._gpu)

    def features(self, out: Tensor, streams: tuple[Tensor, ...], path: Tensor) -> None:
        committing.path_features(out, streams, path, self._gpu)

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        return row_state.pick(x, index, self._gpu)

    def finish(
        self, tables: RowTables, rows: Tensor, dummy_row: int, accepted: Accepted, draft: DraftState | None
    ) -> None:
        row_state.finish(tables, rows, dummy_row, accepted, draft, self._gpu)

    def extend_mask(self, width: int, device: torch.device) -> Tensor:
        assert device == self._causal.device
        return self._causal[:width, :width]


def copy_into(target: DraftTree | Accepted, source: DraftTree | Accepted) -> None:
    """Write every tensor of a value into the buffers of another."""
    for name in source.__dataclass_fields__:
        getattr(target, name).copy_(getattr(source, name))
