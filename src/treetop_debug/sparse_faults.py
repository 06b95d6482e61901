"""Faults of compressed and of sparse attention, put back by name. They do harm to such targets only
(`test_sparse_faults.py`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.rope import Rotation
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch, instead

_BACKEND = "treetop.attention.torch_backend:TorchBackend"


def _of_a_larger_batch(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What an indexer chose for the first rows of a batch that was larger."""
    kept: dict[tuple[int, int], Tensor] = {}

    def choose(self: Any, query: Any, kv: Any, plan: Any, tail: Any) -> Tensor:
        place = kv.data.data_ptr(), plan.visible.shape[1]
        before = kept.get(place)
        if before is not None and len(before) > len(plan.visible):
            return _fitted(before, plan.visible)
        kept[place] = chosen = real(self, query, kv, plan, tail)
        return chosen

    return choose


def _fitted(chosen: Tensor, visible: Tensor) -> Tensor:
    """Of as many rows and keys as there are now."""
    found, width = torch.zeros_like(visible), min(chosen.shape[2], visible.shape[2])
    found[..., :width] = chosen[: len(visible), :, :width]
    return found


def _of_the_forward_before(real: Callable[..., Any]) -> Callable[..., Any]:
    """A layer that shares a choice takes what was chosen a forward ago, for whoever then ran."""
    before: dict[int, Tensor] = {}
    now: dict[int, Tensor] = {}

    def narrowed(self: Any, layer: int, index: Any, kv: Any, plan: Any, tail: Any) -> Any:
        if isinstance(index, int):
            old = before.get(index)
            if old is not None and old.shape[1] == plan.visible.shape[1] and len(old) >= len(plan.visible):
                self.chosen[index] = _fitted(old, plan.visible)
        found = real(self, layer, index, kv, plan, tail)
        if index is not None and not isinstance(index, int):
            if layer in now:
                before[layer] = now[layer]
            now[layer] = self.chosen[layer]
        return found

    return narrowed


def _among_all_nodes(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Among all nodes of the tree, whether they are the query's ancestors or not."""

    def choose(self: Any, query: Any, kv: Any, plan: Any, tail: Any) -> Tensor:
        visible = plan.visible.clone()
        if tail is not None:
            visible[..., -tail.data.shape[1] :] = True
        return real(self, query, kv, replace(plan, visible=visible), tail)

    return choose


def _not_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def _second_plane(real: Callable[..., Tensor]) -> property:
    """The value from the middle of the plane on, where it would be if there were two."""

    def v(self: Any) -> Tensor:
        planes: Tensor = self.planes[:, :, -1]
        return planes.roll(-(planes.shape[-1] // 2), -1)[..., : self.value_dim]

    return property(v)


def _turned_for_the_next(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A token's key, which is one head, is turned by the angles of the next token of its batch."""

    def rotate_(x: Tensor, angles: Rotation) -> Tensor:
        if x.shape[2] == 1:
            angles = Rotation(angles.cos.roll(-1, 1), angles.sin.roll(-1, 1))
        return real(x, angles)

    return rotate_


SPARSE_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "sgl-30854",
            "a batch that has shrunk attends to what was chosen for the larger one's rows",
            (Patch(f"{_BACKEND}.choose", _of_a_larger_batch),),
            "detect_oob: chosen_key",
            2,
        ),
        Fault(
            "sgl-32527",
            "a layer that shares a choice takes another batch's, as that of a rank without requests",
            (Patch("treetop.attention.layer:ChosenKeys.narrowed", _of_the_forward_before),),
            "detect_oob: chosen_key",
            2,
        ),
        Fault(
            "index-of-a-rejected-node",
            "an indexer chooses among all nodes of a tree, not among a query's ancestors",
            (Patch(f"{_BACKEND}.choose", _among_all_nodes),),
            "detect_oob: chosen_key",
            2,
        ),
        Fault(
            "latent-before-its-norm",
            "a latent is written as it is before its norm",
            (instead("treetop.kernels.latent:rms_norm", _not_normed),),
            "tokens",
            None,
        ),
        Fault(
            "latent-as-two-planes",
            "a latent's page is read as one of two planes",
            (Patch("treetop.attention.contract:TailKV.v", _second_plane),),
            "tokens",
            None,
        ),
        Fault(
            "rope-of-another-position",
            "what turns of a key is turned for another token's position",
            (Patch("treetop.kernels.latent:rotate_", _turned_for_the_next),),
            "tokens",
            None,
        ),
    )
}
