"""What a program of compressed attention in Gluon is made of: shared memory, and two warp groups that take turns.

A program has 64 queries, each a head's, of one row. Its items are 64 keys each: the row's tail, if it has it, then
pages from the last to the first. An item is key and value at once, in two halves and its part with RoPE:

    shared memory   queries [64, 576] | place 0: even items [64, 576] | place 1: odd items [64, 576] | weights [64, 64]
    first group     scores and softmax of even items | sums of columns   0..255, of all items
    second group    scores and softmax of odd items  | sums of columns 256..511, of all items

The weights of odd items lie where the queries' part with RoPE was, which both groups have in registers. Of two items:

    first group     softmax 0 | values 0, left  |           | values 1, left  | scores of the next even item
    second group              | values 0, right | softmax 1 | values 1, right | scores of the next odd item

So tensor cores work for one group while the other is at its softmax. Weights of both count from one peak, which passes
from group to group: what the sums shrink by is told with the weights. A half of a place belongs to one group, which
begins the next copy there as soon as it has read it, or says that it is free.

A page that is not full and the tail come first: there keys past the end are masked, and their values, whatever lies
there, are set to 0, which no later item needs.

Source: this division of work is FlashMLA's (deepseek-ai/FlashMLA, "seesaw" scheduling); the online softmax is Milakov
and Gimelshein, arXiv:1805.02867.
"""

from treetop.kernels.gluon_guard import (
    async_load,
    block_barrier,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from treetop.kernels.triton_guard import Arg


@gluon_jit
def allocate_places(dtype: gl.constexpr, gathered: gl.constexpr) -> Arg:
    """A program's shared memory, and barriers: for what is copied, one each, and for what a group tells the other."""
    tiles: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    left = gl.allocate_shared_memory(dtype, [2, 64, 256], tiles)
    right = gl.allocate_shared_memory(dtype, [2, 64, 256], tiles)
    k_rope = gl.allocate_shared_memory(dtype, [2, 64, 64], tiles)
    q_left = gl.allocate_shared_memory(dtype, [1, 64, 256], tiles)
    q_right = gl.allocate_shared_memory(dtype, [1, 64, 256], tiles)
    q_rope = gl.allocate_shared_memory(dtype, [1, 64, 64], tiles)
    weights_even = gl.allocate_shared_memory(dtype, [1, 64, 64], tiles)
    peaks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    masses = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    full_q = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    full_left = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    full_right = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    told = gl.allocate_shared_memory(gl.int64, [4, 1], barrier)
    mbarrier.init(full_q.index(0), count=1)
    for each in gl.static_range(2):
        mbarrier.init(full_left.index(each), count=1)
        mbarrier.init(full_right.index(each), count=1)
    for each in gl.static_range(4):
        mbarrier.init(told.index(each), count=1)
    free_left, free_right = full_left, full_right
    if gathered:
        free_left = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        free_right = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
        for each in gl.static_range(2):
            mbarrier.init(free_left.index(each), count=1)
            mbarrier.init(free_right.index(each), count=1)
    queries = (q_left, q_right, q_rope, full_q)
    keys = (left, right, k_rope, full_left, full_right, free_left, free_right)
    fence_async_shared()
    block_barrier()
    return queries, keys, (weights_even, peaks, shrinks, masses, told)


@gluon_jit
def begin_left(latents: Arg, at: Arg, keys: Arg, place: gl.constexpr, there_is: Arg) -> None:
    """Begin to copy the first 256 columns of an item from row `at` on of `latents`, if there is one.

    keys: of `allocate_places`. latents: a descriptor of blocks [64, 256].
    """
    full = keys[3].index(place)
    mbarrier.expect(full, 64 * 256 * 2, pred=there_is)
    async_load(latents, [at, 0], full, keys[0].index(place), pred=there_is)


@gluon_jit
def begin_right(latents: Arg, ropes: Arg, at: Arg, keys: Arg, place: gl.constexpr, there_is: Arg) -> None:
    """Begin to copy the other 320. ropes: a descriptor of blocks [64, 64]."""
    full = keys[4].index(place)
    mbarrier.expect(full, 64 * 320 * 2, pred=there_is)
    async_load(latents, [at, 256], full, keys[1].index(place), pred=there_is)
    async_load(ropes, [at, 512], full, keys[2].index(place), pred=there_is)


@gluon_jit
def begin_queries(latents: Arg, ropes: Arg, at: Arg, queries: Arg) -> None:
    """Begin to copy a program's queries, from row `at` on."""
    q_left, q_right, q_rope, full = queries
    mbarrier.expect(full.index(0), 64 * 576 * 2)
    async_load(latents, [at, 0], full.index(0), q_left.index(0))
    async_load(latents, [at, 256], full.index(0), q_right.index(0))
    async_load(ropes, [at, 512], full.index(0), q_rope.index(0))


@gluon_jit
def _clear_beyond(values: Arg, filled: Arg, layout: gl.constexpr) -> None:
    """Set half an item's values [64, 256] to 0 from key `filled` on: a weight of 0 times NaN is NaN."""
    for part in gl.static_range(4):
        some = values.slice(part * 64, 64, dim=1)
        stored = gl.arange(0, 64, gl.SliceLayout(1, layout)) < filled
        some.store(gl.where(stored[:, None], some.load(layout), 0.0))


@gluon_jit
def _only_stored(scores: Arg, left: Arg, right: Arg, filled: Arg, of_scores: gl.constexpr) -> Arg:
    """The scores of an item of which `filled` keys are stored; values past these are set to 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _clear_beyond(left, filled, layout)
    _clear_beyond(right, filled, layout)
    fence_async_shared()
    return gl.where((gl.arange(0, 64, gl.SliceLayout(0, of_scores)) < filled)[None, :], scores, float("-inf"))


@gluon_jit
def _nought() -> Arg:
    """0, of which the compiler's first half does not know: else it computes all addresses ahead, and spills them."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _begin_scores(queries: Arg, rope: Arg, keys: Arg, nought: Arg, place: Arg, of_scores: gl.constexpr) -> Arg:
    """The products of queries and an item's keys [64, 64], as three groups of wgmma that are not waited for.

    rope: of the queries, in registers.
    """
    scores = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, of_scores))
    left, right, k_rope = keys[0].index(place), keys[1].index(place), keys[2].index(place)
    scores = warpgroup_mma(queries[0].index(nought), left.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(queries[1].index(nought), right.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma(rope, k_rope.permute((1, 0)), scores, is_async=True)


@gluon_jit
def _tell_weights(
    scores: Arg, peak: Arg, scale: Arg, weights: Arg, peaks: Arg, shrinks: Arg, told: Arg, group: gl.constexpr
) -> Arg:
    """An item's weights, for both groups. Returns the peak, by what all sums shrink, and the weights' sum."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    shrink = gl.exp2(peak - new_peak)
    weight = gl.exp2(scores * scale - new_peak[:, None])
    weights.store(weight.to(weights.dtype))
    peaks.index(group).store(new_peak)
    shrinks.index(group).store(shrink)
    fence_async_shared()
    mbarrier.arrive(told.index(group), count=1)
    return new_peak, shrink, gl.sum(weight, 1)


@gluon_jit
def _cells(item: Arg, column: gl.constexpr, of_sums: gl.constexpr) -> Arg:
    """Where 256 columns of results [..., 512] lie, [64, 256] int64; 64 times nought, for pairs are stored at once."""
    return item[:, None] * 512 + (column + _nought() * 64) + gl.arange(0, 256, gl.SliceLayout(0, of_sums))[None, :]


@gluon_jit
def _store(
    out: Arg, part: Arg, sums: Arg, total: Arg, whole: Arg, item: Arg, lane: Arg, items: Arg, column: gl.constexpr,
    of_sums: gl.constexpr,
) -> None:  # fmt: skip
    """256 columns of the results, of a row that is `whole` into `out`, else into `part`, from row `item` on."""
    seen = total != 0  # also of NaN, which must show
    factor = gl.where(seen, 1.0 / gl.where(seen, total, 1.0), 0.0)
    sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, of_sums))[:, None]
    lane = gl.convert_layout(lane, gl.SliceLayout(1, of_sums))
    there = (lane < items)[:, None]
    if whole:
        gl.store(out + _cells(item + lane, column, of_sums), sums.to(out.dtype.element_ty), mask=there)
    else:
        gl.store(part + _cells(item + lane, column, of_sums), sums, mask=there)


@gluon_jit
def first_group(
    out: Arg, part: Arg, lse: Arg, latents: Arg, places: Arg, table: Arg, first: Arg, count: Arg, has_tail: Arg,
    filled: Arg, mask: Arg, scale: Arg, whole: Arg, item: Arg, tile: Arg, n: Arg, t: Arg, heads: Arg, mask_query: Arg,
    mask_column: Arg, gathered: gl.constexpr,
) -> None:  # fmt: skip
    """Even items' scores and softmax; columns 0 to 255 of the sums; the log-sum-exp.

    places: of `allocate_places`, into which copies of queries and of items 0 and 1 have begun. table: of the row's
    pages, of which item i is number `first - i`. count: of items. has_tail: whether item 0 is the tail, of t columns;
    filled: keys of the last page. mask: of the row. whole: whether these are all items of the row: then results go to
    `out`, else to `part` and `lse`, from row `item` on. gathered: others copy what comes after the first two items, and
    are told which halves are free.
    """
    queries, keys, between = places
    q_rope, full_q = queries[2], queries[3]
    left, right, full_left, full_right = keys[0], keys[1], keys[3], keys[4]
    weights_even, peaks, shrinks, masses, told = between
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    by_query: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_row: gl.constexpr = gl.SliceLayout(1, of_sums)

    page_even, page_odd = first, first
    if not gathered:
        page_even = gl.load(table + gl.maximum(first - 2, 0))
        page_odd = gl.load(table + gl.maximum(first - 3, 0))
    mbarrier.wait(full_q.index(0), 0)
    rope = q_rope.index(0).load(gl.DotOperandLayout(0, of_scores, 2))
    mbarrier.wait(full_left.index(0), 0, pred=count > 0)
    mbarrier.wait(full_right.index(0), 0, pred=count > 0)
    nought = _nought()
    ahead = _begin_scores(queries, rope, keys, nought, nought, of_scores)
    scores, rope = warpgroup_mma_wait(0, [ahead, rope])
    lane = tile * 64 + gl.arange(0, 64, by_query)
    if has_tail > 0:
        scores = _only_stored(scores, left.index(0), right.index(0), t, of_scores)
        key = gl.arange(0, 64, gl.SliceLayout(0, of_scores))
        shown = mask + (lane // heads * mask_query)[:, None] + (key * mask_column)[None, :]
        visible = gl.load(shown, mask=(lane < n * heads)[:, None] & (key < t)[None, :], other=0) != 0
        scores = gl.where(visible, scores, float("-inf"))
    elif (count > 0) & (filled < 64):
        scores = _only_stored(scores, left.index(0), right.index(0), filled, of_scores)
    sums = gl.zeros([64, 256], gl.float32, of_sums)
    peak = gl.full([64], -1e30, gl.float32, by_query)
    mass = gl.zeros([64], gl.float32, by_query)
    for pair in range(0, count // 2):
        turn = pair & 1
        more, both = 2 * pair + 2 < count, 2 * pair + 3 < count
        nought = _nought()
        peak, shrink, of_item = _tell_weights(scores, peak, scale, weights_even.index(0), peaks, shrinks, told, 0)
        mass = mass * shrink + of_item
        sums = sums * gl.convert_layout(shrink, of_row)[:, None]
        token = warpgroup_mma(weights_even.index(nought), left.index(nought), sums, is_async=True)
        sums = warpgroup_mma_wait(0, [token])
        block_barrier()  # all have read it
        if gathered:
            mbarrier.arrive(keys[5].index(0), count=1)
        else:
            begin_left(latents, page_even * 64, keys, 0, more)
        mbarrier.wait(told.index(1), turn)
        peak, shrink = peaks.index(1).load(by_query), shrinks.index(1).load(by_query)
        mass = mass * shrink
        sums = sums * gl.convert_layout(shrink, of_row)[:, None]
        token = warpgroup_mma(q_rope.index(nought), left.index(nought + 1), sums, is_async=True)  # odd weights by now
        mbarrier.wait(full_left.index(0), turn ^ 1, pred=more)
        mbarrier.wait(full_right.index(0), turn ^ 1, pred=more)
        ahead = _begin_scores(queries, rope, keys, nought, nought, of_scores)
        sums = warpgroup_mma_wait(3, [token])
        block_barrier()
        if gathered:
            mbarrier.arrive(keys[5].index(1), count=1)
        else:
            begin_left(latents, page_odd * 64, keys, 1, both)
        if not gathered:
            page_even = gl.load(table + gl.maximum(first - 2 * pair - 4, 0))
            page_odd = gl.load(table + gl.maximum(first - 2 * pair - 5, 0))
        scores, rope = warpgroup_mma_wait(0, [ahead, rope])  # after the last item of none, and nobody reads them
    if count % 2 == 1:
        nought = _nought()
        peak, shrink, of_item = _tell_weights(scores, peak, scale, weights_even.index(0), peaks, shrinks, told, 0)
        mass = mass * shrink + of_item
        sums = sums * gl.convert_layout(shrink, of_row)[:, None]
        sums = warpgroup_mma(weights_even.index(nought), left.index(nought), sums)
    masses.index(0).store(mass)
    mbarrier.arrive(told.index(2), count=1)
    mbarrier.wait(told.index(3), 0)
    total = mass + masses.index(1).load(by_query)
    seen = total != 0
    log_mass = gl.where(seen, (peak + gl.log2(gl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))
    if not whole:
        gl.store(lse + item + lane, log_mass, mask=lane < n * heads)
    _store(out, part, sums, total, whole, item, lane, n * heads, 0, of_sums)


@gluon_jit
def second_group(
    out: Arg, part: Arg, latents: Arg, ropes: Arg, places: Arg, table: Arg, first: Arg, count: Arg, has_tail: Arg,
    filled: Arg, scale: Arg, whole: Arg, item: Arg, tile: Arg, n: Arg, heads: Arg, gathered: gl.constexpr,
) -> None:  # fmt: skip
    """Odd items' scores and softmax; columns 256 to 511 of the sums. The arguments are `first_group`'s."""
    queries, keys, between = places
    q_rope, full_q = queries[2], queries[3]
    left, right, full_left, full_right = keys[0], keys[1], keys[3], keys[4]
    weights_even, peaks, shrinks, masses, told = between
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    by_query: gl.constexpr = gl.SliceLayout(1, of_scores)
    of_row: gl.constexpr = gl.SliceLayout(1, of_sums)

    page_even, page_odd = first, first
    if not gathered:
        page_even = gl.load(table + gl.maximum(first - 2, 0))
        page_odd = gl.load(table + gl.maximum(first - 3, 0))
    mbarrier.wait(full_q.index(0), 0)
    rope = q_rope.index(0).load(gl.DotOperandLayout(0, of_scores, 2))
    mbarrier.wait(full_right.index(1), 0, pred=count > 1)
    mbarrier.wait(full_left.index(1), 0, pred=count > 1)
    nought = _nought()
    ahead = _begin_scores(queries, rope, keys, nought, nought + 1, of_scores)
    scores, rope = warpgroup_mma_wait(0, [ahead, rope])
    if (count > 1) & (has_tail > 0) & (filled < 64):
        scores = _only_stored(scores, left.index(1), right.index(1), filled, of_scores)
    sums = gl.zeros([64, 256], gl.float32, of_sums)
    mass = gl.zeros([64], gl.float32, by_query)
    pairs = count // 2
    for pair in range(0, pairs):
        turn = pair & 1
        more, both = 2 * pair + 2 < count, 2 * pair + 3 < count
        nought = _nought()
        mbarrier.wait(told.index(0), turn)
        peak, shrink = peaks.index(0).load(by_query), shrinks.index(0).load(by_query)
        mass = mass * shrink
        sums = sums * gl.convert_layout(shrink, of_row)[:, None]
        token = warpgroup_mma(weights_even.index(nought), right.index(nought), sums, is_async=True)
        _, shrink, of_item = _tell_weights(scores, peak, scale, q_rope.index(0), peaks, shrinks, told, 1)
        mass = mass * shrink + of_item
        sums = warpgroup_mma_wait(0, [token])
        block_barrier()  # all have read it
        if gathered:
            mbarrier.arrive(keys[6].index(0), count=1)
        else:
            begin_right(latents, ropes, page_even * 64, keys, 0, more)
        sums = sums * gl.convert_layout(shrink, of_row)[:, None]
        token = warpgroup_mma(q_rope.index(nought), right.index(nought + 1), sums, is_async=True)
        sums = warpgroup_mma_wait(0, [token])
        block_barrier()
        if gathered:
            mbarrier.arrive(keys[6].index(1), count=1)
        else:
            begin_right(latents, ropes, page_odd * 64, keys, 1, both)
        if not gathered:
            page_even = gl.load(table + gl.maximum(first - 2 * pair - 4, 0))
            page_odd = gl.load(table + gl.maximum(first - 2 * pair - 5, 0))
        mbarrier.wait(full_right.index(1), turn ^ 1, pred=both)
        mbarrier.wait(full_left.index(1), turn ^ 1, pred=both)
        ahead = _begin_scores(queries, rope, keys, nought, nought + 1, of_scores)
        scores, rope = warpgroup_mma_wait(0, [ahead, rope])
    if count % 2 == 1:
        nought = _nought()
        mbarrier.wait(told.index(0), pairs & 1)
        shrink = shrinks.index(0).load(by_query)
        mass = mass * shrink
        sums = sums * gl.convert_layout(shrink, of_row)[:, None]
        sums = warpgroup_mma(weights_even.index(nought), right.index(nought), sums)
    masses.index(1).store(mass)
    mbarrier.arrive(told.index(3), count=1)
    mbarrier.wait(told.index(2), 0)
    total = mass + masses.index(0).load(by_query)
    lane = tile * 64 + gl.arange(0, 64, by_query)
    _store(out, part, sums, total, whole, item, lane, n * heads, 256, of_sums)
