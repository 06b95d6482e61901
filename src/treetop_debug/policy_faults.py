"""Faults of what decides which trees are verified, put back by name. They change trees and costs, and no token."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.deferred import DeferredPairs, ExtendPairs
from treetop.kernels.tree.grow import TreeBuilder
from treetop.kernels.tree.learn import Observed
from treetop.types.tree import Accepted
from treetop_debug import policy_scenes
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch, instead, kernel_twin


def _of_the_target_alone(pair: str) -> str:
    return f"{pair.partition('-')[0]}.json"


def _of_the_machine_alone(_: str) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "treetop" / "round-costs" / "machine.json"


def _head_of_the_machine(_: str) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "treetop" / "acceptance" / "machine.json"


def _choices_of_the_next_row(real: Callable[..., None]) -> Callable[..., None]:
    """A row's proposals beside what the target chose in another's tree, where nearly all are rejected."""

    def _add_up(calibration: Calibration, growth: TreeBuilder, accepted: Accepted, observed: Observed) -> None:
        real(calibration, growth, replace(accepted, choice=accepted.choice.roll(-1, 0)), observed)

    return _add_up


def _skips_the_newest(real: Callable[..., Any]) -> Callable[..., Any]:
    """The last token that a row has deferred is left out, and the others stand one place too far."""

    def deferred_pairs(pairs: DeferredPairs, rows: Tensor, committed: Tensor) -> tuple[ExtendPairs, Tensor]:
        found, count = real(pairs, rows, committed)
        positions = torch.where(found.positions > 0, found.positions + 1, 0)
        return replace(found, first=found.first + 1, positions=positions), (count - 1).clamp(min=0)

    return deferred_pairs


POLICY_FAULTS = by_name(
    Fault(
        "deferred-token-skipped",
        "the pass that catches up leaves out the newest token that a row has deferred",
        (Patch("treetop.engine.rounds:deferred_pairs", _skips_the_newest),),
        "visibility",
        None,
        scene=policy_scenes.rounds_of_random_shapes,
    ),
    Fault(
        "costs-of-another-model",
        "what rounds cost is kept by machine, so another model's engine begins with it",
        (instead("treetop.engine.startup.round_costs:cost_file", _of_the_machine_alone),),
        "round costs: those at hand are of another engine",
        1,
        scene=policy_scenes.two_models_costs,
    ),
    Fault(
        "calibration-of-another-pair",
        "what is learned is kept by target, so another draft head begins with it",
        (instead("treetop.engine.startup.kept_calibration:file_name", _of_the_target_alone),),
        "was learned of the pair",
        0,
        scene=policy_scenes.two_heads_calibrations,
    ),
    Fault(
        "head-of-another-pair",
        "what a head accepts is kept by machine, so another pair's engine begins with it",
        (instead("treetop.engine.startup.kept_head:head_file", _head_of_the_machine),),
        "acceptance in",
        1,
        scene=policy_scenes.two_pairs_heads,
    ),
    Fault(
        "calibration-of-another-row",
        "a row learns from the target's choices in the tree of the next row, of nodes that it rejects",
        (
            Patch("treetop.kernels.tree.learn:_add_up", _choices_of_the_next_row),
            kernel_twin(
                "treetop.kernels.tree.learn:_add_up_kernel",
                ("choice + item * choice_row", "choice + (item + 1) % tl.num_programs(0) * choice_row"),
            ),
        ),
        "calibration: what rows of a tree",
        1,
        scene=policy_scenes.one_rounds_lesson,
    ),
)
