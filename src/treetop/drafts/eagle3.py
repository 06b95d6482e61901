"""The EAGLE-3 draft head.

Its slot i holds the pair (feature of token i, token i + 1) at position i and proposes token i + 2. The feature is the
target's where the target has run (`extend`), and the head's own hidden state while a tree grows (`grow`).
Source: EAGLE-3, arXiv:2503.01840.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.drafts.protocol import DraftProducts, DraftVocab, Proposal, Streamed
from treetop.kernels.rope import rope_table
from treetop.kernels.table import Ops
from treetop.models.checkpoint import tensor_files
from treetop.models.config import (
    AttentionSpec,
    Config,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    flag,
    model_config,
    read_config,
    size,
    table,
)
from treetop.models.json_file import integers
from treetop.models.layers import (
    GatedMLP,
    RMSNorm,
    SelfAttention,
    attention_params,
    mlp_params,
    norm_param,
)
from treetop.models.loader import Placement, Weights, check_weights, load_weights
from treetop.models.params import Param, Plain, Source, matrix
from treetop.models.target import Target
from treetop.types.errors import CheckpointError, shown

_EMBEDDING = "embed_tokens.weight"
_IDS, _MARKS = Plain(("I64",)), Plain(("BOOL", "U8", "I8", "I32", "I64"))


@dataclass(frozen=True, slots=True)
class HeadFile:
    """What head files differ in. layer: the prefix of the one layer. embedding, d2t, t2d: whether they are there."""

    layer: str = "midlayer"
    embedding: bool = False
    d2t: bool = True
    t2d: bool = False


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """A `DrafterSpec`. decoder: sizes, with the one layer. vocab_size: of the draft.

    norm_before_residual: the residual stream begins with the normed state.
    """

    folder: Path
    decoder: ModelConfig
    vocab_size: int
    target_hidden_size: int
    aux_inputs: tuple[int, ...]
    norm_before_residual: bool
    file: HeadFile

    @property
    def layer(self) -> LayerSpec:
        return self.decoder.layers[0]

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        return (self.layer.attention,)

    @property
    def state_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def params(self) -> list[Param]:
        hidden, file = self.decoder.hidden_size, self.file
        fused = Source("fc.weight", (hidden, len(self.aux_inputs) * self.target_hidden_size))
        head, wide = (self.vocab_size, hidden), (self.decoder.vocab_size, hidden)
        norms = {"hidden_norm": "hidden_norm", "input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        params = [
            matrix("fuse", fused),
            *(norm_param(name, f"{file.layer}.{stored}.weight", hidden) for name, stored in norms.items()),
            norm_param("norm", "norm.weight", hidden),
            *attention_params(self.layer.attention, "attention", f"{file.layer}.self_attn", 2 * hidden, hidden),
            *mlp_params(self.layer.feed_forward, "mlp", f"{file.layer}.mlp", hidden),
            matrix("lm_head", Source("lm_head.weight", head), shard=0),
        ]
        if file.d2t:
            params.append(Param("d2t", head[:1], (Source("d2t", head[:1]),), "index", format=_IDS))
        if file.t2d:
            params.append(Param("t2d", wide[:1], (Source("t2d", wide[:1]),), "index", format=_MARKS))
        if file.embedding:
            params.append(Param(_EMBEDDING, wide, (Source(_EMBEDDING, wide),), "table"))
        return params

    @property
    def derived(self) -> int:
        return self.decoder.vocab_size * self.decoder.hidden_size  # the normed embedding

    @property
    def streamed(self) -> Streamed:
        numbers = {param.name: param.numbers for param in self.params if param.kind == "matrix"}
        fuse, output = numbers.pop("fuse"), numbers.pop("lm_head")
        return Streamed(sum(numbers.values()), fuse, output)

    def build(self, weights: Weights, target: Target, place: Placement, ops: Ops) -> "Eagle3Head":
        return Eagle3Head(self, weights, target.embedding, place, ops)

    def load(self, target: Target, place: Placement) -> "Eagle3Head":
        """Raises CheckpointError for a wrong tensor; the draft vocabulary maps one to one into the target's."""
        weights = load_weights(self.folder, self.params, place)
        offset = weights.setdefault("d2t", _no_offset(self.vocab_size, place))
        _check_vocab(self.folder, offset, weights.pop("t2d", None), self.decoder.vocab_size)
        return self.build(weights, target, place, place.ops)

    def check(self) -> int:
        return check_weights(self.folder, self.params)


class Eagle3Head:
    """One decoder layer over [embedding, feature], with its own vocabulary. A `Drafter`."""

    def __init__(self, spec: Eagle3Spec, weights: Weights, embedding: Tensor, place: Placement, ops: Ops) -> None:
        """embedding: the target's, which the head uses unless it has one of its own."""
        eps, layer = spec.decoder.norm_eps, spec.layer
        self.spec, self._ops = spec, ops
        self._rope = rope_table(layer.attention.rope, place.rope_rows, place.dtype, place.device)
        self.fuse = ops.linear(weights.pop("fuse"))
        self.hidden_norm = RMSNorm(weights["hidden_norm"], eps, ops)
        # A token's normed embedding never changes, so the whole table is normed once.
        self.normed_embedding = RMSNorm(weights["input_norm"], eps, ops)(weights.pop(_EMBEDDING, embedding))
        self.attention = SelfAttention(layer.attention, weights, "attention", 0, eps, ops)
        self.mlp_norm = RMSNorm(weights["mlp_norm"], eps, ops)
        self.mlp = GatedMLP(weights, "mlp", ops)
        self.norm = RMSNorm(weights["norm"], eps, ops)
        self.lm_head = ops.linear(weights.pop("lm_head"))
        self.products = DraftProducts([*self.attention.products, *self.mlp.products], [self.fuse], [self.lm_head])
        self.vocab = DraftVocab(weights.setdefault("d2t", _no_offset(spec.vocab_size, place)))

    def extend(self, tokens: Tensor, aux_hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Drafter`."""
        return self.grow(tokens, self.fuse(aux_hidden), positions, attend)

    def grow(self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `Drafter`. The state is the residual stream before `norm`."""
        norm, width = self.hidden_norm, state.shape[-1]
        x = self._ops.embed_and_norm(self.normed_embedding, tokens, state, norm.weight, norm.eps)
        residual = x[..., -width:] if self.spec.norm_before_residual else state
        x, normed = self.mlp_norm.after(residual, self.attention(x, self._ops.angles(self._rope, positions), attend))
        return self._ops.add(x, self.mlp(normed))

    def propose(self, state: Tensor, k: int) -> Proposal:
        """See `Drafter`."""
        best, tokens = self._ops.top_logprobs(self.lm_head(self.norm(state)), k, self.vocab.offset)
        return Proposal(tokens, best)


def eagle3_spec(folder: Path, target: ModelConfig, dummy: bool) -> Eagle3Spec:
    """The head in a folder, for `target`. dummy: there are no tensors to look at.

    The layer count is not read: it is often the target's (sgl-33966); a head has one layer. Where the auxiliary
    layers stand in the config decides what the numbers mean, and the default is the original repository's
    (`formats.md`, 3b). Raises CheckpointError if the head was made for another target.
    """
    config = read_config(folder)
    where = folder / "config.json"
    decoder = model_config(config, where, [LayerSpec(attention_spec(config, where), dense_spec(config, where))])
    for key, value in (("norm_output", False), ("norm_before_fc", False), ("fc_norm", False), ("use_aux_norm", False)):
        if config.get(key, value) != value:
            raise CheckpointError(f"{where}: {key} = {shown(config[key])} is not supported")
    eagle = table(config, "eagle_config", where)
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(f"{where}: eagle_config.use_aux_hidden_state = false is not supported")
    vocab_size = size(config, "draft_vocab_size", where, default=decoder.vocab_size)
    spec = Eagle3Spec(
        folder=folder,
        decoder=decoder,
        vocab_size=vocab_size,
        target_hidden_size=size(config, "target_hidden_size", where, default=decoder.hidden_size),
        aux_inputs=_aux_inputs(config, eagle, len(target.layers), where),
        norm_before_residual=flag(config, "norm_before_residual", where),
        file=HeadFile(embedding=decoder.hidden_size != target.hidden_size)
        if dummy
        else _head_file(folder, vocab_size != decoder.vocab_size),
    )
    for what, draft_value, target_value in (
        ("vocab_size", decoder.vocab_size, target.vocab_size),
        ("target_hidden_size", spec.target_hidden_size, target.hidden_size),
    ):
        if draft_value != target_value:
            raise CheckpointError(
                f"{where}: this draft is for another target: its {what} is {draft_value}, the target has {target_value}"
            )
    if target.hidden_size != decoder.hidden_size and not spec.file.embedding:
        raise CheckpointError(
            f"{folder}: missing tensor {_EMBEDDING}: the head is {decoder.hidden_size} wide and cannot use"
            f" the target's embedding of {target.hidden_size}"
        )
    return spec


def _head_file(folder: Path, reduced: bool) -> HeadFile:
    """What the file has; newer writers call the one layer `layers.0`. reduced: a vocabulary that needs `d2t`."""
    names = tensor_files(folder)
    layer = "layers.0" if "layers.0.hidden_norm.weight" in names else "midlayer"
    return HeadFile(layer, _EMBEDDING in names, reduced or "d2t" in names, "t2d" in names)


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


def _no_offset(vocab_size: int, place: Placement) -> Tensor:
    """Of a head that proposes the target's own tokens."""
    return torch.zeros(vocab_size, dtype=torch.int64, device=place.device)


def _check_vocab(folder: Path, offset: Tensor, member: Tensor | None, vocab_size: int) -> None:
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
