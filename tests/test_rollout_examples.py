"""What trainers call of an engine, by a small trainer of the test: theirs are not installed (docs/rl.md)."""

import asyncio
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from treetop import AsyncLLM

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from openrlhf_rollouts import TreeActor, params_of
from verl_rollouts import TreeServer

SAMPLING = {"temperature": 0.9, "top_k": 8, "max_tokens": 6, "seed": 3}


@pytest.fixture(scope="module")
def llm():
    made = AsyncLLM("builtin:nestling", "builtin:nestling-eagle3", dtype="float32")
    yield made
    made.close()


class Executor:
    """One turn, as OpenRLHF's."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")["input_ids"][0].tolist()
        answer = await llm_engine.generate(ids, deepcopy(sampling_params), multi_modal_data=None)
        made = answer.outputs[0]
        logprobs = [each[token].logprob for token, each in zip(made.token_ids, made.logprobs, strict=True)]
        return ids + made.token_ids, logprobs, made.finish_reason, answer.weight_version


def weights_of(llm: AsyncLLM):
    from safetensors.torch import load_file

    return load_file(Path(llm.core.info.model_path) / "model.safetensors")


def test_an_actor_of_openrlhf_gives_what_its_executors_ask(llm):
    """Ids, what they were drawn with, and the weights that came while it was paused; nothing starts meanwhile."""

    async def run():
        executor, sampling = Executor(), SimpleNamespace(**SAMPLING, logprobs=1)
        actor = TreeActor(llm, executor)
        tokenizer = AutoTokenizer.from_pretrained(llm.core.info.model_path)
        before = await actor.generate_responses("import os\n", "", sampling, 64, tokenizer, 2)
        await actor.pause_generation()
        waiting = asyncio.create_task(actor.generate_responses("import os\n", "", sampling, 64, tokenizer))
        await actor.update_weights(weights_of(llm))
        assert actor.get_num_unfinished_requests() == 0
        assert not waiting.done()
        await actor.resume_generation()
        return before, await waiting

    (first, second), (after,) = asyncio.run(run())
    prompt = len(first[0]) - 6
    assert len(first[1]) == 6
    assert first[2] == "length"
    for other, version in ((second, 0), (after, 1)):  # one seed; the same weights
        assert other[0] == first[0]
        assert other[1] == pytest.approx(first[1], abs=1e-4)
        assert other[3] == first[3] + version
    (output,) = asyncio.run(llm.generate([first[0][:prompt]], params_of(SimpleNamespace(**SAMPLING, logprobs=0))))
    assert [each.processed for each in output.logprobs] == pytest.approx(first[1], abs=1e-4)


def test_a_server_of_verl_gives_what_its_agent_loops_ask(llm):
    """Ids in and out; requests that are stopped, and what comes before generation is resumed, end as aborted."""

    async def run():
        server = TreeServer(llm, SimpleNamespace, 6)
        await server.set_global_steps(4)
        said = {key: value for key, value in SAMPLING.items() if key != "max_tokens"}
        given = {"prompt_ids": [5, 6, 7], "request_id": "a", "image_data": None, "video_data": None}
        whole = await server.generate(sampling_params={**said, "logprobs": True}, **given)
        long = asyncio.create_task(server.generate(sampling_params={"max_tokens": 400, "ignore_eos": True}, **given))
        while not server._alive:
            await asyncio.sleep(0)
        await server.abort_all_requests(reject_request=True)
        stopped, late = await long, await server.generate(sampling_params=said, **given)
        await server.update_weights(weights_of(llm).items())
        await server.resume_generation()
        again = await server.generate(sampling_params={**said, "logprobs": True}, **given)
        with pytest.raises(ValueError, match="image_data"):
            await server.generate(sampling_params=said, **{**given, "image_data": ["a"]})
        with pytest.raises(NotImplementedError, match="delta_flush"):
            await server.update_weights([], "delta_flush")
        return whole, stopped, late, again

    whole, stopped, late, again = asyncio.run(run())
    assert len(whole.token_ids) == len(whole.log_probs) == 6
    assert whole.stop_reason == "completed"
    assert whole.extra_fields["global_steps"] == 4
    assert [each.stop_reason for each in (stopped, late)] == ["aborted"] * 2
    assert not stopped.token_ids
    assert again.token_ids == whole.token_ids
    assert again.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    assert again.extra_fields["weight_version"] == whole.extra_fields["weight_version"] + 1
