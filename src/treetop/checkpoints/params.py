"""Parameters, declared once: expected tensors, loading, the memory count and shards all follow from these."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm, prod
from typing import Literal

import torch
from torch import Tensor

from treetop.kernels.gemm.scale_forms import more_as_halves
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.parallel import SINGLE_RANK, ExpertPart, Parallel, expert_part
from treetop.weights.format import CheckpointTensor, HeldFormat, Packing, ParameterSpec, Span, StoredFormat, TensorSpec
from treetop.weights.plain import FLOATS, UNQUANTIZED
from treetop.weights.registry import held_format
from treetop.weights.rules import StoredFormats

Kind = Literal["matrix", "experts", "heads", "router", "table", "vector", "score", "index"]
"""A weight that inputs are multiplied by, one of many experts of which inputs take some, one of many heads of which
each takes its own, one that chooses experts or keys, one that rows are looked up in, a vector of a norm or a bias, one
that decides choices and keeps 32 bits, integers. The first three may be quantized; heads' are decoded as they are
loaded."""
_QUANTIZED: tuple[Kind, ...] = ("matrix", "experts", "heads")
STREAMED: tuple[Kind, ...] = ("matrix", "heads", "router")
"""What a forward reads all of."""
Shard = int | Literal["whole", "first"]
"""How ranks share a parameter: cut along an axis, each rank all of it, or the first rank alone (the bias of a product
whose parts are summed over the ranks)."""


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a model: its sources' rows, one below the other.

    name: ours, by which the model takes it.
    stored, held: how a checkpoint has it, and how it lies in memory.
    wide: kept in no less than float32.
    experts: how many experts' rows it holds, one below the other; 0 for what belongs to no expert.
    padded: where ranks cannot divide its one source's rows, zeros stand for those that are missing.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[CheckpointTensor, ...]
    kind: Kind = "matrix"
    shard: Shard = "whole"
    stored: StoredFormat = FLOATS
    held: HeldFormat = UNQUANTIZED
    wide: bool = False
    experts: int = 0
    padded: bool = False

    @property
    def numbers(self) -> int:
        return prod(self.shape)

    def unit(self, axis: int) -> int:
        """Along this axis it may be cut at multiples of it only."""
        return lcm(self.stored.unit(axis), self.held.unit(axis))

    def parts(self, dtype: torch.dtype) -> dict[str, ParameterSpec]:
        """Its tensors in memory where models compute in `dtype`, by the names of its format."""
        if self.kind == "index":
            dtype = torch.int64
        elif self.kind == "score" or self.wide:
            dtype = torch.promote_types(dtype, torch.float32)
        return self.held.parts(self.shape, dtype)

    def held_bytes(self, dtype: torch.dtype, whole: bool = False) -> int:
        """Bytes in memory. whole: in tiles, of products that cut no sum; scales of two levels then lie ready."""
        more = more_as_halves(self.held.scheme, self.shape, dtype) if whole and self.held.scheme is not None else 0
        return more + sum(prod(each.shape) * each.dtype.itemsize for each in self.parts(dtype).values())

    def empty(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Memory for it."""
        return {
            part: torch.empty(each.shape, dtype=each.dtype, device=device) for part, each in self.parts(dtype).items()
        }

    def rows_of(self, source: CheckpointTensor) -> int:
        """How many rows a whole source fills."""
        return prod(source.shape) // prod(self.shape[1:]) if source.rows is None else source.rows


def stored_tensors(params: Iterable[Param]) -> dict[str, TensorSpec]:
    """What a checkpoint must hold."""
    found: dict[str, TensorSpec] = {}
    for param in params:
        for source in param.sources:
            found |= param.stored.stored(source) | param.held.stored(source)
    return found


def in_formats(params: Iterable[Param], formats: StoredFormats) -> list[Param]:
    """Parameters in the formats that a checkpoint says they are stored in.

    Raises CheckpointError for a shape that its format cannot have, and for what is one product here but stored in
    several formats.
    """
    if not formats.rules:
        return list(params)
    found = [_in_format(param, formats) if _is_quantized(param) else param for param in params]
    for _, layer in groupby((p for p in found if p.kind == "experts"), key=lambda p: p.name.rpartition(".")[0]):
        _one_format([(param.stored, param.sources[0]) for param in layer], formats)
    return found


def _is_quantized(param: Param) -> bool:
    """Whether a format can be of it: of matrices those of a Linear alone, and a GRU's are none."""
    of_a_linear = param.kind != "matrix" or all(source.name.endswith(".weight") for source in param.sources)
    return param.kind in _QUANTIZED and of_a_linear


def _in_format(param: Param, formats: StoredFormats) -> Param:
    format_ = _one_format([(formats.of(source.module), source) for source in param.sources], formats)
    for source in _one_of_each_shape(param):
        format_.stored(source)  # or it raises
    return replace(param, stored=format_)


def _one_of_each_shape(param: Param) -> list[CheckpointTensor]:
    """The first of its sources of each shape, by which a format says whether it can be: 512 experts are asked once."""
    found: dict[object, CheckpointTensor] = {}
    for source in param.sources:
        found.setdefault((source.shape, source.stacked, source.parts), source)
    return list(found.values())


def renamed(params: Iterable[Param], names: Mapping[str, str]) -> list[Param]:
    """The same, whose stored tensors have other words in their names."""

    def name_of(stored: str) -> str:
        for ours, theirs in names.items():
            stored = stored.replace(ours, theirs)
        return stored

    return [
        replace(param, sources=tuple(replace(each, name=name_of(each.name)) for each in param.sources))
        for param in params
    ]


def stay_packed(params: Iterable[Param], packing: Packing, activations: bool = False) -> list[Param]:
    """Parameters as they are held, packed in memory where they and their format can be.

    activations: weights of matrices are such that quantize their inputs, where the checkpoint says how. Raises
    CheckpointError for a shape that a packed format cannot have.
    """
    made = [replace(each, held=held_format(each.stored, each.kind, packing, activations)) for each in params]
    for param in made:
        for source in _one_of_each_shape(param):
            param.held.stored(source)  # or it raises
    return made


def check_activations(params: Sequence[Param], folder: object) -> None:
    """Raises ConfigError for a target in which `--quantize-activations` cannot be honoured, by the weight's name."""
    matrices = [each for each in params if each.kind == "matrix"]
    for each in matrices:
        if isinstance(reason := each.stored.activations, str):
            raise ConfigError(
                f"--quantize-activations: {each.sources[0].module} in {each.stored.name} {reason}; drop the option"
            )
    if all(each.stored.activations is None for each in matrices):
        raise ConfigError(f"--quantize-activations: {folder} has no dense products in FP8; drop the option")


def about_activations(params: Sequence[Param]) -> str | None:
    """Which of a target's products quantize their inputs, in words; None if none do. params: as they are held."""
    found = {str(each.held.activations) for each in params if each.held.activations is not None}
    if not found:
        return None
    ways = " and ".join(sorted(found))
    wide = [
        words
        for kind, words in (("experts", "experts"), ("heads", "heads of compressed attention"))
        if any(each.kind == kind for each in params)
    ]
    kept = f"; those of {' and '.join(wide)} keep 16 bits" if wide else ""
    return f"activations in FP8 {ways}{kept}"


def _one_format(each: Sequence[tuple[StoredFormat, CheckpointTensor]], formats: StoredFormats) -> StoredFormat:
    first, source = each[0]
    for other, another in each[1:]:
        if other != first:
            raise CheckpointError(
                f"{formats.where}: quantization_config: {source.module} is {first.name} and {another.module}"
                f" {other.name}, but treetop multiplies by both at once; they must be in one format"
            )
    return first


def matrix(name: str, *sources: CheckpointTensor, shard: Shard = "whole") -> Param:
    """A product's weight, [out, in]; sources that share their input lie one below the other."""
    return Param(name, (sum(s.shape[0] for s in sources), sources[0].shape[1]), sources, "matrix", shard)


def of_vocab(name: str, stored: str, vocab: int, hidden: int, kind: Kind = "matrix") -> Param:
    """A table or an output matrix [vocab, hidden]: ranks have equal parts of the vocabulary, the last ones padded."""
    return Param(name, (vocab, hidden), (CheckpointTensor(stored, (vocab, hidden)),), kind, 0, padded=True)


def vector(name: str, *sources: CheckpointTensor, shard: Shard = "whole") -> Param:
    """A norm's weight or a bias."""
    return Param(name, (sum(s.shape[0] for s in sources),), sources, "vector", shard)


def cut(param: Param, rank: int, size: int) -> Param | None:
    """What rank `rank` of `size` has of a parameter that is whole: None if nothing.

    Each source is cut by itself, at multiples of its units: so a rank has whole heads of q, k and v. Raises ConfigError
    if they cannot be divided.
    """
    if param.shard == "whole" or (param.shard == "first" and rank == 0):
        return param
    if param.shard == "first":
        return None
    axis = param.shard
    if param.padded:
        length = param.shape[0]
        each = -(-length // size)
        if each % param.unit(0) != 0:
            raise _undivided(param.sources[0], size, length, 0, param.unit(0))
        span = Span(0, min(rank * each, length), min((rank + 1) * each, length))
        return replace(param, shape=(each, *param.shape[1:]), sources=(replace(param.sources[0], span=span),))
    spans = [_span(param, source, axis, rank, size) for source in param.sources]
    lengths = [span.stop - span.start for span in spans]
    length = sum(lengths) if axis == 0 else lengths[0]
    sources = tuple(replace(source, span=span) for source, span in zip(param.sources, spans, strict=True))
    return replace(param, shape=(*param.shape[:axis], length, *param.shape[axis + 1 :]), sources=sources)


def own_experts(number: int, part: ExpertPart) -> range:
    """Which of `number` experts a rank has; the first ranks may have one more. Raises ConfigError for one without."""
    if number < part.size:
        raise ConfigError(f"{number} experts are fewer than {part.size} ranks: lower --tp-size or --ep-size")
    each, more = divmod(number, part.size)
    start = part.rank * each + min(part.rank, more)
    return range(start, start + each + (part.rank < more))


def cut_experts(param: Param, part: ExpertPart) -> Param:
    """What a rank has of a parameter: its experts' rows, and all of what is no expert's."""
    if param.experts == 0 or part.size == 1:
        return param
    own, sources = own_experts(param.experts, part), param.sources
    if len(sources) == 1:
        sources = (replace(sources[0], span=Span(0, own.start, own.stop)),)
    else:
        each = len(sources) // param.experts
        sources = sources[own.start * each : own.stop * each]
    rows = param.shape[0] // param.experts * len(own)
    return replace(param, shape=(rows, *param.shape[1:]), sources=sources, experts=len(own))


def of_rank(params: Sequence[Param], parallel: Parallel, expert_ranks: Parallel = SINGLE_RANK) -> list[Param]:
    """What a rank has of these: of one rank all. Raises ConfigError if one cannot be divided.

    parallel: ranks that share all of it. expert_ranks: such that share the experts.
    """
    part = expert_part(parallel, expert_ranks)
    whole = [cut_experts(param, part) for param in params]
    if parallel.size == 1:
        return whole
    mine = (cut(param, parallel.rank, parallel.size) for param in whole)
    return [param for param in mine if param is not None]


def _span(param: Param, source: CheckpointTensor, axis: int, rank: int, size: int) -> Span:
    """The part of a source that is the rank's."""
    length, unit = param.rows_of(source) if axis == 0 else param.shape[axis], lcm(source.unit, param.unit(axis))
    units = length // unit
    if length % unit == 0 and units % size == 0:
        return Span(axis, rank * length // size, (rank + 1) * length // size)
    if length % unit == 0 and source.shared and size % units == 0:
        first = rank * units // size
        return Span(axis, first * unit, (first + 1) * unit)
    raise _undivided(source, size, length, axis, unit)


def _undivided(source: CheckpointTensor, size: int, length: int, axis: int, unit: int) -> ConfigError:
    return ConfigError(
        f"--tp-size {size}: {source.name} cannot be divided: {length} along axis {axis}, in units of {unit}"
    )
