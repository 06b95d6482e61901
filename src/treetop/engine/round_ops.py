"""Which small operations a round uses."""

import torch

from treetop.kernels.grow import fits
from treetop.kernels.triton_guard import why_not
from treetop.spec.round_ops import RoundOps, TorchRoundOps, TritonRoundOps
from treetop.types.layout import Layout


def make_round_ops(layout: Layout, dtype: torch.dtype, device: torch.device) -> RoundOps:
    """Fused launches on a GPU, the reference elsewhere, in float64, and for trees too large for one program."""
    usable = device.type == "cuda" and dtype != torch.float64 and why_not(device) is None
    if usable and all(fits(shape) for shape in layout.shapes):
        return TritonRoundOps(device, layout.max_topk, layout.commit_width)
    return TorchRoundOps()
