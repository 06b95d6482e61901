"""Scales of K/V in FP8: what checkpoints hold, which of it is honoured, and what is refused by name."""

import math
from dataclasses import replace

import pytest
import torch

from support.engines import build, greedy, tokens
from support.fp8_pairs import A_HEAD, LAYERS, LENGTHS, OPTIONS, windows_pair, with_tensors
from support.refusing import refused
from support.tiny_models import Pair, copy_folder
from treetop.attention.registry import BACKENDS
from treetop.engine.startup.plan import check_kv_cache_dtype, plan_engine
from treetop.models.registry import target_spec
from treetop.types.changes import UpdateWeights
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.ids import FULL, WINDOW


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return windows_pair(tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def scaled_pair(pair, tmp_path_factory):
    return with_tensors(pair, tmp_path_factory.mktemp("scaled") / "target", A_HEAD)


def scales_of(pair):
    """[layers, planes, kv_heads] of the full layers 1 and 3, and of the windows' 0 and 2, as an engine has them."""
    pools = build(pair, None, **OPTIONS).engine.runner.pools
    return pools[FULL].scales, pools[WINDOW].scales


def test_scales_go_by_many_names_and_shapes(pair, tmp_path):
    """One a tensor or a head, of each writer; layers without one have 1.0. Other settings pass over them all."""
    name = "model.layers.{}.self_attn.{}_scale"
    tensors = {
        name.format(0, "k"): torch.tensor(0.5),
        name.format(0, "v"): torch.tensor([0.25]),
        name.format(1, "k_proj.k"): torch.tensor([2.0], dtype=torch.bfloat16),
        name.format(1, "v_proj.v"): torch.tensor([[4.0]], dtype=torch.float16),
        name.format(1, "q"): torch.tensor([7.0]),
        name.format(3, "kv"): torch.tensor([8.0]),
    }
    mine = with_tensors(pair, tmp_path / "first", tensors)
    full, windows = scales_of(mine)
    kinds = [layer.attention.window is None for layer in build(mine, None, **OPTIONS).engine.spec.layers]
    found, each = [], {True: iter(full), False: iter(windows)}
    for kind in kinds:
        found.append(next(each[kind]).tolist())
    assert found == [[[0.5] * 2, [0.25] * 2], [[2.0] * 2, [4.0] * 2], [[1.0] * 2] * 2, [[8.0] * 2] * 2]
    more = {name.format(0, "k_proj.output"): torch.tensor([3.0]), name.format(0, "v_proj.output"): torch.tensor([5.0])}
    more[name.format(1, "qkv_proj.k")], more[name.format(1, "qkv_proj.v")] = torch.tensor([6.0]), torch.tensor([9.0])
    full, windows = scales_of(with_tensors(pair, tmp_path / "second", more))
    assert (
        sorted([*full.flatten().tolist(), *windows.flatten().tolist()])
        == [1.0] * 8 + [3.0] * 2 + [5.0] * 2 + [6.0] * 2 + [9.0] * 2
    )
    plain = build(mine, None, **{**OPTIONS, "kv_cache_dtype": "auto"})
    prompts = pair.prompts([9])
    assert tokens(plain.generate(prompts, greedy(8))) == tokens(
        build(pair, None, **{**OPTIONS, "kv_cache_dtype": "auto"}).generate(prompts, greedy(8))
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "not above 0"),
        (-1.0, "not above 0"),
        (math.nan, "NaN or infinite"),
        (math.inf, "NaN or infinite"),
        ([1.0, 0.0], "not above 0"),
        ([1.0, 1.0, 1.0], "shape"),
    ],
)
def test_scales_that_cannot_be_are_refused_by_name(pair, tmp_path, value, words):
    """Before any weight is read."""
    tensor = torch.tensor(value) if isinstance(value, float) else torch.tensor(value).view(-1, 1, 1)
    bad = {"model.layers.1.self_attn.k_scale": tensor, "model.layers.1.self_attn.v_scale": torch.tensor(1.0)}
    mine = with_tensors(pair, tmp_path / "target", bad)
    refused(CheckpointError, lambda: build(mine, None, **OPTIONS), "model.layers.1.self_attn.k_scale", words)


def test_half_a_pair_and_zero_points_are_refused_by_name(pair, tmp_path):
    half = with_tensors(pair, tmp_path / "half", {"model.layers.2.self_attn.v_scale": torch.tensor(1.0)})
    refused(CheckpointError, lambda: build(half, None, **OPTIONS), "model.layers.2.self_attn.k_scale")
    zero = with_tensors(pair, tmp_path / "zero", {"model.layers.2.self_attn.k_zero_point": torch.tensor(1.0)})
    refused(CheckpointError, lambda: build(zero, None, **OPTIONS), "k_zero_point", "--kv-cache-dtype auto")


def test_tiny_and_huge_scales_are_taken_as_they_are(pair, tmp_path):
    """Numbers saturate, or become 0; nothing is NaN, and speculation changes nothing."""
    names = [f"model.layers.{i}.self_attn.{plane}_scale" for i in range(LAYERS) for plane in "kv"]
    for size in (1e-38, 1e3, 1e30):
        mine = with_tensors(pair, tmp_path / f"{size}", {name: torch.tensor(size) for name in names})
        prompts = mine.prompts([9, 4])
        plain, llm = build(mine, None, **OPTIONS), build(mine, (2, 3, 6), **OPTIONS)
        assert tokens(plain.generate(prompts, greedy(12))) == tokens(llm.generate(prompts, greedy(12)))
        assert bool(plain.next_logits(prompts[0]).isfinite().all())


FORMAT = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ALONE = {"quant_method": "compressed-tensors", "config_groups": {}}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({**KV_ALONE, "kv_cache_scheme": FORMAT}, None),
        ({**KV_ALONE, "kv_cache_scheme": {**FORMAT, "strategy": "attn_head"}}, None),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, None),
        ({**KV_ALONE, "kv_cache_scheme": {**FORMAT, "dynamic": True}}, "dynamic"),
        ({**KV_ALONE, "kv_cache_scheme": {**FORMAT, "type": "int"}}, "type"),
        ({**KV_ALONE, "kv_cache_scheme": {**FORMAT, "num_bits": 4}}, "num_bits"),
        ({**KV_ALONE, "kv_cache_scheme": {**FORMAT, "strategy": "channel"}}, "strategy"),
        ({**KV_ALONE, "kv_cache_scheme": {**FORMAT, "symmetric": False}}, "symmetric"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
    ],
    ids=str,
)
def test_a_scheme_of_k_v_is_honoured_or_refused_by_name(scaled_pair, tmp_path, said, words):
    """Weights stay plain in such a folder. What `auto` does not do it does not refuse either."""
    folder = copy_folder(scaled_pair.target, tmp_path / "target", quantization_config=said)
    mine = Pair(folder, scaled_pair.head)
    plan_engine(EngineConfig(str(folder)))
    if words is None:
        assert scales_of(mine)[1].flatten().tolist() == pytest.approx([0.01, 0.3, 0.02, 0.6, 0.03, 0.3, 0.06, 0.6])
    else:
        refused(CheckpointError, lambda: build(mine, None, **OPTIONS), words, "--kv-cache-dtype auto")


def test_what_cannot_read_fp8_is_refused_by_name(pair, monkeypatch):
    """Libraries' backends, and GPUs without a conversion."""
    for name in ("fa3", "fa4", "flashinfer"):
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], probes=()))  # as where there is a GPU
        options = {**OPTIONS, "dtype": "bfloat16", "page_size": 16, "attention_backend": name}
        refused(ConfigError, lambda options=options: build(pair, None, **options), name, "FP8", "--kv-cache-dtype auto")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    target = target_spec(pair.target)
    config = EngineConfig(str(pair.target), kv_cache_dtype="fp8_e4m3")
    refused(ConfigError, lambda: check_kv_cache_dtype(config, target, torch.device("cuda")), "an older GPU", "8.9")


def test_other_weights_bring_their_own_scales(pair, scaled_pair):
    llm = build(pair, None, **OPTIONS)
    llm.engine.prepare(UpdateWeights(str(scaled_pair.target)))()
    prompts = pair.prompts(LENGTHS)
    want = build(scaled_pair, None, **OPTIONS).generate(prompts, greedy(12))
    assert tokens(llm.generate(prompts, greedy(12))) == tokens(want)
