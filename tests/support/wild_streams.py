"""Outputs in the wild: as models write them that leave something out, or do it another way."""

from support.tool_streams import DS, KIMI, STREAMS, Stream, kimi, v3

PARIS = (("get_weather", {"city": "Paris"}),)
PARIS_3 = (("get_weather", {"city": "Paris", "days": 3}),)
QUERY, NOW = ("search", {"query": "x"}), ("now", {})
NEAR = (("get_weather", {"near": ["a", "it's"], "days": 3}),)
_CODER, _GLM = "<tool_call>\n<function=get_weather>\n", "<tool_call>get_weather\n"
_CITY = "<parameter=city>\nParis\n"
_DSML = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
_V3 = v3(*QUERY)
_OBJECT, _CALL = '{"query": "x"}', '{"name": "search", "arguments": {"query": "x"}}'
_NOW = '{"name": "now", "arguments": {}}'
_THINK_CALL = f"<tool_call>\n{_NOW}\n</tool_call>"

WILD = {
    "coder: a parameter is not closed before the next": Stream(
        "qwen3_coder",
        f"{_CODER}{_CITY}<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        calls=PARIS_3,
    ),
    "coder: nor before the function's end": Stream(
        "qwen3_coder", f"{_CODER}{_CITY}</function>\n</tool_call>", calls=PARIS
    ),
    "coder: nor before the call's end": Stream("qwen3_coder", f"{_CODER}{_CITY}</tool_call> Hi", " Hi", PARIS),
    "coder: a function is not closed": Stream("qwen3_coder", f"{_CODER}{_CITY}</parameter>\n</tool_call>", calls=PARIS),
    "coder: nor before the next call": Stream(
        "qwen3_coder", f"{_CODER}{_CITY}</parameter>\n{_CODER}{_CITY}</parameter>\n</function>", calls=(*PARIS, *PARIS)
    ),
    "coder: the end behind a parameter": Stream("qwen3_coder", f"{_CODER}{_CITY}</parameter>\n", calls=PARIS),
    "coder: the end within a tag": Stream("qwen3_coder", f"{_CODER}{_CITY}</para", calls=PARIS),
    "coder: Python's quotes": Stream(
        "qwen3_coder",
        f"{_CODER}<parameter=near>\n['a', \"it's\"]\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>",
        calls=NEAR,
    ),
    "coder: a name in quotes and blanks": Stream(
        "qwen3_coder", f'<function= "get_weather" >\n{_CITY}</parameter>\n</function>', calls=PARIS
    ),
    "coder: an object behind the name": Stream(
        "qwen3_coder", '<tool_call>\n<function=get_weather>\n{"city": "Paris"}\n</function>\n</tool_call>', calls=PARIS
    ),
    "seed: a parameter is not closed": Stream(
        "seed_oss", f"<seed:tool_call>\n<function=get_weather>\n{_CITY}</function>\n</seed:tool_call>", calls=PARIS
    ),
    "glm: a value is not closed before a key": Stream(
        "glm45",
        f"{_GLM}<arg_key>city</arg_key>\n<arg_value>Paris\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        calls=PARIS_3,
    ),
    "glm: nor before the end": Stream(
        "glm45", f"{_GLM}<arg_key>city</arg_key><arg_value>Paris\n</tool_call>", calls=PARIS
    ),
    "glm: a call is not closed": Stream(
        "glm45", f"{_GLM}<arg_key>city</arg_key><arg_value>Paris</arg_value>\n", calls=PARIS
    ),
    "glm: nor before the next": Stream(
        "glm45",
        f"{_GLM}<arg_key>city</arg_key><arg_value>Paris</arg_value>\n<tool_call>now</tool_call>",
        calls=(*PARIS, NOW),
    ),
    "glm: an object behind the name": Stream("glm45", f'{_GLM}{{"city": "Paris"}}\n</tool_call>', calls=PARIS),
    "glm: as hermes": Stream("glm45", f"<tool_call>{_CALL}</tool_call>", calls=(QUERY,)),
    "glm: a name in quotes": Stream(
        "glm45",
        '<tool_call> "get_weather"\n<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>',
        calls=PARIS,
    ),
    "glm: Python's quotes": Stream(
        "glm45",
        f"{_GLM}<arg_key>near</arg_key><arg_value>['a', \"it's\"]</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call>",
        calls=NEAR,
    ),
    "glm: the name of no tool before a bracket": Stream("glm45", "A <tool_call> tag { x }", "A <tool_call> tag { x }"),
    "dsml: a parameter is not closed": Stream(
        "deepseek_v4",
        f'{_DSML}<｜DSML｜parameter name="city" string="true">Paris\n<｜DSML｜parameter name="days" string="false">3\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        calls=PARIS_3,
    ),
    "dsml: nothing is closed": Stream(
        "deepseek_v32",
        f'{_DSML}<｜DSML｜parameter name="city" string="true">Paris'.replace("tool_calls", "function_calls"),
        calls=PARIS,
    ),
    "minimax: names without quotes": Stream(
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name=get_weather>\n<parameter name=city>Paris</parameter>\n</invoke>\n"
        "</minimax:tool_call>Hi",
        "\nHi",
        PARIS,
    ),
    "kimi: no section": Stream("kimi_k2", f"So {kimi('now', 0, {})}", "So", (NOW,)),
    "kimi: a section in the singular": Stream(
        "kimi_k2", KIMI.format(kimi(*NOW[:1], 0, {})).replace("calls_section", "call_section") + "Hi", "Hi", (NOW,)
    ),
    "kimi: a call is not closed": Stream(
        "kimi_k2",
        '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "x<|tool_calls_section_end|>',
        calls=(QUERY,),
    ),
    "kimi: what is no object is text": Stream(
        "kimi_k2",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>x<|tool_call_end|>",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>x<|tool_call_end|>",
    ),
    "llama: a sentence before": Stream("llama3_json", f"I look: {_CALL}", "I look:", (QUERY,)),
    "llama: two objects on two lines": Stream("llama3_json", f"{_NOW}\n{_CALL}", calls=(NOW, QUERY)),
    "llama: the name as function": Stream(
        "llama3_json", '{"type": "function", "function": "search", "parameters": {"query": "x"}}', calls=(QUERY,)
    ),
    "llama: calls in an answer are text": Stream(
        "llama3_json",
        f'{{"rows": [{_NOW}, {_CALL}], "row" : {_CALL}}}',
        f'{{"rows": [{_NOW}, {_CALL}], "row" : {_CALL}}}',
    ),
    "hermes: two objects in a tag": Stream("hermes", f"<tool_call>\n{_NOW}\n{_CALL}\n</tool_call>", calls=(NOW, QUERY)),
    "hermes: a list in a tag": Stream("hermes", f"<tool_call>[{_NOW}, {_CALL}]</tool_call>Hi", "Hi", (NOW, QUERY)),
    "hermes: OpenAI's object": Stream(
        "hermes", f'<tool_call>{{"type": "function", "function": {_CALL}}}</tool_call>', calls=(QUERY,)
    ),
    "hermes: Python's quotes": Stream(
        "hermes",
        "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'say \"x\" \\'', 'exact': True, 'code': None}}"
        "</tool_call>",
        calls=(("get_weather", {"city": 'say "x" \'', "exact": True, "code": None}),),
    ),
    "hermes: a line end in a text, a comma at the end, an escape that is none": Stream(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\\d", "near": ["a",], "code": NaN,},}'
        "</tool_call>",
        calls=(("get_weather", {"city": "a\nb\\d", "near": ["a"], "code": "NaN"}),),
    ),
    "hermes: brackets that do not fit, commas and colons that are missing": Stream(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"near": ["a" "b"} , city: Paris, "days" 3]}</tool_call>',
        calls=(("get_weather", {"near": ["a", "b"]}),),
    ),
    "hermes: the tag ends an open object": Stream(
        "hermes", '<tool_call>{"name": "search", "arguments": {"query": "x"\n</tool_call>Hi', "Hi", (QUERY,)
    ),
    "hermes: the end within a text": Stream(
        "hermes", '<tool_call>{"name": "search", "arguments": {"query": "x', calls=(QUERY,)
    ),
    "hermes: no arguments at the end": Stream("hermes", '<tool_call>{"name": "now"', '<tool_call>{"name": "now"'),
    "deepseek v3: no fence": Stream(
        "deepseek_v3", DS.format(_V3.replace("```json\n", "").replace("\n```", "")), calls=(QUERY,)
    ),
    "deepseek v3: a fence of no language": Stream("deepseek_v3", DS.format(_V3.replace("json", "")), calls=(QUERY,)),
    "deepseek v3: a fence closed on the line": Stream(
        "deepseek_v3", DS.format(_V3.replace("\n```<", "```<")), calls=(QUERY,)
    ),
    "deepseek v3.1: the form of V3": Stream("deepseek_v31", DS.format(_V3), calls=(QUERY,)),
    "deepseek v3.1: an open object": Stream(
        "deepseek_v31",
        DS.format('<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x<｜tool▁call▁end｜>'),
        calls=(QUERY,),
    ),
    "mistral: an object without a list": Stream("mistral", f"[TOOL_CALLS] {_CALL}", calls=(QUERY,)),
    "mistral: an open object": Stream("mistral", '[TOOL_CALLS]search[ARGS]{"query": "x"', calls=(QUERY,)),
    "pythonic: no list": Stream("pythonic", 'search(query="x")', calls=(QUERY,)),
    "pythonic: no list, two lines": Stream("pythonic", "now()\nsearch('x')\nDone", "\nDone", (NOW, QUERY)),
    "pythonic: JSON's constants in Python's quotes": Stream(
        "pythonic", "[search(query={'a': true})]", calls=(("search", {"query": {"a": True}}),)
    ),
    "pythonic: the end within a list": Stream(
        "pythonic", "[get_weather(near=['a', \"it's", calls=(("get_weather", {"near": ["a", "it's"]}),)
    ),
    "harmony: an open object": Stream(
        "openai",
        "<|channel|>commentary to=functions.search<|message|>" + _OBJECT[:-1],
        calls=(QUERY,),
        tail="<|start|>assistant",
    ),
    "gemma 4: a text without marks, no bracket": Stream(
        "gemma4", "<|tool_call>call:get_weather{city:Paris, days: 3<tool_call|>", calls=PARIS_3
    ),
    "qwen3: no opening tag": Stream("hermes", "hm</think>Hi", "Hi", (), "hm", "qwen3"),
    "qwen3: no opening tag, and a call": Stream("hermes", f"hm</think>{_THINK_CALL}", "", (NOW,), "hm", "qwen3"),
    "qwen3: no reasoning": Stream("hermes", f"Hi\n{_THINK_CALL}", "Hi", (NOW,), "", "qwen3"),
    "qwen3: a call before the closing tag": Stream(
        "hermes", f"<think>hm\n{_THINK_CALL}\n</think>\n\nHi", "\nHi", (NOW,), "hm", "qwen3"
    ),
    "qwen3: a word about calls before the closing tag": Stream(
        "hermes", "<think>hm <tool_call> x</think>Hi", "Hi", (), "hm <tool_call> x", "qwen3"
    ),
    "qwen3 coder: a call in a thought that is not closed": Stream(
        "qwen3_coder", f"<think>hm\n{_CODER}{_CITY}</parameter></function></tool_call>", "", PARIS, "hm", "qwen3"
    ),
}
assert not WILD.keys() & STREAMS.keys()
