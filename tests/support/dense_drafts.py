"""What a draft head computes, slot by slot in plain PyTorch and float64. Nothing of the code under test is used here.

A reference answers for a sequence of ids whose last is the root, and a path of drafts below it: the log-probabilities
of what follows. Slot i holds token i + 1 and, up to the root's, a feature of token i; below it the head's own state.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

AFTER_NORM = "after the final norm"


class DenseTarget:
    """A target by `transformers`. Residual streams by layer input, and the last hidden state after the norm.

    kind: its class there. Of one that reads images its language model counts.
    """

    def __init__(self, folder: Path, kind: Any = AutoModelForCausalLM, **options: Any) -> None:
        self.model = kind.from_pretrained(folder, dtype=torch.float64, **options).eval()
        body = getattr(self.model.model, "language_model", self.model.model)
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.lm_head = self.model.get_output_embeddings().weight.detach()
        self._seen: dict = {}
        for index, layer in enumerate(body.layers):
            layer.register_forward_pre_hook(lambda _, args, index=index: self._keep(index, args[0]))
            layer.register_forward_hook(lambda _, args, out, index=index: self._keep(index + 1, out))
        norm = body.norm_f if hasattr(body, "norm_f") else body.norm
        norm.register_forward_hook(lambda _, args, out: self._keep(AFTER_NORM, out))

    def _keep(self, index, value) -> None:
        self._seen[index] = value[0] if isinstance(value, tuple) else value

    def features(self, ids, which) -> torch.Tensor:
        """[n, width], those of `which` side by side."""
        with torch.no_grad():
            self.model(torch.tensor([ids]))
        return torch.cat([self._seen[each].reshape(len(ids), -1) for each in which], dim=-1)


@dataclass
class Dense:
    """Layers of a head: `w` its tensors, `rope` what `transformers` needs to make its angles."""

    w: dict[str, torch.Tensor]
    heads: int
    kv_heads: int
    dim: int
    eps: float
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    positions: int = 2048
    window: int | None = None

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def linear(self, x, name):
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def mlp(self, x, name):
        return self.linear(
            F.silu(self.linear(x, name + ".gate_proj")) * self.linear(x, name + ".up_proj"), name + ".down_proj"
        )

    def attention(self, x, name):
        """Causal, head by head. x: [n, in]."""
        n = len(x)
        config = LlamaConfig(head_dim=self.dim, rope_parameters=dict(self.rope), max_position_embeddings=self.positions)
        cos, sin = (t[0].double() for t in LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(n)[None]))

        def turned(heads):
            if f"{name}.{heads}_norm.weight" in self.w:
                of = self.norm(
                    self.linear(x, f"{name}.{heads}_proj").view(n, -1, self.dim), f"{name}.{heads}_norm.weight"
                )
            else:
                of = self.linear(x, f"{name}.{heads}_proj").view(n, -1, self.dim)
            half = self.dim // 2
            return of * cos[:, None] + torch.cat([-of[..., half:], of[..., :half]], -1) * sin[:, None]

        q, k, v = turned("q"), turned("k"), self.linear(x, f"{name}.v_proj").view(n, -1, self.dim)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        if self.window is not None:
            hidden |= torch.ones(n, n, dtype=torch.bool).tril(-self.window)
        out = []
        for head in range(self.heads):
            kv = head * self.kv_heads // self.heads
            scores = (q[:, head] @ k[:, kv].T * self.dim**-0.5).masked_fill(hidden, float("-inf"))
            out.append(scores.softmax(-1) @ v[:, kv])
        return self.linear(torch.cat(out, -1), f"{name}.o_proj")

    def plain_layer(self, x, name, norm="input_layernorm"):
        normed = self.norm(x, f"{name}.{norm}.weight") if norm else x
        x = x + self.attention(normed, f"{name}.self_attn")
        return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm.weight"), f"{name}.mlp")


@dataclass
class DenseLatent(Dense):
    """Layers with compressed attention, which makes keys and values of every head. sizes: of a head's parts."""

    still: int = 0
    turned: int = 0
    value: int = 0

    def attention(self, x, name):
        """Causal, head by head; neighbours turn together. x: [n, in]."""
        n, half = len(x), self.turned // 2
        of_head = 10000.0 ** (-torch.arange(half, dtype=torch.float32) * 2 / self.turned)
        angle = torch.arange(n, dtype=torch.float32)[:, None] * of_head
        turn = torch.polar(torch.ones(n, half, dtype=torch.float64), angle.double())

        def rotated(part):
            return torch.view_as_real(torch.view_as_complex(part.contiguous().view(n, half, 2)) * turn).flatten(1)

        def normed(latent, which):
            return latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w[f"{name}.{which}.weight"]

        q = self.linear(normed(self.linear(x, f"{name}.q_a_proj"), "q_a_layernorm"), f"{name}.q_b_proj")
        down = self.linear(x, f"{name}.kv_a_proj_with_mqa")
        both = self.linear(normed(down[:, : -self.turned], "kv_a_layernorm"), f"{name}.kv_b_proj")
        q, both, shared = q.view(n, self.heads, -1), both.view(n, self.heads, -1), rotated(down[:, -self.turned :])
        hidden, out = torch.ones(n, n, dtype=torch.bool).triu(1), []
        for head in range(self.heads):
            turned = rotated(q[:, head, self.still :])
            scores = q[:, head, : self.still] @ both[:, head, : self.still].T + turned @ shared.T
            scores = (scores * (self.still + self.turned) ** -0.5).masked_fill(hidden, float("-inf"))
            out.append(scores.softmax(-1) @ both[:, head, self.still :])
        return self.linear(torch.cat(out, -1), f"{name}.o_proj")


def states_of(run, features, tokens, path):
    """States of all slots, those of the path on the head's own. run(tokens, hidden) -> states of slots 0 .. n-1."""
    hidden, tokens = features, list(tokens)
    states = run(tokens, hidden)
    for token in path:
        hidden, tokens = torch.cat([hidden, states[-1:]]), [*tokens, token]
        states = run(tokens, hidden)
    return states


@dataclass
class DenseEagle3:
    """An EAGLE-3 head; the options are what layouts differ in."""

    dense: Dense
    embedding: torch.Tensor
    lm_head: torch.Tensor
    offset: torch.Tensor
    layers: tuple[str, ...] = ("midlayer",)
    before_residual: bool = False
    norm_output: bool = False
    joined: str | None = None
    each: tuple[str, ...] = ()
    fuses: bool = True
    deeper_norm: str = "input_layernorm"

    def fused(self, features):
        d = self.dense
        if not self.fuses:
            return features
        if self.joined:
            features = d.norm(features, self.joined)
        if self.each:
            parts = features.chunk(len(self.each), -1)
            features = torch.cat([d.norm(part, name) for part, name in zip(parts, self.each, strict=True)], -1)
        return d.linear(features, "fc")

    def run(self, tokens, hidden):
        d, first = self.dense, self.layers[0]
        normed = d.norm(hidden, f"{first}.hidden_norm.weight")
        embedded = d.norm(self.embedding[torch.tensor(tokens)], f"{first}.input_layernorm.weight")
        x = normed if self.before_residual else hidden
        x = x + d.attention(torch.cat([embedded, normed], -1), f"{first}.self_attn")
        x = x + d.mlp(d.norm(x, f"{first}.post_attention_layernorm.weight"), f"{first}.mlp")
        for layer in self.layers[1:]:
            x = d.plain_layer(x, layer, self.deeper_norm)
        return d.norm(x, "norm.weight") if self.norm_output else x

    def logits(self, features, tokens, path=()):
        """Of the last slot, [draft vocabulary]."""
        state = states_of(self.run, self.fused(features), tokens, path)[-1]
        normed = state if self.norm_output else self.dense.norm(state, "norm.weight")
        return normed @ self.lm_head.T


@dataclass
class DenseEagle:
    """An EAGLE-1 head."""

    dense: Dense
    embedding: torch.Tensor
    lm_head: torch.Tensor
    offset: torch.Tensor
    layers: tuple[str, ...] = ("layers.0",)

    def run(self, tokens, hidden):
        x = self.dense.linear(torch.cat([self.embedding[torch.tensor(tokens)], hidden], -1), "fc")
        for index, layer in enumerate(self.layers):
            x = self.dense.plain_layer(x, layer, "input_layernorm" if index else None)
        return x

    def logits(self, features, tokens, path=()):
        return states_of(self.run, features, tokens, path)[-1] @ self.lm_head.T


@dataclass
class DenseMtp:
    """An MTP layer. names: of its norms of embedding and hidden state, its projection and its last norm."""

    dense: Dense
    embedding: torch.Tensor
    lm_head: torch.Tensor
    offset: torch.Tensor
    prefix: str
    names: tuple[str, str, str, str]
    hidden_first: bool
    normed_state: bool

    def run(self, tokens, hidden):
        d, (embedding, state, projection, _) = self.dense, self.names
        embedded = self.embedding[torch.tensor(tokens)].clone()
        embedded[0] = 0.0  # position 0
        both = [d.norm(embedded, f"{self.prefix}.{embedding}.weight"), d.norm(hidden, f"{self.prefix}.{state}.weight")]
        x = d.linear(torch.cat(both[::-1] if self.hidden_first else both, -1), f"{self.prefix}.{projection}")
        x = d.plain_layer(x, self.prefix)
        return self.normed(x) if self.normed_state else x

    def normed(self, x):
        return self.dense.norm(x, f"{self.prefix}.{self.names[3]}.weight")

    def logits(self, features, tokens, path=()):
        state = states_of(self.run, features, tokens, path)[-1]
        return (state if self.normed_state else self.normed(state)) @ self.lm_head.T


def dense_of(folder: Path, config: dict | None = None, **changes) -> Dense:
    """Sizes of a config, tensors of a file, both read here."""
    config = config or json.loads((folder / "config.json").read_text())
    path = folder / "model.safetensors"
    tensors = load_file(path) if path.exists() else torch.load(folder / "pytorch_model.bin", weights_only=True)
    heads = config["num_attention_heads"]
    options = {
        "w": {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()},
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "dim": config.get("head_dim") or config["hidden_size"] // heads,
        "eps": config["rms_norm_eps"],
    }
    if config.get("kv_lora_rank") is None:
        return Dense(**{**options, **changes})
    parts = {"still": "qk_nope_head_dim", "turned": "qk_rope_head_dim", "value": "v_head_dim"}
    return DenseLatent(**{**options, **{part: config[key] for part, key in parts.items()}, **changes})


def proposals_of(reference, target: DenseTarget, which, ids, k):
    """For `oracles.grow`: the k best drafts after a node, as target ids with their log-probabilities."""
    features = target.features(ids[:-1], which)

    def proposals(node):
        logits = reference.logits(features, ids[1:], node.path)
        are_final = getattr(reference, "taps", 0) > 0  # a selector's are no softmax over the vocabulary
        logprob = (logits.float() if are_final else torch.log_softmax(logits.float(), -1)).clamp(max=0)
        best, index = torch.sort(logprob, descending=True, stable=True)
        return [(int(i + reference.offset[i]), float(p)) for p, i in zip(best[:k], index[:k], strict=True)]

    return proposals


@dataclass
class DenseFamilyMtp(DenseMtp):
    """Its decoder layer is the last of a model of `transformers`. model: that model."""

    model: object = None
    window: int | None = None
    zeroed: bool = True
    layers: int = 1

    def run(self, tokens, hidden):
        d, (embedding, state, projection, _) = self.dense, self.names
        embedded = self.embedding[torch.tensor(tokens)].clone()
        if self.zeroed:
            embedded[0] = 0.0
        both = [d.norm(embedded, f"{embedding}.weight"), d.norm(hidden, f"{state}.weight")]
        x = d.linear(torch.cat(both, -1), projection)
        n, body = len(tokens), getattr(self.model, "language_model", None) or self.model.model
        rotate = getattr(body, "rotary_emb", lambda x, positions: None)
        rotate = rotate if self.window is None else partial(rotate, layer_type="sliding_attention")
        hide = torch.ones(n, n, dtype=torch.bool).triu(1)
        if self.window is not None:
            hide |= torch.ones(n, n, dtype=torch.bool).tril(-self.window)
        mask = torch.zeros(n, n, dtype=torch.float64).masked_fill(hide, float("-inf"))[None, None]
        angles = rotate(x[None], torch.arange(n)[None])
        with torch.no_grad():
            for layer in body.layers[-self.layers :]:
                x = layer(x[None], attention_mask=mask, position_embeddings=angles)
                x = (x[0] if isinstance(x, tuple) else x)[0]  # beside what an indexer chose
        return self.normed(x) if self.normed_state else x

    def normed(self, x):
        return x if self.names[3] is None else self.dense.norm(x, f"{self.names[3]}.weight")
