"""The MTP layer as a module, in MiMo's naming, and the checkpoint in which it lies beside its target.

It drafts by being used again and again, so it is trained that way: its own normed output stands for the target's.
Names and order of the inputs: the weights of XiaomiMiMo/MiMo-7B-RL; what goes on and the embedding of position 0, which
counts as nothing: vllm and sglang `mimo_mtp.py`.
"""

import json
import shutil
from pathlib import Path

import torch
from common import VOCAB_SIZE, write_json
from draft import Attention, HeadShape, Mlp, RMSNorm, Target
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

PREFIX = "model.mtp_layers.0."


class MtpLayer(nn.Module):
    """Draft layer; slot i pairs the target's last hidden state of position i with the embedding of token i + 1.

    To be used as `Eagle3Head` is: its features are the target's hidden states after the final norm, its state is its
    own output after its own norm, its output matrix is the target's.
    """

    def __init__(self, target: Target) -> None:
        """A layer that starts as the target's last one, and reads its two inputs in equal shares."""
        super().__init__()
        config = target.model.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        shape = HeadShape(
            VOCAB_SIZE, hidden, heads, config.num_key_value_heads, hidden // heads, config.intermediate_size
        )
        self.token_layernorm = RMSNorm(hidden)
        self.hidden_layernorm = RMSNorm(hidden)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden)
        self.self_attn = Attention(shape, hidden, bias=True)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.mlp = Mlp(shape)
        self.final_layernorm = RMSNorm(hidden)
        left = self.load_state_dict(target.model.model.layers[-1].state_dict(), strict=False)
        assert not left.unexpected_keys, left
        nn.init.normal_(self.input_proj.weight, std=0.02)
        with torch.no_grad():
            self.input_proj.weight += torch.eye(hidden).repeat(1, 2)
            self.final_layernorm.weight.copy_(target.model.model.norm.weight)
        self._output = (target.model.lm_head,)  # in a tuple: it is no part of the layer
        self.register_buffer("draft_ids", torch.arange(VOCAB_SIZE), persistent=False)

    def start(self, features: torch.Tensor) -> torch.Tensor:
        """The state that the target's features give: themselves."""
        return features

    def project(
        self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Residual, queries, keys and values of slots; embedding and hidden [batch, n, hidden], positions [n]."""
        embedding = self.token_layernorm(embedding) * (positions != 0)[:, None]
        x = self.input_proj(torch.cat([self.hidden_layernorm(hidden), embedding], dim=-1))
        return x, *self.self_attn.qkv(self.input_layernorm(x), positions)

    def finish(self, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The state that goes on; mixed [batch, heads, n, head_dim]."""
        x = residual + self.self_attn.output(mixed)
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary, [..., vocab]."""
        return functional.linear(state, self._output[0].weight)


def save_with_target(layer: MtpLayer, target: Path, folder: Path) -> None:
    """Write the target's folder again, with the layer's tensors in bf16 and a config that names it as MiMo's does."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in target.glob("*.json"):
        shutil.copy(file, folder)
    own = {PREFIX + name: value.to(torch.bfloat16).contiguous().cpu() for name, value in layer.state_dict().items()}
    tensors = load_file(target / "model.safetensors")
    save_file(tensors | own, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    named = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    write_json(folder / "config.json", config | named)
