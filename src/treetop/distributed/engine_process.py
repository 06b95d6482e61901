"""The engine process: a core behind a zmq socket on a private path. It ends when its parent does.

    python -m treetop.distributed.engine_process    started by `supervisor.py`; a line of JSON on stdin says what to run

stdin stays open as long as the parent lives; its end is the end of this process, whatever it is doing. Ctrl-C and
SIGTERM are the parent's to act on: it drains first. A failure of the engine is told to the parent and ends the process.
Ranks that share experts are engine processes like any other, whose steps are in lockstep (`lockstep.py`).
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec
import zmq

from treetop.core.engine_core import STALLED_S
from treetop.core.loop import Core, CoreLoop
from treetop.core.wire import (
    AbortRequests,
    AddRequests,
    AskChange,
    ChangeDone,
    ClientHello,
    Finish,
    FromCore,
    Leave,
    Load,
    ProcessOptions,
    Ready,
    ToCore,
    Updates,
    decode_to_core,
    encode,
)
from treetop.disaggregation.connector import Connector, open_connector
from treetop.disaggregation.nixl import NixlTransport
from treetop.distributed.log_lines import log_to_stderr
from treetop.distributed.process import EXIT_REPORTED, EXIT_USER_ERROR, SPARE, Failed, begin, report_failure
from treetop.types.changes import TAGS, Change, Commit, LoadLora, Sleep, UnloadLora, UpdateWeights, WakeUp, asked_as
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, ConflictError, EngineError, UserError
from treetop.types.requests import CoreInfo, CoreLoad, RequestUpdate

log = logging.getLogger("treetop")

if TYPE_CHECKING:  # loads PyTorch, which takes seconds
    from treetop.distributed.lockstep import Lockstep
    from treetop.distributed.tp_executor import TpExecutor
    from treetop.scheduler.scheduler import Scheduler

_LOAD_S = 0.25
"""Seconds between two words about the load, at least."""
HEARTBEAT_S = 1.0
"""Seconds after which the load is told though it is what it was: so clients hear that the loop goes round."""
_NOTE_BYTES = 4096
"""That a note grows by beside what a change names and what adapters are there."""
_LINGER_MS = 2000
"""For what was sent last."""
_TICK_S = 0.1
_GRACE = 1.5
"""A wait for others ends by itself, and says for whom; only after so many times the limit does the guard speak."""


class Parts(NamedTuple):
    """What an engine process serves.

    connector: its KV connector, if it has one.
    executor: of the ranks that share the model with it, if there are any.
    lockstep: with the ranks that share its experts, if there are any.
    """

    core: Core
    info: CoreInfo
    connector: Connector | None = None
    executor: "TpExecutor | None" = None
    lockstep: "Lockstep[Any] | None" = None


class EngineServer:
    """Applies what clients send and sends them what the core gives, a step at a time. over: ends it from outside."""

    def __init__(
        self,
        parts: Parts,
        socket: "zmq.Socket[bytes]",
        over: Callable[[], bool] = lambda: False,
        options: ProcessOptions | None = None,
    ) -> None:
        """options: of the process, in whose file changes are noted; None for none."""
        self._core, self._info, self._connector, self._executor, self._lockstep = parts
        self._loop, self._socket, self._over = CoreLoop(self._core, self._connector, self._lockstep), socket, over
        self._why: BaseException | None = None
        self._options = options
        self._asked: tuple[bytes, Change] | None = None  # who waits for requests to end, for what
        self._prepared: tuple[bytes, Change, Commit] | None = None  # whose, for what
        self._clients: dict[bytes, Callable[[list[RequestUpdate]], None]] = {}
        self._identities: dict[int, bytes] = {}  # of clients, by number
        self._left: set[int] = set()
        self._published, self._looked_s, self._sent_s = CoreLoad(), 0.0, 0.0

    def run(self) -> BaseException:
        """Serve until the engine fails. Returns why it did."""
        self._loop.run(self)
        assert self._why is not None
        return self._why

    def take(self, loop: CoreLoop) -> bool:
        """As `Inbox.take`: clients' commands. It ends the loop once the engine has failed."""
        self._publish_load()
        self._why = self._failure()
        if self._why is None:
            self._wait()
            self._receive()
        return self._why is None

    def _failure(self) -> BaseException | None:
        """Why nothing more can be served, if so. A rank may die while there is no step that would say so."""
        failure = self._core.failure
        if failure is None and self._executor is not None and self._loop.idle:
            failure = self._executor.failure
        if (
            failure is None
            and self._connector is not None
            and self._connector.stuck is not None
            and not self._core.busy
        ):
            failure = EngineError(self._connector.stuck)
        return EngineError("shut down") if failure is None and self._over() else failure

    def _wait(self) -> None:
        """Until there is something to do, which nothing may be known of for a while."""
        if not self._loop.idle or (self._lockstep is not None and self._lockstep.has_proposals()):
            return
        poller, wait_ms = zmq.Poller(), int(1000 * (STALLED_S if self._core.busy else _LOAD_S))
        sockets = [self._socket]
        if self._lockstep is not None:
            sockets += self._lockstep.sockets()
        if self._connector is not None:
            wait_ms = min(wait_ms, self._connector.wait_ms)
            sockets += self._connector.sockets()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(wait_ms)

    def _receive(self) -> None:
        with suppress(zmq.Again):
            while True:
                identity, message = self._socket.recv_multipart(zmq.NOBLOCK)
                self._apply(identity, decode_to_core(message))

    def _apply(self, identity: bytes, command: ToCore) -> None:
        match command:
            case ClientHello(number):
                if number not in self._left:
                    self._identities[number] = identity
                    self._clients.setdefault(identity, partial(self._send_updates, identity))
                    self._send(identity, Ready(self._info))
            case AddRequests(requests):
                if identity in self._clients:
                    self._loop.add(requests, self._clients[identity])
            case Leave(number):
                self._leave(number)
            case AbortRequests(request_ids):
                self._loop.abort(request_ids)
            case Finish(request_id, num_tokens):
                self._loop.finish(request_id, num_tokens)
            case AskChange(stage="prepare"):
                self._prepare(identity, command)
            case AskChange():
                self._send(identity, self._change(identity, command))

    def _prepare(self, identity: bytes, asked: AskChange) -> None:
        """Answered once it is prepared, for which requests may have to end."""
        if self._asked is not None or self._prepared is not None:
            self._send(identity, _refused(asked.number, ConflictError()))
            return
        change = asked.change
        self._asked = identity, change
        self._loop.prepare(change, partial(self._is_prepared, identity, asked, change))

    def _is_prepared(self, identity: bytes, asked: AskChange, change: Change, prepared: Commit | BaseException) -> None:
        self._asked = None
        if isinstance(prepared, BaseException):
            self._send(identity, _refused(asked.number, prepared))
            return
        self._prepared = identity, change, prepared
        try:  # before anybody may decide that all take it
            if isinstance(change, UpdateWeights) and not change.more:
                token = "" if self._core.undecided else asked.token
                torn = tuple({*self._core.undecided, *self._core.changed_by(change)})
                self._note(undecided=torn, undecided_by=token)
            if self._options is not None and self._file is not None:
                make_room(self._file, self._options.config, change)
        except OSError as error:
            self._drop()
            self._send(identity, _refused(asked.number, self._unwritten(change, error)))
            return
        self._send(identity, ChangeDone(asked.number))

    def _change(self, identity: bytes, asked: AskChange) -> ChangeDone:
        """An engine that takes this one's place has what was changed, too. Whom that ended has been told before."""
        try:
            if asked.stage == "drop":
                if (identity, asked.change) in (self._asked, self._prepared and self._prepared[:2]):
                    self._drop()
            elif asked.stage == "keep":
                self._keep_old(asked.token)
            elif self._prepared is not None and self._prepared[0] != identity:
                raise ConflictError
            elif self._prepared is None:
                raise EngineError("nothing is prepared here: this engine was started meanwhile")
            else:
                (*_, commit), self._prepared = self._prepared, None
                self._loop.commit(commit)
                self._tell_info()
                self._note_taken(asked.change)
        except Exception as error:  # a folder may be unreadable, and memory short: nothing has changed
            return _refused(asked.number, error)
        return ChangeDone(asked.number)

    def _keep_old(self, token: str) -> None:
        """Of what was prepared in the engine before this one; only whoever asked for that change knows."""
        if self._file is None or not self._core.undecided or self._prepared is not None:
            return
        if token and noted_changes(self._file).undecided_by == token:
            self._core.kept_old()
            self._tell_info()
            self._note(undecided=(), undecided_by="", parts=())

    def _unwritten(self, change: Change, error: OSError) -> EngineError:
        folder = None if self._file is None else self._file.parent
        return EngineError(
            f"{asked_as(change)}: nothing has changed, for {folder} cannot be written ({error}), where an engine that"
            f" takes this one's place would find what has; make room there"
        )

    def _tell_info(self) -> None:
        self._info = self._core.current(self._info)
        for each in self._clients:
            self._send(each, Ready(self._info))

    @property
    def _file(self) -> Path | None:
        noted = None if self._options is None else self._options.noted
        return None if noted is None else Path(noted)

    def _note_taken(self, change: Change) -> None:
        """One that cannot be noted ends the engine, for the one after it would not have it."""
        if self._options is None or self._file is None:
            return
        try:
            note_change(self._file, self._options.config, change, self._core)
        except OSError as error:
            self._loop.end(error)
            raise

    def _note(self, **changes: Any) -> None:
        if self._file is not None:
            write_note(self._file, msgspec.structs.replace(noted_changes(self._file), **changes))

    def _leave(self, number: int) -> None:
        """A client has ended. What it said last may be on its way still."""
        self._left.add(number)
        identity = self._identities.pop(number, None)
        if identity is not None:
            self._loop.leave(self._clients.pop(identity))
            if identity in [each[0] for each in (self._asked, self._prepared) if each is not None]:
                self._drop()

    def _drop(self) -> None:
        """Nobody waits for what was prepared, or is to be, any more, if anything was."""
        self._loop.cancel()
        self._asked = None
        if self._prepared is not None:
            (_, change, _), self._prepared = self._prepared, None
            self._core.drop(change)
            try:
                self._note(undecided=self._core.undecided, undecided_by="", parts=self._core.parts)
            except OSError as error:  # this engine goes on; one in its place refuses requests until weights come again
                log.error("%s: dropped, and %s cannot be written: %s", asked_as(change), self._file, error)

    def _send_updates(self, identity: bytes, updates: list[RequestUpdate]) -> None:
        self._send(identity, Updates(tuple(updates)))

    def _publish_load(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < _LOAD_S and not (self._loop.idle and self._published.num_running):
            return
        self._looked_s, load = now, self._loop.load
        if load != self._published or now - self._sent_s >= HEARTBEAT_S:
            self._published, self._sent_s = load, now
            for identity in self._clients:
                self._send(identity, Load(load))

    def _send(self, identity: bytes, message: FromCore) -> None:
        self._socket.send_multipart([identity, encode(message)])


def _refused(number: int, error: BaseException) -> ChangeDone:
    text = str(error) or type(error).__name__
    return ChangeDone(number, text, isinstance(error, UserError), isinstance(error, ConflictError))


class EngineProcess:
    """What an engine process does. over: set from any thread, for it to end before its next step."""

    def __init__(
        self, options: ProcessOptions, context: "zmq.Context[zmq.Socket[bytes]]", report: Callable[[Failed], None]
    ) -> None:
        """report: tells the parent why it ends."""
        self.options, self._context, self._report = options, context, report
        self.over = threading.Event()

    def run(self) -> int:
        """Serve until something fails, which is told. Returns the exit code."""
        socket = self._context.socket(zmq.ROUTER)
        socket.sndhwm = socket.rcvhwm = 0  # what waits is bounded by the requests that were accepted
        with ExitStack() as stack:
            stack.callback(socket.close, _LINGER_MS)
            try:
                socket.bind(self.options.address)
                parts = self._open(stack)
                if self.options.noted is not None:
                    note = noted_changes(Path(self.options.noted))
                    parts = parts._replace(info=restored(parts.core, parts.info, note))
                failure = EngineServer(parts, socket, self.over.is_set, self.options).run()
            except Exception as error:  # whatever ends it, the parent is told
                failure = error
            self.over.set()
            why = Failed.of(failure)
            self._report(why)
        return EXIT_USER_ERROR if why.user_error else EXIT_REPORTED

    def _open(self, stack: ExitStack) -> Parts:
        """What was asked for; stack: ends it. Raises TreetopError."""
        options = self.options
        if options.mock is not None:
            from treetop.core.mock import make_mock  # noqa: PLC0415  # needs no PyTorch

            mock_core, info = make_mock(options.config, options.mock)
            self._tell_cache(mock_core.scheduler, info, stack)
            return Parts(mock_core, info)
        take_share(options)
        from treetop.distributed.open import open_core  # noqa: PLC0415  # loads PyTorch, which takes seconds
        from treetop.distributed.rank_groups import ExpertEngines  # noqa: PLC0415  # too

        config, engines = options.config, None
        if config.ep_size > 1:
            engines = ExpertEngines(options.folder, options.rank, config.ep_size)
        opened = open_core(config, options.disaggregation.mode != "null", engines, self._context)
        stack.callback(opened.close)
        executor, lockstep = opened.executor, opened.lockstep
        if lockstep is not None:
            threading.Thread(target=self._guard, args=(lockstep,), name="treetop-guard", daemon=True).start()
        parts = Parts(opened.core, opened.info, executor=executor, lockstep=lockstep)
        self._tell_cache(opened.scheduler, opened.info, stack)
        if options.disaggregation.mode == "null":
            return parts
        if not options.rank:
            logging.getLogger("treetop.core").info(options.disaggregation.words(options.config.ep_size))
        from treetop.engine.kv_staging import staging_of  # noqa: PLC0415  # too

        own, staging = options.disaggregation.of_rank(options.rank), staging_of(opened.engine)
        connector = open_connector(opened.scheduler, staging, own, NixlTransport, executor)
        stack.callback(connector.close)
        return parts._replace(connector=connector, info=parts.info._replace(refuses=connector.refuses))

    def _tell_cache(self, scheduler: "Scheduler", info: CoreInfo, stack: ExitStack) -> None:
        """Publish what the prefix cache has, if that is asked for. stack: ends it."""
        options = self.options
        if options.kv_events is None or info.prefix is None:
            return
        from treetop.distributed.kv_events import KVEventPublisher  # noqa: PLC0415  # few ask for it

        rank = options.replica * options.config.ep_size + options.rank
        publisher = KVEventPublisher(options.kv_events, info.prefix.page_size, rank, self._context)
        stack.callback(publisher.close)
        scheduler.watch_cache(publisher.gpu, publisher.host)

    def _guard(self, lockstep: "Lockstep[Any]") -> None:
        """On a thread of its own: the rank may wait where nothing reaches it, such as for its device."""
        timeout_s = self.options.config.step_timeout
        while not self.over.wait(_TICK_S):
            since = lockstep.waiting_since
            if since is not None and time.monotonic() - since > _GRACE * timeout_s:
                late = f"a step did not end in {timeout_s:g} s; raise --step-timeout if it needs longer"
                self._report(Failed(late, False))  # the parent ends all ranks
                return


class ChangesNote(msgspec.Struct, frozen=True):
    """What has changed since the options: folders of the weights in force, None for theirs; adapters, None likewise.

    lora_versions: how often a name has been given. asleep, level: what sleeps, and how deeply.
    lost: of "model" and "draft", what was sent and is in no folder. parts: what has come of weights not whole yet.
    undecided: what a change has prepared, and all engines may have taken but this one. undecided_by: the
    token of that change, whose client knows; "" where nobody does.
    """

    model: str | None = None
    draft: str | None = None
    loras: dict[str, str] | None = None
    lora_versions: dict[str, int] = {}
    weight_version: int = 0
    asleep: tuple[str, ...] = ()
    level: int = 1
    lost: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    undecided_by: str = ""


def note_change(file: Path, config: EngineConfig, change: Change, core: Core) -> None:
    """Note what is in force now."""
    note = msgspec.structs.replace(
        with_folders(noted_changes(file), config, change),
        lora_versions=core.lora_versions,
        weight_version=core.weight_version,
        asleep=core.asleep,
        lost=core.in_no_folder,
        parts=core.parts,
        undecided=core.undecided,
        undecided_by="",
    )
    write_note(file, note)


def with_folders(note: ChangesNote, config: EngineConfig, change: Change) -> ChangesNote:
    """The note with what a change says itself; the rest is the core's to say."""
    loras = dict(config.adapters if note.loras is None else note.loras)
    match change:
        case UpdateWeights(more=False, model=model, draft=draft):
            return msgspec.structs.replace(note, model=model or note.model, draft=draft or note.draft)
        case LoadLora(name, path):
            return msgspec.structs.replace(note, loras={**loras, name: path})
        case UnloadLora(name):
            loras.pop(name, None)
            return msgspec.structs.replace(note, loras=loras)
        case Sleep(level):
            return msgspec.structs.replace(note, level=level)
    return note


def write_note(file: Path, note: ChangesNote) -> None:
    """In one step, into the room that was made for it, if any was."""
    beside = file.with_suffix(".new")
    with _of_its_owner(beside) as written:
        written.write(msgspec.json.encode(note))
        written.truncate()
    beside.replace(file)


def make_room(file: Path, config: EngineConfig, change: Change) -> None:
    """Take the room of the next note, for a disk that is full once the change is in force. Raises OSError."""
    versioned = change.name if isinstance(change, LoadLora) else ""
    note = with_folders(noted_changes(file), config, change)
    size = len(msgspec.json.encode(note)) + len(msgspec.json.encode(versioned)) + _NOTE_BYTES
    with _of_its_owner(file.with_suffix(".new")) as room:
        room.write(bytes(size))


def _of_its_owner(file: Path) -> BinaryIO:
    """Open to write from its beginning, with what it has, if there is one; nobody else may read it."""
    return open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def noted_changes(file: Path) -> ChangesNote:
    return msgspec.json.decode(file.read_bytes(), type=ChangesNote) if file.exists() else ChangesNote()


def restored(core: Core, info: CoreInfo, note: ChangesNote) -> CoreInfo:
    """A core that takes another's place goes on where that was: with its versions, and asleep if it slept."""
    core.restore(note.weight_version, note.lora_versions, note.lost, note.parts, note.undecided)
    if note.asleep:
        core.prepare(Sleep(note.level))()
        core.prepare(WakeUp(tuple(tag for tag in TAGS if tag not in note.asleep)))()
    return core.current(info)


def with_noted_changes(options: ProcessOptions) -> ProcessOptions:
    """The options, with the weights and adapters that an engine before this one went on with."""
    if options.noted is None:
        return options
    note, config = noted_changes(Path(options.noted)), options.config
    config = replace(config, model=note.model or config.model, draft=note.draft or config.draft)
    if note.loras is not None:
        there = {name: path for name, path in note.loras.items() if Path(path).is_dir()}
        for name in note.loras.keys() - there.keys():
            log.warning("adapter %s is gone: its folder %s is not there any more", name, note.loras[name])
        modules = tuple(f"{name}={path}" for name, path in there.items())
        slots, most = config.num_lora_slots, config.most_loras  # as many as before, however many there are now
        config = replace(config, lora_modules=modules, max_loras=slots or None, max_cpu_loras=most or None)
    return msgspec.structs.replace(options, config=config)


def take_share(options: ProcessOptions) -> None:
    """Of several engine processes on one machine each has its share of the threads, and each replica its own GPUs.

    Before CUDA starts: that reads the variable once. Raises ConfigError for more than the machine shows.
    """
    config, num_engines = options.config, options.num_replicas * options.config.ep_size
    if num_engines == 1:
        return
    import torch  # noqa: PLC0415  # takes seconds

    torch.set_num_threads(max(1, torch.get_num_threads() // num_engines))
    found = 0 if config.device == "cpu" else torch.cuda.device_count()
    if options.num_replicas == 1 or (not found and config.device != "cuda"):
        return
    each = config.tp_size * config.ep_size
    if each * options.num_replicas > found:
        raise ConfigError(
            f"--dp-size {options.num_replicas}: {each * options.num_replicas} GPUs are needed, {each} a replica, and"
            f" this machine shows {found}"
        )
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = [str(index) for index in range(found)] if given is None else given.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shown[each * options.replica :][:each])


def main() -> int:
    if SPARE in sys.argv[1:]:
        import_module("treetop.distributed.open")  # which loads PyTorch
    options, parent = begin(ProcessOptions, lambda said: said.folder)
    options = with_noted_changes(options)
    who = f"rank {options.rank}: " if options.config.ep_size > 1 else ""
    log_to_stderr(options.log_level, "%(message)s", who)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        code = EngineProcess(options, context, report_failure).run()
    finally:
        context.destroy(linger=_LINGER_MS)
    if options.config.ep_size > 1:
        parent.join(_LINGER_MS / 1000)  # if the parent is gone, the folder is to go too
    return code


if __name__ == "__main__":
    sys.exit(main())
