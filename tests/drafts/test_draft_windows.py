"""Draft heads whose layers see the last tokens alone: what they draft and keep, and that no output changes."""

import json

import pytest
import torch

from support.dense_drafts import DenseEagle3, DenseTarget, dense_of
from support.engines import build, greedy, sampled, steps, submit, tokens
from support.head_layouts import LAYERS, VOCAB, assert_drafts
from support.refusing import refused
from support.tiny_models import Pair, copy_folder, save_random_head, save_random_llama
from treetop.debug.two_group import write_two_group_pair
from treetop.drafts.registry import drafter_spec
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.ids import DRAFT, NULL_PAGE

WINDOW = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and a head of which a config says that it has a window."""
    folder = tmp_path_factory.mktemp("windows")
    target = save_random_llama(folder / "target", seed=5, head_dim=16)
    head = save_random_head(folder / "plain", target, draft_vocab=None, seed=3)
    return Pair(target, copy_folder(head, folder / "head", layer_types=["sliding_attention"], sliding_window=WINDOW))


def reference(pair, dense_target, window) -> DenseEagle3:
    dense = dense_of(pair.head, {**json.loads((pair.target / "config.json").read_text())}, window=window)
    return DenseEagle3(dense, dense_target.embedding, dense.w["lm_head.weight"], torch.zeros(VOCAB, dtype=torch.long))


@pytest.mark.parametrize(("option", "window"), [({}, WINDOW), ({"speculative_draft_window_size": 3}, 3)], ids=str)
def test_a_head_drafts_by_what_its_window_shows(pair, option, window):
    """Of its config, or the narrower one asked for; drafts of prompts past the window are an independent head's."""
    target = DenseTarget(pair.target)
    assert_drafts(pair, target, reference(pair, target, window), (2, LAYERS // 2, LAYERS - 3), **option)


@pytest.mark.parametrize("options", [{"graphs": "sim", "check_level": 3}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 3, 9)])
def test_tokens_are_those_of_plain_decoding(tmp_path, shape, options):
    """A target that has a window too, small chunks, prompts that share a prefix, rows that are padding, few pages."""
    target, head = write_two_group_pair(tmp_path)
    pair, sizes = Pair(target, head), {"page_size": 4, "chunked_prefill_size": 8, "context_length": 96}
    base = pair.prompts([30, 5], seed=1)
    prompts, params = [*base, base[0] + [9]], [greedy(24), sampled(1, 20), greedy(15)]
    llm = build(pair, shape, speculative_draft_window_size=6, max_total_tokens=150, **sizes, **options)
    plain = build(pair, None, **sizes)
    for _ in range(2):
        assert tokens(llm.generate(prompts, params)) == tokens(plain.generate(prompts, params))
    llm.scheduler.check_integrity()


def test_pages_behind_a_drafts_window_are_given_back(pair):
    """The draft's pool has room for a window of each row and nothing else."""
    llm = build(pair, (3, 3, 9), page_size=4, chunked_prefill_size=8, max_running_requests=2, disable_radix_cache=True)
    layout = llm.engine.layout
    assert layout.group(DRAFT).window == WINDOW
    assert layout.num_pages[DRAFT] == 1 + 2 * layout.window_pages(WINDOW) < 1 + layout.page_columns
    requests = submit(llm, pair.prompts([60, 30], seed=2), greedy(20))
    for _ in steps(llm):
        for running in (request.running for request in requests if request.running is not None):
            held = [page for page in running.lease.pages[DRAFT] if page != NULL_PAGE]
            assert len(held) <= layout.window_pages(WINDOW)
    assert llm.scheduler.load.kv_usage == 0


def test_an_option_narrows_a_window_and_never_widens_it(pair):
    target = target_spec(pair.target).config
    for asked, window in ((None, WINDOW), (3, 3), (50, WINDOW)):
        spec = drafter_spec(pair.head, target, window=asked)
        assert [layer.window for layer in spec.attention] == [window]


def test_a_window_that_cannot_be_is_refused(pair, tmp_path):
    """Of lookup, which has no layers; and where some layers have one and others not."""
    refused(
        ConfigError,
        lambda: build(pair, None, speculative_algorithm="NGRAM", speculative_draft_window_size=8),
        "--speculative-draft-window-size",
        "NGRAM",
    )
    refused(ConfigError, lambda: build(pair, (3, 3, 9), speculative_draft_window_size=0), "draft-window-size")
    said = copy_folder(pair.head, tmp_path / "said", layer_types=None, use_sliding_window=True)
    refused(CheckpointError, lambda: drafter_spec(said, target_spec(pair.target).config), "use_sliding_window")
