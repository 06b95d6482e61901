"""What a client asks of the engine core, and what comes back: host values that can cross a process boundary.

client --EngineRequest--> core --RequestUpdate--> client

Ids only: text, stop strings and tokenizers are the client's.
"""

from collections.abc import Sequence
from typing import NamedTuple

from treetop.types.config import Exactness
from treetop.types.constraint import StructureLimits, TokenConstraint
from treetop.types.errors import ContextLengthError, InputError
from treetop.types.ids import RequestId
from treetop.types.layout import Layout, SpecShape
from treetop.types.routed_experts import ExpertLayers, TokenExperts
from treetop.types.sampling import FinishReason, SamplingParams, TokenLogprobs
from treetop.types.verified_tree import VerifiedTree


class Tenant(NamedTuple):
    """Whose requests share rows as one: an API key's, by the name of it. "" for those of nobody in particular.

    max_rows: of an engine that they hold at most; None for all.
    """

    name: str = ""
    max_rows: int | None = None


class Whose(NamedTuple):
    """What the requests of one call have in common beside what they ask.

    cache_salt, lora: as in `EngineRequest`. as_one: they share rows as one request, as its choices do.
    """

    tenant: Tenant = Tenant()
    cache_salt: str = ""
    as_one: bool = False
    lora: str = ""

    @property
    def salt(self) -> str:
        """What parts the prefix cache: K/V are an adapter's, too, whatever a request calls its salt."""
        return f"{self.lora}\0{self.cache_salt}" if self.lora or self.cache_salt else ""


class EngineRequest(NamedTuple):
    """One prompt. The client chooses the id, which no other request of this core may ever have.

    priority: lower is served first, if the core's policy goes by it.
    timeout_s: seconds from its arrival in the core after which it is ended with an error; None for no such limit.
    constraint: cannot cross to another process.
    bad_words: sequences of ids of which none may come.
    group: the first choice of those that share rows as one request; None for a request that is alone.
    cache_salt: the prefix cache gives it only what requests with the same salt have left there.
    lora: the name of its adapter; "" for none.
    received: output that the client has already, of an engine that is gone; this one goes on behind it, and all limits
        count it.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    priority: int = 0
    timeout_s: float | None = None
    constraint: TokenConstraint | None = None
    received: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    tenant: Tenant = Tenant()
    group: RequestId | None = None
    cache_salt: str = ""
    lora: str = ""
    lora_version: int = 0


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

    new_ids: emitted now, cut at the stop.
    accept_len: accepted drafts of the round that gave them, before any cut; None if it was no round.
    num_drafted: drafts that this round verified; 0 if it was plain or none.
    accept_ranks: of each accepted draft, as in `RowResult`; () where the host has changed the tree.
    error: why the request failed, if it did.
    engine_failed: it failed with the whole engine.
    timed_out: whether that was a timeout.
    user_error: for what the request asks. stats come with finish_reason, in the request's last update.
    num_cached_tokens: as in the stats, with the first tokens.
    logprobs: of each of new_ids, if the request asks for them.
    start: which token of the output the first of new_ids is.
    queue_s, prefill_s: with the first tokens, seconds from arrival to a row, and from there on.
    prompt_logprobs: of the prompt's tokens from the second on, with the first new token or the end, if the request asks
        for them.
    tree: that the round verified, if the request asks for it.
    weight_version: of what new_ids and those after them are of, with the first of a request, or after it was put back.
    experts: of tokens that the target has processed, and of which nothing was told, if the request asks.
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
    queue_s: float | None = None
    prefill_s: float | None = None
    user_error: bool = False
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_drafted: int = 0
    accept_ranks: tuple[int, ...] = ()
    tree: VerifiedTree | None = None
    weight_version: int | None = None
    experts: TokenExperts | None = None

    @property
    def draft_depths(self) -> tuple[int, ...]:
        """Of each of new_ids the depth of the draft that it was; 0 for a token that no draft gave."""
        count, drafts = len(self.new_ids), self.accept_len or 0
        return (*range(1, min(count, drafts) + 1), *(0,) * (count - drafts))


class PrefixPages(NamedTuple):
    """How a core keeps what prompts begin with, which says where a prompt is best sent.

    page_size: tokens of a page.
    lookahead: tokens after a page that it depends on, 1 with a draft head.
    capacity: pages of the smallest pool, of those without a window if there are any.
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
    """What a client must know of a core.

    model_path: the folder.
    shape: of a round's tree, of several the deepest.
    prefix: None if it keeps nothing of prompts.
    refuses: why it takes no requests, if so.
    structure_limits: of each structured output.
    can_change_logits, max_logprobs, can_constrain, can_withhold, has_trees, expert_layers: what a request may ask:
        penalties, biases and the like; log-probabilities, -1 if there are none; constraints; that no draft is accepted;
        trees of its rounds; experts of its tokens, where they are told.
    eos_ids: the model's.
    by_priority: whether it goes by the priority of requests.
    exactness: in force, of `--exactness`; by: the row of the table of `auto`, "" where the option said so.
    device: that computes, as a GPU's driver or a CPU names it, with what else bits depend on; "" where nothing does.
    loras: names of adapters. lora_versions: how often each has been given to one, whatever engine this is.
    asleep: what sleeps, of `TAGS`.
    weight_version: how often weights have been replaced.
    refuses_now: why it takes no requests until something is changed, if so; others like it may take them.
    lacks_weights: whether those that were put in force last are not there, or may not be, asleep or not.
    simulates: acceptance, for measuring: tokens are not those that were drawn.
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
    can_constrain: bool = False
    refuses: str | None = None
    prefix: PrefixPages | None = None
    structure_limits: StructureLimits = StructureLimits()
    exactness: Exactness = "ties"
    exactness_by: str = ""
    device: str = ""
    can_withhold: bool = False
    has_trees: bool = False
    loras: tuple[str, ...] = ()
    lora_versions: tuple[int, ...] = ()
    asleep: tuple[str, ...] = ()
    weight_version: int = 0
    refuses_now: str | None = None
    lacks_weights: bool = False
    expert_layers: ExpertLayers | None = None
    simulates: bool = False

    def lora_version(self, name: str) -> int:
        """Of an adapter that there is, or of none, 0."""
        return dict(zip(self.loras, self.lora_versions, strict=False)).get(name, 0)


class KVTransferStats(NamedTuple):
    """What a worker does for others, or they for it; counts are since its start.

    mode: of `--disaggregation-mode`.
    num_peers: workers at the other end.
    num_requests_in_flight: requests whose KV is being transferred.
    num_slots_quarantined: of the busy slots, those whose transfer was given up and has not ended.
    num_chunks, num_bytes: offered or pulled.
    num_requests_done: requests whose KV was transferred.
    num_local_prefills: requests that a decode worker had to prefill itself.
    time_seconds: of all chunks' transfers.
    overlapped_time_seconds: of these, while prefill went on.
    num_dropped_messages: from senders without a session.
    read_gb_s, write_gb_s: of the link that was tried last.
    """

    mode: str
    num_peers: int = 0
    num_requests_in_flight: int = 0
    num_slots_busy: int = 0
    num_slots_quarantined: int = 0
    num_chunks: int = 0
    num_bytes: int = 0
    num_requests_done: int = 0
    num_local_prefills: int = 0
    time_seconds: float = 0.0
    overlapped_time_seconds: float = 0.0
    num_dropped_messages: int = 0
    read_gb_s: float = 0.0
    write_gb_s: float = 0.0


class HostTierStats(NamedTuple):
    """What the tier of K/V on the host has done since the start.

    saved_tokens, loaded_tokens: whose K/V went to the host, and came back.
    failed_loads: of which a page was not what had been saved.
    usage_perc: share of the fullest group's pages on the host, 0 to 1.
    disk_saved_tokens, disk_loaded_tokens: whose K/V went on to the disk, and came back from there.
    disk_damaged_pages: files of pages that were not what had been written.
    disk_bytes: of files that are kept.
    """

    saved_tokens: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    usage_perc: float = 0.0
    disk_saved_tokens: int = 0
    disk_loaded_tokens: int = 0
    disk_damaged_pages: int = 0
    disk_bytes: int = 0


class CoreLoad(NamedTuple):
    """What a core is busy with.

    kv_usage: share of the fullest pool that requests hold.
    num_gave_way: requests put back so that others have their share of the rows.
    kv_transfer: None without disaggregation.
    host_tier: None without --kv-offloading-size.
    head_fit: mean tokens of rounds with drafts, of the weights before and of those in force; None where either is not
        known.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_retractions: int = 0
    kv_transfer: KVTransferStats | None = None
    num_gave_way: int = 0
    host_tier: HostTierStats | None = None
    head_fit: tuple[float, float] | None = None


def check_prompt(prompt_ids: Sequence[int], max_context: int) -> None:
    """Raise InputError for a prompt that is empty or leaves no room for one token."""
    if not prompt_ids:
        raise InputError("the prompt is empty: it has no token after encoding")
    check_length(len(prompt_ids), max_context)


def check_length(num_tokens: int, max_context: int, exact: bool = True) -> None:
    """Raise ContextLengthError if a prompt of so many tokens, or of no fewer, leaves no room for one more."""
    if num_tokens >= max_context:
        raise ContextLengthError(
            f"the prompt has {'' if exact else 'at least '}{num_tokens} tokens and leaves no room for one more in a"
            f" context of {max_context}; shorten it or raise --context-length"
        )


def check_received(received: Sequence[int], maximum: int) -> None:
    """Raise InputError if a request that goes on has all that it may have. maximum: tokens of its output."""
    if received and len(received) >= maximum:
        raise InputError(f"the request has received {len(received)} tokens of at most {maximum}: nothing is left to do")


def late_error(num_tokens: int) -> str:
    """The error of a request that timed out."""
    return f"request timed out after {num_tokens} tokens (limit: timeout, --request-timeout)"
