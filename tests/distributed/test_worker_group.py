"""A worker group in processes: what ranks say of a step is compared, and whatever goes wrong ends all of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from support.engines import accept_lens, build, greedy, next_and_hold, tokens
from support.grids import few_of
from support.processes import alive
from support.tiny_models import Pair, save_copying_head, save_weak_llama
from support.waiting import WAIT_S, until
from treetop.distributed import process as processes
from treetop.distributed import tp_executor
from treetop.types.errors import EngineError

LONG = greedy(200, whole=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_weak_llama(folder / "target", strength=0.17, sharpness=0.5, vocab_size=212)
    return Pair(target, save_copying_head(folder / "head", target, draft_vocab=188))


@contextmanager
def group(pair, monkeypatch, **options):
    """An LLM over two processes, and the process of the second rank; whatever happens, nothing is left of them."""
    started = {}
    start = processes.start_process
    monkeypatch.setattr(processes, "start_process", lambda *a: started.setdefault(a[1].folder, start(*a)))
    llm = build(pair, (4, 5, 16), tp_size=2, overlap=True, **options)
    ((folder, process),) = started.items()
    try:
        yield llm, process
    finally:
        llm.close()
        assert process.poll() is not None
        assert not Path(folder).exists()


def failure_of(llm, pair, params=LONG) -> tuple[str, float]:
    """How requests end, and after how many seconds."""
    begun = time.monotonic()
    with pytest.raises(EngineError) as error:
        llm.generate(pair.prompts([9, 30]), params)
    return str(error.value), time.monotonic() - begun


def after_first_tokens(llm, pair, act) -> tuple[str, float]:
    """As `failure_of`, of requests that `act` falls into."""
    stream = llm.stream(pair.prompts([9, 30]), LONG)
    next_and_hold(llm, stream, 4)
    act()
    begun = time.monotonic()
    llm._core.abort(())  # with which the core's thread goes on
    with pytest.raises(EngineError) as error:
        deque(stream)
    return str(error.value), time.monotonic() - begun


@pytest.mark.slow
def test_processes_give_what_one_gives_and_a_rank_that_is_killed_ends_the_group(pair, monkeypatch):
    """In flight, and then again and again: an error that names the rank, at once, and no process, no file."""
    alone = build(pair, (4, 5, 16)).generate(pair.prompts([9, 30, 5]), greedy(40, whole=True))
    with group(pair, monkeypatch) as (llm, process):
        shared = llm.generate(pair.prompts([9, 30, 5]), greedy(40, whole=True))
        assert tokens(shared) == tokens(alone)
        assert accept_lens(shared) == accept_lens(alone)
        said, seconds = after_first_tokens(llm, pair, process.kill)
        assert "rank 1 has ended with exit code -9" in said
        assert seconds < 50  # before the deadline
        again, _ = failure_of(llm, pair)
        assert "rank 1 has ended with exit code -9" in again


def test_a_rank_that_stops_for_longer_than_the_deadline_ends_the_group(pair, monkeypatch):
    """A stop that is shorter only takes time."""
    with group(pair, monkeypatch) as (llm, process):
        os.kill(process.pid, signal.SIGSTOP)
        resumed = threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT))
        resumed.start()
        assert len(tokens(llm.generate(pair.prompts([9]), greedy(10, whole=True)))[0]) == 10
        resumed.join()

        def stop():
            executor = llm._core.core.engine
            executor.config = replace(executor.config, step_timeout=2.0)
            executor._ranks.start_deadlines(2.0)
            os.kill(process.pid, signal.SIGSTOP)

        said, seconds = after_first_tokens(llm, pair, stop)
        assert "a rank did not answer in 2 s; raise --step-timeout" in said
        assert seconds < WAIT_S


REFUSED = """
import os, signal, sys, threading
from treetop.distributed import tp_worker
from treetop.parallel import exchange

def refuse(store, meeting):
    {what}

exchange._gloo = refuse
sys.exit(tp_worker.main())
"""


@pytest.mark.parametrize(
    ("what", "deadline_s", "words"),
    few_of(
        [
            (
                "raise RuntimeError('peer access is not supported between these two devices')",
                WAIT_S,
                "rank 1: RuntimeError: peer",
            ),
            ("os.kill(os.getpid(), signal.SIGKILL)", WAIT_S, "rank 1 has ended with exit code -9"),
            (
                "threading.Event().wait(1); os.kill(os.getpid(), signal.SIGSTOP)",
                2.0,
                "a rank did not answer in 2 s; while the group started",
            ),
        ],
        0,
        1,
    ),
    ids=["refused", "killed", "stopped"],
)
def test_a_rank_that_does_not_meet_the_others_ends_the_start(pair, monkeypatch, what, deadline_s, words):
    """Whether its access is refused, it dies or it stops: an error at once, or by the deadline, and nothing is left.

    It stops a second after it came, so that its word has left it.
    """
    started = {}

    def start(_, told):
        started[told.folder] = process = subprocess.Popen(
            [sys.executable, "-c", REFUSED.format(what=what)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        process.stdin.write(msgspec.json.encode(told) + b"\n")
        process.stdin.flush()
        return process

    monkeypatch.setattr(processes, "start_process", start)
    monkeypatch.setattr(tp_executor, "RENDEZVOUS_S", deadline_s)
    with pytest.raises(EngineError, match=words):
        build(pair, None, tp_size=2)
    ((folder, process),) = started.items()
    assert process.poll() is not None
    assert not Path(folder).exists()


def test_a_rank_that_stops_before_it_says_a_word_ends_the_start(pair, monkeypatch):
    """By the deadline of a start, which the error names: a step's has nothing to do with it."""
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    started = []

    def start(_, told):
        started.append(subprocess.Popen([sys.executable, "-c", stops], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(processes, "start_process", start)
    monkeypatch.setattr(tp_executor, "START_S", 1.0)
    with pytest.raises(EngineError, match="rank 1 did not start in 1 s; while the group started"):
        build(pair, None, tp_size=2)
    assert started[0].poll() is not None


PARENT = """
import sys
sys.path[:0] = {path!r}
from support.engines import build, greedy
from support.tiny_models import Pair
from treetop.distributed import process
start = process.start_process
def started(module, told):
    child = start(module, told)
    print(child.pid, told.folder, flush=True)
    return child
process.start_process = started
if __name__ == "__main__":
    pair = Pair({target!r}, {head!r})
    llm = build(pair, (4, 5, 16), tp_size=2)
    print("up", flush=True)
    for delta in llm.stream([[4, 5, 6]], greedy(10**9)):
        print(flush=True)
"""


def test_when_rank_0_is_killed_the_others_end_and_nothing_is_left(pair):
    """A rank sees the end of its stdin wherever it is, also in the middle of an exchange."""
    script = PARENT.format(path=sys.path, target=str(pair.target), head=str(pair.head))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid, folder = parent.stdout.readline().split()
    for _ in range(4):
        assert parent.stdout.readline()
    assert Path(folder).exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(int(pid)), "the other rank lives on")
    until(lambda: not Path(folder).exists(), "its folder is left")
