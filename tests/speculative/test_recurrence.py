"""Recurrent layers under trees: what a row keeps is what its tokens make of nothing, whatever its rounds were."""

import random
from collections import deque

import pytest

from support.drain import Crossover, staggered
from support.engines import accept_lens, build, greedy, sampled, steps, submit, tokens
from support.families import FAMILIES
from support.grids import few_of
from support.recurrences import NAMES as KINDS
from support.recurrent_models import check_dummy, check_snapshot, known_family, save_pair, snapshot, states_of
from support.refusing import refused
from treetop import LLM
from treetop.doctor.conformance import RandomShapes
from treetop.engine.memory import state_bytes
from treetop.tools.inspect import inspect
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop_debug.ranks import ranks_on_threads
from treetop_debug.recurrent_faults import CHANNEL_FAULTS, RECURRENT_FAULTS

OPTIONS = {"context_length": 96, "max_running_requests": 4, "page_size": 4, "chunked_prefill_size": 16}


def slow(*values):
    """A case of the long matrix."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def _family():
    with known_family():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Both kinds of recurrence among full attention."""
    return save_pair(tmp_path_factory.mktemp("recurrent"), "sum", "delta", "full", "delta", "sum")


def built(pair, shape=(2, 3, 6), **options):
    return build(pair, shape, **{**OPTIONS, **options})


def ngram(pair, **options):
    """Drafts from the request's text."""
    shape = {"speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 6}
    options = {"dtype": "float64", **OPTIONS, **options}
    return LLM(model=str(pair.target), draft=None, speculative_algorithm="NGRAM", **shape, **options)


class Watched:
    """Takes what every row keeps after each step, to compare it when the request's tokens are known."""

    def __init__(self, llm) -> None:
        self.llm, self.taken, self.checked = llm, {}, 0
        self.seen, self.hits = set(), 0

    def look(self) -> None:
        """Rows whose steps have all been committed."""
        check_dummy(self.llm)
        for row, request in self.llm.scheduler.rows.by_row.items():
            if request.finish_reason is None and not request.held.steps_out:
                taken = snapshot(self.llm, row, request.num_computed_tokens)
                self.taken.setdefault(request, []).append(taken)
                self.seen.add(request)

    def settle(self, requests=None) -> None:
        """Compare those of requests that will get no tokens more; of all by default."""
        for request in list(self.taken) if requests is None else requests:
            found = self.taken.pop(request, [])
            if found:
                true = states_of(self.llm, request.ids[: max(each.length for each in found)])
            for each in found:
                check_snapshot(each, true)
                self.checked += 1


def run(llm, prompts, params) -> Watched:
    """To the end, with a look after each step."""
    watched = Watched(llm)
    submit(llm, prompts, params)
    for _ in steps(llm):
        watched.look()
    watched.settle()
    return watched


# ---------------------------------------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def prompts(pair):
    """Of 1, 2 and 6 tokens, as many as nodes; of one chunk, one more, two."""
    return pair.prompts([1, 2, 6, 3, 16, 17, 33, 40])


@pytest.fixture(scope="module")
def plain(pair, prompts):
    """One request at a time, plain, its prompt in one chunk."""
    llm = built(pair, None, max_running_requests=1, chunked_prefill_size=64)
    return tokens(llm.generate(prompts, greedy(24)))


def test_plain_tokens_are_those_of_the_dense_model(pair, prompts, plain):
    """One forward over each prefix, from no state."""
    llm = built(pair, None)
    for prompt, answer in zip(prompts, plain, strict=True):
        for end in (0, 1, 7, len(answer) - 1):
            ids = [*prompt, *answer[:end]]
            assert int(llm.engine.next_logits(ids).argmax()) == answer[end]


@pytest.mark.parametrize("graphs", few_of(["off", "sim"], 1))
@pytest.mark.parametrize("shape", [slow(None), slow((1, 3, 4)), (2, 3, 6), (4, 2, 16)])
def test_trees_of_a_random_head_change_no_token(pair, prompts, plain, shape, graphs):
    """Greedy, batches that drain, prompts in chunks; eager, and as captured rounds have it."""
    llm = built(pair, shape, graphs=graphs, check_level=3 if graphs == "sim" else 2)
    outputs = llm.generate(prompts, greedy(24))
    assert tokens(outputs) == plain
    if shape is not None:
        assert sum(sum(output.metrics.accept_lens) for output in outputs) > 2 * shape[0], "drafts were accepted"


def test_chunks_of_333_tokens_change_no_token(tmp_path):
    """Prompts of a chunk, one more, and of several, whose last is short; against one chunk a prompt."""
    pair = save_pair(tmp_path, "delta", "full", "sum", max_position_embeddings=1024)
    prompts, options = pair.prompts([332, 333, 334, 700]), {"context_length": 720, "page_size": 16}
    alone = built(pair, None, max_running_requests=1, **{**options, "chunked_prefill_size": 720})
    want = tokens(alone.generate(prompts, greedy(12)))
    llm = built(pair, **{**options, "chunked_prefill_size": 333, "disable_radix_cache": True})
    assert tokens(llm.generate(prompts, greedy(12))) == want
    assert run(llm, prompts, greedy(6)).checked >= len(prompts)


@pytest.mark.parametrize("tails", [(1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65), slow(range(1, 66))])
def test_what_follows_a_hit_may_be_of_any_length(pair, tails):
    """A checkpoint's states and a tail of 1 to 65 tokens give what the whole prompt gives."""
    base, *ends = pair.prompts([33, *tails], seed=4)
    prompts, options = [[*base, *end[1:]] for end in ends], {"context_length": 112}  # a draft's K/V go by what follows
    want = tokens(built(pair, None, disable_radix_cache=True, **options).generate(prompts, greedy(6)))
    options |= {"state_checkpoint_every": 16, "state_checkpoint_memory": 0.01}
    llm = built(pair, check_level=2, **options)
    llm.generate([base], greedy(2))
    outputs = llm.generate(prompts, greedy(6))
    assert tokens(outputs) == want
    assert [output.metrics.num_cached_tokens for output in outputs][:2] == [32, 32]
    assert all(output.metrics.num_cached_tokens >= 32 for output in outputs)


@pytest.mark.parametrize("chunk", [slow(1), 3, slow(5), slow(64)])
def test_trees_from_the_text_change_no_token_whatever_the_chunks(pair, prompts, plain, chunk):
    """Chunks of one token, of taps - 1, and of all; n-gram drafts."""
    outputs = ngram(pair, chunked_prefill_size=chunk).generate(prompts, greedy(24))
    assert tokens(outputs) == plain
    assert sum(sum(output.metrics.accept_lens) for output in outputs) > 40


def test_sampled_tokens_are_the_same_with_trees(pair, prompts):
    """The target's own draws, by seed and position."""
    params = [sampled(i, 20) for i in range(len(prompts))]
    assert tokens(built(pair).generate(prompts, params)) == tokens(built(pair, None).generate(prompts, params))


def test_a_draining_batch_crosses_from_eager_to_replayed_rounds(pair):
    """Nine requests end one after the other."""
    params, prompts = staggered(9, 2, 4), pair.prompts([3 + 2 * i for i in range(9)], seed=2)
    expected = tokens(built(pair, None, max_running_requests=1).generate(prompts, params))
    llm = built(pair, max_running_requests=9, graphs="sim")
    llm.engine.launcher = Crossover(llm.engine, 4)
    assert tokens(llm.generate(prompts, params)) == expected


@pytest.mark.parametrize(
    "options", few_of([{"speculative_max_deferred": 3}, {"overlap": True}, {"overlap": True, "page_size": 1}], 1)
)
def test_shapes_that_change_defer_and_overlap_change_no_token(pair, prompts, plain, options):
    """Plain rounds that defer the draft's part, chains and trees in turn, rows that lose their draft and get it back;
    with steps in flight.
    """
    llm = built(pair, speculative_policy="auto", **options)
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, loses=True)
    for _ in range(2):  # the second time prefixes come from the cache
        assert tokens(llm.generate(prompts, greedy(24))) == plain
    assert llm.scheduler.policy.num_put_back


def test_a_simulated_acceptance_runs(pair, prompts):
    """What is emitted then is not what was verified; paths are as long as asked for, and nothing else changes."""
    llm = built(pair, simulate_accept_length=2.5, check_level=3)
    outputs = llm.generate(prompts, greedy(24, whole=True))
    assert all(len(each) == 24 for each in tokens(outputs))
    check_dummy(llm)


def test_ranks_share_heads_and_give_what_one_gives(pair, prompts):
    """Two ranks have a key head each with its value heads; trees, chunks, a batch that drains."""
    alone = built(pair).generate(prompts, greedy(12))
    with ranks_on_threads():
        llm = built(pair, tp_size=2)
        shared = llm.generate(prompts, greedy(12))
        heads = [(group.heads, group.key_heads, group.channels) for group in llm.engine.layout.state_groups]
        llm.close()
    assert heads == [(1, 1, 0), (2, 1, 20)]
    assert tokens(shared) == tokens(alone)
    assert accept_lens(shared) == accept_lens(alone)


def test_what_states_cannot_do_is_refused_by_name(pair, tmp_path):
    """Another library's prefill, heads that ranks cannot share, a model without keys and values."""
    by_fla = {"linear_attn_prefill_backend": "fla"}
    refused(ConfigError, lambda: built(pair, **by_fla), "--linear-attn-prefill-backend fla", "no delta rule")
    refused(ConfigError, lambda: built(pair, None, tp_size=4), "--tp-size 4")
    delta = save_pair(tmp_path / "delta", "delta", "full")
    refused(ConfigError, lambda: built(delta, **by_fla), "--linear-attn-prefill-backend fla", "GPU", "use auto")
    alone = save_pair(tmp_path / "alone", "sum", "delta")
    refused(ConfigError, lambda: built(alone, None), "recurrent layers alone")


def test_memory_of_states_is_planned_as_it_is_made(pair, caplog):
    """In the plan's estimate, in the start-up log and by `inspect`."""
    with caplog.at_level("INFO", "treetop"):
        llm = built(pair)
    state = llm.engine.runner.state
    made = [table for table in state.states.tables if table.dim() > 1]  # without counts
    layout = llm.engine.layout
    assert sum(each.nbytes for each in made) == layout.num_rows * state_bytes(layout, 8)
    assert llm.engine.memory.budget.static >= sum(each.nbytes for each in made)
    assert "states state: 2 layers" in caplog.text
    report = inspect(EngineConfig.of(str(pair.target), dtype="float64", **OPTIONS))
    assert report.memory is not None
    assert sum(each.bytes_per_row for each in report.memory.states) <= state_bytes(layout, 8)
    assert [(each.layers, each.rows) for each in report.memory.states] == [(2, 5), (2, 5)]


# ---------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("shape", [slow(None), slow((1, 3, 4)), (2, 3, 6)])
def test_states_of_every_row_are_those_of_its_tokens(pair, prompts, shape):
    """After each step: state with pending, convolution and the pending updates themselves; the dummy row is zero."""
    watched = run(built(pair, shape, check_level=3), prompts, greedy(24))
    assert watched.checked > 60


def test_states_are_those_of_the_tokens_where_pages_run_short(pair):
    """Retracted requests move in again, and their states begin at zero."""
    llm = built(pair, max_total_tokens=112, check_level=3)
    watched = run(llm, pair.prompts([20, 22, 24, 21]), greedy(40))
    assert llm.scheduler.num_retractions
    assert watched.checked > 60


def schedule(llm, watched, rng, beginnings) -> None:
    """Some requests come, some are aborted, between steps of which several may be in flight."""
    tickets, mine, left = deque(), [], rng.randint(2, 5)
    while True:
        if left and rng.random() < 0.5:
            left -= 1
            prompt = [rng.randrange(4, 12) for _ in range(rng.choice([1, 2, 3, 5, 9, 18]))]
            if rng.random() < 0.7:
                prompt = rng.choice(beginnings)[: rng.randrange(4, 21)] + prompt[:9]
            params = greedy(rng.randint(1, 9)) if rng.random() < 0.8 else sampled(rng.randrange(99), 6)
            mine += submit(llm, [prompt], params)
        if rng.random() < 0.06 and (live := [each for each in mine if each.finish_reason is None]):
            llm.scheduler.abort(rng.choice(live).request_id)
        plan = llm.scheduler.plan() if len(tickets) < 2 else None
        if plan is not None:
            tickets.append(llm.engine.launch(plan))
        if tickets and (plan is None or rng.random() < 0.7):
            done = tickets.popleft()
            llm.scheduler.commit(done.plan, llm.engine.collect(done))
            if not tickets:
                watched.look()
        if not left and not tickets and not llm.scheduler.has_work:
            return


def play(pair, seeds, **options) -> Watched:
    """Schedules one after the other on one engine, whose rows go from hand to hand."""
    llm = built(pair, **options)
    watched, beginnings = Watched(llm), pair.prompts([20, 20, 20], seed=7)
    for seed in seeds:
        schedule(llm, watched, random.Random(seed), beginnings)
        llm.scheduler.check_integrity()
        watched.settle()
    watched.hits = sum(request.num_cached_tokens > 0 for request in watched.seen)
    return watched


@pytest.mark.parametrize(
    "options",
    few_of(
        [
            {"shape": (2, 3, 6), "max_total_tokens": 72, "context_length": 48, "check_level": 2},
            {"shape": (1, 2, 3), "graphs": "sim", "check_level": 3, "overlap": True},
            {"shape": None, "chunked_prefill_size": 5},
        ],
        1,
    ),
)
def test_random_schedules_leave_the_states_of_the_tokens(pair, options):
    """Admissions, chunks, rounds, retractions, aborts, hits; state, convolution and pending updates after each step."""
    watched = play(pair, range(20), state_checkpoint_every=8, **options)
    assert watched.checked > (30 if "overlap" in options else 120)
    assert watched.hits > 3


@pytest.mark.parametrize("name", RECURRENT_FAULTS)
def test_states_tell_of_each_past_bug(pair, prompts, name):
    """Put back, some row has not the states of its tokens; without it all have."""
    order = prompts[::-1]  # long prompts leave their rows to short ones
    with RECURRENT_FAULTS[name].active(), pytest.raises(AssertionError, match=r"state|convolution|pending"):
        run(built(pair), order, greedy(12))


FEW = {"max_total_tokens": 72, "context_length": 48, "check_level": 2, "state_checkpoint_every": 8}
OFTEN = ("lfm2", "kimi linear")
WITHOUT = {
    "lfm2": ("state-of-the-round-before", "state-twice"),
    "minimax": ("state-conv-stands", "state-window-by-column"),
}
"""Faults of what a kind has not got: a convolution alone has no state, lightning attention no convolution."""


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Name -> a family's target with a random head, made when it is asked for."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = FAMILIES[name].save(tmp_path_factory.mktemp("kind"), seed=5).pair
        return made[name]

    return of


@pytest.mark.parametrize("name", [each if each in OFTEN else slow(each) for each in KINDS])
def test_random_schedules_of_every_kind_leave_the_states_of_the_tokens(families, name):
    """As above, of families as they are published: states and convolutions, or convolutions alone."""
    watched = play(families(name), range(3), shape=(2, 3, 6), **FEW)
    assert watched.checked > 10


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["off", "sim"])
@pytest.mark.parametrize("name", KINDS)
def test_many_random_schedules_of_every_kind(families, name, graphs):
    assert play(families(name), range(2000, 2300), shape=(2, 3, 6), graphs=graphs, **FEW).hits > 50


def test_decays_by_head_are_not_those_by_channel(families):
    pair = families("kimi linear")
    with CHANNEL_FAULTS["state-decay-by-head"].active(), pytest.raises(AssertionError, match=r"state|pending"):
        run(built(pair), pair.prompts([17, 6], seed=2), greedy(6))


@pytest.mark.slow
@pytest.mark.parametrize("fault", RECURRENT_FAULTS)
@pytest.mark.parametrize("name", KINDS)
def test_states_of_every_kind_tell_of_each_past_bug(families, name, fault):
    """But where a kind has not what the fault is in: a convolution alone has no state, lightning no convolution."""
    if fault in WITHOUT.get(name, ()):
        pytest.skip("this kind keeps nothing that the fault changes")
    pair = families(name)
    with RECURRENT_FAULTS[fault].active(), pytest.raises(AssertionError, match=r"state|convolution|pending"):
        run(built(pair), pair.prompts([40, 33, 17, 16, 6, 2, 1], seed=2), greedy(12))


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["off", "sim"])
@pytest.mark.parametrize("shape", [(2, 3, 6), (4, 2, 16), (1, 4, 5)])
def test_many_random_schedules(pair, shape, graphs):
    """The same, over and over."""
    small = {"max_total_tokens": 96, "context_length": 48, "check_level": 2, "state_checkpoint_every": 4}
    assert play(pair, range(1000, 1500), shape=shape, graphs=graphs, **small).hits > 100
