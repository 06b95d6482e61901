"""The feed-forward of a layer, dense or of experts: the one place that makes it, and the one that lists its tensors."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from treetop.checkpoints.params import Param
from treetop.kernels.moe.routes import RoutedTokens
from treetop.kernels.table import Ops
from treetop.models.config import AbsentSpec, ExpertSpec, FeedForwardSpec, ParallelMoESpec, ShortcutSpec, UngatedSpec
from treetop.models.experts import ExpertMLP, expert_params
from treetop.models.layers import dense_mlp, mlp_params
from treetop.models.parallel_moe import ParallelMoE, parallel_moe_params
from treetop.models.shortcut import ShortcutMLP, shortcut_params
from treetop.models.ungated import UngatedMLP, ungated_params
from treetop.types.parallel import Summed
from treetop.weights.format import Product
from treetop.weights.held import Weights


class FeedForward(Protocol):
    """products: what it takes with weights, see `Target`."""

    @property
    def products(self) -> Sequence[Product]: ...

    def __call__(self, x: Tensor, tokens: RoutedTokens, stream: Tensor) -> Summed:
        """x: [..., hidden], the norm of the residual stream. Returns parts [parts, ..., hidden], whose sum it is."""


def feed_forward(spec: FeedForwardSpec, weights: Weights, name: str, eps: float, ops: Ops) -> FeedForward:
    """name: of its parameters. eps: of its norms, if it has any."""
    if isinstance(spec, ParallelMoESpec):
        return ParallelMoE(spec, weights, name, eps, ops)
    if isinstance(spec, ShortcutSpec):
        return ShortcutMLP(spec, weights, name, ops)
    if isinstance(spec, ExpertSpec):
        return ExpertMLP(spec, weights, name, ops)
    if isinstance(spec, UngatedSpec):
        return UngatedMLP(spec, weights, name, ops)
    assert not isinstance(spec, AbsentSpec)
    return dense_mlp(spec, weights, name, ops)


def feed_forward_params(spec: FeedForwardSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors."""
    if isinstance(spec, AbsentSpec):
        return []
    if isinstance(spec, ParallelMoESpec):
        return parallel_moe_params(spec, name, stored, hidden)
    if isinstance(spec, ShortcutSpec):
        return shortcut_params(spec, name, stored, hidden)
    if isinstance(spec, ExpertSpec):
        return expert_params(spec, name, stored, hidden)
    if isinstance(spec, UngatedSpec):
        return ungated_params(spec, name, stored, hidden)
    return mlp_params(spec, name, stored, hidden)
