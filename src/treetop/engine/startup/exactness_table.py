"""What `--exactness auto` stands for: a table of devices and kinds of models, and never a timing.

So starts, ranks, replicas and both sides of a hand-over come to the same, if they have the same device, model and
options; where they have not, they are refused by name. A row is `bits` where its cost was measured to be at most
`MOST_COST` times that of `ties`; what no row names is `ties`, and so are options whose price no row has. So is a CPU
that has a row and whose library's sums depend on the batch: sums of integers would serve there, at a price that no row
has, either. That and what a GPU fails is found by probes, once for a machine.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import LoadContext, compute_device, compute_dtype
from treetop.engine.startup.default_policy import with_policy
from treetop.engine.startup.exactness import unfit_options, why_not_by_libraries, why_not_by_probes, why_not_model
from treetop.engine.startup.weight_copies import packing, product_weights
from treetop.models.config import ModelConfig
from treetop.models.registry import TargetSpec, target_spec
from treetop.types.config import EngineConfig
from treetop.weights.plain import UNQUANTIZED

Kind = Literal["dense", "experts", "compressed", "sparse", "recurrent"]


MOST_COST = 1.08
"""Of a row that is `bits`."""


@dataclass(frozen=True, slots=True)
class ExactnessRow:
    """What `bits` costs somewhere.

    device: a CPU's maker as it names itself, or a GPU as the driver does.
    drafted: with a draft, whose trees hide a part of the cost. Where rounds may be plain for long both rows count.
    cost: time with `bits` over that with `ties`, of the dearest cell.
    measured: which cells, and at which commit; docs/exactness.md has the command.
    """

    device: str
    kind: Kind
    drafted: bool
    cost: float
    measured: str


TABLE = (
    ExactnessRow(
        "AuthenticAMD", "dense", True, 1.06, "0.946 to 0.989 of the speed at de67d28, before probes tried many rows"
    ),
    ExactnessRow(
        "GenuineIntel", "dense", True, 1.06, "0.945 to 1.035 of the speed at 79c780ed (once 0.88), in MKL's own mode"
    ),
    ExactnessRow("NVIDIA H200", "dense", True, 1.17, "0.98 to 1.17 of the time of 12 kinds of rounds at ee0099e"),
    ExactnessRow(
        "NVIDIA H200", "dense", False, 1.15, "0.99 to 1.15 of the time of plain rounds of 1 to 256 rows, after b715034"
    ),
)


@dataclass(frozen=True, slots=True)
class Settled:
    """config: with `bits` or `ties`. why: in words. by: short, "" where the option said so."""

    config: EngineConfig
    why: str
    by: str = ""


def is_named(config: EngineConfig) -> bool:
    """Whether the option says which, so that no table and no probe decides."""
    return config.exactness != "auto"


def settled(config: EngineConfig, probes: bool = True) -> Settled:
    """What a configuration's exactness is, or without probes would be if they passed. Raises as reading the model's
    config.json does.
    """
    if is_named(config):
        return Settled(config, "as asked")
    ties, device = replace(config, exactness="ties"), compute_device(config.device)
    place = LoadContext(compute_dtype(config.dtype, device), device, 1, shapes=config.shapes)
    target = target_spec(resolve_folder(config.model))
    maker, kind = device_name(device), kind_of(target.config)
    row = _row(maker, kind, config.speculates)
    drafted = _drafted(config.speculates)
    if row is None:
        why = f"no row for a {kind} model {drafted} on {maker}"
        return Settled(ties, why, _short(maker, kind))
    others = _row(maker, kind, not config.speculates)
    alone = others is None or others.cost > MOST_COST
    if config.disaggregation_slots and alone:
        why = f"a worker that hands over to it may be {_drafted(not config.speculates)}, and is ties on {maker} then"
        return Settled(ties, why, "options")
    if row.cost > MOST_COST:
        why = f"{kind} models {drafted} on {maker} have {row.measured}, and {MOST_COST} is the most"
        return Settled(ties, why, _short(maker, kind))
    if config.speculates and with_policy(config).speculative_policy == "auto" and alone:
        why = f"--speculative-policy auto may run plain rounds for long, and without a draft it is ties on {maker}"
        return Settled(ties, why, "options")
    unbuilt = why_not_model(target.config)
    if unbuilt is not None:
        return Settled(ties, unbuilt.reason, _short(maker, kind))
    problem = unfit_options(config, place)
    if problem is not None:
        return Settled(ties, problem.reason, "options")
    place = replace(place, packed=packing(config), activations=config.quantize_activations)
    unmeasured = _unmeasured(config, target, place)
    if unmeasured is not None:
        why = f"what it costs {unmeasured} was not measured"
        return Settled(ties, why, "options")
    dearer = why_not_by_libraries(config, target, place, probes)
    if dearer is None and probes:
        dearer = why_not_by_probes(target, place)
    if dearer is not None:
        return Settled(ties, dearer, "probes")
    why = f"{kind} models {drafted} on {maker} have {row.measured}"
    return Settled(replace(config, exactness="bits"), why, _short(maker, kind))


def _row(maker: str, kind: Kind, drafted: bool) -> ExactnessRow | None:
    return next((row for row in TABLE if (row.device, row.kind, row.drafted) == (maker, kind, drafted)), None)


def _drafted(drafted: bool) -> str:
    return "with a draft" if drafted else "without a draft"


def _unmeasured(config: EngineConfig, target: TargetSpec, place: LoadContext) -> str | None:
    """Of options and weights, what no row was measured with; None for none."""
    if config.has_loras:
        return "beside adapters"
    if config.algorithm == "NGRAM":
        return "with drafts that are looked up"  # where nothing is found no tree hides the cost
    if config.tp_size * config.ep_size > 1:
        return "over ranks"
    if place.device.type == "cpu":
        return None if config.exact_sums in ("auto", "integers") else "with --exact-sums"
    cases = {
        "in float16": place.dtype != torch.bfloat16,
        "with K/V in FP8": config.fp8_kv or config.fp8_draft_kv,
        "without copies of weights": config.compress_weights is False,
        "with quantized weights": any(each.format != UNQUANTIZED for each in product_weights(target, None, place)),
    }
    return next((words for words, there in cases.items() if there), None)


def _short(maker: str, kind: Kind) -> str:
    return f"{kind}.{maker}".replace(" ", "-")


def kind_of(model: ModelConfig) -> Kind:
    """The mechanism that decides what `bits` costs; of several the later named."""
    specs = model.attention.values()
    if model.recurrent:
        return "recurrent"
    if any(spec.index is not None for spec in specs):
        return "sparse"
    if any(spec.latent is not None for spec in specs):
        return "compressed"
    return "experts" if model.has_experts else "dense"


def device_name(device: torch.device) -> str:
    """A GPU's model, or a CPU's maker."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _maker()


@cache
def _maker() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "another CPU"
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return found.get("vendor_id") or ("ARM" if "CPU implementer" in found else "another CPU")
