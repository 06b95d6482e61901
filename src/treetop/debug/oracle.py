"""A dense oracle: what a pair of checkpoints must do, computed without pages, tails, masks of trees or batches.

Every node is scored by a whole forward of its own sequence. It imports nothing of the engine and shares no code with
it: weights come straight from the files, attention is a loop over heads with a causal mask. Slow, and obvious.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OracleNode:
    """A node of a drafted tree: its token, the index of its parent in the list, and its path's log-probability."""

    token: int
    parent: int
    logprob: float


@dataclass(frozen=True, slots=True)
class OracleCalibration:
    """What the head's logits are multiplied by, by depth, and what is added to log-probabilities, by depth and rank."""

    inv_temp: list[float]
    logprob_bias: list[list[float]]


class DensePair:
    """Target and EAGLE-3 head in float64."""

    def __init__(self, target: Path, head: Path) -> None:
        self.config, self.target = _read(target)
        self.head_config, self.head = _read(head)
        layers = self.head_config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        self.aux_outputs: list[int] = list(layers)

    def run_target(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [n, vocab] and the head's features [n, 3 * hidden] of a sequence."""
        c, w = self.config, self.target
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        kinds = c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
        outputs = []
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            window = c["sliding_window"] if kinds[layer] == "sliding_attention" else None
            normed = _norm(x, w[prefix + "input_layernorm.weight"], c)
            x = x + _attention(normed, w, prefix + "self_attn.", c, window)
            x = x + _mlp(_norm(x, w[prefix + "post_attention_layernorm.weight"], c), w, prefix + "mlp.")
            outputs.append(x)
        lm_head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        logits = _norm(x, w["model.norm.weight"], c) @ lm_head.T
        return logits, torch.cat([outputs[i] for i in self.aux_outputs], dim=-1)

    def run_head(
        self, ids: list[int], aux_hidden: Tensor, branch: list[Tensor], inv_temp: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The head over slots 0 .. n-1, slot i holding (feature i, token i + 1).

        ids: the n + 1 tokens. aux_hidden: [m, 3 * hidden] of the first m slots; the head's own states `branch` stand in
        for the other n - m. Returns the state [hidden] and log-probabilities [draft vocabulary] of the last slot.
        """
        c, w = self.head_config, self.head
        hidden = torch.cat([aux_hidden @ w["fc.weight"].T, *(state[None] for state in branch)])
        embedding = self.target["model.embed_tokens.weight"][torch.tensor(ids[1:])]
        normed = [
            _norm(embedding, w["midlayer.input_layernorm.weight"], c),
            _norm(hidden, w["midlayer.hidden_norm.weight"], c),
        ]
        x = hidden + _attention(torch.cat(normed, dim=-1), w, "midlayer.self_attn.", c, None)
        x = x + _mlp(_norm(x, w["midlayer.post_attention_layernorm.weight"], c), w, "midlayer.mlp.")
        logits = _norm(x[-1], w["norm.weight"], c) @ w["lm_head.weight"].T
        return x[-1], torch.log_softmax(logits.to(torch.float32) * inv_temp, dim=-1)

    def tree(self, ids: list[int], k: int, steps: int, size: int, calibration: OracleCalibration) -> list[OracleNode]:
        """The tree that follows `ids`, whose last token is the root: `size` nodes in breadth-first order."""
        inv_temp, logprob_bias = calibration.inv_temp, calibration.logprob_bias
        aux_hidden = self.run_target(ids[:-1])[1]
        state, logprobs = self.run_head(ids, aux_hidden, [], inv_temp[0])
        found = [OracleNode(ids[-1], 0, 0.0)]
        flat: list[tuple[int, float, int]] = []  # (token, logprob, flat index of the parent or -1)
        frontier: list[tuple[int, list[int], list[Tensor]]] = []  # (flat index, ids, branch states)
        for token, logprob in _corrected(self._best(logprobs, k), logprob_bias[0]):
            frontier.append((len(flat), [*ids, token], [state]))
            flat.append((token, logprob, -1))
        for depth in range(1, steps):
            grown: list[tuple[float, int, list[int], list[Tensor]]] = []
            for index, path, branch in frontier:
                state, logprobs = self.run_head(path, aux_hidden, branch, inv_temp[depth])
                for token, logprob in _corrected(self._best(logprobs, k), logprob_bias[depth]):
                    score = float(torch.tensor(flat[index][1]) + torch.tensor(logprob))  # float32, as drafted
                    grown.append((score, len(flat), [*path, token], [*branch, state]))
                    flat.append((token, score, index))
            top_1, *others = grown  # the best child of the first, which leads whatever its score
            others.sort(key=lambda item: (-item[0], item[1]))
            frontier = [(index, path, branch) for _, index, path, branch in [top_1, *others][:k]]
        order = sorted(range(len(flat)), key=lambda i: (-flat[i][1], i))[: size - 1]
        place = {-1: 0} | {index: node for node, index in enumerate(sorted(order), 1)}
        found += [OracleNode(flat[i][0], place[flat[i][2]], flat[i][1]) for i in sorted(order)]
        return found

    def greedy_path(self, ids: list[int], tree: list[OracleNode]) -> list[int]:
        """The tokens one round must emit: plain greedy decoding, for as long as the tree holds its tokens."""
        emitted: list[int] = []
        node = 0
        while True:
            wanted = int(self.run_target([*ids, *emitted])[0][-1].argmax())
            emitted.append(wanted)
            children = [i for i in range(1, len(tree)) if tree[i].parent == node and tree[i].token == wanted]
            if not children:
                return emitted
            node = children[0]

    def _best(self, logprobs: Tensor, k: int) -> list[tuple[int, float]]:
        """The k best draft tokens, as target ids, ties by the smaller draft id."""
        values = logprobs.tolist()
        best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
        return [(i + int(self.head["d2t"][i]), min(values[i], 0.0)) for i in best]


def _corrected(best: list[tuple[int, float]], logprob_bias: list[float]) -> list[tuple[int, float]]:
    """Proposals with their ranks' shifts: none certain, and none likelier than one before it."""
    found, highest = [], 0.0
    for (token, logprob), more in zip(best, logprob_bias, strict=False):
        highest = min(highest, float(torch.tensor(logprob) + torch.tensor(more)))  # float32, as drafted
        found.append((token, highest))
    return found


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    return config, {name: t.to(torch.float64) if t.is_floating_point() else t for name, t in tensors.items()}


def _norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + config["rms_norm_eps"]) * weight


def _mlp(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up = x @ w[prefix + "gate_proj.weight"].T, x @ w[prefix + "up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ w[prefix + "down_proj.weight"].T


def _attention(x: Tensor, w: dict[str, Tensor], prefix: str, config: dict[str, Any], window: int | None) -> Tensor:
    """Causal self-attention of x [n, in], head by head."""
    heads, kv_heads, n = config["num_attention_heads"], config["num_key_value_heads"], x.shape[0]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v = ((x @ w[f"{prefix}{name}_proj.weight"].T).view(n, -1, dim) for name in "qkv")
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0
    q, k = _rotate(q, theta), _rotate(k, theta)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    out = []
    for head in range(heads):
        kv = head * kv_heads // heads
        scores = (q[:, head] @ k[:, kv].T / math.sqrt(dim)).masked_fill(hidden, float("-inf"))
        out.append(torch.softmax(scores, dim=-1) @ v[:, kv])
    return torch.cat(out, dim=-1) @ w[prefix + "o_proj.weight"].T


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Half rotation of x [n, heads, dim] at positions 0 .. n-1, with angles in float32 as checkpoints are trained."""
    n, _, dim = x.shape
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angle = (torch.arange(n, dtype=torch.float32)[:, None] * inverse)[:, None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
