"""Structures along draft trees: what trees give is what plain decoding under the structure gives, token for token.

Of regular expressions the oracle knows no parser library: what may come next are the tokens whose bytes keep a
derivative alive. Where a text is forced the library allows one spelling alone, so all other structures are asked of a
parser that is new for each token. When a budget of reasoning is spent follows from the output's bytes. Logits are
computed densely.
"""

import codecs
import json
import random
from dataclasses import dataclass, replace

import pytest

from conftest import spelling
from support.engines import build
from support.examples import EVERYTHING
from support.grids import few_of
from support.logit_options import changed
from support.oracles import drawn, float32, philox4x32_10, warped
from support.regexes import NONE, Regex, behind_text, nullable, random_regex, then, written
from support.tiny_models import EOS
from treetop import Reasoning, SamplingParams, StructuredOutput
from treetop.structured.grammars import GrammarCompiler

VOCAB, LENGTH = 211, 20
SHAPE = (4, 5, 16)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine finds masks late, and rounds would go on without drafts."""
    monkeypatch.setattr("treetop.scheduler.scheduler._PATIENCE_S", 60.0)


@dataclass(frozen=True)
class Case:
    """A prompt and how tokens are chosen; regex: what the text is held to, if it is one."""

    prompt: list[int]
    params: SamplingParams
    regex: Regex | None = None

    @property
    def held(self) -> bool:
        return self.params.structured_output is not None


def some_choices(dice: random.Random) -> StructuredOutput:
    texts = ["".join(dice.choices("abcdefgh!", k=dice.randint(1, 12))) for _ in range(6)]
    return StructuredOutput("choice", json.dumps(texts))


def some_schema(dice: random.Random) -> StructuredOutput:
    """Short names, so that a text of a few tokens gets behind them."""
    kinds = [{"type": "integer"}, {"type": "boolean"}, {"enum": ["ab", "c!", "ha"]}, {"type": "string", "maxLength": 3}]
    names = dice.sample(["a", "b", "ha", "cc!"], 2)
    schema = {"properties": {name: dice.choice(kinds) for name in names}, "required": names}
    return StructuredOutput("json_schema", json.dumps({"type": "object", "additionalProperties": False, **schema}))


def some_grammar(dice: random.Random) -> StructuredOutput:
    """In Lark's syntax or as GBNF, with a rule that refers to itself."""
    end, more = ("".join(dice.sample("abcdehk", 2)) for _ in range(2))
    if dice.random() < 0.5:
        return StructuredOutput("grammar", f'start: "{end}" | "(" start ")" /[{more}0-3]{{1,2}}/ start')
    return StructuredOutput("grammar", f'root ::= "{end}" | "(" root ")" [{more}] root?')


def some_tags(dice: random.Random) -> StructuredOutput:
    """The trigger is a letter that comes soon."""
    tag = {"begin": dice.choice(["a", "b!"]), "schema": {"enum": ["x", "yy", 3]}, "end": dice.choice(["!", ""])}
    return StructuredOutput("structural_tag", json.dumps({"structures": [tag], "triggers": [tag["begin"][0]]}))


def some_thought(dice: random.Random) -> StructuredOutput:
    """Reasoning that ends by itself now and then, before any text or a structure."""
    closes, opens = "".join(dice.choices("abcdefg!", k=dice.randint(1, 5))), dice.choice(["", "", "a", "b"])
    reasoning = Reasoning(closes, opens, dice.choice([0, 1, 3, 7]))
    held = dice.choice([some_choices, some_schema, some_grammar])(dice)
    return replace(dice.choice([StructuredOutput("text"), StructuredOutput("text"), held]), reasoning=reasoning)


def forced_by_budget(reasoning: Reasoning, output: list[int]) -> int | None:
    """The token that a spent budget leaves; each byte has a token, and the tokenizer knows no longer ones."""
    texts = [b"<eos>" if token == EOS else spelling(token) for token in output]
    said, begins = b"".join(texts), 0
    if reasoning.opens:
        shown = said.lstrip(b" \t\r\n")
        if not shown.startswith(reasoning.opens.encode()):
            return None
        begins = len(said) - len(shown) + len(reasoning.opens)
    thought, closes = said[begins:], reasoning.closes.encode()
    spent = sum(len(b"".join(texts[:place])) >= begins for place in range(len(texts)))
    if closes in thought or spent < reasoning.budget:
        return None
    begun = max(size for size in range(len(closes)) if thought.endswith(closes[:size]))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(thought)
    if not begun and decoder.getstate()[0] and spent < reasoning.budget + 3:
        return None
    return closes[begun] - 28


def ways(dice: random.Random) -> dict:
    return dice.choice(
        [
            {},
            {"temperature": 1.0},
            {"temperature": 1.4, "top_k": 30, "top_p": 0.95},
            {"temperature": 0.8, "frequency_penalty": 0.6, "logit_bias": {EOS: 1.5}},
            {"repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"temperature": 1.1, "min_tokens": 4, "stop_token_ids": (70, 74)},
        ]
    )


def cases(pair, count: int, seed: int) -> list[Case]:
    """Every eighth is free."""
    dice, made = random.Random(seed), []
    prompts = pair.prompts([dice.randint(1, 30) for _ in range(count)], seed)
    for number, prompt in enumerate(prompts):
        regex = held = None
        if number % 8 == 1:
            held = dice.choice([some_choices, some_schema, some_grammar, some_tags])(dice)
        elif number % 8 in (4, 5):
            held = some_thought(dice)
        elif number % 4:
            regex = then(random_regex(dice, b"abcdefghijkl0123!"), random_regex(dice, b"abcdefghijkl0123!", 4))
            held = StructuredOutput("regex", written(regex))
        params = {"max_tokens": LENGTH, "seed": number, "ignore_eos": number % 5 == 0, **ways(dice)}
        if params["ignore_eos"]:
            params.pop("min_tokens", None)  # the text may have to end before
        made.append(Case(prompt, SamplingParams(structured_output=held, **params), regex))
    return made


def may_follow(case: Case, output: list[int], grammars: GrammarCompiler) -> set[int]:
    """EOS where the text may end, unless it is ignored."""
    if case.params.structured_output is None:
        return {*range(VOCAB)}
    if case.regex is None:
        held = case.params.structured_output
        if held.reasoning is not None:
            forced = forced_by_budget(held.reasoning, output)
            if forced is not None:
                return {forced}
            if held.kind == "text":
                return {*range(VOCAB)}
            held = replace(held, reasoning=replace(held.reasoning, budget=None))
        parser = grammars.parser(held)
        parser.follow(output)
        mask = parser.mask()
        allowed = {t for t in range(VOCAB) if mask[t // 8] >> t % 8 & 1}
        return allowed - ({EOS} if case.params.ignore_eos else set())
    left = behind_text(case.regex, b"".join(map(spelling, output)))
    found = {t for t in range(VOCAB) if t != EOS and behind_text(left, spelling(t)) != NONE}
    return found | ({EOS} if nullable(left) and not case.params.ignore_eos else set())


def plain(llm, case: Case) -> tuple[tuple[int, ...], bool]:
    """The output, and whether some options leave no token, which ends the request with an error."""
    params, output = case.params, list[int]()
    grammars = GrammarCompiler(llm.engine.model_path, VOCAB, [EOS])
    while len(output) < params.max_tokens:
        allowed = may_follow(case, output, grammars)
        if not allowed:
            break
        logits = changed(llm.next_logits([*case.prompt, *output]).tolist(), case.prompt, output, params)
        held = [logit if token in allowed else float("-inf") for token, logit in enumerate(logits)]
        if max(held) == float("-inf"):
            return tuple(output), True
        weights = warped(held, float32(params.temperature), params.top_k, float32(params.top_p), 0.0)
        uniform = philox4x32_10([len(case.prompt) + len(output), 0, 0, 0], [params.seed, 0])[0] / 2**32
        output.append(drawn(weights, uniform))
        if output[-1] in params.stop_token_ids or (output[-1] == EOS and not params.ignore_eos):
            break
    return tuple(output), False


@pytest.fixture(scope="module")
def asked(weak_pair):
    llm = build(weak_pair, None)
    made = cases(weak_pair, 48 if EVERYTHING else 32, seed=3)
    want = [plain(llm, case) for case in made]
    llm.close()
    assert sum(len(output) for output, _ in want) > 8 * len(made)
    return made, want


def check(asked, outputs, *, trees=True):
    made, want = asked
    for case, (expected, fails), output in zip(made, want, outputs, strict=True):
        assert output.token_ids == expected, case
        assert (output.error is not None) == fails
    held = [sum(o.metrics.accept_lens) for o, case in zip(outputs, made, strict=True) if case.held]
    assert not trees or sum(held) > 5, "structures cost the trees"


@pytest.mark.parametrize(
    ("shape", "options"),
    few_of(
        [
            (None, {}),
            pytest.param(SHAPE, {}, marks=pytest.mark.slow),
            (SHAPE, {"graphs": "sim", "check_level": 3, "overlap": True}),
            ((3, 4, 25), {"max_running_requests": 3, "check_level": 2, "overlap": True}),
            ((1, 5, 6), {"graphs": "sim", "chunked_prefill_size": 16}),
        ],
        2,
    ),
    ids=str,
)
def test_random_structures_along_trees_equal_plain_masked_decoding(weak_pair, asked, shape, options):
    llm = build(weak_pair, shape, **options)
    made, _ = asked
    check(asked, llm.generate([case.prompt for case in made], [case.params for case in made]), trees=shape is not None)
    llm.close()


@pytest.mark.slow
def test_retraction_and_steps_in_flight_change_nothing(weak_pair, asked):
    """Pages run out again and again; a request that comes back goes on with its parser where it was."""
    llm = build(weak_pair, (2, 3, 8), page_size=4, context_length=80, max_total_tokens=96, overlap=True, check_level=3)
    made, _ = asked
    check(asked, llm.generate([case.prompt for case in made], [case.params for case in made]))
    assert llm.scheduler.num_retractions > 3
    llm.scheduler.check_integrity()
    llm.close()
