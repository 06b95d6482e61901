"""Which small operations a round uses."""

import torch

from treetop.engine.pure import Pure
from treetop.kernels.grow import fits
from treetop.kernels.triton_guard import why_not
from treetop.spec.round_ops import Parts, RoundOps, TorchRoundOps, TritonRoundOps
from treetop.types.layout import Layout


def make_round_ops(pure: Pure, layout: Layout, dtype: torch.dtype, device: torch.device) -> RoundOps:
    """Fused launches on a GPU, the reference elsewhere, in float64, and for trees too large for one program.

    A fused launch contains the functions of `Parts` and cannot call another in their place. So an engine in which a
    fault or an instrument replaced one of them runs the reference, eagerly or captured, made of what it was given.
    """
    usable = device.type == "cuda" and dtype != torch.float64 and why_not(device) is None
    if usable and pure.parts == Parts() and all(fits(shape) for shape in layout.shapes):
        return TritonRoundOps(device, layout.max_topk, layout.commit_width)
    return TorchRoundOps(pure.parts)
