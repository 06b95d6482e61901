"""Times routing and the products with experts on one GPU, against the bytes of the experts that were chosen.

    python benchmarks/experts.py                   the launches that are chosen, a line a shape and number of tokens
    python benchmarks/experts.py --launches        every candidate launch of the two products besides

A time is that of one layer in a replayed graph of many over different weights, as in a decode round: norm, routing,
both products; of one token the first product may choose the experts, which routing alone does here. Results are checked
before anything is timed. The floor is what the chosen experts' weights take at the machine's copy rate. JSON lines on
stdout; the first names the machine.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from frame import DEVICE, copy_bytes_per_s, end_with, machine_of, median_us, parser_of, say
from quantized_cases import FORMATS, random_weight
from torch import Tensor

from treetop.kernels.fused import add_rms_norm
from treetop.kernels.gemm.tiles import TiledWeight, in_turn, tile
from treetop.kernels.moe import experts as kernels
from treetop.kernels.moe.experts import Activation, Experts, GroupedLaunch, choose_grouped, experts_reference
from treetop.kernels.moe.routes import Router, RouterKind, RouterSpec, Routes
from treetop.kernels.moe.routing import route
from treetop.kernels.triton_guard import gpu_traits


@dataclass(frozen=True)
class Shape:
    """A layer of experts. packed: in which of `FORMATS`; None in 16 bits."""

    router: RouterSpec
    hidden: int
    inner: int
    activation: Activation
    packed: str | None

    @property
    def expert_bytes(self) -> float:
        if self.packed is None:
            return 6 * self.hidden * self.inner
        sizes = FORMATS[self.packed].parts((3 * self.inner, self.hidden), torch.bfloat16).values()
        return float(sum(math.prod(each.shape) * each.dtype.itemsize for each in sizes))


SHAPES = {
    "gpt-oss-20b": Shape(
        RouterSpec(32, 4, RouterKind.TOPK_SOFTMAX, bias=True), 2880, 2880, Activation.CLAMPED, packed="mxfp4"
    ),
    **{
        "qwen3-30b-a3b" + ("" if name is None else f" {name}"): Shape(
            RouterSpec(128, 8, RouterKind.SOFTMAX, renormalise=True), 2048, 768, Activation.SILU, packed=name
        )
        for name in (None, "fp8-block", "fp8-channel", "w4a16", "nvfp4")
    },
}
LAYERS = 12


class Layer:
    """Random weights, of which products keep their input's size."""

    def __init__(self, shape: Shape) -> None:
        spec, hidden, inner = shape.router, shape.hidden, shape.inner
        self.gpu = gpu_traits(DEVICE)
        self.shape, self.norm = shape, torch.ones(hidden, dtype=torch.bfloat16, device=DEVICE)
        bias = torch.randn(spec.num_experts, device=DEVICE).bfloat16() if spec.bias else None
        narrow = shape.packed == "mxfp4"
        self.router = Router(spec, self._normal(spec.num_experts, hidden), bias, None, leaves=True, narrow=narrow)
        self.alone = replace(self.router, leaves=False)  # chooses all by itself
        self.experts = Experts(
            self._weight(spec.num_experts, 2, inner, hidden),
            self._weight(spec.num_experts, hidden, inner),
            self._normal(spec.num_experts, 2, inner) if spec.bias else None,
            self._normal(spec.num_experts, hidden) if spec.bias else None,
            shape.activation,
        )

    @staticmethod
    def _normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).mul_(shape[-1] ** -0.5)

    def _weight(self, *shape: int) -> Tensor | TiledWeight:
        if self.shape.packed is None:
            return self._normal(*shape)
        weight = random_weight(FORMATS[self.shape.packed], *shape)
        return tile(in_turn(weight) if len(shape) == 4 else weight)


def check(layer: Layer, x: Tensor) -> float:
    """The relative error of both products. Padding and two calls are looked at too."""
    live = torch.rand(len(x), device=DEVICE) < 0.8
    live[0] = True
    routes = route(x, layer.router, live, layer.gpu)
    got = [kernels.experts(x, routes, layer.experts, layer.gpu) for _ in range(2)]
    assert torch.equal(*got), "two calls differ"
    few = live.nonzero()[:64, 0]
    part = replace(routes, expert=routes.expert[few], weight=routes.weight[few])
    want = experts_reference(x[few].float(), part, in_float32(layer.experts))[0]
    assert not bool(got[0][:, ~live].any()), "padding is not 0"
    return float((got[0].float().sum(0)[few] - want).norm() / want.norm())


def in_float32(experts: Experts) -> Experts:
    """Weights as the reference takes them for inputs in float32."""
    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    weights = {name: getattr(experts, name) for name in names}
    wide: dict[str, Any] = {n: w.float() if isinstance(w, Tensor) else w for n, w in weights.items()}
    return replace(experts, **wide)


def measure(layers: list[Layer], tokens: int) -> dict[str, float]:
    x = torch.randn(tokens, layers[0].shape.hidden, device=DEVICE).bfloat16()
    error = check(layers[0], x)
    assert error < 1e-2, f"relative error {error:.1e}"
    routes = [route(x, layer.alone, None, layer.gpu) for layer in layers]
    touched = statistics.mean(len(each.expert.unique()) for each in routes)

    def whole() -> None:
        stream, parts = x, torch.zeros((1, *x.shape), dtype=x.dtype, device=DEVICE)
        for layer in layers:
            stream, normed = add_rms_norm(stream, parts, layer.norm, 1e-5, layer.gpu)
            parts = kernels.experts(normed, route(normed, layer.router, None, layer.gpu), layer.experts, layer.gpu)

    return {
        "tokens": tokens,
        "error": round(error, 5),
        "experts": touched,
        "layer_us": median_us([whole], 20) / len(layers),
        "route_us": median_us([partial(route, x, layer.alone, None, layer.gpu) for layer in layers], 20),
        "products_us": median_us(products(x, layers, routes), 20),
    }


def products(x: Tensor, layers: list[Layer], routes: list[Routes]) -> list[Callable[[], object]]:
    pairs = zip(layers, routes, strict=True)
    return [partial(kernels.experts, x, each, layer.experts, layer.gpu) for layer, each in pairs]


def candidates(shape: Shape, rows: int, gated: bool) -> list[GroupedLaunch]:
    block_k = 64 if shape.packed is None else 128
    cuts = ((128, 4), (128, 8), (64, 2), (64, 4)) if rows > 32 else ((64, 2), (64, 4), (128, 4), (128, 8))
    splits = (1,) if gated else (1, 2) if rows > 32 else (2, 4, 6)
    stages = (3,) if rows > 32 else (4, 7)
    return [GroupedLaunch(n, block_k, s, each, warps) for (n, warps), s, each in product(cuts, splits, stages)]


def try_launches(layers: list[Layer], tokens: int, name: str) -> None:
    """Times of both products with each candidate of one of them."""
    x = torch.randn(tokens, layers[0].shape.hidden, device=DEVICE).bfloat16()
    routes = [route(x, layer.alone, None, layer.gpu) for layer in layers]
    tiles = routes[0].tiles
    assert tiles is not None

    for gated in (True, False):
        rows = []
        for launch in candidates(layers[0].shape, tiles.rows, gated):

            def chosen(*args: Any, launch: GroupedLaunch = launch, gated: bool = gated) -> GroupedLaunch:
                return launch if args[3] == gated else choose_grouped(*args)

            try:
                with mock.patch.object(kernels, "choose_grouped", chosen):
                    rows.append((median_us(products(x, layers, routes), 20), launch))
            except Exception as error:  # out of shared memory
                say({"launch": str(launch), "error": repr(error)[:200]})
        for us, launch in sorted(rows, key=lambda row: row[0])[:6]:
            say({"shape": name, "tokens": tokens, "gated": gated, "us": us, "launch": str(launch)})


@torch.inference_mode()
def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 4, 8, 32, 60, 480, 4096])
    parser.add_argument("--launches", action="store_true")
    args = parser.parse_args(arguments)
    rate = copy_bytes_per_s()
    say(machine_of(rate))
    for name in args.shapes:
        layers = [Layer(SHAPES[name]) for _ in range(LAYERS)]
        for tokens in args.tokens:
            figures = measure(layers, tokens)
            floor = 1e6 * figures["experts"] * SHAPES[name].expert_bytes / rate
            say({"shape": name, **figures, "floor_us": floor, "ratio": figures["layer_us"] / floor})
            if args.launches:
                try_launches(layers, tokens, name)
        del layers
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    end_with(main)
