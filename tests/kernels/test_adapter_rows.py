"""What adapters add to products, grouped by adapter: every size of rows and ranks, and nobody else's row."""

from dataclasses import replace

import pytest
import torch

from support.interpreted import DEVICE, on_gpu_or_interpreted
from support.operation_cases import adapter_case
from treetop.exact.fixed_point import fixed_point_linear
from treetop.exact.probe import same_bits
from treetop.kernels.exact import batch_invariant_linear
from treetop.kernels.gemm.adapter_rows import (
    RowTiles,
    expand,
    expand_by_rows,
    expand_gated,
    expand_gated_by_rows,
    expand_gated_reference,
    expand_reference,
    shrink,
    shrink_by_rows,
    shrink_reference,
    tile_rows,
    tile_rows_reference,
)
from treetop.kernels.triton_guard import gpu_traits
from treetop.weights.adapted import Adapters

GPU = gpu_traits(DEVICE)


def made(seed, *args):
    torch.manual_seed(seed)
    with DEVICE:
        return adapter_case(*args)


def adapt(parts, x, factors, tiles):
    return expand(parts, shrink(x, factors, tiles, GPU), factors, tiles, GPU)


def near(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("rows", "n", "k", "ends", "rank"),
    [
        (1, 1, 48, (40,), 1),
        (33, 1, 1100, (64, 96, 200), 8),
        (20, 4, 640, (130,), 16),
        (6, 16, 512, (96, 192), 128),
        (3, 70, 256, (70, 140), 33),
    ],
)
def test_every_size_equals_the_plain_products(rows, n, k, ends, rank):
    """More tokens than a tile has, tiles that are not full, shares of k, ranks that are no power of two."""
    parts, x, factors, tiles = made(1, rows, n, k, ends, rank, 4, 2)
    inner, small = shrink(x, factors, tiles, GPU), shrink_reference(x, factors, tiles)
    inner[:, tiles.slots == 0] = torch.nan  # nobody reads it
    want = expand_reference(parts.clone(), small, factors, tiles)
    near(expand(parts.clone(), inner, factors, tiles, GPU), want)
    if ends[-1] % 2 == 0:
        want = expand_gated_reference(parts.clone(), small, factors, tiles, "gelu_tanh")
        near(expand_gated(parts, inner, factors, tiles, "gelu_tanh", gpu=GPU), want)


@on_gpu_or_interpreted
@pytest.mark.parametrize("n", [1, 16])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(n):
    """Whatever the others' adapters; and what a row without one had it has still, bit for bit."""
    parts, x, factors, tiles = made(2, 19, n, 640, (96, 160), 16, 5, 1)
    got = adapt(parts.clone(), x, factors, tiles)
    none = tiles.slots == 0
    assert bool(none.any())
    assert torch.equal(got[:, none], parts[:, none])
    assert not torch.equal(got[:, ~none], parts[:, ~none])
    for row in (0, 7, 18):
        alone = Adapters({}, 5, tiles.slots[row : row + 1], torch.zeros(5, 1, dtype=torch.int32, device=DEVICE))
        own = alone.tiles(1, n)
        tile_rows(own, 5, GPU)
        here = slice(row, row + 1)
        assert torch.equal(adapt(parts[:, here].clone(), x[here], factors, own), got[:, here])


@on_gpu_or_interpreted
def test_by_rows_a_token_has_the_same_bits_however_many_its_row_has():
    """One of 3, of 16 and of 70, whose tiles hold more or fewer: what a round has, and a prefill."""
    parts, x, factors, tiles = made(4, 6, 70, 640, (96, 160), 24, 4, 1)
    none = tiles.slots == 0
    assert 0 < int(none.sum()) < 6
    found = {}
    for n in (1, 3, 16, 70):
        held = Adapters({}, 4, tiles.slots, torch.zeros(5, 6, dtype=torch.int32, device=DEVICE))
        own, here = held.tiles(6, n), x[:, :n].contiguous()
        tile_rows(own, 4, GPU)
        inner = shrink(here, factors, own, GPU, batch_invariant=True)
        some = parts[:, :, :n].contiguous()
        gated = expand_gated(some, inner, factors, own, gpu=GPU, batch_invariant=True)
        found[n] = torch.cat([expand(some, inner, factors, own, GPU, batch_invariant=True)[0], gated], dim=-1)[:, 0]
    assert all(torch.equal(each, found[70]) for each in found.values())


@pytest.mark.parametrize("linear", [batch_invariant_linear, fixed_point_linear])
@pytest.mark.parametrize("n", [1, 17])
def test_on_a_cpu_bits_are_a_rows_own_whatever_the_batch_and_the_tables(n, linear):
    """Near the plain products; rows without an adapter stay as they are; wider tables change nothing."""
    torch.manual_seed(5)
    parts, x, factors, tiles = adapter_case(19, n, 640, (96, 160), 16, 5, 1)
    parts[:, :, :, 0] = -0.0

    def adapted(factors, rows):
        slots, own = tiles.slots[rows], x[rows]
        own_tiles = Adapters({}, 5, slots, torch.zeros(5, len(slots), dtype=torch.int32)).tiles(len(slots), n)
        tile_rows_reference(own_tiles, 5)
        inner = shrink_by_rows(own, factors, own_tiles, linear)
        whole = expand_by_rows(parts[:, rows].clone(), inner, factors, own_tiles, linear)
        gated = expand_gated_by_rows(parts[:, rows].clone(), inner, factors, own_tiles, "silu", linear)
        return whole[0], gated

    got, gated = adapted(factors, torch.arange(19))
    inner = shrink_reference(x, factors, tiles)
    near(got, expand_reference(parts.clone(), inner, factors, tiles)[0])
    near(gated, expand_gated_reference(parts.clone(), inner, factors, tiles))
    none = tiles.slots == 0
    assert same_bits(got[none], parts[0, none])
    assert not torch.equal(got[~none], parts[0, ~none])
    a, b = (torch.zeros(5, *shape) for shape in ((2 * 48, 640), (160, 48)))
    a.view(5, 2, 48, 640)[:, :, :16], b[:, :, :16] = factors.a.view(5, 2, 16, 640), factors.b
    wide = replace(factors, a=a, b=b)
    for rows in ([7], [0, 18], list(range(3, 19))):
        for some in (factors, wide):
            one, other = adapted(some, torch.tensor(rows))
            assert torch.equal(one, got[rows])
            assert torch.equal(other, gated[rows])


@on_gpu_or_interpreted
def test_tiles_have_every_row_once_and_one_adapter_each():
    """At every number of rows to a tile, with slots that nobody has, and tables that held others before."""
    torch.manual_seed(3)
    for rows, per, slots in ((1, 16, 9), (31, 16, 9), (64, 4, 3), (40, 1, 6)):
        given = torch.randint(0, slots, (rows,), device=DEVICE)
        order, present, *where = torch.full((5, rows), 77, dtype=torch.int32, device=DEVICE)
        most = min(rows, rows // per + slots)
        tiles = RowTiles(per, given, order, present, *(each[:most] for each in where))
        tile_rows(tiles, slots, GPU)
        found = []
        for slot, start, count in zip(*(each.tolist() for each in (tiles.slot, tiles.start, tiles.count)), strict=True):
            assert count <= per
            assert set(given[tiles.order[start : start + count].long()].tolist()) <= {slot}
            found += tiles.order[start : start + count].tolist()
        assert sorted(found) == list(range(rows))
