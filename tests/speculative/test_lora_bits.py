"""`--exactness bits` with adapters, on a CPU: a row has its bits alone, beside rows of eight, and along trees."""

import pytest
import torch

from support.bits import bits
from support.engines import accept_lens, build
from support.grids import few_of
from support.loras import EVERY, save_lora
from treetop import SamplingParams
from treetop.engine.startup.operation_probes import adapter_cases
from treetop.exact.probe import BitProbe
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.models.registry import target_spec
from treetop_debug.ranks import ranks_on_threads

BITS = {"exactness": "bits", "dtype": "float32", "context_length": 160}
CPU = torch.device("cpu")
PARAMS = [
    SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1, seed=4, temperature=1.0, top_p=0.9),
]
ALONE = (None, "a0", "a3")
"""Of which an engine is made that has nothing else: the tables of the others have more ranks."""


@pytest.fixture(scope="module")
def adapters(strong_pair, tmp_path_factory):
    """Eight, by name: ranks up to three blocks of a product, all modules and some."""
    folder, made = tmp_path_factory.mktemp("adapters"), {}
    for i in range(8):
        kinds = EVERY if i % 2 else ("q_proj", "v_proj", "down_proj")
        rank = (1, 4, 16, 40)[i % 4]
        made[f"a{i}"] = str(save_lora(folder / f"a{i}", strong_pair.target, rank, rank / 2, i, kinds))
    return made


def asked(pair):
    """The first ends inside attention's first block, the second behind it."""
    return pair.prompts([20, 121]), PARAMS


@pytest.fixture(scope="module", params=few_of(["auto", "integers"], 0))
def wanted(strong_pair, adapters, request):
    """The sums, and by adapter's name the bits of a request alone, decoded plainly."""
    prompts, params = asked(strong_pair)
    found = {}
    options = {**BITS, "max_running_requests": 1, "exact_sums": request.param}
    for name in ALONE:
        own = {} if name is None else {"lora_modules": {name: adapters[name]}}
        llm = build(strong_pair, None, **options, **own)
        found[name] = bits(llm.generate(prompts, params, lora=name))
        llm.close()
    llm = build(strong_pair, None, **options, lora_modules=adapters)
    found |= {name: bits(llm.generate(prompts, params, lora=name)) for name in adapters if name not in found}
    llm.close()
    assert len({str(each) for each in found.values()}) == len(found)
    return request.param, found


def together(llm, pair, names):
    """All requests of all names in one batch: by name, and what was accepted."""
    prompts, params = asked(pair)
    requests = [each for name in names for each in llm._asked(prompts, params, None, name)]
    outputs = {delta.index: delta.output for delta in llm._run(requests) if delta.output is not None}
    whole = [outputs[index] for index in range(len(requests))]
    each = {name: bits(whole[2 * at : 2 * at + 2]) for at, name in enumerate(names)}
    return each, sum(map(sum, accept_lens(whole)))


OPTIONS = [
    ((4, 5, 16), {"max_running_requests": 18, "graphs": "sim", "check_level": 3}),
    (None, {"max_running_requests": 18, "chunked_prefill_size": 16}),
    ((2, 3, 5), {"max_running_requests": 5, "enable_lora": True, "max_loras": 8, "max_lora_rank": 64}),
    ((4, 5, 16), {"max_running_requests": 4, "mixed_chunk": "on", "chunked_prefill_size": 32}),
]


@pytest.mark.parametrize(("shape", "options"), few_of(OPTIONS, 0))
def test_a_row_with_an_adapter_has_its_bits_in_any_company(strong_pair, adapters, wanted, shape, options):
    """Beside rows of seven other adapters and of none, and those are what they are alone."""
    sums, want = wanted
    llm = build(strong_pair, shape, **{**BITS, "exact_sums": sums}, lora_modules=adapters, **options)
    got, accepted = together(llm, strong_pair, list(want))
    llm.scheduler.check_integrity()
    llm.close()
    assert got == want
    assert shape is None or accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.slow
def test_ranks_share_adapters_and_change_no_bit(strong_pair, adapters):
    """Of two, each with its part of the factors; their shares are one sum."""
    names = [None, *adapters]
    with ranks_on_threads():
        llm = build(strong_pair, None, **BITS, lora_modules=adapters, max_running_requests=1, tp_size=2)
        want, _ = together(llm, strong_pair, names)
        llm.close()
        llm = build(strong_pair, (4, 5, 16), **BITS, lora_modules=adapters, max_running_requests=18, tp_size=2)
        got, accepted = together(llm, strong_pair, names)
        llm.close()
    assert got == want
    assert accepted > 0


def test_with_products_of_whole_batches_bits_differ(strong_pair, adapters, wanted, monkeypatch):
    """The comparison sees what it is for: what adapters add, as `ties` has it."""
    real = Ops.__init__

    def made(self, *given):
        real(self, *given)
        for name in ("shrink", "expand", "expand_gated"):
            vars(self)[name] = getattr(Ops, name).reference

    monkeypatch.setattr(Ops, "__init__", made)
    sums, want = wanted
    llm = build(strong_pair, None, **{**BITS, "exact_sums": sums}, lora_modules=adapters, max_running_requests=18)
    got, _ = together(llm, strong_pair, list(want))
    llm.close()
    assert got != want
    assert got[None] == want[None], "rows without one are not concerned"


def test_what_adapters_add_is_probed_by_its_name(strong_pair):
    """As a GPU's start does, here by what a CPU has: at some number of rows, and of several tokens of a row."""
    params = target_spec(strong_pair.target).params
    ops = Ops(OpContext(CPU, torch.float32, profile=profile_of("bits", CPU)))
    probe = BitProbe(lambda generator: adapter_cases(ops, params, 32, generator), (1, 5, 20), 40, 0, torch.float32, CPU)
    names = {name for name, _ in probe.run()}
    assert {"what adapters add to qkv", "what adapters add to gate_up", "what adapters add to down"} <= names
    assert probe.problem() is None
    real = ops.shrink
    for spoilt, name in ((lambda x: len(x) == 5, "of 5 rows"), (lambda x: x.shape[1] > 1, ", prefilled as in a round")):
        vars(ops)["shrink"] = lambda x, *given, spoilt=spoilt: real(x, *given) * (1 + spoilt(x) / 64)
        assert name in probe.problem()
    assert not list(adapter_cases(ops, params, 0, torch.Generator()))
