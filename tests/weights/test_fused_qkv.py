"""q, k and v in one tensor of several parts, in FP8 by blocks: MiMo-V2.5's begin anew in each part, others run on."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import build, greedy, tokens
from support.families import FAMILIES, WINDOW
from support.quantized import fp8_blocks
from support.refusing import refused
from support.tiny_models import Pair, copy_folder
from treetop.checkpoints.params import cut, in_formats
from treetop.drafts.registry import drafter_spec
from treetop.models.layers import self_attention_params
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError
from treetop.weights.format import CheckpointTensor, read_rows
from treetop.weights.fp8 import WHOLE, fp8
from treetop.weights.plain import UNQUANTIZED
from treetop.weights.quantized import Grid

PARTS, BLOCK = 2, 32
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def fetched(tensors, name, span):
    whole = tensors[name]
    return whole if span is None else whole.narrow(span.axis, span.start, span.stop - span.start)


def test_blocks_begin_anew_in_each_part():
    """Two parts of three rows in blocks of two: four rows of scales, of which the second and the last have one row."""
    codes = torch.tensor([[1.0, 2.0]] * 6).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0], [10.0], [100.0], [0.5]])
    format_, source = fp8(Grid(2, 2), "_scale_inv"), CheckpointTensor("x.weight", (6, 2), lambda rows: rows, parts=2)
    assert {name: each.shape for name, each in format_.stored(source).items() if each.read} == {
        "x.weight": (6, 2),
        "x.weight_scale_inv": (4, 1),
    }
    ((_, rows),) = read_rows(
        format_, UNQUANTIZED, source, partial(fetched, {"x.weight": codes, "x.weight_scale_inv": scales})
    )
    assert rows.tolist() == [[1, 2], [1, 2], [10, 20], [100, 200], [100, 200], [0.5, 1]]


def test_rows_of_each_part_are_its_share_of_q_then_of_k_then_of_v(folders):
    """Row numbers as weights. Full layers: parts of 2 heads of q and one of k, 12 wide, and one of v, 8 wide."""
    attention = target_spec(folders[0]).config.layers[0].attention
    (qkv, *_) = self_attention_params(attention, "a", "s", 1, 32)
    rows = torch.arange(88.0)[:, None]
    kept = [source.transform(rows).flatten() for source in qkv.sources]
    whole = torch.cat([torch.arange(24.0), torch.arange(44.0, 68)])
    assert kept[0].sort().values.equal(whole)  # in the order that the rotation wants
    assert kept[1].sort().values.equal(torch.cat([torch.arange(24.0, 36), torch.arange(68.0, 80)]))
    zeros = torch.zeros(4)
    assert kept[2].equal(torch.cat([torch.arange(36.0, 44), zeros, torch.arange(80.0, 88), zeros]))


@pytest.mark.parametrize("grid", [Grid(20, 16), WHOLE], ids=["blocks", "a whole weight"])
def test_blocks_run_through_the_heads_of_other_models(grid, tmp_path):
    """GPT-NeoX's `query_key_value`, a part a head: what quantizes knows no heads. Of one rank, and of two."""
    attention = target_spec(FAMILIES["gpt neox"].save(tmp_path).pair.target).config.layers[0].attention
    format_, generator = fp8(grid), torch.Generator().manual_seed(1)
    codes = torch.randn(96, 32, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(grid.shape((96, 32)), generator=generator)
    spread = scales if grid == WHOLE else scales.repeat_interleave(20, 0)[:96].repeat_interleave(16, 1)
    read = partial(fetched, {"s.qkv_proj.weight": codes, "s.qkv_proj.weight_scale": scales})
    (qkv, *_) = self_attention_params(attention, "a", "s", 32, 32)
    for source, *halves in zip(qkv.sources, *(cut(qkv, rank, 2).sources for rank in range(2)), strict=True):
        assert format_.stored(source)["s.qkv_proj.weight_scale"].shape == grid.shape((96, 32))
        of_one, *of_two = (
            torch.cat([rows for _, rows in read_rows(format_, UNQUANTIZED, each, read)]) for each in (source, *halves)
        )
        assert torch.equal(of_one, source.transform(codes.float() * spread))
        assert torch.equal(of_one, torch.cat(of_two))


def joined(tensors, prefix):
    """q, k and v of a layer in parts, in the published order."""
    parts = [tensors.pop(f"{prefix}.{each}.weight").unflatten(0, (PARTS, -1)) for each in PROJECTIONS]
    return torch.cat(parts, dim=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder as MiMo-V2.5 is published, with an MTP layer, and MiMo-V2-Flash's of the weights that it decodes to."""
    place = tmp_path_factory.mktemp("mimo")
    saved = FAMILIES["mimo v2"].save(place, seed=7)
    plain, format_ = load_file(saved.pair.target / "model.safetensors"), fp8_blocks(BLOCK, 16)
    layer = {name: t for name, t in plain.items() if name.startswith("model.layers.1.") and ".mlp." not in name}
    dense = {name: t for name, t in plain.items() if name.startswith("model.layers.0.mlp.")}
    mtp = {name.replace("model.layers.1.", "model.mtp.layers.0."): t.clone() for name, t in layer.items()}
    mtp |= {name.replace("model.layers.0.", "model.mtp.layers.0."): t.clone() for name, t in dense.items()}
    mtp["model.mtp.layers.0.pre_mlp_layernorm.weight"] = mtp.pop("model.mtp.layers.0.post_attention_layernorm.weight")
    for name in ("enorm", "hnorm", "final_layernorm"):
        mtp[f"model.mtp.layers.0.{name}.weight"] = torch.ones(32)
    mtp["model.mtp.layers.0.eh_proj.weight"] = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) / 8
    plain |= mtp
    published, decoded = dict(plain), dict(plain)
    for prefix in [*(f"model.layers.{index}.self_attn" for index in range(4)), "model.mtp.layers.0.self_attn"]:
        shares = [each.shape[0] // PARTS for each in (plain[f"{prefix}.{name}.weight"] for name in PROJECTIONS)]
        stored = [format_.store(part) for part in joined(published, prefix)]
        for end in (".weight", ".weight_scale_inv"):
            published[f"{prefix}.qkv_proj{end}"] = torch.cat([each.tensors[end] for each in stored])
        split = torch.stack([each.decoded for each in stored]).split(shares, dim=1)
        for name, rows in zip(PROJECTIONS, split, strict=True):
            decoded[f"{prefix}.{name}.weight"] = rows.flatten(0, 1)
    others = {name.removesuffix(".weight") for name in plain if name.startswith("model.") and "norm" not in name}
    config = json.loads((saved.pair.target / "config.json").read_text())
    said = {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "attention_projection_layout": "fused_qkv",
        "quantization_config": {
            **format_.config,
            "ignored_layers": [name for name in sorted(others) if "qkv" not in name],
        },
        "rope_parameters": config["rope_parameters"]["full_attention"],
        "swa_rope_theta": 1e4,
    }
    fused = copy_folder(saved.pair.target, place / "fused", **said)
    flash = copy_folder(saved.pair.target, place / "flash")
    for folder, tensors in ((fused, published), (flash, decoded)):
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return fused, flash, saved.pair.head


@pytest.mark.slow
def test_a_folder_as_published_is_what_its_weights_decode_to(folders):
    """float64: log-probabilities to the last bit, plain and with trees, from an MTP layer that is stored alike."""
    fused, flash, head = folders
    layers = [layer.attention for layer in target_spec(fused).config.layers]
    assert [(each.joined, each.window, each.kv.heads) for each in layers[:2]] == [(2, None, 2), (2, WINDOW, 4)]
    assert [each.rope for each in layers] == [each.attention.rope for each in target_spec(flash).config.layers]
    prompts = Pair(fused, head).prompts([30, 7], seed=4)
    outputs = []
    for target in (fused, flash):
        for draft, shape in ((head, (3, 4, 14)), (target, (1, 3, 4)), (head, None)):
            llm = build(Pair(target, draft), shape, context_length=128, dequantize_weights=shape != (3, 4, 14))
            outputs.append(tokens(llm.generate(prompts, greedy(20))))
    assert all(each == outputs[0] for each in outputs)


def test_ranks_cut_whole_heads_of_it(folders):
    """What two ranks read of q, k and v is what one reads, in their order; decoded and packed."""
    spec = target_spec(folders[0])
    for index in (0, 1):
        attention, name = spec.config.layers[index].attention, f"model.layers.{index}.self_attn"
        tensors = load_file(folders[0] / "model.safetensors")
        (qkv, *_) = in_formats(self_attention_params(attention, "a", name, 32, 32), spec.config.formats)
        for source, *parts in zip(qkv.sources, *(cut(qkv, rank, 2).sources for rank in range(2)), strict=True):
            whole, *halves = (
                torch.cat([rows for _, rows in read_rows(qkv.stored, qkv.held, each, partial(fetched, tensors))])
                for each in (source, *parts)
            )
            assert torch.equal(whole, torch.cat(halves))


def test_its_mtp_layer_is_read_in_parts_too(folders):
    draft = drafter_spec(folders[0], target_spec(folders[0]).config, "MTP")
    assert draft.attention[0].joined == PARTS
    assert draft.check() > 0


@pytest.mark.parametrize(("changes", "words"), [
    ({"quantization_config": None}, ("attention_projection_layout", "FP8 by blocks", "two orders")),
    ({"quantization_config": {"quant_method": "fp8"}}, ("attention_projection_layout", "weight_block_size")),
    ({"attention_projection_layout": "fused_kv"}, ("attention_projection_layout", "only 'split' and 'fused_qkv'")),
    ({"swa_num_key_value_heads": 1}, ("qkv_proj of 2 parts", "4 heads with 1 ")),
])  # fmt: skip
def test_rows_in_an_order_that_nothing_tells_are_refused(folders, tmp_path, changes, words):
    folder = copy_folder(folders[0], tmp_path / "changed", **changes)
    refused(CheckpointError, lambda: target_spec(folder), "config.json", *words)


def test_scales_of_one_part_are_refused_by_their_tensor(folders, tmp_path):
    """The order of others has blocks that run through: three rows of scales, not twice two."""
    name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
    folder = copy_folder(folders[0], tmp_path / "other", tensors={name: torch.ones(3, 2)})
    refused(CheckpointError, target_spec(folder).check, name)
