"""A tiny target with compressed attention: in each layer a token leaves one plane, which is its key and its value.

The plane is a latent [RANK] and a rotated key [TURNED] that all heads share. `OnePlane` attends to the plane as it is:
what would make keys and values of it is applied to the query before and to the output after. `dense_logits` makes keys
and values for every head, in loops, and keeps nothing.
Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

import json
import math
from functools import partial

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from treetop.checkpoints.params import Param, matrix, stored_tensors
from treetop.kernels.kv import PagedKV, write_pages
from treetop.kernels.rope import RopeSpec, rope_table, rotate_
from treetop.models.config import AttentionSpec, DenseSpec, LayerSpec, model_config, num_layers
from treetop.models.layers import norm_param
from treetop.models.registry import Family
from treetop.models.target import TargetOutput
from treetop.types.kv import compressed
from treetop.weights.format import CheckpointTensor

NAME = "OnePlaneForCausalLM"
HEADS, RANK, ROPE_DIM, KEY, VALUE = 4, 12, 4, 6, 5
SIZES = {"hidden_size": 32, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8}
CONFIG = {
    **SIZES,
    "architectures": [NAME],
    "vocab_size": 9,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}


def read(config, where):
    rope = RopeSpec(ROPE_DIM, 10000.0)
    attention = AttentionSpec(HEADS, compressed(RANK, ROPE_DIM), rope, (KEY + ROPE_DIM) ** -0.5)
    return model_config(config, where, [LayerSpec(attention, DenseSpec(1))] * num_layers(config, where))


def params(config):
    hidden, table = config.hidden_size, (config.vocab_size, config.hidden_size)
    made = [
        Param("embedding", table, (CheckpointTensor("embed", table),), "table"),
        norm_param("norm", "norm", hidden),
        matrix("lm_head", CheckpointTensor("head", table)),
    ]
    for i in range(len(config.layers)):
        made += [
            norm_param(f"{i}.norm", f"layers.{i}.norm", hidden),
            matrix(f"{i}.query", CheckpointTensor(f"layers.{i}.query", (HEADS * (KEY + ROPE_DIM), hidden))),
            matrix(f"{i}.plane", *(CheckpointTensor(f"layers.{i}.{n}", (size, hidden)) for n, size in PLANE.items())),
            matrix(f"{i}.to_key", CheckpointTensor(f"layers.{i}.to_key", (HEADS * KEY, RANK))),
            matrix(f"{i}.to_value", CheckpointTensor(f"layers.{i}.to_value", (HEADS * VALUE, RANK))),
            matrix(f"{i}.output", CheckpointTensor(f"layers.{i}.output", (hidden, HEADS * VALUE))),
        ]
    return made


PLANE = {"latent": RANK, "turned": ROPE_DIM}


class OnePlane:
    """A `Target` of attention layers alone."""

    def __init__(self, config, weights, aux_inputs, place, ops):
        self.config, self.aux_inputs, self.weights = config, aux_inputs, weights
        self.embedding = weights["embedding"]
        self.rope = rope_table(config.layers[0].attention.rope, place.rope_rows, place.dtype, place.device)

    products = ()  # they are plain ones of PyTorch

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config.norm_eps)

    def forward(self, tokens, positions, attend, tells_experts=False, last=None):
        x = F.embedding(tokens, self.embedding)
        states, angles = [x], self.rope.at(positions)
        for i, layer in enumerate(self.config.layers):
            normed = self.norm(x, f"{i}.norm")
            q, plane = self.project(i, normed, angles)
            seen = attend(i, partial(self.write, q, plane), layer.attention.scale)
            values = torch.einsum("rnhc,hvc->rnhv", seen, self.weights[f"{i}.to_value"].view(HEADS, VALUE, RANK))
            x = x + values.flatten(2) @ self.weights[f"{i}.output"].T
            states.append(x)
        hidden = self.norm(x, "norm")
        return TargetOutput(hidden if last is None else last.of(hidden), tuple(states[i] for i in self.aux_inputs))

    def project(self, i, normed, angles):
        """Queries [rows, n, HEADS, RANK + TURNED] and the plane [rows, n, 1, 1, RANK + TURNED]."""
        q = (normed @ self.weights[f"{i}.query"].T).unflatten(-1, (HEADS, KEY + ROPE_DIM))
        rotate_(q[..., KEY:], angles)
        to_key = self.weights[f"{i}.to_key"].view(HEADS, KEY, RANK)
        absorbed = torch.einsum("rnhk,hkc->rnhc", q[..., :KEY], to_key)
        plane = (normed @ self.weights[f"{i}.plane"].T)[:, :, None]
        rotate_(plane[..., RANK:], angles)
        return torch.cat([absorbed, q[..., KEY:]], dim=-1), plane[:, :, None]

    @staticmethod
    def write(q, plane, target, slots, scales):
        if slots is None:
            target.copy_(plane)
        else:
            write_pages(PagedKV(target), slots, plane)
        return q

    def logits(self, hidden):
        return hidden @ self.weights["lm_head"].T

    piece = logits


FAMILY = Family(read, "one plane for keys and values", params, lambda config: set(), OnePlane)


def save(folder, seed=0):
    """A random checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(seed)
    config = read(CONFIG, folder)
    tensors = {}
    for name, stored in stored_tensors(params(config)).items():
        made = torch.randn(stored.shape, generator=generator)
        tensors[name] = 1 + 0.2 * made if len(stored.shape) == 1 else made * stored.shape[-1] ** -0.5
    save_file(tensors, folder / "model.safetensors")
    return folder


def dense_logits(folder, ids):
    """Logits after each of `ids` [n, vocab], in float64."""
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight

    def turn(x, position):
        half, out = ROPE_DIM // 2, x.clone()
        for j in range(half):
            angle = torch.tensor(position / 10000.0 ** (2 * j / ROPE_DIM), dtype=torch.float32)
            cos, sin = angle.cos().double(), angle.sin().double()
            out[j], out[j + half] = x[j] * cos - x[j + half] * sin, x[j + half] * cos + x[j] * sin
        return out

    x = w["embed"][torch.tensor(ids)]
    for i in range(CONFIG["num_hidden_layers"]):
        of, normed = f"layers.{i}.", norm(x, w[f"layers.{i}.norm"])
        latent, shared = normed @ w[of + "latent"].T, normed @ w[of + "turned"].T
        shared = torch.stack([turn(key, at) for at, key in enumerate(shared)])
        rows = []
        for at in range(len(ids)):
            q = (w[of + "query"] @ normed[at]).view(HEADS, KEY + ROPE_DIM)
            heads = []
            for h in range(HEADS):
                keys = latent[: at + 1] @ w[of + "to_key"].view(HEADS, KEY, RANK)[h].T
                values = latent[: at + 1] @ w[of + "to_value"].view(HEADS, VALUE, RANK)[h].T
                scores = keys @ q[h, :KEY] + shared[: at + 1] @ turn(q[h, KEY:], at)
                heads.append(torch.softmax(scores / math.sqrt(KEY + ROPE_DIM), dim=0) @ values)
            rows.append(w[of + "output"] @ torch.cat(heads))
        x = x + torch.stack(rows)
    return norm(x, w["norm"]) @ w["head"].T
