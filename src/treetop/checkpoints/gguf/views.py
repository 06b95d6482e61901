"""Tensors of a GGUF file as a folder of the hub has them: by its names, rows in its order."""

from pathlib import Path
from typing import Any

from torch import Tensor

from treetop.checkpoints.gguf.architectures import KEEP_CODES, UNREAD, Architecture, expert_names, hub_name
from treetop.checkpoints.gguf.gpt_oss import is_experts
from treetop.checkpoints.gguf.header import TYPES
from treetop.checkpoints.gguf.stacked_views import stacked_views
from treetop.checkpoints.gguf.tensors import GgufTensors, View
from treetop.types.errors import CheckpointError, shown

_MAX_NAMES = 2**18
_TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose rows llama.cpp interleaves, and the number of their heads."""


def views(file: GgufTensors, kind: Architecture, config: dict[str, Any], path: Path) -> dict[str, View]:
    """All that the file holds, by the hub's names. Raises CheckpointError for a tensor that is not known."""
    made: dict[str, View] = {}
    if kind.stacked:
        made |= stacked_views(file, config, path)
    for name, stored in file.header.tensors.items():
        if name in UNREAD or (kind.stacked and is_experts(name)):
            continue
        experts = [] if kind.stacked else expert_names(name, stored.shape, kind, path)
        of_name = {each: _expert(file, name, expert) for expert, each in enumerate(experts)}
        if not experts:
            hub = hub_name(name, kind, path)
            of_name = {hub: _view(file, name, hub, kind, config)}
        if not made.keys().isdisjoint(of_name):
            raise CheckpointError(f"{path}: tensor {shown(name)[1:-1]} is there under another name too")
        made |= of_name
        if len(made) > _MAX_NAMES:
            raise CheckpointError(f"{path}: holds more than {_MAX_NAMES} tensors, each expert's counted")
    return made


def _view(file: GgufTensors, name: str, hub: str, kind: Architecture, config: dict[str, Any]) -> View:
    stored = file.header.tensors[name]
    shape, type_, heads = stored.shape, TYPES[stored.type][0], _TURNED.get(hub.split(".")[-2])
    codes = type_ in KEEP_CODES and len(shape) == 2
    if kind.interleaved and heads is not None:
        number = config[heads]

        def turned(start: int, stop: int) -> Tensor:
            return _halves(file, name, file.get_tensor(name), number)[start:stop]

        def turned_blocks(start: int, stop: int) -> Tensor:
            return _halves(file, name, file.blocks(name, 0, shape[0]), number)[start:stop]

        return View(shape, type_, turned, turned_blocks if codes else None)
    if kind.norm_offset and hub.endswith("norm.weight"):
        return View(shape, type_, lambda start, stop: file.rows(name, start, stop) - kind.norm_offset)
    blocks = (lambda start, stop: file.blocks(name, start, stop)) if codes else None
    return View(shape, type_, lambda start, stop: file.rows(name, start, stop), blocks)


def _expert(file: GgufTensors, name: str, expert: int) -> View:
    """One of those that lie in one tensor."""
    stored = file.header.tensors[name]
    return View(
        stored.shape[1:],
        TYPES[stored.type][0],
        lambda start, stop: file.rows(name, expert, expert + 1)[0][start:stop],
    )


def _halves(file: GgufTensors, name: str, tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs side by side to the first halves of all pairs, then the second."""
    if heads < 1 or len(tensor) % (2 * heads):
        raise CheckpointError(f"{file.path}: tensor {name} has {len(tensor)} rows for {heads} heads")
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
