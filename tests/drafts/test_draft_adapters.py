"""Adapters of a draft head, beside its target's: a row drafts what the head with its adapter merged drafts."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import block_heads, peagle_heads
from support.assistants import save_assistant, save_assisted
from support.engines import accept_lens, build, greedy, next_and_hold, sampled, steps, submit, tokens
from support.grids import few_of
from support.handing import IDS, Relay, Worker
from support.head_layouts import EAGLE, LAYERS, head_config, random_tensors, save_head
from support.loras import EVERY, merged, save_lora
from support.mtp_layers import mtp_tensors
from support.refusing import refused
from support.tiny_models import (
    Pair,
    copy_folder,
    save_copying_head,
    save_random_head,
    save_random_llama,
    save_weak_llama,
)
from treetop.checkpoints.lora_folder import read_lora
from treetop.doctor.conformance import RandomShapes
from treetop.drafts.registry import drafter_spec
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError, ConfigError
from treetop.types.layout import PLAIN
from treetop_debug.patching import Patch, replaced

SHAPE = (3, 3, 9)
OF_HEADS = (*EVERY, "fc", "eh_proj", "pre_projection", "post_projection")


def eagle3(folder):
    target = save_random_llama(folder / "target", seed=5, head_dim=16)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=90)), {}


def eagle(folder):
    target = save_random_llama(folder / "target", seed=5, head_dim=16)
    return Pair(target, save_head(folder / "head", head_config(), random_tensors(EAGLE))), {}


def peagle(folder):
    target = save_random_llama(folder / "target", seed=5, head_dim=16)
    layout = next(iter(peagle_heads.LAYOUTS.values()))
    return Pair(target, peagle_heads.saved(folder, layout)[0]), {}


def block(folder):
    target = save_random_llama(folder / "target", seed=5, head_dim=16)
    return Pair(target, block_heads.saved(folder, "DeepSpec, gated")), {}


def mtp(folder):
    target = save_random_llama(folder / "target", seed=5, head_dim=16)
    target = copy_folder(target, folder / "with an MTP layer", tensors=mtp_tensors("GLM"))
    return Pair(target, target), {"speculative_algorithm": "MTP"}


def model(folder):
    target = save_random_llama(folder / "target", seed=5, head_dim=16)
    small = save_random_llama(folder / "head", seed=6, num_hidden_layers=2, intermediate_size=40)
    return Pair(target, small), {"speculative_algorithm": "STANDALONE"}


def assistant(folder):
    target = save_assisted(folder / "target")
    return Pair(target, save_assistant(folder / "head", target)), {}


def saved(folder, pair: Pair, seed: int, head: bool):
    """An adapter of a pair, perhaps with one of its head; its folder and the pair that it makes."""
    own = pair.target == pair.head
    within = rf"model\.layers\.[0-{LAYERS - 1}]\." if own else ""
    lora = save_lora(folder / f"a{seed}", pair.target, 4, 8.0, seed, within=within)
    target = merged(folder / f"target{seed}", pair.target, lora, 2.0)
    made = Pair(target, target if own else pair.head)
    if not head:
        return lora, made
    within = rf"model\.layers\.{LAYERS}\." if own else r"(?!markov)"
    of_head = save_lora(lora / "draft", pair.head, 3, 6.0, seed + 10, OF_HEADS, within=within)
    whole = merged(folder / f"head{seed}", made.head, of_head, 2.0)
    return lora, Pair(whole if own else target, whole)


def drafted(llm, prompts, params, names):
    """Of one request for each prompt, in one batch: its trees by round, and its output."""
    seen = {}

    def observe(plan, tree, accepted):
        for at, row in enumerate(plan.rows):
            seen.setdefault(row, []).append((tree.tokens[at].tolist(), tree.parent[at].tolist(), tree.logprob[at]))

    llm.engine.observer = observe
    asked = [
        each
        for prompt, own, name in zip(prompts, params, names, strict=True)
        for each in llm._asked([prompt], [own], None, name)
    ]
    outputs = {delta.index: delta.output for delta in llm._run(asked) if delta.output is not None}
    by_root = {trees[0][0][0]: trees for trees in seen.values()}
    assert len(by_root) == len(prompts), "first tokens do not tell requests apart"
    return [(by_root[outputs[at].token_ids[0]], outputs[at]) for at in range(len(prompts))]


HEADS = [eagle3, eagle, peagle, block, mtp, model, assistant]


@pytest.mark.parametrize("kind", few_of(HEADS, 0, 3, 4))
def test_a_row_drafts_what_the_head_with_its_adapter_merged_drafts(tmp_path, kind):
    """In one batch with a row of the base and one whose adapter has none of the head; prompts in chunks, and prefixes
    that each finds again."""
    pair, options = kind(tmp_path)
    with_head, both = saved(tmp_path, pair, 1, head=True)
    without, one = saved(tmp_path, pair, 2, head=False)
    prompts = pair.prompts([9, 14, 9])
    params = [greedy(9, whole=True), greedy(9, whole=True), sampled(3, 9, whole=True)]
    want = []
    for each, prompt, own in zip((pair, both, one), prompts, params, strict=True):
        want += drafted(build(each, SHAPE, page_size=4, **options), [prompt], [own], [None])
    modules = {"both": str(with_head), "one": str(without)}
    llm = build(
        pair, SHAPE, lora_modules=modules, page_size=4, chunked_prefill_size=7, check_level=3, graphs="sim", **options
    )
    for again in range(2):
        found = drafted(llm, prompts, params, [None, "both", "one"])
        for (mine, output), (wanted, whose) in zip(found, want, strict=True):
            assert (output.token_ids, output.metrics.accept_lens) == (whose.token_ids, whose.metrics.accept_lens)
            for got, tree in zip(mine, wanted, strict=True):
                assert got[:2] == tree[:2]
                torch.testing.assert_close(got[2], tree[2], rtol=0, atol=1e-8)
        assert all(output.metrics.num_cached_tokens > 0 for _, output in found) == bool(again)
    llm.scheduler.check_integrity()


@pytest.fixture(scope="module")
def fitting(tmp_path_factory):
    """A head that drafts well with an adapter of its own alone, beside that of the target; the same folder without it,
    and the pairs that the two make."""
    folder = tmp_path_factory.mktemp("fitting")
    target = save_weak_llama(folder / "target", seed=4, strength=0.1)
    good = save_copying_head(folder / "good", target, draft_vocab=211)
    lora = save_lora(folder / "lora", target, 4, 8.0, 1, size=0.01)
    without = copy_folder(lora, folder / "without")
    of_head = save_lora(lora / "draft", good, 6, 12.0, 2, OF_HEADS, size=1.0)
    whole, bad = merged(folder / "whole", target, lora, 2.0), merged(folder / "bad", good, of_head, -2.0)
    return Pair(target, bad), lora, without, Pair(whole, good), Pair(whole, bad)


def asked(pair):
    return pair.prompts([9, 14, 5]), [greedy(24, whole=True), sampled(3, 24, whole=True), greedy(16, whole=True)]


def known(outputs):
    return tokens(outputs), accept_lens(outputs)


@pytest.fixture(scope="module")
def wanted(fitting):
    """Tokens and accept lengths with the head's adapter and without, of merged weights."""
    pair, _, _, good, bad = fitting
    found = [known(build(each, SHAPE).generate(*asked(pair))) for each in (good, bad)]
    assert found[0][0] == found[1][0]
    lengths = [sum(map(sum, each)) / sum(map(len, each)) for _, each in found]
    assert lengths[0] > 1.2 + lengths[1], lengths
    return found


def test_adapters_of_the_head_come_and_go_in_one_slot(fitting, wanted):
    """Loaded, put out of its slot by one without, found again, after a sleep, and unloaded for another of its name."""
    pair, lora, without, _, _ = fitting
    options = {"enable_lora": True, "enable_draft_lora": True, "max_loras": 1, "max_cpu_loras": 3, "page_size": 4}
    llm = build(pair, SHAPE, graphs="sim", **options)
    base = known(llm.generate(*asked(pair)))
    llm.load_lora("with", lora)
    llm.load_lora("without", without)
    for name in ("with", "without", "with"):
        assert known(llm.generate(*asked(pair), lora=name)) == wanted[name == "without"], name
    llm.sleep(2)
    llm.wake_up()
    assert known(llm.generate(*asked(pair), lora="with")) == wanted[0]
    llm.unload_lora("with")
    llm.load_lora("with", without)
    assert known(llm.generate(*asked(pair), lora="with")) == wanted[1]
    assert known(llm.generate(*asked(pair))) == base


def test_rounds_that_defer_and_catch_up_have_the_rows_adapters(fitting):
    """Plain rounds, chains and trees in turn, of rows that end one after another: one that catches up extends each row
    by its own."""
    pair, lora, without, good, bad = fitting
    prompts = pair.prompts([9, 14, 5])
    params = [greedy(length, whole=True) for length in (9, 20, 30)]
    options = {"speculative_policy": "auto", "speculative_max_deferred": 4, "graphs": "sim"}

    def answers(llm, which, names):
        llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, 1)
        asked_now = [
            each
            for at, name in zip(which, names, strict=True)
            for each in llm._asked([prompts[at]], [params[at]], None, name)
        ]
        outputs = {delta.index: delta.output for delta in llm._run(asked_now) if delta.output is not None}
        assert PLAIN in llm.scheduler.policy.chosen
        return [known([outputs[at]]) for at in range(len(which))]

    want = [
        each for at, own in enumerate((pair, good, bad)) for each in answers(build(own, SHAPE, **options), [at], [None])
    ]
    llm = build(pair, SHAPE, lora_modules={"with": str(lora), "without": str(without)}, **options)
    assert answers(llm, range(3), [None, "with", "without"]) == want
    assert sum(want[1][1][0]) > sum(want[2][1][0])


def test_each_extend_is_told_of_its_own_rows(fitting):
    """Whoever was prefilled or ended since the last tree grew: plain rounds in between select nobody."""
    pair, lora, without, _, _ = fitting
    options = {"speculative_policy": "auto", "speculative_max_deferred": 4, "max_running_requests": 2}
    llm = build(pair, SHAPE, lora_modules={"with": str(lora), "without": str(without)}, **options)
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, 1, loses=True)
    runner, told = llm.engine.runner, []

    def watched(real):
        def extend(self, tokens, aux_hidden, positions, at, attend):
            own = runner.state.numbers["adapter"][at.rows]
            told.append(torch.equal(runner.draft_adapters.current[: len(at.rows)], own) and len(set(own.tolist())))
            return real(self, tokens, aux_hidden, positions, at, attend)

        return extend

    names, prompts = ["with", "", "without", "with", "", "with"], pair.prompts([9, 14, 5, 7, 3, 6])
    with replaced([Patch("treetop.drafts.eagle3:Eagle3Head.extend", watched)]):
        submit(llm, prompts, [greedy(9 + 3 * i, whole=True) for i in range(len(names))], loras=names)
        for _ in steps(llm):
            pass
    assert all(told)
    assert 2 in told


def test_a_forward_of_the_head_that_is_told_of_no_adapters_shows(fitting, wanted):
    """The fault that each selection guards against."""
    pair, lora, _, _, _ = fitting
    with replaced([Patch("treetop.engine.model_runner:ModelRunner.select_for_draft", lambda _: lambda *_: None)]):
        llm = build(pair, SHAPE, lora_modules={"with": str(lora)})
        found = known(llm.generate(*asked(pair), lora="with"))
    assert found[0] == wanted[0][0]
    assert found[1] != wanted[0][1]


@pytest.mark.slow
def test_ranks_have_their_share_of_a_heads_adapter(fitting, wanted):
    pair, lora, without, _, _ = fitting
    modules = {"with": str(lora), "without": str(without)}
    llm = build(pair, SHAPE, lora_modules=modules, tp_size=2, device="cpu")
    assert [known(llm.generate(*asked(pair), lora=name)) for name in modules] == wanted


def test_a_request_that_was_handed_over_goes_on_with_its_heads_adapter(fitting, wanted):
    """What the other worker wrote of the draft's K/V and proposals is of the head with that adapter."""
    pair, lora, _, _, _ = fitting
    workers = [Worker(pair, SHAPE, lora_modules={"with": str(lora)}) for _ in range(2)]
    relay, (prompts, params) = Relay(*workers), asked(pair)
    ids = relay.submit(prompts, params, IDS, loras=["with"] * len(prompts))
    relay.run()
    found = [relay.result(each)[:2] for each in ids]
    assert not relay.local, "a request was prefilled here"
    assert [new for new, _ in found] == wanted[0][0]
    assert [tuple(lengths) for _, lengths in found] == wanted[0][1]
    for worker in workers:
        worker.close()


def test_a_digest_is_of_the_heads_adapter_too(fitting):
    pair, lora, without, _, _ = fitting
    target, draft = target_spec(pair.target), drafter_spec(pair.head, target_spec(pair.target).config)
    digests = [read_lora(each, target.params, draft.params).digest() for each in (lora, without)]
    assert digests[0] != digests[1]
    assert digests[1] == read_lora(lora, target.params).digest()


def test_what_cannot_be_beside_a_head_is_refused_by_name(fitting, tmp_path, caplog):
    pair, lora, without, _, _ = fitting
    later = {"enable_lora": True, "enable_draft_lora": True, "max_lora_rank": 4}

    def start(folder, **options):
        return build(pair, SHAPE, lora_modules={"it": str(folder)}, **options)

    other = copy_folder(without, tmp_path / "unknown")
    save_lora(other / "draft", pair.target, 4, 8.0, within=r"model\.layers\.1\.")
    refused(CheckpointError, lambda: start(other), str(other / "draft"), "draft head has no such module", "layers.1")
    mixed = copy_folder(without, tmp_path / "mixed")
    own, of_head = (load_file(each / "adapter_model.safetensors") for each in (without, lora / "draft"))
    save_file(own | of_head, mixed / "adapter_model.safetensors")
    refused(CheckpointError, lambda: start(mixed), "the model has no such module", "draft/")
    empty = copy_folder(without, tmp_path / "empty")
    (empty / "draft").mkdir()
    refused(CheckpointError, lambda: start(empty), str(empty / "draft"), "adapter_config.json")
    refused(ConfigError, lambda: build(pair, SHAPE, enable_draft_lora=True), "--enable-draft-lora", "--enable-lora")
    refused(ConfigError, lambda: build(pair, None, **later), "--enable-draft-lora", "a draft")
    ngram = {**later, "speculative_algorithm": "NGRAM", "speculative_num_steps": 2}
    refused(ConfigError, lambda: build(pair, None, **ngram), "--enable-draft-lora", "no weights")
    llm = build(pair, SHAPE, enable_lora=True, max_lora_rank=4)
    refused(ConfigError, lambda: llm.load_lora("it", lora), str(lora / "draft"), "--enable-draft-lora")
    llm.load_lora("it", without)
    refused(ConfigError, lambda: build(pair, SHAPE, **later).load_lora("it", lora), "rank 6", "--max-lora-rank 6")
    with caplog.at_level(logging.INFO):
        plain = build(pair, None, lora_modules={"it": str(lora)})
    assert f"{lora / 'draft'} is not read" in caplog.text
    assert tokens(plain.generate([[5, 6]], greedy(6), lora="it")) == tokens(
        llm.generate([[5, 6]], greedy(6), lora="it")
    )


@pytest.mark.parametrize("graphs", few_of(["auto", "sim"], 1))
def test_adapters_stay_beside_other_weights(fitting, tmp_path, graphs):
    """Those of target and head, in and out of slots: afterwards all is as of an engine that has begun with the new
    weights, a request in flight too; no prefix of before is found, and what an update refuses changes nothing."""
    pair, lora, without, _, _ = fitting
    new = Pair(save_weak_llama(tmp_path / "target", seed=8, strength=0.1), tmp_path / "head")
    save_copying_head(new.head, new.target, draft_vocab=211)
    options = {"enable_lora": True, "enable_draft_lora": True, "max_loras": 1, "max_cpu_loras": 3, "page_size": 4}
    options |= {"graphs": graphs, "lora_modules": {"with": str(lora), "without": str(without)}}
    names, fresh = ("with", None, "without", "with"), build(new, SHAPE, **options)
    want = [known(fresh.generate(*asked(pair), lora=name)) for name in names]
    llm = build(pair, SHAPE, **options)
    before = [known(llm.generate(*asked(pair), lora=name)) for name in names]
    refused(CheckpointError, lambda: llm.update_weights(lora), "config.json")
    prompts, long = asked(pair)[0][:1], [greedy(60, whole=True)]
    stream = llm.stream(prompts, long, lora="with")
    begun = next_and_hold(llm, stream, 3)
    llm.update_weights(new.target, new.head, in_flight="retract")
    last = [delta for delta in (begun, *stream) if delta.output is not None][-1].output
    assert last.finish_reason == "length"
    found = [llm.generate(*asked(pair), lora=name) for name in names]
    assert not any(output.metrics.num_cached_tokens for output in found[1])
    assert [known(each) for each in found] == want != before
    llm.update_weights(pair.target, pair.head)
    assert [known(llm.generate(*asked(pair), lora=name)) for name in names] == before
    llm.scheduler.check_integrity()
