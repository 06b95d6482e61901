"""`treetop bench --sweep heads`: every configuration on whole answers, a page and JSON, what is refused."""

import json
import re

import pytest

from support.block_heads import BLOCK, saved
from support.tiny_models import save_random_llama
from treetop.bench import heads, heads_plot, prompts, provenance
from treetop.bench.heads import HeadsOptions
from treetop.bench.intervals import ratio_interval
from treetop.checkpoints.folder import resolve_folder
from treetop.cli import main
from treetop.text.tokenizer import open_tokenizer
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, InputError

PAIR = ["builtin:nestling", "--speculative-draft-model-path", "builtin:nestling-eagle3"]
SHAPES = ["3,1,4", "2,2,4", "2,2,4+learn"]
NAMES = ["plain", *SHAPES, "plain, again"]
HEAD = {"draft": "builtin:nestling-eagle3", "dtype": "float32", "context_length": 256}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """JSON and page of a sweep by the command line, the exit code, the command; the shortest prompts of each kind."""
    page = tmp_path_factory.mktemp("heads") / "heads.html"
    short = {kind: sorted(texts, key=len)[:2] for kind, texts in prompts.read_kinds(None).items()}
    rows = [{"kind": kind, "prompt": text} for kind, texts in short.items() for text in texts]
    file = page.with_name("prompts.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    words = ["bench", *PAIR, "--sweep", "heads", "--shapes", *SHAPES, "--num-prompts", "1", "--max-tokens", "8"]
    code = main([*words, "--prompts", str(file), "--dtype", "float32", "--context-length", "512", "--plot", str(page)])
    return json.loads(page.with_suffix(".json").read_text("utf-8")), page.read_text("utf-8"), code, words


def two_prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("def a():", "import os", "x = 1")), "utf-8"
    )
    return str(file)


@pytest.mark.slow
def test_every_configuration_has_figures_at_every_temperature_of_every_kind(swept):
    found, _, code, _ = swept
    assert code == 0
    kinds = ["all", "chat", "code", "summary", "json"]
    places = [(each["configuration"], each["temperature"], each["kind"]) for each in found["figures"]]
    assert places == [(name, temperature, kind) for name in NAMES for temperature in (0.0, 0.8) for kind in kinds]
    for each in found["figures"]:
        length, faster = each["accept_length"], each["over_plain"]
        assert each["prompts"] == (4 if each["kind"] == "all" else 1)
        assert length["low"] <= length["value"] <= length["high"]
        assert faster["low"] <= faster["value"] <= faster["high"]
        assert each["tokens"] == 8 * each["prompts"]
        if each["family"] == "plain":
            assert length == {"value": 1.0, "low": 1.0, "high": 1.0}
        if each["configuration"] == "plain":
            assert faster == pytest.approx({"value": 1.0, "low": 1.0, "high": 1.0})
    drafted = [each for each in found["figures"] if each["family"] != "plain" and each["kind"] == "all"]
    assert all(each["accept_length"]["value"] > 1 for each in drafted)


def test_in_float32_the_tokens_are_those_of_plain_decoding(swept):
    found, page, _, _ = swept
    assert [check["configuration"] for check in found["checks"]] == [name for name in NAMES[1:] for _ in (0, 1)]
    assert all(check["ok"] and check["sentence"].startswith("outputs equal") for check in found["checks"])
    assert all(each["differ"] == 0 for each in found["figures"])
    assert "0 of 4" in page


def test_the_json_names_what_is_needed_to_measure_it_again(swept):
    found, _, _, words = swept
    assert found["format"] == "treetop-heads-1"
    assert found["command"].split()[:5] == ["treetop", *words[:4]]
    assert (found["model"], found["head"], found["dtype"]) == (PAIR[0], PAIR[2], "float32")
    assert {"treetop", "python", "torch"} <= found["versions"].keys()
    assert found["prompts"] == {"chat": 1, "code": 1, "summary": 1, "json": 1}
    assert (found["warm_up"], found["chat_template"]) == (4, True)
    assert found["prompts_file"].endswith("prompts.jsonl")
    assert found["machine"]["name"].startswith(("CPU", "NVIDIA"))
    assert found["skipped"] == found["failed"] == {}


def test_trees_are_compared_with_chains_of_as_many_nodes_and_with_their_calibration(swept):
    pairs = [(each["first"], each["second"], each["temperature"]) for each in swept[0]["comparisons"]]
    each_at = [("2,2,4", "3,1,4"), ("2,2,4+learn", "2,2,4")]
    assert pairs == [(*pair, temperature) for temperature in (0.0, 0.8) for pair in each_at]


def test_the_page_stands_alone_in_light_and_dark(swept):
    """No address and nothing that loads; the figures are in it, and a bar for each in both charts."""
    found, page, _, _ = swept
    assert not re.search(r"https?:|//\w|\bsrc=|\bhref=|url\(|@import", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    assert json.loads(re.search(r"id='data'>(.*)</script>", page)[1]) == found
    assert page.count("<svg") == 2
    assert page.count("<rect") == 2 * 2 * len(NAMES)
    for name in NAMES:
        assert f"<th>{name}</th>" in page


@pytest.mark.slow
def test_names_of_models_are_text_on_the_page(swept, tmp_path):
    report = heads.run(
        "builtin:nestling",
        {"dtype": "float32", "context_length": 256},
        HeadsOptions(["2,2,4"], two_prompts(tmp_path), 1, 2, (0.0,)),
        lambda _: None,
        "treetop bench '<b>'",
    )
    assert "<b>" not in heads_plot.page(report)
    assert "&lt;b&gt;" in heads_plot.page(report)


@pytest.mark.slow
def test_without_a_head_lookup_is_compared_with_plain_decoding(tmp_path):
    """Prompts of a file without kinds, one to warm up; two at a time."""
    told = []
    asked = HeadsOptions(None, two_prompts(tmp_path), max_tokens=6, temperatures=(0.0,), batch_size=2)
    report = heads.run("builtin:nestling", {"dtype": "float32", "context_length": 256}, asked, told.append, "")
    assert [each.configuration for each in report.figures if each.kind == "all"] == [
        "plain",
        "n-gram 5,4,16",
        "plain, again",
    ]
    assert (report.algorithm, report.head, report.prompts, report.warm_up) == ("NGRAM", None, {"prompts": 2}, 1)
    assert report.ok
    assert len(told) == 2 + 3


def test_a_blocks_trees_are_no_deeper_than_it_proposes(tmp_path):
    """Of the sweep's own shapes, each once; of a head that grows level by level they are as they stand."""
    target = save_random_llama(tmp_path / "target", head_dim=16)
    for name, deepest in (("z-lab", BLOCK - 1), ("DeepSpec, rnn", BLOCK)):
        own = EngineConfig.of(str(target), draft=str(saved(tmp_path / name, name)))
        assert heads._deepest(own) == deepest
        found = heads._configurations(own, {}, HeadsOptions(), deepest)
        assert max(each.shape.num_steps for each in found) == deepest
        assert len({each.name for each in found}) == len(found)
        for each in found:
            shape = each.shape
            assert shape.num_draft_tokens <= 1 + shape.num_candidates
            assert shape.topk > 1 or shape.num_draft_tokens == shape.num_steps + 1
    assert heads._fitted("8,8,32", 7) == "7,8,32"
    assert heads._fitted("5,4,16+learn", 1) == "1,4,5+learn"
    own = EngineConfig.of(PAIR[0], draft=PAIR[2])
    names = [each.name for each in heads._configurations(own, {}, HeadsOptions(), heads._deepest(own))]
    assert names[1:-1] == [*heads.CHAINS, *heads.TREES, *heads.CALIBRATED]


def test_what_no_time_is_left_for_and_what_fails_is_named(tmp_path, monkeypatch):
    """Plain decoding is measured all the same; an interrupt and an engine's error keep what was measured."""
    asked = {"prompts": two_prompts(tmp_path), "max_tokens": 4, "temperatures": (0.0,), "shapes": ["2,1,3", "2,2,4"]}
    report = heads.run("builtin:nestling", HEAD, HeadsOptions(**asked, minutes=1e-6), lambda _: None, "")
    assert [each.configuration for each in report.figures if each.kind == "all"] == ["plain"]
    assert list(report.skipped) == ["2,1,3", "2,2,4", "plain, again"]
    assert report.ok
    answer = heads._Sweep._answer
    ends = {"2,1,3": EngineError("out of memory"), "2,2,4": KeyboardInterrupt()}

    def ended(sweep, configuration, llm):
        if configuration.name in ends:
            raise ends[configuration.name]
        answer(sweep, configuration, llm)

    monkeypatch.setattr(heads._Sweep, "_answer", ended)
    report = heads.run("builtin:nestling", HEAD, HeadsOptions(**asked), lambda _: None, "")
    assert report.failed == {"2,1,3": "out of memory", "2,2,4": "interrupted"}
    assert report.skipped == {"plain, again": "interrupted"}
    assert not report.ok
    assert "2,1,3 was not measured: out of memory" in heads_plot.page(report)


def test_an_interval_resamples_and_compares_item_by_item():
    """Of equal items a point; of unequal ones it holds the ratio; of two runs that are one, 1, however unequal."""
    assert ratio_interval(([3, 3, 3], [2, 2, 2])) == (1.5, 1.5, 1.5)
    found = ratio_interval((list(range(1, 41)), [10] * 40))
    assert found.value == pytest.approx(2.05)
    error = 11.54 / 40**0.5 / 10  # of the mean of 1 .. 40, over 10
    assert (found.low, found.high) == pytest.approx((2.05 - 1.96 * error, 2.05 + 1.96 * error), abs=0.06)
    uneven = ([1, 50, 2, 9], [3, 4, 1, 7])
    assert ratio_interval(uneven, (uneven[1], uneven[0])) == pytest.approx((1, 1, 1))
    assert ratio_interval(([0, 0], [0, 0])) is None


def test_the_packages_prompts_are_fourteen_of_each_kind_and_none_twice():
    """They are asked as a user's message, where there is a template."""
    kinds = prompts.read_kinds(None)
    ids, templated = prompts.as_questions(resolve_folder("builtin:nestling"), 2048, [*kinds["json"]])
    assert templated
    text = open_tokenizer(resolve_folder("builtin:nestling")).decode(ids[0])
    assert text == f"User: {kinds['json'][0]}\n\nAssistant:"
    assert {kind: len(set(texts)) for kind, texts in kinds.items()} == dict.fromkeys(
        ("chat", "code", "summary", "json"), 14
    )


def test_a_commit_is_that_of_the_package_and_of_no_clone_around_it(tmp_path, monkeypatch):
    """What git says of another repository is not this package's commit."""
    asked = []
    monkeypatch.setattr(provenance, "_git", lambda folder, *words: asked.append(words[0]))
    monkeypatch.setattr(
        provenance.metadata, "distribution", lambda _: type("Found", (), {"read_text": lambda *_: None})()
    )
    assert provenance.commit() is None
    assert asked == ["ls-files"]
    vcs = json.dumps({"url": "git+file:x", "vcs_info": {"commit_id": "abc"}})
    monkeypatch.setattr(
        provenance.metadata, "distribution", lambda _: type("Found", (), {"read_text": lambda *_: vcs})()
    )
    assert provenance.commit() == "abc"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--speculative-algorithm", "NONE"], "--speculative-algorithm NONE: --sweep heads compares drafts"),
        (["--speculative-num-steps", "3"], "--speculative-num-steps: not for --sweep heads"),
        (["--speculative-calibration", "learn"], "--speculative-calibration: not for --sweep heads"),
        (["--simulate-accept-length", "2"], "--simulate-accept-length: not for --sweep heads"),
        (["--load-format", "dummy"], "--load-format dummy: not for --sweep heads"),
        (["--batches", "2"], "--batches: not for --sweep heads"),
        (["--rounds", "20"], "--rounds: not for --sweep heads"),
        (["--transformers"], "--transformers: not for --sweep heads"),
        (["--shapes", "5,4,16+more"], "--shapes 5,4,16+more: a shape is S,k,T"),
        (["--shapes", "2,2,99"], "no tree has"),
        (["--num-prompts", "0"], "--num-prompts and --batch-size must be at least 1"),
        (["--temperatures", "0", "-1"], "--temperatures must be finite and at least 0"),
        (["--temperatures", "0", "0"], "--temperatures: one of them is given twice"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--context-length", "64", "--max-tokens", "60"], "need a context of"),
        (["--prompts", "/no/such/file"], "--prompts /no/such/file: not JSON lines"),
        (["--plot", "heads.pdf"], "--plot heads.pdf: the plot is an HTML page"),
    ],
)
def test_what_the_sweep_cannot_do_is_refused_by_name(words, why, capsys, tmp_path, monkeypatch):
    """Before anything is measured or written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heads, "measure_machine", lambda *_: pytest.fail("it measures"))
    assert main(["bench", "builtin:nestling", "--sweep", "heads", *words]) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_options_of_this_sweep_are_refused_elsewhere_and_an_old_page_is_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--sweep", "tree"], ["--sweep", "load"]):
        assert main(["bench", "builtin:nestling", *words, "--minutes", "3"]) == 2
        assert "--minutes: for --sweep heads alone" in capsys.readouterr().err
    (tmp_path / "heads.json").write_text("{}")
    assert main(["bench", "builtin:nestling", "--sweep", "heads"]) == 2
    assert "heads.json: there from an earlier run; name another page with --plot" in capsys.readouterr().err


def test_a_kind_of_one_prompt_and_a_prompt_that_is_too_long_are_refused(tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt": "x", "kind": "short"}\n', "utf-8")
    with pytest.raises(InputError, match="kind 'short' needs a second prompt"):
        heads.run("builtin:nestling", HEAD, HeadsOptions(prompts=str(file)), print, "")
    asked = HeadsOptions(prompts=two_prompts(tmp_path), max_tokens=60)
    with pytest.raises(ConfigError, match=r"need a context of 7\d, have 64; .* or raise --context-length"):
        heads.run("builtin:nestling", {**HEAD, "context_length": 64}, asked, print, "")
