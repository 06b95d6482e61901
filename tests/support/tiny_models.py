"""Tiny checkpoints for the tests: Llama targets made by `transformers`, and EAGLE-3 heads made without training.

A head with a high acceptance is built by hand. The target's embeddings live in its first dimensions and its layers are
weak, so that the next token is mostly a function of the current one; the head attends sharply to itself and copies the
embedding of its token into the residual stream, where the target's own output rows turn it into the next token. What
is left of the target's layers is what the head gets wrong.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers  # its classes are loaded where one is named: most tests in Triton's interpreter name none
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 3
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Pair:
    """A target's folder and its draft head's."""

    target: Path
    head: Path

    @property
    def config(self) -> dict:
        return language_config(self.target)

    def prompts(self, lengths, seed=0):
        """Random prompts of given lengths, without the end-of-sequence token."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.config["vocab_size"]
        return [torch.randint(EOS + 1, vocab, (n,), generator=generator).tolist() for n in lengths]


def language_config(folder: Path) -> dict:
    """A target's config, of what reads images too its language model's part."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)


def llama_config(**changes) -> "transformers.LlamaConfig":
    """A small Llama with grouped queries; every size differs from the others where it can."""
    options = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": None,
    }
    return transformers.LlamaConfig(**{**options, **changes})


def qwen3_config(**changes) -> "transformers.Qwen3Config":
    """The same sizes, with heads wider than the hidden size gives."""
    return transformers.Qwen3Config(**{**llama_config().to_dict(), "model_type": "qwen3", "head_dim": 24, **changes})


def save_random_qwen3(folder: Path, seed: int = 0, **changes) -> Path:
    return save_random(transformers.Qwen3ForCausalLM, qwen3_config(**changes), folder, seed)


def save_random_llama(folder: Path, seed: int = 0, **changes) -> Path:
    return save_random(transformers.LlamaForCausalLM, llama_config(**changes), folder, seed)


def save_random_experts(folder: Path, family: str, seed: int = 0, **changes) -> Path:
    """A small model with experts: qwen3_moe, gpt_oss or glm4_moe."""
    same = {key: value for key, value in llama_config().to_dict().items() if key in _SAME} | {"head_dim": 24}
    routed = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
    if family == "qwen3_moe":
        own = {"num_experts": 7, "norm_topk_prob": True, "mlp_only_layers": [1], **routed}
        return save_random(
            transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**{**same, **own, **changes}), folder, seed
        )
    if family == "gpt_oss":
        own = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 16, "intermediate_size": 32}
        return save_random(
            transformers.GptOssForCausalLM, transformers.GptOssConfig(**{**same, **own, **changes}), folder, seed
        )
    assert family == "glm4_moe"
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    own = {**routed, **groups, "n_shared_experts": 2, "use_qk_norm": True, "num_nextn_predict_layers": 0}
    return save_random(
        transformers.Glm4MoeForCausalLM, transformers.Glm4MoeConfig(**{**same, **own, **changes}), folder, seed
    )


_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id"),
)


def save_mxfp4(folder: Path, stacked: Path, seed: int = 0) -> Path:
    """A GPT-OSS of `stacked` with its experts replaced by random ones in MXFP4, as its checkpoints have them."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in load_file(stacked / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            number, width, out = tensor.shape
            shape = (number, out, width // 32)
            tensors[name] = None
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator).to(torch.uint8)
    return copy_folder(stacked, folder, tensors=tensors, quantization_config={"quant_method": "mxfp4"})


def save_random(kind, config, folder: Path, seed: int) -> Path:
    """A model with random weights large enough that every part of it matters to the logits."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if ("norm" in name and not name.endswith("bias")) or name.endswith(("scale", "scalar")):
                weight.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "sinks")):
                weight.normal_(0, 0.3)
            elif weight.dim():
                weight.normal_(0, weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def save_weak_llama(folder: Path, seed: int = 0, strength: float = 1.0, sharpness: float = 0.35, **changes) -> Path:
    """A Llama whose next token is mostly a function of the current one; `strength` scales what its layers add."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(llama_config(**changes)).eval()
    kv_width = model.config.num_key_value_heads * model.config.head_dim
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            elif "embed_tokens" in name:
                weight.normal_(0, 1.0)
                weight[:, kv_width:] *= 0.1
            elif "lm_head" in name:
                weight.normal_(0, sharpness)
            else:
                writes = "o_proj" in name or "down_proj" in name
                weight.normal_(0, weight.shape[-1] ** -0.5 * (strength if writes else 1.0))
    model.save_pretrained(folder)
    return folder


def save_copying_head(folder: Path, target: Path, draft_vocab: int, seed: int = 0, **config_changes) -> Path:
    """An EAGLE-3 head for a weak target: it proposes the target's tokens as if the target had no layers."""
    config = json.loads((target / "config.json").read_text())
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim, vocab = config["head_dim"], config["vocab_size"]
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    used = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values

    def normal(*shape, scale):
        return torch.randn(shape, generator=generator) * scale

    keys = torch.zeros(kv_heads * dim, 2 * hidden)
    keys[:, : kv_heads * dim] = torch.eye(kv_heads * dim)
    group = heads // kv_heads
    queries = keys.unflatten(0, (kv_heads, dim)).repeat_interleave(group, dim=0).flatten(0, 1)
    output = torch.zeros(hidden, heads * dim)
    for kv in range(kv_heads):  # one query head of each group writes its values back to where they came from
        head = kv * group
        output[kv * dim : (kv + 1) * dim, head * dim : (head + 1) * dim] = torch.eye(dim)
    tensors = {
        "fc.weight": normal(hidden, 3 * hidden, scale=0.02),
        "midlayer.hidden_norm.weight": torch.full((hidden,), 0.08),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": queries * 3 + normal(*queries.shape, scale=0.05),
        "midlayer.self_attn.k_proj.weight": keys * 3 + normal(*keys.shape, scale=0.05),
        "midlayer.self_attn.v_proj.weight": keys + normal(*keys.shape, scale=0.02),
        "midlayer.self_attn.o_proj.weight": output,
        "midlayer.mlp.gate_proj.weight": normal(40, hidden, scale=0.1),
        "midlayer.mlp.up_proj.weight": normal(40, hidden, scale=0.1),
        "midlayer.mlp.down_proj.weight": normal(hidden, 40, scale=0.02),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": weights["lm_head.weight"][used].clone(),
        "d2t": used - torch.arange(draft_vocab),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, used, True),
    }
    return _save_head(folder, tensors, config, draft_vocab, {"norm_before_residual": True, **config_changes})


def save_random_head(folder: Path, target: Path, draft_vocab: int | None, seed: int = 0, **config_changes) -> Path:
    """A head with random weights: it proposes nonsense, of which the engine's output must not depend."""
    config = language_config(target)
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    hidden, dim, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    size = draft_vocab or vocab
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    tensors = {
        "fc.weight": normal(hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": normal(q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": normal(kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": normal(kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": normal(hidden, q),
        "midlayer.mlp.gate_proj.weight": normal(40, hidden),
        "midlayer.mlp.up_proj.weight": normal(40, hidden),
        "midlayer.mlp.down_proj.weight": normal(hidden, 40),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(size, hidden) * 3,
    }
    if draft_vocab is not None:
        used = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = used - torch.arange(draft_vocab)
    return _save_head(folder, tensors, config, draft_vocab, config_changes)


def _save_head(folder: Path, tensors: dict, target: dict, draft_vocab: int | None, changes: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "intermediate_size": 40,
        "hidden_act": "silu",
        "max_position_embeddings": 64,  # smaller than any context: it must not size anything
        "rope_theta": 10000.0,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target["hidden_size"],
        "tie_word_embeddings": False,
        **{key: target[key] for key in kept},
        **changes,
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def copy_folder(source: Path, destination: Path, *, tensors: dict | None = None, **config_changes) -> Path:
    """A copy of a checkpoint with some tensors replaced (None removes one) and some config keys changed."""
    shutil.copytree(source, destination)
    if tensors:
        path = destination / "model.safetensors"
        changed = {**load_file(path), **tensors}
        save_file({name: t.contiguous() for name, t in changed.items() if t is not None}, path)
    if config_changes:
        path = destination / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config_changes}))
    return destination


def save_tokenizer(folder: Path, vocab_size: int, text_of) -> None:
    """A `tokenizer.json` whose ids decode to `text_of(id)` bytes; EOS is special. Only bytes can be encoded."""
    shown = byte_characters()
    vocab = {}
    for token in range(vocab_size):
        name = "<eos>" if token == EOS else "".join(shown[b] for b in text_of(token))
        assert name not in vocab, f"two tokens are spelled {name!r}"
        vocab[name] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
