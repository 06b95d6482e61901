"""`treetop trace`: decode one prompt and show every round's draft tree on one HTML page.

The page needs nothing else: no network, no fonts, no scripts from elsewhere. It is `assets/trace.html` with one JSON
object in it, the one that `page_data` makes.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import HostStep, RoundKey, phases_of
from treetop.llm import LLM, RequestOutput
from treetop.text.tokenizer import Tokenizer
from treetop.types.config import check_writable
from treetop.types.errors import ConfigError
from treetop.types.messages import RoundPlan
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingParams
from treetop.types.tree import Accepted, DraftTree
from treetop.version import __version__

End = Literal["full", "outside", "leaf", "unproposed"]
"""Why a path ends, the first that holds: it is S drafts long; the draft vocabulary lacks the token that the target
wanted next; its last node has no children in the tree; none of those children is the wanted token."""

Tally = list[list[int]]
"""Pairs [tested, accepted]."""

DATA_MARK = "{{trace data}}"
CALIBRATION_BINS = 10


@dataclass(frozen=True, slots=True)
class TreeRound:
    """One decode round as plain numbers.

    tokens, parent, depth: [T], as in `DraftTree`.
    own: the draft's probability of each node after its parent.
    cumulative: of the whole path to it; 1 at the root, None where the draft gave no number.
    path: nodes from the root to the last accepted.
    bonus: what the target wanted after it.
    emitted: how many of the accepted tokens and the bonus are in the output.
    ms: milliseconds of draft, verify, extend, and of the host until the next round.
    """

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    own: list[float | None]
    cumulative: list[float | None]
    path: list[int]
    bonus: int
    emitted: int
    end: End
    ms: tuple[float, float, float, float]

    def children(self, node: int) -> list[int]:
        """In rank order, the draft's favourite first."""
        return [child for child in range(1, len(self.tokens)) if self.parent[child] == node]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a run of `collect` saw. before_ms: from the call to the first round: encoding, prefill, the first plan."""

    llm: LLM
    prompt: str
    params: SamplingParams
    output: RequestOutput
    rounds: tuple[TreeRound, ...]
    before_ms: float

    def statistics(self) -> "Statistics":
        shape = self.llm.config.shape
        return statistics(self.rounds, shape.num_steps, shape.topk)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums over rounds, [tested, accepted] each; a node is tested if its parent is on the accepted path.

    by_depth: depth 1 .. S, of the rounds whose path reached the depth before.
    by_rank: siblings, the draft's favourite first.
    by_confidence: tenths of the draft's own probability.
    accept_lens: rounds that accepted 0 .. S drafts.
    """

    by_depth: Tally
    by_rank: Tally
    by_confidence: Tally
    accept_lens: list[int]
    ends: dict[str, int]


class TimedLauncher:
    """Launches the phases of a round as `Eager` does, and notes when each begins and ends."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.marks: list[tuple[float, ...]] = []
        """A round: when DRAFT began, DRAFT ended, VERIFY ended, EXTEND ended, in seconds."""

    def launch(self, key: RoundKey, max_kv_len: int, host_step: HostStep | None = None) -> None:
        """A host step counts as part of DRAFT."""
        marks = [time.perf_counter()]
        for phase, run in phases_of(self._runner, key).items():
            run(self._runner, key, max_kv_len)
            if phase is Phase.DRAFT and host_step is not None:
                host_step()
            if self._runner.buffers.rows.is_cuda:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
        self.marks.append(tuple(marks))


def run(model: str | None, engine_options: dict[str, Any], prompt: str, params: SamplingParams, path: Path) -> Trace:
    """Trace a prompt into the page `path`. Raises UserError for what cannot work, before any work where it can."""
    check_writable(path, "--output")
    trace = collect(model, engine_options, prompt, params)
    path.write_text(fill_page(page_data(trace)), encoding="utf-8")
    return trace


def collect(model: str | None, engine_options: dict[str, Any], prompt: str, params: SamplingParams) -> Trace:
    """Decode a prompt with an engine of its own, and keep every round. Raises UserError for options without a tree."""
    if engine_options.get("graphs") == "sim":
        raise ConfigError("trace times each phase by itself, which --graphs sim makes meaningless; leave it out")
    if engine_options.get("overlap"):
        raise ConfigError("trace times each round by itself, which --overlap makes meaningless; leave it out")
    if engine_options.get("speculative_policy") == "auto":
        raise ConfigError("trace shows trees of one shape; leave --speculative-policy auto out")
    llm = LLM(model, **{**engine_options, "speculative_policy": "fixed", "overlap": False})
    if llm.engine.runner.drafter is None:
        raise ConfigError("trace shows a draft head's trees; give --speculative-draft-model-path, not NONE")
    seen: list[tuple[DraftTree, Accepted]] = []

    def observe(plan: RoundPlan, tree: DraftTree, accepted: Accepted) -> None:
        assert len(plan.rows) == 1
        seen.append((tree, accepted))

    llm.engine.observer = observe
    llm.engine.launcher = launcher = TimedLauncher(llm.engine.runner)
    begun = time.perf_counter()
    output = llm.generate(prompt, params)[0]
    times = [*(mark[0] for mark in launcher.marks), time.perf_counter()]
    known, left, rounds = drafted_vocabulary(llm), len(output.token_ids) - 1, []
    for at, ((tree, accepted), marks) in enumerate(zip(seen, launcher.marks, strict=True)):
        if not accepted.finite[0]:
            break  # it gave no token and ended the request; `output.error` says so
        edges = (*marks, times[at + 1])
        ms = [round(1000 * (b - a), 4) for a, b in pairwise(edges)]
        rounds.append(_plain_round(tree, accepted, known, left, (ms[0], ms[1], ms[2], ms[3])))
        left -= rounds[-1].emitted
    assert left <= 0, "the rounds' paths do not spell the output"
    return Trace(llm, prompt, params, output, tuple(rounds), 1000 * (times[0] - begun))


def drafted_vocabulary(llm: LLM) -> frozenset[int]:
    """The target tokens that the draft head can propose."""
    drafter = llm.engine.runner.drafter
    assert drafter is not None
    return frozenset(
        drafter.vocab.to_target(torch.arange(len(drafter.vocab.offset)).to(drafter.vocab.offset.device)).tolist()
    )


def statistics(rounds: Sequence[TreeRound], num_steps: int, topk: int) -> Statistics:
    """Sums over all rounds; a round whose last tokens the output lacks counts with its whole path."""
    by_depth, by_rank = [[0, 0] for _ in range(num_steps)], [[0, 0] for _ in range(topk)]
    by_confidence = [[0, 0] for _ in range(CALIBRATION_BINS)]
    accept_lens = [0] * (num_steps + 1)
    for each in rounds:
        accept_lens[len(each.path) - 1] += 1
        for depth, node in enumerate(each.path):
            following = each.path[depth + 1] if depth + 1 < len(each.path) else None
            if depth < num_steps:
                _count(by_depth[depth], following is not None)
            for rank, child in enumerate(each.children(node)):
                _count(by_rank[rank], child == following)
                own = each.own[child]
                if own is not None:
                    tenth = min(int(own * CALIBRATION_BINS), CALIBRATION_BINS - 1)
                    _count(by_confidence[tenth], child == following)
    return Statistics(by_depth, by_rank, by_confidence, accept_lens, dict(Counter(each.end for each in rounds)))


def page_data(trace: Trace) -> dict[str, Any]:
    """All that the page shows. Text is decoded here; numbers are counted here, and only drawn there."""
    llm, output, rounds = trace.llm, trace.output, trace.rounds
    shape, tokenizer, draft = llm.config.shape, llm.tokenizer, llm.engine.draft
    assert tokenizer is not None  # the prompt was encoded with it
    assert draft is not None
    stream = tokenizer.stream(output.prompt_token_ids)
    used = {*output.prompt_token_ids, *output.token_ids}
    used.update(token for each in rounds for token in (*each.tokens, each.bonus))
    pieces, names = _spell(tokenizer, sorted(used), llm.engine.spec.eos_token_ids)
    return {
        "treetop": __version__,
        "model": _model_name(llm.config.model),
        "draft": _model_name(str(llm.config.draft or llm.config.algorithm)),
        "dtype": str(llm.engine.dtype).removeprefix("torch."),
        "shape": [shape.num_steps, shape.topk, shape.num_draft_tokens],
        "vocabularies": [llm.engine.spec.vocab_size, draft.vocab_size],
        "sampling": _sampling(trace.params, llm.config.seed or 0),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "tokens_per_second": output.metrics.tokens_per_second,
        "accept_length": output.metrics.accept_length,
        "before_ms": round(trace.before_ms, 3),
        "prompt": trace.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "output": list(output.token_ids),
        "text": [stream.push((token,)) for token in output.token_ids],
        "pieces": pieces,
        "names": names,
        "statistics": asdict(trace.statistics()),
        "rounds": [asdict(each) for each in rounds],
    }


def fill_page(data: dict[str, Any]) -> str:
    """The template with the data in it; nothing in the data can end the script element it stands in."""
    template = (resources.files("treetop") / "assets" / "trace.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    assert template.count(DATA_MARK) == 1
    return template.replace(DATA_MARK, text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _plain_round(
    tree: DraftTree, accepted: Accepted, known: frozenset[int], left: int, ms: tuple[float, float, float, float]
) -> TreeRound:
    """The first row of a round; left: output tokens that earlier rounds did not give."""
    accept_len, bonus = int(accepted.accept_len[0]), int(accepted.bonus[0])
    count = int((~tree.is_padding[0]).sum())
    tokens, parent, depth, logprob = (
        each[0, :count].tolist() for each in (tree.tokens, tree.parent, tree.depth, tree.logprob)
    )
    path = accepted.path[0, : accept_len + 1].tolist()
    end: End = "unproposed"
    if accept_len == accepted.path.shape[1] - 1:
        end = "full"
    elif bonus not in known:
        end = "outside"
    elif path[-1] not in parent[1:]:
        end = "leaf"
    return TreeRound(
        tokens=tokens,
        parent=parent,
        depth=depth,
        own=[_probability(logprob[node] - logprob[up] if node else 0.0) for node, up in enumerate(parent)],
        cumulative=[_probability(value) for value in logprob],
        path=path,
        bonus=bonus,
        emitted=max(min(accept_len + 1, left), 0),
        end=end,
        ms=ms,
    )


def _probability(logprob: float) -> float | None:
    """Four digits of the probability; None for what is not a number. A rounding error may not lead above 1."""
    return None if math.isnan(logprob) else float(f"{math.exp(min(logprob, 0.0)):.4g}")


def _count(pair: list[int], accepted: bool) -> None:
    pair[0] += 1
    pair[1] += accepted


def _spell(tokenizer: Tokenizer, ids: Sequence[int], eos_ids: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Each token's text, as it reads behind another token; and names for those that are no text of their own."""
    anchor = tokenizer.encode("a")[-1:]
    lead = len(tokenizer.decode(anchor))
    pieces, names = {}, {}
    for token in ids:
        piece = tokenizer.decode([*anchor, token])[lead:]
        if token in eos_ids:
            names[token] = "end of text"
        elif piece in ("", "\ufffd"):
            names[token] = f"{'part of a character' if piece else 'special'} {token}"
        else:
            pieces[token] = piece
    return pieces, names


def _model_name(model: str) -> str:
    """A model as the page names it: without the folders of the machine it was made on."""
    return model if model.startswith("builtin:") else Path(model).resolve().name


def _sampling(params: SamplingParams, engine_seed: int) -> str:
    if params.greedy:
        return "greedy"
    filters = {"top-k": max(params.top_k, 0), "top-p": params.top_p if params.top_p < 1 else 0, "min-p": params.min_p}
    seed = f"seed {params.seed}" if params.seed is not None else f"engine seed {engine_seed}"
    return ", ".join([f"temperature {params.temperature:g}", *(f"{k} {v:g}" for k, v in filters.items() if v), seed])
