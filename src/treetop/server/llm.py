"""The offline interface: `LLM(...).generate(prompts, params)`."""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from treetop.debug.faults import active_fault
from treetop.engine.device import Device
from treetop.engine.engine import Engine, Ticket
from treetop.engine.pure import Pure
from treetop.scheduler.request import Request, RequestUpdate
from treetop.scheduler.scheduler import Scheduler
from treetop.server.text import OutputText, StopStrings
from treetop.server.tokenizer import extra_eos_ids, open_tokenizer
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError, PromptError, shown
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
    """One prompt's result. text: as it reads after the prompt, cut before a stop string; "" without a tokenizer.

    error: why it was aborted, if it was.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None

    @property
    def round_tokens(self) -> int:
        """Tokens that rounds gave: all but the first, which the prompt gave."""
        return max(len(self.token_ids) - 1, 0)


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


class _Unset(Enum):
    """`draft` was not given, which is not the same as None."""

    UNSET = auto()


class LLM:
    """An engine, a scheduler and a tokenizer in one process.

    Without `model` and `draft` it runs the embedded pair; a model without a draft decodes plainly, and `draft=None`
    says so. Both are folders, or builtin:NAME. Options bear the names of `EngineConfig`. pure, wrap: for tests, see
    `Engine`; TREETOP_FAULT in the environment names a fault too. Raises UserError for a configuration that cannot work.
    An engine that fails at run time ends every request: the stream that ran it raises, the others get an error.
    Streams may be open side by side, also in several threads, which take turns at running the engine for all.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | _Unset | None = _Unset.UNSET,
        pure: Pure | None = None,
        wrap: Callable[[Device], Device] | None = None,
        **options: Any,
    ) -> None:
        pure = pure or active_fault(os.environ)
        chosen = {} if draft is _Unset.UNSET else {"draft": _folder(draft)}
        self.config = EngineConfig.of(_folder(model), **options, **chosen)
        self.engine = Engine(self.config, pure, wrap)
        self.model_path, self.draft_path = self.engine.model_path, self.engine.draft_path
        self.tokenizer = open_tokenizer(self.model_path)
        eos_ids = (*self.engine.spec.eos_token_ids, *extra_eos_ids(self.model_path))
        self.scheduler = Scheduler(self.engine.layout, self.config, eos_ids, pure)
        self._seeds = random.Random(self.config.seed)
        # Of scheduler, engine and inbox; a stream that is collected while its thread runs another takes it again.
        self._lock = threading.RLock()
        self._inbox: dict[RequestId, list[RequestUpdate]] = {}
        self._tickets: deque[Ticket] = deque()  # steps that run, oldest first

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
        stops = [self._stop_checker(ids, each) for ids, each in zip(listed, paired, strict=True)]
        return self._run(listed, paired, stops)

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], stops: list[StopChecker]
    ) -> Iterator[TextDelta]:
        live: dict[RequestId, _Live] = {}
        try:
            with self._lock:
                for index, (ids, each, stop) in enumerate(zip(prompts, params, stops, strict=True)):
                    seed = self._seeds.getrandbits(63) if each.seed is None else each.seed
                    text = OutputText(self.tokenizer.stream(ids), each.stop) if self.tokenizer is not None else None
                    request_id = self.scheduler.add(ids, each, seed, stop)
                    live[request_id] = _Live(index, self.scheduler.request(request_id), text)
            while live:
                with self._lock:
                    waiting = [update for request_id in live for update in self._inbox.pop(request_id, [])]
                    if not waiting:
                        self._advance()
                for update in waiting:
                    yield _delta(live[update.request_id], update)
                    if update.finish_reason is not None:
                        del live[update.request_id]
        finally:
            with self._lock:
                for request_id in live:
                    self.scheduler.abort(request_id)
                    self._inbox.pop(request_id, None)
                while self._tickets and not self.scheduler.has_work:  # launched for requests that have ended
                    self._advance()

    def _advance(self) -> None:
        """Keep the engine busy, then commit its oldest step; each stream finds its requests' updates in the inbox."""
        try:
            while (plan := self.scheduler.plan()) is not None:
                self._tickets.append(self.engine.launch(plan))
            assert self._tickets, "requests are alive but nothing can run"
            ticket = self._tickets.popleft()
            updates = self.scheduler.commit(ticket.plan, self.engine.collect(ticket))
        except BaseException as error:
            self._tickets.clear()
            self._post(self.scheduler.fail(f"the engine failed: {type(error).__name__}: {error}"))
            raise
        self._post(updates)

    def _post(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            self._inbox.setdefault(update.request_id, []).append(update)

    def _ids_of(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
            raise InputError(f"prompts must be text, token ids, or a list of these, got {type(prompts).__name__}")
        one = isinstance(prompts, str) or (len(prompts) > 0 and _is_id(prompts[0]))
        listed = cast(Sequence[Prompt], [prompts] if one else prompts)
        return [self._checked(prompt, index, len(listed)) for index, prompt in enumerate(listed)]

    def _checked(self, prompt: Prompt, index: int, count: int) -> list[int]:
        """A prompt's ids. Raises PromptError, which names it among several, if it can never run."""
        try:
            ids = self._encode(prompt)
            self.scheduler.check_prompt(ids)
        except InputError as error:
            raise PromptError(index, count, str(error)) from None
        return ids

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError(f"{self.model_path} has no tokenizer.json; pass token ids instead of text")
            self.scheduler.check_length(self.tokenizer.fewest_tokens(prompt), exact=False)
            ids = self.tokenizer.encode(prompt)
        else:
            listed = isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES)
            if listed:
                self.scheduler.check_length(len(prompt))  # before each of its ids is looked at
            if not listed or not all(map(_is_id, prompt)):
                raise InputError(f"a prompt must be text or a list of token ids, got {shown(prompt)}")
            ids = [int(token) for token in prompt]
        self._check_ids("prompt", ids)
        return ids

    def _check_ids(self, whose: str, ids: Sequence[int]) -> None:
        vocab = self.engine.spec.vocab_size
        outside = next((token for token in ids if not 0 <= token < vocab), None)
        if outside is not None:
            raise InputError(f"{whose} token id {shown(outside)} lies outside the vocabulary [0, {vocab})")

    def _stop_checker(self, prompt_ids: list[int], params: SamplingParams) -> StopChecker:
        self._check_ids("stop", params.stop_token_ids)
        if not params.stop:
            return NoStop()
        if self.tokenizer is None:
            raise InputError(f"stop strings need a tokenizer, and {self.model_path} has no tokenizer.json")
        return StopStrings(self.tokenizer.stream(prompt_ids), params.stop)


def _folder(name: str | Path | None) -> str | None:
    """What the options hold; what is neither text nor a path is left for them to refuse."""
    return str(name) if isinstance(name, Path) else name


_BYTES = (bytes, bytearray, memoryview)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


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
    if not isinstance(params, Sequence) or any(not isinstance(each, SamplingParams) for each in params):
        raise InputError(f"params must be SamplingParams, or a list of them, got {shown(params)}")
    if len(params) != count:
        raise InputError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one each")
    return list(params)
