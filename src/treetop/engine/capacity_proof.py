"""The start-up proofs: acceptance and rounds of padding alone, and of the worst batch that can be admitted."""

import torch

from treetop.engine.graphs import RoundLauncher
from treetop.engine.handover import StagingSlots, export_chunks, import_chunks
from treetop.engine.model_runner import ModelRunner
from treetop.engine.rounds import RoundKey, draft_phase
from treetop.types.errors import CheckError
from treetop.types.ids import Row
from treetop.types.kv_chunk import KVChunk
from treetop.types.layout import SpecShape
from treetop.types.messages import Export, ExportPlan, Import, ImportPlan
from treetop.types.sampling import Choice


def prove_capacity(runner: ModelRunner, launcher: RoundLauncher) -> None:
    """Run every shape with all rows as long as they can get, on the null page, and put the state back.

    Memory for that is in the account before: a GPU has tried it (`engine.worst_steps`), a CPU counts it (`step_bytes`).
    Raises CheckError where a buffer was sized by another formula than the one that fills it (sgl-27338, sgl-26972): no
    option can cause that.
    """
    layout, state = runner.layout, runner.state
    need = layout.pages_for(layout.max_context + layout.max_in_flight * layout.commit_width)
    if need > layout.page_columns:
        raise CheckError(f"page_columns: need {need} for the rounds at the context wall, have {layout.page_columns}")
    tables = {name: table.data.clone() for name, table in state.page_tables.items()}
    for table in state.page_tables.values():
        table.data.zero_()
    for shape in layout.shapes:
        runner.buffers.rows.copy_(runner.buffers.rows.new_tensor(range(layout.max_requests)))
        state.committed[: layout.max_requests] = layout.max_committed
        launcher.launch(RoundKey(layout.max_requests, shape, Choice.GREEDY), layout.max_committed)
    runner.probes.raise_if_fired()
    texts = [] if state.text is None else [state.text]
    null_pages = [pool.data[:, : layout.page_size] for pool in runner.pools.values()]  # nothing else was written
    for tensor in (*state.record.tables.values(), *texts, *null_pages):
        tensor.zero_()
    for name, table in state.page_tables.items():
        table.data.copy_(tables[name])


def prove_padding(runner: ModelRunner, launcher: RoundLauncher) -> None:
    """Run the dummy row alone: its rounds leave no trace.

    Raises CheckError if something changed in the dummy row's state or in a null page, all of which are zero.
    """
    layout = runner.layout
    bucket = layout.buckets[0]
    runner.buffers.rows.fill_(layout.dummy_row)
    for shape in layout.shapes:
        launcher.launch(RoundKey(bucket, shape, Choice.GREEDY), layout.max_committed)
    runner.probes.raise_if_fired()
    _check_untouched(runner, "padded batch: a round of the dummy row")


@torch.inference_mode()
def prove_acceptance(runner: ModelRunner) -> None:
    """The dummy row alone accepts the worst tree it can have, which is to be shown before any step runs on it.

    Raises CheckError if a path leaves its tree.
    """
    bucket = runner.layout.buckets[0]
    runner.buffers.rows.fill_(runner.layout.dummy_row)
    for shape in runner.layout.shapes:
        if shape.num_steps and runner.simulate_accept_length is None:
            _prove_acceptance_of(shape, runner, bucket)


def prove_handover(runner: ModelRunner, slots: StagingSlots) -> None:
    """Pack and unpack the dummy row, and with it compile what that takes.

    Raises CheckError if something changed in the dummy row's state or in a null page.
    """
    dummy, chunk = Row(runner.layout.dummy_row), KVChunk(0, 1, 1)
    export_chunks(runner, slots, ExportPlan((), (), (Export(dummy, 0, chunk),)))
    numbers = runner.state.committed.new_zeros((1, slots.spec.num_own))
    plan = ImportPlan((), (), (), (Import(dummy, 0, chunk, ()),))
    import_chunks(runner, slots, plan, numbers, numbers[:, 0], runner.state.committed.new_tensor([dummy]))
    _check_untouched(runner, "KV transfer: a chunk of the dummy row")


def _check_untouched(runner: ModelRunner, what: str) -> None:
    """All of the dummy row's state and of the null pages is zero."""
    layout, state, dummy = runner.layout, runner.state, runner.layout.dummy_row
    tables = [table.data for table in state.page_tables.values()]
    kept = [tensor[dummy] for tensor in (*state.record.tables.values(), *tables)]
    kept += [pool.data[:, : layout.page_size] for pool in runner.pools.values()]
    if any(bool(tensor.any()) for tensor in kept):
        raise CheckError(f"{what} changed its state or a null page")


def _prove_acceptance_of(shape: SpecShape, runner: ModelRunner, bucket: int) -> None:
    """A dummy row's siblings are alike, and weights may make the target want them all: its path is a line of its tree.

    The tree is grown as in a round; then every node is token 0, and so is the target's choice after each.
    """
    draft_phase(runner, RoundKey(bucket, shape, Choice.GREEDY), runner.layout.max_committed)
    tree, accepted = runner.buffers.tree_of(bucket, shape), runner.buffers.accepted_of(bucket, shape)
    tree.tokens.zero_()
    nothing = runner.target.embedding.new_zeros((bucket, shape.num_draft_tokens, runner.target.config.hidden_size))
    try:
        runner.ops.accept(runner.ops.greedy(runner.target.piece(nothing)), tree, accepted, None)  # all logits are 0
        path = accepted.path[0, : int(accepted.accept_len[0]) + 1].tolist()
    except (IndexError, RuntimeError) as error:
        raise CheckError(f"padded batch: the dummy row's tree of {shape} cannot be accepted: {error}") from error
    parent, depth = tree.parent[0].tolist(), tree.depth[0].tolist()
    line = [depth.index(max(depth))]  # the first of the deepest nodes, and up
    while line[-1] != 0:
        line.append(parent[line[-1]])
    if path != line[::-1]:
        raise CheckError(f"padded batch: the dummy row accepts {path} in a tree of {shape}, expected {line[::-1]}")
