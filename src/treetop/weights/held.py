"""A model's weights where it computes, each in its format."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from treetop.kernels.gate import Gate
from treetop.kernels.moe.experts import Activation
from treetop.weights.adapted import AdaptedGated, GatesAndUps
from treetop.weights.format import (
    MAIN,
    ExpertProducts,
    GatedLinear,
    HeldFormat,
    KernelContext,
    Linear,
    Parts,
    ProductWeight,
)
from treetop.weights.plain import UNQUANTIZED, Unquantized


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """A parameter in memory. shape: of its numbers."""

    format: HeldFormat
    shape: tuple[int, ...]
    parts: Parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


class Weights:
    """Parameters by name. Products take theirs out, so that no weight is there twice.

    A parameter's bias is called NAME_bias.

    held: what has not been taken out.
    products: the weights that products were made with, in their order.
    """

    def __init__(self, held: Mapping[str, HeldWeight], kernel_context: KernelContext) -> None:
        self.held, self._holding = dict(held), kernel_context
        self.products: list[ProductWeight] = []

    def __contains__(self, name: str) -> bool:
        return name in self.held

    def __getitem__(self, name: str) -> Tensor:
        """A plain parameter, which stays."""
        return self.held[name].parts[MAIN]

    def pop(self, name: str) -> Tensor | None:
        """A plain parameter, taken out; None if there is none of this name."""
        found = self.held.pop(name, None)
        return None if found is None else found.parts[MAIN]

    def linear(self, name: str) -> Linear:
        """The product with a weight [out, in], and its bias if it has one."""
        linear, adapters = self._linear(name), self._holding.adapters
        return linear if adapters is None else adapters.linear(name, linear, self._holding.ops)

    def gated(self, name: str, kind: Gate = "silu") -> GatedLinear:
        """Activated gate times up, both of a product with one weight [2 * out, in]; see `linear`."""
        adapters = self._holding.adapters
        if adapters is not None and name in adapters.factors:
            return AdaptedGated(
                self._gates_and_ups(name, kind), kind, adapters.factors[name], adapters, self._holding.ops
            )
        weight, bias = self._take(name, gated=True)
        return weight.format.gated(weight.parts, bias, kind, self._holding)

    def linear_with(self, table: Tensor) -> Linear:
        """The product with a plain table [out, in] that is used otherwise too."""
        self.products.append(ProductWeight(UNQUANTIZED, (table.shape[0], table.shape[1]), gated=False, bias=False))
        return UNQUANTIZED.linear({MAIN: table}, None, self._holding)

    def experts(self, name: str, number: int, activation: Activation) -> ExpertProducts:
        """The products with `number` experts, NAME.gate_up and NAME.down, and their biases if they have any."""
        gate_up, down = self.held.pop(f"{name}.gate_up"), self.held.pop(f"{name}.down")
        both, last = self.pop(f"{name}.gate_up_bias"), self.pop(f"{name}.down_bias")
        return gate_up.format.experts(
            {part: each.view(number, 2, -1, *each.shape[1:]) for part, each in gate_up.parts.items()},
            {part: each.view(number, -1, *each.shape[1:]) for part, each in down.parts.items()},
            (None if both is None else both.view(number, 2, -1), None if last is None else last.view(number, -1)),
            activation,
            self._holding,
        )

    def _linear(self, name: str) -> Linear:
        """The product with a weight and nothing beside it."""
        weight, bias = self._take(name, gated=False)
        return weight.format.linear(weight.parts, bias, self._holding)

    def _gates_and_ups(self, name: str, kind: Gate) -> GatesAndUps:
        """Both, of a weight that adapters are beside."""
        weight, bias = self._take(name, gated=False)
        if isinstance(weight.format, Unquantized):
            return weight.format.beside_adapters(weight.parts, bias, kind, self._holding)
        return weight.format.linear(weight.parts, bias, self._holding)

    def _take(self, name: str, gated: bool) -> tuple[HeldWeight, Tensor | None]:
        weight, bias = self.held.pop(name), self.pop(f"{name}_bias")
        out, width = weight.shape
        self.products.append(ProductWeight(weight.format, (out, width), gated, bias is not None))
        return weight, bias
