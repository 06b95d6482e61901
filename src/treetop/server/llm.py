"""The offline interface: `LLM(...).generate(prompts, params)`."""

import random
import reprlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from treetop.core.engine_core import EngineCore
from treetop.core.thread import CoreClient, CoreThread
from treetop.engine.engine import Engine
from treetop.scheduler.scheduler import Scheduler
from treetop.server.text import OutputText, StopStrings
from treetop.server.tokenizer import extra_eos_ids, open_tokenizer
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError, PromptError
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop.types.sampling import FinishReason, SamplingParams

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
    """A request of a `stream` call that has not ended, as its client knows it.

    text, stop: None without a tokenizer, and without stop strings.
    """

    index: int
    prompt_ids: list[int]
    text: OutputText | None
    stop: StopStrings | None
    output_ids: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)

    def cut(self, update: RequestUpdate) -> RequestUpdate:
        """The update up to the first stop string that it completes, which then ends the request."""
        at = self.stop.feed(update.new_ids) if self.stop is not None else None
        if at is None:
            return update
        return update._replace(new_ids=update.new_ids[: at + 1], finish_reason="stop", error=None)

    def apply(self, update: RequestUpdate) -> "TextDelta":
        """Take what the request was given, and say it as text."""
        self.output_ids += update.new_ids
        if update.accept_len is not None:
            self.accept_lens.append(update.accept_len)
        piece = self.text.push(update.new_ids) if self.text is not None else ""
        if update.finish_reason is None:
            return TextDelta(self.index, piece)
        piece += self.text.finish() if self.text is not None else ""
        return TextDelta(self.index, piece, self._output(update))

    def _output(self, update: RequestUpdate) -> RequestOutput:
        elapsed = time.perf_counter() - self.started_s
        rounds, emitted = len(self.accept_lens), len(self.output_ids)
        assert update.finish_reason is not None
        return RequestOutput(
            prompt_token_ids=tuple(self.prompt_ids),
            token_ids=tuple(self.output_ids),
            text=self.text.full() if self.text is not None else "",
            finish_reason=update.finish_reason,
            metrics=RequestMetrics(
                accept_length=(emitted - 1) / rounds if rounds else None,
                target_forwards=rounds,
                tokens_per_second=emitted / elapsed,
                accept_lens=tuple(self.accept_lens),
            ),
            error=update.error,
        )


class _Unset(Enum):
    """`draft` was not given, which is not the same as None."""

    UNSET = auto()


class LLM:
    """The engine core in this process, and a tokenizer.

    Without `model` and `draft` it runs the embedded pair; a model without a draft decodes plainly, and `draft=None`
    says so. Both are folders, or builtin:NAME. Options bear the names of `EngineConfig`. Raises UserError for a
    configuration that cannot work.
    An engine that fails at run time ends every request, and their streams raise; what is asked later runs again.
    Streams may be open side by side, also in several threads; the engine runs on a thread of its own, which ends with
    `close`, or when nothing holds the LLM or its streams any more.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | _Unset | None = _Unset.UNSET,
        **options: Any,
    ) -> None:
        chosen = {} if draft is _Unset.UNSET else {"draft": _folder(draft)}
        self.config = EngineConfig.of(_folder(model), **options, **chosen)
        engine = Engine(self.config)
        self.model_path, self.draft_path = engine.model_path, engine.draft_path
        self.tokenizer = open_tokenizer(self.model_path)
        eos_ids = (*engine.spec.eos_token_ids, *extra_eos_ids(self.model_path))
        self.engine, self.scheduler = engine, Scheduler(engine.layout, self.config, eos_ids)
        self._core = CoreThread(EngineCore(self.engine, self.scheduler))
        self._seeds = random.Random(self.config.seed)

    def close(self) -> None:
        """End every request with an error, and stop the engine's thread. What is asked later is an EngineError."""
        self._core.close()

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
        for each in paired:
            self._check_stops(each)
        return self._run(listed, paired)

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[TextDelta]:
        live, asked = {}, []
        for index, (ids, each) in enumerate(zip(prompts, params, strict=True)):
            request_id, seed = self._core.next_id(), self._seeds.getrandbits(63) if each.seed is None else each.seed
            live[request_id] = self._live(index, ids, each)
            asked.append(EngineRequest(request_id, tuple(ids), each, seed))
        with CoreClient(self._core) as client:
            client.add(asked)
            while live:
                for update in client.get():
                    if update.engine_failed:
                        raise client.failure
                    mine = live[update.request_id]
                    cut = mine.cut(update)
                    if cut is not update:
                        client.finish(update.request_id, len(mine.output_ids) + len(cut.new_ids))
                    if cut.finish_reason is not None:
                        del live[update.request_id]
                    yield mine.apply(cut)

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
        elif isinstance(prompt, _BYTES) or not isinstance(prompt, Sequence) or not all(map(_is_id, prompt)):
            raise InputError(f"a prompt must be text or a list of token ids, got {reprlib.repr(prompt)}")
        else:
            ids = [int(token) for token in prompt]
        self._check_ids("prompt", ids)
        return ids

    def _check_ids(self, whose: str, ids: Sequence[int]) -> None:
        vocab = self.engine.spec.vocab_size
        outside = next((token for token in ids if not 0 <= token < vocab), None)
        if outside is not None:
            raise InputError(f"{whose} token id {outside} lies outside the vocabulary [0, {vocab})")

    def _check_stops(self, params: SamplingParams) -> None:
        self._check_ids("stop", params.stop_token_ids)
        if params.stop and self.tokenizer is None:
            raise InputError(f"stop strings need a tokenizer, and {self.model_path} has no tokenizer.json")

    def _live(self, index: int, prompt_ids: list[int], params: SamplingParams) -> _Live:
        if self.tokenizer is None:
            return _Live(index, prompt_ids, None, None)
        text = OutputText(self.tokenizer.stream(prompt_ids), params.stop)
        stop = StopStrings(self.tokenizer.stream(prompt_ids), params.stop) if params.stop else None
        return _Live(index, prompt_ids, text, stop)


def _folder(name: str | Path | None) -> str | None:
    """What the options hold; what is neither text nor a path is left for them to refuse."""
    return str(name) if isinstance(name, Path) else name


_BYTES = (bytes, bytearray, memoryview)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _paired(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or any(not isinstance(each, SamplingParams) for each in params):
        raise InputError(f"params must be SamplingParams, or a list of them, got {reprlib.repr(params)}")
    if len(params) != count:
        raise InputError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one each")
    return list(params)
