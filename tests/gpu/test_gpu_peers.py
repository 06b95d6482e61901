"""Exchanges by peer memory on one NVIDIA GPU: two ranks of one process, a stream each. `test_gpu_parallel.py` has
the same kernels between GPUs."""

import random
import time

import pytest
import torch

from treetop.checks.probes import LATE, RECORD
from treetop.kernels.comm import peers
from treetop.kernels.comm.peers import Mailboxes
from treetop.kernels.fused import rms_norm
from treetop.kernels.triton_guard import gpu_traits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZE, EPS, DEADLINE_S = 2, 1e-5, 0.5
SUMS = [(1, 2), (1, 64), (3, 100), (16, 2880), (32, 4096), (8, 8192)]
GATHERS = [(1, 2), (1, 6), (4, 512), (16, 4096)]
"""Rows and width. Programs of both ranks must fit on the GPU at once, also those that are launched ahead."""


class Rank:
    """What a rank sends, and what must come to it. wrong: a count on the device."""

    def __init__(self, number, mail, gpu):
        self.number, self.mail, self.gpu, self.stream = number, mail, gpu, torch.cuda.Stream()
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.sums, self.gathers = {}, {}
        generator = torch.Generator("cuda").manual_seed(0)
        for dtype in (torch.bfloat16, torch.float32):
            for rows, width in SUMS:
                numbers = [torch.randn(n, rows, width, device="cuda", generator=generator) for n in (1, SIZE)]
                x, shares, weight = numbers[0][0].to(dtype), numbers[1].to(dtype), numbers[0][0, 0].to(dtype)
                total = (x.float() + (shares[0].float() + shares[1].float())).to(dtype)
                self.sums[rows, width, dtype] = x, shares[number][None], weight, total, rms_norm(total, weight, EPS)
            for rows, width in GATHERS:
                pieces = torch.randn(rows, SIZE, width, device="cuda", generator=generator).to(dtype)
                self.gathers[rows, width, dtype] = pieces[:, number].contiguous(), pieces

    def run(self, kind, key):
        """One exchange on this rank's stream."""
        with torch.cuda.stream(self.stream):
            if kind == "gather":
                piece, want = self.gathers[key]
                out = torch.empty_like(want)
                peers.gather(out, piece, self.mail, self.gpu)
                self.wrong += (out != want).any()
                return
            x, share, weight, want, want_normed = self.sums[key]
            total, normed = peers.add_shares_rms_norm(x, share, weight, EPS, self.mail, self.gpu)
            self.wrong += (total != want).any() | ~torch.isclose(normed, want_normed, rtol=0.02, atol=0.04).all()

    def kinds(self):
        return [*(("gather", key) for key in self.gathers), *(("sum", key) for key in self.sums)]


@pytest.fixture
def ranks():
    """All launches are compiled and loaded, which must not happen while a kernel waits."""
    boxes = [torch.full((peers.mailbox_bytes(SIZE),), -1, dtype=torch.int8, device="cuda") for _ in range(SIZE)]
    addresses, device, gpu = [box.data_ptr() for box in boxes], torch.device("cuda"), gpu_traits(boxes[0].device)
    records = [torch.zeros(RECORD, dtype=torch.int64, device="cuda") for _ in range(SIZE)]
    both = [Rank(n, Mailboxes.make(n, addresses, device, records[n]), gpu) for n in range(SIZE)]
    for each in both:
        each.mail.ended.fill_(1)
        torch.cuda.synchronize()
        for kind, key in each.kinds():
            each.run(kind, key)
        with torch.cuda.stream(each.stream):
            torch.cuda._sleep(1)
    torch.cuda.synchronize()
    for each, box in zip(both, boxes, strict=True):
        box.fill_(-1)
        for tensor in (each.mail.ended, each.mail.counts, each.wrong):
            tensor.zero_()
        each.mail.control[1] = int(DEADLINE_S * 1e9)
    torch.cuda.synchronize()
    yield both
    for each in both:
        each.mail.control[0] = 1
    torch.cuda.synchronize()


def test_thousands_of_exchanges_behind_delays_of_either_rank(ranks):
    rng, kinds = random.Random(3), ranks[0].kinds()
    for _ in range(3000):
        kind, key = rng.choice(kinds)
        for each in rng.sample(ranks, SIZE):
            if rng.random() < 0.02:
                with torch.cuda.stream(each.stream):
                    torch.cuda._sleep(rng.randrange(1_000_000))
            each.run(kind, key)
    torch.cuda.synchronize()
    assert [(int(each.wrong), int(each.mail.record[0])) for each in ranks] == [(0, 0)] * SIZE


def test_a_wait_for_who_does_not_come_is_written_down_and_ends_all_that_follow(ranks):
    first, _ = ranks
    began = time.monotonic()
    for kind, key in first.kinds():
        first.run(kind, key)
    torch.cuda.synchronize()
    assert DEADLINE_S * 0.9 < time.monotonic() - began < DEADLINE_S + 1
    assert [int(first.mail.record[at]) for at in (0, 4)] == [LATE, 1]
    assert int(first.mail.ended) == int(first.mail.control[0]) == 1


def test_the_host_ends_waits_however_long_they_might_take(ranks):
    first, _ = ranks
    first.mail.control[1] = 2**62
    for kind, key in first.kinds():
        first.run(kind, key)
    time.sleep(0.1)
    assert not first.stream.query()
    first.mail.control[0] = 1
    began = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 1
    assert int(first.mail.record[0]) == 0
