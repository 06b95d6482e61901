"""Which EAGLE-3 head a folder holds: the layouts of SafeAILab, SGLang, SpecForge, NVIDIA and `speculators`, EAGLE-3.1.

Sources: SafeAILab/EAGLE `eagle/model/cnets.py`; sgl-project/sglang `srt/models/llama_eagle3.py`; vllm-project/vllm
`model_executor/models/llama_eagle3.py`; `speculators` 0.9.0 `models/eagle3`.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.checkpoint import tensor_files
from treetop.checkpoints.config_fields import Config, flag, size, table
from treetop.checkpoints.json_file import integers
from treetop.drafts.eagle3 import Eagle3Norms, Eagle3Spec
from treetop.drafts.head_files import (
    EMBEDDING,
    MASK_TOKENS,
    OUTPUT,
    check_made_for,
    head_config,
    head_layers,
    layer_prefixes,
    output_of,
    stated,
)
from treetop.models.config import ModelConfig, model_config
from treetop.models.target import LAST_HIDDEN
from treetop.types.errors import CheckpointError, shown

_LEGACY_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3_spec(folder: Path, target: ModelConfig, dummy: bool) -> Eagle3Spec:
    """The head in a folder, for `target`. dummy: there are no tensors to look at.

    Raises CheckpointError, which names the tensor or the key, if the head was made for another target, if config and
    tensors contradict each other, or for something that is not supported.
    """
    config, nested = head_config(folder)
    where = folder / "config.json"
    names = _assumed(config, nested, target, where) if dummy else frozenset(tensor_files(folder))
    prefixes = layer_prefixes(folder, names)
    decoder = model_config(config, where, head_layers(config, where, names, prefixes))
    vocab_size = size(config, "draft_vocab_size", where, default=decoder.vocab_size)
    reads_layers = _reads_layers(config, names, where)
    aux_inputs = _aux_inputs(config, len(target.layers), where) if reads_layers else (LAST_HIDDEN,)
    spec = Eagle3Spec(
        folder=folder,
        decoder=decoder,
        vocab_size=vocab_size,
        target_hidden_size=size(config, "target_hidden_size", where, default=decoder.hidden_size),
        aux_inputs=aux_inputs,
        fuses=reads_layers,
        norms=replace(
            _norms(config, names, prefixes, len(aux_inputs), where),
            doubtful=not nested and flag(config, "norm_output", where),
        ),
        prefixes=prefixes,
        fuse_bias=reads_layers and stated(config, ("bias",), "fc.bias", names, where),
        output=output_of(decoder, vocab_size, target, names, folder),
        stored=frozenset(names) & {EMBEDDING, "d2t", "t2d"} | ({"d2t"} if vocab_size != decoder.vocab_size else set()),
    )
    check_made_for(where, decoder, spec.target_hidden_size, target)
    if not reads_layers and target.hidden_size != decoder.hidden_size:
        raise CheckpointError(
            f"{where}: use_aux_hidden_state = false feeds the target's last hidden state of {target.hidden_size} to a"
            f" head that is {decoder.hidden_size} wide"
        )
    if target.hidden_size != decoder.hidden_size and EMBEDDING not in spec.stored:
        raise CheckpointError(
            f"{folder}: missing tensor {EMBEDDING}: the head is {decoder.hidden_size} wide and cannot use"
            f" the target's embedding of {target.hidden_size}"
        )
    return spec


def _assumed(config: Config, nested: bool, target: ModelConfig, where: Path) -> frozenset[str]:
    """Tensors of a head that has none yet, with a head of its own: of one layer, or as many as the config says if it is
    of `speculators` or of P-EAGLE.
    """
    says = nested or any(config.get(key) is not None for key in MASK_TOKENS)
    layers = range(size(config, "num_hidden_layers", where)) if says else ()
    names = {f"layers.{i}.self_attn.q_proj.weight" for i in layers} or {"midlayer.hidden_norm.weight"}
    if size(config, "hidden_size", where) != target.hidden_size:
        names.add(EMBEDDING)
    return frozenset(names | {OUTPUT, "d2t"})


def _reads_layers(config: Config, names: Collection[str], where: Path) -> bool:
    """Whether the head reads auxiliary layers, which `fc` fuses, or the target's last hidden state as it is.

    Source of the latter: nvidia/gpt-oss-120b-Eagle3-v2, vllm-27688.
    """
    uses = [each.get("use_aux_hidden_state") for each in (table(config, "eagle_config", where), config)]
    for value in uses:
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{where}: use_aux_hidden_state must be true or false, got {shown(value)}")
    if False not in uses:
        return True
    if "fc.weight" in names:
        raise CheckpointError(f"{where}: use_aux_hidden_state = false, but the file holds fc.weight")
    return False


def _aux_inputs(config: Config, num_layers: int, where: Path) -> tuple[int, ...]:
    """Input indices of the auxiliary layers. Where the ids stand decides what they mean.

    In `eagle_config` (SpecForge, NVIDIA) they count layer outputs, hence the + 1 (sgl-25454); unless one is the number
    of layers, which is no layer: then all of them count the boundaries between layers, as NVIDIA's later heads do
    (sgl-32334). At top level (`speculators`) they are inputs. The default is the original repository's.
    """
    eagle = table(config, "eagle_config", where)
    inputs: tuple[int, ...] = (2, num_layers // 2, num_layers - 3)
    if eagle.get(_IDS) is not None:
        ids = integers(eagle, _IDS, where)
        inputs = ids if num_layers in ids else tuple(i + 1 for i in ids)
        if any(i < 0 for i in ids):
            raise CheckpointError(f"{where}: {_IDS} {ids}: no layer has a negative number")
    elif config.get(_IDS) is not None:
        inputs = integers(config, _IDS, where)
    if not inputs or any(not 0 <= i <= num_layers for i in inputs):
        raise CheckpointError(f"{where}: auxiliary layer inputs {inputs} lie outside the target's 0 .. {num_layers}")
    said = config.get("num_aux_hidden_states")
    if said is not None and said != len(inputs):
        raise CheckpointError(f"{where}: num_aux_hidden_states is {shown(said)}, but there are {len(inputs)}: {inputs}")
    return inputs


def _norms(config: Config, names: Collection[str], prefixes: tuple[str, ...], count: int, where: Path) -> Eagle3Norms:
    """Which norms the head has. One that is in the file is never left out (sgl-32334), whatever the config forgot.

    `norm_output` is read as SGLang and vLLM do: the state that goes on is the normed one. SpecForge wrote the key for
    something else from 2026-05-27 to 2026-09-15 (SpecForge#879), under which a head has the same tensors, so nothing
    but acceptance tells: it is `doubtful` there. What `speculators` writes has one meaning.
    """
    before = stated(config, ("norm_before_fc",), "input_norm.weight", names, where)
    legacy = _LEGACY_NORMS[0] + ".weight" in names
    each = stated(
        config, ("fc_norm", "use_aux_norm"), "aux_norm_low.weight" if legacy else "fc_norm.0.weight", names, where
    )
    if before and each:
        raise CheckpointError(f"{where}: norm_before_fc and fc_norm exclude each other")
    if legacy and count != len(_LEGACY_NORMS):
        raise CheckpointError(f"{where}: tensors {', '.join(_LEGACY_NORMS)} norm 3 layers, but the head reads {count}")
    deeper = []
    for prefix in prefixes[1:]:
        both = [f"{prefix}.{norm}.weight" for norm in ("hidden_norm", "input_layernorm")]
        if all(name in names for name in both):
            raise CheckpointError(f"{where}: the file holds both {both[0]} and {both[1]}, of which a layer has one")
        deeper.append(both[0] if both[0] in names else both[1])
    return Eagle3Norms(
        before_residual=flag(config, "norm_before_residual", where),
        output=flag(config, "norm_output", where),
        joined=before,
        each=(_LEGACY_NORMS if legacy else tuple(f"fc_norm.{i}" for i in range(count))) if each else (),
        deeper=tuple(deeper),
    )
