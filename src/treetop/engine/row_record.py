"""What a row knows beside its pages, as one table of fields: the state's tables, and the record that is transferred.

Whoever makes, packs or unpacks a row's state goes by this table, so no field can be left out or taken for another.
Sampling is no part of it: a request brings its parameters and its seed, and a coin is a function of seed and position.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

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
    """The tables of all rows: each field's name -> [num_rows, *shape]. A record is one row of all, side by side."""

    tables: Mapping[str, Tensor]

    @property
    def fields(self) -> tuple[RecordField, ...]:
        return tuple(RecordField(name, tuple(table.shape[1:]), table.dtype) for name, table in self.tables.items())

    @property
    def num_bytes(self) -> int:
        """Of a packed record, filled up to whole words."""
        return -(-sum(field.num_bytes for field in self.fields) // _WORD) * _WORD

    def pack(self, row: int) -> Tensor:
        """A row's record, [num_bytes] uint8."""
        parts = [table[row].reshape(-1).view(torch.uint8) for table in self.tables.values()]
        packed = torch.cat(parts)
        return torch.nn.functional.pad(packed, (0, self.num_bytes - len(packed)))

    def unpack(self, row: int, record: Tensor, ok: Tensor) -> None:
        """Write a record [num_bytes] uint8 into a row, where `ok`, a bool on the device; else nothing changes."""
        for name, value in parts_of(self.fields, record).items():
            table = self.tables[name]
            table[row] = torch.where(ok, value, table[row])


def parts_of(fields: Iterable[RecordField], record: Tensor) -> dict[str, Tensor]:
    """What a record holds, by field. record: [num_bytes] uint8."""
    found, begin = {}, 0
    for field in fields:
        end = begin + field.num_bytes
        found[field.name] = record[begin:end].clone().view(field.dtype).view(field.shape)  # aligned, whatever begin is
        begin = end
    return found
