"""Changes of engines side by side: one that ends between preparing and taking it is followed by one that takes it."""

import asyncio
import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from subprocess import PIPE, Popen
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest

from support.waiting import WAIT_S
from treetop.api.errors import as_api_error
from treetop.core.engine_core import WEIGHTS_UNDECIDED, EngineCore
from treetop.core.loop import CoreThread
from treetop.core.wire import AskChange, ChangeDone, ClientHello, decode_from_core, decode_to_core, encode
from treetop.distributed import engine_process
from treetop.distributed.client import EngineProcessClient, has_taken
from treetop.distributed.engine_process import EngineServer, Parts, note_change, noted_changes, restored
from treetop.distributed.remote_engine import RankLink, RemoteEngine
from treetop.distributed.tp_executor import TpExecutor
from treetop.distributed.tp_worker import TpWorker
from treetop.scheduler.adapters import AdapterBooks
from treetop.types.changes import TAGS, LoadLora, SentTensors, Sleep, UnloadLora, UpdateWeights, WakeUp
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, ConflictError, EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest
from treetop.types.sampling import SamplingParams

LOAD = LoadLora("it", "folder")


class Side:
    """An engine that says what it is told to."""

    def __init__(self, fails=(), loras=()):
        self.fails, self.told, self.num_restarts, self.until, self.then = list(fails), [], 0, None, {}
        self.links = [SimpleNamespace(info=SimpleNamespace(loras=loras, asleep=(), weight_version=0))]
        self.is_up, self.keeps, self.held = True, None, []

    async def change(self, change, stage, token):
        self.told.append(stage)
        if stage == "prepare":
            vars(self).update(self.then)
        if self.until is not None and self.until[0] == stage:
            (_, came, goes_on), self.until = self.until, None
            came.set()
            await goes_on.wait()
        if self.fails and self.fails[0][0] == stage:
            raise self.fails.pop(0)[1]

    async def another(self, restarts):
        self.told.append("another")

    def takes(self):
        return self._held("takes")

    def behind(self):
        return self._held("behind")

    @contextmanager
    def _held(self, why):
        self.held.append(why)
        yield
        self.held.remove(why)


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


def test_while_one_that_ended_is_waited_for_the_others_have_requests():
    """All new ones: it has none until it has taken the change."""
    client = EngineProcessClient(num_engines=2)
    lost, well = client.engines
    info, seen = CoreInfo("m", 2, 8, 1, SpecShape(1, 0, 1)), []

    async def change(each, change, stage, token):
        seen.append((stage, each._takes, each._is_behind, client.pause))
        await asyncio.sleep(0)  # the other is asked, too
        if each is lost and len(seen) == 4:
            raise EngineError("gone")

    async def another(restarts):
        while well._takes:
            await asyncio.sleep(0)
        chosen = {client.choose(EngineRequest(RequestId(i), (i,), SamplingParams(), 0)).engine for i in range(8)}
        seen.append((chosen, lost._takes, lost._is_behind, well._takes, well._is_behind, client.pause))

    async def run():
        for each in client.engines:
            each.links, each._up, each.num_restarts = [RankLink(each._index, 0, Mock(), info)], True, 0
            each.change, each.another = partial(change, each), another
            each.settled.set()
        await client.change(LOAD)
        assert (lost._is_behind, lost.pause) == (False, None)
        client.close()

    asyncio.run(run())
    asked = [(stage, False, False, None) for stage in ("prepare", "prepare")]
    asked += [("commit", True, False, None)] * 2
    assert seen == [
        *asked,
        ({1}, False, True, False, False, None),
        *((stage, False, True, None) for stage in ("prepare", "commit")),
    ]


def test_one_that_hangs_while_it_takes_a_change_holds_up_nobody_else():
    """Those that have taken it go on, and others that were lost have it without waiting for one another."""

    async def run():
        hangs, well = Side(), Side()
        lost = [Side([("commit", EngineError("gone"))]) for _ in range(2)]
        came, goes_on = asyncio.Event(), asyncio.Event()
        hangs.until = "commit", came, goes_on
        waits = asyncio.Event()
        lost[0].another = lambda restarts: waits.wait()
        client = EngineProcessClient(num_engines=4)
        client.close()
        client.engines = [hangs, lost[0], lost[1], well]
        change = asyncio.ensure_future(client.change(LOAD))
        await came.wait()
        while well.told[-1] != "commit" or lost[1].told[-3:] != ["another", "prepare", "commit"]:
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert [each.held for each in client.engines] == [["takes"], ["behind"], [], []]
        assert not change.done(), "whoever asked waits for all"
        waits.set()
        goes_on.set()
        await change
        assert lost[0].told == ["prepare", "commit", "prepare", "commit"]
        assert [each.held for each in client.engines] == [[]] * 4

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_of_two_processes_whose_changes_cross_one_makes_its_own(tmp_path):
    """Whichever engine each asks first: the other one has asked none. The lock ends with its process."""
    file = tmp_path / "changing"

    def held_by_another():
        code = (
            "import pathlib, sys; from treetop.distributed.shared_file import only_one\n"
            "with only_one(pathlib.Path(sys.argv[1])) as alone: print(alone, flush=True); sys.stdin.read()"
        )
        return Popen([sys.executable, "-c", code, file], stdin=PIPE, stdout=PIPE, text=True)

    async def ask(sides):
        client = EngineProcessClient(num_engines=2, changing_file=file)
        client.close()
        client.engines = sides
        await client.change(LOAD)

    first, second = [Side(), Side()], [Side(), Side()]
    with held_by_another() as other:
        assert other.stdout.readline() == "True\n"
        with pytest.raises(ConflictError):
            asyncio.run(ask(first))
        other.kill()
    asyncio.run(ask(second))
    assert [each.told for each in (*first, *second)] == [[], [], *[["prepare", "commit"]] * 2]


def test_a_lock_that_cannot_be_opened_is_an_error_that_names_it(tmp_path):
    """As where somebody has cleared the folder for temporary files. No engine is asked."""
    side, file = Side(), tmp_path / "cleared" / "changing"

    async def ask():
        client = EngineProcessClient(num_engines=1, changing_file=file)
        client.close()
        client.engines = [side]
        await client.change(LOAD)

    with pytest.raises(EngineError, match="TMPDIR") as raised:
        asyncio.run(ask())
    assert f"{file}, which" in str(raised.value)
    assert "cannot be opened (No such file or directory)" in str(raised.value)
    assert side.told == []


def test_where_one_hangs_as_it_drops_a_change_the_others_have_dropped_it():
    async def run():
        refuses, hangs, well = Side([("prepare", ConfigError("no"))]), Side(), Side()
        came, goes_on = asyncio.Event(), asyncio.Event()
        hangs.until = "drop", came, goes_on
        client = EngineProcessClient(num_engines=3)
        client.close()
        client.engines = [hangs, refuses, well]
        change = asyncio.ensure_future(client.change(LOAD))
        await came.wait()
        while well.told[-1] != "drop" or well.keeps is not None:
            await asyncio.sleep(0)
        assert not change.done()
        goes_on.set()
        with pytest.raises(ConfigError, match="no"):
            await change
        assert hangs.keeps is None

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_one_that_has_it_already_as_it_starts_is_not_asked_twice():
    first = Side([("commit", EngineError("gone"))], loras=("it",))
    changed(first)
    assert first.told == ["prepare", "commit", "another"]


def test_where_one_refuses_all_drop_it_whatever_dropping_says():
    first, second, third = Side([("drop", EngineError("gone"))]), Side([("prepare", ConfigError("no"))]), Side()
    with pytest.raises(ConfigError, match="no"):
        changed(first, second, third)
    assert (first.told, second.told, third.told) == (["prepare", "drop"],) * 3
    assert (first.keeps[0], second.keeps, third.keeps) == (LOAD, None, None), "whoever did not hear it hears it later"


def test_one_that_ends_before_all_have_prepared_it_changes_nothing_anywhere():
    """Whether another is up in its place or not."""
    for gone in ({"is_up": False}, {"num_restarts": 1}):
        first, second = Side(), Side()
        second.then = gone
        with pytest.raises(EngineError, match="an engine has ended meanwhile; nothing has changed"):
            changed(first, second, change=UpdateWeights("m"))
        assert (first.told, second.told) == (["prepare", "drop"],) * 2


def test_one_that_cannot_take_what_the_others_have_is_said_to_whoever_asked():
    """As an error that leaves what was written for the others; it has had no requests until then."""
    first, second = Side([("commit", EngineError("gone")), ("prepare", InputError("no such group"))]), Side()
    with pytest.raises(EngineError, match="cannot take what the others have: no such group"):
        changed(first, second, change=UpdateWeights("m"))
    assert first.told == ["prepare", "commit", "another", "prepare"]
    assert second.told == ["prepare", "commit"]
    assert (first.keeps, first.held, second.held) == (None, ["behind"], [])


def test_what_an_engine_has_taken():
    sleeps = core()
    sleeps.weight_version, sleeps.asleep = 2, ("kv_cache",)
    info = sleeps.current(CoreInfo("m", 2, 8, 1, SpecShape(1, 0, 1)))._replace(loras=("it",))
    taken = LOAD, Sleep(), WakeUp(("weights",)), UnloadLora("other")
    assert all(has_taken(change, info, info) for change in taken)
    assert not any(has_taken(change, info, info) for change in (UnloadLora("it"), WakeUp(None), UpdateWeights()))
    assert has_taken(UpdateWeights(), info, SimpleNamespace(weight_version=1))
    for lacks in ({"lost": ("model",), "undecided": ()}, {"lost": (), "undecided": ("draft",)}):
        vars(sleeps).update(lacks)
        assert not has_taken(UpdateWeights(), sleeps.current(info), SimpleNamespace(weight_version=1))


class Told:
    """A core that says what it is told to; an engine, too."""

    failure, load, busy, weight_version, asleep, lora_versions = None, CoreLoad(), False, 3, (), {"it": 2}
    in_no_folder, parts, undecided, num_committed = (), (), (), 0

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

    def changed_by(self, change):
        return ("model",)

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


def test_what_is_dropped_is_let_go_by_every_rank():
    """Rank 0 says so to the others, of whatever change; each holds nothing of it from then on."""
    executor, worker = TpExecutor.__new__(TpExecutor), TpWorker.__new__(TpWorker)
    executor._failure, executor._ranks, executor.engine = None, Mock(), Mock()
    for change in (LOAD, UpdateWeights("m"), WakeUp()):
        executor.drop(change)
        (told,) = executor._ranks.broadcast.call_args.args
        worker._engine, worker._prepared, worker._plans = Mock(), object(), Mock(recv=lambda told=told: told)
        worker._follow()
        assert worker._prepared is None
        assert worker._engine.drop.call_args.args == executor.engine.drop.call_args.args == (change,)


@pytest.mark.parametrize("stage", ["commit", "drop"])
def test_an_adapter_whose_last_request_ends_while_something_is_prepared_is_forgotten_after_it(stage):
    """Ranks hold one change at a time: this one would be in its place."""
    worker, told, said = TpWorker.__new__(TpWorker), [], []
    worker._prepared, worker._options, worker._engine, worker._send = None, SimpleNamespace(rank=1), Mock(), said.append
    worker._engine.prepare = lambda change: lambda: told.append(change)

    def ask(stage, change):
        worker._plans = Mock(recv=lambda: encode(AskChange.of(0, stage, change)))
        worker._follow()
        if said[-1].error is not None:
            raise EngineError(said[-1].error)

    def prepare(change):
        ask("prepare", change)
        return lambda: ask("commit", change)

    ranks = Mock(prepare=prepare, drop=lambda change: ask("drop", change))
    books = AdapterBooks(["old"], 1, 8)
    core = EngineCore(ranks, scheduler := MagicMock(adapters=books))
    scheduler.adapters_in_use = [books.named("old")]
    core.prepare(UnloadLora("old"))()
    commit, scheduler.adapters_in_use = core.prepare(LOAD), []
    core.abort(RequestId(1))
    assert (told, core.failure) == ([], None)
    if stage == "commit":
        commit()
    else:
        core.drop(LOAD)
    assert [type(each) for each in told] == [LoadLora, UnloadLora][stage == "drop" :]
    assert (core.failure, books.leaving) == (None, [])


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


def test_a_change_ends_where_the_client_is_closed_while_an_engine_takes_it():
    """No other engine is heard of then, and whoever asks later is refused."""

    async def run():
        client = EngineProcessClient()
        engine = client.engines[0]
        engine.num_restarts, engine._up = 0, True

        def send(message):
            asked = decode_to_core(message)
            if asked.stage == "commit":
                client.close()
            else:
                engine._take(engine.links[0], ChangeDone(asked.number))

        socket = SimpleNamespace(send=send, close=lambda: None)
        engine.links = [RankLink(0, 0, socket, CoreInfo("m", 2, 8, 1, SpecShape(1, 0, 1)))]
        for _ in range(2):
            with pytest.raises(EngineError, match="has closed the connection"):
                await client.change(LOAD)

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
        (3, {"it": 2}, (), (), ()),
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


def core():
    scheduler = MagicMock()
    scheduler.adapters.known, scheduler.adapters.names, scheduler.adapters.versions = {}, (), ()
    return EngineCore(Told(), scheduler)


def server_over(core, file):
    """As after a start, with what the note says."""
    info = restored(core, CoreInfo("m", 2, 8, 1, SpecShape(1, 0, 1)), noted_changes(file))
    server = EngineServer(Parts(core, info), Mock(), options=SimpleNamespace(noted=str(file), config=CONFIG))
    for number in (7, 8):
        server._apply(bytes([number]), ClientHello(number))
    return server


CONFIG = EngineConfig(model="m")
SENT = SentTensors(("a",), ("float32",), ((1,),), "g")


@pytest.mark.parametrize("change", [UpdateWeights("n"), UpdateWeights(model_tensors=SENT)])
def test_an_engine_that_ends_before_it_has_taken_weights_is_followed_by_none_that_mixes(tmp_path, change):
    """Others may have taken them: it refuses until whoever asked says that none has, or weights come again."""
    file, me, other = tmp_path / "note", bytes([7]), bytes([8])
    first = server_over(core(), file)
    first._apply(me, AskChange.of(1, "prepare", change))
    first._apply(me, AskChange.of(2, "drop", change))
    assert server_over(core(), file)._core.refuses is None
    first._apply(me, AskChange.of(3, "prepare", change, "this"))
    second = server_over(core(), file)  # the first is gone
    assert second._core.refuses == second._info.refuses_now == WEIGHTS_UNDECIDED
    for identity, token in ((other, "that"), (me, "that"), (me, "")):
        second._apply(identity, AskChange.of(1, "keep", change, token))
        assert second._core.refuses == WEIGHTS_UNDECIDED, "of another change"
    third = server_over(core(), file)
    third._apply(me, AskChange.of(1, "keep", change, "this"))
    assert third._core.refuses is third._info.refuses_now is None
    assert server_over(core(), file)._core.refuses is None
    for stage in ("prepare", "commit"):
        second._apply(other, AskChange.of(2, stage, UpdateWeights(draft="d")))
    assert second._core.refuses == WEIGHTS_UNDECIDED, "of the head alone"
    for stage in ("prepare", "commit"):
        second._apply(me, AskChange.of(3, stage, change))
    assert second._core.refuses is None
    assert noted_changes(file).lost == (("model",) if change.is_sent else ())


class Served(Side):
    """One over servers, of which the next goes on with the note of the last."""

    def __init__(self, file, *fails):
        super().__init__(fails)
        self.file = file
        self.start()

    def start(self):
        self.server, self.is_up = server_over(core(), self.file), True
        if self.keeps is not None:
            self.server._apply(bytes([7]), AskChange.of(0, "keep", *self.keeps))

    async def change(self, change, stage, token):
        if not self.is_up:
            raise EngineError("being started again")
        await super().change(change, stage, token)
        self.server._apply(bytes([7]), AskChange.of(0, stage, change, token))

    async def another(self, restarts):
        self.start()


def test_a_note_that_cannot_be_written_refuses_the_change_and_ends_nobody(tmp_path, monkeypatch):
    """Nobody may decide that all take what no engine after this one would know of; what is dropped is dropped."""
    file, me, asked = tmp_path / "note", bytes([7]), UpdateWeights("n")
    server = server_over(core(), file)

    def said(stage):
        server._apply(me, AskChange.of(1, stage, asked, "this"))
        return decode_from_core(server._socket.send_multipart.call_args.args[0][1])

    def full(file, note):
        raise OSError(28, "No space left on device")

    write = engine_process.write_note
    monkeypatch.setattr(engine_process, "write_note", full)
    refused = said("prepare")
    assert not refused.user_error
    assert refused.error.startswith(f"update_weights: nothing has changed, for {tmp_path} cannot be written")
    dropped = [("prepare", asked), ("drop", asked)]
    assert (server._core.engine.told, server._prepared) == (dropped, None)
    monkeypatch.setattr(engine_process, "write_note", write)
    assert said("prepare").error is None
    monkeypatch.setattr(engine_process, "write_note", full)
    server._leave(7)
    assert (server._core.engine.told, server._prepared) == (2 * dropped, None)
    assert (server._core.refuses, server_over(core(), file)._core.refuses) == (None, WEIGHTS_UNDECIDED)


@pytest.mark.parametrize("change", [UpdateWeights("n" * 4000), LoadLora("a" * 4000, "b" * 4000), Sleep()])
def test_a_disk_that_is_full_once_a_change_is_prepared_ends_nobody(tmp_path, change):
    """The note of what is in force goes into room that was taken before anybody decided."""
    file = tmp_path / "note"
    note_change(file, CONFIG, LoadLora("c" * 9000, "d"), Told())
    server, room = server_over(core(), file), file.with_suffix(".new")
    server._apply(bytes([7]), AskChange.of(1, "prepare", change))
    taken = room.stat()
    assert room.read_bytes() == bytes(taken.st_size), "written, no hole"
    server._apply(bytes([7]), AskChange.of(1, "commit", change))
    assert file.stat().st_ino == taken.st_ino
    assert len(file.read_bytes()) < taken.st_size
    assert not room.exists()


def test_room_is_taken_for_what_is_noted_and_not_for_all_that_a_change_says(tmp_path):
    """The first change of adapters notes those of the options, too; of tensors that are sent nothing is noted."""
    file, adapters = tmp_path / "note", tuple(f"{i}={'p' * 200}{i}" for i in range(50))
    config, change = replace(CONFIG, lora_modules=adapters), LoadLora("a" * 4000, "b")
    engine_process.make_room(file, config, change)
    room = file.with_suffix(".new").stat().st_size
    note_change(file, config, change, Told())
    written = len(file.read_bytes())
    assert 50 * 200 < written < room < written + 10_000
    names = tuple("n" * 100 + str(i) for i in range(1000))
    tensors = SentTensors(names, ("bfloat16",) * 1000, ((1,),) * 1000, "group")
    engine_process.make_room(file, config, UpdateWeights(model_tensors=tensors))
    assert file.with_suffix(".new").stat().st_size < written + 10_000


def test_what_a_later_change_says_is_not_taken_for_what_became_of_an_earlier_one(tmp_path):
    """An engine that may not have what the others have dies again, and while it is down something else is refused."""
    well = Served(tmp_path / "well")
    torn = Served(tmp_path / "torn", ("commit", EngineError("gone")), ("prepare", EngineError("nobody sends")))
    with pytest.raises(EngineError, match="cannot take what the others have"):
        changed(well, torn, change=UpdateWeights("new"))
    for later in (LOAD, UpdateWeights("new")):
        torn.is_up = False
        with pytest.raises(EngineError, match="being started again"):
            changed(well, torn, change=later)
        torn.start()
        torn.keeps = later, "another"  # and if it had been asked in time
        torn.start()
        assert (well.server._core.weight_version, well.server._core.refuses) == (1, None)
        assert (torn.server._core.weight_version, torn.server._core.refuses) == (0, WEIGHTS_UNDECIDED)


def test_who_may_have_others_weights_is_kept_where_a_later_change_is_dropped(tmp_path):
    """And nobody may say that what was before is right."""
    file = tmp_path / "note"
    note_change(file, CONFIG, LOAD, core := Told())
    core.undecided, me = ("model",), bytes([7])
    server = server_over(core, file)
    for stage in ("prepare", "drop"):
        server._apply(me, AskChange.of(1, stage, UpdateWeights("n")))
        assert (noted_changes(file).undecided, noted_changes(file).undecided_by) == (("model",), "")


def test_an_engine_that_starts_is_told_what_none_has_taken_before_it_has_requests():
    """And one that takes its place while others take the change has none until it has taken it, too."""

    async def silent():
        await asyncio.Event().wait()

    async def run():
        engine = RemoteEngine(0, 0, 60.0, None, asyncio.Event())
        engine._journal = Mock(due=lambda: [EngineRequest(RequestId(1), (5,), SamplingParams(), 0)])
        given = []
        for keeps, takes in (
            ((LOAD, "this"), nullcontext),
            (None, RemoteEngine.takes),
            (None, RemoteEngine.behind),
            (None, nullcontext),
        ):
            engine.keeps, sent = keeps, []
            socket = SimpleNamespace(recv=silent, close=lambda: None, send=sent.append)
            link = RankLink(0, 0, socket, CoreInfo("m", 2, 8, 1, SpecShape(1, 0, 1)))
            with takes(engine):
                engine._begin([link], ())
                given.append([getattr(decode_to_core(each), "stage", "requests") for each in sent])
            given[-1].append(len(sent))
        engine.close()
        return given

    assert asyncio.run(run()) == [["keep", "requests", 2], [1], [1], ["requests", 1]]


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


def test_parts_of_weights_that_fail_half_way_count_for_no_others():
    """The engine has let go of them: what is put in force next is what was given for it."""
    half, torn = core(), EngineError("torn")
    half.prepare(UpdateWeights(model_tensors=SENT, more=True))()
    half.engine.prepare = lambda change: Mock(side_effect=torn)
    with pytest.raises(EngineError, match="torn"):
        half.prepare(UpdateWeights(draft_tensors=SENT))()
    assert (half.parts, half.undecided) == ((), ("draft", "model"))
    half.engine = Told()
    half.prepare(UpdateWeights(draft="d"))()
    assert (half.in_no_folder, half.undecided) == ((), ("model",))


def test_of_several_engines_the_head_that_lost_the_most_is_told():
    """And none of those whose weights were not replaced."""
    client = EngineProcessClient(num_engines=2)
    client.close()
    for fits, want in (((None, None), None), (((3.0, 2.9), None, (2.0, 1.5), (4.0, 3.9)), (2.0, 1.5))):
        client.engines = [SimpleNamespace(loads=[CoreLoad(head_fit=each) for each in fits])]
        assert client.load.head_fit == want
