"""The real API over a core that says what a test wants, so that official clients meet outputs of every format."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import uvicorn

from support.serving import TOKENIZER
from support.threads import joined
from support.waiting import until
from treetop.api.api_state import ApiState
from treetop.api.app import make_app
from treetop.checkpoints.folder import resolve_folder
from treetop.distributed.in_flight import InFlightCounter
from treetop.serve_options import ServeOptions
from treetop.types.ids import RequestId
from treetop.types.layout import SpecShape
from treetop.types.requests import CoreInfo, CoreLoad, RequestUpdate

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


class ScriptedClient:
    """An `EngineClient` whose outputs are texts that follow from the prompts', in updates of one to five tokens.

    can_constrain: see `scripted`.
    fails: the error that each request ends with.
    pace_s: between two updates.
    widths: the fewest and the most tokens of an update.
    """

    failure = pause = None
    is_stalled, num_restarts = False, 0

    def __init__(self, reply: Callable[[str], str], can_constrain: bool = False, context: int = 16384) -> None:
        self.reply, self.prompts, self.params, self.asked = reply, [], [], []
        folder, vocab_size = str(resolve_folder("builtin:nestling")), TOKENIZER.vocab_size
        own = {"can_constrain": can_constrain, "can_change_logits": can_constrain}
        self.info = CoreInfo(folder, vocab_size, context, 64, SpecShape(1, 1, 2), **own)
        self.fails: str | None = None
        self.pace_s = 0.0
        self.widths = (1, 5)
        self.running: dict[RequestId, asyncio.Task] = {}
        self._ids, self._random = count(), random.Random(0)

    @property
    def load(self) -> CoreLoad:
        return CoreLoad(num_running=len(self.running))

    async def until_failed(self) -> None:
        await asyncio.Event().wait()

    def next_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def add(self, requests, sink) -> None:
        for each in requests:
            self.running[each.request_id] = asyncio.ensure_future(self._run(each, sink))

    async def _run(self, asked, sink) -> None:
        prompt = TOKENIZER.decode(list(asked.prompt_ids), special=True)
        self.prompts.append(prompt)
        self.params.append(asked.params)
        self.asked.append(asked)
        ids = TOKENIZER.encode(self.reply(prompt), special=False)
        reason = "stop" if len(ids) <= asked.params.max_tokens else "length"
        ids = ids[: asked.params.max_tokens]
        start = 0
        if self.fails is not None:
            ids, reason = (), "abort"
        while start < len(ids):
            size = self._random.randint(*self.widths)
            await asyncio.sleep(self.pace_s)
            sink(RequestUpdate(asked.request_id, tuple(ids[start : start + size]), start=start))
            start += size
        sink(RequestUpdate(asked.request_id, (), finish_reason=reason, error=self.fails, start=len(ids)))
        self.running.pop(asked.request_id, None)

    def abort(self, request_ids) -> None:
        for request_id in request_ids:
            task = self.running.pop(request_id, None)
            if task is not None:
                task.cancel()

    def finish(self, request_id, num_tokens) -> None:
        self.abort([request_id])

    def close(self) -> None:
        self.abort([*self.running])


@contextmanager
def scripted(
    reply: Callable[[str], str], can_constrain: bool = False, context: int = 16384, **options
) -> Iterator[tuple[str, ScriptedClient]]:
    """The address of a server on a thread of this process, and its core.

    can_constrain: structures are asked for and checked; the texts are what they are.
    """
    core = ScriptedClient(reply, can_constrain, context)
    chosen = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "reasoning_parser": "qwen3", **options}
    api = ApiState(core, ServeOptions(**chosen), "scripted", 0, InFlightCounter())
    app = make_app(api)
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", http="h11")
    server = uvicorn.Server(config)

    async def run() -> None:
        if api.options.batch_dir is not None:
            await app.state.batches.resume()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", core
    finally:
        server.should_exit = True
        joined([thread])
        api.close()
