"""A feed-forward of experts, of which a router chooses some for each token, and the parameters it consists of.

How checkpoints hold experts (`ExpertSpec.stored`): "each" has three tensors an expert, as dense layers have them;
"stacked" has GPT-OSS's two for all, [experts, in, out] with gates and ups in turn; "stacked rows" the same two as
[experts, out, in], which its quantized checkpoints have; "stacked halves" has Qwen3-VL's two, [experts, in, out] with
all gates of an expert before its ups, and a router called as with "each"; "each w" and "each of Hy3" are "each" in
Mixtral's names and in Hy3's. In memory it is always gates before ups, [experts, 2, inner, hidden], and [experts,
hidden, inner].

Ranks may share the experts (`--ep-size`): each has an equal part of them, in order, and all else. They give each other
the rows of their batches; each computes what its experts add to them, and gives that back to the row's rank. There the
shares are added in the order of the ranks, so that a row comes to the same numbers whichever rank it is on.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.kernels.routing import Router, Routes
from treetop.kernels.table import Ops
from treetop.models.config import DenseSpec, ExpertLayout, ExpertSpec
from treetop.models.layers import GatedMLP, mlp_params
from treetop.models.params import Param, own_experts
from treetop.types.parallel import Parallel, taken
from treetop.weights.format import Product, Source
from treetop.weights.held import Weights


class ExpertMLP:
    """Router, chosen experts, and what is shared by all tokens beside them.

    As a `Product` it counts nothing: what it reads depends on which experts the rows choose.
    """

    numbers = 0

    def __init__(self, spec: ExpertSpec, weights: Weights, name: str, ops: Ops) -> None:
        router, ranks = f"{name}.router", ops.expert_ranks
        self.spec, self._ops, self._ranks = spec, ops, ranks
        self._router = Router(
            spec.router,
            weights[router],
            weights.pop(f"{router}_bias"),
            weights.pop(f"{router}_score"),
            None if ranks.size == 1 else own_experts(spec.router.num_experts, ranks),
        )
        self._experts = weights.experts(name, spec.router.num_experts // ranks.size, spec.activation)
        self._shared = GatedMLP(weights, f"{name}.shared", ops) if spec.shared_inner else None
        self.products: list[Product] = [self, *(() if self._shared is None else self._shared.products)]

    def read_bytes(self, rows: int) -> int:
        return 0

    def route(self, x: Tensor, live: Tensor | None) -> Routes:
        """The experts of each token. x: [tokens, hidden]; live: [tokens] bool."""
        return self._ops.route(x, self._router, live)

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """x: [..., hidden]; live: of `live_rows`. Returns parts [parts, ..., hidden], of experts 0 where not live."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        routed = self._routed(flat, live) if self._ranks.size == 1 else self._routed_by_ranks(flat, live)
        parts = routed.reshape(-1, *x.shape)
        if self._shared is None:
            return parts
        shared = taken(self._shared(x))
        return torch.cat([parts, shared.to(parts.dtype)]) if len(parts) > 1 else torch.cat([parts, shared])

    def _routed(self, x: Tensor, live: Tensor | None) -> Tensor:
        """What this rank's experts add to rows [rows, hidden], in parts [parts, rows, hidden]."""
        return self._experts(x, self.route(x, live))

    def _routed_by_ranks(self, x: Tensor, live: Tensor | None) -> Tensor:
        """As `_routed`, of the experts of all ranks; a part of each. live: of the rows of all, [ranks * most rows]."""
        assert live is not None, "ranks exchange the rows of batches only"
        size, count = self._ranks.size, len(x)
        most = len(live) // size
        padded = x if most == count else F.pad(x, (0, 0, 0, most - count))
        rows = self._ranks.gather(padded).flatten(0, 1)
        parts = self._routed(rows, live)
        share = parts[0] if len(parts) == 1 else parts.sum(dim=0)
        return self._ranks.all_to_all(share.view(size, most, -1))[:, :count]


def live_rows(live: Tensor | None, ranks: Parallel) -> Tensor | None:
    """Which tokens of a batch are somebody's, [tokens], as experts want to know it: of all the ranks that share them.

    live: of `Attend`. Exchanged once a forward, not in every layer.
    """
    if live is None:
        return None
    flat = live.reshape(-1).contiguous()  # one row's tokens may be one value, seen several times
    return flat if ranks.size == 1 else ranks.gather(flat.to(torch.uint8)).bool().flatten()


@dataclass(frozen=True, slots=True)
class _Names:
    """What a checkpoint calls a layer's feed-forward of experts, and what is in it: the router, the correction of its
    choices, an expert's gate, up and down, the shared experts."""

    block: str = "mlp"
    router: str = "gate"
    score: str = "gate.e_score_correction_bias"
    each: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"


_NAMES: dict[ExpertLayout, _Names] = {
    "each": _Names(),
    "each w": _Names("block_sparse_moe", score="e_score_correction_bias", each=("w1", "w3", "w2")),
    "each of Hy3": _Names(router="router.gate", score="expert_bias", shared="shared_mlp"),
    "stacked": _Names(router="router"),
    "stacked rows": _Names(router="router"),
    "stacked halves": _Names(),
}


def expert_params(spec: ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors. Ranks of `--tp-size` have all of it, those of `--ep-size` whole experts."""
    number, kind, router = spec.router.num_experts, spec.router, f"{name}.router"
    names = _NAMES[spec.stored]
    stored = f"{stored.removesuffix('mlp')}{names.block}"
    gate = f"{stored}.{names.router}"
    params = [Param(router, (number, hidden), (Source(f"{gate}.weight", (number, hidden)),), "router")]
    if kind.bias:
        params.append(Param(f"{router}_bias", (number,), (Source(f"{gate}.bias", (number,)),), "vector"))
    if kind.correction:
        params.append(Param(f"{router}_score", (number,), (Source(f"{stored}.{names.score}", (number,)),), "score"))
    make = _stacked if spec.stored.startswith("stacked") else _each
    params += make(spec, name, f"{stored}.experts", hidden)
    if spec.shared_inner:
        params += mlp_params(DenseSpec(spec.shared_inner), f"{name}.shared", f"{stored}.{names.shared}", hidden)
    return params


def _each(spec: ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """Three matrices an expert, without biases."""
    assert not spec.bias
    number, inner = spec.router.num_experts, spec.inner_size
    gate, up, last = _NAMES[spec.stored].each
    both = [
        Source(f"{stored}.{expert}.{each}.weight", (inner, hidden)) for expert in range(number) for each in (gate, up)
    ]
    down = [Source(f"{stored}.{expert}.{last}.weight", (hidden, inner)) for expert in range(number)]
    return [
        Param(f"{name}.gate_up", (number * 2 * inner, hidden), tuple(both), "experts", experts=number),
        Param(f"{name}.down", (number * hidden, inner), tuple(down), "experts", experts=number),
    ]


def _stacked(spec: ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """One tensor for all experts' gates and ups, in turn, and one for what follows."""
    number, inner, by_rows = spec.router.num_experts, spec.inner_size, spec.stored == "stacked rows"
    params = []
    for each, (out, width) in {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}.items():
        shape = (number, out, width) if by_rows else (number, width, out)
        in_turn = each == "gate_up" and spec.stored != "stacked halves"

        def arranged(tensor: Tensor, in_turn: bool = in_turn) -> Tensor:
            lines = tensor if by_rows else tensor.transpose(1, 2)
            return _gates_first(lines) if in_turn else lines

        source = Source(f"{stored}.{each}_proj", shape, arranged, rows=number * out, stacked=True)
        params.append(Param(f"{name}.{each}", (number * out, width), (source,), "experts", experts=number))
    if spec.bias:
        both, last = number * 2 * inner, number * hidden
        biases = Source(f"{stored}.gate_up_proj_bias", (number, 2 * inner), _gates_first, rows=both, stacked=True)
        after = Source(f"{stored}.down_proj_bias", (number, hidden), rows=last, stacked=True)
        params.append(Param(f"{name}.gate_up_bias", (both,), (biases,), "vector", experts=number))
        params.append(Param(f"{name}.down_bias", (last,), (after,), "vector", experts=number))
    return params


def _gates_first(lines: Tensor) -> Tensor:
    """[experts, 2 * inner, ...] with gates and ups in turn as [experts, 2, inner, ...]: a view."""
    in_pairs: Tensor = lines.unflatten(1, (-1, 2))
    return in_pairs.transpose(1, 2)
