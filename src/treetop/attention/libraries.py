"""Other people's attention kernels: where they are found, and how each is called. All that a vendor decides is here.

    FlashAttention-3   one compiled operator `fwd`, under the name of whoever built it; called by its own schema
    FlashAttention-4   `flash_attn.cute`, compiled when first called; tried on a small problem before it is believed
    FlashInfer         `BatchPrefillWithPagedKVCacheWrapper`, see flashinfer_pages.py

Facts about the calls: hopper/flash_api.cpp and flash_attn/cute/interface.py of Dao-AILab/flash-attention and of
vllm-project/flash-attention; python/sgl_kernel/flash_attn.py of sgl-project/sglang.
"""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

FA3_FILE = "TREETOP_FA3_LIBRARY"
"""Environment variable: a compiled FlashAttention-3 to load before anything that is installed."""

_FA3_NAMESPACES = ("_vllm_fa3_C", "flash_attn_3", "sgl_kernel")


@dataclass(frozen=True, slots=True)
class PagedCall:
    """One batch of queries over pages.

    q: [rows, n, heads, d]. k, v: [pages, page_size, kv_heads, d], strided. table: [rows, columns] int32. lengths:
    [rows] int32, keys a row. query_len: [rows] int32, queries a row that are not padding, which stand last in its keys
    and see up to themselves; None: all are real and see every key. max_kv_len: no length is larger. schedule: how the
    work is shared out, from `schedule` of the library, for all layers of a phase; None: each call finds out for itself.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor
    query_len: Tensor | None
    max_kv_len: int
    scale: float
    schedule: Tensor | None = None


class FlashAttention(Protocol):
    """A FlashAttention over pages."""

    def schedule(self, call: PagedCall) -> Tensor | None:
        """What calls of this shape and these lengths may share; None if the library has no such thing."""

    def __call__(self, call: PagedCall) -> tuple[Tensor, Tensor]:
        """Returns out [rows, n, heads, d] and lse [rows, heads, n] float32, natural; anything where padding is."""


# ------------------------------------------------------------------------------------------------- FlashAttention-3


_NEUTRAL: Mapping[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "has_softcap": False,
    "is_rotary_interleaved": True,
    "max_seqlen_k_new": 0,
    "num_splits": 0,  # by the library's rule, from shapes and `max_seqlen_k` alone: the same in every replay
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Values of operands that this engine has no use for, where a build gives them no default."""


class Operands:
    """Calls a compiled operator by its schema: builds differ in which operands they have. Raises LookupError."""

    def __init__(self, op: Any, needed: set[str]) -> None:
        self.schema = str(op._schema)
        self._op = op
        self._names = [argument.name for argument in op._schema.arguments]
        self._rest = [_rest(argument) for argument in op._schema.arguments]
        missing = needed - {*self._names}
        if missing:
            raise LookupError(f"its operator {op} has no operand {', '.join(sorted(missing))}")

    def __call__(self, given: Mapping[str, Any]) -> Any:
        return self._op(*[given.get(name, rest) for name, rest in zip(self._names, self._rest, strict=True)])


def _rest(argument: Any) -> Any:
    """What an operand gets that no call gives."""
    if argument.name in _NEUTRAL:
        return _NEUTRAL[argument.name]
    return argument.default_value if argument.has_default_value() else None


class FlashOp:
    """FlashAttention-3: its `fwd`, and `get_scheduler_metadata` if the build has it, which saves a launch a layer."""

    def __init__(self, fwd: Any, scheduler: Any, source: str) -> None:
        needed = {"q", "k", "v", "seqused_k", "seqused_q", "page_table", "softmax_scale", "is_causal"}
        self._fwd = Operands(fwd, needed)
        scheduled = scheduler is not None and "scheduler_metadata" in self._fwd.schema
        self._scheduler = Operands(scheduler, {"seqused_k", "seqused_q", "page_size"}) if scheduled else None
        self.fwd = fwd
        self.source, self.schemas = source, [self._fwd.schema, *([self._scheduler.schema] if self._scheduler else [])]

    def schedule(self, call: PagedCall) -> Tensor | None:
        if self._scheduler is None:
            return None
        rows, n, heads, dim = call.q.shape
        kv_heads, page_size = call.k.shape[2], call.k.shape[1]
        metadata: Tensor = self._scheduler(
            {
                **_lengths(call),
                "batch_size": rows,
                "max_seqlen_q": n,
                "num_heads": heads,
                "num_heads_k": kv_heads,
                "headdim": dim,
                "headdim_v": dim,
                "qkv_dtype": call.q.dtype,
                "page_size": page_size,
            }
        )
        return metadata

    def __call__(self, call: PagedCall) -> tuple[Tensor, Tensor]:
        rows, n, heads, _ = call.q.shape
        q = call.q if call.query_len is None else call.q.flatten(0, 1)
        tensors = {"q": q, "k": call.k, "v": call.v, "page_table": call.table}
        how = {"softmax_scale": call.scale, "scheduler_metadata": call.schedule, "max_seqlen_q": n}
        out, lse, *_ = self._fwd({**_lengths(call), **tensors, **how})
        if call.query_len is None:
            return out, lse
        return out.unflatten(0, (rows, n)), lse.view(heads, rows, n).transpose(0, 1)


def _lengths(call: PagedCall) -> dict[str, Any]:
    """A causal batch goes as sequences that stand n queries apart, and its keys are not split.

    A padded batch whose keys are split gave wrong results where `seqused_q` is given (H200, n = 150; right with one
    split, and right as sequences either way). Prefill has queries enough to fill a GPU without.
    """
    lengths = {
        "seqused_k": call.lengths,
        "max_seqlen_k": max(call.max_kv_len, 1),
        "is_causal": call.query_len is not None,
    }
    if call.query_len is None:
        return lengths
    rows, n = call.q.shape[:2]
    starts = torch.arange(0, (rows + 1) * n, n, dtype=torch.int32, device=call.q.device)
    return {**lengths, "seqused_q": call.query_len, "cu_seqlens_q": starts, "num_splits": 1}


def find_fa3() -> FlashOp:
    """FlashAttention-3's operator, from the file named by TREETOP_FA3_LIBRARY or the first package that has it.

    Raises LookupError with what was looked for and what was wrong with it.
    """
    file = os.environ.get(FA3_FILE)
    if file:
        return _fa3_of(f"{FA3_FILE}={file}", lambda: torch.ops.load_library(file))
    problems = []
    for package, load in _FA3_PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            continue
        try:
            return _fa3_of(package, load)
        except LookupError as error:
            problems.append(str(error))
    names = ", ".join(_FA3_PACKAGES)
    raise LookupError("; ".join(problems) or f"none of {names} is installed and {FA3_FILE} names no file")


def _fa3_of(source: str, load: Callable[[], object]) -> FlashOp:
    try:
        load()
        for namespace in _FA3_NAMESPACES:
            operators = getattr(torch.ops, namespace)
            if hasattr(operators, "fwd"):
                scheduler = getattr(operators, "get_scheduler_metadata", None)
                rest = None if scheduler is None else scheduler.default
                return FlashOp(operators.fwd.default, rest, f"{source} (torch.ops.{namespace}.fwd)")
    except (ImportError, OSError, RuntimeError, LookupError) as error:
        raise LookupError(f"{source} cannot be used: {_first_line(error)}") from error
    raise LookupError(f"{source} has no operator fwd under any of {', '.join(_FA3_NAMESPACES)}")


def _load_from_vllm() -> None:
    """The compiled file alone: importing the package would start far more than an operator."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    files = [f for p in spec.submodule_search_locations or () for f in Path(p).glob("vllm_flash_attn/_vllm_fa3_C*.so")]
    if not files:
        raise LookupError("the package holds no vllm_flash_attn/_vllm_fa3_C*.so")
    torch.ops.load_library(str(files[0]))


_FA3_PACKAGES: dict[str, Callable[[], object]] = {
    "flash_attn_interface": lambda: importlib.import_module("flash_attn_interface"),
    "sgl_kernel": lambda: importlib.import_module("sgl_kernel.flash_attn"),
    "vllm": _load_from_vllm,
}


def fa3_problem(device: torch.device) -> str | None:
    """Why FlashAttention-3 cannot be called; None if it can."""
    try:
        find_fa3()
    except LookupError as error:
        return f"FlashAttention-3 was not found: {error}"
    return None


# ------------------------------------------------------------------------------------------------- FlashAttention-4


class FlashCute:
    """`flash_attn_varlen_func` of flash-attn-4 on a padded batch."""

    def schedule(self, call: PagedCall) -> Tensor | None:
        return None

    def __call__(self, call: PagedCall) -> tuple[Tensor, Tensor]:
        with _deprecations_ignored():
            return _call_fa4(call)


def _deprecations_ignored() -> AbstractContextManager[object]:
    """What the library's own compiler deprecates is no failure, even where warnings are errors."""
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)


def _call_fa4(call: PagedCall) -> tuple[Tensor, Tensor]:
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
def fa4_problem(device: torch.device) -> str | None:
    """Why FlashAttention-4 cannot read pages on this GPU, found out by trying; None if it can."""
    try:
        with _deprecations_ignored():
            importlib.import_module("flash_attn.cute")
    except ImportError as error:
        return f"flash-attn-4 cannot be imported: {_first_line(error)}"
    try:
        error_of_probe = _probe_paged(FlashCute(), device)
    except Exception as error:  # whatever a compiler of kernels may raise
        major, minor = torch.cuda.get_device_capability(device)
        return f"paged K/V failed on compute capability {major}.{minor}: {type(error).__name__}: {_first_line(error)}"
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


# -------------------------------------------------------------------------------------------------------- FlashInfer


def flashinfer_problem(device: torch.device) -> str | None:
    """Why FlashInfer cannot be called; None if it can be imported. Its kernels are compiled when first planned."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # it looks for compilers and drivers when it is imported
        return f"flashinfer-python cannot be imported: {type(error).__name__}: {_first_line(error)}"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
