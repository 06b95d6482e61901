"""A block head's weights in formats of its own, and its K/V in another dtype than the target's: trees node by node."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.block_heads import LAYOUTS, DenseBlock, saved
from support.dense_drafts import DenseTarget
from support.draft_rounds import assert_rounds
from support.engines import build, greedy, sampled, tokens
from support.fp8 import rounded_kv
from support.grids import few_of
from support.head_layouts import VOCAB
from support.lookups import lookup
from support.refusing import refused
from support.tiny_models import Pair, save_random_llama
from treetop.tools.quantize import quantize
from treetop.types.errors import ConfigError

KINDS = ["z-lab", "DeepSpec, rnn", "DeepSpec, gated", "Domino", "z-lab, DFlash 2", "speculators, DSpark"]
FP8 = {"speculative_draft_kv_cache_dtype": "fp8_e4m3"}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_random_llama(tmp_path_factory.mktemp("formats") / "target", seed=5, head_dim=16)
    return folder, DenseTarget(folder)


def reference_of(folder, dense: DenseTarget, name: str) -> DenseBlock:
    _, _, _, first, (causal, window), more = LAYOUTS[name]
    offset = torch.zeros(VOCAB, dtype=torch.int64)
    return DenseBlock(folder, dense.embedding, dense.lm_head, offset, first, causal, window, **more)


def plain_again(folder, output):
    """What a quantized folder's weights stand for, as a plain one. Of compressed-tensors: codes times scales."""
    given, found = load_file(folder / "model.safetensors"), {}
    for name, x in given.items():
        scale = given.get(f"{name.removesuffix('_packed')}_scale")
        if name.endswith(".weight_packed"):  # eight codes a word, the first in the lowest bits, 8 for 0
            shape = given[name.removesuffix("_packed") + "_shape"].tolist()
            codes = (x[..., None] >> torch.arange(0, 32, 4)) & 15
            codes = codes.flatten(1)[:, : shape[1]].double() - 8
            each = codes.unflatten(1, (scale.shape[1], -1)) * scale.double()[..., None]
            found[name.removesuffix("_packed")] = each.flatten(1)
        elif name.endswith(".weight") and scale is not None:
            found[name] = x.double() * scale.double()
        elif not name.endswith((".weight_scale", ".weight_shape")):
            found[name] = x
    output.mkdir()
    (output / "config.json").write_text((folder / "config.json").read_text())
    save_file(found, output / "model.safetensors")
    return output


@pytest.mark.pairwise
@pytest.mark.parametrize("form", ["fp8", "w4a16"])
@pytest.mark.parametrize("name", KINDS)
def test_quantized_heads_draft_what_their_weights_stand_for(target, tmp_path, name, form):
    """Layers, fc, the context's K and V and what edges multiply, each in the file's format."""
    head = saved(tmp_path, name)
    quantize(head, target[0], form, 0, tmp_path / form)
    plain = plain_again(tmp_path / form, tmp_path / "plain")
    assert_rounds(Pair(target[0], tmp_path / form), target[1], reference_of(plain, target[1], name), count=2)


def rounding(reference: DenseBlock) -> DenseBlock:
    """The oracle with K and V rounded to FP8 where they are made."""
    whole = reference.block.kv
    reference.block.kv = lambda *args: tuple(rounded_kv(each) for each in whole(*args))
    return reference


@pytest.mark.parametrize("name", few_of(KINDS, 0, 3, 5))
def test_a_draft_keeps_its_own_kv_in_fp8_beside_a_target_that_does_not(target, tmp_path, name):
    folder = saved(tmp_path, name)
    reference = rounding(reference_of(folder, target[1], name))
    assert_rounds(Pair(target[0], folder), target[1], reference, **FP8)


def test_a_draft_keeps_its_kv_whole_beside_a_target_in_fp8(target, tmp_path):
    """Groups have the dtypes asked for, and tokens are those of a plain target in FP8, in batches and graphs."""
    pair = Pair(target[0], saved(tmp_path, "DeepSpec, rnn"))
    prompts, params = pair.prompts([9, 20, 5]), [greedy(20), sampled(3, 20), greedy(12)]
    for own, drafts in (("fp8_e4m3", "auto"), ("auto", "fp8_e4m3"), ("fp8_e4m3", None)):
        kept = {"kv_cache_dtype": own}
        want = tokens(build(Pair(target[0], None), None, **kept).generate(prompts, params))
        for graphs in ("off", "sim"):
            llm = build(pair, (3, 4, 12), graphs=graphs, page_size=4, speculative_draft_kv_cache_dtype=drafts, **kept)
            found = {group.is_draft: group.kv.fp8 for group in llm.engine.layout.groups}
            assert found == {False: own == "fp8_e4m3", True: (drafts or own) == "fp8_e4m3"}
            assert tokens(llm.generate(prompts, params)) == want


def test_drafts_without_kv_refuse_a_dtype_for_it(strong_pair):
    refused(ConfigError, lambda: lookup(strong_pair, (3, 4, 9), **FP8), "--speculative-draft-kv-cache-dtype", "no K/V")
