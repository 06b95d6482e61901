"""Adapters on an NVIDIA GPU: captured rounds read each row's from buffers, beside plain and packed weights."""

from pathlib import Path

import pytest
import torch

from support.bits import asked, bits
from support.engines import accept_lens, build, greedy, tokens
from support.loras import EVERY, merged, save_lora
from support.quantized import fp8_blocks, quantized
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop.engine.startup.operation_probes import adapter_cases
from treetop.exact.probe import BitProbe
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.models.registry import target_spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPE = (4, 3, 12)
PRESET = Path(__file__).parents[2] / "benchmarks" / "presets" / "llama-3.1-8b"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    target = save_random_llama(folder / "target", seed=8, vocab_size=12, intermediate_size=128)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=2))


@pytest.fixture(scope="module")
def adapters(pair, tmp_path_factory):
    """Eight: name, folder, and the scale of its products."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for i in range(8):
        kinds = EVERY if i % 2 == 0 else ("q_proj", "v_proj", "down_proj")
        rank = (8, 16, 64)[i % 3]
        made.append((f"a{i}", save_lora(folder / f"a{i}", pair.target, rank, 2.0 * rank, i, kinds), 2.0))
    return made


def accepted(outputs) -> float:
    """Drafts a round."""
    lengths = [length for own in accept_lens(outputs) for length in own]
    return sum(lengths) / len(lengths)


def answers(pair, adapters, names, prompts, params, **options):
    """Of all names in one batch: by name, the tokens of each prompt."""
    modules = {name: str(folder) for name, folder, _ in adapters}
    llm = build(pair, SHAPE, device="cuda", lora_modules=modules, max_running_requests=32, **options)
    streams = [(name, llm.stream(prompts, params, lora=name)) for name in names]
    begun = [(name, [next(stream)], stream) for name, stream in streams]
    found = {}
    for name, first, stream in begun:
        outputs = {d.index: d.output.token_ids for d in (*first, *stream) if d.output is not None}
        found[name] = [outputs[index] for index in sorted(outputs)]
    llm.close()
    return found


def test_float32_answers_are_those_of_merged_weights(pair, adapters, tmp_path):
    """Captured rounds of trees, all adapters and none in one batch."""
    prompts, params = pair.prompts([5, 41, 17], seed=2), greedy(24)
    got = answers(pair, adapters, [None, *(name for name, _, _ in adapters)], prompts, params, dtype="float32")
    for name, folder, scale in [(None, None, 0), *adapters]:
        whole = pair.target if name is None else merged(tmp_path / name, pair.target, folder, scale)
        llm = build(Pair(whole, None), None, device="cuda", dtype="float32")
        assert got[name] == tokens(llm.generate(prompts, params)), name
        llm.close()


@pytest.mark.parametrize("packed", [False, True])
def test_captured_rounds_equal_eager_ones(pair, adapters, tmp_path, packed):
    """bfloat16: the same kernels on the same numbers; beside packed weights, too. With "off" prompts are not packed, so
    that sums are of other rows.
    """
    target = pair.target
    options = {"dtype": "bfloat16", "overlap": False, "prefill_graph_max_tokens": 0}
    if packed:
        target, _ = quantized(pair.target, tmp_path / "target", fp8_blocks(32, 64))
    prompts, params = pair.prompts([5, 41], seed=2), greedy(24)
    names, own = [None, *(name for name, _, _ in adapters)], Pair(target, pair.head)
    found = [answers(own, adapters, names, prompts, params, graphs=graphs, **options) for graphs in ("auto", "sim")]
    assert found[0] == found[1]
    assert len({str(each) for each in found[0].values()}) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [16, 64])
def test_what_adapters_add_has_a_rows_own_bits_at_any_number_of_rows(dtype, rank):
    """At the widths of Llama-3.1-8B; of a row's only token and of one of several, as a start probes it."""
    gpu = torch.device("cuda")
    ops, params = Ops(OpContext(gpu, dtype, profile=profile_of("bits", gpu))), target_spec(PRESET).params
    counts = (1, 2, 3, 5, 16, 17, 64, 65, 200)
    found = dict(BitProbe(lambda made: adapter_cases(ops, params, rank, made), counts, 256, 1, dtype, gpu).run())
    assert "what adapters add to gate_up" in found
    assert not [name for name, differs in found.items() if differs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_with_bits_a_row_is_what_it_is_alone_and_plainly(pair, adapters, dtype):
    """All adapters and none in one batch, captured and eager, along trees; alone without a draft."""
    prompts = pair.prompts([5, 41, 130, 17], seed=2)
    params, names = asked(prompts), [None, *(name for name, _, _ in adapters)]
    options = {"device": "cuda", "dtype": dtype, "exactness": "bits", "context_length": 256}
    options["lora_modules"] = {name: str(folder) for name, folder, _ in adapters}
    llm = build(pair, None, **options, max_running_requests=1)
    want = [bits(llm.generate(prompts, params, lora=name)) for name in names]
    llm.close()
    assert len({str(each) for each in want}) == len(want)
    for shape, graphs in ((SHAPE, "auto"), ((3, 6, 24), "off"), (None, "auto")):
        llm = build(pair, shape, **options, graphs=graphs, max_running_requests=36, chunked_prefill_size=64)
        requests = [each for name in names for each in llm._asked(prompts, params, None, name)]
        outputs = {delta.index: delta.output for delta in llm._run(requests) if delta.output is not None}
        llm.close()
        whole, few = [outputs[at] for at in range(len(requests))], len(prompts)
        assert [bits(whole[few * at : few * (at + 1)]) for at in range(len(names))] == want, (shape, graphs)
        assert shape is None or sum(map(sum, accept_lens(whole))) > 0


def test_a_budget_of_nodes_goes_to_rows_with_all_adapters(pair, adapters):
    """Captured, each node with its row's adapter, in as many tiles as the budget may need; chances are learned by
    adapter."""
    prompts, params, names = pair.prompts([5, 41, 17], seed=2), greedy(24), [None, *(name for name, _, _ in adapters)]
    options = {"dtype": "float32", "speculative_node_budget": 100, "speculative_calibration": "learn"}
    whole = answers(pair, adapters, names, prompts, params, dtype="float32")
    assert answers(pair, adapters, names, prompts, params, **options) == whole
    assert len({str(each) for each in whole.values()}) > 1


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_rows_draft_by_their_own_adapters_of_the_head(pair, tmp_path, graphs):
    """float32, captured and eager: as many are accepted as of merged heads, but for ties between drafts, beside rows of
    the base and of an adapter without."""
    head_modules = (*EVERY, "fc")
    with_head = save_lora(tmp_path / "with", pair.target, 8, 16.0, 1)
    of_head = save_lora(with_head / "draft", pair.head, 16, 32.0, 2, head_modules)
    without = save_lora(tmp_path / "without", pair.target, 16, 32.0, 3)
    prompts, params = pair.prompts([5, 41, 17], seed=2), greedy(40, whole=True)
    options, want = {"device": "cuda", "dtype": "float32", "graphs": graphs}, {}
    heads = {None: pair.head, "with": merged(tmp_path / "head", pair.head, of_head, 2.0), "without": pair.head}
    folders = {"with": with_head, "without": without}
    for name, head in heads.items():
        target = pair.target if name is None else merged(tmp_path / f"{name} whole", pair.target, folders[name], 2.0)
        llm = build(Pair(target, head), SHAPE, **options)
        want[name] = llm.generate(prompts, params)
        llm.close()
    modules = {name: str(folder) for name, folder in folders.items()}
    llm = build(pair, SHAPE, lora_modules=modules, max_running_requests=16, **options)
    requests = [each for name in heads for each in llm._asked(prompts, params, None, name)]
    outputs = {delta.index: delta.output for delta in llm._run(requests) if delta.output is not None}
    llm.close()
    found = [outputs[at] for at in range(len(requests))]
    whole = [output for name in heads for output in want[name]]
    assert tokens(found) == tokens(whole)
    for at, name in enumerate(heads):
        own, merged_own = accepted(found[3 * at : 3 * at + 3]), accepted(want[name])
        assert own == pytest.approx(merged_own, rel=0.05), name
    bare = build(Pair(merged(tmp_path / "bare", pair.target, with_head, 2.0), pair.head), SHAPE, **options)
    difference = abs(accepted(bare.generate(prompts, params)) / accepted(want["with"]) - 1)
    bare.close()
    assert difference > 0.1, "the head's adapter does not matter: take another seed"


def test_adapters_stay_beside_other_weights(pair, adapters, tmp_path):
    """Captured rounds read the new weights and the same tables: all names as in an engine that began with them."""
    new = Pair(save_random_llama(tmp_path / "new", seed=9, vocab_size=12, intermediate_size=128), pair.head)
    prompts, params, names = pair.prompts([5, 41], seed=2), greedy(24), [None, *(name for name, _, _ in adapters)]
    want = answers(new, adapters, names, prompts, params, dtype="float32")
    modules = {name: str(folder) for name, folder, _ in adapters}
    llm = build(pair, SHAPE, device="cuda", dtype="float32", lora_modules=modules)
    old = tokens(llm.generate(prompts, params, lora="a0"))
    llm.update_weights(new.target)
    assert {name: tokens(llm.generate(prompts, params, lora=name)) for name in names} == want
    assert old != want["a0"]
    llm.close()
