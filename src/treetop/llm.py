"""The offline interface: `LLM(...).generate(prompts, sampling_params)`."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from treetop.checkpoints.sampling_defaults import sampling_defaults
from treetop.checkpoints.weight_folders import Tensors, WeightFolders
from treetop.core.loop import SyncClient
from treetop.distributed.opened import LocalEngine, open_thread
from treetop.engine.engine import Engine
from treetop.outputs import LiveRequest, RequestMetrics, RequestOutput, TextDelta
from treetop.scheduler.scheduler import Scheduler
from treetop.serve_options import Unset, engine_config
from treetop.structured.structure_checker import StructureChecker
from treetop.text.chat_input import Message, conversations_of
from treetop.text.chat_prompt import chat_ids
from treetop.text.chat_template import ChatTemplate, open_chat_template
from treetop.text.prompts import BadWords, Prompt, PromptReader, one_each, paired
from treetop.types.constraint import TokenConstraint
from treetop.types.engine_options import EngineOptions
from treetop.types.errors import ConfigError, InputError
from treetop.types.requests import EngineRequest
from treetop.types.sampling import SamplingParams

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
        self.config = engine_config(model, draft, dict(options))
        opened = open_thread(self.config)
        self._weights = WeightFolders(self.config.model, self.config.draft)
        self._local, self._close_engine = opened.local, opened.close
        self.model_path, self.draft_path = Path(opened.info.model_path), opened.draft_path
        self.max_context = opened.info.max_context
        self._reader = PromptReader(opened.info)
        self.tokenizer = self._reader.tokenizer
        self._structures = StructureChecker(opened.info)
        self._core = opened.thread
        self._seeds = random.Random(self.config.seed or 0)
        self._template: ChatTemplate | None = None

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
    def _in_this_process(self) -> LocalEngine:
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
        self, model: str | Path | Tensors | None = None, draft: str | Path | Tensors | None = None
    ) -> None:
        """Go on with other weights of the same architecture, such as a trainer's after its last step.

        model, draft: folders, or all tensors by the names that the folder in force has for them: a mapping, or pairs
        one after another. What is not given stays. All is read and checked before anything changes. Requests that are
        alive then end with finish_reason "abort" and an error that says so, and with the tokens they had; prefixes in
        the cache are forgotten. What is asked later sees the new weights alone. On a CPU, of one rank.
        Raises ConfigError, CheckpointError and InputError, and nothing has changed.
        """
        with self._weights.changing(model, draft) as given:
            self._core.update_weights(*given)
        engine = self._in_this_process.engine
        self.config, self.model_path, self.draft_path = engine.config, engine.model_path, engine.draft_path
        self._template = None

    def close(self) -> None:
        """End every request with an error, and stop the engine's thread. What is asked later is an EngineError."""
        self._structures.close()
        self._core.close()
        self._close_engine()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        constraints: TokenConstraint | Sequence[TokenConstraint | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt. A str or a list of ids is one prompt; a list of sampling_params pairs with the prompts.

        constraints: what the tokens of each prompt are held to, if anything; an object for each.
        """
        deltas = self.stream(prompts, sampling_params, constraints)
        outputs = {delta.index: delta.output for delta in deltas if delta.output is not None}
        return [outputs[index] for index in sorted(outputs)]

    def chat(
        self,
        /,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        """The next message of each conversation, as `chat_prompts` reads it."""
        prompts = self.chat_prompts(conversations, sampling_params, chat_template, continue_final_message, **options)
        return self.generate(prompts, sampling_params)

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
    ) -> Iterator[TextDelta]:
        """As `generate`, in pieces of text as they come. Bad input raises before any work; leaving early aborts."""
        listed = self._reader.ids_of(prompts, sampling_params)
        each_own = [self._reader.bounded(each) for each in paired(sampling_params, len(listed))]
        held_to = one_each(constraints, len(listed))
        for each, constraint in zip(each_own, held_to, strict=True):
            self._reader.check_params(each, constraint)
        for structure in {each.structured_output for each in each_own}:
            if structure is not None:
                self._structures.check(structure)
        return self._run(listed, each_own, held_to, self._reader.bad_words(each_own))

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        constraints: list[TokenConstraint | None],
        bad_words: BadWords,
    ) -> Iterator[TextDelta]:
        live, asked = {}, []
        for index, (ids, each, constraint) in enumerate(zip(prompts, params, constraints, strict=True)):
            request_id, seed = self._core.next_id(), self._seeds.getrandbits(63) if each.seed is None else each.seed
            request = EngineRequest(request_id, tuple(ids), each, seed, constraint=constraint)
            asked.append(request._replace(bad_words=bad_words[each.bad_words]))
            live[request_id] = LiveRequest.of(index, asked[-1], self.tokenizer)
        with SyncClient(self._core) as client:
            client.add(asked)
            while live:
                for update in client.get():
                    if update.engine_failed:
                        raise client.failure
                    delta = live[update.request_id].take(update, client.finish)
                    if delta.output is not None:
                        del live[update.request_id]
                    yield delta
