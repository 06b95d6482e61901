"""Which backend serves, and why not the others."""

from typing import Any

import torch

from treetop.attention.contract import AttentionBackend
from treetop.attention.torch_backend import TorchBackend
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.triton_guard import why_not

ALL_PHASES = ("prefill", "draft", "verify", "extend")


def make_backend(name: str, dtype: torch.dtype, device: torch.device) -> AttentionBackend[Any, Any]:
    """The backend called `name`; `auto` is Triton on a GPU, else PyTorch. Raises ConfigError with the reason."""
    if name == "auto":
        name = "triton" if refusal("triton", dtype, device) is None else "torch"
    return TritonBackend(dtype, device) if name == "triton" else TorchBackend(dtype, device)


def refusal(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a backend cannot serve here; None if it can."""
    if name == "torch":
        return None
    if name != "triton":
        return "not part of this version"
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    if dtype == torch.float64:
        return "does not compute in float64"
    return why_not(device)
