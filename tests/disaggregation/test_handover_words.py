"""What a chunk of a request takes in a slot."""

import random

import pytest

from treetop.types.errors import CapacityError
from treetop.types.ids import DRAFT, FULL, WINDOW
from treetop.types.kv import paired
from treetop.types.kv_chunk import ALIGNMENT, KVChunk
from treetop.types.kv_transfer.layout import ChunkLayout, Schema
from treetop.types.layout import KVGroup


def _layout(rng: random.Random) -> ChunkLayout:
    groups = [KVGroup(FULL, rng.randint(1, 4), paired(rng.randint(1, 4), rng.choice((1, 3, 8))))]
    if rng.random() < 0.7:
        groups.append(KVGroup(WINDOW, 2, paired(2, 5), rng.randint(1, 40)))
    if rng.random() < 0.7:
        groups.append(KVGroup(DRAFT, 1, paired(1, 4)))
    return ChunkLayout(tuple(groups), rng.choice((2, 4, 8)), rng.randint(1, 99))


def test_segments_are_aligned_do_not_overlap_and_fill_what_is_counted() -> None:
    """Every byte of every head has one place, and as many tokens as a slot is said to hold fit into it."""
    rng = random.Random(1)
    for _ in range(300):
        layout, slot_bytes = _layout(rng), rng.randint(3000, 20_000)
        maximum = layout.tokens_per_slot(slot_bytes)
        count, total = rng.randint(1, maximum), rng.randint(maximum, 3 * maximum)
        start = rng.choice((0, total - count, rng.randint(0, total - count)))
        chunk, end = KVChunk(start, count, total), 0
        segments = layout.segments(chunk)
        for segment in segments:
            assert segment.offset % ALIGNMENT == 0
            assert 0 <= segment.offset - end < ALIGNMENT
            end = segment.offset + segment.num_bytes
        assert end <= layout.num_bytes(chunk) <= slot_bytes
        assert len(segments) == sum(group.kv.heads for group in layout.groups) + chunk.last
        for group in layout.groups:
            mine = [each.num_bytes for each in segments if each.group == group.name]
            sent = chunk.end - chunk.first_seen(group.window)
            assert mine == [sent * layout.itemsize * group.numbers_per_token // group.kv.heads] * group.kv.heads


def test_chunks_of_a_request_bring_each_token_that_a_query_after_it_can_see_once() -> None:
    rng = random.Random(2)
    for _ in range(300):
        total, window, at = rng.randint(1, 60), rng.randint(1, 70), 0
        seen: list[int] = []
        while at < total:
            chunk = KVChunk(at, rng.randint(1, total - at), total)
            seen += range(chunk.first_seen(window), chunk.end)
            at = chunk.end
        assert seen == list(range(max(0, total - window + 1), total))


def test_a_slot_that_holds_no_token_is_refused_by_its_option() -> None:
    layout = ChunkLayout((KVGroup(FULL, 4, paired(2, 64)),), 2, 1000)
    with pytest.raises(CapacityError, match="--disaggregation-slot-bytes"):
        layout.tokens_per_slot(2000)


def test_a_schema_names_the_first_field_that_differs() -> None:
    one = Schema(1, "a", "b", "bfloat16", ("full",), ("root",), (4, 5, 16), 1000, 4096, "ties")
    assert one.difference(one) is None
    assert one.difference(one._replace(draft="c", dtype="float16")) == "draft: b here, c there"
    assert one.difference(one._replace(exactness="bits")) == "exactness: ties here, bits there"
    assert one.difference(one._replace(shape=(4, 5, 17))).startswith("shape: ")
