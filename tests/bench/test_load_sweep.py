"""`treetop bench --sweep load`: every way at every batch, checked outputs, a page."""

import json
import re

import pytest

from treetop.bench import load, load_plot
from treetop.cli import main
from treetop.types.errors import ConfigError


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("load") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text * 3}) + "\n" for text in ("abc ", "x = 1", "hello")))
    return str(file)


def options_of(pair):
    tree = {"speculative_eagle_topk": 2, "speculative_num_steps": 2, "speculative_num_draft_tokens": 4}
    return {"draft": str(pair.head), "dtype": "float64", **tree}


def test_a_sweep_measures_every_way_at_every_batch(weak_pair, prompts):
    told = []
    asked = load.BatchSweepOptions((1, 3), prompts, max_tokens=9, repeats=2)
    report = load.run(str(weak_pair.target), options_of(weak_pair), asked, told.append)
    ways = ["plain", "1,1,2", "2,1,3", "2,2,4", "auto"]
    assert [(point.batch, point.way) for point in report.points] == [(batch, way) for batch in (1, 3) for way in ways]
    for point in report.points:
        assert sum(count for _, count in point.runs) == sum(point.rounds.values())
        if point.way != "auto":
            assert list(point.rounds) == ["0,1,1" if point.way == "plain" else point.way]
        if point.way == "plain":
            assert (point.over_plain, point.accept_length) == (1.0, 1.0)
    assert report.equality.startswith("outputs equal")
    assert len(report.verdicts()) == 2
    assert told[2:] == [point.row() for point in report.points]
    page = load_plot.page(report)
    data = re.search(r"id='data'>(.*)</script>", page)[1]
    assert len(json.loads(data)["points"]) == len(report.points)
    assert page.count("<polyline") == len(ways)
    assert page.count("<div>") == 2


def test_a_sweep_of_random_weights_needs_no_tokenizer(strong_pair):
    """What is accepted is simulated; shapes and their costs are real."""
    options = {**options_of(strong_pair), "dtype": "float32", "load_format": "dummy", "context_length": 280}
    asked = load.BatchSweepOptions((2,), max_tokens=5, repeats=1)
    for simulated in ({"simulate_acceptance": "builtin:llama-3.1-8b"}, {"simulate_accept_length": 1}):
        report = load.run(str(strong_pair.target), {**options, **simulated}, asked, lambda _: None)
        assert report.equality == "outputs not checked: acceptance is simulated"
        assert [point.way for point in report.points][-1] == "auto"


def test_what_a_sweep_of_load_cannot_do_is_refused(weak_pair, prompts, capsys):
    with pytest.raises(ConfigError, match="--sweep load compares shapes of drafts"):
        load.run(str(weak_pair.target), {}, load.BatchSweepOptions((1,), prompts), print)
    assert main(["bench", "--sweep", "load", "--shapes", "1,1,2"]) == 2
    assert "not for --sweep load" in capsys.readouterr().err
    assert main(["bench", "--speculative-policy", "auto"]) == 2
    assert "use --sweep load" in capsys.readouterr().err
