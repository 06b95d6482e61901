"""Draft heads whose layers see the last tokens alone: what they draft and keep, and that no output changes."""

import json

import pytest
import torch

from support.block_heads import LAYOUTS as BLOCK_LAYOUTS
from support.block_heads import block_shapes, random_block
from support.dense_drafts import DenseEagle3, DenseTarget, dense_of
from support.engines import build, greedy, sampled, steps, submit, tokens
from support.grids import few_of
from support.head_layouts import LAYERS, VOCAB, assert_drafts, save_head
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


@pytest.mark.parametrize("options", few_of([{"graphs": "sim", "check_level": 3}, {"overlap": True}], 0), ids=str)
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


@pytest.fixture(scope="module")
def windowed_block(pair, tmp_path_factory):
    """A DFlash 2 head of one layer with a window of 12 and one without."""
    config, more, *_ = BLOCK_LAYOUTS["z-lab, DFlash 2"]
    folder = tmp_path_factory.mktemp("windowed block") / "head"
    return Pair(
        pair.target, save_head(folder, config | {"sliding_window": 12}, random_block({**block_shapes(2), **more}))
    )


@pytest.mark.parametrize("tokens_of_pool", few_of([None, 150], 0))
def test_a_windowed_block_bounds_prefix_hits_no_more_than_a_windowed_target_does(
    windowed_block, tmp_path, tokens_of_pool
):
    """The same traffic through a target whose window is as wide, plainly: each prompt hits as far, or further.

    The pools of windows differ by the tokens that a round may write.
    """
    sizes = {"page_size": 4, "chunked_prefill_size": 8, "context_length": 96, "max_running_requests": 3}
    target = Pair(write_two_group_pair(tmp_path)[0], None)
    assert target_spec(target.target).config.layers[0].attention.window == 12
    engines = [
        build(each, shape, max_total_tokens=tokens_of_pool, **sizes)
        for each, shape in ((windowed_block, (3, 3, 9)), (target, None))
    ]
    prompts = target.prompts([40, 20, 9], seed=4)
    traffic = [prompts, prompts[:1], [prompts[0][:30], prompts[1] + [5] * 9], prompts[2:], [prompts[0]] * 2]
    seen = [
        [output.metrics.num_cached_tokens for some in traffic for output in llm.generate(some, greedy(12))]
        for llm in engines
    ]
    assert all(of_block >= of_target for of_block, of_target in zip(*seen, strict=True)), seen
    assert any(seen[1])


def test_trees_after_a_prefix_hit_are_those_of_an_engine_without_a_cache(windowed_block):
    """At every boundary of a page that a prompt is cut at: the window's pages before it are there, or it is no hit."""
    sizes = {"page_size": 4, "chunked_prefill_size": 8, "context_length": 96, "max_running_requests": 2}
    prompt, hits = windowed_block.prompts([44], seed=6)[0], []
    trees = {}
    for name, more in (("cached", {}), ("alone", {"disable_radix_cache": True})):
        llm = build(windowed_block, (3, 3, 9), **sizes, **more)
        llm.generate([prompt], greedy(4))
        for length in range(3, 44):
            first = []
            llm.engine.observer = lambda plan, tree, accepted, first=first: first.append(tree)
            output = llm.generate([[*prompt[:length], 7]], greedy(2))[0]
            trees[name, length] = first[0].tokens[0].tolist(), first[0].logprob[0].clone()
            hits.append(output.metrics.num_cached_tokens)
    for length in range(3, 44):
        assert trees["cached", length][0] == trees["alone", length][0]
        torch.testing.assert_close(trees["cached", length][1], trees["alone", length][1], rtol=1e-5, atol=1e-5)
    assert len({*hits}) > 5
