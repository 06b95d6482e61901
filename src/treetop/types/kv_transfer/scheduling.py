"""What a scheduler and its worker's state machine tell each other. Host values only, without the serve extra.

scheduler --Admitted, Imported | Computed, Staged | Dropped--> machine --Recv | Stage--> scheduler
"""

from typing import NamedTuple

from treetop.types.ids import RequestId
from treetop.types.kv_chunk import KVChunk
from treetop.types.requests import EngineRequest, Whose
from treetop.types.sampling import SamplingParams, TokenLogprobs


class FirstToken(NamedTuple):
    """What the prompt's last token sampled: the root. logprobs: if the request asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None


class Prompt(NamedTuple):
    """What is to be prefilled, and how its first token is chosen. lora, digest: name and content of its adapter."""

    ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    lora: str = ""
    digest: str = ""

    def request(self, request_id: RequestId) -> EngineRequest:
        """What a prefill worker's scheduler is asked. The prefix cache has a part for each adapter."""
        salt = Whose(lora=self.lora).salt
        return EngineRequest(request_id, self.ids, self.params, self.seed, cache_salt=salt, lora=self.lora)


class Admitted(NamedTuple):
    """Decode: a request has a row, and waits for its K/V from `start` on, which the prefix cache does not have."""

    request_id: RequestId
    start: int
    prompt: Prompt


class Recv(NamedTuple):
    """Decode: import slot `slot`, which holds the request's next chunk. first: with the last chunk."""

    request_id: RequestId
    slot: int
    chunk: KVChunk
    checksums: tuple[int, ...]
    first: FirstToken | None


class Imported(NamedTuple):
    """Decode: what was in slot `slot` is in the row's pages, or was refused; the slot is free again.

    Also if the request has ended meanwhile.
    """

    request_id: RequestId
    slot: int


class Computed(NamedTuple):
    """Prefill: the pages hold `num_tokens` tokens. first: once these are all."""

    request_id: RequestId
    num_tokens: int
    first: FirstToken | None = None


class Stage(NamedTuple):
    """Prefill: pack a computed chunk into slot `slot`."""

    request_id: RequestId
    slot: int
    chunk: KVChunk


class Staged(NamedTuple):
    """Prefill: slot `slot` holds this chunk, and is written no more.

    checksums: of each segment, in the layout's order; none if it was not packed, because the request has ended.
    """

    request_id: RequestId
    slot: int
    chunk: KVChunk
    checksums: tuple[int, ...]


class Dropped(NamedTuple):
    """A request has ended, or is prefilled here: aborted, retracted, failed.

    Chunks of it that are in flight still end with `Staged` or `Imported`, unless the engine has failed. refusal: why it
    was never begun.
    """

    request_id: RequestId
    refusal: str | None = None


SchedulerEvent = Admitted | Imported | Computed | Staged | Dropped
