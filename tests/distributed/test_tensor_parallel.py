"""One model on several ranks gives what one rank gives: tokens and accept lengths, exactly, in float64.

Ranks are threads here, which start in a second; `test_worker_group.py` has them in processes.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from support.engines import accept_lens, build, greedy, products_timed_otherwise, sampled, tokens
from support.families import FAMILIES
from support.grids import few_of
from support.head_layouts import EAGLE, head_config, random_tensors, save_head
from support.refusing import refused
from support.tiny_models import (
    Pair,
    copy_folder,
    save_copying_head,
    save_random_experts,
    save_random_head,
    save_random_llama,
    save_random_qwen3,
    save_weak_llama,
)
from support.waiting import WAIT_S, until
from treetop.debug.two_group import write_two_group_pair
from treetop.distributed import tp_executor
from treetop.doctor import exchange
from treetop.doctor.conformance import RandomShapes
from treetop.kernels.sampling.sampling import greedy_of_ranks, greedy_reference
from treetop.parallel.exchange import ExchangeRank, Rendezvous
from treetop.types.errors import ConfigError, EngineError, UserError
from treetop_debug import ranks as memory_groups
from treetop_debug.patching import wrapped_runner
from treetop_debug.provoke_ranks import NAMES, find_rank_fault
from treetop_debug.rank_faults import RANK_FAULTS
from treetop_debug.ranks import MemoryGroup, ranks_on_threads

LENGTHS = [1, 4, 5, 15, 17, 33]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Checkpoints whose sizes can be divided by four; two KV heads, so that four ranks share them."""
    folder = tmp_path_factory.mktemp("divisible")
    weak = save_weak_llama(folder / "weak", strength=0.17, sharpness=0.5, vocab_size=212)
    strong = save_random_llama(folder / "strong", seed=8, vocab_size=12, attention_bias=True, mlp_bias=True)
    qwen3 = save_random_qwen3(folder / "qwen3", seed=8, vocab_size=12, tie_word_embeddings=True)
    odd = save_weak_llama(folder / "odd", strength=0.17, sharpness=0.5, vocab_size=211)
    tiny = save_random_qwen3(folder / "tiny", seed=8, vocab_size=9, tie_word_embeddings=True)
    mtp = save_glm_with_mtp(folder / "mtp")
    experts = save_random_experts(folder / "experts", "gpt_oss", vocab_size=12)
    gemma = {**FAMILIES["gemma3"].config, "vocab_size": 12}
    config = head_config(architectures=["LlamaForCausalLM"], bias=True, vocab_size=12, draft_vocab_size=None)
    eagle = save_head(folder / "eagle", config, random_tensors({**EAGLE, "fc.bias": (64,)}))
    return {
        "weak": Pair(weak, save_copying_head(folder / "weak-head", weak, draft_vocab=188)),
        "strong": Pair(strong, save_random_head(folder / "strong-head", strong, draft_vocab=8, seed=2)),
        "qwen3": Pair(qwen3, save_random_head(folder / "qwen3-head", qwen3, draft_vocab=None, seed=2)),
        "windows": Pair(*write_two_group_pair(folder)),
        "gemma3": replace(FAMILIES["gemma3"], config=gemma).save(folder / "gemma3").pair,
        "experts": Pair(experts, save_random_head(folder / "experts-head", experts, draft_vocab=8)),
        "eagle": Pair(strong, eagle),
        "odd": Pair(odd, save_copying_head(folder / "odd-head", odd, draft_vocab=187)),
        "tiny": Pair(tiny, save_random_head(folder / "tiny-head", tiny, draft_vocab=None, seed=2)),
        "mtp": Pair(mtp, mtp),
    }


def save_glm_with_mtp(folder):
    """A GLM-4.5 with experts, and the layer of MTP after its last: that one again, with a projection of its own."""
    alone = save_random_experts(folder.with_name("glm"), "glm4_moe", seed=3, vocab_size=13)
    tensors = load_file(alone / "model.safetensors")
    more = {name.replace(".layers.3.", ".layers.4."): t for name, t in tensors.items() if ".layers.3." in name}
    norms = {f"model.layers.4.{name}.weight": (64,) for name in ("enorm", "hnorm", "shared_head.norm")}
    more |= random_tensors({**norms, "model.layers.4.eh_proj.weight": (64, 128)})
    more["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return copy_folder(alone, folder, tensors=more, num_nextn_predict_layers=1)


@pytest.fixture(autouse=True)
def in_this_process():
    with ranks_on_threads():
        yield


def serve(pair, shape, params, ranks, **options):
    options = {"context_length": 96, "chunked_prefill_size": 16, **options}
    llm = build(pair, shape, tp_size=ranks, **options)
    if llm.config.speculative_policy == "auto":  # the first rank chooses for all
        llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, loses=True)
    try:
        outputs = llm.generate(pair.prompts(LENGTHS), params)
        again = llm.generate(pair.prompts(LENGTHS)[4:], greedy(12))  # prefixes that are cached
        llm.scheduler.check_integrity()
    finally:
        llm.close()
    return outputs + again


MIXED = [
    sampled(11, 20, temperature=0.6),
    replace(greedy(20), prompt_logprobs=2),
    sampled(2**62 + 5, 20, top_k=5),
    sampled(13, 20, top_p=0.7),
    sampled(0, 20, min_p=0.2, temperature=1.7, logprobs=3),
    sampled(15, 20, top_k=4, top_p=0.9, min_p=0.05, presence_penalty=0.5, logit_bias={5: 1.5}),
]
CASES = [  # pair, (k, S, T), ranks, parameters, options
    ("weak", (4, 5, 16), 2, greedy(20), {"overlap": True}),
    ("weak", (1, 3, 4), 4, MIXED, {"page_size": 4}),
    ("strong", (2, 3, 6), 2, MIXED, {"graphs": "sim", "check_level": 3}),
    ("strong", (4, 3, 37), 4, greedy(20), {"overlap": True, "page_size": 1}),
    ("qwen3", (4, 2, 8), 2, MIXED, {"overlap": True, "chunked_prefill_size": 5}),
    ("qwen3", (2, 3, 11), 4, greedy(20), {"disable_radix_cache": True}),
    ("windows", (4, 5, 16), 2, MIXED, {"page_size": 2, "overlap": True, "check_level": 2}),
    ("windows", None, 4, greedy(20), {"graphs": "sim"}),
    ("gemma3", (2, 3, 6), 2, greedy(20), {}),
    ("experts", (2, 3, 6), 2, MIXED, {}),
    ("eagle", (4, 2, 8), 4, MIXED, {}),
    ("odd", (4, 5, 16), 2, MIXED, {"overlap": True}),
    ("odd", (2, 3, 6), 4, greedy(20), {"graphs": "sim", "check_level": 2}),
    ("tiny", (2, 3, 6), 4, MIXED, {}),
    ("mtp", (2, 3, 6), 2, MIXED, {"graphs": "sim"}),
    ("weak", (4, 5, 16), 2, MIXED, {"speculative_policy": "auto", "overlap": True}),
    ("windows", (2, 3, 6), 2, MIXED, {"speculative_policy": "auto", "graphs": "sim", "speculative_max_deferred": 3}),
]


@pytest.mark.parametrize(("name", "shape", "ranks", "params", "options"), few_of(CASES, 2, 6, 9, 12, 14))
def test_ranks_give_what_one_gives(pairs, name, shape, ranks, params, options):
    """Greedy and sampled, trees and plain, windows, biases, norms of heads, cached prefixes, two steps in flight."""
    alone = serve(pairs[name], shape, params, 1, **options)
    shared = serve(pairs[name], shape, params, ranks, **options)
    assert tokens(shared) == tokens(alone)
    assert accept_lens(shared) == accept_lens(alone)
    for got, want in zip(shared, alone, strict=True):
        assert (got.prompt_logprobs is None) == (want.prompt_logprobs is None)
        told, right = ([each.logprob for each in (output.prompt_logprobs or ())[1:]] for output in (got, want))
        assert told == pytest.approx(right, abs=1e-6)
    if shape is not None:
        assert sum(map(sum, accept_lens(shared))) > 0, "nothing was accepted, so nothing was tested"


def test_a_rank_reads_and_keeps_only_its_part(pairs):
    """Of every divided weight, and of every pool; norms are whole."""
    llm = build(pairs["weak"], (4, 5, 16), tp_size=2)
    alone = build(pairs["weak"], (4, 5, 16))
    one, all_of = (each.engine.runner for each in (llm, alone))
    assert 2 * one.target.embedding.shape[0] == all_of.target.embedding.shape[0] == 212
    assert one.target.layers[0].input_norm.weight.shape == (64,)
    for name, pool in one.pools.items():
        assert 2 * pool.data.shape[3] == all_of.pools[name].data.shape[3]
        assert llm.engine.layout.group(name).kv.heads == 1
    llm.close()


def test_logits_of_ranks_are_those_of_one(pairs):
    llm, alone = build(pairs["strong"], None, tp_size=4), build(pairs["strong"], None)
    ids = [4, 5, 6, 7, 8]
    assert torch.allclose(llm.next_logits(ids), alone.next_logits(ids), rtol=1e-12, atol=1e-12)
    llm.close()


def test_the_first_ranks_choice_of_products_holds_for_all(pairs):
    """Else what ranks compute alike would not be: the router of experts, say."""
    with products_timed_otherwise() as taken:
        build(pairs["experts"], None, tp_size=2, dtype="float32").close()
    assert taken == taken[:1] * 2 != [[]] * 2


def test_what_cannot_be_divided_is_refused_by_name_before_anything_starts(pairs, tmp_path):
    """Heads, an inner size; and no ranks at all."""
    with_ranks = {"shape": None, "context_length": 64}
    refused(ConfigError, lambda: build(pairs["weak"], tp_size=3, **with_ranks), "--tp-size 3", "4 heads with 2")
    refused(ConfigError, lambda: build(pairs["weak"], tp_size=8, **with_ranks), "--tp-size 8", "[1, 2, 4] can")
    odd = Pair(save_weak_llama(tmp_path / "odd", intermediate_size=99), None)
    refused(ConfigError, lambda: build(odd, tp_size=2, **with_ranks), "--tp-size 2", "gate_proj.weight", "99")
    refused(ConfigError, lambda: build(odd, tp_size=0, **with_ranks), "--tp-size must lie between 1 and 64")
    refused(ConfigError, lambda: build(odd, step_timeout=0, **with_ranks), "--step-timeout")


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_cannot_start_says_why(pairs, tmp_path, monkeypatch, late):
    """Its own word, not that it was waited for. Only the second rank reads the second half of the vocabulary.

    late: it has said so before the first rank goes on from where all have met.
    """
    head = load_file(pairs["weak"].target / "model.safetensors")["lm_head.weight"]
    head[-1, -1] = torch.nan
    broken = copy_folder(pairs["weak"].target, tmp_path / "broken", tensors={"lm_head.weight": head})
    meet, begun = tp_executor._Workers._rendezvous, time.monotonic()

    def met(workers, device):
        groups = meet(workers, device)
        until(lambda: not late or workers.group.failure is not None)
        return groups

    monkeypatch.setattr(tp_executor._Workers, "_rendezvous", met)
    monkeypatch.setattr(memory_groups, "START_S", 2 * WAIT_S)
    refused(UserError, lambda: build(Pair(broken, None), None, tp_size=2), "lm_head.weight", "NaN")
    assert time.monotonic() - begun < WAIT_S, "a rank was waited for"


def provoke(pair, found, level, seconds):
    """Requests on ranks with a fault at a check level: how they end, the ranks' states, and how long it took."""
    runners = []
    options = {"tp_size": 2, "check_level": level, "step_timeout": seconds, "overlap": True, **found.options}
    with found.active(), wrapped_runner(lambda device: runners.append(device) or device):
        llm = build(pair, (4, 5, 16), **options)
        begun, error = time.monotonic(), None
        try:
            llm.generate(pair.prompts([9, 30, 4]), greedy(60))
        except EngineError as caught:
            error = caught
        finally:
            llm.close()
    return error, [runner.state.draft.hidden.tolist() for runner in runners], time.monotonic() - begun


@pytest.mark.parametrize("name", RANK_FAULTS)
def test_a_fault_of_ranks_is_caught_by_its_guard(pairs, name):
    """At its level, or at every level; before any rank waits for longer than the deadline."""
    found = RANK_FAULTS[name]
    deadline_s = 2.0 if "did not answer" in found.guard else 60.0
    error, _, seconds = provoke(pairs["weak"], found, found.level or 0, deadline_s)
    assert found.guard in str(error)
    assert seconds < 60


@pytest.mark.slow
def test_a_sum_in_another_order_makes_ranks_differ_where_no_guard_looks(pairs):
    """Without the digest nothing says so, and each rank drafts from numbers of its own."""
    error, states, _ = provoke(pairs["weak"], RANK_FAULTS["own-rank-order"], 0, 60.0)
    assert error is None
    assert any(state != states[0] for state in states[1:])


@pytest.mark.parametrize("size", [2, 4])
def test_the_best_of_ranks_is_the_first_of_the_largest(tmp_path, size):
    """Ties within a rank and across ranks, infinities, and logits that are not numbers, wherever they are."""
    torch.manual_seed(size)
    logits = torch.randint(0, 3, (6, 5, 24)).double()
    logits[0, 0, 13], logits[1, 1, 0], logits[2, 2, -1] = torch.nan, torch.inf, torch.nan
    logits[3, 3] = -torch.inf
    want = greedy_reference(logits)

    def choose(rank):
        parallel = MemoryGroup(Rendezvous(tmp_path / "meeting", rank, size), torch.device("cpu")).parallel
        return greedy_of_ranks(greedy_reference, parallel, logits.chunk(size, dim=-1)[rank])

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(choose, range(size)):
            assert torch.equal(found.finite, want.finite)
            assert torch.equal(found.token[want.finite], want.token[want.finite])


@pytest.mark.parametrize("width", [1, 3])
def test_joined_pieces_lie_in_one_row_whatever_their_width(width):
    """Of a small vocabulary a rank has a piece one wide; kernels read what is joined as contiguous memory."""
    pieces = torch.arange(2 * 4 * 5 * width).view(2, 4, 5, width)
    rank = ExchangeRank(0, 2, pieces.device, lambda out, piece: out.copy_(pieces), None)
    joined = rank.join(pieces[0])
    assert joined.is_contiguous()
    assert torch.equal(joined, torch.cat([*pieces], -1))


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if "another" in each else pytest.mark.slow) for each in NAMES]
)
def test_doctor_finds_the_guard_of_a_fault_of_ranks(name):
    """On the pair that everybody has, and of ranks that share experts on a random target. The frozen suite runs all."""
    found = find_rank_fault(name)
    assert found.caught is not None
    assert found.fault.guard in found.caught


@pytest.mark.slow
@pytest.mark.parametrize("module", few_of(["treetop.doctor.exchange", "treetop.doctor.expert_ranks"], 0))
def test_what_ranks_have_measured_counts_however_a_library_ends_them(module, monkeypatch, tmp_path):
    """gloo has aborted a rank of doctor as Python took it down, after all was said."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert all(us > 0 for us in exchange.measured_by_ranks(module, 1, "cpu").values())


def test_doctor_says_which_gpus_do_not_reach_each_other(monkeypatch):
    """Three GPUs, of which the last is refused by the others."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other < 2)
    monkeypatch.setattr(exchange, "_topology", lambda: {(0, 1): "NV18"})
    refused_words = "no: exchanges go through the host"
    assert exchange.links() == [
        ("GPU 0 - GPU 1", "yes", "NV18"),
        ("GPU 0 - GPU 2", refused_words, "unknown"),
        ("GPU 1 - GPU 2", refused_words, "unknown"),
    ]
