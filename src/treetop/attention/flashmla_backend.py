"""FlashMLA: the committed prefix of compressed attention (MLA) on Hopper; tail and merge are the engine's.

A prompt, and layers without compression, such as an EAGLE-3 head's, run on the Triton kernel. Packages differ in what
of FlashMLA they build, so a small problem is computed before one is believed.
Source: `flash_mla_with_kvcache` of deepseek-ai/FlashMLA, flash_mla/flash_mla_interface.py, and csrc/api/dense_decode.h;
sgl-flash-mla 1.0.0, where the kernel for compute capability 9 is reached by `use_legacy`.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, Need
from treetop.attention.contract import BackendSpec, RoundExtents
from treetop.attention.flash_pages import FlashTable
from treetop.attention.library_backend import AttendPages, LibraryBackend, first_line, on_hopper
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.kv import PagedKV
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import why_not

PAGE, RANK, ROPE_DIM = 64, 512, 64
"""Of a page, in tokens; of a plane's latent and of its part with RoPE, in numbers. It has kernels for these alone."""

CAPABILITIES = Capabilities(
    HALF, head_dims=tuple(range(2, 513)), page_sizes=(PAGE,), latents=(RANK,), rope_dims=(ROPE_DIM,),
    compressed_only=True,
    own_windows=False, own_sinks=False, own_prefill=False,
)  # fmt: skip


class LatentPrefix(Protocol):
    """Attention to pages of planes that are key and value."""

    def __call__(
        self, q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, rank: int, scale: float, shared: Any
    ) -> tuple[Tensor, Tensor]:
        """q: [rows, n, heads, dim]. pages: [pages, page_size, 1, dim]. table: [rows, columns] int32. lengths: [rows]
        int32. shared: of `share`, for calls of the same q's shape and the same lengths. Returns out [rows, n, heads,
        rank] and lse [rows, heads, n] float32, natural; a row without keys has anything."""

    def share(self) -> Any:
        """What the layers of a phase share; the first call fills it, on the device."""


class FlashMLA:
    """`flash_mla_with_kvcache` of a package. Raises LookupError if its interface is another."""

    def __init__(self, package: Any) -> None:
        try:
            self._attend: Callable[..., tuple[Tensor, Tensor]] = package.flash_mla_with_kvcache
            self._metadata: Callable[[], tuple[Any, Any]] = package.get_mla_metadata
            names = set(inspect.signature(self._attend).parameters)
        except (AttributeError, TypeError, ValueError) as error:  # the last two of what has no signature
            raise LookupError(f"flash_mla has another interface: {error}") from error
        missing = {"tile_scheduler_metadata", "block_table", "cache_seqlens", "head_dim_v", "softmax_scale"} - names
        if missing:
            raise LookupError(f"its flash_mla_with_kvcache has no argument {', '.join(sorted(missing))}")
        self._legacy = {"use_legacy": True} if "use_legacy" in names else {}

    def share(self) -> Any:
        return self._metadata()[0]

    def __call__(
        self, q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, rank: int, scale: float, shared: Any
    ) -> tuple[Tensor, Tensor]:
        return self._attend(
            q,
            pages,
            block_table=table,
            cache_seqlens=lengths,
            head_dim_v=rank,
            tile_scheduler_metadata=shared,
            softmax_scale=scale,
            causal=False,
            is_fp8_kvcache=False,
            **self._legacy,
        )


class LatentPages:
    """`attention` over pages: a table and lengths a phase, gathered on the device, and one division of its work."""

    def __init__(self, attention: LatentPrefix, ops: Ops) -> None:
        self._attention, self._ops = attention, ops

    def begin(self, metadata: AttentionMetadata) -> FlashTable:
        return FlashTable.of(metadata, self._ops)

    def plan(self, begun: FlashTable, metadata: AttentionMetadata) -> AttendPages:
        assert not metadata.causal, "prompts run elsewhere"
        shared, page_size = self._attention.share(), metadata.page_size

        def attend(q: Tensor, kv: PagedKV, scale: float) -> PrefixPart:
            assert kv.value_dim is not None, "layers without compression run elsewhere"
            pages = kv.k.unflatten(0, (-1, page_size))
            out, lse = self._attention(q, pages, begun.table, begun.lengths, kv.value_dim, scale, shared)
            return PrefixPart(out, lse.transpose(1, 2), metadata.kv_len)

        return attend

    def plan_round(self, round: RoundExtents) -> None:
        """Lengths are read on the device: nothing to do."""


def find_flash_mla() -> FlashMLA:
    """FlashMLA of the package that is installed. Raises LookupError with what is wrong with it."""
    try:
        package = importlib.import_module("flash_mla")
    except ModuleNotFoundError as error:
        if error.name == "flash_mla":
            raise LookupError("flash_mla is not installed (pip install sgl-flash-mla)") from error
        raise LookupError(f"flash_mla cannot be imported: {first_line(error)}") from error
    except Exception as error:  # whatever a broken package, or one for another PyTorch, may raise
        raise LookupError(f"flash_mla cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    return FlashMLA(package)


@cache
def problem(device: torch.device) -> str | None:
    """Why FlashMLA cannot be called on this GPU, found out by trying; None if it can."""
    try:
        attention = find_flash_mla()
    except LookupError as error:
        return f"FlashMLA was not found: {error}"
    try:
        error_of_probe = max(_probe(attention, device, dtype) for dtype in (torch.bfloat16, torch.float16))
    except Exception as error:  # whatever a package that was built for another PyTorch may raise
        return f"FlashMLA failed on a small problem: {type(error).__name__}: {first_line(error)}"
    return None if error_of_probe < 0.02 else f"FlashMLA gives wrong results here (relative error {error_of_probe:.1e})"


def _probe(attention: LatentPrefix, device: torch.device, dtype: torch.dtype) -> float:
    """Relative error of two layers over pages in reverse order, of which the last is not full and then NaN.

    The last row has no keys, and anything for a result: it may not disturb the others.
    """
    n, heads, lengths = 2, 16, (PAGE + 19, 3 * PAGE, 0)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    planes, q = normal(2, 7, PAGE, 1, RANK + ROPE_DIM), normal(len(lengths), n, heads, RANK + ROPE_DIM)
    table = torch.tensor([[6, 5, 0], [3, 2, 1], [0, 0, 0]], dtype=torch.int32, device=device)
    planes[:, 5, lengths[0] - PAGE :] = torch.nan
    of_rows = torch.tensor(lengths, dtype=torch.int32, device=device)
    scale, shared, errors = (RANK + ROPE_DIM) ** -0.5, attention.share(), []
    for layer in planes:
        out, lse = attention(q, layer, table, of_rows, RANK, scale, shared)
        for row, length in enumerate(lengths[:-1]):
            keys = layer[table[row].long()].flatten(0, 2)[:length].float()
            scores = q[row].float() @ keys.T * scale
            want = scores.softmax(dim=-1) @ keys[:, :RANK]
            errors += [(out[row].float() - want).norm() / want.norm()]
            errors += [(lse[row].T - scores.logsumexp(-1)).abs().max() / 10]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).max())


def _make(need: Need) -> LibraryBackend:
    ops = Ops(OpContext(need.device, need.dtype))
    pages = LatentPages(find_flash_mla(), ops)
    return LibraryBackend("flashmla", CAPABILITIES, pages, TritonBackend(need.device), ops, need.groups)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not, on_hopper, problem))
