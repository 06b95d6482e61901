"""The worst steps, tried before the pools are sized: what they take at their peak is left free beside the pools."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from treetop.engine.cuda_graphs import Run
from treetop.engine.model_runner import ModelRunner
from treetop.engine.prefill import PrefillBatch, prefill
from treetop.engine.prompt_logprobs import PromptTokens
from treetop.engine.rounds import Eager, RoundKey, mixed_verify, run_phases
from treetop.types.layout import Layout
from treetop.types.sampling import SamplingMode


@torch.inference_mode()
def peak_bytes(runner: ModelRunner) -> int:
    """Bytes that the worst prefill, alone or in a mixed step, and the worst round reserve on a GPU, added up.

    They run on dummy rows, which leaves no trace in any state. They are added, not compared, for the memory of
    captured rounds stays theirs while a prefill runs. What they compile and load is left in place: the driver's part
    of it is then no longer counted as free.
    """
    round, *prefills = map(_peak, profile_steps(runner, SamplingMode.LOGPROBS))
    return round + max(prefills)


def profile_steps(runner: ModelRunner, choice: SamplingMode) -> tuple[Run, ...]:
    """The worst round, prefill and mixed step of those that choose tokens so, on dummy rows. LOGPROBS takes most."""
    layout, prefill = runner.layout, partial(dummy_prefill, runner)
    rows, width = worst_prefill(layout)
    steps = [partial(_round, runner, choice), partial(prefill, choice, rows, width)]
    for blocks, block in layout.largest_in_blocks:  # more lines, of which no more have logits
        steps.append(partial(prefill, SamplingMode.SAMPLE, blocks, block, ends=min(blocks, layout.max_requests)))
    if layout.mixed:
        steps.append(partial(_mixed, runner, choice, rows, width))
    return tuple(steps)


def worst_prefill(layout: Layout) -> tuple[int, int]:
    """(rows, width) of the largest padded prefill batch, of several the one with the most rows, each with its logits.

    A chunk holds its padding too.
    """
    return max(layout.prefill_widths.items(), key=lambda shape: (shape[0] * shape[1], shape[0]))


def _peak(run: Run) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def dummy_prefill(
    runner: ModelRunner, choice: SamplingMode, rows: int, width: int, ends_prompts: bool = True, ends: int | None = None
) -> None:
    """A prefill step of dummy rows; see `dummy_batch`."""
    prefill(runner, replace(dummy_batch(runner, choice, rows, width, ends), ends_prompts=ends_prompts))


def dummy_batch(
    runner: ModelRunner, choice: SamplingMode, rows: int, width: int, ends: int | None = None
) -> PrefillBatch:
    """Of a prefill step of dummy rows, of `width` tokens each, all of them padding. ends: as `PrefillBatch.num_ends`;
    the draft reads a token behind each other line, too.
    """
    dummies = runner.buffers.rows.new_full((rows,), runner.layout.dummy_row)
    next_token = dummies.new_zeros(rows)
    next_token[:ends].fill_(-1)
    return PrefillBatch(
        rows=dummies,
        ends=dummies,
        offset=dummies.new_zeros(rows),
        tokens=dummies.new_zeros((rows, width)),
        query_len=dummies.new_zeros(rows),
        next_token=next_token,
        draft_rows=dummies,
        max_kv_len=runner.layout.max_committed,
        choice=choice,
        prompt=_prompt_tokens(runner, dummies, rows * width) if choice is SamplingMode.LOGPROBS else None,
        num_ends=ends,
    )


def _prompt_tokens(runner: ModelRunner, dummies: Tensor, maximum: int) -> PromptTokens:
    """As many as are looked at at once, of `maximum` that a batch has."""
    places = dummies.new_zeros(min(runner.layout.prompt_lines, maximum))
    return PromptTokens(places, places)


def _round(runner: ModelRunner, choice: SamplingMode) -> None:
    layout = runner.layout
    runner.buffers.row_lists.fill_(layout.dummy_row)
    keys = [RoundKey(layout.most_rows(shape), shape, choice) for shape in layout.shapes]
    for size, block in layout.prefill_sizes[-1:]:  # captured, too: the most tokens, and lines whose logits are made
        runner.buffers.prompts.clear(size, block, layout.dummy_row)
        keys.append(RoundKey.of_prompts(size, block, SamplingMode.SAMPLE))
    for key in (*keys, RoundKey.of_catch_up(layout.max_requests)) if layout.max_deferred else keys:
        run_phases(runner, key, layout.max_committed)


def _mixed(runner: ModelRunner, choice: SamplingMode, rows: int, width: int) -> None:
    layout, batch = runner.layout, dummy_batch(runner, choice, rows, width)
    runner.buffers.row_lists.fill_(layout.dummy_row)
    for shape in layout.shapes:
        key = RoundKey(layout.most_rows(shape), shape, choice, mixed=True)
        Eager(runner).launch(key, layout.max_committed, partial(mixed_verify, runner, batch, key, layout.max_committed))
