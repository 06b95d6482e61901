"""The EAGLE-3 head as a module whose state dict is the checkpoint, and the target's features it reads."""

from dataclasses import dataclass
from pathlib import Path

import torch
from common import CONTEXT, VOCAB_SIZE
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from variants import use_fast_functions

AUX_LAYERS = (0, 2, 3)  # layer outputs: the residual stream after these layers, before the final norm
NORM_EPS = 1e-5
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the head; `hidden` is also the target's."""

    draft_vocab: int = 2048
    hidden: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704

    def config(self) -> dict:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
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
            "max_position_embeddings": CONTEXT,
            "rope_theta": ROPE_THETA,
            "rms_norm_eps": NORM_EPS,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 1,
            "dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
                "use_aux_hidden_state": True,
            },
        }


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 at least."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size]."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + NORM_EPS) * self.weight


class Attention(nn.Module):
    """The projections of one attention; its queries, keys and values are [batch, heads, n, head_dim]."""

    def __init__(self, shape: HeadShape, inputs: int, bias: bool) -> None:
        """inputs: features a slot. bias: of queries, keys and values."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [batch, n, inputs], positions [n] int64; keys and values come repeated to all heads."""

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        group = self.heads // self.kv_heads
        cos, sin = rope_table(positions, self.head_dim)
        q = rotate(split(self.q_proj(x)), cos, sin)
        k = rotate(split(self.k_proj(x)), cos, sin).repeat_interleave(group, dim=1)
        return q, k, split(self.v_proj(x)).repeat_interleave(group, dim=1)

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        """mixed [batch, heads, n, head_dim] -> [batch, n, hidden]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The one decoder layer: it reads the token's embedding and the hidden state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape, 2 * shape.hidden, bias=False)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = Mlp(shape)


class Eagle3Head(nn.Module):
    """Draft head; slot i pairs the target's features of position i with the embedding of token i + 1.

    The attention itself (who sees whom) is the caller's: `start`, then `project`, then mix, then `finish`.
    """

    def __init__(self, shape: HeadShape, draft_ids: torch.Tensor) -> None:
        """draft_ids: [draft_vocab] int64 target ids, ascending."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(AUX_LAYERS) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        member = torch.zeros(VOCAB_SIZE, dtype=torch.bool, device=draft_ids.device)
        member[draft_ids] = True
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        self.register_buffer("t2d", member)

    @property
    def draft_ids(self) -> torch.Tensor:
        """Target id of each draft id, [draft_vocab] int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def start(self, features: torch.Tensor) -> torch.Tensor:
        """The state that the target's features give, [..., hidden]."""
        return self.fc(features)

    def project(
        self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Residual, queries, keys and values of slots; embedding and hidden [batch, n, hidden], positions [n]."""
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)], dim=-1)
        return hidden, *layer.self_attn.qkv(both, positions)

    def finish(self, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The layer's output, which is the recurrent state; mixed [batch, heads, n, head_dim]."""
        hidden = residual + self.midlayer.self_attn.output(mixed)
        return hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the draft vocabulary, [..., draft_vocab]."""
        return self.lm_head(self.norm(hidden))


def rope_table(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, each [n, head_dim] float32."""
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * ROPE_THETA ** (-pair / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Llama's rotary embedding: feature j turns with feature j + head_dim / 2. x [..., n, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


class Target:
    """The frozen target, which also hands out what the head needs: features, logits, embeddings.

    Features are the outputs of AUX_LAYERS side by side, or the last hidden state after the final norm.
    """

    def __init__(self, folder: Path, device: torch.device, last_hidden: bool = False) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        use_fast_functions(self.model)
        self.model.requires_grad_(False)
        self._captured: dict[int, torch.Tensor] = {}
        inner = self.model.model
        for index, module in enumerate([inner.norm] if last_hidden else [inner.layers[i] for i in AUX_LAYERS]):
            module.register_forward_hook(self._capture(index))

    def _capture(self, index: int):
        def keep(_module: nn.Module, _inputs: tuple, output: torch.Tensor | tuple) -> None:
            self._captured[index] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.no_grad()
    def run(self, ids: torch.Tensor, **kwargs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [batch, n, vocab] and features [batch, n, sizes] for ids [batch, n]."""
        logits = self.model(input_ids=ids, use_cache=False, **kwargs).logits
        return logits, torch.cat([self._captured[index] for index in sorted(self._captured)], dim=-1)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings, [..., hidden]."""
        return self.model.model.embed_tokens(ids)


def load_head(folder: Path, device: torch.device) -> Eagle3Head:
    """The head of a checkpoint folder, in float32."""
    tensors = load_file(folder / "model.safetensors")
    draft_vocab, hidden = tensors["lm_head.weight"].shape
    intermediate = tensors["midlayer.mlp.up_proj.weight"].shape[0]
    shape = HeadShape(draft_vocab=draft_vocab, hidden=hidden, intermediate=intermediate)
    head = Eagle3Head(shape, tensors["d2t"] + torch.arange(draft_vocab))
    head.load_state_dict(tensors)
    return head.float().to(device).eval()
