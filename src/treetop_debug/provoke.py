"""Faults, run: does its guard catch each, and is the harm real where no guard looks?

One scenario serves all: held-out prompts on the embedded pair (or ids on the two-group pair, for a fault of windows)
with small pages and chunks, a batch that drains, prefixes that repeat, a request that runs into the context wall, and a
stop token in the middle of an accepted path. A fault of the draft that the embedded head shrugs off is shown by the
dense oracle: what it drafts is not what the head says.

On a GPU the guards run there, on Triton and in captured rounds where a replay repeats what they look at. The decoder
and the readback of committed slots are host code inside the phases, which no replay runs: they look at eager rounds,
and captured rounds of the same fault are compared with the dense oracle. Harm is shown on the CPU: without a guard some
faults address memory that is not theirs, and a GPU context does not survive that.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from treetop.checkpoints.folder import resolve_folder
from treetop.debug.oracle import DensePair
from treetop.doctor.conformance import WINDOW, Conformance, ConformanceCase, follow
from treetop.llm import LLM, RequestOutput
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.errors import TreetopError
from treetop.types.messages import RoundPlan
from treetop.types.sampling import SamplingParams
from treetop.types.tree import Accepted, DraftTree
from treetop_debug.faults import Fault
from treetop_debug.patching import wrapped_runner
from treetop_debug.visibility import VisibilityWatch

_SMALL_TREE: dict[str, Any] = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 6,
}
_CONTEXT = 120
_OPTIONS: dict[str, Any] = {
    "max_running_requests": 4,
    "page_size": 4,
    "chunked_prefill_size": 16,
    "context_length": _CONTEXT,
    "disable_radix_cache": True,
}
_ON: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "cuda": {"device": "cuda", "dtype": "float32", "attention_backend": "triton", "graphs": "auto"},
}
_NO_LEVEL = {"visibility": "visibility decoder", "leased": "ownership of pages", "oracle": "dense oracle"}
"""Guards that belong to no check level, by the words they say."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one run of the scenario gave.

    tokens: of each request.
    rounds: in all.
    error: what stopped it, or None.
    overwritten: results that changed after they were handed out.
    """

    tokens: tuple[tuple[int, ...], ...]
    rounds: int
    error: Exception | None
    overwritten: int

    @property
    def accept_length(self) -> float:
        return sum(len(each) - 1 for each in self.tokens) / max(self.rounds, 1)


@dataclass(frozen=True, slots=True)
class Finding:
    """caught: the guard's words, or None.
    by: which guard.
    harm: what happens without any guard, or None.
    """

    fault: Fault
    caught: str | None
    by: str
    harm: str | None

    @property
    def ok(self) -> bool:
        return self.caught is not None and self.harm is not None


class Provocation:
    """Runs faults against the scenario; a context manager, for the two-group pair's folder.

    device: cpu or cuda, where guards are shown alive.
    options: the engine's there.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.options = device, _ON[device]
        self._conformance = Conformance()
        self._sound: dict[str, Trial] = {}

    def __enter__(self) -> "Provocation":
        self._conformance.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._conformance.__exit__()

    def find(self, fault: Fault) -> Finding:
        """Run a fault with its guard, on the device, and without any, on the CPU; compare the latter with the sound."""
        guarded = self.guarded(fault)
        message = str(guarded.error) if isinstance(guarded.error, TreetopError) else ""
        caught = message if fault.guard in message else None
        by = f"check level {fault.level}" if fault.level is not None else _NO_LEVEL[fault.guard]
        if self.device == "cuda":
            by += ", eager" if looks_from_the_host(fault) else ", captured"
            if looks_from_the_host(fault):
                differs = self.captured_difference(fault)
                by += "; dense oracle, captured"
                caught = f"{caught}; {differs[:60]}" if caught and differs else None
        return Finding(fault, caught, by, self.harm(fault))

    def guarded(self, fault: Fault) -> Trial:
        """The scenario on the device, under the fault's guard."""
        options = dict(self.options)
        if self.device == "cuda" and looks_from_the_host(fault):
            options["graphs"] = "off"
        return self.run(fault, fault.level or 0, watched=fault.guard == "visibility", place=options)

    def captured_difference(self, fault: Fault) -> str | None:
        """The first difference from the dense oracle in rounds as a graph replays them, with no guard on.

        On a CPU GraphSim stands for the graphs. Only for faults that read and write their own memory, if wrongly.
        """
        gpu = self.device == "cuda"
        where = ("triton", "auto", "float32") if gpu else ("torch", "sim", "float64")
        case = ConformanceCase(where[0], where[1], 2, 2, 3, "largest", WINDOW, 5, "shuffled", where[2], overlap=False)
        with fault.active():
            found = self._conformance.run(case, self.device, check_level=0).failure
        if found is not None:
            return found
        options = {**self.options, "graphs": where[1], "dtype": where[2]}  # accepted paths are long on this pair
        return _drafted_otherwise(fault, check_level=0, page_size=2, **_SMALL_TREE, **options)

    def harm(self, fault: Fault) -> str | None:
        """What the fault does at check level 0, on the CPU."""
        key = f"{fault.seed} {fault.options}"
        if key not in self._sound:
            self._sound[key] = self.run(fault, 0, sound=True)
        sound, broken = self._sound[key], self.run(fault, 0)
        if broken.error is not None:
            kind = "pages are lost" if "leased" in str(broken.error) else "the engine stops"
            return f"{kind}: {type(broken.error).__name__}: {_first_line(broken.error)}"
        wrong = sum(a != b for a, b in zip(sound.tokens, broken.tokens, strict=True))
        if wrong:
            return f"wrong tokens in {wrong} of {len(sound.tokens)} requests"
        if broken.overwritten:
            return f"{broken.overwritten} results were overwritten after they were handed out"
        if broken.accept_length < 0.97 * sound.accept_length:
            return f"accept length {broken.accept_length:.2f} instead of {sound.accept_length:.2f}"
        options = {**_ON["cpu"], **_SMALL_TREE, **fault.options}
        failure = _drafted_otherwise(fault, dtype="float64", check_level=0, page_size=4, **options)
        return f"not what the head drafts: {failure[:80]}" if failure is not None else None

    def run(
        self,
        fault: Fault,
        level: int,
        *,
        watched: bool = False,
        sound: bool = False,
        place: Mapping[str, Any] = _ON["cpu"],
    ) -> Trial:
        """The scenario on an engine with the fault (or a sound one, with the same options). place: device options."""
        model, draft = (BUILTIN_MODEL, BUILTIN_DRAFT) if fault.seed is None else self._conformance.pair(fault.seed)
        options = {"speculative_policy": "fixed", **_OPTIONS, **fault.options, **place, "check_level": level}
        outputs: list[RequestOutput] = []
        kept: list[tuple[Tensor, list[Any]]] = []
        error: Exception | None = None
        with nullcontext() if sound else fault.active():
            try:
                with wrapped_runner(VisibilityWatch().wrap) if watched else nullcontext():
                    llm = LLM(model, draft, **options)
                llm.engine.observer = lambda plan, tree, accepted: kept.append(_note(plan, tree, accepted))
                _scenario(llm, outputs)
                llm.scheduler.check_integrity()
            except Exception as caught:  # whatever a fault breaks is a finding
                error = _without_frames(caught)
        tokens = tuple(output.token_ids for output in outputs)
        rounds = sum(output.metrics.target_forwards for output in outputs)
        return Trial(tokens, rounds, error, sum(tensor.tolist() != values for tensor, values in kept))


def find_in_scene(fault: Fault) -> Finding:
    """Run a fault in its own scene: with its guard, and without any."""
    assert fault.scene is not None
    caught = None
    watched = wrapped_runner(VisibilityWatch().wrap) if fault.guard == "visibility" else nullcontext()
    with TemporaryDirectory(prefix="treetop-scene-") as folder:
        try:
            with fault.active(), watched:
                fault.scene(Path(folder) / "guarded", fault.level or 0)
        except TreetopError as error:
            caught = str(error) if fault.guard in str(error) else None
        with fault.active():
            harm = fault.scene(Path(folder) / "harm", -1)
    by = _NO_LEVEL[fault.guard] if fault.level is None else f"check level {fault.level}"
    return Finding(fault, caught, by, harm or None)


def looks_from_the_host(fault: Fault) -> bool:
    """Whether the fault's guard is host code inside the phases: the decoder, or the readback of committed slots."""
    return fault.guard == "visibility" or fault.level == 3


def _drafted_otherwise(fault: Fault, **options: Any) -> str | None:
    """The first difference of the embedded pair's rounds with the fault from the dense oracle, or None."""
    oracle = DensePair(resolve_folder(BUILTIN_MODEL), resolve_folder(BUILTIN_DRAFT))
    with fault.active():
        llm = LLM(BUILTIN_MODEL, BUILTIN_DRAFT, speculative_policy="fixed", **options)
        return follow(llm, oracle, _prompts(llm)[:1], [SamplingParams(max_tokens=12, ignore_eos=True)])[2]


def _scenario(llm: LLM, outputs: list[RequestOutput]) -> None:
    prompts = _prompts(llm)
    # The last row of four ends first: its place in the row list is padding while a long prompt is prefilled in it.
    ragged = [ids[:length] for ids, length in zip(prompts, (9, 3, 10, 28, 53, 58), strict=False)]
    paces = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (24, 24, 24, 4, 16, 16)]
    outputs += llm.generate(ragged, paces)
    first = llm.generate(prompts[:4], SamplingParams(max_tokens=30, ignore_eos=True))
    outputs += first
    # The same beginnings again, the draft's last shared token followed by another one.
    outputs += llm.generate([[*ids[:41], 7] for ids in prompts[:2]], SamplingParams(max_tokens=10, ignore_eos=True))
    nearly = [(ids * 2)[: _CONTEXT - 14] for ids in prompts[6:8]]
    outputs += llm.generate(nearly, SamplingParams(max_tokens=_CONTEXT, ignore_eos=True))  # to the context wall
    outputs += _stop_inside_a_path(llm, prompts[:4], first)


def _stop_inside_a_path(llm: LLM, prompts: Sequence[list[int]], before: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Repeat requests so that a round holds a stop token and, behind it, the last token that max_tokens allows."""
    outputs = []
    for ids, known in zip(prompts, before, strict=True):
        emitted = 1
        for accepted in known.metrics.accept_lens:
            stop = known.token_ids[emitted] if emitted < len(known.token_ids) else None
            if accepted >= 2 and stop is not None and stop not in known.token_ids[:emitted]:
                params = SamplingParams(max_tokens=emitted + 2, stop_token_ids=(stop,), ignore_eos=True)
                outputs += llm.generate(ids, params)
                break
            emitted += accepted + 1
    return outputs


def _prompts(llm: LLM) -> list[list[int]]:
    """Eight prompts of different lengths, each longer than a prefix that is used twice."""
    if llm.tokenizer is None:
        return [[(7 * i + 13 * j) % 96 for j in range(44 + 3 * i)] for i in range(8)]
    path = resolve_folder(BUILTIN_MODEL).parent / "prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()[::8][:8]
    texts = [json.loads(line)["prompt"] for line in lines]
    return [llm.tokenizer.encode(text)[: 44 + 3 * i] for i, text in enumerate(texts)]


def _note(plan: RoundPlan, tree: DraftTree, accepted: Accepted) -> tuple[Tensor, list[Any]]:
    """A handed-out tensor, and what it held then."""
    assert tree.tokens.shape[0] == accepted.tokens.shape[0] >= len(plan.rows)
    return accepted.tokens, accepted.tokens.tolist()


def _without_frames(error: Exception) -> Exception:
    """The same; its traceback would hold the engine that it was raised in."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__, each = None, each.__cause__ or each.__context__
    return error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:90]
