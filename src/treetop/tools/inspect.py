"""What a checkpoint is, what would be loaded of it, and whether that fits; from configs and headers, without a weight
but an output matrix that is stored though its config ties it.

It reads specs, so it knows no family and no drafter by name.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from treetop.checkpoints.checkpoint import StoredFiles, stored_files
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import compute_device, compute_dtype, format_bytes, weight_bytes
from treetop.checkpoints.params import about_activations, stay_packed
from treetop.drafts.protocol import DrafterSpec
from treetop.drafts.registry import FoundDraft, find_draft
from treetop.engine.memory import MemoryUse
from treetop.engine.startup.exactness_table import is_named
from treetop.engine.startup.plan import plan_engine, read_draft_spec
from treetop.engine.startup.weight_copies import packing
from treetop.kernels.profile import profile_of
from treetop.models.config import AttentionSpec, LayerSpec, read_config
from treetop.models.registry import TargetSpec, target_spec
from treetop.types.config import EngineConfig, Exactness
from treetop.types.errors import UserError


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike.

    count: how many.
    attention, feed_forward: their specs' values, but for what is off; attention may be linear.
    """

    count: int
    attention: dict[str, Any]
    feed_forward: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TargetReport:
    """stored: what is on disk.
    dtype: what it computes in.
    weight_bytes: in memory, of the target alone, at most.
    formats: of these bytes, those in each format.
    activations: which products quantize their inputs; None if none do.
    own_draft: the algorithm that the folder's own draft layers need; None if it has none.
    own_head: that a stored output matrix is used though the config ties it, in words; None if not.
    """

    folder: str
    architecture: str
    layers: tuple[LayerKind, ...]
    vocab_size: int
    hidden_size: int
    max_positions: int
    tied_embeddings: bool
    parameters: int
    stored: StoredFiles
    dtype: str
    weight_bytes: int
    formats: dict[str, int]
    activations: str | None
    own_draft: str | None
    own_head: str | None


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a folder drafts with. parameters and what follows: None if there is no target that it could serve."""

    folder: str
    algorithm: str
    layout: str
    reasons: tuple[str, ...]
    stored: StoredFiles
    parameters: int | None = None
    layers: int | None = None
    vocab_size: int | None = None
    aux_inputs: tuple[int, ...] | None = None
    weight_bytes: int | None = None
    formats: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A KV pool.

    bytes_per_token: in all its layers.
    window: None if they see everything.
    chunked: they see their own chunk of so many tokens alone.
    """

    group: str
    layers: int
    window: int | None
    bytes_per_token: int
    tokens: int
    bytes: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class StateReport:
    """States of recurrent layers, of `static`.

    bytes_per_row: what each request row keeps, whatever its length.
    rows: with the dummy row.
    bytes: of all rows.
    """

    group: str
    layers: int
    bytes_per_row: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """In bytes.

    static: weights, tables and buffers.
    kept: for activations and graphs.
    """

    device: str
    total: int
    free: int
    static: int
    kept: int
    pools: tuple[PoolReport, ...]
    states: tuple[StateReport, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """target is None for a draft alone, draft without one, memory if something does not fit, which problems say.

    exactness: that would be in force; None where memory is.
    unprobed: `auto` would be that if the probes of a start pass; for `auto` nothing is probed here.
    """

    fits: bool
    problems: tuple[str, ...]
    target: TargetReport | None
    draft: DraftReport | None
    memory: MemoryReport | None
    exactness: Exactness | None = None
    unprobed: bool = False


def inspect(config: EngineConfig) -> Report:
    """Look at the model of a configuration, at its draft if it names one, and at whether both fit this machine.

    What cannot be loaded is a problem of the report, with its reason, and no error.
    """
    problems: list[str] = []
    spec = report = draft = memory = exactness = None
    asked, unprobed = is_named(config), False
    try:
        folder = resolve_folder(config.model)
        draft = _draft_alone(folder, config)
        if draft is None:
            spec = target_spec(folder)
            spec.check()
            report = _target_report(spec, config)
    except UserError as error:
        problems.append(str(error))
    in_the_target = spec is not None and config.draft is None and config.algorithm == "MTP"
    if (config.draft is not None or in_the_target) and draft is None:
        try:
            where = folder if config.draft is None else resolve_folder(config.draft, "draft")
            draft = _draft_report(where, spec, config)
        except UserError as error:
            problems.append(str(error))
    elif draft is not None and config.draft is not None:
        problems.append(f"model {config.model}: a draft head, not a target")
    if not problems and report is not None:
        try:
            engine_plan = plan_engine(config, probes=asked)
            memory, exactness = _memory_report(engine_plan.use, config), engine_plan.config.exactness
            unprobed = not asked and engine_plan.place.profile.batch_invariant
        except UserError as error:
            problems.append(str(error))
    return Report(not problems, tuple(problems), report, draft, memory, exactness, unprobed)


def _draft_alone(folder: Path, config: EngineConfig) -> DraftReport | None:
    """The draft in a folder that holds no target; None if it holds one, or nothing that is known."""
    try:
        target_spec(folder).check()
    except UserError:
        try:
            return _draft_report(folder, None, config)
        except UserError:
            return None  # the target's error says more
    return None


def _draft_report(folder: Path, target: TargetSpec | None, config: EngineConfig) -> DraftReport:
    found: FoundDraft = find_draft(folder, config.algorithm)
    known = (str(folder), found.algorithm, found.layout, found.reasons, stored_files(folder))
    if target is None:
        return DraftReport(*known)
    spec: DrafterSpec = read_draft_spec(config, target)
    spec.check()
    numbers = sum(param.numbers for param in spec.params) + spec.derived
    params = stay_packed(spec.params, packing(config), config.quantize_activations)
    held = weight_bytes(params, _dtype(config)) + spec.derived * _dtype(config).itemsize
    formats = format_bytes(params, _dtype(config))
    return DraftReport(*known, numbers, len(spec.attention), spec.vocab_size, spec.aux_inputs, held, formats)


def _target_report(spec: TargetSpec, config: EngineConfig) -> TargetReport:
    of, params = spec.config, stay_packed(spec.params, packing(config), config.quantize_activations)
    exact = profile_of(config.exactness, compute_device(config.device)).batch_invariant
    held = format_bytes(params, _dtype(config), exact and packing(config) == "tiles")
    return TargetReport(
        folder=str(spec.folder),
        architecture=read_config(spec.folder)["architectures"][0],
        layers=tuple(_kinds_of(of.layers)),
        vocab_size=of.vocab_size,
        hidden_size=of.hidden_size,
        max_positions=of.max_positions,
        tied_embeddings=of.tied_embeddings,
        parameters=sum(param.numbers for param in spec.params),
        stored=stored_files(spec.folder),
        dtype=_name(_dtype(config)),
        weight_bytes=sum(held.values()),
        formats=held,
        activations=about_activations(params),
        own_draft=_own_draft(spec.folder),
        own_head=spec.about_head(),
    )


def _own_draft(folder: Path) -> str | None:
    try:
        return find_draft(folder).algorithm
    except UserError:
        return None  # it holds nothing but a target


def _kinds_of(layers: tuple[LayerSpec, ...]) -> list[LayerKind]:
    """Kinds in the order of their first layers."""
    order = {layer: index for index, layer in reversed(list(enumerate(layers)))}
    found = groupby(sorted(layers, key=order.__getitem__), key=order.__getitem__)
    return [
        LayerKind(len(list(same)), _values(layers[first].mixer), _values(layers[first].feed_forward))
        for first, same in found
    ]


def _values(spec: Any) -> dict[str, Any]:
    """A spec's values under its kind, such as `dense`; those that are off, or None, are left out."""
    kind = {"kind": type(spec).__name__.removesuffix("Spec").lower()}
    named = {field.name: _plain(getattr(spec, field.name)) for field in fields(spec)}
    if isinstance(spec, AttentionSpec):
        del kind["kind"]
    return {**kind, **_on(named)}


def _on(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value is not False and value != []}


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if is_dataclass(value):
        return _on({f.name: _plain(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, torch.dtype):
        return _name(value)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _memory_report(use: MemoryUse, config: EngineConfig) -> MemoryReport:
    layout, size = use.layout, use.element_size
    pools = []
    for group in layout.groups:
        pages, token = layout.num_pages[group.name], group.bytes_per_token(size)
        held = pages * layout.page_size * token
        pools.append(
            PoolReport(
                group.name,
                group.num_layers,
                group.window,
                token,
                (pages - 1) * layout.page_size,
                held,
                group.chunked,
            )
        )
    states = []
    for state in layout.state_groups:
        row = state.row_bytes(size) + state.pending_bytes(layout.commit_width, size)
        states.append(StateReport(state.name, state.num_layers, row, layout.num_rows, row * layout.num_rows))
    budget = use.budget
    device = str(compute_device(config.device))
    return MemoryReport(
        *(device, budget.memory.total, budget.memory.free + budget.static, budget.static, budget.allowance),
        *(tuple(pools), tuple(states)),
    )


def _dtype(config: EngineConfig) -> torch.dtype:
    return compute_dtype(config.dtype, compute_device(config.device))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_json(report: Report) -> Mapping[str, Any]:
    return asdict(report)


def as_text(report: Report) -> str:
    """The report for people, in lines."""
    lines: list[str] = []
    if report.target is not None:
        lines += _target_lines(report.target)
    if report.draft is not None:
        lines += _draft_lines(report.draft)
    if report.memory is not None:
        lines += _memory_lines(report.memory)
    if report.exactness is not None:
        lines.append(f"exactness {report.exactness}{', if the probes of a start pass' * report.unprobed}")
    lines += [f"problem: {problem}" for problem in report.problems]
    alone = report.target is None and report.draft is not None
    fits = "a draft head: give it to --speculative-draft-model-path of its target" if alone else "it fits"
    return "\n".join([*lines, fits if report.fits else "it does not fit"])


def _target_lines(target: TargetReport) -> list[str]:
    lines = [
        f"target: {target.folder}",
        f"  {target.architecture}, {_count(target.parameters)} parameters, vocabulary {target.vocab_size},"
        f" hidden {target.hidden_size}, {target.max_positions} positions",
    ]
    for kind in target.layers:
        lines.append(f"  {kind.count} layers: attention {_said(kind.attention)}; {_said(kind.feed_forward)}")
    lines.append(f"  on disk: {_stored(target.stored)}")
    lines.append(f"  in memory: {target.dtype}, {_bytes(target.weight_bytes)}{_quantized(target.formats)}")
    if target.activations is not None:
        lines.append(f"  {target.activations}")
    if target.own_head is not None:
        lines.append(f"  {target.own_head}")
    if target.own_draft is not None:
        lines.append(f"  it holds draft layers of its own: --speculative-algorithm {target.own_draft}")
    return lines


def _draft_lines(draft: DraftReport) -> list[str]:
    lines = [f"draft: {draft.folder}", f"  {draft.algorithm}, layout {draft.layout}: {'; '.join(draft.reasons)}"]
    lines.append(f"  on disk: {_stored(draft.stored)}")
    if draft.parameters is not None and draft.aux_inputs is not None and draft.weight_bytes is not None:
        states = ", ".join(map(str, draft.aux_inputs)) or "none"
        lines.append(
            f"  {_count(draft.parameters)} parameters, {draft.layers} layers, vocabulary {draft.vocab_size},"
            f" reads the target's states {states}, {_bytes(draft.weight_bytes)} in memory"
            f"{_quantized(draft.formats or {})}"
        )
    return lines


def _memory_lines(memory: MemoryReport) -> list[str]:
    lines = [f"memory of {memory.device}: {_bytes(memory.free)} of {_bytes(memory.total)} are free"]
    lines.append(f"  weights, tables and buffers {_bytes(memory.static)}, kept for the rest {_bytes(memory.kept)}")
    for pool in memory.pools:
        window = "" if pool.window is None else f", {'chunks of' if pool.chunked else 'window'} {pool.window}"
        lines.append(
            f"  KV pool {pool.group}: {pool.layers} layers{window}, {pool.bytes_per_token} bytes a token,"
            f" {pool.tokens} tokens, {_bytes(pool.bytes)}"
        )
    for state in memory.states:
        lines.append(
            f"  states {state.group}: {state.layers} layers, {_bytes(state.bytes_per_row)} a row,"
            f" {state.rows} rows, {_bytes(state.bytes)}"
        )
    return lines


def _said(values: Mapping[str, Any]) -> str:
    words = []
    for name, value in values.items():
        if isinstance(value, dict):
            words.append(f"{name} ({_said(value)})")
        else:
            words.append(str(value) if name == "kind" else name if value is True else f"{name} {value}")
    return ", ".join(words)


def _stored(stored: StoredFiles) -> str:
    kinds = ", ".join(f"{kind} {_count(numbers)}" for kind, numbers in stored.numbers.items())
    return f"{stored.tensors} tensors in {stored.files} file{'s' * (stored.files != 1)}: {kinds}"


def _quantized(formats: Mapping[str, int]) -> str:
    """The formats, if there is more to say than that weights are plain."""
    each = [f"{name} {_bytes(held)}" for name, held in formats.items()]
    return f" ({', '.join(each)})" if len(each) > 1 else ""


def _count(numbers: int) -> str:
    for name, unit in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if numbers >= unit:
            return f"{numbers / unit:.2f} {name}"
    return str(numbers)


def _bytes(number: int) -> str:
    for name, unit in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number / 2**10:.1f} KiB"
