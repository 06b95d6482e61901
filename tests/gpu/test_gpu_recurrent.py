"""Kernels of layers with a recurrent state on a GPU, at models' widths; engines are in test_gpu_families.py.

python -m pytest tests/gpu/test_gpu_recurrent.py -q
"""

import random
from dataclasses import fields, is_dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from support.recurrent_oracle import path_of, random_inputs, random_parents, random_states, random_tails
from treetop.kernels.recurrent.convolution import tree_windows
from treetop.kernels.table import Ops
from treetop.kernels.tree.commit import Paths
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.state import StateGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda")
NEXT = StateGroup("state", 2, 8192, 4, 32, 16, 128, 128, delta=True, per_channel=False)
KIMI = StateGroup("state", 2, 12288, 4, 32, 32, 128, 128, delta=True, per_channel=True)
NEMOTRON = StateGroup("state", 2, 6144, 4, 64, 8, 128, 64, delta=False, per_channel=False)
FALCON = StateGroup("state", 2, 3584, 4, 24, 1, 256, 64, delta=False, per_channel=False)
GROUPS = {"qwen3 next": NEXT, "kimi linear": KIMI, "nemotron 3 nano": NEMOTRON, "falcon h1": FALCON}
ROWS, NUM_ROWS, WIDTH = (3, 0, 5, 1, 5), 6, 4
"""Of a batch, the dummy twice."""


def moved(value, dtype=None):
    """A copy on the GPU; floats perhaps wider."""
    if isinstance(value, Tensor):
        return value.to(DEVICE, dtype if dtype is not None and value.is_floating_point() else value.dtype, copy=True)
    if is_dataclass(value):
        return type(value)(*(moved(getattr(value, each.name), dtype) for each in fields(value)))
    return value


def kernel(name):
    return getattr(Ops, name).on(gpu_traits(DEVICE))


def parents_of(n):
    rng = random.Random(n)
    return [random_parents(n, kind, rng) for kind in ("tree", "chain", "star", "tree", "chain")]


def assert_near(ours, exact, share):
    """As a share of the largest value."""
    error = float((ours.double() - exact).abs().max() / exact.abs().max())
    print(f"relative error {error:.1e}")
    assert error < share


@pytest.mark.parametrize("n", [1, 16, 33, 64])
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_verified_nodes_are_as_near_to_float64_as_float32_is(name, n, strong):
    """Outputs, states with what was pending, and d; three parts of TF32 are float32 but for a few last bits."""
    torch.manual_seed(n)
    group, rows = GROUPS[name], torch.tensor(ROWS)
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32).layer(1)
    inputs, parents = random_inputs(group, len(ROWS), n, torch.float32, strong), torch.tensor(parents_of(n))
    stash = random_tails(group, len(ROWS), n, torch.float32, torch.float32).updates.layer(0)
    found = []
    for run, dtype in ((Ops.verify_states.reference, torch.float64), (kernel("verify_states"), torch.float32)):
        mine, kept = moved(states, dtype), moved(stash, dtype)
        out = run(mine, rows.to(DEVICE), moved(inputs, dtype), parents.to(DEVICE), kept, NUM_ROWS - 1)
        found.append((out, mine.state, kept.d))
    for ours, exact in zip(found[1], found[0], strict=True):
        assert_near(ours, exact, 1e-5)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("group", [NEXT, KIMI], ids=["qwen3 next", "kimi linear"])
def test_a_node_that_is_not_finite_changes_no_bit_of_others(group, name):
    torch.manual_seed(5)
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32).layer(0)
    inputs, parents, outs = random_inputs(group, len(ROWS), 16, torch.float32), parents_of(16), []
    stash = random_tails(group, len(ROWS), 16, torch.float32, torch.float32).updates.layer(0)
    for bad in (False, True):
        if bad:
            getattr(inputs, name)[:, 4] = float("nan")
        call = (moved(states), torch.tensor(ROWS).to(DEVICE), moved(inputs), torch.tensor(parents).to(DEVICE))
        outs.append(kernel("verify_states")(*call, moved(stash), NUM_ROWS - 1))
    for item in range(len(ROWS)):
        for node in range(16):
            below = 4 in path_of(parents[item], node)
            assert torch.equal(outs[0][item, node], outs[1][item, node]) != ((below and name != "q") or node == 4)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("name", GROUPS)
def test_chunks_are_as_near_to_float64_as_float32_is(name, n):
    torch.manual_seed(n)
    group = GROUPS[name]
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32).layer(0)
    rows, valid = torch.tensor([2, 5, 4]), torch.arange(n) < torch.tensor([n, 0, n // 2])[:, None]
    inputs, found = random_inputs(group, 3, n, torch.float32), []
    for run, dtype in ((Ops.prefill_states.reference, torch.float64), (kernel("prefill_states"), torch.float32)):
        mine = moved(states, dtype)
        out = run(mine, rows.to(DEVICE), moved(inputs, dtype), valid.to(DEVICE))
        found.append((out[valid.to(DEVICE)], mine.state))
    for ours, exact in zip(found[1], found[0], strict=True):
        assert_near(ours, exact, 1e-5)


@pytest.mark.parametrize("name", GROUPS)
def test_in_turn_a_chunk_and_a_tree_have_the_same_bits(name):
    """As `--exactness bits` goes: nodes of any path, and the same tokens as a chunk."""
    torch.manual_seed(4)
    group = GROUPS[name]
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32)
    inputs, parents = random_inputs(group, len(ROWS), 16, torch.float32), parents_of(16)
    stash = random_tails(group, len(ROWS), 16, torch.float32, torch.float32).updates.layer(0)
    verify, prefill, fold = (
        partial(op.batch_invariant_kernel, gpu=gpu_traits(DEVICE))
        for op in (Ops.verify_states, Ops.prefill_states, Ops.fold_states)
    )
    rows, of = torch.tensor(ROWS).to(DEVICE), moved(inputs)
    out = verify(moved(states).layer(0), rows, of, torch.tensor(parents).to(DEVICE), moved(stash), NUM_ROWS - 1)
    for item in range(len(ROWS)):
        for node in (5, 15):
            path, mine = path_of(parents[item], node), moved(states)
            parts = (getattr(of, each.name) for each in fields(of))
            one = type(of)(*(None if part is None else part[item : item + 1, path] for part in parts))
            fold(mine, rows[item : item + 1])
            valid = torch.ones((1, len(path)), dtype=torch.bool, device=DEVICE)
            assert torch.equal(prefill(mine.layer(0), rows[item : item + 1], one, valid)[0], out[item, path])


@pytest.mark.parametrize("group", [
    replace(NEXT, taps=2),
    NEXT,
    KIMI,
    FALCON,
    StateGroup("state", 2, 2048, 3, 0, 0, 0, 0, delta=False, per_channel=False),
], ids=["two taps", "qwen3 next", "kimi linear", "falcon h1", "a convolution alone"])  # fmt: skip
def test_what_is_kept_is_the_references(group):
    """Pending updates, their number, and convolutions in bfloat16, bit for bit; then all of it folded."""
    torch.manual_seed(group.taps)
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.bfloat16)
    tails = random_tails(group, len(ROWS), 9, torch.float32, torch.bfloat16)
    windows = tree_windows(torch.tensor(parents_of(9)), group.taps).to(DEVICE)
    rows, node = torch.tensor(ROWS).to(DEVICE), torch.randint(0, 9, (len(ROWS), WIDTH)).to(DEVICE)
    paths = Paths(rows, torch.zeros_like(rows), torch.tensor([0, 3, 1, 2, 2]).to(DEVICE), WIDTH, node, NUM_ROWS - 1)
    found = []
    for keep, fold in (
        (Ops.keep_states.reference, Ops.fold_states.reference),
        (kernel("keep_states"), kernel("fold_states")),
    ):
        mine = moved(states)
        keep(mine, moved(tails), paths, windows)
        before = (mine.conv.clone(), mine.count.clone(), mine.pending.d.clone(), mine.pending.g.clone())
        fold(mine, torch.tensor([0, 3, 5]).to(DEVICE))
        found.append((before, mine.state, mine.count))
    for ours, theirs in zip(found[1][0], found[0][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    if group.heads:
        assert_near(found[1][1], found[0][1].double(), 1e-5)
    assert torch.equal(found[1][2], found[0][2])
