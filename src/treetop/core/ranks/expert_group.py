"""A group of ranks that share experts: a process each, all alike, and this process, which sends them requests.

    clients --> [ DispatchCore ]  --Add, Abort, Finish-->  [ rank 0 ]  [ rank 1 ]  [ rank 2 ]   `expert_rank.py`
                [ ExpertGroup  ]  <----Updates, Load-----      |           |           |
                                                               +-- wants --+-- wants --+         `lockstep.py`
                                                               +-- rows ---+-- rows ---+         `parallel/`

Whatever goes wrong with one rank ends the group: every process, every file. The error says which rank, and why.
"""

import logging
import subprocess
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from shutil import rmtree
from typing import Any

import torch
import zmq

from treetop.core.child import start_child
from treetop.core.ranks.expert_rank import SAID_WHY, RankOptions
from treetop.core.wire import (
    Abort,
    Add,
    Failed,
    Finish,
    FromCore,
    Load,
    Ready,
    ToCore,
    Updates,
    decode_from_core,
    encode,
)
from treetop.disaggregation.connector import IDLE_MS
from treetop.disaggregation.options import NULL, DisaggregationOptions
from treetop.models.folder import resolve_folder
from treetop.models.loader import compute_device
from treetop.models.params import of_rank
from treetop.models.registry import target_spec
from treetop.parallel.exchange import START_S
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, InputError, TreetopError
from treetop.types.ids import RequestId
from treetop.types.parallel import ALONE, Unmet
from treetop.types.requests import CoreInfo, CoreLoad, EngineRequest, HandoverLoad, RequestUpdate, check_prompt

_LONGEST_PATH = 90
_TICK_S = 0.1
_STEP_S = 0.005
"""How long a step of the dispatcher waits for updates: so long may a command wait."""
_LAST_WORDS_S = 1.0
"""How long ranks may take to say why the group fails; one that dies says nothing."""


class ExpertGroup:
    """Starts the ranks, and hears of them. info: of one rank.

    Raises ConfigError for what cannot work, before anything is started where it can, and EngineError if a rank fails;
    `failure` is that error from then on. `close` ends all processes, any number of times; so does the end of whoever
    holds this object.
    """

    info: CoreInfo

    def __init__(self, config: EngineConfig, handover: DisaggregationOptions = NULL) -> None:
        check_experts(config)
        self.size = config.ep_size
        self._ranks = _Processes(config, handover)
        self.close = weakref.finalize(self, _Processes.end, self._ranks)
        self._why: TreetopError | None = None
        try:
            self.info = self._await_ready(time.monotonic() + START_S)
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> TreetopError | None:
        """Why the group has ended, None while it lives; also where nobody has asked it for anything."""
        if self._why is None and self._ranks.died is not None:
            self._end({})
        return self._why

    def send(self, rank: int, order: ToCore) -> None:
        """Raises EngineError if the group has ended."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # else it keeps all calls that it was raised in
        self._ranks.orders[rank].send(encode(order))

    @property
    def inbox(self) -> "zmq.Socket[bytes]":
        """Where words of the ranks arrive."""
        return self._ranks.inbox

    def receive(self, patience_s: float) -> list[tuple[int, FromCore]]:
        """What ranks have said since; waits so long for a word. Raises EngineError once one has failed or died."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        heard = self._ranks.hear(patience_s)
        failed = {rank: word for rank, word in heard if isinstance(word, Failed)}
        if failed:
            raise self._end(failed)
        return heard

    def _await_ready(self, deadline: float) -> CoreInfo:
        infos: dict[int, CoreInfo] = {}
        while len(infos) < self.size:
            for rank, word in self.receive(_TICK_S):
                if isinstance(word, Ready):
                    infos[rank] = word.info
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(self.size) if rank not in infos)
                raise EngineError(f"rank {missing} was not up in {START_S:g} s")
        return infos[0]

    def _end(self, failed: dict[int, Failed]) -> TreetopError:
        """End the group, once it is known why. Returns that."""
        self._why = self._explained(failed)
        self.close()
        return self._why

    def _explained(self, failed: dict[int, Failed]) -> TreetopError:
        """A rank that has died without a word says most, then the first that says something.

        ConfigError where whoever started the group can change it.
        """
        deadline = time.monotonic() + _LAST_WORDS_S
        while len(failed) < self.size and time.monotonic() < deadline:
            for rank, word in self._ranks.hear(_TICK_S):
                if isinstance(word, Failed):
                    failed.setdefault(rank, word)
            if self._ranks.died is not None and self._ranks.died[1] != SAID_WHY:
                break
        died = self._ranks.died
        if died is not None and died[0] not in failed:
            return EngineError(f"rank {died[0]} has ended with exit code {died[1]}")
        rank, word = next(iter(failed.items()))
        return ConfigError(word.reason) if word.user_error else EngineError(f"rank {rank}: {word.reason}")


class _Processes:
    """The ranks' processes and sockets. died: the first that has ended, and its exit code."""

    def __init__(self, config: EngineConfig, handover: DisaggregationOptions) -> None:
        self.folder = tempfile.mkdtemp(prefix="treetop-")  # mode 0700: nobody else reaches a rank
        self.died: tuple[int, int] | None = None
        self._ending, self._over = threading.Lock(), False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = self._context.socket(zmq.PULL)
        self.inbox.rcvhwm = 0  # what waits is bounded by the requests that were accepted
        self.orders: list[zmq.Socket[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            if len(self.folder) > _LONGEST_PATH:
                raise ConfigError(f"the path of temporary files is too long for a socket: {self.folder}; set TMPDIR")
            self.inbox.bind(f"ipc://{self.folder}/words")
            threads = max(1, torch.get_num_threads() // config.ep_size)
            for rank in range(config.ep_size):
                self.orders.append(self._context.socket(zmq.PUSH))
                self.orders[-1].sndhwm = 0
                self.orders[-1].bind(f"ipc://{self.folder}/orders-{rank}")
                level = logging.WARNING if rank else logging.getLogger("treetop").getEffectiveLevel()
                options = RankOptions(self.folder, config, rank, threads, handover, level)
                self._processes.append(start_process(options))
        except BaseException:
            self.end()
            raise
        for rank, process in enumerate(self._processes):
            threading.Thread(target=self._watch, args=(rank, process), name="treetop-watch", daemon=True).start()

    def hear(self, patience_s: float) -> list[tuple[int, FromCore]]:
        heard: list[tuple[int, FromCore]] = []
        while self.inbox.poll(0 if heard else int(1000 * patience_s)):
            rank, message = self.inbox.recv_multipart()
            heard.append((int(rank), decode_from_core(message)))
        return heard

    def end(self) -> None:
        """End all processes, remove all files. Any number of times."""
        self._kill()
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        self._context.destroy(linger=0)
        rmtree(self.folder, ignore_errors=True)

    def _kill(self) -> None:
        with self._ending:
            self._over = True
            for process in self._processes:
                with suppress(OSError):
                    process.kill()  # nothing of theirs has to be saved, and one may have been stopped

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """The first to die ends the others, also while nobody asks for anything."""
        code = process.wait()
        with self._ending:
            if self._over or self.died is not None:
                return
            self.died = rank, code
        if code == SAID_WHY:
            time.sleep(2 * _LAST_WORDS_S)  # others may have something to say of it, too
        self._kill()
        rmtree(self.folder, ignore_errors=True)


def start_process(options: RankOptions) -> "subprocess.Popen[bytes]":
    """A rank in a process of its own, which ends with this one."""
    return start_child("treetop.core.ranks.expert_rank", options)


def check_experts(config: EngineConfig) -> None:
    """Raises ConfigError for a model whose experts the ranks cannot share, and for more ranks than GPUs."""
    target = target_spec(resolve_folder(config.model))
    if not target.config.has_experts:
        raise ConfigError(f"--ep-size {config.ep_size}: {config.model} has no experts that ranks could share")
    of_rank(target.params, ALONE, Unmet(config.ep_size))
    if compute_device(config.device).type == "cuda" and torch.cuda.device_count() < config.ep_size:
        raise ConfigError(f"--ep-size {config.ep_size}: this machine shows {torch.cuda.device_count()} GPUs")


def least_loaded(alive: Sequence[int], request: EngineRequest) -> int:
    """The rank that gets a request: the first of those with the fewest. alive: requests of each rank."""
    return min(range(len(alive)), key=alive.__getitem__)


class DispatchCore:
    """The ranks of a group as one core: see `EngineCore`. A request stays with the rank that it was given to.

    choose: (requests of each rank, the request) -> its rank.
    """

    num_launched = num_committed = 0
    stalled = False
    """Steps are the ranks' own; a request that was aborted is forgotten at once."""

    def __init__(
        self, group: ExpertGroup, choose: Callable[[Sequence[int], EngineRequest], int] = least_loaded
    ) -> None:
        self._group, self.choose = group, choose
        self.info = group.info._replace(max_requests=group.size * group.info.max_requests)
        self._rank_of: dict[RequestId, int] = {}
        self._loads = [CoreLoad()] * group.size
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._failure or self._group.failure

    @property
    def busy(self) -> bool:
        return bool(self._rank_of)

    def sockets(self) -> "list[zmq.Socket[bytes]]":
        return [self._group.inbox]

    @property
    def load(self) -> CoreLoad:
        """What the ranks have told last; without a request or a role nobody listens, and nothing is held."""
        told = joined_load(self._loads)
        return told if self.busy or told.handover is not None else CoreLoad(num_retractions=told.num_retractions)

    @property
    def placed(self) -> Mapping[RequestId, int]:
        """The rank of each request that is alive."""
        return self._rank_of

    def add(self, request: EngineRequest, remote: bool = False) -> None:
        """Raises InputError for a prompt that can never run. remote: whoever gets it decides that."""
        assert not remote
        if request.constraint is not None:
            raise InputError("constraints: the engines are other processes; give a structured_output instead")
        check_prompt(request.prompt_ids, self.info.max_context)
        counts = Counter(self._rank_of.values())
        rank = self.choose([counts[rank] for rank in range(self._group.size)], request)
        self._rank_of[request.request_id] = rank
        self._send(rank, Add((request,)))

    def abort(self, request_id: RequestId) -> RequestUpdate | None:
        """Its rank will send the last update."""
        if request_id in self._rank_of:
            self._send(self._rank_of[request_id], Abort((request_id,)))
        return None

    def finish(self, request_id: RequestId, num_tokens: int) -> RequestUpdate | None:
        rank = self._rank_of.pop(request_id, None)
        if rank is None:
            return None
        self._send(rank, Finish(request_id, num_tokens))
        return RequestUpdate(request_id, (), finish_reason="stop")

    def step(self) -> list[RequestUpdate]:
        """What ranks have to say, after a short wait for it. A failure is told in the updates."""
        return self.hear(_STEP_S)

    def hear(self, patience_s: float) -> list[RequestUpdate]:
        """As `step`, after a wait of so many seconds."""
        updates: list[RequestUpdate] = []
        try:
            for rank, word in self._group.receive(patience_s):
                if isinstance(word, Load):
                    self._loads[rank] = word.load
                elif isinstance(word, Updates):
                    updates += [update for update in word.updates if update.request_id in self._rank_of]
        except Exception as error:  # whatever it was, every client must hear of it
            return self.fail(error)
        for update in updates:
            if update.finish_reason is not None:
                del self._rank_of[update.request_id]
        return updates

    def fail(self, error: BaseException) -> list[RequestUpdate]:
        self._failure = self._failure or error
        said = f"the engine failed: {type(error).__name__}: {error}"
        alive, self._rank_of = self._rank_of, {}
        return [RequestUpdate(each, (), None, "abort", said, engine_failed=True) for each in alive]

    def _send(self, rank: int, order: ToCore) -> None:
        with suppress(EngineError):  # the next step says so
            self._group.send(rank, order)


class RolesOfRanks:
    """The ranks' KV connectors, as one. Each has a connector of its own, and chooses what it asks for."""

    asks, stuck, wait_ms = False, None, IDLE_MS

    def __init__(self, core: DispatchCore) -> None:
        self._core, self.refuses = core, core.info.refuses

    @property
    def load(self) -> HandoverLoad | None:
        return self._core.load.handover

    def sockets(self) -> Sequence[Any]:
        return self._core.sockets()

    def poll(self, now: float) -> None:
        """Ranks have things to say also while no client has asked for anything."""
        if not self._core.busy:
            self._core.hear(0)

    def close(self) -> None:
        """The parts end with their ranks."""


def joined_load(loads: Sequence[CoreLoad]) -> CoreLoad:
    """Of all ranks: of the fullest pool, and all else added up."""
    return CoreLoad(
        sum(load.num_running for load in loads),
        sum(load.num_waiting for load in loads),
        max(load.kv_usage for load in loads),
        sum(load.num_retractions for load in loads),
        joined_handover([load.handover for load in loads if load.handover is not None]),
    )


def joined_handover(loads: Sequence[HandoverLoad]) -> HandoverLoad | None:
    """Of all ranks: of the fastest link, and all else added up; None of none."""
    if not loads:
        return None
    added = {name: sum(getattr(load, name) for load in loads) for name in HandoverLoad._fields if name != "role"}
    fastest = {name: max(getattr(load, name) for load in loads) for name in ("read_gbps", "write_gbps")}
    return HandoverLoad(loads[0].role, **{**added, **fastest})
