"""Tensors that another process hands over, in the place of a folder's files: by CUDA IPC, or after a broadcast."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from treetop.checkpoints.checkpoint import Expected, all_finite
from treetop.checkpoints.handles import MAX_SIZE, check_handle
from treetop.types.changes import IpcHandle, SentTensors
from treetop.types.errors import CheckpointError, InputError, shown
from treetop.weights.format import Fetch, Span

Broadcast = Callable[[Tensor], None]
"""Fills a tensor with what a trainer sends."""
_KINDS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""dtypes, as safetensors calls them."""


def dtype_of(name: str) -> torch.dtype:
    """Raises InputError for none that a tensor may have. name: also with `torch.` before it."""
    name = name.removeprefix("torch.")
    if name not in _KINDS:
        raise InputError(f"dtypes: {shown(name)} is none of {', '.join(_KINDS)}")
    return getattr(torch, name)  # type: ignore[no-any-return]  # a dtype by its name


def sent_bytes(sent: SentTensors) -> int:
    """What a rank has to have for them: nothing for what lies elsewhere."""
    if not sent.group:
        return 0
    return sum(prod(shape) * dtype_of(dtype).itemsize for shape, dtype in zip(sent.shapes, sent.dtypes, strict=True))


def ipc_tensors(tensors: Mapping[str, Tensor]) -> SentTensors:
    """Where contiguous tensors on a GPU lie, for an engine on the same machine.

    The caller keeps them, unchanged, until the engine has answered. Raises InputError for what is not on a GPU.
    """
    from torch.multiprocessing.reductions import reduce_tensor  # noqa: PLC0415  # starts a thread for files

    handles = list[tuple[IpcHandle, ...]]()
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            raise InputError(f"tensors: {shown(name)} is on {tensor.device}; CUDA IPC hands over what is on a GPU")
        _, (_, _, stride, offset, _, _, device, *storage, _, counter, at, event, sync) = reduce_tensor(tensor.detach())
        handle, size, start = storage
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handles.append((IpcHandle(uuid, offset, tuple(stride), handle, size, start, counter, at, event, sync),))
    dtypes = tuple(str(each.dtype).removeprefix("torch.") for each in tensors.values())
    shapes = tuple(tuple(each.shape) for each in tensors.values())
    return SentTensors((*tensors,), dtypes, shapes, handles=tuple(handles))


def received(sent: SentTensors, device: torch.device, broadcast: Broadcast | None) -> dict[str, Tensor]:
    """The tensors, on the device where they are broadcast, or where they lie.

    broadcast: of the group that `sent` names, if it does.

    Raises InputError for a dtype or a handle that cannot be read here; before that nothing has been received.
    """
    dtypes = [dtype_of(each) for each in sent.dtypes]
    if not all(0 <= size < MAX_SIZE for shape in sent.shapes for size in shape):
        raise InputError(f"shapes: sizes of tensors are from 0 to {MAX_SIZE - 1}")
    for handles in sent.handles:
        for each in handles:
            check_handle(each)
    found, named = dict[str, Tensor](), zip(sent.names, dtypes, sent.shapes, strict=True)
    if broadcast is None:
        opened = zip(named, sent.handles, strict=True)
        return {name: _opened(handles, dtype, shape) for (name, dtype, shape), handles in opened}
    for name, dtype, shape in named:
        found[name] = torch.empty(shape, dtype=dtype, device=device)
        broadcast(found[name])
    return found


def _opened(handles: tuple[IpcHandle, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Another process's tensor, on the nearest GPU that it has a handle of."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor  # noqa: PLC0415  # likewise

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    order = sorted(range(count), key=lambda index: index != torch.cuda.current_device())
    for index in order:
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        for each in handles:
            if each.device_uuid == uuid:
                return rebuild_cuda_tensor(  # type: ignore[no-any-return]  # says nothing of types
                    *(Tensor, torch.Size(shape), each.stride, each.offset, torch.storage.TypedStorage, dtype, index),
                    *(each.handle, each.storage_size_bytes, each.storage_offset_bytes, False),
                    *(each.ref_counter_handle, each.ref_counter_offset, each.event_handle, each.event_sync_required),
                )
    theirs = ", ".join(sorted({each.device_uuid for each in handles})) or "none"
    raise InputError(f"handles: of GPU {theirs}, which this engine does not see; send the tensors by a broadcast")


def copies_of(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """On a device. They have been made when this returns: whoever has the tensors may change them then."""
    copies = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return copies


@contextmanager
def open_sent(
    tensors: Mapping[str, Tensor], where: object, expected: Expected, ignored: Collection[str], device: torch.device
) -> Iterator[Fetch]:
    """As `checkpoint.open_tensors`, of tensors that are there. where: of which folder they are instead, for errors."""
    wanted = {name for name, each in expected.items() if each.read}
    missing = sorted(wanted - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys() - set(ignored))
    about = f"tensors sent for {where}"
    if missing:
        raise CheckpointError(f"{about}: missing tensor {missing[0]}, of {len(missing)} that are")
    if unexpected:
        raise CheckpointError(f"{about}: unexpected tensor {unexpected[0]}, of {len(unexpected)} that are")
    for name in sorted(wanted):
        tensor, stored = tensors[name], expected[name]
        kind = _KINDS[str(tensor.dtype).removeprefix("torch.")]
        if tuple(tensor.shape) not in (stored.shape, *stored.others):
            raise CheckpointError(f"{about}: tensor {name} has shape {tuple(tensor.shape)}, expected {stored.shape}")
        if kind not in stored.kinds:
            raise CheckpointError(f"{about}: tensor {name} is {kind}, expected {' or '.join(stored.kinds)}")
        if tensor.is_floating_point() and not all_finite(tensor):
            raise CheckpointError(f"{about}: tensor {name} holds NaN or infinite values")

    def fetch(name: str, span: Span | None) -> Tensor:
        whole = tensors[name]
        part = whole if span is None else whole.narrow(span.axis, span.start, span.stop - span.start)
        return part.to(device)

    yield fetch
