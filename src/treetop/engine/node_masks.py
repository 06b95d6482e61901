"""What constrained rows are held to: one mask a node of the tree, made by the host between a round's draft and its
verification, and before that the tokens that every tree begins with.

forced --> DRAFT --> tokens and parents of the constrained rows' trees --host--> masks --> VERIFY
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from treetop.engine.features.masks import GrammarMasks
from treetop.engine.features.processors import to_device
from treetop.kernels.sampling.process import mask_words
from treetop.types.errors import CheckError
from treetop.types.ids import Row
from treetop.types.messages import NodeMasks, RoundPlan, RowMask, RowTree, TreeMasks
from treetop.types.tree import DraftTree, PathPositions


def no_masks(_: Sequence[RowTree]) -> tuple[()]:
    """Nothing is known behind a root: a host that walks no tree."""
    return ()


def _nobody(_: Sequence[NodeMasks]) -> None:
    """Nobody else needs them."""


class NodeMaskWriter:
    """Says what may follow each node of constrained rows, in rounds and in the prefill of their first token."""

    def __init__(self, vocab_size: int) -> None:
        """tree_masks: the host's step, which the scheduler takes; it may be set between steps. tell: is given what came
        of it, for ranks that share the model."""
        self._vocab_size, self._words = vocab_size, mask_words(vocab_size)
        self.tree_masks: TreeMasks = no_masks
        self.tell: Callable[[Sequence[NodeMasks]], object] = _nobody

    def force(self, plan: RoundPlan, masks: GrammarMasks) -> None:
        """Write what must follow the roots of constrained rows. held: of the batch."""
        width = masks.forced.shape[1] - 1
        of_row = {mask.row: mask.forced[:width] for mask in plan.masks}
        lines = [[*of_row.get(row, ())] for row in plan.rows]
        masks.forced.fill_(-1)
        known = torch.tensor([[*line, *[-1] * (width - len(line))] for line in lines], dtype=torch.int32)
        masks.forced[: len(lines), :width] = to_device(masks.forced.device, known)

    def hold(self, plan: RoundPlan, tree: DraftTree, places: PathPositions, masks: GrammarMasks) -> None:
        """Ask for masks of the trees of constrained rows, and write them; the host waits for trees that have drafts.

        tree, places: of the batch; rows whose trees come back changed are written. held: is written in full.
        """
        of_row: dict[Row, dict[int, bytes]] = {mask.row: {0: mask.allowed} for mask in plan.masks}
        at, device = {row: place for place, row in enumerate(plan.rows) if row in of_row}, masks.allowed.device
        lines = to_device(device, torch.tensor([*at.values()]))
        masks.allowed.fill_(-1)  # what need not wait for the trees goes first
        masks.masked_drafts.fill_(False)
        for found in self._asked(at, tree, plan.shape.num_steps) if plan.shape.num_steps else ():
            of_row[found.row] = {**found.allowed, **of_row[found.row]}
            if found.tree is not None:
                _replant(at[found.row], found.tree, found.source, tree, places)
        known = [of_row[row] for row in at]
        masked_drafts = torch.ones((len(at), masks.masked_drafts.shape[1]), dtype=torch.bool)
        for line, of_node in enumerate(known):
            masked_drafts[line, list(of_node)] = False
        masks.allowed[lines] = to_device(device, self.packed(dict(enumerate(known)), masked_drafts.shape))
        masks.masked_drafts[lines] = to_device(device, masked_drafts)

    def _asked(self, at: Mapping[Row, int], tree: DraftTree, max_depth: int) -> Sequence[NodeMasks]:
        """Masks of the trees of rows, by their places in the batch."""
        tokens, parents, padding = torch.stack(
            [tree.tokens, tree.parent, tree.is_padding]
        ).tolist()  # of all rows: one copy, and no index before it
        trees = []
        for row, place in at.items():
            count = len(padding[place]) - sum(padding[place])
            trees.append(RowTree(row, tuple(tokens[place][:count]), tuple(parents[place][:count]), max_depth))
        masks = self.tree_masks(trees)
        self.tell(masks)
        return masks

    def roots(self, rows: Sequence[Row], masks: Sequence[RowMask], bucket: int, device: torch.device) -> Tensor | None:
        """What may follow the roots of a prefill's rows; see `process_reference`. None if any token may."""
        if not masks:
            return None
        of_row = {mask.row: {0: mask.allowed} for mask in masks}
        by_place = {place: of_row[row] for place, row in enumerate(rows) if row in of_row}
        return to_device(device, self.packed(by_place, torch.Size((bucket, 1))))

    def packed(self, by_place: Mapping[int, Mapping[int, bytes]], nodes: torch.Size) -> Tensor:
        """Masks by place and node as words on the host, [*nodes, words] int32; every token where none is given."""
        size, most = -(-self._vocab_size // 8), self._words * 4
        words = torch.full((*nodes, most), 0xFF, dtype=torch.uint8)
        for place, of_node in by_place.items():
            if any(len(mask) != size for mask in of_node.values()):
                raise CheckError(
                    f"masks of {[*map(len, of_node.values())]} bytes for a vocabulary of {self._vocab_size}"
                )
            listed = torch.frombuffer(bytearray(b"".join(of_node.values())), dtype=torch.uint8)
            words[place, list(of_node), :size] = listed.view(len(of_node), size)
        return words.view(torch.int32)


def _replant(place: int, new: RowTree, source: Sequence[int], tree: DraftTree, places: PathPositions) -> None:
    """Write another tree over a row's own."""
    count, device = len(new.tokens), tree.tokens.device
    depth, mask = [0] * count, torch.eye(count, dtype=torch.bool)
    for node, up in enumerate(new.parent[1:], start=1):
        depth[node] = depth[up] + 1
        mask[node] |= mask[up]
    numbers = to_device(device, torch.tensor([new.tokens, new.parent, depth, source]))
    tree.tokens[place, :count], tree.parent[place, :count], tree.depth[place, :count] = numbers[:3]
    tree.mask[place, :count, :count] = to_device(device, mask)
    tree.logprob[place, :count] = tree.logprob[place, numbers[3]]
    places.nodes[place, :count] = places.committed[place] + numbers[2]
