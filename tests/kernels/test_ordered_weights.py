"""Weights in 13 bits: every bit comes back, by the instructions of the kernel too, and which products have them.

The kernel runs on a GPU alone: `tests/gpu/test_gpu_exact_rows.py`.
"""

import json
import re

import pytest
import torch

from treetop.checkpoints.loader import LoadContext
from treetop.engine.changes.in_place import copies_between, copy_all
from treetop.engine.startup import weight_copies as deciding
from treetop.engine.startup.probed_products import _read
from treetop.engine.startup.weight_copies import copies_estimate, with_copies
from treetop.kernels.gate import Gate
from treetop.kernels.gemm import ordered_weights as kernel
from treetop.kernels.gemm.ordered_weights import (
    CHUNK,
    MAX_ROWS,
    OrderedLaunch,
    decode,
    encode,
    shared_bytes,
    why_not_ordered,
)
from treetop.kernels.profile import profile_of
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.weights import gpu_products, ordered
from treetop.weights.format import ProductWeight
from treetop.weights.gpu_products import NoSplitKProduct, Probed, _is_ordered_alike
from treetop.weights.ordered import ROWS, OrderedProducts, load_table, offers, ordered_bytes, ordered_if_faster
from treetop.weights.plain import UNQUANTIZED

H200 = GpuTraits(132, True, 227 << 10, True)
SHAPES = {
    "qkv": (6144, 4096, False),
    "output": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "lm_head": (128256, 4096, False),
    "not measured": (10240, 8192, False),
    "not measured, wide": (151936, 5120, False),
    "not measured, gated": (27648, 5120, True),
}


def normal(n, k, seed=0):
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5).bfloat16()


def assert_same_bits(got, want):
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.fixture(autouse=True)
def gluon(monkeypatch):
    """As if this Triton had it, and no interpreter."""
    monkeypatch.setattr(kernel, "why_no_gluon", lambda device: None)
    offers.cache_clear()
    yield
    offers.cache_clear()


# ------------------------------------------------------------------------------------------------------ the numbers


def hard_weight():
    """Zeros of both signs, lines of zeros and of any size, the least and the largest codes; and from line 128 on
    numbers without a code: below all, infinite, none, and subnormal."""
    weight = normal(384, 512)
    weight[0, ::2], weight[1, 7], weight[2] = 0, -0.0, 0
    weight[3] *= 2.0**-90
    weight[4] *= 2.0**30
    weight[5, :2] = torch.tensor([1.5 * 2.0**-60, -1.25 * 2.0**-90]).bfloat16()
    weight[5, 2:] = 0
    weight[6, :] = 2.0**-126
    weight[130, 3] = 1e-30
    weight[141, 9] = -1e-20
    weight[160, 2] = float("inf")
    weight[161, 5] = float("nan")
    weight[183, 511] = 1e-40
    return weight


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), [(16, 256), (64, 1024), (4224, 256)])
def test_every_bit_comes_back(n, k, gated):
    """The last is encoded in several goes. All lines have codes."""
    weight = normal(n, k)
    made = encode(weight, gated)
    assert made.whole_at.tolist() == [-1] * -(-n // 128)
    assert made.words.nbytes * 16 == 13 * weight.nbytes
    assert_same_bits(decode(made), weight)


def test_lines_with_an_outlier_lie_whole_and_others_have_codes():
    """In the order of words, in which a gated weight's line 130 stands beside line 322. The last chunk may be short."""
    weight = hard_weight()
    made = encode(weight, False)
    assert made.whole_at.tolist() == [-1, 0, -1]
    assert_same_bits(decode(made), weight)
    made = encode(weight, True)
    assert made.whole_at.tolist() == [-1, -1, 0]
    assert_same_bits(decode(made), weight)
    short = torch.cat([weight[:128], weight[128:160]])
    made = encode(short, False)
    assert made.whole_at.tolist() == [-1, 0]
    assert_same_bits(decode(made), short)


def test_there_is_room_for_one_chunk_in_64_and_one_more():
    weight = normal(64 * 128, 256)
    weight[5, 3] = weight[300, 3] = 1e-30
    assert sorted(encode(weight, False).whole_at.tolist())[-3:] == [-1, 0, 1]
    weight[700, 3] = 1e-30
    assert encode(weight, False) is None


def test_outliers_are_those_that_are_more_than_thirty_powers_of_two_below_their_lines_largest():
    weight = torch.ones(256, 256).bfloat16()
    weight[0, 0], weight[128, 0] = 2.0**-30, 2.0**-31
    assert encode(weight, False).whole_at.tolist() == [-1, 0]


def run(text, words):
    """Registers after instructions of PTX, 32 bits each. words: by name."""
    held = dict(words)

    def value(name):
        return int(name, 0) if name[0].isdigit() else held[name]

    for line in re.findall(r"^([a-z].*);$", text, re.MULTILINE):
        name, operands = line.split(" ", 1)
        to, *of = [each.strip() for each in operands.split(",")]
        a, b, *rest = map(value, of)
        if name == "and.b32":
            held[to] = a & b
        elif name == "shl.b32":
            held[to] = (a << b) & 0xFFFFFFFF
        elif name == "shr.b32":
            held[to] = a >> b
        elif name == "lop3.b32":
            assert rest[1] == 0xEA
            held[to] = (a & b) | rest[0]
        elif name == "prmt.b32":
            eight = (b << 32) | a
            held[to] = sum(((eight >> (8 * ((rest[0] >> (4 * i)) & 7))) & 0xFF) << (8 * i) for i in range(4))
        elif name == "mul.bf16x2":
            halves = [torch.tensor([half & 0xFFFF, half >> 16]).to(torch.int32) for half in (a, b)]
            x, y = (kernel._as_int16(half).view(torch.bfloat16) for half in halves)
            low, high = ((x * y).view(torch.int16).to(torch.int32) & 0xFFFF).tolist()
            held[to] = low | (high << 16)
        else:
            raise AssertionError(f"no such instruction here: {line}")
    return held


@pytest.mark.parametrize("quarter", range(4))
def test_the_kernels_instructions_make_the_weights(quarter):
    """As the tensor core's operands have them: a lane's four registers are row g at columns 2t and 2t + 1 and 8 columns
    on, then row g + 8. Of some lanes, in the first block and in the last."""
    weight = hard_weight()
    made = encode(weight, False)
    texts = [getattr(kernel, f"_DECODE_{quarter}")]
    text = getattr(texts[0], "value", texts[0])
    for group, block, lane in ((0, 0, 0), (0, 1, 5), (4, 0, 31), (20, 1, 18)):
        planes = (made.words[group, block, :, lane].to(torch.int32) & 0xFFFF).view(13, 4, 2)
        pairs = (planes[..., 0] | planes[..., 1] << 16).tolist()
        for register in range(4):
            line = 16 * group + lane // 4 + 8 * (register // 2)
            scale = int(made.scale.view(torch.int16)[line])
            of_planes = (2 * quarter, 2 * quarter + 1, 8 + quarter, 12)
            given = {f"${4 + i}": pairs[plane][register] & 0xFFFFFFFF for i, plane in enumerate(of_planes)}
            got = run(text, given | {"$8": scale | scale << 16})
            for part in range(4):
                column = 256 * block + 64 * quarter + 16 * part + 2 * (lane % 4) + 8 * (register % 2)
                low, high = (weight[line, column : column + 2].view(torch.int16).to(torch.int32) & 0xFFFF).tolist()
                assert got[f"${part}"] == low | high << 16, (group, block, lane, register, part)


# -------------------------------------------------------------------------------------------------- who gets them


@pytest.mark.parametrize("name", SHAPES)
def test_launches_fit_the_weight_and_the_gpu(name):
    n, k, gated = SHAPES[name]
    for rows, launch in offers(n, k, gated, H200).items():
        assert rows in ROWS
        assert n % (16 * launch.groups) == 0
        assert CHUNK % launch.groups == 0
        assert launch.groups in (launch.num_warps, 2 * launch.num_warps) or (launch.rows_left and not gated)
        assert launch.slots >= 2
        assert shared_bytes(launch, rows) <= H200.shared_bytes
    assert max(ROWS) == MAX_ROWS


def test_the_table_was_measured_and_rules_serve_other_large_weights_alone():
    assert load_table().holds_for(H200)
    entries = json.loads(ordered.TABLE.read_text())["entries"]
    assert all(each["us"] < each["whole_us"] for each in entries if each["launch"] is not None)
    assert offers(10240, 8192, False, H200) == {8: OrderedLaunch(1, 7, 1)}
    assert [*offers(27648, 5120, True, H200)] == [*ROWS]
    assert offers(4096, 2048, False, H200) == {}
    assert offers(10240, 8192 + 128, False, H200) == {}
    assert offers(10240, 8192, False, GpuTraits(84, True, 227 << 10)) == {}


def test_only_hopper_bfloat16_and_gluon_have_them(monkeypatch):
    assert why_not_ordered(torch.bfloat16, H200) is None
    assert "bfloat16" in why_not_ordered(torch.float16, H200)
    assert "9.0" in why_not_ordered(torch.bfloat16, GpuTraits(108, False))
    monkeypatch.setattr(kernel, "why_no_gluon", lambda device: "no Gluon")
    offers.cache_clear()
    assert why_not_ordered(torch.bfloat16, H200) == "no Gluon"
    assert ordered_bytes(28672, 4096, True, H200) == 0


def test_a_weight_with_many_outliers_and_one_in_float16_stay_whole(monkeypatch):
    monkeypatch.setattr(ordered, "offers", lambda *what: {8: OrderedLaunch(1, 2, 1)})
    weight = normal(1024, 256)
    assert ordered_if_faster(weight, False, H200) is not None
    weight[::128, 0] = 1e-30
    assert ordered_if_faster(weight, False, H200) is None
    assert ordered_if_faster(normal(64, 256).half(), False, H200) is None


class Multiplied:
    """`ordered_gemm` on a CPU, and who was asked for a product."""

    def __init__(self, monkeypatch, wrong=0):
        self.rows, self._wrong = [], wrong
        monkeypatch.setattr(ordered, "offers", lambda *what: {8: OrderedLaunch(1, 2, 1), 32: OrderedLaunch(2, 2, 1)})
        monkeypatch.setattr(gpu_products, "offers", ordered.offers)
        monkeypatch.setattr(gpu_products, "ordered_gemm", self)
        monkeypatch.setattr(gpu_products, "skinny_gemm", self.whole)
        monkeypatch.setattr(gpu_products, "gated_rows", self.whole_gated)
        monkeypatch.setattr(gpu_products, "gate_mul", lambda x, kind, gpu: self.gate(x))

    def gate(self, x):
        gate, up = x.chunk(2, -1)
        return gate * up

    def __call__(self, x, weight, launch, gpu, bias, kind):
        self.rows.append(("13", len(x), launch.groups, bias is not None))
        out = x @ decode(weight).T + (self._wrong if len(x) > 16 else 0)
        out = out if bias is None else out + bias
        return self.gate(out) if weight.gated else out

    def whole(self, x, weight, launch, gpu, bias=None, rounds=False):
        self.rows.append(("16", len(x), 0, bias is not None))
        return (x @ weight.T if bias is None else x @ weight.T + bias)[None]

    def whole_gated(self, x, weight, launch, gpu, kind, rounds=False):
        self.rows.append(("16", len(x), 0, False))
        return self.gate(x @ weight.T)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_are_read_in_13_bits_if_copies_are_kept_and_were_probed(monkeypatch, gated, biased):
    """Rows up to 16 between launches for 8 and for 32 take the larger one's place only where there is one."""
    made, weight = Multiplied(monkeypatch), normal(64, 256)
    bias = torch.ones(64).bfloat16() if biased else None
    kind: Gate | None = "silu" if gated else None
    probed = Probed((64, 256), (), True)
    for copies, found in ((True, probed), (False, probed), (True, Probed((64, 256), ()))):
        product = NoSplitKProduct(weight, bias, kind, H200, found, copies)
        for rows in (1, 8, 9, 17, 32, 33):
            product(torch.ones(rows, 256).bfloat16())
        few = copies and found.ordered
        assert [kept for kept, *_ in made.rows] == (["13", "13", "16", "13", "13", "16"] if few else ["16"] * 6)
        assert [groups for _, _, groups, _ in made.rows if groups] == ([1, 1, 2, 2] if few else [])
        assert all(with_bias is biased for *_, with_bias in made.rows)
        assert (product.read_bytes(1) < weight.nbytes) is few
        assert product.read_bytes(33) == weight.nbytes
        made.rows.clear()


@pytest.mark.parametrize("gated", [False, True])
def test_a_probe_keeps_13_bits_only_where_they_have_the_bits_of_16(monkeypatch, gated):
    weight, x = normal(64, 256), normal(32, 256, 1)
    for wrong, alike in ((0, True), (1, False)):
        Multiplied(monkeypatch, wrong)
        assert _is_ordered_alike(weight, gated, x, x @ weight.T, H200) is alike
    assert not _is_ordered_alike(weight.half(), gated, x.half(), x, H200)
    monkeypatch.setattr(gpu_products, "offers", lambda *what: {})
    assert not _is_ordered_alike(weight, gated, x, x @ weight.T, H200)


def test_what_an_older_start_found_is_probed_again(tmp_path):
    """It says nothing of 13 bits."""
    file = tmp_path / "found"
    file.write_text(json.dumps({"shape": [64, 256], "counts": [128]}))
    assert _read(file) is None


def test_other_numbers_come_to_where_the_old_ones_lie():
    """With lines that have no codes, too."""
    launches = {8: OrderedLaunch(1, 2, 1)}
    old, new = (OrderedProducts(encode(each, False), launches) for each in (normal(384, 512), hard_weight()))
    words = old.weight.words.data_ptr()
    copy_all(copies_between(old, new))
    assert old.weight.words.data_ptr() == words
    assert_same_bits(decode(old.weight), hard_weight())


def test_a_products_new_numbers_come_in_place_or_the_product_is_another(monkeypatch):
    """In place with other outliers and where 16 bits serve, whatever rows it has served; not where there is no room
    for numbers without codes, of which 13 bits that captured rounds read would be old ones."""
    Multiplied(monkeypatch)
    probed, x = Probed((384, 512), (), True), torch.ones(8, 512).bfloat16()

    def product(weight, copies=True):
        return NoSplitKProduct(weight.clone(), None, None, H200, probed, copies)

    none = normal(384, 512)
    none[::128, 0] = 1e-30
    old, plain = product(normal(384, 512)), product(normal(384, 512), copies=False)
    before, seen = old(x), old.weight.data_ptr()
    plain(x)
    new = product(hard_weight().nan_to_num(0, 1, 1))
    for each in (old, plain):
        copy_all(copies_between(each, new))
        assert torch.equal(each(x), new(x))
        assert not torch.equal(each(x), before)
    assert old.weight.data_ptr() == seen
    assert old.read_bytes(8) < plain.read_bytes(8)
    assert copies_between(old, product(none)) is None
    assert copies_between(plain, product(none)) is not None


# ------------------------------------------------------------------------------------------------------------ memory


def place(exactness):
    cuda = torch.device("cuda")
    return LoadContext(torch.bfloat16, cuda, 64, profile=profile_of(exactness, cuda))


def test_a_targets_copies_are_counted_where_its_bits_are_exact(monkeypatch):
    """In 13 bits, its draft's in 12."""
    own = [ProductWeight(UNQUANTIZED, (28672, 4096), gated=True, bias=False)]
    drafts = [ProductWeight(UNQUANTIZED, (128256, 4096), gated=False, bias=False)]
    monkeypatch.setattr(
        deciding, "product_weights", lambda target, draft, place: own if draft is None else own + drafts
    )
    in_13, in_12 = 13 * 28672 * 4096 // 8 + 5 * 128 * 4096 * 2, 12 * 128256 * 4096 // 8
    assert copies_estimate(None, None, torch.bfloat16, H200, place("bits")) == in_13
    assert copies_estimate(None, object(), torch.bfloat16, H200, place("bits")) == in_13 + in_12
    assert copies_estimate(None, None, torch.bfloat16, H200, place("ties")) == 12 * 28672 * 4096 // 8


def test_without_gluon_and_a_draft_there_is_nothing_to_keep(monkeypatch):
    monkeypatch.setattr(deciding, "why_not_compressed", lambda device, dtype: None)
    monkeypatch.setattr(deciding, "gpu_traits", lambda device: H200)
    monkeypatch.setattr(kernel, "why_no_gluon", lambda device: "no Gluon")
    with pytest.raises(ConfigError, match=r"16 bits \(no Gluon\), and there is no draft; use --no-compress-weights"):
        with_copies(EngineConfig(compress_weights=True), place("bits"), None, None, None, None)
