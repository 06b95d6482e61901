"""What rows keep: a feature that is off, or that nobody asks for, costs a round nothing; rows are written whole."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.engines import build, pump, submit
from treetop import SamplingParams
from treetop.engine.features.feature import RowFeature
from treetop.engine.features.sampling import RowNumbers
from treetop.engine.rounds import Eager, RoundKey
from treetop.engine.startup.build import zeros_on
from treetop.types.ids import Row
from treetop.types.messages import RowSetup
from treetop.types.sampling import WEIGHING, SamplingMode


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations by name. written: numbers of the host's in places that a tensor names."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter()
        self.lifted, self.written = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[str(func)] += 1
        if func is torch.ops.aten.index_put_.default:
            self.written += any(args[2] is each for each in self.lifted)
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            self.lifted.append(out)
        return out


def operations(llm, choice=SamplingMode.GREEDY):
    """Of a round of the first shape."""
    engine = llm.engine
    engine.runner.buffers.row_lists.fill_(engine.layout.dummy_row)
    with torch.inference_mode(), Operations() as counted:
        engine.launcher.launch(RoundKey(engine.layout.buckets[0], engine.layout.shapes[0], choice), 1)
    return counted.found


@pytest.mark.parametrize("shape", [None, (2, 3, 6)])
def test_logits_processors_cost_a_round_that_changes_none_nothing(strong_pair, shape):
    """Operation by operation; one that changes logits has more, or the test would prove nothing."""
    with_them = build(strong_pair, shape)
    without = build(strong_pair, shape, disable_logits_processors=True)
    assert len(with_them.engine.runner.state.features) == len(without.engine.runner.state.features) + 2
    assert operations(with_them) == operations(without)
    assert operations(with_them, SamplingMode.PROCESS) > operations(with_them)


def test_a_list_has_the_features_that_are_on(strong_pair):
    def kinds(shape, **options):
        return [type(each).__name__ for each in build(strong_pair, shape, **options).engine.runner.state.features]

    assert kinds(None, disable_logits_processors=True) == ["RowNumbers"]
    assert kinds((2, 3, 6)) == ["RowNumbers", "RowProcessors", "GrammarMasks"]
    learning = kinds((2, 3, 6), speculative_calibration="learn")
    assert learning == ["RowNumbers", "Learning", "RowProcessors", "GrammarMasks"]


def test_no_step_waits_for_a_number_of_the_hosts(strong_pair):
    """`table[rows] = 0` makes a tensor on the host, whose copy to a GPU waits for all that was launched before."""
    options = {"speculative_policy": "auto", "speculative_calibration": "learn", "prefill_graph_max_tokens": 0}
    llm = build(strong_pair, (2, 3, 6), **options)
    assert llm.engine.runner.state.deferred is not None
    real, counted, steps = llm.engine._run, Operations(), []

    def run(plan, slot):
        steps.append(type(plan).__name__)
        with counted:
            return real(plan, slot)

    llm.engine._run = run
    submit(llm, [[5, 6, 7], [8, 9]], [SamplingParams(max_tokens=9), SamplingParams(max_tokens=7, temperature=0.8)])
    for _ in pump(llm):
        pass
    assert {"PrefillPlan", "RoundPlan"} <= {*steps}
    assert counted.found["aten.index_put_.default"] > 0
    assert counted.written == 0


def test_every_number_of_a_row_is_written_whatever_it_held():
    """Two requests, rows that hold garbage; a third row keeps its own."""
    numbers = RowNumbers.make(5, partial(zeros_on, torch.device("cpu")))
    for table, garbage in ((numbers.integers, -7), (numbers.floats, float("nan")), (numbers.flags, True)):
        table.fill_(garbage)
    given = SamplingParams(temperature=0.9, top_k=-1, min_p=0.1, presence_penalty=-1.5)
    setups = [RowSetup(Row(3), 0, given, 2**62 + 1, adapter=2), RowSetup(Row(0), 0, SamplingParams(), 5)]
    rows = torch.tensor([3, 0])
    columns = numbers.columns(setups)
    numbers.move_in(rows, setups, iter([torch.tensor(column) for column in columns]))
    found = {name: line[rows].tolist() for name, line in numbers.lines.items()}
    assert {name: found.pop(name) for name in ("seed", "top_k", "classes", "may_end", "adapter")} == {
        "seed": [2**62 + 1, 5],
        "top_k": [0, 0],
        "classes": [8, 0],  # of the second adapter, warm; of none, greedy
        "may_end": [0, 0],
        "adapter": [2, 0],
    }
    flags = {name: found.pop(name) for name in ("active", "constrained")}
    assert flags == {"active": [False, False], "constrained": [False, False]}
    neutral = SamplingParams()
    for name, values in found.items():
        assert values == pytest.approx([getattr(given, name), getattr(neutral, name)]), name
    assert numbers["seed"][1] == -7
    assert torch.isnan(numbers["repetition_penalty"][1])


def test_each_option_that_weighs_logits_has_a_number():
    """One that was forgotten would be ignored, for constrained rows in silence; biases have a list of their own."""
    numbers = RowNumbers.make(2, partial(zeros_on, torch.device("cpu")))
    assert {*WEIGHING} - {"logit_bias"} <= numbers.lines.keys()


class Heard(RowFeature):
    """A feature in no list: the text of each request by its seed, from what features are told alone."""

    def __init__(self) -> None:
        self.texts, self.seed_of = {}, {}

    def move_in(self, rows, setups, columns) -> None:
        for row, setup in zip(rows.tolist(), setups, strict=True):
            self.seed_of[row] = setup.seed
            self.texts[setup.seed] = dict(enumerate(setup.prefix_ids))

    def _note(self, rows, positions, tokens, there) -> None:
        for row, *line in zip(rows.tolist(), positions.tolist(), tokens.tolist(), there.tolist(), strict=True):
            for at, token, known in zip(*line, strict=True):
                if known:
                    self.texts[self.seed_of[row]][at] = token

    def rooted(self, ops, of) -> None:
        live = torch.tensor([[row in self.seed_of] for row in of.rows.tolist()])
        self._note(of.prompt.rows, of.prompt.positions, of.prompt.tokens, of.prompt.valid)
        self._note(of.rows, of.at[:, None], of.tokens[:, None], live)

    def accepted(self, ops, of) -> None:
        self._note(of.paths.rows, of.places.path + 1, of.accepted.tokens, of.paths.kept)


@pytest.mark.parametrize("shape", [None, (2, 3, 8)])
def test_a_feature_hears_of_every_token_of_its_row_and_of_no_other(strong_pair, shape):
    """Through chunks, trees, cached prefixes, rows that change hands and requests that are retracted."""
    options = {"page_size": 4, "context_length": 80, "max_total_tokens": 128, "chunked_prefill_size": 8}
    llm, heard = build(strong_pair, shape, max_running_requests=4, **options), Heard()
    engine = llm.engine
    features = (*engine.runner.state.features, heard)
    engine.runner = replace(engine.runner, state=replace(engine.runner.state, features=features))
    engine.launcher = Eager(engine.runner)
    prompts = strong_pair.prompts([30, 12, 25, 7, 30], seed=1)
    prompts.append(prompts[0])
    params = [SamplingParams(max_tokens=40, ignore_eos=True, seed=seed) for seed in range(len(prompts))]
    requests = submit(llm, prompts, params)
    for _ in pump(llm):
        pass
    assert llm.scheduler.num_retractions > 0
    for prompt, request, one in zip(prompts, requests, params, strict=True):
        whole = [*prompt, *request.output_ids]
        assert [heard.texts[one.seed].get(at) for at in range(len(whole))] == whole
