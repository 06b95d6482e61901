"""Experts: routing and grouped products against independent references, and the families that have them.

Tests of the kernels run on a GPU or in the interpreted session.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from support.grids import few_of
from support.interpreted import DEVICE, ON_GPU, needs_gpu, on_gpu_or_interpreted
from support.operation_cases import coded_weight
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme, decode, factor_apart
from treetop.kernels.gemm.tiles import in_turn, tile
from treetop.kernels.moe import experts as products
from treetop.kernels.moe import placing, routing
from treetop.kernels.moe.experts import Activation, Experts, experts_reference
from treetop.kernels.moe.routes import Router, RouterKind, RouterSpec, route_reference
from treetop.kernels.triton_guard import GpuTraits, gpu_traits

SPECS = {
    "softmax": RouterSpec(6, 2, RouterKind.SOFTMAX),
    "softmax, renormalised": RouterSpec(7, 3, RouterKind.SOFTMAX, renormalise=True),
    "of the chosen": RouterSpec(5, 4, RouterKind.TOPK_SOFTMAX, bias=True),
    "all of them": RouterSpec(3, 3, RouterKind.TOPK_SOFTMAX),
    "one": RouterSpec(9, 1, RouterKind.SOFTMAX),
    "sigmoid": RouterSpec(8, 3, RouterKind.SIGMOID, renormalise=True, scale=2.5, correction=True),
    "groups": RouterSpec(12, 3, RouterKind.SIGMOID, correction=True, groups=4, top_groups=2),
    "corrected softmax": RouterSpec(8, 3, RouterKind.SOFTMAX, renormalise=True, correction=True),
    "factors": RouterSpec(7, 3, RouterKind.SOFTMAX, renormalise=True, factors=True),
    "of inputs": RouterSpec(6, 2, RouterKind.SIGMOID, of_inputs=True),
    "one of inputs": RouterSpec(6, 1, RouterKind.SIGMOID, of_inputs=True),
    "without weights": RouterSpec(9, 4, RouterKind.SOFTMAX, scale=1.5, correction=True, identity=4),
    "groups of one": RouterSpec(6, 2, RouterKind.SIGMOID, correction=True, groups=6, top_groups=3),
}


ACTIVATIONS = [Activation.SILU, Activation.GELU, Activation.CLAMPED, Activation("silu", limit=0.5)]


def make_router(spec: RouterSpec, hidden: int, dtype=torch.float32) -> Router:
    number = spec.num_experts
    bias = torch.randn(number).to(dtype) if spec.bias else None
    correction = torch.randn(number) if spec.correction else None
    factor = torch.rand(number) + 0.5 if spec.factors else None
    return Router(spec, torch.randn(number, hidden).to(dtype), bias, correction, factor=factor)


def make_experts(number, hidden, inner, activation=Activation.SILU, bias=False, dtype=torch.float32) -> Experts:
    def normal(*shape):
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    biases = (normal(number, 2, inner), normal(number, hidden)) if bias else (None, None)
    return Experts(normal(number, 2, inner, hidden), normal(number, hidden, inner), *biases, activation)


def independent_routes(x, router):
    """Each token by itself, in Python: {expert: weight}; those of experts without weights are added up."""
    spec, found = router.spec, []
    for row in x.double():
        logits = (router.weight.double() @ row).tolist()
        if router.bias is not None:
            logits = [a + b for a, b in zip(logits, router.bias.double().tolist(), strict=True)]
        if spec.kind is RouterKind.SIGMOID:
            score = [1 / (1 + math.exp(-logit)) for logit in logits]
        else:
            total = sum(map(math.exp, logits))
            score = [math.exp(logit) / total for logit in logits]
        choice = [s + (0 if router.correction is None else float(router.correction[e])) for e, s in enumerate(score)]
        size = spec.num_experts // spec.groups
        groups = [choice[g * size : (g + 1) * size] for g in range(spec.groups)]
        best = sorted(range(spec.groups), key=lambda g: -sum(sorted(groups[g])[-2:]))[: spec.top_groups]
        allowed = [e for e in range(spec.num_experts) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: spec.top_k]
        total = sum(score[e] for e in chosen)
        share = total if spec.renormalise or spec.kind is RouterKind.TOPK_SOFTMAX else 1.0
        factor = [1.0] * spec.num_experts if router.factor is None else router.factor.double().tolist()
        weights = [(e if e < spec.with_weights else -2, score[e] / share * spec.scale * factor[e]) for e in chosen]
        found.append({e: sum(weight for other, weight in weights if other == e) for e, _ in weights})
    return found


@pytest.mark.parametrize("name", SPECS)
def test_routes_are_what_each_token_would_choose_alone(name):
    torch.manual_seed(1)
    router = make_router(SPECS[name], 24)
    x = torch.randn(40, 24)
    routes = route_reference(x, router, None)
    for expert, weight, want in zip(
        routes.expert.tolist(), routes.weight.tolist(), independent_routes(x, router), strict=True
    ):
        assert set(expert) == set(want)
        got = {e: sum(w for other, w in zip(expert, weight, strict=True) if other == e) for e in expert}
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("of_inputs", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_token_gets_the_weighted_sum_of_its_experts(activation, of_inputs):
    """Against one product after another, in float64; padding gets zeros and reaches no expert. Or the sum of what they
    give for weighted inputs."""
    torch.manual_seed(2)
    router = make_router(RouterSpec(5, 2, RouterKind.SOFTMAX, of_inputs=of_inputs), 16, torch.float64)
    made = make_experts(5, 16, 12, activation, bias=True, dtype=torch.float64)
    made.gate_up[:] *= 6  # beyond the limits of the clamped one
    x, live = torch.randn(9, 16, dtype=torch.float64), torch.arange(9) % 3 != 1
    x[~live] = float("nan")
    routes = route_reference(x, router, live)
    assert bool((routes.expert[~live] == -1).all())
    got = experts_reference(x, routes, made)[0]
    for token in range(9):
        want = torch.zeros(16, dtype=torch.float64)
        for expert, weight in zip(routes.expert[token].tolist(), routes.weight[token], strict=True):
            if expert >= 0:
                read, after = (weight * x[token], 1) if of_inputs else (x[token], weight)
                gate, up = (made.gate_up[expert] @ read) + made.gate_up_bias[expert]
                if activation is Activation.CLAMPED:
                    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                    act = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
                elif activation is Activation.GELU:
                    act = gate / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
                else:
                    limit = activation.limit or math.inf
                    act = (gate / (1 + torch.exp(-gate))).clamp(max=limit) * up.clamp(-limit, limit)
                want += after * (made.down[expert] @ act + made.down_bias[expert])
        torch.testing.assert_close(got[token], want)


def of_rank(router, made, own):
    """What a rank has that has these experts."""
    mine = slice(own.start, own.stop)
    kept = (None if b is None else b[mine].contiguous() for b in (made.gate_up_bias, made.down_bias))
    experts = Experts(made.gate_up[mine].contiguous(), made.down[mine].contiguous(), *kept, made.activation)
    return replace(router, own=own), experts


SHARES = [range(4), range(4, 5), range(5, 12)]


def test_what_ranks_experts_give_adds_up_to_what_all_give():
    """Each token's experts are chosen among all, weighted as among all, and computed once."""
    torch.manual_seed(4)
    spec = SPECS["groups"]
    router, made = make_router(spec, 40, torch.float64), make_experts(12, 40, 24, bias=True, dtype=torch.float64)
    x, live = torch.randn(33, 40, dtype=torch.float64), torch.arange(33) % 4 != 1
    whole = route_reference(x, router, live)
    total = torch.zeros_like(x)
    for own in SHARES:
        its_router, its_experts = of_rank(router, made, own)
        routes = route_reference(x, its_router, live)
        elsewhere = (whole.expert < own.start) | (whole.expert >= own.stop)
        assert torch.equal(routes.expert, torch.where(elsewhere, -1, whole.expert - own.start))
        total += experts_reference(x, routes, its_experts)[0]
    torch.testing.assert_close(total, experts_reference(x, whole, made)[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_in_float64_a_token_gets_the_same_bits_whatever_else_is_in_its_batch(name):
    torch.manual_seed(3)
    spec = SPECS[name]
    router, made = make_router(spec, 40, torch.float64), make_experts(spec.num_experts, 40, 24, dtype=torch.float64)
    x = torch.randn(33, 40, dtype=torch.float64)

    def run(rows):
        return experts_reference(rows, route_reference(rows, router, None), made)[0]

    whole = run(x)
    for part in (x[:1], x[5:7], x[7:20], x.flip(0)):
        index = [int((x == row).all(dim=1).nonzero()) for row in part]
        assert torch.equal(run(part), whole[index])


# --------------------------------------------------------------------------------------------------------------- MXFP4


def independent_decode(groups):
    """Byte by byte, by the format's definition, in float64."""
    sizes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    out = []
    for group in groups.reshape(-1, 17).tolist():
        for byte in group[:16]:
            for code in (byte % 16, byte // 16):
                out.append((-1 if code >= 8 else 1) * sizes[code % 8] * 2.0 ** (group[16] - 127))
    return torch.tensor(out, dtype=torch.float64).view(*groups.shape[:-2], -1)


def groups_of(*shape, scales=(100, 140)):
    groups = torch.randint(0, 256, (*shape, 17), dtype=torch.uint8)
    groups[..., 16] = torch.randint(*scales, shape)
    return groups


def coded(groups):
    """Groups [..., k / 32, 17], whose last byte is the scale, as a quantized weight [..., k]."""
    codes = groups[..., :16].flatten(-2)
    return QuantizedWeight(QuantScheme("e2m1", 32, "e8m0"), 2 * codes.shape[-1], codes, groups[..., 16].contiguous())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [(100, 140), (0, 3), (250, 253), (0, 253)])
def test_every_number_of_mxfp4_is_decoded_exactly(dtype, scales):
    """All codes, subnormal and very large scales, zeros of both signs."""
    torch.manual_seed(4)
    groups = groups_of(3, 50, 4, scales=scales)
    groups[0, 0] = 0
    groups[0, 1, :, :16] = 0x88  # minus zero
    assert torch.equal(decode(coded(groups)).to(dtype).double(), independent_decode(groups))


def test_transformers_decodes_mxfp4_alike():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="this transformers has no MXFP4")
    torch.manual_seed(5)
    groups = groups_of(2, 6, 3)
    theirs = mxfp4.convert_moe_packed_tensors(groups[..., :16].contiguous(), groups[..., 16].contiguous())
    assert torch.equal(decode(coded(groups)).to(torch.bfloat16), theirs.transpose(1, 2))


# ----------------------------------------------------------------------------------------------------- the kernels


TOKENS = [1, 61, 700] if ON_GPU else [1, 37]


def wide_of(made: Experts) -> Experts:
    parts = (made.gate_up, made.down, made.gate_up_bias, made.down_bias)
    return Experts(*(p.float() if isinstance(p, torch.Tensor) else p for p in parts), made.activation)


def near(got, want, share):
    return float((got.float() - want).norm()) <= share * max(float(want.norm()), 1e-6)


@on_gpu_or_interpreted
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("tokens", "by_token"), [*((each, False) for each in TOKENS), *((each, True) for each in TOKENS[1:])]
)
def test_the_kernels_route_as_the_reference(name, tokens, by_token, monkeypatch):
    """The experts and weights, and every assignment of a token that is somebody's once, in its expert's tiles."""
    monkeypatch.setattr(routing, "_BY_TOKEN", (0, 8192) if by_token else (8192, 8192))
    torch.manual_seed(tokens)
    with DEVICE:
        router, x, live = make_router(SPECS[name], 50), torch.randn(tokens, 50), torch.rand(tokens) < 0.8
        got = routing.route(x, router, live, gpu_traits(DEVICE), tells=True)
        want = route_reference(x, router, live, tells=True)
    assert torch.equal(got.expert.long(), want.expert)
    assert got.chosen.dtype == torch.int16
    assert torch.equal(got.chosen, want.chosen)
    assert torch.equal(got.chosen[live].long() < router.spec.with_weights, got.expert[live] >= 0)
    torch.testing.assert_close(got.weight[live], want.weight[live], rtol=1e-4, atol=1e-6)
    tiles, top_k = got.tiles, router.spec.top_k
    found = []
    for each in range(int(tiles.number)):
        first, count, expert = int(tiles.start[each]), int(tiles.count[each]), int(tiles.expert[each])
        assert 0 < count <= tiles.rows
        own = tiles.order[first : first + count].tolist()
        assert own == sorted(own)
        assert all(int(got.expert[a // top_k, a % top_k]) == expert for a in own)
        found += own
    assert sorted(found) == (want.expert.flatten() >= 0).nonzero()[:, 0].tolist()
    assert int(tiles.number) <= len(tiles.expert)


LEFT = ("softmax", "softmax, renormalised", "of the chosen", "all of them", "one")
SPECS_LEFT = {name: SPECS[name] for name in LEFT} | {
    "as many as may be": RouterSpec(128, 8, RouterKind.SOFTMAX, renormalise=True),
    "over a tile of 16": RouterSpec(20, 17, RouterKind.SOFTMAX),
    "sigmoid": RouterSpec(8, 2, RouterKind.SIGMOID, renormalise=True, scale=2.5),
}


@on_gpu_or_interpreted
@pytest.mark.parametrize("name", SPECS_LEFT)
@pytest.mark.parametrize("padding", [None, False, True])
def test_one_tokens_experts_are_those_that_the_first_product_chooses(name, padding):
    """Experts, weights and parts to the bit, of equal logits too."""
    torch.manual_seed(6)
    with DEVICE:
        spec = SPECS_LEFT[name]
        router, gpu = make_router(spec, 50), gpu_traits(DEVICE)
        made = make_experts(spec.with_weights, 50, 45)
        live = None if padding is None else torch.tensor([not padding])
        for x in (torch.randn(1, 50), torch.zeros(1, 50)):
            want = routing.route(x, router, live, gpu, tells=True)
            got = routing.route(x, replace(router, leaves=True), live, gpu, tells=True)
            assert got.left is not None
            assert torch.equal(products.experts(x, got, made, gpu), products.experts(x, want, made, gpu))
            assert torch.equal(got.expert, want.expert)
            assert torch.equal(got.weight, want.weight)
            assert torch.equal(got.chosen, want.chosen)


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("name", "tokens", "exact"),
    [*((name, 1, False) for name in SPECS if name not in LEFT), ("softmax", 2, False), ("softmax", 1, True)],
)
def test_no_other_choice_is_left_to_a_product(name, tokens, exact):
    """Of other routers, of several tokens, and where a token's bits are those of any batch."""
    with DEVICE:
        router = replace(make_router(SPECS[name], 50), leaves=True)
        assert routing.route(torch.randn(tokens, 50), router, None, gpu_traits(DEVICE), exact).left is None


@on_gpu_or_interpreted
def test_many_experts_are_not_left_to_a_product():
    with DEVICE:
        for number in (routing._LEFT, routing._LEFT + 1):
            router = replace(make_router(RouterSpec(number, 2, RouterKind.SOFTMAX), 50), leaves=True)
            left = routing.route(torch.randn(1, 50), router, None, gpu_traits(DEVICE)).left
            assert (left is not None) == (number == routing._LEFT)


CODINGS = {
    "mxfp4": QuantScheme("e2m1", 32, "e8m0"),
    "fp8 blocks": QuantScheme("e4m3", 128),
    "fp8 rows": QuantScheme("e4m3", 0),
    "w4a16": QuantScheme("int4", 32, zeros=True),
    "nvfp4": QuantScheme("e2m1", 16, "times"),
}


def coded_experts(number, hidden, inner, name, activation, biases=(None, None)):
    """In tiles, and the same by rows; products keep their input's size, about."""
    scheme, both = CODINGS[name], []
    for lines, k in ((2 * inner, hidden), (hidden, inner)):
        weight = coded_weight(number * lines, k, scheme)
        if scheme.scales == "float32":
            weight.scale.mul_(0.1 if scheme.numbers == "e4m3" else 3)
        elif scheme.scales == "e8m0":
            weight.scale.clamp_(122, 125)
        else:
            weight.scale.fill_(0x38)
            weight.factor.mul_(0.05)
        shaped = {n: getattr(weight, n) for n in ("codes", "scale", "factor", "zero")}
        lead = (number, 2, inner) if lines == 2 * inner else (number, lines)
        both.append(replace(weight, **{n: p if p is None else p.view(*lead, -1) for n, p in shaped.items()}))
    rows = Experts(*both, *biases, activation)
    return Experts(tile(in_turn(both[0])), tile(both[1]), *biases, activation), rows


def decoded_experts(experts, dtype):
    parts = decode(experts.gate_up).to(dtype), decode(experts.down).to(dtype)
    return Experts(*parts, experts.gate_up_bias, experts.down_bias, experts.activation)


@pytest.mark.parametrize(
    ("gpu", "numbers", "warps"),
    [
        (GpuTraits(132, True, 227 << 10, True), "e4m3", [4, 4]),
        (GpuTraits(132, True, 227 << 10, True), "int4", [8, 4]),
        (GpuTraits(132, True, 227 << 10, True), None, [8, 8]),
        (GpuTraits(108, False, 163 << 10, True), "e4m3", [8, 8]),
        (GpuTraits(148, True, 227 << 10, True, True), "int4", [8, 8]),
    ],
    ids=str,
)
def test_programs_of_many_tokens_lie_side_by_side_where_that_was_measured(gpu, numbers, warps):
    """A first and a second product: with 8 warps a program is alone on a multiprocessor of a Hopper."""
    tiles = SimpleNamespace(rows=128, expert=range(64))
    chosen = [products.choose_grouped(tiles, 2048, 1536, gated, numbers, 2, False, gpu) for gated in (True, False)]
    assert [launch.num_warps for launch in chosen] == warps


@pytest.mark.parametrize(
    ("gpu", "numbers", "warps"),
    [
        (GpuTraits(132, True, 227 << 10, True), "e4m3", 4),
        (GpuTraits(132, True, 227 << 10, True), "e2m1", 2),
        (GpuTraits(132, True, 227 << 10, True), "int4", 2),
        (GpuTraits(108, False, 163 << 10, True), "e4m3", 2),
    ],
    ids=str,
)
def test_a_first_product_of_more_tokens_has_four_warps_where_that_was_measured(gpu, numbers, warps):
    for rows, number, expected in ((16, 32, 2), (16, 33, warps), (32, 68, 2)):
        tiles = SimpleNamespace(rows=rows, expert=range(number))
        launch = products.choose_grouped(tiles, 2048, 1536, True, numbers, 2, False, gpu)
        assert launch.num_warps == expected


HOPPER = GpuTraits(132, False, 227 << 10, True)


@pytest.mark.parametrize(
    ("tokens", "narrow", "gpu", "batch_invariant", "rows"),
    [
        (1, True, HOPPER, False, 8),
        (2, True, HOPPER, False, 16),
        (1, False, HOPPER, False, 16),
        (1, True, HOPPER, True, 16),
        (1, True, GpuTraits(108, False, 163 << 10, True), False, 16),
        (1, True, GpuTraits(148, False, 227 << 10, True, True), False, 16),
    ],
    ids=str,
)
def test_tiles_have_8_rows_where_that_was_measured(tokens, narrow, gpu, batch_invariant, rows):
    """Of one token, where it may have other bits in another batch."""
    spec = RouterSpec(32, 4, RouterKind.TOPK_SOFTMAX)
    allowed = narrow and placing.may_be_narrow(gpu, batch_invariant)
    assert placing.tile_rows(tokens, spec, allowed) == rows


@on_gpu_or_interpreted
def test_tiles_of_8_rows_have_the_sums_of_those_of_16(monkeypatch):
    """With the same launches, the same bits on a GPU; 8 and more tokens come to an expert, and one is padding."""
    torch.manual_seed(2)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    monkeypatch.setattr(products, "choose_grouped", lambda *_: products.GroupedLaunch(64, 128, 1, 2, 2))
    with DEVICE:
        plain = make_router(RouterSpec(4, 2, RouterKind.TOPK_SOFTMAX), 160, dtype)
        tiled, _ = coded_experts(4, 160, 96, "mxfp4", Activation.SILU)
        x, live, gpu = torch.randn(20, 160).to(dtype), torch.arange(20) != 7, gpu_traits(DEVICE)
        monkeypatch.setattr(routing, "tile_rows", lambda *_: 16)
        wide = routing.route(x, plain, live, gpu)
        want = products.experts(x, wide, tiled, gpu)
        monkeypatch.setattr(routing, "tile_rows", lambda *_: 8)
        routes = routing.route(x, plain, live, gpu)
        assert (wide.tiles.rows, routes.tiles.rows) == (16, 8)
        assert int(routes.tiles.number) > int(wide.tiles.number) == 4
        got = products.experts(x, routes, tiled, gpu)
    assert float(want.float().norm()) > 0
    assert not bool(got[:, 7].any())
    if ON_GPU:
        assert torch.equal(got, want)
    else:  # NumPy adds products of other sizes in another order
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@on_gpu_or_interpreted
@pytest.mark.parametrize("name", CODINGS)
@pytest.mark.parametrize("tokens", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_coded_experts_have_the_bits_of_decoded_ones(name, tokens, monkeypatch):
    """With the same cut of k: e4m3 in blocks of 64 columns, 4 bits in blocks of 32, NVFP4 in its groups of 16."""
    torch.manual_seed(tokens)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    with DEVICE:
        router = make_router(RouterSpec(5, 2, RouterKind.TOPK_SOFTMAX), 160, dtype)
        tiled, rows = coded_experts(5, 160, 96, name, Activation.SILU)
        x, gpu = torch.randn(tokens, 160).to(dtype), gpu_traits(DEVICE)
        routes = routing.route(x, router, None, gpu)
        block_k = {"e4m3": 64, "int4": 32, "e2m1": CODINGS[name].group}[CODINGS[name].numbers]
        same = products.GroupedLaunch(64, block_k, 1, 2, 4)
        monkeypatch.setattr(products, "choose_grouped", lambda *_: same)
        plain = products.experts(x, routes, decoded_experts(rows, dtype), gpu)
        monkeypatch.setattr(products, "choose_grouped", lambda *_: replace(same, block_k=128))
        assert torch.equal(products.experts(x, routes, tiled, gpu), plain)
    assert bool(plain.isfinite().all())
    assert float(plain.float().norm()) > 0


FORMATS = [None, "mxfp4", "fp8 blocks", "w4a16", "nvfp4"]


def is_long(tokens, activation, packed):
    """Of packed weights several tokens go with one activation, and one token with all others.

    In the interpreter several tokens of plain weights go with that activation, too, and with the one that has a limit.
    """
    if packed is None:
        return not ON_GPU and tokens > 1 and activation in ACTIVATIONS[1:3]
    return (tokens > 1) == (activation != ACTIVATIONS[0])


@on_gpu_or_interpreted
@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("tokens", "activation", "packed"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * is_long(*case))
        for case in itertools.product(TOKENS, ACTIVATIONS, FORMATS)
    ],
    ids=str,
)
def test_the_grouped_products_equal_the_reference(tokens, activation, packed):
    """Sides that fill no block; half the shapes with biases, with padding, twice with the same bits."""
    torch.manual_seed(tokens)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    number, hidden, inner = (5, 96, 64) if tokens % 2 else (9, 160, 96)
    with DEVICE:
        router = make_router(RouterSpec(number, 2, RouterKind.TOPK_SOFTMAX), hidden, dtype)
        made = make_experts(number, hidden, inner, activation, bias=tokens % 2 == 1, dtype=dtype)
        if packed:
            biases = made.gate_up_bias, made.down_bias
            made, _ = coded_experts(number, hidden, inner, packed, activation, biases)
        x, live = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens) < 0.9
        x[~live] = float("nan")
        routes = routing.route(x, router, live, gpu_traits(DEVICE))
        parts = [products.experts(x, routes, made, gpu_traits(DEVICE)) for _ in range(2)]
        want = experts_reference(x.float().nan_to_num(), routes, wide_of(made))[0]
    assert torch.equal(*parts)
    assert not bool(parts[0][:, ~live].any())
    assert near(parts[0].float().sum(0), want, 0.01)


@on_gpu_or_interpreted
@pytest.mark.parametrize("name", ["fp8 blocks", pytest.param("nvfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [1, 19, pytest.param(150, marks=pytest.mark.slow)])
def test_what_all_tokens_take_is_one_more_expert_of_the_same_launches(name, tokens):
    """Its part is the last; padding takes it too, and gets zeros of the others. Two calls give the same bits, and a
    token's, where k is not cut, are its own in any batch."""
    torch.manual_seed(tokens)
    dtype, spec = torch.bfloat16 if ON_GPU else torch.float16, RouterSpec(6, 2, RouterKind.SOFTMAX, renormalise=True)
    with DEVICE:
        router, gpu = make_router(spec, 160, dtype), gpu_traits(DEVICE)
        gated = replace(router, weight=torch.cat([router.weight, torch.randn(1, 160).to(dtype)]), gates_shared=True)
        made, _ = coded_experts(6, 160, 96, name, Activation.SILU)
        one, _ = coded_experts(1, 160, 96, name, Activation.SILU)
        shared = tuple(one_of(each) for each in (one.gate_up, one.down))
        x, live = torch.randn(tokens, 160).to(dtype), torch.rand(tokens) < 0.8
        routes, plain = (routing.route(x, each, live, gpu) for each in (gated, router))
        want = route_reference(x, gated, live)
        both = replace(made, shared=shared)
        parts = [products.experts(x, routes, both, gpu) for _ in range(2)]
        expected = experts_reference(x.float(), want, both)[0]
        alone = products.experts(x, plain, made, gpu)
        whole = products.experts(x, routing.route(x, gated, live, gpu, True), both, gpu, True)
        first = products.experts(x[:1], routing.route(x[:1], gated, live[:1], gpu, True), both, gpu, True)
    assert torch.equal(routes.expert, plain.expert)
    torch.testing.assert_close(routes.shared, want.shared.float(), rtol=1e-3, atol=1e-4)
    assert torch.equal(*parts)
    assert near(parts[0].float().sum(0), expected, 0.01)
    splits = len(alone) // spec.top_k
    by_split = parts[0].unflatten(0, (splits, -1))
    assert not bool(by_split[:, :-1][:, :, ~live].any())
    assert torch.equal(by_split[:, :-1].flatten(0, 1), alone)  # the others are what they are without it
    if ON_GPU or tokens == 1:  # NumPy's products have other bits by their sizes
        assert torch.equal(whole[:, :1], first)


def one_of(weight):
    """The only expert of a weight in tiles, by itself."""
    return replace(weight, shape=weight.shape[1:])


@on_gpu_or_interpreted
def test_experts_whose_sums_get_the_factor_equal_the_reference():
    """NVFP4: gates and ups of each expert have a factor of their own."""
    torch.manual_seed(3)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    with DEVICE:
        router = make_router(RouterSpec(5, 2, RouterKind.TOPK_SOFTMAX), 96, dtype)
        _, rows = coded_experts(5, 96, 64, "nvfp4", Activation.SILU)
        apart = tile(factor_apart(in_turn(rows.gate_up))), tile(factor_apart(rows.down))
        x, gpu = torch.randn(7, 96).to(dtype), gpu_traits(DEVICE)
        routes = routing.route(x, router, None, gpu)
        made = Experts(*apart, None, None, Activation.SILU)
        got = products.experts(x, routes, made, gpu).float().sum(0)
        for other in (rows, made):
            assert near(got, experts_reference(x.float(), routes, other)[0], 0.01)


@on_gpu_or_interpreted
@pytest.mark.parametrize("of_inputs", [False, True])
def test_float32_products_are_as_exact_as_the_reference(of_inputs):
    torch.manual_seed(9)
    spec = RouterSpec(6, 3, RouterKind.SOFTMAX, of_inputs=of_inputs)
    with DEVICE:
        router, made = make_router(spec, 70), make_experts(6, 70, 45, bias=True)
        x = torch.randn(41, 70)
        routes = routing.route(x, router, None, gpu_traits(DEVICE))
        assert routes.of_inputs == of_inputs
        parts = products.experts(x, routes, made, gpu_traits(DEVICE))
        want = experts_reference(x, routes, made)[0]
    torch.testing.assert_close(parts.sum(0), want, rtol=1e-5, atol=1e-5)


@on_gpu_or_interpreted
@pytest.mark.parametrize("name", few_of([*CODINGS], 2))
def test_a_rank_with_some_of_the_coded_experts_computes_these_alone(name):
    torch.manual_seed(3)
    with DEVICE:
        router = make_router(SPECS["groups"], 96)
        _, rows = coded_experts(12, 96, 64, name, Activation.SILU)
        x, live, total = torch.randn(40, 96), torch.rand(40) < 0.8, 0
        for own in SHARES:
            mine = rows.gate_up.rows(own.start, own.stop), rows.down.rows(own.start, own.stop)
            made = Experts(tile(in_turn(mine[0])), tile(mine[1]), None, None, Activation.SILU)
            routes = routing.route(x, replace(router, own=own), live, gpu_traits(DEVICE))
            total = total + products.experts(x, routes, made, gpu_traits(DEVICE)).sum(0)
        want = experts_reference(x, route_reference(x, router, live), rows)[0]
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-5)


@on_gpu_or_interpreted
@pytest.mark.parametrize("own", SHARES, ids=str)
@pytest.mark.parametrize("tokens", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_a_rank_with_some_of_the_experts_computes_these_alone(tokens, own):
    """In one launch that chooses and in two; what other ranks compute is zero here, as padding is."""
    torch.manual_seed(tokens)
    with DEVICE:
        router, made = make_router(SPECS["groups"], 70), make_experts(12, 70, 45, bias=True)
        x, live = torch.randn(tokens, 70), torch.rand(tokens) < 0.8
        its_router, its_experts = of_rank(router, made, own)
        routes = routing.route(x, its_router, live, gpu_traits(DEVICE), tells=True)
        want = route_reference(x, its_router, live)
        assert torch.equal(routes.expert.long(), want.expert)
        assert torch.equal(routes.chosen.long(), route_reference(x, router, None).expert)
        parts = products.experts(x, routes, its_experts, gpu_traits(DEVICE))
    assert not bool(parts.transpose(0, 1)[want.expert < 0].any())
    assert len(own) == 1 or bool((want.expert >= 0).any())
    torch.testing.assert_close(parts.sum(0), experts_reference(x, want, its_experts)[0], rtol=1e-5, atol=1e-5)


@needs_gpu  # NumPy, which interprets, warns of what is not a number
def test_a_token_that_is_not_a_number_reaches_no_other_token():
    """Its experts are experts, and it alone is not finite."""
    torch.manual_seed(10)
    with DEVICE:
        router, made = make_router(RouterSpec(6, 2, RouterKind.SOFTMAX), 64), make_experts(6, 64, 32)
        x = torch.randn(20, 64)
        clean = products.experts(x, routing.route(x, router, None, gpu_traits(DEVICE)), made, gpu_traits(DEVICE))
        x[7] = float("nan")
        routes = routing.route(x, router, None, gpu_traits(DEVICE))
        dirty = products.experts(x, routes, made, gpu_traits(DEVICE))
    assert bool(((routes.expert >= 0) & (routes.expert < 6)).all())
    assert bool(dirty.sum(0)[7].isnan().all())
    others = torch.arange(20) != 7
    assert bool(dirty[:, others].isfinite().all())
    torch.testing.assert_close(dirty[:, others], clean[:, others], rtol=1e-5, atol=1e-6)


def test_silu_is_the_library_function():
    gate, up = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(Activation.SILU(gate, up), F.silu(gate) * up)
