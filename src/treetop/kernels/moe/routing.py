"""Routes on a GPU: a router's logits, the experts of each token and their weights, and the tiles of each expert.

All of it stays on the device, in two launches for few tokens and three for many. What a route is and its plain
operations are in `kernels.moe.routes`; how assignments are put in order and cut into tiles, in `kernels.moe.placing`.
"""

import torch
from torch import Tensor

from treetop.kernels.dependent_launch import ask_for, launch_options, pdl_wait
from treetop.kernels.moe.placing import (
    may_be_narrow,
    most_tiles,
    place_by_rank_kernel,
    place_kernel,
    tile_rows,
    write_order,
    write_tiles,
)
from treetop.kernels.moe.routes import LeftChoice, Router, RouterKind, Routes, Tiles
from treetop.kernels.sort_key import index_of, key_of
from treetop.kernels.triton_guard import Arg, GpuTraits, constexpr, gpu_traits, jit, lanes, power_of_two, tl

_ONE_PROGRAM = 2**11
"""Tokens times experts, both as powers of two, up to which one program does all that comes after the logits."""
_BY_TOKEN = (256, 8192)
"""Above so many tokens, and up to so many assignments, a token is one warp's and each assignment finds its place by
looking at all others, where bits may depend on the number of tokens: fewer are as fast in programs of several."""
_MANY = 1024
"""Tokens up to which a router's product is cut for few rows, where bits may depend on how many there are."""
_LEFT = 128
"""Experts up to which each program of a first product compares all of them, to find its own; more take longer."""
_OWN = 32
"""Assignments that a program finds places for."""
_MAX_BLOCKS = 64
"""Blocks of tokens where there are more, of 4 to 64 tokens as long as that will do."""


def route(
    x: Tensor,
    router: Router,
    live: Tensor | None,
    gpu: GpuTraits,
    batch_invariant: bool = False,
    *,
    tells: bool = False,
) -> Routes:
    """`route_reference`, and the tiles: in two launches for few tokens, three for many. x, live: contiguous.

    batch_invariant: a token has the same bits in any batch: logits are sums without a cut, and programs have as many
        tokens
    whatever there are.
    """
    spec, tokens, options = router.spec, len(x), launch_options(gpu)
    narrow = router.narrow and may_be_narrow(gpu, batch_invariant)
    experts, rows = spec.num_experts, tile_rows(len(x), router.spec, narrow)
    assert x.is_contiguous()
    assert router.weight.is_contiguous()
    assert live is None or live.is_contiguous()
    by_token = not batch_invariant and tokens > _BY_TOKEN[0] and tokens * spec.top_k <= _BY_TOKEN[1]
    counts = torch.empty((1 if by_token else 0, experts), dtype=torch.int32, device=x.device)
    logits = _logits(x, router.weight, router.bias, gpu, batch_invariant, counts)
    expert = torch.empty((tokens, spec.top_k), dtype=torch.int32, device=x.device)
    weight = torch.empty((tokens, spec.top_k), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, spec.top_k), dtype=torch.int16, device=x.device) if tells else None
    shared = weight.new_empty(tokens) if router.gates_shared else None
    numbers = torch.empty((3, most_tiles(tokens, rows, spec)), dtype=torch.int32, device=x.device)
    order, number = torch.empty_like(expert).view(-1), numbers.new_empty(1)
    if router.leaves and tokens == 1 and not batch_invariant and _can_leave(router):
        tiles = Tiles(rows, order, numbers[0], numbers[1], numbers[2], number)
        return Routes(expert, weight, tiles, False, spec.of_inputs, chosen, left=LeftChoice(logits, live, spec))
    block, one = (1, False) if by_token else _tokens_of_a_program(tokens, experts, batch_invariant)
    blocks = 1 if one else -(-tokens // block)
    counts = counts if by_token else counts.new_empty((blocks, experts))
    choice = {
        "top_k": spec.top_k, "experts": experts, "block": block, "block_e": lanes(experts), "overlap": gpu.can_overlap,
        "num_warps": 1 if by_token else 4 if block * lanes(experts) <= 4096 else 8, **options,
    }  # fmt: skip
    placed = order, *numbers, number, counts, tokens, blocks, numbers.shape[1]
    sigmoid = spec.kind is RouterKind.SIGMOID
    _choose_kernel[(blocks,)](
        expert, weight, expert if chosen is None else chosen, logits,
        logits if router.correction is None else router.correction,
        logits if router.factor is None else router.factor, expert if live is None else live,
        weight if shared is None else shared, *placed, spec.scale, parts=len(logits),
        sigmoid=sigmoid, of_chosen=spec.kind is RouterKind.TOPK_SOFTMAX, renormalise=spec.renormalise,
        corrected=router.correction is not None, factored=router.factor is not None, masked=live is not None,
        groups=spec.groups, top_groups=spec.top_groups, group_best=spec.group_best, block_g=lanes(spec.groups),
        places=one, rows=rows, block_k=lanes(spec.top_k), first=router.here.start, stop=router.here.stop,
        computing=spec.with_weights, tells=tells, shares=shared is not None, by_token=by_token, **choice,
    )  # fmt: skip
    if by_token:
        assignments = tokens * spec.top_k
        place_by_rank_kernel[(-(-assignments // _OWN),)](
            expert, order, *numbers, number, counts, assignments, numbers.shape[1], rows=rows, experts=experts,
            block_e=lanes(experts), own=_OWN, block=min(1024, max(_OWN, power_of_two(assignments))),
            overlap=gpu.can_overlap, num_warps=4, **options,
        )  # fmt: skip
    elif not one:
        place_kernel[(blocks,)](expert, *placed, rows=rows, **choice)
    tile_expert, start, count = numbers
    tiles = Tiles(rows, order, tile_expert, start, count, number)
    return Routes(expert, weight, tiles, router.apart, spec.of_inputs, chosen, shared)


def _can_leave(router: Router) -> bool:
    """Whether a token's experts are those of its largest logits, all here and not many, and weights are of what they
    give."""
    spec = router.spec
    if spec.num_experts > _LEFT:
        return False
    more = router.correction is not None or router.factor is not None or router.gates_shared or spec.of_inputs
    return router.here == range(spec.num_experts) and spec.groups == 1 and not more


def _tokens_of_a_program(tokens: int, experts: int, batch_invariant: bool) -> tuple[int, bool]:
    """How many tokens a program chooses experts for, and whether there is one program, which places them too."""
    if batch_invariant:  # what a program adds up over experts, it adds up as its block is laid out among threads
        block = min(max(_ONE_PROGRAM // lanes(experts), 4), 64)
        return block, tokens <= block
    one = lanes(tokens) * lanes(experts) <= _ONE_PROGRAM
    return lanes(tokens) if one else min(max(power_of_two(-(-tokens // _MAX_BLOCKS)), 4), 64), one


def linear_uncut(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` of x [rows, in] on a GPU, a row in the same bits in any batch, as routers have logits.

    The sum is rounded to the dtype of x before the bias is added.
    """
    nothing = torch.empty((0, 0), dtype=torch.int32, device=x.device)
    out = _logits(x.contiguous(), weight.contiguous(), None, gpu_traits(x.device), True, nothing)[0].to(x.dtype)
    return out if bias is None else out + bias


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, gpu: GpuTraits, batch_invariant: bool, zeros: Tensor
) -> Tensor:
    """A router's logits in parts [parts, tokens, experts] float32, which the next kernel adds up. zeros: [1 or 0, n],
    int32, which become 0."""
    tokens, hidden = x.shape
    experts, few = len(weight), tokens <= (64 if batch_invariant else _MANY)
    block_k = (256 if batch_invariant and x.element_size() == 2 else 64) if few else 32
    blocks = -(-hidden // block_k)
    splits = min(8, blocks) if few and not batch_invariant else 1
    share = -(-blocks // splits) * block_k
    splits = -(-hidden // share)
    block_m = max(16, power_of_two(min(tokens, 64)))
    parts = torch.empty((splits, tokens, experts), dtype=torch.float32, device=x.device)
    _logits_kernel[(-(-experts // 16), -(-tokens // block_m), splits)](
        parts, x, weight, x if bias is None else bias, zeros, tokens, hidden, share, experts,
        zeroed=zeros.numel(), block_z=lanes(max(zeros.numel(), 1)), has_bias=bias is not None,
        asks=lanes(-(-share // 64)) if gpu.can_overlap and few else 0,
        block_m=block_m, block_k=block_k, overlap=gpu.can_overlap,
        num_warps=4, num_stages=4, **launch_options(gpu),
    )  # fmt: skip
    return parts


@jit
def _logits_kernel(
    parts: Arg, x: Arg, weight: Arg, bias: Arg, zeros: Arg, tokens: Arg, hidden: Arg, share: Arg, experts: constexpr,
    zeroed: constexpr, block_z: constexpr, has_bias: constexpr, asks: constexpr, block_m: constexpr, block_k: constexpr,
    overlap: constexpr,
) -> None:  # fmt: skip
    """Logits of 16 experts and a block of tokens over one share of the hidden state; the first adds the bias.

    Grid (experts / 16, tokens / block_m, splits).
    """
    expert = tl.program_id(0) * 16 + tl.arange(0, 16)
    if asks > 0:  # 64 numbers of 16 bits are a cache line
        at = tl.program_id(2) * share + tl.arange(0, asks) * 64
        ask_for(weight + tl.minimum(expert, experts - 1)[:, None] * hidden + tl.minimum(at, hidden - 1)[None, :])
    pdl_wait(overlap, early=True)
    token = tl.program_id(1) * block_m + tl.arange(0, block_m)
    split = tl.program_id(2)
    if zeroed > 0:  # noqa: SIM102 - one for the compiler, one of programs
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (split == 0):
            of = tl.arange(0, block_z)
            tl.store(zeros + of, tl.zeros([block_z], tl.int32), mask=of < zeroed)
    lane = split * share + tl.arange(0, block_k)
    end = tl.minimum((split + 1) * share, hidden)
    weight_at = weight + expert[:, None] * hidden
    x_at = x + token.to(tl.int64)[:, None] * hidden
    total = tl.zeros([block_m, 16], tl.float32)
    for i in range(0, share, block_k):
        inside = (lane + i < end)[None, :]
        w = tl.load(weight_at + (lane + i)[None, :], mask=(expert < experts)[:, None] & inside, other=0.0)
        values = tl.load(x_at + (lane + i)[None, :], mask=(token < tokens)[:, None] & inside, other=0.0)
        total = tl.dot(values, tl.trans(w), total, input_precision="ieee")
    if has_bias and split == 0:
        total += tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    at = parts + (split * tokens + token)[:, None].to(tl.int64) * experts + expert[None, :]
    tl.store(at, total, mask=(token < tokens)[:, None] & (expert < experts)[None, :])


@jit
def _choose_kernel(
    expert_out: Arg, weight_out: Arg, chosen_out: Arg, logits: Arg, correction: Arg, factor: Arg, live: Arg,
    shared_out: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg, number: Arg, counts: Arg,
    tokens: Arg, blocks: Arg, maximum: Arg, scale: Arg, parts: constexpr, sigmoid: constexpr, of_chosen: constexpr,
    renormalise: constexpr,
    corrected: constexpr, factored: constexpr, masked: constexpr, groups: constexpr, top_groups: constexpr,
    group_best: constexpr, block_g: constexpr, places: constexpr, rows: constexpr, block_k: constexpr,
    first: constexpr, stop: constexpr, computing: constexpr, tells: constexpr, shares: constexpr,
    by_token: constexpr, top_k: constexpr, experts: constexpr, block: constexpr, block_e: constexpr, overlap: constexpr,
) -> None:  # fmt: skip
    """Experts and weights of a block of tokens, and how many of them each expert gets. Grid (blocks,).

    logits: [parts, tokens, experts], or one line more if `shares`. counts: [blocks, experts]. first, stop: the experts
    that are here, numbered from 0; a token's others are -1, or -2 from `computing` on, which have no weights. tells:
    `chosen_out` has them as they are. places: there is one block, whose assignments are put in order too. by_token:
    counts [1, experts] are of all tokens, each added by its own program. Ties go to the smaller index, and NaN is above
    all numbers, so that experts are experts.
    """
    pdl_wait(overlap, early=True)
    token = tl.program_id(0) * block + tl.arange(0, block)
    expert = tl.arange(0, block_e)
    there = (token < tokens)[:, None] & (expert < experts)[None, :]
    lines: constexpr = experts + 1 if shares else experts
    at = token[:, None] * lines + expert[None, :]
    score = tl.load(logits + at, mask=there, other=0.0)
    for part in tl.static_range(1, parts):
        score += tl.load(logits + part * tokens * lines + at, mask=there, other=0.0)
    if shares:
        gate_at = logits + token * lines + experts
        gate = tl.load(gate_at, mask=token < tokens, other=0.0)
        for part in tl.static_range(1, parts):
            gate += tl.load(gate_at + part * tokens * lines, mask=token < tokens, other=0.0)
        tl.store(shared_out + token, tl.sigmoid(gate), mask=token < tokens)
    if not sigmoid:
        score = tl.where((expert < experts)[None, :], score, float("-inf"))
    peak = tl.max(score, 1)
    if sigmoid:
        score = tl.sigmoid(score)
    elif not of_chosen:
        score = tl.exp(score - peak[:, None])
        score = score / tl.sum(tl.where((expert < experts)[None, :], score, 0.0), 1)[:, None]
    choice = score
    if corrected:
        choice += tl.load(correction + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    if groups > 1:
        choice = _in_best_groups(choice, expert, experts, groups, top_groups, group_best, block, block_e, block_g)
    lowest: constexpr = -0x7FFFFFFFFFFFFFFF
    index = tl.broadcast_to(expert[None, :], [block, block_e])
    keys = tl.where((expert < experts)[None, :], key_of(choice, index), lowest)
    alive = token < tokens
    if masked:
        alive = alive & (tl.load(live + token, mask=alive, other=0) != 0)
    slot = tl.full([block, block_e], -1, tl.int32)
    lane = tl.arange(0, block_k)
    weights = tl.zeros([block, block_k], tl.float32)
    ids = tl.full([block, block_k], -1, tl.int32)
    if tells:
        all_ids = tl.full([block, block_k], -1, tl.int32)
    if factored:
        own_factor = tl.load(factor + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
        factors = tl.zeros([block, block_k], tl.float32)
    for i in tl.static_range(top_k):
        chosen = index_of(tl.max(keys, 1))
        is_chosen = index == chosen[:, None]
        weight = tl.sum(tl.where(is_chosen, score, 0.0), 1)
        if of_chosen:
            weight = tl.exp(weight - peak)
        weights = tl.where((lane == i)[None, :], weight[:, None], weights)
        if factored:
            own = tl.sum(tl.where(is_chosen, own_factor, 0.0), 1)
            factors = tl.where((lane == i)[None, :], own[:, None], factors)
        here = alive & (chosen >= first) & (chosen < stop)
        ids = tl.where((lane == i)[None, :] & here[:, None], (chosen - first)[:, None], ids)
        if computing < experts:
            ids = tl.where((lane == i)[None, :] & (alive & (chosen >= computing))[:, None], -2, ids)
        if tells:
            all_ids = tl.where((lane == i)[None, :], chosen[:, None], all_ids)
        slot = tl.where((index == (chosen - first)[:, None]) & here[:, None], i, slot)
        keys = tl.where(is_chosen, lowest, keys)
    if renormalise or of_chosen:
        weights = weights / (tl.sum(weights, 1) + 1e-20)[:, None]
    if factored:
        weights = weights * factors
    own, stored = token[:, None] * top_k + lane[None, :], (token < tokens)[:, None] & (lane < top_k)[None, :]
    tl.store(weight_out + own, weights * scale, mask=stored)
    tl.store(expert_out + own, ids, mask=stored)
    if tells:
        tl.store(chosen_out + own, all_ids.to(tl.int16), mask=stored)
    count = tl.sum((slot >= 0).to(tl.int32), 0)
    if places:
        write_order(order, slot, token, tl.zeros([block_e], tl.int32), count, top_k)
        write_tiles(tile_expert, tile_start, tile_count, number, expert, count, tokens, maximum, rows)
    elif by_token:
        tl.atomic_add(counts + expert, count, mask=(count > 0) & (expert < experts), sem="relaxed")
    else:
        tl.store(counts + tl.program_id(0) * experts + expert, count, mask=expert < experts)


@jit
def ranks_of_one(
    logits: Arg, expert: Arg, parts: constexpr, sigmoid: constexpr, of_chosen: constexpr, experts: constexpr
) -> tuple[Arg, Arg, Arg]:
    """Of one token's experts [experts, up to a power of two] the score, the largest logit, and how many are better."""
    there = expert < experts
    score = tl.load(logits + expert, mask=there, other=0.0)
    for part in tl.static_range(1, parts):
        score += tl.load(logits + part * experts + expert, mask=there, other=0.0)
    if not sigmoid:
        score = tl.where(there, score, float("-inf"))
    peak = tl.max(score, 0)
    if sigmoid:
        score = tl.sigmoid(score)
    elif not of_chosen:
        score = tl.exp(score - peak)
        score = score / tl.sum(tl.where(there, score, 0.0), 0)
    lowest: constexpr = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(there, key_of(score, expert), lowest)
    rank = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
    return score, peak, tl.where(there, rank, experts)


@jit
def write_choice(
    expert_out: Arg, weight_out: Arg, chosen_out: Arg, order: Arg, tile_expert: Arg, tile_start: Arg, tile_count: Arg,
    number: Arg, expert: Arg, score: Arg, peak: Arg, rank: Arg, alive: Arg, scale: Arg, of_chosen: constexpr,
    renormalise: constexpr, tells: constexpr, top_k: constexpr, block_k: constexpr,
) -> None:  # fmt: skip
    """Routes and tiles of one token, a tile each of its experts, best first."""
    lane = tl.arange(0, block_k)
    held, taken = rank[:, None] == lane[None, :], lane < top_k
    chosen = tl.sum(tl.where(held, expert[:, None], 0), 0)
    weights = tl.sum(tl.where(held, score[:, None], 0.0), 0)
    if of_chosen:
        weights = tl.exp(weights - peak)
    weights = tl.where(taken, weights, 0.0)
    if renormalise or of_chosen:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(weight_out + lane, weights * scale, mask=taken)
    tl.store(expert_out + lane, tl.where(alive, chosen, -1), mask=taken)
    if tells:
        tl.store(chosen_out + lane, chosen.to(tl.int16), mask=taken)
    tl.store(order + lane, lane, mask=taken)
    tl.store(tile_expert + lane, tl.where(alive, chosen, 0), mask=taken)
    tl.store(tile_start + lane, lane, mask=taken)
    tl.store(tile_count + lane, alive.to(tl.int32) + lane * 0, mask=taken)
    tl.store(number, tl.where(alive, top_k, 0))


@jit
def _in_best_groups(
    choice: Arg, expert: Arg, experts: constexpr, groups: constexpr, top_groups: constexpr, group_best: constexpr,
    block: constexpr, block_e: constexpr, block_g: constexpr,
) -> Arg:  # fmt: skip
    """choice [block, experts], -inf outside the groups whose best have the largest sum."""
    size: constexpr = experts // groups
    group = tl.arange(0, block_g)
    index = tl.broadcast_to(group[None, :], [block, block_g])
    sums = tl.full([block, block_g], float("-inf"), tl.float32)
    for g in tl.static_range(groups):
        own = tl.where((expert // size == g)[None, :], choice, float("-inf"))
        first = tl.max(own, 1)
        at = tl.min(tl.where(own == first[:, None], expert[None, :], block_e), 1)
        both = first
        if size > 1 and group_best > 1:
            both += tl.max(tl.where(expert[None, :] == at[:, None], float("-inf"), own), 1)
        sums = tl.where(index == g, both[:, None], sums)
    lowest: constexpr = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(group[None, :] < groups, key_of(sums, index), lowest)
    taken = tl.zeros([block, block_e], tl.int32)
    for _ in tl.static_range(top_groups):
        best = index_of(tl.max(keys, 1))
        taken = tl.where((expert // size)[None, :] == best[:, None], 1, taken)
        keys = tl.where(index == best[:, None], lowest, keys)
    return tl.where(taken != 0, choice, float("-inf"))
