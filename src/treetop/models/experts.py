"""A feed-forward of experts, of which a router chooses some for each token, and the parameters it consists of.

A family's file says how checkpoints hold its experts and what they call them (`models.config.ExpertLayout`). In memory
it is always gates before ups, [experts, 2, inner, hidden], and [experts, hidden, inner]. Of experts without a gate up
stands for both and is held twice, so that relu(up) * up is their activation.

Ranks may share the experts: each has a part of them, in order. Those of `--ep-size` give each other the rows of
their batches; each computes what its experts add to them, and gives that back to the row's rank. There the shares are
added in the order of the ranks, so that a row comes to the same numbers whichever rank it is on. Those of `--tp-size`
have the same rows: each computes what its experts add to them, and the shares are added as those of any product are.
So a token's experts are added on each rank as one engine adds all of them, then over `--ep-size`, then over
`--tp-size`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.checkpoints.params import Param, matrix, own_experts
from treetop.kernels.fused import joined
from treetop.kernels.moe.routes import ALL_LIVE, IDENTITY, RoutedTokens, Router, Routes
from treetop.kernels.table import Ops
from treetop.models.config import DenseSpec, ExpertSpec, UngatedSpec
from treetop.models.layers import GatedMLP, SteppedMLP, dense_mlp, mlp_params
from treetop.models.ungated import UngatedMLP, ungated_params
from treetop.types.parallel import Parallel, Summed, expert_part
from treetop.weights.format import CheckpointTensor, Product, Span
from treetop.weights.held import Weights
from treetop.weights.packed import TiledExperts


class ExpertMLP:
    """Router, chosen experts, and what is shared by all tokens beside them.

    As a `Product` it counts nothing: what it reads depends on which experts the rows choose.
    """

    numbers = 0

    def __init__(self, spec: ExpertSpec, weights: Weights, name: str, ops: Ops) -> None:
        router, number = f"{name}.router", spec.router.with_weights
        part = expert_part(ops.parallel, ops.expert_ranks)
        own = own_experts(number, part)
        self.spec, self._ops, self._ranks = spec, ops, ops.expert_ranks
        self._experts = weights.experts(name, len(own), spec.activation)
        self._passes = spec.router.identity > 0 and ops.parallel.rank == 0
        self._shared = _shared_mlp(spec, weights, f"{name}.shared", ops) if spec.shared_inner else None
        self._shared_gate = weights[f"{name}.shared_gate"] if spec.shared_gate else None
        together = self._together() if part.size == 1 else None
        self._experts, self._apart = together or self._experts, together is None
        self._router = Router(
            spec.router,
            weights[router] if self._apart else torch.cat([weights[router], weights[f"{name}.shared_gate"]]),
            weights.pop(f"{router}_bias"),
            weights.pop(f"{router}_score"),
            None if part.size == 1 else own,
            weights.pop(f"{router}_factor"),
            gates_shared=not self._apart,
            leaves=ops.gpu_for(Ops.experts) is not None,
            narrow=self._apart and isinstance(self._experts, TiledExperts) and self._experts.in_powers,
        )
        self.products: list[Product] = [self, *(() if self._shared is None else self._shared.products)]
        if spec.latent:
            self._narrow, self._widen = weights.linear(f"{name}.narrow"), weights.linear(f"{name}.widen")
            self.products += [self._narrow, self._widen]

    def _together(self) -> TiledExperts | None:
        """The experts and what all tokens take in the same launches; None where they are computed apart."""
        spec, experts, shared = self.spec, self._experts, self._shared
        gated = self._shared_gate is not None and not (spec.router.bias or spec.router.of_inputs or spec.latent)
        if not (gated and isinstance(experts, TiledExperts) and isinstance(shared, GatedMLP)):
            return None
        return experts.beside(shared.gate_up, shared.down)

    def read_bytes(self, rows: int) -> int:
        return 0

    def route(self, x: Tensor, tokens: RoutedTokens) -> Routes:
        """The experts of each token. x: [tokens, hidden]."""
        return self._ops.route(x, self._router, tokens.live, tells=tokens.chosen is not None)

    def __call__(self, x: Tensor, tokens: RoutedTokens = ALL_LIVE, stream: Tensor | None = None) -> Summed:
        """x: [..., hidden]. Returns parts [parts, ..., hidden], of experts 0 where not live."""
        if self.spec.latent:
            narrow = self._narrow(x)
            found = self._routed(narrow, tokens, x).reshape(-1, *narrow.shape)
            parts = self._widen.parts(joined(found).to(x.dtype))
        else:
            parts = self._routed(x, tokens).reshape(-1, *x.shape)
        if self._shared is not None and self._apart:
            shared = self._shared.parts(x)
            if self._shared_gate is not None:
                shared = shared * self._ops.functions.sigmoid(self._ops.profile.one_line(x, self._shared_gate))
            parts = torch.cat([parts, shared.to(parts.dtype)]) if len(parts) > 1 else torch.cat([parts, shared])
        return self._ops.parallel.share(parts)

    def routed(self, x: Tensor, tokens: RoutedTokens, read: Tensor) -> Summed:
        """What experts add to x [..., hidden], in parts [parts, ..., hidden]. read: by the router."""
        return self._ops.parallel.share(self._routed(x, tokens, read).reshape(-1, *x.shape))

    def _routed(self, x: Tensor, tokens: RoutedTokens, read: Tensor | None = None) -> Tensor:
        """This rank's share of it, in parts [parts, rows, hidden]. read: by the router, if it is not x."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        seen = rows if read is None else read.reshape(-1, read.shape[-1]).contiguous()
        if self._ranks.size > 1:
            return self._routed_by_ranks(rows, tokens, seen)
        routes = self.route(seen, tokens)
        _tell(tokens, routes.chosen)
        parts = self._experts(rows, routes)
        self._pass_on(parts[0], rows, routes.expert, routes.weight)
        return parts

    def _routed_by_ranks(self, x: Tensor, tokens: RoutedTokens, seen: Tensor) -> Tensor:
        """As `routed`, of the experts of all ranks; a part of each. tokens: of all, [ranks * most rows]."""
        assert tokens.live is not None, "ranks exchange the rows of batches only"
        size, count = self._ranks.size, len(x)
        maximum = len(tokens.live) // size

        def gathered(own: Tensor) -> Tensor:
            return self._ranks.gather(own if maximum == count else F.pad(own, (0, 0, 0, maximum - count))).flatten(0, 1)

        rows = gathered(x)
        routes = self.route(rows if seen is x else gathered(seen), tokens)
        parts = self._experts(rows, routes)
        share = parts[0] if len(parts) == 1 else self._added(parts)
        mine = slice(self._ranks.rank * maximum, self._ranks.rank * maximum + count)
        _tell(tokens, routes.chosen, mine)
        self._pass_on(share[mine], x, routes.expert[mine], routes.weight[mine])
        return self._ranks.all_to_all(share.view(size, maximum, -1))[:, :count]

    def _pass_on(self, out: Tensor, x: Tensor, expert: Tensor, weight: Tensor) -> None:
        """Add to out [rows, hidden] what experts without weights give of x: on one of the ranks that share these rows.

        expert, weight: [rows, top_k], of `Routes`.
        """
        if self._passes:
            whole = self._ops.profile.total(torch.where(expert == IDENTITY, weight, 0))
            out += (x.to(whole.dtype) * whole).to(out.dtype)

    def _added(self, parts: Tensor) -> Tensor:
        """The sum of several parts; where bits are exact the first plus the others added in their order, one launch."""
        return self._ops.add(parts[0], parts[1:]) if self._ops.profile.sums_in_order else parts.sum(dim=0)


def _shared_mlp(spec: ExpertSpec, weights: Weights, name: str, ops: Ops) -> GatedMLP | SteppedMLP | UngatedMLP:
    """What all tokens take beside experts, which have a gate if these have."""
    if spec.activation.kind == "relu":
        return UngatedMLP(UngatedSpec(spec.shared_inner, "relu2"), weights, name, ops)
    return dense_mlp(DenseSpec(spec.shared_inner, limit=spec.shared_limit), weights, name, ops)


def _tell(tokens: RoutedTokens, chosen: Tensor | None, mine: slice | None = None) -> None:
    """What a layer's router has chosen, of this rank's own tokens `mine`."""
    if tokens.chosen is not None and chosen is not None:
        tokens.chosen.append(chosen if mine is None else chosen[mine])


def live_rows(live: Tensor | None, ranks: Parallel) -> Tensor | None:
    """Which tokens of a batch are somebody's, [tokens], as experts want to know it: of all the ranks that share them.

    live: of `Attend`. Exchanged once a forward, not in every layer.
    """
    if live is None:
        return None
    flat = live.reshape(-1).contiguous()  # one row's tokens may be one value, seen several times
    return flat if ranks.size == 1 else ranks.gather(flat.to(torch.uint8)).bool().flatten()


def expert_params(spec: ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors. Ranks have whole experts, and all of the router."""
    number, kind, router = spec.router.num_experts, spec.router, f"{name}.router"
    names, layer = spec.stored, stored.removesuffix("mlp")
    stored = f"{layer}{names.block}".removesuffix(".")
    gate = f"{stored}.{names.router}"
    params = [Param(router, (number, hidden), (CheckpointTensor(f"{gate}.weight", (number, hidden)),), "router")]
    if kind.bias:
        params.append(Param(f"{router}_bias", (number,), (CheckpointTensor(f"{gate}.bias", (number,)),), "vector"))
    if kind.correction:
        shape = (1, number) if names.score_rows else (number,)
        params.append(
            Param(
                f"{router}_score",
                (number,),
                (CheckpointTensor(f"{stored}.{names.score}", shape, rows=number),),
                "score",
            )
        )
    if kind.factors:
        factor = CheckpointTensor(f"{stored}.router.per_expert_scale", (number,))
        params.append(Param(f"{router}_factor", (number,), (factor,), "score"))
    params += _MAKE[names.tensors](spec, name, stored, spec.latent or hidden)
    if spec.latent:
        narrow, widen = (f"{stored}.fc{index}_latent_proj.weight" for index in (1, 2))
        params.append(matrix(f"{name}.narrow", CheckpointTensor(narrow, (spec.latent, hidden))))
        params.append(matrix(f"{name}.widen", CheckpointTensor(widen, (hidden, spec.latent))))
    if spec.shared_inner:
        shared = f"{layer if names.shared_in_layer else stored + '.'}{names.shared}"
        if spec.activation.kind == "relu":
            params += ungated_params(UngatedSpec(spec.shared_inner, "relu2"), f"{name}.shared", shared, hidden)
        else:
            dense = DenseSpec(spec.shared_inner, stored=names.shared_stored)
            params += mlp_params(dense, f"{name}.shared", shared, hidden)
    if spec.shared_gate:
        source = CheckpointTensor(f"{stored}.shared_expert_gate.weight", (1, hidden))
        params.append(Param(f"{name}.shared_gate", (1, hidden), (source,), "router"))
    return params


def _apart(spec: ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """A tensor for all experts' gates, one for their ups, and one for what follows."""
    number, inner = spec.router.with_weights, spec.inner_size
    both = tuple(
        CheckpointTensor(
            f"{stored}.{each}_proj.weight", (number, inner, hidden), rows=inner, span=Span(0, expert, expert + 1)
        )
        for expert in range(number)
        for each in ("gate", "up")
    )
    down = CheckpointTensor(f"{stored}.down_proj.weight", (number, hidden, inner), stacked=True)
    return [
        Param(f"{name}.gate_up", (number * 2 * inner, hidden), both, "experts", experts=number),
        Param(f"{name}.down", (number * hidden, inner), (down,), "experts", experts=number),
    ]


def _each(spec: ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """Three matrices an expert, without biases."""
    assert not spec.bias
    number, inner = spec.router.with_weights, spec.inner_size
    gate, up, last = spec.stored.each
    of, every = f"{stored}.experts", range(number)
    both = [
        CheckpointTensor(f"{of}.{expert}.{each}.weight", (inner, hidden)) for expert in every for each in (gate, up)
    ]
    down = [CheckpointTensor(f"{of}.{expert}.{last}.weight", (hidden, inner)) for expert in every]
    return [
        Param(f"{name}.gate_up", (number * 2 * inner, hidden), tuple(both), "experts", experts=number),
        Param(f"{name}.down", (number * hidden, inner), tuple(down), "experts", experts=number),
    ]


def _stacked(spec: ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """One tensor for all experts' gates and ups, in turn, and one for what follows."""
    number, inner, by_rows = spec.router.with_weights, spec.inner_size, spec.stored.by_rows
    params, sizes = [], ((2 * inner, hidden), (hidden, inner))
    for each, tensor, (out, width) in zip(("gate_up", "down"), spec.stored.stacked, sizes, strict=True):
        shape = (number, out, width) if by_rows else (number, width, out)
        in_turn = each == "gate_up" and spec.stored.in_turn

        def arranged(held: Tensor, in_turn: bool = in_turn) -> Tensor:
            lines = held if by_rows else held.transpose(1, 2)
            return _gates_first(lines) if in_turn else lines

        source = CheckpointTensor(f"{stored}.{tensor}", shape, arranged, rows=number * out, stacked=True)
        params.append(Param(f"{name}.{each}", (number * out, width), (source,), "experts", experts=number))
    if spec.bias:
        both, last = number * 2 * inner, number * hidden
        first, second = (f"{stored}.{tensor}_bias" for tensor in spec.stored.stacked)
        biases = CheckpointTensor(first, (number, 2 * inner), _gates_first, rows=both, stacked=True)
        after = CheckpointTensor(second, (number, hidden), rows=last, stacked=True)
        params.append(Param(f"{name}.gate_up_bias", (both,), (biases,), "vector", experts=number))
        params.append(Param(f"{name}.down_bias", (last,), (after,), "vector", experts=number))
    return params


_MAKE = {"each": _each, "stacked": _stacked, "apart": _apart}


def _gates_first(lines: Tensor) -> Tensor:
    """[experts, 2 * inner, ...] with gates and ups in turn as [experts, 2, inner, ...]: a view."""
    in_pairs: Tensor = lines.unflatten(1, (-1, 2))
    return in_pairs.transpose(1, 2)
