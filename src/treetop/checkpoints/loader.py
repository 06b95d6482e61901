"""From a folder, or a `builtin:` name, to parameters where a model computes. All checks come before any work."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from treetop.checkpoints.checkpoint import all_finite, check_tensors, open_tensors
from treetop.checkpoints.params import Param, of_rank, stay_packed, stored_tensors
from treetop.checkpoints.progress import progress
from treetop.checkpoints.sent_tensors import open_sent
from treetop.kernels.profile import TIES, Profile
from treetop.kernels.table import OpContext, Ops
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.layout import SpecShape
from treetop.types.parallel import SINGLE_RANK, Parallel
from treetop.weights.adapted import Adapters
from treetop.weights.cpu_products import ChosenProduct, Shape
from treetop.weights.format import MAIN, Fetch, KernelContext, Packing, read_rows
from treetop.weights.gpu_products import Probed
from treetop.weights.held import HeldWeight, Weights
from treetop.weights.plain import UNQUANTIZED

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
class LoadContext:
    """Where and how a model computes.

    rope_rows: positions its RoPE table holds.
    dummy: random weights, no file.
    compressed: weights in 12 or 13 bits as well.
    products: on a CPU, the calls for weights of each shape.
    probed: on a GPU of products that are probed, what was found of the library's products by shape of a weight.
    profile: the ways that are taken where bits depend on it.
    shapes: of trees that will be grown.
    parallel: the rank that computes.
    expert_ranks: the same of ranks that share only the experts.
    packed: which quantized parameters stay packed in memory.
    activations: products with FP8 weights quantize their inputs.
    fla: prompts go through linear attention by `flash-linear-attention`.
    adapters: beside a model's products, if there are any.
    sent: tensors that stand for a folder's files.
    """

    dtype: torch.dtype
    device: torch.device
    rope_rows: int
    dummy: bool = False
    compressed: bool = False
    products: Mapping[Shape, ChosenProduct] = field(default_factory=dict)
    probed: Mapping[Shape, Probed] = field(default_factory=dict)
    profile: Profile = TIES
    shapes: tuple[SpecShape, ...] = ()
    parallel: Parallel = SINGLE_RANK
    expert_ranks: Parallel = SINGLE_RANK
    packed: Packing = "none"
    activations: bool = False
    fla: bool = False
    adapters: Adapters | None = None
    sent: Mapping[str, Tensor] | None = None

    @property
    def ops(self) -> Ops:
        """The operations that serve here."""
        context = OpContext(self.device, self.dtype, self.shapes, self.profile, self.fla)
        return Ops(context, self.parallel, self.expert_ranks)

    @property
    def kernel_context(self) -> KernelContext:
        """What products here may use."""
        return KernelContext(self.ops, self.compressed, self.products, self.probed, self.adapters)

    def held(self, params: Iterable[Param]) -> list[Param]:
        """Parameters in the formats in which they are held. Raises as `stay_packed`."""
        return stay_packed(params, self.packed, self.activations)

    def own(self, params: Sequence[Param]) -> list[Param]:
        """The rank's part of `held`. Raises ConfigError if one cannot be divided."""
        return of_rank(self.held(params), self.parallel, self.expert_ranks)


def load_weights(folder: Path, params: Sequence[Param], place: LoadContext, ignored: Collection[str] = ()) -> Weights:
    """The rank's part of all parameters, from a folder's files; random ones if the placement says so.

    Each is filled from one stored tensor after another, where the model computes: beside them there is at most one
    tensor in memory. A terminal sees how far it is. ignored: tensors that the files may hold. Raises CheckpointError
    as `checkpoint.open_tensors` says, for what is no weight in its format, and for a number that is too large for the
    dtype in which it is to be held.
    """
    mine = place.own(params)
    if place.dummy:
        return random_weights(mine, place)
    held: dict[str, HeldWeight] = {}
    stored, total = stored_tensors(place.held(params)), weight_bytes(mine, place.dtype)
    opened = (
        open_tensors(folder, stored, ignored, place.device)
        if place.sent is None
        else open_sent(place.sent, folder, stored, ignored, place.device)
    )
    with opened as fetch, progress(folder, total) as loaded:
        for param in mine:
            held[param.name] = HeldWeight(param.held, param.shape, _filled(param, fetch, place, folder))
            loaded(held[param.name].nbytes)
    return Weights(held, place.kernel_context)


def check_weights(folder: Path, params: Sequence[Param], ignored: Collection[str] = ()) -> int:
    """Names and shapes of what `load_weights` would read, without reading it. Returns how many tensors."""
    return check_tensors(folder, stored_tensors(params), ignored)


def _filled(param: Param, fetch: Fetch, place: LoadContext, folder: Path) -> dict[str, Tensor]:
    parts = param.empty(place.dtype, place.device)
    filled = dict.fromkeys(parts, 0)
    for source in param.sources:
        if source.span is not None and source.span.start == source.span.stop:
            continue
        for part, rows in read_rows(param.stored, param.held, source, fetch):
            filled[part] = _put(parts[part], filled[part], rows, f"{folder}: tensor {source.name}")
            del rows  # before more is read
    for part, whole in parts.items():
        if param.padded:
            whole[filled[part] :] = 0
        else:
            assert filled[part] == len(whole), f"{param.name}: sources fill {filled[part]} rows of {len(whole)}"
    return parts


def _put(whole: Tensor, start: int, rows: Tensor, where: str) -> int:
    """Write finite rows of a parameter, from its row `start` on; returns where they end.

    Raises CheckpointError, which begins with `where`, if one becomes infinite.
    """
    stop = start + rows.numel() // prod(whole.shape[1:])
    held = whole[start:stop].view(rows.shape)
    held.copy_(rows)  # rows may be turned: copied once
    if _largest(rows.dtype) > _largest(held.dtype) and not all_finite(held):
        value = float(rows.abs().max())
        wider = next(name for name in ("bfloat16", "float32", "float64") if value <= _largest(_TORCH_DTYPES[name]))
        dtype = str(held.dtype).removeprefix("torch.")
        raise CheckpointError(f"{where} holds {value:.4g}, which is too large for {dtype}; use --dtype {wider}")
    return stop


def _largest(dtype: torch.dtype) -> float:
    """The largest finite number; 0 of integers."""
    return torch.finfo(dtype).max if dtype.is_floating_point else 0.0


def random_weights(params: Sequence[Param], place: LoadContext) -> Weights:
    """Weights of real shapes, for measuring speed: products keep their input's size, all else does nothing."""
    generator = torch.Generator(device=place.device).manual_seed(0)
    held = {}
    for param in params:
        parts = param.empty(place.dtype, place.device)
        if param.kind in ("matrix", "experts", "heads", "router", "table"):
            param.held.fill_random(parts, generator)
        else:
            parts[MAIN].fill_(int(param.kind == "vector" and not param.name.endswith("bias")))
        held[param.name] = HeldWeight(param.held, param.shape, parts)
    return Weights(held, place.kernel_context)


def without_memory(params: Sequence[Param], place: LoadContext) -> Weights:
    """Weights of real shapes without numbers, on the device `meta`: what is made of them says what it takes."""
    held = {p.name: HeldWeight(p.held, p.shape, p.empty(place.dtype, "meta")) for p in params}
    return Weights(held, place.kernel_context)


def weight_bytes(params: Sequence[Param], dtype: torch.dtype, whole: bool = False) -> int:
    """What the parameters take. whole: as `Param.held_bytes` has it."""
    return sum(format_bytes(params, dtype, whole).values())


def format_bytes(params: Sequence[Param], dtype: torch.dtype, whole: bool = False) -> dict[str, int]:
    """What the parameters of each format take, by its name, and whether they are decoded."""
    found = Counter[str]()
    for param in params:
        decoded = param.held == UNQUANTIZED and param.stored.name != param.held.name
        found[f"{param.stored.name} decoded" if decoded else param.held.name] += param.held_bytes(dtype, whole)
    return dict(found)
