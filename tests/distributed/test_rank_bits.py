"""`--exactness bits` with several ranks: what a request gets is what it gets alone and plainly on as many, to the bit.

Ranks are threads here; `test_worker_group.py` and `test_expert_group.py` have them in processes.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from support import expert_pairs
from support.bits import asked, bits
from support.engines import accept_lens, build
from support.grids import few_of
from support.tiny_models import Pair, save_random_experts, save_random_head, save_random_llama
from treetop.checkpoints.loader import LoadContext
from treetop.engine.startup import exact_ranks
from treetop.engine.startup.exact_ranks import sums_differ
from treetop.kernels.profile import Integers, profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.parallel import exchange
from treetop.parallel.exchange import Rendezvous
from treetop.types.errors import ConfigError
from treetop.weights import cpu_products
from treetop_debug.expert_ranks import expert_ranks_on_threads
from treetop_debug.ranks import MemoryGroup, ranks_on_threads

CPU, EPS = torch.device("cpu"), 1e-5
slow = partial(pytest.param, marks=pytest.mark.slow)
BITS = {"exactness": "bits", "dtype": "float32", "context_length": 192}
LENGTHS = [1, 17, 120, 125]
"""Outputs of the last two cross the end of attention's first block of 128 positions."""


def few(prompts):
    """One request of each kind, of twelve tokens."""
    return [replace(params, max_tokens=12) for params in asked(prompts)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Of so few tokens a head which knows nothing is often right; GPT-OSS has biases, sinks and windows."""
    folder = tmp_path_factory.mktemp("bits")
    llama = save_random_llama(folder / "llama", seed=8, vocab_size=12, num_attention_heads=4, num_key_value_heads=2)
    experts = save_random_experts(folder / "experts", "gpt_oss", seed=3, vocab_size=12)
    glm = expert_pairs.save_glm_with_mtp(folder / "glm")
    return {
        "llama": Pair(llama, save_random_head(folder / "llama-head", llama, draft_vocab=8, seed=2)),
        "gpt_oss": Pair(experts, save_random_head(folder / "experts-head", experts, draft_vocab=8, seed=2)),
        "glm": Pair(glm, glm),
    }


def serve(pair, shape, **options):
    """By ranks that share a model."""
    with ranks_on_threads():
        llm = build(pair, shape, **{**BITS, "tp_size": 2, "max_running_requests": 1, **options})
        try:
            prompts = pair.prompts(LENGTHS)
            outputs = llm.generate(prompts, few(prompts))
            llm.scheduler.check_integrity()
            return outputs
        finally:
            llm.close()


def serve_by_experts(pair, shape, places, **options):
    """By ranks that share experts. places: the rank of each request."""
    with expert_ranks_on_threads():
        llm = expert_pairs.build(pair.target, shape, 2, **{**BITS, "max_running_requests": 1, **options})
        try:
            expert_pairs.send_to(llm._core.core, iter(places).__next__)
            prompts = pair.prompts(LENGTHS)
            return llm.generate(prompts, few(prompts))
        finally:
            llm.close()


@pytest.fixture(scope="module")
def plain(pairs):
    """Bits of plain decoding of one request at a time, by model and number of ranks."""
    made = {}

    def of(name, tp_size=2):
        if (name, tp_size) not in made:
            made[name, tp_size] = bits(serve(pairs[name], None, tp_size=tp_size))
        return made[name, tp_size]

    return of


@pytest.mark.parametrize(
    ("name", "shape", "ranks", "options"),
    few_of(
        [
            ("llama", None, 2, {"max_running_requests": 5, "chunked_prefill_size": 16}),
            ("llama", (1, 6, 7), 2, {"max_running_requests": 3, "chunked_prefill_size": 7, "overlap": True}),
            ("llama", (4, 5, 16), 2, {"max_running_requests": 5, "graphs": "sim", "check_level": 3}),
            slow("llama", (4, 5, 16), 4, {"max_running_requests": 3, "chunked_prefill_size": 33}),
            slow("gpt_oss", (4, 5, 16), 2, {"max_running_requests": 3, "chunked_prefill_size": 50}),
        ],
        2,
    ),
)
def test_a_tree_on_ranks_has_the_bits_of_plain_decoding_on_as_many(pairs, plain, *, name, shape, ranks, options):
    outputs = serve(pairs[name], shape, tp_size=ranks, **options)
    assert bits(outputs) == plain(name, ranks)
    if shape is not None:
        assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


def test_another_number_of_ranks_has_other_bits(plain):
    """Shares are sums of fewer terms: so the comparison sees what it is for."""
    assert plain("llama", 2) != plain("llama", 1)


@pytest.fixture(scope="module")
def by_experts(pairs):
    """Of plain decoding of one request at a time, all on the first rank, by `--tp-size`."""
    made = {}

    def of(tp_size):
        if tp_size not in made:
            made[tp_size] = bits(serve_by_experts(pairs["glm"], None, [0] * len(LENGTHS), tp_size=tp_size))
        return made[tp_size]

    return of


@pytest.mark.parametrize(
    ("shape", "places", "options"),
    few_of(
        [
            (None, [1, 0, 1, 1], {"max_running_requests": 3, "chunked_prefill_size": 16}),
            ((2, 3, 6), [0, 1, 1, 0], {"max_running_requests": 3, "graphs": "sim", "overlap": True}),
            slow((1, 3, 4), [0, 1, 1, 0], {"max_running_requests": 2, "tp_size": 2, "chunked_prefill_size": 50}),
        ],
        1,
    ),
)
def test_shared_experts_give_the_bits_of_plain_decoding_on_any_rank(pairs, by_experts, shape, places, options):
    """Beside other requests and none, also where each engine is a group of ranks."""
    outputs = serve_by_experts(pairs["glm"], shape, places, **options)
    assert bits(outputs) == by_experts(options.get("tp_size", 1))
    if shape is not None:
        assert sum(map(sum, accept_lens(outputs))) > 0, "nothing was accepted, so nothing was tested"


# ------------------------------------------------------------------------------------------------ sums, products


def on_ranks(tmp_path, size, work, **options):
    """What each rank gives of work(rank, parallel)."""

    def run(rank):
        return work(rank, MemoryGroup(Rendezvous(tmp_path / "meeting", rank, size), CPU, **options).parallel)

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(run, range(size))]


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (5, torch.bfloat16)])
def test_a_sum_is_that_of_rounded_shares_in_the_order_of_the_ranks(tmp_path, size, dtype):
    """Small ones, which are gathered, and large ones, which many ranks add up on their way; of shares in parts."""
    generator = torch.Generator().manual_seed(size)
    scales = torch.logspace(-3, 3, size)[:, None, None, None]
    large = exchange.SMALL // 128 // 5 * 5 + 5
    for rows in (1, 3, large):
        shares = torch.randn((size, 3, rows, 64), generator=generator) * scales
        x = torch.randn((rows, 64), generator=generator).to(dtype)
        sent = [(each[0] + each[1] + each[2]).to(dtype) for each in shares]
        want = sent[0].float()
        for each in sent[1:]:
            want = want + each.float()
        want = (x.float() + want).to(dtype)

        def work(rank, parallel, x=x, shares=shares):
            ops = Ops(OpContext(CPU, dtype, profile=profile_of("bits", CPU)), parallel=parallel)
            return ops.add(x, parallel.share(shares[rank])), len(parallel.sum(shares[rank]))

        for found, parts in on_ranks(tmp_path / f"{rows}", size, work, exact=dtype):
            assert torch.equal(found, want)
            assert parts == (1 if size > 3 and rows == large else size)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_find_a_sum_that_depends_on_its_rows(tmp_path, size):
    """All of them, also if only one adds otherwise, and the start of an engine is refused on all."""

    def work(rank, parallel, spoilt):
        ops = Ops(OpContext(CPU, torch.float32, profile=profile_of("bits", CPU)), parallel=parallel)
        if spoilt and rank == 1:
            real = parallel.share
            parallel.share = lambda parts: real(parts) * (1 + 2**-20 * (parts.shape[1] == 7))
        return sums_differ(ops, 48, EPS)

    assert on_ranks(tmp_path / "right", size, partial(work, spoilt=False), exact=torch.float32) == [None] * size
    assert on_ranks(tmp_path / "wrong", size, partial(work, spoilt=True), exact=torch.float32) == [7] * size


def test_sums_by_a_library_are_refused_by_name(pairs, monkeypatch):
    """As the engine starts, before weights are read."""
    monkeypatch.setattr(exact_ranks, "sums_differ", lambda ops, hidden, eps: 33)
    with pytest.raises(ConfigError, match=r"sums over ranks of 33 rows .* use --disable-custom-all-reduce or --exact"):
        serve(pairs["llama"], None)


def test_the_first_ranks_exact_products_hold_for_all(pairs, monkeypatch):
    """Whatever another has timed; what another cannot take is refused on all ranks."""
    taken, real = [], cpu_products._fastest_exact

    def otherwise(shape, times, threads, among):
        taken.append(real(shape, times, threads, among))
        return (cpu_products.Call.INTEGERS, 1) if len(taken) % 3 else taken[-1]

    monkeypatch.setattr(cpu_products, "found_once", lambda kind, made_for, find: find())  # no cache that they share
    monkeypatch.setattr(cpu_products, "_fastest_exact", otherwise)
    seen = []
    product = cpu_products.ChosenProduct.product

    def noted(self, *rest):
        seen.append((self.shape, self.calls[0], self.least))
        return product(self, *rest)

    monkeypatch.setattr(cpu_products.ChosenProduct, "product", noted)
    serve(pairs["llama"], None)
    exact = set(seen)
    assert len({shape for shape, *_ in exact}) == len(exact) > 0, "ranks took different products"
    monkeypatch.setattr("treetop.engine.startup.products.is_exact_from", lambda shape, call, least: False)
    with pytest.raises(ConfigError, match="exact on the first rank are not on another"):
        serve(pairs["llama"], None)


def test_ranks_whose_attention_has_other_sums_are_refused(tmp_path):
    """As where one rank's library has exact sums and another's has none."""

    def work(rank, parallel):
        profile = profile_of("bits", CPU, Integers(attention=rank == 1))
        place = LoadContext(torch.float32, CPU, 1, parallel=parallel, profile=profile)
        with pytest.raises(ConfigError, match=r"attention .* is not on another; use --exact-sums integers"):
            exact_ranks.check_ranks(SimpleNamespace(place=place))
        return True

    assert on_ranks(tmp_path, 2, work, exact=torch.float32) == [True] * 2
