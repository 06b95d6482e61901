"""Requests that one engine prefills and another decodes: state, tokens and accept lengths are those of one engine."""

import random
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from engines import build, greedy, sampled
from handing import Relay, Worker
from refusing import refused
from test_mtp import NAMES, mtp_tensors
from test_ngram import lookup
from tiny_models import Pair, copy_folder, save_copying_head, save_random_llama, save_weak_llama
from treetop import LLM
from treetop.debug import two_group
from treetop.debug.ranks import ranks_on_threads
from treetop.debug.record_faults import RECORD_FAULTS
from treetop.engine import row_record
from treetop.kernels.kv import slots_of
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, CheckError, ConfigError, InvariantError
from treetop.types.handover import Admitted, Gone, Imported, Packed, Piece
from treetop.types.ids import RequestId, Row
from treetop.types.messages import Export, ExportPlan, ImportPlan
from treetop.types.requests import EngineRequest

LENGTHS = [1, 4, 5, 17, 33, 60]
IDS = count(10**6)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, strong_pair):
    folder = tmp_path_factory.mktemp("handed")
    weak = save_weak_llama(folder / "weak", strength=0.17, sharpness=0.5, vocab_size=212)
    small = {"vocab_size": 7}
    with patch.dict(two_group._TARGET, small), patch.dict(two_group._HEAD, {**small, "draft_vocab_size": 6}):
        windows = Pair(*two_group.write_two_group_pair(folder, 9))
    return {
        "weak": Pair(weak, save_copying_head(folder / "weak-head", weak, draft_vocab=188)),
        "strong": strong_pair,
        "windows": windows,
        "mtp": Pair(target_with_mtp(folder), None),
    }


def target_with_mtp(folder):
    """A target whose folder holds an MTP layer, in GLM's names."""
    alone = save_random_llama(folder / "alone", seed=7, vocab_size=12)
    tensors, more = load_file(alone / "model.safetensors"), mtp_tensors("GLM")
    more[f"{NAMES['GLM'][0]}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[f"{NAMES['GLM'][0]}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return copy_folder(alone, folder / "mtp", tensors=more, num_nextn_predict_layers=1)


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


def handed(pair, params, prefill, decode, most, warm=()):
    """The same by two workers. warm: prompts that P has prefilled before."""
    relay = Relay(prefill, decode, most)
    if warm:
        prefill.llm.generate(warm, greedy(1))
    found = []
    for wave in prompts_of(pair):
        ids = relay.submit(wave, params[: len(wave)], IDS)
        relay.run()
        found += [relay.result(each) for each in ids]
    assert not relay.local, "a request was prefilled here"
    assert len(decode.free) == decode.engine.layout.handover_slots
    return found, relay.landed


def ngram(pair, shape, **options):
    return lookup(pair, shape, **{"context_length": 128, **options})


def mtp(pair, shape, **options):
    k, steps, size = shape
    tree = {"speculative_eagle_topk": k, "speculative_num_steps": steps, "speculative_num_draft_tokens": size}
    options = {"dtype": "float64", "context_length": 128, "max_running_requests": 8, **options}
    return LLM(str(pair.target), speculative_algorithm="MTP", **tree, **options)


CASES = [  # pair, shape, parameters, prefill's options, decode's, tokens of a piece
    ("weak", (4, 5, 16), GREEDY, {"page_size": 16, "overlap": True}, {"page_size": 4}, 1000),
    ("strong", (2, 3, 6), MIXED, {"page_size": 2, "chunked_prefill_size": 16}, {"graphs": "sim", "overlap": True}, 7),
    ("strong", (2, 3, 6), MIXED, {"check_level": 3, "page_size": 4}, {"check_level": 3, "page_size": 8}, 1000),
    ("windows", (2, 3, 6), MIXED, {"page_size": 8, "chunked_prefill_size": 32}, {"page_size": 2, "overlap": True}, 11),
    ("windows", (2, 3, 6), GREEDY, {"page_size": 1, "check_level": 2}, {"page_size": 8, "check_level": 3}, 1000),
    ("strong", None, MIXED, {"chunked_prefill_size": 8}, {"disable_radix_cache": True, "page_size": 4}, 5),
]


@pytest.mark.parametrize(("name", "shape", "params", "prefill", "decode", "most"), CASES)
def test_two_workers_give_what_one_gives(pairs, name, shape, params, prefill, decode, most):
    """Greedy, sampled, penalties, log-probabilities, windows, hits on either side, unequal pages, overlap."""
    pair = pairs[name]
    expected = aggregated(pair, shape, params)
    workers = Worker(pair, shape, **prefill), Worker(pair, shape, **decode)
    found, landed = handed(pair, params, *workers, most, warm=[prompts_of(pair)[0][5][:33]])
    assert found == expected
    assert landed >= len(found)
    if most < 20:
        assert landed > 2 * len(found), "long prompts come in pieces"
    if shape is not None:
        assert sum(sum(each[1]) for each in found) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize(("name", "make"), [("strong", ngram), ("mtp", mtp)])
def test_drafts_of_other_kinds_are_the_same(pairs, name, make):
    """Looked up in the text, which D has from the prompt and the first token; from a layer of the target's own."""
    expected = aggregated(pairs[name], (3, 3, 9), MIXED, make)
    workers = [Worker(pairs[name], (3, 3, 9), make, page_size=page) for page in (8, 2)]
    found, _ = handed(pairs[name], MIXED, *workers, 13)
    assert found == expected
    assert sum(sum(each[1]) for each in found) > 0


@pytest.mark.parametrize(("name", "ranks"), [("weak", (1, 2)), ("weak", (2, 1)), ("windows", (1, 4))])
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


@pytest.mark.parametrize("name", ["strong", "windows"])
def test_state_after_an_import_is_the_exporters_bit_for_bit(pairs, name):
    """K/V of every group as far as they can be seen, and every field of the record, before any round."""
    prefill, decode = (Worker(pairs[name], (2, 3, 6), page_size=page, overlap=False) for page in (2, 8))
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs[name].prompts([43], seed=3)[0]), sampled(5, 9), 5)
    exported = prefill.scheduler.add(asked, export_from=0)
    decode.scheduler.add(asked, remote=True)
    run_plans(prefill)
    run_plans(decode)
    sent = visible(prefill, exported.held.row, 43)
    for slot, piece in enumerate((Piece(0, 20, 43), Piece(20, 20, 43), Piece(40, 3, 43))):
        prefill.handover.export(asked.request_id, slot, piece)
    run_plans(prefill)
    first, packed = parts(prefill)
    for slot, piece, checksums in packed:
        decode.slots[0].memory[slot] = prefill.slots[0].memory[slot]
        decode.handover.landed(asked.request_id, slot, piece, checksums, first if piece.last else None)
    plan = decode.scheduler.plan()
    assert isinstance(plan, ImportPlan)
    result = decode.engine.step(plan)
    assert [each.root for each in result.imports] == [None, None, first.token]
    got = visible(decode, plan.imports[0].row, 43)
    for field, value in sent.items():
        assert torch.equal(bits(value), bits(got[field])), field
    decode.scheduler.commit(plan, result)


def bits(value):
    return value.reshape(-1).view(torch.uint8)


def run_plans(worker):
    while (plan := worker.scheduler.plan()) is not None:
        worker.scheduler.commit(plan, worker.engine.step(plan))


def stopped(kind, act, *parts):
    """The message of an error that only a bug can cause."""
    with pytest.raises(kind) as error:
        act()
    assert all(part in str(error.value) for part in parts), error.value


def parts(worker):
    """The first token, and (slot, piece, checksums) of what was packed."""
    events = worker.handover.take_events()
    (first,) = [e.first for e in events if getattr(e, "first", None) is not None]
    return first, [(e.slot, e.piece, e.checksums) for e in events if isinstance(e, Packed)]


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


# ---------------------------------------------------------------------------------------------- what goes wrong


def test_what_one_rank_refuses_no_rank_takes(pairs):
    """A bit in the slot of the second rank: rank 0 found its own part intact."""
    prompt, params = pairs["weak"].prompts([30], seed=2)[0], greedy(6)
    with ranks_on_threads():
        prefill, decode = (Worker(pairs["weak"], (2, 3, 6), tp_size=size) for size in (1, 2))
        try:
            relay = Relay(prefill, decode)
            relay.spoil = lambda piece, landing: decode.slots[1].memory[landing, :1].bitwise_xor_(64)
            (spoilt,) = relay.submit([prompt], [params], IDS)
            relay.run()
            assert relay.local == {spoilt}
            (alone,) = prefill.llm.generate([prompt], params)
            assert relay.result(spoilt)[0] == alone.token_ids
        finally:
            prefill.close()
            decode.close()


def test_a_flipped_bit_anywhere_in_a_slot_is_refused_and_the_request_is_prefilled_here(pairs):
    """In every stretch of a middle and of a last piece: K/V of each head of each group, and the record."""
    rng, flipped = random.Random(3), []
    prefill, decode = (Worker(pairs["windows"], (2, 3, 6), page_size=4, disable_radix_cache=True) for _ in range(2))
    prompt, params = pairs["windows"].prompts([40], seed=5)[0], sampled(4, 6)
    relay = Relay(prefill, decode, 25)
    (sound,) = relay.submit([prompt], [params], IDS)
    relay.run()
    assert not relay.local

    for piece in (Piece(0, 25, 40), Piece(25, 15, 40)):
        for stretch in decode.slots[0].spec.own.stretches(piece):
            if not stretch.num_bytes:
                continue

            def spoil(moved, landing, piece=piece, stretch=stretch):
                if moved == piece:
                    at = stretch.offset + rng.randrange(stretch.num_bytes)
                    decode.slots[0].memory[landing, at] ^= 1 << rng.randrange(8)
                    flipped.append(stretch)

            relay.spoil = spoil
            (spoilt,) = relay.submit([prompt], [params], IDS)
            relay.run()
            assert spoilt in relay.local, stretch
            assert relay.result(spoilt) == relay.result(sound)
    assert len(flipped) == 11


def test_an_offer_that_does_not_fit_is_refused_and_ends_nothing_else(pairs):
    """Too few checksums, numbers too large, another first token, log-probabilities that are missing."""
    prefill, decode = (Worker(pairs["strong"], (2, 3, 6)) for _ in range(2))
    real, prompts = decode.handover.landed, pairs["strong"].prompts([21, 22, 23, 24, 25])
    wrong = iter(
        (
            lambda checksums, first: (checksums[:-1], first),
            lambda checksums, first: ((2**64, *checksums[1:]), first),
            lambda checksums, first: (checksums, first._replace(token=(first.token + 1) % 12)),
            lambda checksums, first: (checksums, first._replace(logprobs=None)),
            lambda checksums, first: (checksums, first),
        )
    )

    def landed(request_id, slot, piece, checksums, first):
        real(request_id, slot, piece, *next(wrong)(checksums, first))

    relay, params = Relay(prefill, decode), sampled(4, 6, logprobs=1)
    with patch.object(decode.handover, "landed", landed):
        ids = [relay.submit([prompt], [params], IDS)[0] for prompt in prompts]
        relay.run()
    assert relay.local == set(ids[:4])
    one = build(pairs["strong"], (2, 3, 6), context_length=128).generate(prompts, params)
    assert [relay.result(each)[0] for each in ids] == [output.token_ids for output in one]


def test_a_record_field_copied_from_another_is_caught(pairs):
    """At check level 1 by its guard; without one it does harm."""
    found = RECORD_FAULTS["record-field-copied"]
    for level in (0, 1):
        prefill, decode = (Worker(pairs["weak"], (4, 3, 8), check_level=level) for _ in range(2))
        relay = Relay(prefill, decode)
        with found.active():
            (request_id,) = relay.submit(pairs["weak"].prompts([20]), [greedy(12)], IDS)
            for _ in range(200):
                relay.step()
                if relay.done:
                    break
        failure = decode.core.failure
        if level == found.level:
            assert found.guard in str(failure)
            assert isinstance(failure, CheckError)
        else:
            alone = build(pairs["weak"], (4, 3, 8)).generate(pairs["weak"].prompts([20]), greedy(12))[0]
            accepted = [update.accept_len for update in relay.updates[request_id]][1:]
            assert failure is not None or accepted != list(alone.metrics.accept_lens)


def test_aborts_failures_and_retractions_in_the_middle_keep_the_books_whole(pairs):
    """At random times a client goes, a desk gives up, a slot is spoilt, a worker drops an export; pages are short.

    Every slot that was named comes back once, all pages and rows come back, and who lives on gets what it gets alone.
    """
    rng, name = random.Random(11), "windows"
    alone = build(pairs[name], (2, 3, 6), context_length=128)
    short = {"max_total_tokens": 256, "max_running_requests": 4, "handover_slots": 2}
    prefill = Worker(pairs[name], (2, 3, 6), page_size=2, chunked_prefill_size=16, overlap=True, **short)
    decode = Worker(pairs[name], (2, 3, 6), page_size=4, overlap=True, check_level=3, **short)

    def spoil(piece, landing):
        if rng.random() < 0.1:
            decode.slots[0].memory[landing, rng.randrange(64)] ^= 1

    relay, alive, asked = Relay(prefill, decode, 15, spoil), set(), {}
    for wave in range(5):
        prompts = pairs[name].prompts([rng.randrange(1, 70) for _ in range(8)], seed=wave)
        params = [sampled(rng.randrange(99), rng.randrange(1, 40), temperature=rng.choice((0, 1.0))) for _ in prompts]
        ids = relay.submit(prompts, params, IDS)
        asked.update(zip(ids, zip(prompts, params, strict=True), strict=True))
        alive.update(ids)
        for _ in range(rng.randrange(20, 60)):
            relay.step()
            act, running = rng.random(), [*decode.scheduler.queues.by_id]
            if running and act < 0.04:
                gone = rng.choice(running)
                decode.core.abort(gone)
                alive.discard(gone)
            elif running and act < 0.08:
                relay.give_up(rng.choice(running))
            elif relay.handed and act < 0.11:
                prefill.scheduler.abort(rng.choice([*relay.handed.values()]).remote_id)
    relay.run()
    for worker in (prefill, decode):
        assert worker.core.failure is None
        assert not worker.scheduler.rows.by_row
        assert not worker.handover._exports
        assert not worker.handover._imports
        assert not worker.handover._coming
    assert decode.scheduler.num_retractions > 0
    assert len(alive) > 20
    assert len(relay.local - (asked.keys() - alive)) < len(alive), "some were handed over"
    expected = alone.generate([asked[each][0] for each in sorted(alive)], [asked[each][1] for each in sorted(alive)])
    assert [relay.result(each)[0] for each in sorted(alive)] == [output.token_ids for output in expected]


def test_a_request_that_gives_way_while_it_is_imported_or_exported(pairs):
    """Decoding requests take the pages of younger ones, wherever these stand; the desk hears of it."""
    worker = Worker(pairs["strong"], (2, 3, 6), page_size=4, max_total_tokens=132, overlap=False)
    old = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([10])[0]), greedy(100), 0)
    young = [RequestId(next(IDS)) for _ in range(2)]
    asked = [EngineRequest(each, tuple(pairs["strong"].prompts([40], seed=each)[0]), greedy(5), 0) for each in young]
    worker.scheduler.add(old)
    worker.scheduler.add(asked[0], export_from=0)
    worker.scheduler.add(asked[1], remote=True)
    gone = []
    while old.request_id in worker.scheduler.queues.by_id:
        worker.core.step()
        worker.scheduler.check_integrity()
        gone += [event.request_id for event in worker.handover.take_events() if isinstance(event, Gone)]
    assert sorted(gone) == young
    assert young[0] not in worker.scheduler.queues.by_id, "who wanted it can prefill it, too"
    request = worker.scheduler.queues.by_id[young[1]]
    while request.finish_reason is None:
        worker.core.step()
    assert len(request.output_ids) == 5


def test_a_failed_engine_gives_every_slot_back(pairs):
    """Those that wait for a step, and those in a step that is lost; after Gone, so that nothing is offered."""
    worker = Worker(pairs["strong"], (2, 3, 6))
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([30])[0]), greedy(5), 0)
    worker.scheduler.add(asked, export_from=4)
    run_plans(worker)
    worker.handover.take_events()
    worker.handover.export(asked.request_id, 1, Piece(4, 10, 30))
    plan = worker.scheduler.plan()
    assert isinstance(plan, ExportPlan)
    worker.handover.export(asked.request_id, 2, Piece(14, 16, 30))
    worker.scheduler.fail("broken")
    gone, *packed = worker.handover.take_events()
    assert isinstance(gone, Gone)
    assert sorted((each.slot, each.checksums) for each in packed) == [(1, ()), (2, ())]
    worker.scheduler.check_integrity()


# ---------------------------------------------------------------------------------------------- commands and plans


def test_commands_that_cannot_be_are_refused_by_name(pairs):
    """Bugs of a desk; what comes late for a request that is gone gives its slot back at once."""
    worker = Worker(pairs["strong"], (2, 3, 6))
    ids, number = tuple(pairs["strong"].prompts([30])[0]), RequestId(next(IDS))
    asked = EngineRequest(number, ids, greedy(5), 0)
    handover = worker.handover
    worker.scheduler.add(asked, export_from=4)
    run_plans(worker)
    for slot, piece in [(0, Piece(0, 5, 30)), (0, Piece(4, 27, 31)), (0, Piece(4, 30, 30)), (3, Piece(4, 5, 30))]:
        stopped(
            InvariantError,
            lambda slot=slot, piece=piece: handover.export(number, slot, piece),
            "slot" if slot else "packed",
        )
    handover.export(number, 0, Piece(4, 5, 30))
    stopped(InvariantError, lambda: handover.export(number, 0, Piece(9, 5, 30)), "slot 0")
    stopped(InvariantError, lambda: worker.scheduler.add(asked._replace(request_id=RequestId(1)), export_from=30), "30")
    worker.scheduler.finish_export(number)
    handover.take_events()
    handover.export(number, 2, Piece(9, 5, 30))
    handover.landed(number, 1, Piece(0, 30, 30), (), None)
    assert handover.take_events() == [Packed(number, 2, Piece(9, 5, 30), ()), Imported(number, 1)]
    remote = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([21], seed=9)[0]), greedy(5), 0)
    worker.scheduler.add(remote, remote=True)
    run_plans(worker)
    assert handover.take_events() == [Admitted(remote.request_id, 0)]
    stopped(InvariantError, lambda: handover.landed(remote.request_id, 0, Piece(4, 9, 21), (), None), "after 0 tokens")
    without = build(pairs["strong"], (2, 3, 6), context_length=128)
    refused(ConfigError, lambda: without.scheduler.add(remote, remote=True), "--handover-slots")


MISTAKES = {
    "a slot twice": (lambda e: (e, e), ["slot", "twice"]),
    "no such slot": (lambda e: (replace(e, slot=3),), ["staging slot", "[0, 2]"]),
    "no such row": (lambda e: (replace(e, row=Row(8)),), ["row 8"]),
    "no token": (lambda e: (replace(e, piece=Piece(0, 0, 30)),), ["tokens of a piece"]),
    "past its total": (lambda e: (replace(e, piece=Piece(25, 10, 30)),), ["start of a piece"]),
    "past what is filled": (lambda e: (replace(e, piece=Piece(20, 11, 60)),), ["of what is prefilled", "[1, 30]"]),
    "of another row": (lambda e: (replace(e, row=Row(1)),), ["row 1", "of what is prefilled"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_plan_of_pieces_that_cannot_be_is_refused(pairs, name):
    worker = Worker(pairs["strong"], (2, 3, 6))
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([30])[0]), greedy(5), 0)
    worker.scheduler.add(asked, export_from=0)
    run_plans(worker)
    worker.handover.export(asked.request_id, 0, Piece(0, 30, 30))
    plan, (change, words) = worker.scheduler.plan(), MISTAKES[name]
    stopped(CheckError, lambda: worker.engine.launch(replace(plan, exports=change(plan.exports[0]))), *words)
    pieces = replace(plan.exports[0], piece=Piece(0, 30, 30))
    unset = ImportPlan((), (), (), (pieces,))
    stopped(CheckError, lambda: worker.engine.launch(unset), "are set up")
    worker.scheduler.commit(plan, worker.engine.step(plan))


def test_a_record_is_not_packed_before_the_prompt_is_prefilled(pairs):
    worker = Worker(pairs["strong"], (2, 3, 6), chunked_prefill_size=16)
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([30])[0]), greedy(5), 0)
    worker.scheduler.add(asked, export_from=0)
    plan = worker.scheduler.plan()
    worker.scheduler.commit(plan, worker.engine.step(plan))
    early = ExportPlan((), (), (Export(plan.rows[0], 0, Piece(0, 16, 16)),))
    stopped(CheckError, lambda: worker.engine.launch(early), "has no record")


def test_slots_are_sized_by_name_and_counted_in_the_plan_of_memory(pairs):
    """A slot that holds no token, sizes that cannot be, and the bytes of all slots among the static ones."""
    refused(CapacityError, lambda: Worker(pairs["strong"], None, handover_slot_bytes=64), "--handover-slot-bytes")
    refused(
        ConfigError, lambda: EngineConfig(handover_slot_bytes=100), "--handover-slot-bytes must be a multiple of 16"
    )
    refused(ConfigError, lambda: EngineConfig(handover_slots=-1), "--handover-slots must lie between")
    with_slots = Worker(pairs["strong"], (2, 3, 6), handover_slots=5)
    without = build(pairs["strong"], (2, 3, 6), context_length=128)
    more = with_slots.engine.memory.budget.static - without.engine.memory.budget.static
    assert more == with_slots.slots[0].num_bytes == 5 << 17
    payload, tokens = with_slots.slots[0].spec.own, with_slots.slot_tokens
    assert payload.num_bytes(Piece(0, tokens, tokens)) <= 1 << 17
    assert with_slots.engine.layout.dimensions()["slot_tokens"].option == "--handover-slot-bytes"


def test_the_record_is_every_table_of_a_row_but_its_sampling(pairs):
    """A field that a drafter's state gains is in the record, or this fails; packing and unpacking are inverse."""
    worker = Worker(pairs["weak"], (4, 5, 16))
    state = worker.engine.runner.state
    assert [field.name for field in state.record.fields] == ["committed", "root", *state.draft.__dataclass_fields__]
    assert all(state.record.tables[name] is getattr(state.draft, name) for name in state.draft.__dataclass_fields__)
    for table in state.record.tables.values():
        table[0].copy_(torch.randint(1, 9, table[0].shape))
    packed, no, yes = state.record.pack(0), torch.tensor(False), torch.tensor(True)
    state.record.unpack(1, packed, no)
    assert not any(table[1].any() for table in state.record.tables.values())
    state.record.unpack(1, packed, yes)
    assert all(torch.equal(table[1], table[0]) for table in state.record.tables.values())
    assert len(packed) == row_record.record_bytes(state.record.fields)
