"""Launches of each kernel in a captured round, counted over the public interface: `python -m frozen.launches`.

Two calls differ in their number of rounds and in nothing else; what the longer one launches more, divided by the rounds
it has more, is a round. What only some steps launch, such as edits of the page table, is left out. Prints the counts as
JSON and writes `golden/launches.json`.
"""

import json
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from frozen import golden
from frozen.names import SHAPE
from treetop import LLM, SamplingParams

SHAPES: dict[str, tuple[int, int, int] | None] = {"plain": None, "5,4,16": (4, 5, 16)}
PROMPT = "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv[1:]:\n"
SHORT, LONG = 24, 72  # tokens


def machine() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def count_all() -> dict[str, dict[str, int]]:
    """Kernel name -> launches a round, for each shape, of one row of the embedded pair."""
    return {name: _count(shape) for name, shape in SHAPES.items()}


def _count(shape: tuple[int, int, int] | None) -> dict[str, int]:
    options: dict[str, Any] = {"device": "cuda", "graphs": "auto", "overlap": False, "max_running_requests": 1}
    options["speculative_policy"] = "fixed"
    tree = {"draft": None} if shape is None else dict(zip(SHAPE, shape, strict=True))
    llm = LLM(**tree, **options)
    _profiled(llm, LONG)  # whatever is compiled or captured late
    (first, few), (second, many) = _profiled(llm, SHORT), _profiled(llm, LONG)
    more = second - first
    assert more > 0, "the longer call has no more rounds"
    every_round = {name: (many[name] - few[name]) // more for name in sorted(many | few)}
    return {name: launches for name, launches in every_round.items() if launches > 0}


def _profiled(llm: LLM, tokens: int) -> tuple[int, Counter[str]]:
    """Rounds of a call, and what ran on the GPU meanwhile, by name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True))
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    return output.metrics.target_forwards, Counter({event.key: event.count for event in events})


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: launches are counted on a GPU")
    found = {**machine(), **count_all()}
    print(json.dumps(found, indent=1))
    golden.save("launches", found)


if __name__ == "__main__":
    main()
