"""Outputs as models write them, by the templates and guides that the parsers name, and what is in them."""

import json
from dataclasses import dataclass, field

from treetop.parsers.arguments import Tools
from treetop.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Parser, ReasoningDelta
from treetop.parsers.registry import output_format

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "near": {"type": "array", "items": {"type": "string"}},
        "code": {"type": ["string", "null"]},
    },
}
SCHEMAS = {"get_weather": WEATHER, "search": {"type": "object", "properties": {"query": {"type": "string"}}}, "now": {}}
TOOLS = Tools(SCHEMAS)
ODD = {"city": 'Zürich </tool "é" \\ {🦊}', "days": 3}
PYTHON = "def f(a):\n    if a < 3 and a[0] > 1:\n        return {'x': [1]}\n"


@dataclass(frozen=True)
class Stream:
    """text: the whole output. calls: name and arguments of each. ids: of the calls that the format gives ids."""

    tool_parser: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, dict], ...] = ()
    reasoning: str = ""
    reasoning_parser: str = "none"
    tail: str = "<|im_start|>assistant\n"
    ids: tuple[str, ...] = field(default=())

    def parser(self) -> Parser:
        return output_format("", self.tool_parser, self.reasoning_parser).parser(self.tail, TOOLS)


def said(arguments: dict) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def hermes(name: str, arguments: dict) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {said(arguments)}}}\n</tool_call>'


def coder(name: str, tag: str = "tool_call", **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<{tag}>\n<function={name}>\n{inner}</function>\n</{tag}>"


def glm(name: str, line: str = "\n", **parameters: str) -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>{line}<arg_value>{v}</arg_value>{line}" for k, v in parameters.items())
    return f"<tool_call>{name}{line}{inner}</tool_call>"


def minimax(name: str, **parameters: str) -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters.items())
    return f'<invoke name="{name}">\n{inner}</invoke>\n'


def harmony_call(name: str, arguments: dict, end: str = "<|call|>") -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{said(arguments)}{end}"


TWO = (("get_weather", ODD), ("search", {"query": "a </b> [c]"}))
TYPED = {"city": "Paris\nFrance", "days": 3, "unit": "c", "exact": None, "near": ["a", "b"], "code": PYTHON}
AS_TEXT = {
    "city": "Paris\nFrance",
    "days": "3",
    "unit": "c",
    "exact": "null",
    "near": '["a", "b"]',
    "code": PYTHON,
}
THINKS = "The user asks\n\n<tool_call is what I may need>. 1 < 2 and </thin"
DS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"


def v3(name: str, arguments: dict) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{said(arguments)}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: dict) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{said(arguments)}<｜tool▁call▁end｜>"


def dsml(name: str, arguments: dict, block: str = "function_calls", whole: bool = True) -> str:
    inner = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else said(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    call = f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'
    return f"<｜DSML｜{block}>\n{call}</｜DSML｜{block}>" if whole else call


def kimi(name: str, at: int, arguments: dict) -> str:
    return f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{said(arguments)}<|tool_call_end|>"


def listed(*calls: tuple[str, dict]) -> str:
    return "[" + ", ".join(f'{{"name": "{name}", "arguments": {said(arguments)}}}' for name, arguments in calls) + "]"


def hy3(name: str, **parameters: str) -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in parameters.items())
    return f"<tool_call>{name}<tool_sep>\n{inner}</tool_call>\n"


STREAMS = {
    "hermes: text and two calls": Stream(
        "hermes", f"Let me see.\n{hermes(*TWO[0])}\n{hermes(*TWO[1])}", "Let me see.", TWO
    ),
    "hermes: no arguments, and arguments as a string": Stream(
        "hermes",
        '<tool_call>{"name": "now"}</tool_call><tool_call>{"arguments": "{\\"query\\": \\"\\\\u00e9\\"}", "name":'
        ' "search"}</tool_call><tool_call>{"name": "now", "arguments": null}</tool_call>',
        calls=(("now", {}), ("search", {"query": "é"}), ("now", {})),
    ),
    "hermes: what is no call is text": Stream(
        "hermes",
        'Write <tool_call> {"x": 1} </tool_call> or <tool_cal\n\n or 1 < 2 \n',
        'Write <tool_call> {"x": 1} </tool_call> or <tool_cal\n\n or 1 < 2 \n',
    ),
    "hermes: calls that are not closed": Stream(
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {}}}',
        calls=(("now", {}), ("now", {})),
    ),
    "qwen3: thinks, answers and calls": Stream(
        "hermes",
        f"<think>\n{THINKS}\n</think>\n\nI look.\n{hermes(*TWO[0])}",
        "I look.",
        TWO[:1],
        THINKS,
        "qwen3",
    ),
    "qwen3: the end of the thought is at once the call": Stream(
        "hermes", f"{THINKS}</think>{hermes(*TWO[1])}", "", TWO[1:], THINKS, "qwen3", "assistant\n<think>\n"
    ),
    "qwen3: thinking was closed in the prompt": Stream(
        "hermes", "It is <think> 3.", "It is <think> 3.", (), "", "qwen3", "<think>\n\n</think>\n\n"
    ),
    "qwen3: a thought that does not end": Stream("hermes", "<think>\nI th", "", (), "I th", "qwen3"),
    "qwen3 coder: every type": Stream("qwen3_coder", coder("get_weather", **AS_TEXT), "", (("get_weather", TYPED),)),
    "qwen3 coder: text, two calls, no outer tag, text": Stream(
        "qwen3_coder",
        "First.\n\n" + coder("now") + "\n<function=search>\n<parameter=query>\n<b>\n</parameter>\n</function>\nThen.",
        "First.\nThen.",
        (("now", {}), ("search", {"query": "<b>"})),
    ),
    "qwen3 coder: what is no call is text": Stream(
        "qwen3_coder", "A <tool_call> is <function\n", "A <tool_call> is <function\n"
    ),
    "seed oss": Stream(
        "seed_oss",
        "<seed:think>hm</seed:think>" + coder("get_weather", "seed:tool_call", **AS_TEXT),
        "",
        (("get_weather", TYPED),),
        "hm",
        "seed_oss",
    ),
    "glm 4.5: thinks and calls twice": Stream(
        "glm45",
        f"<think>{THINKS}</think>\nI look.\n{glm('get_weather', **AS_TEXT)}\n{glm('now')}",
        "I look.",
        (("get_weather", TYPED), ("now", {})),
        THINKS,
        "glm45",
    ),
    "glm 4.7: no line ends": Stream(
        "glm45", glm("search", "", query="a b") + glm("now", ""), "", (("search", {"query": "a b"}), ("now", {}))
    ),
    "deepseek r1: thinks in a prompt's block and calls twice": Stream(
        "deepseek_v3",
        f"{THINKS}\n</think>\n\nSo: {DS.format(v3(*TWO[0]) + chr(10) + v3(*TWO[1]))}",
        "So:",
        TWO,
        THINKS,
        "deepseek_r1",
        "<｜Assistant｜><think>\n",
    ),
    "deepseek v3.1": Stream("deepseek_v31", "So:" + DS.format(v31(*TWO[0]) + v31(*TWO[1])), "So:", TWO),
    "deepseek v3.1: thinks": Stream(
        "deepseek_v31", f"{THINKS}</think>{DS.format(v31(*TWO[1]))}", "", TWO[1:], THINKS, "deepseek_v3", "<think>"
    ),
    "deepseek v3.2: thinks and calls twice in a block": Stream(
        "deepseek_v32",
        f"{THINKS}</think>\n\n<｜DSML｜function_calls>\n{dsml(*TWO[0], whole=False)}{dsml(*TWO[1], whole=False)}"
        "</｜DSML｜function_calls>",
        "",
        TWO,
        THINKS,
        "deepseek_v3",
        "<think>",
    ),
    "deepseek v3.2: every type, text before and behind": Stream(
        "deepseek_v32",
        f"So, 1 <｜DSML 2:\n{dsml('get_weather', TYPED)}\nThat is it.",
        "So, 1 <｜DSML 2:\n\nThat is it.",
        (("get_weather", TYPED),),
    ),
    "deepseek v4: a number in quotes stays a text": Stream(
        "deepseek_v4", dsml("search", {"query": "3"}, "tool_calls"), "", (("search", {"query": "3"}),)
    ),
    "pythonic: two calls": Stream(
        "pythonic",
        ' [get_weather(city=\'Zürich, "é" )\\n\\\'\', days=3, near=["a]", "(b"], exact=None), search("a=b, (c")]\n',
        "",
        (
            ("get_weather", {"city": 'Zürich, "é" )\n\'', "days": 3, "near": ["a]", "(b"], "exact": None}),
            ("search", {"query": "a=b, (c"}),
        ),
    ),
    "llama 4: between marks, of every kind of value": Stream(
        "llama4_pythonic",
        "<|python_start|>[now(), get_weather(city = \"x\", exact=True, unit=c, code=-1.5e3, near=({'k': [1, {}]},), ),"
        " search(query=true)]<|python_end|>",
        "",
        (
            ("now", {}),
            ("get_weather", {"city": "x", "exact": True, "unit": "c", "code": -1500.0, "near": [{"k": [1, {}]}]}),
            ("search", {"query": True}),
        ),
    ),
    "pythonic: a list that calls nothing": Stream("pythonic", "[1, 2] and [now()]", "[1, 2] and [now()]"),
    "pythonic: another function": Stream("pythonic", " [print(1)] \n", " [print(1)] \n"),
    "pythonic: text": Stream("pythonic", "It is <|python_start| [now()].", "It is <|python_start| [now()]."),
    "pythonic: text behind": Stream("pythonic", "[now()] Done.", "Done.", (("now", {}),)),
    "kimi: two calls in a section": Stream(
        "kimi_k2",
        f"I look.{KIMI.format(kimi('get_weather', 0, ODD) + kimi('now', 1, {}))}",
        "I look.",
        (("get_weather", ODD), ("now", {})),
        ids=("functions.get_weather:0", "functions.now:1"),
    ),
    "kimi: a thought that a call ends": Stream(
        "kimi_k2",
        f"<think>{THINKS}{KIMI.format(kimi('now', 7, {}))}",
        "",
        (("now", {}),),
        THINKS,
        "kimi_k2",
        ids=("functions.now:7",),
    ),
    "minimax: thinks, and two calls in a block": Stream(
        "minimax_m2",
        f"{THINKS}\n</think>\n\nI look.\n<minimax:tool_call>\n{minimax('get_weather', **AS_TEXT)}{minimax('now')}"
        "</minimax:tool_call>",
        "I look.",
        (("get_weather", TYPED), ("now", {})),
        THINKS,
        "minimax_m2",
        "]~b]ai\n<think>\n",
    ),
    "llama: one call": Stream(
        "llama3_json", '{"name": "get_weather", "parameters": ' + said(ODD) + "}", "", (("get_weather", ODD),)
    ),
    "llama: two calls behind the tag": Stream(
        "llama3_json",
        '<|python_tag|>{"name": "now", "parameters": {}}; {"type": "function", "name": "search", "parameters":'
        ' {"query": "x"}}',
        "",
        (("now", {}), ("search", {"query": "x"})),
    ),
    "llama: an answer that is JSON": Stream(
        "llama3_json", '{"name": "Bob", "parameters": {"a": 1}}\n', '{"name": "Bob", "parameters": {"a": 1}}\n'
    ),
    "llama: other JSON": Stream("llama3_json", ' {"rows": [1, 2]} \n', ' {"rows": [1, 2]} \n'),
    "llama: code": Stream("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)"),
    "mistral: a list": Stream(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + said(ODD) + '}, {"name": "now", "arguments": {}}]',
        "",
        (("get_weather", ODD), ("now", {})),
    ),
    "mistral: a marker before each": Stream(
        "mistral",
        f"[THINK]{THINKS}[/THINK]I look.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{said(ODD)}[TOOL_CALLS]now{{}}",
        "I look.",
        (("get_weather", ODD), ("now", {})),
        THINKS,
        "mistral",
        "[/INST]",
    ),
    "granite: a list": Stream("granite", f"So: <|tool_call|>{listed(*TWO)}", "So:", TWO),
    "granite 3.1: the other mark": Stream("granite", f"<tool_call>{listed(*TWO)}", "", TWO),
    "granite 4": Stream("granite4", hermes(*TWO[0]), "", TWO[:1]),
    "phi 4 mini: a list, and a module of that name": Stream(
        "phi4_mini_json", f"import functools\nfunctools{listed(*TWO)}", "import functools", TWO
    ),
    "phi 4 mini: special tokens": Stream("phi4_mini_json", f"<|tool_call|>{listed(TWO[1])}<|/tool_call|>", "", TWO[1:]),
    "phi 4 mini: code": Stream("phi4_mini_json", "functools[0] and <|tool", "functools[0] and <|tool"),
    "hunyuan: thinks, and calls in its answer": Stream(
        "hunyuan_a13b",
        f"<think>\n{THINKS}\n</think>\n<answer>\nI look.<tool_calls>{listed(*TWO)}</tool_calls>\n</answer>",
        "I look.",
        TWO,
        THINKS,
        "hunyuan_a13b",
    ),
    "hunyuan: thinks and answers": Stream(
        "hunyuan_a13b",
        f"<think>\n{THINKS}\n</think>\n<answer>\nIt is <3.\n</answer>",
        "It is <3.",
        (),
        THINKS,
        "hunyuan_a13b",
    ),
    "hy3: thinks, and two calls in a block": Stream(
        "hy_v3",
        f"{THINKS}</think>I look.\n<tool_calls>\n{hy3('get_weather', **AS_TEXT)}{hy3('now')}</tool_calls>",
        "I look.",
        (("get_weather", TYPED), ("now", {})),
        THINKS,
        "hy_v3",
        "<think>",
    ),
    "hy3: a block without calls is text": Stream(
        "hy_v3", "<tool_calls> x </tool_calls>", "<tool_calls> x </tool_calls>"
    ),
    "olmo 3: a call a line, constants of both kinds": Stream(
        "olmo3",
        "Ok.\n<function_calls>\nget_weather(city='Zürich, \"é\"', days=3, exact=null, near=['a]', \"(b\"])\nnow()\n"
        "search(query=None)\n</function_calls>",
        "Ok.",
        (
            ("get_weather", {"city": 'Zürich, "é"', "days": 3, "exact": None, "near": ["a]", "(b"]}),
            ("now", {}),
            ("search", {"query": None}),
        ),
    ),
    "olmo 3: a function that is no tool": Stream(
        "olmo3", "<function_calls>\nprint(1)\n</function_calls>", "<function_calls>\nprint(1)\n</function_calls>"
    ),
    "gemma 4: thinks, and two calls": Stream(
        "gemma4",
        f"<|channel>thought\n{THINKS}\n<channel|>I look.<|tool_call>call:get_weather{{city:"
        '<|"|>Zürich </tool "é" \\ {🦊}'
        '<|"|>,days:3,near:[<|"|>a]<|"|>,<|"|>,b<|"|>],exact:{a:null,b:[true,-1.5]}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "I look.",
        (
            ("get_weather", {**ODD, "near": ["a]", ",b"], "exact": {"a": None, "b": [True, -1.5]}}),
            ("now", {}),
        ),
        THINKS,
        "gemma4",
    ),
    "gemma 4: does not think": Stream(
        "gemma4", "<|channel>thought\n<channel|>It is <|3.", "It is <|3.", (), "", "gemma4", "<|turn>model\n"
    ),
    "ernie: thinks and answers": Stream(
        "ernie45",
        f"{THINKS}\n</think>\n\n<response>\nIt is 3.\n</response>\n",
        "It is 3.",
        (),
        THINKS,
        "ernie45",
        "<think>\n",
    ),
    "ernie: thinks and calls": Stream(
        "ernie45", f"{THINKS}\n</think>\n\n{hermes(*TWO[0])}\n", "", TWO[:1], THINKS, "ernie45", "<think>\n"
    ),
    "harmony: thinks, says what it does, and calls": Stream(
        "openai",
        f"<|channel|>analysis<|message|>{THINKS}<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{harmony_call('get_weather', ODD)}",
        "I look.",
        (("get_weather", ODD),),
        THINKS,
        "openai_gptoss",
        "<|start|>assistant",
    ),
    "harmony: two thoughts and an answer; the last mark is not shown": Stream(
        "openai",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is 1 <| 2.",
        "It is 1 <| 2.",
        (),
        "One.\nTwo.",
        "openai_gptoss",
        "<|start|>assistant",
    ),
    "harmony: two calls, the recipient before the channel": Stream(
        "openai",
        f"<|channel|>commentary to=functions.now<|message|>{{}}<|call|><|start|>assistant to=functions.search"
        f"<|channel|>commentary json<|message|>{said({'query': 'q'})}",
        "",
        (("now", {}), ("search", {"query": "q"})),
        "",
        "openai_gptoss",
        "<|start|>assistant",
    ),
}


@dataclass
class Heard:
    """What a client would have from the events."""

    content: str = ""
    reasoning: str = ""
    calls: list[list] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    num_ended: int = 0

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self.content += event.text
            elif isinstance(event, ReasoningDelta):
                assert not self.calls, "reasoning comes first"
                self.reasoning += event.text
            elif isinstance(event, CallStart):
                assert event.index == len(self.calls)
                self.calls.append([event.name, ""])
                self.ids.append(event.id)
            elif isinstance(event, Arguments):
                assert event.index == len(self.calls) - 1
                self.calls[-1][1] += event.text
            else:
                assert isinstance(event, CallEnd)
                assert event.index == len(self.calls) - 1
                self.num_ended += 1

    def same(self) -> tuple:
        """All that must not depend on how the text was cut; ids are drawn."""
        return self.content, self.reasoning, self.calls, self.num_ended


def heard(parser: Parser, pieces: list[str], stopped: bool = True) -> Heard:
    """stopped: the output ended by itself."""
    result = Heard()
    for piece in pieces:
        result.take(parser.push(piece))
    result.take(parser.finish(stopped))
    return result
