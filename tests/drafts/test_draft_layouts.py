"""Heads in every published layout: what the engine drafts is what an independent dense computation drafts.

Trees of the first round are compared node by node, so the features that the engine feeds, the first drafts and the
deeper ones are all seen. Facts: docs/checkpoints.md; the sources are named in `drafts/eagle3_config.py`.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.dense_drafts import AFTER_NORM, DenseEagle, DenseEagle3, DenseTarget, dense_of
from support.engines import build, greedy, tokens
from support.grids import few_of
from support.head_layouts import (
    EAGLE,
    LAYERS,
    SHAPE,
    VOCAB,
    WIDTH,
    assert_drafts,
    biases,
    head_config,
    layer_shapes,
    random_tensors,
    save_head,
)
from support.refusing import refused
from support.tiny_models import LLAMA3_ROPE, Pair, copy_folder, save_random_head, save_random_llama
from treetop.checkpoints.loader import LoadContext
from treetop.drafts.protocol import Extension, Nodes
from treetop.drafts.registry import drafter_spec, find_draft
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_random_llama(tmp_path_factory.mktemp("layouts") / "target", seed=5, head_dim=16)
    return folder, DenseTarget(folder)


UNKNOWN_HEADS = [
    ("JetSpec of another layout", {"architectures": ["JetSpecDraftModel"]}, None),
    ("DeepSeek-V4 DSpark", {"dspark_noise_token_id": 3}, None),
    ("XPress", {"speculators_model_type": "xpress"}, None),
    ("Medusa", {"medusa_num_heads": 4}, None),
    ("Gemma 4 assistant", {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma3n_assistant"}, None),
    ("Gemma 4 assistant", {"backbone_hidden_size": 1536}, None),
    ("Gemma 4 assistant", {}, "pre_projection.weight"),
    ("PARD", {"architectures": ["LlamaForCausalLM"], "pard_token": 7}, None),
]


@pytest.mark.parametrize(("name", "said", "tensor"), UNKNOWN_HEADS)
def test_a_head_of_a_kind_that_does_not_run_is_refused_by_its_name(target, tmp_path, name, said, tensor):
    """By its config alone, without weights, too; what else the folder holds looks like EAGLE."""
    head = save_random_head(tmp_path / "head", target[0], draft_vocab=None)
    assert find_draft(head).algorithm == "EAGLE3"
    tensors = {} if tensor is None else {tensor: torch.zeros(1)}
    other = copy_folder(head, tmp_path / "other", tensors=tensors, **said)
    refused(CheckpointError, lambda: find_draft(other), f"a {name} head (", "config.json")
    spec = target_spec(target[0]).config
    for dummy in (False, True) if tensor is None else (False,):
        refused(CheckpointError, lambda dummy=dummy: drafter_spec(other, spec, dummy=dummy), f"a {name} head (")


def eagle3_shapes(prefix="midlayer", count=3, hidden=WIDTH, target_width=WIDTH, draft_vocab=VOCAB, **sizes) -> dict:
    return {
        "fc.weight": (hidden, count * target_width),
        f"{prefix}.hidden_norm.weight": (hidden,),
        f"{prefix}.input_layernorm.weight": (hidden,),
        **layer_shapes(prefix, 2 * hidden, hidden, **sizes),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }


EACH = tuple(f"fc_norm.{i}.weight" for i in range(3))
LEGACY = tuple(f"aux_norm_{each}.weight" for each in ("low", "mid", "high"))
SECOND = {"layers.1.input_layernorm.weight": (WIDTH,), **layer_shapes("layers.1", WIDTH)}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
DEFAULT = (2, LAYERS // 2, LAYERS - 3)
HEADS = {
    # layout: config changes, more tensors, tensors without, the reference's options, layer inputs
    "SafeAILab, dirty config": (
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "draft_vocab_size": None}, {}, (), {}, DEFAULT
    ),
    "SpecForge: ids count outputs": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, {}, (), {}, (1, 3, 4)
    ),
    "NVIDIA: one id is the number of layers": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, {}, (), {}, (1, 3, 4)
    ),
    "top level: ids count inputs": ({"eagle_aux_hidden_state_layer_ids": [0, 3, 4]}, {}, (), {}, (0, 3, 4)),
    "two features": (
        {"eagle_aux_hidden_state_layer_ids": [1, 4], "num_aux_hidden_states": 2},
        {"fc.weight": (WIDTH, 2 * WIDTH)}, (), {}, (1, 4),
    ),
    "EAGLE-3.1": (
        {"fc_norm": True, "norm_output": True}, dict.fromkeys(EACH, (WIDTH,)), (),
        {"each": EACH, "norm_output": True}, DEFAULT,
    ),
    "EAGLE-3.1 by its old names": (
        {"use_aux_norm": True}, dict.fromkeys(LEGACY, (WIDTH,)), (), {"each": LEGACY}, DEFAULT
    ),
    "one norm before fc": (
        {"norm_before_fc": True}, {"input_norm.weight": (3 * WIDTH,)}, (), {"joined": "input_norm.weight"}, DEFAULT
    ),
    "a norm that the config forgot": (
        {}, {"input_norm.weight": (3 * WIDTH,)}, (), {"joined": "input_norm.weight"}, DEFAULT
    ),
    "residual of the normed state": ({"norm_before_residual": True}, {}, (), {"before_residual": True}, DEFAULT),
    "fc with bias": ({"bias": True}, {"fc.bias": (WIDTH,)}, (), {}, DEFAULT),
    "biases and norms of heads": (
        {},
        {**biases("midlayer"), **{f"midlayer.self_attn.{each}_norm.weight": (16,) for each in "qk"}}, (), {}, DEFAULT,
    ),
    "all biases": (
        {"attention_bias": True, "mlp_bias": True},
        {
            **biases("midlayer"),
            "midlayer.self_attn.o_proj.bias": (WIDTH,),
            **{f"midlayer.mlp.{each}_proj.bias": (n,) for each, n in (("gate", 40), ("up", 40), ("down", WIDTH))},
        },
        (), {}, DEFAULT,
    ),
    "a second layer": ({}, SECOND, (), {"layers": ("midlayer", "layers.1")}, DEFAULT),
    "a second layer as SGLang stores it": (
        {},
        {**{k: v for k, v in SECOND.items() if "input_layernorm" not in k}, "layers.1.hidden_norm.weight": (WIDTH,)},
        (), {"layers": ("midlayer", "layers.1"), "deeper_norm": "hidden_norm"}, DEFAULT,
    ),
    "the target's output matrix": ({"draft_vocab_size": None}, {}, ("lm_head.weight",), {}, DEFAULT),
    "its own embedding": ({}, {"embed_tokens.weight": (VOCAB, WIDTH)}, (), {}, DEFAULT),
    "its own embedding, tied": (
        {"tie_word_embeddings": True}, {"embed_tokens.weight": (VOCAB, WIDTH)}, ("lm_head.weight",), {}, DEFAULT
    ),
    "the last hidden state, no fc": (
        {"eagle_config": {"use_aux_hidden_state": False}}, {}, ("fc.weight",), {"fuses": False}, (AFTER_NORM,)
    ),
    "llama3 RoPE, new spelling": (
        {"rope_parameters": LLAMA3_ROPE}, {}, (), {"rope": LLAMA3_ROPE}, DEFAULT
    ),
    "linear RoPE, old spelling": (
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}, {}, (),
        {"rope": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}, DEFAULT,
    ),
}  # fmt: skip


def eagle3_reference(folder, dense_target, options) -> DenseEagle3:
    """The head in a folder, with the target's matrices where it has none."""
    options = dict(options)
    rope = {"rope": options.pop("rope")} if "rope" in options else {}
    dense = dense_of(folder, **rope)
    embedding = dense.w.get("embed_tokens.weight", dense_target.embedding)
    own = dense.w.get("lm_head.weight", dense.w.get("embed_tokens.weight", dense_target.lm_head))
    return DenseEagle3(dense, embedding, own, dense.w.get("d2t", torch.zeros(len(own), dtype=torch.long)), **options)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_in_this_layout_drafts_what_it_must(target, tmp_path, name):
    changes, more, without, options, which = HEADS[name]
    shapes = {key: shape for key, shape in {**eagle3_shapes(), **more}.items() if key not in without}
    head = save_head(tmp_path / "head", head_config(**changes), random_tensors(shapes))
    assert find_draft(head).algorithm == "EAGLE3"
    assert_drafts(Pair(target[0], head), target[1], eagle3_reference(head, target[1], options), which)


@pytest.mark.parametrize("said", few_of([True, False], 0))
def test_which_state_of_a_head_goes_on_is_an_option(target, tmp_path, caplog, said):
    """`norm_output` meant something else for a time: set, it draws a warning, which the option answers."""
    changes, more, _, options, which = HEADS["EAGLE-3.1"]
    config = head_config(**{**changes, "norm_output": said})
    head = save_head(tmp_path / "head", config, random_tensors({**eagle3_shapes(), **more}))
    pair = Pair(target[0], head)
    for recurrence, output in (("auto", said), ("before-norm", False), ("after-norm", True)):
        caplog.clear()
        reference = eagle3_reference(head, target[1], {**options, "norm_output": output})
        assert_drafts(pair, target[1], reference, which, speculative_eagle_recurrence=recurrence)
        warned = any("norm_output is true" in each.message and str(head) in each.message for each in caplog.records)
        assert warned == (said and recurrence == "auto")


@pytest.mark.parametrize("options", [{"draft": None}, {"speculative_algorithm": "NGRAM", "draft": None}])
def test_the_state_that_goes_on_is_refused_without_an_eagle3_head(target, tmp_path, options):
    option = {"speculative_eagle_recurrence": "before-norm"}
    with pytest.raises(ConfigError, match="--speculative-eagle-recurrence is of an EAGLE-3 head"):
        EngineConfig(model=str(target[0]), **options, **option)
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), **layer_shapes("layers.0", WIDTH)}
    head = save_head(tmp_path / "head", head_config(), random_tensors(shapes))
    with pytest.raises(ConfigError, match="holds no EAGLE-3 head"):
        build(Pair(target[0], head), SHAPE, **option)


def latent_shapes(prefix: str, width: int) -> dict:
    """Compressed attention. width: of its input. A head has 10 + 6 numbers, and values of 9."""
    shapes = {
        "q_a_proj": (20, width),
        "q_a_layernorm": (20,),
        "q_b_proj": (4 * 16, 20),
        "kv_a_proj_with_mqa": (18 + 6, width),
        "kv_a_layernorm": (18,),
        "kv_b_proj": (4 * (10 + 9), 18),
        "o_proj": (WIDTH, 4 * 9),
    }
    return {f"{prefix}.self_attn.{name}.weight": shape for name, shape in shapes.items()}


@pytest.mark.parametrize("more", [{}, {"layers.1.input_layernorm.weight": (WIDTH,)}], ids=["one layer", "two layers"])
def test_a_head_with_compressed_attention_drafts_what_it_must(target, tmp_path, more):
    """Kimi-K2.5's, told by its config; the target's attention need not be so."""
    plain = ("q_proj", "k_proj", "v_proj", "o_proj")
    shapes = {key: shape for key, shape in eagle3_shapes().items() if key.split(".")[-2] not in plain}
    shapes |= latent_shapes("midlayer", 2 * WIDTH)
    if more:
        deeper = {key: shape for key, shape in layer_shapes("layers.1", WIDTH).items() if "self_attn" not in key}
        shapes |= more | deeper | latent_shapes("layers.1", WIDTH)
    sizes = {"kv_lora_rank": 18, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9}
    config = head_config(architectures=["Eagle3DeepseekV2ForCausalLM"], num_key_value_heads=4, **sizes)
    head = save_head(tmp_path / "head", config, random_tensors(shapes))
    assert find_draft(head).algorithm == "EAGLE3"
    options = {"layers": ("midlayer", "layers.1")} if more else {}
    assert_drafts(Pair(target[0], head), target[1], eagle3_reference(head, target[1], options), DEFAULT)


def test_a_yarn_draft_rotates_by_its_own_config(target, tmp_path):
    """The target does not scale its rotation; the head does, with an attention factor of its own (Automodel-2399)."""
    head = save_head(tmp_path / "head", head_config(rope_scaling=YARN), random_tensors(eagle3_shapes()))
    reference = eagle3_reference(head, target[1], {"rope": YARN})
    assert_drafts(Pair(target[0], head), target[1], reference, DEFAULT)


def test_a_narrow_head_with_a_reduced_vocabulary(target, tmp_path):
    """Its own embedding, half as wide as the target; d2t holds offsets, and t2d is looked at."""
    used = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:70].sort().values
    tensors = random_tensors(
        {**eagle3_shapes(hidden=32, draft_vocab=70, heads=2, kv=1), "embed_tokens.weight": (VOCAB, 32)}
    )
    tensors |= {"d2t": used - torch.arange(70), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, used, True)}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "target_hidden_size": WIDTH}
    head = save_head(tmp_path / "head", head_config(draft_vocab_size=70, **sizes), tensors)
    assert_drafts(Pair(target[0], head), target[1], eagle3_reference(head, target[1], {}), DEFAULT)


# ---------------------------------------------------------------------------------------------- EAGLE-1 and EAGLE-2

OLD_HEADS = {
    "no bias": ({"bias": False}, {}, ()),
    "a bias that the config does not name": ({}, {"fc.bias": (WIDTH,)}, ()),
    "vLLM's key": ({"eagle_fc_bias": True}, {"fc.bias": (WIDTH,)}, ()),
    "biases of q, k and v": ({"bias": False}, biases("layers.0"), ()),
    "two layers": ({"num_hidden_layers": 2}, SECOND, ("layers.0", "layers.1")),
    "another embedding than the target's": ({}, {"embed_tokens.weight": (VOCAB, WIDTH)}, ()),
}


@pytest.mark.parametrize("name", OLD_HEADS)
def test_an_eagle_head_drafts_what_it_must(target, tmp_path, name):
    """No input norm, no final norm, the target's output matrix, its last hidden state after the final norm."""
    changes, more, layers = OLD_HEADS[name]
    config = head_config(architectures=["LlamaForCausalLM"], **changes)
    head = save_head(tmp_path / "head", config, random_tensors({**EAGLE, **more}))
    assert find_draft(head).algorithm == "EAGLE"
    assert_drafts(Pair(target[0], head), target[1], eagle_reference(head, target[1], layers), (AFTER_NORM,))


def eagle_reference(folder, dense_target, layers=()) -> DenseEagle:
    dense = dense_of(folder)
    embedding = dense.w.get("embed_tokens.weight", dense_target.embedding)
    head = dense_target.lm_head
    return DenseEagle(dense, embedding, head, torch.zeros(len(head), dtype=torch.long), layers or ("layers.0",))


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "old format"])
def test_an_eagle_head_in_a_pytorch_file(target, tmp_path, archive):
    """As they were published: `pytorch_model.bin`, with a copy of the target's embedding that is not kept twice."""
    tensors = random_tensors(EAGLE) | {"embed_tokens.weight": target[1].embedding.float()}
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(head_config(bias=False)))
    torch.save(tensors, head / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    reference = eagle_reference(head, target[1])
    assert_drafts(Pair(target[0], head), target[1], reference, (AFTER_NORM,))
    runner = build(Pair(target[0], head), SHAPE).engine.runner
    assert runner.drafter.embedding.data_ptr() == runner.target.embedding.data_ptr()


# ------------------------------------------------------------------------------------------------------- speculators

SPECULATORS = Path(__file__).parents[1] / "checkpoints" / "speculators"


class Kept:
    """Attention of one sequence over all it has seen, in plain PyTorch: what a head attends by, outside an engine."""

    def __init__(self, layers) -> None:
        self.specs, self.kv = layers, [None] * len(layers)

    def __call__(self, layer, write, scale, sinks=None):
        spec = self.specs[layer]
        n = self.n
        new = torch.empty(1, n, 2, spec.kv.heads, spec.head_dim, dtype=torch.float64)
        q = write(new, None, None)
        seen = new if self.kv[layer] is None else torch.cat([self.kv[layer], new], 1)
        self.kv[layer] = seen
        k, v = (seen[0, :, i].repeat_interleave(spec.num_heads // spec.kv.heads, 1) for i in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", q[0], k) * scale
        scores = scores.masked_fill(torch.ones(n, len(k), dtype=torch.bool).triu(len(k) - n + 1), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)[None]


@pytest.mark.parametrize("name", ["llama", "qwen3-deep", "llama-joined"])
def test_heads_that_speculators_wrote_compute_what_it_computed(name, tmp_path):
    """First drafts of every position, and second drafts on the head's own states: the library's own logits."""
    told = load_file(SPECULATORS / f"{name}.expected.safetensors")
    folder = save_random_llama(tmp_path / "t", **SMALL)
    spec = drafter_spec(SPECULATORS / name, target_spec(folder).config)
    place = LoadContext(torch.float64, torch.device("cpu"), 64)
    head = spec.load(target_spec(folder).load((), place), place)
    tokens_in, n = told["tokens"][None], len(told["tokens"])

    def logprobs(state):
        got = head.propose(Nodes(tokens_in, state, 0), spec.vocab_size)
        ids = head.vocab.to_target(torch.arange(spec.vocab_size))
        return torch.stack([got.logprob[got.tokens == each] for each in ids])[:, 0]

    def run(call, tokens_, state, first, attend, *at):
        attend.n = tokens_.shape[1]
        return call(tokens_, state.double(), torch.arange(first, first + attend.n)[None], *at, attend)

    for i in range(n - 1):
        attend = Kept(spec.attention)
        last = Extension(torch.tensor([0]), torch.tensor([i]))
        states = run(head.extend, tokens_in[:, : i + 1], told["features"][None, : i + 1], 0, attend, last)
        want = torch.log_softmax(told["first"][i], -1)
        torch.testing.assert_close(logprobs(states[0]), want, rtol=1e-4, atol=1e-4)
        attend.n = 1
        nodes = Nodes(tokens_in[:, i + 1 : i + 2], states[:, None].double(), 1)
        states = head.step(nodes, torch.tensor([[i + 1]]), attend)
        want = torch.log_softmax(told["second"][i], -1)
        torch.testing.assert_close(logprobs(states[0, -1]), want, rtol=1e-4, atol=1e-4)


SMALL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize("name", ["llama", "qwen3-deep", "llama-joined"])
def test_heads_that_speculators_wrote_change_no_output(name, tmp_path):
    folder = save_random_llama(tmp_path / "t", **SMALL)
    pair = Pair(folder, SPECULATORS / name)
    found = find_draft(pair.head)
    assert (found.algorithm, found.layout) == ("EAGLE3", "speculators")
    prompts = pair.prompts([5, 12])
    assert tokens(build(pair, SHAPE).generate(prompts, greedy(20))) == tokens(
        build(pair, None).generate(prompts, greedy(20))
    )


def test_a_file_of_speculators_without_norm_before_residual_means_true(tmp_path, caplog):
    """As vLLM reads it; the library's own default is the other one, so it is said."""
    head = copy_folder(SPECULATORS / "llama-joined", tmp_path / "h", norm_before_residual=None)
    target = target_spec(save_random_llama(tmp_path / "t", **SMALL)).config
    with caplog.at_level(logging.WARNING, logger="treetop"):
        assert drafter_spec(head, target).norms.before_residual
    assert "norm_before_residual" in caplog.text
    assert not drafter_spec(SPECULATORS / "llama-joined", target).norms.before_residual
