"""A small language model as a draft: its trees node by node against `transformers`."""

import json

import pytest
import torch
import transformers

from support.dense_drafts import DenseTarget
from support.draft_rounds import assert_batches, assert_rounds
from support.engines import build, greedy, sampled, tokens
from support.families import FAMILIES
from support.grids import few_of
from support.refusing import refused
from support.tiny_models import (
    Pair,
    copy_folder,
    llama_config,
    save_random,
    save_random_experts,
    save_random_llama,
    save_random_qwen3,
    save_tokenizer,
)
from treetop.drafts.registry import drafter_spec, find_draft
from treetop.models.registry import target_spec
from treetop.tools.quantize import quantize
from treetop.types.errors import CheckpointError

ALONE = {"speculative_algorithm": "STANDALONE"}
SMALL = {"num_hidden_layers": 2, "intermediate_size": 40}


class DenseModel:
    """A target and its reference in one, as `proposals_of` asks them: logits after a path, by `transformers`.

    Of a token it reads nothing; what it needs besides is the first one.
    """

    def __init__(self, folder, vocab: int) -> None:
        self.model, self.vocab = DenseTarget(folder).model, vocab
        self.offset = torch.zeros(vocab, dtype=torch.int64)

    def features(self, ids, which):
        return ids

    def logits(self, features, tokens, path=()):
        with torch.no_grad():
            logits = self.model(torch.tensor([[features[0], *tokens, *path]])).logits[0, -1]
        return logits[: self.vocab]


def gemma3(folder, **changes):
    """Windows in all but every third layer, norms around each half, scaled embeddings, heads of 16."""
    same = {key: value for key, value in llama_config().to_dict().items() if key in KEPT}
    own = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
    config = transformers.Gemma3TextConfig(**{**same, **SMALL, **own, **changes})
    return save_random(transformers.Gemma3ForCausalLM, config, folder, 2)


KEPT = (
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
    *("bos_token_id", "eos_token_id"),
)
MODELS = {
    "llama": lambda folder: save_random_llama(folder, seed=2, **SMALL),
    "qwen3": lambda folder: save_random_qwen3(folder, seed=2, **SMALL, tie_word_embeddings=True),
    "gemma3": gemma3,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("standalone") / "target", seed=5, head_dim=16)


@pytest.fixture(scope="module")
def vocab(target):
    return target_spec(target).config.vocab_size


@pytest.mark.parametrize("name", few_of(MODELS, 0, 1))
def test_trees_are_what_the_model_itself_says(target, vocab, tmp_path, name):
    """Positions, windows and the first token included; a chain is the model's own greedy continuation."""
    folder = MODELS[name](tmp_path / "draft")
    reference = DenseModel(folder, vocab)
    for shape in ((3, 3, 9), (1, 5, 6)):
        assert_rounds(Pair(target, folder), reference, reference, (), shape, **ALONE)


def test_a_target_that_drafts_for_itself_accepts_all(target):
    """Also at context lengths at which pages end."""
    llm = build(Pair(target, target), (1, 4, 5), page_size=4, **ALONE)
    for output in llm.generate(Pair(target, None).prompts([3, 4, 5, 8, 13]), greedy(21, whole=True)):
        assert output.metrics.target_forwards == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_drafts_for_itself_or_is_refused(tmp_path, name):
    pair = FAMILIES[name].save(tmp_path).pair
    itself = Pair(pair.target, pair.target)
    config = target_spec(pair.target).config
    attends = [layer.attends for layer in config.layers if layer.recurrent is None]
    if (
        len(attends) < len(config.layers)
        or config.has_experts
        or any(each.index is not None or each.kv_sharing_layer is not None for each in attends)
    ):
        refused(CheckpointError, lambda: drafter_spec(pair.target, config, "STANDALONE"), "not supported as a draft")
        return
    llm = build(itself, (1, 4, 5), page_size=4, **ALONE)
    for output in llm.generate(itself.prompts([3, 9, 30]), greedy(21, whole=True)):
        assert output.metrics.target_forwards == 4


def test_vocabularies_may_be_padded_and_a_token_beyond_is_never_proposed(target, vocab, tmp_path):
    """The likeliest tokens of the wider model are those that the target does not have."""
    wide = save_random_llama(tmp_path / "wide", seed=2, **SMALL, vocab_size=vocab + 9)
    with_words(wide, vocab)
    target = with_words(copy_folder(target, tmp_path / "target"), vocab)
    reference = DenseModel(wide, vocab)
    assert_rounds(Pair(target, wide), reference, reference, (), (3, 3, 9), count=2, **ALONE)
    narrow = with_words(save_random_llama(tmp_path / "narrow", seed=2, **SMALL, vocab_size=vocab - 9), vocab - 9)
    pair = Pair(target, narrow)
    prompts = [[vocab - 1, 5, vocab - 9, vocab - 10], *pair.prompts([9])]
    got = build(pair, (3, 3, 9), **ALONE).generate(prompts, greedy(16))
    assert tokens(got) == tokens(build(Pair(target, None), None).generate(prompts, greedy(16)))


def with_words(folder, count: int, first: int = 0):
    save_tokenizer(folder, count, lambda token: f"{token + first:04}".encode())
    return folder


def test_vocabularies_that_cannot_be_compared_are_refused(target, vocab, tmp_path):
    config = target_spec(target).config
    words = with_words(copy_folder(target, tmp_path / "target"), vocab)
    wide = save_random_llama(tmp_path / "wide", **SMALL, vocab_size=vocab + 1)

    def spec_of(folder, beside):
        return lambda: drafter_spec(folder, config, "STANDALONE", target_folder=beside)

    refused(CheckpointError, spec_of(wide, words), str(vocab + 1), str(vocab), "no tokenizer.json", str(wide))
    (wide / "tokenizer.json").write_text("[]")
    refused(CheckpointError, spec_of(wide, words), "tokenizer.json", "not a tokenizer")


def test_it_has_to_be_asked_for_by_name_and_what_drafts_cannot_have_is_refused(target, tmp_path):
    config = target_spec(target).config
    refused(CheckpointError, lambda: drafter_spec(target, config), "a target, not a draft head", "STANDALONE")
    assert find_draft(target, "STANDALONE").layout == "LlamaForCausalLM"
    experts = save_random_experts(tmp_path / "experts", "qwen3_moe")
    refused(CheckpointError, lambda: drafter_spec(experts, config, "STANDALONE"), "experts", "as a draft")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    refused(CheckpointError, lambda: drafter_spec(tmp_path / "unknown", config, "STANDALONE"), "MambaForCausalLM")


def test_batches_captured_or_not_with_prefix_hits_and_retractions(target, tmp_path):
    """The draft is the target with a little noise, so that trees are accepted in part."""
    lengths = assert_batches(Pair(target, noisy(target, tmp_path / "draft")), (3, 4, 12), **ALONE)
    assert len({*lengths}) > 2


def noisy(target, folder, amount: float = 0.15):
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(amount * parameter.std() * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def test_quantized_weights_draft_as_they_do_alone(target, tmp_path):
    quantize(target, None, "fp8", None, tmp_path / "fp8")
    llm = build(Pair(tmp_path / "fp8", tmp_path / "fp8"), (1, 4, 5), **ALONE)
    for output in llm.generate(Pair(target, None).prompts([3, 9]), greedy(21, whole=True)):
        assert output.metrics.target_forwards == 4


@pytest.mark.slow
def test_deferred_tokens_ranks_and_a_window(target, tmp_path):
    pair = Pair(target, noisy(target, tmp_path / "draft"))
    prompts, params = pair.prompts([9, 20, 5]), [greedy(40), sampled(3, 30), greedy(25)]
    want = tokens(build(Pair(target, None), None).generate(prompts, params))
    auto = {"speculative_policy": "auto", "speculative_calibration": "learn", "page_size": 4}
    for options in (auto, {"tp_size": 2, "device": "cpu"}, {"speculative_draft_window_size": 5}):
        llm = build(pair, (3, 4, 12), **ALONE, **options)
        assert tokens(llm.generate(prompts, params)) == want
