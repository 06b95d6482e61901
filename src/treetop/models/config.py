"""What a `config.json` says, read once into frozen values. Unknown or unsupported content is an error, not a guess."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size, table
from treetop.checkpoints.json_file import integers, read_object
from treetop.kernels.gate import Gate
from treetop.kernels.moe.experts import Activation
from treetop.kernels.moe.routes import RouterSpec
from treetop.kernels.rope import RopeSpec
from treetop.models.mixers.recurrences import ConvSpec, KimiSpec, LightningSpec, MambaSpec, RecurrentSpec
from treetop.models.rope_config import max_positions, reach, rope_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.ids import GroupName
from treetop.types.kv import KVFormat, paired
from treetop.types.state import StateGroup
from treetop.weights.registry import read_formats
from treetop.weights.rules import PLAIN, StoredFormats


@dataclass(frozen=True, slots=True)
class OutputGate:
    """What attention gives is multiplied by an activation of a product with what attention reads: a number for each
    head, or with per_number for each of its numbers.

    in_queries: a checkpoint holds it with the queries: of each head its query, then its gate.
    """

    kind: Literal["sigmoid", "softplus"]
    per_number: bool = False
    in_queries: bool = False


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Compressed attention (MLA): a token leaves a latent, of which every head would make the part of its key that does
    not turn, and its value, and beside it the part with RoPE, which all heads share.

    rank: of the latent.
    qk_nope_head_dim: numbers of a head's query that without RoPE.
    value_dim: of a head's value.
    query_rank: of the latent that queries are made of; None where they are made of the hidden state.
    norm_eps: of the norms of both latents.
    gate: what a head gives is multiplied by the sigmoid of a product with the layer's input, one number a head.
    scale: what is kept of the latent is multiplied by it.
    """

    rank: int
    qk_nope_head_dim: int
    value_dim: int
    query_rank: int | None
    norm_eps: float
    gate: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """The indexer of sparse attention (DSA), by whose scores a query attends to the best of the keys it may see.

    num_heads, head_dim: of the indexer.
    top_k: keys that a query attends to at most.
    interleaved: what has RoPE of its heads turns in pairs of neighbours.
    norm_eps: of the norm of its keys.
    shares: the layer whose choice counts, where the layer has no indexer of its own.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    norm_eps: float
    shares: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A layer's attention.

    kv: what it keeps of a token.
    scale: of its scores.
    window: how far it sees, itself counted; None is everything.
    chunked: it sees its own chunk of `window` positions alone.
    qk_norm: queries and keys have norms of their own, per head.
    norm_weights: whether these are multiplied by their weights before the rotation or after it; None where they have
        none. What they divide by is the same before and after.
    whole_qk_norm: so they have, each one over all heads.
    value_norm: values have norms too, without a weight.
    bias: of q, k and v.
    output_bias: of the output.
    sinks: each head has a logit that takes part in its softmax and has no value, stored as sink_name.
    joined: a checkpoint holds q, k and v as one tensor, of so many parts one below the other, each of which has its
        share of the heads' q, then of k and of v; 0 where they are three.
    parts_apart: blocks of its scales begin anew in each part; else they run through all rows as these are stored.
    gate: of the output.
    value_dim: of a value, where it is narrower than a key; it is kept as wide.
    value_scale: what values are multiplied by.
    score_cap: scores are its tanh(scores / cap).
    values_of_keys: v is what k is before norm and rotation.
    kv_sharing_layer: whose K/V it attends to, where it has none of its own.
    latent: it is compressed; then `rope` is of what has RoPE of a head alone.
    index: it is sparse, and compressed.
    """

    num_heads: int
    kv: KVFormat
    rope: RopeSpec
    scale: float
    window: int | None = None
    chunked: bool = False
    qk_norm: bool = False
    norm_weights: Literal["before", "after"] | None = "before"
    bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    sink_name: str = "sinks"
    whole_qk_norm: bool = False
    joined: int = 0
    parts_apart: bool = False
    value_norm: bool = False
    gate: OutputGate | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    score_cap: float | None = None
    values_of_keys: bool = False
    kv_sharing_layer: int | None = None
    latent: LatentSpec | None = None
    index: IndexSpec | None = None

    @property
    def head_dim(self) -> int:
        """Of what is kept."""
        return self.kv.head_dim

    @property
    def output_dim(self) -> int:
        """Numbers of a head that the output's product reads."""
        if self.latent is not None:
            return self.latent.value_dim
        return self.head_dim if self.value_dim is None else self.value_dim

    def source(self, layer: int) -> int:
        """Whose K/V it attends to, itself the layer at this index."""
        return layer if self.kv_sharing_layer is None else self.kv_sharing_layer


def with_indexer(spec: AttentionSpec, index: IndexSpec | None) -> AttentionSpec:
    """Compressed attention to what an indexer of the layer's own chooses, whose keys are kept; to all with None."""
    kept = 0 if index is None else index.head_dim
    kv = replace(spec.kv, head_dim=spec.kv.head_dim - spec.kv.index_dim + kept, index_dim=kept)
    return replace(spec, kv=kv, index=index)


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


LinearStorage = Literal["by key head", "by part", "by tensor"]
"""How a checkpoint holds the inputs of linear attention, see `models.linear_attention`."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A layer's linear attention: a state by row instead of keys and values. See `kernels.recurrent.states`.

    key_heads, heads: of queries and keys, and of values, of which several read one key.
    key_dim, value_dim: of a head.
    taps: of the convolution of queries, keys and values; 1 is none.
    stored: how a checkpoint holds what it reads.
    delta, per_channel: see `StateGroup`.
    of_beta: beta is multiplied by it.
    norm_eps: of the norm of its output; None for that of the model's norms.
    """

    block: ClassVar[str] = "linear_attn"
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    stored: LinearStorage = "by part"
    delta: bool = True
    per_channel: bool = False
    of_beta: float = 1.0
    norm_eps: float | None = None

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values, side by side in the convolution's channels."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution; 0 without one."""
        return sum(self.widths) if self.taps > 1 else 0

    def of_rank(self, size: int) -> "LinearSpec":
        """What one of `size` ranks computes: whole key heads, with the values that read them.

        Raises ConfigError if they cannot be divided.
        """
        if self.key_heads % size != 0:
            fits = [n for n in range(1, self.key_heads + 1) if self.key_heads % n == 0]
            raise ConfigError(
                f"--tp-size {size}: {self.key_heads} key heads of linear attention cannot be divided; {fits} can"
            )
        return replace(self, key_heads=self.key_heads // size, heads=self.heads // size)

    def state(self, name: GroupName, num_layers: int) -> StateGroup:
        """What so many layers of it keep of a row."""
        return StateGroup(
            name,
            num_layers,
            channels=self.channels,
            taps=self.taps,
            heads=self.heads,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            delta=self.delta,
            per_channel=self.per_channel,
        )


@dataclass(frozen=True, slots=True)
class BothSpec:
    """Attention and a recurrence of the same normed input, added.

    of_input, of_output: what attention's input and output are multiplied by.
    """

    attention: AttentionSpec
    recurrent: MambaSpec
    of_input: float = 1.0
    of_output: float = 1.0


RecurrentKind = LinearSpec | ConvSpec | KimiSpec | LightningSpec | MambaSpec


@dataclass(frozen=True, slots=True)
class AbsentSpec:
    """Stands where a layer has no mixer, or no feed-forward, but the other alone."""


Mixer = AttentionSpec | RecurrentKind | BothSpec | AbsentSpec


DenseLayout = Literal["apart", "joined", "joined of Granite"]


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A gated feed-forward of one weight for all tokens. stored: how a checkpoint holds it, see `models.layers`.

    limit: see `Activation`.
    of_gate, of_output: what the gate before its activation, and what it gives, are multiplied by.
    """

    inner_size: int
    bias: bool = False
    gate: Gate = "silu"
    stored: DenseLayout = "apart"
    limit: float | None = None
    of_gate: float = 1.0
    of_output: float = 1.0


Ungated = Literal["relu2", "gelu", "gelu_tanh", "xielu"]
"""The activation of a feed-forward without a gate, see `models.ungated`."""


@dataclass(frozen=True, slots=True)
class UngatedSpec:
    """A feed-forward without a gate: down(activation(up(x))).

    names: what a checkpoint calls up and down.
    """

    inner_size: int
    activation: Ungated
    bias: bool = False
    names: tuple[str, str] = ("up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class NormNames:
    """How a checkpoint names a layer's norms: of what attention and feed-forward read, and of what they add.

    None where there is no norm.
    """

    attention: str | None = "input_layernorm"
    feed_forward: str | None = "post_attention_layernorm"
    attention_output: str | None = None
    feed_forward_output: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How a checkpoint holds a layer's feed-forward of experts, and what it calls it.

    tensors: three matrices an expert; or stacked, one tensor of all experts' gates and ups and one of what follows; or
        apart, one of the gates, one of the ups and one of what follows.
    block: of the feed-forward within its layer; "" is the layer itself.
    router, score: within the block, its matrix and the correction of its choices.
    each: of an expert, gate, up and down.
    stacked: within the block, of stacked tensors.
    by_rows: a stacked matrix is [out, in], as a product's weight, and not [in, out].
    in_turn: its gates and ups lie in turn, and not one half after the other.
    score_rows: the correction is [1, experts].
    shared: the shared experts.
    shared_in_layer: they stand beside the block and not in it.
    shared_stored: how they are held, see `DenseSpec`.
    """

    tensors: Literal["each", "stacked", "apart"] = "each"
    block: str = "mlp"
    router: str = "gate"
    score: str = "gate.e_score_correction_bias"
    each: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    by_rows: bool = False
    in_turn: bool = False
    score_rows: bool = False
    shared: str = "shared_experts"
    shared_in_layer: bool = False
    shared_stored: DenseLayout = "apart"


EACH = ExpertLayout()


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Gated feed-forwards of which a router chooses `router.top_k` for each token.

    inner_size: of one expert.
    activation: of its gate and up.
    shared_inner: of a dense one beside them, which every token takes too; 0 is none.
    shared_limit: of its activation.
    shared_gate: what it gives is multiplied by the sigmoid of a product with the token, one number.
    bias: experts have biases.
    latent: what experts read and give is so wide, between two products of all; 0 is as wide as the layer.
    stored: how a checkpoint holds them.
    """

    inner_size: int
    router: RouterSpec
    activation: Activation = Activation.SILU
    shared_inner: int = 0
    shared_limit: float | None = None
    shared_gate: bool = False
    bias: bool = False
    latent: int = 0
    stored: ExpertLayout = EACH


@dataclass(frozen=True, slots=True)
class ParallelMoESpec:
    """Gemma 4's: a dense feed-forward, and experts that read the residual stream through norms of their own, added."""

    dense: DenseSpec
    experts: ExpertSpec


@dataclass(frozen=True, slots=True)
class ShortcutSpec:
    """LongCat's: a dense feed-forward, and experts that read the same and whose sum is added behind the next layer."""

    dense: DenseSpec
    experts: ExpertSpec


FeedForwardSpec = DenseSpec | UngatedSpec | ExpertSpec | ParallelMoESpec | ShortcutSpec | AbsentSpec
NormKind = Literal["rms", "layer", "layer with bias"]
"""x / rms(x), or (x - mean(x)) / rms(x - mean(x)), times a weight, perhaps plus a bias."""


@dataclass(frozen=True, slots=True)
class NormedStream:
    """A layer whose halves leave a * normed + b * added: what they read goes on, and not what entered the norm.

    of_mixer, of_feed_forward: (a, b) of each half.
    """

    of_mixer: tuple[float, float]
    of_feed_forward: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A mixer and a feed-forward, each behind its norm and added to the residual stream, perhaps through another.

    scaled: what the layer leaves is multiplied by a number of its own.
    side_by_side: the feed-forward reads what enters the layer: through its own norm, or, without one, what attention
        reads.
    normed_stream: the residual stream is what a half has read, see there; None: what has entered its norm.
    output_norm_eps: of the norms of what attention and feed-forward add; None for the model's.
    """

    mixer: Mixer
    feed_forward: FeedForwardSpec
    norms: NormNames = NormNames()
    scaled: bool = False
    side_by_side: bool = False
    normed_stream: NormedStream | None = None
    output_norm_eps: float | None = None

    @property
    def attends(self) -> AttentionSpec | None:
        """Its attention, if its mixer is that."""
        if isinstance(self.mixer, BothSpec):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, AttentionSpec) else None

    @property
    def attention(self) -> AttentionSpec:
        """Its attention, where every layer has it: of a draft. Raises ConfigError for linear attention."""
        if not isinstance(self.mixer, AttentionSpec):
            raise ConfigError("linear attention: a layer that keeps keys and values is needed here")
        return self.mixer

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """What keeps a state by row, if its mixer is that, or has it."""
        if isinstance(self.mixer, BothSpec):
            return self.mixer.recurrent
        return None if isinstance(self.mixer, AttentionSpec | AbsentSpec) else self.mixer

    @property
    def experts(self) -> ExpertSpec | None:
        """Its experts, if it has any."""
        spec = self.feed_forward
        if isinstance(spec, ParallelMoESpec | ShortcutSpec):
            return spec.experts
        return spec if isinstance(spec, ExpertSpec) else None


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Each layer adds something of the token too, from a table of its own. width: of that. gate: its activation.

    vocab_size: of the table.
    """

    width: int
    vocab_size: int
    gate: Gate


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: what holds for all of it, and its layers, first to last.

    norm: the kind of norm of the residual stream.
    unit_offset: a norm multiplies by 1 + its weight.
    embedding_scale: embeddings are multiplied by it as the compute dtype rounds it.
    embedding_norm: they are divided by their rms.
    residual_scale: what attention and feed-forward add is multiplied by it.
    logits_scale: so are logits.
    logits_cap: logits are its tanh(logits / cap).
    logits_bias: the output matrix has a bias.
    per_layer_embeddings: what each layer adds of the token.
    formats: of its weights, as its own checkpoint says.
    """

    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    norm: NormKind = "rms"
    unit_offset: bool = False
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    logits_bias: bool = False
    per_layer_embeddings: PerLayerSpec | None = None
    formats: StoredFormats = PLAIN

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def attention(self) -> dict[int, AttentionSpec]:
        """Layers that keep keys and values, by index."""
        found = ((index, layer.attends) for index, layer in enumerate(self.layers))
        return {index: spec for index, spec in found if spec is not None}

    @property
    def recurrent(self) -> dict[int, RecurrentSpec]:
        """Layers that keep a state by row, by index."""
        found = ((index, layer.recurrent) for index, layer in enumerate(self.layers))
        return {index: spec for index, spec in found if spec is not None}

    def with_window(self, maximum: int) -> "ModelConfig":
        """The same, whose layers see no more than so many tokens. Shorter than a chunk it is a window."""

        def narrowed(spec: Mixer) -> Mixer:
            if not isinstance(spec, AttentionSpec):
                return spec
            wider = spec.window is None or spec.window > maximum
            return replace(spec, window=maximum, chunked=False) if wider else spec

        return replace(self, layers=tuple(replace(layer, mixer=narrowed(layer.mixer)) for layer in self.layers))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`. Raises CheckpointError if it is missing or not a JSON object.

    Model Optimizer wrote what is quantized into a file of its own before: without a `quantization_config` that counts.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config, beside = read_object(folder / "config.json"), folder / "hf_quant_config.json"
    if config.get("quantization_config") is None and beside.is_file():
        said = table(read_object(beside), "quantization", beside)
        return {**config, "quantization_config": {"quant_method": "modelopt", **said}}
    return config


def model_config(config: Config, where: Path, layers: Sequence[LayerSpec]) -> ModelConfig:
    """What a decoder's config says beside its layers. Raises CheckpointError naming the key that is wrong."""
    return ModelConfig(
        vocab_size=size(config, "vocab_size", where),
        hidden_size=size(config, "hidden_size", where),
        norm_eps=real(config, "rms_norm_eps", where, 1e-6),
        max_positions=max(
            [max_positions(config, where), *(reach(each.attends.rope) for each in layers if each.attends is not None)]
        ),
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


FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"


def layer_types(
    config: Config,
    where: Path,
    default: Callable[[int], str] | None = None,
    known: tuple[str, ...] = (FULL_ATTENTION, SLIDING_ATTENTION),
) -> list[str]:
    """The type of every layer: `layer_types`, or the default by index; without one the key must be there."""
    count, listed = num_layers(config, where), config.get("layer_types")
    if listed is None and default is not None:
        return [default(index) for index in range(count)]
    if not isinstance(listed, list) or len(listed) != count or any(kind not in known for kind in listed):
        raise CheckpointError(f"{where}: layer_types must name {' or '.join(known)} for each of {count} layers")
    return listed


def own_config(config: Config, index: int, keys: Collection[str], where: Path) -> dict[str, Any]:
    """The config as the layer at this index has it: `transformers` 5 writes what is its own as `per_layer_config`.

    keys: that may differ between layers.
    """
    own = table(table(config, "per_layer_config", where), str(index), where)
    for key in own:
        if key not in keys:
            raise CheckpointError(f"{where}: per_layer_config of layer {index}: {key} is not supported, only {keys}")
    return {**config, **own}


def mlp_layer_types(config: Config, where: Path) -> list[str]:
    """dense or sparse for each layer; by default the first is dense."""
    count = num_layers(config, where)
    listed = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    if not isinstance(listed, list) or len(listed) != count or not all(kind in ("dense", "sparse") for kind in listed):
        raise CheckpointError(f"{where}: mlp_layer_types must name dense or sparse for each of {count} layers")
    return listed


def num_experts_per_token(config: Config, maximum: int, where: Path) -> int:
    """maximum: experts that a token can choose among."""
    chosen = size(config, "num_experts_per_tok", where)
    if chosen > maximum:
        raise CheckpointError(
            f"{where}: num_experts_per_tok {chosen} exceeds the {maximum} experts of a token's choice"
        )
    return chosen


def num_layers(config: Config, where: Path) -> int:
    return size(config, "num_hidden_layers", where)
