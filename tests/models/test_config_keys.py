"""Keys that published configs have equal, or leave out: read as `transformers` reads them, or refused by name."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from support.engines import greedy
from support.families import FAMILIES
from support.logits import record_logits
from support.refusing import refused
from support.tiny_models import copy_folder
from treetop import LLM
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError


def with_keys(name, folder, **changes):
    """A family's tiny model of another config."""
    return replace(FAMILIES[name], config={**FAMILIES[name].config, **changes}).save(folder)


def assert_logits_are_those_of_transformers(saved):
    llm = LLM(model=str(saved.pair.target), draft=None, dtype="float32", graphs="off", device="cpu")
    seen, (prompt,) = record_logits(llm), saved.pair.prompts([30])
    llm.generate([prompt], greedy(1))
    theirs = saved.logits(saved.reference(torch.float32), prompt)
    torch.testing.assert_close(seen[0][0], theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))


def test_narrow_values_with_biases_load_and_are_those_of_transformers(tmp_path):
    """MiMo-V2 with `attention_bias`: a value's bias is as narrow as the value, and zeros stand behind it."""
    assert_logits_are_those_of_transformers(with_keys("mimo v2", tmp_path, attention_bias=True))


@pytest.mark.parametrize("name", ["gemma4 of images", "gemma4 unified"])
def test_a_null_size_of_full_heads_is_that_of_the_others(name, tmp_path):
    """As `transformers` 5 saves Gemma 4 whose heads are all alike."""
    saved = with_keys(name, tmp_path, head_dim=8, global_head_dim=8)
    path = saved.pair.target / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["global_head_dim"] = None
    path.write_text(json.dumps(config))
    assert_logits_are_those_of_transformers(saved)


@pytest.mark.parametrize(
    ("key", "listed"),
    [
        ("rope_theta", [1e4]),
        ("rope_theta", []),
        ("partial_rotary_factors", [0.5]),
        ("partial_rotary_factors", []),
        ("layer_types", ["full_attention"]),
        ("swiglu_limits", [0.5]),
    ],
)
def test_a_list_by_layer_that_is_too_short_is_named(key, listed, tmp_path):
    """Step 3.5, whose lists may go on with layers for further tokens."""
    saved = FAMILIES["step 3.5"].save(tmp_path)
    assert target_spec(saved.pair.target).check() > 0
    short = copy_folder(saved.pair.target, tmp_path / "short", **{key: listed})
    refused(CheckpointError, lambda: target_spec(short), f"config.json: {key} must", "each of 4 layers")


@pytest.mark.parametrize("name", ["glm4v", "glm4.6v"])
def test_a_head_that_is_wider_than_its_share_of_the_model_is_refused(name, tmp_path):
    """GLM-4V: `transformers` makes heads of hidden / heads, and of these turns so much as `head_dim` says."""
    saved = FAMILIES[name].save(tmp_path)
    config = json.loads((saved.pair.target / "config.json").read_text())["text_config"]
    for value, fits in ((config["hidden_size"] // config["num_attention_heads"], True), (None, True), (16, False)):
        text = {**config, "head_dim": value}
        folder = copy_folder(saved.pair.target, tmp_path / f"{value}", text_config=text)
        if fits:
            assert target_spec(folder).check() > 0
        else:
            refused(CheckpointError, partial(target_spec, folder), "config.json: head_dim = 16", "only 8")


def test_a_rotation_that_is_narrower_than_what_turns_is_refused(tmp_path):
    """Youtu: `transformers` turns `head_dim` numbers, which are `qk_rope_head_dim` unless a config says otherwise."""
    saved = FAMILIES["youtu"].save(tmp_path)
    for value in (6, None):
        assert target_spec(copy_folder(saved.pair.target, tmp_path / f"{value}", head_dim=value)).check() > 0
    other = copy_folder(saved.pair.target, tmp_path / "other", head_dim=2)
    refused(CheckpointError, lambda: target_spec(other), "config.json: head_dim = 2", "only 6")
