"""Faults of mixed steps by name (`tests/engine/test_mixed.py`, `test_packed.py`): how a prefill and a round may be
joined wrong.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from treetop.attention.mixed import MixedAttention, Part
from treetop.engine.model_runner import ModelRunner
from treetop.engine.prefill import PrefillBatch
from treetop.engine.prompt_blocks import PromptBuffers, column_stride
from treetop.types.layout import Layout
from treetop.types.messages import Chunk, MixedPlan, StepPlan
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch


def _for_one_part(real: Callable[..., None]) -> Callable[..., None]:
    """Results of a step have room for those of a prefill or of a round."""

    def made(self: Any, layout: Layout, *args: Any) -> None:
        real(self, replace(layout, mixed=False), *args)

    return made


def _in_the_rounds_list(real: Callable[..., Any]) -> Callable[..., Any]:
    """A prefill's row list is written where steps apart have it."""

    def mixed_verify(runner: ModelRunner, batch: PrefillBatch, *args: Any) -> Any:
        rows = runner.buffers.rows[: len(batch.rows)]
        rows.copy_(batch.rows)
        return real(runner, replace(batch, rows=rows), *args)

    return mixed_verify


def _before_its_chunk(real: Callable[..., Any]) -> Callable[..., Any]:
    """The extent of a chunk ends where it starts."""

    def span(positions: Tensor, valid: Tensor, kv_len: Tensor) -> Any:
        return real(positions, valid, kv_len - valid.sum(1))

    return span


def _nodes_first(real: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """What the forward gave the nodes' tokens is taken from its beginning, where the prompts' is."""

    def divided(output: Any, parts: tuple[Part, ...]) -> list[Any]:
        return real(output, parts[::-1])[::-1]

    return divided


def _one_width(real: property) -> Callable[[Part, Tensor], Tensor]:
    """Tokens of a part are given to its rows in turn."""

    def of(self: Part, flat: Tensor) -> Tensor:
        return flat.reshape(self.width, self.rows, *flat.shape[2:]).transpose(0, 1).contiguous()

    return of


def _writes_what_it_reads(real: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """A layer that reads another's K/V stores what it has not computed over them."""

    def writes(self: MixedAttention, *args: Any) -> Sequence[Any]:
        self._written.clear()
        return real(self, *args)

    return writes


def _its_own_round(real: Callable[..., StepPlan | None]) -> Callable[..., StepPlan | None]:
    """Prompts that end in the chunk decode in the same step."""

    def prompts(self: Any, *args: Any) -> StepPlan | None:
        plan = real(self, *args)
        if not isinstance(plan, MixedPlan):
            return plan
        ended = tuple(chunk.row for chunk in plan.prefill.chunks if chunk.next_token is None)
        return replace(plan, round=replace(plan.round, rows=(*plan.round.rows, *ended)[: self._layout.max_requests]))

    return prompts


MIXED_FAULTS = by_name(
    Fault(
        "mixed-results-of-one-part",
        "host memory of a step's results is sized for a prefill or a round (sgl-27338)",
        (Patch("treetop.engine.staging:StagingBuffers.__init__", _for_one_part),),
        "results of a step: need",
        1,
    ),
    Fault(
        "mixed-rows-in-one-list",
        "the row list of a prefill is written over its round's (sgl-23037)",
        (Patch("treetop.engine.engine:mixed_verify", _in_the_rounds_list),),
        "the rows of its prefill lie where",
        1,
    ),
    Fault(
        "mixed-row-in-both",
        "a prompt that ends in a step's chunk decodes in its round",
        (Patch("treetop.scheduler.scheduler:Scheduler._prompts", _its_own_round),),
        "a row appears twice",
        1,
    ),
    Fault(
        "mixed-extent-without-chunk",
        "the extent of a chunk lacks its own tokens (sgl-26512)",
        (Patch("treetop.engine.prefill:_Span", _before_its_chunk),),
        "oracle",
        None,
    ),
    Fault(
        "mixed-parts-turned",
        "what the forward gives nodes is read where prompts' tokens are",
        (Patch("treetop.engine.mixed:_divided", _nodes_first),),
        "oracle",
        None,
    ),
    Fault(
        "mixed-tokens-across-rows",
        "tokens of a part go to its rows in turn, not row by row",
        (Patch("treetop.attention.mixed:Part.of", _one_width),),
        "oracle",
        None,
    ),
    Fault(
        "mixed-reader-writes",
        "a layer that reads another's K/V stores over them",
        (Patch("treetop.attention.mixed:MixedAttention._writes", _writes_what_it_reads),),
        "oracle",
        None,
    ),
)


def _own_state(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Every block changes its row's state as if it were a chunk."""

    def numbers(chunks: Sequence[Chunk], size: int, width: int, *others: Any) -> list[int]:
        made, stride = real(chunks, size, width, *others), column_stride(size, width)
        return [*made[:stride], *made[:stride], *made[2 * stride :]]

    return numbers


def _behind_the_row_alone(real: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Blocks of a chunk all stand where it starts."""

    def numbers(chunks: Sequence[Chunk], size: int, width: int, *others: Any) -> list[int]:
        made, stride = real(chunks, size, width, *others), column_stride(size, width)
        return [*made[: 2 * stride], *[0] * stride, *made[3 * stride :]]

    return numbers


def _smaller(real: Callable[..., Any]) -> Callable[..., Any]:
    """Buffers are sized by the smallest batch (sgl-27338)."""

    def made(sizes: Sequence[tuple[int, int]], zeros: Any) -> Any:
        return real([(size // 4, width) for size, width in sizes], zeros)

    return made


def _live_blocks_alone(real: Callable[..., None]) -> Callable[..., None]:
    """What nobody has keeps the rows of the step before (sgl-23037)."""

    def write(self: PromptBuffers, size: int, width: int, numbers: Tensor) -> None:
        before = self.lines_of(size, width)
        held = [each.clone() for each in before]
        real(self, size, width, numbers)
        nobody = before.query_len == 0
        for line, old in zip(before, held, strict=True):
            line[nobody] = old[nobody]

    return write


def _not_kept(real: Callable[..., None]) -> Callable[..., None]:
    """First tokens stay in memory of the graph, and the host reads what the buffer held."""

    def keep(self: PromptBuffers, token: Tensor, finite: Tensor) -> None:
        real(self, token[:0], finite)

    return keep


PACKED_FAULTS = by_name(
    Fault(
        "packed-blocks-change-state",
        "blocks before a chunk's last count as chunks of their own",
        (Patch("treetop.engine.engine:block_numbers", _own_state),),
        "oracle",
        None,
    ),
    Fault(
        "packed-blocks-without-offset",
        "a block's extent lacks the blocks of its chunk before it (sgl-26512)",
        (Patch("treetop.engine.engine:block_numbers", _behind_the_row_alone),),
        "oracle",
        None,
    ),
    Fault(
        "packed-buffers-of-the-smallest",
        "inputs of prompts are sized by another formula than fills them (sgl-27338)",
        (Patch("treetop.engine.buffers:make_prompt_buffers", _smaller),),
        "prompts in blocks: need",
        1,
    ),
    Fault(
        "packed-stale-blocks",
        "padding of a batch keeps rows, offsets and counts of the step before (sgl-23037)",
        (Patch("treetop.engine.prompt_blocks:PromptBuffers.write", _live_blocks_alone),),
        "oracle",
        None,
    ),
    Fault(
        "packed-first-tokens-not-kept",
        "first tokens are read where no replay has written them",
        (Patch("treetop.engine.prompt_blocks:PromptBuffers.keep", _not_kept),),
        "token: row",
        1,
    ),
)
