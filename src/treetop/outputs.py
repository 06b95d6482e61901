"""What a request gives: its output, pieces of text on the way to it, and how they are put together from updates."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from sys import byteorder
from typing import TYPE_CHECKING, Any

from treetop.text.text import IncrementalDetokenizer
from treetop.text.tokenizer import Tokenizer
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate
from treetop.types.routed_experts import ExpertLayers
from treetop.types.sampling import FinishReason, TokenLogprobs
from treetop.types.verified_tree import VerifiedTree

if TYPE_CHECKING:  # it takes seconds
    from torch import Tensor

PromptLogprobs = tuple[TokenLogprobs | None, ...]
"""Of each token of a prompt; None for the first, which nothing comes before."""


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Which experts tokens went to: of each token and each layer with experts top_k ids, best first.

    shape: [tokens, layers, top_k]; layers without experts have no place.
    ids: int16 in the machine's order of bytes.
    """

    shape: tuple[int, int, int]
    ids: bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's: `numpy.asarray` of this is an array."""
        order = "<" if byteorder == "little" else ">"
        return {"shape": self.shape, "typestr": f"{order}i2", "data": self.ids, "version": 3}

    def tensor(self) -> "Tensor":
        """[tokens, layers, top_k] int16, in memory of its own."""
        import torch  # noqa: PLC0415  # likewise

        flat = torch.frombuffer(bytearray(self.ids) or bytearray(2), dtype=torch.int16)  # it takes no empty buffer
        return flat[: prod(self.shape)].view(self.shape)

    def after(self, start: int) -> "RoutedExperts":
        """Without the first `start` tokens."""
        row, kept = 2 * self.shape[1] * self.shape[2], max(self.shape[0] - start, 0)
        return RoutedExperts((kept, *self.shape[1:]), self.ids[start * row :])

    def npy(self, layers: ExpertLayers) -> bytes:
        """A file of NumPy's in vLLM's form: [tokens, all layers, top_k], 0 in those without experts, uint8 of up to 256
        experts and uint16 of more. Source: version 1.0 of the format, NumPy's lib/format; vLLM's response fields.
        """
        order, narrow = ("<", 0) if byteorder == "little" else (">", 1), layers.num_experts <= 256
        tokens, own, top_k = self.shape
        line, ids = (top_k, self.ids[order[1] :: 2]) if narrow else (2 * top_k, self.ids)
        placed = bytearray(tokens * layers.total * line)
        for place, at in enumerate(layers.at):
            for byte in range(line):
                placed[at * line + byte :: layers.total * line] = ids[place * line + byte :: own * line]
        kind = "|u1" if narrow else f"{order[0]}u2"
        told = {"descr": kind, "fortran_order": False, "shape": (tokens, layers.total, top_k)}
        header, begin = repr(told).encode(), b"\x93NUMPY\x01\x00"
        header += b" " * (-(len(begin) + 2 + len(header) + 1) % 64) + b"\n"
        return begin + len(header).to_bytes(2, "little") + header + bytes(placed)

    def int32(self) -> bytes:
        """The ids alone, four bytes each, the lowest first."""
        numbers = array("i", array("h", self.ids))
        if byteorder == "big":
            numbers.byteswap()
        return numbers.tobytes()


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """target_forwards: decode rounds, prefill excluded.
    accept_length: (tokens - 1) / rounds, None without a round.
    accept_lens: accepted drafts of each round, before any cut.
    num_drafted: drafts that each round verified for it, 0 in a plain one.
    accept_ranks: of each round's accepted drafts among the proposals after their parents, the draft's favourite 0.
    tokens_per_second: from the call to the last token, waiting for a row included.
    num_cached_tokens: of the prompt, from the prefix cache.
    weight_version: how often weights had been replaced when its last tokens were computed.
    """

    accept_length: float | None
    target_forwards: int
    tokens_per_second: float
    accept_lens: tuple[int, ...]
    num_cached_tokens: int = 0
    num_drafted: tuple[int, ...] = ()
    accept_ranks: tuple[tuple[int, ...], ...] = ()
    weight_version: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt's result.

    text: as it reads after the prompt, cut before a stop string; "" without a tokenizer.
    error: why it was aborted, if it was.
    timed_out: whether that was a timeout.
    user_error: for what the request asks.
    logprobs: of each of token_ids; None if they were not asked for.
    prompt_logprobs: of each of prompt_token_ids, None for the first; None if they were not asked for, or never came.
    stop_string: the one of `stop` that ended it, None if it ended otherwise.
    draft_depths: of each of token_ids the depth of the draft that it was; 0 for a token that the target chose beyond
        the drafts.
    trees: of each round, if they were asked for; None for a round without drafts.
    routed_experts: of all tokens of prompt and output but the last, which nothing has processed; of those that came
        where the request was aborted. None if they were not asked for.
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
    prompt_logprobs: PromptLogprobs | None = None
    stop_string: str | None = None
    draft_depths: tuple[int, ...] = ()
    trees: tuple[VerifiedTree | None, ...] = ()
    routed_experts: RoutedExperts | None = None

    @property
    def round_tokens(self) -> int:
        """Tokens that rounds gave: all but the first, which the prompt gave."""
        return max(len(self.token_ids) - 1, 0)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a step added to prompt `index`: text, token ids, and the ids with log-probabilities if these are asked for.

    A token may come before its text, which may wait for what follows. `output` comes with the last one. prompt_logprobs
    come with the first, if they are asked for. draft_depths, trees: as in `RequestOutput`.
    """

    index: int
    text: str
    output: RequestOutput | None = None
    tokens: tuple[tuple[int, TokenLogprobs], ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    draft_depths: tuple[int, ...] = ()
    trees: tuple[VerifiedTree | None, ...] = ()

    def after(self, waiting: "TextDelta") -> "TextDelta":
        """This and one before it that nobody has taken, as one."""
        ids = waiting.token_ids + self.token_ids
        text, tokens = waiting.text + self.text, waiting.tokens + self.tokens
        prompt = self.prompt_logprobs or waiting.prompt_logprobs
        depths, trees = waiting.draft_depths + self.draft_depths, waiting.trees + self.trees
        joined = {"text": text, "tokens": tokens, "token_ids": ids, "draft_depths": depths, "trees": trees}
        return replace(self, **joined, prompt_logprobs=prompt)  # type: ignore[arg-type]  # of many kinds


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended, as its client knows it.

    text: None without a tokenizer.
    logprobs: None if they were not asked for.
    first_s, last_s: when the first and the last tokens came, None before.
    prefill_s: as the engine told it with the first.
    hidden_ends: tokens that the text does not show where one of them ended the request.
    tells_trees: whether each round tells its tree.
    experts: layers and top_k of those that came, None before. expert_ids: see `RoutedExperts`.
    priority: as in `EngineRequest`.
    tenant: the name of the API key that it came with, "" without one.
    """

    index: int
    prompt_ids: Sequence[int]
    text: IncrementalDetokenizer | None
    logprobs: list[TokenLogprobs] | None
    hidden_ends: frozenset[int] = frozenset()
    tells_trees: bool = False
    experts: tuple[int, int] | None = None
    expert_ids: bytearray = field(default_factory=bytearray)
    prompt_logprobs: PromptLogprobs | None = None
    output_ids: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)
    accept_ranks: list[tuple[int, ...]] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    trees: list[VerifiedTree | None] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float | None = None
    prefill_s: float | None = None
    num_cached_tokens: int = 0
    weight_version: int = 0
    priority: int = 0
    tenant: str = ""

    @classmethod
    def of(cls, index: int, asked: EngineRequest, tokenizer: Tokenizer | None) -> "LiveRequest":
        prompt_ids, params = asked.prompt_ids, asked.params
        logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        told: dict[str, Any] = {"priority": asked.priority, "tenant": asked.tenant.name}
        told["tells_trees"] = params.tells_trees
        if tokenizer is None:
            return cls(index, prompt_ids, None, logprobs, **told)
        keeps_stop = params.include_stop_str_in_output
        text = IncrementalDetokenizer(
            tokenizer.stream(prompt_ids, not params.skip_special_tokens), params.stop, keeps_stop
        )
        hidden_ends = frozenset() if params.skip_special_tokens or keeps_stop else tokenizer.special_ids
        return cls(index, prompt_ids, text, logprobs, hidden_ends, **told)

    def take(
        self,
        update: RequestUpdate,
        finish: Callable[[RequestId, int], object],
        observe: "Callable[[LiveRequest, RequestUpdate], None] | None" = None,
    ) -> TextDelta:
        """Take an update, cut at the first stop string, and say it as text.

        finish: tells the core how many tokens of the output the client takes, where it takes fewer. observe: told of
        the update, cut, before the request takes it.
        """
        cut = self.cut(update)
        if cut is not update:
            finish(update.request_id, len(self.output_ids) + len(cut.new_ids))
        if observe is not None:
            observe(self, cut)
        return self.apply(cut)

    def cut(self, update: RequestUpdate) -> RequestUpdate:
        """Read the update's text; the update up to the first stop string that it completes, which ends the request."""
        shown = update.new_ids
        if update.finish_reason == "stop" and shown and shown[-1] in self.hidden_ends:
            shown = shown[:-1]
        at = self.text.feed(shown) if self.text is not None else None
        if at is None:
            return update
        new_ids, logprobs = update.new_ids[: at + 1], update.logprobs[: at + 1]
        stopped = update._replace(finish_reason="stop", error=None, timed_out=False, user_error=False)
        return stopped._replace(new_ids=new_ids, logprobs=logprobs)

    def apply(self, update: RequestUpdate) -> TextDelta:
        """Take what the request was given, as `cut` has read it, and say it as text."""
        self.output_ids += update.new_ids
        depths = update.draft_depths
        trees = (update.tree,) if self.tells_trees and update.accept_len is not None else ()
        self.draft_depths += depths
        self.trees += trees
        if update.new_ids:
            self.last_s = time.perf_counter()
            self.first_s = self.last_s if self.first_s is None else self.first_s
        if update.prefill_s is not None:
            self.prefill_s = update.prefill_s
        if update.num_cached_tokens is not None:
            self.num_cached_tokens = update.num_cached_tokens
        if update.weight_version is not None:
            self.weight_version = update.weight_version
        if update.accept_len is not None:
            self.accept_lens.append(update.accept_len)
            self.num_drafted.append(update.num_drafted)
            self.accept_ranks.append(update.accept_ranks)
        text, piece = self.text, ""
        if text is not None:
            piece = text.piece() if update.finish_reason is None else text.finish()
        tokens: tuple[tuple[int, TokenLogprobs], ...] = ()
        if self.logprobs is not None:
            self.logprobs += update.logprobs
            tokens = tuple(zip(update.new_ids, update.logprobs, strict=True))
        prompt: PromptLogprobs | None = None
        if update.prompt_logprobs is not None:
            prompt = self.prompt_logprobs = (None, *update.prompt_logprobs)
        if update.experts is not None:
            start, layers, top_k, ids = update.experts
            self.experts = layers, top_k
            del self.expert_ids[2 * layers * top_k * start :]  # an engine that goes on tells of all again
            self.expert_ids += ids
        output = None if update.finish_reason is None else self._output(update)
        return TextDelta(self.index, piece, output, tokens, update.new_ids, prompt, depths, trees)

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
                num_drafted=tuple(self.num_drafted),
                accept_ranks=tuple(self.accept_ranks),
                weight_version=self.weight_version,
            ),
            error=update.error,
            timed_out=update.timed_out,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            user_error=update.user_error,
            prompt_logprobs=self.prompt_logprobs,
            stop_string=self.text.stop if self.text is not None and update.finish_reason == "stop" else None,
            draft_depths=tuple(self.draft_depths),
            trees=tuple(self.trees),
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> RoutedExperts | None:
        """Of what is told: an engine may have gone past what the client takes."""
        if self.experts is None:
            return None
        row = 2 * prod(self.experts)
        count = min(len(self.expert_ids) // row, len(self.prompt_ids) + max(len(self.output_ids) - 1, 0))
        return RoutedExperts((count, *self.experts), bytes(memoryview(self.expert_ids)[: count * row]))
