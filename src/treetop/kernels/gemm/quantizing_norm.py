"""Add and RMS norm whose result is written in e4m3 too, for the product that reads it: one launch instead of two."""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.fused import add_rms_norm_in_order, add_rms_norm_reference, e4m3
from treetop.kernels.gemm.fp8_rows import Activations, QuantizedRows, quantize_rows_reference, scale_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit_for_any, power_of_two, tl


def norms_codes(how: Activations, hidden: int) -> bool:
    """Whether a norm can write codes like these: no fixed scale, and groups that fill a row."""
    return not how.fixed and (how.group == 0 or (hidden % how.group == 0 and power_of_two(how.group) == how.group))


def add_rms_norm_codes_reference(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, how: Activations
) -> tuple[Tensor, Tensor, QuantizedRows]:
    """`fused.add_rms_norm_reference`, and `fp8_rows.quantize_rows_reference` of the norm's rows, as rounded."""
    return _with_codes(*add_rms_norm_reference(x, delta, weight, eps), how)


def add_rms_norm_codes_in_order(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, how: Activations
) -> tuple[Tensor, Tensor, QuantizedRows]:
    """The same of `fused.add_rms_norm_in_order`."""
    return _with_codes(*add_rms_norm_in_order(x, delta, weight, eps), how)


def _with_codes(total: Tensor, normed: Tensor, how: Activations) -> tuple[Tensor, Tensor, QuantizedRows]:
    return total, normed, quantize_rows_reference(normed.reshape(-1, normed.shape[-1]), how)


def add_rms_norm_codes(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, how: Activations, gpu: GpuTraits
) -> tuple[Tensor, Tensor, QuantizedRows]:
    """`add_rms_norm_codes_reference` in one launch, with the bits of `fused.add_rms_norm` and `fp8_rows.quantize_rows`
    after it. delta: contiguous."""
    x, hidden = x.contiguous(), x.shape[-1]
    assert norms_codes(how, hidden)
    assert delta is None or delta.is_contiguous()
    rows, groups = x.numel() // hidden, hidden // (how.group or hidden)
    normed = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    codes = torch.empty((rows, hidden), dtype=torch.uint8, device=x.device)
    scale = torch.empty((groups, rows), dtype=torch.float32, device=x.device).T
    _norm_codes_kernel[(rows,)](
        total, normed, codes, scale, x, x if delta is None else delta, weight, eps, x.numel(), rows,
        hidden=hidden, block=power_of_two(hidden), parts=0 if delta is None else delta.shape[0], group=how.group,
        powers=how.powers, overlap=gpu.can_overlap, num_warps=8 if hidden > 2048 else 4, **launch_options(gpu),
    )  # fmt: skip
    return total, normed, QuantizedRows(codes, scale)


@jit_for_any("rows")
def _norm_codes_kernel(
    total: Arg, normed: Arg, codes: Arg, scale: Arg, x: Arg, delta: Arg, weight: Arg, eps: Arg, size: Arg, rows: Arg,
    hidden: constexpr, block: constexpr, parts: constexpr, group: constexpr, powers: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program, as `fused._add_rms_norm_kernel`. codes: [rows, hidden]; scale: [groups, rows]."""
    column = tl.arange(0, block)
    there = column < hidden
    weights = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)  # a constant: needs no waiting
    pdl_wait(overlap)
    row = tl.program_id(0).to(tl.int64)
    at = row * hidden + column
    value = tl.load(x + at, mask=there, other=0.0)
    if parts > 0:
        added = tl.load(delta + at, mask=there, other=0.0).to(tl.float32)
        for part in tl.static_range(1, parts):
            added += tl.load(delta + part * size + at, mask=there, other=0.0)
        value = (value.to(tl.float32) + added).to(value.dtype)
        tl.store(total + at, value, mask=there)
    value = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    rounded = (value * inverse * weights).to(normed.dtype.element_ty)
    tl.store(normed + at, rounded, mask=there)
    width: constexpr = group if group > 0 else block
    own = tl.arange(0, block // width)
    values = tl.reshape(rounded.to(tl.float32), [block // width, width])
    s = scale_of(tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), powers)
    tl.store(scale + own.to(tl.int64) * rows + row, s, mask=own * width < hidden)
    of = own[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(codes + row * hidden + of, e4m3(values, s[:, None]), mask=of < hidden)
