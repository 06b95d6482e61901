"""Operations of recurrent layers equal a recurrence from token to token, whatever tree or chunk they are given."""

import random
import sys
from copy import deepcopy
from dataclasses import asdict, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from support.grids import few_of
from support.interpreted import DEVICE, on_gpu_or_interpreted
from support.recurrent_oracle import (
    GATED,
    KINDS,
    after_pending,
    by_node,
    convolved,
    path_of,
    random_inputs,
    random_parents,
    random_states,
    random_tails,
)
from treetop.attention.recurrent import NodeRecurrence, RecurrentLayer
from treetop.kernels.profile import TIES, profile_of
from treetop.kernels.recurrent import fla
from treetop.kernels.recurrent.convolution import path_conv_reference, prefill_conv_reference, tree_windows
from treetop.kernels.recurrent.keep import copy_states, fold_states_reference, keep_states_reference
from treetop.kernels.recurrent.prefill import prefill_states_reference
from treetop.kernels.recurrent.states import StateInputs, StateTails
from treetop.kernels.recurrent.step import DeltaNet
from treetop.kernels.recurrent.verify import verify_states_reference
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.tree.commit import Paths
from treetop.kernels.triton_guard import gpu_traits
from treetop_debug.recurrent_faults import CHANNEL_FAULTS

NUM_ROWS, WIDTH = 6, 4
ROWS = torch.tensor([3, 0, 5, 1, 5])
"""Of a batch, the dummy twice."""
EXACT = {"rtol": 0, "atol": 1e-12}
NAN = float("nan")


def trees(n, seed):
    rng = random.Random(seed)
    return [random_parents(n, kind, rng) for kind in ("tree", "chain", "star", "tree", "chain")]


def verified(group, n, dtype=torch.float64, seed=0, strong=False):
    """A round's verification of a layer, and what went into it."""
    torch.manual_seed(seed)
    states = random_states(group, NUM_ROWS, WIDTH, dtype, torch.float32)
    inputs = random_inputs(group, len(ROWS), n, dtype, strong)
    tails, parents = random_tails(group, len(ROWS) + 1, n + 2, dtype, torch.float32), trees(n, seed)
    before = [after_pending(states, 0, int(row)) for row in ROWS]
    out = verify_states_reference(
        states.layer(0), ROWS, inputs, torch.tensor(parents), tails.updates.layer(0), NUM_ROWS - 1
    )
    return out, states, tails, inputs, parents, before


@pytest.mark.parametrize("n", [1, 2, 9, 33])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strong", [False, True])
def test_nodes_of_any_tree_are_what_a_state_a_node_gives(kind, n, strong):
    """Pending updates are folded, the state is stored but for the dummy's, and d of every node stands in the stash."""
    group = KINDS[kind]
    out, states, tails, inputs, parents, before = verified(group, n, strong=strong)
    for item, row in enumerate(ROWS.tolist()):
        expected, _ = by_node(before[item], inputs, parents[item], item)
        torch.testing.assert_close(out[item], expected, **EXACT)
        stored = torch.zeros_like(before[item]) if row == NUM_ROWS - 1 else before[item]
        torch.testing.assert_close(states.state[0, row], stored, **EXACT)
    for kept, given in ((tails.updates.k, inputs.k), (tails.updates.g, inputs.g)):
        assert torch.equal(kept[0, : len(ROWS), :n], given)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_large_trees(kind, seed):
    n = random.Random(seed).randint(1, 64)
    out, _, _, inputs, parents, before = verified(KINDS[kind], n, seed=seed, strong=seed % 2 == 0)
    for item in range(len(ROWS)):
        torch.testing.assert_close(out[item], by_node(before[item], inputs, parents[item], item)[0], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_near_as_node_by_node(kind):
    """Decays are summed, never subtracted: a few roundings of the largest value."""
    out, _, _, inputs, parents, before = verified(KINDS[kind], 32, torch.float32, strong=True)
    for item in range(len(ROWS)):
        wide = type(inputs)(*(None if each is None else each.double() for each in fields(inputs)))
        expected, _ = by_node(before[item].double(), wide, parents[item], item)
        assert float((out[item] - expected).abs().max() / expected.abs().max()) < 2e-6


def test_quotients_of_powers_are_not_near():
    """Of decays by channel, strong ones: the fault is seen by what the test above looks at."""
    group = KINDS["delta by channel"]
    with CHANNEL_FAULTS["decay-by-quotient"].active():
        out, _, _, inputs, parents, before = verified(group, 32, torch.float32, seed=1, strong=True)
    wide = type(inputs)(*(each.double() for each in fields(inputs)))
    expected = torch.stack([by_node(before[i].double(), wide, parents[i], i)[0] for i in range(len(ROWS))])
    assert not float((out - expected).abs().max() / expected.abs().max()) < 2e-6


def fields(inputs):
    return [inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta]


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_a_node_that_is_not_finite_changes_nobody_but_those_below_it(name):
    """Sums are over ancestors alone: others have the same bits. A product with a mask would give 0 times NaN."""
    torch.manual_seed(3)
    group, n = GATED, 12
    states = random_states(group, NUM_ROWS, WIDTH, torch.float64, torch.float64)
    inputs, parents = random_inputs(group, len(ROWS), n, torch.float64), trees(n, 3)
    outs = []
    for bad in (False, True):
        if bad:
            getattr(inputs, name)[:, 4] = NAN
        layer = random_states(group, NUM_ROWS, WIDTH, torch.float64, torch.float64).layer(0)
        for mine, same in ((layer.state, states.state[0]), (layer.count, states.count)):
            mine.copy_(same)
        stash = random_tails(group, len(ROWS), n, torch.float64, torch.float64).updates.layer(0)
        layer = replace(layer, pending=states.pending.layer(0))
        outs.append(verify_states_reference(layer, ROWS, inputs, torch.tensor(parents), stash, NUM_ROWS - 1))
    for item in range(len(ROWS)):
        for node in range(n):
            below = 4 in path_of(parents[item], node)
            assert torch.equal(outs[0][item, node], outs[1][item, node]) != ((below and name != "q") or node == 4)


def test_a_node_has_the_same_bits_in_any_tree():
    """What else is drafted, and how many, changes nothing: plain decoding is a tree of one node."""
    torch.manual_seed(4)
    group, n = GATED, 10
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32)
    inputs, parents = random_inputs(group, len(ROWS), n, torch.float32), torch.tensor(trees(n, 4))
    outs = []
    for width in (n, 4, 1):
        stash = random_tails(group, len(ROWS), n, torch.float32, torch.float32).updates.layer(0)
        fewer = type(inputs)(*(each[:, :width] for each in fields(inputs)))
        layer = replace(states.layer(0), state=states.state[0].clone())
        outs.append(verify_states_reference(layer, ROWS, fewer, parents[:, :width], stash, NUM_ROWS - 1))
    torch.testing.assert_close(outs[0][:, :4], outs[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(outs[0][:, :1], outs[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_trees_leave_what_token_by_token_leaves(kind):
    """Verify, accept some path, keep, and again: the state with what is pending is that of the committed tokens.

    The convolution stands behind the last node of the path; the dummy row keeps nothing.
    """
    torch.manual_seed(5)
    group, n, rng, dummy = KINDS[kind], 9, random.Random(5), NUM_ROWS - 1
    states = random_states(group, NUM_ROWS, WIDTH, torch.float64, torch.float64)
    tails = random_tails(group, len(ROWS), n, torch.float64, torch.float64)
    for turn in range(4):
        parents = trees(n, 50 + turn)
        windows = tree_windows(torch.tensor(parents), group.taps)
        wanted, conv, nodes, lengths = {}, {}, torch.zeros((len(ROWS), WIDTH), dtype=torch.int64), []
        for item in range(len(ROWS)):
            path = path_of(parents[item], rng.randrange(n))[:WIDTH]
            nodes[item, : len(path)] = torch.tensor(path)
            lengths.append(len(path) - 1)
        tails.mixed.normal_()
        for layer in range(group.num_layers):
            inputs = random_inputs(group, len(ROWS), n, torch.float64)
            before = [after_pending(states, layer, int(row)) for row in ROWS]
            verify_states_reference(
                states.layer(layer), ROWS, inputs, torch.tensor(parents), tails.updates.layer(layer), dummy
            )
            for item, row in enumerate(ROWS.tolist()):
                path = nodes[item, : lengths[item] + 1].tolist()
                wanted[layer, row] = by_node(before[item], inputs, parents[item], item)[1][path[-1]]
                line = torch.cat([states.conv[layer, row].T, tails.mixed[layer, item, path]])
                conv[layer, row] = line[len(line) - group.taps + 1 :].T
        paths = Paths(ROWS, torch.zeros(len(ROWS)), torch.tensor(lengths), WIDTH, nodes, dummy)
        keep_states_reference(states, tails, paths, windows)
        for (layer, row), expected in wanted.items():
            if row == dummy:
                assert not states.state[layer, row].any()
                assert not states.conv[layer, row].any()
                assert states.count[row] == 0
                continue
            torch.testing.assert_close(after_pending(states, layer, row), expected, **EXACT)
            assert torch.equal(states.conv[layer, row], conv[layer, row])
        tails = StateTails(torch.full_like(tails.mixed, NAN), tails.updates)
        for each in (tails.updates.k, tails.updates.d, tails.updates.g):
            each.fill_(NAN)


def test_a_path_of_columns_is_the_first_nodes():
    """A plain round or a chain has no `node`: column j is node j."""
    torch.manual_seed(6)
    one, two = (random_states(GATED, NUM_ROWS, WIDTH, torch.float64, torch.float64) for _ in range(2))
    for mine, same in ((one.conv, two.conv), (one.state, two.state), (one.count, two.count)):
        mine.copy_(same)
    tails = random_tails(GATED, len(ROWS), WIDTH, torch.float64, torch.float64)
    columns = torch.arange(WIDTH).expand(len(ROWS), -1)
    windows, lengths = tree_windows((columns - 1).clamp(min=0), GATED.taps), torch.tensor([0, 1, 3, 2, 0])
    for each, node in ((one, None), (two, columns)):
        paths = Paths(ROWS, torch.zeros(len(ROWS)), lengths, WIDTH, node, NUM_ROWS - 1)
        keep_states_reference(each, tails, paths, windows)
    assert torch.equal(one.conv, two.conv)
    assert one.count.tolist() == two.count.tolist() == [2, 3, 2, 1, 4, 0]
    for row, length in ((3, 1), (0, 2), (1, 3)):
        assert torch.equal(one.pending.d[:, row, :length], two.pending.d[:, row, :length])


@pytest.mark.parametrize("kind", KINDS)
def test_folding_leaves_nothing_pending_and_the_same_state(kind):
    torch.manual_seed(7)
    states = random_states(KINDS[kind], NUM_ROWS, WIDTH, torch.float64, torch.float64)
    rows, others = torch.tensor([4, 2, 5]), [0, 1, 3]
    expected = {(layer, row): after_pending(states, layer, row) for layer in range(2) for row in rows.tolist()}
    untouched, counts = states.state[:, others].clone(), states.count[others].tolist()
    fold_states_reference(states, rows)
    assert states.count[rows].tolist() == [0, 0, 0]
    assert states.count[others].tolist() == counts
    assert torch.equal(states.state[:, others], untouched)
    for (layer, row), state in expected.items():
        torch.testing.assert_close(states.state[layer, row], state, **EXACT)


def test_moving_in_writes_the_whole_state():
    """A row that a request had is as if none had: zeros, which the dummy's row has, or a checkpoint's copy."""
    torch.manual_seed(8)
    states, saved = (random_states(GATED, NUM_ROWS, WIDTH, torch.float64, torch.float64) for _ in range(2))
    copy_states(states, torch.tensor([2, 4]), saved, torch.tensor([NUM_ROWS - 1, 1]))
    assert not states.state[:, 2].any()
    assert not states.conv[:, 2].any()
    assert torch.equal(states.state[:, 4], saved.state[:, 1])
    assert torch.equal(states.conv[:, 4], saved.conv[:, 1])
    assert states.count.tolist() == [0, 1, 0, 3, 0, 0]


LENGTHS = [1, 7, 63, 64, 65, 130]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("kind", ["gated delta", "decay alone"])
def test_a_chunk_goes_on_from_each_rows_own_state_and_padding_is_the_identity(kind, n):
    torch.manual_seed(n)
    group, rows = KINDS[kind], torch.tensor([2, 5, 0, 4])
    states = random_states(group, NUM_ROWS, WIDTH, torch.float64, torch.float64)
    lengths = [n, 0, max(n - 3, 0), n // 2]
    valid = torch.arange(n) < torch.tensor(lengths)[:, None]
    inputs, before = random_inputs(group, len(rows), n, torch.float64), states.state.clone()
    for each in (inputs.q, inputs.k, inputs.v, inputs.g, *([] if inputs.beta is None else [inputs.beta])):
        each[~valid] = NAN
    out = prefill_states_reference(states.layer(1), rows, inputs, valid)
    for item, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        expected = before[1, row]
        if length:
            outs, each = by_node(expected, inputs, random_parents(length, "chain", random.Random(0)), item)
            torch.testing.assert_close(out[item, :length], outs, rtol=0, atol=1e-11)
            expected = each[-1]
        torch.testing.assert_close(states.state[1, row], expected, rtol=0, atol=1e-11)
    assert torch.equal(states.state[0], before[0])
    assert torch.equal(states.state[1, [1, 3, 5]], before[1, [1, 3, 5]])


def test_a_chunk_of_decays_by_channel():
    torch.manual_seed(2)
    group = KINDS["delta by channel"]
    states = random_states(group, 2, WIDTH, torch.float64, torch.float64)
    inputs, m = random_inputs(group, 1, 70, torch.float64, strong=True), states.state[0, 0].clone()
    out = prefill_states_reference(states.layer(0), torch.tensor([0]), inputs, torch.ones((1, 70), dtype=torch.bool))
    outs, each = by_node(m, inputs, random_parents(70, "chain", random.Random(0)), 0)
    torch.testing.assert_close(out[0], outs, rtol=0, atol=1e-11)
    torch.testing.assert_close(states.state[0, 0], each[-1], rtol=0, atol=1e-11)


def by_definition(q, k, v, g, beta, *, scale, initial_state, output_final_state):
    """What flash-linear-attention's function is asked for, token by token."""
    assert output_final_state
    inputs, outs, after = StateInputs(q * scale, k, v, g, beta), [], []
    for row, state in enumerate(initial_state):
        chain = random_parents(q.shape[1], "chain", random.Random(0))
        out, each = by_node(state, inputs, chain, row)
        outs.append(out)
        after.append(each[-1])
    return torch.stack(outs), torch.stack(after)


def test_another_librarys_prefill_is_given_what_it_takes(monkeypatch):
    """Padding that is not finite is the identity; each row goes on from its own state; it may be missing."""
    monkeypatch.setitem(sys.modules, fla.MODULE, None)
    assert "flash-linear-attention cannot be imported" in fla.why_not_fla()
    monkeypatch.setitem(sys.modules, fla.MODULE, SimpleNamespace(chunk_gated_delta_rule=by_definition))
    assert fla.why_not_fla() is None
    torch.manual_seed(14)
    states = random_states(GATED, NUM_ROWS, WIDTH, torch.float64, torch.float64)
    inputs, rows = random_inputs(GATED, 3, 9, torch.float64), torch.tensor([2, 5, 0])
    valid = torch.arange(9) < torch.tensor([9, 0, 4])[:, None]
    for each in fields(inputs):
        each[~valid] = NAN
    one, two = deepcopy(states), deepcopy(states)
    want = prefill_states_reference(one.layer(1), rows, inputs, valid)
    got = fla.prefill_by_fla(two.layer(1), rows, inputs, valid, torch.float64)
    torch.testing.assert_close(got[valid], want[valid], **EXACT)
    torch.testing.assert_close(one.state, two.state, **EXACT)


def test_a_node_a_row_in_one_operation_is_what_the_operations_in_turn_give(monkeypatch):
    """Outputs, states, and what is kept of nodes until one is accepted. Of more nodes, or of bits, there is none."""
    torch.manual_seed(13)
    group, wide = replace(GATED, channels=50), torch.float64
    net = DeltaNet(torch.randn(50, 4).to(wide), torch.rand(3).to(wide), 1e-5, -torch.rand(6), torch.randn(6), 2, 8, 2.0)
    states, tails = random_states(group, NUM_ROWS, WIDTH, wide, wide), random_tails(group, len(ROWS) + 1, 2, wide, wide)
    parents, rows = ROWS.new_zeros((len(ROWS), 1)), len(ROWS)

    def nodes(profile=TIES):
        ops = Ops(OpContext(torch.device("cpu"), wide, profile=profile))
        monkeypatch.setattr(ops, "gpu_for", lambda op: object())
        place, own = RecurrentLayer(group.name, 1, deepcopy(states)), deepcopy(tails)
        windows = {group.name: tree_windows(parents, 4)}
        return NodeRecurrence(ops, {7: place}, {group.name: own}, windows, parents, ROWS, NUM_ROWS - 1)

    mixed, z, gates = torch.randn(rows, 1, 80, dtype=wide).split([50, 18, 12], dim=-1)
    one, other = nodes(), nodes()
    got = one.step(7, mixed, z, gates, net)
    inputs = other.ops.delta_inputs(other.convolve(7, mixed, net.conv, None), gates, net.rate, net.bias, 2, 8)
    want = other.ops.gated_norm(other.recur(7, inputs.with_beta(2.0)), z, net.norm, net.eps)
    torch.testing.assert_close(got, want, **EXACT)
    for mine, theirs in ((one.layers[7].states, other.layers[7].states), (*one.tails.values(), *other.tails.values())):
        torch.testing.assert_close(asdict(mine), asdict(theirs), **EXACT, equal_nan=True)
    assert not torch.equal(one.layers[7].states.state, states.state)
    assert not torch.equal(one.tails[group.name].mixed, tails.mixed)
    two = (each.expand(-1, 2, -1) for each in (mixed, z, gates))
    assert one.step(7, *two, net) is None
    assert nodes(profile_of("bits", torch.device("cpu"))).step(7, mixed, z, gates, net) is None


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_goes_along_each_path(taps, biased):
    torch.manual_seed(9)
    n, channels, parents = 13, 5, trees(13, 9)
    conv, weight = torch.randn((NUM_ROWS, channels, taps - 1)), torch.randn((channels, taps))
    x, bias = torch.randn((len(ROWS), n, channels)), torch.randn(channels) if biased else None
    out = path_conv_reference(conv, ROWS, x, tree_windows(torch.tensor(parents), taps), weight, bias)
    for item, row in enumerate(ROWS.tolist()):
        for node in range(n):
            line = torch.cat([conv[row].T, x[item, path_of(parents[item], node)]])
            torch.testing.assert_close(out[item, node], convolved(line[-taps:], weight, bias))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_chunks_convolution_moves_on_to_its_last_valid_input(n):
    torch.manual_seed(10)
    conv, weight, rows = torch.randn((NUM_ROWS, 5, 3)), torch.randn((5, 4)), torch.tensor([4, 5, 0])
    conv[5] = 0
    lengths = [n, 0, n // 2]
    valid = torch.arange(n) < torch.tensor(lengths)[:, None]
    x, before = torch.randn((3, n, 5)), conv.clone()
    x[~valid] = NAN
    out = prefill_conv_reference(conv, rows, x, valid, weight)
    for item, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        line = torch.cat([before[row].T, x[item, :length]])
        assert torch.equal(conv[row], line[len(line) - 3 :].T)
        for token in range(length):
            torch.testing.assert_close(out[item, token], convolved(line[token : token + 4], weight))
    assert torch.equal(conv[[1, 2, 3]], before[[1, 2, 3]])


def on_device(value):
    """Tensors of a dataclass, where kernels run."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if is_dataclass(value):
        return type(value)(*(on_device(getattr(value, each.name)) for each in dataclass_fields(value)))
    return value


def on_device_all(values):
    return tuple(map(on_device, values))


def both_ways(name, *args, after=lambda args, result: result):
    """What an operation's reference and its kernel leave of the same arguments."""
    op, found = getattr(Ops, name), []
    for run in (op.reference, op.on(gpu_traits(DEVICE))):
        own = [on_device(deepcopy(each)) for each in args]
        found.append(after(own, run(*own)))
    return found


@on_gpu_or_interpreted
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 17])
def test_the_kernel_verifies_any_tree(kind, n):
    """Pending updates of every number, the dummy twice, wide values in several blocks."""
    torch.manual_seed(n)
    group = replace(KINDS[kind], value_dim=37, channels=0, taps=1)
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32).layer(1)
    inputs = random_inputs(group, len(ROWS), n, torch.float32, strong=n == 17)
    stash = random_tails(group, len(ROWS) + 1, n + 2, torch.float32, torch.float32).updates.layer(0)
    args = (states, ROWS, inputs, torch.tensor(trees(n, n)), stash, NUM_ROWS - 1)
    ours, theirs = both_ways("verify_states", *args, after=lambda own, out: (out, own[0].state, own[4].d, own[4].k))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.slow
@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("kind", "name"),
    few_of(
        [("gated delta", "v"), ("gated delta", "g"), pytest.param("delta by channel", "g", marks=pytest.mark.slow)], 1
    ),
)
def test_in_the_kernel_too_a_node_that_is_not_finite_changes_nobody_but_those_below_it(kind, name):
    torch.manual_seed(3)
    group, n, parents, outs = KINDS[kind], 12, trees(12, 3), []
    layer = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32).layer(0)
    inputs = random_inputs(group, len(ROWS), n, torch.float32)
    stash = random_tails(group, len(ROWS), n, torch.float32, torch.float32).updates.layer(0)
    for bad in (False, True):
        if bad:
            getattr(inputs, name)[:, 4] = NAN
        args = (layer, ROWS, inputs, torch.tensor(parents), stash, NUM_ROWS - 1)
        outs.append(both_ways("verify_states", *args)[1])
    for item in range(len(ROWS)):
        for node in range(n):
            below = 4 in path_of(parents[item], node)
            assert torch.equal(outs[0][item, node], outs[1][item, node]) != ((below and name != "q") or node == 4)


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("kind", "n"),
    few_of([("gated delta", 1), ("gated delta", 16), ("gated delta", 17), ("delta by channel", 17)], 0, 2, 3),
)
def test_the_kernel_takes_in_chunks_of_any_length(kind, n):
    """In blocks of its own: padding that is not finite changes nothing."""
    torch.manual_seed(n)
    states = random_states(KINDS[kind], NUM_ROWS, WIDTH, torch.float32, torch.float32).layer(1)
    valid = torch.arange(n) < torch.tensor([n, 0, max(n - 3, 0), n // 2])[:, None]
    inputs = random_inputs(KINDS[kind], 4, n, torch.float32)
    for each in fields(inputs):
        each[~valid] = NAN
    args = (states, torch.tensor([2, 5, 0, 4]), inputs, valid)
    ours, theirs = both_ways("prefill_states", *args, after=lambda own, out: (out[own[3]], own[0].state))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def in_turn(n, parents):
    """By the way of `bits`: a chunk of n tokens of one row, and the same as nodes of a tree that has more."""
    torch.manual_seed(12)
    states = random_states(GATED, NUM_ROWS, WIDTH, torch.float32, torch.float32)
    inputs = random_inputs(GATED, 1, len(parents), torch.float32)
    path = path_of(parents, n)
    chunk = type(inputs)(*(each[:, path] for each in fields(inputs)))
    valid, row = torch.ones((1, len(path)), dtype=torch.bool), torch.tensor([3])
    stash = random_tails(GATED, 1, len(parents), torch.float32, torch.float32).updates.layer(0)
    return states, inputs, stash, path, chunk, valid, row


@on_gpu_or_interpreted
@pytest.mark.parametrize("way", ["reference", "kernel"])
def test_in_turn_a_chunk_a_tree_and_a_fold_have_the_same_bits(way):
    """Nodes whose parents stand elsewhere; outputs, what is kept of them, and the state after them."""
    parents = random_parents(11, "tree", random.Random(3))
    last = max(range(11), key=lambda node: len(path_of(parents, node)))
    states, inputs, stash, path, chunk, valid, row = on_device_all(in_turn(last, parents))
    verify, prefill, fold = (
        (op.batch_invariant if way == "reference" else partial(op.batch_invariant_kernel, gpu=gpu_traits(DEVICE)))
        for op in (Ops.verify_states, Ops.prefill_states, Ops.fold_states)
    )
    one, two = deepcopy(states), deepcopy(states)
    out = verify(one.layer(0), row, inputs, torch.tensor([parents], device=DEVICE), stash, NUM_ROWS - 1)
    fold(two, row)
    assert torch.equal(one.state[0, 3], two.state[0, 3])
    assert torch.equal(prefill(two.layer(0), row, chunk, valid)[0], out[0, path])
    for name in ("k", "d", "g"):
        kept = getattr(one.pending, name)
        kept[0, 3, :WIDTH] = getattr(stash, name)[0, path[:WIDTH]]
    one.count[3] = min(len(path), WIDTH)
    fold(one, row)
    two = deepcopy(states)
    fold(two, row)
    first = type(chunk)(*(each[:, :WIDTH] for each in fields(chunk)))
    prefill(two.layer(0), row, first, valid[:, :WIDTH])
    assert torch.equal(one.state[0, 3], two.state[0, 3])


@pytest.mark.slow
@on_gpu_or_interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_that_goes_in_turn_gives_what_the_reference_gives(kind):
    """Trees, the dummy twice, pending updates of every number; chunks with padding that is not finite."""
    torch.manual_seed(13)
    group, gpu = replace(KINDS[kind], value_dim=37), gpu_traits(DEVICE)
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32)
    inputs, found = random_inputs(group, len(ROWS), 9, torch.float32), []
    stash = random_tails(group, len(ROWS), 9, torch.float32, torch.float32).updates.layer(0)
    lengths = torch.tensor([9, 4, 0, 1, 0])
    for verify, prefill, fold in (
        (Ops.verify_states.reference, Ops.prefill_states.reference, Ops.fold_states.reference),
        (Ops.verify_states.batch_invariant, Ops.prefill_states.batch_invariant, Ops.fold_states.batch_invariant),
        tuple(
            partial(op.batch_invariant_kernel, gpu=gpu)
            for op in (Ops.verify_states, Ops.prefill_states, Ops.fold_states)
        ),
    ):
        own, kept, rows = on_device(deepcopy(states)), on_device(deepcopy(stash)), ROWS.to(DEVICE)
        of, valid = on_device(deepcopy(inputs)), (torch.arange(9) < lengths[:, None]).to(DEVICE)
        out = verify(own.layer(0), rows, of, torch.tensor(trees(9, 13), device=DEVICE), kept, NUM_ROWS - 1)
        after = own.state[0].clone()
        fold(own, rows)
        for each in fields(of):
            if each is not None:
                each[~valid] = NAN
        chunk = prefill(own.layer(1), rows, of, valid)
        found.append((out, after, kept.d, kept.k, kept.g, chunk[valid], own.state))
    for ours in found[1:]:
        for one, other in zip(ours, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@on_gpu_or_interpreted
def test_the_kernels_keep_a_chain_of_columns_and_convolve_with_two_taps():
    torch.manual_seed(11)
    group = replace(GATED, taps=2)
    states = random_states(group, NUM_ROWS, WIDTH, torch.float32, torch.float32)
    tails = random_tails(group, len(ROWS), WIDTH, torch.float32, torch.float32)
    windows = tree_windows((torch.arange(WIDTH).expand(len(ROWS), -1) - 1).clamp(min=0), 2)
    zero = torch.zeros(len(ROWS), dtype=torch.int64)
    paths = Paths(ROWS, zero, torch.tensor([0, 1, 3, 2, 0]), WIDTH, None, NUM_ROWS - 1)
    ours, theirs = both_ways("keep_states", states, tails, paths, windows, after=lambda own, _: own[0])
    assert torch.equal(ours.conv, theirs.conv)
    assert torch.equal(ours.count, theirs.count)
    torch.testing.assert_close(ours.pending.d, theirs.pending.d, rtol=0, atol=0, equal_nan=True)
    x, weight = torch.randn(len(ROWS), WIDTH, group.channels), torch.randn(group.channels, 2)
    ours, theirs = both_ways("path_conv", states.conv[0], ROWS, x, windows, weight)
    torch.testing.assert_close(ours, theirs)
