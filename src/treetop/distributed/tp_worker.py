"""A rank of a worker group but the first: it launches and collects what rank 0 launches, and says how each step ended.

    python -m treetop.distributed.tp_worker      started by `tp_executor.py`; a line of JSON on stdin says what to run

stdin stays open as long as rank 0 lives; its end is the end of this process, whatever it is doing.
"""

import logging
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
import zmq

from treetop.checkpoints.loader import compute_device
from treetop.core.wire import AskChange
from treetop.disaggregation.agent import Connect, RankAgent
from treetop.disaggregation.events import Disconnect, Pull
from treetop.disaggregation.nixl import NixlTransport
from treetop.distributed.log_lines import log_to_stderr
from treetop.distributed.process import EXIT_REPORTED, EXIT_USER_ERROR, Failed, begin, report_failure
from treetop.distributed.rank_groups import RankGroups
from treetop.distributed.tp_wire import (
    Changed,
    Ended,
    FromWorker,
    LaunchStep,
    Moved,
    NextLogits,
    TreeMasksMade,
    WorkerOptions,
    WorkerReady,
    WorkerStarted,
    decode_to_worker,
    encode,
)
from treetop.engine.engine import Engine, InFlightStep
from treetop.engine.kv_staging import staging_of
from treetop.types.changes import Commit
from treetop.types.errors import CheckError, EngineError, InvariantError, UserError
from treetop.types.messages import NodeMasks, RowTree, StepResult

LINGER_MS = 2000
"""For the last words: so long may they be on their way before the rank ends."""
_TICK_MS = 100
"""How often a wait for a plan looks whether collecting has failed."""
_GRACE = 1.25
"""A worker waits longer for the others than rank 0, whose error says more."""


def digest_of(result: StepResult) -> int:
    """A digest of all that a step came to."""
    return zlib.crc32(encode(result))


class TpWorker:
    """Launches on the thread that calls `run`, and collects on another: a step is launched while one before it runs."""

    def __init__(
        self, options: WorkerOptions, context: "zmq.Context[zmq.Socket[bytes]]", report: Callable[[Failed], None]
    ) -> None:
        """report: tells rank 0 why this one ends."""
        self._options, self._report = options, report
        self.why: Failed | None = None
        self._plans, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._plans.connect(f"ipc://{options.folder}/{options.rank}")
        self._outbox.connect(f"ipc://{options.folder}/words")
        self._sending = threading.Lock()
        self._in_flight: SimpleQueue[tuple[int, InFlightStep] | None] = SimpleQueue()
        self._next = 0
        self._agent: RankAgent | None = None
        self._failed = threading.Event()
        self._prepared: Commit | None = None

    def run(self) -> int:
        """Meet the others, start the engine, then follow until something fails, which is told. Returns an exit code."""
        try:
            options = self._options
            device = compute_device(options.config.device)
            self._send(WorkerStarted(options.rank))
            groups = RankGroups(options.config, options.rank, device, options.folder, options.engines)
            self._engine = Engine(options.config, groups.parallel, groups.expert_ranks)
            self._engine.set_tree_masks(self._tree_masks)
            groups.set_deadline(_GRACE * options.config.step_timeout)
            if options.reached:
                staging = staging_of(self._engine)
                self._agent = RankAgent(NixlTransport(staging.memory), staging)
            self._send(WorkerReady(options.rank, b"" if self._agent is None else self._agent.transport.metadata))
            threading.Thread(target=self._collect, name="treetop-collect", daemon=True).start()
            while not self._failed.is_set():
                if self._plans.poll(self._wait_ms):
                    self._follow()
                self._move()
        except Exception as error:  # whatever ends this rank, rank 0 is told
            self._break(error)
        finally:
            self._in_flight.put(None)
            if self._agent is not None:
                self._agent.close()
            self._plans.close(linger=0)
            with self._sending:
                self._outbox.close(LINGER_MS)
        return EXIT_USER_ERROR if self.why is not None and self.why.user_error else EXIT_REPORTED

    def _follow(self) -> None:
        message = decode_to_worker(self._plans.recv())
        match message:
            case NextLogits(ids):
                self._engine.next_logits(ids)
            case Connect() | Disconnect() | Pull():
                assert self._agent is not None
                self._agent.take(message)
            case AskChange(stage="drop"):
                self._prepared = None
                self._engine.drop(message.change)
            case AskChange():
                self._send(self._change(message))
            case TreeMasksMade():
                raise InvariantError("TreeMasksMade received between two steps")
            case _:
                self._launch(message)

    def _change(self, asked: AskChange) -> Changed:
        """A stage of a change. What fails in the last one, rank 0 ends the group for."""
        rank = self._options.rank
        try:
            if asked.stage == "prepare":
                self._prepared = self._engine.prepare(asked.change)
            else:
                assert self._prepared is not None
                commit, self._prepared = self._prepared, None
                commit()
        except Exception as error:  # rank 0 says so to whoever asked
            return Changed(rank, str(error) or type(error).__name__, isinstance(error, UserError))
        return Changed(rank)

    @property
    def _wait_ms(self) -> int:
        if self._agent is None:
            return _TICK_MS
        return self._agent.wait_ms

    def _move(self) -> None:
        """Other workers' transfers go on, and rank 0 hears of this rank's own."""
        if self._agent is not None:
            for number, state in self._agent.moved():
                self._send(Moved(self._options.rank, number, state))

    def _launch(self, message: LaunchStep) -> None:
        """Raises before anything is launched that rank 0 does not launch: no rank waits for what never comes."""
        if message.number != self._next:
            raise InvariantError(
                f"plan {message.number} received, plan {self._next} expected: one was lost or sent twice"
            )
        plan = message.plan()
        bucket = self._engine.bucket_of(plan)
        if bucket != message.bucket:
            raise CheckError(f"step {message.number}: this rank would launch {bucket} rows, rank 0 {message.bucket}")
        self._next += 1
        self._in_flight.put((message.number, self._engine.launch(plan)))

    def _tree_masks(self, _: Sequence[RowTree]) -> Sequence[NodeMasks]:
        """Rank 0's: the constraints are there."""
        while not self._plans.poll(_TICK_MS):
            if self._failed.is_set():
                raise EngineError("rank 0 waits for nobody any more")
        message = decode_to_worker(self._plans.recv())
        if not isinstance(message, TreeMasksMade):
            raise InvariantError(f"{type(message).__name__} received within a step, TreeMasksMade expected")
        return message.masks

    def _collect(self) -> None:
        try:
            while (item := self._in_flight.get()) is not None:
                number, step = item
                self._send(Ended(self._options.rank, number, digest_of(self._engine.collect(step))))
        except Exception as error:  # likewise, from the thread that collects
            self._break(error)
            self._failed.set()

    def _break(self, error: BaseException) -> None:
        if self.why is None:
            self.why = Failed.of(error)
            self._report(self.why)

    def _send(self, message: FromWorker) -> None:
        with self._sending:
            self._outbox.send(encode(message))


def main() -> int:
    options, parent = begin(WorkerOptions, lambda said: said.folder)
    log_to_stderr(logging.WARNING, "%(message)s", f"rank {options.rank}: ")
    torch.set_num_threads(options.threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        code = TpWorker(options, context, report_failure).run()
    finally:
        context.destroy(linger=LINGER_MS)
    parent.join(LINGER_MS / 1000)  # if rank 0 is gone, the folder is to go too
    return code


if __name__ == "__main__":
    sys.exit(main())
