"""The offline interface: `LLM(...).generate(prompts, params)`."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from treetop.debug.faults import active_fault
from treetop.engine.device import Device
from treetop.engine.engine import Engine
from treetop.engine.pure import Pure
from treetop.scheduler.request import Request, RequestUpdate
from treetop.scheduler.scheduler import Scheduler
from treetop.server.text import OutputText, StopStrings
from treetop.server.tokenizer import Tokenizer, extra_eos_ids
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL, EngineConfig
from treetop.types.errors import InputError
from treetop.types.ids import RequestId
from treetop.types.sampling import FinishReason, SamplingParams
from treetop.types.stopping import NoStop, StopChecker

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """target_forwards: decode rounds, prefill excluded. accept_length: (tokens - 1) / rounds, None without a round.

    accept_lens: accepted drafts of each round, before any cut. tokens_per_second: from the
    call to the last token, waiting for a row included.
    """

    accept_length: float | None
    target_forwards: int
    tokens_per_second: float
    accept_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's result. error: why it was aborted, if it was."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that a step added to prompt `index`; `output` comes with the last one."""

    index: int
    text: str
    output: RequestOutput | None = None


@dataclass(slots=True)
class _Live:
    """A request of a `stream` call that has not ended."""

    index: int
    request: Request
    text: OutputText | None
    started_s: float = field(default_factory=time.perf_counter)


_UNSET = "unset"


class LLM:
    """An engine, a scheduler and a tokenizer in one process.

    Without `model` and `draft` it runs the embedded pair; a model without a draft decodes plainly, and `draft=None`
    says so. Options bear the names of `EngineConfig`. pure, wrap: for tests, see
    `Engine`; TREETOP_FAULT in the environment names a fault too. Raises UserError for a configuration that cannot work.
    """

    def __init__(
        self,
        model: str | None = None,
        draft: str | None = _UNSET,
        pure: Pure | None = None,
        wrap: Callable[[Device], Device] | None = None,
        **options: Any,
    ) -> None:
        pure = pure or active_fault(os.environ)
        if draft == _UNSET:
            plain = model is not None or options.get("speculative_algorithm") == "NONE"
            draft = None if plain else BUILTIN_DRAFT
        self.config = EngineConfig.from_options(model=str(model or BUILTIN_MODEL), draft=draft, **options)
        self.engine = Engine(self.config, pure, wrap)
        self.model_path, self.draft_path = self.engine.model_path, self.engine.draft_path
        self.tokenizer = Tokenizer(self.model_path) if (self.model_path / "tokenizer.json").is_file() else None
        eos_ids = (*self.engine.spec.eos_token_ids, *extra_eos_ids(self.model_path))
        self.scheduler = Scheduler(self.engine.layout, self.config, eos_ids, pure)
        self._seeds = random.Random(self.config.seed)
        self._inbox: dict[RequestId, list[RequestUpdate]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt. A str or a list of ids is one prompt; a list of params pairs with the prompts."""
        outputs = {delta.index: delta.output for delta in self.stream(prompts, params) if delta.output is not None}
        return [outputs[index] for index in sorted(outputs)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[TextDelta]:
        """As `generate`, in pieces of text as they come. Bad input raises before any work; leaving early aborts."""
        listed = self._ids_of(prompts)
        paired = _paired(params, len(listed))
        for ids in listed:
            self.scheduler.check_prompt(ids)
        return self._run(listed, paired, [self._stop_checker(each) for each in paired])

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], stops: list[StopChecker]
    ) -> Iterator[TextDelta]:
        live: dict[RequestId, _Live] = {}
        for index, (ids, each, stop) in enumerate(zip(prompts, params, stops, strict=True)):
            seed = self._seeds.getrandbits(63) if each.seed is None else each.seed
            request_id = self.scheduler.add(ids, each, seed, stop)
            text = OutputText(self.tokenizer, each.stop) if self.tokenizer is not None else None
            live[request_id] = _Live(index, self.scheduler.request(request_id), text)
        try:
            while live:
                waiting = [update for request_id in live for update in self._inbox.pop(request_id, [])]
                if not waiting:
                    self._advance()
                for update in waiting:
                    yield _delta(live[update.request_id], update)
                    if update.finish_reason is not None:
                        del live[update.request_id]
        finally:
            for request_id in live:
                self.scheduler.abort(request_id)
                self._inbox.pop(request_id, None)

    def _advance(self) -> None:
        """One step for everybody; each stream finds its requests' updates in the inbox."""
        plan = self.scheduler.plan()
        assert plan is not None, "requests are alive but nothing can run"
        for update in self.scheduler.commit(plan, self.engine.step(plan)):
            self._inbox.setdefault(update.request_id, []).append(update)

    def _ids_of(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed = cast(Sequence[Prompt], [prompts] if one else prompts)
        return [self._encode(prompt) for prompt in listed]

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(f"{self.model_path} has no tokenizer.json; pass token ids instead of text")
            return self.tokenizer.encode(prompt)
        vocab = self.engine.spec.vocab_size
        bad = [token for token in prompt if not 0 <= token < vocab]
        if bad:
            raise InputError(f"prompt token id {bad[0]} lies outside the vocabulary [0, {vocab})")
        return list(prompt)

    def _stop_checker(self, params: SamplingParams) -> StopChecker:
        if not params.stop:
            return NoStop()
        if self.tokenizer is None:
            raise InputError(f"stop strings need a tokenizer, and {self.model_path} has no tokenizer.json")
        return StopStrings(self.tokenizer.stream(), params.stop)


def _delta(live: _Live, update: RequestUpdate) -> TextDelta:
    piece = live.text.push(update.new_ids) if live.text is not None else ""
    if update.finish_reason is None:
        return TextDelta(live.index, piece)
    piece += live.text.finish() if live.text is not None else ""
    return TextDelta(live.index, piece, _output(live, update))


def _output(live: _Live, update: RequestUpdate) -> RequestOutput:
    request = live.request
    elapsed = time.perf_counter() - live.started_s
    rounds, emitted = len(request.accept_lens), len(request.output_ids)
    assert update.finish_reason is not None
    return RequestOutput(
        prompt_token_ids=request.prompt_ids,
        token_ids=tuple(request.output_ids),
        text=live.text.full() if live.text is not None else "",
        finish_reason=update.finish_reason,
        metrics=RequestMetrics(
            accept_length=(emitted - 1) / rounds if rounds else None,
            target_forwards=rounds,
            tokens_per_second=emitted / elapsed,
            accept_lens=tuple(request.accept_lens),
        ),
        error=update.error,
    )


def _paired(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InputError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one each")
    return list(params)
