"""One budget of nodes for a batch: which nodes are verified changes no token, whoever shares the round."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from support.engines import build, greedy, pump, sampled, submit, tokens
from support.fake_recorder import FakeRecorder
from support.families import FAMILIES
from treetop import SamplingParams
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.rounds import RoundKey
from treetop.kernels.tree.tree import ancestor_mask
from treetop.kernels.tree.trim import NOT_CHOSEN, trim_reference
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckError, ConfigError
from treetop.types.layout import SpecShape
from treetop.types.messages import RoundPlan
from treetop.types.tree import DraftTree, FlatNodes, PathPositions
from treetop_debug.budget_faults import BUDGET_FAULTS
from treetop_debug.ranks import ranks_on_threads

LENGTHS = [9, 30, 1, 17, 44, 22, 13, 5]
OPTIONS = {"page_size": 4, "max_running_requests": 4, "chunked_prefill_size": 16, "check_level": 3}


def asked(count):
    """Greedy, sampled and filtered requests of different lengths, with log-probabilities and bans here and there."""
    kinds = [
        lambda i: greedy(26 - i, whole=True),
        lambda i: sampled(i, 22, whole=True),
        lambda i: sampled(i, 18 + i, whole=True, top_k=4, temperature=0.8, logprobs=2),
        lambda i: SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(i % 12,), frequency_penalty=0.5),
    ]
    return [kinds[i % len(kinds)](i) for i in range(count)]


def run(llm, prompts, params):
    """What requests get, with as many steps in flight as there may be."""
    requests = submit(llm, prompts, params)
    for _ in pump(llm):
        pass
    return [tuple(request.output_ids) for request in requests]


@pytest.fixture(scope="module")
def plainly(strong_pair):
    """Prompts, what is asked, and what plain decoding gives, a step at a time."""
    prompts = strong_pair.prompts(LENGTHS)
    params = asked(len(prompts))
    return prompts, params, tokens(build(strong_pair, None, overlap=False).generate(prompts, params))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8_e4m3", "graphs": "sim"},
        {"tp_size": 2, "overlap": True, "check_level": 2},
        {"speculative_calibration": "learn", "graphs": "sim"},
        {"mixed_chunk": "on", "chunked_prefill_size": 8, "graphs": "sim", "overlap": True},
        pytest.param({"mixed_chunk": "on", "chunked_prefill_size": 8}, marks=pytest.mark.slow),
    ],
)
def test_tokens_with_other_options_are_those_of_plain_rounds(strong_pair, drawn, options):
    """K/V in FP8, ranks that share the model, chances that are learned, prompts in rounds."""
    prompts, params, expected = drawn
    if "kv_cache_dtype" in options:
        expected = tokens(build(strong_pair, None, kv_cache_dtype="fp8_e4m3").generate(prompts, params))
    with ranks_on_threads():
        llm = build(strong_pair, (2, 3, 6), speculative_node_budget=13, **{**OPTIONS, **options})
    assert tokens(llm.generate(prompts, params)) == expected
    llm.close()


@pytest.mark.parametrize(
    ("shape", "budget", "graphs", "overlap"),
    [
        ((1, 5, 6), 9, "sim", True),
        pytest.param((1, 3, 4), 4, "off", False, marks=pytest.mark.slow),
        ((2, 3, 6), 11, "sim", True),
        ((4, 3, 16), 7, "off", True),
        pytest.param((4, 3, 16), 40, "sim", False, marks=pytest.mark.slow),
        ((4, 3, 16), 1, "sim", True),
    ],
)
def test_no_token_depends_on_the_budget(strong_pair, plainly, *, shape, budget, graphs, overlap):
    """Chains and trees, from roots alone to nearly whole trees; padding, pages and buffers poisoned."""
    prompts, params, expected = plainly
    llm = build(strong_pair, shape, speculative_node_budget=budget, graphs=graphs, overlap=overlap, **OPTIONS)
    assert run(llm, prompts, params) == expected
    assert run(llm, prompts, params) == expected  # with prefixes of the cache
    assert not llm.scheduler.rows.by_row


def test_requests_that_are_retracted_get_the_same(strong_pair, plainly):
    """Pages are short, so rows come and go, and with them who shares the budget."""
    prompts, params, expected = plainly
    options = {**OPTIONS, "context_length": 96, "max_total_tokens": 120}
    llm = build(strong_pair, (2, 3, 6), speculative_node_budget=13, **options)
    assert run(llm, prompts, params) == expected
    assert llm.scheduler.num_retractions > 0


def test_captured_rounds_have_a_graph_for_each_bucket(strong_pair, plainly):
    """As many flat nodes as the bucket's budget says, whatever the rows."""
    prompts, params, expected = plainly
    llm, recorder = build(strong_pair, (2, 3, 6), speculative_node_budget=13, overlap=True, **OPTIONS), FakeRecorder()
    llm.engine.launcher = graphs = CudaGraphs(llm.engine.runner, recorder)
    graphs.capture_all()
    assert run(llm, prompts, params) == expected
    ran = {(key.bucket, key.shape.nodes_at(key.bucket)) for key in recorder.replayed if isinstance(key, RoundKey)}
    assert ran == {(1, 6), (2, 12), (4, 13)}


KINDS = ("gemma4", "glm 5.2", "falcon h1")
"""Layers that read another's K/V; compressed attention and an indexer whose choice is shared; attention beside a
recurrence. The others hold all the same, in the long run."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in KINDS else pytest.mark.slow, id=each) for each in FAMILIES]
)
def test_no_token_of_any_family_changes(name, tmp_path):
    """Windows, sinks, latents, indexers, experts, recurrent layers."""
    pair = FAMILIES[name].save(tmp_path, seed=5).pair
    dice = random.Random(name)
    prompts = [[dice.randrange(4, 12) for _ in range(length)] for length in (5, 40, 13, 1)]
    options = {"page_size": 4, "max_running_requests": 3, "context_length": 96, "chunked_prefill_size": 16}
    expected = tokens(build(pair, None, **options).generate(prompts, greedy(14)))
    llm = build(pair, (2, 3, 6), speculative_node_budget=9, check_level=3, graphs="sim", **options)
    assert run(llm, prompts, greedy(14)) == expected


def test_trees_that_are_told_are_what_was_verified(strong_pair):
    """As many nodes as the budget leaves of all rows together, each row's a tree, and the path on it."""
    budget, count = 13, 4
    llm = build(strong_pair, (2, 3, 6), speculative_node_budget=budget, overlap=False, **OPTIONS)
    asked = replace(greedy(24), return_draft_trees=True)
    prompts = strong_pair.prompts([9] * count)
    requests, sizes = submit(llm, prompts, [asked] * count), set[int]()
    for plan, updates in pump(llm):
        if isinstance(plan, RoundPlan) and len(plan.rows) == count:
            trees = [each.tree for each in updates]
            for tree in trees:
                assert all(parent < node for node, parent in enumerate(tree.parents) if node)
                assert max(tree.path) < len(tree.tokens) == len(tree.parents) == len(tree.logprobs)
                sizes.add(len(tree.tokens))
            assert sum(len(tree.tokens) for tree in trees) == budget
            assert [each.num_drafted for each in updates] == [len(tree.tokens) - 1 for tree in trees]
            worst = min(min(tree.logprobs) for tree in trees)
            assert worst > -1e30
    assert len(requests) == count
    assert len(sizes) > 1, "all rows had as many"


def test_a_budget_accepts_more_than_a_shape_of_as_many_nodes(strong_pair):
    """Of chains with rows that differ: acceptance is drawn, by a profile."""
    options = {"simulate_acceptance": "builtin:llama-3.1-8b", "max_running_requests": 16, "context_length": 256}

    def tokens_a_round(shape, **more):
        llm = build(strong_pair, shape, overlap=False, **options, **more)
        requests = submit(llm, strong_pair.prompts([9] * 16), [sampled(seed, 120, whole=True) for seed in range(16)])
        rounds = emitted = 0
        for plan, updates in pump(llm):
            if isinstance(plan, RoundPlan) and len(plan.rows) == 16:
                rounds, emitted = rounds + 1, emitted + sum(len(each.new_ids) for each in updates)
        assert len(requests) == 16
        return emitted / rounds / 16

    assert tokens_a_round((1, 6, 7), speculative_node_budget=48) > 1.04 * tokens_a_round((1, 2, 3))


def test_drawn_tokens_have_the_targets_probabilities(strong_pair):
    """The second and third token after one prompt, of many requests that compete for few nodes."""
    prompt, count = strong_pair.prompts([7])[0], 300
    llm = build(strong_pair, (2, 2, 5), speculative_node_budget=20, max_running_requests=8)
    params = [replace(sampled(seed, 3), temperature=1.0) for seed in range(count)]
    outputs = llm.generate([prompt] * count, params)
    seen = Counter(output.token_ids for output in outputs)
    assert any(any(output.metrics.accept_lens) for output in outputs)
    vocab, expected = len(llm.engine.next_logits(prompt)), {}
    for a in range(vocab):
        first = llm.engine.next_logits(prompt).softmax(0)[a].item()
        of_second = llm.engine.next_logits([*prompt, a]).softmax(0)
        for b in range(vocab):
            expected[a, b] = first * of_second[b].item()
    pairs = Counter()
    for (a, b, _), times in seen.items():
        pairs[a, b] += times
    big = {pair: chance for pair, chance in expected.items() if chance * count >= 5}
    rest = 1 - sum(big.values())
    square = sum((pairs[pair] - count * chance) ** 2 / (count * chance) for pair, chance in big.items())
    others = count - sum(pairs[pair] for pair in big)
    square += (others - count * rest) ** 2 / (count * rest)
    freedom = len(big)
    assert square < freedom + 4 * (2 * freedom) ** 0.5


def brute(logprob, rows, dummy, total):
    """Which nodes stay, by sorting them all."""
    nodes = [
        (float("-inf") if rows[r] == dummy or line[n] != line[n] else line[n], -r, -n)
        for r, line in enumerate(logprob)
        for n in range(1, len(line))
    ]
    best = sorted(nodes, reverse=True)[: total - len(rows)]
    return [sorted([0, *(-n for _, r, n in best if -r == row)]) for row in range(len(rows))]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_of_trees_are_trees_of_the_best_paths(seed):
    """Against a sort: ties, chances that are NaN or none, dummy rows; and every entry of what is written."""
    dice, count, width = random.Random(seed), seed % 5 + 1, (2, 6, 9, 40)[seed % 4]
    dummy, parents, scores = 7, [], []
    for _ in range(count):
        up = [0] + [dice.randrange(node) for node in range(1, width)]
        score = [0.0]
        for node in range(1, width):
            score.append(
                score[up[node]] - dice.choice([0.0, 0.0, 0.5, 1.0, float("inf"), float("nan")][: 5 + seed % 2])
            )
        parents.append(up)
        scores.append(score)
    parent, tokens_ = torch.tensor(parents), torch.tensor([[dice.randrange(50) for _ in up] for up in parents])
    mask = ancestor_mask(parent, width)
    depth = mask.sum(2) - 1
    rows = torch.tensor([dummy if dice.random() < 0.2 else place for place in range(count)])
    committed = torch.arange(count) * 10
    places = PathPositions(committed, committed[:, None] + depth, committed[:, None])
    tree = DraftTree(tokens_, parent, depth, mask, torch.tensor(scores))
    chosen = torch.arange(-1, width - 1).repeat(count, 1)
    total = dice.randrange(count, count * width)
    before = DraftTree(*(getattr(tree, name).clone() for name in tree.__dataclass_fields__))
    junk = [torch.full(size, -99) for size in ((count,), (count,), (total,), (count, width))]
    flat = FlatNodes(*junk)
    trim_reference(tree, places, chosen, rows, dummy, flat)
    kept = brute(before.logprob.tolist(), rows.tolist(), dummy, total)
    assert flat.count.tolist() == [len(own) for own in kept]
    assert sum(len(own) for own in kept) == total
    place = 0
    for row, own in enumerate(kept):
        assert int(flat.row_start[row]) == place
        assert flat.at[place : place + len(own)].tolist() == [row * width + node for node in range(len(own))]
        assert flat.spread[row].tolist() == [place + (node if node < len(own) else 0) for node in range(width)]
        place += len(own)
        for node, old in enumerate(own):
            assert own[int(tree.parent[row, node])] == int(before.parent[row, old]), "a child without its parent"
            for name in ("tokens", "depth"):
                assert int(getattr(tree, name)[row, node]) == int(getattr(before, name)[row, old])
            assert torch.equal(tree.logprob[row, node], before.logprob[row, old]) or tree.logprob[row, node].isnan()
            assert int(chosen[row, node]) == old - 1
            line = [own.index(int(up)) for up in before.mask[row, old].nonzero()]
            assert tree.mask[row, node].nonzero()[:, 0].tolist() == line
        for node in range(len(own), width):
            assert tree.mask[row, node].nonzero()[:, 0].tolist() == [node]
            assert int(chosen[row, node]) == NOT_CHOSEN
            assert tree.logprob[row, node] == float("-inf")
        assert tree.is_padding[row].tolist() == [node >= len(own) for node in range(width)]
    assert torch.equal(places.nodes, committed[:, None] + tree.depth)


@pytest.fixture(scope="module")
def drawn(strong_pair):
    """As `plainly`, of requests that change no logit and are told none."""
    prompts = strong_pair.prompts(LENGTHS)
    params = [sampled(i, 20) if i % 3 else greedy(20) for i in range(len(prompts))]
    return prompts, params, tokens(build(strong_pair, None).generate(prompts, params))


@pytest.mark.parametrize("name", BUDGET_FAULTS)
def test_each_fault_shows(strong_pair, drawn, name):
    """By its guard's words, or in the tokens."""
    prompts, params, expected = drawn
    fault = BUDGET_FAULTS[name]
    options = {**OPTIONS, "check_level": fault.level or 1, "speculative_node_budget": 7}
    with fault.active():
        if fault.level is None:
            assert run(build(strong_pair, (2, 3, 6), **options), prompts, params) != expected
        else:
            with pytest.raises(CheckError, match=fault.guard):
                run(build(strong_pair, (2, 3, 6), **options), prompts, params)


def test_what_a_budget_does_not_go_with_is_refused_by_name(strong_pair):
    target, head = str(strong_pair.target), str(strong_pair.head)
    refused = [
        ({"draft": None}, "needs a draft"),
        ({"speculative_policy": "auto"}, "--speculative-policy fixed"),
        ({"speculative_shapes": "3,1,4"}, "S,k,T,N"),
        ({"simulate_accept_length": 2.0}, "--simulate-acceptance"),
        ({"speculative_node_budget": 0}, "--speculative-node-budget"),
    ]
    for options, why in refused:
        with pytest.raises(ConfigError, match=why):
            EngineConfig(target, **{"draft": head, "speculative_node_budget": 9, **options})
    with pytest.raises(ConfigError, match="roots alone"):
        SpecShape(1, 0, 1, 4)
