"""Rows of unequal length in one launch of attention: programs that help the rows whose keys are many.

A launch of a decode phase has the programs that its shapes ask for, a lane of them for each row, and some lanes more.
Which row these help is decided on the device, from the rows' lengths; one that helps nobody ends at once.

    lane        | row 0 | row 1 | row 2 | row 3 | helper 0 | helper 1 | helper 2 |
    keys        |  1k   |  4k   |  1k   |  1k   |
    works on    | row 0 | row 1 | row 2 | row 3 | row 1    | row 1    | nothing  |

A row's share is the blocks of keys that one of its splits has, and what is fair is the mean share. A row whose share is
more than `_LONG` times that gets helpers, so many that none of the team has more than is fair, or as many of them as
there are. Other rows are cut as if there were no helpers. A team divides each of its row's splits, and the last member
to finish one joins their sums, in the team's order: so the result does not depend on who that was.

The last is known by a counter that each member raises once its sums are written, and that the last sets back to 0.
Source: stream-K, Osama et al., arXiv:2301.03598, whose programs, too, share one tile and add up their sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.kernels.attention.metadata import oldest_seen
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, power_of_two, tl

_LONG = constexpr(2)
"""Times the mean share, above which a row has helpers. So many rows of a batch may be padding, and the rest be as long
as each other, without any of them being cut anew."""


@jit
def share_of(length: Arg, splits: Arg, window: constexpr, chunked: constexpr, block_n: constexpr) -> Arg:
    """Blocks of keys that a split of a row has which a query at its end sees. length: int32, of any shape."""
    blocks = (length + (block_n - 1)) // block_n
    if window > 0:
        blocks -= oldest_seen(length, window, chunked) // block_n
    return (blocks + (splits - 1)) // splits


@jit
def row_shares(
    kv_len: Arg, rows: Arg, splits: Arg, window: constexpr, chunked: constexpr, block_n: constexpr,
    block_rows: constexpr,
) -> Arg:  # fmt: skip
    """The shares of all rows, [block_rows] int32; 0 from `rows` on."""
    each = tl.arange(0, block_rows)
    length = tl.load(kv_len + each, mask=each < rows, other=0).to(tl.int32)
    return share_of(length, splits, window, chunked, block_n)


@jit
def _wanted(shares: Arg, rows: Arg) -> Arg:
    """(helpers that each row wants, [block_rows] int32, and all rows together)."""
    fair = (tl.sum(shares, 0) + rows - 1) // rows  # the mean, rounded up
    wanted = tl.where(shares > _LONG * fair, (shares - 1) // tl.maximum(fair, 1), 0)
    return wanted, tl.sum(wanted, 0)


@jit
def seat_of(shares: Arg, lane: Arg, rows: Arg, helpers: Arg, block_rows: constexpr) -> Arg:
    """(row, member, members, first helper) of a lane of programs; row -1 if it helps nobody.

    A row's own lane is member 0. Of its team it is not known yet how large that is: as if it were alone.
    """
    row, member, members, first = lane, lane * 0, lane * 0 + 1, lane * 0
    if lane >= rows:
        helper = lane - rows
        wanted, total = _wanted(shares, rows)
        row = lane * 0 - 1
        if helper < total:
            given = tl.where(total > helpers, wanted * helpers // total, wanted)
            after = tl.cumsum(given, 0)
            row = tl.sum(tl.where(after <= helper, 1, 0), 0)  # rows whose helpers all come before
            first = tl.sum(tl.where(after <= helper, given, 0), 0)
            members = 1 + tl.sum(tl.where(tl.arange(0, block_rows) == row, given, 0), 0)
            member = 1 + helper - first
            row = tl.where(row < block_rows, row, -1)
    return row, member, members, first


@jit
def stream_k_share(
    shares: Arg, share: Arg, lane: Arg, member: Arg, members: Arg, first: Arg, rows: Arg, helpers: Arg,
    block_rows: constexpr,
) -> Arg:  # fmt: skip
    """(members, first helper) of a row's own lane, whose share this is; a helper's as they were."""
    if (member == 0) & (share * rows > _LONG * tl.sum(shares, 0)):  # all that have helpers, without a division
        wanted, total = _wanted(shares, rows)
        given = tl.where(total > helpers, wanted * helpers // tl.maximum(total, 1), wanted)
        each = tl.arange(0, block_rows)
        members = 1 + tl.sum(tl.where(each == lane, given, 0), 0)
        first = tl.sum(tl.where(each < lane, given, 0), 0)
    return members, first


@jit
def _slot_of(sums: Arg, member: Arg, first: Arg, helpers: Arg, unit: Arg, units: Arg, size: constexpr) -> Arg:
    """Where a member leaves its sums: row's own programs stand after all helpers, at the place of their first one."""
    slot = tl.where(member == 0, helpers + first, first + member - 1)
    return sums + (slot * units + unit) * size


@jit
def stream_k_fixup(
    sums: Arg, arrivals: Arg, member: Arg, members: Arg, first: Arg, helpers: Arg, unit: Arg, units: Arg, acc: Arg,
    peak: Arg, mass: Arg, block_m: constexpr, block_d: constexpr,
) -> Arg:  # fmt: skip
    """Leave a member's running sums; the last of its team gets those of all. Nothing to do for one who is alone.

    sums, arrivals: as in `StreamK`. unit: of `units`, which of a lane's programs this is. acc: [block_m, block_d], peak
    (base 2), mass: [block_m], float32. Returns these, and whether this is the last member; others' are to be dropped.
    """
    last = members > 0
    if members > 1:
        size: constexpr = block_m * (block_d + 2)
        lane, dims = tl.arange(0, block_m), tl.arange(0, block_d)
        inside = lane[:, None] * block_d + dims[None, :]
        own = _slot_of(sums, member, first, helpers, unit, units, size)
        tl.store(own + inside, acc)
        tl.store(own + block_m * block_d + lane, peak)
        tl.store(own + block_m * (block_d + 1) + lane, mass)
        tl.debug_barrier()  # all threads' sums are written before one of them says so
        counter = arrivals + first * units + unit
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == members - 1
        tl.store(counter, 0, mask=last)

        acc = tl.zeros([block_m, block_d], tl.float32)
        peak = tl.full([block_m], -1e30, tl.float32)
        mass = tl.zeros([block_m], tl.float32)
        for each in tl.range(0, tl.where(last, members, 0), num_stages=1):
            at = _slot_of(sums, each, first, helpers, unit, units, size)
            part = tl.load(at + inside, cache_modifier=".cg")  # by the L2 cache, where other multiprocessors wrote
            part_peak = tl.load(at + block_m * block_d + lane, cache_modifier=".cg")
            part_mass = tl.load(at + block_m * (block_d + 1) + lane, cache_modifier=".cg")
            new_peak = tl.maximum(peak, part_peak)
            shrink, weight = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
            acc = acc * shrink[:, None] + part * weight[:, None]
            mass = mass * shrink + part_mass * weight
            peak = new_peak
    return acc, peak, mass, last


# ------------------------------------------------------------------------------------------------------- the launch


def make_arrivals(device: torch.device, gpu: GpuTraits) -> Tensor:
    """The counters of one stream's calls, [SMs] int32: 0 before each call, and after it."""
    return torch.zeros(gpu.num_sms, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class StreamK:
    """The helpers of one call.

    helpers: lanes of programs beside the rows'.
    block_rows: a power of two, not below the rows.
    sums: [2 * helpers, units, block_m * (block_d + 2)] float32, what members leave; units: programs of a lane.
    arrivals: [helpers * units, or more] int32, how many members have come.
    """

    helpers: int
    block_rows: int
    sums: Tensor
    arrivals: Tensor

    @classmethod
    def of(cls, rows: int, units: int, size: int, arrivals: Tensor | None, nobody: Tensor) -> "StreamK":
        """As many helpers as multiprocessors, for `rows` lanes of `units` programs, whose sums take `size` numbers.

        None where `arrivals` is None. Two rows are never long beside each other. nobody: a placeholder.
        """
        helpers = 0 if arrivals is None or rows <= 2 else min(rows - 1, arrivals.numel() // units)
        if arrivals is None or helpers == 0:
            return cls(0, 2, nobody, nobody)
        sums = torch.empty(2 * helpers * units * size, dtype=torch.float32, device=arrivals.device)
        return cls(helpers, max(256, power_of_two(rows)), sums, arrivals)
