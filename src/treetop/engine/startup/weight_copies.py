"""Which weights stay packed, which copies of others are kept, and what these take: in 12 bits on a GPU, or 13 where
bits are exact, in a second order on a CPU.

Of which weights, says their format. Decided before any weight is read.
"""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from treetop.checkpoints.loader import LoadContext, compute_device, compute_dtype, without_memory
from treetop.drafts.protocol import DrafterSpec
from treetop.engine.memory import Budget, DeviceMemory, fit, pool_bytes
from treetop.kernels.gemm.ordered_weights import why_not_ordered
from treetop.kernels.table import OpContext, on_a_gpu_in_16_bits
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.models.registry import TargetSpec
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.layout import Layout
from treetop.types.parallel import SINGLE_RANK, PlaceholderRank
from treetop.weights.cpu_products import TIMED_DTYPES, Shape
from treetop.weights.format import Packing, ProductWeight
from treetop.weights.lossless import why_not_compressed


def packing(config: EngineConfig) -> Packing:
    """Which quantized parameters stay packed; if the configuration does not say, those whose products a GPU decodes in
    registers."""
    device = compute_device(config.device)
    if config.dequantize_weights is None:
        stays = on_a_gpu_in_16_bits(OpContext(device, compute_dtype(config.dtype, device)))
    else:
        stays = not config.dequantize_weights
    return "none" if not stays else "rows" if device.type == "cpu" else "tiles"


def with_copies(
    config: EngineConfig,
    place: LoadContext,
    budget: Budget,
    layout: Layout,
    target: TargetSpec,
    draft: DrafterSpec | None,
) -> Budget:
    """The budget with copies of the weights of these models in 12 or 13 bits, if there are to be any.

    By itself that is where they take no more than a quarter of what the pools could have otherwise, or of what
    `--max-total-tokens` leaves, and the pools fit with memory to spare: activations are measured later. Raises
    ConfigError if `--compress-weights` cannot be.
    """
    problem = why_not_compressed(place.device, place.dtype)
    if config.compress_weights and problem is not None:
        raise ConfigError(f"--compress-weights: {problem}; use --no-compress-weights")
    if config.compress_weights and place.profile.products == "probed" and draft is None:
        unordered = why_not_ordered(place.dtype, gpu_traits(place.device))
        if unordered is not None:
            raise ConfigError(
                f"--compress-weights: with --exactness bits a target's weights have 16 bits ({unordered}), and there is"
                " no draft; use --no-compress-weights"
            )
    if config.compress_weights is False or problem is not None:
        return budget
    copies, left = (
        copies_estimate(target, draft, place.dtype, gpu_traits(place.device), place),
        _left(config, place, budget, layout),
    )
    memory = DeviceMemory(budget.memory.total, budget.memory.free - copies)
    made = replace(budget, memory=memory, static=budget.static + copies, copies=copies)
    if config.compress_weights or (4 * copies <= left and _fits(config, place, made, layout)):
        return made
    return budget


@dataclass(frozen=True, slots=True)
class CpuWeights:
    """Weights whose products are chosen by timing, by shape, and in how many orders each may be kept.

    targets: how many are the target's, which come first; 0 where its products are chosen as the draft's are.
    few: few rows are the rule, for there is no draft, and a target's weights are small enough to be laid out in 16 bits
        beside exact calls.
    """

    shapes: tuple[Shape, ...] = ()
    orders: int = 1
    targets: int = 0
    few: bool = False


def with_second_orders(
    config: EngineConfig,
    place: LoadContext,
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
    weights = product_weights(target, draft, place)
    sizes = [each.format.copy_bytes(each, place.dtype, None) for each in weights]
    shapes, size = tuple(each.shape for each, copy in zip(weights, sizes, strict=True) if copy), sum(sizes)
    own = product_weights(target, None, place) if place.profile.products == "one call" else []
    targets = sum(1 for copy in sizes[: len(own)] if copy)
    memory = DeviceMemory(budget.memory.total, budget.memory.free - size)
    made = replace(budget, memory=memory, static=budget.static + size)
    if 4 * size <= _left(config, place, budget, layout) and _fits(config, place, made, layout):
        few = draft is None and sum(prod(each) for each in shapes) <= _MOST_IN_FLOAT16
        return made, CpuWeights(shapes, 2, targets, few)
    return budget, CpuWeights(shapes, targets=targets)


_MOST_IN_FLOAT16 = 2**28
"""Numbers of weights: FBGEMM takes 10 to 20 ns of a start for each."""


def _left(config: EngineConfig, place: LoadContext, budget: Budget, layout: Layout) -> int:
    """Bytes that copies could have: the pools' share, or what `--max-total-tokens` leaves."""
    asked = config.max_total_tokens is not None
    return budget.memory.free - pool_bytes(layout, place.dtype.itemsize) if asked else budget.pool_bytes


def _fits(config: EngineConfig, place: LoadContext, budget: Budget, layout: Layout) -> bool:
    """Whether the pools fit beside an allowance of a sixteenth of all memory."""
    spared = replace(budget, allowance=budget.allowance + budget.memory.total // 16)
    try:
        fit(layout, place.dtype.itemsize, spared, config.max_total_tokens)
    except CapacityError:
        return False
    return True


_NOWHERE = LoadContext(torch.float32, torch.device("meta"), 1)


def copies_estimate(
    target: TargetSpec, draft: DrafterSpec | None, dtype: torch.dtype, gpu: GpuTraits, place: LoadContext = _NOWHERE
) -> int:
    """Bytes of the copies of a rank's weights with which products on this GPU may be faster, of the target's without a
    cut of k where its bits are exact."""
    weights = product_weights(target, draft, place)
    own = len(product_weights(target, None, place)) if place.profile.products == "probed" else 0
    return sum(each.format.copy_bytes(each, dtype, gpu, uncut=at < own) for at, each in enumerate(weights))


def product_weights(
    target: TargetSpec, draft: DrafterSpec | None, place: LoadContext = _NOWHERE
) -> list[ProductWeight]:
    """A rank's part of these models' weights: they are made of tensors without memory, and say what they took."""
    size = place.parallel.size
    rank = SINGLE_RANK if size == 1 else PlaceholderRank(size)  # shapes are those of any other
    nowhere = replace(_NOWHERE, parallel=rank, packed=place.packed, activations=place.activations)
    ops = nowhere.ops
    vars(ops)["add_rms_norm"] = _norm_of_nothing
    weights = without_memory(nowhere.own(target.params), nowhere)
    model, products = target.build(weights, (), nowhere, ops), weights.products
    if draft is not None:
        weights = without_memory(nowhere.own(draft.params), nowhere)
        draft.build(weights, model, nowhere, ops)
        products += weights.products
    return products


def _norm_of_nothing(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What a norm returns, but not computed: on tensors without memory that loads PyTorch's compiler, in a second."""
    return x, x
