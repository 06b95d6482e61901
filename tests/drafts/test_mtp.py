"""MTP layers, in GLM's and in MiMo's names: what they draft is what an independent dense computation drafts."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from support.dense_drafts import AFTER_NORM, DenseMtp, DenseTarget, dense_of
from support.engines import build, greedy, sampled, tokens
from support.grids import few_of
from support.head_layouts import WIDTH, assert_drafts
from support.mtp_layers import NAMES, mtp_tensors
from support.refusing import refused
from support.tiny_models import Pair, copy_folder, llama_config, save_random, save_random_llama
from treetop import LLM
from treetop.doctor.conformance import RandomShapes
from treetop.drafts.registry import find_draft
from treetop.types.errors import CheckpointError, ConfigError

SHAPE = (3, 3, 9)


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    """A family's name, a target with an MTP layer in its folder, and the same target alone."""
    folder = tmp_path_factory.mktemp("mtp")
    if request.param == "MiMo":  # Qwen2's layers, with biases
        config = Qwen2Config(**{**llama_config().to_dict(), "model_type": "qwen2", "use_sliding_window": False})
        alone = save_random(Qwen2ForCausalLM, config, folder / "alone", 7)
        changes = {"architectures": ["MiMoForCausalLM"]}
    else:
        alone, changes = save_random_llama(folder / "alone", seed=7), {}
    tensors = load_file(alone / "model.safetensors")
    more = mtp_tensors(request.param)
    if request.param == "GLM":  # which has copies of the target's
        prefix = NAMES["GLM"][0]
        more[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        more[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    both = copy_folder(alone, folder / "both", tensors=more, num_nextn_predict_layers=1, **changes)
    return request.param, both, DenseTarget(alone)


def reference(family, both, dense_target, normed_state=None) -> DenseMtp:
    prefix, names, hidden_first, of_family = NAMES[family]
    config = {**json.loads((both / "config.json").read_text()), "head_dim": 16}
    head = dense_target.lm_head
    state = of_family if normed_state is None else normed_state
    offset = torch.zeros(len(head), dtype=torch.long)
    dense = dense_of(both, config)
    return DenseMtp(dense, dense_target.embedding, head, offset, prefix, names, hidden_first, state)


def test_it_drafts_what_it_must(family):
    """First drafts and deeper ones, the embedding at position 0 left out; the algorithm is inferred."""
    name, both, dense_target = family
    found = find_draft(both)
    assert found.algorithm == "MTP"
    assert name in found.layout
    assert_drafts(Pair(both, both), dense_target, reference(name, both, dense_target), (AFTER_NORM,))


def test_the_other_recurrence_is_an_option(family):
    name, both, dense_target = family
    other = not NAMES[name][3]
    want = reference(name, both, dense_target, normed_state=other)
    option = {"speculative_mtp_recurrence": "after-norm" if other else "before-norm"}
    assert_drafts(Pair(both, both), dense_target, want, (AFTER_NORM,), **option)


@pytest.fixture(scope="module")
def plain(family):
    """Prompts that share a prefix, parameters, and the tokens of plain decoding."""
    _, both, _ = family
    pair = Pair(both, both)
    base = pair.prompts([18, 5])
    prompts, params = (
        [*base, base[0] + [9]],
        [greedy(25, whole=True), sampled(1, 25, whole=True), greedy(20, whole=True)],
    )
    return prompts, params, tokens(build(pair, None).generate(prompts, params))


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": "sim", "check_level": 3},
        {"overlap": True, "check_level": 2},
        {"speculative_algorithm": "NEXTN"},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 3, 9)])
def test_its_tokens_are_those_of_plain_decoding(family, plain, shape, options):
    """Chains and trees, by both its names and without a folder of a draft; prompts that share a prefix."""
    _, both, _ = family
    k, steps, size = shape
    prompts, params, want = plain
    tree = {"speculative_eagle_topk": k, "speculative_num_steps": steps, "speculative_num_draft_tokens": size}
    options = {"speculative_algorithm": "MTP", **options}
    llm = LLM(str(both), dtype="float64", context_length=96, page_size=4, **tree, **options)
    assert tokens(llm.generate(prompts, params)) == want
    llm.scheduler.check_integrity()


SWITCHED = [
    {},
    {"graphs": "sim", "check_level": 3},
    {"overlap": True, "check_level": 2},
    {"speculative_calibration": "learn", "graphs": "sim", "overlap": True},
]


@pytest.mark.parametrize(
    ("family", "options"),
    few_of([(name, options) for name in NAMES for options in SWITCHED], 1, 7),  # with and without each, of both
    indirect=["family"],
    ids=str,
)
def test_shapes_that_switch_change_no_token(family, plain, options):
    """Plain rounds, chains and trees at random; what plain rounds defer is caught up with before a tree grows,
    or the row goes on without a draft for a while.
    """
    _, both, _ = family
    prompts, params, want = plain
    llm = switching(both, 3, True, **options)
    for _ in range(2):  # the second time prefixes come from the cache
        assert tokens(llm.generate(prompts, params)) == want
        llm.scheduler.check_integrity()
    assert set(llm.scheduler.policy.chosen) == set(llm.engine.layout.shapes)


def switching(both, max_deferred, loses=False, **options):
    tree = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 9}
    auto = {"speculative_policy": "auto", "speculative_max_deferred": max_deferred}
    options = {"speculative_calibration": "off", **options}
    sizes = {"dtype": "float64", "context_length": 96, "page_size": 4}
    llm = LLM(str(both), speculative_algorithm="NEXTN", **tree, **auto, **sizes, **options)
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, loses=loses)
    return llm


@pytest.mark.slow
def test_trees_after_deferred_tokens_are_those_of_an_engine_that_defers_none(family):
    """The layer's K/V and state after a pass that catches up: the same proposals to the last digits."""
    _, both, _ = family
    prompts, seen = Pair(both, both).prompts([9, 20, 5]), []
    for most in (0, 5):
        llm, trees = switching(both, most), []
        llm.engine.observer = lambda plan, tree, accepted, trees=trees: trees.append((plan.shape, tree, accepted))
        llm.generate(prompts, greedy(30))
        seen.append(trees)
    assert [shape for shape, *_ in seen[0]] == [shape for shape, *_ in seen[1]]
    for (_, one, accepted), (_, other, again) in zip(*seen, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(accepted.tokens, again.tokens)
        torch.testing.assert_close(one.logprob, other.logprob, rtol=0, atol=1e-9)


def test_a_target_with_an_mtp_layer_decodes_plainly_without_it(family):
    _, both, _ = family
    assert "draft" not in build(Pair(both, both), None).engine.layout.token_groups


def test_what_is_wrong_with_an_mtp_layer_is_named(family, tmp_path):
    name, both, _ = family
    prefix, names, _, _ = NAMES[name]

    def act(folder, **options):
        return lambda: LLM(str(folder), speculative_algorithm="MTP", dtype="float64", context_length=96, **options)

    gone = copy_folder(both, tmp_path / "gone", tensors={f"{prefix}.{names[1]}.weight": None})
    refused(CheckpointError, act(gone), "missing", f"{prefix}.{names[1]}.weight")
    more = copy_folder(both, tmp_path / "more", tensors={f"{prefix}.extra.weight": torch.ones(3)})
    refused(CheckpointError, act(more), "unexpected", f"{prefix}.extra.weight")
    narrow = copy_folder(both, tmp_path / "narrow", tensors={f"{prefix}.{names[2]}.weight": torch.ones(WIDTH, WIDTH)})
    refused(CheckpointError, act(narrow), f"{prefix}.{names[2]}.weight", "(64, 64)", "(64, 128)")
    stripped = {each: None for each in load_file(both / "model.safetensors") if each.startswith(prefix + ".")}
    without = copy_folder(both, tmp_path / "without", tensors=stripped)
    refused(CheckpointError, act(without), "MTP", "num_nextn_predict_layers = 1")
    refused(
        ConfigError, lambda: build(Pair(both, both), SHAPE, speculative_algorithm="EAGLE3"), "EAGLE3", "MTP", prefix
    )


def test_a_layer_that_does_not_follow_the_targets_is_refused(tmp_path):
    """In DeepSeek's names the number of layers is part of the name."""
    more = {name.replace("model.layers.4.", "model.layers.6."): t for name, t in mtp_tensors("GLM").items()}
    target = save_random_llama(tmp_path / "t")
    folder = copy_folder(target, tmp_path / "both", tensors=more)
    refused(CheckpointError, lambda: LLM(str(folder), speculative_algorithm="MTP"), "model.layers.6", "model.layers.4")
