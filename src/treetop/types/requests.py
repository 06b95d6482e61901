"""What a client asks of the engine core, and what comes back: host values that can cross a process boundary.

client --EngineRequest--> core --RequestUpdate--> client

Ids only: text, stop strings and tokenizers are the client's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from treetop.types.errors import InputError
from treetop.types.ids import RequestId
from treetop.types.layout import Layout, SpecShape
from treetop.types.sampling import FinishReason, SamplingParams, TokenLogprobs


class EngineRequest(NamedTuple):
    """One prompt. The client chooses the id, which no other request of this core may ever have.

    priority: lower is served first, if the core's policy goes by it. timeout_s: seconds from its arrival in the core
    after which it is ended with an error; None for no such limit. received: output that the client has already, of an
    engine that is gone; this one goes on behind it, and all limits count it.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int = 0
    timeout_s: float | None = None
    received: tuple[int, ...] = ()


class RequestStats(NamedTuple):
    """A request from its arrival to its end. Times are seconds of the core's clock; None where it never came so far.

    num_cached_tokens: prompt tokens whose K/V the prefix cache gave when the request was first admitted.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_retractions: int
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float


class RequestUpdate(NamedTuple):
    """What a step added to one request.

    new_ids: emitted now, cut at the stop. accept_len: accepted drafts of the round that gave them, before any cut; None
    if it was no round. error: why the request failed, if it did. engine_failed: it failed with the whole engine.
    timed_out: its time was over. stats come with finish_reason, in the request's last update. num_cached_tokens: as in
    the stats, with the first tokens. logprobs: of each of new_ids, if the request asks for them. start: which token of
    the output the first of new_ids is.
    """

    request_id: RequestId
    new_ids: tuple[int, ...]
    accept_len: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    engine_failed: bool = False
    stats: RequestStats | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    timed_out: bool = False
    start: int = 0


class PrefixPages(NamedTuple):
    """How a core keeps what prompts begin with, which says where a prompt is best sent.

    page_size: tokens of a page. lookahead: tokens after a page that it depends on, 1 with a draft head. capacity: pages
    of the smallest pool, of those without a window if there are any.
    """

    page_size: int
    lookahead: int
    capacity: int

    @classmethod
    def of(cls, layout: Layout) -> "PrefixPages":
        pages = layout.num_pages
        whole = [pages[group.name] for group in layout.groups if group.window is None]
        return cls(layout.page_size, int(layout.has_draft), min(whole or pages.values()) - 1)


class CoreInfo(NamedTuple):
    """What a client must know of a core. model_path: the folder. shape: of a round's tree. prefix: None if it
    keeps nothing of prompts.

    can_change_logits, max_logprobs: what a request may ask: penalties, biases and the like, and log-probabilities; -1
    if there are none. eos_ids: the model's. by_priority: whether it goes by the priority of requests.
    """

    model_path: str
    vocab_size: int
    max_context: int
    max_requests: int
    shape: SpecShape
    can_change_logits: bool = False
    max_logprobs: int = -1
    eos_ids: tuple[int, ...] = ()
    by_priority: bool = False
    prefix: PrefixPages | None = None


class CoreLoad(NamedTuple):
    """What a core is busy with. kv_usage: share of the fullest pool that requests hold."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_retractions: int = 0


def check_prompt(prompt_ids: Sequence[int], max_context: int) -> None:
    """Raise InputError for a prompt that is empty or leaves no room for one token."""
    if not prompt_ids:
        raise InputError("the prompt is empty: it has no token after encoding")
    check_length(len(prompt_ids), max_context)


def check_length(num_tokens: int, max_context: int, exact: bool = True) -> None:
    """Raise InputError if a prompt of so many tokens, or of no fewer, leaves no room for one more."""
    if num_tokens >= max_context:
        raise InputError(
            f"the prompt has {'' if exact else 'at least '}{num_tokens} tokens and leaves no room for one more in a"
            f" context of {max_context}; shorten it or raise --context-length"
        )


def check_received(received: Sequence[int], most: int) -> None:
    """Raise InputError if a request that goes on has all that it may have. most: tokens of its output."""
    if received and len(received) >= most:
        raise InputError(f"the request has received {len(received)} tokens of at most {most}: nothing is left to do")


def late_error(num_tokens: int) -> str:
    """What a request is told whose time is over."""
    return f"its time is over: it has {num_tokens} tokens (timeout, --request-timeout)"
