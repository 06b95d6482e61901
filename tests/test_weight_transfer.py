"""Weights that a trainer sends: by a broadcast, here with gloo; by CUDA IPC in `gpu/test_gpu_weights.py`."""

import asyncio
import base64
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock, call

import httpx
import pytest
import torch
from safetensors.torch import load_file

from support.addresses import addresses
from support.engines import build, greedy, hold_core_thread
from support.new_weights import BITS, PARAMS, answers, tensors_of
from support.refusing import refused
from support.scripted import scripted
from support.serving import child_of
from support.tiny_models import Pair, copy_folder, save_random_head, save_random_llama
from support.waiting import WAIT_S
from treetop import LLM, AsyncLLM
from treetop.checkpoints.sent_tensors import copies_of
from treetop.core.engine_core import WEIGHTS_LOST
from treetop.core.head_fit import HeadFit
from treetop.engine.changes.in_place import copies_between
from treetop.parallel import weight_groups
from treetop.tools.quantize import quantize
from treetop.types.changes import InitWeightsUpdateGroup, IpcHandle, SentTensors, UpdateWeights
from treetop.types.errors import CheckpointError, ConfigError, InputError
from treetop.types.ids import RequestId
from treetop.types.requests import RequestUpdate

MEMORY, EVENT = b"\2c" + bytes(64), bytes(64)
WRONG = (
    ("offset", -1),
    ("stride", (2**40,)),
    ("storage_size_bytes", -1),
    ("storage_offset_bytes", 2**40),
    ("ref_counter_offset", 10_000),
    ("ref_counter_offset", -1),
    ("event_handle", EVENT[1:]),
    ("handle", MEMORY[1:]),
    ("handle", MEMORY + b"a"),
    ("handle", b"\2e"),
)
"""Of handles, fields with what they may not say."""


def free_port():
    return int(addresses(1)[0].rpartition(":")[2])


_TRAINER = """
import sys
from safetensors.torch import load_file
from treetop.weight_transfer import broadcast_tensors, trainer_group
port, size, *files = sys.argv[1:]
group = trainer_group("127.0.0.1", int(port), int(size), "g", "gloo")
for file in files:
    input()
    broadcast_tensors(group, load_file(file).items())
    print("sent", flush=True)
group.close()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("trained")
    target = save_random_llama(folder / "target", seed=9, vocab_size=12)
    return Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=3))


class Trainer:
    """A process that sends files when it is told to. told: what it says of them."""

    def __init__(self, process, files):
        self._process, self._files = process, files

    def sends(self, folder, part=slice(None)):
        """Begin, and say what will come."""
        assert folder == self._files.pop(0)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        tensors = tensors_of(folder)
        dtypes = tuple(str(each.dtype).removeprefix("torch.") for each in tensors.values())
        return SentTensors((*tensors,), dtypes, tuple(tuple(each.shape) for each in tensors.values()), "g")


@contextmanager
def trainer_of(port, size, *folders):
    files = [str(folder / "model.safetensors") for folder in folders]
    command = [sys.executable, "-c", _TRAINER, str(port), str(size), *files]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Trainer(process, [*folders])
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_trainer_broadcasts_is_served_whole_or_not_at_all(strong_pair, trained, tp_size):
    """A target that is torn; target and head, one after another before either is in force; then the target alone."""
    torn = trained.target.parent / f"torn{tp_size}"
    save_random_llama(torn, seed=4, vocab_size=12)
    tensors = tensors_of(torn)
    tensors["model.layers.1.mlp.up_proj.weight"][-1] = torch.inf
    from safetensors.torch import save_file

    save_file(tensors, torn / "model.safetensors")
    params = {"dtype": "float32"} if tp_size > 1 else BITS
    llm = build(strong_pair, (4, 5, 16), **params, tp_size=tp_size, device="cpu")
    prompts = strong_pair.prompts([30, 5])

    def tokens():
        return [each.token_ids for each in llm.generate(prompts, PARAMS)]

    old, port = tokens(), free_port()
    want = [each.token_ids for each in build(trained, None, **params).generate(prompts, PARAMS)]
    order = torn, trained.target, trained.head, strong_pair.target
    with trainer_of(port, 1 + tp_size, *order) as trainer:
        llm.init_weights_update_group("127.0.0.1", port, 1 + tp_size, group_name="g", backend="gloo")
        again = ("127.0.0.1", port, 1 + tp_size, 1, "g", "gloo")
        refused(ConfigError, lambda: llm.init_weights_update_group(*again), "'g'", "already")
        refused(CheckpointError, lambda: llm.update_weights(trainer.sends(torn)), "NaN or infinite")
        llm.update_weights(trainer.sends(trained.target), more=True)
        assert tokens() == old
        llm.update_weights(draft=trainer.sends(trained.head))
        assert tokens() == want
        refused(ConfigError, lambda: llm.update_weights(trainer.sends(strong_pair.target)), "send it, too")
        refused(ConfigError, lambda: llm.sleep(2), "level 1")
    llm.update_weights(strong_pair.target, strong_pair.head)
    assert tokens() == old
    llm.destroy_weights_update_group("g")
    refused(InputError, lambda: llm.update_weights(SentTensors(("a",), ("float32",), ((1,),), "g")), "'g'")
    llm.scheduler.check_integrity()


def test_new_numbers_go_to_where_the_old_ones_lie(strong_pair, trained, tmp_path):
    """Plain and packed: whoever reads the old model's memory reads new numbers; another form is left alone."""
    for name, kind in (("plain", None), ("packed", "fp8")):
        pairs = []
        for which, pair in (("old", strong_pair), ("new", trained)):
            folder = tmp_path / name / which
            if kind is not None:
                quantize(pair.target, None, kind, 0, folder)
            pairs.append(Pair(pair.target if kind is None else folder, pair.head))
        held = {} if kind is None else {"dequantize_weights": False}
        old, new = (build(each, (2, 3, 6), dtype="float64", **held) for each in pairs)
        ids = [3, 1, 4, 1, 5]
        want, runner = new.next_logits(ids), old.engine.runner
        before = [id(runner.target), runner.target.embedding.data_ptr()]
        old.update_weights(pairs[1].target, pairs[1].head)
        after = old.engine.runner.target
        assert [id(after), after.embedding.data_ptr()] == before
        assert torch.equal(old.next_logits(ids), want)
        assert copies_between(runner.target, old.engine.runner.drafter) is None


def test_requests_may_end_on_the_weights_they_began_with(strong_pair, trained):
    """Those that come meanwhile wait, and one that is aborted while it waits ends; nobody's tokens are of both."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9, 5])
    params = PARAMS
    want = [answers(build(pair, None, **BITS), prompts[:1])[0][0] for pair in (strong_pair, trained)]
    first = llm.stream(prompts[:1], params)
    begun = [next(first)]
    done = threading.Event()

    def update():
        llm.update_weights(trained.target, trained.head, in_flight="wait")
        done.set()

    threading.Thread(target=update).start()
    late = llm.stream(prompts[:1], params)
    outputs = [[*begun, *first][-1].output, [*late][-1].output]
    assert done.wait(WAIT_S)
    assert [each.finish_reason for each in outputs] == ["length"] * 2
    assert outputs[0].token_ids == want[0]
    assert outputs[1].token_ids == want[outputs[1].metrics.weight_version]
    assert llm.generate(prompts[:1], params)[0].token_ids == want[1]
    hold_core_thread(llm)
    core = llm._core.core
    core.hold()
    held = core.load.num_waiting
    request = llm._llm.requests(prompts[:1], [greedy(4)])[0]
    core.add(request)
    assert (core.load.num_waiting - held, core.num_alive) == (1, 0)
    assert core.abort(request.request_id).finish_reason == "abort"
    core.add(request._replace(timeout_s=1e-9))
    core.release()
    (ended,) = core.step()
    assert (ended.timed_out, core.num_alive) == (True, 0)
    llm.scheduler.check_integrity()


@pytest.mark.slow
def test_what_was_sent_is_asked_for_again_after_a_crash(strong_pair, trained):
    """The engine after it never answers with the folder's old weights, until it has others."""

    async def run():
        port, prompts = free_port(), strong_pair.prompts([9])
        async with AsyncLLM(strong_pair.target, strong_pair.head, restarts=2, **BITS) as llm:
            with trainer_of(port, 2, trained.target, trained.head) as trainer:
                await llm.init_weights_update_group("127.0.0.1", port, 2, group_name="g", backend="gloo")
                await llm.update_weights(trainer.sends(trained.target), more=True)
                await llm.update_weights(draft=trainer.sends(trained.head))
            new = (await llm.generate(prompts, PARAMS))[0]
            restarts = llm.core.num_restarts
            os.kill(child_of(os.getpid(), "engine_process"), signal.SIGKILL)
            while llm.core.num_restarts == restarts or llm.core.pause is not None:
                await asyncio.sleep(0.05)
            lost = (await llm.generate(prompts, PARAMS))[0]
            await llm.update_weights(trained.target)
            half = (await llm.generate(prompts, PARAMS))[0]
            await llm.update_weights(draft=trained.head)
            return new, lost, half, (await llm.generate(prompts, PARAMS))[0]

    new, lost, half, again = asyncio.run(asyncio.wait_for(run(), 2 * WAIT_S))
    assert [lost.error, half.error] == [WEIGHTS_LOST] * 2
    assert again.token_ids == new.token_ids
    assert (new.metrics.weight_version, again.metrics.weight_version) == (1, 3)


def test_a_head_that_fits_no_longer_is_said(caplog):
    fit, ask = HeadFit(), RequestId(1)

    def rounds(accepted, count=64, drafted=5):
        fit.note([RequestUpdate(ask, (1,), accepted, num_drafted=drafted)] * count)

    rounds(2, 100)
    rounds(0, 500, drafted=0)  # plain rounds say nothing of it
    assert (fit.now, fit.said) == (3.0, None)
    with caplog.at_level(logging.INFO, "treetop.core"):
        for accepted, level in ((2, logging.INFO), (0, logging.WARNING)):
            fit.weights_changed(1)
            rounds(accepted, 63)
            assert fit.said is None
            rounds(accepted, 1)
            assert caplog.records[-1].levelno == level
    assert fit.said == (3.0, 1.0)
    assert "1.00 with weights 1, 3.00 before" in caplog.text


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"names": ("a", "a")}, "2 names, all different"),
        ({"shapes": ()}, "got 1, 0 and 1"),
        ({"handles": ()}, "got 1, 1 and 0"),
    ],
)
def test_tensors_that_do_not_say_one_thing_each_are_refused(fields, part):
    handle = IpcHandle("gpu", 0, (1,), b"", 0, 0, b"", 0, b"", False)
    whole = {"names": ("a",), "dtypes": ("float32",), "shapes": ((1,),), "handles": ((handle,),)}
    refused(InputError, lambda: SentTensors(**{**whole, **fields}), part)


def test_tensors_that_cannot_be_received_change_nothing(strong_pair):
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    old = answers(llm, prompts)
    one = ("a",), ("float32",), ((1,),)
    handle = IpcHandle("GPU-7", 0, (1,), MEMORY, 0, 0, b"", 0, EVENT, False)
    for sent, kind, part in (
        (SentTensors(("a",), ("float32",), ((1,),), "nobody"), InputError, "'nobody'"),
        (SentTensors(("a",), ("float12",), ((1,),), handles=((handle,),)), InputError, "float12"),
        (SentTensors(("a",), ("float32",), ((1,),), handles=((handle,),)), InputError, "GPU-7"),
        (SentTensors(("a",), ("float32",), ((2**40,),), handles=((handle,),)), InputError, "shapes"),
        *(
            (SentTensors(*one, handles=((replace(handle, **{name: wrong}),),)), InputError, name)
            for name, wrong in WRONG
        ),
    ):
        refused(kind, lambda sent=sent: llm.update_weights(sent), part)
    for asked, kind, part in (
        (("127.0.0.1", 9, 2, 0, "g", "gloo"), ConfigError, "rank_offset 0"),
        (("127.0.0.1", 9, 2, 2, "g", "gloo"), ConfigError, "would be 2"),
        (("127.0.0.1", 9, 2, 1, "g", "nccl"), ConfigError, "gloo"),
    ):
        refused(kind, lambda asked=asked: llm.init_weights_update_group(*asked), part)
    assert answers(llm, prompts) == old


def test_an_engine_that_is_closed_leaves_the_groups_of_trainers(strong_pair):
    """So that another in the same process may meet one of the same name."""
    llm, group = LLM(str(strong_pair.target), draft=None, device="cpu"), Mock()
    group.name = "g"
    llm.engine._groups.add(group)
    llm.close()
    group.close.assert_called_once_with()


def test_over_http_in_sglangs_names():
    """What asks for pickles is refused by name, and nothing of it is read."""
    asked = []

    async def change(asked_for):
        asked.append(asked_for)

    named = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1, 2]]}
    memory, event = (base64.b64encode(each).decode() for each in (MEMORY, EVENT))
    handle = {"device_uuid": "u", "offset": 0, "stride": [2, 1], "handle": memory, "storage_size_bytes": 8}
    handle |= {"storage_offset_bytes": 0, "ref_counter_handle": "Ag==", "ref_counter_offset": 0}
    handle |= {"event_handle": event, "event_sync_required": True}
    group = {"master_address": "host", "master_port": 5, "world_size": 2}
    posts = (
        ("/init_weights_update_group", group),
        ("/update_weights_from_distributed", {**named, "draft": named, "flush_cache": False}),
        ("/update_weights_from_tensor", {**named, "handles": [[handle]], "in_flight": "wait"}),
        ("/destroy_weights_update_group", {}),
    )
    with scripted(lambda _: "a") as (url, core):
        core.change = change
        assert [httpx.post(url + path, json=body, timeout=WAIT_S).status_code for path, body in posts] == [403] * 4
    with scripted(lambda _: "a", enable_update_weights=True) as (url, core):
        core.change = change
        assert [httpx.post(url + path, json=body, timeout=WAIT_S).status_code for path, body in posts] == [200] * 4
        pickled = {"serialized_named_tensors": ["gASV"], "flush_cache": True}
        answer = httpx.post(url + "/update_weights_from_tensor", json=pickled, timeout=WAIT_S)
        assert (answer.status_code, "serialized_named_tensors" in answer.text) == (400, True)
        bad = httpx.post(url + "/update_weights_from_distributed", json={**named, "names": ["a", "b"]}, timeout=WAIT_S)
        assert (bad.status_code, "2 names" in bad.text) == (400, True)
        for name, wrong in WRONG:
            said = base64.b64encode(wrong).decode() if isinstance(wrong, bytes) else wrong
            told = {**named, "handles": [[{**handle, name: said}]]}
            bad = httpx.post(url + "/update_weights_from_tensor", json=told, timeout=WAIT_S)
            assert (bad.status_code, name in bad.text) == (400, True)
        for path, told, name in (
            ("/init_weights_update_group", {**group, "world_size": 2**31}, "world_size"),
            ("/init_weights_update_group", {**group, "rank_offset": 10**30}, "rank_offset"),
            ("/update_weights_from_distributed", {**named, "shapes": [[10**30]]}, "shapes"),
            ("/update_weights_from_distributed", {**named, "shapes": [[-1]]}, "shapes"),
        ):
            bad = httpx.post(url + path, json=told, timeout=WAIT_S)
            assert (bad.status_code, name in bad.text) == (400, True)
    met, first, second, left = asked
    assert (met.name, met.rank_offset, met.backend, left.name) == ("weight_update_group", 1, "nccl", met.name)
    assert first.model_tensors == first.draft_tensors == SentTensors(("a",), ("float32",), ((1, 2),), met.name)
    assert (first.more, first.in_flight, second.more, second.in_flight) == (True, "abort", False, "wait")
    (of,) = second.model_tensors.handles
    assert (of[0].handle, of[0].stride, of[0].event_sync_required) == (MEMORY, (2, 1), True)


def test_room_for_new_weights_is_made_of_kv_and_given_back(strong_pair, trained, monkeypatch):
    """Where memory does not hold both: all who run are put back before, and go on, also where nothing comes of it."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    want = [answers(build(pair, None, **BITS), prompts)[0][0] for pair in (strong_pair, trained)]
    monkeypatch.setattr(type(llm.engine), "lacks_room", lambda self, change: True)
    stream = llm.stream(prompts, PARAMS)
    begun = [next(stream)]
    with pytest.raises((ConfigError, CheckpointError)):
        llm.update_weights(trained.target.parent)
    assert [*begun, *stream][-1].output.token_ids == want[0]
    assert llm.engine.runner.pools
    stream = llm.stream(prompts, PARAMS)
    begun = [next(stream)]
    llm.update_weights(trained.target, trained.head, in_flight="retract")
    assert len([*begun, *stream][-1].output.token_ids) == 20
    assert llm.generate(prompts, PARAMS)[0].token_ids == want[1]
    hold_core_thread(llm)
    core = llm._core.core
    commit = core.prepare(UpdateWeights(str(strong_pair.target)))
    assert not llm.engine.runner.pools
    del commit
    core.drop(UpdateWeights(str(strong_pair.target)))
    assert llm.generate(prompts, PARAMS)[0].token_ids == want[1]
    llm.scheduler.check_integrity()


def test_nothing_makes_room_for_what_cannot_come(strong_pair, weak_pair, monkeypatch):
    """Another model, or too large a one: who runs goes on, and prefixes are still there."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS, page_size=4), strong_pair.prompts([30])
    want = answers(llm, prompts)
    engine, dropped = type(llm.engine), []
    monkeypatch.setattr(engine, "_drop_kv", lambda self: dropped.append(True))
    monkeypatch.setattr(engine, "_room_needed", lambda self, change: 2**30)
    for room, given, words in (
        ((0, 2**60), weak_pair.target, "is not the model of"),
        ((0, 2**20), strong_pair.target, "the new weights need 1.0 GiB beside those in force, have 0.0"),
    ):
        monkeypatch.setattr(engine, "_room", lambda self, room=room: room)
        stream = llm.stream(prompts, PARAMS)
        begun = [next(stream)]
        for in_flight in ("abort", "retract"):
            refused(ConfigError, lambda how=in_flight, given=given: llm.update_weights(given, in_flight=how), words)
        assert [*begun, *stream][-1].output.token_ids == want[0][0]
    assert llm.generate(prompts, PARAMS)[0].metrics.num_cached_tokens > 0
    assert not dropped
    llm.scheduler.check_integrity()


def test_headers_are_checked_before_anything_makes_room(strong_pair, trained, monkeypatch, tmp_path):
    """Of the model and of the head, each file's last tensor: one that lacks it, another's shape, and another kind."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS, page_size=4), strong_pair.prompts([30])
    want, engine = answers(llm, prompts), type(llm.engine)
    monkeypatch.setattr(engine, "_drop_kv", lambda self: pytest.fail("K/V have gone"))
    monkeypatch.setattr(engine, "_room_needed", lambda self, change: 2**30)
    monkeypatch.setattr(engine, "_room", lambda self: (0, 2**60))
    for kind, folder in (("model", trained.target), ("draft", trained.head)):
        tensors = load_file(folder / "model.safetensors")
        last = max(tensors)
        for name, changed, words in (
            ("lacking", None, "missing tensor"),
            ("shape", tensors[last].repeat(*(2,) * tensors[last].dim()), "has shape"),
            ("kind", tensors[last].to(torch.int32), "stored as I32"),
        ):
            given = copy_folder(folder, tmp_path / f"{kind} {name}", tensors={last: changed})
            refused(CheckpointError, lambda kind=kind, given=given: llm.update_weights(**{kind: given}), words, last)
    assert llm.generate(prompts, PARAMS)[0].metrics.num_cached_tokens > 0
    assert answers(llm, prompts) == want


def test_parts_that_were_sent_give_way_to_a_folder_and_go_with_what_is_refused(strong_pair, trained):
    """Whole or not, kept parts are of no later update but the next, which names no folder for them."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    want = {pair: answers(build(pair, None, **BITS), prompts)[0][0] for pair in (strong_pair, trained)}
    tensors = tensors_of(trained.target)
    parts = dict([*tensors.items()][:1])
    for kept in (tensors, parts):
        llm.engine._keep({"model": kept})
        llm.update_weights(strong_pair.target, strong_pair.head)
        assert (answers(llm, prompts)[0][0], llm.engine._sent) == (want[strong_pair], frozenset())
    llm.engine._keep({"model": parts})
    refused(CheckpointError, lambda: llm.update_weights(draft=trained.head), "missing tensor")
    llm.update_weights(draft=strong_pair.head)
    assert answers(llm, prompts)[0][0] == want[strong_pair]
    llm.engine._keep({"model": tensors})
    llm.engine.drop(UpdateWeights(draft=str(trained.head)))  # it was refused elsewhere
    llm.update_weights(draft=strong_pair.head)
    assert answers(llm, prompts)[0][0] == want[strong_pair]


def test_only_what_is_sent_comes_in_parts(strong_pair, trained):
    """Nothing becomes of the rest, and of no tensors at all."""
    llm, prompts = build(strong_pair, (2, 3, 6), **BITS), strong_pair.prompts([9])
    llm.update_weights(tensors_of(trained.target), trained.head)
    want, folder = answers(llm, prompts), llm.engine.model_path
    for given in (strong_pair.target, tensors_of(strong_pair.target)):
        refused(InputError, lambda given=given: llm.update_weights(given, more=True), "more: model")
        refused(InputError, lambda given=given: llm.update_weights(draft=given, more=True), "more: draft")
    folder_too = UpdateWeights(str(strong_pair.target), more=True)
    refused(InputError, lambda: llm._core.core.prepare(folder_too), "more: ")
    refused(InputError, lambda: llm.update_weights(draft=SentTensors((), (), (), "g")), "draft: no tensors")
    assert folder == llm.engine.model_path
    assert folder.is_dir()
    assert answers(llm, prompts) == want


def test_tensors_are_copied_before_their_owner_is_told_so(monkeypatch):
    """On a GPU a copy has not been made when the call for it returns."""
    told, device = Mock(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", told.synchronize)
    copies_of({"a": told}, device)
    assert told.mock_calls == [call.to(device, copy=True), call.synchronize(device)]
    (copied,) = copies_of({"a": (tensor := torch.ones(2))}, torch.device("cpu")).values()
    assert torch.equal(copied, tensor)
    assert copied.data_ptr() != tensor.data_ptr()


def test_a_group_that_another_engine_refused_is_closed_and_any_may_be_left_twice(strong_pair, monkeypatch):
    """Its name is free again. An engine that was started again has none of the groups that another has."""
    met = []

    def meet(name, *_):
        met.append(Mock())
        met[-1].name = name
        return met[-1]

    monkeypatch.setattr(weight_groups, "WeightGroup", meet)
    llm = build(strong_pair, (2, 3, 6), **BITS)
    asked = InitWeightsUpdateGroup("g", "127.0.0.1", 9, 1, 2, "gloo")
    llm.engine.prepare(asked)
    llm.engine.drop(asked)
    llm.init_weights_update_group("127.0.0.1", 9, 2, 1, "g", "gloo")
    llm.engine.drop(asked)
    assert [each.close.call_count for each in met] == [1, 0]
    for _ in range(2):
        llm.destroy_weights_update_group("g")
    assert [each.close.call_count for each in met] == [1, 1]
