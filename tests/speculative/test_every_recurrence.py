"""A kind of recurrence cannot forget anything that the others are held to: all goes by `support.recurrences`."""

from typing import get_args

import pytest

from support.engines import accept_lens, build, greedy, tokens
from support.families import FAMILIES
from support.handing import IDS, Relay, Worker
from support.recurrences import FAMILIES_OF, FIRST
from treetop.models.config import RecurrentKind
from treetop.models.mixers import recurrences
from treetop.models.registry import target_spec
from treetop_debug.model_faults import LINEAR_FAULTS, MIXER_FAULTS

SHAPE = (2, 3, 6)
OPTIONS = {"context_length": 64, "page_size": 4, "chunked_prefill_size": 16, "check_level": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> a family's target with a random head, made when it is asked for."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = FAMILIES[name].save(tmp_path_factory.mktemp("kind"), seed=5).pair
        return made[name]

    return of


def test_every_kind_is_in_the_table():
    """Those that a layer may be, and those of the file of specs."""
    kinds = set(get_args(RecurrentKind))
    assert set(FAMILIES_OF) == kinds
    own = {each for each in vars(recurrences).values() if isinstance(each, type) and hasattr(each, "of_rank")}
    assert own - {recurrences.RecurrentSpec} <= kinds


@pytest.mark.parametrize("kind", FAMILIES_OF, ids=lambda kind: kind.__name__)
def test_a_family_of_a_kind_has_layers_of_it(saved, kind):
    found = target_spec(saved(FAMILIES_OF[kind][0]).target).config.recurrent.values()
    assert {type(each) for each in found} == {kind}


@pytest.mark.parametrize("name", FIRST)
def test_trees_and_retractions_change_no_token_of_any_kind(saved, name):
    """Captured rounds of trees, rows that move in again, and a prompt that hits; against plain decoding of one."""
    pair = saved(name)
    prompts = pair.prompts([17, 9, 14, 16, 3], seed=2)
    alone = build(pair, None, **OPTIONS, max_running_requests=1, disable_radix_cache=True)
    plain = tokens(alone.generate(prompts, greedy(16)))
    llm = build(pair, SHAPE, **OPTIONS, max_running_requests=4, max_total_tokens=84, graphs="sim")
    outputs = llm.generate(prompts, greedy(16))
    assert tokens(outputs) == plain
    assert llm.scheduler.num_retractions
    assert sum(map(sum, accept_lens(outputs))), "nothing was accepted, so nothing was tested"
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("name", FIRST)
def test_a_row_of_any_kind_goes_on_in_another_worker(saved, name):
    pair = saved(name)
    prompts = pair.prompts([21, 6], seed=3)
    want = tokens(build(pair, None, **OPTIONS).generate(prompts, greedy(8)))
    prefill, decode = (Worker(pair, SHAPE, **OPTIONS | {"page_size": size}) for size in (4, 8))
    relay = Relay(prefill, decode)
    ids = relay.submit(prompts, [greedy(8)] * 2, IDS)
    relay.run()
    assert [relay.result(each)[0] for each in ids] == want
    assert relay.received
    assert not relay.local, "a request was prefilled here"
    for worker in (prefill, decode):
        worker.close()


def test_faults_of_layers_are_of_families_in_the_table():
    """So that each is put back, and seen, where its family's logits are compared."""
    families = {name.replace(" ", "-") for names in FAMILIES_OF.values() for name in names}
    assert LINEAR_FAULTS
    for fault in MIXER_FAULTS:
        assert any(fault.startswith(family) for family in families), fault
