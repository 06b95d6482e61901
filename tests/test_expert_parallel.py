"""Ranks that share experts give what one process gives, wherever requests are: tokens, exactly, in float64.

Ranks are threads here, which start in a second; `test_expert_group.py` has them in processes.
"""

import pytest
import torch
from safetensors.torch import load_file

from engines import accept_lens, greedy, sampled, tokens
from refusing import refused
from tiny_models import Pair, copy_folder, save_random_experts
from treetop import LLM
from treetop.debug.expert_ranks import expert_ranks_on_threads
from treetop.types.errors import ConfigError

LENGTHS = [1, 4, 5, 15, 17, 33]
MIXED = [
    sampled(11, 16, temperature=0.6),
    greedy(20),
    sampled(2**62 + 5, 12, top_k=5),
    sampled(13, 20, top_p=0.7),
    sampled(0, 9, min_p=0.2, temperature=1.7, logprobs=3),
    sampled(15, 14, top_k=4, top_p=0.9, presence_penalty=0.5, logit_bias={5: 1.5}),
]
TREE, CHAIN = (2, 3, 6), (1, 3, 4)


def save_glm_with_mtp(folder):
    """GLM-4.5 with the layer of MTP after its last, whose feed-forward has experts, too."""
    whole = save_random_experts(folder / "whole", "glm4_moe", seed=8, vocab_size=12, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(2)
    prefix, hidden = "model.layers.2", load_file(whole / "model.safetensors")["lm_head.weight"].shape[1]
    more = {
        f"{prefix}.{name}.weight": torch.rand(hidden, generator=generator) + 0.5
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    projection = torch.randn((hidden, 2 * hidden), generator=generator) * (2 * hidden) ** -0.5
    more[f"{prefix}.eh_proj.weight"] = projection
    changes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return copy_folder(whole, folder / "both", tensors=more, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models whose experts 2 and 4 ranks can share; GPT-OSS's are stacked, and have biases."""
    folder = tmp_path_factory.mktemp("experts")
    small = {"vocab_size": 12, "num_hidden_layers": 2}
    return {
        "glm": save_glm_with_mtp(folder),
        "qwen3": save_random_experts(folder / "qwen3", "qwen3_moe", num_experts=8, mlp_only_layers=[], **small),
        "gpt_oss": save_random_experts(folder / "gpt_oss", "gpt_oss", num_local_experts=4, **small),
    }


def build(folder, shape, ranks, **options):
    """shape: (k, S, T) of MTP; None decodes plainly."""
    options = {"dtype": "float64", "context_length": 96, "page_size": 4, "max_running_requests": 4, **options}
    if shape is not None:
        k, steps, size = shape
        options |= {"speculative_algorithm": "MTP", "speculative_eagle_topk": k, "speculative_num_steps": steps}
        options |= {"speculative_num_draft_tokens": size}
    return LLM(str(folder), ep_size=ranks, **options)


def on_ranks(folder, shape, ranks, places, rounds, **options):
    """Outputs of rounds of (prompts, parameters) on ranks as `places` says; every rank's books are checked."""
    with expert_ranks_on_threads() as started:
        llm = build(folder, shape, ranks, **options)
        try:
            numbers = iter(places)
            llm._core.core.choose = lambda alive, request: next(numbers)
            outputs = [llm.generate(prompts, params) for prompts, params in rounds]
            for rank in started:
                rank.core.scheduler.check_integrity()
            return outputs, [rank.core.engine for rank in started]
        finally:
            llm.close()


def on_one(folder, shape, rounds, **options):
    llm = build(folder, shape, 1, **options)
    return [llm.generate(prompts, params) for prompts, params in rounds]


CASES = [  # model, shape, ranks, the rank of each of twelve requests, options
    ("glm", TREE, 2, [0, 1] * 6, {"graphs": "sim", "check_level": 3}),
    ("glm", TREE, 4, [2] * 12, {"graphs": "sim", "overlap": True}),
    ("glm", CHAIN, 4, [1, 3, 3, 1, 3, 3, 2, 2, 2, 1, 3, 3], {"overlap": True, "check_level": 2}),
    ("glm", None, 2, [1] * 6 + [0, 1] * 3, {"chunked_prefill_size": 5}),
    ("qwen3", None, 4, [3, 0, 0, 3, 3, 0] * 2, {"graphs": "sim", "overlap": True}),
    ("gpt_oss", None, 2, [0, 1, 1, 1, 1, 1] * 2, {"chunked_prefill_size": 7}),
]


@pytest.mark.parametrize(("name", "shape", "ranks", "places", "options"), CASES)
def test_any_placement_gives_what_one_process_gives(folders, name, shape, ranks, places, options):
    """Greedy and sampled, trees, chains and plain; ranks that are idle all the time; prompts that are cached."""
    prompts = Pair(folders[name], None).prompts(LENGTHS)
    rounds = [(prompts, MIXED), (prompts[::-1], [greedy(12)] * 6)]
    want = on_one(folders[name], shape, rounds, **options)
    got, engines = on_ranks(folders[name], shape, ranks, places, rounds, **options)
    for ours, theirs in zip(got, want, strict=True):
        assert tokens(ours) == tokens(theirs)
        assert accept_lens(ours) == accept_lens(theirs)
    if shape is not None:
        assert sum(sum(lens) for each in got for lens in accept_lens(each)) > 0, "nothing was accepted"
    assert len({engine.num_steps for engine in engines}) == 1
    idle = [engine.num_idle for engine in engines]
    unused = {*range(ranks)} - {*places}
    assert all(idle[rank] == engines[rank].num_steps for rank in unused)


def test_what_cannot_work_is_refused_by_name(folders, tmp_path):
    folder = folders["glm"]
    dense = {"draft": None, "dtype": "float64"}
    refused(ConfigError, lambda: LLM("builtin:nestling", ep_size=2, **dense), "--ep-size 2", "no experts")
    refused(ConfigError, lambda: build(folder, None, 2, tp_size=2), "--tp-size and --ep-size")
    refused(ConfigError, lambda: build(folder, None, 0), "--ep-size must lie between 1 and 64")
    with expert_ranks_on_threads():
        refused(ConfigError, lambda: build(folder, None, 2, context_length=10**6), "--context-length")
        refused(ConfigError, lambda: build(folder, None, 3), "--ep-size 3: 8 experts cannot be divided")
        llm = build(folder, None, 2)
        refused(ConfigError, lambda: llm.scheduler, "--ep-size 2", "other processes")
        llm.close()
