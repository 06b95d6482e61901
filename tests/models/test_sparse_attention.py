"""Sparse attention (DSA): what an indexer chooses, where its keys lie, when it is dense, and what is refused."""

import json
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from support.engines import build, greedy, tokens
from support.families import FAMILIES
from support.logits import record_logits
from support.refusing import refused
from support.tiny_models import copy_folder
from treetop import LLM
from treetop.attention import auto
from treetop.attention.auto import Timing
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.registry import BACKENDS, refusal
from treetop.attention.torch_backend import TorchBackend
from treetop.engine.startup.operation_probes import operation_probe
from treetop.kernels.attention.indexer import IndexQuery, choose_keys, index_scores
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.kernels.triton_guard import GpuTraits
from treetop.kernels.tuning import TunedTable
from treetop.models.registry import target_spec
from treetop.tools.inspect import inspect
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError
from treetop.types.ids import DRAFT, FULL, INDEXED
from treetop.types.kv import KVFormat, compressed
from treetop_debug.ranks import ranks_on_threads

INDEX_DIM = 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """GLM 5.2: of four layers the third shares what the second chose."""
    return FAMILIES["glm 5.2"].save(tmp_path_factory.mktemp("sparse"), seed=5)


@pytest.mark.parametrize("top_k", [1, 3, 8, 40])
def test_the_best_of_the_visible_keys_are_chosen_and_of_equal_ones_the_earlier(top_k):
    """Whole numbers, so that many scores are equal, against a count by hand; with holes in what is seen."""
    generator = torch.Generator().manual_seed(top_k)
    heads, keys = (torch.randint(-1, 2, shape, generator=generator).double() for shape in ((3, 5, 2, 4), (3, 23, 4)))
    weights = torch.randint(-2, 3, (3, 5, 2), generator=generator).double()
    visible = torch.rand((3, 5, 23), generator=generator) < 0.7
    visible[0, 0] = False
    chosen = choose_keys(IndexQuery(heads, weights, top_k), keys, visible)
    scores = index_scores(IndexQuery(heads, weights, top_k), keys)
    ties = 0
    for row, n in product(range(3), range(5)):
        by_hand = [
            sum(float(weights[row, n, h]) * max(float(heads[row, n, h] @ keys[row, m]), 0.0) for h in range(2))
            for m in range(23)
        ]
        assert scores[row, n].tolist() == by_hand
        seen = [m for m in range(23) if visible[row, n, m]]
        best = sorted(seen, key=lambda m: (-by_hand[m], m))
        assert chosen[row, n].nonzero().flatten().tolist() == sorted(best[:top_k])
        ties += len(best) > top_k and by_hand[best[top_k - 1]] == by_hand[best[top_k]]
    assert ties > 3 or top_k > 23


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_indexers_keys_are_kept_beside_the_latents_of_its_layer_on_every_rank(saved, ranks):
    """Layers that share a choice keep none: they are a group of their own."""
    with ranks_on_threads():
        llm = build(saved.pair, (2, 3, 6), context_length=64, page_size=4, tp_size=ranks)
        layout, pools = llm.engine.layout, llm.engine.runner.pools
        assert layout.group(INDEXED).kv == KVFormat(1, 1, 20 + 6 + INDEX_DIM, 20, INDEX_DIM)
        assert layout.group(FULL).kv == compressed(20, 6)
        assert {group.name: group.num_layers for group in layout.groups if group.name != DRAFT} == {INDEXED: 3, FULL: 1}
        assert pools[INDEXED].data.shape[2:] == (1, 1, 20 + 6 + INDEX_DIM)
        llm.close()


def test_a_folders_report_counts_every_weight_of_an_indexer(saved):
    report = inspect(EngineConfig(model=str(saved.pair.target), draft=None, context_length=64))
    tensors = load_file(saved.pair.target / "model.safetensors")
    assert report.target.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert sorted(pool.bytes_per_token for pool in report.memory.pools) == [26 * 4, 3 * (26 + INDEX_DIM) * 4]


def test_below_top_k_it_is_dense_attention_bit_for_bit(tmp_path):
    """DeepSeek V3.2 and the same weights as V3, in trees: once with fewer columns than are chosen, and once with more
    columns, of which no query sees more than the 30 tokens and a path of 3. With fewer it is another model."""
    sparse = FAMILIES["deepseek v32"].save(tmp_path, seed=5).pair.target
    indexers = {name: None for name in load_file(sparse / "model.safetensors") if ".indexer." in name}
    v3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "index_topk": None}
    dense = copy_folder(sparse, tmp_path / "dense", tensors=indexers, **v3)
    found = {}
    for name, folder, top_k in (
        ("dense", dense, None),
        ("few", sparse, 200),
        ("more", sparse, 33),
        ("less", sparse, 29),
    ):
        target = copy_folder(folder, tmp_path / name / "as", index_topk=top_k)
        options = {"dtype": "float32", "graphs": "off", "page_size": 4, "device": "cpu", "context_length": 96}
        tree = {"speculative_eagle_topk": 3, "speculative_num_steps": 3, "speculative_num_draft_tokens": 9}
        llm = LLM(model=str(target), speculative_algorithm="NGRAM", chunked_prefill_size=8, **tree, **options)
        seen, prompt = record_logits(llm), [1, 4, 2, 4, 2, 7, 1, 4, 2, 4, 2, 7, 1, 4]
        outputs = llm.generate([prompt, prompt[3:]], greedy(16, whole=True))
        assert max(len(output.token_ids) for output in outputs) + len(prompt) == 30
        found[name] = tokens(outputs), [logits.clone() for logits in seen]
    for name, same in (("few", True), ("more", True), ("less", False)):
        alike = list(map(torch.equal, found[name][1], found["dense"][1]))
        assert found[name][0] == found["dense"][0] or not same
        assert all(alike) == same
    assert len(found["dense"][1]) > 8


TYPES = "indexer_types"
PATTERNS = [
    ({}, "FFFF"),
    ({TYPES: None, "index_topk_freq": 2}, "FFSF"),
    ({TYPES: None, "index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"),
    ({TYPES: None, "index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSF"),
    ({TYPES: None, "index_topk_freq": 2, "index_topk_pattern": "FSSF"}, "FSSF"),
    ({TYPES: None, "index_topk_pattern": ["full", "full", "shared", "full"]}, "FFSF"),
    ({TYPES: ["full", "shared", "full", "shared"], "index_topk_pattern": "FFFF"}, "FSFS"),
]


@pytest.mark.parametrize(("said", "kinds"), PATTERNS)
def test_layers_share_a_choice_as_the_config_says(tmp_path, said, kinds):
    """Listed, by letters, by every so many layers after an offset; a shared layer takes the last choice before it."""
    config = json.loads((FAMILIES["glm 5"].save(tmp_path).pair.target / "config.json").read_text())
    changed = {key: value for key, value in {**config, **said}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    attention = [layer.attention for layer in target_spec(tmp_path).config.layers]
    assert "".join("S" if each.kv.index_dim == 0 else "F" for each in attention) == kinds
    last = [max(i for i in range(layer + 1) if kinds[i] == "F") for layer in range(4)]
    assert [layer if each.index.shares is None else each.index.shares for layer, each in enumerate(attention)] == last


WRONG = [
    ({TYPES: ["shared", "full", "full", "full"]}, "first layer"),
    ({TYPES: ["full"] * 3}, TYPES),
    ({TYPES: None, "index_topk_pattern": "FFXF"}, "index_topk_pattern"),
    ({TYPES: None, "index_topk_pattern": 7}, "index_topk_pattern"),
    ({"q_lora_rank": None}, "q_lora_rank"),
    ({"index_head_dim": 6}, "index_head_dim"),
    ({"index_topk": 0}, "index_topk"),
    ({"index_n_heads": "many"}, "index_n_heads"),
]


@pytest.mark.parametrize(("said", "key"), WRONG)
def test_a_config_that_cannot_be_is_refused_by_key(saved, tmp_path, said, key):
    config = {**json.loads((saved.pair.target / "config.json").read_text()), **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(CheckpointError, lambda: target_spec(tmp_path), "config.json", key)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_backends_without_kernels_of_it_are_refused_by_name(name, device, monkeypatch):
    """Before the machine is asked for its libraries, so on any."""
    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], probes=()))
    need = Need(torch.float16, torch.device(device), groups=(GroupNeed(FULL, 4, 1, 26, latent=20, top_k=9),))
    found = refusal(name, need)
    assert (found is None) == (name in ("torch", "triton", "segments"))
    if found is not None:
        no_kernel = "latents 20 wide" if name == "gluon" else "sparse attention (DSA)"  # it has one for those of 512
        assert no_kernel in found.reason
        assert "--attention-backend t" in found.remedy


@pytest.mark.parametrize("taken", [frozenset({"gluon", "triton"}), frozenset({"triton"})], ids=sorted)
def test_rounds_whose_layers_share_a_choice_go_to_the_backend_that_auto_takes(saved, monkeypatch, taken):
    """Planes with an indexer's keys and without lie in two groups, of which the second sees what the first chose. The
    tokens are those of one backend, plain and by trees; prompts are the fallback's."""
    asked = []

    class Named(TorchBackend):
        def __init__(self, name, need):
            super().__init__(need.dtype, need.device)
            self.called = name

        def choose(self, query, kv, plan, tail):
            asked.append((self.called, "choose"))
            return super().choose(query, kv, plan, tail)

        def prefix_tail(self, *args):
            asked.append((self.called, "tail"))
            return super().prefix_tail(*args)

        def causal(self, *args):
            asked.append((self.called, "causal"))
            return super().causal(*args)

    def composed(name, need):
        sparse = [group for group in need.groups if group.sparse]
        assert [(group.top_k, group.index_dim) for group in sparse] == [(9, INDEX_DIM), (9, 0)]
        (heads,) = {auto.call_of(need, group, 1, 1, 96, False).heads for group in sparse}
        timings = {"triton": Timing(30.0), "gluon": Timing(20.0 if "gluon" in taken else 40.0)}
        table = {f"tail {heads} rows1 n1 keys64": timings}
        monkeypatch.setattr(auto, "gpu_traits", lambda device: GpuTraits(8, True, 227 << 10))
        monkeypatch.setattr(auto, "refusal", lambda name, need: None)
        return auto.AutoBackend(TunedTable(8, "2026-01-01", table), need)

    for name in ("triton", "gluon"):
        monkeypatch.setitem(
            BACKENDS, name, replace(BACKENDS[name], make=partial(Named, name), why_not_chosen=lambda need: None)
        )
    prompts = saved.pair.prompts([50, 12, 20], seed=3)
    for shape in (None, (3, 4, 14)):
        options = {"page_size": 4, "context_length": 96, "dtype": "float64", "device": "cpu"}
        llm = build(saved.pair, shape, **options)
        expected = tokens(llm.generate(prompts, greedy(12)))
        llm.close()
        with monkeypatch.context() as patched:
            patched.setattr("treetop.engine.startup.build.make_backend", composed)
            asked.clear()
            llm = build(saved.pair, shape, **options, check_level=2)
            assert set(llm.engine.runner.backend.parts) == taken
            assert tokens(llm.generate(prompts, greedy(12))) == expected
            llm.close()
        best = "gluon" if "gluon" in taken else "triton"
        beside = set() if shape is None else {"triton"}  # a head's attention
        assert {name for name, kind in asked if kind == "tail"} == {best, *beside}
        assert {name for name, kind in asked if kind == "causal"} == {"triton"}
        assert {name for name, kind in asked if kind == "choose"} == {best, "triton"}


def test_a_gpus_probe_of_bits_knows_latents_and_indexers(saved):
    """It runs anywhere; here by the references that a CPU has with `bits`, which are spoilt one by one."""
    config = target_spec(saved.pair.target).config
    ops = Ops(OpContext(torch.device("cpu"), torch.float32, profile=profile_of("bits", torch.device("cpu"))))
    probe = operation_probe(ops, config, (), 20)
    assert {name for name, _ in probe.run()} >= {"products of latents' keys", "weights of an indexer's heads"}
    assert probe.problem() is None
    spoilt = {"write_latent": "latents and their rotation", "rotate_index_heads": "an indexer's keys and heads"}
    for name, said in spoilt.items():
        real = getattr(ops, name)
        vars(ops)[name] = lambda *given, real=real, **more: real(*given, **more) + (len(given[0]) == 5)
        assert probe.problem() == f"{said} of 5 rows"
        vars(ops)[name] = real
