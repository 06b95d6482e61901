"""Libraries that people write agents with: loops of three calls, whole and streamed, and structures (`make clients`).

Each runs against a core that replays what a model says, and against the embedded pair, whose calls are forced by their
structure. They are heavy, so they are an extra of their own; each test skips without its library.
"""

import asyncio
import json
import os
import warnings
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from support.scripted import TEMPLATE, scripted
from support.serving import serving
from support.tool_streams import ODD, hermes
from support.waiting import WAIT_S

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a server for prices
pytestmark = pytest.mark.filterwarnings("ignore")  # they warn of each other's versions

STEPS = [("get_weather", ODD), ("search", {"query": 'a "b"\n</c>'}), ("now", {})]
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    "now": {"type": "object", "properties": {}},
}
ANSWER = "It is warm: 21 <b>C</b>."
ASK = "How is the weather?"
HI = [{"role": "user", "content": ASK}]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "It does.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def library(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed (pip install treetop-llm[clients])")


def reply(prompt: str) -> str:
    """A thought, a word and a call, until three calls have been answered."""
    done = prompt.count("<tool>")
    return f"<think>\nStep {done}.\n</think>\n\n" + (f"Well.\n{hermes(*STEPS[done])}" if done < 3 else ANSWER)


@pytest.fixture(scope="module")
def server():
    with scripted(reply) as (url, core):
        yield url, core
        assert not core.running


@pytest.fixture(scope="module")
def pair():
    flags = ("--max-running-requests", "4", "--context-length", "2048", "--reasoning-parser", "none")
    with serving("--chat-template", TEMPLATE, *flags) as running:
        yield running


def check_last_prompt(core) -> None:
    """All that was called and answered has reached the model again."""
    last = core.prompts[-1]
    assert last.count("<tool>") == 3
    for name, said in STEPS:
        assert f"{name}{json.dumps(said, ensure_ascii=False)}" in last


COMPACT = {"x-guidance": {"whitespace_flexible": False}}
"""A small model may write nothing but spaces."""


class Count(BaseModel):
    """Count to a number."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=COMPACT)
    n: int = Field(ge=0, le=9)
    how: Literal["up", "down"]


class Move(BaseModel):
    """Move to points."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=COMPACT)
    to: list[bool] = Field(min_length=2, max_length=2)
    count: Count


# --------------------------------------------------------------------------------------------------- openai-agents


@pytest.fixture
def agents():
    module = library("agents")
    module.set_tracing_disabled(True)
    return module


def agent_model(agents, url: str, kind: str, name: str):
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    made = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[kind]
    return made(model=name, openai_client=client)


def agent_tools(agents, called: list):
    """The three tools, which note how they are called."""

    @agents.function_tool(strict_mode=False)
    def get_weather(city: str, days: int) -> str:
        called.append(("get_weather", {"city": city, "days": days}))
        return "done"

    @agents.function_tool(strict_mode=False)
    def search(query: str) -> str:
        called.append(("search", {"query": query}))
        return "done"

    @agents.function_tool(strict_mode=False)
    def now() -> str:
        called.append(("now", {}))
        return "done"

    return [get_weather, search, now]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents_runs_three_tools_to_an_answer(server, agents, kind, stream):
    url, core = server
    called: list = []

    async def run():
        model = agent_model(agents, url, kind, "scripted")
        agent = agents.Agent(
            name="a",
            instructions="Be brief.",
            model=model,
            tools=agent_tools(agents, called),
            model_settings=agents.ModelSettings(include_usage=True),
        )
        if not stream:
            return await agents.Runner.run(agent, ASK)
        running = agents.Runner.run_streamed(agent, ASK)
        async for _ in running.stream_events():
            pass
        return running

    result = asyncio.run(run())
    assert called == STEPS
    assert result.final_output == ANSWER
    check_last_prompt(core)
    usage = result.context_wrapper.usage
    assert usage.requests == 4
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents_of_the_pair_call_what_is_valid(pair, agents, kind, stream):
    """Three runs, each of which must call; what they are given is the library's check of the arguments."""
    called: list = []

    @agents.function_tool
    def count(n: int, how: Literal["up", "down"]) -> str:
        called.append((n, how))
        return "done"

    async def run():
        model = agent_model(agents, pair.url, kind, "builtin:nestling")
        settings = agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=300
        )
        agent = agents.Agent(
            name="a",
            model=model,
            tools=[count],
            model_settings=settings,
            reset_tool_choice=False,
            tool_use_behavior="stop_on_first_tool",
        )
        said: list = [*HI]
        for _ in range(3):
            if stream:
                result = agents.Runner.run_streamed(agent, said)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, said)
            assert result.final_output == "done"
            said = result.to_input_list()

    asyncio.run(run())
    assert len(called) == 3
    assert all(how in ("up", "down") for _, how in called)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents_output_types_are_schemas(pair, agents, kind):
    async def run():
        model = agent_model(agents, pair.url, kind, "builtin:nestling")
        settings = agents.ModelSettings(temperature=0, max_tokens=400)
        agent = agents.Agent(name="a", model=model, output_type=Move, model_settings=settings)
        return await agents.Runner.run(agent, ASK)

    assert isinstance(asyncio.run(run()).final_output, Move)


# ------------------------------------------------------------------------------------------------------- langchain


@pytest.fixture
def langchain():
    library("langchain_core")
    return library("langchain_openai")


def lang_chat(langchain, url: str, name: str, responses: bool, **options):
    return langchain.ChatOpenAI(
        base_url=url + "/v1",
        api_key="none",
        model=name,
        max_retries=0,
        timeout=WAIT_S,
        use_responses_api=responses,
        stream_usage=True,
        **options,
    )


def lang_answer(model, messages: list, stream: bool):
    if not stream:
        return model.invoke(messages)
    whole = None
    for piece in model.stream(messages):
        whole = piece if whole is None else whole + piece
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("responses", [False, True])
def test_langchain_runs_three_tools_to_an_answer(server, langchain, responses, stream):
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    url, core = server
    model = lang_chat(langchain, url, "scripted", responses).bind_tools(TOOLS)
    messages = [SystemMessage("Be brief."), HumanMessage(ASK)]
    for name, said in STEPS:
        answer = lang_answer(model, messages, stream)
        (call,) = answer.tool_calls
        assert not answer.invalid_tool_calls
        assert (call["name"], call["args"]) == (name, said)
        assert answer.text == "Well."
        assert answer.usage_metadata["output_tokens"] > 0
        messages += [answer, ToolMessage("done", tool_call_id=call["id"])]
    assert lang_answer(model, messages, stream).text == ANSWER
    check_last_prompt(core)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("responses", [False, True])
def test_langchain_of_the_pair_calls_what_is_valid(pair, langchain, responses, stream):
    from langchain_core.messages import HumanMessage, ToolMessage

    chat = lang_chat(langchain, pair.url, "builtin:nestling", responses, temperature=0, max_tokens=300)
    messages = [HumanMessage(ASK)]
    for choice in ("Count", "required", "any"):
        model = chat.bind_tools([Count, Move], tool_choice=choice, parallel_tool_calls=False)
        answer = lang_answer(model, messages, stream)
        (call,) = answer.tool_calls
        {"Count": Count, "Move": Move}[call["name"]](**call["args"])
        messages += [answer, ToolMessage("done", tool_call_id=call["id"])]
    for method in ("json_schema", "function_calling"):
        for strict in (None, True):
            found = chat.with_structured_output(Move, method=method, strict=strict).invoke(messages[:1])
            assert isinstance(found, Move)


# --------------------------------------------------------------------------------------------------------- litellm


@pytest.fixture
def litellm():
    module = library("litellm")
    module.suppress_debug_info = True
    module.telemetry = False
    return module


def lite_answer(litellm, where: dict, stream: bool, **body):
    options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_S, **where, **body}
    if not stream:
        return litellm.completion(**options)
    pieces = [*litellm.completion(**options, stream=True, stream_options={"include_usage": True})]
    return litellm.stream_chunk_builder(pieces, messages=body["messages"])


def lite_places(url: str, name: str) -> dict[str, dict]:
    """The same model as OpenAI's, as vLLM's, and as Anthropic's."""
    return {
        "openai": {"model": f"openai/{name}", "api_base": url + "/v1"},
        "vllm": {"model": f"hosted_vllm/{name}", "api_base": url + "/v1"},
        "anthropic": {"model": f"anthropic/{name}", "api_base": url, "max_tokens": 1000},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["openai", "vllm", "anthropic"])
def test_litellm_runs_three_tools_to_an_answer(server, litellm, kind, stream):
    url, core = server
    where = lite_places(url, "scripted")[kind]
    messages: list = [{"role": "system", "content": "Be brief."}, *HI]
    for name, said in STEPS:
        choice = lite_answer(litellm, where, stream, messages=messages, tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls"
        message = choice.message
        assert message.reasoning_content.startswith("Step ")
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, said)
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    answer = lite_answer(litellm, where, stream, messages=messages, tools=TOOLS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage.completion_tokens > 0
    check_last_prompt(core)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["openai", "vllm", "anthropic"])
def test_litellm_of_the_pair_calls_what_is_valid(pair, litellm, kind, stream):
    where = {"temperature": 0, "max_tokens": 300, **lite_places(pair.url, "builtin:nestling")[kind]}
    tools = [
        {"type": "function", "function": {"name": each.__name__, "parameters": each.model_json_schema()}}
        for each in (Count, Move)
    ]
    messages: list = [*HI]
    named = {"type": "function", "function": {"name": "Move"}}
    for choice in (named, "required", "required"):
        message = (
            lite_answer(
                litellm, where, stream, messages=messages, tools=tools, tool_choice=choice, parallel_tool_calls=False
            )
            .choices[0]
            .message
        )
        (call,) = message.tool_calls
        kind, said = {"Count": Count, "Move": Move}[call.function.name], json.loads(call.function.arguments)
        kind.model_validate(said, extra="ignore")  # litellm tells vLLM nothing of additionalProperties
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    found = lite_answer(litellm, where, stream, messages=HI, response_format=Move).choices[0].message.content
    Move.model_validate_json(found)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_responses_run_three_tools_to_an_answer(server, litellm, stream):
    url, core = server
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    items: list = [*HI]

    def ask():
        where = {**lite_places(url, "scripted")["openai"], "api_key": "none", "timeout": WAIT_S}
        answer = litellm.responses(input=items, tools=tools, stream=stream, **where)
        return [*answer][-1].response if stream else answer

    for name, said in STEPS:
        answer = ask()
        call = answer.output[-1]
        assert (call.name, json.loads(call.arguments)) == (name, said)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    assert ask().output[-1].content[0].text == ANSWER
    check_last_prompt(core)


# ---------------------------------------------------------------------------------------------------------- ollama


@pytest.fixture
def ollama():
    return library("ollama")


def ollama_answer(client, stream: bool, **body):
    """A message and the count of its tokens."""
    if not stream:
        whole = client.chat(**body)
        return whole.message, whole.eval_count
    pieces = [*client.chat(**body, stream=True)]
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    said = {
        name: "".join(getattr(piece.message, name) or "" for piece in pieces) or None
        for name in ("content", "thinking")
    }
    calls = [call for piece in pieces for call in piece.message.tool_calls or ()]
    return type(pieces[0].message)(role="assistant", tool_calls=calls or None, **said), pieces[-1].eval_count


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_runs_three_tools_to_an_answer(server, ollama, stream):
    url, core = server
    client = ollama.Client(host=url, timeout=WAIT_S)
    assert [each.model for each in client.list().models] == ["scripted"]
    assert "tools" in client.show("scripted").capabilities
    messages: list = [{"role": "system", "content": "Be brief."}, *HI]
    for index, (name, said) in enumerate(STEPS):
        message, count = ollama_answer(client, stream, model="scripted", messages=messages, tools=TOOLS, think=True)
        assert message.thinking == f"Step {index}."
        assert message.content.strip() == "Well."
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == (name, said)
        assert count > 0
        messages += [message, {"role": "tool", "tool_name": name, "content": "done"}]
    message, _ = ollama_answer(client, stream, model="scripted", messages=messages, tools=TOOLS)
    assert message.content == ANSWER
    check_last_prompt(core)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_of_the_pair_writes_what_a_schema_says(pair, ollama, stream):
    client, options = ollama.Client(host=pair.url, timeout=WAIT_S), {"temperature": 0, "num_predict": 300}
    asked = {"model": "builtin:nestling", "format": Move.model_json_schema(), "options": options}
    message, _ = ollama_answer(client, stream, messages=HI, **asked)
    Move.model_validate_json(message.content)
    pieces = client.generate(prompt=ASK, stream=stream, **asked)
    text = "".join(piece.response for piece in pieces) if stream else pieces.response
    Move.model_validate_json(text)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_asynchronously_streams_and_is_told_what_is_not_here(server, ollama, stream):
    url, _ = server

    async def run() -> None:
        async with ollama.AsyncClient(host=url, timeout=WAIT_S) as client:
            answer = await client.generate(model="scripted", prompt=ASK, stream=stream)
            text = "".join([piece.response async for piece in answer]) if stream else answer.response
            assert text
            with pytest.raises(ollama.ResponseError, match="no-such"):
                await client.chat(model="no-such", messages=HI)
            with pytest.raises(ollama.ResponseError):
                await client.embed(model="scripted", input="a")

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------ instructor


@pytest.fixture
def instructor():
    return library("instructor")


@pytest.fixture
def openais(pair):
    with openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor_gets_three_models_in_a_row(openais, instructor, mode):
    """Each mode asks in another way: a named tool, loosely or strictly, a schema, a tool by responses."""
    client = instructor.from_openai(openais, mode=getattr(instructor.Mode, mode))
    limit = {"max_output_tokens": 300} if mode == "RESPONSES_TOOLS" else {"max_tokens": 300}
    messages: list = [*HI]
    for kind in (Count, Move, Count):
        found = client.create(
            model="builtin:nestling", response_model=kind, messages=messages, temperature=0, max_retries=1, **limit
        )
        assert isinstance(found, kind)
        messages += [{"role": "assistant", "content": found.model_dump_json()}, *HI]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_gets_models_as_they_come(openais, instructor, mode):
    client = instructor.from_openai(openais, mode=getattr(instructor.Mode, mode))
    options = {"model": "builtin:nestling", "messages": HI, "temperature": 0, "max_tokens": 300}
    *_, last = client.create_partial(response_model=Move, **options)
    Move.model_validate(last.model_dump())


def test_instructor_gets_models_by_messages(pair, instructor):
    with anthropic.Anthropic(base_url=pair.url, api_key="none", max_retries=0, timeout=WAIT_S) as plain:
        client = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
        for kind in (Count, Move, Count):
            found = client.create(
                model="builtin:nestling", response_model=kind, messages=HI, max_tokens=300, max_retries=1
            )
            assert isinstance(found, kind)


@pytest.mark.parametrize("kind", ["chat", "messages"])
def test_instructor_reads_what_a_model_says_in_each_form(instructor, kind):
    """Three answers that are replayed: a call where tools are asked for, JSON where a schema is."""
    said = [{"n": 3, "how": "up"}, {"n": 4, "how": "down"}, {"n": 5, "how": "up"}]
    with scripted(lambda prompt: json.dumps(said[prompt.count("<assistant>") - 1]), can_constrain=True) as (url, core):
        if kind == "chat":
            plain = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S)
            client, options = instructor.from_openai(plain), {}
        else:
            plain = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=WAIT_S)
            client, options = instructor.from_anthropic(plain), {"max_tokens": 1000}
        messages: list = [*HI]
        with plain:
            for each in said:
                found = client.create(
                    model="scripted", response_model=Count, messages=messages, max_retries=1, **options
                )
                assert found.model_dump() == each
                messages += [{"role": "assistant", "content": found.model_dump_json()}, *HI]
        assert len(core.prompts) == 3
