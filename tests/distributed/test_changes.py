"""Changes of engines side by side: one that ends between preparing and taking it is followed by one that takes it."""

import asyncio
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from support.waiting import WAIT_S
from treetop.api.errors import as_api_error
from treetop.core.engine_core import EngineCore
from treetop.core.loop import CoreThread
from treetop.core.wire import AskChange, ClientHello, decode_from_core
from treetop.distributed.client import EngineProcessClient, has_taken
from treetop.distributed.engine_process import EngineServer, Parts, note_change, noted_changes, restored
from treetop.types.changes import TAGS, LoadLora, SentTensors, Sleep, UnloadLora, UpdateWeights, WakeUp
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, ConflictError, EngineError
from treetop.types.requests import CoreLoad

LOAD = LoadLora("it", "folder")


class Side:
    """An engine that says what it is told to."""

    def __init__(self, fails=(), loras=()):
        self.fails, self.told, self.num_restarts, self.until = list(fails), [], 0, None
        self.links = [SimpleNamespace(info=SimpleNamespace(loras=loras, asleep=(), weight_version=0))]

    async def change(self, change, stage):
        self.told.append(stage)
        if self.until is not None and self.until[0] == stage:
            (_, came, goes_on), self.until = self.until, None
            came.set()
            await goes_on.wait()
        if self.fails and self.fails[0][0] == stage:
            raise self.fails.pop(0)[1]

    async def another(self, restarts):
        self.told.append("another")


def changed(*sides, change=LOAD):
    client = EngineProcessClient(num_engines=len(sides))
    client.close()
    client.engines = list(sides)
    return asyncio.run(client.change(change))


def test_one_that_ended_before_it_took_it_takes_it_after_the_others():
    first, second = Side([("commit", EngineError("gone"))]), Side()
    changed(first, second)
    assert first.told == ["prepare", "commit", "another", "prepare", "commit"]
    assert second.told == ["prepare", "commit"]


def test_one_that_has_it_already_as_it_starts_is_not_asked_twice():
    first = Side([("commit", EngineError("gone"))], loras=("it",))
    changed(first)
    assert first.told == ["prepare", "commit", "another"]


def test_where_one_refuses_all_drop_it_whatever_dropping_says():
    first, second, third = Side([("drop", EngineError("gone"))]), Side([("prepare", ConfigError("no"))]), Side()
    with pytest.raises(ConfigError, match="no"):
        changed(first, second, third)
    assert (first.told, second.told, third.told) == (["prepare", "drop"],) * 3


def test_what_an_engine_has_taken():
    info = SimpleNamespace(loras=("it",), asleep=("kv_cache",), weight_version=2)
    taken = LOAD, Sleep(), WakeUp(("weights",)), UnloadLora("other")
    assert all(has_taken(change, info, info) for change in taken)
    assert not any(has_taken(change, info, info) for change in (UnloadLora("it"), WakeUp(None), UpdateWeights()))
    assert has_taken(UpdateWeights(), info, SimpleNamespace(weight_version=1))


class Told:
    """A core that says what it is told to; an engine, too."""

    failure, load, busy, weight_version, asleep, lora_versions = None, CoreLoad(), False, 3, (), {"it": 2}
    in_no_folder, parts, num_committed = (), (), 0

    def __init__(self):
        self.told = []

    def prepare(self, change):
        self.told.append(("prepare", change))
        return lambda: self.told.append(("commit", change))

    def drop(self, change):
        self.told.append(("drop", change))

    def fail(self, error):
        return []

    def lacks_room(self, change):
        return False

    def restore(self, *counts):
        self.told.append(counts)

    def current(self, info):
        return info


def test_what_nobody_waits_for_is_dropped_by_all_ranks_once():
    """Whoever asked for it says so, or leaves."""
    core, socket = Told(), Mock()
    server = EngineServer(Parts(core, None), socket)
    asked = UpdateWeights("m")
    for end in (lambda: server._change(b"1", AskChange.of(2, "drop", asked)), lambda: server._leave(7)):
        core.told.clear()
        server._apply(b"1", ClientHello(7))
        server._apply(b"1", AskChange.of(1, "prepare", asked))
        server._apply(b"2", AskChange.of(1, "prepare", asked))
        end()
        end()
        assert core.told == [("prepare", asked), ("drop", asked)]


def test_a_refused_change_leaves_the_one_that_waits():
    """Whoever asked for it: another client, or the same one."""
    core, socket = Told(), Mock()
    core.num_alive, core.hold = 1, lambda: None
    server, waits = EngineServer(Parts(core, None), socket), UpdateWeights("m", in_flight="wait")
    server._apply(b"1", AskChange.of(1, "prepare", waits))
    for identity in (b"2", b"1"):
        server._apply(identity, AskChange.of(2, "prepare", LOAD))
        server._apply(identity, AskChange.of(3, "drop", LOAD))
    core.num_alive = 0
    server._loop._settle()
    server._apply(b"2", AskChange.of(4, "drop", LOAD))
    server._apply(b"1", AskChange.of(5, "commit", waits))
    assert core.told == [("prepare", waits), ("commit", waits)]


def test_one_change_at_a_time_whoever_asks():
    """What is prepared is not replaced, and a commit is of what its own client has prepared: else it is a 409."""
    core, socket = Told(), Mock()
    server = EngineServer(Parts(core, None), socket)
    server._apply(b"1", AskChange.of(1, "prepare", LOAD))
    for identity in (b"1", b"2"):
        server._apply(identity, AskChange.of(2, "prepare", Sleep()))
    server._apply(b"2", AskChange.of(3, "commit", Sleep()))
    said = [decode_from_core(each.args[0][1]) for each in socket.send_multipart.call_args_list]
    assert [(each.number, each.conflict) for each in said] == [(1, False), (2, True), (2, True), (3, True)]
    assert core.told == [("prepare", LOAD)]
    scope = {"path": "/sleep"}
    assert as_api_error(ConflictError(), scope).status == 409


def test_a_change_that_waits_is_not_forgotten_for_another_one():
    """In this process: the second thread has its turn once the first has."""
    core, held, done = Told(), threading.Event(), []
    core.num_alive, core.hold, core.release = 1, held.set, lambda: None
    thread, waits = CoreThread(core), UpdateWeights("m", in_flight="wait")

    def ask(change):
        thread.change(change)
        done.append(change)

    asking = [threading.Thread(target=ask, args=(change,), daemon=True) for change in (waits, LOAD)]
    asking[0].start()
    assert held.wait(WAIT_S)
    asking[1].start()
    refusals = []
    thread._inbox.put(lambda loop: loop.prepare(LOAD, refusals.append))  # past the turns

    def ends(loop):
        core.num_alive = 0
        loop._settle()

    thread._inbox.put(ends)
    for each in asking:
        each.join(WAIT_S)
    thread.close()
    assert done == [waits, LOAD]
    assert core.told == [(stage, change) for change in (waits, LOAD) for stage in ("prepare", "commit")]
    assert [type(each) for each in refusals] == [ConflictError]


def test_of_one_client_changes_are_made_one_after_another():
    """Also where whoever asked is cancelled: while it is prepared all drop it, later all take it."""

    async def run():
        sides = [Side(), Side()]
        client = EngineProcessClient(num_engines=2)
        client.close()
        client.engines = sides
        for stage, then in (("prepare", "drop"), ("commit", "commit")):
            for each in sides:
                each.told.clear()
            came, goes_on = asyncio.Event(), asyncio.Event()
            sides[1].until = stage, came, goes_on
            first = asyncio.ensure_future(client.change(LOAD))
            await came.wait()
            second = asyncio.ensure_future(client.change(Sleep()))
            first.cancel()
            await asyncio.sleep(0)
            goes_on.set()
            with pytest.raises(asyncio.CancelledError):
                await first
            await second
            assert [each.told for each in sides] == [["prepare", then, "prepare", "commit"]] * 2

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_an_engine_after_another_goes_on_where_that_was(tmp_path):
    """Its weights' version, what names of adapters have meant, and what slept and how deeply."""
    core, file, config = Told(), tmp_path / "note", EngineConfig(model="m")
    for change, asleep in ((Sleep(2), TAGS), (WakeUp(("weights",)), ("kv_cache",))):
        core.asleep = asleep
        note_change(file, config, change, core)
    core.told.clear()
    restored(core, None, noted_changes(file))
    slept, woken = Sleep(2), WakeUp(("weights",))
    assert core.told == [
        (3, {"it": 2}, (), ()),
        ("prepare", slept),
        ("commit", slept),
        ("prepare", woken),
        ("commit", woken),
    ]


def test_weights_that_came_in_parts_are_noted_and_found_again_whole(tmp_path):
    """Model first and the head last: both are lost with the engine, and both are there once they have come again."""
    file, config = tmp_path / "note", EngineConfig(model="m")
    sent = SentTensors(("a",), ("float32",), ((1,),), "g")
    parts = UpdateWeights(model_tensors=sent, more=True), UpdateWeights(draft_tensors=sent)

    def after(core, *changes):
        for change in changes:
            core.prepare(change)()
            note_change(file, config, change, core)
        return core.lost, noted_changes(file).lost

    scheduler = MagicMock()
    scheduler.adapters.known = {}
    core = EngineCore(Told(), scheduler)
    assert after(core, *parts) == ((), ("draft", "model"))
    for again in (parts, [UpdateWeights(model_tensors=sent), parts[1]], [parts[0], UpdateWeights("m", "d")]):
        core = EngineCore(Told(), scheduler)
        core.restore(3, {}, ("draft", "model"))
        assert after(core, *again) == ((), () if again[1].draft else ("draft", "model"))
    core = EngineCore(Told(), scheduler)
    core.restore(3, {}, ("draft", "model"))
    core.prepare(parts[0])()
    core.drop(parts[1])  # what was kept has gone with it
    assert after(core, parts[1])[0] == ("model",)


def test_the_last_part_is_refused_where_others_went_with_an_engine(tmp_path):
    """Once: what is sent then is all there is."""
    file, scheduler = tmp_path / "note", MagicMock()
    scheduler.adapters.known = {}
    sent = SentTensors(("a",), ("float32",), ((1,),), "g")
    part, last = UpdateWeights(model_tensors=sent, more=True), UpdateWeights(draft_tensors=sent)
    first, second, third = (EngineCore(Told(), scheduler) for _ in range(3))
    first.prepare(part)()
    note_change(file, EngineConfig(model="m"), part, first)
    assert noted_changes(file).lost == ()
    for core in (second, third):
        core.restore(0, {}, (), noted_changes(file).parts)
    with pytest.raises(ConfigError, match=r"parts of model .* send all again"):
        second.prepare(last)
    second.prepare(last)()
    third.prepare(part)()
    third.prepare(last)()
    note_change(file, EngineConfig(model="m"), last, third)
    assert (noted_changes(file).lost, noted_changes(file).parts) == (("draft", "model"), ())


def test_of_several_engines_the_head_that_lost_the_most_is_told():
    """And none of those whose weights were not replaced."""
    client = EngineProcessClient(num_engines=2)
    client.close()
    for fits, want in (((None, None), None), (((3.0, 2.9), None, (2.0, 1.5), (4.0, 3.9)), (2.0, 1.5))):
        client.engines = [SimpleNamespace(loads=[CoreLoad(head_fit=each) for each in fits])]
        assert client.load.head_fit == want
