"""The EAGLE-3 head is fed the right features, its K/V are those of a prefill, and it earns its keep."""

import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from support.engines import accept_lens, accepted, build, finish, greedy, sampled, steps, submit, tokens
from support.grids import few_of, few_values
from support.tiny_models import Pair, copy_folder, save_random_head
from treetop import LLM
from treetop.types.ids import DRAFT, FULL

ACCEPT_LENGTH_BOUND = 3.0
"""Tokens a round of the embedded pair, S = 5, k = 4, T = 16, over 16 held-out prompts of 64 new tokens."""

SHAPE = (4, 3, 16)


# ---------------------------------------------------------------------------------------------- which features

PLACES = {  # config keys -> the layer inputs of a target of 4 layers that are meant (4: after the last)
    "default": ({}, [2, 2, 1]),
    "nested": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, [1, 2, 3]),
    "nested-last": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, [1, 3, 4]),
    "top-level": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, [0, 1, 3]),
    "top-level-last": ({"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}, [2, 3, 4]),
    "nested-wins": (
        {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            "eagle_aux_hidden_state_layer_ids": [0, 0, 0],
        },
        [1, 2, 3],
    ),
}


def hooked_residuals(folder: Path, ids) -> dict[int, torch.Tensor]:
    """Layer input i -> the residual stream of `ids` there, by hooks on the reference model in float64."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    seen = {}

    def keep(index, value):
        seen[index] = value[0] if isinstance(value, tuple) else value

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: keep(index, args[0]))
        layer.register_forward_hook(lambda _, args, out, index=index: keep(index + 1, out))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return {index: value.reshape(len(ids), -1) for index, value in seen.items()}


@pytest.mark.parametrize("place", PLACES)
def test_the_head_is_fed_the_layers_that_the_config_means(strong_pair, tmp_path, place):
    """Nested ids count layer outputs, top-level ids inputs, and without any the original repository's default holds."""
    keys, inputs = PLACES[place]
    head = copy_folder(strong_pair.head, tmp_path / "head", **keys)
    llm = build(Pair(strong_pair.target, head), SHAPE, chunked_prefill_size=7)
    seen = []
    fuse = llm.engine.runner.drafter.fuse
    llm.engine.runner.drafter.fuse = lambda aux_hidden: seen.append(aux_hidden) or fuse(aux_hidden)
    prompt = strong_pair.prompts([17])[0]
    llm.generate([prompt], greedy(1))
    expected = hooked_residuals(strong_pair.target, prompt)
    assert len(inputs) == 3
    for number, index in enumerate(inputs):
        fed = torch.cat([aux_hidden[0].chunk(3, dim=-1)[number] for aux_hidden in seen])
        torch.testing.assert_close(fed, expected[index], rtol=1e-6, atol=1e-6)
        others = [other for other in expected if other != index]
        assert not any(torch.allclose(fed, expected[other], atol=1e-2) for other in others)


def test_a_head_written_with_the_newer_layer_name_is_the_same_head(strong_pair, tmp_path):
    """`layers.0.*` and `midlayer.*` are two spellings of one head."""
    weights = load_file(strong_pair.head / "model.safetensors")
    newer = copy_folder(strong_pair.head, tmp_path / "newer")
    save_file({k.replace("midlayer.", "layers.0."): v for k, v in weights.items()}, newer / "model.safetensors")
    prompts = strong_pair.prompts([6, 14])
    runs = [
        build(Pair(strong_pair.target, head), SHAPE).generate(prompts, greedy(30)) for head in (strong_pair.head, newer)
    ]
    assert accept_lens(runs[0]) == accept_lens(runs[1])
    assert sum(map(sum, accept_lens(runs[0]))) > 0


# ---------------------------------------------------------------------------------------------- draft state


def draft_state(llm, request):
    """What the next tree of a running request grows from, and the K/V of its known tokens in every group."""
    state, row = llm.engine.runner.state.draft, request.running.row
    tables = [state.tokens[row].clone(), state.logprob[row].clone(), state.hidden[row].clone()]
    page = llm.engine.layout.page_size
    for group in (FULL, DRAFT):
        position = torch.arange(request.num_ids - 1)
        slots = torch.tensor(request.running.lease.pages[group])[position // page] * page + position % page
        for layer in llm.engine.runner.pools[group].layers():
            tables += [layer.kv.k[slots].clone(), layer.kv.v[slots].clone()]
    return tables


def assert_same_state(a, b):
    assert len(a) == len(b)
    assert torch.equal(a[0], b[0]), "other tokens are proposed"
    for x, y in zip(a[1:], b[1:], strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-9, atol=1e-6 if x.dtype == torch.float32 else 1e-9)


def run_until(llm, request, num_output):
    """Step until a request has that many tokens or more."""
    run = steps(llm)
    while len(request.output_ids) < num_output:
        next(run)


@pytest.mark.parametrize("chunk", few_of([1, 3, 16, 29], 1))
def test_many_prefill_chunks_leave_the_same_draft_state_as_one(strong_pair, chunk):
    """K/V of target and draft, hidden state and proposals do not depend on how the prompt was cut."""
    prompt = strong_pair.prompts([30])[0]
    states, lens = [], []
    for size in (512, chunk):
        llm = build(strong_pair, SHAPE, chunked_prefill_size=size, page_size=4)
        (request,) = submit(llm, [prompt], greedy(40))
        run_until(llm, request, 1)
        states.append(draft_state(llm, request))
        finish(llm)
        lens.append(accepted(request))
    assert_same_state(*states)
    assert lens[0] == lens[1]
    assert sum(lens[0]) > 0


@pytest.mark.parametrize("shape", [(1, 0, 1), (1, 3, 4), (4, 3, 16), (3, 1, 4)])
def test_rounds_leave_the_same_state_as_a_prefill_of_the_same_tokens(strong_pair, shape):
    """After rounds the K/V of every committed token, in target and draft, equal those of one prefill: no holes.

    The proposal and the hidden state after the root are equal too. This is so for plain rounds with a draft loaded.
    """
    llm = build(strong_pair, shape, page_size=4)
    requests = submit(
        llm,
        strong_pair.prompts([11, 3, 20]),
        [sampled(1, 60, whole=True), greedy(60, whole=True), sampled(2, 60, whole=True)],
    )
    run_until(llm, requests[0], 25)
    assert shape[1] == 0 or sum(map(sum, (accepted(r) for r in requests))) > 0
    for request in requests:
        fresh = build(strong_pair, shape, page_size=4)
        (other,) = submit(fresh, [request.ids[:-1]], greedy(60, whole=True))
        # The token that the prefill chooses is the root only if it is forced: let the rounds' root follow instead.
        plan = fresh.scheduler.plan()
        target = fresh.engine.runner.target
        logits = target.piece
        root = request.ids[-1]
        target.piece = lambda hidden, root=root, logits=logits: logits(hidden).index_fill(-1, torch.tensor([root]), 1e9)
        fresh.scheduler.commit(plan, fresh.engine.step(plan))
        target.piece = logits
        assert other.output_ids == [root]
        assert_same_state(draft_state(fresh, other), draft_state(llm, request))


@pytest.mark.parametrize("shape", few_values([(4, 3, 16), (1, 4, 5), (2, 5, 12)], 0))
def test_a_batch_of_four_accepts_what_four_batches_of_one_accept(strong_pair, shape):
    """Accept lengths round by round do not depend on the batch."""
    prompts, params = strong_pair.prompts([5, 9, 17, 30]), [greedy(40), sampled(1, 40), greedy(33), sampled(2, 25)]
    llm = build(strong_pair, shape, max_running_requests=4)
    together = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], each)
        assert alone.token_ids == output.token_ids
        assert alone.metrics.accept_lens == output.metrics.accept_lens
    assert sum(map(sum, accept_lens(together))) > 0


def test_the_drafts_own_position_limit_does_not_matter(strong_pair):
    """A head whose config says 64 positions drafts at position 200 as a head whose config says 512."""
    prompt = strong_pair.prompts([200])[0]
    assert json.loads((strong_pair.head / "config.json").read_text())["max_position_embeddings"] < 200
    speculative = build(strong_pair, SHAPE).generate([prompt], sampled(1, 50))
    assert tokens(speculative) == tokens(build(strong_pair, None).generate([prompt], sampled(1, 50)))
    assert sum(map(sum, accept_lens(speculative))) > 0


def test_a_head_that_gives_nan_changes_no_token(strong_pair):
    """Nothing the draft says can change the output: NaN from its first norm on costs speed alone."""
    prompts = strong_pair.prompts([5, 18, 30])
    expected = tokens(build(strong_pair, None).generate(prompts, greedy(30)))
    for wounded in ("norm", "hidden_norm"):
        llm = build(strong_pair, SHAPE)
        getattr(llm.engine.runner.drafter, wounded).weight.fill_(float("nan"))
        assert tokens(llm.generate(prompts, greedy(30))) == expected


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_the_copying_head_of_the_tests_predicts_a_target_without_layers(weak_pair, norm_before_residual):
    """The head's forward is what its checkpoint says: it was built to propose well in this form only."""
    folder = weak_pair.head.parent / f"residual-{norm_before_residual}"
    if not folder.exists():
        copy_folder(weak_pair.head, folder, norm_before_residual=norm_before_residual)
    outputs = build(Pair(weak_pair.target, folder), (4, 5, 16)).generate(weak_pair.prompts([5, 9, 17, 30]), greedy(60))
    mean = sum(sum(lens) for lens in accept_lens(outputs)) / sum(map(len, accept_lens(outputs)))
    assert (1.3 < mean < 3.5) == norm_before_residual, f"{mean} drafts were accepted a round"


def test_a_head_with_its_own_embedding_uses_it(strong_pair, tmp_path):
    """`embed_tokens.weight` of the head replaces the target's: another embedding gives other proposals."""
    own = load_file(strong_pair.target / "model.safetensors")["model.embed_tokens.weight"]
    lens = []
    for name, embedding in (("same", own), ("other", own.flip(0).contiguous())):
        head = copy_folder(strong_pair.head, tmp_path / name, tensors={"embed_tokens.weight": embedding})
        outputs = build(Pair(strong_pair.target, head), SHAPE).generate(
            strong_pair.prompts([9, 20]), greedy(40, whole=True)
        )
        lens.append(accept_lens(outputs))
    without = build(strong_pair, SHAPE).generate(strong_pair.prompts([9, 20]), greedy(40, whole=True))
    assert lens[0] == accept_lens(without)
    assert lens[1] != lens[0]


def test_a_head_of_another_width_than_its_target_drafts(strong_pair, tmp_path):
    """`hidden_size` != `target_hidden_size`: the features are projected, and the head brings its own embedding."""
    generator = torch.Generator().manual_seed(5)
    narrow = copy_folder(strong_pair.target, tmp_path / "narrow", hidden_size=32, head_dim=8)
    head = save_random_head(tmp_path / "head", narrow, draft_vocab=11, target_hidden_size=64)
    weights = load_file(head / "model.safetensors")
    weights["fc.weight"] = torch.randn(32, 3 * 64, generator=generator)
    weights["embed_tokens.weight"] = torch.randn(12, 32, generator=generator)
    save_file(weights, head / "model.safetensors")
    prompts = strong_pair.prompts([9, 20])
    outputs = build(Pair(strong_pair.target, head), SHAPE).generate(prompts, sampled(3, 40))
    assert tokens(outputs) == tokens(build(strong_pair, None).generate(prompts, sampled(3, 40)))
    assert sum(map(sum, accept_lens(outputs))) > 0


# ---------------------------------------------------------------------------------------------- the embedded pair


@pytest.fixture(scope="module")
def embedded_prompts():
    assets = Path(str(resources.files("treetop") / "assets"))
    for name in ("nestling", "nestling-eagle3"):
        if not (assets / name / "model.safetensors").is_file():
            pytest.fail(f"the embedded pair is missing: src/treetop/assets/{name}/model.safetensors")
    lines = (assets / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // 16][:16]]


def embedded_run(prompts, topk, num_steps, num_draft_tokens):
    """Tokens and tokens a round, every round counted in full."""
    llm = LLM(
        speculative_eagle_topk=topk,
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_draft_tokens,
        max_running_requests=16,
        context_length=512,
        dtype="float32",
    )
    outputs = llm.generate(prompts, greedy(64))
    lens = [a for each in accept_lens(outputs) for a in each]
    return tokens(outputs), 1 + sum(lens) / len(lens)


@pytest.mark.slow
def test_the_embedded_head_accepts_three_tokens_a_round_and_a_tree_beats_a_chain(embedded_prompts):
    """The pair that ships is worth its tree: the recorded bound holds, and T = 16 accepts more than its chain."""
    tree_tokens, tree = embedded_run(embedded_prompts, 4, 5, 16)
    chain_tokens, chain = embedded_run(embedded_prompts, 1, 5, 6)
    assert tree >= ACCEPT_LENGTH_BOUND, f"{tree:.2f} tokens a round"
    assert tree > chain, f"tree {tree:.2f}, chain {chain:.2f}"
    equal = sum(a == b for a, b in zip(tree_tokens, chain_tokens, strict=True))
    assert equal >= 15, "tree and chain differ by more than a near tie"
