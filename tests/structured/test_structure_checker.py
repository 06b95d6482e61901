"""Structures are checked in processes that may be killed: what is hostile is refused in time, and hurts nobody."""

import asyncio
import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, RootModel

from treetop import StructuredOutput
from treetop.checkpoints.folder import resolve_folder
from treetop.structured import structure_checker
from treetop.structured.grammars import GrammarCompiler
from treetop.structured.one_of import with_exclusive_branches
from treetop.structured.structure_checker import StructureChecker
from treetop.structured.structured_output import StructuredOutputManager
from treetop.types.constraint import StructureLimits
from treetop.types.errors import EngineError, InputError
from treetop.types.layout import PLAIN
from treetop.types.requests import CoreInfo

FOLDER, VOCAB = resolve_folder("builtin:nestling"), 4096
INFO = CoreInfo(str(FOLDER), VOCAB, 256, 4, PLAIN, eos_ids=(0,), can_constrain=True)
HUGE = StructuredOutput("json_schema", '{"type": "integer", "multipleOf": 9999991}')
WORD = StructuredOutput("regex", "[a-f]{3}")


def checker_of(**limits) -> StructureChecker:
    return StructureChecker(INFO._replace(structure_limits=StructureLimits(**limits)))


@pytest.fixture(scope="module")
def checker():
    made = checker_of()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"timeout_s": 0.5, "memory_mib": 4096}, "longer than 0.5 s to compile.*--structured-output-timeout"),
        ({"timeout_s": 60.0, "memory_mib": 64}, "more than 64 MiB.*--structured-output-memory"),
    ],
)
def test_what_takes_too_much_is_refused_by_the_option_s_name(limits, words):
    """The process that was killed for it is replaced: others are checked as before."""
    made = checker_of(**limits)
    with pytest.raises(InputError, match=f"structured_output: .*{words}"):
        made.check(HUGE)
    made.check(StructuredOutput("choice", '["a"]'))
    made.close()


def test_all_that_ask_for_a_structure_wait_for_one_check(monkeypatch):
    """Side by side or later; a good one as a bad one."""
    asked, release = [], threading.Event()

    def ask(self, structure):
        asked.append(structure)
        release.wait()
        return None if structure is WORD else "bad"

    monkeypatch.setattr(structure_checker._Process, "ask", ask)
    made = checker_of()

    async def many() -> list:
        waiting = [asyncio.ensure_future(made.checked(each)) for each in (WORD, HUGE) * 8]
        while len(asked) < 2:
            await asyncio.sleep(0.001)
        release.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    found = asyncio.run(many())
    assert [type(each) for each in found] == [type(None), InputError] * 8
    made.check(WORD)
    with pytest.raises(InputError, match="bad"):
        made.check(HUGE)
    assert len(asked) == 2
    made.close()


def test_a_structure_that_nobody_waits_for_is_not_begun(monkeypatch):
    """Two checks hold both processes; the third's client goes. One that another waits for is begun."""
    asked, release = [], threading.Event()
    monkeypatch.setattr(
        structure_checker._Process, "ask", lambda self, each: asked.append(each) or (release.wait() and None)
    )
    made = checker_of()
    structures = [StructuredOutput("regex", letter) for letter in "abcd"]

    async def some_leave() -> None:
        waiting = [asyncio.ensure_future(made.checked(each)) for each in (*structures, structures[3])]
        while len(asked) < 2:
            await asyncio.sleep(0.001)
        waiting[2].cancel()
        waiting[3].cancel()
        await asyncio.wait(waiting[2:4])
        release.set()
        await asyncio.gather(*waiting[:2], waiting[4])

    asyncio.run(some_leave())
    assert {each.spec for each in asked} == {"a", "b", "d"}
    made.check(structures[2])
    assert [each.spec for each in asked].count("c") == 1
    made.close()


def test_a_checker_that_was_closed_starts_nothing():
    made = checker_of()
    made.check(WORD)
    made.close()
    for _ in range(2):  # with the process that there was, and without
        with pytest.raises(EngineError, match="has been closed"):
            made.check(StructuredOutput("regex", "b"))
    assert not any(each.alive for each in made._all)


def test_the_event_loop_does_not_wait_for_a_check():
    """The process that checks is stopped: it answers nothing while the loop goes round."""
    checker = checker_of(timeout_s=60.0)
    checker.check(WORD)
    (process,) = checker._all

    async def hostile() -> None:
        os.kill(process._process.pid, signal.SIGSTOP)
        checking = asyncio.ensure_future(checker.checked(StructuredOutput("regex", "b")))
        try:
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not checking.done()
        finally:
            os.kill(process._process.pid, signal.SIGCONT)
        await checking

    asyncio.run(hostile())
    checker.close()


@pytest.mark.parametrize(
    "spec",
    [
        '{"type": "object"}, "x": 1',
        '{"type": "object"}, "name": "z"',
        '{"type": "object"}}, {"lark_grammar": "start: \\"a\\""',
        '{"type": "object"',
        "",
    ],
)
def test_a_schema_that_is_not_json_is_refused_and_adds_nothing(checker, spec):
    with pytest.raises(InputError, match="cannot be read as JSON"):
        checker.check(StructuredOutput("json_schema", spec))


def test_other_threads_run_while_a_structure_is_compiled():
    """The library lets go of Python's lock: the engine has turns meanwhile."""
    grammars, turns = GrammarCompiler(FOLDER, VOCAB, (0,)), 0
    grammars.load()
    slow = StructuredOutput("json_schema", '{"type": "integer", "multipleOf": 99991}')
    with ThreadPoolExecutor() as pool:
        compiled = pool.submit(grammars.parser, slow)
        while not wait([compiled], 0.001).done:
            turns += 1
    compiled.result()
    assert turns > 20


# ---------------------------------------------------------------------------------------------- random structures


def random_regex(dice: random.Random, depth: int = 0) -> str:
    choice = dice.random()
    if depth > 4 or choice < 0.25:
        return dice.choice(
            ["a", ".", "[a-z]", r"\w", r"\p{L}", "[^a]", r"[\s\S]", r"[^\s\S]", "é", "(", "]", r"\b", "^"]
        )
    inner = random_regex(dice, depth + 1)
    if choice < 0.45:
        return f"({inner}|{random_regex(dice, depth + 1)})"
    if choice < 0.65:
        return inner + random_regex(dice, depth + 1)
    if choice < 0.75:
        return f"({inner}){dice.choice('*+?')}"
    minimum = dice.choice([0, 1, 3, 30, 1000, 10**9, 2**32])
    return f"({inner}){{{minimum}{dice.choice(['', ',', f',{2 * minimum}', ',1'])}}}"


def random_schema(dice: random.Random, depth: int = 0):
    number = dice.choice([0, -1, 1, 7, 1e-7, 9973, 999983, 2**63, 10**400, "a", None])
    leaves = [
        {"type": "integer", "multipleOf": number, "minimum": dice.choice([number, 3])},
        {"type": "string", "pattern": random_regex(dice), "minLength": number},
        {"$ref": dice.choice(["#", "#/$defs/a", "#/properties/a", "http://x/y", 3])},
        {"enum": dice.choice([[], [1, "a", None], "a", [[]]])},
        {"const": number},
        dice.choice([True, False, None, {}, [], "x", 3]),
    ]
    if depth > 3 or dice.random() < 0.4:
        return dice.choice(leaves)
    some = [random_schema(dice, depth + 1) for _ in range(dice.randrange(1, 4))]
    return dice.choice(
        [
            {dice.choice(["allOf", "anyOf", "oneOf"]): some},
            {"type": "array", "items": some[0], "prefixItems": some, "minItems": number},
            {"type": "object", "properties": dict(zip("abc", some, strict=False)), "required": ["a", number]},
            {"type": "object", "additionalProperties": some[0], "minProperties": number, "$defs": {"a": some[0]}},
            {"not": some[0]},
            {"type": dice.choice(["object", ["string", "null"], "any", 3]), "patternProperties": {"a*": some[0]}},
        ]
    )


def random_structure(dice: random.Random) -> StructuredOutput:
    if dice.random() < 0.5:
        return StructuredOutput("regex", random_regex(dice))
    return StructuredOutput("json_schema", json.dumps(random_schema(dice)))


def test_random_structures_are_refused_or_kept_and_nothing_else_is_raised():
    """What passes the check is held to by the engine's own parsers: masks, or an InputError, each in bounded time."""
    dice, kept, said = random.Random(11), 0, []
    checker = checker_of(timeout_s=2.0)
    manager = StructuredOutputManager(GrammarCompiler(FOLDER, VOCAB, (0,)), 5.0)
    for _ in range(300):
        structure = random_structure(dice)
        try:
            checker.check(structure)
            walk(dice, manager.constraint(structure))
            kept += 1
        except InputError as error:
            said.append(str(error))
    checker.close()
    assert kept > 20
    assert len(said) > 20
    assert all(each.startswith("structured_output: ") and len(each) < 600 for each in said)


def walk(dice, constraint) -> None:
    """A few tokens of some text."""
    new_ids = ()
    for _ in range(12):
        asked = constraint.ask(new_ids)
        assert wait([asked], 30).done, "a mask has no bound"
        bits = int.from_bytes(asked.result(), "little") & ~1  # but EOS
        if not bits:
            return
        allowed = [token for token in range(VOCAB) if bits >> token & 1]
        new_ids = (dice.choice(allowed),)


# ---------------------------------------------------------------------------------------------- oneOf


class Closed(BaseModel, extra="forbid"):
    """Without keys that are not its own, which random texts are full of."""


class Cat(Closed):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(Closed):
    kind: Literal["dog", "wolf"] = "dog"
    good: bool


class Leaf(Closed):
    shape: Literal["leaf"]


class Node(Closed):
    shape: Literal["node"]
    left: "Annotated[Node | Leaf, Field(discriminator='shape')]"


Pet = RootModel[Annotated[Cat | Dog, Field(discriminator="kind")]]
Tree = RootModel[Annotated[Node | Leaf, Field(discriminator="shape")]]


@pytest.mark.parametrize("model", [Pet, Tree])
def test_unions_of_pydantic_are_kept_by_one_of_their_branches(checker, model):
    """Random texts of the structure are what the model takes, whichever branch they have."""
    schema = {**model.model_json_schema(), "x-guidance": {"whitespace_flexible": False}}
    structure = StructuredOutput("json_schema", json.dumps(schema))
    checker.check(structure)
    found = set()
    grammars, dice = GrammarCompiler(FOLDER, VOCAB, (0,)), random.Random(3)
    tokenizer = grammars.load()
    start = grammars.parser(structure)
    for _ in range(20):
        parser, ids, bits = start.copy(), [], 0
        while bits != 1 and len(ids) < 150:  # until only EOS may come
            parser.follow(ids[-1:])
            bits = int.from_bytes(parser.mask(), "little")
            ids.append(dice.choice([token for token in range(VOCAB) if bits >> token & 1]))
        if bits == 1:
            found.add(type(model.model_validate_json(tokenizer.decode_str(ids[:-1])).root))
    assert len(found) == 2


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [
            {"type": "object", "properties": {"a": {"const": 1}}},
            {"type": "object", "properties": {"a": {"const": 1.0}}},
        ],
        [
            {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}},
            {"type": "object", "properties": {"a": {"const": "y"}}},
        ],
        [{"type": "object", "properties": {"a": {"const": "x"}}}, {"properties": {"a": {"const": "y"}}}],
        [{"$ref": "#/oneOf/0"}, {"type": "object", "properties": {"a": {"const": "y"}}}],
    ],
)
def test_branches_that_may_both_fit_stay_refused(checker, branches):
    spec = json.dumps({"oneOf": branches})
    assert with_exclusive_branches(json.loads(spec)) == {"oneOf": branches}
    with pytest.raises(InputError, match=r"oneOf: its branches must exclude|no text|circular"):
        checker.check(StructuredOutput("json_schema", spec))
