"""Weights replaced again and again, in every way and under requests: memory is flat, answers are a fresh engine's."""

import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from support.engines import accept_lens, build, greedy, next_and_hold, rest, sampled, tokens
from support.loras import save_lora
from support.new_weights import tensors_of
from support.tiny_models import Pair, copy_folder, save_random_head, save_random_llama

SHAPE = (2, 3, 6)
SHARED_MEMORY = Path("/dev/shm")
TURNS = ("model", "draft", "both", "tensors", "shared memory", "again")
"""What is replaced, and how it comes; then all is as before. Target and head change apart: each meets the other's."""
IN_FLIGHT = ("abort", "retract", "wait")


@pytest.fixture(scope="module")
def pairs(strong_pair, tmp_path_factory):
    """Two targets and two heads, and an adapter that has one of the head."""
    folder = tmp_path_factory.mktemp("trained")
    target = save_random_llama(folder / "target", seed=9, vocab_size=12)
    lora = save_lora(folder / "lora", target, 4, 8.0, 1)
    save_lora(lora / "draft", strong_pair.head, 4, 8.0, 2)
    return (strong_pair, Pair(target, save_random_head(folder / "head", target, draft_vocab=11, seed=3))), lora


@pytest.fixture
def shared(pairs):
    """The two pairs in shared memory, where a trainer may have written them."""
    place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield [
            Pair(*(copy_folder(each, Path(folder) / f"{at}{each.name}") for each in (pair.target, pair.head)))
            for at, pair in enumerate(pairs[0])
        ]


def resident() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(llm) -> dict[str, int]:
    """What must not grow, once there is no work."""
    rest(llm)
    gc.collect()
    llm.scheduler.check_integrity()
    return {
        "bytes of tensors": sum(each.nbytes for each in gc.get_objects() if type(each) is torch.Tensor),
        "pages": llm.scheduler.rows.kv_cache.num_available,
        "adapters on the host": len(llm.engine.adapters.held),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "folders of tensors": len(list(Path(tempfile.gettempdir()).glob("treetop-weights-*"))),
    }


def given(what, target, head):
    """What `update_weights` is given in a turn."""
    if what == "tensors":
        return tensors_of(target), tensors_of(head)
    return {"model": (target, None), "draft": (None, head), "again": (None, None)}.get(what, (target, head))


class Served:
    """An engine whose weights are replaced. in_force: which target and head. want: tokens by target and adapter."""

    def __init__(self, own, shared, lora, options):
        self.own, self.shared, self.in_force, self.want = own, shared, [0, 0], {}
        self.prompts = own[0].prompts([9, 5])
        self.params = [greedy(24, whole=True), sampled(3, 24, whole=True)]
        for at, pair in enumerate(own):
            alone = build(Pair(pair.target, None), None, lora_modules={"a": str(lora)})
            self.want |= {(at, name): self.tokens(alone, name) for name in (None, "a")}
            alone.close()
        assert len({str(each) for each in self.want.values()}) == len(self.want)
        self.llm = build(own[0], SHAPE, **options)

    def tokens(self, llm, name):
        return tokens(llm.generate(self.prompts, self.params, lora=name))

    def turn(self, what, how, name) -> set:
        """Replace weights beneath two requests of an adapter, or of none. Returns how these ended."""
        llm, before = self.llm, self.want[self.in_force[0], name]
        stream = llm.stream(self.prompts, self.params, lora=name)
        begun = next_and_hold(llm, stream, 3)
        changed = {"model": (1, 0), "draft": (0, 1), "again": (0, 0)}.get(what, (1, 1))
        self.in_force = [each ^ change for each, change in zip(self.in_force, changed, strict=True)]
        source = self.shared if what == "shared memory" else self.own
        target, head = source[self.in_force[0]].target, source[self.in_force[1]].head
        llm.update_weights(*given(what, target, head), in_flight=how)
        outputs = {delta.index: delta.output for delta in (begun, *stream) if delta.output is not None}
        for at, output in outputs.items():
            assert output.finish_reason in ({"abort", "length"} if how == "abort" else {"length"})
            if how != "retract":
                assert output.token_ids == before[at][: len(output.token_ids)]
        assert self.tokens(llm, name) == self.want[self.in_force[0], name]
        return {outputs[at].finish_reason for at in range(len(self.prompts))}


@pytest.mark.parametrize("times", [2 * len(TURNS), pytest.param(34 * len(TURNS), marks=pytest.mark.slow)])
def test_memory_is_flat_and_answers_are_a_fresh_engines(pairs, shared, times, tmp_path, monkeypatch, capsys):
    """Target, head, both; from folders, tensors, shared memory; what runs meanwhile ends, goes on or is waited for;
    with an adapter that comes and goes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (own, lora), options = pairs, {"enable_lora": True, "enable_draft_lora": True, "page_size": 4}
    served, noted, sizes, ended = Served(own, shared, lora, options), [], [], {how: set() for how in IN_FLIGHT}
    llm = served.llm
    for turn in range(times):
        what, how = TURNS[turn % len(TURNS)], IN_FLIGHT[(turn // len(TURNS) + turn) % len(IN_FLIGHT)]
        if what == "draft":
            llm.load_lora("a", lora)
        ended[how] |= served.turn(what, how, "a" if what in {"draft", "both", "tensors"} else None)
        if what == "tensors":
            llm.unload_lora("a")
        if what == TURNS[-1]:
            noted.append(held(llm))
            sizes.append(resident())
    first, last = noted[0], noted[-1]
    assert served.in_force == [0, 0]
    assert last["pages"] == first["pages"]
    assert all(last[name] <= first[name] for name in first), (first, last)  # other tests' may end meanwhile
    assert "abort" in ended["abort"]
    if times > 100:
        with capsys.disabled():
            print(f"\n{times} updates: {last}; resident MiB {[size >> 20 for size in sizes[::3]]}")
        later = sizes[len(sizes) // 2 :]
        assert max(later) - later[0] < 16 << 20, "a copy of the models each time would be more"
    fresh = build(own[0], SHAPE, **options)
    for each in (llm, fresh):
        each.load_lora("a", lora)
    for name in (None, "a"):
        found = [each.generate(served.prompts, served.params, lora=name) for each in (llm, fresh)]
        assert (tokens(found[0]), accept_lens(found[0])) == (tokens(found[1]), accept_lens(found[1]))
    assert llm.generate(served.prompts, served.params)[0].metrics.weight_version == times
