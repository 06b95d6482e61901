"""Faults of models and their folders, put back by name: each does harm to some targets only.

Formats of weights: `test_checkpoint_formats.py`; gated delta nets and the layers between them, whose logits it
changes: `test_linear_attention.py`; compressed and sparse attention: `test_sparse_faults.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.rope import Rotation
from treetop.models.config import read_config
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch, instead


def _of_the_copy(real: Callable[..., Any]) -> Callable[..., Any]:
    """A head's configuration with what its copy of the target's says of quantized weights."""

    def head_config(folder: Path) -> Any:
        config, nested = real(folder)
        copied = read_config(folder).get("transformer_layer_config", {}).get("quantization_config")
        return {**config, "quantization_config": copied}, nested

    return head_config


def _e4m3(real: Callable[..., Any]) -> Callable[..., Any]:
    """Scales that are powers of two, expected as e4m3 of the same shape."""

    def stored(self: Any, source: Any) -> Any:
        found = real(self, source)
        name = f"{source.name}_scale"
        return {**found, name: replace(found[name], kinds=("F8_E4M3",))}

    return stored


FORMAT_FAULTS = by_name(
    Fault(
        "vllm-25883",
        "a draft head's weights are taken to be in its target's format",
        (Patch("treetop.drafts.eagle3_config:head_config", _of_the_copy),),
        "missing tensor",
        0,
    ),
    Fault(
        "vllm-28435",
        "e8m0 scales are taken for e4m3 scales of the same shape",
        (Patch("treetop.weights.fp4:Fp4.stored", _e4m3),),
        "stored as U8, expected F8_E4M3",
        0,
    ),
)


_GUARD = "logits"


def _without_ones(stored: Tensor, reorder: object) -> Tensor:
    """A norm of 1 + w that multiplies by w."""
    return stored.to(torch.float64)


def _halves(stored: Tensor, dim: int, index: int, then: object) -> Tensor:
    """All queries, then all gates, instead of both head by head."""
    return stored.chunk(2)[index]


def _parts(stored: Tensor, heads: int, lines: slice) -> Tensor:
    """Rows of all key heads' queries, then keys, instead of both by key head."""
    return stored[lines.start * heads : lines.stop * heads]


def _unbounded(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda self, steps: self._speed[:, None] * self._ops.functions.softplus(steps)


LINEAR_FAULTS = by_name(
    Fault(
        "linear-ones-left-out",
        "norms multiply by w instead of 1 + w (vllm-mlx 400)",
        (instead("treetop.models.layers:_offset_by_one", _without_ones),),
        _GUARD,
        None,
    ),
    Fault(
        "linear-gate-by-halves",
        "queries and gates are read by halves instead of by heads",
        (instead("treetop.models.layers:_half_of_heads", _halves),),
        _GUARD,
        None,
    ),
    Fault(
        "linear-rows-by-part",
        "inputs that are stored by key head are read by part",
        (instead("treetop.models.linear_attention:_of_each_head", _parts),),
        _GUARD,
        None,
    ),
)


def _in_16_bits(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def slopes(*call: Any) -> Tensor:
        exact = real(*call)
        return exact.bfloat16().to(exact.dtype)

    return slopes


def _other_order(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The gate behind the norm, where it stands before it."""

    def gated(self: Any, y: Tensor, z: Tensor) -> Tensor:
        normed: Tensor = self._normed(y) * F.silu(z)
        return normed

    return gated


MIXER_FAULTS = by_name(
    Fault(
        "minimax-slopes-in-16-bits",
        "slopes of lightning attention are rounded to bfloat16",
        (Patch("treetop.models.mixers.lightning:slopes", _in_16_bits),),
        _GUARD,
        None,
    ),
    Fault(
        "minimax-whole-stream",
        "what has entered a norm goes on, and not what has left it",
        (Patch("treetop.models.decoder:_kept", lambda real: lambda x, normed, keep: x),),
        _GUARD,
        None,
    ),
    Fault(
        "bamba-norm-first",
        "Mamba-2's gate stands behind the norm",
        (Patch("treetop.models.mixers.mamba2:Mamba2._gated", _other_order),),
        _GUARD,
        None,
    ),
    Fault(
        "ling-3-decays-without-floor",
        "decays that are bounded are not",
        (Patch("treetop.models.mixers.kimi_delta:KimiDelta._decays", _unbounded),),
        _GUARD,
        None,
    ),
    Fault(
        "olmo-hybrid-beta-up-to-1",
        "a delta rule that may be up to 2 is up to 1",
        (Patch("treetop.kernels.recurrent.states:StateInputs.with_beta", lambda real: lambda self, factor: self),),
        _GUARD,
        None,
    ),
)
"""Of layers with recurrences of other kinds; a name begins with its family."""

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


def _rotated_for_the_next(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A token's key, which is one head, is rotated by the angles of the next token of its batch."""

    def rotate_(x: Tensor, angles: Rotation) -> Tensor:
        if x.shape[2] == 1:
            angles = Rotation(angles.cos.roll(-1, 1), angles.sin.roll(-1, 1))
        return real(x, angles)

    return rotate_


def _at_once(real: Callable[..., Any]) -> Callable[..., Any]:
    """What the experts give is added in their own layer."""

    def both(self: Any, x: Tensor, live: Tensor | None, stream: Tensor) -> Tensor:
        found: Tensor = real(self, x, live, stream)
        return torch.cat([found, self._experts(x, live)])

    return both


def _nothing_late(self: Any, x: Tensor, live: Tensor | None) -> Tensor:
    return x.new_zeros((1, *x.shape))


LONGCAT_FAULTS = by_name(
    Fault(
        "longcat-identity-left-out",
        "experts without weights give nothing",
        (instead("treetop.models.experts:ExpertMLP._pass_on", lambda self, *call: None),),
        _GUARD,
        None,
    ),
    Fault(
        "longcat-shortcut-at-once",
        "what experts give is added in their own layer, and not behind the next",
        (
            Patch("treetop.models.shortcut:ShortcutMLP.__call__", _at_once),
            instead("treetop.models.shortcut:ShortcutMLP.late", _nothing_late),
        ),
        _GUARD,
        None,
    ),
    Fault(
        "longcat-latent-unscaled",
        "the latent of keys and values is kept as its norm gives it",
        (instead("treetop.models.latent_attention:_times", lambda scale, weight: weight),),
        _GUARD,
        None,
    ),
)

SPARSE_FAULTS = by_name(
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
        "the rotary part of a key is rotated for another token's position",
        (Patch("treetop.kernels.attention.latent:rotate_", _rotated_for_the_next),),
        "tokens",
        None,
    ),
)
