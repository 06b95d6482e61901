"""What passes between the phases of a round: preallocated for the largest bucket, never rebound.

A batch uses the first rows, so eager and captured rounds run the same functions on the same memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.types.errors import CheckError
from treetop.types.ids import GroupName
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.sampling import MOST_LOGPROBS
from treetop.types.tree import Accepted, DraftTree, PathLogprobs, PathPositions

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a zeroed tensor on the engine's device; at check level 3 inside red zones."""


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """rows: the graph input. identity, causal: the masks of level 0 and of draft extend, which nothing writes. tree,
    places: written by DRAFT. accepted, logprobs, aux_hidden: written by VERIFY; logprobs only if the round has them.

    aux_hidden: [max_requests, S + 1, 3 * hidden], of the accepted path's nodes, all auxiliary layers side by side.
    Tails: group -> [layers, max_requests, capacity, *kv.shape], each scratch of one phase.
    """

    rows: Tensor
    identity: Tensor
    causal: Tensor
    tree: DraftTree
    places: PathPositions
    accepted: Accepted
    logprobs: PathLogprobs
    aux_hidden: Tensor
    draft_tails: dict[GroupName, Tensor]
    verify_tails: dict[GroupName, Tensor]
    extend_tails: dict[GroupName, Tensor]

    def tree_of(self, bucket: int, shape: SpecShape) -> DraftTree:
        """The part of the tree buffers that a batch of `bucket` rows uses."""
        t, tree = shape.num_draft_tokens, self.tree
        return DraftTree(
            _part(tree.tokens, bucket, t),
            _part(tree.parent, bucket, t),
            _part(tree.depth, bucket, t),
            _part(tree.mask, bucket, t, t),
            _part(tree.logprob, bucket, t),
        )

    def places_of(self, bucket: int, shape: SpecShape) -> PathPositions:
        t, w, places = shape.num_draft_tokens, shape.commit_width, self.places
        return PathPositions(
            _part(places.committed, bucket), _part(places.nodes, bucket, t), _part(places.path, bucket, w)
        )

    def accepted_of(self, bucket: int, shape: SpecShape) -> Accepted:
        w, accepted = shape.commit_width, self.accepted
        return Accepted(
            _part(accepted.path, bucket, w),
            _part(accepted.accept_len, bucket),
            _part(accepted.tokens, bucket, w),
            _part(accepted.bonus, bucket),
            _part(accepted.finite, bucket),
        )

    def logprobs_of(self, bucket: int, shape: SpecShape) -> PathLogprobs:
        w, logprobs = shape.commit_width, self.logprobs
        return PathLogprobs(_part(logprobs.values, bucket, w), _part(logprobs.ids, bucket, w))

    def aux_hidden_of(self, bucket: int, shape: SpecShape) -> Tensor:
        return _part(self.aux_hidden, bucket, shape.commit_width)


def extend_mask(width: int) -> Tensor:
    """Which of its own columns draft extend sees: causal, itself included. Returns [width, width] bool (sgl-26628).

    On the CPU: arithmetic on a meta tensor, by which memory is counted, would load PyTorch's compiler, in a second.
    """
    column = torch.arange(width)
    return column[:, None] >= column


def _part(buffer: Tensor, *need: int) -> Tensor:
    """The first `need` of each of a buffer's first dimensions; slicing alone would hide that there are fewer."""
    have = tuple(buffer.shape[: len(need)])
    if any(n > h for n, h in zip(need, have, strict=True)):
        raise CheckError(f"round buffers: need {need}, have {have}; raise --speculative-num-steps")
    return buffer[tuple(slice(n) for n in need)]


def make_round_buffers(
    layout: Layout, num_features: int, hidden: int, vocab_size: int, dtype: torch.dtype, zeros: Zeros
) -> RoundBuffers:
    """Zeroed buffers, sized by the layout's capacities. hidden, vocab_size: the target's."""
    b, t, w, long = layout.max_requests, layout.verify_tail, layout.commit_width, torch.int64

    def tails(groups: list[KVGroup], capacity: int) -> dict[GroupName, Tensor]:
        return {g.name: zeros((g.num_layers, b, capacity, *g.kv.shape), dtype) for g in groups}

    k, best = layout.max_topk, min(MOST_LOGPROBS, vocab_size)
    identity, causal = zeros((k, k), torch.bool), zeros((w, w), torch.bool)
    identity.fill_diagonal_(True)
    causal.copy_(extend_mask(w))
    target = [group for group in layout.groups if not group.is_draft]
    draft = [group for group in layout.groups if group.is_draft]
    return RoundBuffers(
        rows=zeros((b,), long),
        identity=identity,
        causal=causal,
        tree=DraftTree(
            zeros((b, t), long),
            zeros((b, t), long),
            zeros((b, t), long),
            zeros((b, t, t), torch.bool),
            zeros((b, t), torch.float32),
        ),
        places=PathPositions(zeros((b,), long), zeros((b, t), long), zeros((b, w), long)),
        accepted=Accepted(
            zeros((b, w), long), zeros((b,), long), zeros((b, w), long), zeros((b,), long), zeros((b,), torch.bool)
        ),
        logprobs=PathLogprobs(zeros((b, w, 1 + best), torch.float32), zeros((b, w, best), long)),
        aux_hidden=zeros((b, w, num_features * hidden), dtype),
        draft_tails=tails(draft, layout.draft_tail),
        verify_tails=tails(target, layout.verify_tail),
        extend_tails=tails(draft, layout.commit_width),
    )
