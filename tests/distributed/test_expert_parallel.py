"""Ranks that share experts give what one process gives, wherever requests are: tokens, exactly, in float64.

Ranks are threads here, which start in a second; `test_expert_group.py` has them in processes.
"""

import random
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.callers import Caller
from support.engines import accept_lens, greedy, products_timed_otherwise, sampled, tokens
from support.expert_pairs import CHAIN, TREE, build, save_glm5_with_mtp, save_glm_with_mtp, send_to
from support.grids import few_of
from support.refusing import refused
from support.tiny_models import (
    Pair,
    copy_folder,
    save_mxfp4,
    save_random_experts,
    save_random_head,
    save_tokenizer,
)
from support.waiting import until
from treetop import LLM, SamplingParams, StructuredOutput
from treetop.checkpoints.loader import LoadContext, load_weights, weight_bytes
from treetop.checkpoints.params import of_rank
from treetop.distributed.lockstep import StepProposal, merged
from treetop.doctor.conformance import RandomShapes
from treetop.kernels.moe.routes import RoutedTokens
from treetop.models.experts import ExpertMLP, live_rows
from treetop.models.registry import target_spec
from treetop.parallel.exchange import ExchangeRank, Rendezvous
from treetop.types.errors import ConfigError, EngineError, InputError, UserError
from treetop.types.messages import RoundPlan
from treetop.types.parallel import SINGLE_RANK
from treetop.types.requests import EngineRequest
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.rank_faults import LOCKSTEP_FAULTS
from treetop_debug.ranks import MemoryGroup

LENGTHS = [1, 4, 5, 15, 17, 33]
MIXED = [
    sampled(11, 16, temperature=0.6),
    greedy(20),
    sampled(2**62 + 5, 12, top_k=5),
    sampled(13, 20, top_p=0.7),
    sampled(0, 9, min_p=0.2, temperature=1.7, logprobs=3),
    sampled(15, 14, top_k=4, top_p=0.9, presence_penalty=0.5, logit_bias={5: 1.5}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models whose experts 2 and 4 ranks can share; GPT-OSS's are stacked, and have biases."""
    folder = tmp_path_factory.mktemp("experts")
    small = {"vocab_size": 12, "num_hidden_layers": 2}
    packed = {"num_local_experts": 4, "intermediate_size": 64, **small}
    streams = {"vocab_size": 12, "num_hidden_layers": 4}  # enough for the features of an EAGLE-3 head
    return {
        "glm": save_glm_with_mtp(folder),
        "glm 5": save_glm5_with_mtp(folder / "glm 5"),
        "six": save_glm_with_mtp(folder / "six", n_routed_experts=6, n_group=3),
        "qwen3": save_random_experts(folder / "qwen3", "qwen3_moe", num_experts=8, mlp_only_layers=[], **streams),
        "head": save_random_head(folder / "head", folder / "qwen3", draft_vocab=8),
        "gpt_oss": save_random_experts(folder / "gpt_oss", "gpt_oss", num_local_experts=4, **small),
        "mxfp4": save_mxfp4(folder / "mxfp4", save_random_experts(folder / "stacked", "gpt_oss", **packed)),
    }


def on_ranks(folder, shape, ranks, places, rounds, **options):
    """Outputs of rounds of (prompts, parameters) on ranks as `places` says; every rank's books are checked."""
    with expert_ranks_on_threads() as started:
        llm = build(folder, shape, ranks, **options)
        try:
            send_to(llm._core.core, iter(places).__next__)
            outputs = [llm.generate(prompts, params) for prompts, params in rounds]
            for rank in started:
                rank.core.scheduler.check_integrity()
            return outputs, [rank.core.engine for rank in started]
        finally:
            llm.close()


def on_one(folder, shape, rounds, **options):
    llm = build(folder, shape, 1, **{**options, "tp_size": 1, "mixed_chunk": "off"})
    return [llm.generate(prompts, params) for prompts, params in rounds]


CASES = [  # model, shape, ranks, the rank of each of twelve requests, options
    ("glm", TREE, 2, [0, 1] * 6, {"graphs": "sim", "check_level": 3, "mixed_chunk": "on", "chunked_prefill_size": 8}),
    ("glm", TREE, 4, [2] * 12, {"graphs": "sim", "overlap": True}),
    ("glm", CHAIN, 4, [1, 3, 3, 1, 3, 3, 2, 2, 2, 1, 3, 3], {"overlap": True, "check_level": 2}),
    ("glm", None, 2, [1] * 6 + [0, 1] * 3, {"chunked_prefill_size": 5}),
    ("qwen3", None, 3, [2, 0, 1] * 4, {"overlap": True}),
    ("qwen3", None, 4, [3, 0, 0, 3, 3, 0] * 2, {"graphs": "sim", "overlap": True}),
    ("gpt_oss", None, 2, [0, 1, 1, 1, 1, 1] * 2, {"chunked_prefill_size": 7}),
    ("qwen3", TREE, 2, [0, 0, 0, 1, 0, 0] * 2, {"graphs": "sim", "draft": "head"}),
    ("gpt_oss", TREE, 4, [0, 2] * 6, {"graphs": "sim", "speculative_algorithm": "NGRAM", "overlap": True}),
    ("glm", TREE, 2, [0, 1] * 6, {"tp_size": 2, "overlap": True, "check_level": 3, "mixed_chunk": "on"}),
    ("glm", CHAIN, 2, [1] * 12, {"tp_size": 2, "graphs": "sim", "chunked_prefill_size": 7}),
    ("qwen3", None, 2, [0, 1, 1] * 4, {"tp_size": 2}),
    ("glm 5", TREE, 2, [0, 1, 1] * 4, {"graphs": "sim", "check_level": 3}),
    ("glm 5", CHAIN, 4, [3] * 12, {"overlap": True, "check_level": 2, "chunked_prefill_size": 7}),
    ("gpt_oss", TREE, 2, [1, 0, 1] * 4, {"tp_size": 2, "speculative_algorithm": "NGRAM", "overlap": True}),
    ("glm 5", CHAIN, 2, [1] * 12, {"overlap": True, "check_level": 2, "chunked_prefill_size": 7}),
]


@pytest.mark.parametrize(("name", "shape", "ranks", "places", "options"), few_of(CASES, 0, 5, 8))
def test_any_placement_gives_what_one_process_gives(folders, name, shape, ranks, places, options):
    """Greedy and sampled, trees, chains and plain; ranks that are always idle; cached prompts, or in rounds."""
    if "draft" in options:
        options = {**options, "draft": str(folders[options["draft"]])}
    prompts = Pair(folders[name], None).prompts(LENGTHS)
    rounds = [(prompts, MIXED), (prompts[::-1], [greedy(12)] * 6)]
    want = on_one(folders[name], shape, rounds, **options)
    got, engines = on_ranks(folders[name], shape, ranks, places, rounds, **options)
    for ours, theirs in zip(got, want, strict=True):
        assert tokens(ours) == tokens(theirs)
        assert accept_lens(ours) == accept_lens(theirs)
    if shape is not None:
        assert sum(sum(lens) for each in got for lens in accept_lens(each)) > 0, "nothing was accepted"
    assert len({engine.num_steps for engine in engines}) == 1
    idle = [engine.num_idle for engine in engines]
    unused = {*range(ranks)} - {*places}
    assert all(idle[rank] == engines[rank].num_steps for rank in unused)


def test_each_rank_has_a_budget_of_nodes_for_its_own_rows(folders):
    """Ranks exchange as many tokens as the budget of their bucket says; which nodes these are is each one's own."""
    prompts = Pair(folders["glm"], None).prompts(LENGTHS)
    rounds, options = [(prompts, MIXED)], {"speculative_node_budget": 9, "graphs": "sim", "check_level": 3}
    ((want,), (got,)) = (
        on_one(folders["glm"], TREE, rounds),
        on_ranks(folders["glm"], TREE, 2, [0, 1, 1] * 4, rounds, **options)[0],
    )
    assert tokens(got) == tokens(want)


class Crowd:
    """Requests that come at random, to random ranks; some are aborted. What is received is kept."""

    def __init__(self, llm, seed):
        self.llm, self.random, self.asked, self.got, self.gone = llm, random.Random(seed), {}, {}, set()
        send_to(llm._core.core, lambda: self.random.choice(self.favoured))
        self.client = Caller(llm._core.submit)
        self.favoured = [0]

    def come(self, count):
        for _ in range(count):
            prompt = tuple(self.random.choices(range(4, 12), k=self.random.randint(1, 40)))
            params = self.random.choice([greedy, lambda n: sampled(self.random.getrandbits(60), n, top_p=0.9)])
            asked = params(self.random.randint(1, 30))
            request = EngineRequest(self.llm._core.next_id(), prompt, asked, asked.seed or 0)
            self.asked[request.request_id], self.got[request.request_id] = request, []
            self.client.add([request])

    def leave(self):
        request_id = self.random.choice([*self.asked])
        self.llm._core.abort([request_id])

    def receive(self):
        for update in self.client.get():
            self.got[update.request_id] += update.new_ids
            if update.finish_reason is not None:
                if update.finish_reason == "abort":
                    self.gone.add(update.request_id)
                yield update.request_id


def crowded(folder, shape, ranks, num_steps, seed, **options):
    """Run a crowd until every rank has run so many steps. Returns it and the ranks' locksteps."""
    with expert_ranks_on_threads() as started:
        llm = build(folder, shape, ranks, **options)
        try:
            crowd = Crowd(llm, seed)
            alive = 0
            while started[0].core.engine.num_steps < num_steps or alive:
                if started[0].core.engine.num_steps < num_steps and alive < crowd.random.choice([1, 2, 12]):
                    crowd.favoured = crowd.random.choices(range(ranks), k=crowd.random.randint(1, 2))
                    count = crowd.random.randint(1, 5)
                    crowd.come(count)
                    alive += count
                if crowd.random.random() < 0.05:
                    crowd.leave()
                alive -= len([*crowd.receive()])
            for rank in started:
                until(lambda rank=rank: not rank.core.scheduler.rows.by_row, "rows are held")
                rank.core.scheduler.check_integrity()
            return crowd, [rank.core.engine for rank in started]
        finally:
            llm.close()


SHORT = {"max_total_tokens": 128, "chunked_prefill_size": 24}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ranks", "num_steps", "options"),
    [
        (TREE, 3, 60, {"overlap": True, **SHORT}),
        pytest.param(TREE, 4, 2000, {"overlap": True, "check_level": 2, **SHORT}, marks=pytest.mark.slow),
        pytest.param(CHAIN, 2, 500, {"check_level": 3, **SHORT}, marks=pytest.mark.slow),
    ],
)
def test_random_steps_under_graph_semantics_end_and_give_what_one_gives(folders, shape, ranks, num_steps, options):
    """Retraction, cached prefixes, aborts, idle ranks at all times: no hang, no page or row lost, the same tokens."""
    if ranks == 3:  # of six experts
        folders = {"glm": folders["six"]}
    options = {"graphs": "sim", **options}
    crowd, engines = crowded(folders["glm"], shape, ranks, num_steps, 5, **options)
    assert len({engine.num_steps for engine in engines}) == 1
    idle = [engine.num_idle / engine.num_steps for engine in engines]  # how often, is a matter of threads' order
    assert min(idle) > 0.02, idle
    llm = build(folders["glm"], None, 1)
    asked = [crowd.asked[i] for i in crowd.asked if i not in crowd.gone]
    want = tokens(llm.generate([[*each.prompt_ids] for each in asked], [each.params for each in asked]))
    assert [tuple(crowd.got[each.request_id]) for each in asked] == [*map(tuple, want)]
    assert len(crowd.gone) < len(asked)


def test_the_largest_of_each_number_is_agreed_on_and_nobody_starves():
    """Prefills and rounds take turns where both are wanted; a kind that nobody else wants is run at once."""
    long, short, wide = StepProposal(tokens=512), StepProposal(tokens=7), StepProposal(rows=8, choice=1)
    assert merged([short, StepProposal(), long], False) == merged([long, short], True) == long
    assert merged([wide, StepProposal(2, 3), StepProposal()], True) == StepProposal(8, 3)
    ran, prefilled = [], False
    for _ in range(6):
        step = merged([long, wide, StepProposal()], prefilled)
        prefilled = step.tokens > 0
        ran.append(step)
    assert ran == [long, wide] * 3


def test_requests_go_to_the_rank_with_the_fewest(folders):
    """As long as they are alive, for which steps are slow meanwhile."""
    with expert_ranks_on_threads() as started:
        llm = build(folders["glm"], None, 2)
        go_on, step = threading.Event(), started[0].core.step
        started[0].core.step = lambda: (go_on.wait(0.3), step())[1]
        streams = [llm.stream([[4, 5, 6]], greedy(80, whole=True)) for _ in range(5)]
        for stream in streams:
            next(stream)
        core = llm._core.core
        assert sorted(len(link.placed) for link in core.engines[0].links) == [2, 3]
        until(lambda: 0 < core.load.num_running + core.load.num_waiting <= 5)
        go_on.set()
        for stream in streams:
            stream.close()
        llm.generate([[4, 5]], greedy(3))
        until(lambda: (core.load.num_running, core.load.kv_usage) == (0, 0))
        llm.close()


def test_a_rank_that_cannot_start_says_why(folders, tmp_path):
    """Its own word, not that it was waited for. Only the second rank reads the last expert."""
    name = "model.layers.1.mlp.experts.7.down_proj.weight"
    broken = load_file(folders["glm"] / "model.safetensors")[name]
    broken[-1, -1] = torch.nan
    folder = copy_folder(folders["glm"], tmp_path / "broken", tensors={name: broken})
    with expert_ranks_on_threads():
        refused(UserError, lambda: build(folder, None, 2), name, "NaN")


def test_a_request_that_cannot_run_is_refused_alone(folders):
    with expert_ranks_on_threads():
        llm = build(folders["glm"], None, 2)
        refused(InputError, lambda: llm.generate([[4] * 200], greedy(3)), "96")
        assert len(tokens(llm.generate([[4, 5]], greedy(3)))[0]) == 3
        llm.close()


def test_numbers_that_no_message_holds_are_served(folders):
    """A huge limit is legal, and so is a number of NumPy; one that ended the core's thread would end all requests."""
    params = [greedy(10**30), sampled(np.int64(3), np.int32(5), temperature=np.float32(0.5), top_k=2**70)]
    with expert_ranks_on_threads():
        llm = build(folders["glm"], None, 2)
        first, second = tokens(llm.generate([[4, 5]] * 2, params))
        assert (len(first), len(second)) == (94, 5)
        llm.close()


def test_the_error_of_a_group_that_has_ended_does_not_grow_with_each_call(folders):
    """It is one object, which would keep the calls, and what was asked in them, that it was raised in."""
    with expert_ranks_on_threads() as started:
        llm = build(folders["glm"], None, 2)
        started[1].kill()
        sizes = []
        for _ in range(4):
            with pytest.raises(EngineError) as error:
                llm.generate([[4, 5]], greedy(3))
            sizes.append(len(traceback.extract_tb(error.value.__traceback__)))
        assert len({*sizes[1:]}) == 1
        llm.close()


def test_what_cannot_work_is_refused_by_name(folders, tmp_path):
    folder = folders["glm"]
    dense = {"draft": None, "dtype": "float64"}
    refused(ConfigError, lambda: LLM("builtin:nestling", ep_size=2, **dense), "--ep-size 2", "no experts")
    refused(ConfigError, lambda: build(folder, None, 2, tp_size=8), "8 experts are fewer than 16 ranks", "--ep-size")
    refused(ConfigError, lambda: build(folder, None, 0), "--ep-size must lie between 1 and 64")
    with expert_ranks_on_threads():
        refused(ConfigError, lambda: build(folder, None, 2, context_length=10**6), "--context-length")
        llm = build(folder, None, 2)
        refused(ConfigError, lambda: llm.scheduler, "--ep-size 2", "other processes")
        llm.close()


AUTO = {"speculative_policy": "auto", "speculative_shapes": "1,1,2 2,3,6", "speculative_max_deferred": 3}


@pytest.mark.parametrize(
    ("places", "options"),
    few_of(
        [
            ([0, 1] * 6, {"graphs": "sim", "overlap": True, "check_level": 3}),
            ([1] * 12, {"chunked_prefill_size": 5, "check_level": 2}),  # who has no rows says nothing of shapes
        ],
        0,
    ),
)
def test_ranks_run_one_shape_whatever_each_would_choose(folders, places, options):
    """Each rank's policy takes any shape, unlike the others': tokens are those of one process, and every round of all
    ranks has the shape that was agreed on, catching up included.
    """
    prompts = Pair(folders["glm"], None).prompts(LENGTHS)
    with expert_ranks_on_threads() as started:
        llm = build(folders["glm"], TREE, 2, **AUTO, **options)
        try:
            send_to(llm._core.core, iter(places).__next__)
            seen = {}
            for rank in started:
                seen[rank] = []
                layout = rank.core.engine._engine.layout
                policy = RandomShapes(layout.shapes, loses=True)
                policy._random.seed(started.index(rank))
                rank.core.scheduler.policy = policy
                launch = rank.core.engine._engine.launch

                def watched(plan, launch=launch, seen=seen[rank]):
                    if isinstance(plan, RoundPlan):
                        seen.append((plan.shape, plan.catches_up))
                    return launch(plan)

                rank.core.engine._engine.launch = watched
            found = [llm.generate(prompts, MIXED), llm.generate(prompts[::-1], MIXED)]
            wanted = {shape for rank in started for shape in rank.core.scheduler.policy.chosen}
        finally:
            llm.close()
    assert wanted == set(layout.shapes), "they wanted all"
    one, other = seen.values()
    assert one == other
    assert len({shape for shape, _ in one}) == 3
    assert any(catches_up for _, catches_up in one)
    expected = on_one(folders["glm"], TREE, [(prompts, MIXED), (prompts[::-1], MIXED)])
    assert [tokens(each) for each in found] == [tokens(each) for each in expected]


def test_the_shape_that_is_wanted_is_that_of_most_rows():
    """And never one that all rows may not have."""
    many, few, none = StepProposal(8, shape=1, wanted=0), StepProposal(2, shape=1, wanted=2), StepProposal()
    assert merged([few, many, none], False) == merged([none, few, many], True) == StepProposal(8, shape=1, wanted=0)
    behind = StepProposal(2, shape=1, catches_up=True, wanted=2)
    assert merged([behind, many], False) == StepProposal(8, shape=1, catches_up=True, wanted=0)


@pytest.mark.parametrize("name", LOCKSTEP_FAULTS)
def test_a_fault_of_idle_ranks_is_caught_by_its_guard(folders, name):
    """At every check level, and before anybody waits for longer than the deadline; a clean group is right again."""
    found, prompts = LOCKSTEP_FAULTS[name], Pair(folders["glm"], None).prompts([9, 17, 3])
    deadline_s = 8.0 if "did not answer" in found.guard else 300.0
    options = {"graphs": "sim", "check_level": 0, "step_timeout": deadline_s}
    begun = time.monotonic()
    with found.active(), pytest.raises(EngineError) as error:
        on_ranks(folders["glm"], TREE, 2, [1, 1, 1], [(prompts, greedy(20))], **options)
    assert found.guard in str(error.value)
    assert time.monotonic() - begun < 120


@pytest.mark.parametrize(("ranks", "engines"), [(2, 1), (3, 1), (1, 3), (2, 2)])
def test_every_expert_is_on_one_rank(folders, ranks, engines):
    """Of those that share a model, and of those that share its experts."""
    params = [param for param in target_spec(folders["gpt_oss"]).params if param.experts]
    each = [
        of_rank(params, RankOf(rank, ranks), RankOf(engine, engines))
        for engine in range(engines)
        for rank in range(ranks)
    ]
    for param, *parts in zip(params, *each, strict=True):
        assert sum(part.experts for part in parts) == param.experts
        spans = [source.span for part in parts for source in part.sources]
        assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
        assert (spans[0].start, spans[-1].stop) == (0, param.experts)


@pytest.mark.parametrize("name", ["glm", "gpt_oss", "mxfp4"])
def test_ranks_that_read_a_part_have_a_part(folders, name):
    """Of the experts half the bytes each, of all else everything; together every expert once."""
    spec = target_spec(folders[name])
    whole = load_weights(spec.folder, spec.params, place_of(None), spec._unused())
    parts = [load_weights(spec.folder, spec.params, place_of(rank), spec._unused()) for rank in range(2)]
    assert any(param.experts for param in spec.params)
    for param in spec.params:
        own = [part[param.name] for part in parts]
        if param.experts:
            assert torch.equal(torch.cat(own), whole[param.name])
        else:
            assert all(torch.equal(each, whole[param.name]) for each in own)
    for rank, part in enumerate(parts):
        counted = weight_bytes(place_of(rank).own(spec.params), torch.float32)
        assert sum(weight.nbytes for weight in part.held.values()) == counted


@pytest.mark.parametrize("tp_size", few_of([1, 2], 0))
def test_structures_hold_along_the_trees_of_each_rank(folders, tmp_path, monkeypatch, tp_size):
    """Each rank asks its own host; ranks that share a model are told what the first has found."""
    monkeypatch.setattr("treetop.scheduler.scheduler._PATIENCE_S", 60.0)  # a busy machine finds masks late
    folder = copy_folder(folders["glm"], tmp_path / "spelled")
    save_tokenizer(folder, 12, lambda token: bytes([97 + token]))
    prompts = Pair(folder, None).prompts(LENGTHS)
    held = [StructuredOutput("regex", each) for each in ("[d-l]{30}", "(de|fgh|[ij]k)*l{9}", "(ab?c?)*", "[a-l]*")]
    params = [
        SamplingParams(max_tokens=24, seed=index, temperature=index % 2, structured_output=structure)
        for index, structure in enumerate([*held, None, held[1]])
    ]
    rounds = [(prompts, params)]
    (want,) = on_one(folder, None, rounds)
    ((got,), _) = on_ranks(folder, TREE, 2, [0, 1, 1, 0, 1, 1], rounds, tp_size=tp_size, overlap=True)
    assert tokens(got) == tokens(want)
    assert sum(sum(lens) for lens in accept_lens([*got[:4], got[5]])) > 0, "no draft of a structure was accepted"


class RankOf(NamedTuple):
    """All that dividing parameters asks of a `Parallel`."""

    rank: int
    size: int


def place_of(rank):
    ranks = SINGLE_RANK if rank is None else ExchangeRank(rank, 2, torch.device("cpu"), None, None)
    return LoadContext(torch.float32, torch.device("cpu"), 8, expert_ranks=ranks)


def test_the_first_ranks_choice_of_products_holds_for_all(folders):
    """So a prompt in float32 gets the same log-probabilities from any rank, asked for one after the other."""
    one = [[3, 1, 4, 1, 5]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    options = {"dtype": "float32", "disable_radix_cache": True, "max_running_requests": 1}
    with products_timed_otherwise() as taken:
        rounds, _ = on_ranks(folders["glm"], None, 4, range(4), [one] * 4, **options)
    outputs = [output for (output,) in rounds]
    assert taken == taken[:1] * 4 != [[]] * 4
    assert [each.logprobs for each in outputs] == [outputs[0].logprobs] * 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_row_comes_to_the_same_bits_on_any_rank(folders, tmp_path, ranks):
    """Beside other ranks' rows, beside none, and where others have more rows; and it is what one process computes."""
    spec = target_spec(folders["glm"])
    generator = torch.Generator().manual_seed(ranks)
    x, other = (torch.randn((n, 64), generator=generator, dtype=torch.float64) for n in (3, 5))

    def layer(place):
        weights = load_weights(spec.folder, spec.params, place, spec._unused())
        return ExpertMLP(spec.config.layers[1].feed_forward, weights, "layers.1.mlp", place.ops)

    alone = layer(LoadContext(torch.float64, torch.device("cpu"), 8))(
        x, RoutedTokens(torch.ones(3, dtype=torch.bool))
    ).sum(0)

    def run(rank, at, beside):
        group = MemoryGroup(Rendezvous(tmp_path / f"{at}{beside}", rank, ranks), torch.device("cpu"))
        place = LoadContext(torch.float64, torch.device("cpu"), 8, expert_ranks=group.parallel)
        rows = x if rank == at else other
        live = torch.full((5,), rank == at or beside)
        live[len(rows) :] = False
        return layer(place)(rows, RoutedTokens(live_rows(live, group.parallel)))

    found = []
    with ThreadPoolExecutor(ranks) as pool:
        for at in range(ranks):
            for beside in (False, True):
                found.append([*pool.map(partial(run, at=at, beside=beside), range(ranks))][at])
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0].sum(0), alone, rtol=1e-12, atol=1e-12)
