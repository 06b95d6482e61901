"""How many tokens the KV pools hold: what all rows can use, or what fits beside everything else.

    total x --mem-fraction-static           static: weights, tables, buffers, and the pools
    |-- static without the pools            estimated from shapes before loading, measured after
    `-- pools
    the rest                                activations, workspaces, captured graphs, other processes

The same rule runs twice: on an estimate before any weight is read, so that what cannot work is refused before anything
is allocated, and on what was measured once weights, tables and buffers are there.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from treetop.types.errors import CapacityError, EngineError
from treetop.types.layout import Layout
from treetop.types.state import StateGroup

GIB = 2**30
SLACK = 2**28
"""Bytes left to the allocator's rounding."""
BYTES_PER_GRAPH = 3 * 2**23
"""Bytes of the driver that a captured round of three phases is allowed."""
_BYTES_PER_DRAW = 52
"""Bytes that filters and a draw take in PyTorch for each logit, as measured, and a copy of it that was changed."""
_MAX_FRACTION = 0.99
SMALL_CHUNK = 512
"""Prompt tokens of a step where PyTorch attends, which has masks of chunk x context: on every CPU."""
MIN_CHUNK_OF_CPU, MIN_CHUNK_OF_GPU = 128, 512
USUAL_CHUNK_OF_GPU = 2048  # beside rounds
"""Prompt tokens of a prefill step between two rounds, at least, and before it is known what steps cost. Fewer cost
nearly as much, for the weights are read."""
MIXED_CHUNK_OF_GPU = 1024
"""Of one with a round in its forward: more steps save more readings of weights. Launched one by one, fewer tokens of an
8B model take as long (`benchmarks/log.md`)."""
LARGEST_PROMPTS = 1024
"""Prompt tokens in the forward of a captured round, at most; the other sizes are a half, a quarter and an eighth."""
PREFILL_PARTS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
"""Sizes of captured prefill steps, in sixteenths of the largest: the next holds at most twice as much, and of many
tokens a third more."""
ROWS_OF_CPU, ROWS_OF_GPU = (16, 8), (256, 128, 64, 32, 16, 8)
"""Rows to choose from, if `--max-running-requests` does not say: batches whose rounds were measured."""
DEFERRED_ON_CPU, DEFERRED_ON_GPU = 128, 32
"""Tokens of a row that plain rounds may leave to one later pass of the draft, if `--speculative-max-deferred` does not
say: of a small model a pass costs much however few it has."""
TOKENS_OF_A_ROW = 2048
"""Pool tokens that each of so many rows must find, or its whole context if that is shorter, where nobody knows how long
requests are: who needs more waits, or has others retracted."""
CHUNKS = ((60 * GIB, 8192), (35 * GIB, 4096), (0, 2048))
"""A GPU's memory from which on a prefill step holds so many tokens: the larger its memory, the faster it mostly is."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device: all of it, and what nobody uses."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Budget:
    """What is known when pools are sized, in bytes; `free` counts weights, tables and buffers as taken.

    static: weights, tables and buffers.
    allowance: what activations, workspaces and graphs will take.
    fraction: `--mem-fraction-static`.
    copies: of static, weights in 12 or 13 bits beside themselves, by their shapes.
    rest: of the allowance, what the fraction leaves free on a CPU.
    """

    memory: DeviceMemory
    static: int
    allowance: int
    fraction: float
    copies: int = 0
    rest: int = 0

    @property
    def pool_bytes(self) -> int:
        """What the pools may take; negative if the rest does not fit."""
        return min(self.share, self.unused)

    @property
    def share(self) -> int:
        """What the fraction leaves to the pools."""
        return int(self.fraction * self.memory.total) - self.static

    @property
    def unused(self) -> int:
        """What is free and not needed for anything else."""
        return self.memory.free - self.allowance

    def enough(self, need: int) -> float | None:
        """The least fraction, in hundredths, that leaves pools so many bytes; None if none does."""
        short = max(need - self.unused, 0)
        if short > self.rest:
            return None
        by_rest = self.fraction + (1 - self.fraction) * short / self.rest if short else 0.0
        minimum = math.ceil(100 * max((self.static + need) / self.memory.total, by_rest)) / 100
        return minimum if minimum <= _MAX_FRACTION else None

    def or_no_copies(self, missing: int) -> str:
        """The end of a message's advice: to leave the copies out, if there are any and that frees what is missing."""
        helps = self.copies > 0 and self.copies >= missing
        return f", or use --no-compress-weights, which frees up to {gib(self.copies)}" if helps else ""

    def formula(self) -> str:
        return (
            f"min({self.fraction:g} x total {gib(self.memory.total)} - weights and tables {gib(self.static)},"
            f" free {gib(self.memory.free)} - activations and graphs {gib(self.allowance)})"
        )


def memory_of(device: torch.device) -> DeviceMemory:
    """A GPU's memory as its driver sees it, or the machine's, limits of a control group included."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps for later counts as free
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free)
    return _limited(_ram(Path("/proc/meminfo")), Path("/sys/fs/cgroup"))


def chunk_of_gpu(total: int, windows: Sequence[int]) -> int:
    """Prompt tokens of a prefill step on a GPU with `total` bytes, if `--chunked-prefill-size` does not say.

    windows: of the model's layers. Weights are read once a step, so a long prompt wants large steps; activations (some
    200 kB a token for an 8B model) and the rounds of others, which wait for a step, want small ones. A pool of windows
    holds window and chunk for every row, so a chunk is no longer than the shortest window, which at most doubles it.
    """
    by_memory = next(chunk for minimum, chunk in CHUNKS if total >= minimum)
    return max(min([by_memory, *windows]), SMALL_CHUNK)


def activation_allowance(peak: int, num_rounds: int) -> int:
    """Bytes to leave free on a GPU. peak: what the worst prefill and the worst round took when they were tried."""
    return peak + num_rounds * BYTES_PER_GRAPH + SLACK


def step_bytes(layout: Layout, vocab_size: int, element_size: int) -> int:
    """Bytes that the worst step takes on a CPU, about: all rows at the context wall, a round sampled.

    PyTorch's attention gathers a layer's prefix, joins it with the tail, of codes makes numbers, and has two masks and
    a bias for each query, a tree's node or a prompt's token. In a round each node has its logits later, and what
    drawing from them takes; of a prompt's tokens with log-probabilities no more have them at a time, or a few. A mixed
    step has the masks of a prefill and of a round.
    """
    numbers, fp8 = max(group.kv.numbers for group in layout.groups), any(group.kv.fp8 for group in layout.groups)
    rows, nodes = layout.max_requests, layout.max_requests * layout.verify_tail
    gathered = rows * numbers * (2 + 2 * max(element_size, 4) if fp8 else 2 * element_size)
    queries = nodes + layout.chunk if layout.mixed else max(nodes, layout.chunk)
    masked = queries * (element_size + 2)
    lines = max(nodes, layout.prompt_lines)
    return max(layout.max_committed * (gathered + masked), lines * vocab_size * (element_size + _BYTES_PER_DRAW))


def pool_bytes(layout: Layout, element_size: int) -> int:
    """Bytes of all pools of a layout."""
    return sum(
        layout.num_pages[group.name] * layout.page_size * group.bytes_per_token(element_size) for group in layout.groups
    )


def state_bytes(layout: Layout, element_size: int) -> int:
    """Bytes that a row's states take: what recurrent layers keep, with what may be pending."""
    return sum(
        group.row_bytes(element_size) + group.pending_bytes(layout.commit_width, element_size)
        for group in layout.state_groups
    )


def bytes_per_token(layout: Layout, element_size: int) -> dict[str, int]:
    """Bytes that a token takes in each group whose pool grows with the tokens; a window's pool does not."""
    return {g.name: g.bytes_per_token(element_size) for g in layout.groups if g.window is None}


def fit(layout: Layout, element_size: int, budget: Budget, asked: int | None) -> Layout:
    """The layout with its pools sized: `asked` tokens (`--max-total-tokens`), or as many as are of use and fit.

    Raises CapacityError with the numbers and the options to change if the pools do not fit, or not one request at the
    context wall fits into them.
    """
    if asked is not None:
        sized = replace(layout, pool_tokens=asked)
        sized.validate()
        need = pool_bytes(sized, element_size)
        if need > budget.memory.free:
            raise CapacityError(
                f"pools of {asked} tokens: need {gib(need)} = {_costs(sized, element_size)}, have"
                f" {gib(max(budget.memory.free, 0))} free beside weights and tables of {gib(budget.static)};"
                f" lower --max-total-tokens{budget.or_no_copies(need - budget.memory.free)}"
            )
        return sized
    page_bytes = layout.page_size * sum(bytes_per_token(layout, element_size).values())
    left = budget.pool_bytes - pool_bytes(replace(layout, pool_tokens=0), element_size)
    pages = left // page_bytes if page_bytes else 0
    tokens = min(layout.tokens_for_all, max(pages, 0) * layout.page_size)
    if left < 0 or (page_bytes and tokens < layout.tokens_per_request):
        raise CapacityError(_too_little(layout, element_size, budget, tokens))
    sized = replace(layout, pool_tokens=tokens if page_bytes else layout.tokens_for_all)
    sized.validate()
    return sized


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What an engine's memory went to; for the start-up log, doctor and the words of an out-of-memory error."""

    layout: Layout
    element_size: int
    budget: Budget

    def lines(self) -> list[str]:
        """One line a pool, and one for the rest."""
        rows = []
        for group in self.layout.groups:
            slots = (self.layout.num_pages[group.name] - 1) * self.layout.page_size
            per_token = group.bytes_per_token(self.element_size)
            size = self.layout.num_pages[group.name] * self.layout.page_size * per_token
            spared = self.layout.window_spares(group)
            rows.append(
                f"pool {group.name}: {slots} tokens, {gib(size)}, {per_token} B a token"
                + (" in FP8" if group.kv.fp8 else "")
                + (
                    f"; pages behind the window of {group.window} are given back, which saves {spared} tokens or"
                    f" {gib(spared * per_token)} of a request at the context wall"
                    if group.window is not None
                    else ""
                )
            )
        for state in self.layout.state_groups:
            rows.append(state_line(self.layout, state, self.element_size))
        memory, budget = self.budget.memory, self.budget
        rows.append(
            f"memory: total {gib(memory.total)}, weights and tables {gib(budget.static)}"
            + (f" (of which up to {gib(budget.copies)} copies of weights in 12 or 13 bits)" if budget.copies else "")
            + ", pools"
            f" {gib(pool_bytes(self.layout, self.element_size))}, kept for activations and graphs"
            f" {gib(budget.allowance)}, --mem-fraction-static {budget.fraction:g}"
        )
        return rows


def state_line(layout: Layout, group: StateGroup, element_size: int) -> str:
    """What a group of states takes, in words: of weights and tables, and how much of it is each row's."""
    row, width, nodes = group.row_bytes(element_size), layout.commit_width, layout.verify_tail
    row += group.pending_bytes(width, element_size)
    stash = layout.max_requests * group.stash_bytes(nodes, element_size)
    kept = layout.checkpoints * group.row_bytes(element_size)
    return (
        f"states {group.name}: {group.num_layers} layers, {gib(row)} a row x {layout.num_rows} rows ="
        f" {gib(row * layout.num_rows)}, nodes of a round {gib(stash)}"
        + (f", {layout.checkpoints} checkpoints {gib(kept)}" if kept else "")
    )


@contextmanager
def out_of_memory_explained(doing: str, device: torch.device, use: MemoryUse | None = None) -> Iterator[None]:
    """Turn the device's out-of-memory error into an EngineError with the numbers and the options to change."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        numbers = f"; {'; '.join(use.lines())}" if use is not None else ""
        now = memory_of(device)
        raise EngineError(
            f"out of memory while {doing}: {_first_line(error)}; {gib(now.free)} of {gib(now.total)} are free now"
            f"{numbers}; lower --mem-fraction-static, --max-total-tokens, --max-running-requests,"
            f" --chunked-prefill-size or --context-length{use.budget.or_no_copies(0) if use is not None else ''}"
        ) from None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch, CUDA or Triton ran out of memory; they have no common type for it."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in words or "can't allocate memory" in words


def gib(size: int) -> str:
    """Bytes for a reader."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB // 10 else f"{size / 2**20:.2f} MiB"


def _too_little(layout: Layout, element_size: int, budget: Budget, tokens: int) -> str:
    """Not one request fits: what it needs, what there is, and what would change that."""
    one = replace(layout, pool_tokens=layout.tokens_per_request)
    need = pool_bytes(one, element_size)
    fraction = budget.enough(need)
    raised = [] if fraction is None else [f"raise --mem-fraction-static to {fraction:g} or more"]
    of_rows = ""
    if layout.state_groups:
        each = state_bytes(layout, element_size)
        of_rows = (
            f" (states of recurrent layers are {gib(each * layout.num_rows)} of these = {gib(each)} a row x"
            f" (--max-running-requests {layout.max_requests} + the dummy row))"
        )
    if budget.unused <= 0:
        ways = [*raised, "lower --max-running-requests, --context-length or --chunked-prefill-size"]
        return (
            f"weights, tables and buffers: need {gib(budget.static)}{of_rows} beside {gib(budget.allowance)} for"
            f" activations and graphs, have {gib(max(budget.memory.free + budget.static, 0))} free of"
            f" {gib(budget.memory.total)};"
            f" {', '.join(ways)}, choose a narrower --dtype or a smaller model{budget.or_no_copies(-budget.unused)}"
        )
    context = tokens - layout.headroom
    ways = [f"lower --context-length to {context} or less" if context > 0 else "lower --context-length", *raised]
    if need <= budget.unused:
        ways.append("set --max-total-tokens, which overrides the fraction")
    if layout.page_size > 1:
        ways.append("lower --page-size")
    if of_rows:
        ways.append("lower --max-running-requests")
    return (
        f"KV pools: one request of {layout.max_positions} tokens needs {gib(need)} = {_costs(one, element_size)},"
        f" have {gib(max(budget.pool_bytes, 0))} = {budget.formula()}{of_rows}; {', '.join(ways)}"
        f"{budget.or_no_copies(need - budget.pool_bytes)}"
    )


def _costs(layout: Layout, element_size: int) -> str:
    each = [f"{name} {cost} B" for name, cost in bytes_per_token(layout, element_size).items()]
    fixed = pool_bytes(replace(layout, pool_tokens=0), element_size)
    return f"{layout.pool_tokens} tokens x ({' + '.join(each)}) + null pages and windows {gib(fixed)}"


def _ram(meminfo: Path) -> DeviceMemory:
    """The machine's memory; without /proc what the system says there is, all of it counted as free."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        total, free = (1024 * int(rows[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        return DeviceMemory(total, free)
    except (OSError, ValueError, KeyError, IndexError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceMemory(total, total)


def _limited(memory: DeviceMemory, group: Path) -> DeviceMemory:
    """Memory under the limit of a control group (version 2), if there is one; its page cache counts as free."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max" is no limit
        used = int((group / "memory.current").read_text(encoding="ascii"))
        rows = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(rows.get("inactive_file", 0))
    except (OSError, ValueError):
        return memory
    return DeviceMemory(min(memory.total, limit), min(memory.free, max(limit - used, 0)))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].removesuffix(".")
