"""The driver of compute-sanitizer: it reads reports, lets pass only what is listed, and cannot pass for nothing.

The tool itself needs a GPU; here a stand-in prints what it would. The planted overrun and the red zones are real: the
workload runs on Triton's interpreter.
"""

import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
OURS = "_attention_kernel"
WORKLOAD = "WORKLOAD " + json.dumps({"kernels": [f"attention.{OURS}"], "launched": {f"attention.{OURS}": 3}})
SUMMARY = "========= ERROR SUMMARY: 0 errors"
VENDOR = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::Copy>(int, T2, T3)"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPTS / "sanitize.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitize"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sanitize"]


def report(what, kernel) -> str:
    return (
        f"========= {what}\n=========     at {kernel}+0x50 in file.py:12\n"
        "=========     by thread (0,0,0) in block (0,0,0)\n=========     Access to 0x7f is out of bounds\n========="
    )


def judged(script, job, *lines, code=0):
    suppressions = script.suppressions_of(script.SUPPRESSIONS.read_text(encoding="utf-8"))
    return script.judge(script.Run(job, code, "\n".join(lines), 1.0), suppressions)


def test_reports_are_read_with_the_kernel_that_made_them(script):
    """Both spellings of the place, C++ names with blanks, and the host's own copies."""
    older = "========= Invalid __global__ read of size 8\n=========     at 0x160 in some_kernel"
    host = "========= Host API memory access error at host access to 0x7f of size 400 bytes"
    found = script.reports_of("\n".join(["noise", report("Invalid write", OURS), report("Read", VENDOR), older, host]))
    assert [(each.what.split()[0], each.kernel) for each in found] == [
        ("Invalid", OURS),
        ("Read", VENDOR),
        ("Invalid", "some_kernel"),
        ("Host", script.HOST),
    ]


def test_a_clean_run_is_clean_and_a_listed_report_is_counted(script):
    job = script.Job("eager", "initcheck")
    assert judged(script, job, WORKLOAD, SUMMARY).problems == ()
    verdict = judged(script, job, report("Uninitialized __global__ memory read", VENDOR), WORKLOAD, SUMMARY)
    assert verdict.problems == ()
    assert dict(verdict.suppressed) == {VENDOR: 1}


@pytest.mark.parametrize(
    ("tool", "lines", "code", "words"),
    [
        ("memcheck", [report("Invalid __global__ write", OURS), WORKLOAD, SUMMARY], 0, f"1 x Invalid .* at {OURS}"),
        ("memcheck", [report("Invalid __global__ read", VENDOR), WORKLOAD, SUMMARY], 0, "vectorized_elementwise"),
        ("initcheck", [report("Uninitialized", "unknown_kernel"), WORKLOAD, SUMMARY], 0, "at unknown_kernel"),
        ("memcheck", [WORKLOAD], 0, "no summary"),
        ("memcheck", ["Traceback", SUMMARY], 1, "ended with 1"),
        ("memcheck", [SUMMARY], 0, "ended with 0"),
        ("memcheck", ["========= Internal Sanitizer Error: no", WORKLOAD, SUMMARY], 0, "Internal"),
        ("initcheck", [WORKLOAD, SUMMARY, "========= 7 errors were not printed"], 0, "not printed"),
        (None, [WORKLOAD], 1, "ended with 1"),
        ("memcheck", [], None, "took longer"),
    ],
)
def test_whatever_is_not_a_clean_run_fails(script, tool, lines, code, words):
    """A report of ours or of a kernel that is not listed for the tool, and every way to have checked nothing."""
    (problem, *_) = judged(script, script.Job("eager", tool), *lines, code=code).problems
    assert script.re.search(words, problem)


def test_no_suppression_hides_a_kernel_of_ours(script):
    """Not even one whose name a pattern for cuBLAS matches."""
    kernel = "_streaming_gemm_kernel"
    assert any(pattern.search(kernel) for _, pattern in script.suppressions_of(script.SUPPRESSIONS.read_text()))
    workload = "WORKLOAD " + json.dumps({"kernels": [f"a.{kernel}"], "launched": {}})
    lines = [report("Uninitialized __global__ memory read", kernel), workload, SUMMARY]
    assert len(judged(script, script.Job("eager", "initcheck"), *lines).problems) == 1


def test_a_planted_bug_that_is_not_reported_fails(script):
    job = next(job for job in script.UNDER_TOOLS if job.plant == "overrun")
    assert judged(script, job, report("Invalid __global__ write", job.said), SUMMARY, code=1).problems == ()
    assert judged(script, job, report("Invalid __global__ write", OURS), SUMMARY).problems != ()
    captured = next(job for job in script.PLAIN if job.plant)
    assert judged(script, captured, "CheckError: red zone: a write landed after (2,)", code=1).problems == ()
    assert judged(script, captured, WORKLOAD).problems != ()


def stand_in(script, folder, monkeypatch, workload, *argv):
    """The tool and the workload are a script that reports nothing and says `workload`."""
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '{workload}'\necho '{SUMMARY}'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(script, "PLAIN", ())
    monkeypatch.setattr(sys, "argv", ["sanitize", *argv])


@pytest.mark.parametrize("unseen", [(), ("commit._commit_kernel",)])
def test_a_kernel_that_was_never_launched_fails_the_whole(script, tmp_path, monkeypatch, capsys, unseen):
    said = json.loads(WORKLOAD.removeprefix("WORKLOAD "))
    said["kernels"] += unseen
    stand_in(script, tmp_path, monkeypatch, "WORKLOAD " + json.dumps(said))
    monkeypatch.setattr(script, "UNDER_TOOLS", tuple(job for job in script.UNDER_TOOLS if job.plant is None))
    assert script.main() == len(unseen)
    out = capsys.readouterr().out
    assert ("FAILED" in out) is bool(unseen)
    assert f"our kernels, not launched: {', '.join(unseen) or 'none'}" in out


@pytest.mark.parametrize(("launched", "code"), [({"attention._attention_kernel": 1}, 0), ({}, 1)])
def test_with_runs_left_out_kernels_may_be_too_but_not_all(script, tmp_path, monkeypatch, launched, code):
    said = {"kernels": ["attention._attention_kernel", "commit._commit_kernel"], "launched": launched}
    stand_in(script, tmp_path, monkeypatch, "WORKLOAD " + json.dumps(said), "--only", "eager, memcheck")
    monkeypatch.setattr(script, "UNDER_TOOLS", tuple(job for job in script.UNDER_TOOLS if job.plant is None))
    monkeypatch.setattr(script, "judge", lambda run, _: script.Verdict(run, (), {}))
    assert script.main() == code


def test_the_driver_runs_every_job_and_says_which_failed(script, tmp_path, monkeypatch, capsys):
    """A planted bug that nobody reports fails the whole."""
    stand_in(script, tmp_path, monkeypatch, WORKLOAD, "--jobs", "2")
    assert script.main() == 1
    out = capsys.readouterr().out
    assert out.count("ok     ") == 4
    assert out.count("FAILED") == 2
    assert f"our kernels, launched: attention.{OURS}" in out
    assert "4 of 6 runs" in out


def test_without_the_tool_there_is_one_line(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitize"])
    assert script.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_the_workload_launches_the_kernels_that_small_engines_do_not_reach():
    """Eager, in Triton's interpreter: products of compressed weights, a library's page table and the tail after it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, str(SCRIPTS / "sanitize_workload.py"), "--device", "cpu", "--mode", "eager"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    launched = json.loads(done.stdout.removeprefix("WORKLOAD "))["launched"]
    assert {"lossless_weights._compressed_kernel", "pages._gather_kernel", "tail._tail_kernel"} <= set(launched)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [pytest.param(None, marks=pytest.mark.slow), "overrun"])
def test_the_planted_overrun_lands_in_a_red_zone_and_nothing_else_does(plant):
    """Triton's interpreter, level 3, replays of GraphSim: one element past a pool is reported, a sound run is not."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, str(SCRIPTS / "sanitize_workload.py"), "--device", "cpu", "--mode", "captured"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command + (["--plant", plant] if plant else []), env=environment, capture_output=True, text=True, check=False
    )
    if plant is None:
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.removeprefix("WORKLOAD "))
        assert (
            {"attention._attention_kernel", "attention._merge_kernel"} <= set(said["launched"]) <= set(said["kernels"])
        )
    else:
        assert done.returncode == 1
        assert "red zone: a write landed after" in done.stderr
