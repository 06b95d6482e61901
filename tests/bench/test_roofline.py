"""The floor under a round: streamed parameters, bytes and operations, and what this machine is measured to do."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.assistants import save_assistant, save_assisted
from treetop.bench import sweeps
from treetop.bench.machine import Machine, measure_machine
from treetop.bench.roofline import Case, round_floor, saved_bytes
from treetop.checkpoints.loader import LoadContext, random_weights
from treetop.drafts.peagle import PEagleSpec
from treetop.drafts.registry import drafter_spec
from treetop.kernels.gemm.lossless_weights import LosslessLaunch
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.models.config import DenseSpec
from treetop.models.registry import target_spec
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, SpecShape
from treetop.types.phase import Phase
from treetop.weights import lossless
from treetop.weights.lossless import LaunchLimit

PRESETS = Path(__file__).parents[2] / "benchmarks" / "presets"
H200 = Machine("H200", "2", "bfloat16", 4.27e12, 790e12)


def presets(name="llama-3.1-8b"):
    target = target_spec(PRESETS / name)
    return target, drafter_spec(PRESETS / f"eagle3-{name}", target.config, dummy=True)


def test_streamed_parameters_of_the_presets_are_the_known_ones():
    """Llama-3.1-8B streams 7.505 G parameters; a draft level with a 32k head 0.374 G, draft extend also `fc`."""
    target, head = presets()
    assert target.streamed == 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    assert target.streamed / 1e9 == pytest.approx(7.505, abs=0.001)
    level, fuse = head.streamed.layers + head.streamed.output, head.streamed.fuse
    assert level == 2 * 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4096 * 32000
    assert level / 1e9 == pytest.approx(0.374, abs=0.001)
    assert fuse == 3 * 4096 * 4096


@pytest.mark.parametrize(
    ("shape", "batch", "floor_ms"),
    [
        ((0, 1, 1), 1, 3.52),
        ((0, 1, 1), 8, 3.74),
        ((0, 1, 1), 32, 4.49),
        ((3, 1, 4), 1, 4.07),
        ((5, 1, 6), 1, 4.42),
        ((5, 4, 16), 1, 4.42),
        ((5, 4, 16), 8, 4.65),
        ((5, 4, 16), 32, 11.0),
    ],
)
def test_floors_are_those_computed_by_hand(shape, batch, floor_ms):
    """For 4.27 TB/s and 790 TFLOP/s, to the two per cent by which their context was rounded."""
    target, head = presets()
    s, k, t = shape
    case = Case(SpecShape(k, s, t), batch, 1024, 2)
    floor = round_floor(target, head if s else None, case, H200)
    assert 1e3 * sum(floor.values()) == pytest.approx(floor_ms, rel=0.02)


def test_draft_extend_multiplies_one_column_a_row_by_the_output_matrix():
    """Where operations set its floor: (8, 8, 32) at 64 rows has 9 columns, of which one proposes."""
    target, head = presets()
    read, output = head.streamed, 4096 * 32000
    assert read.output == output
    operations = 2 * 64 * (9 * (read.layers + read.fuse) + output) + 64 * 9 * 4 * 32 * 128 * 1024
    floor = round_floor(target, head, Case(SpecShape(8, 8, 32), 64, 1024, 2), H200)
    assert floor[Phase.EXTEND] == pytest.approx(operations / H200.flop_per_s, rel=1e-6)


def test_a_block_is_one_forward_whatever_the_depth():
    """Of the published shapes: a tree's depth adds rows of the output matrix alone, and extend runs no layer."""
    target = target_spec(PRESETS / "qwen3-8b")
    layers = 5 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288)
    for name, edges in (("dflash", 0), ("dspark", 151936 * 256)):
        head = drafter_spec(PRESETS / f"{name}-qwen3-8b", target.config, dummy=True)
        assert head.streamed.layers == layers
        assert head.streamed.fuse == 5 * 4096 * 4096 + 5 * 4096 * 2048
        assert head.streamed.output == 4096 * 151936 + edges
        moved = replace(H200, flop_per_s=math.inf)
        short, long = (round_floor(target, head, Case(SpecShape(4, s, 16), 1, 1024, 2), moved) for s in (3, 7))
        assert long[Phase.DRAFT] - short[Phase.DRAFT] == pytest.approx(2 * 4 * 151936 / moved.bytes_per_s)
        kv = 1024 * 5 * 2048 * 2 + head.block.width * 5 * 2048 * 2
        weights = 2 * (layers + head.streamed.output)
        assert short[Phase.DRAFT] * moved.bytes_per_s == pytest.approx(weights + kv + 2 * 3 * 151936, rel=1e-2)
        assert short[Phase.EXTEND] * moved.bytes_per_s == pytest.approx(2 * (head.streamed.fuse + 4 * 5 * 2048))


def test_placeholders_are_one_forward_beside_the_extend_of_pairs():
    """P-EAGLE: DRAFT runs the layers once and makes all logits; EXTEND runs them over the path, and makes none."""
    target, head = presets()
    draft, read = PEagleSpec(head, 0, (1, 1, 3 * 4096)).with_steps(6), head.streamed
    moved, kv = replace(H200, flop_per_s=math.inf), 2048
    floor = round_floor(target, draft, Case(SpecShape(4, 6, 16), 2, 1000, 2), moved)
    drafted = read.layers + read.output + 2 * (1000 + 5) * kv + 2 * 6 * 32000
    assert floor[Phase.DRAFT] * moved.bytes_per_s == pytest.approx(2 * drafted)
    extended = read.layers + read.fuse + 2 * (1000 + 7) * kv
    assert floor[Phase.EXTEND] * moved.bytes_per_s == pytest.approx(2 * extended)


def test_a_language_model_runs_its_root_each_level_and_the_path():
    """Its output matrix at the root and at each level, not over the path."""
    target, _ = presets()
    draft = drafter_spec(PRESETS / "llama-3.1-8b", target.config, "STANDALONE", dummy=True)
    moved, kv, output = replace(H200, flop_per_s=math.inf), 32 * 2048, 4096 * 128256
    floor = round_floor(target, draft, Case(SpecShape(4, 3, 12), 2, 1000, 2), moved)
    level = target.streamed + 2 * (1000 + 4) * kv + 2 * 4 * 128256
    root = target.streamed + 2 * (1000 + 1) * kv + 2 * 128256
    assert floor[Phase.DRAFT] * moved.bytes_per_s == pytest.approx(2 * (root + 2 * level))
    path = target.streamed - output + 2 * (1000 + 4) * kv
    assert floor[Phase.EXTEND] * moved.bytes_per_s == pytest.approx(2 * path)


def test_an_assistant_reads_the_targets_context_at_each_level(tmp_path):
    """And keeps nothing itself: EXTEND moves no byte."""
    target_folder = save_assisted(tmp_path / "target")
    target = target_spec(target_folder)
    draft = drafter_spec(save_assistant(tmp_path / "head", target_folder), target.config)
    moved = replace(H200, flop_per_s=math.inf)
    short, long = (round_floor(target, draft, Case(SpecShape(2, 3, 7), 1, n, 2), moved) for n in (1, 3))
    of_token = sum(target.config.layers[i].attention.kv.numbers for i in draft.reads_target)
    assert (long[Phase.DRAFT] - short[Phase.DRAFT]) * moved.bytes_per_s == pytest.approx(3 * 2 * 2 * of_token)
    assert long[Phase.EXTEND] == 0


def test_a_floor_is_bytes_or_operations_whichever_takes_longer():
    """Few tokens stream weights, many multiply: with an endless rate of one, the other alone is left."""
    target, head = presets()
    case = Case(SpecShape(4, 5, 16), 64, 1024, 2)
    both = round_floor(target, head, case, H200)
    flop = round_floor(target, head, case, replace(H200, bytes_per_s=math.inf))
    moved = round_floor(target, head, case, replace(H200, flop_per_s=math.inf))
    for phase in Phase.DRAFT, Phase.VERIFY, Phase.EXTEND:
        assert 0 < min(flop[phase], moved[phase]) < max(flop[phase], moved[phase]) == both[phase]
    assert both[Phase.VERIFY] == flop[Phase.VERIFY]


def test_a_window_bounds_the_context_that_a_layer_reads():
    target, _ = presets()
    layer = target.config.layers[0]
    short = replace(layer, mixer=replace(layer.attention, window=128))
    near = replace(target, config=replace(target.config, layers=(short,) * 16 + (layer,) * 16))
    full, half = (
        round_floor(spec, None, Case(PLAIN, 1, 32768, 2), H200)[Phase.VERIFY] * H200.bytes_per_s
        for spec in (target, near)
    )
    assert full - half == pytest.approx(16 * (32768 - 128) * 4096)


def test_tied_embeddings_are_streamed_once(strong_pair, alien_pair):
    for pair, tied in ((strong_pair, False), (alien_pair, True)):
        spec = target_spec(pair.target)
        assert spec.config.tied_embeddings is tied
        assert spec.streamed == replace(spec, config=replace(spec.config, tied_embeddings=not tied)).streamed


def test_what_a_token_attends_to_is_weighed_against_its_products(strong_pair, alien_pair):
    """GPT-OSS: four of 32 experts, every other layer without a window; logits are of a prompt's last token alone."""
    layer = 2880 * (4096 + 1024) + 4096 * 2880 + 2880 * 32 + 4 * 3 * 2880 * 2880
    target, _ = presets("gpt-oss-20b")
    assert target.attended_for_a_token(torch.bfloat16) == pytest.approx(24 * layer / (2 * 12 * 64 * 64), rel=0.01)
    config = target.config
    near = [replace(each, mixer=replace(each.attention, window=128)) for each in config.layers]
    assert replace(target, config=replace(config, layers=tuple(near))).attended_for_a_token(torch.bfloat16) is None
    tied, untied = (target_spec(pair.target).attended_for_a_token(torch.float32) for pair in (alien_pair, strong_pair))
    assert tied == untied  # they differ in vocabulary and embeddings alone


def test_the_machine_is_measured_in_the_engines_dtype():
    machine = measure_machine(torch.device("cpu"), torch.float32)
    assert machine.dtype == "float32"
    assert 1e8 < machine.bytes_per_s < 1e13
    assert 1e8 < machine.flop_per_s < 1e14


def test_the_presets_of_the_table_are_configurations_that_load():
    """Llama-3.1-8B and Qwen3-8B targets, and heads of 32k draft tokens."""
    target, head = presets()
    assert (target.config.vocab_size, head.vocab_size) == (128256, 32000)
    target, head = presets("qwen3-8b")
    assert (target.config.vocab_size, head.vocab_size) == (151936, 32000)
    assert all(layer.attention.qk_norm for layer in target.config.layers)
    assert target.streamed / 1e9 == pytest.approx(7.568, abs=0.001)
    assert sweeps.TABLE == ((3, 1, 4), (5, 1, 6), (5, 4, 16))


class GpuProducts(Ops):
    """As on a GPU, on which nobody computes: products with weights in 12 bits."""

    def gpu_for(self, op):
        return GpuTraits(132, True)


@pytest.fixture
def small_models(strong_pair, monkeypatch):
    """A target of two layers and a head, whose weights are in 12 bits for up to 16 rows, `down` for one."""
    spec = target_spec(strong_pair.target)
    head = drafter_spec(strong_pair.head, spec.config)
    layer = spec.config.layers[0]
    attention = replace(layer.attention, num_heads=4, kv=paired(2, 32), rope=replace(layer.attention.rope, head_dim=32))
    layer = replace(layer, mixer=attention, feed_forward=DenseSpec(256))
    target = replace(spec, config=replace(spec.config, hidden_size=128, vocab_size=512, layers=(layer, layer)))
    small = replace(head.decoder, hidden_size=128, layers=(layer,))
    head = replace(head, decoder=small, target_hidden_size=128, vocab_size=192)
    offer = LaunchLimit(LosslessLaunch(64, 1, 3, 4, 16), 16)
    offered = {1: offer, 4: offer, 8: offer, 16: offer}
    monkeypatch.setattr(lossless, "offers", lambda n, k, gated, gpu: {1: offer} if k == 256 == 2 * n else offered)
    place = LoadContext(torch.bfloat16, torch.device("cpu"), 8, compressed=True)
    ops = Ops(OpContext(place.device, place.dtype))
    monkeypatch.setattr(LoadContext, "ops", property(lambda place: GpuProducts(ops.context)))
    made = target.build(random_weights(target.params, place), (0, 1), place, ops)
    return made, head.build(random_weights(head.params, place), made, place, ops)


def test_what_is_saved_counts_each_product_by_its_own_rows(small_models):
    """A quarter of each weight in 12 bits, but for its scales, which are 2 % of rows this short; padded rows count."""
    target, head = small_models
    qkv, output, gate_up, down = 256 * 128, 128 * 128, 512 * 128, 128 * 256

    def near(numbers):
        return pytest.approx(numbers / 2, rel=0.08)

    few = 2 * (qkv + output + gate_up) + 512 * 128
    assert saved_bytes(target, None, None, PLAIN, 1) == {Phase.VERIFY: near(few + 2 * down)}
    assert saved_bytes(target, None, None, PLAIN, 16) == {Phase.VERIFY: near(few)}
    assert saved_bytes(target, None, None, PLAIN, 17) == {Phase.VERIFY: 0}
    level = 2 * qkv + output + gate_up
    fuse = 128 * 128 * len(head.spec.aux_inputs)
    got = saved_bytes(target, head, head.spec, SpecShape(4, 5, 8), 2)
    extend = near(level + fuse + 192 * 128)
    assert got == {Phase.VERIFY: near(few), Phase.DRAFT: near(level + 192 * 128), Phase.EXTEND: extend}
    got = saved_bytes(target, head, head.spec, SpecShape(4, 5, 8), 3)
    assert got == {Phase.VERIFY: 0, Phase.DRAFT: near(level + 192 * 128), Phase.EXTEND: near(192 * 128)}


def test_the_floor_of_what_is_read_is_lower_by_what_is_saved():
    """In each draft level, in verify and in extend; an operation is not saved."""
    target, head = presets()
    case = Case(SpecShape(1, 3, 4), 1, 1024, 2)
    full = round_floor(target, head, case, H200)
    less = round_floor(target, head, case, H200, {Phase.DRAFT: 100 << 20, Phase.VERIFY: 1 << 30, Phase.EXTEND: 9 << 20})
    by = {phase: (full[phase] - less[phase]) * H200.bytes_per_s / (1 << 20) for phase in full}
    assert by == pytest.approx({Phase.DRAFT: 200, Phase.VERIFY: 1024, Phase.EXTEND: 9})
    limit = replace(H200, flop_per_s=1e9)
    assert round_floor(target, None, case, limit, {Phase.VERIFY: 1 << 30}) == round_floor(target, None, case, limit)
