"""A feed-forward without a gate: down(activation(up(x))).

    relu2       relu(x)^2                                                       arXiv:2109.08668
    gelu        x Phi(x), by the error function; gelu_tanh: by a tanh           arXiv:1606.08415
    xielu       a x^2 + b x above 0, n (e^min(x, c) - 1 - x) + b x below        arXiv:2411.13010

xIELU's a = softplus(alpha_p) and n = b + softplus(alpha_n) are learned, of each layer; b and c are stored beside them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.moe.routes import ALL_LIVE, RoutedTokens
from treetop.kernels.table import Ops
from treetop.models.config import Ungated, UngatedSpec
from treetop.types.parallel import Summed
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights

_CURVE = ("alpha_p", "alpha_n", "beta", "eps")


class UngatedMLP:
    """A `FeedForward`; see the module. name: of its parameters."""

    def __init__(self, spec: UngatedSpec, weights: Weights, name: str, ops: Ops) -> None:
        self.up, self.down = weights.linear(f"{name}.up"), weights.linear(f"{name}.down")
        self.products: list[Product] = [self.up, self.down]
        self._kind, self._parallel = spec.activation, ops.parallel
        self._curve = [weights[f"{name}.{each}"] for each in _CURVE] if spec.activation == "xielu" else []

    def __call__(self, x: Tensor, tokens: RoutedTokens = ALL_LIVE, stream: Tensor | None = None) -> Summed:
        """x: [..., hidden]. Returns parts [parts, ..., hidden], of all ranks and all tokens, live or not."""
        return self._parallel.share(self.parts(x))

    def parts(self, x: Tensor) -> Tensor:
        """This rank's share of it."""
        inner = self.up(x)
        return self.down.parts(_xielu(inner, *self._curve) if self._curve else ungated(inner, self._kind))


def ungated(x: Tensor, kind: Ungated) -> Tensor:
    """The activation, but for xIELU, which has weights."""
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="none" if kind == "gelu" else "tanh")


def _xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    above, below = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    return torch.where(x > 0, above * x * x + beta * x, (torch.expm1(torch.minimum(x, eps)) - x) * below + beta * x)


def ungated_params(spec: UngatedSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors."""
    inner, (up, down) = spec.inner_size, (f"{stored}.{each}" for each in spec.names)
    params = [
        matrix(f"{name}.up", CheckpointTensor(f"{up}.weight", (inner, hidden)), shard=0),
        matrix(f"{name}.down", CheckpointTensor(f"{down}.weight", (hidden, inner)), shard=1),
    ]
    if spec.bias:
        params.append(vector(f"{name}.up_bias", CheckpointTensor(f"{up}.bias", (inner,)), shard=0))
        params.append(vector(f"{name}.down_bias", CheckpointTensor(f"{down}.bias", (hidden,)), shard="first"))
    if spec.activation == "xielu":
        shapes: tuple[tuple[int, ...], ...] = ((1,), (1,), (), ())
        for each, shape in zip(_CURVE, shapes, strict=True):
            source = CheckpointTensor(f"{stored}.act_fn.{each}", shape, _in_one_dimension, rows=1)
            params.append(Param(f"{name}.{each}", (1,), (source,), "vector"))
    return params


def _in_one_dimension(stored: Tensor) -> Tensor:
    return stored.reshape(1)
