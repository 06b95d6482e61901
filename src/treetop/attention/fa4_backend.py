"""FlashAttention-4: `flash_attn.cute`, compiled when first called; tried on a small problem before it is believed.

Facts about the calls: flash_attn/cute/interface.py of Dao-AILab/flash-attention.
"""

import importlib
import warnings
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, Need
from treetop.attention.contract import BackendSpec
from treetop.attention.flash_pages import FlashAttention, FlashPages, PagedCall
from treetop.attention.library_backend import LibraryBackend, first_line
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import why_not

CAPABILITIES = Capabilities(
    HALF, head_dims=(64, 96, 128), page_sizes=(1, 2, 4, 8, 16, 32, 64), own_windows=False, own_sinks=False
)


class FlashCute:
    """`flash_attn_varlen_func` of flash-attn-4 on a padded batch."""

    def schedule(self, call: PagedCall) -> Tensor | None:
        return None

    def __call__(self, call: PagedCall) -> tuple[Tensor, Tensor]:
        with _deprecations_ignored():
            return _call(call)


def _deprecations_ignored() -> AbstractContextManager[object]:
    """What the library's own compiler deprecates is no failure, even where warnings are errors."""
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)


def _call(call: PagedCall) -> tuple[Tensor, Tensor]:
    out, lse, *_ = importlib.import_module("flash_attn.cute").flash_attn_varlen_func(
        call.q,
        call.k,
        call.v,
        seqused_q=call.query_len,
        seqused_k=call.lengths,
        max_seqlen_q=call.q.shape[1],
        max_seqlen_k=max(call.max_kv_len, 1),
        page_table=call.table,
        softmax_scale=call.scale,
        causal=call.query_len is not None,
        return_lse=True,
    )
    return out, lse


@cache
def problem(device: torch.device) -> str | None:
    """Why FlashAttention-4 cannot read pages on this GPU, found out by trying; None if it can."""
    try:
        with _deprecations_ignored():
            importlib.import_module("flash_attn.cute")
    except ImportError as error:
        return f"flash-attn-4 cannot be imported: {first_line(error)}"
    try:
        error_of_probe = _probe_paged(FlashCute(), device)
    except Exception as error:  # whatever a compiler of kernels may raise
        major, minor = torch.cuda.get_device_capability(device)
        return f"paged K/V failed on compute capability {major}.{minor}: {type(error).__name__}: {first_line(error)}"
    return (
        None if error_of_probe < 0.02 else f"paged K/V gives wrong results here (relative error {error_of_probe:.1e})"
    )


def _probe_paged(attention: FlashAttention, device: torch.device) -> float:
    """Relative error of a small call whose pages lie in reverse order."""
    rows, n, page, pages, heads, kv_heads, dim = 2, 4, 16, 5, 4, 2, 128
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)

    kv, q = normal(pages, page, 2, kv_heads, dim), normal(rows, n, heads, dim)
    table = torch.tensor([[4, 3], [2, 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([19, 32], dtype=torch.int32, device=device)
    got, _ = attention(PagedCall(q, kv[:, :, 0], kv[:, :, 1], table, lengths, None, 32, dim**-0.5))
    k, v = kv[table.long()].flatten(1, 2).repeat_interleave(heads // kv_heads, dim=3).float().permute(2, 0, 3, 1, 4)
    seen = torch.arange(32, device=device) < lengths[:, None]
    scores = (q.float().transpose(1, 2) @ k.transpose(2, 3) * dim**-0.5).masked_fill(~seen[:, None, None], -torch.inf)
    want = (scores.softmax(dim=-1) @ v).transpose(1, 2)
    return float((got.float() - want).norm() / want.norm())


def _make(need: Need) -> LibraryBackend:
    ops = Ops(OpContext(need.device, need.dtype))
    return LibraryBackend("fa4", CAPABILITIES, FlashPages(FlashCute(), ops), TritonBackend(need.device), ops)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not, problem))
