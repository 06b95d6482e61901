"""The command line: what it prints where, its exit codes, and one line for whatever a user can get wrong."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny_models import copy_folder
from treetop.cli import main
from treetop.types.layout import SpecShape
from treetop.version import __version__

SOURCE = Path(__file__).parent.parent / "src"
PROMPT = "def add(a, b):\n"


@pytest.fixture(autouse=True)
def no_fault(monkeypatch):
    monkeypatch.delenv("TREETOP_FAULT", raising=False)


def run(capsys, *argv):
    """Exit code, stdout and stderr of a command line, in this process."""
    capsys.readouterr()
    try:
        code = main([str(each) for each in argv])
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err


def spawn(*argv, **options):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "treetop.cli", *map(str, argv)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def lines(text) -> list[str]:
    return text.splitlines()


# ---------------------------------------------------------------------------------------------- generate


def test_generate_streams_text_and_closes_with_a_line_of_figures(capsys):
    """One prompt: the completion as it is, then one line in brackets with tokens, passes, accept length and reason."""
    code, out, err = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12)
    assert (code, err) == (0, "")
    *text, summary = lines(out)
    assert "".join(text).strip()
    for part in ("[12 tokens,", "target passes", "accept length", "tokens/s", "length]"):
        assert part in summary
    echoed = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12, "--echo")[1]
    assert echoed.startswith(PROMPT + text[0])


def test_several_prompts_are_told_apart_and_summed_up_in_one_line(capsys, tmp_path):
    """--prompt repeats, --prompt-file adds its own, and results stand in the order of the prompts."""
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n")
    argv = ["generate", "--prompt", PROMPT, "--prompt", "class A:", "--prompt-file", file, "--max-tokens", 6]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert [line for line in lines(out) if line.startswith("---")] == [f"--- prompt {i}" for i in range(3)]
    assert "[18 tokens," in lines(out)[-1]


def test_json_is_one_object_a_prompt_with_exactly_the_documented_keys(capsys):
    """Nothing but the objects is on stdout; token counts, reason and metrics agree with each other."""
    argv = ["generate", "--json", "--max-tokens", 9, "--ignore-eos"]
    code, out, err = run(capsys, *argv, "--prompt", PROMPT, "--prompt", "class A:")
    assert (code, err) == (0, "")
    objects = [json.loads(line) for line in lines(out)]
    assert len(objects) == 2
    for each in objects:
        assert set(each) == {"text", "token_ids", "finish_reason", "usage", "metrics"}
        assert set(each["usage"]) == {"prompt_tokens", "completion_tokens"}
        assert set(each["metrics"]) == {"accept_length", "target_forwards", "tokens_per_second"}
        assert each["usage"]["completion_tokens"] == len(each["token_ids"]) == 9
        assert each["finish_reason"] == "length"
        forwards = each["metrics"]["target_forwards"]
        assert each["metrics"]["accept_length"] == pytest.approx(8 / forwards)
        assert each["metrics"]["tokens_per_second"] > 0
    (alone,) = lines(run(capsys, *argv, "--prompt", PROMPT)[1])
    assert json.loads(alone)["token_ids"] == objects[0]["token_ids"], "a prompt's tokens depend on the batch"
    (one,) = lines(run(capsys, "generate", "--json", "--max-tokens", 1, "--prompt", PROMPT)[1])
    assert json.loads(one)["metrics"]["accept_length"] is None


def test_a_seed_makes_sampling_reproducible(capsys):
    """The same seed, the same text; another seed, another."""
    argv = ["generate", "--json", "--prompt", PROMPT, "--max-tokens", 16, "--temperature", 1.5, "--ignore-eos"]

    def ids(seed):
        return json.loads(run(capsys, *argv, "--seed", seed)[1])["token_ids"]

    assert ids(7) == ids(7) != ids(8)


def test_a_model_without_a_draft_decodes_plainly_and_gives_the_same_tokens(capsys, weak_pair):
    """With the draft named, a tree; without it, plain decoding; sampled tokens are the same ones."""
    argv = ["generate", weak_pair.target, "--json", "--prompt", "def f", "--max-tokens", 24, "--temperature", 0.7]
    argv += ["--seed", 3, "--dtype", "float64", "--ignore-eos"]
    speculative, plain, forbidden = (
        json.loads(run(capsys, *argv, *more)[1])
        for more in (["--speculative-draft-model-path", weak_pair.head], [], ["--speculative-algorithm", "NONE"])
    )
    assert speculative["token_ids"] == plain["token_ids"] == forbidden["token_ids"]
    assert speculative["metrics"]["target_forwards"] < plain["metrics"]["target_forwards"] == 23
    assert plain["metrics"]["accept_length"] == 1


def test_a_stop_string_ends_the_completion_and_is_cut_off(capsys):
    """The text ends before the stop, and the reason is stop."""
    argv = ["generate", "--json", "--prompt", PROMPT, "--max-tokens", 40, "--ignore-eos"]
    free = json.loads(run(capsys, *argv)[1])["text"]
    stop = free[5:8]
    stopped = json.loads(run(capsys, *argv, "--stop", stop, "--stop", "\x00never")[1])
    assert stopped["text"] == free[: free.index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_comparing_with_plain_decoding_says_that_outputs_are_equal(capsys):
    code, out, _ = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12, "--compare-plain")
    assert code == 0
    assert "the speed of plain decoding" in lines(out)[-1]
    assert "outputs equal" in lines(out)[-1]
    code, out, err = run(capsys, "generate", "--prompt", PROMPT, "--max-tokens", 12, "--compare-plain", "--json")
    assert code == 0
    assert len(lines(out)) == 1
    assert "outputs equal" in err


def test_the_version_is_printed(capsys):
    assert run(capsys, "--version") == (0, f"treetop {__version__}\n", "")


@pytest.mark.parametrize("command", ["generate", "bench", "trace", "doctor"])
def test_help_names_every_option_of_the_engine(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    for option in ("--speculative-num-steps", "--speculative-eagle-topk", "--page-size", "--check-level", "--graphs"):
        assert option in out


# ---------------------------------------------------------------------------------------------- bench and doctor


def test_bench_compares_before_it_times_and_prints_one_object(capsys):
    """Equal outputs, exit code 0, and figures that agree with the shape."""
    argv = ["bench", "--json", "--num-prompts", 2, "--max-tokens", 12, "--repeats", 1]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    (line,) = lines(out)
    report = json.loads(line)
    assert report["outputs_equal"] is True
    assert report["prompts"] == 2
    assert report["shape"] == [5, 4, 16]
    assert 1 <= report["accept_length"] <= 6
    assert len(report["acceptance_by_depth"]) == 5
    assert 0 < report["target_forwards_per_token"] <= 1
    for rate in (report["plain"], report["speculative"]):
        assert 0 < rate["low"] <= rate["median"] <= rate["high"]


def test_a_bench_whose_outputs_differ_exits_1(capsys, monkeypatch):
    """A fault that changes tokens is a failed benchmark, whatever the speed."""
    from treetop import bench

    monkeypatch.setattr(bench, "_near_tie", lambda llm, ids: False)
    monkeypatch.setattr(
        bench,
        "equal_outputs",
        lambda plain, expected, got, real=bench.equal_outputs: real(plain, expected, got[::-1]),
    )
    argv = ["bench", "--num-prompts", 2, "--max-tokens", 6, "--repeats", 1, "--json"]
    code, out, _ = run(capsys, *argv)
    assert code == 1
    assert json.loads(out)["outputs_equal"] is False


def test_doctor_shows_machine_backends_capacity_and_conformance(capsys):
    """Exit code 0, every dimension with its formula, and as many cases as were asked for."""
    shape = SpecShape(3, 4, 12)
    argv = ["doctor", "--cases", 3, "--page-size", 4, "--context-length", 100, "--speculative-eagle-topk", 3]
    argv += ["--speculative-num-steps", 4, "--speculative-num-draft-tokens", 12]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    for part in ("torch", "flashinfer", "why not", "page_columns", "verify_tail", "pages.full", "pages.draft"):
        assert part in out
    flat = " ".join(out.replace("│", " ").split())
    assert f"{-(-(100 + shape.commit_width) // 4)} " in flat
    assert "ceil((context 100 + lag" in flat
    assert "conformance: 3 of 3 cases agree" in out


@pytest.mark.parametrize(("given", "lag"), [("--overlap", 2), ("--no-overlap", 1)])
def test_overlap_is_a_flag_with_its_opposite(capsys, given, lag):
    """The capacity table has positions for the steps in flight, and the text is the same either way."""
    argv = ("--prompt", "def f", "--max-tokens", 12, "--dtype", "float64", "--json", "--device", "cpu")
    code, out, _ = run(capsys, "generate", *argv, given)
    assert code == 0
    plain = run(capsys, "generate", *argv)[1]
    assert json.loads(out)["token_ids"] == json.loads(plain)["token_ids"]
    code, out, _ = run(capsys, "doctor", "--cases", 1, "--device", "cpu", given)
    assert f" {2048 + lag * 6} " in out


def test_trace_refuses_overlap(capsys, tmp_path):
    code, _, err = run(capsys, "trace", "--prompt", "x", "--output", tmp_path / "t.html", "--overlap")
    assert code == 2
    assert "--overlap" in err


def test_a_doctor_that_finds_a_difference_exits_1(capsys, monkeypatch):
    """A failed case is printed with its values, and the exit code says so."""
    from treetop.doctor import run as doctor
    from treetop.doctor.conformance import Outcome

    monkeypatch.setattr(
        doctor.Conformance, "run", lambda self, case: Outcome(case, 1, 0, "tree after 3 tokens: something")
    )
    code, out, _ = run(capsys, "doctor", "--cases", 2)
    assert code == 1
    assert out.count("FAILED Case(") == 2
    assert "0 of 2 cases agree" in out


# ---------------------------------------------------------------------------------------------- bad input


def refused(capsys, argv, *parts):
    """Exit code 2, nothing on stdout, one line on stderr that holds all parts and no traceback."""
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("treetop: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--prompt", ""], ["prompt", "empty"]),
        (["--prompt", "x " * 3000], ["prompt", "2048", "--context-length"]),
        (["--prompt", "a b c d e f g h", "--context-length", "4"], ["--context-length"]),
        (["--prompt", "x", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["--prompt", "x", "--max-tokens", "-3"], ["max_tokens", "-3"]),
        (["--prompt", "x", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["--prompt", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["--prompt", "x", "--temperature", "nan"], ["temperature", "nan"]),
        (["--prompt", "x", "--top-p", "0"], ["top_p", "0"]),
        (["--prompt", "x", "--top-p", "1.1"], ["top_p", "1.1"]),
        (["--prompt", "x", "--top-k", "-2"], ["top_k", "-2"]),
        (["--prompt", "x", "--min-p", "2"], ["min_p", "2"]),
        (["--prompt", "x", "--stop", ""], ["stop"]),
        (["--prompt", "x", "--seed", "-1"], ["seed", "-1"]),
        (["--prompt", "x", "--speculative-num-draft-tokens", "500"], ["--speculative-num-draft-tokens 500", "69"]),
        (["--prompt", "x", "--speculative-eagle-topk", "1"], ["--speculative-eagle-topk 1", "= 6"]),
        (["--prompt", "x", "--speculative-num-steps", "0"], ["--speculative-num-steps 0"]),
        (["--prompt", "x", "--speculative-eagle-topk", "0"], ["--speculative-eagle-topk 0"]),
        (["--prompt", "x", "--page-size", "24"], ["--page-size", "24"]),
        (["--prompt", "x", "--graphs", "bogus"], ["--graphs", "bogus"]),
        (["--prompt", "x", "--dtype", "int8"], ["--dtype", "int8"]),
        (["--prompt", "x", "--check-level", "4"], ["--check-level", "4"]),
        (["--prompt", "x", "--context-length", "4096"], ["--context-length 4096", "2048"]),
        (["--prompt", "x", "--max-total-tokens", "5"], ["--max-total-tokens", "need", "have"]),
        (["--prompt", "x", "--speculative-algorithm", "MTP"], ["MTP"]),
        (["--prompt", "x", "--no-such-flag"], ["--no-such-flag"]),
        (["--prompt-file", "nowhere.txt"], ["--prompt-file", "nowhere.txt"]),
        (["no-such-model", "--prompt", "x"], ["no-such-model", "no such folder"]),
        (["builtin:cuckoo", "--prompt", "x"], ["builtin:cuckoo"]),
        (["--speculative-draft-model-path", "no-such-head", "--prompt", "x"], ["no-such-head"]),
        ([], ["--prompt"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, options, parts):
    refused(capsys, ["generate", *options], *parts)


def test_a_prompt_as_long_as_the_context_is_refused_and_one_shorter_gets_a_token(capsys, weak_pair):
    """No room for one token is an error before any work; room for one gives one."""
    argv = ["generate", weak_pair.target, "--json", "--context-length", 8, "--prompt"]
    refused(capsys, [*argv, "a" * 8], "8 tokens", "--context-length")
    refused(capsys, [*argv, "a" * 9], "9 tokens", "--context-length")
    code, out, _ = run(capsys, *argv, "a" * 7)
    assert code == 0
    assert len(json.loads(out)["token_ids"]) == 1


def test_a_truncated_weight_file_is_named(capsys, weak_pair, tmp_path):
    folder = copy_folder(weak_pair.target, tmp_path / "target")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    refused(capsys, ["generate", folder, "--prompt", "x"], "model.safetensors")


def test_a_draft_of_another_target_is_refused(capsys, weak_pair, strong_pair):
    argv = ["generate", weak_pair.target, "--speculative-draft-model-path", strong_pair.head, "--prompt", "x"]
    refused(capsys, argv, "another target", "12", "211")


def test_nan_in_the_weights_is_refused_with_the_tensors_name(capsys, weak_pair, tmp_path):
    bad = {"model.norm.weight": torch.full((64,), math.nan)}
    folder = copy_folder(weak_pair.target, tmp_path / "target", tensors=bad)
    refused(capsys, ["generate", folder, "--prompt", "x"], "model.norm.weight", "NaN")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["COMMAND"]),
        (["sing"], ["sing", "generate"]),
        (["bench", "--num-prompts", "0"], ["--num-prompts", "0"]),
        (["bench", "--repeats", "0"], ["--repeats"]),
        (["bench", "--prompts", "nowhere.jsonl"], ["--prompts", "nowhere.jsonl"]),
        (["bench", "--speculative-algorithm", "NONE"], ["draft"]),
        (["doctor", "--cases", "0"], ["--cases", "0"]),
        (["trace", "--prompt", "x"], ["--output"]),
    ],
    ids=" ".join,
)
def test_the_other_commands_refuse_in_one_line_too(capsys, argv, parts):
    refused(capsys, argv, *parts)


# ---------------------------------------------------------------------------------------------- real processes


def test_a_real_process_prints_objects_on_stdout_and_errors_on_stderr():
    """What a pipe sees: exit code 0 and one object; exit code 2, nothing, and one line."""
    good = spawn("generate", "--json", "--prompt", PROMPT, "--max-tokens", 4)
    bad = spawn("generate", "--prompt", "x", "--graphs", "bogus")
    out, err = good.communicate(timeout=60)
    assert (good.returncode, err) == (0, "")
    assert len(json.loads(out)["token_ids"]) == 4
    out, err = bad.communicate(timeout=60)
    assert (bad.returncode, out) == (2, "")
    assert len(lines(err)) == 1


def test_ctrl_c_ends_a_stream_with_exit_code_130():
    """After the first piece of text an interrupt ends the process at once, without a traceback."""
    process = spawn("generate", "--prompt", PROMPT, "--max-tokens", 2000, "--ignore-eos")
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert len(lines(err)) <= 1


def test_a_closed_pipe_is_no_error():
    """`treetop ... | head` ends quietly."""
    process = spawn("generate", "--prompt", PROMPT, "--max-tokens", 2000, "--ignore-eos")
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
