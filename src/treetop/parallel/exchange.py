"""A rank over a process group of `torch.distributed`: gloo between processes of a CPU, NCCL between GPUs.

Small shares are gathered: whoever adds them, in the norm that reads them, adds the same numbers in the same order.
GPUs that reach each other's memory do both in one launch, and gather small pieces so (`parallel/peer_memory.py`). Large
shares, of long prompts on GPUs, are added by NCCL, which sends one result to all ranks. A process group is an object of
its own here, not the default one of the process, so that a process can have several, one after the other.

With `--exactness bits` a sum over ranks is one sum, whatever its rows and whoever brings the shares. Each share is
rounded to the dtype in which it is sent. They are added in float32, from the first rank's to the last's, then to what
they are added to, and that is rounded once. The library adds nothing. Large shares of four ranks and more are not
gathered: each rank adds up a part of the numbers, and sends that to all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store

from treetop.kernels.comm.peers import adds, gathers
from treetop.kernels.fused import joined_in_order
from treetop.parallel.peer_memory import PeerExchange, PeerShare, reach_peers
from treetop.types.errors import ConfigError, EngineError
from treetop.types.parallel import Summed

SMALL = 2**20
"""Bytes up to which shares are gathered and added where they are read; more are added by the library on their way."""
_MANY_RANKS = 4
"""From so many on gathering a large share in 16 bits takes more than what is added on its way, in float32."""
START_S = 600.0
"""Seconds until a rank must answer while the group starts: ranks load weights and compile at their own pace."""
RENDEZVOUS_S = 120.0
"""Seconds until all ranks must have met."""
_LEAVE_S = 10.0
"""Seconds that the library may take to give back what a group held."""

Gather = Callable[[Tensor, Tensor], None]
"""(out, piece): fills out [size, ...] with the pieces [...] of the ranks, in their order."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a group find each other. file: in a folder of the owner's alone, of this group alone."""

    file: Path
    rank: int
    size: int


Swap = Callable[[Tensor, Tensor], None]
"""(out, pieces): fills out [size, ...] with what each rank has for this one; pieces [size, ...]: what this one has."""
Reduce = Callable[[Tensor], None]
"""(share): adds up the shares of all ranks in place, to the same bytes everywhere."""


class ExchangeRank:
    """A `Parallel` of three operations.

    reduce: None if the library's is not the same on all ranks. exact: the dtype in which shares are sent where a row's
    bits are to depend on it alone, None where they need not.

    peers: what is exchanged by memory, None for nothing.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, gather: Gather, swap: Swap, reduce: Reduce | None = None,
        exact: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self._device = rank, size, device
        self._gather, self._swap, self._reduce, self._exact = gather, swap, reduce, exact
        self.peers: PeerExchange | None = None

    def sum(self, parts: Tensor) -> Tensor:
        """The ranks' shares, in the order of the ranks: whoever adds them adds the same numbers in the same order."""
        if self._exact is not None:
            return self._exact_sum(joined_in_order(parts).to(self._exact))
        share = parts[0] if parts.shape[0] == 1 else parts.sum(dim=0)
        if self._reduce is None or share.nbytes <= SMALL:
            return self.gather(share)
        share = share.contiguous()
        self._reduce(share)
        return share[None]

    def _exact_sum(self, share: Tensor) -> Tensor:
        """The shares in the order of the ranks, or of many large ones the sum of these in that order, in float32."""
        if self.size < _MANY_RANKS or share.nbytes <= SMALL or share.numel() % self.size:
            return self.gather(share)
        own = joined_in_order(self.all_to_all(share.reshape(self.size, -1)))
        return self.gather(own).view(1, *share.shape)

    def share(self, parts: Tensor) -> Summed:
        """See `Parallel`."""
        if self.peers is None or not adds(parts):
            return self.sum(parts)
        return PeerShare(parts, self.peers, self)

    def gather(self, piece: Tensor) -> Tensor:
        out, piece = piece.new_empty((self.size, *piece.shape)), piece.contiguous()
        if self.peers is None or not gathers(piece.view(-1)):
            self._gather(out, piece)
        else:
            self.peers.gather(out.view(self.size, -1), piece.view(-1))
        return out

    def join(self, piece: Tensor) -> Tensor:
        if self.peers is None or not gathers(piece := piece.contiguous()):
            return self.gather(piece).movedim(0, -2).flatten(-2).contiguous()  # pieces one wide would be a view
        out = piece.new_empty((*piece.shape[:-1], self.size, piece.shape[-1]))
        self.peers.gather(out, piece)
        return out.flatten(-2)

    def all_to_all(self, pieces: Tensor) -> Tensor:
        out = torch.empty_like(pieces, memory_format=torch.contiguous_format)
        self._swap(out, pieces.contiguous())
        return out

    def minimum(self, number: int) -> int:
        return int(self.gather(torch.tensor(number, device=self._device)).min())

    def record(self) -> Tensor | None:
        return None if self.peers is None else self.peers.mail.record


class Group:
    """A process group. `close` ends waiting of this rank, on whatever thread it waits, where the library can.

    parallel: this rank. deadline: seconds until the others must answer, from now on.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        peer_memory: bool = False,
        exact: torch.dtype | None = None,
    ) -> None:
        """Waits until all ranks have come. Raises ConfigError if PyTorch was built without what the device needs.

        peer_memory: GPUs exchange what is small by writing into each other's memory, if all of them can. exact: see
        `ExchangeRank`.
        """
        if not rendezvous.file.parent.is_dir():
            raise EngineError(f"the group has ended: {rendezvous.file.parent} is gone")  # FileStore would wait for it
        store = FileStore(str(rendezvous.file), rendezvous.size)
        store.set_timeout(timedelta(seconds=RENDEZVOUS_S))
        self._group: Any = _nccl(store, rendezvous) if device.type == "cuda" else _gloo(store, rendezvous)
        self._closing = Lock()
        self._leaving: Thread | None = None
        self._gpu, self._seconds = device.type == "cuda", START_S
        gather, swap = (
            (self._gather_on_gpu, self._swap_on_gpu) if self._gpu else (self._gather_on_cpu, self._swap_on_cpu)
        )
        reduce = self._reduce_on_gpu if self._gpu else None
        self.parallel = ExchangeRank(rendezvous.rank, rendezvous.size, device, gather, swap, reduce, exact)
        self.parallel.minimum(0)  # the library connects at the first exchange of a kind, which cannot be recorded
        self.parallel.all_to_all(torch.zeros((rendezvous.size, 1), device=device))
        if self._gpu and peer_memory:
            self.parallel.peers = reach_peers(self.parallel, torch.device("cuda", torch.cuda.current_device()))
        self.set_deadline(START_S)

    def set_deadline(self, seconds: float) -> None:
        """The host waits so long for the others, from now on; on a GPU it does not wait, but kernels do."""
        self._seconds = seconds
        if not self._gpu:
            self._group._set_default_timeout(timedelta(seconds=seconds))
        if self.parallel.peers is not None:
            self.parallel.peers.set_deadline(seconds)

    def close(self, patience_s: float = _LEAVE_S) -> None:
        """Leave the group: kernels that wait for others end. Any number of times, from any thread.

        The library ends them at once, then waits until no captured graph holds a kernel of its own, which are to be
        released first (`Engine.release`). patience_s: how long to wait for it, on a GPU.
        """
        if not self._gpu:
            return
        with self._closing:
            if self._leaving is None:
                if self.parallel.peers is not None:
                    self.parallel.peers.close()
                self._leaving = Thread(target=self._group.abort, name="treetop-leave", daemon=True)
                self._leaving.start()
        self._leaving.join(patience_s)

    def _gather_on_cpu(self, out: Tensor, piece: Tensor) -> None:
        self._wait(lambda: self._group.allgather([[*out.unbind(0)]], [piece]))

    def _swap_on_cpu(self, out: Tensor, pieces: Tensor) -> None:
        self._wait(lambda: self._group.alltoall_base(out, pieces, [], []))

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise EngineError("a rank has left while others waited for it") from error
            late = f"a rank did not answer in {self._seconds:g} s; raise --step-timeout if it needs longer"
            raise EngineError(late) from error

    def _gather_on_gpu(self, out: Tensor, piece: Tensor) -> None:
        self._group._allgather_base(out, piece).wait()  # the stream waits, not the host

    def _swap_on_gpu(self, out: Tensor, pieces: Tensor) -> None:
        self._group.alltoall_base(out, pieces, [], []).wait()

    def _reduce_on_gpu(self, share: Tensor) -> None:
        self._group.allreduce([share]).wait()


def _gloo(store: Store, rendezvous: Rendezvous) -> object:
    if not dist.is_gloo_available():
        raise ConfigError(f"{rendezvous.size} ranks: this PyTorch has no gloo, which ranks on a CPU need")
    gloo: Any = dist.ProcessGroupGloo  # whose stubs lack what it is made of
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # nobody else's network
    options._timeout = timedelta(seconds=START_S)
    return gloo(store, rendezvous.rank, rendezvous.size, options)


def _nccl(store: Store, rendezvous: Rendezvous) -> object:
    if not dist.is_nccl_available():
        raise ConfigError(f"{rendezvous.size} ranks: this PyTorch has no NCCL, which ranks on GPUs need")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=30)  # past it PyTorch would end the process; who waits has a deadline of its own
    return dist.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.size, options)
