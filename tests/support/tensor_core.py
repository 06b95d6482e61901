"""A tensor core for Triton's interpreter, and attention by position in plain numpy on it.

NumPy's product may sum otherwise for another number of rows. Here a product adds the terms of 16 keys at once, in
float64, and rounds to float32 after each step: where in its step a key stands changes nothing, in which step it stands
does, as on a GPU; and what an output gets depends on its own row and column alone, by construction.
"""

import itertools
import math
from contextlib import contextmanager

import numpy as np
import torch

from support.chains import fused

STEP = 16


def in_steps(a, b, total):
    """total + a @ b, float32. a: [m, k]; b: [k, n]; total: [m, n]."""
    a, b = np.float64(a), np.float64(b)
    for start in range(0, a.shape[1], STEP):
        here = slice(start, start + STEP)
        terms = np.add.reduce(a[:, here, None] * b[None, here], axis=1)  # not the last axis: one term after another
        total = np.float32(np.float64(total) + terms)
    return total


def exp2(x):
    """2 ** x of float32, by float64: NumPy's own in float32 may go by vector or number, and by version."""
    return np.exp2(np.float64(x)).astype(np.float32)


def by_pairs(count):
    """An order of so many terms: of each 32 the first two of every four before the other two."""
    at = np.arange(count).reshape(-1, 32 // 4 if count % 32 == 0 else count // 4, 2, 2)
    return at.swapaxes(1, 2).ravel()


@contextmanager
def tensor_core(order=None):
    """In Triton's interpreter inside, products are `in_steps`, `fma` rounds once (of older Tritons twice), and powers
    of 2 are `exp2`. order: of a number of terms, the order in which a product takes these."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def numbers(handle):
        bits = handle.data.dtype == np.uint16  # of bfloat16
        return (handle.data.astype(np.uint32) << 16).view(np.float32) if bits else handle.data

    def dot(a, b, total, *_):
        left, right = numbers(a), numbers(b)
        if order is not None:
            at = order(len(right))
            left, right = left[:, at], right[at]
        with np.errstate(all="ignore"):
            return TensorHandle(in_steps(left, right, total.data), total.dtype.scalar)

    def fma(x, y, z):
        assert z.data.dtype == np.float32
        with np.errstate(all="ignore"):
            return TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    def power(x):
        assert x.data.dtype == np.float32
        return TensorHandle(exp2(x.data), x.dtype.scalar)

    own = {"create_dot": dot, "create_fma": fma, "create_exp2": power}
    real = {name: getattr(interpreter_builder, name) for name in own}
    vars(interpreter_builder).update(own)
    try:
        yield
    finally:
        vars(interpreter_builder).update(real)


def starts_of_segments(end, unit):
    """First positions of the segments that hold 0 .. end - 1: 16 of one unit, 24 of two, 48 of four, then of eight."""
    starts, at = [], 0
    while at < end:
        starts.append(at)
        at += unit * (1 if len(starts) <= 16 else 2 if len(starts) <= 40 else 4 if len(starts) <= 88 else 8)
    return [*starts, at]


def attention_by_position(q, seen, scale, block, unit, sink=None, scales=None):
    """One head of one query. q: [d] of any dtype. seen: position -> (k [d], v [wide]). Returns [wide] like q.

    scales: of keys and of values in FP8. The sums as `kernels.attention.segments` describes them, one operation after
    another.
    """
    of_key, of_value = np.float32(scales or (1, 1))
    wide_v, scale = len(next(iter(seen.values()))[1]), np.float32(scale * math.log2(math.e)) * of_key
    wide = {at: [each.float().numpy() for each in kv] for at, kv in seen.items()}
    query = q.float().numpy()[None]
    acc, peak, mass = np.zeros((1, wide_v), np.float32), np.float32(-1e30), np.float32(0)
    starts = starts_of_segments(max(seen) + 1, unit)
    for first, after in itertools.pairwise(starts):
        if not any(first <= at < after for at in seen):
            continue
        part, part_peak, part_mass = np.zeros((1, wide_v), np.float32), np.float32(-1e30), np.zeros((1, 1), np.float32)
        for start in range(first, after, block):
            here = [wide.get(start + i) for i in range(block)]
            if not any(each is not None for each in here):
                continue
            widths = len(q), wide_v
            k, v = (np.stack([np.zeros(widths[i]) if each is None else each[i] for each in here]) for i in (0, 1))
            raw = in_steps(query, k.T, np.zeros((1, block), np.float32))
            raw[0, [each is None for each in here]] = -np.inf
            new_peak = np.maximum(part_peak, raw.max() * scale)
            hidden = raw == -np.inf
            weights = exp2(np.where(hidden, np.float32(-np.inf), fused(np.where(hidden, 0, raw), scale, -new_peak)))
            weights = torch.from_numpy(weights).to(q.dtype).float().numpy()
            shrink = exp2(part_peak - new_peak)
            part = in_steps(weights, v, part * shrink)
            part_mass = in_steps(weights, np.ones((block, 1)), part_mass * shrink)
            part_peak = new_peak
        acc, peak, mass = _joined(acc, peak, mass, part, part_peak, part_mass[0, 0])
    if sink is not None:
        sink = np.float32(sink) * np.float32(math.log2(math.e))
        new_peak = np.maximum(peak, sink)
        shrink = exp2(peak - new_peak)
        acc, mass = acc * shrink, fused(mass, shrink, exp2(sink - new_peak))
    return torch.from_numpy((acc[0] / mass + np.float32(0)) * of_value).to(q.dtype)


def _joined(acc, peak, mass, part, part_peak, part_mass):
    new_peak = np.maximum(peak, part_peak)
    shrink, share = exp2(peak - new_peak), exp2(part_peak - new_peak)
    return fused(part, share, acc * shrink), new_peak, fused(part_mass, share, mass * shrink)
