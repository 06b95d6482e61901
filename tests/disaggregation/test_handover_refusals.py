"""Commands, plans and sizes of a hand-over that cannot be are refused by name."""

from dataclasses import replace

import pytest
import torch

from support.engines import build, greedy
from support.handing import IDS, Worker, make_pairs, run_plans, stopped
from support.refusing import refused
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, CheckError, ConfigError, InvariantError
from treetop.types.ids import RequestId, Row
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.scheduling import Admitted, Imported, Prompt, Recv, Stage, Staged
from treetop.types.messages import Export, ExportPlan, ImportPlan
from treetop.types.requests import EngineRequest


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, strong_pair):
    return make_pairs(tmp_path_factory.mktemp("handed"), strong_pair)


def test_commands_that_cannot_be_are_refused_by_name(pairs):
    """Bugs of a state machine; what comes late for a request that is gone gives its slot back at once."""
    worker = Worker(pairs["strong"], (2, 3, 6))
    ids, number = tuple(pairs["strong"].prompts([30])[0]), RequestId(next(IDS))
    asked = EngineRequest(number, ids, greedy(5), 0)
    kv_transfer = worker.kv_transfer
    worker.scheduler.add(asked, export_from=4)
    run_plans(worker)
    for slot, chunk in [
        (0, KVChunk(0, 5, 30)),
        (0, KVChunk(4, 27, 31)),
        (0, KVChunk(4, 30, 30)),
        (3, KVChunk(4, 5, 30)),
    ]:
        stopped(
            InvariantError,
            lambda slot=slot, chunk=chunk: kv_transfer.stage(Stage(number, slot, chunk)),
            "slot" if slot else "packed",
        )
    kv_transfer.stage(Stage(number, 0, KVChunk(4, 5, 30)))
    stopped(InvariantError, lambda: kv_transfer.stage(Stage(number, 0, KVChunk(9, 5, 30))), "slot 0")
    stopped(InvariantError, lambda: worker.scheduler.add(asked._replace(request_id=RequestId(1)), export_from=30), "30")
    worker.scheduler.finish_export(number)
    kv_transfer.take_events()
    kv_transfer.stage(Stage(number, 2, KVChunk(9, 5, 30)))
    kv_transfer.recv(Recv(number, 1, KVChunk(0, 30, 30), (), None))
    assert kv_transfer.take_events() == [Staged(number, 2, KVChunk(9, 5, 30), ()), Imported(number, 1)]
    remote = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([21], seed=9)[0]), greedy(5), 0)
    worker.scheduler.add(remote, remote=True)
    run_plans(worker)
    assert kv_transfer.take_events() == [Admitted(remote.request_id, 0, Prompt(remote.prompt_ids, remote.params, 0))]
    stopped(
        InvariantError,
        lambda: kv_transfer.recv(Recv(remote.request_id, 0, KVChunk(4, 9, 21), (), None)),
        "after 0 tokens",
    )
    without = build(pairs["strong"], (2, 3, 6), context_length=128)
    refused(ConfigError, lambda: without.scheduler.add(remote, remote=True), "--disaggregation-slots")


MISTAKES = {
    "a slot twice": (lambda e: (e, e), ["slot", "twice"]),
    "no such slot": (lambda e: (replace(e, slot=3),), ["staging slot", "[0, 2]"]),
    "no such row": (lambda e: (replace(e, row=Row(8)),), ["row 8"]),
    "no token": (lambda e: (replace(e, chunk=KVChunk(0, 0, 30)),), ["tokens of a KV chunk"]),
    "past its total": (lambda e: (replace(e, chunk=KVChunk(25, 10, 30)),), ["start of a KV chunk"]),
    "past what is filled": (lambda e: (replace(e, chunk=KVChunk(20, 11, 60)),), ["of what is prefilled", "[1, 30]"]),
    "of another row": (lambda e: (replace(e, row=Row(1)),), ["row 1", "of what is prefilled"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_plan_of_chunks_that_cannot_be_is_refused(pairs, name):
    worker = Worker(pairs["strong"], (2, 3, 6))
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([30])[0]), greedy(5), 0)
    worker.scheduler.add(asked, export_from=0)
    run_plans(worker)
    worker.kv_transfer.stage(Stage(asked.request_id, 0, KVChunk(0, 30, 30)))
    plan, (change, words) = worker.scheduler.plan(), MISTAKES[name]
    stopped(CheckError, lambda: worker.engine.launch(replace(plan, exports=change(plan.exports[0]))), *words)
    chunks = replace(plan.exports[0], chunk=KVChunk(0, 30, 30))
    unset = ImportPlan((), (), (), (chunks,))
    stopped(CheckError, lambda: worker.engine.launch(unset), "are set up")
    worker.scheduler.commit(plan, worker.engine.step(plan))


def test_a_record_is_not_packed_before_the_prompt_is_prefilled(pairs):
    worker = Worker(pairs["strong"], (2, 3, 6), chunked_prefill_size=16)
    asked = EngineRequest(RequestId(next(IDS)), tuple(pairs["strong"].prompts([30])[0]), greedy(5), 0)
    worker.scheduler.add(asked, export_from=0)
    plan = worker.scheduler.plan()
    worker.scheduler.commit(plan, worker.engine.step(plan))
    early = ExportPlan((), (), (Export(plan.rows[0], 0, KVChunk(0, 16, 16)),))
    stopped(CheckError, lambda: worker.engine.launch(early), "has no record")


def test_slots_are_sized_by_name_and_counted_in_the_plan_of_memory(pairs):
    """A slot that holds no token, sizes that cannot be, and the bytes of all slots among the static ones."""
    refused(
        CapacityError,
        lambda: Worker(pairs["strong"], None, disaggregation_slot_bytes=64),
        "--disaggregation-slot-bytes",
    )
    refused(
        ConfigError,
        lambda: EngineConfig(disaggregation_slot_bytes=100),
        "--disaggregation-slot-bytes must be a multiple of 16",
    )
    refused(ConfigError, lambda: EngineConfig(disaggregation_slots=-1), "--disaggregation-slots must lie between")
    with_slots = Worker(pairs["strong"], (2, 3, 6), disaggregation_slots=5)
    without = build(pairs["strong"], (2, 3, 6), context_length=128)
    more = with_slots.engine.memory.budget.static - without.engine.memory.budget.static
    assert more == with_slots.slots[0].num_bytes == 5 << 17
    payload, tokens = with_slots.slots[0].spec.own, with_slots.slot_tokens
    assert payload.num_bytes(KVChunk(0, tokens, tokens)) <= 1 << 17
    assert with_slots.engine.layout.dimensions()["slot_tokens"].option == "--disaggregation-slot-bytes"


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
    assert len(packed) == state.record.num_bytes
