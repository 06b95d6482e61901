"""Faults of compressed and of sparse attention, put back by name. They do harm to such targets only
(`test_sparse_faults.py`)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.rope import Rotation
from treetop_debug.faults import Fault
from treetop_debug.patching import Patch, instead

_NARROWED = "treetop.attention.layer:ChosenKeys.narrowed"

Choose = Callable[[IndexQuery, Any, Any, Any], Any]
"""`SparseBackend.choose` of a backend."""


@dataclass(frozen=True)
class _Choosing:
    """A backend that chooses otherwise. choose: instead of the real one's, which it is given."""

    real: Any
    choose_instead: Callable[[Choose, IndexQuery, Any, Any, Any], Any]

    def choose(self, query: IndexQuery, kv: Any, plan: Any, tail: Any) -> Any:
        return self.choose_instead(self.real.choose, query, kv, plan, tail)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _choosing(kind: Callable[[], Callable[[Choose, IndexQuery, Any, Any, Any], Any]]) -> Patch:
    """Every backend chooses otherwise. kind: makes what remembers nothing yet."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        otherwise = kind()

        def narrowed(self: Any, *call: Any) -> Any:
            return real(replace(self, backend=_Choosing(self.backend, otherwise)), *call)

        return narrowed

    return Patch(_NARROWED, make)


def _of_a_larger_batch() -> Callable[[Choose, IndexQuery, Any, Any, Any], Any]:
    """What an indexer chose for the first rows of a batch that was larger."""
    larger: dict[tuple[int, int], Any] = {}

    def choose(real: Choose, query: IndexQuery, kv: Any, plan: Any, tail: Any) -> Any:
        place, rows = (kv.data.data_ptr(), query.heads.shape[1]), len(query.heads)
        chosen, before = real(query, kv, plan, tail), larger.get(place)
        if _rows(before) > rows:
            return _fitted(before, chosen)
        larger[place] = chosen
        return chosen

    return choose


def _rows(chosen: Any) -> int:
    return 0 if chosen is None else len(chosen if isinstance(chosen, Tensor) else chosen.count)


def _fitted(chosen: Any, now: Any) -> Any:
    """What was chosen, of as many rows and keys as there are now."""
    if now is None or chosen is None:
        return now
    if isinstance(now, SparseKeys):
        columns, rows = now.columns, len(now.count)
        if columns is not None and chosen.columns is not None:
            columns = _fitted(chosen.columns, columns)
        return SparseKeys(chosen.positions[:rows], chosen.count[:rows], columns)
    found, width = torch.zeros_like(now), min(chosen.shape[2], now.shape[2])
    found[..., :width] = chosen[: len(now), :, :width]
    return found


def _of_the_forward_before(real: Callable[..., Any]) -> Callable[..., Any]:
    """A layer that shares a choice takes what was chosen a forward ago, for whoever then ran."""
    before: dict[tuple[int, int], Any] = {}
    now: dict[tuple[int, int], Any] = {}

    def narrowed(self: Any, layer: int, index: Any, kv: Any, plan: Any, tail: Any) -> Any:
        if isinstance(index, int):
            mine = self.chosen[index]
            old = before.get((index, _queries(mine)))
            if _rows(old) >= _rows(mine):
                self.chosen[index] = _fitted(old, mine)
        found = real(self, layer, index, kv, plan, tail)
        if isinstance(index, IndexQuery):
            mine = self.chosen[layer]
            place = layer, _queries(mine)
            if place in now:
                before[place] = now[place]
            now[place] = mine
        return found

    return narrowed


def _queries(chosen: Any) -> int:
    """Of a row."""
    return 0 if chosen is None else int((chosen if isinstance(chosen, Tensor) else chosen.count).shape[1])


def _among_all_nodes(choose: Choose, query: IndexQuery, kv: Any, plan: Any, tail: Any) -> Any:
    """Among all nodes of the tree, whether they are the query's ancestors or not."""
    if tail is None:
        return choose(query, kv, plan, tail)
    if isinstance(plan, AttentionMetadata):
        assert plan.mask is not None
        return choose(query, kv, replace(plan, mask=torch.ones_like(plan.mask)), tail)
    visible = plan.visible.clone()
    visible[..., -tail.data.shape[1] :] = True
    return choose(query, kv, replace(plan, visible=visible), tail)


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
            (_choosing(_of_a_larger_batch),),
            "detect_oob: chosen_key",
            2,
        ),
        Fault(
            "sgl-32527",
            "a layer that shares a choice takes another batch's, as that of a rank without requests",
            (Patch(_NARROWED, _of_the_forward_before),),
            "detect_oob: chosen_key",
            2,
        ),
        Fault(
            "index-of-a-rejected-node",
            "an indexer chooses among all nodes of a tree, not among a query's ancestors",
            (_choosing(lambda: _among_all_nodes),),
            "detect_oob: chosen_key",
            2,
        ),
        Fault(
            "latent-before-its-norm",
            "a latent is written as it is before its norm",
            (instead("treetop.kernels.attention.latent:rms_norm", _not_normed),),
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
            (Patch("treetop.kernels.attention.latent:rotate_", _turned_for_the_next),),
            "tokens",
            None,
        ),
    )
}
