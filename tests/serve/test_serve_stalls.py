"""Whatever the body of one request holds, the event loop that serves all others is soon free again.

A hold is processor time that the loop's thread takes between two of its turns, so a busy machine does not lengthen it;
but a virtual one may count time in which it stood still. A body that holds the loop does so each time.
"""

import asyncio
import gc
import json
import os
import signal
import threading
import time
import tracemalloc

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from support.grids import few_of
from support.serving import TEMPLATE, TOKENIZER
from support.waiting import WAIT_S
from treetop.api.api_state import ApiState
from treetop.api.app import make_app
from treetop.api.limits import MAX_CHAT_VALUES, MAX_MESSAGES, MAX_OBJECTS, MAX_VALUES, BodyMeter
from treetop.checkpoints.folder import resolve_folder
from treetop.core.clients import InProcessClient
from treetop.core.loop import CoreThread
from treetop.core.mock import make_mock
from treetop.core.wire import MockOptions
from treetop.distributed.in_flight import InFlightCounter
from treetop.serve_options import ServeOptions
from treetop.text.chat_template import ChatTemplate
from treetop.text.prompts import PromptReader
from treetop.text.size_class_pools import SizeClassPools
from treetop.types.config import BUILTIN_MODEL, EngineConfig
from treetop.types.layout import PLAIN
from treetop.types.requests import CoreInfo
from treetop.types.sampling import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MAX_HELD = 50
"""In what a million nulls take to be read beside it: 0.01 s on a quiet core, where a hold is below 0.2 s. Before, of
these bodies: up to 50 s.
"""
HI = {"role": "user", "content": "hi"}
LARGE = 16 * 2**20 - 100


def unit_s() -> float:
    """The processor time that a million nulls take to be read, here and now."""
    nulls, began = b"[" + b"null," * 999_999 + b"null]", time.thread_time()
    json.loads(nulls)
    return time.thread_time() - began


class Held:
    """The longest hold of the loop so far. Takes turns with everything else in it."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            self.longest_s, before = max(self.longest_s, now - before), now


@pytest.fixture(scope="module")
def answer():
    """answer(path, body) -> (response, the longest hold in `unit_s`), of the API over a mock engine in this process."""
    options = ServeOptions(chat_template=TEMPLATE)
    config = EngineConfig.of(None, context_length=2048)

    async def asked(path: str, body: bytes) -> tuple[httpx.Response, float]:
        core, info = make_mock(config, MockOptions(tuple(range(40, 90)), 0.0, 4, 4))
        local = InProcessClient(CoreThread(core), info)
        api, held = ApiState(local, options, "builtin:nestling", 0, InFlightCounter()), Held()
        headers = {"Content-Type": "application/json"}
        transport = httpx.ASGITransport(make_app(api))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})  # what is made once is made
            watch = asyncio.create_task(held.watch())
            await asyncio.sleep(0.01)
            response = await client.post(path, content=body, headers=headers)
            await asyncio.sleep(0.01)
            watch.cancel()
        api.close()
        local.close()
        return response, held.longest_s / unit_s()

    gc.collect()
    gc.freeze()  # as `serve` does
    yield lambda path, body: asyncio.run(asked(path, body))
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as `conftest.py` had done


def holds(answer, path: str, body: bytes, held: float) -> bool:
    """Whether the loop is held too long each time. held: how long it was the first time."""
    return held >= MAX_HELD and all(answer(path, body)[1] >= MAX_HELD for _ in range(2))


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def prompt_of(value: bytes, rest: bytes = b"") -> bytes:
    return b'{"max_tokens": 1, "prompt": ' + value + rest + b"}"


def messages_of(content: bytes, rest: bytes = b"") -> bytes:
    return b'{"max_tokens": 1, "messages": [{"role": "user", "content": ' + content + b"}]" + rest + b"}"


def as_text(value: bytes) -> bytes:
    """As JSON's text of JSON."""
    return b'"' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def call_of(value: bytes, text: bool = True) -> bytes:
    """An assistant's message with a call, whose arguments are a text, or an object."""
    said = b'{"a": ' + value + b"}"
    said = as_text(said) if text else said
    return (
        b'{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '
        + said
        + b"}}]}"
    )


def many_fields() -> bytes:
    return b",".join(b'"k%d": 1' % i for i in range(120_000))


ESCAPES = b'"' + b"\\u0061" * (LARGE // 7 - 99) + b'"'
HOSTILE = {
    "nulls": (COMPLETIONS, lambda: prompt_of(listed(b"null", 500_000)), 400, "prompt[0]: Input should be"),
    "lists of nulls": (
        COMPLETIONS,
        lambda: prompt_of(listed(listed(b"null", 500), 1000)),
        400,
        "prompt[0][0]: Input should be",
    ),
    "texts, then nulls": (
        COMPLETIONS,
        lambda: prompt_of(b'["a",' + listed(b"null", 500_000)[1:]),
        400,
        "prompt[1]: Input",
    ),
    "unknown fields": (COMPLETIONS, lambda: prompt_of(b'"a",' + many_fields()), 400, "too many fields"),
    "unknown fields inside": (
        COMPLETIONS,
        lambda: prompt_of(b'"a", "stream": true, "stream_options": {' + many_fields() + b"}"),
        400,
        "stream_options: too many fields",
    ),
    "stop ids": (
        COMPLETIONS,
        lambda: prompt_of(b'"a", "n": 128, "stop_token_ids": ' + listed(b"5", 60_000)),
        400,
        "stop_",
    ),
    "allowed ids": (
        COMPLETIONS,
        lambda: prompt_of(b'"a", "allowed_token_ids": ' + listed(b"5", 10**6)),
        400,
        "allowed_",
    ),
    "allowed ids of all choices": (
        COMPLETIONS,
        lambda: prompt_of(b'"a", "n": 128, "allowed_token_ids": ' + listed(b"5", 200_000)),
        400,
        "n: 25600128 ids in one request",
    ),
    "biases": (
        COMPLETIONS,
        lambda: prompt_of(b'"a", "logit_bias": {' + b",".join(b'"%d": null' % i for i in range(60_000)) + b"}"),
        400,
        "logit_bias: too many fields",
    ),
    "stops": (COMPLETIONS, lambda: prompt_of(b'"a", "stop": ' + listed(b"5", 500_000)), 400, "stop: "),
    "choices": (
        COMPLETIONS,
        lambda: prompt_of(b'"a", "n": 128, "guided_choice": ' + listed(b"1", 500_000)),
        400,
        "guided",
    ),
    "ids": (COMPLETIONS, lambda: prompt_of(listed(b"5", MAX_VALUES - 9)), 400, "--context-length"),
    "lists of ids": (COMPLETIONS, lambda: prompt_of(listed(b"[5]", 120_000)), 400, "--max-queued-requests"),
    "texts": (COMPLETIONS, lambda: prompt_of(listed(b'"a"', 120_000)), 400, "--max-queued-requests"),
    "ids of many prompts": (
        COMPLETIONS,
        lambda: prompt_of(listed(listed(b"5", 2000), 1000), b', "echo": true'),
        200,
        "",
    ),
    "many choices of many prompts": (COMPLETIONS, lambda: prompt_of(listed(b'"a"', 32), b', "n": 128'), 200, ""),
    "a long text": (COMPLETIONS, lambda: prompt_of(b'"' + b"a b " * (LARGE // 4) + b'"'), 400, "--context-length"),
    "escapes": (COMPLETIONS, lambda: prompt_of(b'"' + b"\\u0061" * (LARGE // 6) + b'"'), 400, "--context-length"),
    "empty lists": (COMPLETIONS, lambda: prompt_of(listed(b"[]", 5_000_000)), 400, "texts, lists and objects"),
    "short texts": (COMPLETIONS, lambda: prompt_of(listed(b'"ab"', 3_000_000)), 400, "texts, lists and objects"),
    "numbers": (COMPLETIONS, lambda: prompt_of(listed(b"1.5", 4_000_000)), 400, "values"),
    "long numbers": (COMPLETIONS, lambda: prompt_of(listed(b"9" * 4000, 4000)), 400, "prompt"),
    "depth": (COMPLETIONS, lambda: b"[" * LARGE, 400, "texts, lists and objects"),
    "quotes": (COMPLETIONS, lambda: b'"' * LARGE, 400, "texts, lists and objects"),
    "messages": (CHAT, lambda: b'{"messages": ' + listed(json.dumps(HI).encode(), 20_000) + b"}", 400, "messages: "),
    "wrong messages": (
        CHAT,
        lambda: b'{"messages": ' + listed(b'{"role": null, "x": [1]}', 20_000) + b"}",
        400,
        "messages",
    ),
    "parts": (
        CHAT,
        lambda: b'{"messages": [{"role": "user", "content": ' + listed(b'{"type": "text", "text": 5}', 20_000) + b"}]}",
        400,
        "messages",
    ),
    "items": (RESPONSES, lambda: b'{"input": ' + listed(json.dumps(HI).encode(), 20_000) + b"}", 400, "input: "),
    "wrong items": (
        RESPONSES,
        lambda: b'{"input": ' + listed(b'{"type": "reasoning", "content": 3}', 20_000) + b"}",
        400,
        "input",
    ),
    "as many items as there may be": (
        RESPONSES,
        lambda: b'{"input": ' + listed(json.dumps(HI).encode(), MAX_MESSAGES) + b"}",
        400,
        "--context-length",
    ),
    "wrong blocks": (MESSAGES, lambda: messages_of(listed(b'{"type": "text", "text": 5}', 20_000)), 400, "messages"),
    "many blocks": (
        MESSAGES,
        lambda: messages_of(listed(b'{"type": "text", "text": "ab cd"}', 1024)),
        400,
        "--context-length",
    ),
    "members of a call": (
        MESSAGES,
        lambda: messages_of(b'[{"type": "tool_use", "id": "a", "name": "f", "input": {' + many_fields() + b"}}]"),
        400,
        "too many fields",
    ),
    "wrong tools": (
        MESSAGES,
        lambda: messages_of(b'"a"', b', "tools": ' + listed(b'{"name": 3}', 20_000)),
        400,
        "tools[0].name: ",
    ),
    "a large tool": (
        CHAT,
        lambda: (
            b'{"tool_choice": "required", "messages": [{"role": "user", "content": "a"}], "tools": [{"type":'
            b' "function", "function": {"name": "f", "parameters": {' + many_fields() + b"}}}]}"
        ),
        400,
        "tools: the chat template shows none",
    ),
    "calls of a message": (
        CHAT,
        lambda: (
            b'{"messages": [{"role": "assistant", "tool_calls": '
            + listed(b'{"function": {"name": "f"}}', 20_000)
            + b"}]}"
        ),
        400,
        "messages[0].tool_calls: List should have at most",
    ),
    "ids to text": ("/detokenize", lambda: b'{"tokens": ' + listed(b"77", 10**6) + b"}", 200, ""),
    **{
        f"arguments of {item.decode()}": (
            CHAT,
            lambda item=item: b'{"messages": [' + call_of(listed(item, LARGE // (len(item) + 1) - 99)) + b"]}",
            400,
            "messages[0].tool_calls[0].function.arguments: more than",
        )
        for item in (b"[[]]", b"{}", b"1")
    },
    "arguments as an object": (
        CHAT,
        lambda: b'{"messages": [' + call_of(listed(b"1", 2 * 10**6), text=False) + b"]}",
        400,
        "messages[0].tool_calls[0].function.arguments: more than",
    ),
    "arguments of escapes": (CHAT, lambda: b'{"messages": [' + call_of(ESCAPES) + b"]}", 200, ""),
    "arguments of as much as may be": (
        CHAT,
        lambda: b'{"max_tokens": 1, "messages": [' + call_of(listed(b"[[]]", MAX_CHAT_VALUES // 3 - 9)) + b"]}",
        200,
        "",
    ),
    "arguments of many messages": (
        CHAT,
        lambda: b'{"messages": ' + listed(call_of(b"[" * 90 + b"]" * 90), 8000) + b"}",
        400,
        "].tool_calls[0].function.arguments: more than",
    ),
    "arguments of many calls": (
        "/tokenize",
        lambda: b'{"messages": ' + listed(call_of(listed(b"{}", 600)), 8000) + b"}",
        400,
        "].tool_calls[0].function.arguments: more than",
    ),
    "arguments of items": (
        RESPONSES,
        lambda: (
            b'{"input": [{"type": "message", "role": "user", "content": "a"}, {"type": "function_call", "call_id": "a",'
            b' "name": "f", "arguments": ' + as_text(b'{"a": ' + listed(b"{}", 5 * 10**6) + b"}") + b"}]}"
        ),
        400,
        "input[1].arguments: more than",
    ),
    "input of a block": (
        MESSAGES,
        lambda: (
            b'{"max_tokens": 1, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{'
            b'"type": "tool_use", "id": "a", "name": "f", "input": {"a": ' + listed(b"1", 2 * 10**6) + b"}}]}]}"
        ),
        400,
        "messages[1].content[0].input: more than",
    ),
    "template options": (
        CHAT,
        lambda: b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {' + many_fields() + b"}}",
        400,
        "chat_template_kwargs: too many fields",
    ),
    "template options inside": (
        CHAT,
        lambda: (
            b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": {' + many_fields() + b"}}}"
        ),
        400,
        "chat_template_kwargs: more than",
    ),
}


@pytest.mark.parametrize("name", few_of(HOSTILE, *range(0, 49, 2)))
def test_no_body_holds_the_loop(answer, name):
    """Its answer comes, names the field or the bound, and is short."""
    path, body_of, status, words = HOSTILE[name]
    body = body_of()
    response, held = answer(path, body)
    assert response.status_code == status, response.text[:300]
    assert words in response.text
    assert status == 200 or len(response.content) < 1000
    assert not holds(answer, path, body, held), held


def test_as_many_messages_as_there_may_be_hold_nobody_up(answer):
    body = json.dumps({"messages": [HI] * MAX_MESSAGES}).encode()
    response, held = answer("/tokenize", body)
    assert response.status_code == 200, response.text[:300]
    assert not holds(answer, "/tokenize", body, held), held


@pytest.mark.parametrize("item", few_of([b"null", b"[]", b"{}", b'"ab"', b"257", b"1.5"], 0, 3))
def test_no_body_takes_more_than_ten_times_what_one_may_have(answer, item):
    """As much of each kind as the meter lets through: read, checked, and refused."""
    count = MAX_OBJECTS if item[:1] in b'[{"' else MAX_VALUES
    for body in (
        prompt_of(listed(item, count - 9)),
        prompt_of(b'"a", "n": 0, "guided_json": {"x": ' + listed(item, count - 9) + b"}"),
    ):
        tracemalloc.start()
        response, _ = answer(COMPLETIONS, body)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert response.status_code == 400
        assert peak < 10 * LARGE


leaves = st.none() | st.integers() | st.text(st.sampled_from('"\\,[]{}:aé\n'), max_size=6)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('\\"[,a', max_size=3), inner, max_size=5),
)


def counted(value) -> tuple[int, int, int]:
    """Texts, brackets and commas outside texts of a value's JSON."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [*map(counted, value), *(map(counted, value.values()) if isinstance(value, dict) else ())]
    texts, brackets, commas = (sum(each) for each in zip((0, 0, 0), *inner, strict=True))
    return texts, brackets + 1, commas + max(0, len(value) - 1)


@settings(max_examples=200, deadline=None)
@given(value=trees, ascii_only=st.booleans(), size=st.integers(1, 9))
def test_a_body_counts_the_same_however_it_is_cut_into_pieces(value, ascii_only, size):
    """An escape or a text may lie in two pieces; what stands in a text counts for nothing."""
    body, meter = json.dumps(value, ensure_ascii=ascii_only).encode(), BodyMeter(10**6)
    for start in range(0, len(body), size):
        meter.take(body[start : start + size])
    assert (meter.num_quotes // 2, meter.num_brackets, meter.num_commas) == counted(value)
    assert meter.num_bytes == len(body)


def test_a_text_may_hold_any_number_of_brackets_and_quotes():
    """Code, or JSON in a text, is one text."""
    meter = BodyMeter(2**24)
    meter.take(json.dumps({"prompt": '{"a": [1, "b"], }' * 500_000}).encode())
    assert meter.num_quotes == 4
    with pytest.raises(HTTPException, match="--max-body-bytes"):
        meter.take(b"a" * 2**24)


def test_the_options_of_all_choices_are_checked_once(monkeypatch):
    """n choices, one look at the ids that they share; each has its own seed."""
    from treetop.text import prompts

    looks = []
    check_ids = prompts.PromptReader.check_ids
    monkeypatch.setattr(
        prompts.PromptReader, "check_ids", lambda self, whose, ids: looks.append(whose) or check_ids(self, whose, ids)
    )
    core, info = make_mock(EngineConfig.of(None), MockOptions((40,), 0.0, 1, 1))

    async def asked():
        from treetop import AsyncLLM

        llm = AsyncLLM.of(InProcessClient(CoreThread(core), info))
        params, ids = SamplingParams(stop_token_ids=(5,) * 100, max_tokens=1), [1, 2]
        seen = []
        monkeypatch.setattr(llm.core, "add", lambda requests, sink: seen.extend(requests))
        llm.queue([ids] * 128, [params] * 128, seeds=range(128))
        llm.close()
        return seen

    seen = asyncio.run(asked())
    assert looks.count("stop") == 1
    assert [each.seed for each in seen] == [*range(128)]
    assert len({id(each.prompt_ids) for each in seen}) == 1


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded():
    """The library lets go of Python's lock; a thread that wants a turn each millisecond gets many."""
    text, turns = "def f(x): return x\n" * 50_000, []
    done = threading.Event()

    def turn():
        while not done.wait(0.001):
            turns.append(None)

    thread = threading.Thread(target=turn)
    thread.start()
    for _ in range(5):  # one turn each would be between two of them
        before = len(turns)
        ids = TOKENIZER.encode(text)
        if len(turns) - before > 20:
            break
    assert TOKENIZER.decode_each([ids]) == [TOKENIZER.decode(ids)]
    done.set()
    thread.join()
    assert len(turns) - before > 20


def test_small_work_does_not_wait_for_large_work():
    """A lane that is full delays its own kind alone; what is cancelled before its turn is never begun."""
    release, begun = threading.Event(), []

    async def run():
        lanes = SizeClassPools("test", 100)
        large = [asyncio.ensure_future(lanes.run(100, release.wait)) for _ in range(2)]
        cancelled = asyncio.ensure_future(lanes.run(500, begun.append, "late"))
        await asyncio.sleep(0)
        assert await lanes.run(99, lambda: "small") == "small"
        assert not any(each.done() for each in large)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        release.set()
        assert await asyncio.gather(*large) == [True, True]
        await lanes.run(100, lambda: None)
        lanes.close()

    asyncio.run(run())
    assert begun == []


def test_a_small_chat_is_rendered_while_a_large_one_is():
    """The large one is rendered by another process: here, one that is stopped."""
    from treetop.api.rendering import LARGE_CHAT, Rendering

    async def run():
        rendering = Rendering(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}))
        reader = PromptReader(CoreInfo(str(resolve_folder(BUILTIN_MODEL)), 5000, 4000, 4, PLAIN))
        long = [{**HI, "pad": "x" * LARGE_CHAT}] * 20
        await rendering.ids_of(reader, long, {})
        other = rendering._large._process.pid
        os.kill(other, signal.SIGSTOP)
        try:
            large = asyncio.ensure_future(rendering.ids_of(reader, long, {}))
            assert await rendering.ids_of(reader, [HI], {}) == reader.encode("hi", False)
            assert not large.done()
        finally:
            os.kill(other, signal.SIGCONT)
        assert await large == reader.encode("hi" * 20, False)
        rendering.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
