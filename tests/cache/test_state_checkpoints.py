"""Prompts that begin alike go on from states that were kept of them: exactly where pages and a checkpoint are."""

import pytest

from support.engines import build, greedy, steps, submit, tokens
from support.examples import EVERYTHING
from support.grids import few_of
from support.recurrent_models import known_family, save_pair
from support.refusing import refused
from treetop.cache.checkpoints import StateCheckpoints
from treetop.cache.prefix_cache import Node
from treetop.types.errors import CapacityError, CheckError, ConfigError, OwnershipError
from treetop_debug.ranks import ranks_on_threads
from treetop_debug.recurrent_faults import CHECKPOINT_FAULTS

OPTIONS = {
    "context_length": 192,
    "max_running_requests": 3,
    "page_size": 4,
    "chunked_prefill_size": 64,
    "check_level": 2,
}


@pytest.fixture(scope="module", autouse=True)
def _family():
    with known_family():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("recurrent"), "sum", "delta", "full")


def built(pair, shape=(2, 3, 6), **options):
    return build(pair, shape, **{**OPTIONS, **options})


def cached(outputs) -> list[int]:
    return [output.metrics.num_cached_tokens for output in outputs]


# ---------------------------------------------------------------------------------------------- slots


def node(serial: int) -> Node:
    return Node(serial, (0, (serial,)), None, {})


def test_slots_are_free_leased_or_cached_and_the_least_used_goes_first():
    slots, (one, two, three) = StateCheckpoints(2), map(node, range(3))
    first, second = slots.lease(), slots.lease()
    assert slots.lease() is None, "others lease all"
    slots.check([first, second])
    slots.put(first, one)
    slots.put(second, two)
    assert slots.read(one) == first
    third = slots.lease()
    assert third == second, "the other was read"
    assert not slots.holds(two)
    slots.check([third])
    slots.put(third, one)
    assert slots.read(one) == first, "a checkpoint never changes"
    slots.check([])
    slots.drop(one)
    slots.drop(three)
    slots.check([])
    for wrong in (lambda: slots.give_back(0), lambda: slots.put(1, three), lambda: slots.check([0])):
        with pytest.raises(OwnershipError):
            wrong()


# ---------------------------------------------------------------------------------------------- hits


@pytest.mark.parametrize(
    "options", few_of([{}, {"shape": None}, {"overlap": True, "graphs": "sim"}, {"page_size": 1}], 0, 2)
)
def test_a_repeated_prompt_is_a_hit_and_gives_the_same_tokens(pair, options):
    """At the last page that leaves a token; with a head, whose last key of a page depends on the token after it."""
    prompts = pair.prompts([33, 3, 40, 41, 65])
    llm, alone = built(pair, **options), built(pair, disable_radix_cache=True, **options)
    expected = tokens(alone.generate(prompts, greedy(10)))
    size = llm.engine.layout.page_size
    for prompt, answer in zip(prompts, expected, strict=True):
        first, again = (llm.generate([prompt], greedy(10)) for _ in range(2))
        assert tokens(first) == tokens(again) == [answer]
        assert cached(again) == [(len(prompt) - 1) // size * size]
    llm.scheduler.check_integrity()
    assert cached(alone.generate(prompts[:1], greedy(1))) == [0]


def test_a_tail_of_any_length_behind_a_hit_gives_the_tokens_of_no_hit(pair):
    """1 to 65 tokens, as many as two blocks of a chunk and one more (sgl-29633)."""
    (base,), (rest,) = pair.prompts([32]), pair.prompts([65], seed=4)
    prompts = [base + rest[:n] for n in (range(1, 66) if EVERYTHING else (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65))]
    llm = built(pair, state_checkpoint_memory=1.0)
    llm.generate([base + rest[:1]], greedy(1))
    outputs = llm.generate(prompts, greedy(3))
    assert all(n >= 32 for n in cached(outputs))
    assert tokens(outputs) == tokens(built(pair, None, disable_radix_cache=True).generate(prompts, greedy(3)))


def test_states_are_kept_at_every_so_many_tokens_and_where_prompts_part(pair):
    """A part of a prompt is a hit at a multiple; where a second prompt parts from a first, a third finds its states."""
    (base,), others = pair.prompts([60]), pair.prompts([20, 20, 20], seed=3)
    llm = built(pair, state_checkpoint_every=16, state_checkpoint_memory=1.0)
    assert cached(llm.generate([base], greedy(2))) == [0]
    assert cached(llm.generate([base[:41] + others[0]], greedy(2))) == [32], "multiples of 16"
    assert cached(llm.generate([base[:41] + others[1]], greedy(2))) == [40], "the junction, found by the one before"
    prompt = base[:41] + others[2]
    assert tokens(llm.generate([prompt], greedy(9))) == tokens(built(pair, None).generate([prompt], greedy(9)))


def test_a_next_turn_goes_on_from_its_prompt(pair):
    """Its reply is prefilled again: rounds keep no states."""
    llm, (prompt, more) = built(pair), pair.prompts([30, 9])
    turn = [*prompt, *tokens(llm.generate([prompt], greedy(20)))[0], *more]
    outputs = llm.generate([turn], greedy(8))
    assert cached(outputs) == [28]
    assert tokens(outputs) == tokens(built(pair, None).generate([turn], greedy(8)))


@pytest.mark.slow
def test_few_slots_and_short_pages_change_no_token(pair):
    """Slots go from prompt to prompt, pages and their slots are evicted together, requests are put back."""
    prompts = pair.prompts([24, 9, 40, 24], seed=5) * 3
    llm = built(pair, max_total_tokens=200, max_running_requests=2, context_length=96, state_checkpoint_every=8)
    submit(llm, prompts, greedy(12))
    hits = sum(setup.committed > 0 for plan, _ in steps(llm) for setup in getattr(plan, "setups", ()))
    assert hits
    expected = tokens(built(pair, None, max_running_requests=1).generate(prompts[:4], greedy(12)))
    assert tokens(llm.generate(prompts, greedy(12))) == expected * 3
    llm.scheduler.check_integrity()


def test_ranks_keep_their_own_heads(pair):
    """Of the same tokens in the same slots."""
    prompts = pair.prompts([33, 40])
    expected = tokens(built(pair).generate(prompts, greedy(6)))
    with ranks_on_threads():
        llm = built(pair, tp_size=2)
        first, again = (llm.generate(prompts, greedy(6)) for _ in range(2))
        llm.close()
    assert tokens(first) == tokens(again) == expected
    assert cached(again) == [32, 36]


def test_a_model_without_states_is_not_asked_for_them(strong_pair):
    """And what cannot be kept is refused by name."""
    refused(ConfigError, lambda: build(strong_pair, state_checkpoint_every=16), "--state-checkpoint-every", "recurrent")
    refused(ConfigError, lambda: build(strong_pair, state_checkpoint_memory=1.0), "--state-checkpoint-memory")


def test_memory_for_states_is_counted_and_none_turns_the_cache_off_by_name(pair, caplog):
    refused(ConfigError, lambda: built(pair, state_checkpoint_every=6), "--state-checkpoint-every 6", "--page-size 4")
    refused(CapacityError, lambda: built(pair, state_checkpoint_memory=1e-7), "--state-checkpoint-memory", "one row")
    each = sum(group.row_bytes(8) for group in built(pair).engine.layout.state_groups)
    assert built(pair, state_checkpoint_memory=5.5 * each / 2**30).engine.layout.checkpoints == 5
    assert built(pair).engine.layout.checkpoints == OPTIONS["max_running_requests"]
    with caplog.at_level("INFO", "treetop"):
        llm = built(pair, state_checkpoint_memory=0.0)
    assert "prefix cache off" in caplog.text
    prompts = pair.prompts([33])
    assert cached(llm.generate(prompts, greedy(2)) + llm.generate(prompts, greedy(2))) == [0, 0]


@pytest.mark.parametrize("name", CHECKPOINT_FAULTS)
def test_a_wrong_checkpoint_is_told(pair, name):
    """By a guard of plans, or by tokens that are not those of no hit."""
    fault, (prompt,) = CHECKPOINT_FAULTS[name], pair.prompts([42])
    expected = tokens(built(pair, None, disable_radix_cache=True).generate([prompt], greedy(24)))
    with fault.active():
        llm = built(pair, check_level=fault.level or 0)
        submit(llm, [prompt, prompt[:20]], greedy(24))
        if fault.level:
            with pytest.raises(CheckError, match=fault.guard):
                list(steps(llm)), submit(llm, [prompt], greedy(24)), list(steps(llm))
        else:
            list(steps(llm))
            (request,) = submit(llm, [prompt], greedy(24))
            list(steps(llm))
            assert request.num_cached_tokens
            assert [tuple(request.output_ids)] != expected
