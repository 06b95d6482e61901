"""An engine with `--exactness bits` as it is on a GPU, in Triton's interpreter: a tree has the bits of plain decoding.

As in test_segments.py, products are a stand-in's. The bits of real kernels are compared in tests/gpu/test_gpu_bits.py.
"""

from dataclasses import replace

import pytest
import torch

from support.bits import bits
from support.engines import accept_lens, build, sampled, tokens
from support.families import FAMILIES
from support.interpreted import interpreted
from support.lookups import lookup
from support.tensor_core import tensor_core
from support.tiny_models import Pair, save_random_llama
from treetop.attention.segments_backend import SegmentsBackend
from treetop.engine.startup.products import Products
from treetop.engine.startup.weight_copies import product_weights
from treetop.kernels.profile import profile_of
from treetop.kernels.table import Ops
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.messages import PrefillPlan
from treetop.weights.gpu_products import NoSplitKProduct, Probed

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KERNELS = {
    "skinny_gemm",
    "gated_rows",
    "add_rms_norm",
    "angles",
    "rotate_and_write",
    "draw",
    "write_latent",
    "heads_rows",
}
KERNELS |= {"rotate_index_heads", "write_index_keys"}
"""What is interpreted beside attention; the rest is the reference."""


def by_our_kernel(engine_plan):
    """What a GPU's probe finds where the library serves nowhere."""
    weights = product_weights(engine_plan.target, None, engine_plan.place)
    return Products({}, {}, {each.shape: Probed(each.shape, ()) for each in weights})


def save_llama(folder):
    return save_random_llama(folder, seed=8, vocab_size=12, num_hidden_layers=1, intermediate_size=32)


def save_glm(folder):
    """GLM-5.2 without experts: the second layer shares the choice of the first one, in a KV group of its own."""
    made_of = FAMILIES["glm 5.2"]
    sizes = {"vocab_size": 12, "num_hidden_layers": 2, "first_k_dense_replace": 2, "intermediate_size": 48}
    sizes |= {"q_lora_rank": 32, "v_head_dim": 8, "index_topk": 40, "index_n_heads": 3}
    return replace(made_of, config={**made_of.config, **sizes}).save(folder).pair.target


@interpreted
@pytest.mark.parametrize(("save", "kept"), [(save_llama, "auto"), (save_glm, "auto"), (save_llama, "fp8_e4m3")])
def test_a_tree_has_the_bits_of_plain_decoding(tmp_path, monkeypatch, save, kept):
    """In bfloat16, by the kernels that `bits` has on a GPU, beside another row and in chunks; K/V in FP8 too."""
    of_a_gpu = profile_of("bits", torch.device("cuda"))
    monkeypatch.setattr("treetop.engine.startup.plan.chosen_profile", lambda *_: of_a_gpu)
    monkeypatch.setattr("treetop.engine.startup.build.products_of", by_our_kernel)
    monkeypatch.setattr(Ops, "gpu_for", lambda self, op: gpu_traits(CPU) if op.name in KERNELS else None)
    used = set()
    real = NoSplitKProduct._kernel
    monkeypatch.setattr(NoSplitKProduct, "_kernel", lambda self, x: used.add(self._kind) or real(self, x))
    target = save(tmp_path)
    pair = Pair(target, target)
    prompts, params = pair.prompts([5, 62]), [sampled(seed, 5, logprobs=1, temperature=seed) for seed in (0, 1)]

    def run(make, shape, **options):
        fixed = {"dtype": "bfloat16", "device": "cpu", "attention_backend": "segments", "graphs": "off"}
        fixed["kv_cache_dtype"] = kept
        llm = make(pair, shape, exactness="bits", context_length=96, page_size=16, **fixed, **options)
        assert isinstance(llm.engine.runner.backend, SegmentsBackend)
        outputs = llm.generate(prompts, params)
        llm.close()
        return outputs

    with tensor_core():
        want = bits(run(build, None, max_running_requests=1))
        outputs = run(lookup, (2, 2, 4), max_running_requests=2, chunked_prefill_size=16)
    assert bits(outputs) == want
    assert sum(map(sum, accept_lens(outputs))) > 0
    assert used == {None, "silu"}


@interpreted
@pytest.mark.parametrize(("exactness", "backend"), [("bits", "segments"), ("ties", "triton")])
def test_prompts_in_blocks_get_what_those_in_lines_do(tmp_path, monkeypatch, exactness, backend):
    """As many blocks as they take, narrow and wide, with the kernels that write K/V, attend and draw on a GPU."""
    if exactness == "bits":
        of_a_gpu = profile_of("bits", torch.device("cuda"))
        monkeypatch.setattr("treetop.engine.startup.plan.chosen_profile", lambda *_: of_a_gpu)
        monkeypatch.setattr("treetop.engine.startup.build.products_of", by_our_kernel)
    monkeypatch.setattr(Ops, "gpu_for", lambda self, op: gpu_traits(CPU) if op.name in KERNELS else None)
    target = save_llama(tmp_path)
    pair = Pair(target, target)
    prompts = pair.prompts([5, 40, 17, 30, 3, 9])
    params = [sampled(seed, 4, temperature=1.0) for seed in range(6)]

    def run(make, shape, **options):
        fixed = {"device": "cpu", "attention_backend": backend, "exactness": exactness, "prefill_graph_max_tokens": 0}
        fixed["dtype"] = "bfloat16" if exactness == "bits" else "float32"
        llm = make(pair, shape, context_length=96, page_size=16, disable_radix_cache=True, **fixed, **options)
        plans, launch = [], llm.engine.launch
        llm.engine.launch = lambda plan: plans.append(plan) or launch(plan)
        outputs = llm.generate(prompts, params)
        llm.close()
        return tokens(outputs), {plan.block for plan in plans if isinstance(plan, PrefillPlan)}

    with tensor_core():
        want, lines = run(build, None, max_running_requests=1, graphs="off")
        found, blocks = run(lookup, (2, 2, 4), max_running_requests=6, chunked_prefill_size=64, graphs="sim")
    assert found == want
    assert lines == {0}
    assert blocks == {1, 4}
