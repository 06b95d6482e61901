"""Numbers of a row that are its request's own, or follow from it: those that its tokens are chosen by, mostly.

One table for each kind of number, so that moving in costs the same however many options there are. A number that bears
the name of an option is that option: whoever adds one to `RowSamplingParams` or `LogitsProcessors` adds nothing here.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from treetop.engine.buffers import Zeros
from treetop.engine.features.feature import RowFeature
from treetop.kernels.sampling.process import LogitsProcessors
from treetop.kernels.sampling.sampling import RowSamplingParams
from treetop.types.messages import RowSetup
from treetop.types.sampling import SamplingParams, class_of

_ANY_VOCABULARY = 2**31 - 1
"""A larger top-k means the same."""
_ALIGNED = 16
"""Each number's column of a table begins at multiples of so many: kernels tell such addresses from others."""
_NEUTRAL = SamplingParams()
_OPTIONS = tuple(
    field.name
    for kernel in (RowSamplingParams, LogitsProcessors)
    for field in fields(kernel)
    if isinstance(getattr(_NEUTRAL, field.name, None), float)
)


def _may_end(setup: RowSetup) -> int:
    return 0 if setup.history is None else len(setup.history.prompt_ids) + setup.params.min_tokens


def is_active(setup: RowSetup) -> bool:
    """Whether a row changes logits; what is ruled out is in the masks of a constrained one."""
    return setup.history is not None and (not setup.constrained or setup.params.weighs)


_INTEGERS: dict[str, Callable[[RowSetup], int]] = {
    "seed": lambda setup: setup.seed,
    "top_k": lambda setup: min(max(setup.params.top_k, 0), _ANY_VOCABULARY),
    "classes": lambda setup: class_of(setup.params.temperature, setup.adapter),
    "may_end": _may_end,
    "adapter": lambda setup: setup.adapter,
}
_FLAGS: dict[str, Callable[[RowSetup], bool]] = {
    "active": is_active,
    "constrained": lambda setup: setup.constrained,
}


@dataclass(frozen=True, slots=True)
class RowNumbers(RowFeature):
    """integers, floats, flags: int64, float32, bool, a line a number; a line is `num_rows` and some more.

    lines: each number's, [num_rows], by name.
    """

    integers: Tensor
    floats: Tensor
    flags: Tensor
    lines: dict[str, Tensor]

    @classmethod
    def make(cls, num_rows: int, zeros: Zeros) -> "RowNumbers":
        """Those of a request that asks for nothing."""
        width, lines = -(-num_rows // _ALIGNED) * _ALIGNED, dict[str, Tensor]()

        def table(names: Sequence[str], dtype: torch.dtype) -> Tensor:
            made = zeros((len(names), width), dtype)
            lines.update(zip(names, made[:, :num_rows].unbind(), strict=True))
            return made

        numbers = cls(
            table([*_INTEGERS], torch.int64), table(_OPTIONS, torch.float32), table([*_FLAGS], torch.bool), lines
        )
        for name in _OPTIONS:
            lines[name].fill_(getattr(_NEUTRAL, name))
        return numbers

    def __getitem__(self, name: str) -> Tensor:
        return self.lines[name]

    @property
    def params(self) -> RowSamplingParams:
        return RowSamplingParams(*(self[field.name] for field in fields(RowSamplingParams)))

    def columns(self, setups: Sequence[RowSetup]) -> list[Sequence[int]]:
        return [
            [number(setup) for number in _INTEGERS.values() for setup in setups],
            [_bits(getattr(setup.params, name)) for name in _OPTIONS for setup in setups],
            [int(flag(setup)) for flag in _FLAGS.values() for setup in setups],
        ]

    def move_in(self, rows: Tensor, setups: Sequence[RowSetup], columns: Iterator[Tensor]) -> None:
        self.integers[:, rows] = next(columns).view(-1, len(rows))
        self.floats[:, rows] = next(columns).view(torch.float64).view(-1, len(rows)).to(torch.float32)
        self.flags[:, rows] = next(columns).view(-1, len(rows)).to(torch.bool)


def _bits(number: float) -> int:
    """The bits of a float64, as an int64."""
    return int(struct.unpack("q", struct.pack("d", number))[0])
