"""Processes that the tests fork from a warm one (`support/warm.py`) are what a cold start gives."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support import warm
from support.grids import few_of
from support.holding import STEPS, Held
from support.serving import children_of, command_of, mock
from support.waiting import WAIT_S, until
from treetop.core.wire import MockOptions, ProcessOptions
from treetop.distributed import process
from treetop.distributed.process import Failed
from treetop.types.config import EngineConfig


def starts(*kept: int):
    """kept: places of the starts of a day, warm and cold."""
    return pytest.mark.parametrize("start", few_of([warm.Popen, subprocess.Popen], *kept), ids=["warm", "cold"])


@starts(1)
def test_a_command_has_its_streams_folder_environment_and_exit_code(start, tmp_path):
    """A file is named by a path of its folder, and an option by its environment; one line on stderr, and 2."""
    (tmp_path / "serve.yaml").write_text("max-modle-len: 512")
    command = [sys.executable, "-m", "treetop.cli", "serve", "--config", "serve.yaml"]
    ended = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    out, err = ended.communicate(timeout=WAIT_S)
    assert (ended.returncode, out, err.count("\n")) == (2, "", 1)
    assert "--max-modle-len" in err
    environment = {**os.environ, "TREETOP_FAULT": "no such"}
    ended = start(command[:4], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert "'no such'" in ended.communicate(timeout=WAIT_S)[1]


@starts(0, 1)
def test_an_engine_is_a_child_with_its_own_command_line_and_session(start, monkeypatch, tmp_path):
    """It is waited for and killed as any other, and it ends with its stdin."""
    monkeypatch.setattr(process, "Popen", start)
    options = ProcessOptions(f"ipc://{tmp_path}/a", EngineConfig(), MockOptions((1, 2), 0.01, 1, 1))
    for end in ("kill", "stdin"):
        child = process.start_process("treetop.distributed.engine_process", options)
        assert child.poll() is None
        until(lambda pid=child.pid: pid in children_of(os.getpid(), "engine_process"))
        until(lambda pid=child.pid: os.getsid(pid) == pid)
        assert command_of(child.pid).split() == [sys.executable, "-P", "-m", "treetop.distributed.engine_process"]
        until(Path(tmp_path, "a").exists)
        if end == "kill":
            child.kill()
        child.stdin.close()
        code = child.wait(WAIT_S)
        assert code == -signal.SIGKILL if end == "kill" else code in (0, -signal.SIGALRM)  # on a busy machine
        assert child.stdout.read() == b""
        child.stdout.close()
        Path(tmp_path, "a").unlink(missing_ok=True)


@starts(0)
def test_an_engine_that_cannot_start_says_why(start, monkeypatch, tmp_path):
    monkeypatch.setattr(process, "Popen", start)
    options = ProcessOptions(f"ipc://{tmp_path}/a", EngineConfig(model=str(tmp_path), draft=None, device="cpu"), None)
    child = process.start_process("treetop.distributed.engine_process", options, stderr=subprocess.DEVNULL)
    with child.stdin, child.stdout:
        why = msgspec.json.decode(child.stdout.read(), type=Failed)
        assert child.wait(WAIT_S) == process.EXIT_USER_ERROR
    assert why.user_error
    assert str(tmp_path) in why.reason


@starts(0)
def test_processes_of_a_server_are_its_own(start):
    """Engine and API processes are children of the server, and what either of these counts both show."""
    with mock(1, "1", "--api-workers", "2", start=start) as server:
        commands = [command_of(pid) for pid in server.children()]
        assert sum("engine_process" in each for each in commands) == 1
        assert sum("serve.worker" in each for each in commands) == 2
        for _ in range(6):  # each on a connection of its own
            body = {"prompt": "a", "max_tokens": 2}
            assert server.post("/v1/completions", body, headers={"Connection": "close"}).status_code == 200
        assert server.metric("treetop:generation_tokens_total") == 12
        assert server.end() == 0


def test_what_reads_its_environment_as_it_starts_is_started_cold(tmp_path):
    """But for what is held at a place, which is found in the environment once it is forked."""
    command = [sys.executable, "-m", "treetop.cli", "--version"]
    for name in ("PYTHONPATH", "OMP_NUM_THREADS", "LD_PRELOAD"):
        assert not warm._starts_alike({**os.environ, name: "other"})
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        assert warm._starts_alike({**os.environ, name: "other"})
    assert warm._starts_alike({**os.environ, **Held(tmp_path, STEPS).environment})
    assert warm._warm_command(command) == ["treetop.cli", "--version"]
    assert warm._warm_command(["bash", "-c", "true"]) is None
    assert warm._warm_command([sys.executable, "-m", "treetop.text.render"]) is None
