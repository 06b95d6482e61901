"""The offline interface: `LLM(...).generate(prompts, sampling_params)`, a synchronous shell over `AsyncLLM`.

It has no event loop: the caller's thread waits for updates itself, and gives them to the call's `DeltaStream`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from treetop.async_llm import AsyncLLM, DeltaStream
from treetop.checkpoints.sampling_defaults import sampling_defaults
from treetop.checkpoints.weight_folders import Tensors
from treetop.core.clients import InProcessClient, Sink
from treetop.distributed.open import OpenCore
from treetop.engine.engine import Engine
from treetop.outputs import RequestMetrics, RequestOutput, TextDelta
from treetop.scheduler.scheduler import Scheduler
from treetop.serve_options import Unset
from treetop.text.chat_input import Message, conversations_of
from treetop.text.chat_prompt import chat_ids
from treetop.text.chat_template import ChatTemplate, open_chat_template
from treetop.text.prompts import Prompt, one_each, paired
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
from treetop.types.constraint import TokenConstraint
from treetop.types.engine_options import EngineOptions
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate, Whose
from treetop.types.sampling import SamplingParams

if TYPE_CHECKING:  # needs an extra
    from treetop.distributed.background import BackgroundClient

__all__ = ["LLM", "RequestMetrics", "RequestOutput", "TextDelta"]


class LLM:
    """The engine core in this process, and a tokenizer.

    Without `model` and `draft` it runs the default pair; a model without a draft decodes plainly, and `draft=None`
    says so. Both are folders, or builtin:NAME. Options bear the names of `EngineConfig`. Raises UserError for a
    configuration that cannot work.
    An engine that fails at run time ends every request, and their streams raise; what is asked later runs again.
    Streams may be open side by side, also in several threads; the engine runs on a thread of its own, which ends with
    `close`, or when nothing holds the LLM or its streams any more.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        draft: str | Path | Unset | None = Unset.UNSET,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._llm = AsyncLLM(model, draft, **options)
        self.config, opened = self._llm.config, self._llm.opened
        self._core, self._local, self.draft_path = opened.client, opened.local, opened.draft_path
        self.model_path = Path(self._core.info.model_path)
        self.max_context = self._core.info.max_context
        self._reader = self._llm.reader
        self.tokenizer = self._reader.tokenizer
        self._template: ChatTemplate | None = None
        self._changing = Lock()

    @property
    def engine(self) -> Engine:
        """The engine of this process, for tools; it may change in any release. ConfigError if all are in others."""
        return self._in_this_process.engine

    @property
    def scheduler(self) -> Scheduler:
        """What plans for `engine`; likewise for tools."""
        return self._in_this_process.scheduler

    def next_logits(self, ids: list[int]) -> Tensor:
        """Of the target behind these ids, [vocab_size], for tools. See `Engine`."""
        return self._in_this_process.next_logits(ids)

    @property
    def _in_this_process(self) -> OpenCore:
        if self._local is None:
            raise ConfigError(
                f"--ep-size {self.config.ep_size}: the engines are in other processes; this needs one here"
            )
        return self._local

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """As the model's `generation_config.json` has it, which is what `treetop serve` gives a request by default.

        changes: fields of `SamplingParams` that are to be otherwise. Raises CheckpointError and InputError.
        """
        return SamplingParams(**{**sampling_defaults(self.model_path), **changes})

    def update_weights(
        self,
        model: str | Path | Tensors | SentTensors | None = None,
        draft: str | Path | Tensors | SentTensors | None = None,
        in_flight: InFlight = "abort",
        more: bool = False,
    ) -> None:
        """Go on with other weights of the same architecture, such as a trainer's after its last step.

        model, draft: folders, or all tensors by the names that the folder in force has for them: a mapping, or pairs
        one after another. What is not given stays; without either all folders in force are read again, such as after an
        update that failed, unless parts of tensors have come, which these are then. All is read and checked before
        anything changes, on all ranks.
        in_flight: requests that are alive end with finish_reason "abort" and an error that says so, and with the tokens
        they had; or, "retract", keep these and go on with the new weights; or, "wait", end on the old ones first, while
        new ones wait. Prefixes in the cache are forgotten. What is asked later sees the new weights alone;
        `metrics.weight_version` of its output counts them.
        Tensors may also be sent (`weight_transfer`); more: others will be, and nothing is in force until then.
        Raises ConfigError, CheckpointError and InputError, and nothing has changed.
        """
        check_in_flight(in_flight)
        with self._changing:  # of several threads one after another, folders too
            with self._llm.weights.changing(model, draft, more) as asked:
                self._core.change_now(replace(asked, in_flight=in_flight))
            engine = self._in_this_process.engine
            self.config, self.model_path, self.draft_path = engine.config, engine.model_path, engine.draft_path
            self._template = None

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        rank_offset: int = 1,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> None:
        """Meet a trainer, who is rank 0 and at this address, for broadcasts of weights; SGLang's call of this name.

        Returns once all ranks have come. backend: gloo on a CPU. Raises ConfigError, and EngineError if they do not.
        """
        self._core.change_now(
            InitWeightsUpdateGroup(group_name, master_address, master_port, rank_offset, world_size, backend)
        )

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Leave it. A group that is not there has been left."""
        self._core.change_now(DestroyWeightsUpdateGroup(group_name))

    def load_lora(self, name: str, path: str | Path) -> None:
        """An adapter that PEFT wrote, for requests that name it from now on; with `enable_lora`.

        Raises InputError for a name that is taken, CheckpointError and ConfigError for a folder that does not fit.
        """
        self._core.change_now(LoadLora(name, str(path)))

    def unload_lora(self, name: str) -> None:
        """No request may name this adapter any more; those that have go on with it. Raises InputError."""
        self._core.change_now(UnloadLora(name))

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: that of K/V, and on a GPU that of weights, which stay on the host.

        level: 2 drops weights wherever they are; `wake_up` reads their folders again. Requests that are alive end with
        finish_reason "abort" and an error that says so; those that come meanwhile do at once. Cached prefixes are
        forgotten. Raises InputError, and ConfigError where memory is not this engine's alone.
        """
        self._core.change_now(Sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As after a start. tags: "weights" or "kv_cache" alone, None for both; requests run once both are awake.

        Raises InputError, and CheckpointError for weights that cannot be read any more; all sleeps as before then.
        """
        self._core.change_now(WakeUp.of(tags))

    def flush_cache(self) -> None:
        """Forget every cached prefix, on the device and on the host; what `kv_offloading_folder` has stays.

        Requests that run are put back and go on by a prefill, with the tokens that they would have had.
        """
        self._core.change_now(FlushCache())

    @property
    def is_sleeping(self) -> bool:
        return bool(self._core.info.asleep)

    def close(self) -> None:
        """End every request with an error, and stop the engine's thread. What is asked later is an EngineError."""
        self._llm.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        constraints: TokenConstraint | Sequence[TokenConstraint | None] | None = None,
        *,
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt. A str or a list of ids is one prompt; a list of sampling_params pairs with the prompts.

        constraints: what the tokens of each prompt are held to, if anything; an object for each. lora: the name of an
        adapter of `lora_modules`; None for the model as it is.
        """
        deltas = self._run(self._asked(prompts, sampling_params, constraints, lora))
        outputs = {delta.index: delta.output for delta in deltas if delta.output is not None}
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        /,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        *,
        lora: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """The next message of each conversation, as `chat_prompts` reads it. lora: see `generate`."""
        prompts = self.chat_prompts(conversations, sampling_params, chat_template, continue_final_message, **options)
        return self.generate(prompts, sampling_params, lora=lora)

    def chat_prompts(
        self,
        /,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[list[int]]:
        """Ids of each conversation, for `generate` or `stream`; a list of {"role", "content"} is one.

        chat_template: a file or the template itself, instead of the model's. options: given to it.
        continue_final_message: the output goes on with the last message.
        Raises InputError if there is none, or if it refuses the messages.
        """
        template = self._template_of(chat_template)
        listed = conversations_of(conversations)
        own = paired(sampling_params, len(listed))
        return [
            chat_ids(
                template,
                self._reader,
                each,
                options,
                continues=continue_final_message,
                cut=params.truncate_prompt_tokens is not None,
            )
            for each, params in zip(listed, own, strict=True)
        ]

    def _template_of(self, given: str | None) -> ChatTemplate:
        if given is None and self._template is not None:
            return self._template
        template = open_chat_template(self.model_path, given)
        if template is None:
            raise InputError(f"{self.model_path} has no chat template; give one with chat_template")
        if given is None:
            self._template = template
        return template

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        constraints: TokenConstraint | Sequence[TokenConstraint | None] | None = None,
        *,
        lora: str | None = None,
    ) -> Iterator[TextDelta]:
        """As `generate`, in pieces of text as they come. Bad input raises before any work; leaving early aborts."""
        return self._run(self._asked(prompts, sampling_params, constraints, lora))

    def _asked(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        constraints: TokenConstraint | Sequence[TokenConstraint | None] | None,
        lora: str | None,
    ) -> list[EngineRequest]:
        """On the caller's thread, which may be interrupted. Raises InputError."""
        listed = self._reader.ids_of(prompts, sampling_params)
        each_own = paired(sampling_params, len(listed))
        held_to, whose = one_each(constraints, len(listed)), Whose(lora=lora or "")
        asked = self._llm.requests(listed, each_own, constraints=held_to, whose=whose)
        for structure in {each.structured_output for each in each_own}:
            if structure is not None:
                self._llm.structures.check(structure)
        return asked

    def _run(self, asked: list[EngineRequest]) -> Iterator[TextDelta]:
        with WaitingClient(self._core) as core:
            stream = DeltaStream(core, asked, self.tokenizer)
            while core.step(stream):
                yield from stream.taken()


class WaitingClient:
    """The core of one `DeltaStream` whose thread waits for updates itself, and may be interrupted at any line.

    It is a context: on leaving, requests that are still alive are aborted, and nothing of them is in flight any more.
    """

    def __init__(self, core: "InProcessClient | BackgroundClient") -> None:
        self._core, self._alive = core, set[RequestId]()
        self._queue: SimpleQueue[list[RequestUpdate]] = SimpleQueue()

    def __enter__(self) -> "WaitingClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        alive = getattr(self, "_alive", None)  # an interrupt may have fallen into `__init__`
        if alive:  # or into `close`
            self._core.abort(tuple(alive))

    def add(self, requests: Sequence[EngineRequest], sink: Sink) -> None:
        """Queue requests, which are planned together. Raises EngineError if the core has ended.

        sink: of the stream that `step` is given; not kept, so that whoever drops both has dropped them.
        """
        if self._core.failure is not None:
            raise self._core.failure
        self._alive.update(request.request_id for request in requests)
        self._core.submit(requests, self._queue.put)

    def abort(self, request_ids: Sequence[RequestId]) -> None:
        self._core.abort(request_ids)
        self._alive.difference_update(request_ids)

    def finish(self, request_id: RequestId, num_tokens: int) -> None:
        self._core.finish(request_id, num_tokens)
        self._alive.discard(request_id)

    def step(self, stream: DeltaStream) -> bool:
        """Wait for the next updates, and give them to the stream. False if it is over.

        Raises what ended the engine, or EngineError if that is not known.
        """
        try:
            if stream.over:
                return False
        except EngineError as error:
            raise self._core.core.failure or error from None
        for update in self._updates():
            stream.take(update)
            if update.finish_reason is not None:
                self._alive.discard(update.request_id)
        return True

    def _updates(self) -> list[RequestUpdate]:
        ended = False
        while True:
            try:
                return self._queue.get(timeout=1.0)
            except Empty:
                if ended:
                    raise EngineError("the engine core has ended") from None
                ended = self._core.failure is not None  # and looks once more: what was said last is there by now

    def close(self) -> None:
        """Abort what is alive, and wait until nothing is in flight that was."""
        if self._alive:
            self._core.abort(tuple(self._alive))
        self._core.flush()
        self._alive.clear()
