"""Exchanges by peer memory without a GPU: the kernels, interpreted, in processes whose mailboxes are shared memory.

`test_operations.py` compares them with their references, `test_gpu_peers.py` runs them on one GPU,
`test_gpu_parallel.py` on two; `test_peer_protocol.py` sees all that can happen in a model of the protocol.
"""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from support.bits import bits
from support.engines import accept_lens, build, greedy, tokens
from support.examples import EVERYTHING
from support.families import FAMILIES
from support.grids import few_of
from support.tiny_models import Pair, save_copying_head, save_random_experts, save_random_head, save_weak_llama
from support.waiting import WAIT_S
from treetop.checks.probes import LATE, RECORD, Probes
from treetop.kernels.comm import peers
from treetop.kernels.comm.peers import Mailboxes
from treetop.kernels.triton_guard import gpu_traits
from treetop.parallel import peer_memory
from treetop.parallel.exchange import Rendezvous
from treetop.parallel.peer_memory import PeerExchange, PeerMemoryError, reach_peers
from treetop.types.errors import EngineError
from treetop_debug import ranks as threads
from treetop_debug.ranks import MemoryGroup, ranks_on_threads

CPU = torch.device("cpu")
GPU = gpu_traits(CPU)


def test_ranks_exchange_behind_delays_and_the_death_of_one_is_written_down(tmp_path):
    """Sums in several dtypes and numbers of parts, gathers of one and several slots, in an order of chance; all ranks
    come to the same bits. A wait for who is gone ends, says who it is, and no later one waits."""
    pytest.importorskip("triton", reason="Triton is not installed; its interpreter runs on any CPU")
    size, exchanges = 2, 40 if EVERYTHING else 12
    for rank in range(size):
        torch.full((peers.mailbox_bytes(size),), 255, dtype=torch.uint8).numpy().tofile(tmp_path / f"mailbox-{rank}")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "peer_rank.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(exchanges)], env=environment, stdout=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        said = [rank.communicate(timeout=240)[0].decode().splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size
    assert said[0][0] == said[1][0]
    assert said[0][1] == f"{LATE} 1 1"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_two_threads_look_for_the_same_number(monkeypatch, dtype):
    """One of them might empty its box before the other, which waits on, has seen it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    launches = []
    monkeypatch.setattr(peers, "_add_shares_kernel", Launches(launches))
    monkeypatch.setattr(peers, "_gather_kernel", Launches(launches))
    mail = Mailboxes.make(0, [0, 0], CPU, torch.zeros(RECORD, dtype=torch.int64))
    for width in (2, 6, 64, 100, 512, 2880, 8192):
        x = torch.zeros((1, width), dtype=dtype)
        peers.add_shares_rms_norm(x, x[None], None, 1e-5, mail, GPU)
        peers.gather(torch.zeros((1, 2, width), dtype=dtype), x, mail, GPU)
    assert len(launches) == 14
    assert all(launch["block"] >= 32 * launch["num_warps"] for launch in launches)


def test_who_waits_for_long_is_not_late_by_looking_whether_to_end(monkeypatch):
    """All programs of the largest launches, one warp after the other. On GPUs a late rank once made all that came
    after it as late: see `tests/support/gpu_ranks.py`."""
    pytest.importorskip("triton", reason="Triton is not installed")
    launches, read_ns, reads = [], 1100, 2
    monkeypatch.setattr(peers, "_add_shares_kernel", Launches(launches))
    monkeypatch.setattr(peers, "_gather_kernel", Launches(launches))
    mail = Mailboxes.make(0, [0, 0], CPU, torch.zeros(RECORD, dtype=torch.int64))
    x, piece = torch.zeros((peers.ROWS, peers.ROW_BYTES // 4)), torch.zeros(peers.CHUNKS * peers.CHUNK)
    assert peers.adds(x[None])
    assert not peers.adds(torch.zeros((1, peers.ROWS + 1, 8)))
    assert peers.gathers(piece)
    assert not peers.gathers(torch.zeros(piece.numel() + 1))
    peers.add_shares_rms_norm(x, x[None], None, 1e-5, mail, GPU)
    peers.gather(torch.zeros((2, piece.numel())), piece, mail, GPU)
    programs = (peers.ROWS, peers.CHUNKS)
    for launch, count in zip(launches, programs, strict=True):
        assert 2 * count * launch["num_warps"] * reads * read_ns < peers.LOOK_NS


class Launches:
    """Stands for a kernel."""

    def __init__(self, options):
        self.options = options

    def __getitem__(self, grid):
        return lambda *args, **options: self.options.append(options)


class MailboxGroup(MemoryGroup):
    """Ranks on threads that exchange by memory what ranks on GPUs do. shares: how many sums were left to their norm."""

    boxes: ClassVar[dict[Path, list[torch.Tensor]]] = {}
    shares = 0

    def __init__(self, rendezvous, device, peer_memory=False, exact=None):
        super().__init__(rendezvous, device, exact=exact)
        if not peer_memory:
            return
        new = [
            torch.full((peers.mailbox_bytes(rendezvous.size),), 255, dtype=torch.uint8) for _ in range(rendezvous.size)
        ]
        boxes = self.boxes.setdefault(rendezvous.file, new)
        record = torch.zeros(RECORD, dtype=torch.int64)
        mail = Mailboxes.make(rendezvous.rank, [each.data_ptr() for each in boxes], device, record)
        self.parallel.peers = Counted(mail, device, boxes)
        self.set_deadline(60.0)

    def set_deadline(self, seconds):
        super().set_deadline(seconds)
        if self.parallel.peers is not None:
            self.parallel.peers.set_deadline(min(seconds, 60.0))


class Counted(PeerExchange):
    def add_rms_norm(self, *arguments):
        MailboxGroup.shares += 1
        return super().add_rms_norm(*arguments)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    weak = save_weak_llama(folder / "weak", strength=0.17, sharpness=0.5, vocab_size=212)
    experts = save_random_experts(folder / "experts", "glm4_moe", vocab_size=12)
    gemma = {**FAMILIES["gemma3"].config, "vocab_size": 12}
    return {
        "weak": Pair(weak, save_copying_head(folder / "weak-head", weak, draft_vocab=188)),
        "experts": Pair(experts, save_random_head(folder / "experts-head", experts, draft_vocab=8)),
        "gemma3": replace(FAMILIES["gemma3"], config=gemma).save(folder / "gemma3").pair,
    }


def answers(pair, shape=(3, 3, 8), params=None, **options):
    llm = build(pair, shape, **{"context_length": 96, "chunked_prefill_size": 16, "dtype": "float32", **options})
    try:
        return llm.generate(pair.prompts([1, 4, 17]), params or greedy(12))
    finally:
        llm.close()


@pytest.mark.parametrize("name", few_of(["weak", "experts", "gemma3"], 0, 2))
def test_an_engine_whose_ranks_exchange_by_memory_gives_what_one_rank_gives(pairs, monkeypatch, name):
    """Sums that the next norm takes, that a norm of their own takes, that a shared expert adds, and that a head's
    output is; gathers of logits. Without the option, and with it."""
    alone = answers(pairs[name])
    monkeypatch.setattr(threads, "MemoryGroup", MailboxGroup)
    with ranks_on_threads():
        MailboxGroup.shares = 0
        shared = answers(pairs[name], tp_size=2)
        assert MailboxGroup.shares > 0
        MailboxGroup.shares = 0
        by_library = answers(pairs[name], tp_size=2, disable_custom_all_reduce=True)
        assert MailboxGroup.shares == 0
    assert tokens(shared) == tokens(by_library) == tokens(alone)
    assert accept_lens(shared) == accept_lens(alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_with_exactness_bits_who_brings_the_shares_changes_no_bit(pairs, name, monkeypatch):
    """Trees in a batch by memory, plain decoding of one request at a time by the library; two and three parts."""
    monkeypatch.setattr(threads, "MemoryGroup", MailboxGroup)
    given = {"params": replace(greedy(8), logprobs=2), "tp_size": 2, "exactness": "bits"}
    with ranks_on_threads():
        MailboxGroup.shares = 0
        shared = answers(pairs[name], **given)
        assert MailboxGroup.shares > 0
        alone = answers(pairs[name], None, disable_custom_all_reduce=True, max_running_requests=1, **given)
    assert bits(shared) == bits(alone)


def test_a_wait_that_was_too_long_ends_the_step_with_an_error(pairs, monkeypatch):
    """At level 0, too: the second rank's mail is lost. The host would see it much later.

    Nobody waits for a short time before: a process that stands still then would be late, too.
    """
    real, losing = peers._exchanged, threading.Event()

    def loses(mail, slot, slots, *more):
        if losing.is_set():
            mail.control[1] = 2 * 10**9  # ns
            slots = [torch.zeros_like(slots[0]), slots[1]] if mail.rank == 1 else slots
        return real(mail, slot, slots, *more)

    monkeypatch.setattr(threads, "MemoryGroup", MailboxGroup)
    monkeypatch.setattr(peers, "_exchanged", loses)
    with ranks_on_threads():
        llm = build(pairs["weak"], (3, 3, 8), tp_size=2, dtype="float32", check_level=0, step_timeout=WAIT_S)
        losing.set()
        with pytest.raises(EngineError, match=r"rank \d did not answer others in time"):
            llm.generate(pairs["weak"].prompts([4] * 4), greedy(300))
        llm.close()


def test_a_record_of_a_late_rank_is_raised_whatever_the_level():
    for enabled in (False, True):
        probes = Probes.make(CPU, enabled, dummy_row=3)
        with pytest.raises(EngineError, match="rank 5 did not answer others in time; raise --step-timeout"):
            probes.check([LATE, 0, 0, 2, 5, 0, 0, 17])


@pytest.mark.parametrize("refused", ["nobody", "one", "all"])
def test_ranks_whose_memory_is_not_reached_by_all_use_the_library(tmp_path, monkeypatch, caplog, refused):
    """All or none: no rank waits for another that has given up, and what is allocated is given back."""
    size, held = 2, set()

    class Mapped:
        handle = bytes(64)

        def __init__(self, size, device):
            self.own = id(self)
            held.add(self.own)

        def map(self, handle):
            return 0

        def __del__(self):
            held.remove(self.own)

    def check(whole, device):
        if refused == "all" or (refused == "one" and whole.rank == 1):
            raise PeerMemoryError(f"GPU {whole.rank} is alone")

    monkeypatch.setattr(peer_memory, "_Mapped", Mapped)
    monkeypatch.setattr(peer_memory, "_check_access", check)
    monkeypatch.setattr(peer_memory, "_tried", lambda exchange, whole, device: None)

    def reach(rank):
        group = MemoryGroup(Rendezvous(tmp_path / "meeting", rank, size), CPU)
        return reach_peers(group.parallel, CPU)

    with caplog.at_level(logging.WARNING, "treetop"), ThreadPoolExecutor(size) as pool:
        found = [*pool.map(reach, range(size))]
    assert [each is not None for each in found] == [refused == "nobody"] * size
    if refused == "nobody":
        assert not caplog.records
        return
    assert "GPU 1 is alone" in caplog.text
    assert ("another rank does not reach" in caplog.text) == (refused == "one")
    assert not held
