"""Slow float64 oracle of P-EAGLE: one sequence, pairs and placeholders in one causal row, no cache.

Written from the mathematics, held against the published module. It is fed the tensors of a file by published names.
"""

from dataclasses import dataclass

import torch

from support.block_oracle import D, attend, rms, turn


@dataclass
class DensePEagle:
    """What `proposals_of` asks for: logits after a path, which only tells how deep it is.

    embedding, lm_head: the head's or the target's. layers: what tensors of each begin with.
    """

    w: dict[str, torch.Tensor]
    embedding: torch.Tensor
    lm_head: torch.Tensor
    offset: torch.Tensor
    mask_token: int
    layers: tuple[str, ...]
    before_residual: bool = False
    depths: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    eps: float = 1e-5
    theta: float = 10000.0

    def __post_init__(self) -> None:
        self.w = {name: t.to(D) if t.is_floating_point() else t for name, t in self.w.items()}

    def lin(self, name, x):
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, name, x):
        return rms(x, self.w[name + ".weight"], self.eps)

    def logits(self, features, tokens, path=()):
        """features: [n, width], of the tokens before the root, which is the last of `tokens`."""
        n, more = len(tokens), self.depths - 1
        ids = torch.tensor([*tokens, *[self.mask_token] * more])
        features = torch.cat([features.to(D), self.w["mask_hidden"].reshape(1, -1).expand(more, -1)])
        hidden = self.hidden(self.embedding.to(D)[ids], features)
        return hidden[n - 1 + len(path)] @ self.lm_head.to(D).T

    def hidden(self, embedded, features):
        """embedded: [n, hidden]. features: [n, width]. Slot i stands at position i. Returns [n, hidden]."""
        positions = torch.arange(len(embedded))
        sees = positions[:, None] >= positions
        x = self.lin("fc", features)
        for index, at in enumerate(self.layers):
            residual, y = x, self.norm(f"{at}.input_layernorm", embedded if index == 0 else x)
            if index == 0:
                h = self.norm(f"{at}.hidden_norm", x)
                residual, y = (h if self.before_residual else x), torch.cat([y, h], -1)
            q = self.lin(f"{at}.self_attn.q_proj", y).unflatten(-1, (self.heads, self.head_dim))
            k = self.lin(f"{at}.self_attn.k_proj", y).unflatten(-1, (self.kv_heads, self.head_dim))
            v = self.lin(f"{at}.self_attn.v_proj", y).unflatten(-1, (self.kv_heads, self.head_dim))
            if f"{at}.self_attn.q_norm.weight" in self.w:
                q, k = self.norm(f"{at}.self_attn.q_norm", q), self.norm(f"{at}.self_attn.k_norm", k)
            q, k = turn(q, positions, self.theta), turn(k, positions, self.theta)
            x = residual + self.lin(f"{at}.self_attn.o_proj", attend(q, k, v, sees, self.head_dim**-0.5))
            y = self.norm(f"{at}.post_attention_layernorm", x)
            gate = self.lin(f"{at}.mlp.gate_proj", y)
            x = x + self.lin(f"{at}.mlp.down_proj", gate * torch.sigmoid(gate) * self.lin(f"{at}.mlp.up_proj", y))
        return self.norm("norm", x)
