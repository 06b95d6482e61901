"""From a folder, or a `builtin:` name, to a model that runs. All checks come before any work."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from treetop.kernels.ops import Ops, ops_for
from treetop.kernels.products import ChosenProduct, Shape
from treetop.kernels.rope import rope_table
from treetop.models.checkpoint import Shapes, check_tensors, read_tensors, tensor_files
from treetop.models.eagle3 import Eagle3Head
from treetop.models.llama import Llama
from treetop.models.spec import Eagle3Spec, ModelSpec, eagle3_spec
from treetop.types.errors import CheckpointError, ConfigError

_MIDLAYER, _NEWER = "midlayer.", "layers.0."
_EMBEDDING = "embed_tokens.weight"
_TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_device(option: str) -> torch.device:
    """The device that `--device` means; `auto` is a GPU if there is one."""
    if option == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no CUDA device is available; use --device cpu")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if option == "auto" else option
    return torch.device(chosen)


def compute_dtype(option: str, device: torch.device) -> torch.dtype:
    """The dtype that `--dtype` means on this device; `auto` is float32 on a CPU, whatever the checkpoint holds."""
    if option == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _TORCH_DTYPES[option]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model computes.

    rope_rows: positions its RoPE table holds. dummy: random weights, no file. compressed: weights in 12 bits as well.
    products: on a CPU, the calls for weights of each shape.
    """

    dtype: torch.dtype
    device: torch.device
    rope_rows: int
    dummy: bool = False
    compressed: bool = False
    products: Mapping[Shape, ChosenProduct] = field(default_factory=dict)

    @property
    def ops(self) -> Ops:
        return ops_for(self.device, self.dtype, self.compressed, self.products)


def load_target(folder: Path, spec: ModelSpec, aux_inputs: tuple[int, ...], place: Placement) -> Llama:
    """Load a target. aux_inputs: which residual streams the draft head reads; () without a draft."""
    shapes = Llama.shapes(spec)
    weights = _dummy(shapes, place) if place.dummy else _cast(read_tensors(folder, shapes, _unused(spec)), place)
    rope = rope_table(spec.rope, place.rope_rows, place.dtype, place.device)
    return Llama(spec, weights, rope, aux_inputs, place.ops)


def load_eagle3(folder: Path, spec: Eagle3Spec, target: Llama, place: Placement) -> Eagle3Head:
    """Load an EAGLE-3 head. Its own embedding is used if the checkpoint has one, else the target's."""
    if place.dummy:
        own = {_EMBEDDING} if spec.layer.hidden_size != target.embedding.shape[1] else set()
        weights = _dummy(_head_shapes(spec, {"d2t", *own}), place)
    else:
        weights = _cast(_head_tensors(folder, spec), place)
    rope = rope_table(spec.layer.rope, place.rope_rows, place.dtype, place.device)
    return Eagle3Head(spec, weights, rope, weights.get(_EMBEDDING, target.embedding), place.ops)


def _head_tensors(folder: Path, spec: Eagle3Spec) -> dict[str, Tensor]:
    """A head's tensors by today's names, as stored; the draft vocabulary maps one to one into the target's."""
    raw = read_tensors(folder, _stored_shapes(folder, spec))
    tensors = {name.replace(_NEWER, _MIDLAYER): tensor for name, tensor in raw.items()}
    tensors.setdefault("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
    _check_vocab(folder, tensors["d2t"], tensors.pop("t2d", None), spec.layer.vocab_size)
    return tensors


def check_target(folder: Path, spec: ModelSpec) -> int:
    """Names and shapes of a target's tensors, without reading them; how many there are. Raises CheckpointError."""
    return check_tensors(folder, Llama.shapes(spec), _unused(spec))


def check_eagle3(folder: Path, spec: Eagle3Spec) -> int:
    """The same of a head."""
    return check_tensors(folder, _stored_shapes(folder, spec))


def read_eagle3_spec(folder: Path, target: ModelSpec, algorithm: str | None, dummy: bool = False) -> Eagle3Spec:
    """The head's spec, after its tensors have shown that it is an EAGLE-3 head, as `algorithm` says or None infers.

    dummy: there are no tensors to look at.
    """
    if not dummy:
        _refuse_target(folder)
    spec = eagle3_spec(folder, target)
    if dummy:
        return spec
    found = _algorithm_of(set(tensor_files(folder)))
    if algorithm not in (None, found):
        raise ConfigError(f"--speculative-algorithm {algorithm}, but {folder} holds an {found} head")
    if found != "EAGLE3":
        raise CheckpointError(f"{folder}: holds an {found} head; only EAGLE3 heads are supported")
    if target.hidden_size != spec.layer.hidden_size and _EMBEDDING not in tensor_files(folder):
        raise CheckpointError(
            f"{folder}: missing tensor {_EMBEDDING}: the head is {spec.layer.hidden_size} wide and cannot use"
            f" the target's embedding of {target.hidden_size}"
        )
    return spec


def _refuse_target(folder: Path) -> None:
    """Raise CheckpointError if the folder holds a target: layers of a model, and no `fc` that fuses features."""
    names = tensor_files(folder)
    layers = [name for name in names if name.startswith("model.layers.")]
    if layers and "fc.weight" not in names:
        raise CheckpointError(
            f"{folder}: a target, not a draft head: it holds {layers[0]} and no fc.weight; give a head's folder to"
            " --speculative-draft-model-path"
        )


def _algorithm_of(names: set[str]) -> str:
    """An EAGLE-3 head norms the feature beside the embedding; EAGLE-1 and -2 heads have no such norm."""
    eagle3 = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "d2t"}
    return "EAGLE3" if eagle3 & names or "fc.weight" not in names else "EAGLE"


def _unused(spec: ModelSpec) -> set[str]:
    """Tensors that a target's file may hold without a use; older writers stored the frequencies of the rotation."""
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(spec.num_layers)}
    return frequencies | ({"lm_head.weight"} if spec.tied_embeddings else set())


def _stored_shapes(folder: Path, spec: Eagle3Spec) -> dict[str, tuple[int, ...]]:
    """A head's tensors as its file names them; newer writers call the one layer `layers.0`."""
    names = set(tensor_files(folder))
    prefix = _NEWER if f"{_NEWER}hidden_norm.weight" in names else _MIDLAYER
    shapes = {name.replace(_MIDLAYER, prefix): shape for name, shape in _head_shapes(spec, names).items()}
    return {**shapes, "t2d": (spec.layer.vocab_size,)} if "t2d" in names else shapes


def _head_shapes(spec: Eagle3Spec, names: set[str]) -> dict[str, tuple[int, ...]]:
    """Expected tensors: the optional ones only where the file has them or the vocabulary needs them."""
    shapes = dict(Eagle3Head.shapes(spec))
    vocab, hidden = spec.layer.vocab_size, spec.layer.hidden_size
    if _EMBEDDING in names:
        shapes[_EMBEDDING] = (vocab, hidden)
    if spec.draft_vocab_size == vocab and "d2t" not in names:
        del shapes["d2t"]
    return shapes


def _check_vocab(folder: Path, offset: Tensor, member: Tensor | None, vocab_size: int) -> None:
    """d2t must be an offset that maps the draft vocabulary one to one into the target's; t2d, if present, agrees."""
    target = torch.arange(offset.shape[0]) + offset
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


def _dummy(shapes: Shapes, place: Placement) -> dict[str, Tensor]:
    """Random weights of real shapes, for measuring speed; the draft vocabulary is the first tokens of the target's."""
    generator = torch.Generator(device=place.device).manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        if name == "d2t":
            tensors[name] = torch.zeros(shape, dtype=torch.int64, device=place.device)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=place.dtype, device=place.device)
        else:
            tensors[name] = torch.empty(shape, dtype=place.dtype, device=place.device)
            tensors[name].normal_(std=float(shape[-1] ** -0.5), generator=generator)
    return tensors


def _cast(tensors: dict[str, Tensor], place: Placement) -> dict[str, Tensor]:
    return {
        name: tensor.to(place.device, place.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
