"""Ranks that share experts, in processes: over gloo they give what one gives, and whatever goes wrong ends them all."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.engines import greedy, sampled, tokens
from support.expert_pairs import TREE, build, save_glm_with_mtp
from support.expert_servers import OPTIONS, ranks_of
from support.processes import alive
from support.serving import child_of, serving
from support.threads import in_threads, joined
from support.tiny_models import Pair, copy_folder, save_tokenizer
from support.waiting import WAIT_S, until
from treetop.distributed import process as processes
from treetop.types.errors import EngineError

PROMPTS = [9, 30, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_glm_with_mtp(tmp_path_factory.mktemp("glm"))


@contextmanager
def group(folder, monkeypatch, ranks=2, **options):
    """An LLM over ranks, and their processes; whatever happens, nothing is left of them."""
    started, places = [], set()
    start = processes.start_process

    def noted(module, told):
        started.append(start(module, told))
        places.add(told.folder)
        return started[-1]

    monkeypatch.setattr(processes, "start_process", noted)
    llm = build(folder, TREE, ranks, **OPTIONS, **options)
    try:
        yield llm, started
    finally:
        llm.close()
        assert all(process.poll() is not None for process in started)
        assert not any(Path(place).exists() for place in places)


def in_flight(llm, folder, act):
    """How requests end that `act` falls into, and after how many seconds."""
    stream = llm.stream(Pair(folder, None).prompts(PROMPTS), greedy(200, whole=True))
    for _ in range(5):
        next(stream)
    act()
    begun = time.monotonic()
    with pytest.raises(EngineError) as error:
        deque(stream)
    return str(error.value), time.monotonic() - begun


@pytest.mark.slow
def test_processes_give_what_one_gives_and_a_rank_that_is_killed_ends_them(folder, monkeypatch):
    """Mid-round: an error that names the rank, for what was asked and what is asked later; no process, no file.

    Before that a parked group takes no processor time, and wakes up for the next request.
    """
    prompts, params = Pair(folder, None).prompts(PROMPTS), [greedy(30), sampled(3, 30), greedy(12)]
    alone = build(folder, TREE, 1, **OPTIONS).generate(prompts, params)
    with group(folder, monkeypatch) as (llm, started):
        assert tokens(llm.generate(prompts, params)) == tokens(alone)
        until(lambda: taken(started, 2.0) < 0.2, "a parked group is busy")
        assert tokens(llm.generate(prompts, params)) == tokens(alone)
        said, seconds = in_flight(llm, folder, started[1].kill)
        assert said == "rank 1 has ended with exit code -9"
        assert seconds < 50  # before the deadline
        with pytest.raises(EngineError, match="rank 1 has ended with exit code -9"):
            llm.generate(prompts, params)


@pytest.mark.slow
def test_engines_that_share_experts_may_be_ranks_that_share_a_model(folder, monkeypatch):
    """Four processes give what one gives; one that no client knows of dies, and nothing is left of any."""
    prompts, params = Pair(folder, None).prompts(PROMPTS), [greedy(30), sampled(3, 30), greedy(12)]
    alone = build(folder, TREE, 1, **OPTIONS).generate(prompts, params)
    with group(folder, monkeypatch, tp_size=2) as (llm, started):
        assert tokens(llm.generate(prompts, params)) == tokens(alone)
        workers = [child_of(engine.pid, "tp_worker") for engine in started]
        said, _ = in_flight(llm, folder, lambda: os.kill(workers[1], signal.SIGKILL))
        assert "rank 1 has ended with exit code -9" in said or "a rank has left" in said
        until(lambda: not any(map(alive, workers)), "a worker is left")


def test_a_rank_that_dies_while_all_are_parked_ends_the_others_at_once(folder, monkeypatch):
    """Nobody has to ask for anything."""
    with group(folder, monkeypatch) as (llm, started):
        started[0].kill()
        assert started[1].wait(WAIT_S) == -9
        with pytest.raises(EngineError, match="rank 0 has ended with exit code -9"):
            llm.generate([[4, 5]], greedy(3))


def test_a_rank_that_fails_while_all_are_parked_ends_the_others_soon(folder, monkeypatch):
    """It says why, which is heard by whoever asks next."""
    with group(folder, monkeypatch) as (llm, started):
        llm._core._post(llm._core.core.engines[0].links[0].socket.send, b"nonsense")
        assert started[1].wait(WAIT_S) == -9
        with pytest.raises(EngineError, match="rank 0: ValidationError"):
            llm.generate([[4, 5]], greedy(3))


@pytest.mark.slow
def test_a_rank_that_stops_for_longer_than_the_deadline_ends_the_group(folder, monkeypatch):
    """A stop that is shorter only takes time. All wait for a rank that has no request, too."""
    with group(folder, monkeypatch, step_timeout=6.0) as (llm, started):
        process = started[1]
        os.kill(process.pid, signal.SIGSTOP)
        resumed = threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT))
        resumed.start()
        assert len(tokens(llm.generate([[5, 6, 7]], greedy(10)))[0]) == 10
        resumed.join()
        said, seconds = in_flight(llm, folder, lambda: os.kill(process.pid, signal.SIGSTOP))
        assert "raise --step-timeout" in said
        assert "rank 1 did not propose step" in said or "a rank did not answer in 6 s" in said
        assert seconds < WAIT_S


def taken(processes, seconds: float) -> float:
    """The most processor time that one of these takes in so long."""
    before = [seconds_of(process.pid) for process in processes]
    threading.Event().wait(seconds)
    return max(seconds_of(process.pid) - was for process, was in zip(processes, before, strict=True))


def seconds_of(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


PARENT = """
import sys
sys.path[:0] = {path!r}
from support.engines import greedy
from support.expert_pairs import CHAIN, build
from treetop.distributed import process
start = process.start_process
def started(module, told):
    child = start(module, told)
    print(child.pid, told.folder, flush=True)
    return child
process.start_process = started
if __name__ == "__main__":
    llm = build({folder!r}, CHAIN, 2)
    print("up", flush=True)
    for delta in llm.stream([[4, 5, 6]], greedy(80)):
        print(flush=True)
    print("waiting", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_when_the_parent_is_killed_the_ranks_end_and_nothing_is_left(folder):
    """A rank sees the end of its stdin wherever it is."""
    script = PARENT.format(path=sys.path, folder=str(folder))
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids, places = zip(*(parent.stdout.readline().split() for _ in range(2)), strict=True)
    for _ in range(4):
        assert parent.stdout.readline()
    assert Path(places[0]).exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    until(lambda: not any(alive(int(pid)) for pid in pids), "a rank lives on")
    until(lambda: not Path(places[0]).exists(), "their folder is left")


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """The flags of a server of ranks, and what its model says after a prompt of ids, 40 tokens long."""
    place = copy_folder(folder, tmp_path_factory.mktemp("served") / "model")
    save_tokenizer(place, 12, lambda token: bytes([97 + token]))
    prompts = Pair(folder, None).prompts([3, 11, 6, 20])
    llm = build(place, TREE, 1, **OPTIONS)
    texts = [output.text for output in llm.generate(prompts, greedy(40))]
    flags = [
        str(place),
        "--ep-size",
        "2",
        "--device",
        "cpu",
        "--dtype",
        "float64",
        "--graphs",
        "sim",
        "--page-size",
        "4",
    ]
    flags += ["--context-length", "256", "--max-running-requests", "4", "--speculative-algorithm", "MTP"]
    k, steps, size = map(str, TREE)
    flags += ["--speculative-eagle-topk", k, "--speculative-num-steps", steps, "--speculative-num-draft-tokens", size]
    return flags, str(place), prompts, texts


@pytest.mark.slow
def test_a_server_of_ranks_drains_whole_answers(served):
    """Every answer is what one process gives, streamed or not; exit code 0; no rank is left."""
    flags, model, prompts, want = served
    with serving(*flags) as server:
        texts = {}

        def ask(index):
            options = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}, "stream": index % 2 == 1}
            answer = server.client().completions.create(model=model, prompt=prompts[index], **options)
            texts[index] = "".join(chunk.choices[0].text for chunk in (answer if index % 2 else [answer]))

        threads = in_threads(4, ask)
        until(lambda: len(texts) == 4 or server.metric("treetop:num_requests_running") == 4)
        ranks = ranks_of(server)
        server.process.send_signal(signal.SIGTERM)
        joined(threads)
        assert texts == dict(enumerate(want))
        assert server.process.wait(WAIT_S) == 0
    until(lambda: not any(alive(pid) for pid in ranks))


@pytest.mark.slow
def test_a_server_ends_with_the_first_of_its_ranks(served):
    """Also while nobody asks for anything: exit code 1 if no engine may be started again, and no rank is left."""
    with serving(*served[0], "--engine-restarts", "0") as server:
        ranks = ranks_of(server)
        os.kill(ranks[1], signal.SIGKILL)
        assert server.wait() == 1
        assert any("rank 1 has ended with exit code -9" in line for line in server.said)
    until(lambda: not any(alive(pid) for pid in ranks))
