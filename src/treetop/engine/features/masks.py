"""What the host knows of constrained rows (`engine.node_masks`).

Before DRAFT it writes what is forced behind their roots, between DRAFT and VERIFY the masks of their nodes.
"""

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
class GrammarMasks(RowFeature):
    """In the list where rows may be constrained. Of other rows every token is allowed and no node is masked.

    allowed: [max_requests, T, words] int32, what may follow a node; see `process_reference`.
    masked_drafts: [max_requests, T] bool, nodes behind which that is not known, which are not accepted.
    forced: [max_requests, S + 1] int32, tokens that must follow a root, -1 where none is known; the last is unused.
    """

    allowed: Tensor
    masked_drafts: Tensor
    forced: Tensor

    @classmethod
    def make(cls, layout: Layout, vocab_size: int, zeros: Zeros) -> "GrammarMasks":
        nodes = layout.max_requests, layout.verify_tail
        allowed = zeros((*nodes, mask_words(vocab_size)), torch.int32).fill_(-1)
        forced = zeros((layout.max_requests, layout.commit_width), torch.int32).fill_(-1)
        return cls(allowed, zeros(nodes, torch.bool), forced)

    def of(self, bucket: int, shape: SpecShape) -> "GrammarMasks":
        """Those of a batch."""
        nodes = bucket, shape.num_draft_tokens
        forced = part_of(self.forced, bucket, shape.commit_width)
        return GrammarMasks(part_of(self.allowed, *nodes), part_of(self.masked_drafts, *nodes), forced)

    def scratch(self, phase: Phase) -> Sequence[Tensor]:
        return (self.allowed, self.masked_drafts) if phase is Phase.DRAFT else ()
