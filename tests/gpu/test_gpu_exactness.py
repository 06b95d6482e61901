"""On a GPU: a tree changes no token. Backends, captured and eager rounds, shapes, pages, batches, a batch that drains.

float32 without TF32: equality by the design's rule (section 6): the first mismatch of a sequence is excused only by a
near tie of the target's logits, and more than one in 10^4 tokens fails; excused cases are printed. 16-bit: products of
different row counts round differently, so the margins of first mismatches are printed, and a margin that rounding
cannot explain fails.
"""

import pytest
import torch

from support.drain import Crossover, held_out, staggered, watch_rows
from support.engines import accept_lens, greedy, sampled, tokens
from support.gpu_pairs import HEAD, make
from treetop import LLM
from treetop.attention.capabilities import Need
from treetop.attention.registry import refusal
from treetop.bench.equality import equal_outputs
from treetop.kernels.gemm import lossless_weights
from treetop.weights import lossless

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MAX_TOKENS = 40
MEAN_TOLERANCE = {torch.bfloat16: 0.10, torch.float16: 0.05}
"""Of the mean accept length of a 16-bit run against float32's, relative; texts that part have different lengths."""
ROUNDINGS = 8
"""What a 16-bit mismatch may span, in roundings of the best logit; a wrong token is far outside."""

# (S, k, T), page size, rows, chunk, backend, graphs; each value of a column meets most of the others.
GRID = [
    ((5, 4, 16), 1, 8, 512, "triton", "auto"),
    ((5, 4, 16), 16, 3, 7, "triton", "off"),
    ((5, 4, 16), 64, 8, 64, "torch", "off"),
    ((3, 1, 4), 1, 3, 64, "triton", "off"),
    ((3, 1, 4), 16, 1, 512, "torch", "off"),
    ((3, 1, 4), 64, 8, 7, "triton", "auto"),
    ((5, 1, 6), 16, 8, 512, "triton", "auto"),
    ((5, 1, 6), 64, 3, 64, "triton", "off"),
    ((2, 3, 8), 1, 1, 7, "torch", "off"),
    ((2, 3, 8), 16, 8, 64, "triton", "auto"),
    ((2, 3, 8), 64, 3, 512, "triton", "auto"),
    ((8, 8, 32), 1, 3, 512, "triton", "auto"),
    ((8, 8, 32), 64, 8, 7, "triton", "off"),
    ((8, 2, 20), 16, 8, 64, "torch", "off"),
    ((1, 8, 9), 16, 8, 512, "triton", "auto"),
    ((6, 10, 60), 64, 3, 512, "triton", "auto"),
]


def assert_equal(plain, expected, got, capsys) -> None:
    """Equal by the rule; ties are printed."""
    equality = equal_outputs(plain, expected, got)
    if equality.margins:
        with capsys.disabled():
            print(f" [{equality.sentence()}] ", end="")
    assert equality.ok, equality.sentence()


@pytest.fixture(scope="module")
def plain() -> LLM:
    """Captured plain rounds on Triton, sixteen rows."""
    assert torch.get_float32_matmul_precision() == "highest"
    return make(None, max_running_requests=16)


@pytest.fixture(scope="module")
def prompts(plain) -> list[list[int]]:
    return held_out(plain, 12)


@pytest.fixture(scope="module")
def expected(plain, prompts):
    return plain.generate(prompts, greedy(MAX_TOKENS))


# ---------------------------------------------------------------------------------------------- float32


@pytest.mark.parametrize(("shape", "page", "rows", "chunk", "backend", "graphs"), GRID)
def test_a_tree_changes_no_token(plain, prompts, expected, capsys, *, shape, page, rows, chunk, backend, graphs):
    """Twelve prompts through `rows` rows give the tokens of plain decoding."""
    llm = make(
        shape=shape,
        page_size=page,
        max_running_requests=rows,
        chunked_prefill_size=chunk,
        attention_backend=backend,
        graphs=graphs,
    )
    got = llm.generate(prompts, greedy(MAX_TOKENS))
    llm.scheduler.check_integrity()
    assert_equal(plain, expected, got, capsys)
    assert sum(map(sum, accept_lens(got))) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize(("backend", "graphs"), [("triton", "auto"), ("triton", "off"), ("torch", "off")])
def test_every_batch_size_around_a_buckets_edge_gives_the_same_tokens(plain, prompts, capsys, *, backend, graphs):
    """Every bucket of sixteen rows, one below and one above; seventeen requests wait for a row (sgl-25512)."""
    llm = make(max_running_requests=16, attention_backend=backend, graphs=graphs)
    many = [*prompts, *(ids[:-1] for ids in prompts[-5:])]
    expected = plain.generate(many, greedy(16))
    edges = {edge + step for edge in llm.engine.layout.buckets for step in (-1, 0, 1)} - {0}
    assert edges == {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17}
    for batch in sorted(edges):
        assert_equal(plain, expected[:batch], llm.generate(many[:batch], greedy(16)), capsys)
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("draft", [HEAD, None], ids=["tree", "plain"])
@pytest.mark.parametrize("largest", [32, 8, 2])
def test_a_batch_draining_from_32_to_1_gives_the_tokens_of_small_batches(plain, capsys, *, largest, draft):
    """Eager above `largest` rows, captured below: buckets 32, 24, 16, 8, 4, 2, 1 (sgl-28569)."""
    prompts, params = held_out(plain, 32, longest=20), staggered(32, 2, 7)  # so short that one step takes them all
    expected = plain.generate(prompts, params)
    llm = make(draft, max_running_requests=32, chunked_prefill_size=4096)
    llm.engine.launcher = crossover = Crossover(llm.engine, largest)
    rows = watch_rows(llm)
    got = llm.generate(prompts, params)
    llm.scheduler.check_integrity()
    assert (rows[0], rows[-1]) == (32, 1)
    prefilled = {0}  # a captured prefill step is a round of no rows
    assert (crossover.launched["own"] | crossover.launched["eager"]) - prefilled == set(llm.engine.layout.buckets)
    assert crossover.launched["eager"] == {bucket for bucket in llm.engine.layout.buckets if bucket > largest}
    assert_equal(plain, expected, got, capsys)


def test_accepted_lengths_do_not_depend_on_backend_or_runner(prompts, capsys):
    """float32: every request's accepted lengths are equal; one of twelve may leave at a near tie of the draft."""
    runs = {}
    for backend, graphs in [("triton", "auto"), ("triton", "off"), ("torch", "off")]:
        llm = make(attention_backend=backend, graphs=graphs)
        runs[backend, graphs] = accept_lens(llm.generate(prompts, greedy(MAX_TOKENS)))
    first = runs["triton", "auto"]
    for name, other in runs.items():
        differ = [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
        with capsys.disabled():
            print(f" [{name}: mean a + 1 {mean(other):.3f}, requests that differ {differ}] ", end="")
        assert len(differ) <= 1
        assert mean(other) == pytest.approx(mean(first), rel=0.01)


def test_sampled_tokens_follow_the_seed_whatever_the_tree_and_the_backend(plain, prompts):
    """The uniform depends on seed and position alone: captured trees, eager torch and plain rounds draw the same."""
    params = [sampled(seed, 24, temperature=0.8, top_p=0.9 if seed % 2 else 1.0) for seed in range(len(prompts))]
    expected = tokens(plain.generate(prompts, params))
    for options in ({}, {"shape": (3, 1, 4)}, {"attention_backend": "torch", "graphs": "off"}):
        got = tokens(make(**options).generate(prompts, params))
        assert sum(a != b for a, b in zip(got, expected, strict=True)) <= 1, "a uniform may fall on an edge once"


# ---------------------------------------------------------------------------------------------- 16 bits


@pytest.fixture(scope="module")
def float32_mean(prompts) -> float:
    return mean(accept_lens(make().generate(prompts, greedy(MAX_TOKENS))))


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["triton", "torch", "fa3", "flashinfer", "fa4"])
def test_in_16_bits_only_roundings_may_differ(prompts, float32_mean, capsys, *, backend, dtype, graphs):
    """Plain against a tree, one dtype and backend: margins of first mismatches; accept length near float32's."""
    if (problem := refusal(backend, Need(dtype, torch.device("cuda")))) is not None:
        pytest.skip(f"{backend}: {problem.reason}")
    options = {"dtype": str(dtype).removeprefix("torch."), "attention_backend": backend, "graphs": graphs}
    plain, llm = make(None, **options), make(**options)
    check_16_bits(plain, llm, prompts, float32_mean, dtype, capsys)


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_with_compressed_weights_only_roundings_may_differ(prompts, float32_mean, monkeypatch, capsys, *, graphs):
    """Against plain decoding with whole weights, a row at a time: a tree of 16 nodes is what the kernel takes.

    The embedded pair's weights count as worth it.
    """
    monkeypatch.setattr(lossless, "_WORTH_PARAMETERS", 0)
    lossless.offers.cache_clear()
    if (problem := lossless.why_not_compressed(torch.device("cuda"), torch.bfloat16)) is not None:
        pytest.skip(problem)
    taken = rows_of_compressed_products(monkeypatch)
    try:
        options = {"dtype": "bfloat16", "graphs": graphs}
        plain = make(None, compress_weights=False, **options)
        assert not taken
        llm = make(compress_weights=True, max_running_requests=1, **options)
        assert llm.engine.memory.budget.copies > 0
        check_16_bits(plain, llm, prompts, float32_mean, torch.bfloat16, capsys)
        assert {16, 4, 6} <= set(taken)  # verify, draft, extend
    finally:
        lossless.offers.cache_clear()


def rows_of_compressed_products(monkeypatch) -> list[int]:
    """The rows of every product with a compressed weight that is launched or captured from now on."""
    taken: list[int] = []

    def counted(x, *args):
        taken.append(len(x))
        return lossless_weights.lossless_gemm(x, *args)

    monkeypatch.setattr("treetop.weights.linear.lossless_gemm", counted)
    return taken


def check_16_bits(plain, llm, prompts, float32_mean, dtype, capsys) -> None:
    expected = plain.generate(prompts, greedy(MAX_TOKENS))
    got = llm.generate(prompts, greedy(MAX_TOKENS))
    llm.scheduler.check_integrity()
    margins = [m for want, have in zip(expected, got, strict=True) if (m := margin(plain, want, have)) is not None]
    lens = mean(accept_lens(got))
    with capsys.disabled():
        shown = ", ".join(f"{m:.4f}" for m in margins)
        print(f" [{len(margins)} of {len(got)} sequences leave, margins {shown or '-'}, a + 1 {lens:.3f}] ", end="")
    assert all(m <= ROUNDINGS * torch.finfo(dtype).eps for m in margins)
    assert lens == pytest.approx(float32_mean, rel=MEAN_TOLERANCE[dtype])


def margin(plain, want, have) -> float | None:
    """How far below the best the logits at a first mismatch lie, over max(1, |best|); None if there is no mismatch."""
    pairs = zip(want.token_ids, have.token_ids, strict=True)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return None
    logits = plain.next_logits([*want.prompt_token_ids, *want.token_ids[:at]]).to(torch.float64)
    best = float(logits.max())
    lowest = min(float(logits[want.token_ids[at]]), float(logits[have.token_ids[at]]))
    return (best - lowest) / max(1.0, abs(best))


def mean(lens) -> float:
    """Mean a + 1 of all rounds."""
    every = [a for each in lens for a in each]
    return 1 + sum(every) / len(every)
