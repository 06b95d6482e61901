"""What the sweeps of `treetop bench` measure, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treetop.bench.rounds import RoundGrid, warm_up
from treetop.checkpoints.loader import compute_device
from treetop.types.config import EngineConfig
from treetop.types.errors import InputError
from treetop.types.layout import PLAIN, SpecShape

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
TREES = ((3, 1, 4), (5, 1, 6), (5, 4, 8), (5, 4, 16), (6, 8, 16), (8, 8, 32), (8, 10, 60))
TABLE = ((3, 1, 4), (5, 1, 6), (5, 4, 16))
TABLE_BATCHES = (1, 8, 32)
INPUT = 1024


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """sweep: which defaults; None is a single point.
    shapes: "S,k,T" each. What is given replaces the sweep's own.
    """

    sweep: str | None
    shapes: Sequence[str] | None
    batches: Sequence[int] | None
    inputs: Sequence[int] | None
    rounds: int
    batch_size: int


def make_grid(model: str | None, engine_options: dict[str, Any], options: SweepOptions) -> RoundGrid:
    """The grid that the options mean. Raises UserError for numbers that no benchmark has."""
    for name in ("batches", "inputs"):
        bad = [value for value in getattr(options, name) or () if value < 1]
        if bad:
            raise InputError(f"--{name} must be at least 1, got {bad[0]}")
    if options.rounds < 1 or options.batch_size < 1:
        raise InputError(f"--rounds and --batch-size must be at least 1, got {options.rounds}, {options.batch_size}")
    own = EngineConfig.of(model, **{**engine_options, "simulate_accept_length": None, "simulate_acceptance": None})
    if options.shapes:
        shapes = tuple(SpecShape.parse(text, "--shapes") for text in options.shapes)
    elif own.draft is None:
        shapes = (PLAIN,)
    else:
        trees = {"tree": TREES, "table": TABLE}.get(options.sweep or "")
        chosen = tuple(SpecShape(k, s, t) for s, k, t in trees) if trees else (own.shape,)
        shapes = (PLAIN, *chosen)
    batches = {"batch": BATCHES, "table": TABLE_BATCHES}.get(options.sweep or "", (options.batch_size,))
    lengths = CONTEXTS if options.sweep == "context" else (INPUT,)
    return RoundGrid(
        shapes,
        tuple(options.batches or batches),
        tuple(options.inputs or lengths),
        options.rounds,
        warm_up(compute_device(own.device)),
        engine_options.get("chunked_prefill_size"),
    )
