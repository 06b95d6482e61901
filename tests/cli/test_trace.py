"""The trace page agrees with the engine: its rounds spell the output, and its trees are trees."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treetop import LLM, SamplingParams
from treetop.cli import main
from treetop.tools.trace import Trace, TreeRound, collect, drafted_vocabulary, fill_page, page_data, run, statistics
from treetop.types.errors import ConfigError
from treetop_debug.patching import wrapped_runner

PROMPT = 'def closing():\n    """Ends a "</script><!-- & </SCRIPT>" \u2028 \u65e5\u672c {{trace data}}."""\n    return '
SMALL: dict[str, Any] = {"max_running_requests": 1, "context_length": 512}
NARROW = {**SMALL, "speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 9}
WARM = SamplingParams(max_tokens=41, temperature=1.2, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def greedy() -> Trace:
    return collect(None, SMALL, PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))


@pytest.fixture(scope="module")
def sampled() -> Trace:
    return collect(None, NARROW, "class StagingBuffers:", WARM)


@pytest.fixture(params=["greedy", "sampled"])
def trace(request: pytest.FixtureRequest) -> Trace:
    return request.getfixturevalue(request.param)


def data_of(page: str) -> dict[str, Any]:
    """What a browser finds in the page's data element: everything up to the first end tag of a script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', page, re.DOTALL | re.IGNORECASE)
    assert found is not None
    return json.loads(found.group(1))


def test_the_rounds_of_the_page_spell_the_output(trace: Trace) -> None:
    """First the token of the prompt's pass, then each round's accepted nodes and bonus, cut where the output ends."""
    data = data_of(fill_page(page_data(trace)))
    spelled = data["output"][:1]
    for each in data["rounds"]:
        tokens = [*(each["tokens"][node] for node in each["path"][1:]), each["bonus"]]
        spelled += tokens[: each["emitted"]]
    assert spelled == data["output"] == list(trace.output.token_ids)
    assert all(each["emitted"] == len(each["path"]) for each in data["rounds"][:-1])
    assert len(data["rounds"]) == trace.output.metrics.target_forwards
    assert [len(each["path"]) - 1 for each in data["rounds"]] == list(trace.output.metrics.accept_lens)
    assert "".join(data["text"]) == trace.output.text


def test_each_root_is_the_bonus_of_the_round_before(trace: Trace) -> None:
    roots = [each.tokens[0] for each in trace.rounds]
    assert roots == [trace.output.token_ids[0], *(each.bonus for each in trace.rounds[:-1])]


def test_trees_are_trees_and_paths_go_down_them(trace: Trace) -> None:
    """A parent stands before its child, one depth above it; siblings differ; a path is a chain of parents."""
    shape = trace.llm.config.shape
    for each in trace.rounds:
        assert len(each.tokens) == len(each.parent) == len(each.depth) == shape.num_draft_tokens
        assert (each.parent[0], each.depth[0], each.path[0]) == (0, 0, 0)
        for node in range(1, len(each.tokens)):
            assert each.parent[node] < node
            assert each.depth[node] == each.depth[each.parent[node]] + 1 <= shape.num_steps
            siblings = [each.tokens[child] for child in each.children(each.parent[node])]
            assert len(set(siblings)) == len(siblings) <= shape.topk
        assert [each.parent[node] for node in each.path[1:]] == each.path[:-1]


def test_probabilities_are_probabilities(trace: Trace) -> None:
    """Each lies in [0, 1], siblings' fall and sum to at most 1, a path's is the product of its nodes' own."""
    for each in trace.rounds:
        own, cumulative = [p or 0.0 for p in each.own], [p or 0.0 for p in each.cumulative]
        assert all(0 < p <= 1 for p in (*own, *cumulative))
        assert own[0] == cumulative[0] == 1
        for node in range(len(own)):
            children = [own[child] for child in each.children(node)]
            assert sum(children) <= 1.001
            assert children == sorted(children, reverse=True)
            if node:
                assert math.isclose(cumulative[node], own[node] * cumulative[each.parent[node]], rel_tol=2e-3)


def test_the_reason_a_path_ended_is_true(trace: Trace) -> None:
    """The wanted token is never among the children; each reason is checked against the tree and the vocabulary."""
    known, num_steps = drafted_vocabulary(trace.llm), trace.llm.config.shape.num_steps
    for each in trace.rounds:
        children = [each.tokens[child] for child in each.children(each.path[-1])]
        assert each.bonus not in children
        full = len(each.path) == num_steps + 1
        reason = "full" if full else "outside" if each.bonus not in known else "unproposed" if children else "leaf"
        assert each.end == reason


def test_the_draft_vocabulary_is_what_the_head_can_say(greedy: Trace) -> None:
    known, head = drafted_vocabulary(greedy.llm), greedy.llm.engine.draft
    assert head is not None
    assert len(known) == head.vocab_size
    assert all(token in known for each in greedy.rounds for token in each.tokens[1:])


def test_statistics_add_up(trace: Trace) -> None:
    shape = trace.llm.config.shape
    counted = statistics(trace.rounds, shape.num_steps, shape.topk)
    drafts = sum(trace.output.metrics.accept_lens)
    assert sum(counted.accept_lens) == sum(counted.ends.values()) == len(trace.rounds)
    assert sum(a * n for a, n in enumerate(counted.accept_lens)) == drafts
    for tally in (counted.by_depth, counted.by_rank, counted.by_confidence):
        assert sum(accepted for _, accepted in tally) == drafts
        assert all(tested >= accepted for tested, accepted in tally)
    assert counted.by_depth[0][0] == len(trace.rounds)


def test_statistics_of_a_tree_drawn_by_hand() -> None:
    """
    root -- a (0.6, accepted) -- c (0.9)          wanted after a: neither c nor d
        `-- b (0.3)           `- d (0.05)
    """
    each = TreeRound(
        tokens=[10, 11, 12, 13, 14],
        parent=[0, 0, 0, 1, 1],
        depth=[0, 1, 1, 2, 2],
        own=[1.0, 0.6, 0.3, 0.9, 0.05],
        cumulative=[1.0, 0.6, 0.3, 0.54, 0.03],
        path=[0, 1],
        bonus=99,
        emitted=2,
        end="unproposed",
        ms=(1.0, 1.0, 1.0, 1.0),
    )
    counted = statistics([each], num_steps=2, topk=2)
    assert counted.by_depth == [[1, 1], [1, 0]]
    assert counted.by_rank == [[2, 1], [2, 0]]
    assert counted.accept_lens == [0, 1, 0]
    assert [tenth for tenth, (tested, _) in enumerate(counted.by_confidence) if tested] == [0, 3, 6, 9]
    assert counted.by_confidence[6] == [1, 1]


def test_times_cover_the_run(trace: Trace) -> None:
    """Four parts a round, none negative; with what went before they hold the request's own time."""
    parts = [part for each in trace.rounds for part in each.ms]
    assert all(part >= 0 for part in parts)
    assert all(each.ms[1] > 0 for each in trace.rounds)
    elapsed_ms = 1000 * len(trace.output.token_ids) / trace.output.metrics.tokens_per_second
    assert elapsed_ms <= sum(parts) + trace.before_ms + 1


def test_a_traced_run_gives_the_tokens_of_any_other(sampled: Trace) -> None:
    assert LLM(None, **NARROW).generate("class StagingBuffers:", WARM)[0].token_ids == sampled.output.token_ids


def test_text_cannot_leave_the_element_it_is_in(greedy: Trace) -> None:
    """Prompt, tokens and names pass through unchanged, and the page has the two scripts of its template only."""
    page = fill_page(page_data(greedy))
    assert data_of(page)["prompt"] == PROMPT
    assert len(re.findall(r"<script", page, re.IGNORECASE)) == len(re.findall(r"</script", page, re.IGNORECASE)) == 2
    assert "<!--" not in page
    data = page_data(greedy)
    data["pieces"][5], data["text"][0] = "</script><script>", "<!--<script>"
    assert data_of(fill_page(data)) == json.loads(json.dumps(data))


def test_the_page_names_nothing_outside_itself(greedy: Trace) -> None:
    page = fill_page(page_data(greedy))
    addresses = set(re.findall(r"https?://[^\"'\s<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name space, which no browser fetches"
    assert not re.search(r"\b(?:src|@import|url)\s*[=(]", page)
    assert "default-src 'none'" in page
    assert str(Path(greedy.llm.model_path).parent) not in page


def test_every_token_of_the_page_has_a_spelling(trace: Trace) -> None:
    data = data_of(fill_page(page_data(trace)))
    spelled = data["pieces"].keys() | data["names"].keys()
    used = {*data["output"], *(token for each in data["rounds"] for token in (*each["tokens"], each["bonus"]))}
    assert {str(token) for token in used} <= spelled
    assert data["pieces"].keys().isdisjoint(data["names"])


def test_a_run_of_one_token_has_no_round(tmp_path: Path) -> None:
    trace = run(None, SMALL, "x = 1", SamplingParams(max_tokens=1), tmp_path / "page.html")
    data = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert data["rounds"] == [] == list(trace.rounds)
    assert data["accept_length"] is None
    assert len(data["output"]) == 1


def test_a_tree_of_its_root_only_can_be_traced() -> None:
    options = {"speculative_num_steps": 0, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 1}
    trace = collect(None, {**SMALL, **options}, "x = 1", SamplingParams(max_tokens=5, ignore_eos=True))
    assert [each.end for each in trace.rounds] == ["full"] * 4
    assert page_data(trace)["statistics"]["by_depth"] == []


class FailsLater:
    """A target whose logits are not numbers from the given call on."""

    def __init__(self, target: Any, good: int) -> None:
        self._target, self._good = target, good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def piece(self, hidden: Any) -> Any:
        self._good -= 1
        return self._target.piece(hidden) * (1 if self._good >= 0 else math.nan)


@pytest.mark.parametrize("good", [0, 4])
def test_a_request_that_fails_leaves_the_rounds_before(good: int) -> None:
    """Call 1 is the prompt's, the others are rounds'; level 0 runs no start-up proof that would take some."""
    with wrapped_runner(lambda device: replace(device, target=FailsLater(device.target, good))):
        trace = collect(None, {**SMALL, "check_level": 0}, "x = 1", SamplingParams(max_tokens=60, ignore_eos=True))
    data = data_of(fill_page(page_data(trace)))
    assert "not finite" in data["error"]
    assert len(data["rounds"]) == max(good - 1, 0)
    assert len(data["output"]) == bool(good) + sum(each["emitted"] for each in data["rounds"])


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    flags = ["--max-tokens", "9", "--ignore-eos", "--context-length", "256", "--max-running-requests", "1"]
    assert main(["trace", "--prompt", "import os", "--output", str(page), *flags]) == 0
    data = data_of(page.read_text(encoding="utf-8"))
    assert (data["prompt"], len(data["output"])) == ("import os", 9)
    assert f"{page} [9 tokens, {len(data['rounds'])} target passes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--output", "{}/missing/page.html"], "there is no folder {}/missing"),
        (["--output", "{}"], "is a folder"),
        (["--output", "{}/\0"], "not a path"),
        (["--output", "{}/\ud800"], "not a path"),
        (["--output", "{}/" + "x" * 5000], "too long"),
        (["--output", "{}/page.html", "--speculative-algorithm", "NONE"], "--speculative-draft-model-path"),
        (["--output", "{}/page.html", "--graphs", "sim"], "--graphs sim"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_page(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["trace", "--prompt", "x", *(flag.replace("{}", str(tmp_path)) for flag in flags)]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told.replace("{}", str(tmp_path)) in error
    assert list(tmp_path.iterdir()) == []


def test_errors_are_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        run(None, {}, "x", SamplingParams(), tmp_path / "missing" / "page.html")
    with pytest.raises(ConfigError, match="draft"):
        run(None, {"draft": None}, "x", SamplingParams(), tmp_path / "page.html")


def test_a_prompt_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["trace", "--output", "page.html"])
    assert stopped.value.code == 2
    assert "--prompt" in capsys.readouterr().err
