"""`AsyncLLM` in this process, chat templates, and `LLM.chat`: the same tokens and text as `LLM`."""

import asyncio
import threading

import pytest

from support.engines import build, greedy, sampled, tokens
from support.waiting import WAIT_S, until
from treetop import AsyncLLM, SamplingParams
from treetop.core.clients import InProcessClient, Sinks
from treetop.core.loop import CoreThread
from treetop.core.mock import make_mock
from treetop.core.wire import MockOptions
from treetop.text.chat_template import ChatTemplate, open_chat_template
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError, EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest, RequestUpdate

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"


def mocked(step_s: float = 0.0, maximum: int = 4, **options) -> AsyncLLM:
    core, info = make_mock(EngineConfig.of(None, **options), MockOptions(tuple(range(40, 90)), step_s, 1, maximum))
    return AsyncLLM.of(InProcessClient(CoreThread(core), info))


def test_it_gives_what_llm_gives(weak_pair):
    """Several prompts at once, greedy and seeded; deltas join to the text. Arguments have the names of vLLM's."""
    llm = build(weak_pair)
    prompts, params = weak_pair.prompts([4, 11, 2]), [greedy(20), sampled(3, 25), greedy(9)]
    expected = llm.generate(prompts=prompts, sampling_params=params)
    llm.close()
    options = {"dtype": "float64", "context_length": 256}

    async def both():
        own = AsyncLLM(weak_pair.target, weak_pair.head, **options)
        outputs = await own.generate(prompts=prompts, sampling_params=params)
        texts = dict.fromkeys(range(3), "")
        async for delta in await own.stream(prompts, sampling_params=params):
            texts[delta.index] += delta.text
        own.close()
        return outputs, texts

    outputs, texts = asyncio.run(both())
    assert tokens(outputs) == tokens(expected)
    assert [each.text for each in outputs] == [each.text for each in expected] == [*texts.values()]


def test_bad_input_raises_before_any_work():
    llm = mocked()

    async def ask(prompt, **params):
        await llm.stream(prompt, SamplingParams(**params))

    for prompt, params, words in (
        ([[]], {}, "prompt is empty"),
        ([[1], [10**9]], {}, "prompt 1: prompt token id"),
        ("x", {"stop_token_ids": (10**9,)}, "stop token id"),
        (3, {}, "prompts must be"),
    ):
        with pytest.raises(InputError, match=words):
            asyncio.run(ask(prompt, **params))
    assert llm.alive.own == 0
    llm.close()


def test_leaving_and_cancelling_abort():
    """Nothing runs on for a reader that is gone, however it went."""
    llm = mocked(0.05, 1)

    async def leave():
        stream = await llm.stream([1, 2], SamplingParams(max_tokens=2000))
        async for _ in stream:
            break
        stream.close()
        task = asyncio.create_task(llm.generate([[1], [2]], SamplingParams(max_tokens=2000)))
        await asyncio.to_thread(until, lambda: llm.alive.own == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(llm.core._thread.flush)
        assert llm.core.load.num_running == 0

    asyncio.run(asyncio.wait_for(leave(), WAIT_S))
    assert llm.alive.own == 0
    llm.close()


def test_a_slow_reader_gets_all_in_fewer_pieces_and_its_stop_is_seen_at_once():
    llm = mocked(0.0, 4)

    async def read():
        stream = await llm.stream([1, 2], SamplingParams(max_tokens=40))
        while stream._live:
            stream._arrived.clear()
            await stream._arrived.wait()
        return [delta async for delta in stream]

    pieces = asyncio.run(asyncio.wait_for(read(), WAIT_S))
    assert len(pieces) == 1
    assert len(pieces[0].output.token_ids) == 40
    assert pieces[0].text == pieces[0].output.text
    llm.close()


def test_an_engine_that_fails_or_is_closed_is_told_to_each_reader():
    async def failing():
        llm = mocked(0.01, 1)
        first, second = [await llm.stream([1, i], SamplingParams(max_tokens=2000)) for i in range(2)]
        async for _ in first:
            break
        llm.core._thread.core.engine.collect = lambda in_flight: 1 / 0
        for stream in (first, second):
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                async for _ in stream:
                    pass
        llm.close()
        with pytest.raises(EngineError, match="closed"):
            await llm.stream([1])

    asyncio.run(asyncio.wait_for(failing(), WAIT_S))


def test_an_event_loop_is_woken_once_for_all_that_waits_and_one_sink_that_breaks_costs_the_others_nothing():
    """Whatever comes while it looks is looked at; the order of each request's updates stays."""

    async def run():
        heard, woken, sinks = [], [], Sinks()
        loop = asyncio.get_running_loop()
        real, loop.call_soon_threadsafe = loop.call_soon_threadsafe, lambda call: (woken.append(1), real(call))
        broken, good = (EngineRequest(RequestId(i), (1,), SamplingParams(), 0) for i in range(2))
        sinks.add([broken], lambda update: 1 / 0)
        deliver = sinks.add([good], heard.append)
        thread = threading.Thread(target=lambda: [deliver([RequestUpdate(i % 2, (i,))]) for i in range(1000)])
        thread.start()
        thread.join()  # in which the loop stands still
        del loop.call_soon_threadsafe
        assert len(woken) == 1
        await asyncio.to_thread(until, lambda: len(heard) == 500)
        assert [update.new_ids[0] for update in heard] == [*range(1, 1000, 2)]
        thread = threading.Thread(target=lambda: [deliver([RequestUpdate(1, (i,))]) for i in range(5000)])
        thread.start()  # while the loop looks
        await asyncio.to_thread(until, lambda: len(heard) == 5500)
        assert [update.new_ids[0] for update in heard[500:]] == [*range(5000)]
        thread.join()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_an_event_loop_that_ends_while_it_is_told_something_takes_no_other_with_it():
    """It may be closed after the engine's thread has seen that it is open."""
    llm, loops = mocked(0.01, 1), []

    async def left_open():
        loops.append(asyncio.get_running_loop())
        loops[0].is_closed = lambda: False
        return await llm.stream([1], SamplingParams(max_tokens=2000))

    stream = asyncio.run(left_open())
    core = llm.core._thread.core
    committed = core.num_committed
    until(lambda: core.num_committed > committed + 2 or llm.core.failure is not None)
    assert len(tokens(asyncio.run(llm.generate([2], SamplingParams(max_tokens=5))))[0]) == 5
    stream.close()
    llm.close()
    del loops[0].is_closed


def test_a_template_renders_as_chat_templates_expect(tmp_path):
    """Special tokens, loop controls, tojson without escapes, options, and errors of its own."""
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% if m.content == 'bad' %}{{ raise_exception('bad words') }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ extra }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": "<é&>"}] * 3
    line = '{"role": "user", "content": "<é&>"}\n'
    assert template.render(messages, extra="x") == f"<s>{line}{line}>x"
    assert template.render(messages[:1], add_generation_prompt=False) == f"<s>{line}"
    with pytest.raises(InputError, match="bad words"):
        template.render([{"role": "user", "content": "bad"}])
    assert template.render(messages[:1]) == f"<s>{line}>"
    template.close()
    assert open_chat_template(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "a{{ eos_token }}"}], "eos_token": {"content": "</s>"}}'
    )
    assert open_chat_template(tmp_path).render([]) == "a</s>"
    (tmp_path / "chat_template.jinja").write_text("b")
    assert open_chat_template(tmp_path).render([]) == "b"
    assert open_chat_template(tmp_path, "{{ messages | length }}").render(messages) == "3"
    with pytest.raises(ConfigError, match="--chat-template"):
        open_chat_template(tmp_path, str(tmp_path / "none"))


def test_chat_is_generate_of_the_templates_text():
    from treetop import LLM

    llm = LLM(max_running_requests=2, context_length=128)
    talk = [{"role": "user", "content": "def f(x):"}]
    params = SamplingParams(max_tokens=12)
    text = "[user] def f(x): "
    expected = llm.generate(llm.tokenizer.encode(text, special=False), params)
    template = TEMPLATE.replace("{{ bos_token }}", "")
    assert tokens(llm.chat(talk, sampling_params=params, chat_template=template)) == tokens(expected)
    assert len(llm.chat([talk, talk], params, TEMPLATE)) == 2
    assert tokens(llm.chat(talk, params)) == tokens(
        llm.generate(llm.tokenizer.encode("User: def f(x):\n\nAssistant:", special=False), params)
    )
    llm.close()
