"""The asynchronous interface: `await AsyncLLM(...).stream(prompts, sampling_params)`, over a core wherever it runs."""

import asyncio
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from treetop.checkpoints.sampling_defaults import sampling_defaults
from treetop.checkpoints.weight_folders import Tensors, WeightFolders
from treetop.core.clients import EngineClient, RequestClient
from treetop.distributed.in_flight import InFlightCounter
from treetop.outputs import LiveRequest, RequestOutput, TextDelta
from treetop.serve_options import Unset, engine_config
from treetop.structured.structure_checker import StructureChecker
from treetop.text.prompts import Prompt, PromptReader, one_each, paired
from treetop.text.size_class_pools import SizeClassPools
from treetop.text.tokenizer import Tokenizer
from treetop.types.changes import (
    DestroyWeightsUpdateGroup,
    FlushCache,
    InFlight,
    InitWeightsUpdateGroup,
    LoadLora,
    SentTensors,
    Sleep,
    UnloadLora,
    WakeUp,
    check_in_flight,
)
from treetop.types.config import EngineConfig
from treetop.types.constraint import StructuredOutput, TokenConstraint
from treetop.types.engine_options import EngineOptions
from treetop.types.errors import ConfigError, EngineError, InputError, shown
from treetop.types.ids import RequestId
from treetop.types.options import is_integer, is_number
from treetop.types.requests import EngineRequest, RequestUpdate, Whose
from treetop.types.sampling import SamplingParams
from treetop.version import DISTRIBUTION

if TYPE_CHECKING:  # loads PyTorch
    from treetop.distributed.open import Opened

_LONG = 4096
"""Characters or ids that are read beside the event loop, not in it."""
_LARGE = 2**18
"""Those that small ones never wait for: encoding them may take a second."""
_READERS = min(8, os.cpu_count() or 1)
MAX_TIMEOUT_S = 10**6
"""Seconds that a request may be given."""

Observer = Callable[[LiveRequest, RequestUpdate], None]
"""Told of each update, cut to what the client gets, before the request takes it."""


class AsyncLLM:
    """As `LLM`, for an event loop. Requests of all tasks are decoded together.

    The engine runs on a thread of its own in this process. With `restarts` it runs in a process of its own: one that
    dies is started again up to so many times within an hour, and requests go on behind what they have. Such an engine
    starts in `async with AsyncLLM(..., restarts=3) as llm:` and ends with it.

    `generate`, `stream`, `default_sampling_params`, `update_weights`, `load_lora`, `unload_lora` and `close` are for
    all; the rest is for what serves requests over a core, and may change in any release. Raises UserError for a
    configuration that cannot work.
    """

    core: EngineClient
    reader: PromptReader
    opened: "Opened"
    """What this object started itself, in this process."""

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | Unset | None = Unset.UNSET,
        *,
        restarts: int | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.config = config = engine_config(model, draft, dict(options))
        self._supervised: AbstractAsyncContextManager[EngineClient] | None = None
        self._seed, self._started = config.seed or 0, False
        self.weights = WeightFolders(config.model, config.draft)
        if restarts is not None:
            self._supervised = _supervised(config, restarts)
            return
        from treetop.distributed.open import open_client  # noqa: PLC0415  # loads PyTorch

        self.opened = open_client(config)
        self._open(self.opened.client, self._seed, None)

    @classmethod
    def of(
        cls, core: EngineClient, seed: int = 0, observe: Observer | None = None, alive: InFlightCounter | None = None
    ) -> "AsyncLLM":
        """Over a core that is up. seed: of the requests that bring none. alive: where they are counted."""
        llm = cls.__new__(cls)
        llm._supervised, llm._started = None, False
        llm.weights = WeightFolders(core.info.model_path, None)
        llm._open(core, seed, observe, alive)
        return llm

    def _open(
        self, core: EngineClient, seed: int, observe: Observer | None, alive: InFlightCounter | None = None
    ) -> None:
        self.core, self.reader, self._observe = core, PromptReader(core.info), observe
        self._seeds = random.Random(seed)
        self.lanes = SizeClassPools("tokens", _LARGE, _READERS)
        self.structures = StructureChecker(core.info)
        self._changing_weights = asyncio.Lock()
        self.batcher = CallbackBatcher()
        self.alive = alive or InFlightCounter()
        """Requests that have been queued and have not ended."""
        self._started = True

    async def __aenter__(self) -> "AsyncLLM":
        """With `restarts` the engine starts here. Raises UserError and EngineError if it cannot."""
        if self._supervised is not None:
            core = await self._supervised.__aenter__()
            try:
                self._open(core, self._seed, None)
            except BaseException:
                await self._supervised.__aexit__(*sys.exc_info())
                raise
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self.close()
        if self._supervised is not None:
            await self._supervised.__aexit__(*raised)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """As `LLM.default_sampling_params`."""
        self._check_started()
        return SamplingParams(**{**sampling_defaults(Path(self.core.info.model_path)), **changes})

    async def update_weights(
        self,
        model: str | Path | Tensors | SentTensors | None = None,
        draft: str | Path | Tensors | SentTensors | None = None,
        in_flight: InFlight = "abort",
        more: bool = False,
    ) -> None:
        """As `LLM.update_weights`, for requests of all tasks. An engine that takes this one's place has them, too.

        Over a core of others tensors of a head are refused: which folder it has is not known here. Of a task that is
        cancelled the engine may take the weights yet. Changes are made one after another; where another process makes
        one meanwhile, this is a ConflictError, and nothing has changed.
        """
        self._check_started()
        check_in_flight(in_flight)
        async with self._changing_weights:
            stack = ExitStack()  # files are written and removed beside the event loop
            asked = await asyncio.to_thread(stack.enter_context, self.weights.changing(model, draft, more))
            try:
                await self.core.change(replace(asked, in_flight=in_flight))
            except BaseException:
                await asyncio.to_thread(stack.__exit__, *sys.exc_info())
                raise
            await asyncio.to_thread(stack.close)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        rank_offset: int = 1,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> None:
        """As `LLM.init_weights_update_group`, of all engines: their ranks follow one another from `rank_offset` on."""
        self._check_started()
        asked = InitWeightsUpdateGroup(group_name, master_address, master_port, rank_offset, world_size, backend)
        async with self._changing_weights:
            await self.core.change(asked)

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """As `LLM.destroy_weights_update_group`."""
        self._check_started()
        async with self._changing_weights:
            await self.core.change(DestroyWeightsUpdateGroup(group_name))

    async def load_lora(self, name: str, path: str | Path) -> None:
        """As `LLM.load_lora`; every engine has it, and whatever takes its place."""
        self._check_started()
        async with self._changing_weights:
            await self.core.change(LoadLora(name, str(path)))

    async def unload_lora(self, name: str) -> None:
        """As `LLM.unload_lora`."""
        self._check_started()
        async with self._changing_weights:
            await self.core.change(UnloadLora(name))

    async def sleep(self, level: int = 1) -> None:
        """As `LLM.sleep`, of all engines."""
        self._check_started()
        async with self._changing_weights:
            await self.core.change(Sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLM.wake_up`."""
        self._check_started()
        async with self._changing_weights:
            await self.core.change(WakeUp.of(tags))

    async def flush_cache(self) -> None:
        """As `LLM.flush_cache`, of all engines."""
        self._check_started()
        async with self._changing_weights:
            await self.core.change(FlushCache())

    @property
    def is_sleeping(self) -> bool:
        self._check_started()
        return bool(self.core.info.asleep)

    def close(self) -> None:
        """End every request with an error, and let the core go."""
        if not self._started:
            return
        self.lanes.close()
        self.structures.close()
        self.core.close()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        constraints: TokenConstraint | Sequence[TokenConstraint | None] | None = None,
        *,
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt, as `LLM.generate`; cancelling the task aborts."""
        return await (await self.stream(prompts, sampling_params, constraints=constraints, lora=lora)).outputs()

    async def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        constraints: TokenConstraint | Sequence[TokenConstraint | None] | None = None,
        *,
        lora: str | None = None,
    ) -> "DeltaStream":
        """Queue the prompts; the result gives pieces of text as they come. priority, timeout_s: of `EngineRequest`.
        lora: as of `LLM.generate`.

        Raises InputError before any work, and EngineError if the engine is dead.
        """
        self._check_started()
        listed = await self.ids_of(prompts, sampling_params)
        each_own = paired(sampling_params, len(listed))
        for structure in {each.structured_output for each in each_own}:
            await self.check_structure(structure)
        held_to, whose = one_each(constraints, len(listed)), Whose(lora=lora or "")
        return self.queue(listed, each_own, priority, timeout_s, held_to, whose=whose)

    async def check_structure(self, asked: StructuredOutput | None) -> None:
        """Raise InputError for a structure that no text has, or that cannot be kept within the limits.

        What this engine holds to no structure at all, `queue` refuses.
        """
        if asked is not None and self.core.info.can_constrain:
            await self.structures.checked(asked)

    def queue(
        self,
        prompts: list[list[int]],
        params: Sequence[SamplingParams],
        priority: int = 0,
        timeout_s: float | None = None,
        constraints: Sequence[TokenConstraint | None] | None = None,
        seeds: Sequence[int] | None = None,
        whose: Whose = Whose(),  # noqa: B008  # frozen
    ) -> "DeltaStream":
        """As `stream`, at once, for prompts that `ids_of` gave, and as many parameters, their structures checked.

        Prompts or parameters that are one object are looked at once. seeds: None for those of the parameters.
        """
        asked = self.requests(prompts, params, priority, timeout_s, constraints, seeds, whose)
        return DeltaStream(self.core, asked, self.reader.tokenizer, self._observe, self.alive.add, self.batcher)

    def requests(
        self,
        prompts: list[list[int]],
        params: Sequence[SamplingParams],
        priority: int = 0,
        timeout_s: float | None = None,
        constraints: Sequence[TokenConstraint | None] | None = None,
        seeds: Sequence[int] | None = None,
        whose: Whose = Whose(),  # noqa: B008  # frozen
    ) -> list[EngineRequest]:
        """What `queue` asks of the core, on any thread. Raises InputError."""
        if not is_integer(priority) or not -(2**31) <= priority < 2**31:
            raise InputError(f"priority must be an integer in [-2^31, 2^31), got {shown(priority)}")
        if priority and not self.core.info.by_priority:
            raise InputError("priority: requests are served as they come; start with --schedule-policy priority")
        if timeout_s is not None and not (is_number(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
            raise InputError(f"timeout must be a number of seconds above 0, up to {MAX_TIMEOUT_S}")
        if whose.lora and whose.lora not in self.core.info.loras:
            known = ", ".join(self.core.info.loras) or "none"
            raise InputError(f"lora: {shown(whose.lora)} is no adapter of this engine, which has {known}")
        held_to, version = constraints or [None] * len(params), self.core.info.lora_version(whose.lora)
        given = [self._seed_of(each) for each in params] if seeds is None else seeds
        own: dict[int, SamplingParams] = {}
        prompts_by_id: dict[int, tuple[int, ...]] = {}
        limits = int(priority), None if timeout_s is None else float(timeout_s)
        asked, bad_words = list[EngineRequest](), self.reader.bad_words(params)
        for ids, each, seed, constraint in zip(prompts, params, given, held_to, strict=True):
            if id(each) not in own or constraint is not None:
                own[id(each)] = self.reader.bounded(each)
                self.reader.check_params(own[id(each)], constraint)
            if id(ids) not in prompts_by_id:
                prompts_by_id[id(ids)] = tuple(ids)
            request_id = self.core.next_id()
            request = EngineRequest(request_id, prompts_by_id[id(ids)], own[id(each)], seed, *limits, constraint)
            group = (asked[0].request_id if asked else request_id) if whose.as_one else None
            request = request._replace(bad_words=bad_words[each.bad_words], tenant=whose.tenant, group=group)
            asked.append(request._replace(cache_salt=whose.salt, lora=whose.lora, lora_version=version))
        return asked

    async def ids_of(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """As `PromptReader.ids_of`."""
        listed = prompts if isinstance(prompts, list) else [prompts]
        several = listed and isinstance(listed[0], str | list)
        size = sum(len(each) for each in listed if isinstance(each, str | list)) if several else len(listed)
        if size < _LONG:
            return self.reader.ids_of(prompts, sampling_params)
        return await self.lanes.run(size, self.reader.ids_of, prompts, sampling_params)

    async def encode(self, text: str, special: bool = True, cut: bool = False) -> list[int]:
        """As `PromptReader.encode`."""
        if len(text) < _LONG:
            return self.reader.encode(text, special, cut)
        return await self.lanes.run(len(text), self.reader.encode, text, special, cut)

    def _check_started(self) -> None:
        if not self._started:
            raise EngineError("an engine with restarts starts in `async with AsyncLLM(..., restarts=N) as llm:`")

    def _seed_of(self, params: SamplingParams) -> int:
        return self._seeds.getrandbits(63) if params.seed is None else params.seed


def _supervised(config: EngineConfig, restarts: object) -> AbstractAsyncContextManager[EngineClient]:
    """An engine in a process of its own, once it is entered. Raises ConfigError."""
    if not (is_integer(restarts) and 0 <= restarts <= 1000):  # type: ignore[operator]  # an integer
        raise ConfigError(f"restarts must be an integer from 0 to 1000, or None, got {shown(restarts)}")
    try:
        from treetop.distributed.supervisor import supervised_engine  # noqa: PLC0415  # needs the serve extra
    except ModuleNotFoundError as error:
        raise ConfigError(f"restarts needs {error.name}; pip install {DISTRIBUTION}[serve]") from None
    return supervised_engine(config, int(restarts))  # type: ignore[call-overload]  # an integer


class CallbackBatcher:
    """Calls once, in the event loop's next turn, what has been asked for since the last."""

    def __init__(self) -> None:
        self._asked: dict[Callable[[], object], None] = {}

    def add(self, call: Callable[[], object]) -> None:
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._run)
        self._asked[call] = None

    def _run(self) -> None:
        asked, self._asked = self._asked, {}
        for call in asked:
            call()


class DeltaStream:
    """Deltas of one call, as they come; `close` aborts what is alive. What a slow reader has not taken is joined."""

    def __init__(
        self,
        core: RequestClient,
        asked: Sequence[EngineRequest],
        tokenizer: Tokenizer | None,
        observe: Observer | None = None,
        count: Callable[[int], object] = lambda _: None,
        batcher: CallbackBatcher | None = None,
    ) -> None:
        """core: runs them. count: is told how many more requests are alive. turns: of the event loop, for `push`."""
        self._core, self._observe, self._count, self._batcher = core, observe, count, batcher or CallbackBatcher()
        self._live: dict[RequestId, LiveRequest] = {}
        self._ready: dict[int, TextDelta] = {}  # by prompt, in the order of their coming
        self._failure: EngineError | None = None
        self._arrived = asyncio.Event()
        self._tell: Callable[[], object] = self._arrived.set
        for index, each in enumerate(asked):
            self._live[each.request_id] = LiveRequest.of(index, each, tokenizer)
        self._core.add(asked, self.take)
        self._count(len(asked))

    def __aiter__(self) -> "DeltaStream":
        return self

    async def __anext__(self) -> TextDelta:
        """The next piece of any prompt. Raises EngineError if the engine fails."""
        while not self._ready:
            if self.over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._ready.pop(next(iter(self._ready)))

    def push(self, ready: Callable[[], object]) -> None:
        """From now on `ready` is called in the event loop's next turn after something has come, once for all of it.

        It may be called for nothing, and must not raise.
        """
        self._tell = partial(self._batcher.add, ready)
        self._tell()

    def taken(self) -> Iterable[TextDelta]:
        """What has come and has not been taken, one piece a prompt."""
        came, self._ready = self._ready, {}
        return came.values()

    def alive(self) -> Iterable[tuple[RequestId, LiveRequest]]:
        """Those that have not ended."""
        return self._live.items()

    @property
    def over(self) -> bool:
        """Whether all has been taken and nothing more comes. Raises EngineError if that is the engine's failure."""
        if self._ready:
            return False
        if self._failure is not None:
            raise self._failure
        return not self._live

    async def outputs(self, see: Callable[[TextDelta], object] = lambda _: None) -> list[RequestOutput]:
        """All results, in the order of the prompts; leaving early aborts. see: is given each delta."""
        outputs = {}
        try:
            async for delta in self:
                see(delta)
                if delta.output is not None:
                    outputs[delta.index] = delta.output
        finally:
            self.close()
        return [outputs[index] for index in sorted(outputs)]

    def close(self) -> None:
        """Abort what is alive; any number of times."""
        if self._live:
            self._core.abort(tuple(self._live))
        for request_id in [*self._live]:
            self._end(request_id)

    def end_early(self) -> None:
        """What is alive ends with what it has, and finish_reason "abort". Any number of times."""
        for request_id in [*self._live]:
            self._core.abort((request_id,))
            self.take(RequestUpdate(request_id, (), finish_reason="abort"))

    def take(self, update: RequestUpdate) -> None:
        """An update, as soon as it comes: a stop string ends its request however slowly the text is read."""
        mine = self._live.get(update.request_id)
        if mine is None:
            return
        if update.engine_failed:
            self._fail(EngineError(update.error or "the engine failed"))
            return
        try:
            delta = mine.take(update, self._core.finish, self._observe)
        except Exception as error:  # whatever it was, its reader must not wait for ever
            self._fail(EngineError(f"the text could not be made: {type(error).__name__}"))
            raise
        if delta.output is not None:
            self._end(update.request_id)
        waiting = self._ready.get(delta.index)
        self._ready[delta.index] = delta if waiting is None else delta.after(waiting)
        self._tell()

    def _end(self, request_id: RequestId) -> None:
        del self._live[request_id]
        self._count(-1)

    def _fail(self, error: EngineError) -> None:
        self._failure = error
        self.close()
        self._tell()
