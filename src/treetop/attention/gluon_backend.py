"""The Triton backend with kernels in Gluon for rounds of compressed attention (MLA) on Hopper, on pages of 64 tokens.

Of sparse attention (DSA) one of them gathers the keys that were chosen. Prompts, trees of more than 64 columns, and
layers without compression, such as an EAGLE-3 head's, are the Triton backend's as they were. No machine without such a
GPU can tell whether a kernel is right, so a small problem is computed before it is believed; if that of chosen keys is
wrong, these are Triton's.
"""

import logging
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Need
from treetop.attention.contract import BackendSpec
from treetop.attention.library_backend import first_line, on_hopper
from treetop.attention.triton_backend import CAPABILITIES as TRITONS
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.latent_attention import latent_attention_reference
from treetop.kernels.attention.latent_gather import chosen_planes_attention
from treetop.kernels.attention.latent_gluon import MOST_COLUMNS, PAGE, RANK, ROPE_DIM, latent_pages_attention
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.gluon_guard import why_no_gluon
from treetop.kernels.kv import PagedKV, PageTable
from treetop.kernels.triton_guard import gpu_traits, why_not
from treetop.types.ids import FULL
from treetop.types.phase import Phase

_LOG = logging.getLogger("treetop.attention")

CAPABILITIES = replace(
    TRITONS, dtypes=HALF, page_sizes=(PAGE,), latents=(RANK,), rope_dims=(ROPE_DIM,), compressed_only=True,
    fp8_kv=False,
)  # fmt: skip


class GluonBackend(TritonBackend):
    """See the module."""

    name = "gluon"
    capabilities = CAPABILITIES

    def __init__(self, device: torch.device, sparse: bool = False) -> None:
        """sparse: whether an indexer will choose keys."""
        super().__init__(device)
        self._gathers = sparse and (wrong := problem_of_chosen(device)) is None
        if sparse and not self._gathers:
            _LOG.warning("attention backend gluon: keys that are chosen are Triton's: %s", wrong)

    def _attend(
        self, q: Tensor, kv: PagedKV, plan: AttentionMetadata, tail: Tensor | None, scale: float, sinks: Tensor | None
    ) -> Tensor:
        columns = 0 if tail is None else tail.shape[1]
        gathers = plan.chosen is not None
        if kv.value_dim is None or plan.causal or plan.window is not None or columns > MOST_COLUMNS:
            return super()._attend(q, kv, plan, tail, scale, sinks)
        if gathers and not self._gathers:
            return super()._attend(q, kv, plan, tail, scale, sinks)
        assert sinks is None, "no model has compressed attention and sinks"
        attend = chosen_planes_attention if gathers else latent_pages_attention
        return attend(q, kv.planes, plan, tail, scale, self._gpu)


@cache
def problem(device: torch.device) -> str | None:
    """Why the kernel cannot be believed on this GPU, found out by trying; None if it can."""
    return _problem(device, chosen=False)


@cache
def problem_of_chosen(device: torch.device) -> str | None:
    """The same of the kernel of chosen keys."""
    return _problem(device, chosen=True)


def _problem(device: torch.device, chosen: bool) -> str | None:
    try:
        error = max(_error(device, dtype, chosen) for dtype in HALF)
    except Exception as error_of_call:  # whatever a compiler of another version may raise
        return f"its kernel failed on a small problem: {type(error_of_call).__name__}: {first_line(error_of_call)}"
    return None if error < 0.02 else f"its kernel gives wrong results here (relative error {error:.1e})"


def _error(device: torch.device, dtype: torch.dtype, chosen: bool) -> float:
    """Of rows on pages in reverse order, the last of which is NaN past its end, one without keys, and a tail.

    chosen: every second key is, of the null page too where a row has fewer.
    """
    n, heads, lengths = 2, 16, (PAGE + 19, 3 * PAGE, 0)
    rows, generator = len(lengths), torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    planes, q = normal(7 * PAGE, 1, 1, RANK + ROPE_DIM), normal(rows, n, heads, RANK + ROPE_DIM)
    tail = normal(rows, n, 1, 1, RANK + ROPE_DIM)
    planes[5 * PAGE + lengths[0] - PAGE : 6 * PAGE] = torch.nan
    table = torch.tensor([[6, 5, 0], [3, 2, 1], [0, 0, 0]], dtype=torch.int32, device=device)
    kv_len, row_list = torch.tensor(lengths, device=device), torch.arange(rows, device=device)
    positions = kv_len[:, None] + torch.arange(n, device=device)
    mask = torch.ones(rows, n, n, dtype=torch.bool, device=device).tril()
    metadata = AttentionMetadata(
        Phase.VERIFY, PageTable(FULL, table), row_list, kv_len, 3 * PAGE, PAGE, positions, None, positions, mask
    )
    attend = latent_pages_attention
    if chosen:
        every_second = torch.arange(0, 3 * PAGE, 2, dtype=torch.int32, device=device).expand(rows, n, -1).contiguous()
        count = ((kv_len + 1) // 2).to(torch.int32)[:, None].expand(rows, n).contiguous()
        metadata = replace(metadata, chosen=SparseKeys(every_second, count, mask))
        attend = chosen_planes_attention
    scale, gpu = (RANK + ROPE_DIM) ** -0.5, gpu_traits(device)
    want = latent_attention_reference(q.float(), planes, metadata, tail.float(), RANK, scale)
    errors = [(attend(q, planes, metadata, tail, scale, gpu, splits) - want).norm() / want.norm() for splits in (1, 2)]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())


def _sparse(need: Need) -> bool:
    return any(group.sparse for group in need.groups)


def _make(need: Need) -> GluonBackend:
    return GluonBackend(need.device, _sparse(need))


def _why_not_chosen(need: Need) -> str | None:
    return problem_of_chosen(need.device) if _sparse(need) else None


PROBES = why_not, why_no_gluon, on_hopper, problem
BACKEND = BackendSpec(CAPABILITIES, _make, PROBES, why_not_chosen=_why_not_chosen)
