"""A folder that PEFT wrote of a low-rank adapter (LoRA): what it says, and which products of a model it changes.

A folder `draft` in it is such an adapter of the draft head.

    y = W x + scale * B (A x)        A: [rank, in], B: [out, rank]

Source: PEFT 0.18 `tuners/lora` (`LoraConfig`, `lora_alpha / r`, or by its root with `use_rslora`), E. Hu et al.,
"LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from torch import Tensor

from treetop.checkpoints.checkpoint import all_finite
from treetop.checkpoints.json_file import not_there, read_object
from treetop.checkpoints.params import Param
from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import CheckpointTensor

_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_DRAFT = "draft"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_MAX_RANK, _BLOCK = 512, 1 << 20
_ADAPTABLE = re.compile(
    r"(layers\.\d+\.)?(attention\.(qkv|output|gate)|mlp\.(gate_up|up|down))|fuse|context|projection|narrow|widen"
)
"""Parameters whose products may have adapters beside them: those of attention with keys and values, of dense
feed-forwards, and those by which draft heads take in and give out states."""
_MODULES = {
    "model": "q, k, v and o of attention, gate, up and down of dense feed-forwards can; those of a draft head are in"
    f" the folder's {_DRAFT}/",
    "draft head": "q, k, v and o of attention, gate, up and down of dense feed-forwards, what joins states (fc) can",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "use_dora": (False,),
    "use_qalora": (False,),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "megatron_config": (),
}
"""Settings that are taken with these values, and where they are missing or null."""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """Beside a module's weight, [out, in] as it is stored. scale: of B A."""

    name: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class LoraFolder:
    """An adapter that was checked against a model. modules: by what the model's checkpoint calls them.

    draft: of the draft head, if it has one.
    """

    path: Path
    modules: Mapping[str, LoraModule]
    draft: "LoraFolder | None" = None

    @property
    def unread(self) -> Path | None:
        """An adapter of a draft head, where there is no such head."""
        beside = self.path / _DRAFT
        return beside if self.draft is None and beside.exists() else None

    @property
    def rank(self) -> int:
        """The largest."""
        return max(each.rank for each in self.modules.values())

    def digest(self) -> str:
        """Of what it changes, wherever it lies: what counts of its config, and the bytes of its factors."""
        found = sha256()
        for name, module in sorted(self.modules.items()):
            found.update(f"{name} {module.rank} {module.scale!r} ".encode())
        with (self.path / _TENSORS).open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
        if self.draft is not None:
            found.update(self.draft.digest().encode())
        return found.hexdigest()[:32]

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank]. Raises CheckpointError if they are not finite."""
        file = self.path / _TENSORS
        found = []
        with _opened(file) as tensors:
            for end in (_A, _B):
                found.append(tensors.get_tensor(f"{_PREFIX}{module}{end}"))
                if not all_finite(found[-1]):
                    raise CheckpointError(f"{file}: tensor {_PREFIX}{module}{end} holds what is no number")
        return found[0], found[1]


def is_adaptable(param: Param) -> bool:
    """Whether products with a parameter may have adapters beside them; of one whose columns are turned none may."""
    turned = param.name == "projection" and any(source.transform is not None for source in param.sources)
    return param.kind == "matrix" and _ADAPTABLE.fullmatch(param.name) is not None and not turned


def read_lora(path: Path, params: Sequence[Param], draft: Sequence[Param] = ()) -> LoraFolder:
    """What a folder holds, by its config and its tensors' headers. params: of the model, whole. draft: of its head;
    () for none, of which nothing is read then.

    Raises CheckpointError, which names the key or the tensor, for what is no LoRA adapter of this model, or changes
    what cannot be changed by request.
    """
    found, beside = _read(path, params, "model"), path / _DRAFT
    if not (draft and beside.exists()):
        return found
    return replace(found, draft=_read(beside, draft, "draft head"))


def _read(path: Path, params: Sequence[Param], whose: Literal["model", "draft head"]) -> LoraFolder:
    config, where = read_object(path / _CONFIG), path / _CONFIG
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{where}: peft_type must be 'LORA', got {shown(kind)}")
    for key, values in _NEUTRAL.items():
        if config.get(key) is not None and config[key] not in values:
            raise CheckpointError(f"{where}: {key} = {shown(config[key])} is not supported")
    file, places = path / _TENSORS, _places(params)
    with _opened(file) as tensors:
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    modules = {}
    for module in sorted({_module(file, name) for name in shapes}):
        sources = places.get(module)
        if sources is None:
            raise CheckpointError(
                f"{file}: {module}: the {whose} has no such module, or none that an adapter can be beside:"
                f" {_MODULES[whose]}"
            )
        modules[module] = LoraModule(module, *_rank_and_scale(module, sources[0], shapes, config, path))
    if not modules:
        raise CheckpointError(f"{file}: holds no adapter")
    return LoraFolder(path, modules)


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise CheckpointError(f"{file}: {not_there(file)}; adapters are read from safetensors")
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not readable: {error}") from None


def adaptable_modules(params: Sequence[Param]) -> set[str]:
    """By the names of a checkpoint. params: of a model, whole."""
    return set(_places(params))


def _places(params: Sequence[Param]) -> dict[str, list[CheckpointTensor]]:
    """The sources that are made of each module, of those that adapters may be beside."""
    found = dict[str, list[CheckpointTensor]]()
    barred = {each.module for param in params if not is_adaptable(param) for each in param.sources}
    for param in filter(is_adaptable, params):
        for source in param.sources:
            if source.module not in barred:
                found.setdefault(source.module, []).append(source)
    return found


def _module(file: Path, tensor: str) -> str:
    for end in (_A, _B):
        if tensor.startswith(_PREFIX) and tensor.endswith(end):
            return tensor.removeprefix(_PREFIX).removesuffix(end)
    raise CheckpointError(f"{file}: tensor {tensor} is not supported: an adapter has {_PREFIX}MODULE{_A} and {_B[1:]}")


def _rank_and_scale(
    module: str, source: CheckpointTensor, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], path: Path
) -> tuple[int, float]:
    file, (out, width) = path / _TENSORS, source.shape
    names = [f"{_PREFIX}{module}{end}" for end in (_A, _B)]
    missing = next((name for name in names if name not in shapes), None)
    if missing is not None:
        raise CheckpointError(f"{file}: missing tensor {missing}")
    a, b = (shapes[name] for name in names)
    rank = a[0] if a else 0
    if not 1 <= rank <= _MAX_RANK:
        raise CheckpointError(f"{file}: tensor {names[0]} has shape {a}: ranks lie between 1 and {_MAX_RANK}")
    for name, found, expected in ((names[0], a, (rank, width)), (names[1], b, (out, rank))):
        if found != expected:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {found}, expected {expected}: it is of another model"
            )
    said = _of_module(module, "r", "rank_pattern", config, rank, path)
    if said != rank:
        raise CheckpointError(f"{path / _CONFIG}: r or rank_pattern is {said:g}, but {names[0]} has {rank} rows")
    alpha = _of_module(module, "lora_alpha", "alpha_pattern", config, 8, path)
    scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    return rank, scale


def _of_module(module: str, key: str, table: str, config: Mapping[str, Any], default: float, path: Path) -> float:
    """The number that a table of patterns has for a module: PEFT matches whole names, or what follows a dot."""
    patterns, where = config.get(table) or {}, path / _CONFIG
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: {table} must be an object, got {shown(patterns)}")
    found = config.get(key, default)
    for pattern, value in patterns.items():
        try:
            fits = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise CheckpointError(f"{where}: {table}: {shown(pattern)} is no pattern: {error}") from None
        if fits:
            found = value
            break
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < abs(found) < 1e6:
        raise CheckpointError(f"{where}: {key} or {table} of {module} must be a number, got {shown(found)}")
    return float(found)
