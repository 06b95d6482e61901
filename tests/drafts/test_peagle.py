"""P-EAGLE in its layouts, its trees node by node against an oracle."""

import pytest
import torch

from support.dense_drafts import DenseTarget
from support.dense_peagle import DensePEagle
from support.draft_rounds import assert_batches, assert_rounds
from support.engines import build, greedy, sampled, tokens
from support.head_layouts import VOCAB, save_head
from support.peagle_heads import LAYOUTS, MASK, saved
from support.refusing import refused
from support.tiny_models import Pair, copy_folder, save_random_llama
from treetop.drafts.registry import drafter_spec, find_draft
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_random_llama(tmp_path_factory.mktemp("peagle") / "target", seed=5, head_dim=16)
    return folder, DenseTarget(folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_drafts_what_its_oracle_says(target, tmp_path, name):
    layout = LAYOUTS[name]
    folder, tensors = saved(tmp_path, layout)
    assert find_draft(folder).algorithm == "PEAGLE"
    embedding = tensors.get("embed_tokens.weight", target[1].embedding)
    offset = tensors.get("d2t", torch.zeros(layout.vocab, dtype=torch.int64))
    reference = DensePEagle(
        tensors, embedding, tensors["lm_head.weight"], offset, MASK, layout.layers, layout.before_residual
    )
    assert_rounds(Pair(target[0], folder), target[1], reference)


@pytest.mark.slow
def test_batches_captured_or_not_with_prefix_hits_and_retractions(target, tmp_path):
    pair = Pair(target[0], saved(tmp_path, LAYOUTS["speculators"])[0])
    assert sum(assert_batches(pair, (8, 3, 40))) > 2


def test_other_weights_take_its_place(target, tmp_path):
    """The specs are equal but for the folder."""
    layout = LAYOUTS["speculators"]
    old, (new, tensors) = saved(tmp_path / "old", layout)[0], saved(tmp_path / "new", layout)
    other = copy_folder(new, tmp_path / "other", tensors={"mask_hidden": -tensors["mask_hidden"]})
    prompts = Pair(target[0], old).prompts([9, 20])

    def trees(llm) -> list:
        grown = []
        llm.engine.observer = lambda plan, tree, accepted: grown.append(tree.tokens.tolist())
        llm.generate(prompts, greedy(6))
        return grown

    want, llm = trees(build(Pair(target[0], other), (1, 4, 5))), build(Pair(target[0], old), (1, 4, 5))
    assert trees(llm) != want
    llm.update_weights(draft=other)
    assert trees(llm) == want


@pytest.mark.slow
def test_ranks_shapes_of_one_level_and_deferred_pairs(target, tmp_path):
    pair = Pair(target[0], saved(tmp_path, LAYOUTS["speculators"])[0])
    prompts, params = pair.prompts([9, 20, 5]), [greedy(40), sampled(3, 30), greedy(25)]
    want = tokens(build(pair, None).generate(prompts, params))
    auto = build(pair, (3, 4, 12), speculative_policy="auto", speculative_calibration="learn", page_size=4)
    assert auto.engine.runner.layout.max_deferred
    assert tokens(auto.generate(prompts, params)) == want
    for options in ({"shape": (2, 1, 3)}, {"shape": (3, 4, 12), "tp_size": 2, "device": "cpu"}):
        assert tokens(build(pair, **options).generate(prompts, params)) == want


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"mask_token_id": None}, ("mask_token_id", "ptd_token_id")),
        ({"mask_token_id": VOCAB}, ("mask_token_id", str(VOCAB))),
        ({"mask_token_id": "7"}, ("mask_token_id",)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, ("mask_hidden", "(1, 1, 128)")),
        ({"transformer_layer_config": None}, ("transformer_layer_config",)),
        ({"draft_vocab_size": 70}, ("d2t",)),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_key(target, tmp_path, changes, parts):
    folder = copy_folder(saved(tmp_path, LAYOUTS["speculators"])[0], tmp_path / "other", **changes)
    config = target_spec(target[0]).config
    refused(CheckpointError, lambda: drafter_spec(folder, config).check(), *parts)


def test_a_head_without_its_placeholders_is_refused_and_one_of_another_kind_too(target, tmp_path):
    folder, tensors = saved(tmp_path, LAYOUTS["amazon"])
    config = target_spec(target[0]).config
    refused(ConfigError, lambda: drafter_spec(folder, config, "EAGLE3"), "PEAGLE", "mask_hidden")
    del tensors["mask_hidden"]
    other = save_head(tmp_path / "other", LAYOUTS["amazon"].config, tensors)
    refused(CheckpointError, lambda: drafter_spec(other, config), "mask_hidden")
