"""Which copies of weights are kept, and what they take: in 12 bits on a GPU, in a second order on a CPU.

`kernels.packed_weights` and `kernels.products` say what for. Decided before any weight is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treetop.drafts.protocol import DrafterSpec
from treetop.engine.memory import Budget, Memory, fit, pool_bytes
from treetop.kernels.gate import Gate
from treetop.kernels.linear import GatedLinear, Linear
from treetop.kernels.packed_weights import compressed_bytes, why_not_compressed
from treetop.kernels.products import TIMED_DTYPES, Shape
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.models.loader import Placement
from treetop.models.params import Param, of_rank
from treetop.models.registry import TargetSpec
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.layout import Layout
from treetop.types.parallel import ALONE, Parallel


def with_copies(
    config: EngineConfig,
    place: Placement,
    budget: Budget,
    layout: Layout,
    target: TargetSpec,
    draft: DrafterSpec | None,
) -> Budget:
    """The budget with copies of the weights of these models in 12 bits, if there are to be any.

    By itself that is where they take no more than a quarter of what the pools could have otherwise, or of what
    `--max-total-tokens` leaves, and the pools fit with memory to spare: activations are measured later. Raises
    ConfigError if `--compress-weights` cannot be.
    """
    problem = why_not_compressed(place.device, place.dtype)
    if config.compress_weights and problem is not None:
        raise ConfigError(f"--compress-weights: {problem}; use --no-compress-weights")
    if config.compress_weights is False or problem is not None:
        return budget
    copies, left = (
        copies_estimate(target, draft, gpu_traits(place.device), place.parallel),
        _left(config, place, budget, layout),
    )
    memory = Memory(budget.memory.total, budget.memory.free - copies)
    made = replace(budget, memory=memory, static=budget.static + copies, copies=copies)
    if config.compress_weights or (4 * copies <= left and _fits(config, place, made, layout)):
        return made
    return budget


@dataclass(frozen=True, slots=True)
class CpuWeights:
    """Weights whose products are chosen by timing, by shape, and in how many orders each may be kept."""

    shapes: tuple[Shape, ...] = ()
    orders: int = 1


def with_second_orders(
    config: EngineConfig,
    place: Placement,
    budget: Budget,
    layout: Layout,
    target: TargetSpec,
    draft: DrafterSpec | None,
) -> tuple[Budget, CpuWeights]:
    """On a CPU the budget with every weight in a second order, where these take a quarter of what pools could have.

    They count as weights do, whether or not timing will want them.
    """
    if place.device.type != "cpu" or place.dtype not in TIMED_DTYPES:
        return budget, CpuWeights()
    shapes = tuple(weight.shape for weight in product_weights(target, draft, place.parallel))
    size = place.dtype.itemsize * sum(n * k for n, k in shapes)
    memory = Memory(budget.memory.total, budget.memory.free - size)
    made = replace(budget, memory=memory, static=budget.static + size)
    if 4 * size <= _left(config, place, budget, layout) and _fits(config, place, made, layout):
        return made, CpuWeights(shapes, 2)
    return budget, CpuWeights(shapes)


def _left(config: EngineConfig, place: Placement, budget: Budget, layout: Layout) -> int:
    """Bytes that copies could have: the pools' share, or what `--max-total-tokens` leaves."""
    asked = config.max_total_tokens is not None
    return budget.memory.free - pool_bytes(layout, place.dtype.itemsize) if asked else budget.pool_bytes


def _fits(config: EngineConfig, place: Placement, budget: Budget, layout: Layout) -> bool:
    """Whether the pools fit beside an allowance of a sixteenth of all memory."""
    spared = replace(budget, allowance=budget.allowance + budget.memory.total // 16)
    try:
        fit(layout, place.dtype.itemsize, spared, config.max_total_tokens)
    except CapacityError:
        return False
    return True


def copies_estimate(target: TargetSpec, draft: DrafterSpec | None, gpu: GpuTraits, parallel: Parallel = ALONE) -> int:
    """Bytes of all weights of a rank in 12 bits that gain by it."""
    weights = product_weights(target, draft, parallel)
    return sum(compressed_bytes(*each.shape, each.gated, gpu) for each in weights if not each.bias)


@dataclass(frozen=True, slots=True)
class ProductWeight:
    """A weight that products are taken with. gated: gate and up, one after the other."""

    shape: Shape
    gated: bool
    bias: bool


def product_weights(target: TargetSpec, draft: DrafterSpec | None, parallel: Parallel = ALONE) -> list[ProductWeight]:
    """A rank's part of these models' weights: they are made of tensors without memory, and asked."""
    ops, nowhere = _Recorded(), Placement(torch.float32, torch.device("meta"), 1)
    model = target.build(_without_memory(of_rank(target.params, parallel)), (), nowhere, ops)
    if draft is not None:
        draft.build(_without_memory(of_rank(draft.params, parallel)), model, nowhere, ops)
    return ops.weights


def _without_memory(params: Sequence[Param]) -> dict[str, Tensor]:
    return {param.name: param.empty(torch.float32, "meta") for param in params}


def _norm_of_nothing(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What a norm returns, but not computed: on tensors without memory that loads PyTorch's compiler, in a second."""
    return x, x


class _Recorded(Ops):
    """Notes every weight that a product is prepared for."""

    def __init__(self) -> None:
        super().__init__(OpContext(torch.device("meta"), torch.float32))
        vars(self)["add_rms_norm"] = _norm_of_nothing
        self.weights: list[ProductWeight] = []

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        self.weights.append(ProductWeight((weight.shape[0], weight.shape[1]), False, bias is not None))
        return super().linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None = None, kind: Gate = "silu") -> GatedLinear:
        self.weights.append(ProductWeight((weight.shape[0], weight.shape[1]), True, bias is not None))
        return super().gated(weight, bias, kind)
