"""Rows of unequal length share the programs of a launch by their lengths, and attend as they would alone.

Tests of the kernels run in the interpreted session.
"""

import random

import pytest
import torch

from support.grids import few_of
from support.interpreted import interpreted
from support.scenes import assert_close, assert_close_lse, dense_answer, scene
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.attention import paged_attention
from treetop.kernels.attention.attention_config import Launch
from treetop.kernels.attention.latent_attention import latent_attention
from treetop.kernels.attention.stream_k import StreamK, make_arrivals, row_shares, seat_of, share_of, stream_k_share
from treetop.kernels.triton_guard import GpuTraits, constexpr, jit, power_of_two, tl

CPU = torch.device("cpu")
GPU = GpuTraits(num_sms=132, can_overlap=False)


def by_hand(lengths, splits, helpers, block_n=64, window=None, chunked=False):
    """Members of each row's team, by the rule that `kernels.attention.stream_k` states."""
    shares = []
    for length in lengths:
        first = 0
        if window is not None:
            first = length // window * window if chunked else max(length - window + 1, 0)
        shares.append(-((first // block_n - -(-length // block_n)) // splits))
    fair = -(-sum(shares) // len(shares))
    wanted = [-(-share // fair) - 1 if share > 2 * fair else 0 for share in shares]
    total = sum(wanted)
    return [1 + (each if total <= helpers else each * helpers // total) for each in wanted]


@pytest.mark.parametrize("units", [8, 12, 32, 100, 132, 133, 400])
def test_helpers_are_no_more_programs_than_multiprocessors(units):
    """So their counters fit; none where two rows cannot be long beside each other, or nobody counts."""
    arrivals, nobody = make_arrivals(CPU, GPU), torch.zeros(1)
    for rows in (1, 2, 3, 32, 300):
        stream_k = StreamK.of(rows, units, 16 * 18, arrivals, nobody)
        assert stream_k.helpers * units <= len(arrivals) == GPU.num_sms
        assert stream_k.helpers < rows
        assert (stream_k.helpers > 0) == (rows > 2 and units <= GPU.num_sms)
        if stream_k.helpers:
            assert stream_k.sums.numel() == 2 * stream_k.helpers * units * 16 * 18
            assert stream_k.block_rows >= rows
    assert StreamK.of(32, units, 16 * 18, None, nobody).helpers == 0


@jit
def seats_kernel(  # noqa: PLR0917 - a kernel
    out, kv_len, rows, splits, helpers, window: constexpr, chunked: constexpr, block_n: constexpr,
    block_rows: constexpr,
):  # fmt: skip
    """(row, member, members, first helper) of each lane, as attention finds them. out: [lanes, 4]."""
    lane = tl.program_id(0)
    shares = row_shares(kv_len, rows, splits, window, chunked, block_n, block_rows)
    row, member, members, first = seat_of(shares, lane, rows, helpers, block_rows)
    if row >= 0:
        share = share_of(tl.load(kv_len + row).to(tl.int32), splits, window, chunked, block_n)
        members, first = stream_k_share(shares, share, lane, member, members, first, rows, helpers, block_rows)
    tl.store(out + lane * 4, row)
    tl.store(out + lane * 4 + 1, member)
    tl.store(out + lane * 4 + 2, members)
    tl.store(out + lane * 4 + 3, first)


def seats(lengths, splits, helpers, block_n=64, window=None, chunked=False):
    rows = len(lengths)
    out = torch.full((rows + helpers, 4), -7, dtype=torch.int32)
    block_rows = max(4, power_of_two(rows))
    seats_kernel[(rows + helpers,)](
        out, torch.tensor(lengths), rows, splits, helpers, window or 0, chunked, block_n, block_rows
    )
    return out.tolist()


def check_seats(lengths, splits, helpers, **kind):
    """Each row's lanes are its team, each once, and agree on where it stands among the helpers. Returns sizes."""
    found = seats(lengths, splits, helpers, **kind)
    sizes = by_hand(lengths, splits, helpers, **kind)
    for row, size in enumerate(sizes):
        stream_k = [each for each in found if each[0] == row]
        assert [member for _, member, _, _ in stream_k] == list(range(size))
        assert {members for _, _, members, _ in stream_k} == {size}
        if size > 1:
            assert {first for _, _, _, first in stream_k} == {sum(sizes[:row]) - row}
    assert sum(each[0] == -1 for each in found) == helpers - (sum(sizes) - len(lengths))
    return sizes


@interpreted
@pytest.mark.parametrize(
    ("seeds", "splits", "helpers"),
    [(1, 1, 16), (1, 1, 3), (1, 4, 4), pytest.param(40, 2, 9, marks=pytest.mark.slow)],
)
def test_teams_follow_lengths(seeds, splits, helpers):
    """Random lengths, some of which are many times the others; windows make rows alike again."""
    for seed in range(seeds):
        rng = random.Random(seed)
        lengths = [rng.choice([0, 1, 64, 700, 1000, 1024, 1100]) for _ in range(rng.randint(3, 12))]
        lengths += rng.sample([5000, 9000, 32768, 0], 3)
        assert max(check_seats(lengths, splits, helpers)) > 1
        check_seats(lengths, splits, helpers, window=300)
        check_seats(lengths, splits, helpers, window=512, chunked=True, block_n=32)
    assert check_seats([1024] * 8 + [32768], splits, helpers, window=512) == [1] * 9


@interpreted
@pytest.mark.parametrize(("longest", "members"), [(8192, 7), (32768, 16)])
def test_one_long_row_is_divided_into_parts_like_the_others(longest, members):
    """32 rows of 1k, one of them long, with 8 K/V heads on 132 multiprocessors: no program has much more work."""
    stream_k = StreamK.of(32, 8, 1, make_arrivals(CPU, GPU), torch.zeros(1))
    lengths = [1024] * 9 + [longest] + [1024] * 22
    sizes = check_seats(lengths, 1, stream_k.helpers)
    assert sizes == [members if length == longest else 1 for length in lengths]
    pieces = [-(-(length // 64) // size) for length, size in zip(lengths, sizes, strict=True)]
    work = [piece for piece, size in zip(pieces, sizes, strict=True) for _ in range(size)]
    mean = sum(length // 64 for length in lengths) / len(work)
    assert max(pieces) <= (1.3 if longest == 8192 else 1.5) * mean + 1


@interpreted
@pytest.mark.parametrize("splits", [1, 8])
def test_rows_of_about_one_length_are_alone(splits):
    """Up to half of them padding, and others half as long again: they are cut as they were without helpers."""
    rng = random.Random(splits)
    for lengths in ([1000] * 5 + [0] * 5, [rng.randint(900, 1700) for _ in range(10)]):
        assert check_seats(lengths, splits, 2) == [1] * 10


LENGTHS = [20, 0, 170, 33, 140, 1, 0, 0]
ONE_LONG = [16, 170, 7, 0, 0]


def attend(s, splits, sinks=None, tail=True, monkeypatch=None):
    """(out, lse, sums of members that were written) with helpers, whose sums are NaN before."""
    made = []
    if monkeypatch is not None:

        def spoilt(*args):
            stream_k = StreamK.of(*args)
            stream_k.sums.fill_(float("nan"))
            made.append(stream_k)
            return stream_k

        of = type("Spoilt", (), {"of": staticmethod(spoilt)})
        monkeypatch.setattr("treetop.kernels.attention.attention.StreamK", of)
    arrivals = torch.zeros(16, dtype=torch.int32)
    launch = Launch(block_m=16, block_n=16, splits=splits, num_warps=4, num_stages=1)
    data = s.tail.data if tail else None
    out, lse = paged_attention(
        s.q, s.kv.data, s.metadata, data, s.scale, sinks, GPU, launch, s.kv.scales, arrivals=arrivals
    )
    assert not arrivals.any()
    used = 0
    for stream_k in made:
        slots = stream_k.sums.view(-1, 16 * (power_of_two(s.q.shape[3]) + 2))
        used = int((~slots.isnan().any(dim=1)).sum())
    return out, lse, used


@interpreted
@pytest.mark.parametrize(
    ("lengths", "splits", "options"),
    few_of(
        [
            (LENGTHS, 1, {"n": 3, "t": 9, "sinks": True}),
            (ONE_LONG, 1, {"n": 1, "t": 1}),
            (ONE_LONG, 1, {"n": 2, "t": 2, "tail": False}),
            (ONE_LONG, 2, {"n": 2, "t": 2, "kv_heads": 2, "sinks": True}),
            (ONE_LONG, 1, {"n": 9, "t": 9, "heads": 2}),  # two blocks of queries
            (ONE_LONG, 1, {"n": 4, "t": 4, "window": 120}),
            (ONE_LONG, 2, {"n": 4, "t": 4, "window": 200, "chunked": True, "sinks": True}),
            (ONE_LONG, 1, {"n": 2, "t": 5, "dim": 24, "dtype": torch.float16}),
            (ONE_LONG, 1, {"n": 2, "t": 2, "fp8": True}),
            ([0] * 4, 1, {"n": 1, "t": 1}),
        ],
        *range(0, 10, 3),
    ),
    ids=str,
)
def test_teams_attend_as_rows_alone(lengths, splits, options, monkeypatch):
    """Against dense attention; as many members' sums are written as the lengths say."""
    kind = {"heads": 2, "kv_heads": 1, "page_size": 8, **options}
    sinks = torch.linspace(-1, 1, 2) if kind.pop("sinks", False) else None
    tail = kind.pop("tail", True)
    s = scene(**kind, max_kv_len=176, lengths=lengths)
    blocks = -(-kind["n"] * 2 // kind["kv_heads"] // 16)
    helpers = min(len(lengths) - 1, 16 // (splits * kind["kv_heads"] * blocks))
    seen = {"block_n": 16, "window": kind.get("window"), "chunked": kind.get("chunked", False)}
    sizes = by_hand(lengths, splits, helpers, **seen)
    out, lse, used = attend(s, splits, sinks, tail, monkeypatch)
    want, want_lse = dense_answer(s, with_tail=tail, sinks=sinks)
    assert used == splits * kind["kv_heads"] * blocks * sum(size for size in sizes if size > 1)
    assert (used > 0) == any(lengths)
    assert_close(out, want, s)
    if sinks is None:
        assert_close_lse(lse, want_lse, s)


@interpreted
def test_without_a_long_row_no_bit_changes():
    """Nor in a prefill, whose rows are never helped."""
    launch = Launch(block_m=16, block_n=16, splits=2, num_warps=4, num_stages=1)
    alike = scene(n=3, t=4, heads=2, kv_heads=1, max_kv_len=40, lengths=[40, 30, 36, 0])
    for s in (alike, scene(n=3, heads=2, kv_heads=1, max_kv_len=40, causal=True)):
        tail = None if s.metadata.causal else s.tail.data
        call = s.q, s.kv.data, s.metadata, tail, s.scale, None, GPU, launch, None
        before, after = paged_attention(*call), paged_attention(*call, arrivals=make_arrivals(CPU, GPU))
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)


@interpreted
def test_the_result_does_not_depend_on_who_comes_last(monkeypatch):
    """A row's own program after all its helpers: the interpreter's grid is walked from its end."""
    s = scene(n=2, t=2, heads=2, kv_heads=1, page_size=8, max_kv_len=176, lengths=ONE_LONG)
    want = attend(s, 1)[0]
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_index(x, y, builder.grid_dim[2] - 1 - z))
    assert torch.equal(attend(s, 1)[0], want)


@interpreted
def test_compressed_attention_has_teams_too(monkeypatch):
    s = scene(n=3, t=3, heads=3, kv_heads=1, dim=24, latent=16, page_size=8, max_kv_len=176, lengths=ONE_LONG)
    sizes = []
    monkeypatch.setattr(
        "treetop.kernels.attention.latent_attention.StreamK",
        type("Seen", (), {"of": staticmethod(lambda *args: sizes.append(StreamK.of(*args)) or sizes[-1])}),
    )
    arrivals = torch.zeros(16, dtype=torch.int32)
    launch = Launch(block_m=16, block_n=16, splits=2, num_warps=4, num_stages=1)
    out = latent_attention(s.q, s.kv.data, s.metadata, s.tail.data, 16, s.scale, GPU, launch, arrivals=arrivals)
    assert_close(out, dense_answer(s, with_tail=True)[0], s)
    assert sizes[0].helpers > 0
    assert not arrivals.any()


@interpreted
def test_the_backend_has_helpers(monkeypatch):
    """By counters of its own, which its calls hand on."""
    s = scene(n=1, t=1, heads=2, kv_heads=1, page_size=8, max_kv_len=40, lengths=[40, 3, 0, 0])
    given, real = [], StreamK.of
    seen = type("Seen", (), {"of": staticmethod(lambda *args: given.append(args[3]) or real(*args))})
    monkeypatch.setattr("treetop.kernels.attention.attention.StreamK", seen)
    backend = TritonBackend(CPU)
    out = backend.prefix_tail(s.q, s.kv, backend.plan(None, s.metadata), s.tail, s.scale)
    assert_close(out, dense_answer(s, with_tail=True)[0], s)
    assert given[0] is backend._arrivals
    assert given[0] is not TritonBackend(CPU)._arrivals
