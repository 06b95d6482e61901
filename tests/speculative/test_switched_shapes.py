"""Shapes that change from round to round, and draft extends that wait for each other: no token and no tree changes."""

from dataclasses import replace

import pytest
import torch

from support.engines import accept_lens, build, greedy, pump, sampled, submit, tokens
from support.grids import few_of
from support.lookups import lookup
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop.debug.oracle import DensePair
from treetop.debug.two_group import write_two_group_pair
from treetop.doctor.conformance import RandomShapes, follow
from treetop.types.errors import CheckError
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.messages import RoundPlan
from treetop_debug.patching import Patch, replaced, wrapped_runner
from treetop_debug.visibility import VisibilityWatch

GRID = [  # (k, S, T), page size, chunk, batch, options
    ((4, 5, 16), 16, 512, 8, {}),
    ((1, 5, 6), 4, 5, 8, {"overlap": True}),
    ((2, 3, 11), 1, 7, 3, {"graphs": "sim", "check_level": 3}),
    ((8, 2, 40), 16, 5, 8, {"graphs": "sim", "check_level": 2}),
    ((3, 4, 9), 2, 16, 5, {"graphs": "sim", "check_level": 3, "overlap": True}),
    ((4, 1, 5), 64, 16, 1, {"check_level": 2, "overlap": True}),
]
DEFERRED = 4


def switched(llm, seed=0) -> RandomShapes:
    """From now on every round has a random shape of its own, and rows lose their draft and get it back."""
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, seed, loses=True)
    return llm.scheduler.policy


def adaptive(pair, shape, **options):
    options = {"speculative_policy": "auto", "speculative_max_deferred": DEFERRED, **options}
    llm = build(pair, shape, **options)
    return llm, switched(llm)


@pytest.mark.parametrize(("shape", "page", "chunk", "batch", "options"), few_of(GRID, 1))
def test_shapes_that_switch_at_random_change_no_token(strong_pair, shape, page, chunk, batch, options):
    """Float64, greedy and sampled, eager and replayed: with plain rounds, chains and trees in turn, as plainly."""
    prompts = strong_pair.prompts([1, 3, 15, 16, 17, 33])
    params = [greedy(40), sampled(11, 40), greedy(23), sampled(2**62 + 5, 40, top_k=5), greedy(40), sampled(1, 30)]
    want = tokens(build(strong_pair, None, max_running_requests=1).generate(prompts, params))
    sizes = {"page_size": page, "chunked_prefill_size": chunk, "max_running_requests": batch}
    llm, policy = adaptive(strong_pair, shape, **sizes, **options)
    outputs = llm.generate(prompts, params), llm.generate(prompts, params)  # prefixes that come from the cache
    assert [*map(tokens, outputs)] == [want] * 2
    llm.scheduler.check_integrity()
    assert set(policy.chosen) == set(llm.engine.layout.shapes)
    assert sum(map(sum, accept_lens([*outputs[0], *outputs[1]]))) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("options", few_of([{}, {"graphs": "sim", "check_level": 3}, {"overlap": True}], 1), ids=str)
def test_windows_of_target_and_draft_hold_what_is_deferred(tmp_path, options):
    """Pages behind the draft's window stay until it has caught up; few pages, so that requests are put back too."""
    pair, sizes = Pair(*write_two_group_pair(tmp_path)), {"page_size": 2, "chunked_prefill_size": 8}
    sizes["context_length"], draft = 96, {"speculative_draft_window_size": 6, "speculative_max_deferred": 7}
    prompts, params = (
        pair.prompts([30, 5, 11, 2], seed=1),
        [greedy(50, whole=True), sampled(1, 60, whole=True), greedy(45, whole=True), greedy(60, whole=True)],
    )
    want = tokens(build(pair, None, **sizes).generate(prompts, params))
    llm, policy = adaptive(pair, (3, 3, 9), max_total_tokens=150, **draft, **sizes, **options)
    assert tokens(llm.generate(prompts, params)) == want
    llm.scheduler.check_integrity()
    assert PLAIN in policy.chosen


@pytest.mark.parametrize("options", few_of([{}, {"graphs": "sim", "check_level": 3}, {"overlap": True}], 2), ids=str)
def test_drafts_from_the_text_switch_too(strong_pair, options):
    """A lookup has no K/V, and reads the text that plain rounds have left."""
    prompts, params = (
        strong_pair.prompts([24, 5, 9]),
        [greedy(40, whole=True), sampled(1, 30, whole=True), greedy(36, whole=True)],
    )
    policy = {"speculative_policy": "auto", "speculative_max_deferred": DEFERRED}
    llm = lookup(strong_pair, (4, 3, 12), **policy, **options)
    switched(llm)
    outputs = llm.generate(prompts, params)
    assert tokens(outputs) == tokens(build(strong_pair, None).generate(prompts, params))
    assert sum(map(sum, accept_lens(outputs))) > 20


@pytest.fixture(scope="module")
def trees_of(tmp_path_factory):
    """(shape, tokens and scores of trees, accepted) of each round where so many tokens are deferred at most."""
    folder, made = tmp_path_factory.mktemp("deferred"), {}
    target = save_random_llama(folder / "target", seed=5, vocab_size=40)
    pair = Pair(target, save_random_head(folder / "head", target, draft_vocab=None, seed=3))

    def trees(deferred, **options):
        if (key := (deferred, *options.items())) not in made:
            llm, _ = adaptive(pair, (3, 3, 9), speculative_max_deferred=deferred, max_running_requests=4, **options)
            llm.scheduler.policy = _InTurn([PLAIN] * 6 + [SpecShape(3, 3, 9)] * 2)
            seen = []
            llm.engine.observer = lambda plan, tree, accepted: seen.append((plan.shape, tree, accepted))
            llm.generate(pair.prompts([9, 20, 5, 33]), greedy(30))
            made[key] = [(shape, tree.tokens, tree.logprob, accepted.tokens) for shape, tree, accepted in seen]
        return made[key]

    return trees


@pytest.mark.pairwise
@pytest.mark.parametrize("options", [{}, {"graphs": "sim"}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("most", [1, 3, 16])
def test_what_was_deferred_leaves_the_draft_as_if_it_had_not(trees_of, most, options):
    """After plain rounds and one pass the next tree is that of an engine whose plain rounds extend, K/V and all."""
    trees = [trees_of(deferred, **options) for deferred in (0, most)]
    assert len(trees[0]) == len(trees[1])
    for (shape, *one), (other, *two) in zip(*trees, strict=True):
        assert shape == other
        for a, b in zip(one, two, strict=True):
            assert (a - b).abs().max() < 1e-5


class _InTurn:
    """A policy that goes through a list of shapes again and again. shape: what runs between trials."""

    shape, watches, looks, alone = PLAIN, False, False, False

    def __init__(self, shapes) -> None:
        self._shapes, self._next = shapes, 0

    def choose(self, *_) -> SpecShape:
        self._next += 1
        return self._shapes[(self._next - 1) % len(self._shapes)]

    def pays_to_catch_up(self, rows, drafting) -> bool:
        return True

    def pays_to_read(self, rows, drafting, coming, others) -> bool:
        return True

    def cost_of_draft(self, rows, computed, left) -> None:
        return None

    def note(self, plan, result, seconds, tokens) -> None:
        pass


@pytest.mark.parametrize("most", few_of([1, 3, 8], 1))
def test_no_more_than_so_many_tokens_are_deferred(strong_pair, most):
    """Plain rounds alone catch up in one pass every so many rounds, whenever rows came; trees begin with one."""
    llm, _ = adaptive(strong_pair, (2, 3, 6), speculative_max_deferred=most)
    llm.scheduler.policy = _InTurn([PLAIN])
    submit(llm, strong_pair.prompts([5, 9]), greedy(40))
    plans = [plan for plan, _ in pump(llm) if isinstance(plan, RoundPlan)]
    due = [index for index, plan in enumerate(plans) if plan.catches_up]
    assert due == list(range(most, len(plans), most))


@pytest.mark.parametrize("graphs", ["off", "sim"])
def test_a_catch_up_on_a_cpu_computes_what_is_deferred_and_one_of_a_graph_all_that_may_be(strong_pair, graphs):
    """One plain round, then two, .. before each tree: as many columns, and the same tokens and paths either way."""
    turns, widths = [each for count in range(1, 5) for each in [PLAIN] * count + [SpecShape(2, 2, 6)]], []

    def noting(real):
        def deferred_pairs(pairs, rows, committed, width):
            widths.append((width, int(pairs.count[rows].max())))
            return real(pairs, rows, committed, width)

        return deferred_pairs

    with replaced((Patch("treetop.engine.rounds:deferred_pairs", noting),)):
        llm, _ = adaptive(strong_pair, (2, 2, 6), speculative_shapes="2,2,6", speculative_max_deferred=8, graphs=graphs)
        llm.scheduler.policy = _InTurn(turns)
        widths.clear()
        outputs = llm.generate(strong_pair.prompts([5, 9]), greedy(30, whole=True))
    assert {most for _, most in widths} >= {1, 2, 3}
    assert [width for width, _ in widths] == [8 if graphs == "sim" else most for _, most in widths]
    assert tokens(outputs) == tokens(
        build(strong_pair, None).generate(strong_pair.prompts([5, 9]), greedy(30, whole=True))
    )


def test_who_sees_whom_while_shapes_switch(strong_pair):
    """From first principles, also in the pass that catches up."""
    watch = VisibilityWatch()
    with wrapped_runner(watch.wrap):
        llm, _ = adaptive(strong_pair, (2, 3, 6), page_size=4)
    llm.generate(strong_pair.prompts([5, 9, 17]), greedy(40))
    assert all(watch.checked.values())


def test_a_tree_on_rows_that_the_draft_has_not_caught_up_with_is_refused(strong_pair):
    """Level 1 counts what each row has deferred, by plans alone."""

    def never(real):
        return lambda planner, batch, shape: real(planner, batch, shape) and False

    llm, _ = adaptive(strong_pair, (2, 3, 6))
    submit(llm, strong_pair.prompts([5, 9]), greedy(40, whole=True))
    with (
        replaced((Patch("treetop.scheduler.rounds:RoundPlanner._catches_up", never),)),
        pytest.raises(CheckError, match="tokens that wait for draft extend: row"),
    ):
        list(pump(llm))


def skips_the_newest(real):
    """A pass that leaves out the last token that a row has deferred, and puts the others one place too far."""

    def deferred_pairs(pairs, rows, *others):
        found, count = real(pairs, rows, *others)
        positions = torch.where(found.positions > 0, found.positions + 1, 0)
        return replace(found, first=found.first + 1, positions=positions), (count - 1).clamp(min=0)

    return deferred_pairs


def test_a_deferred_extend_that_skips_a_token_is_seen(tmp_path):
    """A fault: by the visibility decoder where it runs, and by the dense oracle in what the head then drafts."""
    patches = (Patch("treetop.engine.rounds:deferred_pairs", skips_the_newest),)
    pair = Pair(*write_two_group_pair(tmp_path, window=10_000))
    prompts, oracle = pair.prompts([9, 5], seed=1), DensePair(pair.target, pair.head)
    options = {"context_length": 96, "page_size": 4}

    def engine():
        return adaptive(pair, (3, 3, 9), **options)[0]

    assert follow(engine(), oracle, prompts, [greedy(40, whole=True)] * 2)[2] is None
    with replaced(patches):
        assert "tree after" in follow(engine(), oracle, prompts, [greedy(40, whole=True)] * 2)[2]
        with wrapped_runner(VisibilityWatch().wrap), pytest.raises(CheckError, match="visibility: phase extend"):
            engine()
