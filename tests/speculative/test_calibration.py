"""Calibration: what is learned, what it does to trees, that no token depends on it, and what is kept of it."""

import json
import math
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from support.engines import build, greedy, sampled, tokens
from support.lookups import lookup
from support.operations import reference_ops
from support.refusing import refused
from support.round_ops import Buffers, identity, random_calibration, random_children, random_tables, shapes, sown_growth
from treetop import ConfigError, EngineConfig
from treetop.doctor.conformance import RandomShapes
from treetop.kernels.tree.calibration import InverseTemperature, corrected, make_calibration
from treetop.kernels.tree.learn import (
    HORIZON,
    ONE,
    PRIOR_CHOICES,
    PRIOR_NODES,
    SHIFT,
    Observed,
    _add_up,
    learn_reference,
)
from treetop.kernels.tree.topk import top_logprobs_reference
from treetop.types.errors import CheckError
from treetop.types.layout import SpecShape
from treetop.types.sampling import CLASSES, class_of_temperature
from treetop_debug.policy_faults import POLICY_FAULTS

LEARN = {"speculative_calibration": "learn"}
SHAPES = [(4, 3, 9), (3, 4, 20), (1, 3, 4)]


def fresh(depths=3, ranks=4):
    return make_calibration(depths, ranks, lambda size, dtype: torch.zeros(size, dtype=dtype))


# ---------------------------------------------------------------------------------------------------------- scores


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_corrected_proposal_is_no_likelier_than_certain_or_than_one_before_it(seed):
    """Whatever was learned, and whatever a head says."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logprob = (-torch.rand(3, 5) * 6).sort(descending=True).values
    logprob[rng.randrange(3), rng.randrange(5) :] = rng.choice([float("nan"), float("-inf"), -0.0])
    got = corrected(logprob, torch.rand(3, 5) * 2 * SHIFT - SHIFT)
    assert bool((got <= 0).all())
    assert bool((got[:, 1:] <= got[:, :-1]).all())


def test_a_calibration_that_learned_nothing_changes_no_score():
    logprob = torch.tensor([[-0.0, -0.25, -3.0], [-1.0, -1.0, float("-inf")]])
    assert torch.equal(corrected(logprob, torch.zeros(2, 3)), logprob)
    logits, ones = torch.randn(2, 3, 50), InverseTemperature(torch.ones(CLASSES), torch.tensor([2, 0]))
    for got, want in zip(top_logprobs_reference(logits, 4, None, ones), top_logprobs_reference(logits, 4), strict=True):
        assert torch.equal(got, want)


def test_each_rows_logits_are_heated_by_its_class():
    logits, inv_temp = torch.randn(3, 2, 50), InverseTemperature(torch.tensor([0.5, 2.0, 3.0]), torch.tensor([2, 0, 1]))
    got = top_logprobs_reference(logits, 4, None, inv_temp)[0]
    for row, factor in enumerate((3.0, 0.5, 2.0)):
        want = torch.log_softmax(logits[row] * factor, dim=-1).topk(4).values
        torch.testing.assert_close(got[row], want)


def test_rows_are_classes_by_temperature():
    assert [*map(class_of_temperature, (0.0, 0.2, 0.7, 0.71, 3.0))] == [0, 1, 1, 2, 2]


@given(shape=shapes(2), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_spine_is_in_every_frontier(shape, seed):
    """The best child of the greedy chain's last node comes first, however many others score higher."""
    rng, ops = random.Random(seed), reference_ops()
    growth = sown_growth(shape, 2, random_calibration(rng, shape.num_steps, shape.topk))
    tree, places, _ = Buffers.make().of(2, shape)
    frontier = ops.start(random_tables(rng, 6, 8), torch.tensor([3, 5]), growth, tree, places, identity(shape))
    for level in range(shape.num_steps - 1):
        children = random_children(rng, 2, shape.topk, 8)
        frontier = ops.grow(growth, level, frontier, children)
        assert torch.equal(frontier.tokens[:, 0], children.tokens[:, 0, 0])
        assert bool((frontier.score[:, 1:-1] >= frontier.score[:, 2:]).all())


# -------------------------------------------------------------------------------------------------------- learning


def random_round(rng, shape, rows):
    """Trees from production code, choices that often agree with them, and the same by linked nodes.

    Returns growth, what was accepted, and of each row [(depth, k proposals as (token, probability), choice)] of the
    verified nodes that have proposals.
    """
    ops, buffers = reference_ops(), Buffers.make()
    growth = sown_growth(shape, rows, random_calibration(rng, shape.num_steps, shape.topk))
    tables = random_tables(rng, shape.topk, 8)
    tree, places, accepted = buffers.of(rows, shape)
    frontier = ops.start(tables, torch.arange(rows), growth, tree, places, identity(shape))
    levels = []
    for level in range(shape.num_steps - 1):
        children = random_children(rng, rows, shape.topk, 8)
        levels.append((frontier, children))
        frontier = ops.grow(growth, level, frontier, children)
    ops.select(growth, tree, places)
    accepted.choice.copy_(torch.randint(0, 40, accepted.choice.shape))
    accepted.finite.fill_(True)
    for row, parents in enumerate(tree.parent.tolist()):
        for node, parent in enumerate(parents):
            if node and rng.random() < 0.6:
                accepted.choice[row, parent] = tree.tokens[row, node]
    found = [verified_of(tables, levels, growth, tree, accepted, row) for row in range(rows)]
    return growth, accepted, found


def verified_of(tables, levels, growth, tree, accepted, row):
    """By the path of tokens from the root: a frontier's node is verified if the tree has a node of its path."""
    paths = {}
    for node, (parent, token) in enumerate(zip(tree.parent[row].tolist(), tree.tokens[row].tolist(), strict=True)):
        paths[node] = () if node == 0 else (*paths[parent], token)
    choice_after = {path: int(accepted.choice[row, node]) for node, path in paths.items()}
    root = list(zip(tables.draft.tokens[row].tolist(), tables.draft.logprob[row].tolist(), strict=True))
    proposals, shape = {(): root}, growth.shape
    above, k = [(token,) for token, _ in root], shape.topk
    for level, (frontier, children) in enumerate(levels):
        listed = []
        for slot, path in enumerate(above):
            assert path[-1] == int(frontier.tokens[row, slot])
            both = zip(children.tokens[row, slot].tolist(), children.logprob[row, slot].tolist(), strict=True)
            proposals[path] = list(both)
            listed += [(*path, token) for token, _ in proposals[path]]
        first = k + level * k * k
        flat = growth.parents[row, 1 + (level + 1) * k :][:k].tolist()
        above = [listed[each - first] for each in flat]
    return [(len(path), said, choice_after[path]) for path, said in proposals.items() if path in choice_after]


@given(shape=shapes(1), rows=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_round_adds_up_every_verified_node_that_has_proposals(shape, rows, seed):
    """Nodes, choices by rank and predicted shares equal those of linked nodes, off the accepted path too."""
    growth, accepted, found = random_round(random.Random(seed), shape, rows)
    calibration = fresh(shape.num_steps + 1, shape.topk + 1)
    observed = Observed(torch.arange(rows), 5, None, True)
    _add_up(calibration, growth, accepted, observed)
    want = torch.zeros_like(calibration.sums)
    for row, nodes in enumerate(found):
        kind = int(growth.classes[row])
        for depth, said, choice in nodes:
            want[kind, depth, 0] += 1
            for rank, (token, logprob) in enumerate(said):
                want[kind, depth, 1 + rank] += token == choice
                share = 0.0 if math.isnan(logprob) else math.exp(logprob)
                want[kind, depth, 2 + shape.topk + rank] += int(share * ONE + 0.5)
    counts = slice(0, 2 + shape.topk)
    assert torch.equal(calibration.sums[:, :, counts], want[:, :, counts])
    assert int((calibration.sums - want).abs().max()) <= 2 * rows * shape.topk  # exp of another library


def test_padding_constrained_rows_and_rows_that_are_not_finite_teach_nothing():
    shape = SpecShape(3, 3, 9)
    growth, accepted, _ = random_round(random.Random(1), shape, 4)
    accepted.finite[1] = False
    constrained = torch.tensor([False, False, True, False, False, False])
    apart = fresh(shape.num_steps, shape.topk)
    _add_up(apart, growth, accepted, Observed(torch.tensor([0, 1, 2, 5]), 5, constrained, True))
    by_row = ("tokens", "scores", "parents", "positions", "logprob", "chosen", "classes")
    alone, first = fresh(shape.num_steps, shape.topk), replace(growth, **{of: getattr(growth, of)[:1] for of in by_row})
    one = replace(accepted, choice=accepted.choice[:1], finite=accepted.finite[:1])
    _add_up(alone, first, one, Observed(torch.tensor([0]), 5, None, True))
    assert torch.equal(apart.sums, alone.sums)
    assert int(alone.sums.sum()) > 0


def taught(calibration, nodes, chosen, predicted, makes_logits=True, kind=0, depth=0):
    """A round of so many nodes of one class and depth. chosen, predicted: by rank."""
    ranks = calibration.logprob_bias.shape[2]
    calibration.sums[kind, depth, 0] = nodes
    calibration.sums[kind, depth, 1 : 1 + len(chosen)] = torch.tensor(chosen)
    calibration.sums[kind, depth, 1 + ranks : 1 + ranks + len(predicted)] = torch.tensor(
        [round(share * ONE) for share in predicted]
    )
    shape = SpecShape(2, 1, 3)
    nobody = Observed(torch.tensor([5]), 5, None, makes_logits)  # a round of padding adds nothing of its own
    growth, buffers = sown_growth(shape, 1, calibration), Buffers.make()
    growth.classes.zero_()
    growth.chosen.fill_(-1)
    growth.logprob.zero_()
    growth.tokens.zero_()
    growth.parents.fill_(-1)
    learn_reference(calibration, growth, buffers.of(1, shape)[2], nobody)


def test_what_a_round_teaches_by_hand():
    """One class and depth learn; the others, and the sums, are as they were."""
    calibration = fresh(2, 2)
    taught(calibration, 16, [12, 2], [8.0, 4.0], kind=1, depth=1)
    assert float(calibration.nodes[1, 1]) == 16
    ratios = [math.log((12 + PRIOR_CHOICES) / (8 + PRIOR_CHOICES)), math.log((2 + PRIOR_CHOICES) / (4 + PRIOR_CHOICES))]
    assert calibration.logprob_bias[1, 1].tolist() == pytest.approx(ratios)
    assert float(calibration.inv_temp[1, 1]) == pytest.approx(math.exp(4.0 * (12 - 8) / (PRIOR_NODES + 16)))
    assert calibration.inv_temp[0].tolist() == [1.0] * CLASSES
    assert calibration.inv_temp[1, [0, 2]].tolist() == [1.0, 1.0]
    assert not bool(calibration.logprob_bias[[0, 2]].any())
    assert not bool(calibration.sums.any())
    taught(calibration, 8, [4, 1], [2.0, 1.0], makes_logits=False, kind=1, depth=1)
    keep = 1 - 2 * 8 / (PRIOR_NODES + 16 + 8)
    assert calibration.chosen[1, 1].tolist() == pytest.approx([12 * keep + 4, 2 * keep + 1])
    assert float(calibration.inv_temp[1, 1]) == pytest.approx(math.exp(0.2))  # nothing to inverse temperature


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_what_is_learned_stays_within_bounds(seed):
    """From rounds of any size that were always or never right."""
    rng, calibration = random.Random(seed), fresh(2, 3)
    for _ in range(40):
        nodes = rng.choice([0, 1, 7, 400, 10**5])
        right = rng.choice([0, nodes])
        taught(calibration, nodes, [right, 0, nodes - right], [rng.random() * nodes] * 3)
        assert bool(calibration.logprob_bias.isfinite().all())
        assert float(calibration.logprob_bias.abs().max()) <= SHIFT + 1e-6
        assert 1 / 16.001 <= float(calibration.inv_temp.min()) <= float(calibration.inv_temp.max()) <= 16.001
        assert float(calibration.nodes.max()) <= HORIZON
        assert float(calibration.chosen.min()) >= 0


# --------------------------------------------------------------------------------------------------------- engines


@pytest.mark.pairwise
@pytest.mark.parametrize("graphs", ["off", "sim"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_token_depends_on_a_calibration(strong_pair, shape, graphs):
    """Greedy and drawn, with tables that nothing would teach, which change between rounds, in each mode."""
    prompts, params = strong_pair.prompts([3, 9, 5]), [greedy(20), sampled(3, 20, temperature=0.5), sampled(4, 20)]
    want = tokens(build(strong_pair, None).generate(prompts, params))
    for seed, mode in enumerate(("learn", "off")):
        llm = build(strong_pair, shape, graphs=graphs, speculative_calibration=mode)
        calibration = llm.engine.runner.state.calibration
        rng, depths = random.Random(seed), calibration.logprob_bias.shape[1]

        def disturb(*_, calibration=calibration, rng=rng, depths=depths):
            other = random_calibration(rng, depths, calibration.logprob_bias.shape[2])
            calibration.inv_temp.copy_(other.inv_temp)
            calibration.logprob_bias.copy_(other.logprob_bias)

        disturb()
        llm.engine.observer = disturb
        assert tokens(llm.generate(prompts, params)) == want


def state_of(llm):
    calibration = llm.engine.runner.state.calibration
    return {name: getattr(calibration, name).clone() for name in calibration.__dataclass_fields__}


def assert_equal_state(got, want):
    for name, table in want.items():
        assert torch.equal(got[name], table), name


def test_proofs_at_start_teach_nothing_and_rounds_teach_their_class(strong_pair):
    """Also eagerly and as graphs, where the same is learned to the bit."""
    engines = [build(strong_pair, (4, 3, 9), graphs=graphs, **LEARN) for graphs in ("off", "sim")]
    for llm in engines:
        before = state_of(llm)
        assert bool((before["inv_temp"] == 1).all())
        assert not any(bool(table.any()) for name, table in before.items() if name != "inv_temp")
        llm.generate(strong_pair.prompts([4, 7]), [greedy(30), sampled(1, 30)])
    eager, graphed = map(state_of, engines)
    assert_equal_state(graphed, eager)
    taught_classes = eager["nodes"].sum(dim=1)
    assert [bool(each) for each in taught_classes] == [True, False, True]


def test_lookup_learns_shifts_and_no_heat(strong_pair):
    """N-gram drafts have no logits."""
    llm = lookup(strong_pair, (3, 4, 9), **LEARN)
    llm.generate([[1, 2, 3, 1, 2, 3, 1, 2]], greedy(30))
    state = state_of(llm)
    assert bool((state["inv_temp"] == 1).all())
    assert bool(state["logprob_bias"].any())


def test_shapes_that_change_from_round_to_round_teach_one_calibration(strong_pair):
    """At random, plain ones among them: the tokens are those of plain decoding, and every depth is learned of."""
    prompts, params = strong_pair.prompts([3, 9, 5]), greedy(40)
    llm = build(strong_pair, (3, 3, 9), speculative_policy="auto", **LEARN)
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes)
    assert tokens(llm.generate(prompts, params)) == tokens(build(strong_pair, None).generate(prompts, params))
    assert bool((state_of(llm)["nodes"][0] > 0).all())


# -------------------------------------------------------------------------------------------------------- on disk


def kept_at(folder, monkeypatch):
    """Written after every round."""
    monkeypatch.setattr("treetop.engine.startup.kept_calibration.EVERY", 1)
    return {"speculative_calibration_dir": str(folder), **LEARN}


def test_what_was_learned_of_a_pair_is_there_again(strong_pair, tmp_path, monkeypatch):
    """In a tree of other depths and ranks too; frozen, it stays as it is."""
    options = kept_at(tmp_path / "new" / "folder", monkeypatch)
    first = build(strong_pair, (4, 3, 9), **options)
    first.generate(strong_pair.prompts([4, 7]), greedy(40))
    learned = state_of(first)
    frozen = build(strong_pair, (4, 3, 9), **{**options, "speculative_calibration": "frozen"})
    assert_equal_state(state_of(frozen), learned)
    frozen.generate(strong_pair.prompts([4]), greedy(20))
    assert_equal_state(state_of(frozen), learned)
    other = state_of(build(strong_pair, (2, 5, 8), **options))
    assert torch.equal(other["logprob_bias"][:, :3, :2], learned["logprob_bias"][:, :, :2])
    assert torch.equal(other["inv_temp"][:3], learned["inv_temp"])
    assert not bool(other["logprob_bias"][:, 3:].any())


def test_a_calibration_that_cannot_be_used_is_refused_by_name(strong_pair, tmp_path, monkeypatch):
    """Of another pair, damaged, of a later version, or none at all where nothing is to be learned."""
    options = kept_at(tmp_path, monkeypatch)

    def start(**more):
        return build(strong_pair, (4, 3, 9), **{**options, **more})

    refused(ConfigError, lambda: start(speculative_calibration="frozen"), "nothing was learned of this pair")
    start().generate(strong_pair.prompts([4]), greedy(8))
    (file,) = tmp_path.iterdir()
    whole = json.loads(file.read_text())
    wrong = {
        "learned of the pair": {**whole, "pair": "another-pair"},
        "has format 9": {**whole, "format": 9},
        "learned of the pair 'xx": {**whole, "pair": "x" * 10**6},
        "has format 'xx": {**whole, "format": "x" * 10**6},
        "is damaged (": {**whole, "heat": "x" * 10**6},
        "is damaged": {**whole, "chosen": [[1.0]]},
        "no counts": {**whole, "heat": [[float("nan")] * CLASSES]},
    }
    for words, content in wrong.items():
        file.write_text(json.dumps(content))
        assert len(refused(ConfigError, start, words, "--speculative-calibration-dir")) < 600
    for content in (b"{", b"\xff\xfe", b"[" * 200_000, b"[]", b'{"format": 1e999}'):
        file.write_bytes(content)
        assert len(refused(ConfigError, start, file.name, "remove it")) < 600
    file.unlink()
    os.mkfifo(file)
    refused(ConfigError, start, "not a file", "remove it")
    (tmp_path / "file").write_text("")
    refused(
        ConfigError, lambda: start(speculative_calibration_dir=str(tmp_path / "file")), "--speculative-calibration-dir"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative_calibration": "frozen"}, "frozen needs --speculative-calibration-dir"),
        (
            {"speculative_calibration": "off", "speculative_calibration_dir": "x"},
            "give --speculative-calibration learn",
        ),
        ({"draft": None, "speculative_calibration_dir": "x", **LEARN}, "a draft"),
        ({"load_format": "dummy", "speculative_calibration_dir": "x", **LEARN}, "--load-format dummy"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    refused(ConfigError, lambda: EngineConfig.of(None, **options), words)


# ----------------------------------------------------------------------------------------------------------- faults


def test_a_head_that_began_with_another_ones_calibration_is_stopped(strong_pair, tmp_path, monkeypatch):
    """Two heads of one target; the fault gives them one file."""
    options = kept_at(tmp_path / "kept", monkeypatch)
    other = type(strong_pair)(strong_pair.target, tmp_path / "head")
    shutil.copytree(strong_pair.head, other.head)
    file = other.head / "model.safetensors"
    weights = load_file(file)
    save_file({name: each + (name == "norm.weight") for name, each in weights.items()}, file)

    def two_heads():
        for pair in (strong_pair, other):
            build(pair, (4, 3, 9), **options).generate(pair.prompts([4]), greedy(8))

    two_heads()
    assert len(list((tmp_path / "kept").iterdir())) == 2
    found = POLICY_FAULTS["calibration-of-another-pair"]
    options = kept_at(tmp_path / "faulty", monkeypatch)
    with found.active():
        refused(ConfigError, two_heads, found.guard)


def test_a_row_that_learns_from_another_ones_tree_is_stopped_at_start(strong_pair):
    """Without the proof the engine serves the right tokens, and learns something else."""
    found = POLICY_FAULTS["calibration-of-another-row"]
    prompts = strong_pair.prompts([4, 9, 7, 12])
    sound = build(strong_pair, (4, 3, 9), **LEARN)
    want = tokens(sound.generate(prompts, greedy(40)))
    with found.active():
        with pytest.raises(CheckError, match=found.guard):
            build(strong_pair, (4, 3, 9), **LEARN)
        llm = build(strong_pair, (4, 3, 9), check_level=0, **LEARN)
        assert tokens(llm.generate(prompts, greedy(40))) == want
    assert float((state_of(llm)["logprob_bias"] - state_of(sound)["logprob_bias"]).abs().max()) > 0.3
