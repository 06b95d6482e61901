"""What a row knows beside its pages, as one table of fields: the state's tables, and the record that is transferred.

Whoever makes, packs or unpacks a row's state goes by this table, so no field can be left out or taken for another.
Sampling is no part of it: a request brings its parameters and its seed, and a uniform is a function of seed and
    position.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from treetop.types.parallel import SINGLE_RANK, Parallel

_WORD = 4
"""Bytes: a record is as many words, for its checksum."""


class RecordField(NamedTuple):
    """One number, or row of numbers, a row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def words(self) -> str:
        """For a reader, and for a comparison of two workers."""
        return f"{self.name}: {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class RowRecord:
    """The tables of all rows: each field's name -> [num_rows, *shape]. A record is one row of all, side by side.

    shared: fields [num_rows, layers, width, ...] of which each rank has a share of the width: a part of each of some
        parts, whose widths here these are. A record holds what all ranks have, so that a worker of any number of ranks
        can read it; packing and unpacking are then collective.
    """

    tables: Mapping[str, Tensor]
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parallel: Parallel = SINGLE_RANK

    @property
    def fields(self) -> tuple[RecordField, ...]:
        """Of all ranks together."""
        return tuple(self._field(name, table) for name, table in self.tables.items())

    @property
    def num_bytes(self) -> int:
        """Of a packed record, filled up to whole words."""
        return -(-sum(field.num_bytes for field in self.fields) // _WORD) * _WORD

    def pack(self, row: int) -> Tensor:
        """A row's record, [num_bytes] uint8."""
        parts = [self._of_all(name, row).reshape(-1).view(torch.uint8) for name in self.tables]
        packed = torch.cat(parts)
        return torch.nn.functional.pad(packed, (0, self.num_bytes - len(packed)))

    def unpack(self, row: int, record: Tensor, ok: Tensor) -> None:
        """Write a record [num_bytes] uint8 into a row, where `ok`, a bool on the device; else nothing changes."""
        for name, value in parts_of(self.fields, record).items():
            table = self.tables[name]
            table[row] = torch.where(ok, self.own(name, value), table[row])

    def own(self, name: str, value: Tensor) -> Tensor:
        """This rank's share of a field's value."""
        if name not in self.shared:
            return value
        rank, size, widths = self.parallel.rank, self.parallel.size, self.shared[name]
        parts = value.split([size * width for width in widths], dim=1)
        return torch.cat(
            [part.narrow(1, rank * width, width) for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def _of_all(self, name: str, row: int) -> Tensor:
        """A field of a row, of all ranks."""
        value = self.tables[name][row]
        if name not in self.shared or self.parallel.size == 1:
            return value
        pieces = self.parallel.gather(value.contiguous()).split(list(self.shared[name]), dim=2)
        return torch.cat([piece.movedim(0, 1).flatten(1, 2) for piece in pieces], dim=1)

    def _field(self, name: str, table: Tensor) -> RecordField:
        shape = list(table.shape[1:])
        if name in self.shared:
            shape[1] *= self.parallel.size
        return RecordField(name, tuple(shape), table.dtype)


def parts_of(fields: Iterable[RecordField], record: Tensor) -> dict[str, Tensor]:
    """What a record holds, by field. record: [num_bytes] uint8."""
    found, begin = {}, 0
    for each in fields:
        end = begin + each.num_bytes
        found[each.name] = record[begin:end].clone().view(each.dtype).view(each.shape)  # aligned, whatever begin is
        begin = end
    return found
