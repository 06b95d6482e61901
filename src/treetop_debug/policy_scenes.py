"""Scenes of faults of what decides which trees are verified, on the CPU.

They need more than one engine, or rounds whose shapes change. Random pairs of a few thousand weights are enough. Each
is given a folder and a check level, -1 where nobody is to look; it says what happened, and raises what a guard says.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file, save_file
from torch import Tensor

from treetop.debug.oracle import DensePair
from treetop.debug.two_group import write_two_group_pair
from treetop.doctor.conformance import RandomShapes, follow
from treetop.llm import LLM
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.costs import HeadAcceptance
from treetop.types.errors import CheckError
from treetop.types.layout import SpecShape
from treetop.types.sampling import SamplingParams
from treetop_debug.patching import Patch, instead, replaced

_TREE: dict[str, Any] = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 9,
}
_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "page_size": 4,
    "context_length": 96,
    "max_running_requests": 4,
    "disable_radix_cache": True,
    **_TREE,
}
_AUTO: dict[str, Any] = {"speculative_policy": "auto", "speculative_max_deferred": 4}
_LEARN: dict[str, Any] = {"speculative_calibration": "learn"}
_PROMPTS = [[(7 * i + 13 * j) % 96 for j in range(5 + 4 * i)] for i in range(4)]
_TEXTS = ["def area(radius):\n", "import os\nimport ", "class Queue:\n", "for name in sorted(", "    return self."]
_PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
_COMING = [[(5 * i + 11 * j) % 96 for j in range(length)] for i, length in enumerate((5, 9, 6, 13, 50, 40, 45))]
_PACES = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (44, 40, 6, 8, 3, 4, 3)]
_USELESS = HeadAcceptance((0.02,), 0.02)
Pair = tuple[Path, Path]


def _llm(pair: Pair, level: int, **options: Any) -> LLM:
    return LLM(str(pair[0]), str(pair[1]), **{**_OPTIONS, "check_level": max(level, 0), **options})


def rounds_of_random_shapes(folder: Path, level: int) -> str:
    """Rounds of random shapes beside the dense oracle."""
    pair = write_two_group_pair(folder, window=10_000)
    llm = _llm(pair, level, dtype="float64", speculative_calibration="off", **_AUTO)
    llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes)
    failure = follow(llm, DensePair(*pair), _PROMPTS[:2], [_PARAMS] * 2)[2]
    return f"not what the head drafts: {failure[:80]}" if failure else ""


def captured_rounds_of_random_shapes(folder: Path, level: int) -> str:
    """Captured rounds of random shapes, two of which differ in k alone, beside the dense oracle, which is a guard too.
    Requests that wait enter rows of those that end; where nobody is to look nothing looks at sizes of buffers.
    """
    pair = write_two_group_pair(folder, window=10_000)
    unlooked = (instead("treetop.engine.buffers:part_of", _sliced),) if level < 0 else ()
    shapes = {**_AUTO, "speculative_shapes": "3,1,4 3,2,4 2,3,9", "chunked_prefill_size": 8}
    try:
        with replaced(unlooked), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some operations of PyTorch warn of what others raise
            llm = _llm(pair, level, dtype="float64", graphs="sim", speculative_calibration="off", **shapes)
            llm.scheduler.policy = RandomShapes(llm.engine.layout.shapes)
            failure = follow(llm, DensePair(*pair), _COMING, _PACES)[2]
    except (RuntimeError, IndexError) as error:
        return f"the engine stops: {type(error).__name__}: {str(error)[:60]}"
    if failure and level >= 0:
        raise CheckError(f"oracle: {failure}")
    return f"not what the oracle gives: {failure[:80]}" if failure else ""


def _sliced(buffer: Tensor, *need: int) -> Tensor:
    return buffer[tuple(slice(each) for each in need)]


def two_models_costs(folder: Path, level: int) -> str:
    """An engine of small trees, then one of another model's, each with a first start on this machine."""
    shapes: dict[str, Any] = {"speculative_shapes": "1,1,2", "max_running_requests": 1, **_AUTO}
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        tables = []
        for seed in (0, 1):
            llm = _llm(write_two_group_pair(folder / str(seed), seed=seed), level, **shapes)
            tables.append(llm.engine.costs)
            llm.close()
    same = tables[0] == tables[1]
    return "a model's rounds are believed to cost what another's took" if same else ""


def two_cards_costs(folder: Path, level: int) -> str:
    """An engine, then the same on another machine, which finds the cache of the first."""
    shapes: dict[str, Any] = {"speculative_shapes": "1,1,2", "max_running_requests": 1, **_AUTO}
    pair, tables = write_two_group_pair(folder / "pair"), []
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        for card in ("one", "another"):
            with patch.object(os, "uname", lambda card=card: SimpleNamespace(nodename=card)):
                llm = _llm(pair, level, **shapes)
            tables.append(llm.engine.costs)
            llm.close()
    return "rounds of a card are believed to cost what another's took" if tables[0] == tables[1] else ""


def two_pairs_heads(folder: Path, level: int) -> str:
    """A pair that has learned that nothing holds, then another pair, with none that has learned before it."""
    options: dict[str, Any] = {"speculative_shapes": "1,1,2", "max_running_requests": 1, **_AUTO}
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        for seed in (0, 1):
            llm = _llm(write_two_group_pair(folder / str(seed), seed=seed), level, **options)
            chances = llm.engine.experience.head.acceptance
            llm.engine.experience.head.keep(_USELESS)
            llm.close()
    return f"a new head begins with chances {chances.best}" if chances == _USELESS else ""


def two_heads_calibrations(folder: Path, level: int) -> str:
    """Two heads of one target, whose calibrations are kept; without the check of a file where nobody is to look."""
    pair, inv_temps = write_two_group_pair(folder), []
    other = pair[0], folder / "other-head"
    shutil.copytree(pair[1], other[1])
    file = other[1] / "model.safetensors"
    save_file({name: each + (name == "norm.weight") for name, each in load_file(file).items()}, file)
    unlooked = (Patch("treetop.engine.startup.kept_calibration:_tables", _believed),) if level < 0 else ()
    with replaced(unlooked):
        for each in (pair, other):
            llm = _llm(each, level, speculative_calibration_dir=str(folder / "kept"), **_LEARN)
            calibration, kept = llm.engine.runner.state.calibration, llm.engine._kept
            inv_temps.append(calibration.inv_temp.tolist())
            llm.generate(_PROMPTS, _PARAMS)
            assert kept is not None
            kept.write(calibration)
            llm.close()
    same = inv_temps[0] == inv_temps[1]
    return "" if same else f"a new head begins with temperatures {[round(1 / each, 2) for each in inv_temps[1][0]]}"


def _believed(real: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    return lambda path, pair, found: real(path, found["pair"], found)


def one_rounds_lesson(folder: Path, level: int) -> str:
    """What one round of the embedded pair teaches, beside what the target chose in it."""
    options = {**_OPTIONS, "max_running_requests": len(_TEXTS), "check_level": max(level, 0), **_LEARN}
    llm, found = LLM(BUILTIN_MODEL, BUILTIN_DRAFT, **options), list[list[int]]()
    shape = llm.config.shape
    llm.engine.observer = lambda plan, tree, accepted: found.append(_hits(llm, shape, accepted.choice))
    llm.generate(_TEXTS, SamplingParams(max_tokens=2, ignore_eos=True))
    (hits,) = found
    learned = [round(each) for each in llm.engine.runner.state.calibration.chosen[0, 0].tolist()]
    llm.engine.observer = None
    return f"the roots' proposals were chosen {learned} times instead of {hits}" if learned != hits else ""


def _hits(llm: LLM, shape: SpecShape, choice: Tensor) -> list[int]:
    """How often each proposal of the roots is the target's choice there."""
    rows, runner = choice.shape[0], llm.engine.runner
    tokens = runner.buffers.growth_of(rows, shape).tokens[:, : shape.topk]
    live = runner.buffers.rows[:rows] != runner.layout.dummy_row
    return [int(each) for each in ((tokens == choice[:, :1]) & live[:, None]).sum(dim=0)]
