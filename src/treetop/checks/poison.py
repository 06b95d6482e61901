"""Level 3: what must not be read holds values that show, and what must not be written is surrounded by red zones."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from treetop.types.errors import CheckError

_ZONE = 64
_PATTERN = 0xA5


def poison(tensor: Tensor) -> None:
    """NaN for floats, the smallest value for integers, True for flags: legal nowhere, or at least never by luck.

    Bytes have all bits set: whatever float lies in them is NaN.
    """
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.fill_(255)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


@dataclass(frozen=True, slots=True)
class RedZones:
    """Makes tensors between two zones of a fixed byte pattern, and checks that the zones are intact."""

    device: torch.device
    _zones: list[tuple[str, Tensor]] = field(default_factory=list)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A zeroed tensor of `shape` with a zone of 64 bytes on either side."""
        size = torch.empty((), dtype=dtype).element_size() * int(torch.Size(shape).numel())
        memory = torch.full((size + 2 * _ZONE,), _PATTERN, dtype=torch.uint8, device=self.device)
        memory[_ZONE : _ZONE + size].zero_()
        name = f"{tuple(shape)} {dtype}"
        self._zones.append((f"before {name}", memory[:_ZONE]))
        self._zones.append((f"after {name}", memory[_ZONE + size :]))
        return memory[_ZONE : _ZONE + size].view(dtype).view(shape)

    def check(self) -> None:
        """Raise CheckError naming the first buffer with a write beside it."""
        for name, zone in self._zones:
            if bool((zone != _PATTERN).any()):
                raise CheckError(f"red zone: a write landed {name}")
