"""One rank of several processes whose mailboxes are files in shared memory: the kernels of `kernels/comm/peers.py`,
interpreted. `tests/parallel/test_peers.py` starts them.

python peer_rank.py FOLDER RANK SIZE EXCHANGES      prints a digest of what came

Then all but rank 0 leave, and it prints of its next exchange what went wrong, who was late, and whether waits are over.
"""

import random
import sys
import time
import zlib
from pathlib import Path

import torch

from treetop.checks.probes import RECORD
from treetop.kernels.comm import peers
from treetop.kernels.comm.peers import Mailboxes
from treetop.kernels.fused import add_rms_norm_reference
from treetop.kernels.triton_guard import gpu_traits

CPU = torch.device("cpu")
GPU, EPS = gpu_traits(CPU), 1e-5
TRIES = 50
"""So often a rank looks for what another is to send; the interpreter has no clock."""


def mailbox(folder: Path, rank: int, size: int) -> torch.Tensor:
    return torch.from_file(
        str(folder / f"mailbox-{rank}"), shared=True, size=peers.mailbox_bytes(size), dtype=torch.uint8
    )


def one(choice: random.Random, mail: Mailboxes) -> int:
    """An exchange that all ranks choose alike and whose result each knows. Returns a digest of what came."""
    generator = torch.Generator().manual_seed(choice.randrange(2**31))
    if choice.random() < 0.4:
        rows, words = choice.choice([(1, 1), (1, 3), (4, 256), (5, 300)])
        pieces = torch.randint(-(2**31), 2**31, (rows, mail.ranks, words), generator=generator, dtype=torch.int32)
        pieces[:, :, 0] = -1
        out = torch.empty_like(pieces)
        peers.gather(out, pieces[:, mail.rank].contiguous(), mail, GPU)
        assert mail.record[0] or torch.equal(out, pieces), "a gathered piece is not what was sent"
        return zlib.crc32(out.numpy().tobytes())
    dtype, num_parts = choice.choice([torch.float16, torch.bfloat16, torch.float32]), choice.choice([1, 3])
    rows, hidden = choice.choice([1, 2, 3]), choice.choice([2, 48, 64])
    parts = torch.randn(mail.ranks, num_parts, rows, hidden, generator=generator)
    parts = parts.to(dtype if num_parts == 1 else torch.float32)
    x, weight = (torch.randn(n, hidden, generator=generator).to(dtype) for n in (rows, 1))
    if choice.random() < 0.3:
        not_there(parts[0, 0, 0, :1])
    given = None if choice.random() < 0.2 else weight[0]
    total, normed = peers.add_shares_rms_norm(x, parts[mail.rank], given, EPS, mail, GPU)
    if not mail.record[0]:
        shares = parts[:, 0] if num_parts == 1 else parts.sum(1).to(dtype)
        added = shares[0].float()
        for share in shares[1:]:  # in the order of the ranks
            added = added + share.float()
        slack = 0.0 if num_parts == 1 else 0.01 if dtype == torch.float16 else 1e-5
        if dtype == torch.bfloat16:  # to which the interpreter rounds otherwise
            slack = 0.1
        torch.testing.assert_close(total, (x.float() + added).to(dtype), equal_nan=True, rtol=0, atol=slack)
        if given is not None:
            wanted = add_rms_norm_reference(total, None, given, EPS)[1]
            torch.testing.assert_close(normed, wanted, equal_nan=True, rtol=0.02, atol=0.03)
    return zlib.crc32(total.view(torch.uint8).numpy().tobytes())


def not_there(number: torch.Tensor) -> None:
    """Make it the NaN that stands for a number which has not come."""
    number.view(torch.int16 if number.itemsize == 2 else torch.int32).fill_(-1)


def main(folder: Path, rank: int, size: int, exchanges: int) -> None:
    torch.set_num_threads(1)
    boxes = [mailbox(folder, each, size) for each in range(size)]
    record = torch.zeros(RECORD, dtype=torch.int64)
    mail = Mailboxes.make(rank, [each.data_ptr() for each in boxes], CPU, record)
    mail.control[1] = 10**9
    alike, own, digest = random.Random(0), random.Random(rank), 0
    for _ in range(exchanges):
        if own.random() < 0.1:
            time.sleep(own.random() * 0.02)  # another rank comes first
        digest = zlib.crc32(one(alike, mail).to_bytes(4, "little"), digest)
    print(digest)
    if rank > 0:
        return
    mail.control[1] = TRIES
    one(alike, mail)  # nobody answers
    print(record.tolist()[0], record.tolist()[4], int(mail.control[0]))
    mail.control[1] = 10**9
    one(alike, mail)  # nor now, and nobody waits


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
