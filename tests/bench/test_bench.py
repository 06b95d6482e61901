"""The benchmark: what it compares before it times, what it refuses, and the grid it measures."""

import json
from dataclasses import asdict, replace
from functools import cache

import pytest

from support.command_line import refused
from support.engines import build, greedy, sampled
from support.tiny_models import copy_folder
from treetop.bench import compare, equality, rounds
from treetop.bench.equality import Equality, equal_outputs
from treetop.bench.prompts import prompt_ids
from treetop.bench.rounds import RoundGrid, engine_config, plain_options, run_grid
from treetop.bench.sweeps import SweepOptions, make_grid
from treetop.cli import main
from treetop.llm import LLM
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.sampling import SamplingParams

# ---------------------------------------------------------------------------------------------- equality


@pytest.fixture(scope="module", autouse=True)
def _one_machine():
    """Its memory and products are measured once for all reports; `test_roofline.py` is about that."""
    with pytest.MonkeyPatch.context() as patch:
        measured = cache(rounds.measure_machine)
        for module in (rounds, compare):
            patch.setattr(module, "measure_machine", measured)
        yield


def two(pair, dtype, params, change=None):
    """A plain engine and its outputs, once as they are and once with a changed token."""
    llm = build(pair, None, dtype=dtype)
    expected = llm.generate(pair.prompts([9, 20]), params)
    got = list(expected)
    ids = list(got[0].token_ids)
    ids[3] = (ids[3] + 1) % 12
    got[0] = replace(got[0], token_ids=tuple(ids) if change is None else change(got[0].token_ids))
    return llm, expected, got


@pytest.mark.parametrize(
    ("dtype", "sampling", "ok", "words"),
    [
        ("float64", False, False, "differ in 1 of 2"),
        ("float32", False, False, "differ in 1 of 2"),
        ("bfloat16", False, True, "part in 1 of 2 sequences"),
        ("float16", False, True, "of their size apart"),
        ("float64", True, False, "differ in 1 of 2"),
        ("float32", True, False, "differ in 1 of 2"),
        ("bfloat16", True, True, "sampled outputs differ in 1 of 2"),
    ],
)
def test_a_wrong_token_fails_in_full_precision_and_is_reported_in_half(strong_pair, dtype, sampling, ok, words):
    params = sampled(1, 8) if sampling else greedy(8)
    llm, expected, got = two(strong_pair, dtype, params)
    found = equal_outputs(llm, expected, got, sampled=sampling)
    assert found.ok is ok
    assert words in found.sentence()
    assert equal_outputs(llm, expected, expected, sampled=sampling) == Equality(16, 2, 0, half=dtype.endswith("16"))


def test_a_near_tie_is_excused_in_float32_only_and_only_when_greedy(strong_pair, monkeypatch):
    monkeypatch.setattr(equality, "margin_of", lambda llm, ids: 1e-5)
    for dtype, sampling, ok in (("float32", False, True), ("float32", True, False), ("float64", False, False)):
        llm, expected, got = two(strong_pair, dtype, sampled(1, 8) if sampling else greedy(8))
        assert equal_outputs(llm, expected, got, sampled=sampling).ok is ok, (dtype, sampling)


def test_too_many_near_ties_are_not_excused():
    assert Equality(10_000, 9, 0, (1e-5,)).ok
    assert not Equality(10_000, 9, 0, (1e-5, 1e-5)).ok
    assert Equality(10_000, 9, 0, (0.1, 0.2), half=True).ok


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_sequence_that_ends_early_is_never_excused(strong_pair, dtype):
    llm, expected, got = two(strong_pair, dtype, greedy(8), change=lambda ids: ids[:5])
    assert not equal_outputs(llm, expected, got).ok


def test_the_margin_is_the_gap_of_the_two_best_logits(strong_pair):
    llm = build(strong_pair, None)
    best = llm.next_logits([5, 6, 7]).topk(2).values
    assert equality.margin_of(llm, [5, 6, 7]) == pytest.approx(float(best[0] - best[1]) / max(1, abs(float(best[0]))))


# ---------------------------------------------------------------------------------------------- grids


def grid_of(sweep=None, model=None, engine=None, **options):
    chosen = {"shapes": None, "batches": None, "inputs": None, "rounds": 3, "batch_size": 2, **options}
    return make_grid(model, engine or {}, SweepOptions(sweep, **chosen))


def test_each_sweep_varies_one_thing():
    own = (PLAIN, SpecShape(4, 5, 16))
    assert grid_of() == RoundGrid(own, (2,), (1024,), 3)
    assert grid_of("batch") == RoundGrid(own, (1, 2, 4, 8, 16, 32, 64), (1024,), 3)
    assert grid_of("context") == RoundGrid(own, (2,), (1024, 2048, 4096, 8192, 16384, 32768), 3)
    assert grid_of("tree").shapes[0] == PLAIN
    assert len(set(grid_of("tree").shapes)) == 8
    table = grid_of("table")
    assert table.shapes == (PLAIN, SpecShape(1, 3, 4), SpecShape(1, 5, 6), SpecShape(4, 5, 16))
    assert table.batches == (1, 8, 32)
    given = grid_of("batch", batches=[3], inputs=[7, 9], shapes=["0,1,1", "2,3,4"])
    assert given == RoundGrid((PLAIN, SpecShape(3, 2, 4)), (3,), (7, 9), 3)
    assert grid_of(engine={"speculative_algorithm": "NONE"}).shapes == (PLAIN,)


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"shapes": ["5,4"]}, ConfigError, "--shapes 5,4"),
        ({"shapes": ["a,b,c"]}, ConfigError, "--shapes"),
        ({"shapes": ["5,4,500"]}, ConfigError, "69"),
        ({"batches": [0]}, InputError, "--batches"),
        ({"inputs": [5, -1]}, InputError, "--inputs"),
        ({"rounds": 0}, InputError, "--rounds"),
        ({"batch_size": 0}, InputError, "--batch-size"),
    ],
)
def test_a_grid_that_cannot_be_measured_is_refused(options, kind, part):
    with pytest.raises(kind, match=part):
        grid_of(**options)


def test_an_engine_has_the_rows_and_the_context_that_its_grid_needs():
    grid = RoundGrid((PLAIN, SpecShape(2, 3, 6)), (1, 5), (300,), 10)
    config = engine_config(None, {"simulate_accept_length": 4}, grid.shapes[1], grid)
    assert (config.max_running_requests, config.context_length) == (5, 1024)
    assert config.shape == grid.shapes[1]
    assert config.simulate_accept_length == 4
    assert engine_config(None, {"simulate_accept_length": 9}, SpecShape(2, 3, 6), grid).simulate_accept_length == 4
    assert engine_config(None, {"simulate_accept_length": 9}, SpecShape(4, 5, 4), grid).simulate_accept_length == 4
    with pytest.raises(ConfigError, match="--simulate-accept-length 9: the longest path of these shapes has 4"):
        run_grid(None, {"simulate_accept_length": 9}, grid, print)
    plain = engine_config(None, {"simulate_accept_length": 4}, PLAIN, grid)
    assert (plain.draft, plain.simulate_accept_length) == (None, None)
    assert engine_config(None, {"max_running_requests": 9}, PLAIN, grid).max_running_requests == 9
    for options, part in (
        ({"max_running_requests": 2}, "--max-running-requests 2"),
        ({"context_length": 310}, "have 310"),
    ):
        with pytest.raises(ConfigError, match=part):
            engine_config(None, options, PLAIN, grid)
    with pytest.raises(ConfigError, match="--inputs"):
        engine_config(None, {}, PLAIN, replace(grid, lengths=(4096,)))
    with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
        engine_config(None, {"speculative_algorithm": "NONE"}, SpecShape(2, 3, 6), grid)


def test_rows_hardly_grow_before_all_are_timed(strong_pair):
    grid = RoundGrid((SpecShape(2, 3, 6),), (8,), (400,), 4, prefill_size=800)
    options = {"draft": str(strong_pair.head), "simulate_accept_length": 3, "chunked_prefill_size": 800}
    llm = LLM(**asdict(engine_config(str(strong_pair.target), options, grid.shapes[0], grid)))
    first, begun = 0, set()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for delta in llm.stream(prompt_ids(llm, 8, 400), params):
        first += len(delta.token_ids) if delta.index == 0 else 0
        begun.add(delta.index)
        if len(begun) == 8:
            break
    steps = 8 * 400 // 800
    assert first <= 1 + 3 * (steps + 2)  # a round between two prefill steps, and what is in flight


@pytest.mark.parametrize(
    ("options", "batches", "parts"),
    [
        (["--speculative-draft-model-path", "no-such-head"], [1], ["no-such-head", "no such folder"]),
        (["--speculative-draft-model-path", "builtin:nestling"], [1], ["a target, not a draft head"]),
        (["--max-running-requests", "2"], [1, 4], ["a batch of 4", "--max-running-requests 2"]),
        (["--inputs", "20", "4000"], [1], ["--inputs", "4000"]),
        (["--context-length", "512"], [1], ["have 512", "--inputs"]),
        (["--max-total-tokens", "16"], [1], ["--max-total-tokens", "need", "have 2"]),
        (["--attention-backend", "fa3"], [1], ["--attention-backend fa3", "CUDA device"]),
        (["--check-level", "7"], [1], ["--check-level", "7"]),
        (["--plot", "p.png"], [1], ["--plot p.png", ".html"]),
        (["--plot", "nowhere/p.html"], [1], ["--plot nowhere/p.html", "folder"]),
        (["--plot", f"{'p' * 300}.html"], [1], ["--plot 'ppp", "too long"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:50],
)
def test_a_sweep_refuses_before_it_measures_the_machine(capsys, monkeypatch, options, batches, parts):
    monkeypatch.setattr(rounds, "measure_machine", lambda *args: pytest.fail("the machine was measured"))
    argv = ["bench", "--device", "cpu", "--batches", *map(str, batches), *options]
    refused(capsys, argv, *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--speculative-draft-model-path", "no-such-head"], ["no-such-head", "no such folder"]),
        (["--context-length", "30"], ["prompt of", "--prompts", "--context-length"]),
        (
            ["--context-length", "200", "--num-prompts", "1", "--speculative-num-steps", "12"],
            ["no room to time rounds", "--context-length"],
        ),
        (["--attention-backend", "fa3"], ["--attention-backend fa3", "CUDA device"]),
    ],
    ids=" ".join,
)
def test_a_comparison_refuses_before_it_loads_an_engine(capsys, monkeypatch, options, parts):
    monkeypatch.setattr(compare, "LLM", lambda *args, **options: pytest.fail("an engine was loaded"))
    refused(capsys, ["bench", "--device", "cpu", *options], *parts)


def test_a_grid_is_measured_after_outputs_were_compared(strong_pair):
    """Every case has its phases, and figures that agree with each other."""
    said = []
    grid = RoundGrid((PLAIN, SpecShape(2, 3, 6)), (1, 3), (20, 40), 4)
    options = {"draft": str(strong_pair.head), "dtype": "float64"}
    report = run_grid(str(strong_pair.target), options, grid, said.append)
    assert report.checked.startswith("outputs equal")
    assert len(report.figures) == 8
    for each in report.figures:
        assert each.rounds == 4
        assert each.wall_ms_low <= each.wall_ms <= each.wall_ms_high
        assert set(each.phase_ms) == ({"draft", "verify"} if each.shape == (0, 1, 1) else {"draft", "verify", "extend"})
        assert each.wall_over_floor == pytest.approx(each.wall_ms / each.floor_ms)
        assert each.read_floor_ms == each.floor_ms
        assert each.wall_over_read_floor == each.wall_over_floor
        assert each.tokens_per_second == pytest.approx(1e3 * each.batch * each.accept_length / each.wall_ms)
        assert each.accept_length == 1 if each.shape == (0, 1, 1) else 1 <= each.accept_length <= 4
        assert each.row() in said
    assert json.loads(json.dumps(report.as_json()))["cases"][3]["batch"] == 3


@pytest.mark.slow
def test_a_tree_alone_is_compared_with_plain_decoding(strong_pair, monkeypatch):
    """A grid needs no plain shape for that; plain decoding alone has nothing to be compared with."""
    options = {"draft": str(strong_pair.head), "dtype": "float64"}
    measure = lambda *shapes: run_grid(  # noqa: E731  # one call
        str(strong_pair.target), options, RoundGrid(shapes, (1,), (20,), 2), lambda text: None
    )
    assert measure(SpecShape(2, 3, 6)).checked.startswith("outputs equal")
    assert measure(PLAIN).checked == "outputs not checked: plain decoding alone"
    monkeypatch.setattr(rounds, "equal_outputs", lambda *args: Equality(10, 2, 1))
    with pytest.raises(EngineError, match="outputs differ in 1 of 2"):
        measure(SpecShape(2, 3, 6))


@pytest.mark.slow
def test_what_every_shape_showed_is_reported(strong_pair, monkeypatch):
    """Not only what the last one did."""
    told = iter((Equality(10, 2, 0, (1e-6,)), Equality(10, 2, 0)))
    monkeypatch.setattr(rounds, "equal_outputs", lambda *args: next(told))
    grid = RoundGrid((PLAIN, SpecShape(2, 3, 6), SpecShape(1, 3, 4)), (1,), (20,), 2)
    report = run_grid(str(strong_pair.target), {"draft": str(strong_pair.head)}, grid, lambda text: None)
    assert report.checked == "outputs equal, 10 tokens, 1 near ties excused; outputs equal, 10 tokens"


def test_plain_rounds_of_an_engine_of_many_shapes_may_be_timed_for_long(strong_pair):
    """On posed rows the draft lacks nothing: what plain rounds put off has no more room than the host allows."""
    options = {"speculative_policy": "auto", "speculative_shapes": "2,3,6", "speculative_max_deferred": 3}
    llm = build(strong_pair, (2, 3, 6), **options)
    assert llm.engine.layout.max_deferred == 3
    assert len(rounds.device_times_ms(llm, 1, 20, 5, PLAIN)) == 5
    assert llm.generate([[1, 2, 3]], greedy(8))[0].token_ids
    llm.close()


def test_a_forced_accept_length_is_what_is_measured(strong_pair):
    grid = RoundGrid((SpecShape(2, 3, 6),), (2,), (20,), 4)
    options = {"draft": str(strong_pair.head), "simulate_accept_length": 3}
    report = run_grid(str(strong_pair.target), options, grid, lambda text: None)
    assert report.figures[0].accept_length == 3
    assert "forced" in report.checked


def test_shapes_whose_outputs_differ_are_not_timed(strong_pair, monkeypatch):
    """A difference is an EngineError before any figure of that shape."""
    monkeypatch.setattr(rounds, "equal_outputs", lambda *args: Equality(10, 2, 1))
    measured = []
    monkeypatch.setattr(
        rounds,
        "measure",
        lambda llm, *args: (
            measured.append(llm.config.shape)
            or rounds.Figures((0, 1, 1), 1, 1, 1.0, 1.0, 1.0, 1.0, {}, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1.0)
        ),
    )
    grid = RoundGrid((PLAIN, SpecShape(2, 3, 6)), (1,), (20,), 2)
    with pytest.raises(EngineError, match="outputs differ in 1 of 2"):
        run_grid(str(strong_pair.target), {"draft": str(strong_pair.head)}, grid, lambda text: None)
    assert measured == [PLAIN]


def test_dummy_weights_need_a_config_folder_alone(tmp_path, strong_pair):
    """--load-format dummy: two config.json, nothing else, and nothing to compare."""
    folders = {}
    for name, folder in (("target", strong_pair.target), ("head", strong_pair.head)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "config.json").write_text((folder / "config.json").read_text())
    options = {"draft": str(folders["head"]), "load_format": "dummy", "simulate_accept_length": 2}
    grid = RoundGrid((PLAIN, SpecShape(2, 3, 6)), (2,), (20,), 2)
    report = run_grid(str(folders["target"]), options, grid, lambda text: None)
    assert "random weights" in report.checked
    assert [each.accept_length for each in report.figures] == [1, 2]


def test_a_dummy_head_of_another_width_has_an_embedding_of_its_own(tmp_path, strong_pair):
    """As its checkpoint would: the target's embedding does not fit it."""
    width = json.loads((strong_pair.target / "config.json").read_text())["hidden_size"]
    changes = {"hidden_size": width // 2, "target_hidden_size": width, "head_dim": 8}
    head = copy_folder(strong_pair.head, tmp_path / "h", **changes)
    options = {"draft": str(head), "load_format": "dummy", "simulate_accept_length": 2}
    grid = RoundGrid((SpecShape(2, 3, 6),), (2,), (20,), 2)
    report = run_grid(str(strong_pair.target), options, grid, lambda text: None)
    assert report.figures[0].accept_length == 2


def test_the_plain_engine_of_a_comparison_is_never_forced():
    options = plain_options(
        {"simulate_accept_length": 3, "draft": "x", "speculative_algorithm": "EAGLE3", "page_size": 4}
    )
    config = EngineConfig.of("m", **options)
    assert (config.draft, config.simulate_accept_length, config.page_size) == (None, None, 4)


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_sweeps_prints_json_and_draws(capsys, tmp_path, strong_pair):
    argv = ["bench", str(strong_pair.target), "--speculative-draft-model-path", str(strong_pair.head), "--json"]
    argv += ["--sweep", "batch", "--batches", "1", "2", "--inputs", "20", "--rounds", "2"]
    assert main([*argv, "--plot", str(tmp_path / "p.html")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    assert [(case["shape"], case["batch"]) for case in json.loads(line)["cases"]] == [
        ([0, 1, 1], 1),
        ([0, 1, 1], 2),
        ([5, 4, 16], 1),
        ([5, 4, 16], 2),
    ]
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    for bad, part in (("p.png", ".html"), ("nowhere/p.html", "folder")):
        assert main([*argv, "--plot", str(tmp_path / bad)]) == 2
        assert part in capsys.readouterr().err
    assert main([*argv, "--transformers"]) == 2
    assert "--transformers" in capsys.readouterr().err


@pytest.mark.slow
def test_the_comparison_measures_rounds_of_both_and_transformers_too(capsys):
    """The peer decodes the same prompts; the rounds are of plain and of speculative decoding."""
    argv = [
        "bench",
        "--num-prompts",
        "1",
        "--max-tokens",
        "4",
        "--repeats",
        "1",
        "--rounds",
        "2",
        "--json",
        "--transformers",
    ]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["shape"] for each in report["rounds"]] == [[0, 1, 1], [5, 4, 16]]
    assert report["transformers"]["median"] > 0
    assert report["machine"]["bytes_per_s"] > 0


def test_a_comparison_sizes_contexts_by_its_prompts(monkeypatch):
    """Two engines share the memory: neither takes more than the prompts need."""
    made = []

    class StopError(Exception):
        pass

    def note(model, **options):
        made.append(options)
        raise StopError

    monkeypatch.setattr(compare, "LLM", note)
    options = compare.BenchOptions(None, 2, 16, 3, 1, 2, False)
    with pytest.raises(StopError):
        compare.run(None, {}, options)
    assert made[0]["max_running_requests"] == 3
    assert made[0]["context_length"] % 1024 == 0
