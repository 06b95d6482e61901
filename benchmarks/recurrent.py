"""Times the recurrent layers of Qwen3-Next and others on one GPU, without their products with weights.

    python benchmarks/recurrent.py --batches 1,8,32 --nodes 1,4,16,64
    python benchmarks/recurrent.py --chunks 2048,8192 --batches 1

A time is that of one layer in a replayed graph of many over different states, as in a round: convolution along paths,
gates, verification with one update pending for one node and six for more, norm and gate. Gates and norm are those of a
gated delta net; of other kinds convolution and verification are timed alone. Outputs are checked against the reference
before anything is timed. `floor_us` is what a load and a store of the states take at the machine's copy
rate. `--chunks` times prefill in the same way. JSON lines on stdout; the first names the machine.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from frame import DEVICE, copy_bytes_per_s, end_with, machine_of, median_us, parser_of, say
from torch import Tensor

from treetop.kernels.recurrent.convolution import tree_windows
from treetop.kernels.recurrent.states import LayerStates, StateInputs, StateUpdates
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import STATE
from treetop.types.state import StateGroup

GROUPS = {
    "qwen3-next": StateGroup(STATE, 36, 8192, 4, 32, 16, 128, 128, delta=True, per_channel=False),
    "qwen3.5-27b": StateGroup(STATE, 48, 10240, 4, 48, 16, 128, 128, delta=True, per_channel=False),
    "kimi-linear": StateGroup(STATE, 20, 12288, 4, 32, 32, 128, 128, delta=True, per_channel=True),
    "nemotron-3-nano": StateGroup(STATE, 23, 6144, 4, 64, 8, 128, 64, delta=False, per_channel=False),
}
WIDTH, LAYERS = 6, 6
HALF, WIDE = torch.bfloat16, torch.float32


def updates(group: StateGroup, *lead: int) -> StateUpdates:
    k = torch.randn(*lead, group.key_heads, group.key_dim, device=DEVICE) / group.key_dim**0.5
    d = torch.randn(*lead, group.heads, group.value_dim, device=DEVICE)
    return StateUpdates(k, d, -torch.rand(*lead, *group.decay_shape, device=DEVICE))


class Layer:
    """Random states of `rows` rows and what comes in for them: `n` tokens each."""

    def __init__(self, group: StateGroup, rows: int, n: int, exact: bool = False) -> None:
        ops, gpu = Ops, gpu_traits(DEVICE)
        self.group, self.rows, self.dummy = group, torch.arange(rows, device=DEVICE), rows
        conv = torch.randn(rows + 1, group.channels, group.taps - 1, device=DEVICE, dtype=HALF)
        state = torch.randn(rows + 1, *group.state_shape, device=DEVICE)
        count = torch.full((rows + 1,), 1 if n == 1 else WIDTH, device=DEVICE)
        self.states = LayerStates(conv, state, updates(group, rows + 1, WIDTH), count)
        self.mixed = torch.randn(rows, n, group.channels, device=DEVICE, dtype=HALF)
        self.weight = torch.randn(group.channels, group.taps, device=DEVICE, dtype=HALF) / 2
        self.gates = torch.randn(rows, n, 2 * group.heads, device=DEVICE, dtype=HALF)
        self.rate, self.bias = -torch.rand(group.heads, device=DEVICE), torch.randn(group.heads, device=DEVICE)
        self.z = torch.randn(rows, n, group.heads * group.value_dim, device=DEVICE, dtype=HALF)
        self.norm = torch.ones(group.value_dim, device=DEVICE, dtype=HALF)
        self.stash, self.given = updates(group, rows, n), None
        if not group.delta or group.per_channel:
            of, beta = updates(group, rows, n), torch.rand(rows, n, group.heads, device=DEVICE)
            self.given = StateInputs(of.k, of.k.clone(), of.d, of.g, beta if group.delta else None)
        rng = random.Random(n)
        line = [[0, *(rng.randrange(node) for node in range(1, n))] for _ in range(rows)]
        self.parents = torch.tensor(line, device=DEVICE)
        self.windows = tree_windows(self.parents, group.taps)
        self.valid = torch.ones((rows, n), dtype=torch.bool, device=DEVICE)
        names = ("path_conv", "prefill_conv", "delta_inputs", "verify_states", "prefill_states", "gated_norm")
        self.run: dict[str, Callable[..., object]] = {name: getattr(ops, name).on(gpu, exact) for name in names}

    def inputs(self, mixed: object) -> object:
        return self.given or self.run["delta_inputs"](
            mixed, self.gates, self.rate, self.bias, self.group.key_heads, self.group.key_dim
        )

    def verify(self) -> None:
        mixed = self.run["path_conv"](self.states.conv, self.rows, self.mixed, self.windows, self.weight)
        call = (self.states, self.rows, self.inputs(mixed), self.parents, self.stash, self.dummy)
        self.leave(self.run["verify_states"](*call))

    def prefill(self) -> None:
        mixed = self.run["prefill_conv"](self.states.conv, self.rows, self.mixed, self.valid, self.weight)
        out = self.run["prefill_states"](self.states, self.rows, self.inputs(mixed), self.valid)
        self.leave(out)

    def leave(self, out: object) -> None:
        if self.given is None:
            self.run["gated_norm"](out, self.z, self.norm, 1e-6)

    def error(self) -> float:
        """Of a verification, as a share of the largest output, against the reference in float64."""
        inputs = self.inputs(self.mixed)
        assert isinstance(inputs, StateInputs)
        wide = StateInputs(*(None if x is None else x.double() for x in _parts(inputs)))  # type: ignore[arg-type]
        pending = StateUpdates(
            *(x.double() for x in (self.states.pending.k, self.states.pending.d, self.states.pending.g))
        )
        states = replace(self.states, state=self.states.state.double(), pending=pending)
        stash = StateUpdates(self.stash.k.double(), self.stash.d.double(), self.stash.g.double())
        exact = Ops.verify_states.reference(states, self.rows, wide, self.parents, stash, self.dummy)
        own = replace(self.states, state=self.states.state.clone())
        ours = self.run["verify_states"](own, self.rows, inputs, self.parents, self.stash, self.dummy)
        assert isinstance(ours, Tensor)
        return float((ours.double() - exact).abs().max() / exact.abs().max())


def _parts(inputs: StateInputs) -> list[Tensor | None]:
    return [inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta]


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=GROUPS, default="qwen3-next")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--nodes", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--chunks", type=numbers, help="time chunks of so many tokens instead")
    parser.add_argument("--exact", action="store_true", help="time what --exactness bits has instead")
    args: argparse.Namespace = parser.parse_args(arguments)
    group, copy = GROUPS[args.model], copy_bytes_per_s()
    say(machine_of(copy))
    for rows in args.batches:
        for n in args.chunks or args.nodes:
            layers = [Layer(group, rows, n, args.exact) for _ in range(LAYERS)]
            error = None if args.chunks else layers[0].error()
            if error is not None and error > 1e-4:
                raise AssertionError(f"{n} nodes, {rows} rows: outputs are off by {error:.1e}")
            calls = [partial(Layer.prefill if args.chunks else Layer.verify, layer) for layer in layers]
            took = median_us(calls)
            floor = 2 * rows * 4 * group.heads * group.key_dim * group.value_dim / copy * 1e6
            line = {"model": args.model, "rows": rows, "tokens": n, "layer_us": round(took, 2), "error": error}
            say({**line, "all_layers_ms": round(took * group.num_layers / 1e3, 3), "floor_us": round(floor, 2)})
    return 0


if __name__ == "__main__":
    end_with(main)
