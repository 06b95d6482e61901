"""The start-up proof: the real round runs once on the worst batch that can be admitted."""

import torch

from treetop.engine.device import Device
from treetop.engine.graphs import RoundLauncher
from treetop.engine.rounds import RoundKey
from treetop.types.errors import CheckError
from treetop.types.sampling import Choice

CPU_ROWS = 8
"""Rows (a bucket) that the proof runs on a CPU, where PyTorch's attention gathers each row's whole context."""


def prove_capacity(device: Device, launcher: RoundLauncher) -> None:
    """Run every shape with rows as long as they can get, on the null page, and put the state back.

    All rows on a GPU, which has tried them before the pools were sized. On a CPU the last of the tables: what a row
    needs does not depend on how many there are, and memory for all of them is in the account (`round_bytes`).
    Raises CheckError where a buffer was sized by another formula than the one that fills it (sgl-27338, sgl-26972): no
    option can cause that.
    """
    layout, state = device.layout, device.state
    need = layout.pages_for(layout.max_context + layout.lag * layout.commit_width)
    if need > layout.page_columns:
        raise CheckError(f"page_columns: need {need} for the rounds at the context wall, have {layout.page_columns}")
    tables = {name: table.data.clone() for name, table in state.page_tables.items()}
    for table in state.page_tables.values():
        table.data.zero_()
    rows = device.buffers.rows
    count = layout.max_requests if rows.is_cuda else min(layout.max_requests, CPU_ROWS)
    for shape in layout.shapes:
        rows[:count] = torch.arange(layout.max_requests - count, layout.max_requests, device=rows.device)
        state.committed[: layout.max_requests] = layout.max_committed
        launcher.launch(RoundKey(count, shape, Choice.GREEDY), layout.max_committed)
    device.probes.raise_if_fired()
    draft = [state.draft.tokens, state.draft.logprob, state.draft.hidden] if state.draft is not None else []
    null_pages = [pool.data[:, : layout.page_size] for pool in device.pools.values()]  # nothing else was written
    for tensor in (state.committed, state.root, *draft, *null_pages):
        tensor.zero_()
    for name, table in state.page_tables.items():
        table.data.copy_(tables[name])
