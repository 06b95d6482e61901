"""What plain rounds leave to a later draft extend: kept in order, and nothing else of the slots is read."""

import torch

from treetop.kernels.tree.deferred import DeferredPairs, defer, deferred_pairs

ROWS, SLOTS, WIDTH, DUMMY = 4, 5, 3, 0


def used_before() -> DeferredPairs:
    """Slots as a former request may have left them: its states were NaN, its tokens some."""
    count = torch.zeros(ROWS, dtype=torch.int64)
    tokens = torch.full((ROWS, SLOTS), 77, dtype=torch.int64)
    return DeferredPairs(count, tokens, torch.full((ROWS, SLOTS, WIDTH), float("nan")))


def test_padding_holds_nothing_of_a_former_request():
    """Rows with 0, 1 and 3 pairs and the dummy row: what lies past a row's count is zero, in every table."""
    pairs = used_before()
    states = torch.arange(3 * WIDTH, dtype=torch.float32).reshape(3, WIDTH) + 1
    for step in range(3):
        defer(pairs, torch.tensor([3, DUMMY]), DUMMY, torch.tensor([10 + step, 5]), states[[step, step]])
    defer(pairs, torch.tensor([1]), DUMMY, torch.tensor([20]), states[:1])
    rows, committed = torch.tensor([3, 1, 2, DUMMY]), torch.tensor([9, 4, 6, 0])
    extend, count = deferred_pairs(pairs, rows, committed, SLOTS)
    assert count.tolist() == [3, 1, 0, 0]
    assert extend.first.tolist() == [6, 3, 6, 0]
    assert extend.last.tolist() == [2, 0, 0, 0]
    assert extend.tokens.tolist() == [[10, 11, 12, 0, 0], [20, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert extend.positions.tolist() == [[6, 7, 8, 0, 0], [3, 0, 0, 0, 0], [0] * 5, [0] * 5]
    expected = torch.zeros(4, SLOTS, WIDTH)
    expected[0, :3], expected[1, 0] = states, states[0]
    assert torch.equal(extend.aux_hidden, expected)
    narrow, again = deferred_pairs(pairs, rows, committed, 3)  # for all that any of them has
    assert torch.equal(again, count)
    for name in ("tokens", "positions", "aux_hidden"):
        assert torch.equal(getattr(narrow, name), getattr(extend, name)[:, :3]), name
