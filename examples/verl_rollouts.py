"""verl's rollouts by trees: `TreeServer` answers what verl's agent loops ask of a rollout server, and takes weights.

    python examples/verl_rollouts.py

A server of verl has token ids in and out (`generate`, a `TokenOutput` back); its replica puts it to sleep, wakes it and
stops it around an update, and `BaseRollout` brings the weights. Source: verl 0.9.1, verl/workers/rollout/llm_server.py,
replica.py, base.py and vllm_rollout/vllm_async_server.py. Needs `verl`, of which only `TokenOutput` is used.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from treetop import AsyncLLM, RequestOutput, SamplingParams

PROMPTS = ["def area(r):\n", "import os\n", "class A:\n"]


class TreeServer:
    """A rollout server and its weights. In verl a Ray actor opens the engine and makes one of these for its methods.

    token_output: verl's `TokenOutput`, or what takes its fields. response_length: tokens of an answer where the agent
    loop does not say how many.
    """

    def __init__(self, llm: AsyncLLM, token_output: Callable[..., Any], response_length: int) -> None:
        self._llm, self._token_output, self._response_length = llm, token_output, response_length
        self._alive, self._stopped = set[asyncio.Task[Any]](), set[asyncio.Task[Any]]()
        self._may_go, self._rejects, self._global_steps = asyncio.Event(), False, 0
        self._may_go.set()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **beside: Any
    ) -> Any:
        """Raises ValueError for what is not text.

        sampling_params: as verl's agent loops have them; with `logprobs` true a token comes with the log-probability
        that it was drawn with.
        """
        if given := sorted(name for name, value in beside.items() if value):
            raise ValueError(f"{given[0]}: prompts are ids of text here")
        if not self._may_go.is_set() and self._rejects:
            return self._answer(None)
        await self._may_go.wait()
        params = self._params(sampling_params)
        task = asyncio.create_task(self._llm.generate([[*prompt_ids]], params))
        self._alive.add(task)
        try:
            (output,) = await task
        except asyncio.CancelledError:
            if task not in self._stopped:  # whoever asked has gone
                raise
            return self._answer(None)
        finally:
            self._alive.discard(task)
            self._stopped.discard(task)
        return self._answer(output)

    async def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """What runs ends as aborted, without tokens; what comes waits for `resume_generation`, or is aborted, too."""
        self._rejects = reject_request
        self._may_go.clear()
        self._stopped |= {task for task in self._alive if task.cancel()}

    async def resume_generation(self) -> None:
        self._may_go.set()

    async def clear_kv_cache(self) -> None:
        """Nothing: an update drops what older weights have cached."""

    async def sleep(self) -> None:
        await self._llm.sleep(1)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._llm.wake_up(tags)

    async def release(self) -> None:
        await self.sleep()

    async def resume(self, tags: Sequence[str]) -> None:
        await self._llm.wake_up(tags)

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """All tensors by name. Raises NotImplementedError for another wire format."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"wire_format {wire_format}: only named_tensors are taken")
        await self._llm.update_weights(dict(weights), in_flight="retract")

    def _params(self, said: dict[str, Any]) -> SamplingParams:
        own = dict(said)
        most = [own.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        own["max_tokens"] = next((count for count in most if count is not None), self._response_length)
        own["logprobs"] = 0 if own.get("logprobs") else None
        return SamplingParams(**own)

    def _answer(self, output: RequestOutput | None) -> Any:
        """None: it was aborted before its end."""
        extra: dict[str, Any] = {"global_steps": self._global_steps}
        if output is None:
            return self._token_output(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields=extra)
        extra["num_cached_tokens"] = output.metrics.num_cached_tokens
        extra["weight_version"] = output.metrics.weight_version
        logprobs = None if output.logprobs is None else [each.processed for each in output.logprobs]
        return self._token_output(
            token_ids=[*output.token_ids],
            log_probs=logprobs,
            stop_reason="aborted" if output.finish_reason == "abort" else "completed",
            extra_fields=extra,
        )


async def rollouts(token_output: Callable[..., Any]) -> None:
    """Two steps of what a trainer does: rollouts, and the weights of the step that follows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415  # slow

    async with AsyncLLM("builtin:nestling", "builtin:nestling-eagle3", dtype="float32") as llm:
        folder = llm.core.info.model_path
        server, tokenizer = TreeServer(llm, token_output, 16), AutoTokenizer.from_pretrained(folder)
        policy = AutoModelForCausalLM.from_pretrained(folder)
        for step in range(2):
            await server.set_global_steps(step)
            sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
            ids = [tokenizer(text)["input_ids"] for text in PROMPTS * 2]
            outputs = await asyncio.gather(
                *[server.generate(request_id=str(i), prompt_ids=each, sampling_params=sampling)
                  for i, each in enumerate(ids)]
            )  # fmt: skip
            drawn = sum(len(each.token_ids) for each in outputs)
            mean = sum(sum(each.log_probs) for each in outputs) / drawn
            versions = {each.extra_fields["weight_version"] for each in outputs}
            print(f"step {step}: {len(outputs)} rollouts of weights {versions}, mean log-probability {mean:.3f}")
            tied = {"lm_head.weight"} if policy.config.tie_word_embeddings else set()
            await server.abort_all_requests()
            await server.update_weights((name, each) for name, each in policy.state_dict().items() if name not in tied)
            await server.resume_generation()


if __name__ == "__main__":
    from verl.workers.rollout.replica import TokenOutput

    asyncio.run(rollouts(TokenOutput))
