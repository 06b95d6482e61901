"""What the endpoints share: the model, its names and defaults, admission, and the counting of what is served."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fastapi import Request

from treetop.api.batches.store import BatchStore
from treetop.api.errors import ApiError
from treetop.api.events import client_gone
from treetop.api.keys.api_keys import CALLER, ApiKey, Keys
from treetop.api.metrics import Metrics
from treetop.api.rendering import Rendering
from treetop.api.requests.fields import SamplingFields
from treetop.api.requests.message_members import check_messages
from treetop.api.response_store import ResponseStore
from treetop.api.telemetry.tracing import check_tracing, open_tracer
from treetop.async_llm import AsyncLLM, DeltaStream
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.sampling_defaults import sampling_defaults, unsupported
from treetop.core.clients import EngineClient
from treetop.distributed.in_flight import InFlightCounter
from treetop.outputs import LiveRequest, RequestOutput
from treetop.parsers.registry import output_format
from treetop.serve_options import ServeOptions
from treetop.text.chat_input import Message
from treetop.text.chat_template import ChatTemplate, open_chat_template
from treetop.text.tokenizer import open_tokenizer
from treetop.types.constraint import StructuredOutput
from treetop.types.errors import ConfigError, InputError, shown
from treetop.types.requests import RequestUpdate, Tenant, Whose, check_prompt, late_error
from treetop.types.sampling import SamplingParams
from treetop.version import __version__

if TYPE_CHECKING:
    from treetop.api.requests.chat_body import ChatMessage

log = logging.getLogger("treetop.server")

StructureRequest = tuple[str, StructuredOutput]
"""The field that asks for a structure, and the structure."""
MAX_QUEUED_IDS = 2**22
"""Ids of one request's prompts and options, counted for each choice: what the engine is told at once."""


class ApiState:
    """One API process.

    leaving: shutting down soon; /health/ready is 503, and requests are still served.
    draining: shutting down; new work gets 503, and running requests are finished.
    num_working: requests in progress that may be work.
    """

    def __init__(
        self,
        core: EngineClient,
        options: ServeOptions,
        model: str,
        seed: int,
        alive: InFlightCounter,
        keys: Keys | None = None,
    ) -> None:
        """model: as the caller named it. alive: counts the requests of all API processes. keys: None for those of the
        options.

        Raises UserError for files of the model that cannot be read.
        """
        self.options, self.core = options, core
        self.base_names = options.served_model_name or (model,)
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0], core.info)
        self.tracer = open_tracer(options.otlp_traces_endpoint, self.names[0])
        self.keys = keys or Keys.of(options)
        self.llm = AsyncLLM.of(core, seed, self._observe, alive)
        folder = Path(core.info.model_path)
        self.defaults = sampling_defaults(folder)
        for wish in unsupported(folder):
            log.warning("generation_config.json: %s is not supported: it is not applied", wish)
        if self.defaults["repetition_penalty"] != 1 and not core.info.can_change_logits:
            log.warning("generation_config.json: repetition_penalty is not applied, for this engine changes no logits")
            self.defaults["repetition_penalty"] = 1.0
        template = open_chat_template(folder, options.chat_template)
        self.rendering = None if template is None else Rendering(template)
        self.output_format = output_format(
            "" if template is None else template.code, options.tool_call_parser, options.reasoning_parser
        )
        path = options.responses_db
        self.responses = None if path is None and options.num_api_workers > 1 else ResponseStore(path)
        self.asked_to_leave, self.draining = asyncio.Event(), False
        self.num_working = 0
        self._alive, self._most_alive = alive, core.info.max_requests + options.max_queued_requests

    @property
    def system_fingerprint(self) -> str:
        """What bits of an answer depend on beside the request and the machine: this version, what is exact, and why."""
        info = self.core.info
        by = f"-by-auto.{info.exactness_by}" if info.exactness_by else ""
        return f"treetop-{__version__}-{info.exactness}{by}"

    @property
    def leaving(self) -> bool:
        return self.asked_to_leave.is_set()

    @property
    def names(self) -> tuple[str, ...]:
        """Of models, and of adapters that are loaded."""
        return (*self.base_names, *self.core.info.loras)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(404, f"model: {name[:200]!r} is not served here", "model", "model_not_found")

    async def check_structure(self, request: Request, body: SamplingFields, asked: StructureRequest | None) -> None:
        """Wait until a structure is known to be one that can be kept.

        Raises InputError, which names the field, if it cannot, and ApiError if the time is over or the client is gone.
        """
        if asked is None:
            return
        field, structure = asked
        checked, gone = (
            asyncio.ensure_future(each) for each in (self.llm.check_structure(structure), client_gone(request.receive))
        )
        try:
            await asyncio.wait({checked, gone}, timeout=self._timeout_of(body), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (checked, gone):
                if not each.done():
                    each.cancel()
        if not checked.done():
            if gone.done():
                raise ApiError(499, "the client is gone")
            raise ApiError(504, late_error(0), "timeout", "timeout")
        try:
            checked.result()
        except InputError as error:
            raise InputError(str(error).replace("structured_output", field, 1)) from None

    def start(
        self,
        ids: Sequence[list[int]],
        body: SamplingFields,
        max_tokens: int | None,
        structure: StructureRequest | None,
        shows_special: bool = False,
    ) -> DeltaStream:
        """Queue n choices of each prompt. Raises InputError, and ApiError if the queue is full.

        max_tokens: None for all that the context holds. structure: of every choice. shows_special: special tokens are
        in the text for whoever reads it here.
        """
        if self.core.info.refuses is not None:
            raise ApiError(400, self.core.info.refuses, code="prefill_worker")
        maximum = self.core.info.max_context if max_tokens is None else max_tokens
        held_to = None if structure is None else structure[1]
        key = CALLER.get()
        params, timeout_s = body.params(self.defaults, maximum, held_to), self._timeout_of(body)
        if shows_special:
            params = replace(params, skip_special_tokens=False)
        prompts = [each for each in ids for _ in range(body.n)]
        self._check_size(ids, body.n, params)
        start, shortest = body.experts_start, min(map(len, ids), default=0)
        if start > shortest:
            name = "routed_experts_start_len" if body.routed_experts_start_len else "routed_experts_prompt_start"
            raise InputError(f"{name} {start}: at most the prompt's {shortest} tokens")
        with self._alive.locked():
            self._admit(len(prompts))
            stream = self.llm.queue(
                prompts,
                [params] * len(prompts),
                body.priority,
                timeout_s,
                seeds=body.seeds(len(ids)),
                whose=_whose(key, body.cache_salt, self._adapter_of(body.model)),
            )
        num_tokens = sum(map(len, prompts))
        self.metrics.arrived(num_tokens)
        if key is not None:
            self.metrics.of_keys.arrived(key.name, num_tokens)
            self.keys.limits.used(key.name, num_tokens)
        if self.tracer is not None:
            self.tracer.begin(stream, params, body.n)
        return stream

    def _adapter_of(self, name: str | None) -> str:
        return name if name is not None and name in self.core.info.loras else ""

    def _observe(self, live: LiveRequest, update: RequestUpdate) -> None:
        self.metrics.observe(live, update)
        if live.tenant and update.new_ids:
            self.keys.limits.used(live.tenant, len(update.new_ids))
        if self.tracer is not None:
            self.tracer.observe(live, update)

    def _check_size(self, ids: Sequence[list[int]], count: int, params: SamplingParams) -> None:
        """Raise for what would hold up the engine by its mere size."""
        own = len(params.stop_token_ids) + len(params.allowed_token_ids or ()) + len(params.logit_bias)
        size = count * (sum(map(len, ids)) + own * len(ids))
        if size > MAX_QUEUED_IDS:
            raise ApiError(
                400, f"n: {size} ids in one request, with those of every choice: at most {MAX_QUEUED_IDS}", "n"
            )

    def _timeout_of(self, body: SamplingFields) -> float | None:
        maximum = self.options.request_timeout
        if body.timeout is not None and maximum is not None and body.timeout > maximum:
            raise ApiError(400, f"timeout: at most {maximum:g} seconds here (--request-timeout)", "timeout")
        return maximum if body.timeout is None else body.timeout

    def check_count(self, count: int) -> None:
        """Raise for more completions in one request than can ever be."""
        if count > self._most_alive:
            raise ApiError(
                400,
                f"{count} completions in one request: at most {self._most_alive} can run and wait; ask for less, or"
                " raise --max-queued-requests",
                "n",
            )

    def _admit(self, count: int) -> None:
        self.check_count(count)
        total = self._alive.total
        if total + count > self._most_alive:
            self.metrics.refused()
            raise ApiError(
                429,
                f"the queue is full: {total} requests run and wait, of {self._most_alive}; try again later"
                " (--max-queued-requests)",
                code="queue_full",
            )

    def check_room(self, ids: Sequence[list[int]], max_tokens: int, field: str) -> None:
        """Raise ApiError where the context has no room for the output that `field` asks for behind a prompt."""
        longest, room = max(map(len, ids)), self.core.info.max_context
        if longest + max_tokens > room:
            raise ApiError(
                400,
                f"{field}: the prompt's {longest} tokens and {shown(max_tokens)} of output need a context of"
                f" {shown(longest + max_tokens)}, and it has {room}; ask for at most {room - longest}, leave"
                f" {field} out, or serve with a larger --context-length",
                field,
                "context_length_exceeded",
            )

    def check_messages(self, messages: "Sequence[ChatMessage]", answers: Mapping[int, str] | None = None) -> None:
        """Raise ApiError for what the model's template, or nobody, could make sense of. answers: of `ChatRequest`."""
        check_messages(messages, "" if self.rendering is None else self.rendering.template.code, answers or {})

    async def chat_ids(
        self, messages: Sequence[Message], options: Mapping[str, Any], continues: bool = False, cut: bool = False
    ) -> list[int]:
        """Ids of a conversation, of any number: see `chat_ids` of `text/chat_prompt.py`.

        Raises ApiError without a template.
        """
        if self.rendering is None:
            raise ApiError(400, "the model has no chat template; serve it with --chat-template FILE", "messages")
        return await self.rendering.ids_of(self.llm.reader, messages, options, continues, cut)

    async def chat_prompt(
        self, messages: Sequence[Message], options: Mapping[str, Any], reading: SamplingParams, continues: bool
    ) -> list[int]:
        """As `chat_ids`, of which `reading` says what is kept.

        Raises ApiError for what leaves nothing to go on from, or no room in the context.
        """
        cut = reading.truncate_prompt_tokens is not None
        try:
            ids = self.llm.reader.last(await self.chat_ids(messages, options, continues, cut), reading)
            if ids:
                check_prompt(ids, self.core.info.max_context)
        except InputError as error:
            raise ApiError(400, str(error), "messages", error.code) from None
        if not ids:
            raise ApiError(400, "messages: the chat template makes no text of them", "messages", "empty_prompt")
        return ids

    def usage(self, prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Tokens asked and received: each prompt once, every choice."""
        asked, given = sum(map(len, prompts)), sum(len(output.token_ids) for output in outputs)
        cached = min(asked, sum(output.metrics.num_cached_tokens for output in outputs))
        return {**tokens_used(asked, given), "prompt_tokens_details": {"cached_tokens": cached}}

    def close(self) -> None:
        if self.tracer is not None:
            self.tracer.close()
        if self.responses is not None:
            self.responses.close()
        self.keys.limits.close()
        self.llm.structures.close()
        self.llm.lanes.close()
        if self.rendering is not None:
            self.rendering.close()


def check_files(model: str, options: ServeOptions) -> None:
    """Raise UserError for files that a `ApiState` of this model could not read. It takes no engine to know."""
    check_tracing(options.otlp_traces_endpoint)
    folder = resolve_folder(model)
    open_tokenizer(folder)
    sampling_defaults(folder)
    if options.batch_dir is not None:
        BatchStore(Path(options.batch_dir), options.batch_bytes)
    template = open_chat_template(folder, options.chat_template)
    if template is not None:
        with closing(template):
            _check_template(template, None if options.chat_template is not None else folder)


def _check_template(template: ChatTemplate, folder: Path | None) -> None:
    """folder: of the model whose own it is; None for that of the options, which must be a template at all."""
    problem, overrun = template.problem(), template.overrun()
    if folder is None and problem is not None:
        raise ConfigError(f"--chat-template: {problem}")
    if overrun is not None:
        whose = "--chat-template" if folder is None else f"{folder}: its chat template"
        more = "" if folder is None else "; give another by --chat-template FILE"
        raise ConfigError(f"{whose}: {overrun}{more}")
    if problem is not None:
        log.warning("%s: its chat template cannot be used, and chats are refused: %s", folder, problem)


class UsageSoFar:
    """What an event of a stream says of usage: nothing, null if it comes last, or that of the event's choice so far."""

    def __init__(self, body: SamplingFields, prompts: Sequence[Sequence[int]]) -> None:
        self._body, self._prompts = body, prompts
        self._given = [0] * (len(prompts) * body.n)

    def after(self, index: int, num_new: int) -> dict[str, Any]:
        """Once choice `index` has so many tokens more."""
        if self._body.continuous_usage:
            self._given[index] += num_new
            return {"usage": tokens_used(len(self._prompts[index // self._body.n]), self._given[index])}
        return {"usage": None} if self._body.include_usage else {}


def tokens_used(asked: int, given: int) -> dict[str, int]:
    return {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}


def _whose(key: ApiKey | None, salt: str | None, adapter: str) -> Whose:
    """Of a request's choices. salt: that the request asks for."""
    if key is None:
        return Whose(cache_salt=salt or "", as_one=True, lora=adapter)
    return Whose(Tenant(key.name, key.max_rows), key.salt(salt), as_one=True, lora=adapter)


def new_id(kind: str) -> str:
    return f"{kind}-{uuid4().hex}"
