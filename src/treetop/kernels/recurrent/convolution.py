"""The depthwise convolution before a recurrence: along each node's path, and along a chunk of a prompt.

Inputs of a row, by index: its state's taps - 1 columns, the newest last, then what the batch brings.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl


def tree_windows(parents: Tensor, taps: int) -> Tensor:
    """What stands before each node on its path, oldest first: indices into the row's inputs [rows, T, taps - 1].

    parents: [rows, T] int64, each before its children; node 0 is the root, whose parent means nothing.
    """
    rows, nodes = parents.shape
    before = torch.arange(taps - 1, device=parents.device)
    up = torch.cat(
        [(before - 1).clamp(min=0).expand(rows, -1), before[-1:].expand(rows, -1), parents[:, 1:] + taps - 1], dim=1
    )  # the last column of the state stands before the root; nobody looks beyond the first
    line = [torch.arange(taps - 1, taps - 1 + nodes, device=parents.device).expand(rows, -1)]
    for _ in range(taps - 1):
        line.append(up.gather(1, line[-1]))
    return torch.stack(line[:0:-1], dim=2) if taps > 1 else parents.new_empty((rows, nodes, 0))


def path_conv_reference(
    conv: Tensor,
    rows: Tensor,
    x: Tensor,
    windows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """The convolution at each node, along its path; no activation.

    conv: [num_rows, channels, taps - 1]. rows: [rows] int64. x: [rows, T, channels]. windows: `tree_windows`.
    weight: [channels, taps], the newest last. bias: [channels]. kept: gets x. Sums are of float32 at least.
    Returns [rows, T, channels].
    """
    taps = weight.shape[1]
    if kept is not None:
        kept.copy_(x)
    inputs = _inputs(conv, rows, x)
    index = windows.flatten(1)[..., None].expand(-1, -1, x.shape[2])
    window = inputs.gather(1, index).unflatten(1, windows.shape[1:])
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) * weight[:, -1].to(wide)
    for tap in range(taps - 2, -1, -1):
        total = total + window[:, :, tap].to(wide) * weight[:, tap].to(wide)
    return (total if bias is None else total + bias.to(wide)).to(x.dtype)


def prefill_conv_reference(
    conv: Tensor, rows: Tensor, x: Tensor, valid: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The convolution at each token of a chunk, after each row's own state, which moves on to the last valid inputs.

    x: [rows, n, channels]. valid: [rows, n] bool, tokens before padding. The rest as in `path_conv_reference`.
    """
    before = weight.shape[1] - 1
    first = torch.arange(x.shape[1], device=x.device)[:, None]
    windows = (first + torch.arange(before, device=x.device)).expand(len(rows), -1, -1)
    out = path_conv_reference(conv, rows, x, windows, weight, bias)
    if before:
        last = valid.sum(dim=1)[:, None] + windows[:, 0]
        kept = _inputs(conv, rows, x).gather(1, last[..., None].expand(-1, -1, x.shape[2]))
        conv[rows] = kept.transpose(1, 2)
    return out


def _inputs(conv: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """[rows, taps - 1 + n, channels]."""
    return torch.cat([conv[rows].transpose(1, 2).to(x.dtype), x], dim=1)


def path_conv(
    conv: Tensor, rows: Tensor, x: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None = None,
    kept: Tensor | None = None, *, gpu: GpuTraits,
) -> Tensor:  # fmt: skip
    """`path_conv_reference` in one launch."""
    return _convolved(conv, rows, x, windows, weight, bias, kept, gpu)


def prefill_conv(
    conv: Tensor, rows: Tensor, x: Tensor, valid: Tensor, weight: Tensor, bias: Tensor | None = None,
    *, gpu: GpuTraits,
) -> Tensor:  # fmt: skip
    """`prefill_conv_reference` in two launches: the state moves on when all of it was read."""
    out = _convolved(conv, rows, x, None, weight, bias, None, gpu)
    channels, before = conv.shape[1:]
    if before:
        block = min(_BLOCK, lanes(channels))
        _move_on_kernel[(-(-channels // block), len(rows))](
            conv, rows, x, valid.sum(dim=1), x.stride(0), x.stride(1), conv.stride(0), channels,
            before=before, block=block, overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
        )  # fmt: skip
    return out


_BLOCK = 512
"""Channels of a program."""


def _convolved(
    conv: Tensor, rows: Tensor, x: Tensor, windows: Tensor | None, weight: Tensor, bias: Tensor | None,
    kept: Tensor | None, gpu: GpuTraits,
) -> Tensor:  # fmt: skip
    """windows: None where each token stands behind the one before it."""
    (batch, n, channels), taps = x.shape, weight.shape[1]
    assert x.stride(2) == rows.stride(0) == 1
    assert conv[0].is_contiguous()
    assert weight.is_contiguous()
    assert windows is None or windows.is_contiguous()
    assert kept is None or (kept.shape == x.shape and kept.stride(2) == 1)
    kept_strides = (0, 0) if kept is None else kept.stride()[:2]
    out = torch.empty((batch, n, channels), dtype=x.dtype, device=x.device)
    block = min(_BLOCK, lanes(channels))
    _conv_kernel[(-(-channels // block), n, batch)](
        out, conv, rows, x, rows if windows is None else windows, weight, weight if bias is None else bias,
        out if kept is None else kept, n, channels, x.stride(0), x.stride(1), conv.stride(0), *kept_strides,
        taps=taps, has_windows=windows is not None, has_bias=bias is not None, keeps=kept is not None, block=block,
        overlap=gpu.can_overlap, num_warps=4, **launch_options(gpu),
    )  # fmt: skip
    return out


@jit
def _conv_kernel(
    out: Arg, conv: Arg, rows: Arg, x: Arg, windows: Arg, weight: Arg, bias: Arg, kept: Arg, n: Arg, channels: Arg,
    x_row: Arg, x_token: Arg, conv_row: Arg, kept_row: Arg, kept_token: Arg, taps: constexpr, has_windows: constexpr,
    has_bias: constexpr, keeps: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some channels of one token. Grid (blocks, tokens, rows). The newest input first, as the reference sums them."""
    pdl_wait(overlap, early=True)
    token = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    there = channel < channels
    state = conv + tl.load(rows + item) * conv_row + channel * (taps - 1)
    own = x + item * x_row + channel
    here = tl.load(own + token * x_token, mask=there, other=0.0)
    if keeps:
        at = kept + item * kept_row + token * kept_token + channel
        tl.store(at, here.to(kept.dtype.element_ty), mask=there)
    total = here.to(tl.float32)
    total *= tl.load(weight + channel * taps + (taps - 1), mask=there, other=0.0).to(tl.float32)
    for back in tl.static_range(1, taps):
        tap = taps - 1 - back
        index = token + tap
        if has_windows:
            index = tl.load(windows + (item * n + token) * (taps - 1) + tap)
        if index < taps - 1:
            read = tl.load(state + index, mask=there, other=0.0).to(tl.float32)
        else:
            read = tl.load(own + (index - (taps - 1)) * x_token, mask=there, other=0.0).to(tl.float32)
        total += read * tl.load(weight + channel * taps + tap, mask=there, other=0.0).to(tl.float32)
    if has_bias:
        total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(out + (item * n + token) * channels + channel, total.to(out.dtype.element_ty), mask=there)


@jit
def _move_on_kernel(
    conv: Arg, rows: Arg, x: Arg, counts: Arg, x_row: Arg, x_token: Arg, conv_row: Arg, channels: Arg,
    before: constexpr, block: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Some channels of one row. Grid (blocks, rows). A source never lies before the column that it goes to."""
    pdl_wait(overlap, early=True)
    item = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    there = channel < channels
    count = tl.load(counts + item)
    state = conv + tl.load(rows + item) * conv_row + channel * before
    if count > 0:
        for column in tl.static_range(before):
            index = count + column
            if index < before:
                kept = tl.load(state + index, mask=there, other=0.0)
            else:
                at = x + item * x_row + (index - before) * x_token + channel
                kept = tl.load(at, mask=there, other=0.0).to(conv.dtype.element_ty)
            tl.store(state + column, kept, mask=there)
