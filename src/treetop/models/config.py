"""What a `config.json` says, read once into frozen values. Unknown or unsupported content is an error, not a guess."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from treetop.kernels.experts import Activation
from treetop.kernels.rope import RopeSpec
from treetop.kernels.routing import RouterSpec
from treetop.models.json_file import MOST_TOKENS, integers, read_object
from treetop.types.errors import CheckpointError, shown
from treetop.types.kv import KVFormat, paired

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer's attention. kv: what it keeps of a token. scale: of its scores. window: how far it sees, itself counted;
    None is everything.

    qk_norm: queries and keys have norms of their own, per head and before the rotation. bias: of q, k and v;
    output_bias: of the output. sinks: each head has a logit that takes part in its softmax and has no value.
    """

    num_heads: int
    kv: KVFormat
    rope: RopeSpec
    scale: float
    window: int | None = None
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    sinks: bool = False

    @property
    def head_dim(self) -> int:
        return self.kv.head_dim


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A gated feed-forward of one weight for all tokens."""

    inner_size: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Gated feed-forwards of which a router chooses `router.top_k` for each token.

    inner_size: of one expert. activation: of its gate and up. shared_inner: of a dense one beside them, which every
    token takes too; 0 is none. bias: experts have biases. stored: how a checkpoint holds them, see `models.experts`.
    """

    inner_size: int
    router: RouterSpec
    activation: Activation = Activation.SILU
    shared_inner: int = 0
    bias: bool = False
    stored: Literal["each", "stacked", "mxfp4"] = "each"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention and feed-forward, each behind its norm and added to the residual stream."""

    attention: AttentionSpec
    feed_forward: DenseSpec | ExpertSpec


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: what holds for all of it, and its layers, first to last."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises CheckpointError if it is missing or not a JSON object."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    return read_object(folder / "config.json")


def model_config(config: Config, where: Path, layers: Sequence[LayerSpec]) -> ModelConfig:
    """What a decoder's config says beside its layers. Raises CheckpointError naming the key that is wrong."""
    if config.get("quantization_config") is not None:
        raise CheckpointError(f"{where}: quantization_config: quantized weights are not supported, only 16 or 32 bits")
    return ModelConfig(
        vocab_size=size(config, "vocab_size", where),
        hidden_size=size(config, "hidden_size", where),
        norm_eps=real(config, "rms_norm_eps", where, 1e-6),
        max_positions=_max_positions(config, where),
        tied_embeddings=flag(config, "tie_word_embeddings", where),
        eos_token_ids=integers(config, "eos_token_id", where),
        layers=tuple(layers),
    )


def attention_spec(config: Config, where: Path) -> AttentionSpec:
    """Grouped-query attention by the usual keys."""
    heads = size(config, "num_attention_heads", where)
    hidden = size(config, "hidden_size", where)
    kv_heads = size(config, "num_key_value_heads", where, default=heads)
    head_dim = size(config, "head_dim", where, default=hidden // heads)
    if heads % kv_heads != 0 or head_dim % 2 != 0:
        raise CheckpointError(
            f"{where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads},"
            f" and head_dim {head_dim} even"
        )
    bias = flag(config, "attention_bias", where)
    rope = _rope_spec(config, head_dim, _max_positions(config, where), where)
    return AttentionSpec(heads, paired(kv_heads, head_dim), rope, head_dim**-0.5, bias=bias, output_bias=bias)


def dense_spec(config: Config, where: Path) -> DenseSpec:
    """A gated feed-forward by the usual keys."""
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act {shown(config['hidden_act'])} is not supported, only 'silu'")
    return DenseSpec(size(config, "intermediate_size", where), flag(config, "mlp_bias", where))


def num_layers(config: Config, where: Path) -> int:
    return size(config, "num_hidden_layers", where)


def _max_positions(config: Config, where: Path) -> int:
    return size(config, "max_position_embeddings", where, default=2048)


def _rope_spec(config: Config, head_dim: int, max_positions: int, where: Path) -> RopeSpec:
    """RoPE of both spellings: transformers 5 writes `rope_parameters`, earlier ones `rope_scaling` + `rope_theta`."""
    rope = table(config, "rope_parameters", where) or table(config, "rope_scaling", where)
    theta = real(rope, "rope_theta", where, real(config, "rope_theta", where, 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"{where}: rope_type {shown(kind)} is not supported, only default, linear, llama3")
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"{where}: partial_rotary_factor is not supported")
    low, high = real(rope, "low_freq_factor", where, 1.0), real(rope, "high_freq_factor", where, 4.0)
    if kind == "llama3" and low >= high:
        raise CheckpointError(f"{where}: high_freq_factor {high} must be greater than low_freq_factor {low}")
    return RopeSpec(
        head_dim=head_dim,
        theta=theta,
        kind=kind,
        factor=real(rope, "factor", where, 1.0),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=size(rope, "original_max_position_embeddings", where, default=max_positions),
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


def size(config: Config, key: str, where: Path, default: int | None = None) -> int:
    return int(_bounded(config, key, where, default, "an integer", (int,)))


def real(config: Config, key: str, where: Path, default: float) -> float:
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
        raise CheckpointError(f"{where}: {key} must be {what} from {least} to {most}, got {shown(value)}")
    return value


def flag(config: Config, key: str, where: Path) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} must be true or false, got {shown(value)}")
    return bool(value)


def table(config: Config, key: str, where: Path) -> Config:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: {key} must be an object, got {shown(value)}")
    return value or {}
