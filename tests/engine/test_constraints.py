"""Structured output is exact: a constrained request gives, in any batch, what a slow oracle under its constraint gives.

The oracle is that of the logit options, one token at a time; what the constraint rules out has weight 0.
"""

import json
import math
import random
import re
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.engines import build, pump, submit, tokens
from support.fake_recorder import FakeRecorder
from support.grids import few_of
from support.logit_options import SHAPE, VOCAB, WAYS, Oracle, changed, params_of
from support.oracles import chi_square_tail, drawn, float32, philox4x32_10, warped
from support.tiny_models import EOS
from treetop import LLM, SamplingParams, StructuredOutput
from treetop.distributed.client import EngineProcessClient
from treetop.distributed.tp_wire import LaunchStep, decode_to_worker, encode
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.scheduler.constrained import ConstraintState
from treetop.types.errors import CheckError, InputError
from treetop.types.ids import RequestId
from treetop.types.messages import NodeMasks
from treetop.types.phase import Phase
from treetop.types.requests import EngineRequest
from treetop_debug.ranks import ranks_on_threads

LENGTH = 24


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine finds masks late, and rounds would go on without drafts."""
    monkeypatch.setattr("treetop.scheduler.scheduler._PATIENCE_S", 60.0)


class Whims:
    """Another random set after each output, at times any token or, late, none; the same for the same output."""

    def __init__(self, seed: int, ends: bool = True) -> None:
        self.seed, self.ends, self.output = seed, ends, []

    def allowed(self, new_ids):
        self.output += new_ids
        dice = random.Random(f"{self.seed} {self.output}")
        if dice.random() < 0.2:
            return None
        if self.ends and len(self.output) > 10 and dice.random() < 0.1:
            return []
        ids = {token for token in range(VOCAB) if dice.random() < 0.5} | {dice.randrange(3, VOCAB)}
        if dice.random() < 0.5:
            return ids
        return sum(1 << token for token in ids).to_bytes(2, "little")


class Revocable(Whims):
    """The same along draft trees."""

    def rollback(self, num_tokens):
        assert num_tokens == 1
        del self.output[-1]


class Forcing(Revocable):
    """Often one token alone, so that the tree gets branches that the draft did not propose."""

    def allowed(self, new_ids):
        answer = super().allowed(new_ids)
        dice = random.Random(f"{self.seed} {self.output} again")
        return [dice.randrange(3, VOCAB)] if answer != [] and dice.random() < 0.6 else answer


def set_of(said) -> set[int]:
    if said is None:
        return {*range(VOCAB)}
    return {t for t in range(VOCAB) if said[t // 8] >> t % 8 & 1} if isinstance(said, bytes) else {*said}


@pytest.fixture(scope="module")
def oracle(strong_pair):
    return Oracle(strong_pair)


def weights_of(oracle, prompt, output, params, allowed) -> list[float]:
    logits = changed(oracle.logits([*prompt, *output]), prompt, output, params)
    held = [logit if token in allowed else float("-inf") for token, logit in enumerate(logits)]
    return warped(held, float32(params.temperature), params.top_k, float32(params.top_p), float32(params.min_p))


def run(oracle, prompt, params, constraint) -> tuple[int, ...]:
    output, new = [], ()
    while len(output) < params.max_tokens:
        allowed = set_of(constraint.allowed(new))
        if not allowed:
            break
        uniform = philox4x32_10([len(prompt) + len(output), 0, 0, 0], [params.seed, 0])[0] / 2**32
        new = (drawn(weights_of(oracle, prompt, output, params, allowed), uniform),)
        output += new
        if new[0] == EOS and not params.ignore_eos:
            break
    return tuple(output)


@pytest.fixture(scope="module")
def asked(strong_pair, oracle):
    """Prompts with and without constraints side by side, every way to choose, some with penalties; and what is due."""
    params = [
        SamplingParams(max_tokens=LENGTH, seed=seed, ignore_eos=seed % 3 > 0, **WAYS[way])
        for seed, way in enumerate([*WAYS] * 4)
    ]
    params += [params_of(option, way, 50, LENGTH) for option in ("presence_penalty", "logit_bias") for way in WAYS]
    prompts = strong_pair.prompts([(7 * i) % 23 + 1 for i in range(len(params))])
    seeds = [seed if seed % 4 else None for seed in range(len(params))]
    want = [
        run(oracle, prompt, each, held_to(seed)) if seed is not None else oracle.run(prompt, each)
        for prompt, each, seed in zip(prompts, params, seeds, strict=True)
    ]
    return prompts, params, seeds, want


def held_to(seed):
    """Every second one can be asked along trees."""
    return None if seed is None else (Whims, Revocable, Whims, Forcing)[seed % 4](seed)


@pytest.mark.parametrize(
    ("shape", "options"),
    few_of(
        [
            (None, {}),
            (
                SHAPE,
                {"graphs": "sim", "check_level": 3, "overlap": True, "mixed_chunk": "on", "chunked_prefill_size": 16},
            ),
            (SHAPE, {"check_level": 3, "max_running_requests": 5, "attention_backend": "torch"}),
            ((4, 3, 37), {"overlap": False, "max_running_requests": 3, "speculative_node_budget": 40}),
            ((1, 5, 6), {"overlap": True, "chunked_prefill_size": 16, "speculative_node_budget": 20}),
            (SHAPE, {"tp_size": 2, "graphs": "sim", "check_level": 3, "overlap": True}),
        ],
        1,
        4,
        5,
    ),
)
def test_constrained_requests_equal_the_oracle_in_any_batch(strong_pair, asked, shape, options):
    prompts, params, seeds, want = asked
    with ranks_on_threads():
        llm = build(strong_pair, shape, **options)
    outputs = llm.generate(prompts, params, [held_to(seed) for seed in seeds])
    assert tokens(outputs) == want
    for output, seed in zip(outputs, seeds, strict=True):
        if seed is not None and seed % 2 == 0:
            assert not any(output.metrics.accept_lens), "a draft was accepted, and nobody asked what may follow it"
    if shape is not None:
        ways = {"free": lambda seed: seed is None, "along trees": lambda seed: seed is not None and seed % 2}
        for way, is_one in ways.items():
            drafts = [sum(o.metrics.accept_lens) for o, seed in zip(outputs, seeds, strict=True) if is_one(seed)]
            assert sum(drafts) > len(drafts), f"no trees: {way}"
    llm.close()


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_every_token_has_the_logprob_that_it_was_drawn_with(strong_pair, oracle, shape):
    """Free, with everything that changes logits, and held to constraints; the accepted node's own, in a mixed batch."""
    params = [params_of(option, way, 50, 16) for option in ("all at once", "presence_penalty") for way in WAYS]
    params = [replace(each, logprobs=0) for each in params] * 2
    prompts = strong_pair.prompts([(7 * i) % 23 + 1 for i in range(len(params))])
    seeds = [None] * 6 + [1, 3, 2, 5, 7, 9]
    llm = build(strong_pair, shape, max_running_requests=5)
    outputs = llm.generate(prompts, params, [held_to(seed) for seed in seeds])
    llm.close()
    for prompt, each, seed, output in zip(prompts, params, seeds, outputs, strict=True):
        constraint, new, want = held_to(seed), (), []
        for at, token in enumerate(output.token_ids):
            allowed = {*range(VOCAB)} if constraint is None else set_of(constraint.allowed(new))
            weights = weights_of(oracle, prompt, output.token_ids[:at], each, allowed)
            new = (token,)
            want.append(math.log(weights[token]))
        assert [given.processed for given in output.logprobs] == pytest.approx(want, abs=2e-5)
        if each.temperature == 0:
            assert not any(want)
    if shape is not None:
        assert sum(sum(output.metrics.accept_lens) for output in outputs) > len(outputs), "no trees"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_budget_of_nodes_changes_no_token_whatever_the_options(strong_pair, asked, seed):
    """Shapes, budgets, rows, pages at random; trees that the host plants anew have the nodes that the budget left."""
    prompts, params, seeds, want = asked
    dice = random.Random(seed)
    k, s = dice.choice([1, 1, 2, 3, 4]), dice.randrange(2, 6)
    t = s + 1 if k == 1 else dice.randrange(s + 2, min(24, 1 + k + (s - 1) * k * k) + 1)
    rows = dice.choice([2, 3, 5, 8])
    options = {
        "speculative_node_budget": dice.randrange(rows // 2 + 1, rows * t),
        "max_running_requests": rows,
        "page_size": dice.choice([1, 4, 16]),
        "chunked_prefill_size": dice.choice([8, 24, 64]),
        "graphs": dice.choice(["off", "sim"]),
        "overlap": dice.random() < 0.5,
        "mixed_chunk": dice.choice(["off", "on"]),
        "check_level": dice.choice([1, 3]),
        "max_total_tokens": dice.choice([None, 304]),
        "speculative_calibration": dice.choice(["off", "learn"]),
    }
    llm = build(strong_pair, (k, s, t), **options)
    assert tokens(llm.generate(prompts, params, [held_to(each) for each in seeds])) == want, options
    llm.close()


def test_captured_rounds_stop_for_the_masks_of_nodes(strong_pair, asked):
    """A round with constrained rows is two graphs, all others one; the tokens are the oracle's."""
    prompts, params, seeds, want = asked
    llm, recorder = build(strong_pair, SHAPE, max_running_requests=6, overlap=True), FakeRecorder()
    llm.engine.launcher = CudaGraphs(llm.engine.runner, recorder)
    outputs = llm.generate(prompts, params, [held_to(seed) for seed in seeds])
    assert tokens(outputs) == want
    drafts = [sum(o.metrics.accept_lens) for o, seed in zip(outputs, seeds, strict=True) if seed and seed % 2]
    assert sum(drafts) > len(drafts), "no trees"
    held = [each for each in recorder.replayed if isinstance(each, tuple) or each.grammar_masked]
    assert held[::2] == [(Phase.DRAFT, key) for key in held[1::2]]
    assert 0 < len(held) < len(recorder.replayed)
    llm.close()


def test_only_the_constrained_row_waits_for_the_host(strong_pair):
    """With two steps in flight the others take part in every round, it in every second one."""
    llm = build(strong_pair, SHAPE, overlap=True)
    (prompt, other) = strong_pair.prompts([6, 6])
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    constrained, free = submit(llm, [prompt, other], params, [Whims(3, ends=False), None])
    row_of, maximum = {}, 0
    rounds = {constrained.request_id: 0, free.request_id: 0}
    for plan, _ in pump(llm):
        row_of |= {r.running.row: r.request_id for r in (constrained, free) if r.running is not None}
        maximum = max(maximum, len(llm.scheduler.steps))
        if not getattr(plan, "chunks", ()):
            for row in plan.rows:
                rounds[row_of[row]] += 1
    assert maximum == 1, "one step was out after each commit: two were in flight"
    assert rounds[constrained.request_id] == 39
    assert [len(r.output_ids) for r in (constrained, free)] == [40, 40]


def test_retraction_and_steps_in_flight_change_nothing(strong_pair, asked):
    prompts, params, seeds, want = asked
    llm = build(
        strong_pair, (2, 3, 8), page_size=4, context_length=80, max_total_tokens=96, overlap=True, check_level=3
    )
    requests = submit(llm, prompts, params, [held_to(seed) for seed in seeds])
    for _ in pump(llm):
        pass
    assert llm.scheduler.num_retractions > 3
    assert [tuple(request.output_ids) for request in requests] == want


def test_the_row_of_a_constrained_request_forgets_it(strong_pair, oracle):
    """One row: with a constraint, free, with options that change logits, with a constraint again."""
    llm = build(strong_pair, SHAPE, max_running_requests=1)
    (prompt,) = strong_pair.prompts([8], seed=4)
    free = SamplingParams(temperature=1.1, seed=3, max_tokens=LENGTH, ignore_eos=True)
    for params, seed in ((free, 1), (free, None), (free, 2), (params_of("all at once", "sampled"), None), (free, 5)):
        want = oracle.run(prompt, params) if seed is None else run(oracle, prompt, params, Whims(seed))
        (output,) = llm.generate([prompt], params, [held_to(seed)])
        assert output.token_ids == want
        if seed is None:
            assert sum(output.metrics.accept_lens) > 0


@pytest.mark.slow
def test_a_free_request_in_the_row_of_a_constrained_one_gets_its_drafts(strong_pair):
    """Beside a request whose logits are changed, so that rounds look at what rows are held to."""
    free = SamplingParams(temperature=1.1, seed=3, max_tokens=LENGTH, ignore_eos=True)
    changes = SamplingParams(presence_penalty=1.0, max_tokens=4 * LENGTH, ignore_eos=True)  # to the free one's end
    *both, first = strong_pair.prompts([8, 9, 12], seed=4)
    rounds = []
    for before in ((), (first,)):
        llm = build(strong_pair, SHAPE, max_running_requests=2)
        for prompt in before:
            llm.generate([prompt], free, [Whims(1)])
        rounds.append([(each.token_ids, each.metrics.accept_lens) for each in llm.generate(both, [free, changes])])
    assert rounds[0] == rounds[1]
    assert sum(rounds[0][0][1]) > 0


@pytest.mark.parametrize("position", [0, 1, 3])
def test_tokens_follow_the_constrained_distribution(strong_pair, oracle, position, constrained_draws):
    """Counts fit the exact mixture over what was sampled before."""
    prompt, params, outputs = constrained_draws
    observed, expected = [0.0] * VOCAB, [0.0] * VOCAB
    for output in outputs:
        whims, before = Whims(7, ends=False), output.token_ids[:position]
        allowed = set_of(whims.allowed(before))
        probs = weights_of(oracle, prompt, list(before), params, allowed)
        observed[output.token_ids[position]] += 1
        expected = [e + p / sum(probs) for e, p in zip(expected, probs, strict=True)]
    assert chi_square_tail(observed, expected) > 1e-4


@pytest.fixture(scope="module", params=[Whims, Revocable])
def constrained_draws(strong_pair, request):
    llm = build(strong_pair, (4, 3, 16), max_running_requests=64, context_length=64)
    (prompt,) = strong_pair.prompts([6], seed=9)
    params = [SamplingParams(temperature=1.1, seed=seed, max_tokens=4, ignore_eos=True) for seed in range(600)]
    outputs = llm.generate([prompt] * len(params), params, [request.param(7, ends=False) for _ in params])
    return prompt, params[0], outputs


def test_a_token_outside_the_constraint_never_leaves(strong_pair, monkeypatch):
    """If the device does not rule it out, the host does: the guard fires, and nothing is given."""
    llm = build(strong_pair, SHAPE)
    (prompt,) = strong_pair.prompts([8])
    (first,) = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))[0].token_ids
    monkeypatch.setattr("treetop.kernels.sampling.process.caps", lambda *_: torch.tensor(float("inf")))
    deltas = llm.stream([prompt], SamplingParams(ignore_eos=True), [Only({*range(VOCAB)} - {first})])
    with pytest.raises(CheckError, match="constrained request got"):
        next(deltas)


def test_a_draft_behind_which_nothing_is_known_never_leaves(strong_pair, monkeypatch):
    llm = build(strong_pair, SHAPE)
    monkeypatch.setattr("treetop.kernels.tree.accept.MaskedDrafts.of_tree", lambda _: torch.tensor(False))
    with pytest.raises(CheckError, match="constrained request got"):
        llm.generate(strong_pair.prompts([8]), SamplingParams(ignore_eos=True), [Only(None)])


def test_a_token_that_does_not_fit_its_node_never_leaves(strong_pair, monkeypatch):
    """The masks of two nodes are mixed up on their way: the guard follows the path that was accepted."""
    llm = build(strong_pair, SHAPE)
    real = llm.scheduler.node_masks

    def mixed_up(trees):
        return [NodeMasks(each.row, dict.fromkeys(each.allowed, bytes([0xFF, 0x0F]))) for each in real(trees)]

    llm.engine.set_tree_masks(mixed_up)
    held_to_all = [Revocable(seed) for seed in range(20)]
    with pytest.raises(CheckError, match="constrained request got"):
        llm.generate(strong_pair.prompts([8] * 20), SamplingParams(ignore_eos=True), held_to_all)


class Stubborn(Revocable):
    """Takes a draft back once, and then never again."""

    def rollback(self, num_tokens):
        super().rollback(num_tokens)
        if len(self.output) > 4:
            raise ZeroDivisionError("never again")


class Touchy(Revocable):
    """Raises of what the model does not choose, which plain decoding never asks."""

    def __init__(self, seed, good) -> None:
        super().__init__(seed)
        self.good, self.num_raised = good, 0

    def allowed(self, new_ids):
        answer = super().allowed(new_ids)
        if tuple(self.output) != self.good[: len(self.output)]:
            self.num_raised += 1
            raise SystemExit(3)
        return answer


def test_what_a_constraint_raises_of_a_draft_ends_nothing(strong_pair, oracle):
    llm = REFUSING.setdefault("llm", build(strong_pair, SHAPE))
    prompts = strong_pair.prompts([5, 7, 6, 8])
    params = SamplingParams(1.1, seed=4, max_tokens=LENGTH, ignore_eos=True)
    want = [run(oracle, prompt, params, Whims(3)) for prompt in prompts]
    touchy = [Touchy(3, good) for good in want]
    outputs = llm.generate(prompts, params, touchy)
    assert tokens(outputs) == want
    assert sum(each.num_raised for each in touchy) > 0
    assert sum(sum(output.metrics.accept_lens) for output in outputs) > 0


def test_a_constraint_that_takes_nothing_back_ends_its_request_alone(strong_pair, oracle):
    llm = REFUSING.setdefault("llm", build(strong_pair, SHAPE))
    prompts, params = strong_pair.prompts([5, 7]), SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    want = run(oracle, prompts[0], SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=0), Whims(3, ends=False))
    bad, good = llm.generate(prompts, params, [Stubborn(3, ends=False), None])
    assert "the constraint failed: ZeroDivisionError: never again" in bad.error
    assert 4 < len(bad.token_ids) < LENGTH
    assert bad.token_ids == want[: len(bad.token_ids)]
    assert good.token_ids == oracle.run(prompts[1], SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=0))
    llm.scheduler.check_integrity()


@pytest.mark.parametrize("num_known", few_of([0, 1, 3], 0, 1))
def test_drafts_that_are_not_reached_in_time_are_not_accepted(strong_pair, asked, num_known, monkeypatch):
    """The walk is cut off somewhere: the tokens stay the same."""
    prompts, params, seeds, want = asked
    now = iter(range(10**9))
    monkeypatch.setattr("treetop.scheduler.tree_walk.time", SimpleNamespace(monotonic=lambda: next(now)))
    real = ConstraintState.walk
    monkeypatch.setattr(ConstraintState, "walk", lambda self, tree, _: real(self, tree, next(now) + num_known))
    llm = build(strong_pair, SHAPE)
    outputs = llm.generate(prompts, params, [held_to(seed) for seed in seeds])
    assert tokens(outputs) == want
    drafts = sum(sum(o.metrics.accept_lens) for o, seed in zip(outputs, seeds, strict=True) if seed is not None)
    assert (drafts > 0) == (num_known > 0)


class Panic(BaseException):
    """As the exception of a library that is no Python."""

    def __str__(self) -> str:
        raise SystemExit(4)


def ended_by(error):
    def raise_it(call):
        if call == 3:
            raise error

    return raise_it


class Only:
    """The same set always, or what a function of the call's number gives."""

    def __init__(self, what) -> None:
        self.what, self.calls = what, 0

    def allowed(self, new_ids):
        self.calls += 1
        return self.what(self.calls) if callable(self.what) else self.what


def raised(call):
    if call == 3:
        raise ZeroDivisionError("at a bad moment")


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        (lambda call: [4] if call < 3 else [VOCAB], {}, f"allows token {VOCAB} of a vocabulary of {VOCAB}"),
        (lambda call: None if call < 3 else [-1], {}, "allows token -1"),
        (lambda call: None if call < 3 else b"\0" * 9 + b"\1", {}, "allows token 72"),
        (raised, {}, "the constraint failed: ZeroDivisionError: at a bad moment"),
        (ended_by(SystemExit(3)), {}, "the constraint failed: SystemExit: 3"),
        (ended_by(KeyboardInterrupt()), {}, "the constraint failed: KeyboardInterrupt"),
        (ended_by(Panic()), {}, "the constraint failed: Panic: it cannot be shown"),
        (lambda call: None if call < 3 else [EOS], {"min_tokens": 9, "ignore_eos": False}, "min_tokens leave"),
        (lambda call: None if call < 3 else [7], {"allowed_token_ids": (4, 5)}, "allowed_token_ids and"),
        ([], {}, "allows no first token"),
        ([99], {}, "allows token 99"),
    ],
)
def test_a_constraint_that_cannot_be_kept_ends_its_request_alone(strong_pair, oracle, what, options, words):
    llm = REFUSING.setdefault("llm", build(strong_pair, SHAPE))
    prompts = strong_pair.prompts([5, 7])
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **options})
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    bad, good = llm.generate(prompts, [params, free], [Only(what), None])
    assert bad.finish_reason == "abort"
    assert words in bad.error
    assert good.token_ids == oracle.run(prompts[1], SamplingParams(max_tokens=12, ignore_eos=True, seed=0))
    llm.scheduler.check_integrity()


REFUSING: dict = {}


def test_a_constraint_stays_in_its_process_and_its_masks_reach_every_rank(strong_pair):
    """A structure is text, and crosses; an object cannot. What a rank is sent says the same as what was planned."""
    asked = EngineRequest(RequestId(0), (4, 5), SamplingParams(), 0, constraint=Only(None))
    remote = EngineProcessClient()
    with pytest.raises(InputError, match="constraints: the engine is another process"):
        remote.add([asked], print)
    remote.close()
    llm, masks = build(strong_pair, SHAPE), 0
    submit(llm, strong_pair.prompts([4, 6]), SamplingParams(max_tokens=5, ignore_eos=True), [Whims(1), None])
    for number in range(20):
        plan = llm.scheduler.plan()
        if plan is None:
            break
        assert decode_to_worker(encode(LaunchStep.of(number, 2, plan))).plan() == plan
        masks += len(plan.masks)
        llm.scheduler.commit(plan, llm.engine.step(plan))
    assert masks == 5


def test_what_cannot_be_asked_is_refused_by_name(strong_pair):
    llm = REFUSING.setdefault("llm", build(strong_pair, SHAPE))
    prompts, one = strong_pair.prompts([3, 3]), Only(None)
    for constraints, words in (
        (one, "constraints: give each of 2"),
        ([one, one], "one of its own"),
        ([one, 3], "must have a method"),
    ):
        with pytest.raises(InputError, match=words):
            llm.generate(prompts, None, constraints)
    json_object = SamplingParams(structured_output=StructuredOutput("json_object"))
    with pytest.raises(InputError, match="give one of them"):
        llm.generate(prompts[:1], json_object, [one])
    for plain in (
        build(strong_pair, SHAPE, disable_logits_processors=True),
        build(strong_pair, SHAPE, simulate_accept_length=2),
    ):
        with pytest.raises(InputError, match="structured_output"):
            plain.generate(prompts[:1], None, [Only(None)])


# ---------------------------------------------------------------------------------------------- structures


@pytest.fixture(scope="module")
def nestling():
    llm = LLM(max_running_requests=4, context_length=192)
    yield llm
    llm.close()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "bc"]}, "count": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PRIMES = json.dumps({"type": "integer", "allOf": [{"multipleOf": each} for each in (9973, 9967, 9949)]})
STRUCTURES = [
    (StructuredOutput("json_schema", json.dumps(SCHEMA)), lambda text: 3 <= json.loads(text)["count"] <= 99),
    (StructuredOutput("regex", "[a-f]{3}-(x|yz){2}"), lambda text: re.fullmatch("[a-f]{3}-(x|yz){2}", text)),
    (StructuredOutput("choice", '["def f", "a \\"b\\"", "é"]'), lambda text: text in ("def f", 'a "b"', "é")),
]


def test_texts_have_the_structures_that_were_asked_for(nestling):
    """Together with free requests; every output is complete, for EOS comes only where the structure ends."""
    params, checks = [], []
    for temperature in (0, 0.9, 1.6):
        for structure, check in STRUCTURES:
            params.append(SamplingParams(temperature, seed=3, max_tokens=80, structured_output=structure))
            checks.append(check)
        params.append(SamplingParams(temperature, seed=3, max_tokens=20, ignore_eos=True))
        checks.append(lambda text: len(text) > 5)
    outputs = nestling.generate(["def f(x):"] * len(params), params)
    for output, check, each in zip(outputs, checks, params, strict=True):
        assert check(output.text), output.text
        assert output.finish_reason == ("stop" if each.structured_output else "length")


@pytest.mark.parametrize("structure", [structure for structure, _ in STRUCTURES], ids=lambda each: each.kind)
def test_a_structure_that_can_only_end_ends_where_eos_is_ignored(nestling, structure):
    """The same text, and no EOS in it."""
    held, ignoring = (
        nestling.generate("def", SamplingParams(max_tokens=80, ignore_eos=ignore, structured_output=structure))[0]
        for ignore in (False, True)
    )
    assert (ignoring.finish_reason, ignoring.error, ignoring.text) == ("stop", None, held.text)
    assert ignoring.token_ids == held.token_ids[:-1]


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("json_schema", "{", "structured_output"),
        ("json_schema", '{"type": "strange"}', "strange"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("regex", "a(b", "unclosed group"),
        ("json_schema", '{"$ref": "#"}', "no text has this structure"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "no text has this structure"),
        ("regex", r"[^\s\S]", "no text has this structure"),
        ("json_schema", "false", "schema is false"),
        ("json_schema", PRIMES, "too complex"),
        ("regex", "x{50}a{1000000000}", "too complex"),
        ("choice", "[]", "choice needs"),
        ("choice", "[1]", "choice needs"),
        ("choice", "[" * 60000, "choice needs"),
        ("regex", "\ud800", "UTF-8"),
        ("strange", "x", "kind must be"),
        ("grammar", "start: x", "structured_output"),
        ("grammar", "root ::= [", "neither Lark nor GBNF"),
        ("grammar", "start: start", "no text has this structure"),
        ("grammar", "start: /x{50}a{1000000000}/", "too complex"),
        ("lark", 'root ::= "a"', "1\\(7\\): Expected"),
        ("structural_tag", "[", "structures and triggers"),
        ("structural_tag", '{"structures": [{}], "triggers": ["a"]}', "needs begin and end"),
        ("structural_tag", '{"structures": [{}], "triggers": [""]}', "not empty"),
        (
            "structural_tag",
            '{"structures": [{"begin": "a", "end": "", "schema": {"type": 3}}], "triggers": ["a"]}',
            "structured_output",
        ),
        ("regex", "a" * 70000, "70000 characters"),
        ("regex", 3, "spec must be text"),
    ],
)
def test_structures_that_make_no_sense_are_refused(nestling, kind, spec, words):
    with pytest.raises(InputError, match=words) as refused:
        nestling.generate("a", SamplingParams(structured_output=StructuredOutput(kind, spec)))
    assert not {"state>", "backtrace", "Parser:"} & {*str(refused.value).split()}


def test_thousands_of_choices_are_one_structure(nestling):
    texts = [f"choice {number}" for number in range(3000)]
    params = SamplingParams(1.5, seed=5, structured_output=StructuredOutput("choice", json.dumps(texts)))
    outputs = nestling.generate(["a", "b", "c"], params)
    assert all(output.text in texts and output.finish_reason == "stop" for output in outputs)


TREES = (
    (
        "json_schema",
        json.dumps({**SCHEMA, "properties": {**SCHEMA["properties"], "note": {"type": "string", "maxLength": 12}}}),
        json.loads,
    ),
    (
        "lark",
        'start: call+ "\\n"\ncall: NAME "(" [arg ("," arg)*] ")" ";"\narg: NAME | NUMBER | call\n'
        "NAME: /[a-z_]{2,8}/\nNUMBER: /[0-9]{1,3}/",
        re.compile(r"([a-z_]{2,8}\(.*\);)+\n", re.DOTALL).fullmatch,
    ),
)
"""Kinds, specs, and what a whole text must pass."""


def test_the_embedded_pair_gives_along_trees_what_plain_decoding_gives():
    """A schema and a grammar, greedy and drawn, beside a request without any; drafts are accepted in all."""
    asked = [
        SamplingParams(temperature, seed=seed, max_tokens=64, structured_output=structure)
        for temperature, seed in ((0, 0), (0.8, 1), (0.8, 2))
        for structure in (*(StructuredOutput(kind, spec) for kind, spec, _ in TREES), None)
    ]
    outputs = []
    for options in ({}, {"draft": None}):
        with closing(LLM(max_running_requests=4, context_length=192, exactness="bits", **options)) as llm:
            outputs.append(llm.generate(["def load(path):\n    "] * len(asked), asked))
    along, plainly = outputs
    assert [each.token_ids for each in along] == [each.token_ids for each in plainly]
    whole = 0
    for number, (output, plain) in enumerate(zip(along, plainly, strict=True)):
        assert output.error is None
        assert len(output.metrics.accept_lens) < len(plain.metrics.accept_lens)
        if number % 3 < 2 and output.finish_reason == "stop":
            assert TREES[number % 3][2](output.text), output.text
            whole += 1
    assert whole
