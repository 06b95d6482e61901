"""Each past bug of the field, put back by name: its guard says so, and without a guard it does harm."""

import io
from contextlib import redirect_stderr
from dataclasses import fields

import pytest

from engines import build, greedy, tokens
from treetop.cli import main
from treetop.debug import faults
from treetop.debug.faults import ENVIRONMENT, FAULTS, active_fault, fault
from treetop.doctor.provoke import Provocation
from treetop.engine import pure as sound
from treetop.engine.pure import Pure
from treetop.kernels.kv import commit_tail
from treetop.kernels.tree import next_level_mask
from treetop.spec.round_ops import draft_positions
from treetop.types.errors import ConfigError, EngineError, TreetopError
from treetop.types.layout import Layout

REQUIRED = {  # what issue and design name; the registry may hold more
    "sgl-27360",
    "sgl-27338",
    "sgl-23037-padding",
    "sgl-23037-alias",
    "padding-siblings",
    "sgl-24617",
    "sgl-26628-missed",
    "sgl-26628-twice",
    "sgl-25015",
    "sgl-27545",
    "sgl-26972",
    "column-ancestors",
    "in-place-compaction",
    "unaligned-allocation",
    "prefix-without-draft",
    "chunk-tail",
    "limit-before-stop",
}
FIRST_CAUGHT = {  # fault -> the lowest check level that says so; None is the decoder or the ownership check
    "sgl-27360": 1,
    "sgl-27338": 1,
    "sgl-23037-padding": 1,
    "sgl-23037-alias": 1,
    "padding-siblings": 1,
    "sgl-24617": 1,
    "sgl-27545": 2,
    "sgl-26972": 1,
    "in-place-compaction": 3,
    "prefix-without-draft": 1,
    "chunk-tail": 1,
    "limit-before-stop": 1,
}
HARM = {  # fault -> what its harm's description says
    "sgl-27360": "the engine stops: RuntimeError",
    "sgl-27338": "the engine stops: RuntimeError",
    "sgl-23037-padding": "wrong tokens",
    "sgl-23037-alias": "overwritten after they were handed out",
    "padding-siblings": "the engine stops: RuntimeError",
    "sgl-24617": "the engine stops: IndexError",
    "sgl-26628-missed": "not what the head drafts",
    "sgl-26628-twice": "not what the head drafts",
    "sgl-25015": "not what the head drafts",
    "sgl-27545": "accept length",
    "sgl-26972": "the engine stops",
    "column-ancestors": "not what the head drafts",
    "in-place-compaction": "wrong tokens",
    "unaligned-allocation": "pages are lost",
    "prefix-without-draft": "pages are lost",
    "chunk-tail": "accept length",
    "limit-before-stop": "wrong tokens",
}


class Recorded(Provocation):
    """Remembers every trial by (fault, level, watched), so that none is run twice."""

    def __init__(self):
        super().__init__()
        self.trials = {}

    def run(self, fault, level, *, watched=False, sound=False):
        if sound:
            return super().run(fault, level, watched=watched, sound=True)
        key = (fault.name, level, watched)
        if key not in self.trials:
            self.trials[key] = super().run(fault, level, watched=watched)
        return self.trials[key]


@pytest.fixture(scope="module")
def provocation():
    with Recorded() as recorded:
        yield recorded


def said(trial) -> str:
    return "" if trial.error is None else str(trial.error)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_the_guard_that_is_named_for_it(provocation, name):
    """At its level, or by the visibility decoder and the ownership check at level 0, the guard's words are said."""
    found = fault(name)
    trial = provocation.run(found, found.level or 0, watched=found.level is None)
    assert found.guard in said(trial)
    assert isinstance(trial.error, TreetopError)
    assert "\n" not in said(trial)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_not_caught_at_the_level_below_its_guard(provocation, name):
    """The guard at that level is what catches it: one level lower, and without the decoder, nothing says those words.

    A table without headroom is the exception: the ledger checks capacity at every level, but only when a request is at
    the wall and not at start-up.
    """
    found = fault(name)
    trial = provocation.run(found, (found.level or 1) - 1)
    if name == "sgl-26972":
        assert provocation.run(found, 1).tokens == (), "the start-up proof comes before any request"
        assert trial.tokens, "no request ran before the capacity error"
    elif name != "unaligned-allocation":  # caught by the books at any level, whenever somebody looks at them
        assert found.guard not in said(trial)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_does_harm_where_no_guard_looks(provocation, name):
    """Wrong tokens, a lower accept length, lost pages, an overwritten result or a crash: no fault is a straw man."""
    harm = provocation.harm(fault(name))
    assert harm is not None
    assert HARM[name] in harm


@pytest.mark.parametrize(
    "name", ["sgl-24617", "padding-siblings", "sgl-27360"], ids=["two-group pair", "zeros", "embedded pair"]
)
def test_no_guard_fires_on_the_sound_engine(provocation, name):
    """The scenario runs to its end at level 3 under the decoder, and gives what it gives at level 0."""
    watched = provocation.run(fault(name), 3, watched=True, sound=True)
    bare = provocation.run(fault(name), 0, sound=True)
    assert watched.error is None
    assert (watched.tokens, watched.rounds, watched.overwritten) == (bare.tokens, bare.rounds, 0)


def test_the_registry_and_these_tables_name_the_same_faults():
    """Every fault that was asked for is there, at the level that these tests and the document say."""
    assert set(FAULTS) >= REQUIRED
    assert {name: f.level for name, f in FAULTS.items() if f.level is not None} == FIRST_CAUGHT
    assert set(HARM) == set(FAULTS)


def test_each_fault_replaces_entries_of_the_table_and_nothing_else():
    """A fault is the table with the entries it names exchanged, each for another function."""
    for name, found in FAULTS.items():
        changed = {f.name for f in fields(Pure) if getattr(found.pure, f.name) is not getattr(Pure(), f.name)}
        assert changed == set(found.replace), name
        assert changed, name


# ---------------------------------------------------------------------------------------------- never active otherwise


def test_without_a_name_the_table_holds_the_real_functions(strong_pair):
    """`Pure()`, an empty environment and a fresh engine all have the functions of the core, every entry."""
    elsewhere = {
        "layout": Layout,
        "commit": commit_tail,
        "next_level_mask": next_level_mask,
        "draft_positions": draft_positions,
    }
    for field in fields(Pure):
        real = elsewhere[field.name] if field.name in elsewhere else getattr(sound, field.name)
        assert getattr(Pure(), field.name) is real
    errors = io.StringIO()
    with redirect_stderr(errors):
        assert active_fault({}) == active_fault({ENVIRONMENT: ""}) == Pure()
        assert build(strong_pair, (2, 3, 6)).engine.device.pure == Pure()
    assert errors.getvalue() == ""


@pytest.fixture
def unsaid():
    """No fault has been announced in this process yet."""
    faults._announce.cache_clear()


@pytest.mark.usefixtures("unsaid")
def test_a_fault_of_the_environment_is_active_and_says_so_loudly(strong_pair, monkeypatch, capsys):
    """TREETOP_FAULT reaches engine and scheduler; one line on stderr, once, names it and says what it does."""
    monkeypatch.setenv(ENVIRONMENT, "limit-before-stop")
    llm = build(strong_pair, (2, 3, 6), check_level=0)
    assert llm.engine.device.pure == fault("limit-before-stop").pure
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for part in ("FAULT", "limit-before-stop", "IS ACTIVE", ENVIRONMENT, fault("limit-before-stop").summary):
        assert part in err
    build(strong_pair, (2, 3, 6), check_level=0)
    assert capsys.readouterr().err == "", "said again by the second engine of the process"
    monkeypatch.delenv(ENVIRONMENT)
    assert build(strong_pair, (2, 3, 6)).engine.device.pure == Pure()


@pytest.mark.usefixtures("unsaid")
def test_a_caught_fault_of_the_environment_ends_the_command_line_with_its_guards_words(monkeypatch, capsys):
    """Exit code 1, and after the loud line one more: what the guard said, without a traceback."""
    monkeypatch.setenv(ENVIRONMENT, "sgl-23037-alias")
    assert main(["generate", "--prompt", "def f", "--max-tokens", "4"]) == 1
    err = capsys.readouterr().err
    assert "IS ACTIVE" in err.splitlines()[0]
    assert "shares memory with the round's buffers" in err.splitlines()[1]
    assert len(err.splitlines()) == 2


def test_an_unknown_fault_is_refused_in_one_line_that_lists_the_known(monkeypatch, capsys):
    """Exit code 2, and no traceback; a typo must not run the sound engine."""
    monkeypatch.setenv(ENVIRONMENT, "sgl-1")
    assert main(["generate", "--prompt", "x"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "'sgl-1'" in err
    assert all(name in err for name in FAULTS)
    with pytest.raises(ConfigError):
        fault("sgl-1")


def test_the_faults_guard_holds_in_graphsim_too(strong_pair):
    """A kept view is overwritten by the next replay, and a sound copy is not."""
    outputs = []
    for pure in (Pure(), fault("sgl-23037-alias").pure):
        llm = build(strong_pair, (2, 3, 6), graphs="sim", check_level=0, pure=pure)
        kept = []
        llm.engine.observer = lambda plan, tree, accepted, kept=kept: kept.append(
            (accepted.tokens, accepted.tokens.tolist())
        )
        outputs.append(tokens(llm.generate(strong_pair.prompts([5, 9]), greedy(20))))
        overwritten = sum(tensor.tolist() != values for tensor, values in kept)
        assert (overwritten > 0) == (pure != Pure())
    assert outputs[0] == outputs[1], "the engine itself reads results before the next round"
    with pytest.raises(EngineError, match="shares memory"):
        build(strong_pair, (2, 3, 6), graphs="sim", pure=pure).generate(strong_pair.prompts([5]), greedy(3))


def test_a_kept_view_gives_wrong_tokens_where_rounds_overlap(strong_pair):
    """With a round in flight the buffers hold the next round's results when the last one's are read."""
    prompts = strong_pair.prompts([5, 9])
    expected = tokens(build(strong_pair, (2, 3, 6)).generate(prompts, greedy(20)))
    broken = fault("sgl-23037-alias").pure
    assert tokens(build(strong_pair, (2, 3, 6), overlap=True, check_level=0).generate(prompts, greedy(20))) == expected
    wrong = build(strong_pair, (2, 3, 6), overlap=True, check_level=0, pure=broken).generate(prompts, greedy(20))
    assert tokens(wrong) != expected
    with pytest.raises(EngineError, match="shares memory"):
        build(strong_pair, (2, 3, 6), overlap=True, pure=broken).generate(prompts, greedy(3))
