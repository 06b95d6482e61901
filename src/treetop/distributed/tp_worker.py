"""A rank of a worker group but the first: it launches and collects what rank 0 launches, and says how each step ended.

    python -m treetop.distributed.tp_worker      started by `tp_executor.py`; a line of JSON on stdin says what to run

stdin stays open as long as rank 0 lives; its end is the end of this process, whatever it is doing.
"""

import logging
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import torch
import zmq

from treetop.disaggregation.agent import Connect, RankAgent
from treetop.disaggregation.events import Disconnect, Pull
from treetop.disaggregation.nixl import NixlTransport
from treetop.distributed.process import SAID_USER_ERROR, SAID_WHY, Failed, begin, say_why
from treetop.distributed.tp_wire import (
    Ended,
    FromWorker,
    Here,
    Launch,
    Moved,
    NextLogits,
    Up,
    WorkerOptions,
    decode_to_worker,
    encode,
)
from treetop.engine.engine import Engine, InFlightStep
from treetop.engine.kv_staging import staging_of
from treetop.models.loader import compute_device
from treetop.parallel.exchange import Group, Meeting
from treetop.types.errors import CheckError, InvariantError
from treetop.types.messages import StepResult

LINGER_MS = 2000
"""For the last words: so long may they be on their way before the rank ends."""
_TICK_MS = 100
"""How often a wait for a plan looks whether collecting has failed."""
_GRACE = 1.25
"""A worker waits longer for the others than rank 0, whose error says more."""


def meeting_of(folder: str, rank: int, size: int) -> Meeting:
    return Meeting(Path(folder) / "meeting", rank, size)


def digest_of(result: StepResult) -> int:
    """A digest of all that a step came to."""
    return zlib.crc32(encode(result))


class TpWorker:
    """Launches on the thread that calls `run`, and collects on another: a step is launched while one before it runs."""

    def __init__(
        self, options: WorkerOptions, context: "zmq.Context[zmq.Socket[bytes]]", say: Callable[[Failed], None]
    ) -> None:
        """say: tells rank 0 why this one ends."""
        self._options, self._tell = options, say
        self.why: Failed | None = None
        self._plans, self._words = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._plans.connect(f"ipc://{options.folder}/{options.rank}")
        self._words.connect(f"ipc://{options.folder}/words")
        self._speaking = threading.Lock()
        self._in_flight: SimpleQueue[tuple[int, InFlightStep] | None] = SimpleQueue()
        self._next = 0
        self._agent: RankAgent | None = None
        self._failed = threading.Event()

    def run(self) -> int:
        """Meet the others, start the engine, then follow until something fails, which is told. Returns an exit code."""
        try:
            options = self._options
            device = compute_device(options.config.device)
            if device.type == "cuda":
                torch.cuda.set_device(options.rank)
            self._say(Here(options.rank))
            config = options.config
            meeting = meeting_of(options.folder, options.rank, config.tp_size)
            group = Group(meeting, device, not config.disable_custom_all_reduce)
            self._engine = Engine(options.config, group.parallel)
            group.set_deadline(_GRACE * options.config.step_timeout)
            if options.reached:
                staging = staging_of(self._engine)
                self._agent = RankAgent(NixlTransport(staging.memory), staging)
            self._say(Up(options.rank, b"" if self._agent is None else self._agent.transport.metadata))
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
            with self._speaking:
                self._words.close(LINGER_MS)
        return SAID_USER_ERROR if self.why is not None and self.why.user_error else SAID_WHY

    def _follow(self) -> None:
        message = decode_to_worker(self._plans.recv())
        match message:
            case NextLogits(ids):
                self._engine.next_logits(ids)
            case Connect() | Disconnect() | Pull():
                assert self._agent is not None
                self._agent.take(message)
            case _:
                self._launch(message)

    @property
    def _wait_ms(self) -> int:
        if self._agent is None:
            return _TICK_MS
        return self._agent.wait_ms

    def _move(self) -> None:
        """Other workers' transfers go on, and rank 0 hears of this rank's own."""
        if self._agent is not None:
            for number, state in self._agent.moved():
                self._say(Moved(self._options.rank, number, state))

    def _launch(self, message: Launch) -> None:
        """Raises before anything is launched that rank 0 does not launch: no rank waits for what never comes."""
        if message.number != self._next:
            raise InvariantError(
                f"plan {message.number} came where plan {self._next} was due: one was lost or came twice"
            )
        bucket = self._engine.bucket_of(message.plan)
        if bucket != message.bucket:
            raise CheckError(f"step {message.number}: this rank would launch {bucket} rows, rank 0 {message.bucket}")
        self._next += 1
        self._in_flight.put((message.number, self._engine.launch(message.plan)))

    def _collect(self) -> None:
        try:
            while (item := self._in_flight.get()) is not None:
                number, step = item
                self._say(Ended(self._options.rank, number, digest_of(self._engine.collect(step))))
        except Exception as error:  # likewise, from the thread that collects
            self._break(error)
            self._failed.set()

    def _break(self, error: BaseException) -> None:
        if self.why is None:
            self.why = Failed.of(error)
            self._tell(self.why)

    def _say(self, word: FromWorker) -> None:
        with self._speaking:
            self._words.send(encode(word))


def main() -> int:
    options, parent = begin(WorkerOptions, lambda said: said.folder)
    logging.basicConfig(level=logging.WARNING, format=f"rank {options.rank}: %(message)s", stream=sys.stderr)
    torch.set_num_threads(options.threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        code = TpWorker(options, context, say_why).run()
    finally:
        context.destroy(linger=LINGER_MS)
    parent.join(LINGER_MS / 1000)  # if rank 0 is gone, the folder is to go too
    return code


if __name__ == "__main__":
    sys.exit(main())
