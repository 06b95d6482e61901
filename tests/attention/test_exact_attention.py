"""Exact attention is its arithmetic in order, to the bit, whatever lies beside a query."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from support.chains import attention_in_order
from treetop.attention import exact_backend, exact_layout
from treetop.attention.contract import TailKV
from treetop.attention.exact_backend import ExactBackend
from treetop.attention.torch_backend import TorchBackend, broken_rows
from treetop.exact.probe import adversarial
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV, PageTable, write_pages
from treetop.types.ids import FULL
from treetop.types.phase import Phase

PAGE, KV_HEADS, GROUP, DIM = 16, 2, 2, 16
SCALE, COLUMNS = 0.29, 24

pytestmark = pytest.mark.skipif(
    exact_backend.problem(DIM, 1) is not None, reason="this library's products are not chains: `bits` is refused here"
)


@dataclass
class World:
    """Rows with committed K/V in pages, and a tree behind each. parent: [rows][t], -1 for the root."""

    kv: PagedKV
    table: torch.Tensor
    tail: torch.Tensor
    q: torch.Tensor
    lengths: list[int]
    parent: list[list[int]]

    def metadata(self, window=None, chunked=False) -> AttentionMetadata:
        rows, t = len(self.lengths), self.tail.shape[1]
        depth, mask = torch.zeros(rows, t, dtype=torch.int64), torch.zeros(rows, t, t, dtype=torch.bool)
        for row, parents in enumerate(self.parent):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    depth[row, node] = depth[row, parent] + 1
                    mask[row, node] = mask[row, parent]
                mask[row, node, node] = True
        kv_len, at = torch.tensor(self.lengths), torch.arange(rows)
        positions = kv_len[:, None] + depth
        return AttentionMetadata(
            Phase.VERIFY, PageTable(FULL, self.table), at, kv_len, max(self.lengths) + 3, PAGE, positions, window,
            positions, mask, chunked,
        )  # fmt: skip

    def seen(self, row, node, kv_head, window, chunked):
        """position -> (k, v) of what a node sees, gathered one by one."""
        found, columns, at = {}, [], node
        while at >= 0:
            columns.insert(0, at)
            at = self.parent[row][at]
        length = self.lengths[row]
        for position in range(length):
            place = int(self.table[row, position // PAGE]) * PAGE + position % PAGE
            found[position] = [self.kv.data[place, plane, kv_head].numpy() for plane in range(2)]
        for depth, column in enumerate(columns):
            found[length + depth] = [self.tail[row, column, plane, kv_head].numpy() for plane in range(2)]
        last = length + len(columns) - 1
        if chunked:
            return {position: kv for position, kv in found.items() if position // window == last // window}
        return {position: kv for position, kv in found.items() if window is None or last - position < window}


def make(lengths, t, seed=0) -> World:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    table = (1 + torch.randperm(rows * COLUMNS, generator=generator)).view(rows, COLUMNS).to(torch.int32)
    data = adversarial(((rows * COLUMNS + 1) * PAGE, 2, KV_HEADS, DIM), generator)
    data[0] = 0
    tail = adversarial((rows, t, 2, KV_HEADS, DIM), generator)
    q = adversarial((rows, t, KV_HEADS * GROUP, DIM), generator) * 0.01
    draws = torch.rand((rows, t), generator=generator).tolist()
    parent = [[-1, *(int(draws[row][i] * i) for i in range(1, t))] for row in range(rows)]
    return World(PagedKV(data), table, tail, q, lengths, parent)


def answer(world, window=None, sinks=None, chunked=False, integers=False):
    backend, metadata = ExactBackend(torch.float32, torch.device("cpu"), integers), world.metadata(window, chunked)
    plan = backend.plan(backend.begin(metadata), metadata)
    return backend.prefix_tail(world.q, world.kv, plan, TailKV(world.tail), SCALE, sinks)


def expected(world, row, node, head, window=None, sinks=None, chunked=False):
    sink = None if sinks is None else float(sinks[head])
    q = world.q[row, node, head].numpy()
    return torch.from_numpy(attention_in_order(q, world.seen(row, node, head // GROUP, window, chunked), SCALE, sink))


CASES = [
    *(([0, 5, 127, 125, 300], None, False, False), ([126, 128, 40], 19, True, False)),
    *(([255, 251], None, True, False), ([3], None, False, False), ([126, 128, 40], 32, False, True)),
]


@pytest.mark.parametrize(("lengths", "window", "with_sinks", "chunked"), CASES)
def test_every_bit_is_that_of_the_sums_in_order(lengths, window, with_sinks, chunked):
    """Numbers of widely different size; trees within a block, across its end, and before any key; into a chunk."""
    world = make(lengths, 9)
    sinks = torch.linspace(-2, 30, KV_HEADS * GROUP) if with_sinks else None
    got = answer(world, window, sinks, chunked)
    for row in range(len(lengths)):
        for node in (0, 4, 8):
            for head in (0, KV_HEADS * GROUP - 1):
                want = expected(world, row, node, head, window, sinks, chunked)
                assert torch.equal(got[row, node, head], want), (row, node, head)


def test_layers_of_one_plan_leave_each_other_alone():
    """Other keys and values, and in the last one plane with values narrower than keys, after which the first again."""
    first, second = make([5, 127, 140], 9, seed=1), make([5, 127, 140], 9, seed=2)
    latent = replace(second.kv, data=second.kv.data[:, :1].contiguous(), value_dim=DIM // 2)
    backend, metadata = ExactBackend(torch.float32, torch.device("cpu")), first.metadata()
    layers = [(first.kv, TailKV(first.tail)), (replace(second.kv), TailKV(second.tail))]
    layers.append((latent, TailKV(second.tail[:, :, :1].contiguous(), DIM // 2)))

    def served(plan, kv, tail):
        return backend.prefix_tail(first.q, kv, plan, tail, SCALE)

    shared = backend.plan(backend.begin(metadata), metadata)
    together = [served(shared, *layer) for layer in [*layers, layers[0]]]
    alone = [served(backend.plan(backend.begin(metadata), metadata), *layer) for layer in layers]
    assert not torch.equal(alone[0], alone[1])
    for got, want in zip(together, [*alone, alone[0]], strict=True):
        assert torch.equal(got, want)


def test_a_sum_that_overflows_names_no_row():
    large = torch.full((2, 3), 3e38)
    assert broken_rows(large) == []
    large[1, 2] = float("inf")
    assert broken_rows(large) == [1]


def ties(kv, tail, q):
    """All scores of a query are equal."""
    kv[:, 0], tail[:, :, 0] = 0.5, 0.5


def zeros(kv, tail, q):
    """Queries and values of zeros, of either sign."""
    q[:, ::2], q[:, 1::2] = 0.0, -0.0
    kv[::2, 1], tail[:, ::3, 1] = -0.0, 0.0


def huge_and_tiny(kv, tail, q):
    """Values near the largest number and below the least normal one, that cancel or vanish beside others."""
    kv[::3, 1] *= 1e31 / 2**14
    kv[1::3, 1] *= 1e-40
    tail[:, ::2, 1] *= -1e31 / 2**14
    q *= 20.0  # most weights are 0


@pytest.mark.parametrize("change", [ties, zeros, huge_and_tiny])
def test_every_bit_is_that_of_the_sums_in_order_on_hostile_numbers(change):
    """What no query sees may even be infinite: a page that is nobody's, a position behind the row's end."""
    world = make([5, 126, 150], 5, seed=8)
    change(world.kv.data[1:], world.tail, world.q)
    for row, length in enumerate(world.lengths):
        for position in range(length, COLUMNS * PAGE):
            world.kv.data[int(world.table[row, position // PAGE]) * PAGE + position % PAGE] = float("inf")
    got = answer(world)
    assert got.isfinite().all()
    for row, node, head in ((row, node, head) for row in range(3) for node in (0, 4) for head in (0, 3)):
        want = expected(world, row, node, head)
        assert torch.equal(got[row, node, head].view(torch.int32), want.view(torch.int32)), (row, node, head)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("t", [1, 6, 60])
def test_a_node_has_the_bits_of_a_prefill_of_its_path(t, integers):
    """In any chunk, and whatever rows stand beside it."""
    world = make([125, 7, 200], t, seed=3)
    got = answer(world, integers=integers)
    for row, length in enumerate(world.lengths):
        path, at = [], t - 1
        while at >= 0:
            path.insert(0, at)
            at = world.parent[row][at]
        positions = torch.arange(length, length + len(path))[None]
        table, data = world.table[row : row + 1], world.kv.data.clone()
        slots = table[0, positions // PAGE].to(torch.int64) * PAGE + positions % PAGE
        write_pages(PagedKV(data), slots, world.tail[row, path][None])
        for start in (0, len(path) - 1):
            chunk = positions[:, start:]
            end = torch.tensor([length + len(path)])
            metadata = AttentionMetadata(
                Phase.PREFILL, PageTable(FULL, table), torch.zeros(1, dtype=torch.int64), end, int(end), PAGE, chunk
            )
            backend = ExactBackend(torch.float32, torch.device("cpu"), integers)
            plan = backend.plan(backend.begin(metadata), metadata)
            out = backend.causal(world.q[row, path][None, start:], PagedKV(data), plan, SCALE)
            assert torch.equal(out[0], got[row, path[start:]])


def test_a_prefill_of_short_rows_keeps_to_its_window():
    """Each query sees its last positions alone, never the first one beside them; a row of no keys has numbers."""
    world, window = make([6, 20, 0], 1, seed=4), 4
    length = torch.tensor(world.lengths)[:, None]
    write_pages(world.kv, world.table.gather(1, length // PAGE).to(torch.int64) * PAGE + length % PAGE, world.tail)
    end = torch.tensor([7, 21, 0])
    metadata = AttentionMetadata(
        Phase.PREFILL, PageTable(FULL, world.table), torch.arange(3), end, 21, PAGE, length, window
    )  # fmt: skip
    backend = ExactBackend(torch.float32, torch.device("cpu"))
    got = backend.causal(world.q, world.kv, backend.plan(backend.begin(metadata), metadata), SCALE)
    assert got.isfinite().all()
    for row, head in ((row, head) for row in (0, 1) for head in range(KV_HEADS * GROUP)):
        assert torch.equal(got[row, 0, head], expected(world, row, 0, head, window)), (row, head)


def test_slices_of_a_prefill_are_one_prefill(monkeypatch):
    """Queries are cut so that scores stay small."""
    world = make([40, 130], 12, seed=5)
    whole = answer(world)
    monkeypatch.setattr(exact_layout, "_SCORES", 4000)
    assert torch.equal(answer(world), whole)


@pytest.mark.parametrize(("lengths", "window", "with_sinks", "chunked"), CASES)
def test_sums_of_integers_are_attention(lengths, window, with_sinks, chunked):
    """Near the library's chains, closer to float64 than these, and the same for any slices of queries."""
    world = make(lengths, 9)
    sinks = torch.linspace(-2, 30, KV_HEADS * GROUP) if with_sinks else None
    got = answer(world, window, sinks, chunked, integers=True)
    wide = replace(world, kv=PagedKV(world.kv.data.double()), tail=world.tail.double(), q=world.q.double())
    metadata = world.metadata(window, chunked)
    plain = TorchBackend(torch.float64, torch.device("cpu"))
    plan = plain.plan(plain.begin(metadata), metadata)
    sinks = None if sinks is None else sinks.double()
    want = plain.prefix_tail(wide.q, wide.kv, plan, TailKV(wide.tail), SCALE, sinks)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6 * float(want.abs().max()))


def test_sums_of_integers_do_not_know_the_order_of_columns():
    """Nor what lies between: a tree whose nodes stand in another order has the same bits."""
    world = make([77, 100], 9, seed=7)
    metadata = world.metadata()
    flipped = replace(
        metadata,
        positions=metadata.positions.flip(1),
        tail_positions=metadata.tail_positions.flip(1),
        mask=metadata.mask.flip(1).flip(2),
    )
    backend = ExactBackend(torch.float32, torch.device("cpu"), integers=True)
    plan = backend.plan(backend.begin(flipped), flipped)
    got = backend.prefix_tail(world.q.flip(1), world.kv, plan, TailKV(world.tail.flip(1)), SCALE).flip(1)
    assert torch.equal(got, answer(world, integers=True))


def by_length(weights, v, out=None):
    """A mutant: the keys in two halves, whose border moves with the row's length."""
    weights, v = torch.cat(weights, dim=2), torch.cat(v, dim=1)
    half = weights.shape[2] // 2
    total = torch.bmm(weights[:, :, :half], v[:, :half]) + torch.bmm(weights[:, :, half:], v[:, half:])
    return total if out is None else out.copy_(total)


def test_a_share_by_length_is_noticed(monkeypatch):
    world = make([77, 100], 9, seed=6)
    want = answer(world)
    assert torch.equal(want[0, 8, 0], expected(world, 0, 8, 0))
    monkeypatch.setattr(exact_backend, "folded", by_length)
    assert not torch.equal(answer(world), want)


def test_a_tail_folded_in_the_order_of_columns_is_noticed():
    """A tree whose columns do not rise in position along a path is summed otherwise: so nodes come after parents."""
    world = make([77, 100], 9, seed=7)
    turned = replace(world, tail=world.tail.flip(1), q=world.q.flip(1))
    metadata = world.metadata()
    flipped = replace(
        metadata,
        positions=metadata.positions.flip(1),
        tail_positions=metadata.tail_positions.flip(1),
        mask=metadata.mask.flip(1).flip(2),
    )
    backend = ExactBackend(torch.float32, torch.device("cpu"))
    plan = backend.plan(backend.begin(flipped), flipped)
    got = backend.prefix_tail(turned.q, world.kv, plan, TailKV(turned.tail), SCALE).flip(1)
    want = answer(world)
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-2 * float(want.abs().max()))
    assert not torch.equal(got, want)


def scaled_by_shape(q, turned, out=None):
    """A mutant: queries times a factor in small products, and the sums times it in large ones."""
    if turned.shape[2] > 256:
        return torch.bmm(q, turned, out=out).mul_(0.29)
    return torch.bmm(q * 0.29, turned, out=out)


@pytest.mark.parametrize(("name", "mutant", "what"), [
    ("folded", by_length, "sums"), ("scored", scaled_by_shape, "scores"),
])  # fmt: skip
def test_a_library_whose_products_are_no_chains_is_refused(monkeypatch, name, mutant, what):
    """The probe sees a product that is cut by its number of keys, and one that is scaled elsewhere by that number."""
    monkeypatch.setattr(exact_backend, name, mutant)
    assert exact_backend.problem.__wrapped__(DIM, 1) == f"attention's {what} with heads of {DIM}"


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("queries", [16, 33, 250])
def test_scores_are_the_same_among_any_number_of_queries_and_keys(dim, queries):
    """Of a backend with a scale that is no power of two, in the mode of MKL that this process has."""
    generator = torch.Generator().manual_seed(dim)
    q = adversarial((1, queries, 2, dim), generator) * 0.01
    data = adversarial((1 + COLUMNS * PAGE, 2, 2, dim), generator)
    table = PageTable(FULL, torch.arange(1, 1 + COLUMNS, dtype=torch.int32)[None])

    def causal(start, stop):
        at, end = torch.arange(start, stop)[None], torch.tensor([stop])
        metadata = AttentionMetadata(Phase.PREFILL, table, torch.zeros(1, dtype=torch.int64), end, stop, PAGE, at)
        backend = ExactBackend(torch.float32, torch.device("cpu"))
        plan = backend.plan(backend.begin(metadata), metadata)
        return backend.causal(q[:, start:stop], PagedKV(data.contiguous()), plan, SCALE)

    want = causal(0, queries)
    assert not torch.equal(want[:, -1], want[:, -2])
    for start, stop in ((0, 1), (0, 16), (7, 9), (queries - 16, queries), (queries - 1, queries), (1, queries)):
        assert torch.equal(causal(start, stop)[0], want[0, start:stop]), (start, stop)


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("backend", [ExactBackend, partial(ExactBackend, integers=True), TorchBackend])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_infinite_number_of_a_node_shows_only_where_it_is_seen(plane, backend, value):
    """Nodes that do not see it, and rows beside it, have the numbers that they have without: in the second row some
    that lie behind its open block, whose weights are not 0."""
    world = make([5, 126, 300], 6, seed=3)
    world.q *= 1e-3
    world.parent = [[-1, 0, 0, 0, 1, 3]] * 3
    made, metadata = backend(torch.float32, torch.device("cpu")), world.metadata()
    plan = made.plan(made.begin(metadata), metadata)
    want = made.prefix_tail(world.q, world.kv, plan, TailKV(world.tail), SCALE)
    world.tail[1, 2, plane] = value
    got = made.prefix_tail(world.q, world.kv, plan, TailKV(world.tail), SCALE)
    others = [0, 1, 3, 4, 5]
    assert got[1, others].isfinite().all()
    if backend is not TorchBackend:
        assert torch.equal(got[:, others], want[:, others])
    torch.testing.assert_close(got[:, others], want[:, others], rtol=1e-3, atol=1e-2)
    assert torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("dim", [8, 16, 40])
@pytest.mark.parametrize("keys", [130, 131])
def test_few_queries_add_a_short_last_block_as_many_do(dim, keys):
    generator = torch.Generator().manual_seed(dim)
    weights = adversarial((8, 120, keys), generator).abs()
    v = adversarial((8, keys, dim + exact_layout.ones_of(dim)), generator)
    blocks = exact_layout.in_blocks(v, keys, 1)
    want = exact_backend.folded(exact_layout.in_blocks(weights, keys, 2), blocks)
    for queries in (1, 2, 5):
        few = exact_layout.of_least(weights[:, :queries])
        got = exact_backend.folded(exact_layout.in_blocks(few, keys, 2), blocks)
        assert torch.equal(got[:, :queries], want[:, :queries])
