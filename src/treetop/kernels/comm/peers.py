"""Exchanges between the GPUs of one host by writing into each other's memory, each one launch.

Every rank has a mailbox that all can write. A program writes its row, or its piece, into the same slot of every rank's
mailbox, waits for what the others write into its own, and goes on with all of them, in the order of the ranks. Data
says by itself that it has come, so one trip over the link is enough: a row of a sum is written over a number that no
sum is; each word of a gathered piece comes beside the number of its exchange. Stores into others' memory are written
through (`.wt`): nothing says when a rank that waits would see an ordinary one.

A slot has two boxes, used in turn. Who writes into a box for the second time has read, in between, what its owner wrote
after emptying it. How often a slot was used is counted on the device, so recorded graphs can be replayed.

Source: the protocols LL of NCCL and "Lamport" of TensorRT-LLM's all-reduce, whose ideas these are.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from treetop.checks.probes import LATE
from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.fused import add_in_order, joined_in_order, rms_norm
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, interpreted, jit, lanes, tl

ROWS, ROW_BYTES = 256, 32 << 10
"""Slots of sums, one for each row of a launch, and how long a row may be, in float32."""
CHUNKS, CHUNK = 64, 1024
"""Slots of gathers, and how many words of 4 bytes a slot holds, each beside a number."""
_BOXES = 2
LOOK_NS = 20_000_000
"""How often a wait looks into the host's memory whether it is to end; what it finds is on the device for all others. A
GPU's warps look there one after the other, about a microsecond each time. If this were not much longer than all of them
take, one rank that once comes late would make the others look, and so be late in their turn, without end."""


def mailbox_bytes(ranks: int) -> int:
    """Memory that each rank's mailbox takes. To begin with all of its bits are set."""
    return sums_bytes(ranks) + _BOXES * ranks * CHUNKS * CHUNK * 8


def sums_bytes(ranks: int) -> int:
    """Of that the slots of sums, with which it begins."""
    return _BOXES * ranks * ROWS * ROW_BYTES


@dataclass(frozen=True, slots=True)
class Mailboxes:
    """What a rank has of the mailboxes of all.

    addresses: [ranks] int64, of each rank's mailbox as this rank reaches it.
    counts: [ROWS + CHUNKS] int32, zero to begin with.
    control: [2] int64 in pinned memory of the host: whether waiting is to end, and how long a wait may be, in
        nanoseconds.
    ended: [1] int32, whether a wait has found that it is to end.
    record: [8] int64, as `checks.probes` reads it.
    """

    rank: int
    ranks: int
    addresses: Tensor
    counts: Tensor
    control: Tensor
    ended: Tensor
    record: Tensor

    @classmethod
    def make(cls, rank: int, addresses: list[int], device: torch.device, record: Tensor) -> "Mailboxes":
        counts = torch.zeros(ROWS + CHUNKS, dtype=torch.int32, device=device)
        control = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        ended = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(rank, len(addresses), torch.tensor(addresses, device=device), counts, control, ended, record)


def adds(parts: Tensor) -> bool:
    """Whether `add_shares_rms_norm` takes a share in these parts [parts, ..., hidden]."""
    hidden = parts.shape[-1]
    rows = parts[0].numel() // max(hidden, 1)
    return 0 < rows <= ROWS and hidden * 4 <= ROW_BYTES and parts.dtype != torch.float64


def gathers(piece: Tensor) -> bool:
    """Whether `gather` takes a piece [..., width]."""
    whole_words = piece.shape[-1] * piece.element_size() % 4 == 0 and piece.data_ptr() % 4 == 0
    return whole_words and 0 < piece.nbytes <= CHUNKS * CHUNK * 4


_NAN = {2: 0x7FFF, 4: 0x7FFFFFFF}
"""By the bytes of a number: a NaN whose bits are not all set."""


def add_shares_rms_norm_reference(
    x: Tensor, parts: Tensor, weight: Tensor | None, eps: float, mail: Mailboxes
) -> tuple[Tensor, Tensor]:
    """x plus the shares of all ranks, and that over its root mean square, times weight; the sum twice without weight.

    parts: [parts, ..., hidden], whose sum, rounded to x's dtype, is this rank's share. It is `add_rms_norm` of the
    gathered shares: these are added in float32, from the first rank's to the last's, then to x, and rounded once.
    """
    word, nan = (torch.int16, torch.int32)[x.element_size() == 4], _NAN[x.element_size()]
    boxes = [_sums(mail, peer).view(word) for peer in range(mail.ranks)]
    came = []
    for slot, row in enumerate(joined_in_order(parts).to(x.dtype).view(-1, x.shape[-1]).view(word)):
        slots, words = [each[:, slot] for each in boxes], row.where(row != -1, nan)
        came.append(_exchanged(mail, slot, slots, words, lambda words: words != -1))
        slots[mail.rank][int(mail.counts[slot]) - 1 & 1] = -1
    shares = torch.stack(came, dim=1).view(x.dtype).view(mail.ranks, *x.shape)
    total = add_in_order(x, shares)
    return total, total if weight is None else rms_norm(total, weight, eps)


def gather_reference(out: Tensor, piece: Tensor, mail: Mailboxes) -> None:
    """Fill out [..., ranks, width] with the pieces [..., width] of the ranks, in their order.

    piece: `width` is a multiple of 4 bytes; see `gathers`. Instead of what does not come in time out gets this rank's
    own, so that indices stay legal until the host reads the record.
    """
    boxes = [_pieces(mail, peer) for peer in range(mail.ranks)]
    came = piece.new_empty((mail.ranks, *piece.shape))
    to = came.view(mail.ranks, -1).view(torch.int32)
    for chunk, words in enumerate(piece.reshape(-1).view(torch.int32).split(CHUNK)):
        number = (mail.counts[ROWS + chunk] + 1).to(torch.int64)
        numbered, slots = number << 32 | words.to(torch.int64) & 0xFFFFFFFF, [each[:, chunk] for each in boxes]
        found = _exchanged(mail, ROWS + chunk, slots, numbered, partial(_numbered, number))
        to[:, chunk * CHUNK :][:, : len(words)] = found.where(found >> 32 == number, numbered).to(torch.int32)
    out.copy_(came.movedim(0, -2))


def _numbered(number: Tensor, words: Tensor) -> Tensor:
    return words >> 32 == number


def _exchanged(
    mail: Mailboxes, slot: int, slots: list[Tensor], words: Tensor, there: Callable[[Tensor], Tensor]
) -> Tensor:
    """The words of all ranks for one slot, [ranks, words]. slots: of each rank, [2, ranks, most words]."""
    box = int(mail.counts[slot]) & 1
    mail.counts[slot] += 1
    others = [peer for peer in range(mail.ranks) if peer != mail.rank]
    for peer in others:
        slots[peer][box, mail.rank, : len(words)] = words
    began = time.monotonic_ns()
    while True:
        came = slots[mail.rank][box, :, : len(words)].clone()
        came[mail.rank] = words
        if there(came).all() or mail.control[0]:
            return came
        time.sleep(0)
        if time.monotonic_ns() - began > mail.control[1]:
            mail.record[:5] = torch.tensor([LATE, 0, 0, slot, int((~there(came)).any(1).nonzero()[-1])])
            mail.control[0] = 1


def _sums(mail: Mailboxes, peer: int) -> Tensor:
    """The slots of sums of a rank's mailbox, [2, ROWS, ranks, ROW_BYTES] uint8."""
    size = sums_bytes(mail.ranks)
    return _memory(int(mail.addresses[peer]), size, mail.counts.device).view(_BOXES, ROWS, mail.ranks, ROW_BYTES)


def _pieces(mail: Mailboxes, peer: int) -> Tensor:
    """The slots of gathers of a rank's mailbox, [2, CHUNKS, ranks, CHUNK] int64."""
    first, size = sums_bytes(mail.ranks), _BOXES * CHUNKS * mail.ranks * CHUNK * 8
    found = _memory(int(mail.addresses[peer]) + first, size, mail.counts.device).view(torch.int64)
    return found.view(_BOXES, CHUNKS, mail.ranks, CHUNK)


class _At:
    """Memory of a GPU, as PyTorch asks for it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _memory(address: int, size: int, device: torch.device) -> Tensor:
    """[size] uint8, the memory at an address."""
    if device.type == "cuda":
        return torch.as_tensor(_At(address, size), device=device)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def add_shares_rms_norm(
    x: Tensor, parts: Tensor, weight: Tensor | None, eps: float, mail: Mailboxes, gpu: GpuTraits, num_warps: int = 0
) -> tuple[Tensor, Tensor]:
    """`add_shares_rms_norm_reference` in one launch."""
    x, parts = x.contiguous(), parts.contiguous()
    hidden, wide = x.shape[-1], x.element_size() == 4
    num_warps = num_warps or (8 if hidden > 2048 else 4)
    block = max(lanes(hidden), 32 * num_warps)
    total = torch.empty_like(x)
    normed = total if weight is None else torch.empty_like(x)
    _add_shares_kernel[(x.numel() // hidden,)](
        total, normed, x, parts, x if weight is None else weight, eps, x.numel(),
        mail.addresses, mail.counts, mail.control, mail.ended, mail.record, mail.rank,
        ranks=mail.ranks, hidden=hidden, block=block, parts_count=parts.shape[0], norms=weight is not None,
        word=tl.int32 if wide else tl.int16, nan=_NAN[x.element_size()], slot=ROW_BYTES // x.element_size(), slots=ROWS,
        late=LATE, look=0 if interpreted() else LOOK_NS, overlap=gpu.can_overlap,
        num_warps=num_warps, **launch_options(gpu),
    )  # fmt: skip
    return total, normed


def gather(out: Tensor, piece: Tensor, mail: Mailboxes, gpu: GpuTraits) -> None:
    """`gather_reference` in one launch. Both contiguous; see `gathers`."""
    words = piece.nbytes // 4
    width = piece.shape[-1] * piece.element_size() // 4
    _gather_kernel[(-(-words // CHUNK),)](
        out.view(-1).view(torch.int32), piece.view(-1).view(torch.int32), words, width,
        mail.addresses, mail.counts, mail.control, mail.ended, mail.record, mail.rank,
        ranks=mail.ranks, block=CHUNK, chunks=CHUNKS, before=sums_bytes(mail.ranks) // 8,
        slots=ROWS, late=LATE, look=0 if interpreted() else LOOK_NS, overlap=gpu.can_overlap,
        num_warps=4, **launch_options(gpu),
    )  # fmt: skip


@jit
def _add_shares_kernel(
    total: Arg, normed: Arg, x: Arg, parts: Arg, weight: Arg, eps: Arg, size: Arg,
    addresses: Arg, counts: Arg, control: Arg, ended: Arg, record: Arg, rank: Arg,
    ranks: constexpr, hidden: constexpr, block: constexpr, parts_count: constexpr, norms: constexpr, word: constexpr,
    nan: constexpr, slot: constexpr, slots: constexpr, late: constexpr, look: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One row a program. total, normed, x: [rows, hidden]; parts: [parts, rows, hidden]; weight: [hidden].

    slot: numbers that one has room for. A mailbox begins with [2, slots, ranks, slot] of them, all bits set where
    nothing has come. block: no less than there are threads: were two to look for the same number, one might empty its
    box before the other has seen it.
    """
    column = tl.arange(0, block)
    there, me = column < hidden, tl.zeros([block], tl.int32) + rank
    if norms:
        scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)  # a constant: needs no waiting
    row = tl.program_id(0)
    pdl_wait(overlap)
    at = row.to(tl.int64) * hidden + column
    share = tl.load(parts + at, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts_count):
        share += tl.load(parts + part * size + at, mask=there, other=0.0)
    bits = share.to(x.dtype.element_ty).to(word, bitcast=True)
    bits = tl.where(bits == -1, tl.full([block], nan, word), bits)  # stays NaN
    count = tl.load(counts + row)
    first = ((count & 1) * slots + row) * (ranks * slot)
    for turn in tl.static_range(1, ranks):
        box = _mailbox(addresses, (rank + turn) % ranks, word)
        tl.store(box + (first + rank * slot) + column, bits, mask=there, cache_modifier=".wt")

    own = _mailbox(addresses, rank, word) + first
    value = tl.load(x + at, mask=there, other=0.0)
    added = tl.zeros([block], tl.float32)
    missing = tl.full([], 1, tl.int32)
    tries = tl.full([], 0, tl.int64)
    began = tl.full([], 0, tl.int64)
    looked = tl.full([], 0, tl.int64)
    while missing > 0:
        ends = tl.load(ended, volatile=True)
        absent = tl.zeros([block], tl.int32)
        for peer in tl.static_range(ranks):
            came = tl.load(own + peer * slot + column, mask=there & (me != peer), other=bits, volatile=True)
            absent = tl.where(came == -1, peer + 1, absent)
            sent = came.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
            added = sent if peer == 0 else added + sent  # as gathered shares are added: a sum of -0 stays -0
        missing = _missing(absent, ends)
        if missing > 0:
            tries += 1
            began, looked = _patience(missing, tries, began, looked, control, ended, record, row, late, look)
    for peer in tl.static_range(ranks):
        tl.store(own + peer * slot + column, tl.full([block], -1, word), mask=there & (me != peer))
    value = (value.to(tl.float32) + added).to(value.dtype)
    tl.store(total + at, value, mask=there)
    if norms:
        value = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
        tl.store(normed + at, (value * inverse * scale).to(normed.dtype.element_ty), mask=there)
    tl.store(counts + row, count + 1)  # all of the program has read it: all have waited for one another above


@jit
def _gather_kernel(
    out: Arg, piece: Arg, words: Arg, width: Arg,
    addresses: Arg, counts: Arg, control: Arg, ended: Arg, record: Arg, rank: Arg,
    ranks: constexpr, block: constexpr, chunks: constexpr, before: constexpr, slots: constexpr, late: constexpr,
    look: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """`block` words a program. out: [words / width, ranks, width] int32; piece: [words] int32.

    A mailbox has, after `before` numbers of 8 bytes, [2, chunks, ranks, block] of them: a word, above it its number.
    """
    lane = tl.arange(0, block)
    chunk = tl.program_id(0)
    pdl_wait(overlap)
    at = chunk * block + lane
    there, me = at < words, tl.zeros([block], tl.int32) + rank
    count = tl.load(counts + slots + chunk)
    number = (count + 1).to(tl.int64)
    data = (number << 32) | (tl.load(piece + at, mask=there, other=0).to(tl.int64) & 0xFFFFFFFF)
    first = before + ((count & 1) * chunks + chunk) * (ranks * block)
    for turn in tl.static_range(1, ranks):
        box = _mailbox(addresses, (rank + turn) % ranks, tl.int64)
        tl.store(box + (first + rank * block) + lane, data, mask=there, cache_modifier=".wt")

    own = _mailbox(addresses, rank, tl.int64) + first
    to = out + at // width * (ranks * width) + at % width
    missing = tl.full([], 1, tl.int32)
    tries = tl.full([], 0, tl.int64)
    began = tl.full([], 0, tl.int64)
    looked = tl.full([], 0, tl.int64)
    while missing > 0:
        ends = tl.load(ended, volatile=True)
        absent = tl.zeros([block], tl.int32)
        for peer in tl.static_range(ranks):
            came = tl.load(own + peer * block + lane, mask=there & (me != peer), other=data, volatile=True)
            absent = tl.where((came >> 32) != number, peer + 1, absent)
            tl.store(to + peer * width, tl.where((came >> 32) == number, came, data).to(tl.int32), mask=there)
        missing = _missing(absent, ends)
        if missing > 0:
            tries += 1
            began, looked = _patience(missing, tries, began, looked, control, ended, record, chunk, late, look)
    tl.store(counts + slots + chunk, count + 1)


@jit
def _mailbox(addresses: Arg, rank: Arg, number: constexpr) -> Arg:
    """Where a rank's mailbox begins."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(number)), 16)


@jit
def _missing(absent: Arg, ends: Arg) -> Arg:
    """1 + a rank that is waited for; 0 if none is, or if any warp of the program has seen that waiting ends: they look
    at different times, and must leave together. absent: [block], 0 or 1 + a rank."""
    found = tl.max(tl.where(ends != 0, 1 << 20, absent), 0)
    return tl.where(found < 1 << 20, found, 0)


@jit
def _patience(
    missing: Arg, tries: Arg, began: Arg, looked: Arg, control: Arg, ended: Arg, record: Arg, row: Arg,
    late: constexpr, look: constexpr,
) -> Arg:  # fmt: skip
    """Write down that waiting ends, where it does, so that no wait goes on. missing: 1 + the rank that is waited for.
    Returns since when one waits, and when one has looked into the host's memory.

    A wait that was too long goes into the record. look: see LOOK_NS; 0 where there is no clock, and tries count.
    """
    now = tries
    if look > 0:
        now = tl.extra.cuda.globaltimer().to(tl.int64)
    if began == 0:
        began = now
        looked = now
    if now - looked > look:
        looked = now
        if tl.load(control, volatile=True) != 0:
            tl.store(ended, 1, cache_modifier=".wt")
        elif now - began > tl.load(control + 1, volatile=True):
            if tl.load(record) == 0:
                tl.store(record + 3, row)
                tl.store(record + 4, missing - 1)
                tl.store(record, late)
            tl.store(control, 1)
            tl.store(ended, 1, cache_modifier=".wt")
    return began, looked
