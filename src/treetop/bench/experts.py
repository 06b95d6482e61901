"""How many experts the tokens of a round choose: what of a model's weights a round has to read."""

import torch
from torch import Tensor

from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import RoundKey, run_phases
from treetop.kernels.moe.routes import RoutedTokens, Routes
from treetop.models.experts import ExpertMLP


@torch.inference_mode()
def distinct_experts(runner: ModelRunner, key: RoundKey, max_kv_len: int) -> list[int] | None:
    """Experts that somebody chose in each layer, in one round that runs eagerly; None for a dense model.

    No request may be alive. Counted in the last forward of a layer, which is the target's.
    """
    layers = [each for each in runner.target.products if isinstance(each, ExpertMLP)]
    if not layers:
        return None
    seen: dict[int, Tensor] = {}

    def recording(index: int, layer: ExpertMLP) -> None:
        route = layer.route

        def recorded(x: Tensor, tokens: RoutedTokens) -> Routes:
            routes = route(x, tokens)
            seen[index] = routes.expert
            return routes

        vars(layer)["route"] = recorded

    try:
        for index, layer in enumerate(layers):
            recording(index, layer)
        run_phases(runner, key, max_kv_len)
    finally:
        for layer in layers:
            vars(layer).pop("route", None)
    return [len(expert[expert >= 0].unique()) for _, expert in sorted(seen.items())]
