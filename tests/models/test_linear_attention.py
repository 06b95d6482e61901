"""Gated delta nets and what stands around them: `transformers` in float64, and faults that would show nowhere else."""

import contextlib
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from support.engines import build, greedy, tokens
from support.families import FAMILIES
from support.grids import few_of
from support.logits import record_logits
from support.recurrences import FIRST, NAMES
from support.tiny_models import copy_folder
from treetop import LLM
from treetop.engine.startup.exactness import why_not_model
from treetop.engine.startup.operation_probes import operation_probe
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.models.config import LinearSpec
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop_debug.model_faults import LINEAR_FAULTS, MIXER_FAULTS

ALSO = ("qwen3.5 of images", "qwen3.5 moe of images")


@contextlib.contextmanager
def no_downcasts():
    """`transformers` casts to float32 inside: of a float64 tensor that is left out."""
    to, as_float, as_type, softmax = torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, F.softmax

    def kept(self, *args, **named):
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            named = {key: torch.float64 if each is torch.float32 else each for key, each in named.items()}
        return to(self, *args, **named)

    def of_wide(x, *args, **named):
        if x.dtype == torch.float64:
            named.pop("dtype", None)
        return softmax(x, *args, **named)

    def typed(self, *args):
        return self if self.dtype == torch.float64 and args == (torch.float32,) else as_type(self, *args)

    torch.Tensor.to, torch.Tensor.type = kept, typed
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else as_float(self)
    F.softmax = torch.nn.functional.softmax = of_wide
    try:
        yield
    finally:
        torch.Tensor.to, torch.Tensor.float, torch.Tensor.type = to, as_float, as_type
        F.softmax = torch.nn.functional.softmax = softmax


def widened(model):
    """Parameters that `transformers` keeps in float32 are in float64, too; frequencies stay as they were made."""
    for each in model.parameters():
        each.data = each.data.double()
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name -> a family's folder, made when it is asked for."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = FAMILIES[name].save(tmp_path_factory.mktemp("linear"), seed=5)
        return made[name]

    return of


def our_logits(folder, prompt, chunk, count=1):
    """Of the prompt and of the tokens that follow it but the last."""
    options = {"dtype": "float64", "graphs": "off", "page_size": 4, "device": "cpu", "context_length": 256}
    llm = LLM(model=str(folder), draft=None, chunked_prefill_size=chunk, **options)
    seen = record_logits(llm)
    (output,) = llm.generate([prompt], greedy(count))
    return torch.cat([logits[0] for logits in seen]), output.token_ids


@pytest.mark.parametrize("name", [*NAMES, *ALSO])
def test_logits_are_those_of_transformers_in_float64(saved, name):
    """1e-11 of the largest: a prompt past a block of 64 tokens, in one chunk, and tokens after it, one by one."""
    model, prompt = widened(saved(name).reference(torch.float64)), saved(name).pair.prompts([90], seed=2)[0]
    ours, after = our_logits(saved(name).pair.target, prompt, 512, 5)
    with no_downcasts():
        theirs = saved(name).logits(model, [*prompt, *after[:-1]])
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-11


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65])
def test_any_chunks_leave_the_same_state(saved, chunk):
    """A chunk goes on from the row's state and convolution, wherever it begins."""
    prompt = saved("qwen3.5").pair.prompts([70], seed=1)[0]
    whole, expected = our_logits(saved("qwen3.5").pair.target, prompt, 512, 6)
    ours, after = our_logits(saved("qwen3.5").pair.target, prompt, chunk, 6)
    assert after == expected
    torch.testing.assert_close(ours, whole, rtol=0, atol=1e-11 * float(whole.abs().max()))


def test_limits_of_steps_hold_for_single_tokens_too(saved, tmp_path):
    """Of Mamba-2, with chunks of a token: `transformers` leaves limits out there, and has them in a whole prompt."""
    limited = {"time_step_limit": [0.4, 0.9]}
    folder, prompt = copy_folder(saved("bamba").pair.target, tmp_path / "limited", **limited), [7, 5, 9, 4, 8, 6] * 3
    model = replace(saved("bamba"), theirs=folder).reference(torch.float64)
    with no_downcasts():
        theirs = saved("bamba").logits(model, prompt)
    ours, _ = our_logits(folder, prompt, 1)
    without, _ = our_logits(saved("bamba").pair.target, prompt, 1)
    largest = float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) < 1e-11 * largest
    assert float((without - theirs).abs().max()) > 1e-3 * largest


def limited(gate, up, limit):
    """As Ling's own: the activated gate at most so much, up within as much on both sides."""
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def test_limits_of_late_layers_are_lings_own(saved, tmp_path):
    """`transformers` leaves them out, so its layers 2 and 3 get them here; without them logits differ."""
    routed, shared = [0, 0, 0.05, 0.1], [None, None, 0, 0.07]
    lists = {"expert_swiglu_limit_list": routed, "share_expert_swiglu_limit_list": shared}
    folder = copy_folder(saved("ling 3").pair.target, tmp_path / "limited", **lists)
    model, prompt = widened(saved("ling 3").reference(torch.float64)), saved("ling 3").pair.prompts([20], seed=2)[0]
    for layer, of_experts, of_shared in zip(model.model.layers, routed, shared, strict=True):
        if of_experts:
            del layer.mlp.experts.act_fn  # a module
            layer.mlp.experts.act_fn = partial(Gated, of_experts)
        if of_shared:
            mlp = layer.mlp.shared_experts
            mlp.forward = lambda x, mlp=mlp, most=of_shared: mlp.down_proj(
                limited(mlp.gate_proj(x), mlp.up_proj(x), most)
            )
    with no_downcasts():
        theirs = saved("ling 3").logits(model, prompt)
    ours, _ = our_logits(folder, prompt, 7)
    without, _ = our_logits(saved("ling 3").pair.target, prompt, 7)
    largest = float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) < 1e-11 * largest
    assert float((without - theirs).abs().max()) > 1e-3 * largest


class Gated:
    """An activated gate that is yet to be multiplied by up, so that both are limited."""

    def __init__(self, limit, gate):
        self.limit, self.gate = limit, gate

    def __mul__(self, up):
        return limited(self.gate, up, self.limit)


@pytest.mark.parametrize("changes", [
    {"layer_group_size": 3}, {"expert_swiglu_limit_list": [1.0]}, {"use_mla_nope": True}, {"kda_lower_bound": 1.0},
    {"gated_attention_proj_granularity_type": "element_wise"},
])  # fmt: skip
def test_what_ling_cannot_be_is_refused_by_key(saved, tmp_path, changes):
    folder = copy_folder(saved("ling 3").pair.target, tmp_path / "changed", **changes)
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        target_spec(folder)


@pytest.mark.parametrize("name", FIRST)
def test_a_gpus_probe_of_bits_knows_every_kind_of_recurrence(saved, name):
    """It runs anywhere; here by the references that a CPU has with `bits`, one of which is spoilt."""
    config = target_spec(saved(name).pair.target).config
    assert why_not_model(config) is None
    ops = Ops(OpContext(torch.device("cpu"), torch.float32, profile=profile_of("bits", torch.device("cpu"))))
    probe = operation_probe(ops, config, (), 20)
    assert probe.problem() is None
    spoilt = "path_conv" if name == "lfm2" else "verify_states"
    real = getattr(ops, spoilt)
    vars(ops)[spoilt] = lambda *given, **more: real(*given, **more) + (len(given[1]) == 5)
    assert probe.problem() == "the recurrence of a layer of 5 rows"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *ALSO])
def test_long_chunks_and_long_prompts(saved, name):
    prompt = saved(name).pair.prompts([240], seed=1)[0]
    model = widened(saved(name).reference(torch.float64))
    with no_downcasts():
        theirs = saved(name).logits(model, prompt)
    for chunk in (63, 64, 65, 233):
        ours, _ = our_logits(saved(name).pair.target, prompt, chunk)
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-10


def test_a_config_says_which_layers_are_linear_and_what_turns(saved):
    """By `layer_types`, else every fourth layer is full; a quarter of a head has RoPE where nobody says."""
    folder = saved("qwen3.5").pair.target
    config = target_spec(folder).config
    assert list(config.recurrent) == [0, 1, 2]
    assert config.attention[3].rope.rotary_dim == 4
    assert config.unit_offset
    assert config.recurrent[0] == LinearSpec(2, 6, 10, 6, 4, "by part")


@pytest.mark.parametrize(("changes", "key"), [
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"linear_num_value_heads": 5}, "linear_num_value_heads"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ({"layer_types": ["linear_attention"] * 4}, "full_attention"),
    ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(saved, tmp_path, changes, key):
    folder = copy_folder(saved("qwen3.5").pair.target, tmp_path / "changed", **changes)
    with pytest.raises(CheckpointError, match=key):
        target_spec(folder)


def test_a_part_of_another_kind_is_refused(saved, tmp_path):
    """Intern-S2 wraps such a text, `qwen4_exp` is one of another kind."""
    folder = saved("qwen3.5 of images").pair.target
    text = json.loads((folder / "config.json").read_text())["text_config"]
    changed = copy_folder(folder, tmp_path / "changed", text_config={**text, "model_type": "qwen4_exp_text"})
    with pytest.raises(CheckpointError, match="qwen4_exp_text"):
        target_spec(changed)


def test_ranks_have_whole_key_heads():
    """With the value heads that read them; what cannot be divided is refused by the option's name."""
    spec = LinearSpec(4, 12, 8, 8, 4)
    assert spec.of_rank(2) == LinearSpec(2, 6, 8, 8, 4)
    with pytest.raises(ConfigError, match=r"--tp-size 3: 4 key heads .*\[1, 2, 4\] can"):
        spec.of_rank(3)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", few_of(["qwen3 next", "qwen3.5 moe"], 0))
@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 4, 14)])
def test_trees_of_lookup_are_exact_in_ragged_batches(saved, name, shape):
    """Prompts of 1 token, of as many as a tree has, and more rows than run at once, under a simulated graph."""
    pair = saved(name).pair
    prompts = pair.prompts([1, 14, 30, 3, 64, 65], seed=4)
    sizes = {"page_size": 4, "context_length": 128, "max_running_requests": 3, "chunked_prefill_size": 16}
    expected = tokens(build(pair, None, **sizes).generate(prompts, greedy(24)))
    names = ("topk", "num_steps", "num_draft_tokens")
    tree = {f"speculative_{'eagle_' if each == 'topk' else ''}{each}": n for each, n in zip(names, shape, strict=True)}
    options = {"dtype": "float64", "graphs": "sim", "device": "cpu", "check_level": 3, "speculative_algorithm": "NGRAM"}
    llm = LLM(model=str(pair.target), **tree, **sizes, **options)
    assert tokens(llm.generate(prompts, greedy(24))) == expected
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("name", LINEAR_FAULTS)
def test_a_fault_of_a_layer_shows_in_logits(saved, name):
    """Each of them loads; nothing but a comparison with `transformers` tells."""
    folder, prompt = saved("qwen3 next").pair.target, saved("qwen3 next").pair.prompts([20], seed=2)[0]
    right, _ = our_logits(folder, prompt, 512)
    with LINEAR_FAULTS[name].active():
        wrong, _ = our_logits(folder, prompt, 512)
    assert float((wrong - right).abs().max() / right.abs().max()) > 1e-3


@pytest.mark.parametrize("name", MIXER_FAULTS)
def test_a_fault_of_another_kind_of_layer_shows_in_logits(saved, name):
    """As above: beyond what equality with `transformers` allows, by far."""
    family = next(each for each in NAMES if name.startswith(each.replace(" ", "-")))
    folder, prompt = saved(family).pair.target, saved(family).pair.prompts([20], seed=2)[0]
    right, _ = our_logits(folder, prompt, 512)
    with MIXER_FAULTS[name].active():
        wrong, _ = our_logits(folder, prompt, 512)
    assert float((wrong - right).abs().max() / right.abs().max()) > 1e-6
