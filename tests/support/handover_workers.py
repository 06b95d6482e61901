"""Engine processes with roles, as `treetop serve` starts them, and a client of one of them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import msgspec
import zmq

from support.nixl_peer import OVER_TCP
from support.waiting import WAIT_S
from support.warm import Popen
from treetop.core.wire import AddRequests, ClientHello, Load, ProcessOptions, Ready, Updates, decode_from_core, encode
from treetop.distributed.process import Failed
from treetop.types.config import EngineConfig
from treetop.types.ids import RequestId
from treetop.types.kv_transfer.options import SECRET_VARIABLE, DisaggregationOptions
from treetop.types.requests import CoreLoad, EngineRequest, KVTransferStats, RequestUpdate
from treetop.types.sampling import SamplingParams

SECRET = "a secret of the tests"
_NUMBERS = count()


class WorkerProcess:
    """One engine process. load: its last word. ended: last updates, and tokens, accepted lengths of each request."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        disaggregation: DisaggregationOptions,
        secret: str = SECRET,
        gpu: int | None = None,
        start: type[subprocess.Popen[bytes]] = Popen,
    ) -> None:
        """start: `subprocess.Popen` for a worker that imports everything itself."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{folder}/{next(_NUMBERS)}"
        over = {"UCX_TLS": OVER_TCP} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        environment = {**os.environ, SECRET_VARIABLE: secret, **over}
        command = [sys.executable, "-P", "-m", "treetop.distributed.engine_process"]
        pipe = subprocess.PIPE
        self.process = start(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
        assert self.process.stdin is not None
        options = ProcessOptions(address, config, None, 30, disaggregation)
        self.process.stdin.write(msgspec.json.encode(options) + b"\n")
        self.process.stdin.flush()
        self._socket = self.context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._socket.send(encode(ClientHello()))
        self.load = CoreLoad()
        self._failed: str | None = None
        self.info: object = None
        self.tokens: dict[RequestId, list[int]] = {}
        self.accept_lens: dict[RequestId, list[int]] = {}
        self.last: dict[RequestId, RequestUpdate] = {}
        self.first_s: dict[RequestId, float] = {}

    def up(self) -> "WorkerProcess":
        self.until(lambda: self.info is not None or self.failed is not None)
        assert self.failed is None, self.failed
        return self

    @property
    def failed(self) -> str | None:
        """Why it has ended, as it has said itself."""
        if self._failed is None and self.process.poll() is not None:
            assert self.process.stdout is not None
            for line in self.process.stdout.read().splitlines():
                self._failed = msgspec.json.decode(line, type=Failed).reason
        return self._failed

    @property
    def kv_transfer(self) -> KVTransferStats:
        return self.load.kv_transfer or KVTransferStats("none")

    def ask(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestId]:
        ids = [RequestId(next(_NUMBERS)) for _ in prompts]
        asked = zip(ids, prompts, params, strict=True)
        requests = tuple(EngineRequest(i, tuple(prompt), each, each.seed or 0) for i, prompt, each in asked)
        for request_id in ids:
            self.tokens[request_id], self.accept_lens[request_id] = [], []
        self._socket.send(encode(AddRequests(requests)))
        return ids

    def read(self, patience_ms: int = 0) -> None:
        while self._socket.poll(patience_ms):
            self._take(self._socket.recv())
            patience_ms = 0

    def until(self, true: Callable[[], bool], seconds: float = WAIT_S) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, (self.load, self.failed, self.last)
            assert self.failed is None, self.failed
            self.read(20)

    def wait(self, ids: Sequence[RequestId], seconds: float = WAIT_S) -> list[tuple[tuple[int, ...], list[int]]]:
        """Until these have ended well. Returns tokens and accepted lengths."""
        self.until(lambda: self.have_ended(ids), seconds)
        assert all(self.last[each].error is None for each in ids), [self.last[each] for each in ids]
        return [(tuple(self.tokens[each]), self.accept_lens[each]) for each in ids]

    def have_ended(self, ids: Sequence[RequestId]) -> bool:
        return all(each in self.last for each in ids)

    def close(self) -> str:
        """What it has said on stderr."""
        self.process.kill()
        _, said = self.process.communicate()
        self.context.destroy(linger=0)
        return said.decode()

    def _take(self, message: bytes) -> None:
        match decode_from_core(message):
            case Ready(info):
                self.info = info
            case Load(load):
                self.load = load
            case Updates(updates):
                for update in updates:
                    self._update(update)

    def _update(self, update: RequestUpdate) -> None:
        if update.request_id not in self.tokens:
            return
        self.tokens[update.request_id] += update.new_ids
        if update.new_ids:
            self.first_s.setdefault(update.request_id, time.monotonic())
        if update.accept_len is not None:
            self.accept_lens[update.request_id].append(update.accept_len)
        if update.finish_reason is not None:
            self.last[update.request_id] = update
