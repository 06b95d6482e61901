"""What the folders of draft heads have in common: their config, and what their tensors say of it.

Tensors decide where a config may be wrong: published heads name the target's number of layers (sgl-33966), the target's
architecture, or leave out a bias.
"""

import logging
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from treetop.checkpoints.config_fields import Config, flag, size, table
from treetop.checkpoints.params import Param, of_vocab
from treetop.models.config import SLIDING_ATTENTION, LayerSpec, ModelConfig, attention_spec, dense_spec, read_config
from treetop.models.embedding import part_of
from treetop.models.families.deepseek import latent_attention
from treetop.models.target import Target
from treetop.types.errors import CheckpointError, shown
from treetop.types.parallel import Parallel
from treetop.weights.format import CheckpointTensor, Linear
from treetop.weights.held import Weights
from treetop.weights.plain import Plain

log = logging.getLogger("treetop")

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
OutputOf = Literal["own", "embedding", "target"]
"""Whose matrix gives a head's logits."""
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Where heads that draft in parallel say which token stands for one not drafted yet."""
_OF_SPECULATORS = (
    *MASK_TOKENS,
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)


def head_config(folder: Path) -> tuple[Config, bool]:
    """A head's `config.json` as one table, and whether `speculators` wrote it, which nests the layers' part.

    A file of `speculators` without `norm_before_residual` means true, as vLLM reads it; the library's own default is
    false, so it is logged. Source: vllm `transformers_utils/configs/speculators`, `speculators` 0.9.0.
    """
    config, where = read_config(folder), folder / "config.json"
    kind = config.get("speculators_model_type")
    if kind is None:
        return config, False
    if kind not in ("eagle3", "peagle"):
        raise CheckpointError(f"{where}: speculators_model_type {shown(kind)} is neither 'eagle3' nor 'peagle'")
    layers = table(config, "transformer_layer_config", where)
    if not layers:
        raise CheckpointError(f"{where}: transformer_layer_config is missing")
    merged = {**layers, **{key: config[key] for key in _OF_SPECULATORS if config.get(key) is not None}}
    if "norm_before_residual" not in merged:
        log.warning("%s: norm_before_residual is missing; taken as true, as vLLM does", where)
    merged["quantization_config"] = config.get("quantization_config")  # the nested one is its target's (vllm-25883)
    return {"norm_before_residual": True, "draft_vocab_size": 32000, **merged}, True


def layer_prefixes(folder: Path, names: Collection[str]) -> tuple[str, ...]:
    """The prefix of each layer's tensors, as many as there are. Raises CheckpointError if one between is missing."""
    numbers = sorted({int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,9})\.", name))})
    middle = any(name.startswith("midlayer.") for name in names)
    if middle and 0 in numbers:
        raise CheckpointError(f"{folder}: tensors midlayer.* and layers.0.* are two first layers")
    stored = ([0] if middle else []) + numbers
    if not stored or stored != list(range(len(stored))):
        gap = next((i for i, number in enumerate(stored) if number != i), len(stored))
        raise CheckpointError(f"{folder}: missing tensor layers.{gap}.self_attn.q_proj.weight")
    first = ("midlayer",) if middle else ()
    return (*first, *(f"layers.{number}" for number in numbers))


def head_layers(config: Config, where: Path, names: Collection[str], prefixes: tuple[str, ...]) -> list[LayerSpec]:
    """A head's layers: sizes and rotation by its own config, norms of heads and biases by its tensors.

    RoPE is the head's, not the target's: a head for GPT-OSS may rotate by YaRN or not. Nor is its attention: a head
    for Kimi-K2 is compressed or not (vllm `deepseek_eagle3.py`). Raises CheckpointError for layers of which some have a
    window.
    """
    window = _window(config, len(prefixes), where)
    compressed = config.get("kv_lora_rank") is not None
    attention = (
        latent_attention({"rope_interleave": True, **config}, where) if compressed else attention_spec(config, where)
    )
    attention, dense = replace(attention, window=window), dense_spec(config, where)
    layers = []
    for prefix in prefixes:
        has = {part: f"{prefix}.{part}" in names for part in _OPTIONAL}
        layers.append(
            LayerSpec(
                replace(
                    attention,
                    qk_norm=has["self_attn.q_norm.weight"],
                    bias=attention.bias or has["self_attn.q_proj.bias"],
                    output_bias=has["self_attn.o_proj.bias"],
                ),
                replace(dense, bias=dense.bias or has["mlp.gate_proj.bias"]),
            )
        )
    return layers


def _window(config: Config, count: int, where: Path) -> int | None:
    """What the first `count` layers of a head see, by `layer_types` and `sliding_window`."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        if config.get("use_sliding_window"):
            raise CheckpointError(f"{where}: use_sliding_window of a draft head without layer_types is not supported")
        return None
    slides = [kind == SLIDING_ATTENTION for kind in kinds[:count]]
    if any(slides) and not all(slides):
        raise CheckpointError(f"{where}: layers of a draft head of which some have a window (layer_types)")
    return size(config, "sliding_window", where) if any(slides) else None


_OPTIONAL = ("self_attn.q_norm.weight", "self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.gate_proj.bias")


def stated(config: Config, keys: tuple[str, ...], tensor: str, names: Collection[str], where: Path) -> bool:
    """Whether a head has a part, by one of these keys or by its tensor. To deny what is there is an error."""
    said = [key for key in keys if flag(config, key, where)]
    denied = [key for key in keys if config.get(key) is False]
    if tensor in names and denied and not said:
        raise CheckpointError(f"{where}: {denied[0]} = false, but the file holds {tensor}")
    return bool(said) or tensor in names


def output_of(
    decoder: ModelConfig, vocab_size: int, target: ModelConfig, names: Collection[str], folder: Path
) -> OutputOf:
    """Whose matrix gives the logits: the head's own if it has one (vllm-27732), its embedding if tied, the target's.

    Source of a head without one: sgl-27908.
    """
    if OUTPUT in names:
        return "own"
    if vocab_size != decoder.vocab_size:
        raise CheckpointError(
            f"{folder}: missing tensor {OUTPUT}: the head proposes {vocab_size} of {decoder.vocab_size} tokens and"
            " cannot use the target's"
        )
    if decoder.tied_embeddings and EMBEDDING in names:
        return "embedding"
    if decoder.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{folder}: missing tensor {OUTPUT}: the head is {decoder.hidden_size} wide and cannot use the target's"
            f" of {target.hidden_size}"
        )
    return "target"


_INDICES, _MARKS = Plain(("I64",)), Plain(("BOOL", "U8", "I8", "I32", "I64"))


def vocab_params(decoder: ModelConfig, vocab_size: int, output: OutputOf, stored: Collection[str]) -> list[Param]:
    """Of a head's vocabulary of `vocab_size`: what its file has of output matrix, d2t, t2d and embedding."""
    hidden, wide, params = decoder.hidden_size, decoder.vocab_size, list[Param]()
    if output == "own":
        params.append(of_vocab("lm_head", OUTPUT, vocab_size, hidden))
    for name, rows, kinds in (("d2t", vocab_size, _INDICES), ("t2d", wide, _MARKS)):
        if name in stored:
            params.append(Param(name, (rows,), (CheckpointTensor(name, (rows,)),), "index", stored=kinds))
    if EMBEDDING in stored:
        params.append(Param(EMBEDDING, (wide, hidden), (CheckpointTensor(EMBEDDING, (wide, hidden)),), "table"))
    return params


def head_output(output: OutputOf, weights: Weights, embedding: Tensor, target: Target, parallel: Parallel) -> Linear:
    """The product that gives a head's logits. embedding: the head's whole one."""
    if output == "target":
        return target.lm_head
    return weights.linear("lm_head") if output == "own" else weights.linear_with(part_of(embedding, parallel))


def check_made_for(where: Path, draft: ModelConfig, target_hidden_size: int, target: ModelConfig) -> None:
    """Raise CheckpointError if a head was made for another target than this."""
    for what, draft_value, target_value in (
        ("vocab_size", draft.vocab_size, target.vocab_size),
        ("target_hidden_size", target_hidden_size, target.hidden_size),
    ):
        if draft_value != target_value:
            raise CheckpointError(
                f"{where}: this draft is for another target: its {what} is {draft_value}, the target has {target_value}"
            )


def no_offset(vocab_size: int, device: torch.device) -> Tensor:
    """`DraftVocab.offset` of a drafter that proposes the target's own tokens."""
    return torch.zeros(vocab_size, dtype=torch.int64, device=device)


def check_vocab(folder: Path, offset: Tensor, member: Tensor | None, vocab_size: int) -> None:
    """d2t must be an offset that maps the draft vocabulary one to one into the target's; t2d, if present, agrees."""
    target = torch.arange(offset.shape[0], device=offset.device) + offset
    outside = (target < 0) | (target >= vocab_size)
    if bool(outside.any()):
        index = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{folder}: tensor d2t maps draft token {index} to {int(target[index])}, outside [0, {vocab_size});"
            " d2t must hold offsets, not ids"
        )
    if target.unique().shape[0] != target.shape[0]:
        raise CheckpointError(f"{folder}: tensor d2t maps two draft tokens to one target token")
    if member is not None and not torch.equal(member.nonzero().flatten(), target.sort().values):
        raise CheckpointError(f"{folder}: tensor t2d does not mark the target tokens that d2t gives")
