"""Requests that one engine prefills and another decodes: state, tokens and accept lengths are those of one engine."""

import pytest
import torch

from support.engines import build, greedy, sampled
from support.grids import few_of
from support.handing import IDS, LENGTHS, Relay, Worker, bits, make_pairs, parts, run_plans
from support.lookups import lookup
from support.tiny_models import Pair
from treetop import LLM
from treetop.debug import two_group
from treetop.kernels.kv import slots_of
from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.scheduling import Recv, Stage
from treetop.types.messages import ExportPlan, ImportPlan
from treetop.types.requests import EngineRequest
from treetop_debug.ranks import ranks_on_threads


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, strong_pair):
    return make_pairs(tmp_path_factory.mktemp("handed"), strong_pair)


MIXED = [
    sampled(11, 16, temperature=0.6),
    greedy(16),
    sampled(2**62 + 5, 16, top_k=5, logprobs=2),
    sampled(13, 16, top_p=0.7, frequency_penalty=0.8, repetition_penalty=1.3),
    sampled(0, 16, min_p=0.2, temperature=1.7),
    sampled(15, 16, top_k=4, presence_penalty=0.5, logit_bias={5: 1.5}),
]
GREEDY = [greedy(16)] * len(LENGTHS)


def prompts_of(pair):
    """Six prompts, and then three that begin as some of them do."""
    first = pair.prompts(LENGTHS)
    more = pair.prompts([3, 9, 20], seed=7)
    return first, [[*first[5], *more[0]], [*first[4], *more[1]], [*first[5][:30], *more[2]]]


def aggregated(pair, shape, params, make=build, **options):
    """What one engine gives, each wave by itself: (tokens, accepted lengths, log-probabilities)."""
    llm = make(pair, shape, **{"context_length": 128, **options})
    found = []
    for wave in prompts_of(pair):
        for output in llm.generate(wave, params[: len(wave)]):
            found.append((output.token_ids, list(output.metrics.accept_lens), list(output.logprobs or ())))
    llm.close()
    return found


def handed(pair, params, prefill, decode, maximum, warm=()):
    """The same by two workers. warm: prompts that P has prefilled before."""
    relay = Relay(prefill, decode, maximum)
    if warm:
        prefill.llm.generate(warm, greedy(1))
    found = []
    for wave in prompts_of(pair):
        ids = relay.submit(wave, params[: len(wave)], IDS)
        relay.run()
        found += [relay.result(each) for each in ids]
    assert not relay.local, "a request was prefilled here"
    assert len(decode.free) == decode.engine.layout.disaggregation_slots
    return found, relay.received


def ngram(pair, shape, **options):
    return lookup(pair, shape, **{"context_length": 128, **options})


def mtp(pair, shape, **options):
    k, steps, size = shape
    tree = {"speculative_eagle_topk": k, "speculative_num_steps": steps, "speculative_num_draft_tokens": size}
    options = {"dtype": "float64", "context_length": 128, "max_running_requests": 8, **options}
    return LLM(str(pair.target), speculative_algorithm="MTP", **tree, **options)


def model(pair, shape, **options):
    """The target drafts for itself, so that greedily all is accepted."""
    options = {"context_length": 128, "speculative_algorithm": "STANDALONE", **options}
    return build(Pair(pair.target, pair.target), shape, **options)


CASES = [  # pair, shape, parameters, prefill's options, decode's, tokens of a chunk
    ("weak", (4, 5, 16), GREEDY, {"page_size": 16, "overlap": True}, {"page_size": 4}, 1000),
    ("strong", (2, 3, 6), MIXED, {"page_size": 2, "chunked_prefill_size": 16}, {"graphs": "sim", "overlap": True}, 7),
    ("strong", (2, 3, 6), MIXED, {"check_level": 3, "page_size": 4}, {"check_level": 3, "page_size": 8}, 1000),
    ("windows", (2, 3, 6), MIXED, {"page_size": 8, "chunked_prefill_size": 32}, {"page_size": 2, "overlap": True}, 11),
    ("windows", (2, 3, 6), GREEDY, {"page_size": 1, "check_level": 2}, {"page_size": 8, "check_level": 3}, 1000),
    ("latents", (2, 3, 6), MIXED, {"page_size": 8, "chunked_prefill_size": 16}, {"page_size": 2, "check_level": 3}, 7),
    ("chunks", (2, 3, 6), MIXED, {"page_size": 8, "chunked_prefill_size": 16}, {"page_size": 2, "check_level": 3}, 7),
    ("strong", None, MIXED, {"chunked_prefill_size": 8}, {"disable_radix_cache": True, "page_size": 4}, 5),
]


@pytest.mark.parametrize(("name", "shape", "params", "prefill", "decode", "maximum"), few_of(CASES, 1, 3, 6, 7))
def test_two_workers_give_what_one_gives(pairs, name, shape, params, prefill, decode, maximum):
    """Greedy, sampled, penalties, log-probabilities, windows, hits on either side, unequal pages, overlap."""
    pair = pairs[name]
    expected = aggregated(pair, shape, params)
    workers = Worker(pair, shape, **prefill), Worker(pair, shape, **decode)
    found, received = handed(pair, params, *workers, maximum, warm=[prompts_of(pair)[0][5][:33]])
    assert found == expected
    assert received >= len(found)
    if maximum < 20:
        assert received > 2 * len(found), "long prompts come in chunks"
    if shape is not None:
        assert sum(sum(each[1]) for each in found) > 0, "nothing was accepted, so nothing was tested"


def test_what_is_packed_or_unpacked_keeps_no_other_step_from_being_launched(pairs, monkeypatch):
    """Two chunks, or two rounds, are in flight beside it."""
    beside = {ExportPlan: 0, ImportPlan: 0}
    workers = [Worker(pairs["strong"], (2, 3, 6), overlap=True, chunked_prefill_size=8) for _ in range(2)]
    for worker in workers:

        def launch(plan, worker=worker, launch=worker.engine.launch):
            kinds = [type(step.plan) for step in worker.scheduler.steps]
            for kind in set(beside) & set(kinds):
                beside[kind] = max(beside[kind], len(kinds) - kinds.count(kind))
            assert len(kinds) - kinds.count(ExportPlan) - kinds.count(ImportPlan) <= 2
            return launch(plan)

        monkeypatch.setattr(worker.engine, "launch", launch)
    relay = Relay(*workers, maximum=5)
    ids = relay.submit(pairs["strong"].prompts([33, 60, 45]), [greedy(40)] * 3, IDS)
    relay.run()
    assert beside == {ExportPlan: 2, ImportPlan: 2}
    assert all(relay.result(each)[0] for each in ids)


@pytest.mark.parametrize(("name", "make"), few_of([("strong", ngram), ("strong", model), ("mtp", mtp)], 0, 2))
def test_drafts_of_other_kinds_are_the_same(pairs, name, make):
    """Looked up in the text, which D has from the prompt and the first token; of a language model, which runs that
    text; from a layer of the target's own.
    """
    expected = aggregated(pairs[name], (3, 3, 9), MIXED, make)
    workers = [Worker(pairs[name], (3, 3, 9), make, page_size=page) for page in (8, 2)]
    found, _ = handed(pairs[name], MIXED, *workers, 13)
    assert found == expected
    assert sum(sum(each[1]) for each in found) > 0


@pytest.mark.parametrize(
    ("name", "ranks"), few_of([("weak", (1, 2)), ("weak", (2, 1)), ("windows", (1, 4)), ("latents", (2, 1))], 0, 3)
)
def test_ranks_take_their_heads_from_ranks_of_another_number(pairs, tmp_path, name, ranks):
    """Ranges of heads of each slot, also where neighbours share a head; the books of all ranks agree."""
    pair = pairs[name]
    if name == "windows":
        pair = Pair(*two_group.write_two_group_pair(tmp_path, 9))  # a vocabulary that can be divided
    expected = aggregated(pair, (2, 3, 6), MIXED)
    with ranks_on_threads():
        workers = [Worker(pair, (2, 3, 6), tp_size=size, page_size=4) for size in ranks]
        try:
            found, _ = handed(pair, MIXED, *workers, 20)
        finally:
            for worker in workers:
                worker.close()
    assert found == expected


# ---------------------------------------------------------------------------------------------- state


def visible(worker, request_row, total):
    """K/V of each group that a query at `total` can see, [layers, tokens, ...], and each field of the record."""
    runner, row = worker.engine.runner, torch.tensor([request_row])
    found = {name: table[request_row].clone() for name, table in runner.state.record.tables.items()}
    for group in worker.engine.layout.groups:
        first = 0 if group.window is None else max(total - group.window + 1, 0)
        positions, size = torch.arange(first, total)[None], worker.engine.layout.page_size
        table = runner.state.table_of(group.name).data
        slots = slots_of(table, row, positions, torch.ones_like(positions, dtype=torch.bool), size)[0]
        found[f"pool.{group.name}"] = runner.pools[group.name].data[:, slots]
    return found


@pytest.mark.parametrize("name", ["strong", "windows", "latents"])
def test_state_after_an_import_is_the_exporters_bit_for_bit(pairs, name):
    """K/V of every group as far as they can be seen, and every field of the record, before any round."""
    prefill, decode = (Worker(pairs[name], (2, 3, 6), page_size=page, overlap=False) for page in (2, 8))
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs[name].prompts([43], seed=3)[0]), sampled(5, 9), 5)
    exported = prefill.scheduler.add(asked, export_from=0)
    decode.scheduler.add(asked, remote=True)
    run_plans(prefill)
    run_plans(decode)
    sent = visible(prefill, exported.held.row, 43)
    for slot, chunk in enumerate((KVChunk(0, 20, 43), KVChunk(20, 20, 43), KVChunk(40, 3, 43))):
        prefill.kv_transfer.stage(Stage(asked.request_id, slot, chunk))
    run_plans(prefill)
    first, packed = parts(prefill)
    for slot, chunk, checksums in packed:
        decode.slots[0].memory[slot] = prefill.slots[0].memory[slot]
        decode.kv_transfer.recv(Recv(asked.request_id, slot, chunk, checksums, first if chunk.last else None))
    plan = decode.scheduler.plan()
    assert isinstance(plan, ImportPlan)
    result = decode.engine.step(plan)
    assert [each.root for each in result.imports] == [None, None, first.token]
    got = visible(decode, plan.imports[0].row, 43)
    for field, value in sent.items():
        assert torch.equal(bits(value), bits(got[field])), field
    decode.scheduler.commit(plan, result)


# ---------------------------------------------------------------------------------------------- the prefix cache


def test_an_imported_prefix_is_found_at_once_and_windows_hold_what_they_see(pairs):
    """While the first request still decodes, another that begins alike asks only for the rest, at either end."""
    for name in ("strong", "windows"):
        prefill, decode = (Worker(pairs[name], None, page_size=page) for page in (2, 8))
        relay, (ids, more) = Relay(prefill, decode), pairs[name].prompts([56, 12], seed=4)
        (first,) = relay.submit([ids], [greedy(60)], IDS)  # a window of 9 begins with a page of 8: none is torn
        while not relay.updates[first]:
            relay.step()
        (second,) = relay.submit([[*ids, *more]], [greedy(3)], IDS)
        while second not in relay.handed:
            relay.step()
        assert first in decode.scheduler.queues.by_id
        assert relay.handed[second].start == 56
        lease = decode.scheduler.queues.by_id[second].held.lease
        held = {group: [column for column, page in enumerate(pages) if page] for group, pages in lease.pages.items()}
        assert held["full"] == list(range(9))
        assert held.get("window", [7, 8]) == [7, 8], "tokens 60 .. 67 of 68"
        relay.run()
        assert relay.local == set()


def test_a_torn_page_never_enters_the_prefix_cache(pairs):
    """A window's first page lacks tokens that nobody who decodes sees; a request that ends there would see them."""
    prefill, decode = (Worker(pairs["windows"], (2, 3, 6), page_size=page) for page in (2, 8))
    relay, (ids, more) = Relay(prefill, decode), pairs["windows"].prompts([43, 5], seed=4)
    relay.submit([ids], [greedy(1)], IDS)
    relay.run()
    assert not relay.local
    params = [sampled(seed, 8) for seed in range(6)]
    alike = [[*ids[:41], *more[: 1 + seed % 3]] for seed in range(6)]
    found = relay.submit(alike, params, IDS, remote=False)
    relay.run()
    alone = build(pairs["windows"], (2, 3, 6), context_length=128).generate(alike, params)
    assert [relay.result(each)[0] for each in found] == [output.token_ids for output in alone]
