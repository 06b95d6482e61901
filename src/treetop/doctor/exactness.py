"""`treetop doctor --exactness bits`: whether a row has the same bits in any company here, and where it has not.

First the operations of the target, each alone: a product with a weight of each of the model's shapes, and what is done
by row or by element; on a GPU these are what a start probes (`engine.startup.operation_probes`), with the arithmetic
that is in force. Then whole engines, over random prompts: plain decoding of one request at a time against trees,
batches, orders, chunks, retractions and prefixes from the cache.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from treetop.checkpoints.loader import LoadContext
from treetop.doctor.rank_sums import rank_sum_differs
from treetop.doctor.tables import print_table
from treetop.engine.startup.adapters import rank_of_tables
from treetop.engine.startup.operation_probes import adapter_cases, operation_probe
from treetop.engine.startup.plan import EnginePlan
from treetop.engine.startup.products import Products, products_of
from treetop.exact.probe import BitProbe, RowCase, of_rows
from treetop.kernels.exact import MOST_ROWS, Functions
from treetop.kernels.fused import rms_norm
from treetop.kernels.triton_guard import gpu_traits
from treetop.llm import LLM
from treetop.outputs import RequestOutput
from treetop.types.parallel import SINGLE_RANK
from treetop.types.sampling import SamplingParams
from treetop.weights.gpu_products import NoSplitKProduct
from treetop.weights.linear import LibraryLinear

COUNTS = (1, 2, 3, 4, 5, 8, 13, 16, 17, 32, 33, 60, 64, 96, MOST_ROWS, 480)
"""Rows of a batch whose bits are compared."""


@dataclass(frozen=True, slots=True)
class Amount:
    """What each engine serves: so many prompts, of one token to `longest`, and so many tokens after each."""

    prompts: int
    longest: int
    tokens: int

    def sentence(self) -> str:
        return f"{self.prompts} prompts of 1 to {self.longest} tokens, {self.tokens} tokens each, half of them drawn"


_MANY, _FEW = Amount(9, 200, 40), Amount(5, 140, 12)
"""Both go beyond a block of attention (128 positions on a CPU). With few, all engines of SmolLM2 take two cores some
two minutes."""
_SMALL = 2e7
"""Numbers of a target with which a CPU serves many."""
_TREES = ((1, 6, 7), (4, 5, 16), (5, 4, 16), (8, 5, 60))


def show_exactness(console: Console, engine_plan: EnginePlan, model: str | None, options: Mapping[str, Any]) -> int:
    """Print both parts. Exit code 1 if `--exactness bits` was asked for and something differs."""
    found = list(operations(engine_plan))
    rows = [
        (name, "same bits" if not counts else f"differs at {', '.join(map(str, counts))}") for name, counts in found
    ]
    print_table(console, f"operations, rows of {', '.join(map(str, COUNTS))}", ("operation", "a row's bits"), rows)
    cases = []
    amount = amount_of(engine_plan)
    console.print(f"engines, against plain decoding of one request at a time: {amount.sentence()}", highlight=False)
    for case in engines(engine_plan, model, options):
        cases.append(case)
        console.print(case.sentence(), markup=False, highlight=False)
    differ = sum(case.tokens + case.logprobs for case in cases) + sum(len(counts) for _, counts in found)
    asked = engine_plan.config.exactness
    verdict = "every bit is that of plain decoding" if not differ else "not all bits are those of plain decoding"
    console.print(f"exactness {asked}: {verdict}", markup=False, highlight=False)
    return int(asked == "bits" and differ > 0)


# ------------------------------------------------------------------------------------------------ operations


def operations(engine_plan: EnginePlan) -> Iterator[tuple[str, list[int]]]:
    """Each operation of the target, and the row counts at which a row's bits differ from those among most rows."""
    place, target = engine_plan.place, engine_plan.target
    if place.parallel.size > 1:
        differ = rank_sum_differs(engine_plan)
        yield f"sum over {place.parallel.size} ranks, and norm", [] if differ is None else [differ]
    yield from _probe(engine_plan, _products).run()
    if place.device.type == "cuda":
        rank = rank_of_tables(engine_plan.config, engine_plan.adapters, place.profile.batch_invariant)
        yield from operation_probe(place.ops, target.config, place.own(target.params), rank=rank).run()
    else:
        yield from _probe(engine_plan, _others).run()


def _probe(engine_plan: EnginePlan, cases: Callable[[EnginePlan, torch.Generator], Iterator[RowCase]]) -> BitProbe:
    place = engine_plan.place
    return BitProbe(partial(cases, engine_plan), COUNTS, max(COUNTS), 0, place.dtype, place.device)


def _others(engine_plan: EnginePlan, generator: torch.Generator) -> Iterator[RowCase]:
    """What else a CPU computes by row or by element."""
    place, model = engine_plan.place, engine_plan.target.config
    hidden, vocab = model.hidden_size, model.vocab_size
    norm = torch.ones(hidden, dtype=place.dtype)
    yield RowCase(f"norm of {hidden}", hidden, of_rows(lambda x: rms_norm(x, norm, 1e-5)))
    functions = place.profile.functions
    for name in Functions.__dataclass_fields__:
        yield RowCase(f"{name} of 1000", 1000, of_rows(getattr(functions, name)))
    for name, function in (("log_softmax", torch.log_softmax), ("softmax", torch.softmax)):
        yield RowCase(f"{name} of {vocab}", vocab, of_rows(partial(_by_row, function)))
    rank = rank_of_tables(engine_plan.config, engine_plan.adapters, place.profile.batch_invariant)
    yield from adapter_cases(place.ops, place.own(engine_plan.target.params), rank, generator)


def _products(engine_plan: EnginePlan, generator: torch.Generator) -> Iterator[RowCase]:
    """With weights of each of the target's shapes that are in no other format, by what serves them."""
    place = engine_plan.place
    if place.device.type == "cpu":  # products of the first rank, which here tells no other
        alone = replace(place, parallel=SINGLE_RANK, expert_ranks=SINGLE_RANK)
        chosen = products_of(replace(engine_plan, place=alone))
    else:
        chosen = products_of(engine_plan)
    tied = ("embedding",) if engine_plan.target.config.tied_embeddings else ()
    weights = {
        param.shape for param in place.own(engine_plan.target.params) if param.kind == "matrix" or param.name in tied
    }
    shapes = sorted(chosen.probed) if chosen.probed else sorted((shape[0], shape[1]) for shape in weights)
    for out, width in shapes:
        weight = torch.randn((out, width), generator=generator, device=place.device) * width**-0.5
        product, by = _product(weight.to(place.dtype), chosen, place)
        yield RowCase(f"product [{out}, {width}]{by}", width, of_rows(product))


def _product(weight: Tensor, chosen: Products, place: LoadContext) -> tuple[Callable[[Tensor], Tensor], str]:
    """What serves a weight, and the words on it."""
    shape = weight.shape[0], weight.shape[1]
    probed, choice = chosen.probed.get(shape), chosen.target.get(shape)
    if probed is not None:
        product = NoSplitKProduct(weight, None, None, gpu_traits(place.device), probed, place.compressed)
        return product, f", {probed.served()}"
    by = f", {choice.calls[0]}" if choice is not None and choice.exact else ""
    return (LibraryLinear(weight, None, choice) if place.device.type == "cpu" else _linear(weight)), by


def _by_row(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x.float(), dim=-1)


def _linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, weight)


# --------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True, slots=True)
class Compared:
    """An engine against plain decoding of one request at a time.

    sequences: how many were compared, of which so many have other tokens; logprobs: so many have the same tokens and
    other log-probabilities.
    """

    name: str
    sequences: int
    tokens: int
    logprobs: int

    def sentence(self) -> str:
        if not self.tokens + self.logprobs:
            return f"same bits  {self.name}"
        return (
            f"DIFFERS    {self.name}: tokens of {self.tokens}, logits of {self.logprobs} of {self.sequences} sequences"
        )


def engines(engine_plan: EnginePlan, model: str | None, options: Mapping[str, Any]) -> Iterator[Compared]:
    """Each case is an engine of its own, one after another."""
    rng, amount = random.Random(0), amount_of(engine_plan)
    prompts, params = _requests(engine_plan.target.config.vocab_size, amount, rng)
    order = list(range(len(prompts)))
    rng.shuffle(order)
    context = min(max(map(len, prompts)) + amount.tokens + 1, engine_plan.layout.max_context)
    options = {**options, "context_length": context}  # pools of whole contexts take longer to make than to use
    plain = _serve(model, options, prompts, params, **_PLAIN, max_running_requests=1)
    cases: list[tuple[str, dict[str, Any]]] = [("plain, 8 requests at once", {**_PLAIN, "max_running_requests": 8})]
    cases += [(f"plain, chunks of {n}", {**_PLAIN, "chunked_prefill_size": n}) for n in (16, 333)]
    trees = _TREES if engine_plan.config.speculates else ()
    for shape, rows in zip(trees, (1, 3, 8, 33), strict=False):
        cases.append((f"tree {shape}, {rows} at once", {**_tree(shape), "max_running_requests": rows}))
    few = {"max_total_tokens": 2 * context, "max_running_requests": 8}
    few |= _tree(_TREES[1]) if trees else _PLAIN
    cases.append(("pages for two of eight: requests are retracted", few))
    for name, changes in cases:
        yield _compared(name, plain, _serve(model, options, prompts, params, **changes))
    turned = _serve(model, options, [prompts[i] for i in order], [params[i] for i in order], max_running_requests=8)
    yield _compared("another order", [plain[i] for i in order], turned)
    twice = _serve(model, options, prompts * 2, params * 2, max_running_requests=3)
    yield _compared("prefixes from the cache", plain, twice[len(prompts) :])


_PLAIN: dict[str, Any] = {"speculative_algorithm": "NONE", "draft": None}


def _tree(shape: tuple[int, int, int]) -> dict[str, Any]:
    names = ("speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens")
    return dict(zip(names, shape, strict=True))


def amount_of(engine_plan: EnginePlan) -> Amount:
    """By device and size of the target, and within its context."""
    numbers = sum(prod(param.shape) for param in engine_plan.target.params)
    amount = _FEW if engine_plan.place.device.type == "cpu" and numbers > _SMALL else _MANY
    context = engine_plan.layout.max_context
    longest = max(1, min(amount.longest, context - amount.tokens - 1))
    return replace(amount, longest=longest, tokens=min(amount.tokens, context - longest))


def _requests(vocab: int, amount: Amount, rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts; greedy and sampled in turn."""
    longer = amount.longest - 1
    lengths = [1 + i * longer // (amount.prompts - 1) for i in range(amount.prompts)]
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(max_tokens=amount.tokens, ignore_eos=True, logprobs=1, seed=i, temperature=i % 2)
        for i in range(amount.prompts)
    ]
    return prompts, params


def _serve(
    model: str | None,
    options: Mapping[str, Any],
    prompts: list[list[int]],
    params: list[SamplingParams],
    **changes: Any,
) -> list[RequestOutput]:
    llm = LLM(model, **{**options, **changes})
    try:
        return llm.generate(prompts, params)
    finally:
        llm.close()


def _compared(name: str, plain: list[RequestOutput], others: list[RequestOutput]) -> Compared:
    pairs = list(zip(plain, others, strict=True))
    same = [pair for pair in pairs if pair[0].token_ids == pair[1].token_ids]
    logprobs = sum(one.logprobs != other.logprobs for one, other in same)
    return Compared(name, len(pairs), len(pairs) - len(same), logprobs)
