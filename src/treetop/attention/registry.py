"""Makes the backend that an engine asked for."""

from typing import Any

from treetop.attention.auto import FALLBACK, AutoBackend, load_table
from treetop.attention.capabilities import Need, refusal, require
from treetop.attention.contract import AttentionBackend
from treetop.attention.flash_pages import FlashPages
from treetop.attention.flashinfer_pages import FlashInferPages
from treetop.attention.libraries import FlashCute, find_fa3
from treetop.attention.library_backend import LibraryBackend, PagesLibrary
from treetop.attention.torch_backend import TorchBackend
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.table import OpContext, Ops

BACKENDS = ("torch", "triton", "fa3", "flashinfer", "fa4")


def make_backend(name: str, need: Need) -> AttentionBackend[Any, Any]:
    """The backend called `name`, or for `auto` the one that the measured table composes; on a CPU that is PyTorch's.

    Raises ConfigError with the reason and the option to change.
    """
    if name == "auto":
        if refusal("triton", need) is not None:
            return make_backend("torch", need)
        auto = AutoBackend(load_table(), need, make_backend)
        return auto if len(auto.parts) > 1 else auto.parts[FALLBACK]
    require(name, need)
    if name == "torch":
        return TorchBackend(need.dtype, need.device)
    triton = TritonBackend(need.dtype, need.device)
    ops = Ops(OpContext(need.device, need.dtype))
    return triton if name == "triton" else LibraryBackend(name, _library(name, need, ops), triton, ops)


def _library(name: str, need: Need, ops: Ops) -> PagesLibrary:
    if name == "flashinfer":
        return FlashInferPages(need)
    return FlashPages(find_fa3() if name == "fa3" else FlashCute(), ops)
