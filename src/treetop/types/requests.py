"""What a client asks of the engine core, and what comes back: host values that can cross a process boundary.

client --EngineRequest--> core --RequestUpdate--> client

Ids only: text, stop strings and tokenizers are the client's.
"""

from typing import NamedTuple

from treetop.types.ids import RequestId
from treetop.types.sampling import FinishReason, SamplingParams


class EngineRequest(NamedTuple):
    """One prompt. The client chooses the id, which no other request of this core may ever have."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


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
    if it was no round. error: why the request failed, if it did. engine_failed: it failed with the whole engine. stats
    come with finish_reason, in the request's last update.
    """

    request_id: RequestId
    new_ids: tuple[int, ...]
    accept_len: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    engine_failed: bool = False
    stats: RequestStats | None = None
