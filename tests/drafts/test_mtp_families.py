"""MTP layers of Hy3, ERNIE, MiMo-V2 and Qwen3-Next draft what an independent computation drafts; trees are exact."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from support.dense_drafts import AFTER_NORM, Dense, DenseFamilyMtp, DenseTarget, dense_of
from support.engines import build, greedy, sampled, tokens
from support.families import FAMILIES, WINDOW
from support.grids import few_of
from support.head_layouts import assert_drafts
from support.refusing import refused
from support.tiny_models import Pair, copy_folder
from treetop.drafts.registry import find_draft
from treetop.types.errors import CheckpointError


@dataclass(frozen=True)
class Layout:
    """tiny: a family. layer: what its tensors are under, own: its own tensors. renamed: parts of the decoder layer.

    last: what the config says of the one layer more that `transformers` runs, which becomes the MTP layer.
    """

    tiny: str
    layer: str
    own: tuple[str, str, str, str | None]
    last: dict
    normed_state: bool = True
    zeroed: bool = True
    renamed: tuple[tuple[str, str], ...] = ()
    window: int | None = None
    unit_offset: bool = False


QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
KINDS = [f"{kind}_attention" for kind in ("linear", "full", "linear", "linear", "full")]
LAYOUTS = {
    "Hy3": Layout(
        "hy3",
        "model.layers.4",
        *[tuple(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"))],
        {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]},
    ),
    "DeepSeek": Layout(
        "deepseek v3",
        "model.layers.4",
        *[tuple(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))],
        {},
        normed_state=False,
    ),
    "GLM-4.7-Flash": Layout(
        "glm4 moe lite",
        "model.layers.4",
        *[tuple(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))],
        {},
        normed_state=False,
    ),
    "DeepSeek-V3.2": Layout(
        "deepseek v32",
        "model.layers.4",
        *[tuple(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))],
        {},
        normed_state=False,
    ),
    "GLM-5.2": Layout(
        "glm 5.2",
        "model.layers.4",
        *[tuple(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))],
        {"indexer_types": ["full", "full", "shared", "shared", "full"]},
        normed_state=False,
    ),
    "ERNIE": Layout(
        "ernie moe",
        "model.mtp_block.0",
        ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0", None),
        {},
        normed_state=False,
    ),
    **{
        tiny: Layout(tiny, "mtp.layers.0", QWEN, {"layer_types": KINDS}, zeroed=False, unit_offset=True)
        for tiny in ("qwen3 next", "qwen3.5", "qwen3.5 moe")
    },
    "MiMo-V2": Layout(
        "mimo v2",
        "model.mtp.layers.0",
        *[tuple(f"model.mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"))],
        {
            "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "sliding", "sliding")],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "dense"],
        },
        zeroed=False,
        renamed=(("post_attention_layernorm", "pre_mlp_layernorm"),),
        window=WINDOW,
    ),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def made(request, tmp_path_factory):
    """The layout, a folder with its MTP layer, and the model of `transformers` with that layer as its last."""
    layout, folder = LAYOUTS[request.param], tmp_path_factory.mktemp("mtp")
    tiny = FAMILIES[layout.tiny]
    more = {"num_hidden_layers": 5, "vocab_size": 211, **tiny.config, **layout.last}
    saved = type(tiny)(tiny.name, {**more, "num_hidden_layers": 5, "vocab_size": 211}).save(folder / "whole", seed=9)
    stored, generator = load_file(saved.theirs / "model.safetensors"), torch.Generator().manual_seed(2)
    tensors, hidden = dict.fromkeys(name for name in stored if name.startswith("model.layers.4.")), 32
    for name in list(tensors):
        moved = layout.layer + name.removeprefix("model.layers.4")
        for old, new in layout.renamed:
            moved = moved.replace(old, new)
        tensors[moved] = stored[name]
    for name in filter(None, layout.own):
        wide = "proj" in name or name == "mtp.fc"
        shape = (hidden, 2 * hidden) if wide else (hidden,)
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * (0.12 if wide else 0.3) + (not wide)
    config = json.loads((saved.theirs / "config.json").read_text())
    lists = {key: value[:4] for key, value in config.items() if isinstance(value, list) and len(value) == 5}
    changes = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1, **lists}
    if "moe_layer_end_index" in config:
        changes["moe_layer_end_index"] = 3
    both = copy_folder(saved.theirs, folder / "both", tensors=tensors, **changes)
    return request.param, layout, both, saved.theirs


def test_it_drafts_what_it_must(made):
    """First drafts and deeper ones, by their trees and scores; the algorithm is inferred from the names."""
    name, layout, both, whole = made
    found = find_draft(both)
    deepseek, qwen = "shared_head" in str(layout.own), layout.own == QWEN
    assert (found.algorithm, found.layout) == ("MTP", "GLM and DeepSeek" if deepseek else "Qwen" if qwen else name)
    how = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(whole, **how).eval()
    target = DenseTarget(both, attn_implementation="eager", experts_implementation="eager")
    dense: Dense = dense_of(both)
    if layout.unit_offset:
        dense.w |= {f"{name}.weight": dense.w[f"{name}.weight"] + 1 for name in layout.own if "norm" in name}
    reference = DenseFamilyMtp(
        *(dense, target.embedding, target.lm_head, torch.zeros(len(target.lm_head), dtype=torch.long), layout.layer),
        *(layout.own, False, layout.normed_state),
        model=model,
        window=layout.window,
        zeroed=layout.zeroed,
    )
    assert_drafts(Pair(both, both), target, reference, (AFTER_NORM,))


OPTIONS = {"page_size": 4, "context_length": 96, "chunked_prefill_size": 8}


@pytest.fixture(scope="module")
def plain(made):
    """Prompts, parameters and the tokens of plain decoding, which are the same with prefixes from the cache."""
    _, _, both, _ = made
    pair = Pair(both, both)
    base = pair.prompts([25, 5])
    prompts, params = [*base, base[0] + [9]], [greedy(16), sampled(1, 16), greedy(12)]
    llm = build(pair, None, **OPTIONS)
    want = tokens(llm.generate(prompts, params))
    assert tokens(llm.generate(prompts, params)) == want
    return prompts, params, want


@pytest.mark.parametrize(
    ("made", "shape"),
    few_of([(name, shape) for name in LAYOUTS for shape in ((1, 3, 4), (3, 3, 9))], 0, 5, 8, 13, 16),
    indirect=["made"],
)
def test_its_tokens_are_those_of_plain_decoding(made, plain, shape):
    """Chains and trees, greedy and sampled, prompts that share a prefix, past a window, twice, checked at level 3."""
    _, _, both, _ = made
    llm = build(Pair(both, both), shape, graphs="sim", check_level=3, **OPTIONS)
    for _ in range(2):
        assert tokens(llm.generate(*plain[:2])) == plain[2]
    llm.scheduler.check_integrity()


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A folder of Step 3.7 with an MTP layer, and one of five layers whose last is that layer."""
    folder, tiny = tmp_path_factory.mktemp("step"), FAMILIES["step"]
    last = {"layer_types": "sliding_attention", "mlp_layer_types": "dense"}
    last |= {"swiglu_limits": 0.0, "swiglu_limits_shared": 0.0}
    lists = {key: [*tiny.config[key], each] for key, each in last.items()}
    more = {**tiny.config, **lists, "num_hidden_layers": 5, "vocab_size": 211}
    whole = type(tiny)(tiny.name, more, vision=tiny.vision).save(folder / "whole", seed=9).theirs
    generator, prefix = torch.Generator().manual_seed(2), "model.layers.4"
    own = ("enorm", "hnorm", "transformer.shared_head.norm")
    tensors = {f"{prefix}.{name}.weight": torch.randn(32, generator=generator) * 0.3 for name in own}
    tensors[f"{prefix}.eh_proj.weight"] = torch.randn((32, 64), generator=generator) * 0.12
    tensors[f"{prefix}.transformer.shared_head.output.weight"] = torch.zeros(211, 32)
    text = json.loads((whole / "config.json").read_text())["text_config"]
    text |= {key: text[key][:4] for key in last} | {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    del text["per_layer_config"]["4"]
    return copy_folder(whole, folder / "both", tensors=tensors, text_config=text), whole


def test_steps_layer_reads_the_target_before_its_final_norm(step):
    """And drafts what it must, with norms of 1 + w. The output matrix is the target's."""
    both, whole = step
    assert find_draft(both).layout == "Step"
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    target = DenseTarget(both, AutoModelForImageTextToText, **how)
    model = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float64, **how).eval().model
    names = [f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj")]
    names.append("model.layers.4.transformer.shared_head.norm")
    dense = dense_of(both, json.loads((both / "config.json").read_text())["text_config"])
    dense.w |= {f"{name}.weight": dense.w[f"{name}.weight"] + 1 for name in names if "norm" in name}
    reference = DenseFamilyMtp(
        *(dense, target.embedding, target.lm_head, torch.zeros(211, dtype=torch.long), "", tuple(names), False, False),
        model=model,
        window=WINDOW,
        zeroed=False,
    )
    assert_drafts(Pair(both, both), target, reference, (4,))


def test_tokens_with_steps_layer_are_those_of_plain_decoding(step):
    both, _ = step
    pair = Pair(both, both)
    prompts, params = pair.prompts([25, 5]), [greedy(20), sampled(1, 20)]
    plain = tokens(build(pair, None, page_size=4).generate(prompts, params))
    for shape in ((1, 3, 4), (3, 3, 9)):
        assert tokens(build(pair, shape, page_size=4, graphs="sim", check_level=3).generate(prompts, params)) == plain


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """A folder of Nemotron-H with MTP layers, and one of eight layers whose last two are those."""
    folder, tiny = tmp_path_factory.mktemp("nemotron"), FAMILIES["nemotron h"]
    whole = type(tiny)(tiny.name, {**tiny.config, "hybrid_override_pattern": "ME*-ME*E", "vocab_size": 211}).save(
        folder / "whole", seed=9
    )
    stored, generator = load_file(whole.theirs / "model.safetensors"), torch.Generator().manual_seed(2)
    tensors = {}
    for name, tensor in stored.items():
        for old, new in (("backbone.layers.6.", "mtp.layers.0."), ("backbone.layers.7.", "mtp.layers.1.")):
            if name.startswith(old):
                tensors |= {name: None, new + name.removeprefix(old): tensor}
    for name in NEMOTRON:
        shape = (32, 64) if "proj" in name else (32,)
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.12 + ("proj" not in name)
    kinds = json.loads((whole.theirs / "config.json").read_text())["layers_block_type"][:6]
    said = {"layers_block_type": kinds, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    return copy_folder(whole.theirs, folder / "both", tensors=tensors, num_hidden_layers=6, **said), whole.theirs


NEMOTRON = (*(f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")), "mtp.layers.1.final_layernorm")


def test_nemotrons_two_layers_draft_what_they_must(nemotron):
    """Attention and experts behind a norm each; the state that goes on is the normed one."""
    both, whole = nemotron
    assert find_draft(both).layout == "Nemotron"
    config = json.loads((both / "config.json").read_text())
    config["rms_norm_eps"] = config["layer_norm_epsilon"]
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float64, **how).eval()
    target = DenseTarget(both, **how)
    reference = DenseFamilyMtp(
        *(dense_of(both, config), target.embedding, target.lm_head, torch.zeros(211, dtype=torch.long), ""),
        *(NEMOTRON, False, True),
        model=model,
        zeroed=False,
        layers=2,
    )
    assert_drafts(Pair(both, both), target, reference, (AFTER_NORM,))


def test_tokens_with_nemotrons_layers_are_those_of_plain_decoding(nemotron, tmp_path):
    """And what they are not is refused: another pattern, a tensor that nobody reads."""
    both, _ = nemotron
    pair = Pair(both, both)
    prompts, params = pair.prompts([25, 5]), [greedy(20), sampled(1, 20)]
    plain = tokens(build(pair, None, page_size=4).generate(prompts, params))
    llm = build(pair, (3, 3, 9), page_size=4, graphs="sim", check_level=3)
    assert tokens(llm.generate(prompts, params)) == plain
    other = copy_folder(both, tmp_path / "other", mtp_hybrid_override_pattern="M*E")
    refused(CheckpointError, lambda: build(Pair(other, other), (3, 3, 9)), "mtp_hybrid_override_pattern")
    more = copy_folder(both, tmp_path / "more", tensors={"mtp.layers.1.mixer.gate.bias": torch.zeros(6)})
    refused(CheckpointError, lambda: build(Pair(more, more), (3, 3, 9)), "mtp.layers.1.mixer.gate.bias")


def test_a_layer_in_a_folder_of_images_is_found(tmp_path):
    """GLM-OCR's, in DeepSeek's names under those of its language model."""
    tiny, prefix = FAMILIES["glm ocr"], "model.language_model.layers.4"
    whole = type(tiny)(tiny.name, {**tiny.config, "num_hidden_layers": 5}, vision=tiny.vision).save(tmp_path / "whole")
    generator, own = torch.Generator().manual_seed(2), ("enorm", "hnorm", "shared_head.norm")
    tensors = {f"{prefix}.{name}.weight": torch.rand(32, generator=generator) + 0.5 for name in own}
    tensors[f"{prefix}.eh_proj.weight"] = torch.randn((32, 64), generator=generator) / 8
    text = json.loads((whole.theirs / "config.json").read_text())["text_config"]
    text = {**text, "num_hidden_layers": 4, "layer_types": None, "num_nextn_predict_layers": 1}
    both = copy_folder(whole.theirs, tmp_path / "both", tensors=tensors, text_config=text)
    assert find_draft(both).layout == "GLM and DeepSeek"
    pair, prompts = Pair(both, both), Pair(both, both).prompts([20, 5])
    assert tokens(build(pair, (3, 3, 9)).generate(prompts, greedy(20))) == tokens(
        build(pair, None).generate(prompts, greedy(20))
    )


def test_a_target_that_has_no_such_layer_is_refused(made, tmp_path):
    """MiMo-V2's layer has a window, as some of its target's must."""
    name, layout, both, _ = made
    if name != "MiMo-V2":
        gone = copy_folder(both, tmp_path / "gone", tensors={f"{layout.own[1]}.weight": None})
        refused(CheckpointError, lambda: build(Pair(gone, gone), (3, 3, 9)), "missing", f"{layout.own[1]}.weight")
        return
    full = copy_folder(both, tmp_path / "full", layer_types=["full_attention"] * 4)
    refused(CheckpointError, lambda: build(Pair(full, full), (3, 3, 9)), "MiMo-V2", "not supported with this target")
