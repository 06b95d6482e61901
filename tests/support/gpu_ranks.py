"""What the ranks of `tests/gpu/test_gpu_parallel.py` do where no engine is needed: a process each, on a GPU each."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import Tensor

from treetop.checks.probes import LATE
from treetop.engine.startup.exact_ranks import sums_differ
from treetop.kernels.comm.peers import LOOK_NS
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.parallel import exchange
from treetop.parallel.exchange import Group, Rendezvous

SIZE, EPS = 2, 1e-5
DEADLINE_S = 2.0
SHAPES = [(1, 4096), (256, 4096), (16, 8192), (4, 4096), (64, 1024), (7, 2880), (3, 512), (2, 6)]
"""Rows and widths of sums."""


def ranks_do(work: Callable[[int, Group], None]) -> None:
    """`work` on all ranks of a group; raises what one raises. One that kills itself is expected to."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(work, rank, folder)) for rank in range(SIZE)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
            rank.kill()
            rank.join()
        codes = [rank.exitcode for rank in ranks]
        assert all(code in (0, -signal.SIGKILL if index else 0) for index, code in enumerate(codes)), codes


def _rank(work: Callable[[int, Group], None], rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    group = Group(Rendezvous(Path(folder) / "meeting", rank, SIZE), torch.device("cuda"), peer_memory=True)
    assert group.parallel.peers is not None, "peers are not reached"
    work(rank, group)
    group.parallel.minimum(0)  # nobody leaves before all have done it
    group.close()


def ops_of(group: Group, dtype: torch.dtype) -> Ops:
    return Ops(OpContext(torch.device("cuda"), dtype), parallel=group.parallel)


def shares_of_all(rows: int, width: int, dtype: torch.dtype, parts: int = 1) -> Tensor:
    """[ranks, parts, 1, rows, width], the same on all ranks."""
    generator = torch.Generator().manual_seed(rows * width)
    shares = torch.randn((SIZE, parts, 1, rows, width), generator=generator)
    return shares.to(dtype if parts == 1 else torch.float32).cuda()


@cache
def ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """There before any kernel runs: a norm reads its weight without waiting for what ran before."""
    made = torch.ones(shape, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    return made


def norm_of(group: Group, mine: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = ones(mine.shape[1:], dtype), ones(mine.shape[-1:], dtype)
    return ops_of(group, dtype).add_rms_norm(x, group.parallel.share(mine), weight, EPS)


def norm_of_gathered(group: Group, mine: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same by NCCL."""
    share = mine.sum(0).to(dtype)
    shares = share.new_empty((SIZE, *share.shape))
    group._gather_on_gpu(shares, share)
    x, weight = ones(mine.shape[1:], dtype), ones(mine.shape[-1:], dtype)
    return ops_of(group, dtype).add_rms_norm(x, shares, weight, EPS)


def sums_are_the_same(rank: int, group: Group) -> None:
    """On all ranks to the bit, and those of shares gathered by NCCL: to the bit but for a share that is in parts."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, width in SHAPES:
            for parts in (1, 3):
                mine = shares_of_all(rows, width, dtype, parts)[rank]
                found, expected = norm_of(group, mine, dtype), norm_of_gathered(group, mine, dtype)
                for one, other in zip(found, expected, strict=True):
                    each = one.new_empty((SIZE, *one.shape))
                    group._gather_on_gpu(each, one)
                    assert torch.equal(each[0], each[1]), f"ranks have other bits: {rows} x {width} {dtype}"
                    if parts == 1:
                        assert torch.equal(one, other), f"not what NCCL's shares give: {rows} x {width} {dtype}"
                    torch.testing.assert_close(one, other, rtol=0.02, atol=0.04)


def exact_sums_are_one(rank: int, group: Group) -> None:
    """With `--exactness bits`: of few rows and many, in one part and in parts, by peer memory and by NCCL, and added as
    many ranks add large shares."""
    parallel, many = group.parallel, exchange._MANY_RANKS
    try:
        for dtype in (torch.bfloat16, torch.float16):
            parallel._exact = dtype
            ops = Ops(
                OpContext(torch.device("cuda"), dtype, profile=profile_of("bits", torch.device("cuda"))),
                parallel=parallel,
            )
            for width in (64, 512, 2880, 4096, 8192):
                for peers, fewest in ((parallel.peers, many), (None, many), (None, 2)):
                    before, parallel.peers, exchange._MANY_RANKS = parallel.peers, peers, fewest
                    differ = sums_differ(ops, width, EPS)
                    parallel.peers = before
                    assert differ is None, f"{differ} rows x {width} {dtype}, peers {peers is not None}, {fewest}"
    finally:
        exchange._MANY_RANKS = many


def ten_thousand_exchanges(rank: int, group: Group) -> None:
    """Of all kinds, with delays on both sides, of the host and of the device."""
    parallel, dtype = group.parallel, torch.bfloat16
    alike, own = random.Random(5), random.Random(rank)
    shares = {shape: shares_of_all(*shape, dtype) for shape in SHAPES}
    expected = {shape: norm_of_gathered(group, each[rank], dtype) for shape, each in shares.items()}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        shape = alike.choice(SHAPES)
        if alike.random() < 0.3:
            wrong += (parallel.gather(shares[shape][rank]) != shares[shape]).any()
        elif alike.random() < 0.3:
            side_by_side = shares[shape].movedim(0, -2).flatten(-2)
            wrong += (parallel.join(shares[shape][rank]) != side_by_side).any()
        else:
            found = norm_of(group, shares[shape][rank], dtype)
            wrong += (found[0] != expected[shape][0]).any() | (found[1] != expected[shape][1]).any()
        chance = own.random()
        if chance < 0.005:
            time.sleep(own.random() * 0.003)
        elif chance < 0.02:
            torch.cuda._sleep(int(own.random() * 400_000))
    assert int(wrong) == 0
    assert parallel.peers.mail.record.tolist()[0] == 0


def graph_of(
    group: Group, mine: Tensor, exchanges: int, look: Callable[[Tensor, Tensor], None]
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    norm_of(group, mine, torch.bfloat16)  # compiled before it is recorded
    group.parallel.gather(mine)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        for _ in range(exchanges):
            look(norm_of(group, mine, torch.bfloat16)[0], group.parallel.gather(mine))
    return graph


def graphs_replay(rank: int, group: Group) -> None:
    """Two graphs in turn, each with an odd number of uses of every slot, behind delays."""
    wrong, own, graphs = torch.zeros((), dtype=torch.int64, device="cuda"), random.Random(rank), []
    for shape, exchanges in (((4, 4096), 7), ((1, 8192), 3)):
        shares = shares_of_all(*shape, torch.bfloat16)
        expected = norm_of_gathered(group, shares[rank], torch.bfloat16)[0]

        def look(found: Tensor, gathered: Tensor, expected: Tensor = expected, shares: Tensor = shares) -> None:
            wrong.add_((found != expected).any() | (gathered != shares).any())

        graphs.append((graph_of(group, shares[rank], exchanges, look), look))  # with what it reads
    for step in range(300):
        graphs[step % 2][0].replay()
        if own.random() < 0.1:
            torch.cuda._sleep(int(own.random() * 2_000_000))
    torch.cuda.synchronize()
    assert int(wrong) == 0


def one_late_rank_does_not_make_others_late(rank: int, group: Group) -> None:
    """Who has waited for long looks into the host's memory; if many did so often, all would be late from then on.

    So each reading would be slow, some two hundred times as slow as one before which nobody was late; other work on the
    GPUs, which takes its turns between two events, makes both slow.
    """
    mine = shares_of_all(256, 4096, torch.bfloat16)[rank]
    graph = graph_of(group, mine, 50, lambda found, gathered: None)

    def ms_after(late: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if late and rank == 1:
            torch.cuda._sleep(3 * LOOK_NS)  # cycles, of which a nanosecond has up to two
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    times = [(ms_after(False), ms_after(True)) for _ in range(5)]
    assert min(late / usual for usual, late in times) < 25, f"ms for 50 exchanges, usual and after a late rank: {times}"


def a_rank_dies(rank: int, group: Group) -> None:
    """Who waits in a graph for one that is gone writes that down in time, and no later wait takes as long."""
    mine = shares_of_all(4, 4096, torch.bfloat16)[rank]
    graph = graph_of(group, mine, 32, lambda found, gathered: None)
    group.set_deadline(DEADLINE_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    assert DEADLINE_S * 0.9 < time.monotonic() - begun < DEADLINE_S + 2
    record = group.parallel.record()
    assert record is not None
    assert (int(record[0]), int(record[4])) == (LATE, 1)
    group.close()
    os._exit(0)  # the other is not there to meet at the end


def waits_are_ended(rank: int, group: Group) -> None:
    """Closing a group ends kernels that wait, however long they might."""
    mine = shares_of_all(4, 4096, torch.bfloat16)[rank]
    graph = graph_of(group, mine, 32, lambda found, gathered: None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    graph.replay()
    time.sleep(0.3)
    begun = time.monotonic()
    group.close()
    torch.cuda.synchronize()
    assert time.monotonic() - begun < 1
    os._exit(0)
