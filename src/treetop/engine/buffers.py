"""What passes between the phases of a round: preallocated for the largest bucket, never rebound.

A batch uses the first rows, so eager and captured rounds run the same functions on the same memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from treetop.checks.poison import poison
from treetop.kernels.kv import kv_dtype
from treetop.kernels.recurrent.states import StateTails, StateUpdates
from treetop.kernels.sampling.process import mask_words
from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.grow import TreeBuilder, make_growth
from treetop.models.config import ModelConfig
from treetop.types.errors import CheckError
from treetop.types.ids import GroupName
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import MAX_LOGPROBS
from treetop.types.state import StateGroup
from treetop.types.tree import Accepted, DraftTree, PathLogprobs, PathPositions

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a zeroed tensor on the engine's device; at check level 3 inside red zones."""


@dataclass(frozen=True, slots=True)
class HeldNodes:
    """What nodes of constrained rows are held to; of other rows every token is allowed and no node is withheld.

    allowed: [rows, T, words] int32, what may follow a node; see `process_reference`.
    withheld: [rows, T] bool, nodes behind which that is not known, which are not accepted.
    """

    allowed: Tensor
    withheld: Tensor


Part = TypeVar("Part")


def _once(make: Callable[["RoundBuffers", int, SpecShape], Part]) -> Callable[["RoundBuffers", int, SpecShape], Part]:
    """What `make` gives for a bucket and a shape, made once: buffers stay where they are, and each round asks often."""

    @wraps(make)
    def part(buffers: "RoundBuffers", bucket: int, shape: SpecShape) -> Part:
        key = make.__name__, bucket, shape
        if key not in buffers.parts:
            buffers.parts[key] = make(buffers, bucket, shape)
        found: Part = buffers.parts[key]
        return found

    return part


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """rows: the graph input.
    identity, causal: the masks of level 0 and of draft extend, which nothing writes.
    blocks: group -> the mask [B, B] of the drafter's block, which nothing writes.
    tree, places, growth: written by DRAFT.
    held: written by the host between DRAFT and VERIFY, if the round has constrained rows; None where none may have any.
    accepted, logprobs, aux_hidden: written by VERIFY; logprobs only if the round has them.

    aux_hidden: [max_requests, S + 1, 3 * hidden], of the accepted path's nodes, all auxiliary layers side by side.
    Tails: group -> [layers, max_requests, capacity, *kv.shape], each scratch of one phase.
    state_tails: group of states -> what VERIFY keeps of its nodes; its scratch.

    parts: what has been asked for, by method, bucket and shape.
    """

    rows: Tensor
    identity: Tensor
    causal: Tensor
    blocks: dict[GroupName, Tensor]
    tree: DraftTree
    places: PathPositions
    held: HeldNodes | None
    accepted: Accepted
    growth: dict[SpecShape, TreeBuilder]
    logprobs: PathLogprobs
    aux_hidden: Tensor
    draft_tails: dict[GroupName, Tensor]
    verify_tails: dict[GroupName, Tensor]
    extend_tails: dict[GroupName, Tensor]
    state_tails: dict[GroupName, StateTails]
    parts: dict[tuple[str, int, SpecShape], Any] = field(default_factory=dict, compare=False, repr=False)

    @_once
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

    @_once
    def places_of(self, bucket: int, shape: SpecShape) -> PathPositions:
        t, w, places = shape.num_draft_tokens, shape.commit_width, self.places
        return PathPositions(
            _part(places.committed, bucket), _part(places.nodes, bucket, t), _part(places.path, bucket, w)
        )

    @_once
    def held_of(self, bucket: int, shape: SpecShape) -> HeldNodes:
        assert self.held is not None, "the client is told that no logits can be changed"
        t = shape.num_draft_tokens
        return HeldNodes(_part(self.held.allowed, bucket, t), _part(self.held.withheld, bucket, t))

    @_once
    def accepted_of(self, bucket: int, shape: SpecShape) -> Accepted:
        w, accepted = shape.commit_width, self.accepted
        return Accepted(
            _part(accepted.path, bucket, w),
            _part(accepted.accept_len, bucket),
            _part(accepted.tokens, bucket, w),
            _part(accepted.bonus, bucket),
            _part(accepted.finite, bucket),
            _part(accepted.choice, bucket, shape.num_draft_tokens),
        )

    @_once
    def growth_of(self, bucket: int, shape: SpecShape) -> TreeBuilder:
        return self.growth[shape].first(bucket)

    @_once
    def logprobs_of(self, bucket: int, shape: SpecShape) -> PathLogprobs:
        w, logprobs = shape.commit_width, self.logprobs
        return PathLogprobs(_part(logprobs.values, bucket, w), _part(logprobs.ids, bucket, w))

    @_once
    def aux_hidden_of(self, bucket: int, shape: SpecShape) -> Tensor:
        return _part(self.aux_hidden, bucket, shape.commit_width)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of states and updates in an engine of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def make_updates(group: StateGroup, leading: tuple[int, int], dtype: torch.dtype, zeros: Zeros) -> StateUpdates:
    """Zeroed updates [layers, *leading, ...] of a group. dtype: the engine's."""
    shapes = (group.key_heads, group.key_dim), (group.heads, group.value_dim), group.decay_shape
    k, d, g = (zeros((group.num_layers, *leading, *shape), state_dtype(dtype)) for shape in shapes)
    return StateUpdates(k, d, g)


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
    layout: Layout,
    num_features: int,
    model: ModelConfig,
    calibration: Calibration,
    dtype: torch.dtype,
    zeros: Zeros,
    *,
    constrains: bool,
    blocks: Mapping[GroupName, bool] | None = None,
) -> RoundBuffers:
    """Zeroed buffers, sized by the layout's capacities. model: the target's. constrains: rows may be.

    blocks: KV group -> whether queries of the drafter's block see it up to themselves alone; None without one.
    """
    hidden, vocab_size = model.hidden_size, model.vocab_size
    b, t, w, long = layout.max_requests, layout.verify_tail, layout.commit_width, torch.int64

    def tails(groups: list[KVGroup], capacity: int) -> dict[GroupName, Tensor]:
        return {g.name: zeros((g.num_layers, b, capacity, *g.kv.shape), kv_dtype(g.kv, dtype)) for g in groups}

    k, best, extend = layout.max_topk, min(MAX_LOGPROBS, vocab_size), layout.extend_tail
    identity, causal = zeros((k, k), torch.bool), zeros((extend, extend), torch.bool)
    identity.fill_diagonal_(True)
    causal.copy_(extend_mask(extend))
    masks = dict[GroupName, Tensor]()
    for name, is_causal in (blocks or {}).items():
        masks[name] = zeros((layout.block, layout.block), torch.bool).fill_(True)
        if is_causal:
            masks[name].copy_(extend_mask(layout.block))
    target = [group for group in layout.groups if not group.is_draft]
    draft = [group for group in layout.groups if group.is_draft]
    return RoundBuffers(
        rows=zeros((b,), long),
        identity=identity,
        causal=causal,
        blocks=masks,
        tree=DraftTree(
            zeros((b, t), long),
            zeros((b, t), long),
            zeros((b, t), long),
            zeros((b, t, t), torch.bool),
            zeros((b, t), torch.float32),
        ),
        places=PathPositions(zeros((b,), long), zeros((b, t), long), zeros((b, w), long)),
        held=HeldNodes(zeros((b, t, mask_words(vocab_size)), torch.int32).fill_(-1), zeros((b, t), torch.bool))
        if constrains
        else None,
        accepted=Accepted(
            zeros((b, w), long),
            zeros((b,), long),
            zeros((b, w), long),
            zeros((b,), long),
            zeros((b,), torch.bool),
            zeros((b, t), long),
        ),
        growth={shape: make_growth(shape, b, calibration, zeros) for shape in layout.shapes},
        logprobs=PathLogprobs(zeros((b, w, 1 + best), torch.float32), zeros((b, w, best), long)),
        aux_hidden=zeros((b, w, num_features * hidden), dtype),
        draft_tails=tails(draft, layout.draft_tail),
        verify_tails=tails(target, layout.verify_tail),
        extend_tails=tails(draft, extend),
        state_tails={
            group.name: StateTails(
                zeros((group.num_layers, b, t, group.channels), dtype), make_updates(group, (b, t), dtype, zeros)
            )
            for group in layout.state_groups
        },
    )


def poison_undeclared(buffers: RoundBuffers, phase: Phase) -> None:
    """Poison scratch and outputs of a phase: whatever they hold before it runs must not matter."""
    tails = [*buffers.draft_tails.values(), *buffers.verify_tails.values(), *buffers.extend_tails.values()]
    for each in buffers.state_tails.values():
        tails += [each.mixed, each.updates.k, each.updates.d, each.updates.g]
    held = [] if buffers.held is None else [buffers.held.allowed, buffers.held.withheld]
    drafted = [getattr(value, name) for value in (buffers.tree, buffers.places) for name in value.__dataclass_fields__]
    verified = [getattr(buffers.accepted, name) for name in buffers.accepted.__dataclass_fields__]
    verified += [buffers.logprobs.values, buffers.logprobs.ids, buffers.aux_hidden]
    outputs = {
        Phase.DRAFT: [*drafted, *held, *verified],
        Phase.VERIFY: verified,
        Phase.EXTEND: [],
    }
    for tensor in (*tails, *outputs[phase]):
        poison(tensor)
