"""From a folder, or a `builtin:` name, to parameters where a model computes. All checks come before any work."""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2, prod
from pathlib import Path

import torch
from torch import Tensor

from treetop.kernels.mxfp4 import GROUP_BYTES
from treetop.kernels.products import ChosenProduct, Shape
from treetop.kernels.table import OpContext, Ops
from treetop.models.checkpoint import all_finite, check_tensors, open_tensors
from treetop.models.params import Fetch, Param, Plain, Source, Span, of_rank, stored_tensors
from treetop.models.progress import progress
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.layout import SpecShape
from treetop.types.parallel import ALONE, Parallel

Weights = MutableMapping[str, Tensor]
"""Parameters by name. A model takes out what it keeps in another form, so that this is never there twice."""

_PIECE = 2**24
"""Numbers of a stored tensor that are read together."""
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
    products: on a CPU, the calls for weights of each shape. shapes: of trees that will be grown. parallel: the
    rank that computes. expert_ranks: the same of ranks that share only the experts.
    """

    dtype: torch.dtype
    device: torch.device
    rope_rows: int
    dummy: bool = False
    compressed: bool = False
    products: Mapping[Shape, ChosenProduct] = field(default_factory=dict)
    shapes: tuple[SpecShape, ...] = ()
    parallel: Parallel = ALONE
    expert_ranks: Parallel = ALONE

    @property
    def ops(self) -> Ops:
        """The operations that serve here."""
        context = OpContext(self.device, self.dtype, self.shapes)
        return Ops(context, self.compressed, self.products, self.parallel, self.expert_ranks)

    def own(self, params: Sequence[Param]) -> list[Param]:
        """The rank's part of parameters. Raises ConfigError if one cannot be divided."""
        return of_rank(params, self.parallel, self.expert_ranks)


def load_weights(
    folder: Path, params: Sequence[Param], place: Placement, ignored: Collection[str] = ()
) -> dict[str, Tensor]:
    """The rank's part of all parameters, by name, from a folder's files; random ones if the placement says so.

    Each is filled from one stored tensor after another, where the model computes: beside them there is at most one
    tensor in memory. A terminal sees how far it is. ignored: tensors that the files may hold. Raises CheckpointError
    as `checkpoint.open_tensors` says, and for a number that is too large for the dtype in which it is to be held.
    """
    mine = place.own(params)
    if place.dummy:
        return random_weights(mine, place)
    weights: dict[str, Tensor] = {}
    stored, total = stored_tensors(params), weight_bytes(mine, place.dtype)
    with open_tensors(folder, stored, ignored, place.device) as fetch, progress(folder, total) as loaded:
        for param in mine:
            weights[param.name] = _filled(param, fetch, place, folder)
            loaded(weights[param.name].nbytes)
    return weights


def check_weights(folder: Path, params: Sequence[Param], ignored: Collection[str] = ()) -> int:
    """Names and shapes of what `load_weights` would read, without reading it. Returns how many tensors."""
    return check_tensors(folder, stored_tensors(params), ignored)


def _filled(param: Param, fetch: Fetch, place: Placement, folder: Path) -> Tensor:
    whole, start = param.empty(place.dtype, place.device), 0
    for source in param.sources:
        for piece in _pieces(param, source):
            where = f"{folder}: tensor {source.name}"
            start = _put(whole, start, param.format.read(piece, fetch), where)  # keeps nothing that was read
    if param.padded:
        whole[start:] = 0
        return whole
    assert start == param.shape[0], f"{param.name}: the sources fill {start} rows of {param.shape[0]}"
    return whole


def _pieces(param: Param, source: Source) -> list[Source]:
    """Parts of a source that is stored as it is, so that little of a large tensor is in memory beside its parameter."""
    if source.span is not None and source.span.start == source.span.stop:
        return []
    if not isinstance(param.format, Plain) or source.transform is not None or source.span is not None:
        return [source]
    rows, step = source.shape[0], max(1, _PIECE // prod(source.shape[1:]))
    return [replace(source, span=Span(0, first, min(first + step, rows))) for first in range(0, rows, step)]


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


def random_weights(params: Sequence[Param], place: Placement) -> dict[str, Tensor]:
    """Weights of real shapes, for measuring speed: products keep their input's size, all else does nothing."""
    generator = torch.Generator(device=place.device).manual_seed(0)
    weights = {}
    for param in params:
        made = param.empty(place.dtype, place.device)
        if made.dtype == torch.uint8:
            made.random_(0, 256, generator=generator)
            made[..., GROUP_BYTES - 1] = 125 - round(log2(param.shape[-1]) / 2)  # of the same size, about
        elif param.kind in ("matrix", "experts", "table"):
            made.normal_(std=float(param.shape[-1] ** -0.5), generator=generator)
        else:
            made.fill_(int(param.kind == "vector" and not param.name.endswith("bias")))
        weights[param.name] = made
    return weights


def weight_bytes(params: Sequence[Param], dtype: torch.dtype) -> int:
    """What the parameters take."""
    return sum(param.held_bytes(dtype) for param in params)
