"""OpenRLHF's rollouts by trees: `TreeActor` has the methods that its trainers call of a `RolloutRayActor`.

    python examples/openrlhf_rollouts.py

OpenRLHF's agent executors ask `generate` for token ids and the log-probabilities that they were drawn with. Trainers
pause, sleep, wake and resume an engine around an update of weights. They send weights one by one over a process group
of vLLM's workers, which is refused here: `update_weights` takes all of them at once. Source: OpenRLHF 0.11.2,
openrlhf/trainer/ray/vllm_engine.py and openrlhf/utils/agent.py. Needs `openrlhf`, which may lack its `vllm` and `ray`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from treetop import AsyncLLM, RequestOutput, SamplingParams

PROMPTS = ["def area(r):\n", "import os\n", "class A:\n"]
_TAKEN = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip
"""Options of vLLM's `SamplingParams` that have the same name and meaning here; lists are taken beside them."""


class TreeActor:
    """An `llm_engine` of OpenRLHF's executors. In its trainers a Ray actor opens the engine and makes one of these.

    executor: an `AgentExecutorBase`, whose `execute` is given this object.
    """

    def __init__(self, llm: AsyncLLM, executor: Any) -> None:
        self._llm, self._executor, self._unfinished = llm, executor, 0
        self._may_go = asyncio.Event()
        self._may_go.set()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> Any:
        """An answer in vLLM's form, for ids and its `SamplingParams`. Raises ValueError for what is not text."""
        if multi_modal_data:
            raise ValueError("multi_modal_data: prompts are text here")
        await self._may_go.wait()
        self._unfinished += 1
        try:
            (output,) = await self._llm.generate([[*prompt_token_ids]], params_of(sampling_params))
        finally:
            self._unfinished -= 1
        return answer_of(output)

    async def generate_responses(  # OpenRLHF's order
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[Any]:
        """What the executor makes of each of `num_samples` rollouts of one prompt."""
        given = {"prompt": prompt, "label": label, "sampling_params": sampling_params, "images": images}
        beside = {"max_length": max_length, "hf_tokenizer": hf_tokenizer, "llm_engine": self}
        return await asyncio.gather(*[self._executor.execute(**given, **beside) for _ in range(num_samples)])

    def get_num_unfinished_requests(self) -> int:
        return self._unfinished

    async def pause_generation(self) -> None:
        """New requests wait; what runs goes on, and from an update on with its weights."""
        self._may_go.clear()

    async def resume_generation(self) -> None:
        self._may_go.set()

    async def reset_prefix_cache(self) -> None:
        """Nothing: an update drops what older weights have cached."""

    async def sleep(self, level: int = 1) -> None:
        await self._llm.sleep(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._llm.wake_up(tags)

    async def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """All tensors of the policy. Running requests are put back and recomputed with them."""
        await self._llm.update_weights(dict(tensors), in_flight="retract")

    async def init_process_group(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("no group of vLLM's workers here: give all tensors to update_weights")


def params_of(theirs: Any) -> SamplingParams:
    """theirs: vLLM's `SamplingParams`, or what has its names. Log-probabilities are of what is drawn alone."""
    given = {name: value for name in _TAKEN if (value := getattr(theirs, name, None)) is not None}
    lists = {name: tuple(value) for name in ("stop", "stop_token_ids") if (value := getattr(theirs, name, None))}
    asked = getattr(theirs, "logprobs", None)
    return SamplingParams(**given, **lists, logprobs=None if asked is None else 0)


def answer_of(output: RequestOutput) -> Any:
    """In vLLM's form; log-probabilities are those that tokens were drawn with, its `processed_logprobs`."""
    logprobs = None
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = [{token: SimpleNamespace(logprob=each.processed)} for token, each in pairs]
    made = SimpleNamespace(
        token_ids=[*output.token_ids], text=output.text, finish_reason=output.finish_reason, logprobs=logprobs
    )
    return SimpleNamespace(outputs=[made], weight_version=output.metrics.weight_version)


async def rollouts(executor: Any) -> None:
    """One step of what a trainer does: rollouts, an update between, and rollouts of the new weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415  # slow

    async with AsyncLLM("builtin:nestling", "builtin:nestling-eagle3", dtype="float32") as llm:
        folder = llm.core.info.model_path
        actor, tokenizer = TreeActor(llm, executor), AutoTokenizer.from_pretrained(folder)
        sampling = SimpleNamespace(temperature=1.0, top_p=0.95, top_k=-1, max_tokens=16, min_tokens=1, logprobs=1)
        policy = AutoModelForCausalLM.from_pretrained(folder)
        for _ in range(2):
            given = [actor.generate_responses(text, "", sampling, 128, tokenizer, 2) for text in PROMPTS]
            samples = [each for group in await asyncio.gather(*given) for each in group]
            drawn = sum(end - start for each in samples for start, end in each["action_ranges"])
            said = sum(sum(each["rollout_log_probs"]) for each in samples)
            print(f"{len(samples)} rollouts, {drawn} tokens, mean log-probability {said / drawn:.3f}")
            await actor.pause_generation()
            tied = {"lm_head.weight"} if policy.config.tie_word_embeddings else set()
            await actor.update_weights({name: each for name, each in policy.state_dict().items() if name not in tied})
            await actor.resume_generation()


if __name__ == "__main__":
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    asyncio.run(rollouts(SingleTurnAgentExecutor()))
