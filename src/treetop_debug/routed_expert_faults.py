"""Faults of the experts that are told of tokens, by name (`tests/engine/test_routed_experts.py`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treetop.engine.model_runner import ModelRunner
from treetop.kernels.tree.commit import Paths
from treetop.types.ids import EXPERTS
from treetop.types.messages import PrefillPlan
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch


def _of_nodes_in_order(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What a round tells is of as many nodes of its trees as it accepts, whichever they are."""

    def experts_of_round(runner: ModelRunner, paths: Paths) -> Tensor:
        found = real(runner, paths)
        tail = runner.buffers.verify_tails[EXPERTS][0, : len(paths.rows), : paths.width].flatten(2).view(torch.int16)
        return found.copy_(tail[..., : found.shape[-1]])

    return experts_of_round


def _own_numbers(real: Callable[..., Any]) -> Callable[..., Any]:
    """A rank tells of its own experts, by the numbers that they have there."""

    def route(layer: Any, *call: Any) -> Any:
        routes = real(layer, *call)
        return replace(routes, chosen=None if routes.chosen is None else routes.expert.to(torch.int16))

    return route


def _of_its_own_tokens(real: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """A prefill tells of the tokens that it computes, and nothing of those that a prefix hit has spared it."""

    def experts_of_chunks(runner: ModelRunner, plan: PrefillPlan, rows: Tensor) -> Tensor | None:
        found, end = real(runner, plan, rows), 0
        for chunk in plan.chunks:
            if found is not None and chunk.experts_from is not None:
                begin, end = end, end + chunk.start + len(chunk.token_ids) - chunk.experts_from
                found[begin : begin + chunk.start - chunk.experts_from] = 0
        return found

    return experts_of_chunks


ROUTED_EXPERT_FAULTS = by_name(
    Fault(
        "experts-of-a-rejected-branch",
        "a round tells of nodes in their order in the tree, of which a rejected branch has some",
        (Patch("treetop.engine.engine:experts_of_round", _of_nodes_in_order),),
        "oracle",
        None,
    ),
    Fault(
        "experts-untold-behind-a-hit",
        "tokens whose K/V the prefix cache gave are told as if they had gone to the first expert",
        (Patch("treetop.engine.engine:experts_of_chunks", _of_its_own_tokens),),
        "oracle",
        None,
    ),
    Fault(
        "experts-as-a-rank-counts-them",
        "a rank tells the numbers that its own experts have there, and -1 of others",
        (Patch("treetop.models.experts:ExpertMLP.route", _own_numbers),),
        "experts of tokens: -1",
        1,
    ),
)
