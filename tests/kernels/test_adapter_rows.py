"""What adapters add to products, grouped by adapter: every size of rows and ranks, and nobody else's row."""

import pytest
import torch

from support.interpreted import DEVICE, on_gpu_or_interpreted
from support.operation_cases import adapter_case
from treetop.kernels.gemm.adapter_rows import (
    RowTiles,
    expand,
    expand_gated,
    expand_gated_reference,
    expand_reference,
    shrink,
    shrink_reference,
    tile_rows,
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
        alone = Adapters({}, 5, tiles.slots[row : row + 1], torch.zeros(4, 1, dtype=torch.int32, device=DEVICE))
        own = alone.tiles(1, n)
        tile_rows(own, 5, GPU)
        here = slice(row, row + 1)
        assert torch.equal(adapt(parts[:, here].clone(), x[here], factors, own), got[:, here])


@on_gpu_or_interpreted
def test_tiles_have_every_row_once_and_one_adapter_each():
    """At every number of rows to a tile, with slots that nobody has, and tables that held others before."""
    torch.manual_seed(3)
    for rows, per, slots in ((1, 16, 9), (31, 16, 9), (64, 4, 3), (40, 1, 6)):
        given = torch.randint(0, slots, (rows,), device=DEVICE)
        order, *where = torch.full((4, rows), 77, dtype=torch.int32, device=DEVICE)
        most = min(rows, rows // per + slots)
        tiles = RowTiles(per, given, order, *(each[:most] for each in where))
        tile_rows(tiles, slots, GPU)
        found = []
        for slot, start, count in zip(*(each.tolist() for each in (tiles.slot, tiles.start, tiles.count)), strict=True):
            assert count <= per
            assert set(given[tiles.order[start : start + count].long()].tolist()) <= {slot}
            found += tiles.order[start : start + count].tolist()
        assert sorted(found) == list(range(rows))
