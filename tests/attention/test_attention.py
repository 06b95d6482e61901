"""Conformance of attention backends: prefix + tail and causal equal attention written with loops."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from support.oracles import attention
from treetop.attention.contract import TailKV
from treetop.attention.tail import attend
from treetop.attention.torch_backend import TorchBackend
from treetop.kernels.attention.attention import tail_visible
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV, PageTable, commit_tail, slots_of, write_pages
from treetop.types.ids import FULL
from treetop.types.phase import Phase

DIM = 4


@dataclass
class Case:
    """A random batch: pages, extents, a tail with a tree mask, queries, and what each query may see."""

    metadata: AttentionMetadata
    kv: PagedKV
    tail: TailKV
    q: torch.Tensor
    kv_heads: int


def make_case(seed, page_size, window=None, *, heads=4, kv_heads=2, extents=(0, 1, 7, 16, 0), chunked=False) -> Case:
    """The last row is a padding row: null pages and nothing committed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows, n, t = len(extents), 3, 5
    max_kv_len = max(extents) + rng.randrange(3)
    columns = -(-(max_kv_len + 6) // page_size)
    pages = list(range(1, rows * columns + 1))
    rng.shuffle(pages)
    table = torch.tensor(pages, dtype=torch.int32).reshape(rows, columns)
    table[-1] = 0
    kv = PagedKV(normal((rows * columns + 1) * page_size, 2, kv_heads, DIM))
    kv.data[0] = 0
    kv_len = torch.tensor(extents)
    row_list = torch.tensor([*torch.randperm(rows - 1, generator=generator).tolist(), rows - 1])
    depth = torch.tensor([[rng.randrange(4) for _ in range(t)] for _ in range(rows)])
    tail_positions = kv_len[:, None] + depth
    chosen = torch.tensor([rng.sample(range(t), n) for _ in range(rows)])  # each query is a node of the tail
    mask = torch.rand((rows, n, t), generator=generator) < 0.4
    mask.scatter_(2, chosen[:, :, None], True)
    mask &= depth[:, None, :] <= depth.gather(1, chosen)[:, :, None]
    positions, pages = tail_positions.gather(1, chosen), PageTable(FULL, table)
    metadata = AttentionMetadata(
        Phase.VERIFY, pages, row_list, kv_len, max_kv_len, page_size, positions, window, tail_positions, mask, chunked
    )
    return Case(metadata, kv, TailKV(normal(rows, t, 2, kv_heads, DIM)), normal(rows, n, heads, DIM), kv_heads)


def slot(metadata, index, position):
    size = metadata.page_size
    return int(metadata.table.data[metadata.rows[index], position // size]) * size + position % size


def is_near(metadata, at, position):
    """Within the window, or the chunk, of a query at a position."""
    window = metadata.window
    if window is None:
        return True
    return at // window == position // window if metadata.chunked else at - position < window


def expected_row(case, index, column, head, *, parts=("prefix", "tail"), causal=False):
    """Keys and values that one query head sees, gathered one by one, and their attention."""
    at = int(case.metadata.positions[index, column])
    kv_head = head // (case.q.shape[2] // case.kv_heads)
    keys, values = [], []
    for position in range(int(case.metadata.kv_len[index])) if "prefix" in parts else ():
        if is_near(case.metadata, at, position) and (not causal or position <= at):
            place = slot(case.metadata, index, position)
            keys.append(case.kv.k[place, kv_head].tolist())
            values.append(case.kv.v[place, kv_head].tolist())
    for j in range(case.tail.k.shape[1]) if "tail" in parts else ():
        position = int(case.metadata.tail_positions[index, j])
        if case.metadata.mask[index, column, j] and is_near(case.metadata, at, position):
            keys.append(case.tail.k[index, j, kv_head].tolist())
            values.append(case.tail.v[index, j, kv_head].tolist())
    return attention(case.q[index, column, head].tolist(), keys, values, 0.6)


def expected(case, **options):
    rows, n, heads, dim = case.q.shape
    out, lse = torch.zeros(rows, n, heads, dim, dtype=torch.float64), torch.zeros(rows, n, heads, dtype=torch.float64)
    for index in range(rows):
        for column in range(n):
            for head in range(heads):
                values, total = expected_row(case, index, column, head, **options)
                out[index, column, head] = torch.tensor(values, dtype=torch.float64)
                lse[index, column, head] = total
    return out, lse


GRID = [
    (seed, page, window, heads, kv_heads)
    for seed, (page, window, heads, kv_heads) in enumerate(
        [(1, None, 4, 2), (4, None, 4, 4), (16, None, 6, 1), (4, 3, 4, 2), (16, 1, 4, 2), (1, 9, 2, 2), (64, 6, 4, 1)]
    )
]


CHUNKED = [(seed, page, window, heads, kv_heads) for seed, page, window, heads, kv_heads in GRID if window is not None]
NAMES = [f"page{g[1]}-window{g[2]}-heads{g[3]}-{g[4]}" for g in GRID] + [f"chunk{g[2]}" for g in CHUNKED]


@pytest.fixture(params=[*((g, False) for g in GRID), *((g, True) for g in CHUNKED)], ids=NAMES)
def case(request):
    (seed, page, window, heads, kv_heads), chunked = request.param
    return make_case(seed, page, window, heads=heads, kv_heads=kv_heads, chunked=chunked)


@pytest.fixture
def backend():
    return TorchBackend(torch.float64, torch.device("cpu"))


def test_prefix_and_tail_equal_attention_over_the_visible_keys(case, backend):
    """Committed keys within the extent and the window, and the tail's keys that mask and window show; no others."""
    plan = backend.plan(backend.begin(case.metadata), case.metadata)
    out = backend.prefix_tail(case.q, case.kv, plan, case.tail, 0.6)
    torch.testing.assert_close(out, expected(case)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("window", "chunked"), [(None, 0), (1, 0), (4, 0), (100, 0), (1, 1), (4, 1), (15, 1), (100, 1)]
)
@pytest.mark.parametrize("page", [1, 4, 16])
def test_causal_equals_attention_over_all_positions_up_to_the_query(backend, page, window, chunked):
    """A prefill query sees positions up to its own, no further back than its window or than where its chunk begins;
    position 0 is no exception."""
    case = make_case(page, page, window, extents=(9, 17, 30, 0), chunked=bool(chunked))
    positions = torch.tensor([[3, 7, 8], [14, 15, 16], [0, 1, 29], [0, 0, 0]])
    case.metadata = replace(case.metadata, positions=positions, tail_positions=None, mask=None)
    plan = backend.plan(backend.begin(case.metadata), case.metadata)
    out = backend.causal(case.q, case.kv, plan, 0.6)
    want, _ = expected(case, parts=("prefix",), causal=True)
    torch.testing.assert_close(out[:3], want[:3], rtol=1e-9, atol=1e-9)
    assert bool(torch.isfinite(out).all()), "a padding row must stay finite"


def test_a_window_is_applied_by_position_and_not_by_tail_column():
    """Siblings stand at one position: a window of 2 shows the parent of both, whatever columns lie between."""
    positions = torch.tensor([[10, 11, 11, 11, 12]])
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    metadata = make_case(0, 4, window=2).metadata
    seen = tail_visible(replace(metadata, positions=positions, tail_positions=positions, mask=mask))
    assert seen[0, 4].tolist() == [False, True, True, True, True]
    assert seen[0, 3].tolist() == [True, True, True, True, True]


def test_a_path_that_enters_a_chunk_sees_nothing_before_it():
    """Positions 10, 11 and 12 in chunks of 12: the last, first of its chunk, sees itself; a chunk of 4 cuts alike."""
    positions = torch.tensor([[10, 11, 11, 11, 12]])
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    for chunk in (12, 4):
        metadata = replace(make_case(0, 4, window=chunk).metadata, chunked=True)
        seen = tail_visible(replace(metadata, positions=positions, tail_positions=positions, mask=mask))
        assert seen[0, 4].tolist() == [False] * 4 + [True]
        assert seen[0, 3, :4].tolist() == [True] * 4


def test_an_empty_prefix_of_width_zero_is_legal(backend):
    """A batch in which nobody has anything committed, with a bound of 0, is attention over the tail alone."""
    case = make_case(5, 4, extents=(0, 0, 0))
    case.metadata = replace(case.metadata, max_kv_len=0)
    plan = backend.plan(backend.begin(case.metadata), case.metadata)
    out = backend.prefix_tail(case.q, case.kv, plan, case.tail, 0.6)
    torch.testing.assert_close(out, expected(case)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_what_lies_beyond_the_extent_is_never_read(backend, seed):
    """NaN in every slot outside the committed positions, the null slot apart, changes no bit."""
    case = make_case(seed, 4)
    plan = backend.plan(backend.begin(case.metadata), case.metadata)
    clean = backend.prefix_tail(case.q, case.kv, plan, case.tail, 0.6)
    used = {slot(case.metadata, i, p) for i in range(5) for p in range(int(case.metadata.kv_len[i]))} | {0}
    unused = [s for s in range(case.kv.k.shape[0]) if s not in used]
    case.kv.data[unused] = float("nan")
    assert torch.equal(backend.prefix_tail(case.q, case.kv, plan, case.tail, 0.6), clean)


def test_attend_survives_scores_that_overflow_an_exponential():
    """Scores of a thousand give finite weights: the largest is subtracted first."""
    q = torch.full((1, 1, 1, DIM), 50.0, dtype=torch.float64)
    k = torch.stack([torch.full((1, 1, DIM), 20.0), torch.full((1, 1, DIM), 19.0)], dim=1).double()
    v = torch.tensor([[[[1.0] * DIM], [[5.0] * DIM]]]).double()
    out, lse = attend(q, k, v, torch.ones(1, 1, 2, dtype=torch.bool), 1.0)
    torch.testing.assert_close(out, torch.ones_like(out))
    assert float(lse) == pytest.approx(4000.0)


# ---------------------------------------------------------------------------------------------- slots and writes


@pytest.mark.parametrize("page", [1, 2, 16])
def test_a_slot_is_its_page_times_the_page_size_plus_the_offset(page):
    """The one address function, and the null slot for what is not visible, even at positions past the table."""
    table = torch.tensor([[5, 2, 9], [4, 7, 1]], dtype=torch.int32)
    rows, positions = torch.tensor([1, 0]), torch.tensor([[0, page, 3 * page - 1, 10**6], [1, 2, 0, -5]])
    visible = torch.tensor([[True, True, True, False], [page > 1, True, True, False]])
    got = slots_of(table, rows, positions, visible, page)
    for i, row in enumerate(rows.tolist()):
        for j in range(4):
            p = int(positions[i, j])
            want = int(table[row, p // page]) * page + p % page if visible[i, j] else 0
            assert int(got[i, j]) == want


def test_large_pools_are_addressed_in_64_bits():
    """A slot past 2^31 does not wrap."""
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    got = slots_of(table, torch.tensor([0]), torch.tensor([[63]]), torch.tensor([[True]]), 64)
    assert int(got) == (2**31 - 1) * 64 + 63


def test_writes_to_the_null_slot_are_dropped():
    """Prefill and commit store what has a slot, once, and leave the null slot zero."""
    generator = torch.Generator().manual_seed(0)
    pages = PagedKV(torch.zeros(8, 2, 1, DIM))
    new = torch.randn(2, 3, 2, 1, DIM, generator=generator)
    write_pages(pages, torch.tensor([[3, 0, 5], [0, 0, 7]]), new)
    assert torch.equal(pages.data[[3, 5, 7]], torch.stack([new[0, 0], new[0, 2], new[1, 2]]))
    assert not pages.data[[0, 1, 2, 4, 6]].any()

    pool, tail = torch.zeros(2, 8, 2, 1, DIM), torch.randn(2, 2, 4, 2, 1, DIM, generator=generator)
    commit_tail(pool, tail, torch.tensor([[0, 3, 0], [0, 0, 0]]), torch.tensor([[6, 2, 0], [1, 0, 0]]))
    assert torch.equal(pool[:, [6, 2, 1]], torch.stack([tail[:, 0, 0], tail[:, 0, 3], tail[:, 1, 0]], dim=1))
    assert not pool[:, [0, 3, 4, 5, 7]].any()
