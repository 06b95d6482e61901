"""Scales of K/V in FP8, which a checkpoint may hold beside its weights."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from treetop.checkpoints.checkpoint import open_tensors, tensor_files
from treetop.models.registry import TargetSpec
from treetop.types.errors import CheckpointError
from treetop.types.parallel import Parallel
from treetop.weights.format import TensorSpec
from treetop.weights.kv_scales import PLANES, scale_names, zero_names
from treetop.weights.quantized import SCALES

_log = logging.getLogger("treetop")


def read_kv_scales(spec: TargetSpec, parallel: Parallel) -> list[Tensor]:
    """Of each layer that has K/V of its own, in the model's order: [planes, kv_heads] float32 of the rank's heads.

    A scale is one a plane, or one a head; that of compressed attention's plane is its keys'. 1 where a layer has none,
    which the log says. Raises CheckpointError for one that is not above 0 and finite, of another shape, or of one plane
    alone, and for zero points.
    """
    found: list[Tensor] = []
    files, missing = tensor_files(spec.folder), 0
    for index, attention in spec.config.attention.items():
        if attention.kv_sharing_layer is not None:
            continue
        heads, planes = attention.kv.heads, PLANES[: attention.kv.planes]
        scales = _of_layer(spec, spec.names.stored(f"model.layers.{index}.self_attn"), planes, heads, files)
        missing += scales is None
        own, first = max(heads // parallel.size, 1), parallel.rank * heads // parallel.size
        found.append(torch.ones((len(planes), own)) if scales is None else scales[:, first : first + own].contiguous())
    if missing and parallel.rank == 0:
        _log.warning(
            "--kv-cache-dtype fp8_e4m3: %s has no scales of K/V for %d of %d layers: theirs are 1.0",
            spec.folder, missing, len(found),
        )  # fmt: skip
    return found


def _of_layer(
    spec: TargetSpec, attention: str, planes: Sequence[str], heads: int, files: Mapping[str, Path]
) -> Tensor | None:
    """Of all heads; None if a file has none."""
    if zeros := [name for name in zero_names(attention) if name in files]:
        raise CheckpointError(
            f"{files[zeros[0]]}: tensor {zeros[0]}: K/V with zero points are not supported; use --kv-cache-dtype auto"
        )
    chosen = [next((name for name in scale_names(attention, plane) if name in files), None) for plane in planes]
    if not any(chosen):
        return None
    for name, plane in zip(chosen, planes, strict=True):
        if name is None:
            raise CheckpointError(f"{spec.folder}: missing tensor {attention}.{plane}_scale, whose other plane has one")
    names = [name for name in chosen if name is not None]
    others = ((1,), (1, 1), (heads,), (heads, 1), (heads, 1, 1))
    with open_tensors(spec.folder, {name: TensorSpec((), SCALES, others) for name in names}, files) as fetch:
        read = [fetch(name, None).to(torch.float32).flatten() for name in names]
    for name, scale in zip(names, read, strict=True):
        if not bool((scale > 0).all()):
            raise CheckpointError(f"{files[name]}: tensor {name} holds a scale of {float(scale.min())}, not above 0")
    return torch.stack([scale.expand(heads) for scale in read])
