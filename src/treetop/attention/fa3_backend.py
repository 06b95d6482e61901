"""FlashAttention-3: one compiled operator `fwd`, under the name of whoever built it; called by its own schema.

Facts about the calls: hopper/flash_api.cpp of Dao-AILab/flash-attention and of vllm-project/flash-attention;
python/sgl_kernel/flash_attn.py of sgl-project/sglang.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.attention.capabilities import HALF, Capabilities, Need
from treetop.attention.contract import BackendSpec
from treetop.attention.flash_pages import FlashPages, PagedCall
from treetop.attention.library_backend import LibraryBackend, first_line, on_hopper
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import why_not

# With pages of 128 tokens and more it loads whole pages, also what nobody wrote there.
CAPABILITIES = Capabilities(
    HALF, head_dims=tuple(range(8, 257, 8)), page_sizes=(1, 2, 4, 8, 16, 32, 64), own_windows=False, own_sinks=False,
    captures_first_call=True,
)  # fmt: skip
FA3_FILE = "TREETOP_FA3_LIBRARY"
"""Environment variable: a compiled FlashAttention-3 to load before anything that is installed."""

_NAMESPACES = ("_vllm_fa3_C", "flash_attn_3", "sgl_kernel")
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
        return _found_in(f"{FA3_FILE}={file}", lambda: torch.ops.load_library(file))
    problems = []
    for package, load in _PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            continue
        try:
            return _found_in(package, load)
        except LookupError as error:
            problems.append(str(error))
    names = ", ".join(_PACKAGES)
    raise LookupError("; ".join(problems) or f"none of {names} is installed and {FA3_FILE} names no file")


def _found_in(source: str, load: Callable[[], object]) -> FlashOp:
    try:
        load()
        for namespace in _NAMESPACES:
            operators = getattr(torch.ops, namespace)
            if hasattr(operators, "fwd"):
                scheduler = getattr(operators, "get_scheduler_metadata", None)
                rest = None if scheduler is None else scheduler.default
                return FlashOp(operators.fwd.default, rest, f"{source} (torch.ops.{namespace}.fwd)")
    except (ImportError, OSError, RuntimeError, LookupError) as error:
        raise LookupError(f"{source} cannot be used: {first_line(error)}") from error
    raise LookupError(f"{source} has no operator fwd under any of {', '.join(_NAMESPACES)}")


def _load_from_vllm() -> None:
    """The compiled file alone: importing the package would start far more than an operator."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    files = [f for p in spec.submodule_search_locations or () for f in Path(p).glob("vllm_flash_attn/_vllm_fa3_C*.so")]
    if not files:
        raise LookupError("the package holds no vllm_flash_attn/_vllm_fa3_C*.so")
    torch.ops.load_library(str(files[0]))


_PACKAGES: dict[str, Callable[[], object]] = {
    "flash_attn_interface": lambda: importlib.import_module("flash_attn_interface"),
    "sgl_kernel": lambda: importlib.import_module("sgl_kernel.flash_attn"),
    "vllm": _load_from_vllm,
}


def problem(device: torch.device) -> str | None:
    """Why FlashAttention-3 cannot be called; None if it can."""
    try:
        find_fa3()
    except LookupError as error:
        return f"FlashAttention-3 was not found: {error}"
    return None


def _make(need: Need) -> LibraryBackend:
    ops = Ops(OpContext(need.device, need.dtype))
    return LibraryBackend("fa3", CAPABILITIES, FlashPages(find_fa3(), ops), TritonBackend(need.device), ops)


BACKEND = BackendSpec(CAPABILITIES, _make, (why_not, on_hopper, problem))
