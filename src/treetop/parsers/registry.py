"""Formats of reasoning and tool calls by vLLM's names, and which ones a chat template speaks of."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from treetop.parsers import deepseek, gemma4, glm45, harmony, hermes, invokes, kimi_k2, mistral, pythonic, strict
from treetop.parsers.arguments import Tools
from treetop.parsers.events import Parser
from treetop.parsers.llama3_json import llama3_json
from treetop.parsers.olmo3 import olmo3
from treetop.parsers.qwen3_coder import qwen3_coder, seed_oss
from treetop.parsers.source import Steps, TextBuffer
from treetop.parsers.strict import Held
from treetop.parsers.text_parser import PlainText, Reader, TextParser
from treetop.parsers.thinking import Thinking, plain, thinking
from treetop.parsers.writer import Writer, new_call_id
from treetop.types.constraint import Reasoning

NONE = "none"
"""The name that stands for no parser at all."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    read: reads an output behind its reasoning.
    sign: a pattern that is in templates of this format.
    words: marks of the format that may be special tokens, which an output's text does not show otherwise.
    strict: makes the structure that holds calls to their schemas; None where that cannot be done.
    new_id: makes the ids of calls.
    """

    read: Callable[[TextBuffer, Writer, Tools], Steps[None]]
    sign: str
    words: tuple[str, ...] = ()
    strict: Held | None = None
    new_id: Callable[[], str] = new_call_id


TOOL_PARSERS: dict[str, ToolFormat] = {
    "kimi_k2": ToolFormat(kimi_k2.kimi_k2, r"<\|tool_calls_section_begin\|>", kimi_k2.WORDS, strict.KIMI_K2),
    "deepseek_v3": ToolFormat(deepseek.deepseek, r"<｜tool▁sep｜>[\s\S]*```json", deepseek.WORDS, strict.DEEPSEEK_V3),
    "deepseek_v31": ToolFormat(deepseek.deepseek, r"<｜tool▁sep｜>", deepseek.WORDS, strict.DEEPSEEK_V31),
    "deepseek_v4": ToolFormat(invokes.deepseek_v4, r"｜DSML｜tool_calls", (invokes.DSML,), strict.DEEPSEEK_V4),
    "deepseek_v32": ToolFormat(invokes.deepseek_v32, r"｜DSML｜", (invokes.DSML,), strict.DEEPSEEK_V32),
    "minimax_m2": ToolFormat(
        invokes.minimax_m2, r"minimax:tool_call", ("<minimax:tool_call>", "</minimax:tool_call>"), strict.MINIMAX_M2
    ),
    "seed_oss": ToolFormat(seed_oss, r"seed:tool_call", (), strict.SEED_OSS),
    "qwen3_coder": ToolFormat(qwen3_coder, r"<function=", ("<tool_call>", "</tool_call>"), strict.QWEN3_CODER),
    "hy_v3": ToolFormat(glm45.hy_v3, r"<tool_sep>", glm45.WORDS, strict.HY_V3),
    "glm45": ToolFormat(glm45.glm45, r"<arg_key>", glm45.WORDS, strict.GLM45),
    "gemma4": ToolFormat(gemma4.gemma4, r"<\|tool_call>call:", gemma4.WORDS),
    "hunyuan_a13b": ToolFormat(hermes.hunyuan_a13b, r"<tool_calls>", hermes.hunyuan_a13b.words, strict.HUNYUAN_A13B),
    "phi4_mini_json": ToolFormat(
        hermes.phi4_mini, r"functools\[|<\|/tool(_call)?\|>", hermes.phi4_mini.words, strict.PHI4_MINI
    ),
    "granite": ToolFormat(hermes.granite, r"<\|tool_call\|>", hermes.granite.words, strict.GRANITE),
    "olmo3": ToolFormat(olmo3, r"<function_calls>"),
    "hermes": ToolFormat(hermes.hermes, r"<tool_call>", hermes.hermes.words, strict.HERMES),
    "mistral": ToolFormat(
        mistral.mistral, r"\[TOOL_CALLS\]", mistral.WORDS, strict.mistral_calls, mistral.new_mistral_id
    ),
    "pythonic": ToolFormat(pythonic.pythonic, r"func_name1\(param(s_name)?1=", pythonic.WORDS),
    "llama3_json": ToolFormat(
        llama3_json, r"<\|python_tag\|>|\"parameters\": dictionary", ("<|python_tag|>",), strict.llama3_calls
    ),
}
"""In the order in which a template is asked for their signs."""
_SAME = {
    "glm47": "glm45",
    "granite4": "hermes",
    "ernie45": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}

_CALLS = "{", "<function="
"""What stands behind Qwen's `<tool_call>` where it is a call, and no word about one."""
REASONING_PARSERS: dict[str, Thinking] = {
    "kimi_k2": Thinking(also_closes=kimi_k2.BEGINS),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
    "qwen3": Thinking(
        awaits=True, also_closes=tuple(f"<tool_call>{gap}{begin}" for gap in ("", "\n") for begin in _CALLS)
    ),
    "glm45": Thinking(),
    "hy_v3": Thinking(),
    "olmo3": Thinking(),
    "gemma4": Thinking("<|channel>", "<channel|>", title="thought"),
    "hunyuan_a13b": Thinking(answer=("<answer>", "</answer>")),
    "ernie45": Thinking(answer=("<response>", "</response>")),
    "deepseek_v3": Thinking(),
    "deepseek_r1": Thinking(inside=True),
    "minimax_m2": Thinking(inside=True),
}
HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"
"""Both stand for Harmony, which has one reader for all."""

_SIGNS = {HARMONY_TOOLS: r"<\|channel\|>"} | {name: each.sign for name, each in TOOL_PARSERS.items()}
_REASONING_SIGNS = {
    "mistral": r"\[/THINK\]",
    "seed_oss": "</seed:think>",
    "gemma4": r"<\|channel>",
    "hunyuan_a13b": r"<answer>[\s\S]*</think>|</think>[\s\S]*<answer>",
    "ernie45": r"<response>[\s\S]*</think>|</think>[\s\S]*<response>",
    "qwen3": "</think>|<think>",
}
ToolParserName = Literal[
    "openai",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "minimax_m2",
    "seed_oss",
    "qwen3_coder",
    "qwen3_xml",
    "glm45",
    "glm47",
    "hy_v3",
    "hunyuan_a13b",
    "gemma4",
    "phi4_mini_json",
    "granite",
    "granite4",
    "olmo3",
    "ernie45",
    "hermes",
    "mistral",
    "pythonic",
    "llama4_pythonic",
    "llama3_json",
    "llama4_json",
    "none",
]
ReasoningParserName = Literal[
    "openai_gptoss",
    "kimi_k2",
    "mistral",
    "seed_oss",
    "qwen3",
    "glm45",
    "hy_v3",
    "hunyuan_a13b",
    "gemma4",
    "olmo3",
    "ernie45",
    "deepseek_v3",
    "deepseek_r1",
    "minimax_m2",
    "none",
]
TOOL_NAMES, REASONING_NAMES = get_args(ToolParserName), get_args(ReasoningParserName)


@dataclass(frozen=True, slots=True)
class OutputParsers:
    """How a model writes reasoning and tool calls, as far as it is known."""

    tools: ToolFormat | None = None
    thinking: Thinking | None = None
    is_harmony: bool = False

    @property
    def has_calls(self) -> bool:
        return self.is_harmony or self.tools is not None

    @property
    def strict(self) -> Held | None:
        """Makes the structure of outputs whose calls are held to their schemas; None where that cannot be done."""
        if self.is_harmony:
            return strict.harmony_calls
        return None if self.tools is None else self.tools.strict

    def words(self, with_tools: bool) -> tuple[str, ...]:
        """Marks that an output's text must show, also where they are special tokens."""
        if self.is_harmony:
            return harmony.WORDS
        tags = () if self.thinking is None else (self.thinking.opens, self.thinking.closes)
        return (*tags, *(self.tools.words if self.tools is not None and with_tools else ()))

    def reasoning(self, tail: str, budget: int | None, held: bool) -> Reasoning | None:
        """What an output may say before its answer, as the engine is told; None for nothing.

        tail: the end of the prompt's text. held: what follows is held to a structure, so no call can begin within it.
        """
        if self.is_harmony:
            return None if budget is None else harmony.reasoning(tail, budget)
        tags = self.thinking
        if tags is None or tags.has_closed(tail):
            return None
        opens = "" if tags.begins_inside(tail) else tags.opens
        return Reasoning(tags.closes, opens, budget, () if held else tags.also_closes)

    def answer(self, tail: str, reader: Reader, most_calls: int | None = None) -> Parser:
        """Of an output that is held to a structure, which `reader` reads, behind reasoning if there is `reasoning`."""
        if self.thinking is not None and not self.thinking.has_closed(tail):
            reader = thinking(_of_held(self.thinking), tail, reader)
        return PlainText() if reader is plain else TextParser(reader, most_calls)

    def parser(
        self, tail: str, tools: Tools | None = None, most_calls: int | None = None, held: bool = False
    ) -> Parser:
        """Of one output.

        tail: the end of the prompt's text. tools: None if it may hold no calls. held: as `reasoning` has it.
        """
        if self.is_harmony:
            return TextParser(harmony.harmony(tail), most_calls)
        reader: Reader = plain
        new_id = new_call_id
        if self.tools is not None and tools is not None:
            reader, new_id = _with_tools(self.tools, tools), self.tools.new_id
        if self.thinking is not None:
            reader = thinking(_of_held(self.thinking) if held else self.thinking, tail, reader)
        return PlainText() if reader is plain else TextParser(reader, most_calls, new_id)


def _of_held(tags: Thinking) -> Thinking:
    """Where what follows is held to a structure: it is told that there is reasoning by the first tag alone."""
    return replace(tags, also_closes=(), awaits=False, answer=None)


def _with_tools(form: ToolFormat, tools: Tools) -> Reader:
    return lambda source, out: form.read(source, out, tools)


def output_format(template: str, tool_parser: str | None = None, reasoning_parser: str | None = None) -> OutputParsers:
    """Of a model with this chat template. The others: names of parsers, None to go by the template."""
    if tool_parser is None:
        tool_parser = _first_in(template, _SIGNS)
    named = reasoning_parser is not None
    if reasoning_parser is None:
        reasoning_parser = _reasoning_of(template, tool_parser)
    if tool_parser == HARMONY_TOOLS or reasoning_parser == HARMONY_REASONING:
        return OutputParsers(is_harmony=True)
    thinks = REASONING_PARSERS.get(reasoning_parser)
    if thinks is not None and not named:  # many templates speak of reasoning whose models do not reason
        thinks = replace(thinks, awaits=False)
    return OutputParsers(TOOL_PARSERS.get(_SAME.get(tool_parser, tool_parser)), thinks)


def _reasoning_of(template: str, tool_parser: str) -> str:
    if tool_parser == HARMONY_TOOLS:
        return HARMONY_REASONING
    if tool_parser == "kimi_k2":
        return tool_parser
    return _first_in(template, _REASONING_SIGNS)


def _first_in(template: str, signs: Mapping[str, str]) -> str:
    return next((name for name, sign in signs.items() if re.search(sign, template)), NONE)
