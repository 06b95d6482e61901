"""What a `config.json` says of the rotation of heads, in the spellings of `transformers` 5 and of earlier ones."""

import math
from pathlib import Path

from treetop.checkpoints.config_fields import Config, flag, real, size, table
from treetop.kernels.rope import DynamicNTK, LinearScaling, Llama3, Proportional, RopeSpec, Yarn
from treetop.types.errors import CheckpointError, shown


def rope_spec(
    config: Config,
    head_dim: int,
    where: Path,
    *,
    layer_type: str | None = None,
    rotary_factor: float | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """RoPE of both spellings: transformers 5 writes `rope_parameters`, earlier ones `rope_scaling` + `rope_theta`.

    layer_type: whose part of `rope_parameters` counts, where layers differ. rotary_factor: the family's default share
    of a head that has RoPE; None where all of it has. interleaved: see `RopeSpec`.
    """
    rope = _rope_table(config, layer_type, where)
    longrope = {"long_factor", "short_factor"} if rope.get("rope_type", rope.get("type")) == "longrope" else set()
    for key in sorted(set(rope) - set(_ROPE_KEYS.split()) - longrope):  # longrope is refused by its type
        raise CheckpointError(f"{where}: {key} of the rotary embedding is not supported")
    theta = real(rope, "rope_theta", where, real(config, "rope_theta", where, 10000.0))
    if rotary_factor is None:
        share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
        if share != 1:
            raise CheckpointError(f"{where}: partial_rotary_factor {shown(share)} is not supported with this model")
        return RopeSpec(head_dim, theta, _rope_scaling(config, rope, head_dim, theta, where), None, interleaved)
    of_config = real(config, "partial_rotary_factor", where, rotary_factor)
    share = real(rope, "partial_rotary_factor", where, of_config)
    rotary_size = int(head_dim * share)
    if rotary_size < 2 or rotary_size % 2 != 0:
        raise CheckpointError(
            f"{where}: partial_rotary_factor {share} must turn an even number of {head_dim} dimensions,"
            f" not {rotary_size}"
        )
    return RopeSpec(head_dim, theta, _rope_scaling(config, rope, rotary_size, theta, where), rotary_size, interleaved)


_ROPE_KEYS = (
    "rope_theta rope_type type partial_rotary_factor factor low_freq_factor high_freq_factor truncate beta_fast"
    " beta_slow attention_factor mscale mscale_all_dim original_max_position_embeddings finetuned"
    " mrope_section mrope_interleaved"
)
"""What may stand in a table of RoPE. `finetuned` says nothing of the arithmetic, and m-rope nothing of that of text,
whose tokens have the same position in time, height and width (Qwen2-VL, arXiv:2409.12191, section 2.1)."""


def _rope_table(config: Config, layer_type: str | None, where: Path) -> Config:
    """The one table that counts, of either spelling."""
    new, old = table(config, "rope_parameters", where), table(config, "rope_scaling", where)
    nested = {key: value for key, value in new.items() if isinstance(value, dict)}
    if nested:
        if len(nested) < len(new):
            raise CheckpointError(f"{where}: rope_parameters has parts for types of layers and keys beside them")
        if layer_type not in nested:
            raise CheckpointError(
                f"{where}: rope_parameters has parts for {shown(', '.join(nested))}, but"
                f" {'none for ' + layer_type if layer_type else 'all layers of this model rotate alike'}"
            )
        new = nested[layer_type]
    if new and old and new != old:
        raise CheckpointError(f"{where}: rope_parameters and rope_scaling differ; remove one of them")
    return new or old


def _rope_scaling(
    config: Config, rope: Config, rotary_size: int, theta: float, where: Path
) -> LinearScaling | Llama3 | Yarn | DynamicNTK | Proportional | None:
    """turned: dimensions of a head that turn. Raises CheckpointError for a kind that is not supported."""
    kind, positions = rope.get("rope_type", rope.get("type", "default")), max_positions(config, where)
    key = "original_max_position_embeddings"
    original = size(config if config.get(key) is not None else rope, key, where, default=positions)
    if kind in ("default", "mrope"):
        return None
    if kind == "linear":
        return LinearScaling(real(rope, "factor", where))
    if kind == "llama3":
        low, high = real(rope, "low_freq_factor", where), real(rope, "high_freq_factor", where)
        if low > high:
            raise CheckpointError(f"{where}: high_freq_factor {high} must be no less than low_freq_factor {low}")
        return Llama3(real(rope, "factor", where), low, high, original)
    if kind == "dynamic" and rotary_size > 2:
        return DynamicNTK(real(rope, "factor", where), positions)
    if kind == "proportional":
        return Proportional(real(rope, "factor", where, 1.0))
    if kind == "yarn" and theta > 1:
        return _yarn(rope, real(rope, "factor", where, positions / original), original, where)
    raise CheckpointError(
        f"{where}: rope_type {shown(kind)} is not supported, only default, linear, llama3, yarn (rope_theta above 1)"
        " and dynamic (more than 2 dimensions with RoPE)"
    )


def _yarn(rope: Config, factor: float, original: int, where: Path) -> Yarn:
    """The attention factor is what the table says, or follows from the factor and, if both are there, its mscales."""
    fast, slow = real(rope, "beta_fast", where, 32.0), real(rope, "beta_slow", where, 1.0)
    if fast < slow:
        raise CheckpointError(f"{where}: beta_fast {fast} must be no less than beta_slow {slow}")

    def grown(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    scales = real(rope, "mscale", where, 0.0), real(rope, "mscale_all_dim", where, 0.0)
    attention = grown(scales[0]) / grown(scales[1]) if all(scales) else grown(1.0)
    truncate = rope.get("truncate") is None or flag(rope, "truncate", where)
    return Yarn(factor, original, fast, slow, truncate, real(rope, "attention_factor", where, attention))


def max_positions(config: Config, where: Path) -> int:
    return size(config, "max_position_embeddings", where, default=2048)


def reach(rope: RopeSpec) -> int:
    """Positions that a scaled rotation was made for, where a config says less; 0 where it does not say."""
    scaling = rope.scaling
    if isinstance(scaling, Yarn):
        return int(scaling.factor * scaling.original_max_position)
    return int(scaling.factor * scaling.max_position) if isinstance(scaling, DynamicNTK) else 0
