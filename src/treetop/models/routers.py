"""Routers of experts in groups, by the keys that DeepSeek gave them, and others after it."""

from dataclasses import replace
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, real, require_value, size
from treetop.kernels.moe.routes import RouterKind, RouterSpec
from treetop.models.config import num_experts_per_token
from treetop.types.errors import CheckpointError


def router_in_groups(config: Config, where: Path, kind: RouterKind) -> RouterSpec:
    """Experts of the best groups. Raises CheckpointError for groups that cannot be."""
    number = size(config, "n_routed_experts", where)
    groups, top = size(config, "n_group", where, default=1), size(config, "topk_group", where, default=1)
    if number % groups != 0 or top > groups:
        raise CheckpointError(
            f"{where}: n_group {groups} must divide n_routed_experts {number}, and topk_group {top} be no more"
        )
    chosen = num_experts_per_token(config, number // groups * top, where)
    scale = real(config, "routed_scaling_factor", where, 1.0)
    return RouterSpec(number, chosen, kind, scale=scale, groups=groups, top_groups=top)


def renormalised(router: RouterSpec, config: Config, where: Path) -> RouterSpec:
    """Weights add up to 1 unless the config says that they need not."""
    said = config.get("norm_topk_prob") is None or flag(config, "norm_topk_prob", where)
    return replace(router, renormalise=said)


def corrected_sigmoids(config: Config, where: Path) -> RouterSpec:
    """DeepSeek-V3's: sigmoids, whose choice has a correction. Source: arXiv:2412.19437, section 2.1.2."""
    require_value(config, "scoring_func", "sigmoid", where)
    require_value(config, "topk_method", "noaux_tc", where)
    router = router_in_groups(config, where, RouterKind.SIGMOID)
    return replace(renormalised(router, config, where), correction=True)
