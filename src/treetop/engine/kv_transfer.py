"""Staging slots of a rank, and the steps that pack chunks of requests into them and unpack chunks from them.

Pages never meet the network: others read and write these slots alone. Every rank moves its own KV heads; what the ranks
find of them is gathered, so that each rank comes to the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from treetop.engine.features.feature import NewRoots
from treetop.engine.model_runner import ModelRunner
from treetop.engine.row_record import parts_of
from treetop.engine.staging import HostResults, RowResults
from treetop.kernels.comm.kv_chunks import ChunkSpan, checksum
from treetop.kernels.kv import moved
from treetop.types.errors import CheckError
from treetop.types.kv_chunk import KVChunk
from treetop.types.kv_transfer.layout import ChunkLayout, Segment, first_head
from treetop.types.layout import KVGroup
from treetop.types.messages import Export, ExportPlan, Import, ImportPlan, ImportResult
from treetop.types.parallel import Parallel
from treetop.types.sampling import SamplingMode

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


class Move(Protocol):
    """`pack` or `unpack` of the table of operations."""

    def __call__(self, slot: Tensor, pool: Tensor, table: Tensor, span: ChunkSpan, sums: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class KVTransferSpec:
    """What slots hold.

    own: layout of this rank.
    whole: as one rank alone has it, whose checksums travel.

    sources: of each segment of `whole` but the record's, the rank that has it and its place among that rank's.
    """

    own: ChunkLayout
    whole: ChunkLayout
    sources: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, own: Sequence[KVGroup], whole: Sequence[KVGroup], itemsize: int, record_bytes: int, ranks: int
    ) -> "KVTransferSpec":
        """own, whole: the KV groups of a rank, and of one rank alone."""
        begins = [0, *accumulate(group.kv.heads for group in own)]
        sources = []
        for begin, mine, group in zip(begins, own, whole, strict=False):
            for head in range(group.kv.heads):  # of several ranks that share a head the first is as good as any
                rank = next(r for r in range(ranks) if head - first_head(group, r, ranks) in range(mine.kv.heads))
                sources.append((rank, begin + head - first_head(group, rank, ranks)))
        mine_alone, all_of = (ChunkLayout(tuple(groups), itemsize, record_bytes) for groups in (own, whole))
        return cls(mine_alone, all_of, tuple(sources))

    @property
    def num_own(self) -> int:
        """Segments of a last chunk of this rank's, the record the last."""
        return sum(group.kv.heads for group in self.own.groups) + 1

    @property
    def num_whole(self) -> int:
        return len(self.sources) + 1

    def own_checksums(self, checksums: Sequence[int], chunk: KVChunk, rank: int, ranks: int) -> list[int] | None:
        """This rank's part of a chunk's checksums, 0 for a record that does not come; None if they cannot be right."""
        if len(checksums) != self.num_whole - (not chunk.last) or not all(_LOWEST <= c <= _HIGHEST for c in checksums):
            return None
        found: list[int] = []
        begin = 0
        for mine, group in zip(self.own.groups, self.whole.groups, strict=True):
            first = begin + first_head(group, rank, ranks)
            found += checksums[first : first + mine.kv.heads]
            begin += group.kv.heads
        return [*found, checksums[-1] if chunk.last else 0]


@dataclass(frozen=True, slots=True)
class StagingSlots:
    """memory: [slots, slot_bytes] uint8, made once, so that a transport can register it."""

    spec: KVTransferSpec
    memory: Tensor

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


# ---------------------------------------------------------------- device


def export_chunks(runner: ModelRunner, slots: StagingSlots, plan: ExportPlan) -> RowResults:
    """Pack chunks into slots. As results, a chunk a row: tokens: checksums of all ranks; finite: see `_same_record`."""
    sums = _no_sums(slots, plan.exports)
    sound = torch.ones_like(sums[:, 0], dtype=torch.bool)
    for i, export in enumerate(plan.exports):
        _move(runner, slots, export, runner.ops.pack, sums[i])
        segment = _record_segment(slots, export.chunk)
        if segment is not None:
            if runner.layout.state_groups:
                runner.state.states.fold(runner.ops, runner.state.committed.new_tensor([export.row]))
            staged = _bytes_of(slots, export.slot, segment)
            staged.copy_(runner.state.record.pack(export.row))
            sums[i, -1] = checksum(staged.clone().view(torch.int32))
            sound[i] = _same_record(runner, export.row, staged)
    gathered = runner.ops.parallel.gather(sums).movedim(0, 1).flatten(1)
    return RowResults(gathered, gathered.new_zeros(len(sums)), _all_ranks(runner.ops.parallel, sound))


def import_chunks(
    runner: ModelRunner, slots: StagingSlots, plan: ImportPlan, expected: Tensor, known: Tensor, last_rows: Tensor
) -> RowResults:
    """Check and unpack chunks from slots; then write the rows of last chunks, whose requests have been set up.

    expected: [chunks, num_own] int64, checksums; known: [chunks] int64, 0 where there are none. last_rows: of last
    chunks, int64. As results, a chunk a row: tokens: the root, of a last chunk; accept_len: 1 if it is intact; finite:
    whether an intact record is in its row.
    """
    sums, staged = _no_sums(slots, plan.imports), dict[int, Tensor]()
    for i, each in enumerate(plan.imports):
        _clear_torn_pages(runner, slots, each)
        _move(runner, slots, each, runner.ops.unpack, sums[i])
        segment = _record_segment(slots, each.chunk)
        if segment is not None:
            staged[i] = _bytes_of(slots, each.slot, segment)
            sums[i, -1] = checksum(staged[i].clone().view(torch.int32))
    good = _all_ranks(runner.ops.parallel, (sums == expected).all(1) & (known != 0))
    roots, written = torch.zeros_like(known), torch.ones_like(good)
    for (i, record), row in zip(staged.items(), last_rows.unbind(), strict=True):
        each = plan.imports[i]
        good[i] &= _fits(runner, each.chunk, record)
        runner.state.record.unpack(each.row, record, good[i])
        written[i] = (runner.state.record.pack(each.row) == record).all() | ~good[i]
        roots[i] = _begin(runner, each, good[i], row.view(1))
    return RowResults(roots[:, None], good.to(torch.int64), written)


def _begin(runner: ModelRunner, each: Import, good: Tensor, row: Tensor) -> Tensor:
    """The root of a row [1] that has been imported, which is now known; 0 if it has not."""
    root, at = torch.where(good, runner.state.root[row], 0), torch.full_like(row, each.chunk.total)
    runner.state.rooted(runner.ops, NewRoots(SamplingMode.PROCESS, row, at, root, good.to(torch.int64).view(1) - 1))
    return root[0]


def _no_sums(slots: StagingSlots, moved: Sequence[Export | Import]) -> Tensor:
    """Room for the checksums of chunks, [chunks, num_own] int64."""
    return torch.zeros((len(moved), slots.spec.num_own), dtype=torch.int64, device=slots.memory.device)


def _move(runner: ModelRunner, slots: StagingSlots, moved: Export | Import, run: Move, sums: Tensor) -> None:
    """Run pack or unpack over all groups of a chunk. sums: [num_own], gets the checksum of each KV head."""
    spec, layout, chunk, begin = slots.spec, runner.layout, moved.chunk, 0
    segments = spec.own.segments(chunk)
    for group in spec.own.groups:
        mine, end = segments[begin : begin + group.kv.heads], begin + group.kv.heads
        first = chunk.first_seen(group.window)
        if first < chunk.end:
            stride = mine[1].offset - mine[0].offset if len(mine) > 1 else 0
            span = ChunkSpan(first, chunk.end - first, layout.page_size, mine[0].offset, stride)
            pool, table = runner.pools[group.name].data, runner.state.table_of(group.name).data[moved.row]
            run(slots.memory[moved.slot], pool, table, span, sums[begin:end])
        begin = end


def _clear_torn_pages(runner: ModelRunner, slots: StagingSlots, each: Import) -> None:
    """Zero what a window's first page holds before the first token that comes: masked, but read, and it may be NaN."""
    size = runner.layout.page_size
    for group in slots.spec.own.groups:
        first = each.chunk.first_seen(group.window)
        if group.window is not None and first == each.chunk.total - group.window + 1 and first % size:
            page = runner.state.table_of(group.name).data[each.row, first // size].to(torch.int64)
            torn = page * size + torch.arange(first % size, device=page.device)
            moved(runner.pools[group.name].data).index_fill_(1, torn, 0)


def _record_segment(slots: StagingSlots, chunk: KVChunk) -> Segment | None:
    """Where the record of a last chunk lies."""
    return slots.spec.own.segments(chunk)[-1] if chunk.last else None


def _bytes_of(slots: StagingSlots, slot: int, segment: Segment) -> Tensor:
    return slots.memory[slot, segment.offset : segment.offset + segment.num_bytes]


def _same_record(runner: ModelRunner, row: int, staged: Tensor) -> Tensor:
    """Whether each field of a packed record is the row's own, bit for bit."""
    record = runner.state.record
    bits = [
        (record.tables[name][row], record.own(name, value)) for name, value in parts_of(record.fields, staged).items()
    ]
    return torch.stack([(_bits(one) == _bits(two)).all() for one, two in bits]).all()


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def _fits(runner: ModelRunner, chunk: KVChunk, staged: Tensor) -> Tensor:
    """Whether a record is one of a prompt of this length, and its root a token."""
    parts = parts_of(runner.state.record.fields, staged)
    root = parts["root"]
    return (parts["committed"] == chunk.total) & (root >= 0) & (root < runner.target.config.vocab_size)


def _all_ranks(parallel: Parallel, flags: Tensor) -> Tensor:
    """What every rank says yes to. flags: bool."""
    return parallel.gather(flags.to(torch.int64)).amin(0) > 0


# ---------------------------------------------------------------- host


def import_columns(spec: KVTransferSpec, plan: ImportPlan, parallel: Parallel) -> list[list[int]]:
    """The inputs of an import, as columns of integers: checksums of this rank, known, rows of last chunks."""
    own = [spec.own_checksums(each.checksums, each.chunk, parallel.rank, parallel.size) for each in plan.imports]
    return [
        [number for each in own for number in each or [0] * spec.num_own],
        [int(each is not None) for each in own],
        [each.row for each in plan.imports if each.chunk.last],
    ]


def collect_exports(
    spec: KVTransferSpec, plan: ExportPlan, got: HostResults, check_level: int
) -> tuple[tuple[int, ...], ...]:
    """The checksums of each chunk, of the whole layout. Raises CheckError, at level 1, for a wrong record."""
    found = []
    for export, sums, sound in zip(plan.exports, got.tokens, got.finite, strict=True):
        if check_level >= 1 and not sound:
            raise CheckError(f"exported record: slot {export.slot} does not hold what row {export.row} has")
        heads = [sums[rank * spec.num_own + place] for rank, place in spec.sources]
        found.append((*heads, sums[spec.num_own - 1]) if export.chunk.last else tuple(heads))
    return tuple(found)


def collect_imports(plan: ImportPlan, got: HostResults, check_level: int) -> tuple[ImportResult, ...]:
    """Raises CheckError, at level 1, for a row that does not have what its slot held."""
    found = []
    for i, each in enumerate(plan.imports):
        if check_level >= 1 and not got.finite[i]:
            raise CheckError(f"imported record: row {each.row} does not have what slot {each.slot} held")
        intact = bool(got.accept_len[i])
        found.append(ImportResult(intact, got.tokens[i][0] if intact and each.chunk.last else None))
    return tuple(found)
