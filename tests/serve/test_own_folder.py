"""A server's folder goes with it, or with the next server's start."""

import os
import signal
import subprocess
import sys

import pytest

from treetop.serve import own_folder as own

HOLD = "from treetop.serve.own_folder import own_folder\nwith own_folder() as f: print(f, flush=True); input()"


@pytest.fixture
def holding(tmp_path):
    """holding() -> (process, its folder), of owners that live until they are ended."""
    started = []

    def hold():
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        started.append(process)
        return process, tmp_path / os.path.basename(process.stdout.readline().strip())

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_killed_owner_left_is_swept_and_nothing_else(holding, tmp_path):
    """Neither a living owner's, nor one that is not ours to judge: no lock file, another name, a link."""
    living, kept = holding()
    killed, left = holding()
    others = [tmp_path / "treetop-serve-beginning", tmp_path / "treetop-other"]
    for each in others:
        each.mkdir()
    (others[1] / "owner").touch()
    (tmp_path / "treetop-serve-link").symlink_to(others[1])
    (left / "metrics").mkdir()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    own.sweep(tmp_path)
    assert not left.exists()
    assert all(each.exists() for each in (kept, *others, tmp_path / "treetop-serve-link"))
    living.communicate("\n")
    assert not kept.exists()
