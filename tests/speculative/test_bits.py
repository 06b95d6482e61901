"""`--exactness bits`, on a CPU in float32: speculative decoding has the logits of plain decoding, to the bit."""

from itertools import product

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from support.bits import asked, bits
from support.engines import accept_lens, build
from support.examples import EVERYTHING
from support.families import FAMILIES
from support.grids import few_of
from support.handing import IDS, Relay, Worker
from support.lookups import lookup
from support.mtp_layers import mtp_tensors
from support.recurrences import NAMES
from support.tiny_models import Pair, copy_folder, llama_config, save_random, save_random_experts, save_random_head
from treetop import SamplingParams
from treetop.attention import exact_backend
from treetop.attention.exact_backend import ExactBackend
from treetop.attention.integer_sums import IntegerSums
from treetop.doctor.conformance import RandomShapes
from treetop.engine.startup import exactness
from treetop.types.errors import ConfigError
from treetop.weights import cpu_products
from treetop.weights.cpu_products import Call
from treetop_debug.ranks import ranks_on_threads

BITS = {"exactness": "bits", "dtype": "float32"}
LENGTHS = [1, 4, 17, 100, 121, 126, 128, 140]
"""Outputs of these cross the end of attention's first block of 128 positions, or begin behind it."""
SHAPES = [(1, 6, 7), (4, 5, 16), (5, 4, 16), (8, 5, 60), (2, 3, 5), (3, 2, 9)]


def serve(pair, shape, lengths=LENGTHS, make=build, **options):
    llm = make(pair, shape, **{**BITS, "context_length": 256, "max_running_requests": 1, **options})
    prompts = pair.prompts(lengths)
    outputs = llm.generate(prompts, asked(prompts))
    llm.scheduler.check_integrity()
    return llm, outputs


@pytest.fixture(scope="module")
def plain(strong_pair):
    return bits(serve(strong_pair, None)[1])


CASES = [
    (None, 8, 16, "auto"),
    (None, 3, 333, "sim"),
    *(
        (shape, batch, chunk, "auto")
        for shape, batch, chunk in zip(SHAPES, (3, 8, 1, 3, 8, 1), (333, 16, 7) * 2, strict=True)
    ),
    ((4, 5, 16), 33, 512, "sim"),
]


@pytest.mark.parametrize(("shape", "batch", "chunk", "graphs"), few_of(CASES, 2, 5, 8))
def test_every_logit_is_that_of_plain_decoding(strong_pair, plain, *, shape, batch, chunk, graphs):
    """Greedy, sampled and changed logits, whatever the tree, the batch, the chunks and the launcher."""
    options = {"max_running_requests": batch, "chunked_prefill_size": chunk, "graphs": graphs}
    options["check_level"] = 3 if graphs == "sim" else 1
    _, outputs = serve(strong_pair, shape, **options)
    assert bits(outputs) == plain
    if shape is not None:
        assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["auto", "sim"])
@pytest.mark.parametrize(("shape", "batch", "chunk"), list(product([None, *SHAPES], (1, 3, 8, 33), (16, 333, 512))))
def test_the_whole_matrix_of_shapes_batches_and_chunks(strong_pair, plain, *, shape, batch, chunk, graphs):
    lengths = LENGTHS * (1 if batch < 33 else 5)
    _, outputs = serve(
        strong_pair, shape, lengths, max_running_requests=batch, chunked_prefill_size=chunk, graphs=graphs
    )
    if batch == 33:  # prompts are other ones: alone against all at once
        assert bits(outputs) == bits(serve(strong_pair, None, lengths)[1])
    else:
        assert bits(outputs) == plain


SLOW = pytest.mark.slow


@pytest.mark.parametrize("sums", [pytest.param("packed", marks=SLOW), pytest.param("linear", marks=SLOW), "integers"])
def test_whosever_sums_they_are_a_tree_changes_no_bit(strong_pair, plain, sums):
    """Each that `--exact-sums` may choose, forced: where the library's are not exact it is refused by name."""
    options, lengths = {"exact_sums": sums, "chunked_prefill_size": 16}, [17, 121]
    try:
        want = bits(serve(strong_pair, None, lengths, exact_sums=sums)[1])
    except ConfigError as error:
        assert sums != "integers"
        pytest.skip(f"not exact on this CPU: {error}")
    _, outputs = serve(strong_pair, (4, 5, 16), lengths, max_running_requests=3, graphs="sim", **options)
    assert bits(outputs) == want
    assert sum(map(sum, accept_lens(outputs))) > 0
    assert sums != "integers" or want != [plain[LENGTHS.index(length)] for length in lengths], "they are the library's"


@pytest.fixture
def library_without_chains(monkeypatch, tmp_path):
    """A CPU, met for the first time, whose library gives no exact attention, and no exact `F.linear` either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(exact_backend, "problem", lambda *_: "attention's scores with heads of 16")
    monkeypatch.setattr(cpu_products, "_least_rows", lambda shape, call, threads: 1 if call is Call.PACKED else None)


def test_without_a_setting_that_helps_attention_has_sums_of_integers(strong_pair, library_without_chains, monkeypatch):
    """As on a CPU whose library has no mode: products are still the library's where these are exact."""
    monkeypatch.setattr(exactness, "remedy", lambda suffices: None)
    want = bits(serve(strong_pair, None, [17])[1])
    llm, outputs = serve(strong_pair, (4, 5, 16), [17], max_running_requests=3)
    assert isinstance(llm.engine.runner.backend._sums, IntegerSums)
    assert {each.calls[0] for each in llm.engine.products if each.exact} <= {Call.PACKED, Call.INTEGERS}
    assert bits(outputs) == want


def test_where_a_setting_would_help_it_is_refused_and_names_both_ways(strong_pair, library_without_chains, monkeypatch):
    """Else the bits of a process would depend on what it did before."""
    monkeypatch.setattr(exactness, "remedy", lambda suffices: "start with a mode")
    words = "attention's scores .* depend on the batch; start with a mode, or use --exact-sums integers"
    for sums in ("auto", "packed"):
        with pytest.raises(ConfigError, match=words):
            build(strong_pair, None, **BITS, exact_sums=sums)
    build(strong_pair, None, **BITS, exact_sums="integers").close()


def test_without_it_logits_differ(strong_pair, plain):
    """The comparison sees what it is for: by default float32 rounds otherwise with the number of rows."""
    _, outputs = serve(strong_pair, (4, 5, 16), max_running_requests=3, exactness="ties")
    assert bits(outputs) != plain


def test_a_retraction_changes_no_bit(strong_pair, plain):
    """What was decoded is prefilled again, from its tokens: K/V and logits are the same."""
    llm, outputs = serve(strong_pair, (4, 5, 16), max_running_requests=8, max_total_tokens=512, page_size=4)
    assert llm.scheduler.num_retractions > 0
    assert bits(outputs) == plain


@pytest.mark.slow
def test_a_prefix_from_the_cache_changes_no_bit(strong_pair, plain):
    """Of a prompt, and of a prompt and output that other trees have decoded."""
    llm, outputs = serve(strong_pair, (5, 4, 16), max_running_requests=4, page_size=4)
    prompts = strong_pair.prompts(LENGTHS)
    assert bits(llm.generate(prompts, asked(prompts))) == bits(outputs) == plain
    longer = [[*prompt, *output.token_ids[:-3]] for prompt, output in zip(prompts, outputs, strict=True)]
    fresh = build(strong_pair, None, **BITS, max_running_requests=1)
    assert bits(llm.generate(longer, asked(longer))) == bits(fresh.generate(longer, asked(longer)))


def test_logprobs_of_a_prefill_are_those_of_the_tokens_as_they_were_drawn(strong_pair):
    """What a trainer recomputes of prompt and output equals what the sampler saw, to the bit."""
    _, outputs = serve(strong_pair, (4, 5, 16), max_running_requests=8)
    whole = [[*o.prompt_token_ids, *o.token_ids] for o in outputs]
    trainer = build(strong_pair, None, **BITS, max_running_requests=3, chunked_prefill_size=77)
    again = trainer.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for before, after in zip(outputs, again, strict=True):
        recomputed = [each.logprob for each in after.prompt_logprobs[len(before.prompt_token_ids) :]]
        assert recomputed == [each.logprob for each in before.logprobs]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Experts, alone and with windows and sinks."""
    pairs = {}
    for name in ("qwen3_moe", "gpt_oss"):
        folder = tmp_path_factory.mktemp(name)
        target = save_random_experts(folder / "target", name, seed=3, vocab_size=12)
        pairs[name] = Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sums"),
    few_of(
        [
            ("qwen3_moe", "auto"),
            ("gpt_oss", "auto"),
            pytest.param("gpt_oss", "integers", marks=SLOW),
        ],
        1,
    ),
)
def test_experts_windows_and_sinks_change_no_bit(families, name, sums):
    """Tokens of an expert vary with the batch; a window ends anywhere in a block."""
    pair, lengths = families[name], [9, 30, 125]
    want = bits(serve(pair, None, lengths, exact_sums=sums)[1])
    for shape, batch, chunk in [(None, 3, 16), ((4, 5, 16), 2, 333)]:
        options = {"graphs": "sim", "check_level": 3} if shape else {}
        sizes = {"max_running_requests": batch, "chunked_prefill_size": chunk}
        _, outputs = serve(pair, shape, lengths, exact_sums=sums, **sizes, **options)
        assert bits(outputs) == want, (shape, batch, chunk)


@pytest.mark.parametrize("family", few_of(NAMES, 0))
def test_states_of_rows_change_no_bit(family, tmp_path):
    """A state has the bits of its tokens, whatever brought them in: of every kind, beside experts of every kind."""
    exact = {**BITS, "context_length": 64}
    pair = FAMILIES[family].save(tmp_path).pair
    prompts = pair.prompts([17, 12, 15])
    llm = build(pair, None, **exact, max_running_requests=1, chunked_prefill_size=64, disable_radix_cache=True)
    want, hits = bits(llm.generate(prompts, asked(prompts))), 0
    for shape, batch, chunk, options in (
        ((4, 5, 16), 2, 333, {"graphs": "sim", "state_checkpoint_memory": 0.05}),
        ((2, 3, 5), 3, 5, {"max_total_tokens": 80}),
    ):
        sizes = {"max_running_requests": batch, "chunked_prefill_size": chunk, "state_checkpoint_every": 8}
        llm = build(pair, shape, **exact, page_size=4, **sizes, **options)
        assert bits(llm.generate(prompts, asked(prompts))) == want, (shape, batch, chunk)
        again = llm.generate(prompts[:2], asked(prompts[:2]))
        assert bits(again) == want[:2], "from the prefix cache"
        hits += sum(output.metrics.num_cached_tokens for output in again)
    assert hits
    assert llm.scheduler.num_retractions
    loose = build(pair, (4, 5, 16), dtype="float32", context_length=64).generate(prompts[:1], asked(prompts[:1]))
    assert bits(loose) != want[:1], "the comparison sees nothing"


@pytest.mark.parametrize(
    ("family", "more"),
    [
        pytest.param("glm 5", {}, marks=pytest.mark.slow),
        pytest.param("deepseek v32", {}, marks=pytest.mark.slow),
        pytest.param("glm 5.2", {"kv_cache_dtype": "fp8_e4m3"}, marks=pytest.mark.slow),
        pytest.param("glm 5", {"exact_sums": "integers"}, marks=pytest.mark.slow),
        pytest.param("glm 5", {"tp_size": 2}, marks=pytest.mark.slow),
        ("deepseek v3", {"kv_cache_dtype": "fp8_e4m3"}),
        pytest.param("deepseek v3", {"exact_sums": "integers"}, marks=pytest.mark.slow),
        pytest.param("deepseek v2 lite", {}, marks=pytest.mark.slow),
        pytest.param("deepseek v3", {"tp_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_compressed_attention_changes_no_bit(tmp_path, family, more):
    """A plane that is key and value of all heads, in FP8 and of two ranks too, retracted or from the prefix cache."""
    lengths = [1, 30, 100, 121]
    pair = FAMILIES[family].save(tmp_path).pair
    prompts, want = pair.prompts(lengths), None
    with ranks_on_threads():
        for shape, batch, chunk, options in (
            (None, 1, 512, {"disable_radix_cache": True}),
            *([(None, 4, 16, {})] if EVERYTHING else []),
            ((4, 5, 16), 2, 333, {"graphs": "sim", "check_level": 3}),
            ((2, 3, 5), 4, 7, {"max_total_tokens": 204, "page_size": 4}),
        ):
            sizes = {"max_running_requests": batch, "chunked_prefill_size": chunk, "context_length": 200}
            llm = build(pair, shape, **BITS, **sizes, **{**options, **more})
            outputs = llm.generate(prompts, asked(prompts))
            want = want or bits(outputs)
            assert bits(outputs) == want, (shape, batch, chunk)
            if "disable_radix_cache" not in options:
                assert bits(llm.generate(prompts, asked(prompts))) == want, "from the prefix cache"
            assert "max_total_tokens" not in options or llm.scheduler.num_retractions > 0
            llm.close()
        ties = {**BITS, "exactness": "ties"}
        llm = build(pair, (4, 5, 16), **ties, context_length=200, **more)
        assert bits(llm.generate(prompts, asked(prompts))) != want, "the comparison sees nothing"
        llm.close()


def test_keys_that_an_indexer_chooses_change_no_bit(tmp_path, monkeypatch):
    """GLM-5: what a query attends to is chosen by scores that are its own, in a tree as in a prefill by chunks."""
    pair, seen, choose = FAMILIES["glm 5"].save(tmp_path).pair, [], ExactBackend.choose

    def noted(self, query, kv, plan, tail):
        chosen = choose(self, query, kv, plan, tail)
        seen.append(bool((chosen.sum(dim=2) < (plan.bias == 0).sum(dim=2)).any()))
        return chosen

    want = bits(serve(pair, None, [17, 30], context_length=64)[1])
    monkeypatch.setattr(ExactBackend, "choose", noted)
    sizes = {"context_length": 64, "max_running_requests": 2, "chunked_prefill_size": 7}
    _, outputs = serve(pair, (4, 5, 16), [17, 30], **sizes)
    assert bits(outputs) == want
    assert any(seen), "all keys were chosen"


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_the_bits_of_plain_decoding(tmp_path, family):
    """Gates, norms, scales, routers and heads of every kind that there is a tiny model of."""
    pair = FAMILIES[family].save(tmp_path).pair
    want = bits(serve(pair, None, [1, 9, 30], context_length=None)[1])
    _, outputs = serve(pair, (4, 5, 16), [1, 9, 30], context_length=None, max_running_requests=3)
    assert bits(outputs) == want


@pytest.mark.slow
def test_shapes_that_switch_change_no_bit(strong_pair, plain):
    """Plain rounds, chains and trees in turn, with draft extends that wait."""
    options = {"speculative_policy": "auto", "speculative_max_deferred": 4, "max_running_requests": 8}
    llm = build(strong_pair, (4, 5, 16), **BITS, context_length=256, **options)
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes, 0, loses=True)
    prompts = strong_pair.prompts(LENGTHS)
    assert bits(llm.generate(prompts, asked(prompts))) == plain
    assert len(set(llm.scheduler.policy.chosen)) > 1


def test_mtp_layers_change_no_bit(tmp_path):
    """MiMo: a layer of the target's own folder drafts."""
    config = Qwen2Config(**{**llama_config().to_dict(), "model_type": "qwen2", "use_sliding_window": False})
    alone = save_random(Qwen2ForCausalLM, config, tmp_path / "alone", 7)
    mimo = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    pair = Pair(copy_folder(alone, tmp_path / "both", tensors=mtp_tensors("MiMo"), **mimo), alone)
    want = bits(serve(pair, None, [1, 30, 125])[1])
    options = {"speculative_algorithm": "MTP", "max_running_requests": 3}
    _, outputs = serve(pair, (2, 3, 6), [1, 30, 125], make=lookup, **options)
    assert bits(outputs) == want


def test_a_hand_over_changes_no_bit(strong_pair, plain):
    """From a worker whose pages have 8 tokens, prefilled in chunks, to one whose pages have 2; greedy and sampled."""
    options = {**BITS, "context_length": 256, "max_running_requests": 4, "chunked_prefill_size": 32}
    workers = [Worker(strong_pair, (4, 5, 16), **{**options, "page_size": size}) for size in (8, 2)]
    relay, prompts = Relay(*workers, 7), strong_pair.prompts(LENGTHS)
    ids = relay.submit(prompts, asked(prompts), IDS)
    relay.run()
    assert not relay.local, "a request was prefilled here"
    results = [relay.result(each) for each in ids]
    assert [list(tokens) for tokens, _, _ in results] == [list(tokens) for tokens, _ in plain]
    logprobs = [[each.logprob.hex() for each in logprobs] for _, _, logprobs in results]
    assert logprobs == [[logprob for logprob, _ in each] for _, each in plain]


@pytest.mark.slow
def test_lookups_change_no_bit(strong_pair):
    want = bits(serve(strong_pair, None)[1])
    _, outputs = serve(strong_pair, (2, 4, 9), make=lookup, max_running_requests=8)
    assert bits(outputs) == want


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float64"}, "it is built for float32"),
        ({"attention_backend": "triton"}, "attention backend triton is not exact"),
    ],
)
def test_where_it_cannot_be_it_is_refused_by_name(strong_pair, options, words):
    with pytest.raises(ConfigError, match=words):
        build(strong_pair, (4, 5, 16), **{**BITS, **options})


def test_too_wide_a_tree_is_refused(strong_pair):
    with pytest.raises(ConfigError, match="a tree may have 64 nodes; lower --speculative-num-draft-tokens"):
        build(strong_pair, (8, 5, 65), **BITS)


@pytest.mark.slow
def test_tokens_of_many_are_those_of_one(strong_pair):
    """33 requests at once; some of them alone and plainly."""
    lengths = [1 + 3 * i for i in range(33)]
    _, together = serve(strong_pair, (4, 5, 16), lengths, max_running_requests=33)
    prompts, some = strong_pair.prompts(lengths), slice(0, None, 8)
    alone = build(strong_pair, None, **BITS, max_running_requests=1)
    assert bits(together)[some] == bits(alone.generate(prompts[some], asked(prompts)[some]))
