"""What a request gives: its output, pieces of text on the way to it, and how they are put together from updates."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from treetop.server.text import OutputText
from treetop.server.tokenizer import Tokenizer
from treetop.types.requests import RequestUpdate
from treetop.types.sampling import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """target_forwards: decode rounds, prefill excluded. accept_length: (tokens - 1) / rounds, None without a round.

    accept_lens: accepted drafts of each round, before any cut. tokens_per_second: from the
    call to the last token, waiting for a row included. num_cached_tokens: of the prompt, from the prefix cache.
    """

    accept_length: float | None
    target_forwards: int
    tokens_per_second: float
    accept_lens: tuple[int, ...]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's result. text: as it reads after the prompt, cut before a stop string; "" without a tokenizer.

    error: why it was aborted, if it was. timed_out: because its time was over. user_error: for what the request asks.
    logprobs: of each of token_ids; None if
    they were not asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None
    timed_out: bool = False
    logprobs: tuple[TokenLogprobs, ...] | None = None
    user_error: bool = False

    @property
    def round_tokens(self) -> int:
        """Tokens that rounds gave: all but the first, which the prompt gave."""
        return max(len(self.token_ids) - 1, 0)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a step added to prompt `index`: text, token ids, and the ids with log-probabilities if these are asked for.

    A token may come before its text, which may wait for what follows. `output` comes with the last one.
    """

    index: int
    text: str
    output: RequestOutput | None = None
    tokens: tuple[tuple[int, TokenLogprobs], ...] = ()
    token_ids: tuple[int, ...] = ()

    def after(self, waiting: "TextDelta") -> "TextDelta":
        """This and one before it that nobody has taken, as one."""
        ids = waiting.token_ids + self.token_ids
        return replace(self, text=waiting.text + self.text, tokens=waiting.tokens + self.tokens, token_ids=ids)


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended, as its client knows it.

    text: None without a tokenizer. logprobs: None if they were not asked for. first_s, last_s: when the first and the
    last tokens came, None before. prefill_s: as the engine told it with the first. speculates: whether drafts of it may
    be accepted.
    """

    index: int
    prompt_ids: Sequence[int]
    text: OutputText | None
    logprobs: list[TokenLogprobs] | None
    speculates: bool = True
    output_ids: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float | None = None
    prefill_s: float | None = None
    num_cached_tokens: int = 0

    @classmethod
    def of(
        cls, index: int, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> "LiveRequest":
        logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        text = None if tokenizer is None else OutputText(tokenizer.stream(prompt_ids), params.stop)
        return cls(index, prompt_ids, text, logprobs, params.structured_output is None)

    def cut(self, update: RequestUpdate) -> RequestUpdate:
        """Read the update's text; the update up to the first stop string that it completes, which ends the request."""
        at = self.text.feed(update.new_ids) if self.text is not None else None
        if at is None:
            return update
        new_ids, logprobs = update.new_ids[: at + 1], update.logprobs[: at + 1]
        stopped = update._replace(finish_reason="stop", error=None, timed_out=False, user_error=False)
        return stopped._replace(new_ids=new_ids, logprobs=logprobs)

    def apply(self, update: RequestUpdate) -> TextDelta:
        """Take what the request was given, as `cut` has read it, and say it as text."""
        self.output_ids += update.new_ids
        if update.new_ids:
            self.last_s = time.perf_counter()
            self.first_s = self.last_s if self.first_s is None else self.first_s
        if update.prefill_s is not None:
            self.prefill_s = update.prefill_s
        if update.num_cached_tokens is not None:
            self.num_cached_tokens = update.num_cached_tokens
        if update.accept_len is not None:
            self.accept_lens.append(update.accept_len)
        text, piece = self.text, ""
        if text is not None:
            piece = text.piece() if update.finish_reason is None else text.finish()
        tokens: tuple[tuple[int, TokenLogprobs], ...] = ()
        if self.logprobs is not None:
            self.logprobs += update.logprobs
            tokens = tuple(zip(update.new_ids, update.logprobs, strict=True))
        if update.finish_reason is None:
            return TextDelta(self.index, piece, tokens=tokens, token_ids=update.new_ids)
        return TextDelta(self.index, piece, self._output(update), tokens, update.new_ids)

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
                num_cached_tokens=self.num_cached_tokens,
            ),
            error=update.error,
            timed_out=update.timed_out,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            user_error=update.user_error,
        )
