"""Which block head a folder holds: DFlash of z-lab, JetSpec, DFlash and DSpark of DeepSpec (with layers of Qwen3 or
Gemma 4) and `speculators`, DSpark of SpecForge.

Names of tensors do not tell them apart where it counts: which layer's state a number means, which slot proposes after
the root, what a window is. Sources: z-lab/dflash 44947fb, DeepSpec afdfa7c, JetSpec 2c7b3fa, SpecForge a6b6b02,
`speculators` 0.9.0, and vllm `model_executor/models/qwen3_dflash.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from treetop.checkpoints.checkpoint import tensor_files
from treetop.checkpoints.config_fields import Config, flag, require_value, size, table
from treetop.checkpoints.json_file import integers
from treetop.drafts.block import BlockHeadSpec
from treetop.drafts.block_edges import MARKOV_KINDS, DominoSpec, EdgeSpec, MarkovSpec, SelectorSpec
from treetop.drafts.block_layers import ConvolutionSpec
from treetop.drafts.head_files import EMBEDDING, check_made_for, output_of
from treetop.drafts.protocol import BlockSpec
from treetop.models.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    LayerSpec,
    ModelConfig,
    attention_spec,
    dense_spec,
    model_config,
    read_config,
)
from treetop.models.families import gemma4
from treetop.types.errors import CheckpointError, shown

Writer = Literal["z-lab", "JetSpec", "DeepSpec", "SpecForge", "speculators"]
Kind = Literal["DFlash", "DFlash 2", "JetSpec", "DSpark", "Domino"]
Body = Literal["Qwen3", "Gemma 4"]
_DFLASH2, _DFLASH = "DFlash2DraftModel", ("DFlashDraftModel", "DFlashSpeculator")
_DEEPSPEC: dict[str, Body] = {"Qwen3DSparkModel": "Qwen3", "Gemma4DSparkModel": "Gemma 4"}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Whose files these are, and of what kind. sign: the key or tensor that says so. body: whose layers it has."""

    writer: Writer
    kind: Kind
    sign: str
    body: Body = "Qwen3"


_OF_SPECULATORS: dict[str, Kind] = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark"}
_ONLY = {"attention_sink_bias": False, "use_aux_hidden_state": True, "logit_scale": 1, "is_neox_style": True}
"""Settings of which one value is supported."""


def find_block(config: Config) -> BlockLayout | None:
    """The layout of a block head whose whole `config.json` this is; None if it is of another kind."""
    said = config.get("speculators_model_type")
    if isinstance(said, str) and said in _OF_SPECULATORS:
        return BlockLayout("speculators", _OF_SPECULATORS[said], f"speculators_model_type is {said}")
    architectures = config.get("architectures")
    for name in _DEEPSPEC.keys() & _words(architectures):
        kind: Kind = "DSpark" if config.get("markov_rank") else "DFlash"
        return BlockLayout("DeepSpec", kind, f"architectures has {name}", _DEEPSPEC[name])
    if _DFLASH2 in _words(architectures):
        return BlockLayout("z-lab", "DFlash 2", f"architectures has {_DFLASH2}")
    dflash, named = config.get("dflash_config"), [name for name in _DFLASH if name in _words(architectures)]
    if not isinstance(dflash, dict):
        return BlockLayout("z-lab", "DFlash", f"architectures has {named[0]}") if named else None
    if dflash.get("projector_type") == "dspark":
        return BlockLayout("SpecForge", "DSpark", "dflash_config.projector_type is dspark")
    if dflash.get("projector_type") == "domino":
        return BlockLayout("SpecForge", "Domino", "dflash_config.projector_type is domino")
    if dflash.get("causal_head"):
        return BlockLayout("JetSpec", "JetSpec", "config.json has dflash_config.causal_head")
    return BlockLayout("z-lab", "DFlash", "config.json has dflash_config")


def _words(architectures: object) -> list[str]:
    return [each for each in architectures if isinstance(each, str)] if isinstance(architectures, list) else []


def block_spec(folder: Path, target: ModelConfig, dummy: bool) -> BlockHeadSpec:
    """The head in a folder, for `target`. dummy: there are no tensors to look at.

    Raises CheckpointError, which names the tensor or the key, if the head was made for another target, if config and
    tensors contradict each other, or for something that is not supported.
    """
    whole, where = read_config(folder), folder / "config.json"
    names = frozenset(tensor_files(folder)) if not dummy else frozenset[str]()
    layout = find_block(whole)
    if layout is None:
        raise CheckpointError(f"{where}: no block head: neither dflash_config, nor of DeepSpec, nor of speculators")
    config = _joined(whole, layout, where)
    root = "model." if "model.fc.weight" in names else ""
    width = size(config, "block_size", where)
    shifted = _is_shifted(config, layout, where)
    if layout.body == "Gemma 4":
        decoder, causal = _of_gemma(config, where), (False,) * size(config, "num_hidden_layers", where)
    else:
        layers, causal = _layers(config, layout, names, root, where)
        decoder = model_config(config, where, layers)
    vocab_size = size(config, "draft_vocab_size", where, default=decoder.vocab_size)
    edges = _edges(config, layout, decoder, vocab_size, where, root, names)
    spec = BlockHeadSpec(
        folder=folder,
        decoder=decoder,
        vocab_size=vocab_size,
        aux_inputs=_aux_inputs(config, layout, len(target.layers), len(decoder.layers), where),
        target_hidden_size=size(config, "target_hidden_size", where, default=decoder.hidden_size),
        block=BlockSpec(
            width,
            width if shifted else width - 1,
            causal,
            anchored=layout.writer == "speculators",
            max_topk=None if edges is None else edges.max_topk,
        ),
        first=0 if shifted else 1,
        mask_token=_mask_token(config, decoder.vocab_size, where),
        edges=edges,
        output=output_of(replace(decoder, tied_embeddings=False), vocab_size, target, names, folder),
        root=root,
        stored=names & {EMBEDDING, "d2t", "t2d"} | ({"d2t"} if vocab_size != decoder.vocab_size else set()),
        convolution=_convolution(config, layout, decoder.hidden_size, where),
        unused=tuple(sorted(name for name in names if name.startswith("confidence_head."))),
    )
    check_made_for(where, decoder, spec.target_hidden_size, target)
    if _scales(target) != _scales(decoder):
        raise CheckpointError(
            f"{where}: the target scales its embeddings or logits, or caps these, and the head does not do so too: this"
            f" is not supported (scales and cap: {_scales(target)}, the head's {_scales(decoder)})"
        )
    if target.hidden_size != decoder.hidden_size and EMBEDDING not in spec.stored:
        raise CheckpointError(
            f"{folder}: missing tensor {EMBEDDING}: the head is {decoder.hidden_size} wide and cannot use the target's"
            f" embedding of {target.hidden_size}"
        )
    return spec


def _scales(config: ModelConfig) -> tuple[float, float, float | None]:
    return config.embedding_scale, config.logits_scale, config.logits_cap


def _of_gemma(config: Config, where: Path) -> ModelConfig:
    """Full layers of Gemma 4, whatever it keeps beside them. Source: DeepSpec `modeling/dspark/gemma4`."""
    for key, only in {"enable_moe_block": False, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}.items():
        require_value(config, key, only, where)
    kinds = [FULL_ATTENTION] * size(config, "num_hidden_layers", where)
    if config.get("layer_types") not in (None, kinds):
        raise CheckpointError(f"{where}: layer_types: a head with layers of Gemma 4 has {FULL_ATTENTION} alone")
    return gemma4.read({**config, "layer_types": kinds, "hidden_size_per_layer_input": 0}, where)


def _joined(whole: Config, layout: BlockLayout, where: Path) -> Config:
    """The settings as one table: those of `dflash_config` and of the layers' own beside those at top level."""
    dflash = dict(table(whole, "dflash_config", where))
    for key, only in _ONLY.items():
        require_value(dflash, key, only, where)
        require_value(whole, key, only, where)
    if layout.writer != "speculators":
        return {**whole, **{key: value for key, value in dflash.items() if value is not None}}
    layers = dict(table(whole, "transformer_layer_config", where))
    if not layers:
        raise CheckpointError(f"{where}: transformer_layer_config is missing")
    layers.pop("quantization_config", None)  # its target's
    return {**layers, **{key: value for key, value in whole.items() if key != "transformer_layer_config"}}


def _is_shifted(config: Config, layout: BlockLayout, where: Path) -> bool:
    """Whether slots predict the token after their own position, so that the root's own slot proposes first."""
    if layout.writer == "speculators":
        said = config.get("sample_from_anchor")
        return layout.kind == "DSpark" if said is None else flag(config, "sample_from_anchor", where)
    if layout.kind == "Domino":
        return flag(config, "shift_label", where)
    return layout.writer in ("DeepSpec", "SpecForge")


def _layers(
    config: Config, layout: BlockLayout, names: Collection[str], root: str, where: Path
) -> tuple[list[LayerSpec], tuple[bool, ...]]:
    """A head's layers, and whether a query of each sees its block up to itself alone."""
    count = size(config, "num_hidden_layers", where)
    windows, causal = _windows(config, layout, count, where)
    attention, dense = attention_spec(config, where), dense_spec(config, where)
    layers = []
    for index, window in enumerate(windows):
        stored = f"{root}layers.{index}.self_attn"
        norms = f"{stored}.q_norm.weight" in names or not names  # of a head that has no tensors: as published ones
        layers.append(LayerSpec(replace(attention, window=window, qk_norm=norms), dense))
    return layers, causal


def _windows(config: Config, layout: BlockLayout, count: int, where: Path) -> tuple[list[int | None], tuple[bool, ...]]:
    """Of each layer: what it sees at most, and whether its block is causal.

    A window of `speculators` is counted from the root, and leaves the block alone: `BlockSpec.anchored`. There, and in
    the other layouts where nothing says, layers with a window are causal in the block. Source: vllm
    `qwen3_dflash.py`, `speculators` 0.9.0 `models/dflash`.
    """
    kinds = config.get("layer_types")
    slides = [kind == SLIDING_ATTENTION for kind in kinds[:count]] if isinstance(kinds, list) else [False] * count
    known = (FULL_ATTENTION, SLIDING_ATTENTION)
    if isinstance(kinds, list) and (len(kinds) < count or any(kind not in known for kind in kinds[:count])):
        raise CheckpointError(f"{where}: layer_types must name {' or '.join(known)} for each of {count} layers")
    everywhere = flag(config, "use_swa", where) and not any(slides)
    slides = [True] * count if everywhere else slides
    key = "swa_window_size" if config.get("swa_window_size") is not None else "sliding_window"
    window = size(config, key, where) if any(slides) else None
    if layout.writer == "speculators":
        apart = layout.kind != "DFlash 2" and not flag(config, "sliding_window_non_causal", where)
        causal = [own and apart for own in slides]
        reach = None if window is None else window + 1
        return [reach if own else None for own in slides], tuple(causal)
    said = config.get("is_causal") if config.get("is_causal") is not None else config.get("causal")
    if said is not None and not isinstance(said, bool):
        raise CheckpointError(f"{where}: causal must be true or false, got {shown(said)}")
    causal = [own and not everywhere for own in slides] if said is None else [said] * count
    if layout.kind in ("JetSpec", "DFlash 2"):
        causal = [layout.kind == "JetSpec"] * count
    return [window if own else None for own in slides], tuple(causal)


def _aux_inputs(config: Config, layout: BlockLayout, num_layers: int, num_own: int, where: Path) -> tuple[int, ...]:
    """The states of the target that the head reads, as `Target` numbers them: what enters a layer.

    `target_layer_ids` count what layers leave, `aux_hidden_state_layer_ids` what enters them. The last layer's is
    never read. Source of the defaults: z-lab/dflash, `speculators` 0.9.0.
    """
    if layout.writer == "speculators":
        key = "aux_hidden_state_layer_ids"
        inputs = integers(config, key, where) if config.get(key) is not None else (2, num_layers // 2, num_layers - 3)
    elif config.get("target_layer_ids") is not None:
        key, inputs = "target_layer_ids", tuple(each + 1 for each in integers(config, "target_layer_ids", where))
    elif num_own == 1:
        key, inputs = "target_layer_ids", (num_layers // 2 + 1,)
    else:
        key = "target_layer_ids"
        inputs = tuple(round(1 + i * (num_layers - 4) / (num_own - 1)) + 1 for i in range(num_own))
    if not inputs or any(not 0 <= each < num_layers for each in inputs):
        raise CheckpointError(
            f"{where}: {key}: the head reads {inputs}, and the target has the inputs of {num_layers} layers"
        )
    return inputs


def _mask_token(config: Config, vocab_size: int, where: Path) -> int:
    token = config.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise CheckpointError(f"{where}: mask_token_id must be a token below {vocab_size}, got {shown(token)}")
    return token


def _convolution(config: Config, layout: BlockLayout, hidden: int, where: Path) -> ConvolutionSpec | None:
    if layout.kind != "DFlash 2":
        return None
    group = size(config, "conv_group_size", where, default=16)
    if hidden % group:
        raise CheckpointError(f"{where}: conv_group_size {group} does not divide hidden_size {hidden}")
    return ConvolutionSpec(size(config, "conv_kernel_size", where, default=2), group, hidden)


def _edges(
    config: Config,
    layout: BlockLayout,
    decoder: ModelConfig,
    vocab_size: int,
    where: Path,
    root: str,
    names: Collection[str],
) -> EdgeSpec | None:
    """What scores a node's proposals by its path. Older files of SpecForge call the Markov head `logit_head`."""
    hidden = decoder.hidden_size
    if layout.kind == "DFlash 2":
        if vocab_size != decoder.vocab_size:
            raise CheckpointError(f"{where}: draft_vocab_size {vocab_size}: DFlash 2 proposes all tokens of the target")
        rank, top = size(config, "selector_rank", where), size(config, "selector_top_k", where)
        return SelectorSpec(rank, min(top, vocab_size), hidden, vocab_size, root)
    if layout.kind == "Domino":
        plain = size(config, "pure_draft_prefix_len", where, default=1)
        gru, width = size(config, "gru_hidden_dim", where), size(config, "emb_dim", where)
        return DominoSpec(gru, width, plain, hidden, vocab_size, root)
    if layout.kind != "DSpark":
        return None
    kind = config.get("markov_head_type", "vanilla")
    if kind not in MARKOV_KINDS:
        raise CheckpointError(f"{where}: markov_head_type must be one of {', '.join(MARKOV_KINDS)}, got {shown(kind)}")
    old = any(name.startswith(f"{root}logit_head.") for name in names)
    prefix = f"{root}{'logit_head' if old else 'markov_head'}"
    rank = size(config, "markov_rank", where)
    return MarkovSpec(kind, rank, decoder.hidden_size, decoder.vocab_size, vocab_size, prefix)
