"""A rank of a group that shares experts: an engine core like any other, whose steps are in lockstep with the others'.

    python -m treetop.core.ranks.expert_rank     started by `expert_group.py`; a line of JSON on stdin says what to run

stdin stays open as long as the parent lives; its end is the end of this process, whatever it is doing.
"""

import logging
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from treetop.core.child import begin
from treetop.core.engine_core import STALLED_S
from treetop.core.local_core import core_of, info_of
from treetop.core.loop import CoreLoop
from treetop.core.ranks.lockstep import Agreement, Lockstep
from treetop.core.wire import Abort, Add, Failed, Finish, FromCore, Load, Ready, ToCore, Updates, decode_to_core, encode
from treetop.disaggregation.connector import open_connector
from treetop.disaggregation.nixl import NixlTransport
from treetop.disaggregation.options import NULL, DisaggregationOptions
from treetop.engine.engine import Engine
from treetop.engine.kv_staging import staging_of
from treetop.models.loader import compute_device
from treetop.parallel.exchange import Group, Meeting
from treetop.types.config import EngineConfig
from treetop.types.errors import EngineError, TreetopError, UserError
from treetop.types.requests import CoreLoad, RequestUpdate

_LOAD_S = 0.25
"""Seconds between two words about the load while requests are served, at least."""
_LINGER_MS = 2000
"""For the last words."""
_TICK_S = 0.1
SAID_WHY = 1
"""Exit code of a rank that has told what failed."""
_GRACE = 1.5
"""A wait for others ends by itself, and says for whom; only after so many times the limit does the guard speak."""


class RankOptions(msgspec.Struct, frozen=True):
    """What a rank is told on stdin. folder: where the group meets, of its owner alone. threads: of PyTorch.

    handover: the group's options. log_level: what rank 0 says speaks for all, of the others only warnings are shown.
    """

    folder: str
    config: EngineConfig
    rank: int
    threads: int
    handover: DisaggregationOptions = NULL
    log_level: int = logging.WARNING


class ExpertRank:
    """Serves the requests that it is sent. ended: set from any thread, for it to end before its next step."""

    def __init__(self, options: RankOptions, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._options, self._context = options, context
        self._orders, self._words = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._orders.rcvhwm = self._words.sndhwm = 0
        self._orders.connect(f"ipc://{options.folder}/orders-{options.rank}")
        self._words.connect(f"ipc://{options.folder}/words")
        self._speaking = threading.Lock()
        self._told, self._told_s = CoreLoad(), 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Meet the others, start the engine, then serve until something fails, which is told."""
        group = agreement = engine = role = None
        try:
            rank, config = self._options.rank, self._options.config
            device = compute_device(config.device)
            if device.type == "cuda":
                torch.cuda.set_device(rank)
            group = Group(Meeting(Path(self._options.folder) / "meeting", rank, config.ep_size), device)
            engine = Engine(config, expert_ranks=group.parallel)
            group.set_deadline(config.step_timeout)
            agreement = Agreement(self._options.folder, rank, config.ep_size, self._context)
            lockstep = Lockstep(engine, agreement, config.step_timeout)
            threading.Thread(target=self._guard, args=(lockstep,), name="treetop-guard", daemon=True).start()
            core, info = core_of(lockstep, engine), info_of(engine)
            if self._options.handover.mode != "null":
                mine = self._options.handover.of_rank(rank)
                role = open_connector(core.scheduler, staging_of(engine), mine, NixlTransport)
                info = info._replace(refuses=role.refuses)
            self._say(Ready(info))
            self._serve(CoreLoop(core, role), lockstep, agreement)
        except Exception as error:  # whatever ends this rank, the others are told
            reason = str(error) if isinstance(error, TreetopError) else f"{type(error).__name__}: {error}"
            with suppress(zmq.ZMQError):  # the parent has ended the group
                self._say(Failed(reason, isinstance(error, UserError)))
        finally:
            self.ended.set()
            if role is not None:
                role.close()
            if engine is not None:
                engine.release()
            if group is not None:
                group.close()
            if agreement is not None:
                agreement.close()
            self._orders.close(linger=0)
            with self._speaking:
                self._words.close(_LINGER_MS)

    def _serve(self, loop: CoreLoop, lockstep: Lockstep[Any], agreement: Agreement) -> None:
        """A step at a time: of its own requests, or of the others'; it sleeps while there is neither."""
        core, role = loop.core, loop.role
        while not self.ended.is_set():
            while self._orders.poll(0):
                self._apply(loop, decode_to_core(self._orders.recv()))
            if role is not None:  # before the step, which does what the role tells the scheduler
                role.poll(time.monotonic())
            if core.busy:
                loop.step()
            if not core.busy or core.stalled:
                if lockstep.called():
                    lockstep.rest()
                else:
                    self._sleep(loop, agreement)
            self._tell_load(loop)
            if core.failure is not None:
                raise core.failure

    def _sleep(self, loop: CoreLoop, agreement: Agreement) -> None:
        """Until there is something to do, which nothing may be known of for a while.

        Raises EngineError if the rank has to be started anew, while nobody has anything for the group to do.
        """
        role, wait_ms = loop.role, int(1000 * (STALLED_S if loop.core.busy else _LOAD_S))
        sockets = [self._orders, agreement.inbox]
        if role is not None:
            if role.stuck is not None and not loop.core.busy:
                raise EngineError(role.stuck)
            wait_ms = min(wait_ms, role.wait_ms)
            sockets += role.sockets()
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        poller.poll(wait_ms)

    def _apply(self, loop: CoreLoop, order: ToCore) -> None:
        match order:
            case Add(requests):
                loop.add(requests, self._tell)
            case Abort(request_ids):
                loop.abort(request_ids)
            case Finish(request_id, num_tokens):
                loop.finish(request_id, num_tokens)

    def _tell(self, updates: list[RequestUpdate]) -> None:
        if not any(update.engine_failed for update in updates):  # which the end of the group will say
            self._say(Updates(tuple(updates)))

    def _tell_load(self, loop: CoreLoop) -> None:
        now = time.monotonic()
        if loop.core.busy and now - self._told_s < _LOAD_S:
            return
        self._told_s, load = now, loop.load
        if load != self._told:
            self._told = load
            self._say(Load(load))

    def _guard(self, lockstep: Lockstep[Any]) -> None:
        """On a thread of its own: the rank may wait where nothing reaches it, such as for its device."""
        timeout_s = self._options.config.step_timeout
        while not self.ended.wait(_TICK_S):
            since = lockstep.waiting_since
            if since is not None and time.monotonic() - since > _GRACE * timeout_s:
                late = f"a step did not end in {timeout_s:g} s; raise --step-timeout if it needs longer"
                with suppress(zmq.ZMQError):
                    self._say(Failed(late, False))  # the parent ends all ranks
                return

    def _say(self, word: FromCore) -> None:
        with self._speaking:
            self._words.send_multipart([str(self._options.rank).encode(), encode(word)])


def main() -> int:
    options, parent = begin(RankOptions, lambda said: said.folder)
    logging.basicConfig(level=options.log_level, format=f"rank {options.rank}: %(message)s", stream=sys.stderr)
    torch.set_num_threads(options.threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ExpertRank(options, context).run()
    finally:
        context.destroy(linger=_LINGER_MS)
    parent.join(_LINGER_MS / 1000)  # if the parent is gone, the folder is to go too
    return SAID_WHY


if __name__ == "__main__":
    sys.exit(main())
