"""Faults of gated delta nets and of the layers between them, put back by name: each gives a target other logits
(`test_linear_attention.py`)."""

import torch
from torch import Tensor

from treetop_debug.faults import Fault
from treetop_debug.patching import instead

_GUARD = "logits"


def _without_ones(stored: Tensor, reorder: object) -> Tensor:
    """A norm of 1 + w that multiplies by w."""
    return stored.to(torch.float64)


def _halves(stored: Tensor, dim: int, index: int, then: object) -> Tensor:
    """All queries, then all gates, instead of both head by head."""
    return stored.chunk(2)[index]


def _parts(stored: Tensor, heads: int, lines: slice) -> Tensor:
    """Rows of all key heads' queries, then keys, instead of both by key head."""
    return stored[lines.start * heads : lines.stop * heads]


LINEAR_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "linear-ones-left-out",
            "norms multiply by w instead of 1 + w (vllm-mlx 400)",
            (instead("treetop.models.layers:_offset_by_one", _without_ones),),
            _GUARD,
            None,
        ),
        Fault(
            "linear-gate-by-halves",
            "queries and gates are read by halves instead of by heads",
            (instead("treetop.models.layers:_half_of_heads", _halves),),
            _GUARD,
            None,
        ),
        Fault(
            "linear-rows-by-part",
            "inputs that are stored by key head are read by part",
            (instead("treetop.models.linear_attention:_of_each_head", _parts),),
            _GUARD,
            None,
        ),
    )
}
