"""The EAGLE-3 head of SmolLM2 as a module whose state dict is the checkpoint, its target, and the loss of its chains."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

TAPS = (2, 14, 28)  # layers of the target whose outputs the EAGLE-3 head reads: the residual stream


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the head; all but the draft vocabulary are the target's."""

    vocab: int
    draft_vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    rope_theta: float
    norm_eps: float

    @classmethod
    def of(cls, target: "Target", draft_vocab: int) -> "Shape":
        """The head of a target."""
        config = target.model.config
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
        return cls(
            vocab=config.vocab_size,
            draft_vocab=draft_vocab,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            intermediate=config.intermediate_size,
            context=config.max_position_embeddings,
            rope_theta=float(theta),
            norm_eps=config.rms_norm_eps,
        )

    def config(self) -> dict:
        """The checkpoint's config.json."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "draft_vocab_size": self.draft_vocab,
            "hidden_size": self.hidden,
            "target_hidden_size": self.hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
        }


class Norm(nn.Module):
    """RMS norm, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size]."""
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DraftVocabulary(nn.Module):
    """What a head says of its own vocabulary, by the names of published files: `d2t`, `t2d`."""

    def hold(self, vocab: Tensor, target_size: int) -> None:
        """vocab: [draft_vocab] int64 ids of the target, ascending. target_size: of the target's vocabulary."""
        self.register_buffer("d2t", vocab - torch.arange(len(vocab)))
        member = torch.zeros(target_size, dtype=torch.bool)
        member[vocab] = True
        self.register_buffer("t2d", member)

    @property
    def vocab(self) -> Tensor:
        """Target id of each draft id, [draft_vocab] int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


class Head(DraftVocabulary):
    """fc over the taps, one decoder layer over [embedding, state], and a vocabulary of its own."""

    def __init__(self, shape: Shape, vocab: Tensor) -> None:
        """vocab: [draft_vocab] int64 ids of the target, ascending."""
        super().__init__()
        s, self.shape = shape, shape
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.fc = linear(len(TAPS) * s.hidden, s.hidden)
        self.midlayer = nn.ModuleDict(
            {
                "hidden_norm": Norm(s.hidden, s.norm_eps),
                "input_layernorm": Norm(s.hidden, s.norm_eps),
                "post_attention_layernorm": Norm(s.hidden, s.norm_eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * s.hidden, wide),
                        "k_proj": linear(2 * s.hidden, narrow),
                        "v_proj": linear(2 * s.hidden, narrow),
                        "o_proj": linear(wide, s.hidden),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": linear(s.hidden, s.intermediate),
                        "up_proj": linear(s.hidden, s.intermediate),
                        "down_proj": linear(s.intermediate, s.hidden),
                    }
                ),
            }
        )
        self.norm = Norm(s.hidden, s.norm_eps)
        self.lm_head = linear(s.hidden, s.draft_vocab)
        self.hold(vocab, s.vocab)

    @torch.no_grad()
    def begin_from(self, target: "Target") -> None:
        """Start from the target: its output rows, its last norm, and the last tap as the state."""
        for matrix in (p for p in self.parameters() if p.ndim > 1):
            matrix.normal_(std=0.02)
        self.lm_head.weight.copy_(target.model.lm_head.weight[self.vocab].float())
        self.norm.weight.copy_(target.model.model.norm.weight.float())
        self.fc.weight[:, -self.shape.hidden :] += torch.eye(self.shape.hidden, device=self.fc.weight.device)

    def qkv(self, embedding: Tensor, state: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of slots, [batch, heads, n, head_dim] each; turn: cosines and sines of positions."""
        layer, s = self.midlayer, self.shape
        x = torch.cat([layer["input_layernorm"](embedding), layer["hidden_norm"](state)], dim=-1)
        parts = [
            layer["self_attn"][name](x).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        ]
        group = s.heads // s.kv_heads
        q, k = (rotated(part, *turn) for part in parts[:2])
        return q, k.repeat_interleave(group, 1), parts[2].repeat_interleave(group, 1)

    def after(self, state: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output, which is the next state; mixed [batch, heads, n, head_dim]."""
        layer = self.midlayer
        state = state + layer["self_attn"]["o_proj"](mixed.transpose(1, 2).flatten(2))
        mlp, x = layer["mlp"], layer["post_attention_layernorm"](state)
        return state + mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    def logits(self, state: Tensor) -> Tensor:
        """[..., draft_vocab]."""
        return self.lm_head(self.norm(state))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: feature j turns with j + head_dim / 2. x [batch, heads, n, d]; cos, sin [batch, 1, n, d]."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


def turns(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [batch, n], [batch, 1, n, head_dim] float32 each."""
    rates = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions.float()[:, None, :, None] * torch.cat([rates, rates])
    return angles.cos(), angles.sin()


class Features(NamedTuple):
    """logits [batch, n, vocab], taps [batch, n, taps * hidden] and embedding [batch, n, hidden] of the target."""

    logits: Tensor
    taps: Tensor
    embedding: Tensor


class Target:
    """The frozen target, and what the head reads of it."""

    def __init__(self, folder: Path, device: torch.device, taps: tuple[int, ...] = TAPS) -> None:
        """taps: layers whose outputs are read, never the last."""
        self.taps = taps
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.model.requires_grad_(False)
        self.vocab_size = self.model.config.vocab_size

    @torch.no_grad()
    def run(self, ids: Tensor, positions: Tensor, seen: Tensor) -> "Features":
        """What the head reads of rows [batch, n]. seen: [batch, 1, n, n] bool, which keys a query sees."""
        inner = self.model.model
        states = inner(
            input_ids=ids, position_ids=positions, attention_mask=seen, use_cache=False, output_hidden_states=True
        )
        # hidden_states[i] is the residual stream before layer i, so the output of layer i - 1.
        taps = torch.cat([states.hidden_states[tap + 1] for tap in self.taps], dim=-1)
        return Features(self.model.lm_head(states.last_hidden_state), taps, inner.embed_tokens(ids))


class Chains(NamedTuple):
    """losses: [ttt]. hits and counted: [ttt, batch, n] bool, greedy hits, and whether the target wrote what is to come."""

    losses: Tensor
    hits: Tensor
    counted: Tensor


def visible(document: Tensor) -> Tensor:
    """Which keys a query sees, [batch, 1, n, n] bool: those of its conversation, up to itself."""
    n = document.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool, device=document.device).tril()
    return (document[:, :, None] == document[:, None, :])[:, None] & causal


def mix(q: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor) -> Tensor:
    """Attention of chain i at step s: step 0's slots that it sees, then its own steps 1..s; all [batch, heads, n, d]."""
    n, scale = q.shape[2], q.shape[3] ** -0.5
    scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(~seen, float("-inf"))
    own = [(q * key).float().sum(-1, keepdim=True) for key in keys[1:]]
    weights = torch.softmax(torch.cat([scores, *own], dim=-1) * scale, dim=-1).to(q.dtype)
    mixed = weights[..., :n] @ values[0]
    for step, value in enumerate(values[1:]):
        mixed = mixed + weights[..., n + step, None] * value
    return mixed


def loss_of_chains(
    head: Head, of: Features, document: Tensor, position: Tensor, own: Tensor, ttt: int, prompt_weight: float = 0.0
) -> Chains:
    """The loss of each step for rows of conversations [batch, n]; `head.py` says what a chain is.

    document, position, own: see `Pack`. Labels count 1 where the target wrote what is to be predicted, prompt_weight
    elsewhere, and 0 where it is of another conversation.
    """
    n = document.shape[1] - ttt - 1
    seen = visible(document)[:, :, :n, :n]
    kept = of.logits[..., head.vocab].float()
    mass = (kept.logsumexp(-1) - of.logits.float().logsumexp(-1)).exp()
    labels, best = kept.softmax(-1), of.logits.argmax(-1)
    shape, state = head.shape, head.fc(of.taps[:, :n]).float()
    keys, values, losses, hits, counted = [], [], [], [], []
    for step in range(ttt):
        here, ahead = slice(step + 1, step + 1 + n), slice(step + 2, step + 2 + n)
        turn = turns(position[:, :n] + step, shape.head_dim, shape.rope_theta)
        q, k, v = head.qkv(of.embedding[:, here], state, turn)
        keys.append(k)
        values.append(v)
        state = head.after(state, mix(q, keys, values, seen))
        guess = head.logits(state).float()
        entropy = -(labels[:, here] * guess.log_softmax(-1)).sum(-1)
        same = (document[:, :n] == document[:, ahead]) & (document[:, :n] >= 0)
        weight = same * (own[:, ahead] + prompt_weight * ~own[:, ahead])
        losses.append((entropy * mass[:, here] * weight).sum() / weight.sum().clamp(min=1))
        hits.append(head.vocab[guess.argmax(-1)] == best[:, here])
        counted.append(same & own[:, ahead])
    return Chains(torch.stack(losses), torch.stack(hits), torch.stack(counted))
