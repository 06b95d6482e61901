"""Weights in 12 bits: every bit comes back, what does not fit is left alone, and memory counts them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.engines import build
from support.tiny_models import save_random_experts
from treetop.checkpoints.loader import LoadContext
from treetop.drafts.head_files import EMBEDDING
from treetop.engine.memory import Budget, DeviceMemory, MemoryUse, fit, out_of_memory_explained, pool_bytes
from treetop.engine.startup import weight_copies as deciding
from treetop.engine.startup.plan import plan_engine
from treetop.engine.startup.weight_copies import copies_estimate, with_copies
from treetop.kernels.gemm import lossless_weights
from treetop.kernels.gemm.lossless_weights import BLOCK, MAX_ROWS, TILE, LosslessLaunch, compress, decompress
from treetop.kernels.gemm.skinny_gemm import TABLE, load_table
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError, EngineError
from treetop.weights import lossless, plain
from treetop.weights.lossless import (
    ROWS,
    LaunchLimit,
    compress_if_faster,
    compressed_bytes,
    offers,
    why_not_compressed,
)

CPU = torch.device("cpu")
H200 = GpuTraits(132, True, 227 << 10)
PLACE = LoadContext(torch.bfloat16, CPU, 64)
GIB = 2**30


def normal(n, k, seed=0):
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5).bfloat16()


def assert_same_bits(got, want):
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 512), (384, 1280), (4224, 128)])
def test_every_bit_comes_back(n, k, gated):
    """The last is encoded in three goes."""
    weight = normal(n, k)
    assert_same_bits(decompress(compress(weight, gated)), weight)


def test_zeros_and_numbers_far_below_a_rows_largest_come_back():
    """Rows of zeros, zeros of both signs, subnormals, rows of any scale, rows whose largest number is far from all."""
    weight = normal(256, 512)
    weight[3] = 0
    weight[4, ::2], weight[5, 7] = 0, -0.0
    weight[9, :20], weight[10, 5] = 1e-20, 1e-40
    weight[100:102] *= 1e-30
    weight[102:104] *= 1e30
    weight[40:60, 500] = -1e-12
    small = compress(weight, False)
    assert len(small.lines) >= 41
    assert_same_bits(decompress(small), weight)


def test_outliers_are_as_few_as_the_format_promises():
    """Of normal weights one in some ten thousand: those 15 powers of two below the largest of their row."""
    small = compress(normal(1024, 4096), False)
    assert 0.5e-4 < len(small.lines) / (1024 * 4096) < 2e-4
    assert small.crowd[TILE] <= 64


def test_outliers_and_scales_add_next_to_nothing_to_the_words_that_are_counted():
    n, k = 128, 4096
    small = compress(normal(n, k), False)
    assert small.words.nbytes == 3 * n * k // 2
    assert sum(each.nbytes for each in (small.scale, small.lines, small.columns, small.values)) < 0.01 * n * k


@pytest.mark.parametrize(
    "weight",
    [
        normal(128, 512).half(),
        normal(96, 512),
        normal(128, 320),
        torch.rand(128, 512).mul(40).sub(20).exp().bfloat16(),
        normal(128, 512).index_fill(1, torch.tensor([3]), float("nan")),
        normal(128, 512).index_fill(1, torch.tensor([3]), float("inf")),
    ],
    ids=["float16", "half a tile", "half a block", "all sizes", "nan", "inf"],
)
def test_what_does_not_fit_is_left_alone(weight):
    assert compress(weight, False) is None


def test_a_small_number_beside_a_giant_is_exact_or_left_alone():
    """Over its row's scale an outlier has to be a bfloat16 again."""
    weight = torch.full((64, 128), 1e38).bfloat16()
    weight[0, 0] = 1.6
    assert_same_bits(decompress(compress(weight, False)), weight)
    weight[0, 0] = 1e-30
    assert compress(weight, False) is None


def test_a_gated_weight_needs_whole_tiles_of_both_halves():
    assert compress(normal(192, 128), False) is not None
    assert compress(normal(192, 128), True) is None


def test_a_tile_with_too_many_outliers_ends_it():
    """Before what comes after it is packed."""
    weight, packed = normal(2 * 4096, 128), []
    weight[5, :40] = 1e-20
    few = compress(normal(4096, 128), False).crowd[TILE]
    encode = lossless_weights._encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lossless_weights, "_encode", lambda tiles: packed.append(len(tiles)) or encode(tiles))
        assert compress(weight, False, 39) is None
        assert sum(packed) == lossless_weights._TILES_AT_ONCE
    assert compress(weight, False, 40 + few) is None, "no launch has the steps"
    assert compress(normal(4096, 128), False, few) is not None
    assert compress(normal(4096, 128), False, few - 1) is None


# -------------------------------------------------------------------------------------------------- who gets them


def planted(counts, k=1024):
    """A weight without outliers but for so many in each tile."""
    weight = (torch.rand(TILE * len(counts), k, generator=torch.Generator().manual_seed(0)) / 2 + 0.5).bfloat16()
    for tile, count in enumerate(counts):
        for i in range(count):
            weight[tile * TILE + i % TILE, i // TILE] = 2.0**-30
    return weight


def test_outliers_are_counted_by_blocks_of_lines():
    """Of a gated weight a block has lines of both halves."""
    weight = planted([7, 0, 90, 5])
    assert compress(weight, False).crowd == {64: 90, 128: 95, 256: 102}
    assert compress(weight, True).crowd == {64: 90, 128: 97, 256: 102}
    assert compress(weight, False).starts.tolist() == [0, 7, 7, 97, 102]
    assert compress(planted([0, 3, 0]), False).crowd == {64: 3}
    assert_same_bits(decompress(compress(weight, True)), weight)


def test_each_number_of_rows_is_decided_by_the_block_that_has_most(monkeypatch):
    """At the limit 12 bits serve, one outlier more and 16 do; without any number of rows left nothing is kept."""
    launch, wide = LosslessLaunch(64, 1, 3, 4, 16), LosslessLaunch(128, 1, 3, 8, 64)
    table = {
        1: LaunchLimit(launch, 90),
        4: LaunchLimit(launch, 50),
        16: LaunchLimit(launch, 50),
        32: LaunchLimit(wide, 60),
    }
    monkeypatch.setattr(lossless, "offers", lambda *args: table)

    def rows_of(counts):
        made = compress_if_faster(planted(counts), False, H200)
        if made is None:
            return []
        assert made.launch(33) is None
        return [rows for rows in range(1, 33) if made.launch(rows) is not None]

    assert rows_of([50, 9, 8, 7]) == [1, 2, 3, 4, *range(9, 33)]
    assert rows_of([50, 11, 8, 7]) == [1, 2, 3, 4, *range(9, 17)]
    assert rows_of([51, 0, 0, 0]) == [1, *range(17, 33)]
    assert rows_of([90, 0, 0, 0]) == [1]
    assert rows_of([91, 0, 0, 0]) == []


def test_other_numbers_fit_launches_that_have_the_steps_for_them(monkeypatch):
    """Whether a start would keep them or not; at the last step's last pick, and one beyond."""
    launch = LosslessLaunch(64, 1, 3, 4, 16)  # 8 steps of 16 picks
    monkeypatch.setattr(lossless, "offers", lambda *args: {1: LaunchLimit(launch, 50)})
    products = compress_if_faster(planted([50, 9]), False, H200)
    for most in (20, 50, 51, 128):
        new = planted([9, most])
        made = compress_if_faster(new, False, H200)
        assert (made is None) == (most > 50)
        assert_same_bits(decompress(products.fitting(new, made)), new)
    assert products.fitting(planted([9, 129]), None) is None


@pytest.mark.slow
def test_weights_that_read_too_widely_stay_in_16_bits():
    """Shapes of Llama-3.1-8B's qkv: normal weights are kept, one bad tile, scaled columns and a giant refuse them."""
    weight = normal(6144, 4096)
    assert set(compress_if_faster(weight, False, H200).launches) == {1, 4, 8, 16}
    tile, columns, giant = weight.clone(), weight.clone(), weight.clone()
    tile[:TILE] *= torch.logspace(-6, 0, 4096).bfloat16()
    columns[:, ::500] *= 30
    giant[9, 9] = 1e30
    for wide in (tile, columns, giant):
        assert compress_if_faster(wide, False, H200) is None


def test_only_measured_gpus_and_bfloat16_have_them():
    assert "bfloat16" in why_not_compressed(CPU, torch.float16)
    assert "132 multiprocessors" in why_not_compressed(CPU, torch.bfloat16)
    assert compressed_bytes(28672, 4096, True, H200) == 3 * 28672 * 4096 // 2
    assert compressed_bytes(28672, 4096, True, GpuTraits(84, True, 227 << 10)) == 0


def test_the_option_is_refused_where_it_cannot_be(strong_pair):
    with pytest.raises(ConfigError, match=r"--compress-weights: only bfloat16 .*--no-compress-weights"):
        build(strong_pair, compress_weights=True)
    with pytest.raises(ConfigError, match="--compress-weights must be True, False or None"):
        build(strong_pair, compress_weights="yes")


@pytest.fixture
def decide(monkeypatch, strong_pair):
    """The decision as if this were a measured GPU, for copies of so many bytes."""
    layout = build(strong_pair).engine.layout
    monkeypatch.setattr(deciding, "why_not_compressed", lambda device, dtype: None)

    def decided(budget, copies, **options):
        monkeypatch.setattr(deciding, "copies_estimate", lambda *args: copies)
        return with_copies(EngineConfig(**options), PLACE, budget, layout, None, None)

    decided.layout = layout
    return decided


@pytest.mark.parametrize(
    ("total", "free", "fraction", "expected"),
    [(100, 100, 0.5, True), (100, 100, 0.39, False), (100, 40, 0.5, True), (100, 39, 0.5, False)],
)
def test_by_itself_copies_take_a_quarter_of_what_pools_could_have(decide, total, free, fraction, expected):
    """Less by the fraction, or by what others left free; asked for, they are made, and not wanted, they are not."""
    budget = Budget(DeviceMemory(total * GIB, free * GIB), 0, 0, fraction)
    made = decide(budget, 10 * GIB)
    assert (made.copies > 0) is expected
    assert made.static == made.copies
    assert made.memory.free == free * GIB - made.copies
    assert decide(budget, 10 * GIB, compress_weights=True).copies == 10 * GIB
    assert decide(budget, 1, compress_weights=False) is budget


@pytest.fixture
def on_a_measured_gpu(monkeypatch):
    """Copies of a few bytes can be made, and by itself a rank makes them if `fit` says so."""
    monkeypatch.setattr(deciding, "why_not_compressed", lambda device, dtype: None)
    monkeypatch.setattr(deciding, "copies_estimate", lambda *args: 1000)
    return lambda fit: monkeypatch.setattr(deciding, "_fits", lambda *args: fit)


@pytest.mark.parametrize("first", [True, False])
def test_ranks_that_share_a_model_follow_the_first_one(strong_pair, on_a_measured_gpu, first):
    """They get its configuration, which holds what it chose, and may have more or less memory themselves."""
    given = EngineConfig.of(str(strong_pair.target), draft=None, tp_size=2, dtype="float64", device="cpu")
    on_a_measured_gpu(first)
    planned = plan_engine(given)
    assert planned.place.compressed is first
    on_a_measured_gpu(not first)
    assert plan_engine(planned.config).place.compressed is first


@pytest.mark.parametrize(("own", "others"), [(True, 1), (True, 0), (False, 1)])
def test_ranks_that_share_experts_compress_together_or_not_at_all(tmp_path, on_a_measured_gpu, own, others):
    """Or a request's bits would depend on its rank. others: the least that another rank says of this."""
    folder = save_random_experts(tmp_path / "target", "qwen3_moe", num_experts=8)
    said = []

    def minimum(number):
        said.append(number)
        return min(number, others) if len(said) == 6 else number  # after pages, exactness, rows and the chunk

    on_a_measured_gpu(own)
    config = EngineConfig.of(str(folder), draft=None, ep_size=2, dtype="float64", device="cpu")
    planned = plan_engine(config, expert_ranks=SimpleNamespace(size=2, rank=0, minimum=minimum))
    assert said[5] == own
    assert planned.place.compressed == bool(own and others)


def test_parts_of_ranks_come_out_of_12_bits_bit_for_bit():
    """By rows and by columns, as parameters are cut; a part that is no whole tile stays as it is."""
    torch.manual_seed(0)
    weight = torch.randn(256, 2048).bfloat16()
    for parts in (weight.chunk(2), weight.chunk(2, dim=1)):
        for part in parts:
            assert torch.equal(decompress(compress(part.contiguous(), False)), part)
    assert compressed_bytes(28672 // 3, 4096, True, H200) == 0


def test_by_itself_copies_leave_the_tokens_that_were_asked_for(decide):
    asked, pools = decide.layout.pool_tokens, pool_bytes(decide.layout, 2)
    for spare, expected in ((40 * GIB, True), (40 * GIB - 1, False)):
        budget = Budget(DeviceMemory(1000 * GIB, pools + spare), 0, 0, 0.5)
        assert (decide(budget, 10 * GIB, max_total_tokens=asked).copies > 0) is expected


def test_by_itself_copies_leave_room_for_a_request(decide):
    """A request that takes nine tenths of what is left has its pools, and no copies beside them."""
    one = pool_bytes(replace(decide.layout, pool_tokens=decide.layout.tokens_per_request), 2)
    for total, expected in ((16 * one, True), (10 * one // 9, False)):
        budget = Budget(DeviceMemory(total, total), 0, 0, 0.999)
        assert (decide(budget, one // 5).copies > 0) is expected


def test_without_room_errors_name_the_option_if_it_helps(strong_pair):
    """Tokens that were asked for, one request, weights alone, and memory that runs out while running."""
    layout = build(strong_pair).engine.layout
    asked, one = (pool_bytes(replace(layout, pool_tokens=n), 2) for n in (10_000, layout.tokens_per_request))
    advice = "or use --no-compress-weights, which frees up to"
    for need, tokens, unused in ((asked, 10_000, 0), (one, None, 1), (1, None, -1)):
        for copies, named in ((need, True), (0, False), (1 if need > 1 else 0, False)):
            free = unused if tokens is None else 0
            with pytest.raises(CapacityError) as error:
                fit(layout, 2, Budget(DeviceMemory(2**40, free), 2**30, 0, 0.9, copies), tokens)
            assert (advice in str(error.value)) is named
    use = MemoryUse(layout, 2, Budget(DeviceMemory(2**40, 0), 2**30, 0, 0.9, 10 * GIB))
    with pytest.raises(EngineError, match=advice), out_of_memory_explained("x", CPU, use):
        raise RuntimeError("out of memory")
    assert "(of which up to 10.00 GiB copies of weights in 12 or 13 bits)" in use.lines()[-1]


@pytest.mark.parametrize("attention_bias", [False, True])
def test_copies_are_counted_by_the_models_own_products(strong_pair, monkeypatch, attention_bias):
    """Of every product without bias of target and head, and no other weight; a head as wide as it likes."""
    llm = build(strong_pair)
    config, head = llm.engine.spec, llm.engine.draft
    layer = config.layers[0]
    attention = replace(layer.attention, bias=attention_bias, output_bias=attention_bias)
    layers = (replace(layer, mixer=attention),) * len(config.layers)
    target = replace(llm.engine.target, config=replace(config, layers=layers))
    head = replace(
        head, decoder=replace(head.decoder, hidden_size=2 * head.state_size), stored=frozenset({EMBEDDING, "d2t"})
    )
    seen: list[tuple[int, int, bool]] = []

    def counted(n, k, gated, gpu):
        seen.append((n, k, gated))
        return n * k

    monkeypatch.setattr(plain, "compressed_bytes", counted)
    hidden, inner = config.hidden_size, layer.feed_forward.inner_size
    heads = attention.num_heads * attention.head_dim
    qkv = heads + attention.kv.numbers
    products = [] if attention_bias else [(qkv, hidden, False), (hidden, heads, False)]
    products += [(2 * inner, hidden, True), (hidden, inner, False)]
    expected = [*products * len(layers), (config.vocab_size, hidden, False)]
    assert copies_estimate(target, None, torch.bfloat16, H200) == sum(n * k for n, k, _ in expected)
    assert seen == expected
    seen.clear()
    copies_estimate(target, head, torch.bfloat16, H200)
    assert len(seen) == len(expected) + 1 + 4 + 1
    assert seen[-1] == (head.vocab_size, head.state_size, False)


def test_the_committed_launches_can_be_launched():
    """Whole blocks of outputs and of k, one split if gated, a Hopper GPU's memory, rows that the kernel takes.

    Their limits are within what their steps can add, and never grow with the rows.
    """
    compressed = {key: entry["compressed"] for key, entry in load_table().entries.items() if "compressed" in entry}
    assert len(compressed) > 10
    for (n, k, gated, rows), entry in compressed.items():
        launch = LosslessLaunch(*entry["launch"])
        limits = {int(each): most for each, most in entry["most_outliers"].items()}
        for each, maximum in limits.items():
            assert offers(n, k, gated, H200)[each] == LaunchLimit(launch, maximum)
        assert set(limits) <= set(ROWS)
        assert max(limits) <= rows <= MAX_ROWS
        assert sorted(limits.values(), reverse=True) == [limits[each] for each in sorted(limits)]
        assert 0 < max(limits.values()) <= launch.picks * k // BLOCK
        assert n % launch.block_n == 0
        assert k % (launch.splits * BLOCK) == 0
        assert launch.splits == 1 or not gated
        assert launch.block_n % (2 * TILE if gated else TILE) == 0
        stage = 2 * (launch.block_n * BLOCK * 3 // 4 + rows * BLOCK)
        assert stage * launch.num_stages <= 227 << 10


def test_a_shape_has_one_entry_in_the_table():
    entries = json.loads(TABLE.read_text(encoding="utf-8"))["entries"]
    assert len({(each["n"], each["k"], each["gated"], each["rows"]) for each in entries}) == len(entries)
    assert len(load_table().entries) == len(entries)


@pytest.mark.parametrize(
    "shape", [(8192, 4096, True), (24576, 1536, False), (4672, 4608, False), (65536, 512, False), (4096, 4224, False)]
)
def test_weights_that_were_not_measured_get_a_launch_for_up_to_16_rows(shape):
    n, k, gated = shape
    found = offers(n, k, gated, H200)
    assert set(found) == {1, 4, 8, 16}
    for offer in found.values():
        launch = offer.launch
        assert n % launch.block_n == 0
        assert k % (launch.splits * BLOCK) == 0
        assert launch.splits == 1 or not gated
        assert offer.most_outliers <= launch.picks * k // BLOCK


@pytest.mark.parametrize(
    "shape",
    [(4096, 4096, False), (2048, 1024, True), (40000, 4100, False), (40032, 4096, False), (40000, 4096, True)],
)
def test_small_weights_and_broken_tiles_get_none(shape):
    assert offers(*shape, H200) == {}
    assert compressed_bytes(*shape, H200) == 0


def test_only_weights_larger_than_those_measured_without_gain_are_worth_it():
    entries = load_table().entries.items()
    without = [n * k for (n, k, _, rows), entry in entries if rows == 16 and "compressed" not in entry]
    assert max(without) == lossless._WORTH_PARAMETERS
