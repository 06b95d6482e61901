"""Memory on the host that a GPU copies to and from, pinned where it lies.

PyTorch's allocator of pinned memory rounds what it is asked for up to a power of two. Here memory is mapped, then
registered with the driver (`cudaHostRegister`), so it takes what it holds and no more than a page of the machine above.
It stays mapped while it is registered: the driver would send copies of the next that lies at this address to the pages
that were there before.
What cannot be registered, for the limit of locked memory or for want of it, is used as it is: copies take longer and
hold up the host, and bytes are the same. It is registered with the next that is made.
"""

import logging
import mmap
from collections.abc import Callable
from weakref import finalize

import torch
from torch import Tensor

log = logging.getLogger("treetop")

Pin = Callable[[int, int], bool]
"""Register so many bytes at an address. Whether that went well."""
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU


def pinning(device: torch.device) -> tuple[Pin, Callable[[int], object]]:
    """How memory is pinned for a GPU, and how that ends. Errors stay on the thread that asked."""
    runtime = torch.cuda.cudart()

    def pin(address: int, num_bytes: int) -> bool:
        with torch.cuda.device(device):
            return int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)) == 0

    return pin, runtime.cudaHostUnregister


class PinnedMemory:
    """What has been made, in order, and which of it is pinned. One thread makes; another may use what is made."""

    def __init__(self, pin: Pin | None, unpin: Callable[[int], object] = lambda address: None) -> None:
        """pin: None where nothing is to be pinned."""
        self._pin, self._unpin = pin, unpin
        self._pinned: dict[int, Tensor] = {}
        self._loose: dict[int, Tensor] = {}
        self._warned = False
        self._end = finalize(self, _unpin_all, self._pinned, unpin)
        self._end.atexit = False

    @property
    def num_loose_bytes(self) -> int:
        """Of memory that is used without being pinned, though it should be."""
        return sum(each.numel() for each in self._loose.values())

    def make(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, zero. Raises OSError if there is no such memory."""
        made = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        if self._pin is not None:
            self._loose[made.data_ptr()] = made
            self._register(self._pin)
        return made

    def _register(self, pin: Pin) -> None:
        """All that is loose, the newest first: what fails ends it, and the next that is made tries again."""
        for address, memory in reversed([*self._loose.items()]):
            if not pin(address, memory.numel()):
                if not self._warned:
                    log.warning(
                        "%d bytes on the host cannot be pinned (`ulimit -l`?): copies of the tier take longer until"
                        " they can",
                        memory.numel(),
                    )
                self._warned = True
                return
            self._pinned[address] = self._loose.pop(address)

    def release(self) -> None:
        """Nothing is pinned any more; nothing may be on its way."""
        _unpin_all(self._pinned, self._unpin)


def _unpin_all(pinned: dict[int, Tensor], unpin: Callable[[int], object]) -> None:
    while pinned:
        address = next(iter(pinned))
        unpin(address)
        del pinned[address]
