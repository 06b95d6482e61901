"""MTP: the layer that a target was trained with to predict one token more, drafting by being used again and again.

Its slot i holds the pair (last hidden state of token i after the target's final norm, token i + 1) at position i: both
normed, side by side, through one product, then a decoder layer like the target's last one, and a norm of its own before
the target's output matrix. While a tree grows its own state stands for the target's.

Weights lie in the target's folder. Which state goes on is the family's: GLM and DeepSeek chain modules before the norm
(DeepSeek-V3, arXiv:2412.19437, section 2.2; vllm `glm4_moe_mtp.py`), MiMo after it (vllm and sglang `mimo_mtp.py`), as
do MiMo-V2 (vllm `mimo_v2_mtp.py`) and Hy3 (`hy_v3_mtp.py`); ERNIE has no norm there (vllm `ernie_mtp.py`, sglang
`ernie4_eagle.py`). Step's, a dense layer with a window, reads the target's state before its final norm and chains its
own before the norm (sglang `step3p5_mtp.py`). All of these but MiMo-V2's and Step's zero the embedding at position 0.
Qwen3-Next's and 3.5's has the attention of their full layers,
chains the normed state and zeroes nothing (vllm `qwen3_next_mtp.py`, `qwen3_5_mtp.py`). So does Nemotron 3's, which is
stored as two layers with a norm each, attention and experts (vllm `nemotron_h_mtp.py`). LongCat's, a dense layer,
does the same (vllm `longcat_flash_mtp.py`).
Where the target's attention is sparse, so is the layer's, by an indexer of its own at every level; it is dense where
none is stored.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.checkpoint import tensor_files
from treetop.checkpoints.config_fields import require_value
from treetop.checkpoints.loader import LoadContext, check_weights, load_weights
from treetop.checkpoints.params import STREAMED, Param, in_formats, matrix, stored_tensors
from treetop.drafts.head_files import no_offset
from treetop.drafts.protocol import DraftProducts, DraftVocab, Extension, Nodes, Proposal, Streamed
from treetop.kernels.moe.routes import RoutedTokens
from treetop.kernels.rope import rope_table
from treetop.kernels.table import Ops
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.models.config import (
    AbsentSpec,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    NormNames,
    read_config,
    with_indexer,
)
from treetop.models.decoder import DecoderLayer, decoder_params
from treetop.models.embedding import whole_table
from treetop.models.experts import live_rows
from treetop.models.layers import NoNorm, RMSNorm, norm_param, rotary_at
from treetop.models.target import LAST_HIDDEN, LastTokens, Target
from treetop.types.config import Recurrence
from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import CheckpointTensor
from treetop.weights.held import Weights
from treetop.weights.plain import FLOATS
from treetop.weights.registry import read_formats
from treetop.weights.rules import Named, StoredFormats


def _last(target: ModelConfig) -> LayerSpec:
    return target.layers[-1]


def _dense(target: ModelConfig) -> LayerSpec | None:
    """The last layer with the feed-forward of a dense one; None without any."""
    found = (each.feed_forward for each in target.layers if isinstance(each.feed_forward, DenseSpec))
    forward = next(found, None)
    return None if forward is None else replace(target.layers[-1], feed_forward=forward)


def _dense_with_window(target: ModelConfig) -> LayerSpec | None:
    """As that, with the attention of one with a window."""
    layer = _dense(target)
    attention = next((each for each in target.attention.values() if each.window is not None), None)
    return None if layer is None or attention is None else replace(layer, mixer=attention)


def _dense_of_mimo(target: ModelConfig) -> LayerSpec | None:
    """As that, with another name of a norm."""
    layer = _dense_with_window(target)
    return None if layer is None else replace(layer, norms=NormNames(feed_forward="pre_mlp_layernorm"))


def _dense_of_step(target: ModelConfig) -> LayerSpec | None:
    """As with a window, and without a limit of its activation."""
    layer = _dense_with_window(target)
    if layer is None or not isinstance(layer.feed_forward, DenseSpec):
        return None
    return replace(layer, feed_forward=replace(layer.feed_forward, limit=None))


def _attending(target: ModelConfig) -> LayerSpec | None:
    """The last layer, with the attention of one that has keys and values, and experts if any layer has."""
    if not target.attention:
        return None
    forward = next((each.feed_forward for each in target.layers if each.experts), target.layers[-1].feed_forward)
    return replace(target.layers[-1], mixer=[*target.attention.values()][-1], feed_forward=forward)


def _attention_and_experts(target: ModelConfig) -> LayerSpec | None:
    """What the target has as two layers."""
    layer = _attending(target)
    return None if layer is None or layer.experts is None else replace(layer, norms=NormNames())


@dataclass(frozen=True, slots=True)
class MtpNames:
    """How a family calls an MTP layer's own tensors, and what differs.

    layer, and the others: names of modules, {root} for what the target's begin with and {n} for the layer's number.
    shown_by: the one that shows it.
    final_norm: None where there is none.
    copies: tensors of the target that the layer has again, which are not read.
    hidden_first: the order of the projection's input.
    normed_state: the state that goes on is the normed one.
    zeroed: the embedding at position 0 counts as zero.
    follows: the layers are numbered on from the target's.
    before_norm: it reads the target's state before the final norm.
    renamed: parts of the decoder layer's names, and what they are stored as.
    pattern: keys of a config and what they may say of the layer's halves.
    kind: which of the target's layers it is like.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None
    shown_by: str
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    normed_state: bool = False
    zeroed: bool = True
    follows: bool = False
    before_norm: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    pattern: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    kind: Callable[[ModelConfig], LayerSpec | None] = _last

    def of(self, name: str, root: str, number: int) -> str:
        return name.format(root=root, n=number)


def _names(
    layer: str, own: tuple[str, str, str, str], shown_by: str, copies: tuple[str, ...] = (), **what: Any
) -> MtpNames:
    """Of a layer whose own tensors lie beside those of its attention and feed-forward."""
    embedding, hidden, projection, final, shown = (f"{layer}.{each}" for each in (*own, shown_by))
    again = tuple(f"{layer}.{each}" for each in copies)
    return MtpNames(layer, embedding, hidden, projection, final, shown, again, **what)


_DEEPSEEK = ("enorm", "hnorm", "eh_proj")
GLM = _names(
    "{root}layers.{n}", (*_DEEPSEEK, "shared_head.norm"), "eh_proj", ("embed_tokens", "shared_head.head"), follows=True
)
HY3 = _names(
    *("{root}layers.{n}", (*_DEEPSEEK, "final_layernorm"), "final_layernorm"),
    *(("embed_tokens", "shared_head", "shared_head.head"),),
    normed_state=True,
    follows=True,
)
MIMO = _names(
    *("{root}mtp_layers.{n}", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), "input_proj"),
    hidden_first=True,
    normed_state=True,
)
MIMO_V2 = _names(
    *("{root}mtp.layers.{n}", (*_DEEPSEEK, "final_layernorm"), "eh_proj"),
    normed_state=True,
    zeroed=False,
    kind=_dense_of_mimo,
)
STEP = _names(
    *("{root}layers.{n}", (*_DEEPSEEK, "transformer.shared_head.norm"), "transformer.shared_head.norm"),
    *(("embed_tokens", "transformer.shared_head.output"),),
    zeroed=False,
    follows=True,
    before_norm=True,
    kind=_dense_of_step,
)
ERNIE = MtpNames(
    *("{root}mtp_block.{n}", "{root}mtp_emb_norm.{n}", "{root}mtp_hidden_norm.{n}", "{root}mtp_linear_proj.{n}"),
    final_norm=None,
    shown_by="{root}mtp_linear_proj.{n}",
    kind=_dense,
)
QWEN = MtpNames(
    *("mtp.layers.{n}", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    shown_by="mtp.layers.{n}.input_layernorm",
    normed_state=True,
    zeroed=False,
    kind=_attending,
)
NEMOTRON = MtpNames(
    *("mtp.layers.{n}", "mtp.layers.{n}.enorm", "mtp.layers.{n}.hnorm", "mtp.layers.{n}.eh_proj"),
    "mtp.layers.1.final_layernorm",
    shown_by="mtp.layers.{n}.eh_proj",
    normed_state=True,
    zeroed=False,
    renamed=(
        ("mtp.layers.0.self_attn.", "mtp.layers.0.mixer."),
        ("mtp.layers.0.mlp.", "mtp.layers.1.mixer."),
        ("mtp.layers.0.input_layernorm.", "mtp.layers.0.norm."),
        ("mtp.layers.0.post_attention_layernorm.", "mtp.layers.1.norm."),
    ),
    pattern=(
        ("mtp_hybrid_override_pattern", ("*E",)),
        ("mtp_layers_block_type", (["attention", "moe"], ["full_attention", "moe"])),
    ),
    kind=_attention_and_experts,
)
LONGCAT = MtpNames(
    *("{root}mtp.layers.{n}", "{root}mtp.layers.{n}.enorm.m", "{root}mtp.layers.{n}.hnorm.m"),
    "{root}mtp.layers.{n}.eh_proj",
    final_norm="{root}mtp.norm",
    shown_by="{root}mtp.layers.{n}.enorm.m",
    normed_state=True,
    zeroed=False,
    renamed=((".mlp.", ".transformer_layer.mlp."),),
)
_STORED = {
    "LongCat": LONGCAT,
    "Qwen": QWEN,
    "Nemotron": NEMOTRON,
    "Hy3": HY3,
    "Step": STEP,
    "GLM and DeepSeek": GLM,
    "MiMo": MIMO,
    "MiMo-V2": MIMO_V2,
    "ERNIE": ERNIE,
}
"""Layouts in the order in which they are looked for."""


@dataclass(frozen=True, slots=True)
class FoundMtp:
    """MTP layers of a folder.

    layout: a family's.
    root: what the target's names begin with.
    numbers: first to last.
    """

    layout: str
    names: MtpNames
    root: str
    numbers: tuple[int, ...]


def find_mtp(tensors: Collection[str]) -> FoundMtp | None:
    """The MTP layers among a folder's tensors, or None."""
    for layout, names in _STORED.items():
        shown = re.escape(names.shown_by).replace(r"\{root\}", _ROOT).replace(r"\{n\}", r"(?P<n>\d{1,9})") + r"\.weight"
        found = [match for tensor in tensors if (match := re.fullmatch(shown, tensor))]
        if found:
            root = found[0].groupdict().get("root", "")
            return FoundMtp(layout, names, root, tuple(sorted(int(match["n"]) for match in found)))
    return None


_ROOT = r"(?P<root>model\.language_model\.|language_model\.model\.|model\.)"


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """A `DrafterSpec`.

    decoder: the target's sizes, with the one layer.
    root, number: of its names.
    normed_state: as asked, or as the family does it.
    """

    folder: Path = field(compare=False)
    decoder: ModelConfig
    names: MtpNames
    root: str
    number: int
    normed_state: bool
    aux_inputs: tuple[int, ...] = (LAST_HIDDEN,)
    state_dtype: torch.dtype | None = None
    reads_text: bool = False
    reads_target: tuple[int, ...] = ()
    makes_logits: bool = True
    block: None = None

    def with_window(self, window: int) -> "MtpSpec":
        """The same, whose layer sees no more than so many tokens."""
        return replace(self, decoder=self.decoder.with_window(window))

    @property
    def prefix(self) -> str:
        """Of the names of its attention and feed-forward."""
        return self._stored(self.names.layer)

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return (self.decoder.layers[0].attention,)

    @property
    def state_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def params(self) -> list[Param]:
        hidden, names = self.decoder.hidden_size, self.names
        swap = _swapped_halves if names.hidden_first else None
        own = {"embedding_norm": names.embedding_norm, "hidden_norm": names.hidden_norm, "norm": names.final_norm}
        params = [
            *(
                norm_param(name, f"{self._stored(tensor)}.weight", hidden, self.decoder.unit_offset)
                for name, tensor in own.items()
                if tensor is not None
            ),
            matrix(
                "projection", CheckpointTensor(f"{self._stored(names.projection)}.weight", (hidden, 2 * hidden), swap)
            ),
            *(
                _moved(each, self.prefix, names.renamed)
                for each in decoder_params(self.decoder)
                if each.name.startswith("layers.0.")
            ),
        ]
        return in_formats(params, self.decoder.formats)

    @property
    def derived(self) -> int:
        return (self.vocab_size + 1) * self.decoder.hidden_size  # the normed embedding, and a row of zeros

    @property
    def streamed(self) -> Streamed:
        layers = sum(param.numbers for param in self.params if param.kind in STREAMED)
        return Streamed(layers, 0, self.vocab_size * self.decoder.hidden_size)

    def build(self, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> "MtpLayer":
        return MtpLayer(self, weights, target, place, ops)

    def load(self, target: Target, place: LoadContext) -> "MtpLayer":
        """Raises CheckpointError for a wrong tensor of the layer; the folder's others are the target's."""
        ignored = set() if place.dummy else self._ignored()
        return self.build(load_weights(self.folder, self.params, place, ignored), target, place, place.ops)

    def check(self) -> int:
        return check_weights(self.folder, self.params, self._ignored())

    def _ignored(self) -> set[str]:
        copies, own = {f"{self._stored(name)}.weight" for name in self.names.copies}, stored_tensors(self.params)
        return copies | {
            name for name in tensor_files(self.folder) if name not in own and not name.startswith(self._prefixes)
        }

    @property
    def _prefixes(self) -> tuple[str, ...]:
        """Of names of which all must be read."""
        stored = {".".join(new.split(".")[:3]) for _, new in self.names.renamed}
        return tuple(f"{each}." for each in sorted({self.prefix, *stored}))

    def _stored(self, name: str) -> str:
        return self.names.of(name, self.root, self.number)


class MtpLayer:
    """A `Drafter`; see the module."""

    block = None

    def __init__(self, spec: MtpSpec, weights: Weights, target: Target, place: LoadContext, ops: Ops) -> None:
        """target: whose embedding and output matrix the layer uses."""
        eps = spec.decoder.norm_eps
        self.spec, self._ops, self._target = spec, ops, target
        self._rope = rope_table(spec.attention[0].rope, place.rope_rows, place.dtype, place.device)
        # A token's normed embedding never changes; the last row is that of no token, for position 0.
        nothing = target.embedding.new_zeros((1, spec.decoder.hidden_size))
        embedding = torch.cat([whole_table(target.embedding, spec.vocab_size, ops.parallel), nothing])
        self.normed_embedding = RMSNorm(weights["embedding_norm"], eps, ops)(embedding)
        self.hidden_norm = RMSNorm(weights["hidden_norm"], eps, ops)
        self.projection = weights.linear("projection")
        self.layer = DecoderLayer(spec.decoder, weights, 0, ops)
        self.norm = RMSNorm(weights["norm"], eps, ops) if spec.names.final_norm is not None else NoNorm(ops)
        self.products = DraftProducts([self.projection, *self.layer.products], [], [target.lm_head])
        self.vocab = DraftVocab(no_offset(spec.vocab_size, place.device))

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, at: Extension, attend: Attend) -> Tensor:
        """See `Drafter`."""
        return at.states(self._ops, partial(self._forward, tokens, aux_hidden, positions, attend))

    def step(self, nodes: Nodes, positions: Tensor, attend: Attend, lines: Any = None) -> Tensor:
        """See `Drafter`. The state is the layer's output, normed or not."""
        return self._forward(nodes.tokens, nodes.state, positions, attend)

    def _forward(
        self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend, last: LastTokens | None = None
    ) -> Tensor:
        norm = self.hidden_norm
        if self.spec.names.zeroed:
            tokens = torch.where(positions == 0, self.spec.vocab_size, tokens)
        x = self.projection(self._ops.embed_and_norm(self.normed_embedding, tokens, state, norm.weight, norm.eps))
        rotary = rotary_at(self._rope, positions, self._ops)
        tokens_of_all = RoutedTokens(live_rows(attend.live(), self._ops.expert_ranks))
        x, added = self.layer(x, self.layer.input_norm(x), rotary, attend, tokens_of_all, last=last)
        return self.norm.after(x, added)[1] if self.spec.normed_state else self._ops.add(x, added)

    def propose(self, nodes: Nodes, k: int, inv_temp: InverseTemperature | None = None, lines: Any = None) -> Proposal:
        """See `Drafter`."""
        normed = nodes.state if self.spec.normed_state else self.norm(nodes.state)
        best, tokens = self._ops.top_logprobs(self._target.logits(normed), k, self.vocab.offset, inv_temp)
        return Proposal(tokens, best)


def mtp_spec(folder: Path, target: ModelConfig, dummy: bool, recurrence: Recurrence = "auto") -> MtpSpec:
    """The MTP layer in a target's folder; of several the first, which is used again. dummy: there are no tensors.

    Raises CheckpointError if there is none, or it does not follow this target's layers.
    """
    count = len(target.layers)
    tensors = set() if dummy else set(tensor_files(folder))
    found = _dummy(target) if dummy else find_mtp(tensors)
    if found is None:
        said, where = read_config(folder).get("num_nextn_predict_layers"), folder / "config.json"
        but = f", though {where} has num_nextn_predict_layers = {shown(said)}" if said else ""
        raise CheckpointError(
            f"{folder}: no MTP layer for --speculative-algorithm MTP: neither model.layers.N.eh_proj.weight nor"
            f" model.mtp_layers.0.input_proj.weight is in it{but}"
        )
    names, number = found.names, found.numbers[0]
    wanted = count if names.follows else 0
    if number != wanted:
        found_at, would_be = (names.of(names.layer, found.root, each) for each in (number, wanted))
        raise CheckpointError(
            f"{folder}: the MTP layer {found_at} does not follow the target's {count} layers: it would be {would_be}"
        )
    said = {} if dummy else read_config(folder)
    for key, known in names.pattern:
        if said.get(key) is not None and said[key] not in known:
            require_value(said, key, known[0], folder / "config.json")
    layer = names.kind(target)
    if (
        layer is None
        or layer.attention.kv_sharing_layer is not None
        or layer.scaled
        or target.per_layer_embeddings is not None
    ):
        raise CheckpointError(f"{folder}: an MTP layer in {found.layout}'s names is not supported with this target")
    if layer.attention.index is not None:
        indexer = f"{names.of(names.layer, found.root, number)}.self_attn.indexer.wk.weight"
        own = replace(layer.attention.index, shares=None) if dummy or indexer in tensor_files(folder) else None
        layer = replace(layer, mixer=with_indexer(layer.attention, own))
    formats = read_formats(read_config(folder), folder / "config.json")
    if names in (QWEN, NEMOTRON, LONGCAT):
        formats = _plain_as_stored(formats, tensors)
    if names is QWEN:
        layer = _as_stored(layer, tensors)
    decoder = replace(target, layers=(layer,), formats=formats)
    normed = names.normed_state if recurrence == "auto" else recurrence == "after-norm"
    reads = (count if names.before_norm else LAST_HIDDEN,)
    return MtpSpec(folder, decoder, names, found.root, number, normed, aux_inputs=reads)


def _dummy(target: ModelConfig) -> FoundMtp:
    if any(isinstance(layer.mixer, AbsentSpec) for layer in target.layers):
        return FoundMtp("Nemotron", NEMOTRON, "", (0,))
    if target.recurrent:
        return FoundMtp("Qwen", QWEN, "", (0,))
    return FoundMtp("GLM", GLM, "model.", (len(target.layers),))


def _as_stored(layer: LayerSpec, tensors: Collection[str]) -> LayerSpec:
    """Experts one by one or stacked, which an MTP layer may have otherwise than the target's."""
    if layer.experts is None or not tensors:
        return layer
    stacked = any(name.startswith("mtp.") and name.endswith(".experts.gate_up_proj") for name in tensors)
    stored = replace(layer.experts.stored, tensors="stacked" if stacked else "each", by_rows=stacked)
    return replace(layer, feed_forward=replace(layer.experts, stored=stored))


def _plain_as_stored(formats: StoredFormats, tensors: Collection[str]) -> StoredFormats:
    """Lists of what is not quantized forget the layer: what has a weight and nothing beside it is plain."""
    own = (name for name in tensors if name.startswith(("mtp.", "model.mtp.")))
    modules = {name.removesuffix(".weight") for name in own if name.endswith(".weight")}
    beside = {name.rpartition(".")[0] for name in tensors if not name.endswith((".weight", ".bias"))}
    plain = frozenset(modules - beside)
    return replace(formats, rules=(Named(plain, FLOATS), *formats.rules)) if plain and formats.rules else formats


def _swapped_halves(weight: Tensor) -> Tensor:
    """Columns for [embedding, hidden] of a weight [out, 2 * hidden] that was made for [hidden, embedding]."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _moved(param: Param, prefix: str, renamed: tuple[tuple[str, str], ...] = ()) -> Param:
    """A parameter of a model's first layer, stored under another prefix, and perhaps otherwise from there on."""

    def stored(name: str) -> str:
        name = prefix + name.removeprefix("model.layers.0")
        for old, new in renamed:
            name = name.replace(old, new)
        return name

    return replace(param, sources=tuple(replace(each, name=stored(each.name)) for each in param.sources))
