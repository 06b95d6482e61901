"""What passes between the phases of a round: preallocated for the largest bucket, never rebound.

A batch uses the first rows, so eager and captured rounds run the same functions on the same memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from treetop.engine.prompt_blocks import PromptBuffers, make_prompt_buffers
from treetop.kernels.kv import kv_dtype
from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.grow import TreeBuilder, make_growth
from treetop.models.config import ModelConfig
from treetop.types.errors import CheckError
from treetop.types.ids import GroupName
from treetop.types.layout import KVGroup, Layout, SpecShape
from treetop.types.phase import Phase
from treetop.types.sampling import MAX_LOGPROBS
from treetop.types.tree import Accepted, DraftTree, FlatNodes, PathLogprobs, PathPositions

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a zeroed tensor on the engine's device; at check level 3 inside red zones."""


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
    """row_lists: the graph input, [2, max_requests]: the batch's rows, and of them what the draft has, the dummy row in
        place of those that it has nothing of.
    identity, causal: the masks of level 0 and of draft extend, which nothing writes.
    blocks: group -> the mask [B, B] of the drafter's block, which nothing writes.
    prompts: graph inputs of steps that have prompts in blocks, and what these found.
    tree, places, growth, flat: written by DRAFT; flat only where a budget cuts trees.
    accepted, logprobs, aux_hidden: written by VERIFY; logprobs only if the round has them.

    aux_hidden: [max_requests, S + 1, 3 * hidden], of the accepted path's nodes, all auxiliary layers side by side.
    Tails: group -> [layers, max_requests, capacity, *kv.shape], each scratch of one phase.

    parts: what has been asked for, by method, bucket and shape.
    """

    row_lists: Tensor
    prompts: PromptBuffers
    identity: Tensor
    causal: Tensor
    blocks: dict[GroupName, Tensor]
    tree: DraftTree
    places: PathPositions
    accepted: Accepted
    growth: dict[SpecShape, TreeBuilder]
    flat: FlatNodes
    logprobs: PathLogprobs
    aux_hidden: Tensor
    draft_tails: dict[GroupName, Tensor]
    verify_tails: dict[GroupName, Tensor]
    extend_tails: dict[GroupName, Tensor]
    parts: dict[tuple[str, int, SpecShape], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def rows(self) -> Tensor:
        """[max_requests] int64, of all that a round runs with."""
        return self.row_lists[0]

    @property
    def draft_rows(self) -> Tensor:
        """[max_requests] int64, of the draft's phases, which take a row without a draft for padding."""
        return self.row_lists[1]

    def undeclared(self, phase: Phase) -> list[Tensor]:
        """Scratch and outputs of a phase: whatever they hold before it runs must not matter."""
        tails = [*self.draft_tails.values(), *self.verify_tails.values(), *self.extend_tails.values()]
        values = self.tree, self.places, self.flat
        drafted = [getattr(value, name) for value in values for name in value.__dataclass_fields__]
        verified = [getattr(self.accepted, name) for name in self.accepted.__dataclass_fields__]
        verified += [self.logprobs.values, self.logprobs.ids, self.aux_hidden, self.prompts.token, self.prompts.finite]
        if phase in (Phase.DRAFT, Phase.PREFILL):
            return [*tails, *drafted, *verified]
        return [*tails, *verified] if phase is Phase.VERIFY else tails

    @_once
    def tree_of(self, bucket: int, shape: SpecShape) -> DraftTree:
        """The part of the tree buffers that a batch of `bucket` rows uses."""
        t, tree = shape.num_draft_tokens, self.tree
        return DraftTree(
            part_of(tree.tokens, bucket, t),
            part_of(tree.parent, bucket, t),
            part_of(tree.depth, bucket, t),
            part_of(tree.mask, bucket, t, t),
            part_of(tree.logprob, bucket, t),
        )

    @_once
    def places_of(self, bucket: int, shape: SpecShape) -> PathPositions:
        t, w, places = shape.num_draft_tokens, shape.commit_width, self.places
        return PathPositions(
            part_of(places.committed, bucket), part_of(places.nodes, bucket, t), part_of(places.path, bucket, w)
        )

    @_once
    def accepted_of(self, bucket: int, shape: SpecShape) -> Accepted:
        w, accepted = shape.commit_width, self.accepted
        return Accepted(
            part_of(accepted.path, bucket, w),
            part_of(accepted.accept_len, bucket),
            part_of(accepted.tokens, bucket, w),
            part_of(accepted.bonus, bucket),
            part_of(accepted.finite, bucket),
            part_of(accepted.choice, bucket, shape.num_draft_tokens),
        )

    @_once
    def growth_of(self, bucket: int, shape: SpecShape) -> TreeBuilder:
        growth, wide, n = self.growth[shape], shape.topk * shape.num_steps, shape.num_candidates
        return replace(
            growth,
            tokens=part_of(growth.tokens, bucket, n),
            scores=part_of(growth.scores, bucket, n),
            parents=part_of(growth.parents, bucket, 1 + wide),
            positions=part_of(growth.positions, bucket, wide),
            logprob=part_of(growth.logprob, bucket, n),
            chosen=part_of(growth.chosen, bucket, shape.num_draft_tokens),
            classes=part_of(growth.classes, bucket),
        )

    @_once
    def flat_of(self, bucket: int, shape: SpecShape) -> FlatNodes | None:
        """None where no budget cuts the trees of such a batch."""
        if not shape.is_ragged_at(bucket):
            return None
        flat = self.flat
        return FlatNodes(
            part_of(flat.count, bucket),
            part_of(flat.row_start, bucket),
            part_of(flat.at, shape.nodes_at(bucket)),
            part_of(flat.spread, bucket, shape.num_draft_tokens),
        )

    @_once
    def logprobs_of(self, bucket: int, shape: SpecShape) -> PathLogprobs:
        w, logprobs = shape.commit_width, self.logprobs
        return PathLogprobs(part_of(logprobs.values, bucket, w), part_of(logprobs.ids, bucket, w))

    @_once
    def aux_hidden_of(self, bucket: int, shape: SpecShape) -> Tensor:
        return part_of(self.aux_hidden, bucket, shape.commit_width)


def extend_mask(width: int) -> Tensor:
    """Which of its own columns draft extend sees: causal, itself included. Returns [width, width] bool (sgl-26628).

    On the CPU: arithmetic on a meta tensor, by which memory is counted, would load PyTorch's compiler, in a second.
    """
    column = torch.arange(width)
    return column[:, None] >= column


def part_of(buffer: Tensor, *need: int) -> Tensor:
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
    blocks: Mapping[GroupName, bool] | None = None,
) -> RoundBuffers:
    """Zeroed buffers, sized by the layout's capacities. model: the target's.

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
        row_lists=zeros((2, b + b % 2), long)[:, :b],  # the second is aligned as the first is
        prompts=make_prompt_buffers(layout.packed_sizes, zeros),
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
        accepted=Accepted(
            zeros((b, w), long),
            zeros((b,), long),
            zeros((b, w), long),
            zeros((b,), long),
            zeros((b,), torch.bool),
            zeros((b, t), long),
        ),
        growth={shape: make_growth(shape, b, calibration, zeros) for shape in layout.shapes},
        flat=FlatNodes(
            zeros((b,), long), zeros((b,), long), zeros((layout.most_flat_nodes,), long), zeros((b, t), long)
        ),
        logprobs=PathLogprobs(zeros((b, w, 2 + best), torch.float32), zeros((b, w, best), long)),
        aux_hidden=zeros((b, w, num_features * hidden), dtype),
        draft_tails=tails(draft, layout.draft_tail),
        verify_tails=tails(target, layout.verify_tail),
        extend_tails=tails(draft, extend),
    )
