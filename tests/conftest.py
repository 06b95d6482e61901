"""Session fixtures: the tiny checkpoints, made once."""

import gc
import os
import random
import signal
import subprocess
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TREETOP_DEFAULT_MODEL"] = "nestling"  # whatever is installed
os.environ.pop("SSL_CERT_FILE", None)  # nobody outside is asked: no client reads all certificates as it is made
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; what tests start would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from transformers.utils import logging as transformers_logging

import treetop
from frozen import command_line
from support import examples, pairwise, warm, windowed_llama
from support.interpreted import INTERPRETED, patch_without_search, why_not_interpreted
from support.tiny_models import (
    Pair,
    save_copying_head,
    save_random_head,
    save_random_llama,
    save_random_qwen3,
    save_tokenizer,
    save_weak_llama,
)
from treetop.distributed import process
from treetop.engine.startup.mkl_probe import suffices
from treetop.exact.mkl_mode import choose_mode
from treetop.models.registry import FAMILIES

gc.disable()  # until all is imported
torch.set_num_threads(1)  # the models are too small to share
choose_mode(suffices)  # as `--exactness bits` does, which comes too late in a test
examples.register()
if INTERPRETED and why_not_interpreted() is None:
    patch_without_search()
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()


LONGEST = (
    "engine/test_aot_compile.py",
    "models/test_families.py",
    "frozen/test_command_line.py",
    "serve/test_serve_life.py",
    "debug/test_faults.py",
    "test_soak_roles.py",
    "test_soak.py",
    "test_bad_chats.py",
    "kernels/test_triton.py",
    "kernels/test_segments.py",
    "kernels/test_round_ops.py",
    "kernels/test_recurrent.py",
    "kernels/test_experts.py",
    "kernels/test_draw.py",
    "kernels/test_tail.py",
    "kernels/test_kernel_arguments.py",
    "cli/test_cli.py",
    "speculative/test_bits.py",
    "models/test_golden.py",
    "engine/test_constraints.py",
    "distributed/test_expert_parallel.py",
    "frozen/test_runs.py",
    "speculative/test_exactness.py",
    "serve/test_serve_chaos.py",
    "weights/test_checkpoint_formats.py",
    "distributed/test_engine_restarts.py",
    "speculative/test_recurrence.py",
    "drafts/test_mtp_families.py",
    "distributed/test_tensor_parallel.py",
    "parallel/test_peers.py",
    "cli/test_cli_refusals.py",
    "serve/test_serve_stalls.py",
    "scheduler/test_scheduler.py",
    "drafts/test_block_heads.py",
    "engine/test_overlap.py",
    "drafts/test_lookup.py",
    "drafts/test_eagle3.py",
    "api/test_serve_sampling.py",
    "speculative/test_switched_shapes.py",
    "models/test_family_ranks.py",
    "bench/test_bench_scripts.py",
    "bench/test_heads.py",
    "cache/test_prefix_hits.py",
    "engine/test_tree_masks.py",
    "models/test_trained_pairs.py",
    "cache/test_cache.py",
    "parsers/test_parsers.py",
    "engine/test_lora.py",
    "engine/test_processors.py",
    "disaggregation/test_expert_roles.py",
    "disaggregation/test_handover.py",
    "distributed/test_warm_starts.py",
    "serve/test_ray.py",
    "distributed/test_data_parallel.py",
    "distributed/test_worker_group.py",
)
"""Files of 15 seconds of processor time or more, and some that wait, which run first, so that none is what the last
process waits for; those of kernels in their session.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if examples.EVERYTHING and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(examples.SEED)


def pytest_report_header() -> str:
    return f"TESTS_SEED={examples.SEED} draws the same again"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    pairwise.leave_the_rest(items)
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """What is imported stays: no collection of garbage goes through its million objects again, and there are fewer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 10)
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def _draw_again() -> None:
    """What is drawn next depends on nothing that was run before, nor on which process it was run by."""
    random.seed(examples.SEED)
    if torch.cuda.is_initialized():
        torch.manual_seed(examples.SEED)
    else:  # of devices that are not in use, `manual_seed` keeps a stack trace each time
        torch.default_generator.manual_seed(examples.SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _draw_again()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _draw_again()
    if item.get_closest_marker("interpreted") and (why_not := why_not_interpreted()):
        pytest.skip(why_not)  # from here, so that the closing lines say it once


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What engines keep for later starts is kept beside the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm_starts():
    """Engines and ranks that a test starts are forked from a process which has imported what they import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "Popen", warm.Popen)
        yield


@pytest.fixture(scope="session", autouse=True)
def _warm_command_lines():
    """A day's frozen command lines are forked, too, where they run what this process has imported.

    `make test-all` starts them cold.
    """

    def start(argv: tuple[str, ...], **more: str) -> subprocess.Popen:
        given = command_line.environment(**more)
        del given["PYTHONPATH"]
        given |= {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return warm.Popen([*command_line.COMMAND, *argv], env=given, **pipes)

    with pytest.MonkeyPatch.context() as patch:
        if not examples.EVERYTHING and Path(treetop.__file__).is_relative_to(command_line.SOURCE):
            patch.setattr(command_line, "start", start)
        yield


@pytest.fixture(scope="session")
def mock_server():
    """A server that all share who leave it as it is: a mock engine whose rounds of four tokens take no time.

    Whatever they have sent, it serves at the end, and has shown no traceback.
    """
    from support.serving import mock, replayed

    with mock(0, "4", "--max-running-requests", "8", "--request-timeout", "120") as server:
        yield server
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9})
        assert answer.json()["choices"][0]["text"] == replayed(1, 9)
        assert not any("Traceback" in line for line in server.said), "".join(server.said)


@pytest.fixture(autouse=True)
def no_fault(monkeypatch):
    """No fault of the caller's environment; a test that wants one names it."""
    monkeypatch.delenv("TREETOP_FAULT", raising=False)


@pytest.fixture(autouse=True)
def family_of_frozen_checkpoints(request, monkeypatch):
    """One of the frozen targets is of a family that nobody publishes."""
    if request.path.parent.name == "frozen":
        monkeypatch.setitem(FAMILIES, windowed_llama.NAME, windowed_llama.FAMILY)


@pytest.fixture(scope="session")
def weak_pair(tmp_path_factory) -> Pair:
    """A target and a head that agrees with it often: about 2.5 tokens a round. It has a tokenizer."""
    folder = tmp_path_factory.mktemp("weak")
    target = save_weak_llama(folder / "target", strength=0.17, sharpness=0.5)
    save_tokenizer(target, 211, spelling)
    return Pair(target, save_copying_head(folder / "head", target, draft_vocab=190))


@pytest.fixture(scope="session")
def strong_pair(tmp_path_factory) -> Pair:
    """A target whose every K/V matters, and a random head that is often right, for the vocabulary is tiny."""
    folder = tmp_path_factory.mktemp("strong")
    target = save_random_llama(folder / "target", seed=8, vocab_size=12)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))


@pytest.fixture(scope="session")
def qwen3_pair(tmp_path_factory) -> Pair:
    """The same with norms of queries and keys, and heads that are wider than the hidden size gives."""
    folder = tmp_path_factory.mktemp("qwen3")
    target = save_random_qwen3(folder / "target", seed=8, vocab_size=12)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))


@pytest.fixture(scope="session")
def alien_pair(tmp_path_factory) -> Pair:
    """A target and a random head that almost never agree; the head has no vocabulary of its own."""
    folder = tmp_path_factory.mktemp("alien")
    target = save_random_llama(folder / "target", seed=3, tie_word_embeddings=True)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=None, seed=4))


def spelling(token: int) -> bytes:
    """What a token of the weak target looks like: ASCII, words of two and three letters, and lone bytes."""
    if token < 4:
        return bytes([token])
    if token < 99:
        return bytes([token + 28])  # ' ' to '~'
    if token < 181:
        word = token - 99
        return bytes([97 + word % 26, 97 + word // 26]) + (b"!" if word % 3 == 0 else b"")
    return bytes([0x80 + token - 181]) if token < 200 else bytes([0xC3 + token - 200])
