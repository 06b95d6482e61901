"""DeepSpec's heads with layers of Gemma 4: their trees node by node against an account of their own, over the target's
states by `transformers`.

The account is held against DeepSpec's module in float64, outputs within 7.4e-15.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers.models.gemma4 import modeling_gemma4

from support.assistants import save_assisted
from support.block_heads import RANK, random_block
from support.block_oracle import Markov
from support.dense_drafts import DenseTarget
from support.draft_rounds import assert_batches, assert_rounds
from support.families import GEMMA4
from support.head_layouts import save_head
from support.refusing import refused
from support.tiny_models import Pair, copy_folder
from treetop.drafts.registry import drafter_spec, find_draft
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError

BLOCK, MASK, HEADS, DIM, INNER, THETA, PART, EPS = 6, 4, 4, 24, 40, 1e6, 0.25, 1e-6
IDS = [0, 1, 2]
ROPE = {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": PART}


def rms(x, weight=1.0, eps=EPS):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(x, positions):
    """x: [n, heads, dim]. Of the halves' pairs the first quarter turns."""
    turning, angle = int(PART * DIM // 2), torch.zeros(len(positions), DIM // 2, dtype=torch.float64)
    rates = THETA ** (-torch.arange(0, 2 * turning, 2, dtype=torch.float64) / DIM)
    angle[:, :turning] = positions.double()[:, None] * rates
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Account:
    """What a head says after a path. alike: values are what keys are before their norm."""

    def __init__(self, folder, embedding, lm_head, alike, cap, markov) -> None:
        self.w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
        self.embedding, self.lm_head, self.alike, self.cap = embedding.double(), lm_head.double(), alike, cap
        self.offset = torch.zeros(len(embedding), dtype=torch.int64)
        self.edges = None if markov is None else Markov(self.w, markov)

    def logits(self, features, tokens, path=()):
        hidden = self._hidden(features, torch.tensor([tokens[-1]] + [MASK] * (BLOCK - 1)))
        unary = self.cap * (hidden @ self.lm_head.T / self.cap).tanh()
        if self.edges is None:
            return unary[len(path)]
        state = self.edges.begin()
        for depth, token in enumerate([tokens[-1], *path]):
            bias, state = self.edges.step(token, hidden[depth], state)
        return unary[len(path)] + bias

    def _hidden(self, features, ids):
        w, root = self.w, len(features)
        context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
        x, positions = self.embedding[ids] * self.embedding.shape[1] ** 0.5, torch.arange(root + BLOCK)
        for i in range(2):
            at = f"layers.{i}."
            attn = at + "self_attn."

            def heads(of, name, attn=attn):
                return (of @ w[f"{attn}{name}_proj.weight"].T).unflatten(-1, (-1, DIM))

            y = rms(x, w[at + "input_layernorm.weight"])
            both = torch.cat([context, y])
            value = rms(heads(both, "k" if self.alike else "v"))
            key = turned(rms(heads(both, "k"), w[attn + "k_norm.weight"]), positions)
            query = turned(rms(heads(y, "q"), w[attn + "q_norm.weight"]), positions[root:])
            share = HEADS // key.shape[1]
            out = [
                torch.softmax(query[:, h] @ key[:, h // share].T, -1) @ value[:, h // share] for h in range(HEADS)
            ]  # all see all, scale 1
            attended = torch.cat(out, -1) @ w[attn + "o_proj.weight"].T
            x = x + rms(attended, w[at + "post_attention_layernorm.weight"])
            y = rms(x, w[at + "pre_feedforward_layernorm.weight"])
            inner = F.gelu(y @ w[at + "mlp.gate_proj.weight"].T, approximate="tanh") * (
                y @ w[at + "mlp.up_proj.weight"].T
            )
            x = x + rms(inner @ w[at + "mlp.down_proj.weight"].T, w[at + "post_feedforward_layernorm.weight"])
            x = x * w[at + "layer_scalar"]
        return rms(x, w["norm.weight"])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_assisted(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(autouse=True)
def wide_norms(monkeypatch):
    """Norms of `transformers` in float64: it computes them in float32."""

    def norm(self, x):
        return rms(x, self.weight if self.with_scale else 1.0, self.eps)

    monkeypatch.setattr(modeling_gemma4.Gemma4RMSNorm, "forward", norm)


def config_of(target, **changes) -> dict:
    theirs = json.loads((target / "config.json").read_text())
    return {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "vocab_size": theirs["vocab_size"],
        "hidden_size": theirs["hidden_size"], "intermediate_size": INNER, "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 16,
        "global_head_dim": DIM, "num_global_key_value_heads": 1, "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False, "rms_norm_eps": EPS,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "max_position_embeddings": 2048, "final_logit_softcapping": GEMMA4["final_logit_softcapping"],
        "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": IDS, "markov_rank": RANK,
        "markov_head_type": "vanilla", "num_anchors": 4, **changes,
    }  # fmt: skip


def saved(folder, target, markov="vanilla", own=True, **changes):
    """own: with copies of the embedding and the output matrix, as they are published."""
    config = config_of(target, **{"markov_rank": 0 if markov is None else RANK, "markov_head_type": markov, **changes})
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    kv = (config["num_global_key_value_heads"] if config["attention_k_eq_v"] else 2) * DIM
    shapes = {"fc.weight": (hidden, 3 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for at in ("layers.0.", "layers.1."):
        attn = at + "self_attn."
        shapes |= {attn + "q_proj.weight": (HEADS * DIM, hidden), attn + "o_proj.weight": (hidden, HEADS * DIM)}
        shapes |= {attn + f"{each}_proj.weight": (kv, hidden) for each in "kv"[: 2 - config["attention_k_eq_v"]]}
        shapes |= {attn + f"{each}_norm.weight": (DIM,) for each in "qk"} | {at + "layer_scalar": (1,)}
        shapes |= {at + f"mlp.{half}_proj.weight": (INNER, hidden) for half in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (hidden, INNER)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[at + norm + "_layernorm.weight"] = (hidden,)
    tensors = random_block(shapes)
    if markov is not None:
        table = dict.fromkeys(("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"), (vocab, RANK))
        if markov == "gated":
            table |= {"markov_head.gate_proj.weight": (RANK, hidden + RANK), "markov_head.gate_proj.bias": (RANK,)}
        tensors |= random_block(table, seed=1)
    for at in ("layers.0.", "layers.1."):
        tensors[at + "layer_scalar"] = tensors[at + "layer_scalar"].abs() + 0.4
    if own:
        dense = DenseTarget(target)
        tensors |= {"embed_tokens.weight": dense.embedding.float(), "lm_head.weight": dense.lm_head.float().clone()}
    return save_head(folder, config, tensors)


@pytest.mark.parametrize(
    ("markov", "alike", "own"), [("vanilla", False, True), ("gated", True, False), (None, True, True)]
)
def test_trees_are_what_the_account_says(target, tmp_path, markov, alike, own):
    folder = saved(tmp_path / "head", target, markov, own, attention_k_eq_v=alike)
    assert find_draft(folder).algorithm == ("DFLASH" if markov is None else "DSPARK")
    dense = DenseTarget(target)
    account = Account(folder, dense.embedding, dense.lm_head, alike, GEMMA4["final_logit_softcapping"], markov)
    assert_rounds(Pair(target, folder), dense, account, (1, 2, 3))


@pytest.mark.slow
def test_batches_captured_or_not_with_retractions(target, tmp_path):
    assert_batches(Pair(target, saved(tmp_path / "head", target, attention_k_eq_v=True)), (3, 4, 12), hits=False)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("layer_types",)),
        ({"enable_moe_block": True}, ("enable_moe_block",)),
        ({"hidden_size_per_layer_input": 6}, ("hidden_size_per_layer_input",)),
        ({"num_kv_shared_layers": 1}, ("num_kv_shared_layers",)),
        ({"final_logit_softcapping": None}, ("scales", "cap")),
        ({"num_global_key_value_heads": 4, "attention_k_eq_v": True}, ("v_proj.weight",)),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(target, tmp_path, changes, parts):
    folder = copy_folder(saved(tmp_path / "head", target), tmp_path / "other", **changes)
    config = target_spec(target).config
    refused(CheckpointError, lambda: drafter_spec(folder, config).check(), *parts)
