"""The depthwise convolution before a recurrence: along each node's path, and along a chunk of a prompt.

Inputs of a row, by index: its state's taps - 1 columns, the newest last, then what the batch brings.
"""

import torch
from torch import Tensor


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
    conv: Tensor, rows: Tensor, x: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The convolution at each node, along its path; no activation.

    conv: [num_rows, channels, taps - 1]. rows: [rows] int64. x: [rows, T, channels]. windows: `tree_windows`.
    weight: [channels, taps], the newest last. bias: [channels]. Sums are of float32 at least.
    Returns [rows, T, channels].
    """
    taps = weight.shape[1]
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
