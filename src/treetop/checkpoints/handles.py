"""What a handle of another process's memory may say: PyTorch takes it as it is, and its numbers for addresses.

Sources: `c10/cuda/CUDACachingAllocator.cpp` and `torch/csrc/CudaIPCTypes.h` of PyTorch.
"""

from treetop.types.changes import IpcHandle
from treetop.types.errors import InputError

MAX_SIZE = 2**40
"""No size, stride or offset of a tensor is as large."""
NUM_COUNTERS = 10_000
"""Of a file of them, in which PyTorch counts who reads a storage."""
_CUDA_BYTES = 64
"""Of a handle of memory and of an event, as CUDA gives it."""
_SEGMENT = b"e"
"""The second byte of a handle of memory that can grow, which is longer; any other's is as long as CUDA's and 2 more."""


def check_handle(handle: IpcHandle) -> None:
    """Raises InputError for what names no memory, or some beside it."""
    sizes = {
        "offset": (handle.offset,),
        "stride": handle.stride,
        "storage_size_bytes": (handle.storage_size_bytes,),
        "storage_offset_bytes": (handle.storage_offset_bytes,),
    }
    for name, values in sizes.items():
        if not all(0 <= each < MAX_SIZE for each in values):
            raise InputError(f"handles: {name}: from 0 to {MAX_SIZE - 1}")
    if not 0 <= handle.ref_counter_offset < NUM_COUNTERS:
        raise InputError(f"handles: ref_counter_offset: from 0 to {NUM_COUNTERS - 1}")
    if len(handle.event_handle) != _CUDA_BYTES:
        raise InputError(f"handles: event_handle: {len(handle.event_handle)} bytes, must be {_CUDA_BYTES}")
    size, grows = len(handle.handle), handle.handle[1:2] == _SEGMENT
    if size < 2 + _CUDA_BYTES if grows else size != 2 + _CUDA_BYTES:
        raise InputError(f"handles: handle: {size} bytes, must be {2 + _CUDA_BYTES}")
