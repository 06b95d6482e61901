"""A language model that drafts with another vocabulary: which tokens are the same, and that no output depends on it."""

import json

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.engines import build, greedy, sampled, tokens
from support.grids import few_of
from support.refusing import refused
from support.tiny_models import EOS, Pair, copy_folder, save_random_llama, save_tokenizer
from treetop.drafts.shared_words import shared_words
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError

ALONE = {"speculative_algorithm": "STANDALONE"}


def write(folder, words, over_bytes: bool, special=()):
    """A tokenizer with these names in order; those of `special` are added tokens."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    if over_bytes:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel() if over_bytes else decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_tokens_of_two_kinds_are_the_same_by_what_they_stand_for(tmp_path):
    """Spaces, bytes and letters beyond ASCII by either spelling; a special token is none that is spelled like it."""
    target = write(
        tmp_path / "target", ["Ġthe", "the", "Ċ", "Ã©", "<s>", "xthe", "zz", "<e>", "Ġ"], True, ["<s>", "<e>"]
    )
    draft = write(tmp_path / "draft", ["<0x0A>", "é", "▁the", "<e>", "<s>", "the", "own", "▁"], False, ["<s>"])
    words = shared_words(draft, 8, target, 11)
    pairs = dict(zip(words.meant.tolist(), words.proposed.tolist(), strict=True))
    assert pairs == {0: 2, 1: 5, 2: 0, 3: 1, 4: 4, 8: 7}
    assert words.meant.tolist() == sorted(words.meant.tolist())
    # "xthe" ends with "the", "zz" with nothing known; the special <e> is spelled like the draft's; two are padding.
    assert words.reads.tolist() == [2, 5, 0, 1, 4, 5, 0, 3, 7, 0, 0]


def test_tokens_beyond_a_models_rows_are_not_proposed(tmp_path):
    """Names that a tokenizer has and the model does not."""
    target = write(tmp_path / "target", ["a", "b", "c", "d"], True)
    draft = write(tmp_path / "draft", ["d", "c", "b", "a"], True)
    words = shared_words(draft, 3, target, 3)
    assert (words.meant.tolist(), words.proposed.tolist()) == ([1, 2], [2, 1])
    assert words.reads.tolist() == [0, 2, 1]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_random_llama(tmp_path_factory.mktemp("words") / "target", seed=5, head_dim=16)
    save_tokenizer(folder, target_spec(folder).config.vocab_size, spelled)
    return folder


def spelled(token: int) -> bytes:
    return f"{token:04}".encode()


def reordered(target, folder, kept: list[int]):
    """The target itself with the tokens `kept`, in this order."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        rows = embedding[kept].clone(), output[kept].clone()
        model.resize_token_embeddings(len(kept))
        model.get_input_embeddings().weight.copy_(rows[0])
        model.get_output_embeddings().weight.copy_(rows[1])
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    written = json.loads((target / "tokenizer.json").read_text())
    names = {token: word for word, token in written["model"]["vocab"].items()}
    written["model"]["vocab"] = {names[token]: place for place, token in enumerate(kept)}
    for added in written["added_tokens"]:
        added["id"] = kept.index(added["id"])
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return folder


def test_the_target_in_another_order_accepts_all_that_it_drafts(target, tmp_path):
    """So every token is read and proposed as what it is; a wrong one would end a chain early."""
    vocab = target_spec(target).config.vocab_size
    draft = reordered(target, tmp_path / "draft", torch.randperm(vocab).tolist())
    llm = build(Pair(target, draft), (1, 4, 5), page_size=4, **ALONE)
    for output in llm.generate(Pair(target, None).prompts([3, 4, 5, 8, 13]), greedy(21, whole=True)):
        assert output.metrics.target_forwards == 4


@pytest.mark.parametrize("graphs", few_of(["off", "sim"], 0))
def test_no_token_depends_on_what_the_vocabularies_share(target, tmp_path, graphs):
    """Greedy and drawn, with a third of the words, in prompts too; batches, trees and chains."""
    vocab = target_spec(target).config.vocab_size
    kept = [token for token in torch.randperm(vocab).tolist() if token % 3 == 0 or token == EOS]
    pair = Pair(target, reordered(target, tmp_path / "draft", kept))
    prompts, params = pair.prompts([9, 3, 14]), [greedy(24), sampled(3, 24), sampled(4, 24, temperature=0.5)]
    want = tokens(build(Pair(target, None), None).generate(prompts, params))
    for shape in ((3, 3, 9), (1, 4, 5)):
        llm = build(pair, shape, graphs=graphs, page_size=4, **ALONE)
        outputs = llm.generate(prompts, params)
        assert tokens(outputs) == want
        assert llm.engine.runner.drafter.spec.vocab_size == len(kept)


def test_vocabularies_that_share_nothing_are_refused(target, tmp_path):
    other = copy_folder(target, tmp_path / "other")
    save_tokenizer(other, target_spec(target).config.vocab_size, lambda token: f"{token + 7000:04}".encode())
    written = json.loads((other / "tokenizer.json").read_text())
    written["added_tokens"][0]["content"] = "<other>"
    written["model"]["vocab"]["<other>"] = written["model"]["vocab"].pop("<eos>")
    (other / "tokenizer.json").write_text(json.dumps(written))
    refused(CheckpointError, lambda: build(Pair(target, other), (2, 2, 5), **ALONE), "tokenizer.json", "7000", "0000")
