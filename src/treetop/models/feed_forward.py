"""The feed-forward of a layer, dense or of experts: the one place that makes it, and the one that lists its tensors."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from treetop.kernels.table import Ops
from treetop.models.config import DenseSpec, ExpertSpec
from treetop.models.experts import ExpertMLP, expert_params
from treetop.models.layers import GatedMLP, mlp_params
from treetop.models.params import Param
from treetop.types.parallel import Summed
from treetop.weights.format import Product
from treetop.weights.held import Weights


class FeedForward(Protocol):
    """products: what it takes with weights, see `Target`."""

    @property
    def products(self) -> Sequence[Product]: ...

    def __call__(self, x: Tensor, live: Tensor | None) -> Summed:
        """x: [..., hidden]. live: [...] bool, False for padding, None if there is none. Returns parts [parts, ...,
        hidden], whose sum it is."""


def feed_forward(spec: DenseSpec | ExpertSpec, weights: Weights, name: str, ops: Ops) -> FeedForward:
    """name: of its parameters."""
    if isinstance(spec, ExpertSpec):
        return ExpertMLP(spec, weights, name, ops)
    return GatedMLP(weights, name, ops, spec.gate)


def feed_forward_params(spec: DenseSpec | ExpertSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors."""
    make = expert_params if isinstance(spec, ExpertSpec) else mlp_params
    return make(spec, name, stored, hidden)  # type: ignore[arg-type]  # chosen by the spec's type
