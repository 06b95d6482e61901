"""Sampling options over HTTP, by the official client, on the embedded pair: what `LLM` gives for the same request."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openai
import pytest

from support.grids import few_of
from support.serving import TOKENIZER, children_of, serving
from support.waiting import until
from treetop import LLM, RequestOutput, SamplingParams, StructuredOutput

NAME, PROMPT = "builtin:nestling", "def area(r):"
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
NUMBERS = [TOKENIZER.encode(text, special=False)[0] for text in "0123456789"]

OPTIONS = [
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.4, "temperature": 0.8},
    {"logit_bias": {str(NUMBERS[3]): 6.5, str(NUMBERS[4]): -100}, "temperature": 1.1},
    {"min_tokens": 20, "stop_token_ids": TOKENIZER.encode(" return\n", special=False)},
    {"allowed_token_ids": NUMBERS},
    {"bad_words": ["return", "    return", "math.pi"]},
    {"temperature": 1.0, "min_p": 0.05, "top_k": 40, "top_p": 0.95},
]


@pytest.fixture(scope="module")
def server():
    with serving(
        "--dtype", "float64", "--device", "cpu", "--context-length", "256", "--chat-template", CHAT
    ) as running:
        yield running


@pytest.fixture(scope="module")
def llm():
    llm = LLM(dtype="float64", device="cpu", context_length=256)
    llm.said = {}
    yield llm
    llm.close()


def complete(server, **body):
    """The fields that OpenAI's client does not know travel beside the others."""
    known = {"logprobs", "n", "max_tokens", "prompt", "stream", "best_of", "echo"}
    extra = {name: body.pop(name) for name in set(body) - known}
    request = {"model": NAME, "prompt": PROMPT, "max_tokens": 30, **body}
    return server.client().completions.create(**request, extra_body={"temperature": 0, "seed": 7, **extra})


def offline(llm, **options) -> RequestOutput:
    """Of equal options the same output, which is made once."""
    bias = {int(token): value for token, value in options.pop("logit_bias", {}).items()}
    params = SamplingParams(**{"max_tokens": 30, "seed": 7, "logit_bias": bias, **options})
    if repr(params) not in llm.said:
        llm.said[repr(params)] = llm.generate(PROMPT, params)[0]
    return llm.said[repr(params)]


@pytest.mark.parametrize("options", few_of(OPTIONS, 0, 2, 5), ids=lambda options: next(iter(options)))
def test_an_option_gives_what_it_gives_offline(server, llm, options):
    want = offline(llm, **options)
    answer = complete(server, **options)
    assert answer.choices[0].text == want.text
    assert answer.choices[0].finish_reason == want.finish_reason
    assert answer.usage.completion_tokens == len(want.token_ids)
    if "min_p" not in options:
        assert want.token_ids != offline(llm, temperature=options.get("temperature", 0)).token_ids


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["area", "r"]}, "count": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LARK = 'start: call+\ncall: NAME "(" /[0-9]{1,2}/ ");"\nNAME: /[a-c]{2}/'
GBNF = 'root ::= pair ("," pair)*\npair ::= [a-c] [0-9]'
TAGS = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
NAMED = {"type": "json_schema", "json_schema": {"name": "counted", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("body", "kind", "spec"),
    few_of(
        [
            ({"response_format": NAMED}, "json_schema", json.dumps(SCHEMA)),
            ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
            ({"json_schema": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
            ({"structured_outputs": {"regex": "[a-f]{3}"}}, "regex", "[a-f]{3}"),
            ({"guided_choice": ["one", "two"]}, "choice", '["one", "two"]'),
            ({"response_format": {"type": "json_object"}}, "json_object", ""),
            ({"structured_outputs": {"grammar": LARK}}, "grammar", LARK),
            ({"guided_grammar": GBNF}, "grammar", GBNF),
            ({"ebnf": GBNF}, "grammar", GBNF),
            ({"structural_tag": TAGS}, "structural_tag", json.dumps(TAGS)),
            ({"response_format": {"type": "structural_tag", **TAGS}}, "structural_tag", json.dumps(TAGS)),
        ],
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        8,
        10,
    ),
)
def test_a_structure_gives_what_it_gives_offline(server, llm, body, kind, spec):
    """Each spelling; the same tokens as without HTTP, and JSON where it is asked for."""
    want = offline(llm, structured_output=StructuredOutput(kind, spec), temperature=0.9)
    answer = complete(server, temperature=0.9, **body)
    assert answer.choices[0].text == want.text
    assert answer.choices[0].finish_reason == want.finish_reason
    if kind == "json_schema":
        assert json.loads(want.text)["count"] >= 3


def test_chat_streams_json_to_the_official_client(server):
    """Two choices, and another request beside them."""
    body = {"model": NAME, "messages": [{"role": "user", "content": "# hi"}], "max_tokens": 60, "seed": 3, "n": 2}
    client, texts = server.client().chat.completions, ["", ""]
    for chunk in client.create(**body, response_format=NAMED, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(json.loads(text)["count"] >= 3 for text in texts)


def test_choices_have_seeds_of_their_own_that_stay(server):
    """The i-th draws as a request with seed + i; the seeds lie on a ring."""
    many = complete(server, n=3, temperature=1.2, seed=2**63 - 2)
    texts = [choice.text for choice in many.choices]
    assert len(set(texts)) == 3
    alone = [complete(server, temperature=1.2, seed=seed).choices[0].text for seed in (2**63 - 2, 2**63 - 1, 0)]
    assert texts == alone
    assert many.usage.completion_tokens > 30
    assert complete(server, n=3, best_of=3, temperature=1.2, seed=2**63 - 2).choices[2].text == texts[2]


def test_a_completions_logprobs_are_the_engines(server, llm):
    want = offline(llm, logprobs=2, stop=" ** ")
    found = complete(server, logprobs=2, stop=" ** ").choices[0].logprobs
    assert len(found.tokens) == len(want.token_ids)
    assert found.token_logprobs == pytest.approx([each.logprob for each in want.logprobs], abs=1e-6)
    assert "".join(found.tokens).startswith(want.text)
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    for token, own, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == own == max(top.values())


def test_streamed_logprobs_are_those_at_once(server):
    whole = complete(server, logprobs=1, temperature=1.0, n=2)
    pieces = {0: [], 1: []}
    for chunk in complete(server, logprobs=1, temperature=1.0, n=2, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += zip(
                choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset, strict=True
            )
    for choice in whole.choices:
        told = choice.logprobs
        assert pieces[choice.index] == [*zip(told.tokens, told.token_logprobs, told.text_offset, strict=True)]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_prompts_logprobs(server, llm, max_tokens, stream):
    """What lm-eval asks: prompts as ids, max_tokens 0 or 1; nothing for the first token, then each token's own."""
    texts = ["def area(r):\n    return r ** 2\n", "import os"]
    ids = [TOKENIZER.encode(text) for text in texts]
    told = {0: [], 1: []}
    answer = complete(server, prompt=ids, max_tokens=max_tokens, echo=True, logprobs=2, stream=stream)
    found = {0: "", 1: ""}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index] += choice.text
            if choice.logprobs is not None:
                got = choice.logprobs
                lists = got.tokens, got.token_logprobs, got.top_logprobs, got.text_offset
                told[choice.index] += zip(*lists, strict=True)
    for index, prompt in enumerate(ids):
        output = llm.generate(prompt, SamplingParams(max_tokens=max_tokens, prompt_logprobs=2, logprobs=2))[0]
        assert found[index] == texts[index] + output.text
        tokens, own, best, offsets = zip(*told[index], strict=True)
        assert "".join(tokens).startswith(texts[index])
        assert offsets == tuple(len("".join(tokens[:i])) for i in range(len(tokens)))
        assert own[0] is best[0] is None
        want = [each.logprob for each in (*output.prompt_logprobs[1:], *output.logprobs)]
        assert own[1:] == pytest.approx(want, abs=1e-6)
        for token, logprob, top in zip(tokens[1:], own[1:], best[1:], strict=True):
            assert top[token] == logprob
            assert 1 <= len(top) <= 3


def test_an_echo_without_logprobs_may_be_all_that_is_asked(server):
    answer = complete(server, max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PROMPT, "length")
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 0
    assert "".join(each.choices[0].text for each in complete(server, max_tokens=0, echo=True, stream=True)) == PROMPT


def test_prompt_logprobs_come_in_vllms_form(server, llm):
    want = llm.generate(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=1))[0]
    choice = complete(server, max_tokens=2, prompt_logprobs=1, logprobs=3, echo=True).choices[0]
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
    chat = server.post("/v1/chat/completions", body).json()
    assert chat["prompt_token_ids"] == list(want.prompt_token_ids)
    for told in (choice.model_extra["prompt_logprobs"], chat["prompt_logprobs"]):
        assert told[0] is None
        for token, each, logprobs in zip(want.prompt_token_ids[1:], told[1:], want.prompt_logprobs[1:], strict=True):
            ((best, value),) = logprobs.top
            assert each.keys() == {str(token), str(best)}
            assert each[str(token)]["logprob"] == pytest.approx(logprobs.logprob, abs=1e-6)
            assert each[str(token)]["rank"] == (1 if token == best else None)
            assert each[str(best)]["logprob"] == pytest.approx(value, abs=1e-6)
            assert each[str(best)]["rank"] == 1
            assert each[str(token)]["decoded_token"] == TOKENIZER.token_bytes(token).decode(errors="replace")


def test_a_chats_logprobs_spell_its_tokens(server):
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "# ö 素早い\ndef area(r):"}],
        "max_tokens": 20,
        "temperature": 1.5,
        "seed": 3,
        "logprobs": True,
    }
    client = server.client().chat.completions
    whole = client.create(**body, top_logprobs=2).choices[0]
    content = whole.logprobs.content
    assert len(content) == 20
    text = b"".join(bytes(each.bytes) for each in content)
    assert text.decode(errors="replace") == whole.message.content
    for each in content:
        assert len(each.top_logprobs) == 2
        assert bytes(each.bytes).decode(errors="replace") == each.token
        assert each.top_logprobs[0].logprob >= max(each.logprob, each.top_logprobs[1].logprob)
    streamed = [
        each.model_dump()
        for chunk in client.create(**body, top_logprobs=2, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for each in choice.logprobs.content
    ]
    assert streamed == [each.model_dump() for each in content]
    assert all(not each.top_logprobs for each in client.create(**body).choices[0].logprobs.content)
    drawn = client.create(**body, extra_body={"logprobs_mode": "processed_logprobs"}).choices[0].logprobs.content
    assert [each.raw_logprob for each in drawn] == pytest.approx([each.logprob for each in whole.logprobs.content])
    assert all(each.logprob != each.raw_logprob for each in drawn), "a temperature of 1.5 changes each"
    with pytest.raises(openai.BadRequestError, match="logprobs_mode"):
        client.create(**body, top_logprobs=2, extra_body={"logprobs_mode": "processed_logprobs"})


DEEP: dict = {}
for _ in range(300):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"best_of": 2}, "best_of: only equal to n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be in"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: not in a stream"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens must be at least 1"),
        ({"logprobs": 21}, "logprobs must be in"),
        ({"logprobs": -1}, "logprobs must be in"),
        ({"logit_bias": {"a": 1}}, "logit_bias: keys must be token ids"),
        ({"logit_bias": {"4096": 1}}, "logit_bias token id 4096 lies outside"),
        ({"logit_bias": {"1": 101}}, "logit_bias: a bias"),
        ({"logit_bias": {str(token): 1 for token in range(512)}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty must be in"),
        ({"frequency_penalty": "1"}, "frequency_penalty: "),
        ({"repetition_penalty": -1}, "repetition_penalty must be in"),
        ({"min_tokens": 31}, "min_tokens must be in"),
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"bad_words": [""]}, "bad_words must not be empty"),
        ({"bad_words": ["a"] * 129}, "bad_words: "),
        ({"response_format": {"type": "xml"}}, "response_format: type must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema must be"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format: 'schema' is not known"),
        ({"response_format": {"type": "text", "strict": True}}, "response_format: 'strict' is not known"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stricts": True}}},
            "response_format.json_schema: 'stricts' is not known, only schema, name, strict, description",
        ),
        ({"guided_json": {"$ref": "#"}}, "guided_json: no text has this structure"),
        ({"regex": r"[^\s\S]", "stream": True}, "regex: no text has this structure"),
        ({"regex": "x{50}a{1000000000}", "stream": True}, "regex: the structure is too complex"),
        (
            {"guided_json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "guided_json: oneOf: its branches must",
        ),
        ({"regex": "a{0}", "ignore_eos": True}, "the constraint allows no first token"),
        ({"response_format": {"type": "structural_tag"}}, "structural_tag needs an object with structures"),
        ({"response_format": {"type": "strange"}}, "response_format: type must be"),
        ({"structural_tag": {**TAGS, "triggers": ["<g="]}}, "must begin with one of the triggers"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs: grammar: "),
        ({"structured_outputs": {"strange": "a"}}, "structured_outputs: 'strange' is not supported"),
        ({"guided_grammar": 'root ::= "a" | [', "stream": True}, "guided_grammar: grammar: neither Lark nor GBNF"),
        ({"ebnf": "root ::= " + "(" * 5000}, "ebnf: grammar: too deep"),
        ({"ebnf": 'root ::= "a"\n' + "#" * 20000}, "at most 16384 are read"),
        ({"ebnf": "start: x"}, "ebnf: "),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs: json, regex: give one"),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex, regex: give one"),
        ({"guided_regex": "a(b"}, "unclosed group"),
        ({"guided_json": {"type": "strange"}}, "strange"),
        ({"guided_json": "no json"}, "guided_json: "),
        ({"guided_json": DEEP}, "the body is not JSON: recursion limit"),
        ({"guided_choice": []}, "choice needs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, body, words):
    answer = server.post("/v1/completions", {"model": NAME, "prompt": PROMPT, "max_tokens": 30, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_client_of_openai_may_name_and_describe_its_schema(server):
    described = {**NAMED["json_schema"], "description": "a count", "strict": None}
    answer = complete(server, response_format={"type": "json_schema", "json_schema": described})
    assert json.loads(answer.choices[0].text)["count"] >= 3


def test_hostile_structures_stall_no_stream_and_no_other_request(server):
    """Streams and answers come while those that check structures stand still; then what is hostile is refused, for its
    time or memory, and what only takes long is kept.
    """
    multiples = [{"guided_json": {"type": "integer", "multipleOf": each}} for each in (9999991, 19997)]
    hostile = [multiples[0], {"regex": "a{1000000000}"}, {"guided_json": {"$ref": "#"}, "stream": True}]
    ask = {"model": NAME, "prompt": PROMPT, "max_tokens": 8}
    with ThreadPoolExecutor(8) as pool:
        stopped = {*checkers(server)}
        stop(stopped)
        try:
            answers = [pool.submit(server.post, "/v1/completions", {**ask, **body}) for body in hostile * 2]
            until(lambda: len(checkers(server)) == 2)
            stopped = {*checkers(server)}
            stop(stopped)
            for _ in range(3):
                assert server.get("/health").status_code == 200
                events = complete(server, max_tokens=100, stream=True, ignore_eos=True)
                assert sum(1 for _ in events) > 10
            assert not all(each.done() for each in answers)
        finally:
            go_on(stopped)
        late = server.post("/v1/completions", {**ask, **multiples[0], "timeout": 0.1})
        assert [answer.result().status_code for answer in answers] == [400] * 6
    assert late.status_code in (400, 504)
    assert server.post("/v1/completions", {**ask, **multiples[1]}).status_code == 200


def checkers(server) -> list[int]:
    """Process ids of those that check structures."""
    return children_of(server.process.pid, "structure_process")


def stop(pids) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def go_on(pids) -> None:
    """Those that have not been ended for their time."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_the_time_of_a_request_counts_while_its_structure_is_checked(server):
    body = {"model": NAME, "prompt": PROMPT, "guided_json": {"type": "integer", "multipleOf": 9999937}}
    answer = server.post("/v1/completions", {**body, "timeout": 0.2, "stream": True})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"


@pytest.mark.slow
def test_an_engine_that_cannot_says_so(mock_server):
    """The mock replays tokens: nothing changes them, and they have no log-probabilities."""
    for body, words in (
        ({"min_tokens": 2}, "min_tokens: this engine"),
        ({"logprobs": 1}, "logprobs: this engine"),
        ({"logprobs": 1, "echo": True}, "logprobs: this engine"),
        ({"regex": "a"}, "structured_output: this engine"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            complete(mock_server, **body)
    messages = [{"role": "user", "content": "hi"}]
    answer = mock_server.post("/v1/chat/completions", {"messages": messages, "top_logprobs": 2})
    assert "top_logprobs: only with logprobs true" in answer.json()["error"]["message"]
