"""What a `config.json` says, read once into frozen values. Unknown or unsupported content is an error, not a guess."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treetop.kernels.rope import RopeSpec
from treetop.models.json_file import MOST_TOKENS, integers, read_object
from treetop.types.errors import CheckpointError

Config = Mapping[str, Any]

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
WINDOWED = "WindowedLlamaForCausalLM"
"""Llama with `layer_types` and `sliding_window`: treetop's own test model, `debug/two_group.py`."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama-shaped decoder: sizes, norms and positions. windows: how far each layer sees, None for everything.

    qk_norm: queries and keys have norms of their own, per head and before the rotation.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """An EAGLE-3 head: its one decoder layer, its vocabulary, and which target features it reads.

    aux_inputs: indices i, each meaning the residual stream entering target layer i; the number of target layers means
    the last layer's output, before the final norm.
    """

    layer: ModelSpec
    draft_vocab_size: int
    target_hidden_size: int
    aux_inputs: tuple[int, ...]
    norm_before_residual: bool


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises CheckpointError if it is missing or not a JSON object."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    return read_object(folder / "config.json")


def decoder_spec(config: Config, where: Path) -> ModelSpec:
    """The sizes of a Llama-shaped decoder. Raises CheckpointError naming the key that is missing or wrong."""
    if config.get("quantization_config") is not None:
        raise CheckpointError(f"{where}: quantization_config: quantized weights are not supported, only 16 or 32 bits")
    heads = _size(config, "num_attention_heads", where)
    hidden = _size(config, "hidden_size", where)
    kv_heads = _size(config, "num_key_value_heads", where, default=heads)
    head_dim = _size(config, "head_dim", where, default=hidden // heads)
    if heads % kv_heads != 0 or head_dim % 2 != 0:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads},"
            f" and head_dim {head_dim} even"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act {config['hidden_act']!r:.200} is not supported, only 'silu'")
    max_positions = _size(config, "max_position_embeddings", where, default=2048)
    num_layers = _size(config, "num_hidden_layers", where)
    return ModelSpec(
        vocab_size=_size(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", where),
        num_layers=num_layers,
        num_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_real(config, "rms_norm_eps", where, 1e-6),
        rope=_rope_spec(config, head_dim, max_positions, where),
        max_positions=max_positions,
        tied_embeddings=_flag(config, "tie_word_embeddings", where),
        attention_bias=_flag(config, "attention_bias", where),
        mlp_bias=_flag(config, "mlp_bias", where),
        eos_token_ids=integers(config, "eos_token_id", where),
        windows=_windows(config, num_layers, where),
        qk_norm=config.get("architectures") == [QWEN3],
    )


def target_spec(folder: Path) -> ModelSpec:
    """Spec of a target checkpoint. Raises CheckpointError for an architecture that treetop does not run."""
    config = read_config(folder)
    architectures = config.get("architectures") or ["missing"]
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise CheckpointError(
            f"{folder}/config.json: architectures must be a list of names, got {architectures!r:.200}"
        )
    if architectures not in ([LLAMA], [QWEN3], [WINDOWED]):
        raise CheckpointError(
            f"{folder}/config.json: architecture {', '.join(architectures)} is not supported, only {LLAMA} and {QWEN3}"
        )
    if architectures == [QWEN3] and config.get("use_sliding_window"):
        raise CheckpointError(f"{folder}/config.json: use_sliding_window = true is not supported with {QWEN3}")
    return decoder_spec(config, folder / "config.json")


def eagle3_spec(folder: Path, target: ModelSpec) -> Eagle3Spec:
    """Spec of an EAGLE-3 head for `target`.

    The layer count is not read: it is often the target's (sgl-33966); a head has one layer. Where the auxiliary
    layers stand in the config decides what the numbers mean, and the default is the original repository's
    (`formats.md`, 3b). Raises CheckpointError if the head was made for another target.
    """
    config = read_config(folder)
    where = folder / "config.json"
    layer = decoder_spec({**config, "num_hidden_layers": 1}, where)
    for key, value in (("norm_output", False), ("norm_before_fc", False), ("fc_norm", False), ("use_aux_norm", False)):
        if config.get(key, value) != value:
            raise CheckpointError(f"{where}: {key} = {config[key]!r:.200} is not supported")
    eagle = _table(config, "eagle_config", where)
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(f"{where}: eagle_config.use_aux_hidden_state = false is not supported")
    spec = Eagle3Spec(
        layer=layer,
        draft_vocab_size=_size(config, "draft_vocab_size", where, default=layer.vocab_size),
        target_hidden_size=_size(config, "target_hidden_size", where, default=layer.hidden_size),
        aux_inputs=_aux_inputs(config, eagle, target.num_layers, where),
        norm_before_residual=_flag(config, "norm_before_residual", where),
    )
    for what, draft_value, target_value in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("target_hidden_size", spec.target_hidden_size, target.hidden_size),
    ):
        if draft_value != target_value:
            raise CheckpointError(
                f"{where}: this draft is for another target: its {what} is {draft_value}, the target has {target_value}"
            )
    return spec


def _aux_inputs(config: Config, eagle: Config, num_layers: int, where: Path) -> tuple[int, ...]:
    """Input indices of the auxiliary layers; the nested key counts layer outputs, hence the + 1 (sgl-25454)."""
    key = "eagle_aux_hidden_state_layer_ids"
    if eagle.get(key) is not None:
        inputs = tuple(i + 1 for i in integers(eagle, key, where))
    elif config.get(key) is not None:
        inputs = integers(config, key, where)
    else:
        inputs = (2, num_layers // 2, num_layers - 3)
    if not inputs or any(not 0 <= i <= num_layers for i in inputs):
        raise CheckpointError(f"{where}: auxiliary layer inputs {inputs} lie outside the target's 0 .. {num_layers}")
    return inputs


def _windows(config: Config, num_layers: int, where: Path) -> tuple[int | None, ...]:
    """Each layer's window; only the windowed architecture has any."""
    if config.get("architectures") != [WINDOWED]:
        return (None,) * num_layers
    window, kinds = _size(config, "sliding_window", where), config.get("layer_types")
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(known):
        raise CheckpointError(f"{where}: layer_types must name {' or '.join(known)} for each of {num_layers} layers")
    return tuple(known[kind] for kind in kinds)


def _rope_spec(config: Config, head_dim: int, max_positions: int, where: Path) -> RopeSpec:
    """RoPE of both spellings: transformers 5 writes `rope_parameters`, earlier ones `rope_scaling` + `rope_theta`."""
    rope = _table(config, "rope_parameters", where) or _table(config, "rope_scaling", where)
    theta = _real(rope, "rope_theta", where, _real(config, "rope_theta", where, 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"{where}: rope_type {kind!r:.200} is not supported, only default, linear, llama3")
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor is not supported")
    low, high = _real(rope, "low_freq_factor", where, 1.0), _real(rope, "high_freq_factor", where, 4.0)
    if kind == "llama3" and low >= high:
        raise CheckpointError(f"{where}: high_freq_factor {high} must be greater than low_freq_factor {low}")
    return RopeSpec(
        head_dim=head_dim,
        theta=theta,
        kind=kind,
        factor=_real(rope, "factor", where, 1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_size(rope, "original_max_position_embeddings", where, default=max_positions),
    )


_MOST_HEADS, _MOST_WIDTH, _MOST_POSITIONS = 2**10, 2**20, 2**31
_BOUNDS: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 2**10),
    "num_attention_heads": (1, _MOST_HEADS),
    "num_key_value_heads": (1, _MOST_HEADS),
    "head_dim": (2, 2**12),
    "hidden_size": (1, _MOST_WIDTH),
    "target_hidden_size": (1, _MOST_WIDTH),
    "intermediate_size": (1, _MOST_WIDTH),
    "vocab_size": (1, MOST_TOKENS),
    "draft_vocab_size": (1, MOST_TOKENS),
    "max_position_embeddings": (1, _MOST_POSITIONS),
    "original_max_position_embeddings": (1, _MOST_POSITIONS),
    "sliding_window": (1, _MOST_POSITIONS),
    "rms_norm_eps": (1e-30, 1.0),
    "rope_theta": (1.0, 1e15),
    "factor": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
}
"""Least and most of every number that is read. Real models lie far within; beyond, sizes of tensors overflow."""


def _size(config: Config, key: str, where: Path, default: int | None = None) -> int:
    return int(_bounded(config, key, where, default, "an integer", (int,)))


def _real(config: Config, key: str, where: Path, default: float) -> float:
    return float(_bounded(config, key, where, default, "a number", (int, float)))


def _bounded(
    config: Config, key: str, where: Path, default: float | None, what: str, kinds: tuple[type[int | float], ...]
) -> int | float:
    """The number at `key`, or the default. Raises CheckpointError unless it is of its kind and within its bounds."""
    value = config.get(key)
    if value is None:
        value = default
    least, most = _BOUNDS[key]
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        raise CheckpointError(f"{where}: {key} must be {what} from {least} to {most}, got {reprlib.repr(value)}")
    return value


def _flag(config: Config, key: str, where: Path) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} must be true or false, got {reprlib.repr(value)}")
    return bool(value)


def _table(config: Config, key: str, where: Path) -> Config:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} must be an object, got {reprlib.repr(value)}")
    return value or {}
