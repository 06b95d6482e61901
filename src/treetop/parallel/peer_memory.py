"""A rank whose small exchanges are writes into the other GPUs' memory (`kernels/comm/peers.py`); large ones stay
NCCL's.

Every rank allocates a mailbox and maps those of the others, once, through CUDA's handles for other processes. All ranks
do so or none: they try an exchange, and agree.
"""

import ctypes
import logging
import os
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.checks.probes import RECORD
from treetop.kernels.comm.peers import Mailboxes, mailbox_bytes
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import gpu_traits, why_not
from treetop.types.parallel import Parallel

log = logging.getLogger("treetop")
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_TRY_S = 60.0
"""Seconds that one rank may wait for another in the first exchange, for which a kernel is compiled."""


class PeerMemoryError(Exception):
    """Why this rank does not reach the others' memory."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class _Driver:
    """What is used of CUDA's driver, for the context of this thread's device."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerMemoryError(str(error)) from None

    def call(self, name: str, *arguments: object) -> None:
        code = self._library[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise PeerMemoryError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")

    def allocate(self, size: int) -> int:
        """Memory with all bits set."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(255), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        """By which another process maps memory that was allocated here."""
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        return address.value

    def unmap(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


class _Mapped:
    """This rank's mailbox, and the others' once mapped. They are given back when nobody holds this any more."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._driver = _Driver()
        self._mapped: list[int] = []
        self.own = self._driver.allocate(size)
        given_back = weakref.finalize(self, _give_back, self._driver, self.own, self._mapped, device)
        given_back.atexit = False  # the end of a process gives everything back
        self.handle = self._driver.handle(self.own)

    def map(self, handle: bytes) -> int:
        self._mapped.append(self._driver.map(handle))
        return self._mapped[-1]


def _give_back(driver: _Driver, own: int, mapped: list[int], device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        for address in mapped:
            driver.unmap(address)
        driver.free(own)


class PeerExchange:
    """What a rank exchanges by memory. memory: what has to live as long as this does."""

    def __init__(self, mail: Mailboxes, device: torch.device, memory: object) -> None:
        self.mail, self._memory = mail, memory
        add, gather = Ops.add_shares_rms_norm, Ops.gather
        gpu = gpu_traits(device) if why_not(device) is None else None
        self._add = add.reference if gpu is None else add.on(gpu)
        self._gather = gather.reference if gpu is None else gather.on(gpu)

    def set_deadline(self, seconds: float) -> None:
        """So long a rank waits for another."""
        self.mail.control[1] = int(seconds * 1e9)

    def close(self) -> None:
        """Whoever waits ends soon, and what comes later does not wait."""
        self.mail.control[0] = 1

    def add_rms_norm(self, x: Tensor, parts: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """See `Share`."""
        return self._add(x, parts, weight, eps, self.mail)

    def gather(self, out: Tensor, piece: Tensor) -> None:
        """Fill out [..., size, width] with the pieces [..., width] of the ranks, in their order."""
        self._gather(out, piece, self.mail)


@dataclass(frozen=True, slots=True)
class PeerShare:
    """A `Share` of a rank that reaches the others' memory."""

    parts: Tensor
    exchange: PeerExchange
    rank: Parallel

    def add_rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """See `Share`."""
        return self.exchange.add_rms_norm(x, self.parts, weight, eps)

    def sum(self) -> Tensor:
        """See `Share`."""
        return self.rank.sum(self.parts)


def reach_peers(whole: Parallel, device: torch.device) -> PeerExchange | None:
    """What ranks of one host exchange by memory; None, with a warning, where one of them cannot. Collective.

    device: this rank's GPU; those of the others lie beside it, in the order of the ranks.
    """
    reason, memory, exchange = None, None, None
    try:
        _check_access(whole, device)
        memory = _Mapped(mailbox_bytes(whole.size), device)
        handle = memory.handle
    except PeerMemoryError as error:
        reason, handle = str(error), bytes(_HANDLE_BYTES)
    handles = whole.gather(torch.tensor([*handle, reason is None], dtype=torch.uint8, device=device)).tolist()
    if memory is not None and all(each[-1] for each in handles):
        try:
            exchange = _exchange_over(memory, whole, [bytes(each[:-1]) for each in handles], device)
        except PeerMemoryError as error:
            reason = str(error)
    if whole.minimum(int(exchange is not None)) and exchange is not None:  # no kernel waits for a rank that has failed
        reason = _tried(exchange, whole, device)
        if whole.minimum(int(reason is None)):
            return exchange
    log.warning("sums over ranks go through NCCL: %s", reason or "another rank does not reach its peers' memory")
    return None


def _check_access(whole: Parallel, device: torch.device) -> None:
    """Raise PeerMemoryError if the driver or the user says that peers' memory cannot be reached."""
    reason = why_not(device)
    if reason is not None:
        raise PeerMemoryError(reason)
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        raise PeerMemoryError("NCCL_P2P_DISABLE is set")
    first = device.index - whole.rank
    for peer in range(first, first + whole.size):
        if peer != device.index and not torch.cuda.can_device_access_peer(device.index, peer):
            raise PeerMemoryError(f"GPU {device.index} does not reach the memory of GPU {peer}")


def _exchange_over(memory: _Mapped, whole: Parallel, handles: list[bytes], device: torch.device) -> PeerExchange:
    addresses = [memory.own if peer == whole.rank else memory.map(each) for peer, each in enumerate(handles)]
    record = torch.zeros(RECORD, dtype=torch.int64, device=device)
    exchange = PeerExchange(Mailboxes.make(whole.rank, addresses, device, record), device, memory)
    exchange.set_deadline(_TRY_S)
    return exchange


def _tried(exchange: PeerExchange, whole: Parallel, device: torch.device) -> str | None:
    """What is wrong with first exchanges of all ranks, twice through each of a slot's boxes."""
    own = torch.arange(6, dtype=torch.float32, device=device).view(2, 3) + 10 * whole.rank
    expected = torch.stack([own + 10 * (peer - whole.rank) for peer in range(whole.size)])
    weight = torch.ones(3, device=device)
    torch.cuda.synchronize(device)  # kernels read weights without waiting for what ran before
    for _ in range(4):
        side_by_side = torch.empty((2, whole.size, 3), device=device)
        exchange.gather(side_by_side, own)
        total = exchange.add_rms_norm(torch.zeros_like(own), own[None], weight, 1e-5)[0]
        if int(exchange.mail.record[0]):
            return f"rank {int(exchange.mail.record[4])} did not answer in {_TRY_S:g} s"
        if not torch.equal(side_by_side.movedim(1, 0), expected):
            return "a gathered piece was not what had been sent"
        if not torch.equal(total, expected.sum(0)):
            return "a sum was not that of the ranks' shares"
    return None
