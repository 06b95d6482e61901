"""Sums in order, each term rounded once, in plain numpy: the arithmetic that exact attention says it has."""

import numpy as np
import torch

BLOCK = 128


def fused(a, b, c):
    """a * b + c of float32 arrays, rounded once. Rounding the float64 sum to odd first makes the second rounding right.

    Source: Boldo and Melquiond, Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd,
    IEEE Transactions on Computers 57 (2008).
    """
    product, c = np.float64(a) * np.float64(b), np.float64(c)  # a product of two float32 is exact
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    odd = (np.asarray(total).view(np.int64) & 1) == 1
    moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error == 0) | odd, total, moved).astype(np.float32)


def chain(weights, terms):
    """Sum of weights[i] * terms[i], one after another, from 0. weights: [n] or [n, ...]; terms: [n, ...]."""
    total = np.zeros(np.broadcast_shapes(np.shape(weights)[1:], np.shape(terms)[1:]), np.float32)
    for weight, term in zip(weights, terms, strict=True):
        total = fused(weight, term, total)
    return total


def exp(x):
    """PyTorch's, of one float32."""
    return torch.exp(torch.from_numpy(np.array([x]))).numpy()[0]


def attention_in_order(q, seen, scale, sink=None):
    """One query's attention. q: [d] float32. seen: position -> (k [d], v [d]). Returns [d] float32."""
    positions = sorted(seen)
    scaled = q * np.float32(scale)
    scores = np.array([chain(scaled, seen[at][0]) for at in positions], np.float32)
    peak = np.float32(max([*scores, *([] if sink is None else [sink])]))
    far = np.float32(-80)
    weights = [exp(max(score - peak, far)) - exp(far) for score in scores]
    total = np.zeros(len(q) + 1, np.float32)
    for block in range(positions[-1] // BLOCK + 1):
        here = [i for i, at in enumerate(positions) if at // BLOCK == block]
        terms = [np.append(seen[positions[i]][1], np.float32(1)) for i in here]
        total = total + chain([weights[i] for i in here], terms) if here else total
    mass = total[-1]
    if sink is not None:
        mass = mass + exp(np.float32(sink) - peak)
    return total[:-1] / mass
