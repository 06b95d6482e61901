"""Other weights in a running engine: nothing of the old ones is used again."""

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.engines import build, greedy, hold_core_thread, next_and_hold, sampled
from support.new_weights import BITS, PARAMS, answers, tensors_of
from support.scripted import scripted
from support.serving import child_of, serving
from support.tiny_models import Pair, save_random_head, save_random_llama
from support.waiting import WAIT_S
from treetop import LLM, AsyncLLM, SamplingParams
from treetop.checkpoints.folder import resolve_folder
from treetop.core.engine_core import WEIGHTS_REPLACED, WEIGHTS_UNDECIDED, EngineCore
from treetop.distributed.client import EngineProcessClient
from treetop.kernels.fused import gate_mul_reference
from treetop.kernels.gemm.lossless_weights import TILE, LosslessLaunch, is_whole, lossless_gemm_reference
from treetop.kernels.triton_guard import GpuTraits
from treetop.tools.quantize import quantize
from treetop.types.changes import UpdateWeights
from treetop.types.errors import CheckpointError, ConfigError, EngineError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import EngineRequest
from treetop.weights.linear import SkinnyLinear
from treetop.weights.lossless import LaunchLimit


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Pair:
    """What a trainer has made of `strong_pair`: all numbers are others."""
    folder = tmp_path_factory.mktemp("trained")
    target = save_random_llama(folder / "target", seed=9, vocab_size=12)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=3))


@pytest.mark.parametrize("graphs", ["auto", "sim"])
def test_after_it_every_bit_is_that_of_an_engine_of_the_new_weights(strong_pair, trained, graphs):
    """Prompts that the prefix cache knew too; target and head, and back again."""
    llm, prompts = build(strong_pair, (4, 5, 16), **BITS, graphs=graphs, page_size=4), strong_pair.prompts([30, 5, 30])
    old = answers(llm, prompts)
    again = llm.generate(prompts[:1], PARAMS)[0]
    assert again.metrics.num_cached_tokens > 0
    llm.update_weights(trained.target, trained.head)
    first = llm.generate(prompts[:1], PARAMS)[0]
    assert first.metrics.num_cached_tokens == 0
    new = answers(llm, prompts)
    assert new == answers(build(trained, None, **BITS), prompts)
    assert new != old
    assert (llm.model_path, llm.draft_path) == (trained.target, trained.head)
    llm.update_weights(strong_pair.target)
    assert answers(llm, prompts) == old
    llm.scheduler.check_integrity()


@pytest.fixture
def in_twelve_bits(monkeypatch):
    """Products of few rows with weights in 12 bits, as on a GPU, by their reference. Yields the most outliers of a
    block with which a start takes them, and how many products have had them.
    """
    limits, taken = [10], Counter()

    def few(self, x):
        if self._compressed is None or self._compressed.launch(x.numel() // x.shape[-1]) is None:
            return None
        taken["products"] += 1
        return lossless_gemm_reference(x.reshape(-1, x.shape[-1]), self._compressed.weight).to(x.dtype)[None]

    def offers(n, k, gated, gpu):
        launch = LosslessLaunch(TILE, 1, 3, 4, 64)
        return {rows: LaunchLimit(launch, limits[0]) for rows in (1, 16)} if is_whole(n, k, gated) else {}

    monkeypatch.setattr("treetop.weights.lossless.offers", offers)
    monkeypatch.setattr("treetop.weights.linear._GpuWeight.few", few)
    gpu = GpuTraits(132, True, 227 << 10)

    def linear(self, parts, bias, context):
        return SkinnyLinear(parts[""].contiguous(), gpu, True, bias)

    monkeypatch.setattr("treetop.weights.plain.Unquantized.linear", linear)
    monkeypatch.setattr(
        "treetop.weights.plain.Unquantized.gated", lambda *given: _Gated(linear(*given[:3], None), given[3])
    )
    return limits, taken


class _Gated:
    def __init__(self, linear, kind):
        self._linear, self._kind = linear, kind
        self.numbers, self.read_bytes = linear.numbers, linear.read_bytes

    def __call__(self, x):
        return gate_mul_reference(self._linear(x), self._kind)


@pytest.mark.parametrize("counts", [(8, 15), (15, 8)])
def test_outliers_beyond_a_launchs_limit_have_no_round_captured_anew(in_twelve_bits, tmp_path, counts):
    """Of a weight that was kept in 12 bits, or was not, whatever a start would choose for the new one; there and back,
    with the tokens of an engine that has the new weights and the same launches."""
    limits, taken = in_twelve_bits
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "intermediate_size": 128, "vocab_size": 128}
    pairs = []
    for name, count in zip(("old", "new"), counts, strict=True):
        target = save_random_llama(tmp_path / name, seed=3 + count, **sizes)
        tensors = {key: tensor.bfloat16() for key, tensor in tensors_of(target).items()}
        for i in range(count):
            tensors["model.layers.1.self_attn.o_proj.weight"][i % TILE, 5 + i // TILE] = 2.0**-40
        save_file(tensors, target / "model.safetensors")
        pairs.append(Pair(target, None))
    old, new = pairs
    options = {"dtype": "bfloat16", "exactness": "ties", "graphs": "sim", "device": "cpu"}
    llm, prompts = build(old, None, **options), old.prompts([9, 5])
    first, launcher = answers(llm, prompts), llm.engine.launcher
    limits[0] = 16 if counts[0] <= 10 else 10
    want = answers(build(new, None, **options), prompts)
    limits[0] = 10
    for _ in range(2):
        llm.update_weights(new.target)
        assert llm.engine.launcher is launcher
        assert answers(llm, prompts) == want != first
        llm.update_weights(old.target)
        assert llm.engine.launcher is launcher
        assert answers(llm, prompts) == first
    assert taken["products"]


def test_weights_that_fail_half_way_end_the_engine_and_all_requests(strong_pair, monkeypatch):
    llm = build(strong_pair, (2, 3, 6))
    hold_core_thread(llm)
    core = EngineCore(llm.engine, llm.scheduler)
    monkeypatch.setattr(llm.engine, "prepare", lambda change: lambda: 1 // 0)
    core.add(EngineRequest(RequestId(1), (5, 6, 7), greedy(50, whole=True), 0))
    core.step()
    with pytest.raises(ZeroDivisionError):
        core.prepare(UpdateWeights())()
    assert isinstance(core.failure, ZeroDivisionError)
    (ended,) = core.step()
    assert ended.engine_failed
    assert "ZeroDivisionError" in ended.error


@pytest.mark.parametrize("again", [(), ("target",)])
def test_weights_that_failed_half_way_serve_nobody_until_all_are_read_again(strong_pair, trained, monkeypatch, again):
    """Of a folder that is in force already, too; the target alone is half of what had failed."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    want = answers(llm, prompts)

    def half(runner):  # the target is there, and nothing behind it
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("treetop.engine.engine.give_back", half)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.update_weights(trained.target, trained.head)
    torn = llm.generate(prompts, PARAMS)[0]
    assert (torn.error, torn.token_ids) == (WEIGHTS_UNDECIDED, ())
    assert (llm.engine.model_path, llm.engine.draft_path) == (strong_pair.target, strong_pair.head)
    llm.update_weights(**{"model" if each == "target" else "draft": getattr(strong_pair, each) for each in again})
    if again == ("target",):
        assert llm.generate(prompts, PARAMS)[0].error == WEIGHTS_UNDECIDED
        llm.update_weights(draft=strong_pair.head)
    assert answers(llm, prompts) == want


def test_requests_in_flight_end_with_what_they_had(strong_pair, trained):
    """They are told why, the engine has not failed, and their prefixes are not kept."""
    llm = build(strong_pair, (2, 3, 6), **BITS)
    stream = llm.stream(strong_pair.prompts([9]), sampled(1, 200, logprobs=0, whole=True))
    pieces = [next_and_hold(llm, stream, 4), next(stream), next(stream)]
    had = [token for piece in pieces for token in piece.token_ids]
    llm.update_weights(trained.target, trained.head)
    deltas = list(stream)
    output = deltas[-1].output
    assert output.finish_reason == "abort"
    assert output.error == WEIGHTS_REPLACED
    assert output.token_ids[: len(had)] == tuple(had)
    assert len(output.token_ids) < 200
    llm.scheduler.check_integrity()
    prompts = strong_pair.prompts([9, 4])
    assert answers(llm, prompts) == answers(build(trained, None, **BITS), prompts)


@pytest.mark.parametrize("mixed", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_requests_in_flight_may_go_on_with_the_new_weights(strong_pair, trained, mixed):
    """They keep what they had; what follows is what the new weights say behind it. One waits, one is prefilled."""
    more = {"page_size": 4, "max_running_requests": 2, "chunked_prefill_size": 8, "mixed_chunk": mixed}
    llm = build(strong_pair, (2, 3, 6), **BITS, **more)
    prompts = strong_pair.prompts([9, 40, 5])
    streams = [llm.stream([prompt], sampled(1, 60, logprobs=0, whole=True)) for prompt in prompts]
    begun = [[next_and_hold(llm, streams[0], 3)], [], []]
    assert begun[0][0].token_ids
    llm.update_weights(trained.target, trained.head, in_flight="retract")
    outputs = [[*first, *stream][-1].output for first, stream in zip(begun, streams, strict=True)]
    fresh = build(trained, None, **BITS)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (output.finish_reason, len(output.token_ids), len(output.logprobs)) == ("length", 60, 60)
        assert output.metrics.weight_version == 1
        for at in (58, 59):
            logits = fresh.next_logits([*prompt, *output.token_ids[:at]]).double().log_softmax(-1)
            assert output.logprobs[at].logprob == pytest.approx(float(logits[output.token_ids[at]]), abs=1e-4)
    llm.scheduler.check_integrity()
    assert answers(llm, prompts[:1]) == answers(fresh, prompts[:1])
    with pytest.raises(InputError, match="in_flight: must be abort, retract or wait, got 'keep'"):
        llm.update_weights(trained.target, in_flight="keep")


def test_ranks_have_other_weights_all_or_none(strong_pair, trained, tmp_path):
    """Also where one of them alone refuses, for its part of a tensor holds what is no number."""
    llm, prompts = build(strong_pair, (2, 3, 6), tp_size=2, device="cpu"), strong_pair.prompts([9, 30])
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    old, new = (
        [each.token_ids for each in build(pair, None).generate(prompts, params)] for pair in (strong_pair, trained)
    )

    def given():
        return [(each.token_ids, each.metrics.weight_version) for each in llm.generate(prompts, params)]

    assert given() == [(ids, 0) for ids in old]
    llm.update_weights(trained.target, trained.head)
    assert given() == [(ids, 1) for ids in new]
    with pytest.raises((ConfigError, CheckpointError)):
        llm.update_weights(tmp_path)
    for row in (0, -1):  # of the first rank, of the second
        tensors = tensors_of(strong_pair.target)
        tensors["model.layers.1.mlp.up_proj.weight"][row] = torch.inf
        with pytest.raises((CheckpointError, ConfigError), match="NaN or infinite"):
            llm.update_weights(tensors, strong_pair.head)
    assert given() == [(ids, 1) for ids in new]
    llm.update_weights(strong_pair.target, strong_pair.head)
    assert given() == [(ids, 2) for ids in old]


def test_what_does_not_fit_changes_nothing(strong_pair, weak_pair, tmp_path):
    """Another architecture, another head, no folder."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    old = answers(llm, prompts)
    with pytest.raises(ConfigError, match=r"is not the model of .*: their config\.json differ"):
        llm.update_weights(weak_pair.target)
    with pytest.raises((ConfigError, CheckpointError)):
        llm.update_weights(strong_pair.target, weak_pair.head)
    with pytest.raises((ConfigError, CheckpointError)):
        llm.update_weights(tmp_path)
    assert answers(llm, prompts) == old


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-3}, {"rope_theta": 5000.0}, {"norm_before_residual": True}])
def test_a_head_whose_config_differs_is_refused(strong_pair, trained, tmp_path, change):
    """Names and shapes are the same, but tensors mean something else; the same config in another folder is taken."""
    head = shutil.copytree(trained.head, tmp_path / "head")
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    old, config = answers(llm, prompts), json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=r"head is another draft head: its config or its tensors differ"):
        llm.update_weights(draft=head)
    assert answers(llm, prompts) == old
    (head / "config.json").write_text(json.dumps(config))
    llm.update_weights(draft=head)
    assert llm.draft_path == head


def test_tensors_by_name_are_as_good_as_folders(strong_pair, trained, monkeypatch, tmp_path):
    """A mapping and pairs; of target and head, each alone too. What was written goes with the weights."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    llm, prompts = build(strong_pair, (4, 5, 16), **BITS), strong_pair.prompts([30, 5])
    old, new = answers(llm, prompts), answers(build(trained, None, **BITS), prompts)
    target, head = tensors_of(trained.target), tensors_of(trained.head)
    llm.update_weights({name: tensor.t().contiguous().t() for name, tensor in target.items()}, iter(head.items()))
    assert answers(llm, prompts) == new
    llm.update_weights(strong_pair.target)
    assert answers(llm, prompts) == old
    assert len(list(tmp_path.iterdir())) == 1, "the head's folder is still in force, the target's is not"
    llm.update_weights(draft=tensors_of(strong_pair.head))
    llm.update_weights(model=strong_pair.target, draft=strong_pair.head)
    assert answers(llm, prompts) == old
    assert list(tmp_path.iterdir()) == []
    llm.scheduler.check_integrity()


class _OfATrainer(torch.Tensor):
    """A kind of its own, as shards are."""


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_do_not_fit_change_nothing(strong_pair, weak_pair, monkeypatch, tmp_path):
    """A wrong shape, one missing, one more, one twice, no tensor, infinite; the last of a good lot, or of the head."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    old, target = answers(llm, prompts), tensors_of(strong_pair.target)
    changed = {name: tensor + 1 for name, tensor in target.items()}
    last = sorted(target)[-1]
    for wrong, words in (
        ({**changed, last: target[last][:-1]}, "has shape"),
        ({name: tensor for name, tensor in changed.items() if name != last}, "missing tensor"),
        ({**changed, "surplus": target[last]}, "unexpected tensor surplus"),
        ([*changed.items(), (last, target[last])], "is given twice"),
        ({**changed, last: [1.0]}, "must be text and its value a tensor"),
        ({**changed, last: target[last] * float("inf")}, "NaN or infinite"),
        ({**changed, last: target[last].to("meta")}, f"tensor '{last}' has no numbers"),
        ({**changed, last: target[last].to_sparse()}, f"tensor '{last}' is laid out as torch.sparse_coo"),
        (
            {**changed, last: torch.quantize_per_tensor(target[last], 0.1, 0, torch.qint8)},
            f"tensor '{last}' is of qint8",
        ),
        ({**changed, last: target[last].to(torch.complex128)}, f"tensor '{last}' is of complex128"),
        ({**changed, last: target[last].as_subclass(_OfATrainer)}, f"tensor '{last}' is a _OfATrainer"),
        (list(changed), "pairs of a name and a tensor, got '"),
        ([(*pair, 1) for pair in changed.items()], "pairs of a name and a tensor, got"),
        (target[last], "pairs of a name and a tensor"),
        (7, "a folder, or tensors by name, got 7"),
        ({}, "no tensors were given"),
        (iter(()), "no tensors were given"),
    ):
        with pytest.raises((CheckpointError, InputError), match=words) as error:
            llm.update_weights(wrong)
        assert str(error.value).startswith("update_weights: ")
        assert str(tmp_path) not in str(error.value), "a folder that is nobody's"
    head = tensors_of(strong_pair.head)
    name = next(name for name in head if head[name].ndim == 2)
    with pytest.raises(CheckpointError, match=f"^update_weights: the tensors given for draft: .*{name}"):
        llm.update_weights(changed, {**head, name: head[name][:, :-1]})
    with pytest.raises(CheckpointError, match=f"^update_weights: the tensors given for model: missing tensor {last}$"):
        llm.update_weights({key: tensor for key, tensor in changed.items() if key != last})
    with pytest.raises(InputError, match="give a model or a draft"):
        llm.update_weights(more=True)
    assert answers(llm, prompts) == old
    assert list(tmp_path.iterdir()) == []
    plain = build(strong_pair, None, **BITS)
    with pytest.raises(InputError, match="draft: tensors need a draft in a folder of its own"):
        plain.update_weights(draft=head)
    with pytest.raises(ConfigError, match="this engine has no draft head of its own folder"):
        plain.update_weights(draft=strong_pair.head)


def test_quantized_folders_are_put_in_place_of_quantized_ones(strong_pair, trained, tmp_path):
    """The same format, read and prepared anew; another is refused."""
    before, after = tmp_path / "before", tmp_path / "after"
    quantize(strong_pair.target, None, "fp8", 0, before)
    quantize(trained.target, None, "fp8", 0, after)
    llm, prompts = build(Pair(before, strong_pair.head), (2, 3, 6), **BITS), strong_pair.prompts([9, 30])
    old = answers(llm, prompts)
    with pytest.raises(ConfigError, match=r"their config\.json differ"):
        llm.update_weights(trained.target)
    assert answers(llm, prompts) == old
    llm.update_weights(after, trained.head)
    assert answers(llm, prompts) == answers(build(Pair(after, trained.head), None, **BITS), prompts) != old


def test_what_was_learned_of_other_weights_is_forgotten(strong_pair, trained):
    llm = build(strong_pair, (4, 5, 16), **BITS, speculative_calibration="learn")
    llm.generate(strong_pair.prompts([9, 30]), PARAMS)
    nodes = llm.engine.runner.state.calibration.nodes
    llm.engine.runner.state.calibration.reset()
    fresh = nodes.clone()
    llm.generate(strong_pair.prompts([9, 30]), PARAMS)
    assert not torch.equal(nodes, fresh)
    llm.update_weights(trained.target, trained.head)
    assert torch.equal(nodes, fresh)


def test_an_engine_that_takes_the_place_of_another_has_the_weights_in_force(strong_pair, trained):
    """In a process of its own: an open stream ends with its reason, and a restart does not bring the old ones back; nor
    those that were prepared in the engine that died.
    """
    options = {"context_length": 512, "max_running_requests": 8, "speculative_eagle_topk": 2, **BITS}
    options |= {"speculative_num_steps": 3, "speculative_num_draft_tokens": 6}
    prompts = strong_pair.prompts([9, 4])

    async def run():
        async with AsyncLLM(strong_pair.target, strong_pair.head, restarts=1, **options) as llm:
            first = await llm.generate(prompts, PARAMS)
            engine, change = child_of(os.getpid(), "engine_process"), llm.core.change
            os.kill(engine, signal.SIGSTOP)  # while tensors are written: what is asked now does not end before
            stream = await llm.stream(prompts[:1], sampled(1, 480, whole=True))

            async def asked(what):
                answer = asyncio.ensure_future(change(what))
                while not llm.core.engines[0]._updating:
                    await asyncio.sleep(0)
                os.kill(engine, signal.SIGCONT)
                await answer

            llm.core.change = asked
            await llm.update_weights(tensors_of(trained.target), trained.head)
            llm.core.change = change
            (cut,) = await stream.outputs()
            with pytest.raises(ConfigError, match="is not the model of"):
                await llm.update_weights("builtin:nestling")
            second = await llm.generate(prompts, PARAMS)
            (engine,) = llm.core.engines
            change = engine.change

            async def dies(asked, stage, token):
                await change(asked, stage, token)
                if stage == "prepare":
                    os.kill(child_of(os.getpid(), "engine_process"), signal.SIGKILL)
                    while engine.is_up:
                        await asyncio.sleep(0.01)

            engine.change = dies
            with pytest.raises(EngineError, match="an engine has ended meanwhile; nothing has changed"):
                await llm.update_weights(strong_pair.target, strong_pair.head)
            third = await llm.generate(prompts, PARAMS)
            return first, cut, second, third

    first, cut, *later = asyncio.run(asyncio.wait_for(run(), 2 * WAIT_S))
    want = answers(build(trained, None, **BITS), prompts)
    assert (cut.finish_reason, cut.error) == ("abort", WEIGHTS_REPLACED)
    assert [[(each.token_ids, each.logprobs) for each in outputs] for outputs in later] == [want, want]
    assert [(each.token_ids, each.logprobs) for each in first] != want


def test_tensors_that_the_engine_may_have_taken_stay_until_others_are_in_force(strong_pair, trained):
    """Whoever asked for them has gone, or the engine ended before it answered; what it refused goes at once."""
    given = []

    async def cancelled() -> None:
        llm, begun = AsyncLLM(str(strong_pair.target), None, **BITS), asyncio.Event()

        async def slowly(change):
            given.append(Path(change.model))
            begun.set()
            await asyncio.Event().wait()

        llm.core.change, tensors = slowly, load_file(trained.target / "model.safetensors")
        task = asyncio.ensure_future(llm.update_weights(tensors))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        for error, stays in ((EngineError("it has ended"), True), (ConfigError("another model"), False)):
            llm.core.change = AsyncMock(side_effect=error)
            with pytest.raises(type(error)):
                await llm.update_weights(tensors)
            given.append(Path(llm.core.change.call_args.args[0].model))
            assert given[-1].exists() is stays
        assert given[0].is_dir()
        llm.core.change = AsyncMock()
        await llm.update_weights(str(strong_pair.target))
        assert not any(folder.exists() for folder in given)
        llm.close()

    asyncio.run(cancelled())


def test_over_http_only_where_the_operator_says_so():
    """SGLang's path and field. A request that it has ended may be asked again: 503."""
    asked = []

    async def change(asked_for):
        if asked_for.model == "bad":
            raise ConfigError("update_weights: bad is not the model")
        asked.append((asked_for.model, asked_for.draft, asked_for.in_flight))

    path, body = "/update_weights_from_disk", {"model_path": "new", "draft_model_path": "head", "in_flight": "retract"}
    with scripted(lambda _: "a") as (url, core):
        core.change = change
        refused = httpx.post(url + path, json=body, timeout=WAIT_S)
        assert refused.status_code == 403
        assert "--enable-update-weights" in refused.json()["error"]["message"]
    assert asked == []
    with scripted(lambda _: "a", enable_update_weights=True, admin_api_key="key") as (url, core):
        core.change = change
        assert httpx.post(url + path, json=body, timeout=WAIT_S).status_code == 401
        key = {"Authorization": "Bearer key"}
        assert httpx.post(url + path, json=body, headers=key, timeout=WAIT_S).json()["success"] is True
        bad = httpx.post(url + path, json={"model_path": "bad"}, headers=key, timeout=WAIT_S)
        assert (bad.status_code, "is not the model" in bad.text) == (400, True)
        assert httpx.post(url + path, json={"draft_model_path": "head"}, headers=key, timeout=WAIT_S).status_code == 400
        core.fails = WEIGHTS_REPLACED
        ended = httpx.post(url + "/v1/completions", json={"prompt": "a"}, headers=key, timeout=WAIT_S)
        assert (ended.status_code, ended.json()["error"]["code"]) == (503, "weights_replaced")
    assert asked == [("new", "head", "retract")]


@pytest.mark.slow
def test_engines_side_by_side_have_other_weights_all_or_none(tmp_path):
    """Every answer says of which weights it is, whichever engine gives it."""
    folder = shutil.copytree(resolve_folder("builtin:nestling"), tmp_path / "new")
    tensors = tensors_of(folder)
    name = next(name for name in tensors if name.endswith("0.mlp.down_proj.weight"))
    save_file({**tensors, name: tensors[name].flip(0).contiguous()}, folder / "model.safetensors")
    torn = shutil.copytree(folder, tmp_path / "torn")
    save_file({**tensors, name: tensors[name] * torch.inf}, torn / "model.safetensors")
    asked = {"prompt": ["Once", "upon", "a", "time"], "max_tokens": 12, "temperature": 0}

    def answers(server):
        body = server.post("/v1/completions", asked).json()
        return [each["text"] for each in body["choices"]], body["weight_version"]

    want = [each.text for each in LLM(folder, None).generate(asked["prompt"], SamplingParams(max_tokens=12))]
    with serving("builtin:nestling", "--dp-size", "2", "--enable-update-weights") as server:
        old = answers(server)
        assert server.post("/update_weights_from_disk", {"model_path": str(torn)}).status_code == 400
        assert [answers(server) for _ in range(3)] == [old] * 3
        assert server.post("/update_weights_from_disk", {"model_path": str(folder)}).status_code == 200
        assert [answers(server) for _ in range(3)] == [(want, 1)] * 3
        assert old == (old[0], 0)
        assert old[0] != want
        assert server.get("/v1/models").json()["data"][0]["weight_version"] == 1


def test_where_weights_cannot_be_replaced_it_is_refused_by_name():
    async def refusals():
        for client in (EngineProcessClient(), EngineProcessClient(num_engines=2)):
            with pytest.raises(EngineError, match="the engine is being started again"):
                await client.change(UpdateWeights("m"))
            client.close()

    asyncio.run(refusals())
