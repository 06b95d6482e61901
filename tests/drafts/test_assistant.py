"""Gemma 4's assistants: their trees node by node against an account of their own, over the target's K/V by
`transformers`.
"""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.gemma4 import modeling_gemma4

from support.assistants import HEADS, KINDS, ROPE, save_assistant, save_assisted
from support.draft_rounds import assert_batches, assert_rounds
from support.families import GEMMA4
from support.grids import few_of
from support.refusing import refused
from support.tiny_models import Pair, copy_folder
from treetop.drafts.registry import drafter_spec, find_draft
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError


def rms(x, weight=1.0, eps=1e-6):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turned(q, position, kind):
    rope, dim = ROPE[kind], q.shape[-1]
    turning = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
    angle = torch.zeros(dim // 2, dtype=torch.float64)
    angle[:turning] = position * rope["rope_theta"] ** (-torch.arange(0, 2 * turning, 2, dtype=torch.float64) / dim)
    first, second = q.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Account:
    """What an assistant says after a path, by the target's cache and the formulas of `transformers`' module."""

    def __init__(self, target, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        self.theirs = json.loads((target / "config.json").read_text())
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {
            name: t if t.dtype == torch.int64 else t.double()
            for name, t in load_file(folder / "model.safetensors").items()
        }
        self.offset = torch.zeros(self.theirs["vocab_size"], dtype=torch.int64)
        own = len(GEMMA4["layer_types"]) - GEMMA4["num_kv_shared_layers"]
        self.last = {kind: i for i, kind in enumerate(GEMMA4["layer_types"][:own])}

    def features(self, ids, which):
        """Those of the committed tokens: hidden state and K/V, and the first token."""
        cache = DynamicCache()
        with torch.no_grad():
            out = self.model.model(torch.tensor([ids]), cache=cache, use_cache=True)
        shared = {}
        for kind, layer in self.last.items():
            seen = slice(-GEMMA4["sliding_window"], None) if kind == "sliding_attention" else slice(None)
            shared[kind] = tuple(t[0, :, seen] for t in (cache.layers[layer].keys, cache.layers[layer].values))
        return out.last_hidden_state[0, -1], shared

    def logits(self, features, tokens, path=()):
        (hidden, shared), position = features, len(tokens)
        table = self.model.get_input_embeddings().weight.detach()
        for token in (tokens[-1], *path):
            x = self._body(torch.cat([table[token] * table.shape[1] ** 0.5, hidden]), position, shared)
            hidden = self.w["post_projection.weight"] @ x
        logits = self.w["model.embed_tokens.weight"] @ x
        if self.config["use_ordered_embeddings"]:
            clusters = self.w["masked_embedding.token_ordering"].view(self.config["num_centroids"], -1)
            best = (self.w["masked_embedding.centroids.weight"] @ x).topk(self.config["centroid_intermediate_top_k"])
            kept = torch.zeros(len(logits), dtype=torch.bool).index_fill_(0, clusters[best.indices].flatten(), True)
            logits = logits.masked_fill(~kept, float("-inf"))
        return logits.detach()

    def _body(self, given, position, shared):
        w, x = self.w, self.w["pre_projection.weight"] @ given
        for i, kind in enumerate(KINDS):
            at, (k, v) = f"model.layers.{i}.", shared[kind]
            q = (w[at + "self_attn.q_proj.weight"] @ rms(x, w[at + "input_layernorm.weight"])).view(HEADS, -1)
            q = turned(rms(q, w[at + "self_attn.q_norm.weight"]), position, kind)
            share = HEADS // len(k)
            out = [F.softmax(k[h // share] @ q[h], -1) @ v[h // share] for h in range(HEADS)]
            attended = w[at + "self_attn.o_proj.weight"] @ torch.cat(out)
            x = x + rms(attended, w[at + "post_attention_layernorm.weight"])
            y = rms(x, w[at + "pre_feedforward_layernorm.weight"])
            y = F.gelu(w[at + "mlp.gate_proj.weight"] @ y, approximate="tanh") * (w[at + "mlp.up_proj.weight"] @ y)
            x = (x + rms(w[at + "mlp.down_proj.weight"] @ y, w[at + "post_feedforward_layernorm.weight"])) * w[
                at + "layer_scalar"
            ]
        return rms(x, w["model.norm.weight"])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_assisted(tmp_path_factory.mktemp("assistant"))


@pytest.fixture(autouse=True)
def wide_norms(monkeypatch):
    """Norms of `transformers` in float64: it computes them in float32."""

    def norm(self, x):
        return rms(x, self.weight if self.with_scale else 1.0, self.eps)

    monkeypatch.setattr(modeling_gemma4.Gemma4RMSNorm, "forward", norm)


@pytest.mark.parametrize("clustered", few_of([False, True], 1))
def test_trees_are_what_the_account_says(target, tmp_path, clustered):
    """Chains and trees, past the windows; output is plain decoding's."""
    folder = save_assistant(tmp_path / "head", target, 8 if clustered else 0, 2)
    assert find_draft(folder).algorithm == "GEMMA4"
    account = Account(target, folder)
    for shape in ((3, 3, 9), (1, 5, 6)):
        assert_rounds(Pair(target, folder), account, account, (), shape)


@pytest.mark.slow
def test_batches_captured_or_not_with_retractions(target, tmp_path):
    """With lookups beside it: a drafter around it hands on whose K/V it reads."""
    folder = save_assistant(tmp_path / "head", target)
    assert_batches(Pair(target, folder), (3, 3, 9), hits=False, speculative_suffix_lookup=True)


def test_what_does_not_fit_is_refused(target, tmp_path):
    folder = save_assistant(tmp_path / "head", target, 8, 2)
    config = target_spec(target).config

    def spec(of, window=None):
        return lambda: drafter_spec(of, config, window=window)

    refused(ConfigError, spec(folder, 8), "--speculative-draft-window-size 8")
    made = json.loads((folder / "config.json").read_text())
    for name, changes, says in (
        ("wide", {"backbone_hidden_size": 12}, "backbone_hidden_size is 12"),
        ("heads", {"text_config": made["text_config"] | {"head_dim": 32}}, "heads of 32"),
        ("clusters", {"centroid_intermediate_top_k": 99}, "centroid_intermediate_top_k 99"),
        ("tied", {"text_config": made["text_config"] | {"tie_word_embeddings": False}}, "tie_word_embeddings"),
    ):
        refused(CheckpointError, spec(copy_folder(folder, tmp_path / name, **changes)), says)
    full = replace(config, layers=tuple(layer for layer in config.layers if layer.attention.window is None))
    refused(CheckpointError, lambda: drafter_spec(folder, full), "a kind of layer that the target does not have")
