"""Whether weights are kept in 12 bits too (`kernels.compressed`), and what that takes: decided before any is read."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treetop.drafts.protocol import DrafterSpec
from treetop.engine.memory import Budget, Memory, fit, pool_bytes
from treetop.kernels.compressed import compressed_bytes, why_not_compressed
from treetop.kernels.linear import GatedLinear, Linear
from treetop.kernels.ops import TorchOps
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.models.loader import Placement
from treetop.models.params import Param
from treetop.models.registry import TargetSpec
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError
from treetop.types.layout import Layout


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
    copies, asked = copies_estimate(target, draft, gpu_traits(place.device)), config.max_total_tokens is not None
    left = budget.memory.free - pool_bytes(layout, place.dtype.itemsize) if asked else budget.pool_bytes
    memory = Memory(budget.memory.total, budget.memory.free - copies)
    made = replace(budget, memory=memory, static=budget.static + copies, copies=copies)
    if config.compress_weights or (4 * copies <= left and _fits(config, place, made, layout)):
        return made
    return budget


def _fits(config: EngineConfig, place: Placement, budget: Budget, layout: Layout) -> bool:
    """Whether the pools fit beside an allowance of a sixteenth of all memory."""
    spared = replace(budget, allowance=budget.allowance + budget.memory.total // 16)
    try:
        fit(layout, place.dtype.itemsize, spared, config.max_total_tokens)
    except CapacityError:
        return False
    return True


def copies_estimate(target: TargetSpec, draft: DrafterSpec | None, gpu: GpuTraits) -> int:
    """Bytes of all weights in 12 bits that gain by it: the models are made of tensors without memory, and counted."""
    ops, nowhere = _CopiesCounted(gpu), Placement(torch.float32, torch.device("meta"), 1)
    model = target.build(_without_memory(target.params), (), nowhere, ops)
    if draft is not None:
        draft.build(_without_memory(draft.params), model, nowhere, ops)
    return ops.bytes


def _without_memory(params: Sequence[Param]) -> dict[str, Tensor]:
    return {param.name: torch.empty(param.shape, device="meta") for param in params}


class _CopiesCounted(TorchOps):
    """Counts what the weights of products take in 12 bits."""

    def __init__(self, gpu: GpuTraits) -> None:
        self.bytes, self._gpu = 0, gpu

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        self._count(weight, bias, False)
        return super().linear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None = None) -> GatedLinear:
        self._count(weight, bias, True)
        return super().gated(weight, bias)

    def _count(self, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
        n, k = weight.shape
        self.bytes += compressed_bytes(n, k, gated, self._gpu) if bias is None else 0
