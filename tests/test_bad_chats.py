"""Whatever a caller hands to `chat`, `generate` and `AsyncLLM`: a TreetopError of one bounded line, or an answer."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch

from support.grids import few_values
from support.refusing import load, refused
from support.tiny_models import copy_folder
from treetop import LLM, AsyncLLM, SamplingParams
from treetop.text.chat_input import rendering
from treetop.types.errors import CheckpointError, ConfigError, InputError, TreetopError

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ option }}{% endfor %}"
TALK = [{"role": "user", "content": "hi"}]
SHORT = SamplingParams(max_tokens=2)


class Unprintable:
    def __repr__(self):
        raise RuntimeError


def loop() -> list:
    itself = []
    itself.append(itself)
    return itself


def deep() -> list:
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return nested


HOSTILE = [
    *(None, True, False, 0, 5, -1, 10**400, 1.5, math.nan, math.inf, 1j, "", "hi", "\ud800", "x" * 10**5),
    *(b"hi", bytearray(b"a"), memoryview(b"ab"), [], [1], [None], ["a", 1], [[1], [2]], [[]], [["a"]], [[[[]]]]),
    *({}, {"a": 1}, {1: 2}, {(1, 2): 3}, set(), {1, 2}, (), (1, 2), range(3), iter([1])),
    *(object(), Unprintable(), int, print, torch.tensor([1, 2]), np.array([1, 2]), np.int64(4), np.float32("nan")),
    *(TALK, [TALK], [TALK, 5], [*TALK, 5], [5, *TALK], [{}], [{b"role": "user"}], loop(), deep()),
]


@pytest.fixture(scope="module")
def llm():
    llm = LLM(context_length=64)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def async_llm():
    llm = AsyncLLM(context_length=64)
    yield llm
    llm.close()


def bounded(act) -> None:
    """It works, or says in one line why it does not."""
    said = "nothing"
    try:
        act()
    except TreetopError as error:
        said = str(error)
    assert 0 < len(said) < 1500
    assert "\n" not in said


@pytest.mark.parametrize(
    "hostile",
    few_values(HOSTILE, *range(0, len(HOSTILE), 3)),
    ids=[f"{at}-{type(each).__name__}" for at, each in enumerate(HOSTILE)],
)
def test_whatever_a_caller_gives_only_errors_of_treetop_come_out(llm, async_llm, hostile):
    """Prompts, conversations, messages, contents, options, parameters, constraints, priority and timeout."""
    bounded(lambda: llm.generate(hostile, SHORT))
    bounded(lambda: llm.generate([hostile], SHORT))
    bounded(lambda: [*llm.stream([[5]], [hostile])])
    bounded(lambda: llm.generate([[5]], SHORT, [hostile]))
    bounded(lambda: llm.chat(hostile, SHORT, TEMPLATE))
    bounded(lambda: llm.chat([hostile], SHORT, TEMPLATE))
    bounded(lambda: llm.chat([{"role": hostile, "content": hostile}], SHORT, TEMPLATE))
    bounded(lambda: llm.chat(TALK, SHORT, hostile))
    for option in ("option", "self", "messages", "add_generation_prompt"):
        bounded(lambda option=option: llm.chat(TALK, SHORT, TEMPLATE, **{option: hostile}))

    async def ask(**limits):
        return await (await async_llm.stream([[5]], SHORT, **limits)).outputs()

    bounded(lambda: asyncio.run(ask(priority=hostile)))
    bounded(lambda: asyncio.run(ask(timeout_s=hostile)))
    bounded(lambda: asyncio.run(ask(constraints=hostile)))


@pytest.mark.parametrize(
    ("asked", "options", "words"),
    [
        (5, {}, ("conversations must be a list of messages", "got 5")),
        ([1], {}, ("conversation 0", "got 1")),
        ([TALK, [5]], {}, ("conversation 1: message 0", "got 5")),
        ("hi", {}, ("conversations must be a list", "'hi'")),
        ([{"role": "user", "content": b"hi"}], {}, ("message 0 is no JSON", "bytes")),
        ([*TALK, {"role": "user", "content": {1, 2}}], {}, ("message 1 is no JSON", "set")),
        (TALK, {"tools": object()}, ("tools is no JSON", "object")),
        (TALK, {"tools": 10**5000}, ("tools is no JSON",)),
    ],
)
def test_what_is_no_conversation_is_refused_by_place(llm, asked, options, words):
    refused(InputError, lambda: llm.chat(asked, SHORT, TEMPLATE, **options), *words)


def test_a_chat_template_of_another_kind_is_refused(llm):
    refused(ConfigError, lambda: llm.chat(TALK, SHORT, 5), "--chat-template", "got 5")


def test_options_of_a_template_reach_it_as_json():
    asked = json.loads(rendering(TALK, {"tools": [1], "add_generation_prompt": False}))
    assert asked == {"messages": TALK, "tools": [1], "add_generation_prompt": False}


@pytest.mark.parametrize("name", ["x" * 10**6, "x\n" * 10**5])
def test_an_architecture_of_a_million_characters_gives_a_short_error(strong_pair, tmp_path, name):
    folder = copy_folder(strong_pair.target, tmp_path / "t", architectures=[name])
    message = refused(CheckpointError, load(folder), "architecture x", "is not supported", "LlamaForCausalLM")
    assert len(message) < 1000


def test_a_tensor_of_a_hundred_thousand_characters_gives_a_short_error(strong_pair, tmp_path):
    folder = copy_folder(strong_pair.target, tmp_path / "t", tensors={"x" * 10**5: torch.zeros(1)})
    assert len(refused(CheckpointError, load(folder), "unexpected tensor x")) < 1000


def test_no_error_is_longer_than_a_screen_whatever_it_quotes():
    """Its beginning and its end are kept, which say where and what to do."""
    for kind in (InputError, CheckpointError, ConfigError):
        text = str(kind("begin " + "x" * 10**6 + " end"))
        assert len(text) < 4000
        assert text.startswith("begin x")
        assert text.endswith("x end")
    assert str(InputError("short")) == "short"
