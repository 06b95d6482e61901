"""Lightning attention: linear attention whose heads forget at a constant rate each, of MiniMax-01 and M1.

    q, k, v = SiLU(in(x)), by head
    M <- e^-s M + k^T v;  o = q M           the recurrence of `kernels.recurrent.states`, without its delta rule
    out(norm(o) * sigmoid(gate(x)))         the norm of all heads' numbers together, whose eps is 1e-6

s of head h (from 1) of H is 2^(-8 h / H), times a number of the layer. It is computed here: `transformers` keeps it in
the model's dtype, of which bfloat16 is 0.4 % off. No convolution and no rotation. In float32 at least but for products.
Source: MiniMax-01, arXiv:2501.08313; `transformers`' minimax.
"""

from functools import partial

import torch
from torch import Tensor

from treetop.attention.layer import Attend
from treetop.checkpoints.params import Param, matrix, vector
from treetop.kernels.recurrent.states import StateInputs
from treetop.kernels.table import Ops
from treetop.models.layers import Rotary
from treetop.models.mixers.recurrences import LightningSpec
from treetop.types.parallel import Summed
from treetop.weights.format import CheckpointTensor, Product
from treetop.weights.held import Weights

NORM_EPS = 1e-6
"""Whatever a model's norms have."""


def slopes(spec: LightningSpec, like: Tensor) -> Tensor:
    """[heads], in the dtype of `like`, float32 at least."""
    head = torch.arange(1, spec.heads + 1, dtype=torch.float64)
    found = torch.exp2(-8 * head / spec.heads) * spec.of_slopes
    return found.to(like.device, torch.promote_types(like.dtype, torch.float32))


class Lightning:
    """An `Attention` whose `attend` keeps a state. name: of its parameters."""

    def __init__(self, spec: LightningSpec, weights: Weights, name: str, layer: int, ops: Ops) -> None:
        self.spec, self._layer, self._ops = spec.of_rank(ops.parallel.size), layer, ops
        self.inputs, self.gate, self.output = (weights.linear(f"{name}.{each}") for each in ("qkv", "gate", "output"))
        self.products: list[Product] = [self.inputs, self.gate, self.output]
        self._norm = weights[f"{name}.norm"]
        self._decay = -slopes(spec, self._norm)

    def __call__(self, x: Tensor, rotary: Rotary, attend: Attend) -> Summed:
        """x: [rows, n, in]. Returns parts [parts, rows, n, hidden], of all ranks."""
        spec, wide, functions = self.spec, self._decay.dtype, self._ops.functions
        mixed = functions.silu(self.inputs(x)).to(wide)
        q, k, v = (each.unflatten(-1, (spec.heads, spec.head_dim)).contiguous() for each in mixed.chunk(3, dim=-1))
        inputs = StateInputs(q, k, v, self._decay.expand(*x.shape[:2], -1).contiguous(), None)
        out = attend.recur(self._layer, inputs).flatten(2)
        mean = self._ops.profile.total(out.square()) / out.shape[-1]
        normed = out * torch.rsqrt(mean + NORM_EPS) * self._norm
        gated = normed * functions.sigmoid(self.gate(x).to(wide))
        return self._ops.parallel.share(self.output.parts(gated.to(x.dtype)))


def lightning_params(spec: LightningSpec, name: str, stored: str, hidden: int) -> list[Param]:
    """stored: the prefix of its tensors, of which one has q, k and v of each head in turn."""
    inner = spec.heads * spec.head_dim
    cuts = (partial(_of_each_head, heads=spec.heads, part=part) for part in range(3))
    qkv = [CheckpointTensor(f"{stored}.qkv_proj.weight", (3 * inner, hidden), cut, inner) for cut in cuts]
    return [
        Param(f"{name}.qkv", (3 * inner, hidden), tuple(qkv), "matrix", 0),
        matrix(f"{name}.gate", CheckpointTensor(f"{stored}.output_gate.weight", (inner, hidden)), shard=0),
        matrix(f"{name}.output", CheckpointTensor(f"{stored}.out_proj.weight", (hidden, inner)), shard=1),
        vector(f"{name}.norm", CheckpointTensor(f"{stored}.norm.weight", (inner,))),
    ]


def _of_each_head(stored: Tensor, heads: int, part: int) -> Tensor:
    by_head: Tensor = stored.unflatten(0, (heads, 3, -1))
    return by_head[:, part].flatten(0, 1)
