"""What passes between host and device each step: one copy in, one copy out, in slots that rotate.

The host writes a step's inputs into its slot and goes on; the device copies them, runs, and copies the results into the
same slot. `max_steps` are out at most, so a slot that comes round again has long been read.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat

import torch
from torch import Tensor

from treetop.checks.probes import RECORD
from treetop.engine.buffers import Zeros
from treetop.engine.packed_trees import PackedTrees
from treetop.engine.prompt_blocks import num_numbers
from treetop.types.errors import CapacityError, CheckError, InvariantError
from treetop.types.layout import Layout
from treetop.types.messages import ProposalCounts
from treetop.types.sampling import CLASSES, MAX_LOGPROBS, TokenLogprobs
from treetop.types.tree import PathLogprobs

_ALIGNED = 2
"""Columns begin at multiples of so many integers, 16 bytes: kernels tell such addresses from others, and a kernel that
no step before needed would be compiled between two rounds.
"""


@dataclass(slots=True)
class Slot:
    """Host memory of one step, pinned beside a GPU.

    step: whose it is now.
    done: that step's end; None on a CPU.
    """

    inputs: Tensor
    results: Tensor
    done: torch.cuda.Event | None
    step: int = -1


@dataclass(frozen=True, slots=True)
class RowResults:
    """What the host learns of a step's rows.

    tokens: [rows, w] int64.
    accept_len: [rows] int64.
    finite: [rows] bool.
    logprobs: if a row asks for them.
    prompt: of prompt tokens, [n, 2 + maximum] and [n, maximum], if a chunk asks for them.
    candidates: of a round with drafts, [rows, w - 1] int64, which candidate each accepted draft was, by flat index; and
        nodes, [rows, 1], where a budget has cut trees.
    proposals: [2, classes, depths, ranks] float32, of a calibration's counts, if the host goes by them.
    trees: of a round with drafts, what was verified, if a row asks.
    experts: in memory of their own on the host, there at the step's end, if a row asks: of chunks [tokens, ids], of a
        round [rows, w, ids] int16.

    What is transferred has results of this form, too (`engine/kv_transfer.py`).
    """

    tokens: Tensor
    accept_len: Tensor
    finite: Tensor
    logprobs: PathLogprobs | None = None
    prompt: PathLogprobs | None = None
    candidates: Tensor | None = None
    proposals: Tensor | None = None
    trees: PackedTrees | None = None
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HostResults:
    """`RowResults` on the host, and the record of the probes. candidates: () where there are none."""

    tokens: list[tuple[int, ...]]
    accept_len: list[int]
    finite: list[bool]
    record: list[int]
    logprobs: PathLogprobs | None
    prompt: PathLogprobs | None = None
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    proposals: ProposalCounts | None = None
    trees: PackedTrees | None = None
    experts: Tensor | None = None

    def logprobs_of(self, item: int, num_tokens: int, maximum: int) -> tuple[TokenLogprobs, ...]:
        """Of the first tokens of a row, with up to `maximum` of the best beside each."""
        assert self.logprobs is not None
        return listed_logprobs(self.logprobs.values[item, :num_tokens], self.logprobs.ids[item, :num_tokens], maximum)


def listed_logprobs(values: Tensor, ids: Tensor, maximum: int) -> tuple[TokenLogprobs, ...]:
    """Of each line, with up to `maximum` of the best. values: [n, 2 + at most]. ids: [n, at most]."""
    lines = zip(values[:, : 2 + maximum].tolist(), ids[:, :maximum].tolist(), strict=True)
    return tuple(
        TokenLogprobs(own, tuple(zip(of_best, best, strict=True)), drawn) for (own, drawn, *best), of_best in lines
    )


@dataclass(frozen=True, slots=True)
class InFlightResults:
    """Results of step `step`, on their way to its slot: `values`, a part of it, for a bucket of `rows` rows.

    width, drafts: columns of tokens and of candidates.
    proposals: the shape of what is told of them, () for nothing.
    nodes: of each row's tree, 0 if none are told.
    maximum: how many of the best tokens' log-probabilities they hold, None for none at all.
    prompt: prompt tokens, and the best beside each.
    """

    slot: Slot
    step: int
    values: Tensor
    rows: int
    width: int
    drafts: int
    proposals: tuple[int, ...]
    nodes: int
    maximum: int | None
    prompt: tuple[int, int]
    experts: Tensor | None = None


class StagingBuffers:
    """`max_steps + 1` slots, and the device memory that they are copied to and from."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        zeros: Zeros,
        check_level: int,
        setup_widths: Sequence[int],
        checksums: int = 0,
        classes: int = CLASSES,
    ) -> None:
        """setup_widths: of `RowState`. checksums: of a piece that is handed over, of all ranks. classes: of a
        calibration.
        """
        self._check_level = check_level
        b, pieces = layout.max_requests, layout.disaggregation_slots
        # Row lists, of a mixed step two pairs, cells; for a prefill the setups, and of each row: length, next token; of
        # each token: place, id; or blocks of prompts.
        # Of each prompt token with log-probabilities: place, id. For an import the checksums of each piece, known, row.
        numbers = 6 * b + 3 * layout.max_edits + sum(setup_widths)
        sizes = (*layout.packed_sizes, *((blocks * width, width) for blocks, width in layout.largest_in_blocks))
        packed = max((num_numbers(size, width) for size, width in sizes), default=0)
        numbers += max(4 * layout.chunk, pieces * (checksums + 2), packed)
        most_columns = 2 + 3 * len(layout.groups) + len(setup_widths) + 6
        numbers += most_columns * (_ALIGNED - 1)
        self._inputs = zeros((numbers,), torch.int64)
        a_token = 1 + 2 + 2 * MAX_LOGPROBS  # its id, log-probabilities, ids of the best
        lines = max(b, *(size // width for size, width in layout.packed_sizes), 0)
        of_prompts = lines * (a_token + 2) + layout.chunk * a_token
        a_round = b * (layout.commit_width * a_token + 2 + layout.commit_width)
        a_round += 2 * classes * layout.commit_width * layout.max_topk
        a_round += b * PackedTrees.width(layout.verify_tail, layout.commit_width)
        most = a_round + RECORD + of_prompts if layout.mixed else max(a_round, of_prompts)
        results = max(most, pieces * (checksums + 2))
        self._results = zeros((results + RECORD,), torch.int64)
        self._slots = [self._slot(device) for _ in range(layout.max_steps + 1)]
        self._steps = 0

    def _slot(self, device: torch.device) -> Slot:
        cuda = device.type == "cuda"
        inputs, results = (torch.zeros(len(t), dtype=t.dtype, pin_memory=cuda) for t in (self._inputs, self._results))
        # A wait for a blocking event takes no core, which processes beside this one need.
        return Slot(inputs, results, torch.cuda.Event(blocking=True) if cuda else None)

    def take(self) -> Slot:
        """The next step's slot. It waits for a step only if more than `max_steps` are out; that one is lost."""
        slot = self._slots[self._steps % len(self._slots)]
        if slot.done is not None:
            slot.done.synchronize()
        slot.step = self._steps
        self._steps += 1
        return slot

    def send(self, slot: Slot, **parts: Sequence[Sequence[int]]) -> dict[str, list[Tensor]]:
        """Parts of columns of integers on the device, int64, in one copy. They hold until the next step's are sent.

        Returns the columns of each part under its name, each aligned to 16 bytes.
        """
        columns = [column for part in parts.values() for column in part]
        padding = [-len(column) % _ALIGNED for column in columns]
        need = sum(map(len, columns)) + sum(padding)
        if need > len(self._inputs):
            raise CapacityError(
                f"inputs of a step: need {need} integers, have {len(self._inputs)}, for max_requests, chunk and"
                " max_edits; raise --max-running-requests or --chunked-prefill-size"
            )
        numbers = array("q")  # several times as fast as a tensor of a list
        for column, more in zip(columns, padding, strict=True):
            numbers += array("q", column)
            numbers.extend(repeat(0, more))
        if need:  # there is no tensor of an empty array
            slot.inputs[:need] = torch.frombuffer(numbers, dtype=torch.int64)
        self._inputs[:need].copy_(slot.inputs[:need], non_blocking=True)
        widths = [width for column, more in zip(columns, padding, strict=True) for width in (len(column), more)]
        sent = islice(self._inputs[:need].split(widths), 0, None, 2)
        return {name: [*islice(sent, len(part))] for name, part in parts.items()}

    def post(self, slot: Slot, results: RowResults, record: Tensor, behind: int = 0) -> InFlightResults:
        """Copy a step's results into its slot, in one copy, and mark the step's end.

        behind: numbers in the slot that are of another part of the step.
        """
        parts = [results.tokens.reshape(-1), results.accept_len, results.finite.to(torch.int64)]
        if results.candidates is not None:
            parts.append(results.candidates.reshape(-1))
        told = results.proposals
        if told is not None:
            parts.append(_bits(told))
        if results.trees is not None:
            parts.append(results.trees.packed.reshape(-1))
        parts.append(record)
        logprobs, prompt = results.logprobs, results.prompt
        for each in (logprobs, prompt):
            if each is not None:
                parts += [each.ids.reshape(-1), _bits(each.values)]
        end = behind + sum(len(part) for part in parts)
        if end > len(self._results):
            raise CheckError(f"results of a step: need {end} integers, have {len(self._results)} for all its parts")
        packed = self._results[behind:end]
        torch.cat(parts, out=packed)
        values = copy_out(packed, slot.results[behind:end])
        if self._check_level >= 1:
            check_own_memory("tokens", values, packed)
        if slot.done is not None:
            slot.done.record()
        maximum = None if logprobs is None else logprobs.ids.shape[2]
        of_prompt = (0, 0) if prompt is None else (prompt.ids.shape[0], prompt.ids.shape[1])
        rows, width = results.tokens.shape
        drafts = 0 if results.candidates is None else results.candidates.shape[1]
        shape = () if told is None else tuple(told.shape)
        nodes = 0 if results.trees is None else results.trees.nodes
        sizes = rows, width, drafts, shape, nodes, maximum, of_prompt
        return InFlightResults(slot, slot.step, values, *sizes, results.experts)


def copy_out(tensor: Tensor, memory: Tensor) -> Tensor:
    """What outlives the round's buffers: a copy in `memory`, never a view (sgl-23037). It does not wait."""
    return memory.copy_(tensor, non_blocking=True)


def check_own_memory(name: str, handed: Tensor, buffer: Tensor) -> None:
    """Level 1: a result that is handed out has memory of its own (sgl-23037)."""
    if handed.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        raise CheckError(f"result {name}: shares memory with the round's buffers")


def collect(posted: InFlightResults) -> HostResults:
    """Wait for the end of a step, and nothing later, and read its results.

    Raises InvariantError if `max_steps` more, and one, have been launched since: its slot is another's now.
    """
    slot, n, maximum = posted.slot, posted.rows, posted.maximum
    if slot.step != posted.step:
        raise InvariantError(f"step {posted.step} is collected too late: its slot belongs to step {slot.step}")
    if slot.done is not None:
        slot.done.synchronize()
    lines, best = posted.prompt
    end = len(posted.values) - lines * (2 + 2 * best)
    width, drafts = posted.width, posted.drafts
    counts = math.prod(posted.proposals) if posted.proposals else 0
    told = n * (width + 2 + drafts)
    of_trees = n * PackedTrees.width(posted.nodes, width) if posted.nodes else 0
    head = told + counts + of_trees + RECORD
    values = posted.values[:told].tolist()
    tokens, rest = values[: n * width], values[n * width :]
    candidates = rest[2 * n :]
    logprobs = prompt = proposals = trees = None
    if of_trees:
        packed = posted.values[told + counts : told + counts + of_trees]
        trees = PackedTrees(packed.view(n, -1).clone(), posted.nodes)
    if counts:
        proposals = tuple(posted.values[told : told + counts].view(torch.float64).view(posted.proposals).tolist())
    if maximum is not None:
        logprobs = _unpacked(posted.values[head:end], (n, width), maximum)
    if lines:
        prompt = _unpacked(posted.values[end:], (lines,), best)
    return HostResults(
        tokens=[tuple(tokens[i * width : (i + 1) * width]) for i in range(n)],
        accept_len=rest[:n],
        finite=[bool(ok) for ok in rest[n : 2 * n]],
        record=posted.values[head - RECORD : head].tolist(),
        logprobs=logprobs,
        prompt=prompt,
        candidates=[tuple(candidates[i * drafts : (i + 1) * drafts]) for i in range(n)] if drafts else [],
        proposals=proposals,
        trees=trees,
        experts=posted.experts,
    )


def _bits(numbers: Tensor) -> Tensor:
    """Floating-point numbers as integers, [n] int64."""
    return numbers.to(torch.float64).view(torch.int64).reshape(-1)


def _unpacked(packed: Tensor, shape: tuple[int, ...], maximum: int) -> PathLogprobs:
    """Ids of the best, then log-probabilities, of as many tokens as `shape` has, in memory of their own."""
    count = math.prod(shape)
    ids, bits = packed.split([count * maximum, count * (2 + maximum)])
    return PathLogprobs(bits.view(torch.float64).view(*shape, 2 + maximum).clone(), ids.view(*shape, maximum).clone())
