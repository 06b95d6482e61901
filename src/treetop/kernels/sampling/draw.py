"""Drawing tokens on a GPU: temperature, top-k, top-p, min-p and the draw in one launch, without sorting.

A logit's weight is exp((logit - best) / temperature), so that min-p compares with it directly. What top-k and top-p
keep is a prefix of the tokens ordered by logit, hence a lowest logit and how many of its equals; both are found by a
search over the ordered bits of a logit, where one pass over the row counts, or weighs, what lies above three
thresholds. The first pass bounds the searches: top-k by the lowest of the lanes' best, top-p by the logit below which
all together weigh too little. The draw finds its block of the vocabulary first, then the token in it.

Weights are float32; a lane adds its own in float32, lanes and the blocks of a draw are added in float64, all in a fixed
order: the token depends on the row's logits, its parameters and its uniform alone. It may differ from the reference's
where a uniform, a top-p mass or a min-p weight falls on an edge within those roundings.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import launch_options, pdl_wait
from treetop.kernels.sampling.sampling import TEMPERATURES, SampledTokens, SamplingMetadata
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, jit, lanes, tl

_BLOCK = 8192
"""Logits that a program looks at in a step; a pass over a row is bound by the latency of its steps."""


def draw_tokens(
    logits: Tensor, sampler: SamplingMetadata, rows: Tensor, positions: Tensor, filtered: bool, gpu: GpuTraits
) -> SampledTokens:
    """`draw_reference` in one launch, which is the same with filters and without.

    logits: contiguous; float32 or narrower. A token of logits that are not finite has no meaning.
    """
    count, width, vocab = logits.shape
    assert logits.is_contiguous()
    assert rows.is_contiguous()
    params = sampler.params
    token = torch.empty((count, width), dtype=torch.int64, device=logits.device)
    finite = torch.empty((count, width), dtype=torch.bool, device=logits.device)
    logprob = torch.empty((count, width), dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, lanes(vocab))
    _draw_kernel[(count * width,)](
        token, finite.view(torch.uint8), logprob, logits, rows, positions,
        params.temperature, params.top_k, params.top_p, params.min_p, sampler.seed,
        vocab, width, *positions.stride(),
        block=block, block_b=lanes(-(-vocab // block)), coldest=TEMPERATURES[0],
        hottest=TEMPERATURES[1], overlap=gpu.can_overlap,
        num_warps=max(4, min(16, block // 512)), **launch_options(gpu),
    )  # fmt: skip
    return SampledTokens(token, finite, logprob)


def draw_wide(
    logits: Tensor, sampler: SamplingMetadata, rows: Tensor, positions: Tensor, filtered: bool, gpu: GpuTraits
) -> SampledTokens:
    """`draw_tokens` of logits in float32 whatever their dtype: as `kernels.sampling.process` leaves those of a whole
    batch.

    A row that changes no logit of its own has the same sums beside one that does and without.
    """
    return draw_tokens(logits.to(torch.float32), sampler, rows, positions, filtered, gpu)


@jit
def _draw_kernel(
    token: Arg, finite: Arg, logprob: Arg, logits: Arg, rows: Arg, positions: Arg, temperatures: Arg, top_ks: Arg,
    top_ps: Arg, min_ps: Arg, seeds: Arg, vocab: Arg, width: Arg, position_row: Arg, position_node: Arg,
    block: constexpr, block_b: constexpr, coldest: constexpr, hottest: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """One node a program. token: [rows * T] int64; finite: the same, bytes; logprob: float32. Grid (rows * T,)."""
    pdl_wait(overlap, early=True)
    node = tl.program_id(0).to(tl.int64)
    line = logits + node * vocab
    row = tl.load(rows + node // width)
    temperature = tl.load(temperatures + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row).to(tl.float64), tl.load(min_ps + row)
    lane = tl.arange(0, block)

    highest = tl.full([block], float("-inf"), tl.float32)
    place = tl.zeros([block], tl.int32)
    strange = tl.zeros([block], tl.int32)
    for start in range(0, vocab, block):
        value = _load(line, start + lane, vocab).to(tl.float32)
        strange = strange | (value != value).to(tl.int32)  # noqa: PLR0124 (NaN)
        place = tl.where(value > highest, start + lane, place)
        highest = tl.maximum(highest, value)
    best = tl.max(highest, 0)
    first = tl.min(tl.where(highest == best, place, 0x7FFFFFFF), 0)
    sound = (tl.abs(best) < float("inf")) & (tl.max(strange, 0) == 0)
    tl.store(finite + node, sound.to(tl.uint8))

    result, chance = tl.minimum(first, vocab - 1).to(tl.int64), tl.full([], 0.0, tl.float32)
    if sound & (temperature > 0):
        scale = 1.4426950408889634 / tl.minimum(tl.maximum(temperature, coldest), hottest)
        top = tl.max(_ordered(highest.to(logits.dtype.element_ty)), 0).to(tl.int64)
        lowest = tl.full([], -0x8000 if logits.dtype.element_ty.primitive_bitwidth == 16 else -0x80000000, tl.int64)
        cut, spare = lowest, tl.full([], 0, tl.int64)
        filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1)
        if filtered:
            goal = tl.zeros([], tl.float64)
            equals = tl.full([], 0x7FFFFFFF, tl.int64)  # of the lowest logit that top-k keeps
            if (top_k > 0) & (top_k < vocab):
                if top_k <= block:  # each lane's highest is one of at least `block` logits from their lowest on
                    lowest = tl.min(_ordered(highest.to(logits.dtype.element_ty)), 0).to(tl.int64)
                lowest = _cut(line, vocab, best, scale, lowest, top + 1, top_k.to(tl.float64), False, block)
                above = _above(line, vocab, best, scale, lowest + 1, False, block)
                equals = top_k - above.to(tl.int64)
                goal = _above(line, vocab, best, scale, lowest + 1, True, block)
                goal += equals.to(tl.float64) * _weight_of(lowest, logits.dtype.element_ty, best, scale).to(tl.float64)
            else:
                goal = _above(line, vocab, best, scale, lowest, True, block)
            cut, spare = lowest, equals
            if top_p < 1:
                # Weights below (1 - top_p) * mass / vocab are too little together; half of that, as sums are rounded.
                light = tl.log2(((1 - top_p) * goal / (2 * vocab)).to(tl.float32))
                low = _ordered((best + light / scale).to(logits.dtype.element_ty)).to(tl.int64)
                goal = tl.maximum(goal * top_p, 1e-30)  # the best one always stays
                cut = _cut(line, vocab, best, scale, tl.maximum(lowest, low), top + 1, goal, True, block)
                more = goal - _above(line, vocab, best, scale, cut + 1, True, block)
                weight = _weight_of(cut, logits.dtype.element_ty, best, scale).to(tl.float64)
                spare = tl.ceil(tl.minimum(more / tl.maximum(weight, 1e-300), 1e9)).to(tl.int64)

        parts = tl.zeros([block_b], tl.float64)
        part = tl.arange(0, block_b)
        known = tl.full([], 0, tl.int64)  # equals of the cut in the blocks before
        ties = tl.zeros([block_b], tl.int64)
        for start in range(0, vocab, block):
            weight, equal = _kept(line, start, vocab, best, scale, min_p, cut, spare, known, filtered, block)
            here = part == start // block
            parts = tl.where(here, tl.sum(weight.to(tl.float64), 0), parts)
            ties = tl.where(here, known, ties)
            known += equal
        sums = tl.cumsum(parts, 0)
        position = tl.load(positions + node // width * position_row + node % width * position_node)
        uniform = _uniform(tl.load(seeds + row), position + 1)
        total = tl.max(sums, 0)
        target = uniform * total
        chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32), 0), block_b - 1)
        before = tl.max(tl.where(part < chosen, sums, 0.0), 0)
        known = tl.sum(tl.where(part == chosen, ties, 0), 0)
        weight, equal = _kept(line, chosen * block, vocab, best, scale, min_p, cut, spare, known, filtered, block)
        within = before + tl.cumsum(weight.to(tl.float64), 0)
        last = tl.max(tl.where(weight > 0, lane, 0), 0)
        place_in = tl.minimum(tl.sum((within <= target).to(tl.int32), 0), last)
        result = (chosen * block + place_in).to(tl.int64)
        own = tl.sum(tl.where(lane == place_in, weight, 0.0), 0)
        chance = tl.log(own) - tl.log(total.to(tl.float32))
    tl.store(token + node, result)
    tl.store(logprob + node, chance)


@jit
def _load(line: Arg, at: Arg, vocab: Arg) -> Arg:
    """Logits, -inf past the vocabulary."""
    return tl.load(line + at, mask=at < vocab, other=float("-inf"))


@jit
def _ordered(value: Arg) -> Arg:
    """Integers that order like logits, int32; 16-bit types keep to 16 bits, which makes the search short."""
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = tl.where((bits & 0x7FFF) == 0, 0, bits ^ ((bits >> 15) & 0x7FFF))  # the two zeros are equal
    else:
        bits = value.to(tl.int32, bitcast=True)
        ordered = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return ordered


@jit
def _weight_of(key: Arg, dtype: constexpr, best: Arg, scale: Arg) -> Arg:
    """The weight of the logit whose ordered integer is `key`."""
    if dtype.primitive_bitwidth == 16:
        bits = key.to(tl.int32)
        value = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    else:
        bits = key.to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp2((value - best) * scale)


@jit
def _share(value: Arg, at: Arg, vocab: Arg, best: Arg, scale: Arg, weighed: constexpr) -> Arg:
    """What logits `value` at tokens `at` add to a sum, float32: their weights, or one each; 0 past the vocabulary."""
    return tl.exp2((value.to(tl.float32) - best) * scale) if weighed else (at < vocab).to(tl.float32)


@jit
def _above(line: Arg, vocab: Arg, best: Arg, scale: Arg, threshold: Arg, weighed: constexpr, block: constexpr) -> Arg:
    """How many logits have an ordered integer of at least `threshold`, or their weight; float64."""
    lane = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for start in range(0, vocab, block):
        value = _load(line, start + lane, vocab)
        each = _share(value, start + lane, vocab, best, scale, weighed)
        total += tl.where(_ordered(value) >= threshold.to(tl.int32), each, 0.0)
    return tl.sum(total.to(tl.float64), 0)


@jit
def _cut(
    line: Arg, vocab: Arg, best: Arg, scale: Arg, low: Arg, high: Arg, goal: Arg, weighed: constexpr, block: constexpr
) -> Arg:
    """The largest threshold in low .. high - 1 at or above which lies at least `goal`, as it does above `low`."""
    lane = tl.arange(0, block)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        one, two, three = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        total_1 = tl.zeros([block], tl.float32)
        total_2 = tl.zeros([block], tl.float32)
        total_3 = tl.zeros([block], tl.float32)
        for start in range(0, vocab, block):
            value = _load(line, start + lane, vocab)
            each = _share(value, start + lane, vocab, best, scale, weighed)
            key = _ordered(value)
            total_1 += tl.where(key >= one.to(tl.int32), each, 0.0)
            total_2 += tl.where(key >= two.to(tl.int32), each, 0.0)
            total_3 += tl.where(key >= three.to(tl.int32), each, 0.0)
        enough_1 = tl.sum(total_1.to(tl.float64), 0) >= goal
        enough_2 = (tl.sum(total_2.to(tl.float64), 0) >= goal) & (two < high)
        enough_3 = (tl.sum(total_3.to(tl.float64), 0) >= goal) & (three < high)
        new_low = tl.where(enough_3, three, tl.where(enough_2, two, tl.where(enough_1, one, low)))
        high = tl.where(enough_3, high, tl.where(enough_2, three, tl.where(enough_1, two, one)))
        low = new_low
    return low


@jit
def _kept(
    line: Arg, start: Arg, vocab: Arg, best: Arg, scale: Arg, min_p: Arg, cut: Arg, spare: Arg, known: Arg,
    filtered: Arg, block: constexpr,
) -> Arg:  # fmt: skip
    """Weights of one block, 0 where filtered, and how many equals of the cut it has. known: those before it."""
    at = start + tl.arange(0, block)
    value = _load(line, at, vocab)
    weight = _share(value, at, vocab, best, scale, True)
    weight = tl.where(weight >= min_p, weight, 0.0)
    equal = tl.full([], 0, tl.int64)
    if filtered:
        key = _ordered(value)
        same = ((key == cut.to(tl.int32)) & (at < vocab)).to(tl.int32)
        rank = known + (tl.cumsum(same, 0) - same).to(tl.int64)
        weight = tl.where((key > cut.to(tl.int32)) | ((same > 0) & (rank < spare)), weight, 0.0)
        equal = tl.sum(same, 0).to(tl.int64)
    return weight, equal


@jit
def _uniform(seed: Arg, position: Arg) -> Arg:
    """`kernels.sampling.sampling.philox_uniform` of one draw."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    bits, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return bits.to(tl.float64) * 2.3283064365386963e-10
