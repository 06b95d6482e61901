"""The MTP layer of a GLM-4.5, whose feed-forward has experts: it drafts what `transformers`' own layer would."""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.dense_drafts import AFTER_NORM, DenseMtp, DenseTarget, dense_of
from support.engines import build, greedy, sampled, tokens
from support.expert_pairs import CHAIN, TREE, save_glm_with_mtp
from support.grids import few_of
from support.head_layouts import assert_drafts
from support.tiny_models import Pair


@dataclass
class DenseExpertMtp(DenseMtp):
    """Its decoder layer is that of a model of `transformers` with one layer more. model: that model."""

    model: object = None

    def run(self, tokens, hidden):
        plain, n = self.dense.plain_layer, len(tokens)
        angles = self.model.model.rotary_emb(hidden[None], torch.arange(n)[None])
        mask = torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        layer = self.model.model.layers[-1]

        def whole_layer(x, _):
            with torch.no_grad():
                return layer(x[None], attention_mask=mask, position_embeddings=angles)[0]

        self.dense.plain_layer = whole_layer
        try:
            return super().run(tokens, hidden)
        finally:
            self.dense.plain_layer = plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_glm_with_mtp(tmp_path_factory.mktemp("glm"), vocab_size=211)


def test_it_drafts_what_it_must(folder):
    """First drafts and deeper ones, by their trees and scores."""
    how = {"dtype": torch.float64, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder.parent / "whole", **how).eval()
    target = DenseTarget(folder, experts_implementation="eager")
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    offset = torch.zeros(len(target.lm_head), dtype=torch.long)
    dense = dense_of(folder)
    reference = DenseExpertMtp(
        dense, target.embedding, target.lm_head, offset, "model.layers.2", names, False, False, model
    )
    assert_drafts(Pair(folder, folder), target, reference, (AFTER_NORM,))


@pytest.mark.parametrize(
    "options", few_of([{"graphs": "sim", "check_level": 3}, {"overlap": True, "graphs": "sim"}], 1), ids=str
)
@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_its_tokens_are_those_of_plain_decoding(folder, shape, options):
    """Trees and chains, greedy and sampled, prompts that share a prefix, rows that are padding."""
    pair = Pair(folder, folder)
    base = pair.prompts([18, 5])
    prompts, params = [*base, base[0] + [9]], [greedy(20), sampled(1, 20), greedy(15)]
    llm = build(pair, shape, page_size=4, context_length=96, **options)
    assert tokens(llm.generate(prompts, params)) == tokens(build(pair, None).generate(prompts, params))
    llm.scheduler.check_integrity()
