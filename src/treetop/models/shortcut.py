"""LongCat-Flash's feed-forward with experts: a dense one, and experts whose sum is added a layer later.

    x = x + attention(norm(x));  late = experts(norm(x));  x = x + dense(norm(x))      this layer, of one norm(x)
    x = x + attention(norm(x));                            x = x + dense(norm(x)) + late      the layer behind it

Ranks that exchange what experts read and give may do so while the rest goes on; here all comes in turn.
Source: shortcut-connected experts, arXiv:2404.05019; LongCat-Flash, arXiv:2509.01322, section 2.2.
"""

from torch import Tensor

from treetop.checkpoints.params import Param
from treetop.kernels.moe.routes import RoutedTokens
from treetop.kernels.table import Ops
from treetop.models.config import ShortcutSpec
from treetop.models.experts import ExpertMLP, expert_params
from treetop.models.layers import dense_mlp, mlp_params
from treetop.types.parallel import Summed, taken
from treetop.weights.format import Product
from treetop.weights.held import Weights


class ShortcutMLP:
    """A `FeedForward`; see the module."""

    def __init__(self, spec: ShortcutSpec, weights: Weights, name: str, ops: Ops) -> None:
        self._dense = dense_mlp(spec.dense, weights, f"{name}.dense", ops)
        self._experts = ExpertMLP(spec.experts, weights, f"{name}.experts", ops)
        self.products: list[Product] = [*self._dense.products, *self._experts.products]

    def __call__(self, x: Tensor, tokens: RoutedTokens, stream: Tensor) -> Summed:
        return self._dense(x)

    def late(self, x: Tensor, tokens: RoutedTokens) -> Tensor:
        """What is added behind the next layer, in parts [parts, ..., hidden]. x: as of `__call__`."""
        return taken(self._experts(x, tokens))


def shortcut_params(spec: ShortcutSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of the dense one's tensors, which those of the experts share."""
    return [
        *mlp_params(spec.dense, f"{name}.dense", stored, hidden),
        *expert_params(spec.experts, f"{name}.experts", stored, hidden),
    ]
