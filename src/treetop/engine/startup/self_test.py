"""The start-up self-tests: acceptance and rounds of padding alone, and of the worst batch that can be admitted."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from treetop.engine.features.learning import Learning
from treetop.engine.kv_transfer import StagingSlots, export_chunks, import_chunks
from treetop.engine.model_runner import ModelRunner
from treetop.engine.prompt_blocks import block_numbers
from treetop.engine.rounds import RoundKey, RoundLauncher, draft_phase, mixed_verify
from treetop.engine.startup.profile_run import dummy_batch
from treetop.kernels.kv import moved
from treetop.kernels.tree.accept import MaskedDrafts
from treetop.kernels.tree.calibration import make_calibration
from treetop.kernels.tree.grow import make_growth
from treetop.kernels.tree.learn import Observed
from treetop.types.errors import CheckError
from treetop.types.ids import Row
from treetop.types.kv_chunk import KVChunk
from treetop.types.layout import SpecShape
from treetop.types.messages import Chunk, Export, ExportPlan, Import, ImportPlan
from treetop.types.sampling import CLASSES, SamplingMode
from treetop.types.tree import Accepted


def self_test_capacity(runner: ModelRunner, launcher: RoundLauncher) -> None:
    """Run every shape with all rows as long as they can get, on the null page, and put the state back; mixed steps too,
    whose largest chunk is the last row's, at the end of the context. Captured ones have it in every block.

    Memory for that is in the account before: a GPU has tried it (`engine.startup.profile_run`), a CPU counts it
    (`step_bytes`). Raises CheckError where a buffer was sized by another formula than the one that fills it (sgl-27338,
    sgl-26972): no option can cause that.
    """
    layout, state = runner.layout, runner.state
    need = layout.pages_for(layout.max_context + layout.max_in_flight * layout.commit_width)
    if need > layout.page_columns:
        raise CheckError(f"page_columns: need {need} for the rounds at the context wall, have {layout.page_columns}")
    keys = [RoundKey(layout.most_rows(shape), shape, SamplingMode.GREEDY) for shape in layout.shapes]
    mixed = [replace(key, mixed=True) for key in keys if layout.mixed]
    mixed += [
        replace(key, prompts=size, block=layout.prompt_block)
        for key in keys
        for size in layout.prompt_sizes
        if key.bucket in layout.coarse_buckets and size < layout.max_context
    ]
    fitting = [(size, block) for size, block in layout.prefill_sizes if size < layout.max_context]
    mixed += [RoundKey.of_prompts(size, block, SamplingMode.GREEDY) for size, block in fitting[-2:]]
    if layout.max_deferred:
        keys.append(RoundKey.of_catch_up(layout.max_requests))
    with on_null_pages(runner):
        for key in keys + mixed:
            runner.buffers.row_lists.copy_(runner.buffers.rows.new_tensor(range(layout.max_requests)))
            state.committed[: layout.max_requests] = layout.max_committed
            if state.deferred is not None:
                state.deferred.count[: layout.max_requests] = layout.max_deferred if key.catches_up else 0
            for each in state.states.groups.values():
                each.count[: layout.max_requests] = layout.commit_width
            if key.prompts:
                _fill_blocks(runner, key.prompts, key.block)
            launcher.launch(key, layout.max_committed, partial(_longest_chunk, runner, key) if key.mixed else None)
        runner.probes.raise_if_fired()


def _fill_blocks(runner: ModelRunner, size: int, block: int) -> None:
    """Prompts of a captured round: one chunk of the last row, which ends the context and leaves its place there."""
    layout, row = runner.layout, runner.layout.max_requests - 1
    chunk = Chunk(Row(row), layout.max_context - size, (0,) * size, None)
    numbers = block_numbers([chunk], size, block, layout.dummy_row)
    runner.buffers.prompts.write(size, block, runner.buffers.row_lists.new_tensor(numbers))
    runner.buffers.row_lists[:, row] = layout.dummy_row
    runner.state.committed[row] = chunk.start


def _longest_chunk(runner: ModelRunner, key: RoundKey) -> None:
    """A mixed round's forward with the largest chunk of one row, which gives its place in the round to the dummy."""
    layout, row = runner.layout, runner.layout.max_requests - 1
    width = layout.prefill_widths[1]
    start = layout.max_context - width
    batch = dummy_batch(runner, key.choice, 1, width)
    batch.rows.fill_(row)
    batch.query_len.fill_(width)
    runner.buffers.row_lists[:, row] = layout.dummy_row
    runner.state.committed[row] = start
    mixed_verify(runner, batch, key, layout.max_committed)


@contextmanager
def on_null_pages(runner: ModelRunner) -> Iterator[None]:
    """Inside every row's pages are the null page, and rows may stand anywhere; afterwards all is as it was at start."""
    layout, state = runner.layout, runner.state
    tables = {name: table.data.clone() for name, table in state.page_tables.items()}
    for table in state.page_tables.values():
        table.data.zero_()
    yield
    null_pages = [pool.data[:, : layout.page_size] for pool in runner.pools.values()]  # nothing else was written
    for tensor in (*state.written, *null_pages):
        tensor.zero_()
    for name, table in state.page_tables.items():
        table.data.copy_(tables[name])


def self_test_padding(runner: ModelRunner, launcher: RoundLauncher) -> None:
    """Run the dummy row alone: its rounds leave no trace.

    Raises CheckError if something changed in the dummy row's state or in a null page, all of which are zero.
    """
    layout = runner.layout
    bucket = layout.buckets[0]
    runner.buffers.row_lists.fill_(layout.dummy_row)
    for shape in layout.shapes:
        key = RoundKey(bucket, shape, SamplingMode.GREEDY)
        launcher.launch(key, layout.max_committed)
        if layout.mixed:
            batch, mixed = dummy_batch(runner, key.choice, 1, 1), replace(key, mixed=True)
            between = partial(mixed_verify, runner, batch, mixed, layout.max_committed)
            launcher.launch(mixed, layout.max_committed, between)
        for size in layout.prompt_sizes:
            runner.buffers.prompts.clear(size, layout.prompt_block, layout.dummy_row)
            launcher.launch(replace(key, prompts=size, block=layout.prompt_block), layout.max_committed)
    for size, block in layout.prefill_sizes[:2]:
        runner.buffers.prompts.clear(size, block, layout.dummy_row)
        launcher.launch(RoundKey.of_prompts(size, block, SamplingMode.GREEDY), layout.max_committed)
    if layout.max_deferred:
        launcher.launch(RoundKey.of_catch_up(bucket), layout.max_committed)
    runner.probes.raise_if_fired()
    _check_untouched(runner, "padded batch: a round of the dummy row")


@torch.inference_mode()
def self_test_acceptance(runner: ModelRunner) -> None:
    """The dummy row alone accepts the worst tree it can have, which is to be shown before any step runs on it.

    Raises CheckError if a path leaves its tree.
    """
    bucket = runner.layout.buckets[0]
    runner.buffers.row_lists.fill_(runner.layout.dummy_row)
    for shape in runner.layout.shapes:
        if shape.num_steps and runner.simulation is None:
            _self_test_acceptance_of(shape, runner, bucket)


@torch.inference_mode()
def self_test_learning(runner: ModelRunner, learning: Learning) -> None:
    """Rows learn from their own trees: each of a few whose target chooses another rank at every node.

    Raises CheckError if what was learned is not what their choices say, class by class.
    """
    for shape in runner.layout.shapes:
        if shape.num_steps:
            _self_test_learning_of(shape, runner, learning)


def self_test_kv_transfer(runner: ModelRunner, slots: StagingSlots) -> None:
    """Pack and unpack the dummy row, and with it compile what that takes.

    Raises CheckError if something changed in the dummy row's state or in a null page.
    """
    dummy, chunk = Row(runner.layout.dummy_row), KVChunk(0, 1, 1)
    export_chunks(runner, slots, ExportPlan((), (), (Export(dummy, 0, chunk),)))
    numbers = runner.state.committed.new_zeros((1, slots.spec.num_own))
    plan = ImportPlan((), (), (), (Import(dummy, 0, chunk, ()),))
    import_chunks(runner, slots, plan, numbers, numbers[:, 0], runner.state.committed.new_tensor([dummy]))
    _check_untouched(runner, "KV transfer: a chunk of the dummy row")


def _self_test_learning_of(shape: SpecShape, runner: ModelRunner, learning: Learning) -> None:
    """Candidates in order, as many as the tree holds; those that have children are the first k of their level."""
    device, rows, k, nodes = runner.buffers.rows.device, CLASSES, shape.topk, shape.num_draft_tokens
    long, n = torch.int64, shape.num_candidates
    calibration = make_calibration(shape.num_steps, k, partial(_zeros_on, device))
    growth = make_growth(shape, rows, calibration, partial(_zeros_on, device))
    growth.classes.copy_(torch.arange(rows))
    growth.tokens.copy_(torch.arange(rows * n).view(rows, n))
    growth.chosen.copy_(torch.arange(-1, nodes - 1))
    firsts = [0, *(k + level * k * k for level in range(shape.num_steps - 1))]
    parents = [-1, *(first + slot for first in firsts for slot in range(k))]
    growth.parents.copy_(torch.tensor(parents))
    choice, chosen = torch.full((rows, nodes), -1), torch.zeros(calibration.chosen.shape)
    for group, parent in enumerate(parents[:-k]):
        if parent + 1 < nodes:
            for row in range(rows):
                rank = (row + group) % k
                choice[row, parent + 1] = row * n + group * k + rank
                chosen[row, 0 if parent < 0 else 1 + (group - 1) // k, rank] += 1
    wide, column = torch.zeros((rows, 1), dtype=long, device=device), torch.zeros(rows, dtype=long, device=device)
    finite = torch.ones(rows, dtype=torch.bool, device=device)
    accepted = Accepted(wide, column, wide, column, finite, choice.to(device))
    observed = Observed(torch.arange(rows, device=device), rows, None, learning.makes_logits)
    runner.ops.learn(calibration, growth, accepted, observed)
    if not torch.equal(calibration.chosen.cpu(), chosen):
        raise CheckError(f"calibration: what rows of a tree of {shape} learned is not what the target chose in them")


def _zeros_on(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _check_untouched(runner: ModelRunner, what: str) -> None:
    """All of the dummy row's state and of the null pages is zero."""
    layout, state, dummy = runner.layout, runner.state, runner.layout.dummy_row
    tables = [table.data for table in state.page_tables.values()]
    kept = [tensor[dummy] for tensor in (*state.written, *tables)]
    kept += [moved(pool.data[:, : layout.page_size]) for pool in runner.pools.values()]
    if any(bool(tensor.any()) for tensor in kept):
        raise CheckError(f"{what} changed its state or a null page")


def _self_test_acceptance_of(shape: SpecShape, runner: ModelRunner, bucket: int) -> None:
    """A dummy row's siblings are alike, and weights may make the target want them all: its path is a line of its tree.

    The tree is grown as in a round; then every node is token 0, and so is the target's choice after each.
    """
    draft_phase(runner, RoundKey(bucket, shape, SamplingMode.GREEDY), runner.layout.max_committed)
    tree, accepted = runner.buffers.tree_of(bucket, shape), runner.buffers.accepted_of(bucket, shape)
    tree.tokens.zero_()
    nothing = runner.target.embedding.new_zeros((bucket, shape.num_draft_tokens, runner.target.config.hidden_size))
    masked_drafts = MaskedDrafts(runner.buffers.rows[:bucket], runner.buffers.draft_rows[:bucket], None)
    try:
        choice = runner.ops.greedy(torch.zeros_like(runner.target.piece(nothing)))
        runner.ops.accept(choice, tree, accepted, None, masked_drafts)
        path = accepted.path[0, : int(accepted.accept_len[0]) + 1].tolist()
    except (IndexError, RuntimeError) as error:
        raise CheckError(f"padded batch: the dummy row's tree of {shape} cannot be accepted: {error}") from error
    parent, depth = tree.parent[0].tolist(), tree.depth[0].tolist()
    line = [depth.index(max(depth))]  # the first of the deepest nodes, and up
    while line[-1] != 0:
        line.append(parent[line[-1]])
    if path != line[::-1]:
        raise CheckError(f"padded batch: the dummy row accepts {path} in a tree of {shape}, expected {line[::-1]}")
