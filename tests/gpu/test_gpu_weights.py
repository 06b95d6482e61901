"""Weights of a running engine on NVIDIA GPUs: in the place of the old ones, by CUDA IPC, by an NCCL broadcast.

`python -m pytest tests/gpu/test_gpu_weights.py -s` says the seconds of an 8B shape.
"""

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from support.addresses import addresses
from support.engines import build, greedy, tokens
from support.quantized import fp8_blocks, quantized
from support.tiny_models import Pair, save_random_head, save_random_llama
from treetop import LLM, SamplingParams
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.engine.memory import gib
from treetop.types.changes import SentTensors
from treetop.weight_transfer import group_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PRESETS = Path(__file__).parents[2] / "benchmarks" / "presets"
_PEER = """
import sys, pickle, torch
from safetensors.torch import load_file
from treetop.weight_transfer import broadcast_tensors, ipc_tensors, trainer_group
from treetop.core.wire import encode
way, device, *files = sys.argv[1:]
torch.cuda.set_device(int(device))
if way.isdigit():
    group = trainer_group("127.0.0.1", int(way), 2, "g", "nccl")
for file in files:
    input()
    if file.endswith(".safetensors"):
        tensors = {name: each.cuda() for name, each in load_file(file).items()}
    else:
        shapes = torch.load(file)
        tensors = {n: torch.empty(s, dtype=torch.bfloat16, device="cuda").normal_(std=0.02) for n, s in shapes.items()}
    torch.cuda.synchronize()
    if way.isdigit():
        print("ready", flush=True)
        input()
        broadcast_tensors(group, tensors.items())
        torch.cuda.synchronize()
    else:
        print(encode(ipc_tensors(tensors)).hex(), flush=True)
input()
"""


class Peer:
    """A trainer's process on one card."""

    def __init__(self, way, device, files):
        command = [sys.executable, "-c", _PEER, str(way), str(device), *map(str, files)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        with self.process:  # its pipes, too
            pass

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def said(self):
        self.go()
        return self.process.stdout.readline().strip()

    def handed(self):
        import msgspec

        return msgspec.msgpack.decode(bytes.fromhex(self.said()), type=SentTensors)


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def pairs(request, tmp_path):
    """Before and after."""
    made = []
    for name, seed in (("old", 8), ("new", 9)):
        target = save_random_llama(tmp_path / name, seed=seed, vocab_size=12, intermediate_size=128)
        head = save_random_head(tmp_path / f"{name}-head", target, draft_vocab=11, seed=seed)
        if request.param:
            target, _ = quantized(target, tmp_path / f"{name}-fp8", fp8_blocks(32, 64))
        made.append(Pair(target, head))
    return made


OPTIONS = {"dtype": "bfloat16", "device": "cuda", "overlap": False, "max_total_tokens": 4096}


def answers(llm, pair):
    return tokens(llm.generate(pair.prompts([5, 41], seed=2), greedy(24)))


@pytest.mark.parametrize("room", [True, False])
def test_captured_rounds_read_new_weights_where_the_old_ones_were(pairs, monkeypatch, room):
    """Graphs are kept; where K/V had to make room they are captured anew. As often as one likes, memory is flat."""
    old, new = pairs
    fresh = build(new, (4, 3, 12), **OPTIONS)
    want = answers(fresh, new)
    fresh.close()
    del fresh
    gc.collect()
    llm = build(old, (4, 3, 12), **OPTIONS)
    first = answers(llm, old)
    monkeypatch.setattr(type(llm.engine), "lacks_room", lambda self, change: not room)
    held = []
    for _ in range(3):
        launcher = llm.engine.launcher
        llm.update_weights(new.target, new.head)
        assert isinstance(launcher, CudaGraphs)
        assert (llm.engine.launcher is launcher) is room
        assert answers(llm, new) == want
        llm.update_weights(old.target, old.head, in_flight="retract")
        assert answers(llm, old) == first
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] - held[-2] < 2**20
    llm.scheduler.check_integrity()
    llm.close()


@pytest.mark.parametrize("cards", [1, 2])
def test_weights_by_ipc_and_by_a_broadcast_are_a_folders(pairs, cards):
    """From a process on the same card by IPC, on another by both."""
    if torch.cuda.device_count() < cards:
        pytest.skip("needs two GPUs")
    old, new = pairs
    files = [*sorted(new.target.glob("*.safetensors")), *sorted(new.head.glob("*.safetensors"))]
    llm = build(old, (4, 3, 12), **OPTIONS)
    first = answers(llm, old)
    llm.update_weights(new.target, new.head)
    want = answers(llm, new)
    llm.update_weights(old.target, old.head)
    with Peer("ipc", cards - 1, files) as peer:
        llm.update_weights(peer.handed(), more=True)
        assert answers(llm, old) == first
        llm.update_weights(draft=peer.handed())
        assert answers(llm, new) == want
    if cards == 2:
        llm.update_weights(old.target, old.head)
        port = addresses(1)[0].rpartition(":")[2]
        with Peer(port, 1, files) as peer:
            llm.init_weights_update_group("127.0.0.1", int(port), 2, group_name="g")
            for kind, folder in (("model", new.target), ("draft", new.head)):
                assert peer.said() == "ready"
                peer.go()
                llm.update_weights(**{kind: _told(folder)}, more=kind == "model")
            assert answers(llm, new) == want
    llm.close()


def _told(folder):
    from safetensors.torch import load_file

    tensors = {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}

    class Group:
        name = "g"

    return group_tensors(Group, tensors.items())


def _shapes_of(llm, folder):
    """Names and shapes of a target's tensors, for a trainer that has others."""
    spec = llm.engine.target
    shapes = {source.name: source.shape for param in spec.params for source in param.sources}
    torch.save(shapes, folder / "shapes.pt")
    return folder / "shapes.pt", shapes


def test_an_8b_shape_is_updated_in_a_few_copies(tmp_path):
    """Seconds of an update by IPC on one card and by a broadcast from another, and how long a stream stood still."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 70 * 2**30:
        pytest.skip("needs 70 GiB of free GPU memory")
    model = str(PRESETS / "llama-3.1-8b")
    more = {"max_running_requests": 16, "context_length": 4096, "max_total_tokens": 4 * 4096}
    llm = LLM(model, None, load_format="dummy", dtype="bfloat16", **more)
    file, shapes = _shapes_of(llm, tmp_path)
    nbytes = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    prompts = [[*range(100 + i, 140 + i)] for i in range(4)]
    gaps = []

    def update(sent, what, begin=lambda: None):
        seconds, largest, pause = [], 0.0, threading.Event()

        def run():
            begin()
            started = time.perf_counter()
            llm.update_weights(sent, in_flight="retract")
            seconds.append(time.perf_counter() - started)
            pause.set()

        thread, last = threading.Thread(target=run), time.perf_counter()
        for count, _ in enumerate(llm.stream(prompts, SamplingParams(max_tokens=1500, ignore_eos=True))):
            now = time.perf_counter()
            largest, last = max(largest, now - last), now
            if count == 50:
                largest = 0.0
                thread.start()
            if pause.is_set() and count > 400:
                break
        thread.join()
        graphs = isinstance(llm.engine.launcher, CudaGraphs)
        print(f"\n{what}: {gib(nbytes)} in {seconds[0]:.3f} s, {nbytes / seconds[0] / 1e9:.0f} GB/s, longest gap of"
              f" a stream {largest:.3f} s, graphs {graphs}")  # fmt: skip
        gaps.append(largest)

    with Peer("ipc", 0, [file, file]) as peer:
        for _ in range(2):
            update(peer.handed(), "IPC, one card")
    if torch.cuda.device_count() > 1:
        port = addresses(1)[0].rpartition(":")[2]
        with Peer(port, 1, [file, file]) as peer:
            llm.init_weights_update_group("127.0.0.1", int(port), 2, group_name="g")
            sent = SentTensors((*shapes,), ("bfloat16",) * len(shapes), tuple(map(tuple, shapes.values())), "g")
            for _ in range(2):
                assert peer.said() == "ready"
                update(sent, "NCCL, two cards", peer.go)
    assert max(gaps) < 30
    llm.close()
