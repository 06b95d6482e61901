"""Rows that go on without a draft: it reads nothing of them, has no K/V of theirs, and no one else misses any."""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.engines import accepted, build, greedy, pump, sampled, steps, submit, tokens
from support.grids import few_of
from support.handing import IDS, Relay, Worker
from support.offloading import POOL, on_a_cpu, stats, with_tier
from support.tiny_models import Pair
from treetop.checks.host import PlanChecker
from treetop.debug.two_group import write_two_group_pair
from treetop.doctor.conformance import RandomShapes
from treetop.engine import rounds as rounds_module
from treetop.engine.rounds import RoundKey
from treetop.scheduler.acceptance import AcceptanceEstimate
from treetop.scheduler.policy import AdaptiveShape, FixedShape
from treetop.types.costs import CatchUpCost, CostTable, HeadAcceptance, RoundCost
from treetop.types.errors import CheckError
from treetop.types.ids import is_draft
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import PrefillPlan, RoundPlan, RowResult, StepResult, prefill_of
from treetop.types.sampling import SamplingMode

SHAPE = (3, 3, 9)
WITHOUT = replace(greedy(20, whole=True), speculative=False)
WITH = greedy(20, whole=True)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Pair:
    return Pair(*write_two_group_pair(tmp_path_factory.mktemp("windowed")))


def one(llm, prompt, params):
    (request,) = submit(llm, [prompt], [params])
    waits = llm.scheduler.rows.host is not None  # for a disk
    plans = [plan for plan, _ in (steps if waits else pump)(llm)]
    return request, plans


@pytest.mark.parametrize(
    ("kind", "options"),
    few_of(
        [
            ("whole", {"check_level": 3, "speculative_policy": "auto", "speculative_max_deferred": 3}),
            ("windowed", {"check_level": 3, "max_total_tokens": 150, "page_size": 4}),
            ("windowed", {"overlap": True, "graphs": "sim", "speculative_policy": "auto", "mixed_chunk": "on"}),
            ("whole", {"overlap": True, "graphs": "sim", "check_level": 2, "max_total_tokens": 200}),
        ],
        2,
    ),
)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_schedules_change_no_token(strong_pair, windowed, kind, options, seed):
    """Requests that begin alike, with and without a draft, some of which lose it as they run and get it again; put
    back, aborted.
    """
    pair, rng = strong_pair if kind == "whole" else windowed, random.Random(seed)
    beginnings, sizes = pair.prompts([33, 18], seed), {"context_length": 96, "max_running_requests": 3}
    prompts = [[*rng.choice(beginnings)[: rng.choice((9, 18, 33))], *pair.prompts([3], i)[0]] for i in range(9)]
    params = [
        replace(rng.choice((greedy(14, whole=True), sampled(i, 14, whole=True))), speculative=rng.random() < 0.6)
        for i in range(9)
    ]
    want = tokens(build(pair, None, **sizes).generate(prompts, params))
    llm = build(pair, SHAPE, **{"chunked_prefill_size": 16, **sizes, **options})
    policy = None
    if "speculative_policy" in options:
        policy = llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, seed, loses=True)
    lost, stop = [], llm.scheduler.rows.stop_drafting
    llm.scheduler.rows.stop_drafting = lambda request: lost.append(request.params.speculative) or stop(request)
    for _ in range(2):  # the second time prefixes come from the cache
        asked = submit(llm, prompts, params)
        gone = rng.choice(asked)
        for step, _ in enumerate(pump(llm)):
            for request in [*llm.scheduler.queues.decoding]:
                if rng.random() < 0.05 and request.held.lease.drafts:
                    llm.scheduler.rows.stop_drafting(request)
                elif rng.random() < 0.05 and not llm.scheduler.steps.has_rows:
                    llm.scheduler._rounds.put_back(request)
            if step == 20:
                llm.scheduler.abort(gone.request_id)
            llm.scheduler.check_integrity()
        got = [tuple(request.output_ids) for request in asked]
        assert [each for each, request in zip(got, asked, strict=True) if request is not gone] == [
            each for each, request in zip(want, asked, strict=True) if request is not gone
        ]
        assert want[asked.index(gone)][: len(gone.output_ids)] == tuple(gone.output_ids)
    assert any(lost)
    assert policy is None or policy.num_put_back


@pytest.mark.parametrize("options", few_of([{"check_level": 3}, {"graphs": "sim", "overlap": True}], 1), ids=str)
def test_who_drafts_finds_no_prefix_without_the_drafts_and_fills_it(strong_pair, options):
    """It accepts what it would behind an empty cache; who has no draft finds every prefix."""
    (prompt,) = strong_pair.prompts([50])
    fresh, _ = one(build(strong_pair, SHAPE, **options), prompt, WITH)
    llm = build(strong_pair, SHAPE, page_size=8, **options)
    first, _ = one(llm, prompt, WITHOUT)
    again, _ = one(llm, prompt, WITHOUT)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    drafting, _ = one(llm, prompt, WITH)
    assert drafting.num_cached_tokens == 0, "the draft would read what nobody wrote"
    hit, _ = one(llm, prompt, WITH)
    assert hit.num_cached_tokens == 48, "nodes were not given the draft's pages"
    assert accepted(drafting) == accepted(hit) == accepted(fresh)
    assert any(accepted(hit))
    assert one(llm, prompt, WITHOUT)[0].num_cached_tokens == 48
    assert len({tuple(each.output_ids) for each in (fresh, first, again, drafting, hit)}) == 1


def test_it_pays_for_no_draft(strong_pair, monkeypatch):
    """Alone it has no draft extend at all and holds no page of the draft's; beside others the catch-up is theirs."""
    llm = build(strong_pair, SHAPE, speculative_policy="auto", speculative_max_deferred=4, max_running_requests=4)
    costs, good = costs_of(llm.engine.layout, 1.0), HeadAcceptance((0.9, 0.9, 0.9), 0.5)
    llm.scheduler.policy = Modelled(costs, llm.engine.layout, lambda: good)  # by a clock a row might lose its draft
    extended, real = [], type(llm.engine.runner.drafter).extend
    monkeypatch.setattr(
        type(llm.engine.runner.drafter), "extend", lambda *given: extended.append(len(given[1])) or real(*given)
    )
    _, plans = one(llm, strong_pair.prompts([30])[0], WITHOUT)
    assert not extended
    assert all(plan.no_draft == plan.rows for plan in plans if isinstance(plan, RoundPlan | PrefillPlan))
    submit(llm, strong_pair.prompts([30, 9, 12]), [WITHOUT, WITH, WITHOUT])
    for _ in pump(llm):
        for each in llm.scheduler.rows.by_row.values():
            held = {group for group, pages in each.held.lease.pages.items() if pages}
            assert any(map(is_draft, held)) == each.params.speculative
        if extended:  # behind the prefill, whose batch they share
            extended[:] = [rows for rows in extended if rows != 4]
    assert set(extended) <= {1}, "they caught up for a row that drafts"


class Readers(TorchDispatchMode):
    """Operations that are given a tensor, by name and by what else they are given; a view is none."""

    def __init__(self, tensor):
        super().__init__()
        self.at, self.found = tensor.data_ptr(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [each.data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not func.is_view and self.at in given:
            self.found.append((func.overloadpacket.__name__, {*given} - {self.at}))
        return func(*args, **(kwargs or {}))


def test_a_phase_finds_what_the_draft_has_in_one_launch(strong_pair):
    """Which rows have a draft is known when a plan is staged: DRAFT and EXTEND look up where these stand, once."""
    engine = build(strong_pair, SHAPE, speculative_calibration="learn").engine
    buffers, key = engine.runner.buffers, RoundKey(4, engine.layout.shapes[0], SamplingMode.GREEDY)
    buffers.row_lists.fill_(engine.layout.dummy_row)
    with torch.inference_mode(), Readers(buffers.draft_rows) as reading:
        engine.launcher.launch(key, 1)
    committed = [name for name, others in reading.found if engine.runner.state.committed.data_ptr() in others]
    assert committed == ["index"] * 2
    tables = {table.data.data_ptr() for table in engine.runner.state.page_tables.values()}
    others = [name for name, others in reading.found if not others & tables]  # kernels read pages by them
    assert others.count("index") == len(committed)
    assert "where" not in others


def test_no_tree_grows_from_what_was_in_its_row_before(strong_pair):
    """Its trees are those of a row that nobody had: what was proposed to the request before is nowhere in them."""

    def grown(llm):
        seen = []
        llm.engine.observer = lambda plan, tree, accepted: seen.append(tree.tokens.clone())
        one(llm, strong_pair.prompts([7])[0], WITHOUT)
        return seen

    llm = build(strong_pair, SHAPE, max_running_requests=1)
    one(llm, strong_pair.prompts([40])[0], WITH)
    trees = grown(llm), grown(build(strong_pair, SHAPE, max_running_requests=1))
    assert len(trees[0]) == len(trees[1]) > 0
    for a, b in zip(*trees, strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("disk", [False, True])
def test_tiers_keep_both_kinds_apart(strong_pair, tmp_path, disk):
    """From the host, and from a disk that another engine wrote, who drafts gets no page without the draft's."""
    folder = {"kv_offloading_folder": str(tmp_path), "kv_offloading_disk_size": 1} if disk else {}
    prompts = strong_pair.prompts([100, 100, 100], seed=5)
    short = {kind: replace(params, max_tokens=9) for kind, params in (("with", WITH), ("without", WITHOUT))}
    fresh = [accepted(one(build(strong_pair, (3, 3, 8)), prompt, short["with"])[0]) for prompt in prompts]

    def engine():
        return with_tier(strong_pair, **{**POOL, **folder, "check_level": 3})

    def asked(llm, which, kind):
        request, _ = one(llm, prompts[which], short[kind])
        return request.num_cached_tokens, accepted(request)

    with on_a_cpu():
        llm = engine()
        for which in range(3):
            asked(llm, which, "without")
        if disk:
            llm.close()
            llm = engine()
        assert asked(llm, 0, "without")[0] == 96
        assert asked(llm, 1, "with") == (0, fresh[1])
        for which in (2, 0):
            asked(llm, which, "without")
        if disk:
            llm.close()
            llm = engine()
        assert asked(llm, 1, "with") == (96, fresh[1])
        for which in (2, 0):
            asked(llm, which, "without")
        assert asked(llm, 1, "without")[0] == 96, "those with the draft's serve who has none"
        assert not stats(llm).failed_loads
        llm.close()


def test_what_is_handed_over_comes_whole_and_goes_on_without(strong_pair):
    """Another worker's prefill has a record with proposals; the row is padding to the draft from its first round on."""
    prompts, params = strong_pair.prompts([40, 33]), [WITH, WITHOUT]
    want = tokens(build(strong_pair, None).generate(prompts, params))
    prefill, decode = (Worker(strong_pair, SHAPE, check_level=3) for _ in range(2))
    plans, launch = [], decode.engine.launch
    decode.engine.launch = lambda plan: plans.append(plan) or launch(plan)
    relay = Relay(prefill, decode)
    ids = relay.submit(prompts, params, IDS)
    relay.run()
    assert not relay.local
    results = [relay.result(each) for each in ids]
    assert [each[0] for each in results] == want
    assert any(results[0][1])
    assert not any(results[1][1])
    rounds = [plan for plan in plans if isinstance(plan, RoundPlan)]
    assert all(len(plan.no_draft) == 1 for plan in rounds if len(plan.rows) == 2)
    for worker in (prefill, decode):
        worker.close()


def test_the_draft_reads_no_prompt_that_was_handed_over(strong_pair):
    """So what policies are told of prompts that it reads are those which were prefilled here, but for cached ones."""
    prefill, decode = (Worker(strong_pair, SHAPE) for _ in range(2))
    relay, few, read_per_token = Relay(prefill, decode), greedy(2, whole=True), decode.scheduler._lengths.read_per_token
    relay.submit(strong_pair.prompts([5] * 16), [few] * 16, IDS)
    relay.run()
    assert not relay.local
    assert read_per_token() == 0.0
    relay.submit(strong_pair.prompts([8] * 16, seed=5), [few] * 16, IDS, remote=False)
    relay.run()
    assert read_per_token() == pytest.approx(2.0), "half of 32 requests had 8 tokens for 2"
    for worker in (prefill, decode):
        worker.close()


def test_a_row_without_a_draft_never_gets_one_again(strong_pair):
    """Level 1: a plan whose row the draft has no K/V of is refused, and one that lists them elsewhere than last."""
    llm = build(strong_pair, SHAPE, check_level=1, max_running_requests=2)
    submit(llm, strong_pair.prompts([5, 9]), [WITHOUT, WITH])
    plans = [plan for plan, _ in pump(llm) if len(plan.rows) == 2]
    prompts, plan = (next(each for each in plans if isinstance(each, kind)) for kind in (PrefillPlan, RoundPlan))
    assert [each.no_draft for each in (prompts, plan)] == [each.rows[1:] for each in (prompts, plan)]
    checker = PlanChecker(llm.engine.layout)
    checker.check(plan)
    for wrong in (replace(plan, no_draft=()), replace(plan, rows=plan.rows[::-1])):
        with pytest.raises(CheckError, match="have no draft"):
            checker.check(wrong)
    checker.check(prompts)
    for wrong in (replace(prompts, no_draft=()), replace(prompts, chunks=prompts.chunks[::-1])):
        with pytest.raises(CheckError, match="have no draft"):
            checker.check(wrong)


@pytest.mark.parametrize("options", [{}, {"graphs": "sim", "prefill_graph_max_tokens": 64}], ids=str)
def test_who_has_no_draft_costs_none(strong_pair, options):
    """The draft reads lines of a prefill that have one, not the batch; where nobody has, neither a prefill step nor a
    round launched phase by phase keeps or reads anything for it.
    """
    llm = build(strong_pair, SHAPE, speculative_policy="auto", max_running_requests=8, check_level=3, **options)
    drafter, lines, kept = llm.engine.runner.drafter, [], []
    extend, gather = drafter.extend, rounds_module.defer
    drafter.extend = lambda tokens, *given: lines.append(tuple(tokens.shape)) or extend(tokens, *given)
    rounds_module.defer = lambda *given: kept.append(given) or gather(*given)
    try:
        prompts, few = strong_pair.prompts([9] * 8), [replace(WITHOUT, max_tokens=4)] * 8
        want = tokens(build(strong_pair, None).generate(prompts, few))
        lines.clear()
        assert tokens(llm.generate(prompts, few)) == want
        assert not lines
        assert bool(kept) == bool(options), "a graph has it as data"
        llm.scheduler.policy = FixedShape(PLAIN)
        assert tokens(llm.generate(prompts, [*few[:7], replace(WITH, max_tokens=4)])) == want
        assert lines
        if not options:
            assert {rows for rows, _ in lines} == {1}
    finally:
        rounds_module.defer = gather


class Modelled(AdaptiveShape):
    """Rounds take what a table says, whatever the machine does. While the head is watched every tenth is a trial, which
    is always due."""

    def choose(self, *given) -> SpecShape:
        chosen = super().choose(*given)
        self.alone = self.looks = self.watches
        return self._trees[-1] if self.watches and self._num_rounds % 10 == 0 else chosen

    def note(self, plan, result, *took) -> None:
        super().note(plan, result, None)


def costs_of(layout, catch_up: float) -> CostTable:
    """In plain rounds, which cost the same at any size. catch_up: of all rows; of few its share."""
    price = {shape: 1.0 + 0.05 * shape.num_draft_tokens for shape in layout.shapes} | {PLAIN: 1.0}
    rounds = [
        RoundCost(rows, shape, (0.5 + rows / 16) * price[shape], 0.0)
        for rows in layout.coarse_buckets
        for shape in layout.shapes
    ]
    ups = [CatchUpCost(rows, catch_up * rows / layout.max_requests) for rows in layout.coarse_buckets]
    return CostTable("", tuple(rounds), tuple(ups))


@pytest.mark.parametrize("options", few_of([{"check_level": 3}, {"graphs": "sim", "overlap": True}], 1), ids=str)
def test_a_head_that_does_not_pay_is_watched_by_few_rows(strong_pair, options):
    """A catch-up that the budget does not pay is not made: rows go on without a draft, and all but one begin so; trees
    are of the others alone. Once trees would pay, who comes has a draft again.
    """
    useless, good = HeadAcceptance((0.02,), 0.02), HeadAcceptance((0.9, 0.9, 0.9), 0.5)
    llm = build(
        strong_pair, SHAPE, speculative_policy="auto", speculative_max_deferred=8, max_running_requests=8, **options
    )
    layout = llm.engine.layout
    policy = llm.scheduler.policy = Modelled(costs_of(layout, 8.0), layout, lambda: useless)
    prompts, params = strong_pair.prompts([5, 9, 12, 20] * 3), [greedy(60, whole=True)] * 12
    want = tokens(build(strong_pair, None).generate(prompts, params))
    asked = submit(llm, prompts, params)
    plans, begun = [], []
    for plan, _ in pump(llm):
        plans.append(plan)
        begun += getattr(plan, "setups", ())
    assert [tuple(request.output_ids) for request in asked] == want
    assert policy.watches
    assert [setup.drafts for setup in begun[:8]] == [True] * 8
    assert sum(setup.drafts for setup in begun[8:]) <= 1
    rounds = [plan for plan in plans if isinstance(plan, RoundPlan)]
    assert all(len(plan.rows) - len(plan.no_draft) <= 1 for plan in rounds if plan.catches_up)
    trials = [plan for plan in rounds if plan.shape != PLAIN and plan.no_draft == ()]
    assert {len(plan.rows) for plan in trials[-3:]} == {1}
    assert all(len(plan.no_draft) >= len(plan.rows) - 1 for plan in rounds[60:])
    policy._head = good
    policy.acceptance = AcceptanceEstimate(policy._trees, good)
    told = RowResult(trials[-1].rows[0], (1, 1, 1, 1), True)
    policy.note(trials[-1], StepResult((told,)), None)
    again = submit(llm, prompts, [greedy(12, whole=True)] * 4 + params[4:])
    begun = [setup for plan, _ in pump(llm) for setup in getattr(plan, "setups", ())]
    assert [tuple(request.output_ids) for request in again] == [each[:12] for each in want[:4]] + want[4:]
    assert sum(setup.drafts for setup in begun[:8]) <= 1
    assert all(setup.drafts for setup in begun[8:])


class OfATable(AdaptiveShape):
    """Rounds take what a table says, whatever the machine does."""

    def note(self, plan, result, *took) -> None:
        super().note(plan, result, None)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_head_that_is_wrong_from_one_moment_on_costs_an_engine_two_percent_of_200_rounds(strong_pair, rows):
    """By what its rounds and catch-ups take in plain rounds. Two drafts are accepted until then, and none any more."""
    llm = build(strong_pair, SHAPE, speculative_policy="auto", speculative_max_deferred=8, max_running_requests=rows)
    layout, table = llm.engine.layout, costs_of(llm.engine.layout, 0.5)
    llm.scheduler.policy = OfATable(table, layout, lambda: HeadAcceptance((0.9,), 0.5))
    ops, gains, wrong = llm.engine.runner.ops, list[float](), False

    def accept(chosen, tree, accepted, forced, *given) -> None:
        most = 0 if wrong else min(2, accepted.path.shape[1] - 1)
        real(chosen, tree, accepted, torch.full_like(accepted.bonus, most), *given)

    real = ops.accept
    object.__setattr__(ops, "accept", accept)
    submit(llm, strong_pair.prompts([9] * 16 * rows), [greedy(60, whole=True)] * 16 * rows)
    for plan, updates in pump(llm):
        if not isinstance(plan, RoundPlan) or len(plan.rows) < rows or len(gains) >= 300:
            continue
        plain_s = table.seconds(rows, PLAIN, 0.0)
        took = table.seconds(rows, plan.shape, 0.0) + plan.catches_up * table.catch_up_seconds(rows, 1)
        gains.append(sum(len(update.new_ids) for update in updates) / rows - took / plain_s)
        wrong = len(gains) >= 100
    object.__setattr__(ops, "accept", real)
    assert len(gains) == 300
    assert sum(gains[:100]) > 20.0
    assert sum(gains[102:]) >= -0.02 * 200


@pytest.mark.parametrize(
    ("head", "saved", "reads", "kind"),
    few_of(
        [
            ("good", 9.0, 0.0, {"check_level": 3}),
            ("good", 9.0, 0.0, {"graphs": "sim", "overlap": True, "mixed_chunk": "on"}),
            ("good", 1.0, 0.0, {"overlap": True}),
            ("good", 9.0, 5.0, {}),
            ("useless", 9.0, 0.0, {}),
        ],
        3,
    ),
)
def test_a_long_request_that_lost_its_draft_gets_it_back_where_that_pays(strong_pair, head, saved, reads, kind):
    """Once trees would pay for it, it is put back, comes again with a draft and accepts as one that never lost it. Not
    where what is saved does not pay for that, where it gains nothing, or where drafts take longer to read prompts than
    trees gain, so that it would come without one; and who ends soon goes on without.
    """
    heads = {"useless": HeadAcceptance((0.02,), 0.02), "good": HeadAcceptance((0.9, 0.9, 0.9), 0.5)}
    sizes = {"speculative_policy": "auto", "speculative_max_deferred": 8, "max_running_requests": 4}
    llm = build(strong_pair, SHAPE, **sizes, **kind)
    layout, scheduler = llm.engine.layout, llm.scheduler
    policy = scheduler.policy = Modelled(costs_of(layout, 8.0), layout, lambda: heads["useless"])
    prompts, params = strong_pair.prompts([9, 5, 12, 20]), [greedy(n, whole=True) for n in (120, 40, 20, 20)]
    want = tokens(build(strong_pair, None).generate(prompts, params))
    asked, begun, lost = submit(llm, prompts, params), [], []
    for plan, _ in pump(llm):
        begun += getattr(prefill_of(plan), "setups", ())
        if not lost and len(scheduler.queues.by_id) == 2:
            lost = [request for request in asked[:2] if not request.held.lease.drafts]
            policy._head = heads[head]
            policy.acceptance, policy.savings = AcceptanceEstimate(policy._trees, heads[head]), saved
            policy._prefills.note(64, 1.5)  # two plain rounds or three
            policy._read_per_token = lambda: reads
    assert [tuple(request.output_ids) for request in asked] == want
    assert asked[0] in lost, "it kept its draft"
    again = [setup for setup in begun[4:] if setup.drafts]
    assert len(begun) == 4 + len(again)
    pays = head == "good" and saved > 3.0 and not reads
    assert len(again) == pays
    assert any(accepted(asked[0])) == pays
    assert asked[1] not in lost or not any(accepted(asked[1]))
    assert (policy.savings < saved - 1.5) == pays


def test_its_rounds_teach_nothing(strong_pair):
    """What the target chooses where the draft read nothing is nothing that a calibration counts."""
    llm = build(strong_pair, SHAPE, speculative_calibration="learn", max_running_requests=2)
    one(llm, strong_pair.prompts([9])[0], WITHOUT)
    assert not llm.engine.runner.state.calibration.nodes.any()
    one(llm, strong_pair.prompts([9])[0], WITH)
    assert llm.engine.runner.state.calibration.nodes.any()


def test_simulated_acceptance_accepts_nothing_for_it(strong_pair):
    """A row that goes on without a draft has one token a round, where others have what is simulated."""
    llm = build(strong_pair, SHAPE, simulate_accept_length=2, max_running_requests=2)
    first, second = submit(llm, strong_pair.prompts([9, 9]), WITH)
    for step, _ in enumerate(pump(llm)):
        if step == 2:
            llm.scheduler.rows.stop_drafting(first)
    assert all(accepted(first)[:2])
    assert set(accepted(first)[2:]) == {0}
    assert all(accepted(second)[:6])
