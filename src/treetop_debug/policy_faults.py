"""Faults of what decides which trees are verified, and of rounds whose shapes change, put back by name."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.engine.graphs import GraphSim
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import RoundKey
from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.deferred import DeferredPairs, ExtendPairs
from treetop.kernels.tree.grow import TreeBuilder
from treetop.kernels.tree.learn import Observed
from treetop.types.layout import PLAIN, SpecShape
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

    def deferred_pairs(pairs: DeferredPairs, rows: Tensor, *others: Any) -> tuple[ExtendPairs, Tensor]:
        found, count = real(pairs, rows, *others)
        positions = torch.where(found.positions > 0, found.positions + 1, 0)
        return replace(found, first=found.first + 1, positions=positions), (count - 1).clamp(min=0)

    return deferred_pairs


def _of_chains(real: Callable[..., TreeBuilder]) -> Callable[..., TreeBuilder]:
    def make_growth(shape: SpecShape, *others: Any) -> TreeBuilder:
        return replace(real(SpecShape(1, shape.num_steps, shape.num_steps + 1), *others), shape=shape)

    return make_growth


def _of_one_row(real: Callable[..., TreeBuilder]) -> Callable[..., TreeBuilder]:
    return lambda shape, count, *others: real(shape, 1, *others)


def _kept_by(name: Callable[[RoundKey], RoundKey | tuple[RoundKey, int, int]]) -> Patch:
    """Of the rounds that have one name, that of most rows was captured first, and its graph serves them all."""

    def make(real: Callable[..., None]) -> Callable[..., None]:
        def launch(self: GraphSim, key: RoundKey, *others: Any) -> None:
            mine = name(replace(key, undrafted=False, deferred=0))
            alike = [kept for kept, _ in self._captured if name(kept) == mine]
            real(self, max(alike, key=lambda kept: kept.bucket) if key.bucket else key, *others)

        return launch

    return Patch("treetop.engine.graphs:GraphSim.launch", make)


def _as_many_as_branches() -> tuple[Patch, ...]:
    """A round keeps as many proposals as its own tree had branches."""
    branches = [1]

    def noting(real: Callable[..., None]) -> Callable[..., None]:
        def grow_trees(runner: ModelRunner, rows: Tensor, shape: SpecShape, *others: Any) -> None:
            branches[0] = shape.topk
            real(runner, rows, shape, *others)

        return grow_trees

    def cut(real: Callable[..., Any]) -> Callable[..., Any]:
        def extended(self: ModelRunner, *args: Any) -> Any:
            kept, k = real(self, *args), branches[0]
            return kept and replace(kept, tokens=kept.tokens[:, :k], logprob=kept.logprob[:, :k])

        return extended

    extend = Patch("treetop.engine.model_runner:ModelRunner.extended", cut)
    return Patch("treetop.engine.rounds:grow_trees", noting), extend


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
        "costs-of-another-card",
        "what rounds cost is kept by nothing of the card, so an engine on another one begins with it",
        (instead("treetop.engine.startup.round_costs:cost_file", _of_the_machine_alone),),
        "round costs: those at hand are of another engine",
        1,
        scene=policy_scenes.two_cards_costs,
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
    Fault(
        "shape-buffer-without-k",
        "candidates of each shape's trees are sized without the factor k (sgl-27338)",
        (Patch("treetop.engine.buffers:make_growth", _of_chains),),
        "round buffers: need",
        0,
        scene=policy_scenes.captured_rounds_of_random_shapes,
    ),
    Fault(
        "shape-buffer-without-rows",
        "candidates of each shape's trees are sized without the rows",
        (Patch("treetop.engine.buffers:make_growth", _of_one_row),),
        "round buffers: need",
        0,
        scene=policy_scenes.captured_rounds_of_random_shapes,
    ),
    Fault(
        "shape-graph-without-k",
        "captured rounds are kept without k, so a tree's round replays that of a chain with as many steps and nodes",
        (_kept_by(lambda key: (replace(key, shape=PLAIN), key.shape.num_steps, key.shape.num_draft_tokens)),),
        "oracle",
        None,
        scene=policy_scenes.captured_rounds_of_random_shapes,
    ),
    Fault(
        "shape-graph-without-rows",
        "captured rounds are kept without their rows, so a smaller batch replays a larger one's with rows of before",
        (_kept_by(lambda key: replace(key, bucket=min(key.bucket, 1))),),
        "oracle",
        None,
        scene=policy_scenes.captured_rounds_of_random_shapes,
    ),
    Fault(
        "shape-proposals-stale",
        "a round proposes as many tokens as its own tree had branches: the next shape's others are of a round before",
        _as_many_as_branches(),
        "oracle",
        None,
        scene=policy_scenes.captured_rounds_of_random_shapes,
    ),
)
