"""Experts of GPT-OSS in a GGUF file as the hub has them; those in MXFP4 as its codes and scales, which stay packed.

A block of ggml is a scale, then 16 bytes: code j in the lower half of byte j, code j + 16 in the upper. The hub has
codes 2j and 2j + 1 in byte j. Codes and scales mean the same. Source: llama.cpp's `conversion/gpt_oss.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.checkpoints.gguf.gpt_oss import Stacked, stacked_experts
from treetop.checkpoints.gguf.header import TYPES
from treetop.checkpoints.gguf.tensors import GgufTensors, View

_HALF = 16


def stacked_views(file: GgufTensors, config: dict[str, Any], path: Path) -> dict[str, View]:
    """As the config's `quantization_config` says: with one, rows of the hub's tensors are those of the file."""
    made: dict[str, View] = {}
    for each in stacked_experts(file.header, path):
        if each.packed:
            made |= _packed(file, each)
        else:
            made[each.name] = _plain(file, each, turned="quantization_config" not in config)
    return made


def _plain(file: GgufTensors, stacked: Stacked, turned: bool) -> View:
    """turned: the hub has [experts, in, out]."""
    number, rows, *width = file.header.tensors[stacked.parts[0]].shape
    kind = TYPES[file.header.tensors[stacked.parts[0]].type][0]
    shape, turned = (number, rows * len(stacked.parts), *width), turned and bool(width)

    def read(start: int, stop: int) -> Tensor:
        lines = _in_turn([file.rows(part, start, stop) for part in stacked.parts])
        return lines.transpose(1, 2) if turned else lines

    return View((number, *width, shape[1]) if turned else shape, kind, read)


def _packed(file: GgufTensors, stacked: Stacked) -> dict[str, View]:
    number, rows, width = file.header.tensors[stacked.parts[0]].shape
    groups = (number, rows * len(stacked.parts), width // (2 * _HALF))

    def read(of_blocks: Callable[[Tensor], Tensor]) -> Callable[[int, int], Tensor]:
        return lambda start, stop: _in_turn([of_blocks(file.blocks(part, start, stop)) for part in stacked.parts])

    return {
        f"{stacked.name}_blocks": View((*groups, _HALF), "U8", read(_codes)),
        f"{stacked.name}_scales": View(groups, "U8", read(lambda blocks: blocks[..., 0])),
    }


def _codes(blocks: Tensor) -> Tensor:
    """[..., 17] uint8 to the hub's [..., 16]."""
    stored = blocks[..., 1:]
    codes = torch.cat([stored & 0xF, stored >> 4], -1)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    """Rows [experts, rows, ...] of the first, the second, the first, ..., as [experts, parts * rows, ...]."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts), 2).flatten(1, 2)
