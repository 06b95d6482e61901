"""What this machine can do: how fast it copies, and how fast it multiplies. Floors are computed from both."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """bytes_per_s: read and written, by a copy.
    flop_per_s: of a large square matrix product in the engine's dtype.
    """

    name: str
    torch: str
    dtype: str
    bytes_per_s: float
    flop_per_s: float

    def sentence(self) -> str:
        return (
            f"{self.name}, torch {self.torch}, {self.dtype}: copies {self.bytes_per_s / 1e12:.3g} TB/s, multiplies"
            f" {self.flop_per_s / 1e12:.3g} TFLOP/s"
        )


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The best of a few copies and products, after one that is not timed."""
    gpu = device.type == "cuda"
    size, n = (2**31, 8192) if gpu else (2**27, 1024)
    copy_s, product_s = _copy_s(device, size), _product_s(device, dtype, n)
    name = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    words = str(dtype).removeprefix("torch.")
    return Machine(name, torch.__version__, words, 2 * size / copy_s, 2 * n**3 / product_s)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_s(device: torch.device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return _best_s(device, lambda: target.copy_(source))


def _product_s(device: torch.device, dtype: torch.dtype, n: int) -> float:
    a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return _best_s(device, lambda: torch.mm(a, b, out=out))


def _best_s(device: torch.device, run: Callable[[], object]) -> float:
    times = []
    for _ in range(1 + _REPEATS):
        synchronize(device)
        started_s = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started_s)
    return min(times[1:])
