"""What the endpoints share: the model, its names and defaults, admission, and the counting of what is served."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from treetop.core.clients import AsyncCore
from treetop.models.folder import generation_config, resolve_folder
from treetop.server.alive import Alive
from treetop.server.api.errors import ApiError
from treetop.server.api.fields import SamplingFields
from treetop.server.api.rendering import Rendering
from treetop.server.async_llm import AsyncLLM, DeltaStream
from treetop.server.chat_input import Message
from treetop.server.chat_template import open_chat_template
from treetop.server.metrics import Metrics
from treetop.server.options import ServeOptions
from treetop.server.outputs import RequestOutput
from treetop.server.tokenizer import open_tokenizer
from treetop.types.errors import CheckpointError, ConfigError, InputError
from treetop.types.sampling import SamplingParams

log = logging.getLogger("treetop.server")

MOST_QUEUED_IDS = 2**22
"""Ids of one request's prompts and options, counted for each choice: what the engine is told at once."""


class Front:
    """One API process. draining: it takes what comes until its connections end, and says that it is not ready."""

    def __init__(self, core: AsyncCore, options: ServeOptions, model: str, seed: int, alive: Alive) -> None:
        """model: as the caller named it. alive: counts the requests of all API processes.

        Raises UserError for files of the model that cannot be read.
        """
        self.options, self.core = options, core
        self.names = options.served_model_name or (model,)
        self.created = int(time.time())
        self.metrics = Metrics(self.names[0], core.info)
        self.llm = AsyncLLM.of(core, seed, self.metrics.observe, alive)
        folder = Path(core.info.model_path)
        self.defaults = sampling_defaults(folder)
        for wish in _unsupported(folder):
            log.warning("generation_config.json: %s is not supported: it is not applied", wish)
        if self.defaults["repetition_penalty"] != 1 and not core.info.can_change_logits:
            log.warning("generation_config.json: repetition_penalty is not applied, for this engine changes no logits")
            self.defaults["repetition_penalty"] = 1.0
        template = open_chat_template(folder, options.chat_template)
        self.rendering = None if template is None else Rendering(template)
        self.draining = False
        self._alive, self._most_alive = alive, core.info.max_requests + options.max_queued_requests

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(404, f"model: {name[:200]!r} is not served here", "model", "model_not_found")

    async def check_structure(self, body: SamplingFields) -> None:
        """Raise InputError, which names the field, for a structure that cannot be kept."""
        if body.structure is not None:
            field, structure = body.structure
            try:
                await self.llm.check_structure(structure)
            except InputError as error:
                raise InputError(str(error).replace("structured_output", field, 1)) from None

    def start(self, ids: Sequence[list[int]], body: SamplingFields, max_tokens: int | None) -> DeltaStream:
        """Queue n choices of each prompt. max_tokens: None for all that the context holds. Raises ApiError if full."""
        if self.core.info.refuses is not None:
            raise ApiError(400, self.core.info.refuses, code="prefill_worker")
        most = self.core.info.max_context if max_tokens is None else max_tokens
        params, timeout_s = body.params(self.defaults, most), self._timeout_of(body)
        prompts = [each for each in ids for _ in range(body.n)]
        self._check_size(ids, body.n, params)
        with self._alive.locked():
            self._admit(len(prompts))
            stream = self.llm.queue(
                prompts, [params] * len(prompts), body.priority, timeout_s, seeds=body.seeds(len(ids))
            )
        self.metrics.arrived(sum(map(len, prompts)))
        return stream

    def _check_size(self, ids: Sequence[list[int]], count: int, params: SamplingParams) -> None:
        """Raise for what would hold up the engine by its mere size."""
        own = len(params.stop_token_ids) + len(params.allowed_token_ids or ()) + len(params.logit_bias)
        size = count * (sum(map(len, ids)) + own * len(ids))
        if size > MOST_QUEUED_IDS:
            raise ApiError(
                400, f"n: {size} ids in one request, with those of every choice: at most {MOST_QUEUED_IDS}", "n"
            )

    def _timeout_of(self, body: SamplingFields) -> float | None:
        most = self.options.request_timeout
        if body.timeout is not None and most is not None and body.timeout > most:
            raise ApiError(400, f"timeout: at most {most:g} seconds here (--request-timeout)", "timeout")
        return most if body.timeout is None else body.timeout

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

    async def chat_ids(
        self, messages: Sequence[Message], options: dict[str, Any], continues: bool = False, cut: bool = False
    ) -> list[int]:
        """See `chat_ids` of `server/chat_prompt.py`. Raises ApiError without a template."""
        if self.rendering is None:
            raise ApiError(400, "the model has no chat template; serve it with --chat-template FILE", "messages")
        return await self.rendering.ids_of(self.llm.reader, messages, options, continues, cut)

    def usage(self, prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Tokens asked and received: each prompt once, every choice."""
        asked, given = sum(map(len, prompts)), sum(len(output.token_ids) for output in outputs)
        cached = min(asked, sum(output.metrics.num_cached_tokens for output in outputs))
        return {**tokens_used(asked, given), "prompt_tokens_details": {"cached_tokens": cached}}

    def close(self) -> None:
        self.llm.lanes.close()
        if self.rendering is not None:
            self.rendering.close()


def check_files(model: str, options: ServeOptions) -> None:
    """Raise UserError for files that a `Front` of this model could not read. It takes no engine to know."""
    folder = resolve_folder(model)
    open_tokenizer(folder)
    sampling_defaults(folder)
    template = open_chat_template(folder, options.chat_template)
    if template is not None:
        problem = None if options.chat_template is None else template.problem()
        template.close()
        if problem is not None:
            raise ConfigError(f"--chat-template: {problem}")


def sampling_defaults(folder: Path) -> dict[str, float]:
    """What a request that does not say gets: of `generation_config.json`, else temperature 1 and no filter."""
    config, where = generation_config(folder), folder / "generation_config.json"
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    defaults |= {name: config[name] for name in defaults if config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InputError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return defaults


def _unsupported(folder: Path) -> list[str]:
    """What `generation_config.json` asks for beside that."""
    config = generation_config(folder)
    neutral = {"length_penalty": 1, "no_repeat_ngram_size": 0}
    return [f"{name} {config[name]}" for name, value in neutral.items() if config.get(name, value) not in (value, None)]


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


def new_id(kind: str) -> str:
    return f"{kind}-{uuid4().hex}"
