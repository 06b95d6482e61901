"""Streams that write to a connection: a write a step, nothing to a client that is slow, and the bytes of each event."""

import asyncio
import json

from treetop.api.completions import Completion, CompletionRequest
from treetop.api.events import WRITER, EventStream, EventTemplate, event
from treetop.async_llm import AsyncLLM
from treetop.checkpoints.folder import resolve_folder
from treetop.types.ids import RequestId
from treetop.types.layout import PLAIN
from treetop.types.requests import CoreInfo, RequestUpdate
from treetop.types.sampling import SamplingParams

INFO = CoreInfo("", 512, 256, 4, PLAIN)


class Core:
    """Updates come when the test says so."""

    failure = None

    def __init__(self):
        self.info = INFO._replace(model_path=str(resolve_folder("builtin:nestling")))
        self.asked, self.sink = 0, None

    def next_id(self):
        self.asked += 1
        return RequestId(self.asked - 1)

    def add(self, requests, sink):
        self.sink = sink

    def abort(self, request_ids):
        pass

    def finish(self, request_id, num_tokens):
        pass


class Writer:
    """A connection that keeps what it is given."""

    def __init__(self):
        self.written, self.is_paused, self.resumed = [], False, None

    def write_body(self, data):
        if data:
            self.written.append(data)


class Metrics:
    def of(self, outputs):
        return None


class Api:
    names, system_fingerprint, metrics = ("model",), "of-a-test", Metrics()

    def __init__(self, llm):
        self.llm = llm


class Told:
    """A stream of two choices, its writer, and what went through the web server."""

    def __init__(self):
        self.core, self.writer, self.sent = Core(), Writer(), []
        llm = AsyncLLM.of(self.core)
        body = CompletionRequest(prompt="a", n=2, stream=True)
        deltas = llm.queue([[5]] * 2, [SamplingParams(max_tokens=99)] * 2)
        self.decode = llm.reader.tokenizer.decode
        self.ids = llm.reader.tokenizer.encode("def area(r): return r * r", special=False)
        answer = Completion(Api(llm), body, [[5]], [""], deltas)
        stream = EventStream(deltas, answer)
        self.task = asyncio.ensure_future(
            stream({"path": "/v1/completions", "state": {WRITER: self.writer}}, self._receive, self._send)
        )

    async def _receive(self):
        await asyncio.Event().wait()

    async def _send(self, message):
        self.sent.append(message)

    async def step(self, *updates):
        """What a step gives, and turns of the loop for all that it sets going."""
        for update in updates:
            self.core.sink(update)
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self):
        await self.task
        return self.sent[-1]["body"]


def update(choice, *ids, **more):
    return RequestUpdate(RequestId(choice), ids, None, **more)


def texts(data):
    """Choice and text of each event."""
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    return [(each["choices"][0]["index"], each["choices"][0]["text"]) for each in events if "choices" in each]


def run(scene):
    asyncio.run(asyncio.wait_for(scene(), 60))


def test_all_that_a_step_gives_a_connection_is_one_write():
    async def scene():
        told = Told()
        await told.step()
        await told.step(update(0, *told.ids[:2]), update(1, told.ids[0]))
        await told.step(update(1, told.ids[1]))
        first, second = told.writer.written
        assert [index for index, _ in texts(first)] == [0, 1]
        assert [index for index, _ in texts(second)] == [1]
        await told.step(update(0, *told.ids[2:3], finish_reason="length"), update(1, finish_reason="length"))
        assert (await told.end()).endswith(b"data: [DONE]\n\n")

    run(scene)


def test_a_client_that_is_slow_gets_nothing_until_it_has_read_and_then_all_at_once():
    async def scene():
        told = Told()
        await told.step()
        told.writer.is_paused = True
        for token in told.ids:
            await told.step(update(0, token))
        assert told.writer.written == []
        told.writer.is_paused = False
        told.writer.resumed()
        (written,) = told.writer.written
        assert texts(written) == [(0, told.decode(told.ids))]
        told.task.cancel()

    run(scene)


def test_what_others_got_is_written_before_the_one_that_failed():
    """The error is the stream's last event, and nothing more is written."""

    async def scene():
        told = Told()
        await told.step()
        await told.step(update(0, told.ids[0]), update(1, told.ids[0], finish_reason="abort", error="broken"))
        last = await told.end()
        assert [index for index, _ in texts(told.writer.written[0])] == [0]
        assert b"the request failed: broken" in last
        assert told.writer.resumed is None

    run(scene)


def test_an_engine_that_fails_ends_the_stream_with_its_error():
    async def scene():
        told = Told()
        await told.step()
        await told.step(update(0, told.ids[0]), update(1, error="it is gone", engine_failed=True))
        assert b"it is gone" in await told.end()
        assert len(told.writer.written) == 1

    run(scene)


def test_an_event_by_a_template_is_the_event():
    """Any text and any name, also such as look like the hole."""
    for name in ("m", '\0","x":"', "\\u0000"):
        for text in ("a", "", '"\\\n\0', "\u00e9\u4e2d\U0001f600", EventTemplate.HOLE):
            written = [event({"model": name, "text": each, "end": None}) for each in (EventTemplate.HOLE, text)]
            assert EventTemplate(written[0]).event(text) == written[1]
