"""Tiny checkpoints of the frozen suite, written without any code of treetop.

Weights are integers of a seeded generator over a power of two, times a square root: every machine writes the same
bytes, and `digests` proves it. Nothing here may change: the golden files are about these weights.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

EOS = 3
STEPS = 2**15  # uniform weights are multiples of 1 / STEPS


@dataclass(frozen=True)
class Pair:
    """A target's folder, its draft head's, and how many tokens the target knows."""

    target: Path
    head: Path
    vocab: int

    def prompt(self, length: int, seed: int) -> list[int]:
        """Token ids of a seeded prompt, EOS not among them."""
        return torch.randint(EOS + 1, self.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Weights:
    """Tensors by name, drawn in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def uniform(self, *shape: int) -> Tensor:
        """Multiples of 1 / STEPS in [-1, 1)."""
        drawn = torch.randint(-STEPS, STEPS, shape, generator=self.generator)
        return drawn.to(torch.float32) / STEPS

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Weights that give their input's size times `gain`."""
        self.tensors[name] = self.uniform(*shape) * (gain * math.sqrt(3 / shape[-1]))

    def norm(self, name: str, size: int, spread: float = 0.5) -> None:
        self.tensors[name] = 1 + spread * self.uniform(size)


def write_all(folder: Path, nudge: int | None = None) -> dict[str, Pair]:
    """All pairs, by name. nudge: a seed by which each weight goes to the next float32 up or down, for `regenerate`."""
    pairs = {}
    for name, make in _makers().items():
        target, head, vocab = folder / name / "target", folder / name / "head", 0
        for where, (config, tensors) in zip((target, head), make(), strict=True):
            where.mkdir(parents=True)
            (where / "config.json").write_text(json.dumps(config, indent=1))
            save_file(tensors if nudge is None else _nudged(tensors, nudge), where / "model.safetensors")
            vocab = config["vocab_size"]
        pairs[name] = Pair(target, head, vocab)
    _write_tokenizer(pairs["text"].target, pairs["text"].vocab)
    return pairs


def digests() -> dict[str, str]:
    """A short hash of each pair's weights."""
    found = {}
    for name, make in _makers().items():
        total = hashlib.sha256()
        for _, tensors in make():
            for key in sorted(tensors):
                total.update(key.encode() + tensors[key].contiguous().numpy().tobytes())
        found[name] = total.hexdigest()[:16]
    return found


# ---------------------------------------------------------------- the pairs

Checkpoint = tuple[dict, dict[str, Tensor]]


def _makers() -> dict[str, Callable[[], tuple[Checkpoint, Checkpoint]]]:
    return {"llama": _llama, "qwen3": _qwen3, "text": _text, "repeat": _repeat, "window": _window}


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "hidden_act": "silu",
}


def _llama() -> tuple[Checkpoint, Checkpoint]:
    """Layers that matter as much as the embeddings, and a head that knows only these; it lacks a few tokens."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "vocab_size": 30}
    tensors = _weak_decoder(config, seed=1, strength=0.45)
    return (config, tensors), _copying_head(config, tensors["lm_head.weight"], draft_vocab=26, seed=2)


def _qwen3() -> tuple[Checkpoint, Checkpoint]:
    """Norms of queries and keys, heads wider than the hidden size gives; what layers add the head gets wrong."""
    sizes = {**SIZES, "head_dim": 24, "num_hidden_layers": 3}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **sizes, "vocab_size": 50}
    tensors = _weak_decoder(config, seed=3, strength=0.4)
    return (config, tensors), _copying_head(config, tensors["lm_head.weight"], draft_vocab=None, seed=4)


def _window() -> tuple[Checkpoint, Checkpoint]:
    """Layers that see 12 tokens back, in turn with layers that see everything; a random head, right by chance."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {"architectures": ["WindowedLlamaForCausalLM"], "model_type": "llama", **SIZES, "vocab_size": 9}
    config |= {"sliding_window": 12, "layer_types": kinds}
    return (config, _decoder(config, seed=5)), _random_head(config, draft_vocab=None, seed=6)


def _text() -> tuple[Checkpoint, Checkpoint]:
    """The next token is mostly a function of the current one, which the head copies: long paths. It has a tokenizer."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES, "vocab_size": 160}
    tensors = _weak_decoder(config, seed=7, strength=0.17)
    return (config, tensors), _copying_head(config, tensors["lm_head.weight"], draft_vocab=140, seed=8)


def _repeat() -> tuple[Checkpoint, Checkpoint]:
    """A hostile target with tied embeddings: whatever came last comes again, EOS too, and the head knows it."""
    sizes = {**SIZES, "tie_word_embeddings": True}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, "vocab_size": 40}
    tensors = _weak_decoder(config, seed=9, strength=0.02)
    return (config, tensors), _copying_head(config, tensors["model.embed_tokens.weight"], draft_vocab=None, seed=10)


# ---------------------------------------------------------------- weights


def _decoder(config: dict, seed: int) -> dict[str, Tensor]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    weights = Weights(seed)
    weights.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=1.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights.norm(at + "input_layernorm.weight", hidden)
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            weights.matrix(f"{at}self_attn.{name}_proj.weight", size, hidden)
        weights.matrix(at + "self_attn.o_proj.weight", hidden, q)
        if config["model_type"] == "qwen3":
            weights.norm(at + "self_attn.q_norm.weight", dim)
            weights.norm(at + "self_attn.k_norm.weight", dim)
        weights.norm(at + "post_attention_layernorm.weight", hidden)
        weights.matrix(at + "mlp.gate_proj.weight", inner, hidden)
        weights.matrix(at + "mlp.up_proj.weight", inner, hidden)
        weights.matrix(at + "mlp.down_proj.weight", hidden, inner)
    weights.norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head.weight", config["vocab_size"], hidden)
    return weights.tensors


def _weak_decoder(config: dict, seed: int, strength: float) -> dict[str, Tensor]:
    """Embeddings that live in the first dimensions, and layers that add `strength` of what they could."""
    tensors = _decoder(config, seed)
    width = config["num_key_value_heads"] * config["head_dim"]
    for name, weight in tensors.items():
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            weight.fill_(1.0)
        elif "embed_tokens" in name or "lm_head" in name:
            weight.mul_(math.sqrt(config["hidden_size"]) * (1.0 if "embed" in name else 0.5))
            if "embed" in name:
                weight[:, width:] *= 0.1
        elif "o_proj" in name or "down_proj" in name:
            weight.mul_(strength)
    if "lm_head.weight" in tensors:  # token 0 never follows itself; only the hostile target does that
        tensors["lm_head.weight"][0] = tensors["model.embed_tokens.weight"][0] * -0.5
    return tensors


def _random_head(target: dict, draft_vocab: int | None, seed: int) -> Checkpoint:
    hidden, dim, inner = target["hidden_size"], target["head_dim"], 40
    q, kv = target["num_attention_heads"] * dim, target["num_key_value_heads"] * dim
    weights = Weights(seed)
    weights.matrix("fc.weight", hidden, 3 * hidden)
    for name, size in (("q", q), ("k", kv), ("v", kv)):
        weights.matrix(f"midlayer.self_attn.{name}_proj.weight", size, 2 * hidden)
    weights.matrix("midlayer.self_attn.o_proj.weight", hidden, q)
    weights.matrix("midlayer.mlp.gate_proj.weight", inner, hidden)
    weights.matrix("midlayer.mlp.up_proj.weight", inner, hidden)
    weights.matrix("midlayer.mlp.down_proj.weight", hidden, inner)
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        weights.norm(name + ".weight", hidden)
    weights.matrix("lm_head.weight", draft_vocab or target["vocab_size"], hidden, gain=2.0)
    if draft_vocab is not None:
        weights.tensors["d2t"] = _d2t(weights, target["vocab_size"], draft_vocab)
    return _head_config(target, draft_vocab, inner), weights.tensors


def _copying_head(target: dict, output_rows: Tensor, draft_vocab: int | None, seed: int) -> Checkpoint:
    """It attends sharply to itself and writes its token's embedding where the target's output rows read it.

    output_rows: of the target's last product, [vocab, hidden].
    """
    hidden, dim, inner = target["hidden_size"], target["head_dim"], 40
    heads, kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    group, width = heads // kv_heads, kv_heads * dim
    weights = Weights(seed)
    copies = torch.eye(width, 2 * hidden)
    weights.matrix("fc.weight", hidden, 3 * hidden, gain=0.3)
    at = "midlayer.self_attn."
    queries = copies.unflatten(0, (kv_heads, dim)).repeat_interleave(group, 0).flatten(0, 1)
    for name, rows in (("q", queries * 3), ("k", copies * 3), ("v", copies)):
        weights.tensors[f"{at}{name}_proj.weight"] = rows + weights.uniform(*rows.shape) * 0.03
    output = torch.zeros(kv_heads, dim, kv_heads, group, dim)
    for head in range(kv_heads):  # one query head of each group writes
        output[head, :, head, 0] = torch.eye(dim)
    rest = torch.zeros(hidden - width, heads * dim)
    weights.tensors[at + "o_proj.weight"] = torch.cat([output.reshape(width, -1), rest])
    weights.matrix("midlayer.mlp.gate_proj.weight", inner, hidden, gain=0.8)
    weights.matrix("midlayer.mlp.up_proj.weight", inner, hidden, gain=0.8)
    weights.matrix("midlayer.mlp.down_proj.weight", hidden, inner, gain=0.1)
    for name in ("midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        weights.tensors[name + ".weight"] = torch.ones(hidden)
    weights.tensors["midlayer.hidden_norm.weight"] = torch.full((hidden,), 0.0625)
    weights.tensors["lm_head.weight"] = output_rows.clone()
    if draft_vocab is not None:
        weights.tensors["d2t"] = _d2t(weights, target["vocab_size"], draft_vocab)
        weights.tensors["lm_head.weight"] = output_rows[weights.tensors["d2t"] + torch.arange(draft_vocab)]
    return {**_head_config(target, draft_vocab, inner), "norm_before_residual": True}, weights.tensors


def _d2t(weights: Weights, vocab: int, draft_vocab: int) -> Tensor:
    """Offsets from draft tokens to a random choice of the target's."""
    used = torch.randperm(vocab, generator=weights.generator)[:draft_vocab].sort().values
    return used - torch.arange(draft_vocab)


def _head_config(target: dict, draft_vocab: int | None, inner: int) -> dict:
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": inner,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target["hidden_size"],
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, target["num_hidden_layers"] - 1]},
        **{key: target[key] for key in kept},
    }


def _nudged(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, weight in tensors.items():
        up = torch.randint(0, 2, weight.shape, generator=generator).bool()
        limit = torch.where(up, math.inf, -math.inf)
        result[name] = torch.nextafter(weight, limit) if weight.is_floating_point() else weight
    return result


# ---------------------------------------------------------------- text


def spelling(token: int) -> str:
    """What a token of the text pair looks like: ASCII, then words of two letters."""
    if token < EOS + 1:
        return chr(token)
    if token < 99:
        return chr(token + 28)  # ' ' to '~'
    word = token - 99
    return chr(97 + word % 26) + chr(97 + word // 26 + word % 5)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A `tokenizer.json` that spells as `spelling` does; only single characters are encoded."""
    shown = {**{chr(c): chr(c) for c in range(33, 127)}, " ": "\u0120", **{chr(c): chr(256 + c) for c in range(4)}}
    names = ["<eos>" if token == EOS else "".join(shown[c] for c in spelling(token)) for token in range(vocab_size)]
    assert len(set(names)) == vocab_size, "two tokens are spelled alike"
    tokenizer = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
