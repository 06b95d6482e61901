"""`return_routed_experts`: the experts that each token went to, as the model's own routers say, for whoever asks."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from support.engines import build as pair_engine
from support.engines import greedy, sampled, tokens
from support.expert_pairs import build, save_glm_with_mtp, send_to
from support.families import FAMILIES
from support.grids import few_of
from support.offloading import on_a_cpu, stats
from support.tiny_models import Pair, save_random_experts, save_random_head
from treetop.attention.layer import DenseAttention
from treetop.engine.memory import pool_bytes
from treetop.outputs import LiveRequest, RoutedExperts
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.ids import EXPERTS, RequestId
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop.types.routed_experts import ExpertLayers, TokenExperts
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.ranks import ranks_on_threads
from treetop_debug.routed_expert_faults import ROUTED_EXPERT_FAULTS

TREE = (4, 3, 12)
ROUTERS = {"glm": "gate", "qwen3": "gate", "gpt_oss": "router"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Groups, shared experts and a dense first layer; no dense layer but the second; windows and biases."""
    folder = tmp_path_factory.mktemp("experts")
    small = {"vocab_size": 12, "num_hidden_layers": 4}
    return {
        "glm": save_glm_with_mtp(folder),
        "qwen3": save_random_experts(folder / "qwen3", "qwen3_moe", **small),
        "head": save_random_head(folder / "head", folder / "qwen3", draft_vocab=8),
        "gpt_oss": save_random_experts(folder / "gpt_oss", "gpt_oss", **small),
    }


class Oracle:
    """What the routers of `transformers`' model choose, in float64, of whole sequences: ids in ascending order."""

    def __init__(self, folder, router: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        self._seen = []
        for name, module in self.model.named_modules():
            if name.endswith(f"mlp.{router}"):
                module.register_forward_hook(lambda _, __, given: self._seen.append(given[2]))

    def of(self, output):
        """[tokens, layers, top_k] of all but the last token."""
        ids = [*output.prompt_token_ids, *output.token_ids]
        self._seen.clear()
        with torch.no_grad():
            self.model(torch.tensor([ids[:-1] or ids]))
        return torch.stack(self._seen, dim=1).sort(-1).values

    def check(self, output) -> None:
        want, told = self.of(output), output.routed_experts
        assert told.shape == tuple(want.shape)
        assert torch.equal(told.tensor().long().sort(-1).values, want)


@pytest.fixture(scope="module")
def oracles(folders):
    return {name: Oracle(folders[name], router) for name, router in ROUTERS.items()}


def asking(params):
    return replace(params, return_routed_experts=True)


def leaves_nodes_out(outputs) -> bool:
    """Whether a path was accepted that is not its tree's first nodes, of a request whose experts are told."""
    asked = [output for output in outputs if output.routed_experts is not None]
    paths = [tree.path for output in asked for tree in output.trees if tree is not None]
    return any(path != tuple(range(len(path))) for path in paths)


MIXED = [
    asking(greedy(30, whole=True)),
    asking(sampled(3, 25, whole=True)),
    sampled(4, 12),
    asking(sampled(5, 30, whole=True, top_p=0.9)),
    greedy(9),
]
LENGTHS = [5, 17, 9, 30, 1]
CASES = [  # model, shape, options
    ("glm", TREE, {"speculative_algorithm": "MTP", "chunked_prefill_size": 8, "check_level": 3}),
    ("qwen3", TREE, {"draft": "head", "graphs": "sim", "overlap": True}),
    ("gpt_oss", TREE, {"speculative_algorithm": "NGRAM", "mixed_chunk": "on", "chunked_prefill_size": 16}),
    ("glm", None, {"check_level": 3, "chunked_prefill_size": 7}),
    ("qwen3", TREE, {"draft": "head", "graphs": "sim", "overlap": True, "mixed_chunk": "on", "check_level": 3}),
    ("qwen3", (1, 3, 4), {"draft": "head", "page_size": 1}),
    ("qwen3", (4, 3, 12), {"draft": "head", "speculative_node_budget": 19, "check_level": 3}),
    ("qwen3", TREE, {"draft": "head", "speculative_policy": "auto", "check_level": 3}),
    ("gpt_oss", None, {"overlap": True, "graphs": "sim", "page_size": 2}),
]


@pytest.mark.parametrize(("name", "shape", "options"), few_of(CASES, 0, 1, 2, 6))
def test_ids_are_those_of_the_models_own_routers(folders, oracles, name, shape, options):
    """Plain and of trees, greedy and sampled, in chunks and mixed steps, beside others, and behind cached prompts."""
    options = {**options, **({"draft": str(folders["head"])} if "draft" in options else {})}
    prompts = Pair(folders[name], None).prompts(LENGTHS)
    llm = build(folders[name], shape, 1, enable_return_routed_experts=True, **options)
    plain = build(folders[name], shape, 1, **options)
    try:
        asked = [replace(each, return_draft_trees=shape is not None) for each in MIXED]
        first, again = (llm.generate(prompts, asked) for _ in range(2))
        silent = [replace(each, return_routed_experts=False) for each in MIXED]
        assert tokens(first) == tokens(again) == tokens(plain.generate(prompts, silent))
        assert again[3].metrics.num_cached_tokens > first[3].metrics.num_cached_tokens
        for output, params in zip([*first, *again], MIXED * 2, strict=True):
            if params.return_routed_experts:
                oracles[name].check(output)
            else:
                assert output.routed_experts is None
        if shape is not None and "speculative_policy" not in options:
            assert shape[0] == 1 or leaves_nodes_out([*first, *again])
    finally:
        llm.close()
        plain.close()


def test_a_request_that_is_put_back_knows_of_each_token_once(folders, oracles):
    """With few pages requests give way and are computed again."""
    few = {"context_length": 64, "max_total_tokens": 80, "chunked_prefill_size": 8, "check_level": 3}
    llm = build(folders["glm"], TREE, 1, enable_return_routed_experts=True, speculative_algorithm="MTP", **few)
    prompts = Pair(folders["glm"], None).prompts([20, 25, 18, 23], seed=5)
    outputs = llm.generate(prompts, [asking(greedy(30)), asking(sampled(2, 30))] * 2)
    assert llm.scheduler.num_retractions > 0
    for output in outputs:
        oracles["glm"].check(output)
    llm.scheduler.check_integrity()
    llm.close()


def dense(llm, ids):
    """[tokens, layers, top_k]: the target's own forward of whole sequences, without pages, tails, trees or ranks."""
    engine, at = llm.engine, torch.arange(len(ids))[None]
    layers = {
        i: (each.kv, each.window, each.chunked, each.source(i), None) for i, each in engine.spec.attention.items()
    }
    caps = {i: each.score_cap for i, each in engine.spec.attention.items() if each.score_cap is not None}
    attend = DenseAttention(len(ids), engine.dtype, at.device, layers, caps=caps)
    with torch.inference_mode():
        found = engine.runner.target.forward(torch.tensor([ids]), at, attend, tells_experts=True).experts[0]
    return found.unflatten(-1, (-1, next(each.experts.router.top_k for each in engine.spec.layers if each.experts)))


@pytest.mark.parametrize(
    "family",
    few_of(
        ["longcat", "qwen3 next", "gemma4 experts", "deepseek v3", "mixtral", "lfm2 moe", "llama 4", "nemotron h"],
        0,
        1,
        2,
    ),
)
def test_ids_of_every_kind_of_layer_are_those_of_a_dense_forward(tmp_path, family):
    """Experts without weights and late ones, recurrent layers, experts beside a dense one, latents, windows."""
    saved = FAMILIES[family].save(tmp_path)
    options = {"draft": None, "speculative_algorithm": "NGRAM", "check_level": 3, "chunked_prefill_size": 16}
    llm = build(saved.pair.target, (2, 3, 6), 1, enable_return_routed_experts=True, **options)
    prompts = saved.pair.prompts([21, 6, 30])
    for _ in range(2):
        for output in llm.generate(prompts, [asking(greedy(16)), asking(sampled(3, 16)), asking(greedy(9))]):
            want = dense(llm, [*output.prompt_token_ids, *output.token_ids][:-1])
            assert torch.equal(output.routed_experts.tensor(), want)
    llm.close()


RANKED = [  # model, shape, ranks that share experts, that share the model, options
    ("glm", TREE, 2, 1, {"speculative_algorithm": "MTP", "mixed_chunk": "on", "chunked_prefill_size": 8}),
    ("gpt_oss", None, 1, 2, {"graphs": "sim", "overlap": True}),
    ("glm", TREE, 2, 2, {"speculative_algorithm": "MTP"}),
]


@pytest.mark.parametrize(("name", "shape", "ep", "tp", "options"), few_of(RANKED, 0, 1))
def test_ranks_tell_experts_as_the_model_counts_them(tmp_path, oracles, name, shape, ep, tp, options):
    folder = {"glm": save_glm_with_mtp, "gpt_oss": save_even}[name](tmp_path)
    oracle = oracles["glm"] if name == "glm" else Oracle(folder, "router")
    prompts = Pair(folder, None).prompts(LENGTHS)
    with ranks_on_threads() if ep == 1 else expert_ranks_on_threads():
        llm = build(folder, shape, ep, tp_size=tp, enable_return_routed_experts=True, **options)
        try:
            if ep > 1:
                send_to(llm._core.core, iter([0, 1, 1, 0, 1] * 2).__next__)
            for output in [*llm.generate(prompts, MIXED), *llm.generate(prompts, MIXED)]:
                if output.routed_experts is not None:
                    oracle.check(output)
        finally:
            llm.close()


def save_even(folder):
    """A GPT-OSS whose experts two ranks can share."""
    return save_random_experts(folder / "even", "gpt_oss", num_local_experts=4, vocab_size=12, num_hidden_layers=3)


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_comes_back_from_the_host_or_a_disk_has_them(folders, oracles, tmp_path, on_disk):
    """Pages of prompts that left the device are loaded again, their experts with them."""
    few = {"context_length": 128, "max_total_tokens": 160, "page_size": 16, "max_running_requests": 2}
    if on_disk:
        few |= {"kv_offloading_folder": str(tmp_path), "kv_offloading_disk_size": 0.1}
    with on_a_cpu():
        llm = pair_engine(
            Pair(folders["qwen3"], folders["head"]), TREE, enable_return_routed_experts=True, **few,
            kv_offloading_size=4 / 1024,
        )  # fmt: skip
    prompts = Pair(folders["qwen3"], None).prompts([90, 92, 95])
    for prompt in [*prompts, *prompts]:
        (output,) = llm.generate([prompt], asking(greedy(5)))
        oracles["qwen3"].check(output)
    assert stats(llm).loaded_tokens > 0
    llm.close()


def test_they_come_with_a_stream_and_behind_a_stop_string_end_with_the_text(folders, oracles):
    """An update may hold tokens past the stop: nothing is told of them. An aborted request tells what it knows."""
    llm = build(folders["glm"], TREE, 1, enable_return_routed_experts=True, speculative_algorithm="MTP")
    (prompt,) = Pair(folders["glm"], None).prompts([20])
    deltas = [*llm.stream(prompt, asking(greedy(16)))]
    oracles["glm"].check(deltas[-1].output)
    whole = deltas[-1].output.routed_experts
    (alone,) = llm.generate([prompt], asking(greedy(1)))
    assert alone.routed_experts.shape[0] == len(prompt)
    assert torch.equal(alone.routed_experts.tensor(), whole.tensor()[: len(prompt)])
    array = np.asarray(whole)
    assert array.dtype == np.int16
    assert np.array_equal(np.frombuffer(whole.int32(), "<i4").reshape(whole.shape), array)
    assert np.array_equal(np.asarray(whole.after(7)), array[7:])
    assert whole.after(99).tensor().shape == (0, *whole.shape[1:])
    llm.close()


@pytest.mark.parametrize(("num_experts", "kind"), [(256, np.uint8), (257, np.uint16), (30_000, np.uint16)])
def test_a_file_has_all_layers_as_vllm_numbers_them(num_experts, kind):
    """Those without experts before, between and behind the others have zeros."""
    random_ = np.random.default_rng(0)
    ids = random_.integers(0, num_experts, (5, 2, 3)).astype(np.int16)
    read = np.load(io.BytesIO(RoutedExperts(ids.shape, ids.tobytes()).npy(ExpertLayers(5, (1, 3), num_experts))))
    want = np.zeros((5, 5, 3), kind)
    want[:, [1, 3]] = ids
    assert read.dtype == kind
    assert np.array_equal(read, want)
    empty = RoutedExperts((0, 2, 3), b"").npy(ExpertLayers(5, (1, 3), num_experts))
    assert np.load(io.BytesIO(empty)).shape == (0, 5, 3)


def test_they_outlive_a_sleep(folders, oracles):
    llm = build(folders["glm"], TREE, 1, enable_return_routed_experts=True, speculative_algorithm="MTP")
    (prompt,) = Pair(folders["glm"], None).prompts([20])
    llm.generate([prompt], asking(greedy(8)))
    llm.sleep(1)
    llm.wake_up()
    (output,) = llm.generate([prompt], asking(greedy(8)))
    oracles["glm"].check(output)
    llm.close()


def test_an_engine_that_goes_on_with_a_request_tells_of_all_again():
    """What the one before had told is replaced, not added to; what lies past the last token taken is not shown."""
    asked = EngineRequest(RequestId(1), (5, 6, 7), asking(greedy(9)), 0)
    live, ids = LiveRequest.of(0, asked, None), np.arange(5 * 4, dtype=np.int16)

    def tell(first, tokens, new_ids, **more):
        told = TokenExperts(first, 2, 2, ids[4 * first : 4 * (first + tokens)].tobytes())
        return live.apply(RequestUpdate(asked.request_id, new_ids, experts=told, **more))

    tell(0, 3, (8,))
    tell(3, 1, (9,))
    told = tell(0, 5, (2,), finish_reason="length").output.routed_experts
    assert np.array_equal(np.asarray(told), ids.reshape(5, 2, 2))
    tell(0, 3, ())
    assert live.apply(RequestUpdate(asked.request_id, (), finish_reason="abort")).output.routed_experts.shape[0] == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["glm", "qwen3"])
def test_captured_rounds_tell_what_eager_ones_tell_on_a_gpu(folders, name):
    """The kernel's ids; float32, where the routers' own are the oracle's but for near ties."""
    draft = {"draft": str(folders["head"])} if name == "qwen3" else {"speculative_algorithm": "MTP"}
    options = {"dtype": "float32", "device": "cuda", "mixed_chunk": "on", **draft}
    found = []
    for graphs in ("auto", "off"):
        llm = build(folders[name], TREE, 1, enable_return_routed_experts=True, graphs=graphs, **options)
        outputs = llm.generate(Pair(folders[name], None).prompts(LENGTHS), MIXED)
        found.append([each.routed_experts and each.routed_experts.ids for each in outputs])
        llm.close()
    assert found[0] == found[1]


def test_memory_is_counted_and_nothing_is_taken_without_the_option(folders):
    """4 layers but a dense one, 3 experts a token, 2 bytes each, in whole words."""
    without, layout = (
        build(folders["qwen3"], None, 1, enable_return_routed_experts=asked).engine.layout for asked in (False, True)
    )
    assert layout.group(EXPERTS).bytes_per_token(8) == 20
    assert without.experts is None
    assert all(group.is_attended or group.is_draft for group in without.groups)
    more = layout.num_pages[EXPERTS] * layout.page_size * 20
    assert pool_bytes(layout, 8) - pool_bytes(without, 8) == more


@pytest.mark.parametrize("name", [each for each in ROUTED_EXPERT_FAULTS if "rank" not in each])
def test_a_fault_shows_beside_the_models_own_routers(folders, oracles, name):
    prompts = Pair(folders["qwen3"], None).prompts(LENGTHS)
    options = {"draft": str(folders["head"]), "enable_return_routed_experts": True}
    with ROUTED_EXPERT_FAULTS[name].active():
        llm = build(folders["qwen3"], TREE, 1, **options)
        outputs = [*llm.generate(prompts, MIXED), *llm.generate(prompts, MIXED)]
        llm.close()
    oracle, wrong = oracles["qwen3"], 0
    for output in outputs:
        if output.routed_experts is not None:
            wrong += not torch.equal(output.routed_experts.tensor().long().sort(-1).values, oracle.of(output))
    assert wrong


def test_numbers_of_a_rank_are_caught(folders):
    """At level 1, by what is no expert of the model."""
    fault = ROUTED_EXPERT_FAULTS["experts-as-a-rank-counts-them"]
    with fault.active(), expert_ranks_on_threads():
        llm = build(folders["glm"], None, 2, enable_return_routed_experts=True, check_level=fault.level)
        try:
            with pytest.raises(EngineError, match=fault.guard):
                llm.generate(Pair(folders["glm"], None).prompts([9]), asking(greedy(4)))
        finally:
            llm.close()


def test_what_cannot_be_told_is_refused_by_name(strong_pair, folders):
    with pytest.raises(ConfigError, match="--enable-return-routed-experts: this model has no experts"):
        pair_engine(strong_pair, None, enable_return_routed_experts=True)
    with pytest.raises(ConfigError, match="--enable-return-routed-experts: not with --disaggregation-slots"):
        build(folders["qwen3"], None, 1, enable_return_routed_experts=True, disaggregation_slots=2)
    llm = build(folders["qwen3"], None, 1)
    with pytest.raises(InputError, match=r"return_routed_experts: .* start it with --enable-return-routed-experts"):
        llm.generate([[5, 6]], asking(greedy(4)))
    llm.close()
