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

from treetop.drafts.protocol import DrafterSpec
from treetop.engine.buffers import Zeros
from treetop.types.layout import Layout

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


def record_fields(layout: Layout, drafter: DrafterSpec | None, dtype: torch.dtype) -> tuple[RecordField, ...]:
    """The table. dtype: the engine's.

    committed: tokens whose K/V are in the pages of every group. root: the token after them, whose K/V are in none. With
    a drafter, what the next tree grows from: tokens and their log-probabilities, and the state they were made of. Of
    recurrent layers the convolution and the state, with nothing pending.
    """
    long, k = torch.int64, layout.max_topk
    fields = [RecordField("committed", (), long), RecordField("root", (), long)]
    if drafter is not None:
        fields.append(RecordField("tokens", (k,), long))
        fields.append(RecordField("logprob", (k,), torch.float32))
        fields.append(RecordField("hidden", (drafter.state_size,), drafter.state_dtype or dtype))
    for group in layout.state_groups:
        wide = torch.promote_types(dtype, torch.float32)
        own = (
            RecordField(f"conv.{group.name}", (group.num_layers, *group.conv_shape), dtype),
            RecordField(f"state.{group.name}", (group.num_layers, *group.state_shape), wide),
        )
        fields += [each for each in own if each.num_bytes]
    return tuple(fields)


def record_bytes(fields: Iterable[RecordField]) -> int:
    """Of a packed record, filled up to whole words."""
    return -(-sum(field.num_bytes for field in fields) // _WORD) * _WORD


@dataclass(frozen=True, slots=True)
class RowRecord:
    """The tables of all rows: each field's name -> [num_rows, *shape]. A record is one row of all, side by side."""

    fields: tuple[RecordField, ...]
    tables: Mapping[str, Tensor]

    @classmethod
    def make(
        cls, fields: tuple[RecordField, ...], num_rows: int, zeros: Zeros, given: Mapping[str, Tensor]
    ) -> "RowRecord":
        """given: tables that are there already, by name."""
        tables = {}
        for field in fields:
            shape = (num_rows, *field.shape)
            tables[field.name] = given[field.name] if field.name in given else zeros(shape, field.dtype)
        return cls(fields, tables)

    @property
    def num_bytes(self) -> int:
        return record_bytes(self.fields)

    def pack(self, row: int) -> Tensor:
        """A row's record, [num_bytes] uint8."""
        parts = [self.tables[field.name][row].reshape(-1).view(torch.uint8) for field in self.fields]
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
