"""What a `config.json` says, read once into frozen values. Unknown or unsupported content is an error, not a guess."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from treetop.kernels.experts import Activation
from treetop.kernels.gate import Gate
from treetop.kernels.rope import DynamicNTK, Linear, Llama3, RopeSpec, Yarn
from treetop.kernels.routing import RouterSpec
from treetop.models.json_file import MOST_TOKENS, integers, read_object
from treetop.types.errors import CheckpointError, ConfigError, shown
from treetop.types.kv import KVFormat, paired
from treetop.weights.registry import read_formats
from treetop.weights.rules import PLAIN, StoredFormats

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer's attention. kv: what it keeps of a token. scale: of its scores. window: how far it sees, itself counted;
    None is everything.

    qk_norm: queries and keys have norms of their own, per head and before the rotation; whole_qk_norm: so they have,
    each one over all heads. bias: of q, k and v; output_bias: of the output. sinks: each head has a logit that takes
    part in its softmax and has no value. joined: a checkpoint holds q, k and v as one tensor.
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
    whole_qk_norm: bool = False
    joined: bool = False

    @property
    def head_dim(self) -> int:
        return self.kv.head_dim


def attention_of_rank(spec: AttentionSpec, size: int) -> AttentionSpec:
    """What one of `size` ranks computes of a layer's attention: an equal part of its heads, whole groups of them.

    With more ranks than KV heads each has one, which others have too. Raises ConfigError if they cannot be divided.
    """
    heads, kv = spec.num_heads, spec.kv.heads
    if spec.whole_qk_norm and size > 1:
        raise ConfigError(f"--tp-size {size}: its norms of queries and keys are over all heads; use --tp-size 1")
    if heads % size != 0 or (kv % size != 0 and size % kv != 0):
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
        raise ConfigError(f"--tp-size {size}: {heads} heads with {kv} of keys and values cannot be divided; {fits} can")
    return replace(spec, num_heads=heads // size, kv=replace(spec.kv, heads=max(kv // size, 1)))


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A gated feed-forward of one weight for all tokens. joined: a checkpoint holds gate and up as one tensor."""

    inner_size: int
    bias: bool = False
    gate: Gate = "silu"
    joined: bool = False


@dataclass(frozen=True, slots=True)
class NormNames:
    """How a checkpoint names a layer's norms: of what attention and feed-forward read, and of what they add.

    None where there is no norm.
    """

    attention: str | None = "input_layernorm"
    feed_forward: str | None = "post_attention_layernorm"
    attention_output: str | None = None
    feed_forward_output: str | None = None


ExpertLayout = Literal["each", "stacked", "stacked rows", "stacked halves", "each w", "each of Hy3"]
"""How a checkpoint holds experts, see `models.experts`."""


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Gated feed-forwards of which a router chooses `router.top_k` for each token.

    inner_size: of one expert. activation: of its gate and up. shared_inner: of a dense one beside them, which every
    token takes too; 0 is none. bias: experts have biases. stored: how a checkpoint holds them.
    """

    inner_size: int
    router: RouterSpec
    activation: Activation = Activation.SILU
    shared_inner: int = 0
    bias: bool = False
    stored: ExpertLayout = "each"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention and feed-forward, each behind its norm and added to the residual stream, perhaps through another."""

    attention: AttentionSpec
    feed_forward: DenseSpec | ExpertSpec
    norms: NormNames = NormNames()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: what holds for all of it, and its layers, first to last.

    unit_offset: a norm multiplies by 1 + its weight. embedding_scale: embeddings are multiplied by it as the compute
    dtype rounds it. residual_scale: what attention and feed-forward add is multiplied by it. logits_scale: so are
    logits. formats: of its weights, as its own checkpoint says.
    """

    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    unit_offset: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    formats: StoredFormats = PLAIN

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.feed_forward, ExpertSpec) for layer in self.layers)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises CheckpointError if it is missing or not a JSON object."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    return read_object(folder / "config.json")


def model_config(config: Config, where: Path, layers: Sequence[LayerSpec]) -> ModelConfig:
    """What a decoder's config says beside its layers. Raises CheckpointError naming the key that is wrong."""
    return ModelConfig(
        vocab_size=size(config, "vocab_size", where),
        hidden_size=size(config, "hidden_size", where),
        norm_eps=real(config, "rms_norm_eps", where, 1e-6),
        max_positions=max(_max_positions(config, where), *(_reach(layer.attention.rope) for layer in layers)),
        tied_embeddings=flag(config, "tie_word_embeddings", where),
        eos_token_ids=integers(config, "eos_token_id", where),
        layers=tuple(layers),
        formats=read_formats(config, where),
    )


def attention_spec(
    config: Config,
    where: Path,
    *,
    layer_type: str | None = None,
    rotary_factor: float | None = None,
    interleaved: bool = False,
) -> AttentionSpec:
    """Grouped-query attention by the usual keys. The rest as in `rope_spec`."""
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
    rope = rope_spec(
        config, head_dim, where, layer_type=layer_type, rotary_factor=rotary_factor, interleaved=interleaved
    )
    return AttentionSpec(heads, paired(kv_heads, head_dim), rope, head_dim**-0.5, bias=bias, output_bias=bias)


def dense_spec(config: Config, where: Path) -> DenseSpec:
    """A gated feed-forward by the usual keys."""
    require_value(config, "hidden_act", "silu", where)
    return DenseSpec(size(config, "intermediate_size", where), flag(config, "mlp_bias", where))


FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


def layer_types(config: Config, where: Path, default: Callable[[int], str] | None = None) -> list[str]:
    """The type of every layer: `layer_types`, or the default by index; without one the key must be there."""
    count, listed, known = num_layers(config, where), config.get("layer_types"), (FULL_ATTENTION, SLIDING_ATTENTION)
    if listed is None and default is not None:
        return [default(index) for index in range(count)]
    if not isinstance(listed, list) or len(listed) != count or any(kind not in known for kind in listed):
        raise CheckpointError(f"{where}: layer_types must name {' or '.join(known)} for each of {count} layers")
    return listed


def require_value(config: Config, key: str, value: object, where: Path) -> None:
    """Raises CheckpointError if a key is there with another value than the only one that is supported."""
    found = config.get(key)
    if found is not None and found != value:
        raise CheckpointError(f"{where}: {key} = {shown(found)} is not supported, only {value!r}")


def num_experts_per_token(config: Config, most: int, where: Path) -> int:
    """most: experts that a token can choose among."""
    chosen = size(config, "num_experts_per_tok", where)
    if chosen > most:
        raise CheckpointError(f"{where}: num_experts_per_tok {chosen} exceeds the {most} experts of a token's choice")
    return chosen


def num_layers(config: Config, where: Path) -> int:
    return size(config, "num_hidden_layers", where)


def _reach(rope: RopeSpec) -> int:
    """Positions that a scaled rotation was made for, where a config says less; 0 where it does not say."""
    scaling = rope.scaling
    if isinstance(scaling, Yarn):
        return int(scaling.factor * scaling.original_max_position)
    return int(scaling.factor * scaling.max_position) if isinstance(scaling, DynamicNTK) else 0


def _max_positions(config: Config, where: Path) -> int:
    return size(config, "max_position_embeddings", where, default=2048)


def rope_spec(
    config: Config,
    head_dim: int,
    where: Path,
    *,
    layer_type: str | None = None,
    rotary_factor: float | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """RoPE of both spellings: transformers 5 writes `rope_parameters`, earlier ones `rope_scaling` + `rope_theta`.

    layer_type: whose part of `rope_parameters` counts, where layers differ. rotary_factor: the family's default share
    of a head that turns; None where the family turns all of it. interleaved: see `RopeSpec`.
    """
    rope = _rope_table(config, layer_type, where)
    longrope = {"long_factor", "short_factor"} if rope.get("rope_type", rope.get("type")) == "longrope" else set()
    for key in sorted(set(rope) - set(_ROPE_KEYS.split()) - longrope):  # longrope is refused by its type
        raise CheckpointError(f"{where}: {key} of the rotary embedding is not supported")
    theta = real(rope, "rope_theta", where, real(config, "rope_theta", where, 10000.0))
    if rotary_factor is None:
        share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
        if share != 1:
            raise CheckpointError(f"{where}: partial_rotary_factor {shown(share)} is not supported with this model")
        return RopeSpec(head_dim, theta, _rope_scaling(config, rope, head_dim, theta, where), None, interleaved)
    of_config = real(config, "partial_rotary_factor", where, rotary_factor)
    share = real(rope, "partial_rotary_factor", where, of_config)
    turned = int(head_dim * share)
    if turned < 2 or turned % 2 != 0:
        raise CheckpointError(
            f"{where}: partial_rotary_factor {share} must turn an even number of {head_dim} dimensions, not {turned}"
        )
    return RopeSpec(head_dim, theta, _rope_scaling(config, rope, turned, theta, where), turned, interleaved)


_ROPE_KEYS = (
    "rope_theta rope_type type partial_rotary_factor factor low_freq_factor high_freq_factor truncate beta_fast"
    " beta_slow attention_factor mscale mscale_all_dim original_max_position_embeddings finetuned"
    " mrope_section mrope_interleaved"
)
"""What may stand in a table of RoPE. `finetuned` says nothing of the arithmetic, and m-rope nothing of that of text,
whose tokens have the same position in time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1)."""


def _rope_table(config: Config, layer_type: str | None, where: Path) -> Config:
    """The one table that counts, of either spelling."""
    new, old = table(config, "rope_parameters", where), table(config, "rope_scaling", where)
    nested = {key: value for key, value in new.items() if isinstance(value, dict)}
    if nested:
        if len(nested) < len(new):
            raise CheckpointError(f"{where}: rope_parameters has parts for types of layers and keys beside them")
        if layer_type not in nested:
            raise CheckpointError(
                f"{where}: rope_parameters has parts for {shown(', '.join(nested))}, but"
                f" {'none for ' + layer_type if layer_type else 'all layers of this model rotate alike'}"
            )
        new = nested[layer_type]
    if new and old and new != old:
        raise CheckpointError(f"{where}: rope_parameters and rope_scaling differ; remove one of them")
    return new or old


def _rope_scaling(
    config: Config, rope: Config, turned: int, theta: float, where: Path
) -> Linear | Llama3 | Yarn | DynamicNTK | None:
    """turned: dimensions of a head that turn. Raises CheckpointError for a kind that is not supported."""
    kind, positions = rope.get("rope_type", rope.get("type", "default")), _max_positions(config, where)
    key = "original_max_position_embeddings"
    original = size(config if config.get(key) is not None else rope, key, where, default=positions)
    if kind in ("default", "mrope"):
        return None
    if kind == "linear":
        return Linear(real(rope, "factor", where))
    if kind == "llama3":
        low, high = real(rope, "low_freq_factor", where), real(rope, "high_freq_factor", where)
        if low >= high:
            raise CheckpointError(f"{where}: high_freq_factor {high} must be greater than low_freq_factor {low}")
        return Llama3(real(rope, "factor", where), low, high, original)
    if kind == "dynamic" and turned > 2:
        return DynamicNTK(real(rope, "factor", where), positions)
    if kind == "yarn" and theta > 1:
        return _yarn(rope, real(rope, "factor", where, positions / original), original, where)
    raise CheckpointError(
        f"{where}: rope_type {shown(kind)} is not supported, only default, linear, llama3, yarn (rope_theta above 1)"
        " and dynamic (more than 2 dimensions that turn)"
    )


def _yarn(rope: Config, factor: float, original: int, where: Path) -> Yarn:
    """The attention factor is what the table says, or follows from the factor and, if both are there, its mscales."""
    fast, slow = real(rope, "beta_fast", where, 32.0), real(rope, "beta_slow", where, 1.0)
    if fast < slow:
        raise CheckpointError(f"{where}: beta_fast {fast} must be no less than beta_slow {slow}")

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scales = real(rope, "mscale", where, 0.0), real(rope, "mscale_all_dim", where, 0.0)
    attention = grown(scales[0]) / grown(scales[1]) if all(scales) else grown(1.0)
    truncate = rope.get("truncate") is None or flag(rope, "truncate", where)
    return Yarn(factor, original, fast, slow, truncate, real(rope, "attention_factor", where, attention))


_MOST_HEADS, _MOST_WIDTH, _MOST_POSITIONS, _MOST_EXPERTS = 2**10, 2**20, 2**31, 2**10
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
    "max_window_layers": (0, 2**10),
    "sliding_window_pattern": (1, 2**10),
    "query_pre_attn_scalar": (1e-6, 1e6),
    "rope_local_base_freq": (1.0, 1e15),
    "num_experts": (1, _MOST_EXPERTS),
    "num_local_experts": (1, _MOST_EXPERTS),
    "n_routed_experts": (1, _MOST_EXPERTS),
    "num_experts_per_tok": (1, _MOST_EXPERTS),
    "n_shared_experts": (0, 2**6),
    "n_group": (1, _MOST_EXPERTS),
    "topk_group": (1, _MOST_EXPERTS),
    "moe_intermediate_size": (1, _MOST_WIDTH),
    "decoder_sparse_step": (1, 2**10),
    "first_k_dense_replace": (0, 2**10),
    "num_nextn_predict_layers": (0, 2**6),
    "routed_scaling_factor": (1e-6, 1e6),
    "swiglu_limit": (1e-6, 1e6),
    "swiglu_alpha": (1e-6, 1e6),
    "embedding_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "no_rope_layer_interval": (1, 2**10),
    "rotary_dim": (2, 2**12),
    "num_shared_experts": (0, 2**6),
    "router_scaling_factor": (1e-6, 1e6),
    "rms_norm_eps": (1e-30, 1.0),
    "rope_theta": (1.0, 1e15),
    "factor": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e3),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "partial_rotary_factor": (1e-6, 1.0),
}
"""Least and most of every number that is read. Real models lie far within; beyond, sizes of tensors overflow."""


def size(config: Config, key: str, where: Path, default: int | None = None) -> int:
    return int(_bounded(config, key, where, default, "an integer", (int,)))


def real(config: Config, key: str, where: Path, default: float | None = None) -> float:
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
