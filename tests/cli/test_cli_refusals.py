"""One line on stderr for whatever a user can get wrong, and what a process does with signals and pipes."""

import json
import math
import signal
import subprocess

import pytest
import torch

from support.command_line import PROMPT, lines, refused, run, spawn
from support.grids import few_of
from support.holding import STREAM, Held
from support.tiny_models import copy_folder

# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--prompt", ""], ["prompt", "empty"]),
        (["--prompt", "x " * 3000], ["prompt", "2048", "--context-length"]),
        (["--prompt", "a b c d e f g h", "--context-length", "4"], ["--context-length"]),
        (["--prompt", "x", "--max-tokens", "0"], ["--max-tokens must", "0"]),
        (["--prompt", "x", "--max-tokens", "-3"], ["--max-tokens must", "-3"]),
        (["--prompt", "x", "--max-tokens", "many"], ["--max-tokens", "many"]),
        (["--prompt", "x", "--temperature", "-1"], ["--temperature must", "-1"]),
        (["--prompt", "x", "--temperature", "nan"], ["--temperature must", "nan"]),
        (["--prompt", "x", "--top-p", "0"], ["--top-p must", "0"]),
        (["--prompt", "x", "--top-p", "1.1"], ["--top-p must", "1.1"]),
        (["--prompt", "x", "--top-k", "-2"], ["--top-k must", "-2"]),
        (["--prompt", "x", "--min-p", "2"], ["--min-p must", "2"]),
        (["--prompt", "x", "--stop", ""], ["--stop strings"]),
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
        (["--prompt", "x", "--speculative-num-steps", "65"], ["num-steps 65", "64"]),
        (["--prompt", "x", "--mem-fraction-static", "1.2"], ["--mem-fraction-static", "1.2"]),
        (["--prompt", "x", "--mem-fraction-static", "lots"], ["--mem-fraction-static", "lots"]),
        (["--prompt", "x", "--compare-plain", "--simulate-accept-length", "2"], ["--compare-plain", "--simulate"]),
        (["--prompt", "x", "--simulate-accept-length", "99"], ["--simulate-accept-length must", "99"]),
        (["--prompt", "", "--simulate-accept-length", "2"], ["empty"]),
        (["--prompt", "x" * 30_000_000], ["at least", "2048", "--context-length"]),
        (["--prompt", "x", "--prompt", ""], ["--prompt, number 2", "empty"]),
        (["--prompt", "x", "--top-p", "0", "--min-p", "2"], ["--top-p must", "; --min-p must"]),
        (["--prompt", "x", "--no-such-flag"], ["--no-such-flag"]),
        (["--prompt", "x", "--no-such\nflag"], ["--no-such\\nflag"]),
        (["--prompt", "x", "--seed", "9" * 4000], ["--seed must", "an integer of"]),
        (["--prompt-file", "no\nwhere"], ["--prompt-file no\\nwhere"]),
        (["--prompt-file", "\0"], ["--prompt-file", "null byte"]),
        (["--prompt-file", "\ud800"], ["--prompt-file"]),
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
    "line",
    ["[" * 100_000, "9" * 100_000, '{"prompt": 5}', '{"prompt": null}', "[1]", "5", '"x"', "{}", "\0"],
    ids=lambda line: ascii(line)[:12],
)
def test_a_line_of_prompts_that_holds_none_is_refused(capsys, tmp_path, line):
    (tmp_path / "prompts.jsonl").write_text(line)
    refused(capsys, ["bench", "--prompts", tmp_path / "prompts.jsonl"], "--prompts", "JSON lines with a `prompt`")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["COMMAND"]),
        (["sing"], ["sing", "generate"]),
        (["bench", "--num-prompts", "0"], ["--num-prompts", "0"]),
        (["bench", "--repeats", "0"], ["--repeats"]),
        (["bench", "--prompts", "nowhere.jsonl"], ["--prompts", "nowhere.jsonl"]),
        (["bench", "--speculative-algorithm", "NONE"], ["--speculative-draft-model-path", "MTP or NGRAM"]),
        (["doctor", "--cases", "0"], ["--cases", "0"]),
        (["trace", "--prompt", "x"], ["--output"]),
        (["bench", "--sweep", "tree", "--plot", "\0.html"], ["--plot", "not a path"]),
        (["bench", "--sweep", "tree", "--plot", "x" * 5000 + ".html"], ["--plot", "too long"]),
    ],
    ids=" ".join,
)
def test_the_other_commands_refuse_in_one_line_too(capsys, argv, parts):
    refused(capsys, argv, *parts)


# ---------------------------------------------------------------------------------------------- real processes


@pytest.mark.slow
def test_a_real_process_prints_objects_on_stdout_and_errors_on_stderr():
    """What a pipe sees: exit code 0 and one object; exit code 2, nothing, and one line."""
    good = spawn("generate", "--json", "--prompt", PROMPT, "--max-tokens", 4, "--context-length", 256)
    bad = spawn("generate", "--prompt", "x", "--graphs", "bogus")
    out, err = good.communicate(timeout=300)
    assert (good.returncode, err) == (0, "")
    assert len(json.loads(out)["token_ids"]) == 4
    out, err = bad.communicate(timeout=300)
    assert (bad.returncode, out) == (2, "")
    assert len(lines(err)) == 1


def test_ctrl_c_ends_a_stream_with_exit_code_130(tmp_path):
    """After the first piece of text, where it stands still, an interrupt ends the process at once, without a traceback.

    A shell's background job ignores interrupts, and what it starts would.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        argv = ["generate", "--prompt", PROMPT, "--max-tokens", 2000, "--ignore-eos"]
        process = spawn(*argv, environment=Held(tmp_path, STREAM).environment)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert len(lines(err)) <= 1


@pytest.mark.slow
def test_a_closed_pipe_is_no_error():
    """`treetop ... | head` ends quietly."""
    process = spawn("generate", "--prompt", PROMPT, "--max-tokens", 2000, "--ignore-eos", start=subprocess.Popen)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("encoding", few_of(["latin-1", "ascii:surrogateescape"], 0))
def test_what_the_terminal_cannot_show_is_escaped(monkeypatch, encoding):
    """Prompt, text, errors and help: nothing is lost, and nothing ends in a traceback."""
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    prompt = "# \u2192 \u4e2d \U0001f600"
    shown, error = (
        spawn("generate", *argv)
        for argv in (("--echo", "--prompt", prompt, "--max-tokens", 3, "--context-length", 256), ("\u4e2d",))
    )
    out, err = shown.communicate(timeout=300)
    assert (shown.returncode, err) == (0, "")
    assert out.startswith("# \\u2192 \\u4e2d \\U0001f600")
    assert out.splitlines()[-1].startswith("[3 tokens")
    out, err = error.communicate(timeout=300)
    assert (error.returncode, out) == (2, "")
    assert len(lines(err)) == 1
