"""Masks of constrained rows' nodes, written by the host between DRAFT and VERIFY (`engine.node_masks`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.engine.buffers import Zeros, part_of
from treetop.engine.features.feature import RowFeature
from treetop.kernels.sampling.process import mask_words
from treetop.types.layout import Layout, SpecShape
from treetop.types.phase import Phase


@dataclass(frozen=True, slots=True)
class HeldNodes(RowFeature):
    """In the list where rows may be constrained. Of other rows every token is allowed and no node is withheld.

    allowed: [max_requests, T, words] int32, what may follow a node; see `process_reference`.
    withheld: [max_requests, T] bool, nodes behind which that is not known, which are not accepted.
    """

    allowed: Tensor
    withheld: Tensor

    @classmethod
    def make(cls, layout: Layout, vocab_size: int, zeros: Zeros) -> "HeldNodes":
        nodes = layout.max_requests, layout.verify_tail
        return cls(zeros((*nodes, mask_words(vocab_size)), torch.int32).fill_(-1), zeros(nodes, torch.bool))

    def of(self, bucket: int, shape: SpecShape) -> "HeldNodes":
        """Those of a batch."""
        nodes = bucket, shape.num_draft_tokens
        return HeldNodes(part_of(self.allowed, *nodes), part_of(self.withheld, *nodes))

    def scratch(self, phase: Phase) -> Sequence[Tensor]:
        return (self.allowed, self.withheld) if phase is Phase.DRAFT else ()
