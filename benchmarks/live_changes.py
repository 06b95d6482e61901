"""Other weights, sleep and wake of an engine whose streams go on: seconds, and how long the streams stood still.

    python benchmarks/live_changes.py                       Llama-3.1-8B's shape and its head, by CUDA IPC, and sleep
    python benchmarks/live_changes.py --parts update --profile

A trainer's process on the same card has random tensors of target and head and hands them over twice: the head with the
target, in one update. `pause_s` is the longest gap of a stream less the median one; `over_copy` the seconds over those
of a copy on the device of as many bytes. Where the streams stand still is said by `--profile`: the functions that took
the engine's thread longest. `--way tensors`, for a machine without a GPU, has them in this process. One JSON object a
line.
"""

import cProfile
import gc
import pstats
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from frame import add_model, copy_bytes_per_s, end_with, machine_of, parser_of, preset, say
from torch import Tensor

from treetop import LLM, SamplingParams

_TRAINER = """
import sys, torch
from treetop.core.wire import encode
from treetop.weight_transfer import ipc_tensors
kinds = [
    {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in torch.load(file).items()}
    for file in sys.argv[1:]
]
for line in sys.stdin:
    for tensors in kinds:
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
        if "t2d" in tensors:  # tokens of the draft are the first
            tensors["t2d"][: len(tensors["d2t"])] = True
    torch.cuda.synchronize()
    for tensors in kinds:
        print(encode(ipc_tensors(tensors)).hex(), flush=True)
"""
_LINES = 25
"""Of a profile."""
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
_OF_VOCABULARIES = {"d2t": torch.int64, "t2d": torch.bool}
"""What a head has of two vocabularies."""


def shapes_of(llm: LLM) -> list[Shapes]:
    """Names, shapes and dtypes of the tensors of the target's folder, and of the head's."""
    engine = llm.engine
    assert engine.draft is not None
    return [
        {
            source.name: (source.shape, _OF_VOCABULARIES.get(source.name, engine.dtype))
            for param in spec.params
            for source in param.sources
        }
        for spec in (engine.target, engine.draft)
    ]


def random_tensors(shapes: Shapes, llm: LLM) -> dict[str, Tensor]:
    made = {}
    for name, (shape, dtype) in shapes.items():
        made[name] = torch.zeros(shape, dtype=dtype, device=llm.engine.runner.buffers.rows.device)
        if dtype.is_floating_point:
            made[name].normal_(std=0.02)
    if "t2d" in made:
        made["t2d"][: len(made["d2t"])] = True
    return made


@contextmanager
def trainer(shapes: list[Shapes]) -> Iterator[Callable[[], list[Any]]]:
    """What gives handles of other tensors of these shapes each time that it is called."""
    import msgspec  # noqa: PLC0415

    from treetop.types.changes import SentTensors  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.pt" for i in range(len(shapes))]
        for file, each in zip(files, shapes, strict=True):
            torch.save(each, file)
        command = [sys.executable, "-c", _TRAINER, *map(str, files)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def handed() -> list[Any]:
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                lines = [process.stdout.readline().strip() for _ in shapes]  # type: ignore[union-attr]
                return [msgspec.msgpack.decode(bytes.fromhex(line), type=SentTensors) for line in lines]

            try:
                yield handed
            finally:
                process.kill()


class Gaps:
    """Times of a stream's events, and the longest gap between two of them since it was last asked."""

    def __init__(self, llm: LLM, rows: int, tokens: int) -> None:
        self._llm, self._rows, self._tokens, self._ends = llm, rows, tokens, threading.Event()
        self._at: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Gaps":
        self._thread.start()
        while len(self._at) < 30:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        prompts = [[*range(100 + i, 140 + i)] for i in range(self._rows)]
        params = SamplingParams(max_tokens=self._tokens, ignore_eos=True)
        while not self._ends.is_set():
            for _ in self._llm.stream(prompts, params):
                self._at.append(time.perf_counter())
                if self._ends.is_set():
                    break

    def between(self, begun: float, ended: float) -> tuple[float, float]:
        """The longest gap that touches this time, and the median of those before, seconds."""
        while self._at[-1] < ended + 0.2 and self._thread.is_alive():
            time.sleep(0.01)
        at = [*self._at]
        pairs = [*pairwise(at)]
        rounds = [b - a for a, b in pairs if b < begun and b - a > 5e-4]  # rows of one round come together
        return max(b - a for a, b in pairs if b > begun and a < ended), statistics.median(rounds)


def profiled(llm: LLM) -> cProfile.Profile:
    """What the engine's thread does while it prepares changes and puts them in force."""
    profile, engine = cProfile.Profile(), llm.engine
    prepare = engine.prepare

    @wraps(prepare)
    def watched(change: Any) -> Any:
        commit = profile.runcall(prepare, change)
        return lambda: profile.runcall(commit)

    engine.prepare = watched  # type: ignore[method-assign]
    return profile


def updates(llm: LLM, args: Any, copy: float | None) -> None:
    """Say what each of two updates took."""
    shapes = shapes_of(llm)
    every = [sized for each in shapes for sized in each.values()]
    nbytes = sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in every)
    profile = profiled(llm) if args.profile else None

    def all_of(handed: Callable[[], list[Any]]) -> None:
        for turn in range(args.turns):
            target, head = handed()
            with Gaps(llm, args.rows, args.tokens) as gaps:
                begun = time.perf_counter()
                llm.update_weights(target, head, in_flight="retract")
                ended = time.perf_counter()
                longest, median = gaps.between(begun, ended)
            seconds, pause = ended - begun, longest - median
            line = {"part": "update", "turn": turn, "gb": round(nbytes / 1e9, 2), "seconds": round(seconds, 3)}
            line |= {"longest_gap_s": round(longest, 3), "median_gap_s": round(median, 4), "pause_s": round(pause, 3)}
            if copy is not None:
                line |= {"copy_s": round(2 * nbytes / copy, 4), "over_copy": round(seconds * copy / 2 / nbytes, 2)}
            say(line)

    if args.way == "ipc":
        with trainer(shapes) as handed:
            all_of(handed)
    else:
        all_of(lambda: [random_tensors(each, llm) for each in shapes])
    if profile is not None:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(_LINES)
        pstats.Stats(profile, stream=sys.stdout).sort_stats("cumtime").print_stats(_LINES)


def sleeps(llm: LLM, args: Any) -> None:
    """Say what falling asleep and waking take, and what is given back."""
    on_gpu = torch.cuda.is_available()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    want = llm.generate([[5] * 40], params)[0].token_ids
    for turn in range(args.turns):
        before, begun = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
        llm.sleep()
        asleep, left = time.perf_counter(), torch.cuda.memory_allocated() if on_gpu else 0
        llm.wake_up()
        awake = time.perf_counter()
        line = {"part": "sleep", "turn": turn, "sleep_s": round(asleep - begun, 3), "wake_s": round(awake - asleep, 3)}
        same = llm.generate([[5] * 40], params)[0].token_ids == want
        say({**line, "given_back_gib": round((before - left) / 2**30, 2), "same_tokens": same})


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--parts", nargs="+", choices=("update", "sleep"), default=["update", "sleep"])
    parser.add_argument("--way", choices=("ipc", "tensors"), default="ipc")
    parser.add_argument("--rows", type=int, default=8, help="streams")
    parser.add_argument("--tokens", type=int, default=2000, help="of a stream; then it begins again")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shape", default="5,4,16")
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--profile", action="store_true", help="what the engine's thread did")
    args = parser.parse_args(arguments)
    model, draft = (args.model, args.draft) if args.model else preset(args.preset)
    steps, topk, nodes = map(int, args.shape.split(","))
    copy = copy_bytes_per_s() if torch.cuda.is_available() else None
    gc.collect()
    if copy is not None:
        torch.cuda.empty_cache()
    say(machine_of(copy))
    begun = time.perf_counter()
    llm = LLM(
        model, draft, load_format="auto" if args.model else "dummy", max_running_requests=args.rows,
        context_length=args.context_length, max_total_tokens=args.rows * args.context_length,
        speculative_policy="fixed", speculative_num_steps=steps, speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )  # fmt: skip
    say({"up": model, "start_s": round(time.perf_counter() - begun, 1)})
    if "sleep" in args.parts:  # before tensors that no folder has
        sleeps(llm, args)
    if "update" in args.parts:
        updates(llm, args, copy)
    llm.close()
    return 0


if __name__ == "__main__":
    end_with(main)
