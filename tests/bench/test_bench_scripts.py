"""What the scripts of `bench/` compute from what they measured: without a GPU, on numbers that are known."""

import asyncio
import importlib
import json
import sys
from argparse import Namespace
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import date
from importlib import resources
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from treetop import LLM
from treetop.attention.auto import Timing, call_of, choose
from treetop.kernels.attention.latent_attention import latent_attention_reference
from treetop.kernels.gemm import skinny_gemm as kernels
from treetop.kernels.gemm.ordered_weights import OrderedLaunch, decode
from treetop.kernels.gemm.skinny_gemm import load_table
from treetop.kernels.triton_guard import GpuTraits
from treetop.kernels.tuning import read_table
from treetop.types.errors import InputError
from treetop_debug.servers import Stream

BENCH = Path(__file__).parents[2] / "benchmarks"
CHOICES = BENCH.parent / "src" / "treetop" / "attention" / "choices.json"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of `bench/` by name, as if it ran: the scripts beside it are found."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for path in BENCH.glob("*.py"):
        sys.modules.pop(path.stem, None)


# ----------------------------------------------------------------------------------------------------- profile_round


def test_times_between_completions_add_up_to_the_time_that_passed(script):
    """Durations of kernels that wait inside each other add up to more: 10 + 14 + 18 here, of 25."""
    shares = script("profile_round").shares
    kernels = [("c", 7.0, 25.0), ("a", 0.0, 10.0), ("b", 2.0, 16.0)]
    assert shares(kernels) == [("a", 10.0), ("b", 6.0), ("c", 9.0)]
    assert sum(end - start for _, start, end in kernels) == 42.0


def test_a_gap_belongs_to_the_kernel_after_it_and_what_ends_at_once_takes_nothing(script):
    shares = script("profile_round").shares
    assert shares([("a", 5.0, 8.0), ("late", 11.0, 12.0)]) == [("a", 3.0), ("late", 4.0)]
    assert shares([("a", 0.0, 8.0), ("b", 3.0, 8.0)]) == [("a", 8.0), ("b", 0.0)]
    assert shares([("long", 4.0, 9.0), ("inside", 5.0, 6.0)]) == [("inside", 2.0), ("long", 3.0)]
    assert shares([]) == []


# ------------------------------------------------------------------------------------------------- committed tables


def test_a_run_replaces_what_it_tried_and_keeps_the_rest(script):
    """Classes of earlier runs stay, and in a class the backends that were not tried; a result gone wrong goes."""
    tables = script("frame")
    old = {
        "a": {"triton": {"us": 9.0}, "fa3": {"us": 8.0}, "fa4": {"us": 7.0}},
        "b": {"triton": {"us": 5.0}, "fa3": {"us": 4.0}},
    }
    new = {"a": {"triton": {"us": 1.0}}, "c": {"triton": {"us": 2.0}, "fa3": {"us": 3.0}}}
    joined = tables.join_backends(old, new, ["triton", "fa3"])
    assert joined == {"a": {"triton": {"us": 1.0}, "fa4": {"us": 7.0}}, "b": old["b"], "c": new["c"]}


def test_a_written_table_is_read_back_with_a_class_a_line(script):
    tables = script("frame")
    head, classes = {"gpu": "G", "num_sms": 2}, {"b": {"triton": {"us": 1.0}}, "a": {"triton": {"us": 2.0}}}
    text = tables.text_of(head, classes)
    assert json.loads(text) == {**head, "classes": classes}
    assert [line.split('"')[1] for line in text.splitlines() if "triton" in line] == ["a", "b"]


@pytest.mark.parametrize(
    ("package", "name"), [("treetop.attention", "choices.json"), ("treetop.kernels.attention", "attention_config.json")]
)
def test_the_committed_tables_are_as_the_benchmark_writes_them(script, package, name):
    """So a run that adds classes changes no other line."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    table = json.loads(text)
    classes = table.pop("classes")
    assert script("frame").text_of(table, classes) == text


def test_a_run_adds_its_classes_and_leaves_the_day_and_the_lines_of_all_others(script, monkeypatch, tmp_path):
    """To a copy of the committed table: each new time says its run, the table each run's commands; what a run measures
    again is of that run; one that measured nothing writes nothing."""
    tables, path = script("frame"), tmp_path / "choices.json"
    path.write_bytes(CHOICES.read_bytes())
    before = json.loads(path.read_text(encoding="utf-8"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: before["gpu"])
    monkeypatch.setattr(tables.datetime, "date", SimpleNamespace(today=lambda: date(2031, 2, 3)))
    name, known = "tail h1x64x576e2c7 rows1 n1 keys64", "tail h1x16x576e2 rows1 n1 keys8192"
    new = {name: {"triton": {"us": 3.0, "plan_us": 0.0}}, known: {"gluon": {"us": 9.0, "plan_us": 0.0}}}
    tables.add_runs(path, "python x.py", "abc", {}, ["triton"])
    assert path.read_bytes() == CHOICES.read_bytes()
    tables.add_runs(path, "python x.py", "abc", new, ["gluon"])
    tables.add_runs(path, "python x.py", "abc", {name: new[name]}, ["triton"])
    tables.add_runs(path, "python y.py", "abc", {name: new[name]}, ["triton"])
    after, run = json.loads(path.read_text(encoding="utf-8")), "2031-02-03, abc"
    assert after["runs"] == {**before.get("runs", {}), run: ["python x.py", "python y.py"]}
    changed = {each for each in after["classes"] if after["classes"][each] != before["classes"].get(each)}
    assert changed == {name, known}
    assert after["classes"][name] == {"triton": {"us": 3.0, "plan_us": 0.0, "run": run}}
    kept = {each: timing for each, timing in before["classes"][known].items() if each != "gluon"}
    assert after["classes"][known] == {**kept, "gluon": {"us": 9.0, "plan_us": 0.0, "run": run}}
    assert {each: after[each] for each in ("gpu", "num_sms", "date", "command")} == {
        each: before[each] for each in ("gpu", "num_sms", "date", "command")
    }
    found = read_table(path, lambda row: {each: Timing(**timing) for each, timing in row.items()})
    reason = choose(found, name, frozenset({"triton"}))[1]
    assert reason == f"{name}: triton 3.0 us ({run})"


def test_sparse_attention_is_measured_in_the_classes_that_an_engine_asks_for(script):
    """DeepSeek-V3.2's and GLM-5's, whose planes are wider than a key; each class once; dense calls have others."""
    made = []
    for shape in script("attention_shapes").sparse_shapes():
        need = shape.need
        (group,) = need.groups
        assert (group.head_dim, group.index_dim, group.latent, group.top_k) == (704, 128, 512, 2048)
        call = call_of(need, group, shape.rows, shape.n, shape.capacity, False, shape.tail)
        assert call == shape.call
        made.append((call.group, call.rows, call.n, call.max_kv_len))
        dense = replace(group, head_dim=576, index_dim=0, top_k=0)
        asked = call_of(need, dense, shape.rows, shape.n, shape.capacity, False, shape.tail).shape_class
        assert asked == shape.call.shape_class.replace("c2048", "")
    assert sorted(made) == sorted(product((64, 128), (1, 8, 32), (1, 4, 16), (8192, 32768)))


def test_a_case_of_sparse_attention_is_compared_with_attention_to_what_was_chosen(script, monkeypatch):
    """In a ragged batch with a padding row: no key beyond a row's, and another choice is another result."""
    cases = script("attention_cases")
    monkeypatch.setattr(cases, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(cases, "rotation", lambda shape: None)
    torch.manual_seed(0)
    whole = replace(script("attention_shapes").sparse_shape(3, 90, 4, 5), top_k=20, dtype=torch.float32, ragged=True)
    case = cases.build(whole, 1)
    metadata, (layer,) = case.metadata, case.layers
    assert case.q.is_contiguous(), "as an engine's queries are, of which no kernel then makes a copy"
    chosen = metadata.chosen
    for row, length in enumerate(metadata.kv_len.tolist()):
        for query in range(5):
            few = chosen.positions[row, query, : chosen.count[row, query]].tolist()
            assert few == sorted(set(few))
            assert len(few) == min(length, 20)
            assert all(each < length for each in few)
    scale = 576**-0.5
    out = latent_attention_reference(case.q, layer.planes, metadata, case.tail.planes, 512, scale)
    assert cases.error_of(case, out, layer) < 1e-6
    every = replace(metadata, chosen=None)
    out = latent_attention_reference(case.q, layer.planes, every, case.tail.planes, 512, scale)
    assert cases.error_of(case, out, layer) > 0.1


def test_a_table_of_another_gpu_is_not_overwritten_unasked(script, monkeypatch, capsys):
    """What a part of the classes would leave is a table without the others."""
    pytest.importorskip("triton", reason="the script times Triton's kernels")
    attention = script("attention")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another GPU")
    for asked, name in (("--write-table", "choices.json"), ("--tune", "attention_config.json")):
        with pytest.raises(SystemExit) as stopped:
            attention.options_of([asked, "--shapes", "prefill"])
        assert stopped.value.code == 2
        assert f"{name} is of another GPU; --replace" in capsys.readouterr().err
        assert attention.options_of([asked, "--replace"]).replace
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda *_: json.loads(CHOICES.read_text(encoding="utf-8"))["gpu"]
    )
    assert attention.options_of(["--write-table"]).write_table


def test_prefill_is_measured_from_512_to_8k_queries_over_up_to_32k_keys(script):
    """One prompt and eight; every class once, those of least work first."""
    shapes = script("attention_shapes").prefill_shapes()
    sizes = {(shape.rows, shape.n, shape.prefix_len) for shape in shapes}
    assert len(sizes) == len({shape.call.shape_class for shape in shapes}) == len(shapes)
    assert {(rows, n, 32768) for rows in (1, 8) for n in (1024, 2048, 4096, 8192)} <= sizes
    assert all(n <= keys for _, n, keys in sizes)
    work = [shape.operations for shape in shapes]
    assert work == sorted(work)


def test_a_large_prefill_is_compared_at_some_queries_of_every_row_as_at_all(script, monkeypatch):
    """The first and the last among them; also in a ragged batch with a padding row."""
    cases = script("attention_cases")
    monkeypatch.setattr(cases, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(cases, "rotation", lambda shape: None)
    shape = cases.Shape("prefill", 3, 40, 100, 0, 4, 2, 16, 4, dtype=torch.float32, ragged=True)
    torch.manual_seed(0)
    whole = cases.build(shape, 1)
    expected = cases.reference(whole, whole.layers[0])
    assert expected.shape[1] == 40
    monkeypatch.setattr(cases, "MAX_COMPARED", 7)
    case = replace(whole)
    assert case.compared.tolist() == [0, 6, 13, 20, 26, 32, 39]
    torch.testing.assert_close(cases.reference(case, case.layers[0]), expected[:, case.compared])
    wrong = expected.clone()
    wrong[1, 13] += 1
    assert cases.error_of(case, expected, case.layers[0]) < 1e-5
    assert cases.error_of(case, wrong, case.layers[0]) > 0.01


# ---------------------------------------------------------------------------------------------------------- prefill


def test_prompts_are_timed_by_the_size_of_steps_and_first_tokens_compared(script, strong_pair, tmp_path, capsys):
    """On a CPU: every case on every engine, each with the step that was asked for, 0 the engine's own."""
    options = ["--model", str(strong_pair.target), "--load-format", "auto", "--backends", "torch", "--repeats", "3"]
    out = tmp_path / "prefill.json"
    cases = ["--device", "cpu", "--cases", "1x40", "3x17", "--chunks", "0", "16", "--json", str(out)]
    assert script("prefill").main([*options, *cases]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    found = [(each["chunk"], each["prompts"], each["tokens"]) for each in report["figures"]]
    assert found == [(123, 1, 40), (123, 3, 17), (16, 1, 40), (16, 3, 17)]  # 3 rows of 41 tokens are less than 512
    assert [engine["attends"] for engine in report["engines"]] == ["torch", "torch"]
    for each in report["figures"]:
        assert 0 < each["ms_low"] <= each["ms"] <= each["ms_high"]
        assert each["tokens_per_s"] == pytest.approx(1e3 * each["prompts"] * each["tokens"] / each["ms"])
        assert each["agree"]
        assert len(each["first_tokens"]) == each["prompts"]
    assert "first tokens differ" not in capsys.readouterr().err


def test_first_tokens_that_differ_are_said(script, strong_pair):
    prefill = script("prefill")
    llm = LLM(str(strong_pair.target), None, device="cpu", max_running_requests=1, context_length=64)
    case = prefill.Case.of("1x20")
    sound = prefill.measure(llm, "torch", case, 1, None)
    assert sound.agree
    other = prefill.measure(llm, "torch", case, 1, [sound.first_tokens[0] + 1])
    assert not other.agree
    assert "differ" in prefill.line_of(other)


@pytest.mark.parametrize("case", ["8", "0x5", "ax8", "8x", "1x-4"])
def test_a_case_that_is_none_is_refused(script, case):
    with pytest.raises(InputError, match="--cases"):
        script("prefill").Case.of(case)


# ---------------------------------------------------------------------------------------------------------- serving


@pytest.mark.slow
def test_a_server_is_timed_beside_an_engine_of_this_process(script, strong_pair, capsys):
    """On a CPU: every part gives its line, over a server that streams text though the model has no tokenizer."""
    model = ["--model", str(strong_pair.target), "--draft", str(strong_pair.head), "--device", "cpu"]
    sizes = ["--batches", "1", "2", "--input-tokens", "5", "--prompt-tokens", "100", "--rounds", "10", "--repeats", "1"]
    assert script("serving").main([*model, *sizes, "--accept-length", "2"]) == 0
    machine, one, two, host, ttft, gaps = map(json.loads, capsys.readouterr().out.splitlines())
    assert machine["options"]["simulate_accept_length"] == 2
    assert [one["batch"], two["batch"], host["batch"], gaps["rows"]] == [1, 2, 2, 1]
    assert all(each["server_rounds_per_s"]["low"] > 0 < each["llm_rounds_per_s"]["low"] for each in (one, two))
    assert 0 < host["scheduler_core_us"]["median"] < host["round_us"]
    assert host["hidden"] is None  # nothing overlaps on a CPU
    assert ttft["cached_tokens"] == 80  # whole pages of 16 of the 90 that prompts share
    assert ttft["uncached_share"] == 0.2
    assert gaps["alone_ms"]["p50"] > 0
    assert gaps["ratio"]["p99"] > 0


def test_rounds_of_a_stream_are_counted_by_its_tokens(script):
    """An event may hold several rounds: the one with the last round ends the time, and all its rounds count."""
    serving = script("serving")
    stream = Stream(0.0, [(1.0, 1), (2.0, 4)])
    later = [(3.0, 7), (4.5, 16), (5.0, 19)]
    assert serving.rounds_since(stream, 1, 3, 3) is None
    stream.events += later[:1]
    assert serving.rounds_since(stream, 1, 3, 3) is None
    stream.events += later[1:]
    assert serving.rounds_since(stream, 1, 3, 3) == (2.5, 4)
    assert serving.gaps_ms(stream, 2) == [1000.0, 1500.0, 500.0]


def test_launches_without_a_cut_join_what_a_table_has(script, tmp_path, monkeypatch):
    """Beside an entry's others, in one of their own, and none where the vendor's product was faster."""
    pytest.importorskip("triton", reason="the script times Triton's kernels")
    module, table = script("skinny_gemm"), tmp_path / "table.json"
    key = {"name": "down", "n": 4096, "k": 14336, "gated": False}
    known = {**key, "rows": 16, "launch": [64, 128, 2, 6, 4], "us": 1.0, "vendor_us": 2.0}
    table.write_text(json.dumps({"num_sms": 132, "machine": {"gpu": "H200"}, "entries": [known]}))
    monkeypatch.setattr(module, "TABLE", table)
    monkeypatch.setattr(script("frame"), "gpu_traits", lambda _: GpuTraits(132, True, 227 << 10))
    monkeypatch.setattr(kernels, "TABLE", table)
    for rows, launch in ((16, [64, 128, 1, 8, 4]), (64, [32, 128, 1, 8, 4]), (256, None)):
        module.add_whole({**key, "rows": rows}, {"launch": launch, "us": 1.0})
    load_table.cache_clear()
    try:
        found = load_table()
    finally:
        load_table.cache_clear()
    wholes = {16: [64, 128, 1, 8, 4], 64: [32, 128, 1, 8, 4], 256: None}
    assert {key: each["whole"]["launch"] for key, each in found.entries.items()} == {
        (4096, 14336, False, rows): launch for rows, launch in wholes.items()
    }
    assert {key[3]: each["launch"] for key, each in found.entries.items() if "launch" in each} == {16: known["launch"]}


@pytest.mark.parametrize("wrong", [None, 2])
def test_launches_of_weights_in_13_bits_are_the_fastest_with_the_right_bits(script, tmp_path, monkeypatch, wrong):
    """On a CPU, timed by what a launch is made up to take. 16 bits serve where none gains; wrong bits are an error."""
    module, table = script("ordered_weights"), tmp_path / "table.json"
    kept = {"name": "other", "n": 128, "k": 256, "gated": False, "rows": 8, "launch": None, "us": 1.0, "whole_us": 1.0}
    table.write_text(json.dumps({"num_sms": 132, "machine": {"gpu": "H200", "torch": "2"}, "entries": [kept]}))
    launches = [OrderedLaunch(1, 2, 1), OrderedLaunch(2, 2, 1)]
    us = {None: 10.0, 1: 9.9, 2: 7.0}

    def multiply(x, weight, launch, gpu):
        return x @ decode(weight).T + (launch.groups == wrong)

    for name, value in {
        **{"TABLE": table, "DEVICE": torch.device("cpu"), "SHAPES": {"new": (64, 256, False)}},
        **{"gpu_traits": lambda _: GpuTraits(132, True, 227 << 10), "compile_all": lambda *_: None},
        **{"machine_of": lambda: {"gpu": "H200", "torch": "2"}, "calls": lambda n, k: 2},
        **{"candidates": lambda *_: launches, "ordered_gemm": multiply, "whole": lambda x, w, gated: x @ w.T},
        "median_us": lambda calls: us[None if len(calls[0].args) < 4 else calls[0].args[2].groups],
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(script("frame"), "gpu_traits", module.gpu_traits)
    assert module.main(["--write-table", "--rows", "8", "--only", "new"]) == (wrong is not None)
    entries = json.loads(table.read_text())["entries"]
    found = {"launch": [2, 2, 1, False], "us": 7.0} if wrong is None else {"launch": None, "us": 10.0}
    new = {"name": "new", "n": 64, "k": 256, "gated": False, "rows": 8, **found, "whole_us": 10.0}
    assert entries == [kept, new]


# -------------------------------------------------------------------------------------------------------- load ramp


@pytest.mark.slow
def test_contenders_of_a_ramp_get_the_same_requests(script, capsys):
    """Plain decoding, a fixed shape and the policy, a server each: as many tokens in every step."""
    sizes = ["--clients", "1", "2", "1", "--requests", "1", "--prompt-tokens", "4", "8", "--max-tokens", "4", "8"]
    assert (
        script("load_ramp").main(
            [
                *sizes,
                "--shapes",
                "2,1,3",
                "--turns",
                "1",
                "--options=--device cpu --context-length 256 --max-running-requests 2",
            ]
        )
        == 0
    )
    lines = [*map(json.loads, capsys.readouterr().out.splitlines())]
    runs, compared, auto = lines[:3], lines[3:6], lines[6]
    for part in (runs, compared):
        assert [each["contender"] for each in part] == ["plain", "2,1,3", "auto"]
    tokens = [[step["tokens"] for step in each["steps"]] for each in runs]
    assert tokens == 3 * tokens[:1]
    assert [each["tokens"] for each in compared] == [sum(each) for each in tokens]
    for each in compared:
        assert [step["clients"] for step in each["steps"]] == [1, 2, 1]
        assert all(step[f"tokens_per_{clock}"] > 0 for step in each["steps"] for clock in ("s", "cpu_s"))
    plain, fixed, _ = (each["ramp"] for each in compared)
    assert (plain["over_plain_by_s"], plain["plain_share"], fixed["plain_share"]) == (1, 1, 0)
    assert fixed["mean_drafts"] == 2 >= fixed["mean_accepted"] >= 0
    assert auto["by_cpu_s"]["best_fixed"] in ("plain", "2,1,3")
    assert auto["by_s"]["auto_over_plain"] > 0
    assert auto["by_s"]["plain_95"] is None, "one turn says nothing of how far it is off"
    assert [each["clients"] for each in auto["by_s"]["loads"]] == [1, 2]


def test_a_ramps_intervals_are_of_paired_turns(script):
    """A machine that is slower in some turns for all is off by nothing; the best of a load is plain where that is."""
    ramp = script("load_ramp")

    def turns(*rates):
        return [
            [ramp.Step(1, rate, 1.0, 1.0, 1, 0, 0, 0), ramp.Step(4, 2 * rate, 1.0, 1.0, 1, 0, 0, 0)] for rate in rates
        ]

    plain, fixed, auto = turns(100, 50, 200), turns(90, 45, 180), turns(110, 55, 220)
    assert ramp.interval(auto, plain, "s") == [1.1, 1.1]
    low, high = ramp.interval(turns(110, 55, 240), plain, "s")
    assert low < 1.1 < high
    found = ramp.loads({"plain": plain, "2,1,3": fixed, "auto": auto}, (1, 4), ["2,1,3"], "s")
    assert [each["clients"] for each in found] == [1, 4]
    assert all(each["best_fixed"] == "plain" and each["auto_over_best_fixed"] == 1.1 for each in found)


def test_servers_that_are_up_together_take_each_step_in_turns(script, monkeypatch):
    """So a machine that is slow for a while is so for all. Each turn has prompts of its own, for the caches have those
    before; one that time cuts off does not count."""
    ramp, up, taken = script("load_ramp"), [], []

    @asynccontextmanager
    async def served(model, options):
        up.append(options)
        yield Namespace(options=options, start_s=0.0)
        assert len(taken) > 3, "none ends before all have been measured"

    async def step(server, clients):
        taken.append((up.index(server.options), len(clients), clients[0][0]["prompt"]))
        if len(taken) == 3 + 2 * 6 + 2:  # warm-up, two turns, and a part of the third
            clock.now = 100.0
        return ramp.Step(len(clients), 1, 1.0, 1.0, 1, 0, 0, 0)

    clock = Namespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(ramp, "served", served)
    monkeypatch.setattr(ramp, "step", step)
    monkeypatch.setattr(ramp, "time", clock)
    sizes = {"clients": [1, 2], "requests": [3, 1], "prompt_tokens": (8, 8), "max_tokens": (4, 4)}
    args = Namespace(model="builtin:nestling", seed=0, turns=3, **sizes)
    runs = asyncio.run(ramp.together(args, {"plain": {"n": 0}, "2,1,3": {"n": 1}, "auto": {"n": 2}}, 50.0))
    assert {name: [len(each) for each in ramps] for name, ramps in runs.items()} == {name: [2, 2] for name in runs}
    auto, plain, fixed = range(3)  # as they were started: others find what auto compiled
    order = [who for who, _, _ in taken[3:]]
    first, second = [plain, fixed, auto], [auto, fixed, plain]
    assert order == [*first, *second, *second, *first, *first[:2]]
    assert [clients for _, clients, _ in taken[3:]] == [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3 + [1] * 2
    prompts = [prompt for _, _, prompt in taken]
    assert prompts[3] == prompts[4] == prompts[5] != prompts[9], "the same for all, others in the next turn"


def test_a_ramp_has_one_number_of_requests_or_one_a_step(script):
    with pytest.raises(InputError, match=r"^--requests: one number, or as many as --clients has, 3$"):
        script("load_ramp").main(["--clients", "1", "2", "1", "--requests", "1", "2"])


def test_options_of_a_ramp_are_for_every_server_and_those_of_drafts_for_drafts(script):
    parse = script("load_ramp").contenders
    given = "--device cuda --disable-radix-cache --simulate-acceptance builtin:kimi-k2 --max-running-requests 9"
    found = parse(Namespace(options=given, clients=[1, 4], shapes=["2,1,3", "5,4,8"], draft="head", profiles=None))
    assert list(found) == ["plain", "2,1,3", "5,4,8", "auto"]
    common = {"max_running_requests": "9", "exactness": "ties", "device": "cuda", "disable_radix_cache": True}
    assert found["plain"] == {**common, "speculative_algorithm": "NONE"}
    drafted = {**common, "draft": "head", "simulate_acceptance": "builtin:kimi-k2"}
    assert all(found[name].items() >= drafted.items() for name in ("2,1,3", "5,4,8", "auto"))
    assert found["5,4,8"]["speculative_eagle_topk"] == 4
    assert found["auto"]["speculative_shapes"] == "2,1,3 5,4,8"
    of_bits = Namespace(options=f"{given} --exactness bits", clients=[1], shapes=[], draft="head", profiles=None)
    assert {each["exactness"] for each in parse(of_bits).values()} == {"bits"}


# ------------------------------------------------------------------------------------------------------ live_changes


def test_a_pause_is_the_longest_gap_that_touches_a_change(script):
    """Of rows that come together in rounds of 10 ms; a longer gap long before it is none."""
    gaps = script("live_changes").Gaps(None, 1, 1)
    gaps._at = [0.0, 0.0001, 0.5, *(0.51 + i * 0.01 for i in range(50)), 3.0, 3.01, 4.0]
    longest, median = gaps.between(1.1, 2.0)
    assert (round(longest, 6), round(median, 6)) == (2.0, 0.01)


@pytest.mark.parametrize("name", ["plain", "9,9,9"])
def test_a_ramp_leaves_out_only_whom_it_has_beside_plain(script, name):
    with pytest.raises(InputError, match=f"^--without {name}: may name 2,1,3 auto$"):
        script("load_ramp").main(["--shapes", "2,1,3", "--without", name])
