"""A tiny target with recurrent layers among attention, of the engine's own parts and none of a family's.

A recurrent layer is one product for q, k, v, decays and rates, a convolution of the first three if there is one, the
recurrence, and an output product. Two kinds: a decayed running sum, without a convolution; and one with four taps and
the delta rule, of which value heads share key heads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from support.tiny_models import Pair, save_random_head
from treetop.attention.recurrent import DenseRecurrence
from treetop.checkpoints.params import Param, matrix, of_vocab, vector
from treetop.debug.random_checkpoint import random_tensors, write_config, write_tensors
from treetop.kernels.recurrent.states import StateInputs, StateUpdates
from treetop.kernels.rope import rope_table
from treetop.models.attention import attention, attention_params
from treetop.models.config import DenseSpec, LayerSpec, LinearSpec, attention_spec, model_config
from treetop.models.embedding import lookup, piece_of, whole_logits
from treetop.models.layers import RMSNorm, norm_param, rotary_at
from treetop.models.registry import FAMILIES, Family, target_spec
from treetop.models.target import LAST_HIDDEN, TargetOutput
from treetop.weights.format import CheckpointTensor

NAME = "TinyRecurrentForCausalLM"
SUM = LinearSpec(key_heads=2, heads=2, key_dim=4, value_dim=6, taps=1, delta=False)
DELTA = LinearSpec(key_heads=2, heads=4, key_dim=6, value_dim=4, taps=4)
KINDS = {"sum": SUM, "delta": DELTA}
CONFIG = {
    "architectures": [NAME],
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
    "tie_word_embeddings": False,
}


def read(config, where):
    spec, dense = attention_spec(config, where), DenseSpec(config["intermediate_size"])
    mixers = [KINDS.get(kind, spec) for kind in config["mixers"]]
    return model_config(config, where, [LayerSpec(mixer, dense) for mixer in mixers])


def params(config) -> list[Param]:
    hidden, found = config.hidden_size, []
    for index, layer in enumerate(config.layers):
        name, stored = f"layers.{index}", f"model.layers.{index}"
        found.append(norm_param(f"{name}.norm", f"{stored}.norm.weight", hidden))
        spec = layer.recurrent
        if spec is None:
            found += attention_params(layer.attention, f"{name}.mixer", f"{stored}.self_attn", hidden, hidden)
            continue
        rows = {"q": spec.widths[0], "k": spec.widths[1], "v": spec.widths[2], "g": spec.heads, "beta": spec.heads}
        units = {"q": spec.key_dim, "k": spec.key_dim, "v": spec.value_dim, "g": 1, "beta": 1}
        parts = [CheckpointTensor(f"{stored}.{each}.weight", (n, hidden), unit=units[each]) for each, n in rows.items()]
        found.append(matrix(f"{name}.in", *parts, shard=0))
        out = CheckpointTensor(f"{stored}.out.weight", (hidden, rows["v"]), unit=spec.value_dim)
        found.append(matrix(f"{name}.out", out, shard=1))
        if spec.taps > 1:
            taps = tuple(CheckpointTensor(f"{stored}.conv_{e}", (rows[e], spec.taps), unit=units[e]) for e in "qkv")
            found.append(Param(f"{name}.conv", (spec.channels, spec.taps), taps, "vector", 0))
            found.append(
                vector(
                    f"{name}.conv_bias",
                    *(CheckpointTensor(f"{stored}.bias_{e}", (rows[e],), unit=units[e]) for e in "qkv"),
                    shard=0,
                )
            )
    return [
        of_vocab("embedding", "model.embed_tokens.weight", config.vocab_size, hidden, "table"),
        *found,
        norm_param("norm", "model.norm.weight", hidden),
        of_vocab("lm_head", "lm_head.weight", config.vocab_size, hidden),
    ]


class RecurrentLayer:
    def __init__(self, spec, weights, name, index, ops):
        self.spec, self.index, self.ops = spec.of_rank(ops.parallel.size), index, ops
        self.inner, self.out = weights.linear(f"{name}.in"), weights.linear(f"{name}.out")
        self.conv = (weights[f"{name}.conv"], weights[f"{name}.conv_bias"]) if spec.taps > 1 else None
        self.products = [self.inner, self.out]

    def __call__(self, x, turn, attend):
        spec = self.spec
        mixed, g, beta = self.inner(x).split([sum(spec.widths), spec.heads, spec.heads], dim=-1)
        if self.conv is not None:
            mixed = F.silu(attend.convolve(self.index, mixed, *self.conv))
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k, v = mixed.to(wide).split(spec.widths, dim=-1)
        q, k = (F.normalize(each.unflatten(-1, (-1, spec.key_dim)), dim=-1) for each in (q, k))
        v, g = v.unflatten(-1, (-1, spec.value_dim)), -F.softplus(g.to(wide) - 1)
        rate = beta.to(wide).sigmoid() if spec.delta else None
        out = attend.recur(self.index, StateInputs(q, k, v, g, rate))
        return self.ops.parallel.share(self.out.parts(out.to(x.dtype).flatten(2)))


class TinyRecurrent:
    """A `Target`: layers behind norms, each added to the residual stream."""

    def __init__(self, config, weights, aux_inputs, place, ops):
        self.config, self.aux_inputs, self._ops = config, aux_inputs, ops
        self.embedding = weights["embedding"]
        self._embed, eps = lookup(self.embedding, ops.parallel), config.norm_eps
        self.norms = [RMSNorm(weights[f"layers.{i}.norm"], eps, ops) for i in range(len(config.layers))]
        self.layers = [
            RecurrentLayer(layer.recurrent, weights, f"layers.{i}", i, ops)
            if layer.recurrent is not None
            else attention(layer.attention, weights, f"layers.{i}.mixer", i, eps, ops)
            for i, layer in enumerate(config.layers)
        ]
        ropes = [spec.rope for spec in config.attention.values()]
        self._rope = rope_table(ropes[0], place.rope_rows, place.dtype, place.device)
        self.norm, self.lm_head = RMSNorm(weights["norm"], eps, ops), weights.linear("lm_head")
        self._piece = piece_of(self.lm_head, self.embedding.shape[0], config.vocab_size, ops.parallel)
        self.products = [*(product for layer in self.layers for product in layer.products), self.lm_head]

    def forward(self, tokens, positions, attend, tells_experts=False, last=None):
        x, turn, streams = self._embed(tokens), rotary_at(self._rope, positions, self._ops), {}
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            streams[i] = x
            x = self._ops.add(x, layer(norm(x), turn, attend))
        streams[len(self.layers)], streams[LAST_HIDDEN] = x, self.norm(x)
        hidden = streams[LAST_HIDDEN] if last is None else last.of(streams[LAST_HIDDEN])
        return TargetOutput(hidden, tuple(streams[i] for i in self.aux_inputs))

    def piece(self, hidden):
        return self._piece(hidden)

    def logits(self, hidden):
        return whole_logits(self.lm_head(hidden), self.config.vocab_size, self._ops.parallel)


@contextmanager
def known_family() -> Iterator[None]:
    """Inside, folders of this architecture load."""
    FAMILIES[NAME] = Family(read, "a test's", params, lambda config: set(), TinyRecurrent)
    try:
        yield
    finally:
        del FAMILIES[NAME]


def save_pair(folder: Path, *mixers: str, seed: int = 0, **changes) -> Pair:
    """A target of these layers ("sum", "delta", "full") and a head with random weights; its family is to be known."""
    target = folder / "target"
    write_config(target, {**CONFIG, "num_hidden_layers": len(mixers), "mixers": list(mixers), **changes})
    tensors = random_tensors(target_spec(target).params, torch.Generator().manual_seed(seed))
    tensors["lm_head.weight"] *= 4
    write_tensors(target, tensors)
    layers = [0, 1, len(mixers) - 1]
    head = save_random_head(
        folder / "head", target, None, seed, eagle_config={"eagle_aux_hidden_state_layer_ids": layers}
    )
    return Pair(target, head)


# ---------------------------------------------------------------------------------------------- what states should be


@dataclass(frozen=True)
class AllStates(DenseRecurrence):
    """Of each layer the state after every token, and all inputs of the convolution."""

    states: dict[int, list[Tensor]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)

    def convolve(self, layer, x, weight, bias):
        self.inputs[layer] = x[0]
        return super().convolve(layer, x, weight, bias)

    def recur(self, layer, inputs):
        shared = inputs.v.shape[2] // inputs.k.shape[2]
        k, v, g = inputs.k[0].repeat_interleave(shared, 1), inputs.v[0], inputs.g[0]
        state = v.new_zeros((*k.shape[1:], v.shape[2]))
        self.states[layer] = [state]
        for t in range(len(v)):
            state = state * g[t].exp().view(len(g[t]), -1, 1)
            d = v[t] if inputs.beta is None else inputs.beta[0, t, :, None] * (v[t] - (k[t][:, None] @ state)[:, 0])
            state = state + k[t][:, :, None] * d[:, None]
            self.states[layer].append(state)
        return super().recur(layer, inputs)


def states_of(llm, ids) -> AllStates:
    """Of a request's tokens from nothing, by the definition."""
    found = AllStates()
    with torch.inference_mode(), replaced_recurrence(found):
        llm.engine.next_logits(list(ids))
    return found


@contextmanager
def replaced_recurrence(found):
    """Dense forwards inside leave their states in `found`."""
    from treetop.engine import engine

    dense = engine.DenseAttention
    engine.DenseAttention = partial(dense, recurrence=found)
    try:
        yield
    finally:
        engine.DenseAttention = dense


@dataclass(frozen=True)
class Snapshot:
    """What a row keeps, folded by the definition. length: tokens that it covers; start: the first that is pending."""

    length: int
    count: int
    layers: dict[int, tuple[Tensor, Tensor, StateUpdates]]


def snapshot(llm, row: int, length: int) -> Snapshot:
    """Of a row with so many committed tokens."""
    runner, layers = llm.engine.runner, {}
    counts = {int(states.count[row]) for states in runner.state.states.groups.values()}
    assert len(counts) == 1, "groups disagree on what is pending"
    count = counts.pop()
    for index, place in runner.recurrent_layers.items():
        states, at = place.states, place.index
        state, pending = states.state[at, row].clone(), states.pending
        kept = StateUpdates(*(each[at, row, :count].clone() for each in (pending.k, pending.d, pending.g)))
        shared = state.shape[0] // max(kept.k.shape[1], 1)
        for j in range(count if state.numel() else 0):  # none of a convolution alone
            state = state * kept.g[j].exp().view(state.shape[0], -1, 1)
            state = state + kept.k[j].repeat_interleave(shared, 0)[:, :, None] * kept.d[j][:, None]
        layers[index] = state, states.conv[at, row].clone(), kept
    return Snapshot(length, count, layers)


def check_snapshot(taken: Snapshot, true: AllStates, tolerance: float = 1e-12) -> None:
    """Raise AssertionError unless a row's states are those of its tokens."""
    n, first = taken.length, taken.length - taken.count
    assert first >= 0, f"{taken.count} updates are pending of {n} tokens"
    for layer, (state, conv, pending) in taken.layers.items():
        what = f"layer {layer}, {n} tokens, {taken.count} pending"
        if state.numel():  # else a convolution alone
            _equal(state, true.states[layer][n], tolerance, f"state, {what}")
            own = true.updates[layer]
            for name in ("k", "d", "g"):
                _equal(getattr(pending, name), getattr(own, name)[first:n], tolerance, f"pending {name}, {what}")
        if conv.shape[1]:
            padded = torch.cat([conv.new_zeros(conv.shape[1], conv.shape[0]), true.inputs[layer][:n]])
            _equal(conv, padded[n:].T, tolerance, f"convolution, {what}")


def _equal(one: Tensor, other: Tensor, tolerance: float, what: str) -> None:
    assert one.shape == other.shape, what
    if one.numel():
        off = (one - other).abs().max().item()
        assert off <= tolerance * max(1.0, other.abs().max().item()), f"{what}: off by {off:.2g}"


def check_dummy(llm) -> None:
    """The dummy row's states are zero."""
    dummy = llm.engine.layout.dummy_row
    for states in llm.engine.runner.state.states.groups.values():
        assert int(states.count[dummy]) == 0
        for each in (states.conv, states.state, states.pending.k, states.pending.d, states.pending.g):
            assert not bool(each[:, dummy].any()), "the dummy row's states are not zero"
