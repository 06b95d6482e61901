"""Block heads: DFlash, JetSpec and DSpark in every layout, their trees node by node against an oracle."""

import pytest
import torch

from support.block_heads import (
    BLOCK,
    FULL,
    IDS,
    LAYOUTS,
    PLAIN,
    SLIDES,
    TOP,
    DenseBlock,
    block_shapes,
    markov_shapes,
    random_block,
    saved,
    speculators,
    zlab,
)
from support.dense_drafts import DenseTarget
from support.draft_rounds import assert_batches, assert_rounds
from support.engines import accept_lens, build, greedy, sampled, tokens
from support.grids import few_of
from support.head_layouts import LAYERS, VOCAB, save_head
from support.refusing import refused
from support.tiny_models import Pair, copy_folder, save_random_llama
from treetop.drafts.registry import drafter_spec, find_draft
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop_debug.block_faults import BLOCK_FAULTS


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_random_llama(tmp_path_factory.mktemp("blocks") / "target", seed=5, head_dim=16)
    return folder, DenseTarget(folder)


def reference_of(folder, dense: DenseTarget, name: str, **changes) -> DenseBlock:
    _, _, _, first, (causal, window), more = LAYOUTS[name]
    offset = torch.zeros(VOCAB, dtype=torch.int64)
    return DenseBlock(folder, dense.embedding, dense.lm_head, offset, first, causal, window, **{**more, **changes})


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_drafts_what_its_oracle_says(target, tmp_path, name):
    folder = saved(tmp_path, name)
    found = find_draft(folder)
    assert found.algorithm == LAYOUTS[name][2]
    assert_rounds(Pair(target[0], folder), target[1], reference_of(folder, target[1], name))


def test_a_vocabulary_and_an_embedding_of_its_own(target, tmp_path):
    """Edges are in draft ids and read target ids; files of another writer have a prefix."""
    used = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:70].sort().values
    config = speculators("dspark", markov_rank=12, draft_vocab_size=70)
    shapes = {**block_shapes(2), **markov_shapes("vanilla", 70), "lm_head.weight": (70, 64)}
    tensors = random_block({**shapes, "embed_tokens.weight": (VOCAB, 64)})
    tensors |= {"d2t": used - torch.arange(70), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, used, True)}
    folder = save_head(tmp_path / "head", config, tensors)
    own = tensors["embed_tokens.weight"], tensors["lm_head.weight"], tensors["d2t"]
    reference = DenseBlock(folder, *own, 0, *PLAIN, rule="anchor", markov="vanilla")
    assert_rounds(Pair(target[0], folder), target[1], reference)


def test_a_file_whose_tensors_begin_with_model(target, tmp_path):
    tensors = {f"model.{name}": x for name, x in random_block(block_shapes(2)).items()}
    folder = save_head(tmp_path / "head", zlab(), tensors)
    reference = reference_of(folder, target[1], "z-lab", prefix="model.")
    assert_rounds(Pair(target[0], folder), target[1], reference, shape=(1, 5, 6), count=2)


@pytest.mark.parametrize("name", few_of(["DeepSpec, rnn", "speculators, DFlash 2"], 0))
def test_batches_captured_or_not_with_prefix_hits_and_retractions(target, tmp_path, name):
    assert_batches(Pair(target[0], saved(tmp_path, name)), (3, 4, 12), hits="DFlash 2" not in name)  # it has a window


def test_plain_rounds_leave_the_context_to_a_later_one(target, tmp_path):
    """Rounds without a tree defer what the head has to see; a tree after them is what it would have been."""
    pair = Pair(target[0], saved(tmp_path, "DeepSpec, gated"))
    options = {"speculative_policy": "auto", "speculative_calibration": "learn", "page_size": 4}
    prompts, params = pair.prompts([9, 20, 5]), [greedy(40), sampled(3, 30), greedy(25)]
    llm = build(pair, (3, 4, 12), **options)
    assert llm.engine.runner.layout.max_deferred
    assert tokens(llm.generate(prompts, params)) == tokens(build(pair, None).generate(prompts, params))


def test_ranks_that_share_a_head_draft_alike(target, tmp_path):
    pair = Pair(target[0], saved(tmp_path, "DeepSpec, vanilla"))
    prompts, params = pair.prompts([9, 20, 5]), [greedy(20), sampled(3, 20), greedy(12)]
    want = build(pair, (3, 4, 12)).generate(prompts, params)
    got = build(pair, (3, 4, 12), tp_size=2, device="cpu").generate(prompts, params)
    assert (tokens(got), accept_lens(got)) == (tokens(want), accept_lens(want))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"block_size": 1}, ("block_size",)),
        ({"block_size": None}, ("block_size",)),
        ({"dflash_config": {"target_layer_ids": IDS}}, ("mask_token_id",)),
        ({"dflash_config": {"target_layer_ids": IDS, "mask_token_id": VOCAB}}, ("mask_token_id", str(VOCAB))),
        ({"dflash_config": {"target_layer_ids": [0, 1, LAYERS - 1], "mask_token_id": 1}}, ("target_layer_ids",)),
        ({"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 1}}, ("fc.weight",)),
        ({"dflash_config": {"mask_token_id": 1, "attention_sink_bias": True}}, ("attention_sink_bias",)),
        ({"dflash_config": {"mask_token_id": 1, "is_neox_style": False}}, ("is_neox_style",)),
        ({"dflash_config": {"mask_token_id": 1, "causal": "yes"}}, ("causal",)),
        ({"dflash_config": {"mask_token_id": 1, "projector_type": "dspark"}}, ("markov_rank",)),
        ({"layer_types": [SLIDES]}, ("layer_types",)),
        ({"layer_types": [SLIDES, FULL]}, ("sliding_window",)),
        ({"vocab_size": 13}, ("another target", "13")),
        ({"num_hidden_layers": 3}, ("layers.2",)),
        ({"draft_vocab_size": 70}, ("lm_head.weight",)),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_its_key(target, tmp_path, changes, parts):
    folder = copy_folder(saved(tmp_path, "z-lab"), tmp_path / "other", **changes)
    config = target_spec(target[0]).config
    refused(CheckpointError, lambda: drafter_spec(folder, config).check(), *parts)


def test_more_branches_than_a_selector_scores_are_refused(target, tmp_path):
    pair = Pair(target[0], saved(tmp_path, "speculators, DFlash 2"))
    refused(ConfigError, lambda: build(pair, (TOP + 1, 1, 4)), "--speculative-eagle-topk", str(TOP))


def test_a_tree_deeper_than_the_block_is_refused(target, tmp_path):
    """A block of six in place proposes five tokens, one that is shifted six."""
    for name, deepest in (("z-lab", BLOCK - 1), ("DeepSpec, vanilla", BLOCK)):
        pair = Pair(target[0], saved(tmp_path / f"{deepest}", name))
        refused(ConfigError, lambda pair=pair, n=deepest + 1: build(pair, (1, n, n + 1)), "--speculative-num-steps")
        assert build(pair, (1, deepest, deepest + 1)).generate([[5, 6]], greedy(4))


@pytest.mark.parametrize("name", BLOCK_FAULTS)
def test_the_oracle_tells_of_each_past_bug(target, tmp_path, name):
    """Put back, it changes what is drafted, and no token: so only a comparison of trees can tell."""
    found, layout = BLOCK_FAULTS[name]
    pair = Pair(target[0], saved(tmp_path, layout))
    reference, shape = reference_of(pair.head, target[1], layout), (3, 5, 14)
    assert_rounds(pair, target[1], reference, shape=shape, count=5)
    with found.active(), pytest.raises(AssertionError):
        assert_rounds(pair, target[1], reference, shape=shape, count=5)
    with found.active():
        drafted = tokens(build(pair, shape).generate(pair.prompts([9, 3]), greedy(12)))
    assert drafted == tokens(build(pair, None).generate(pair.prompts([9, 3]), greedy(12)))
