"""The start-up proof: the real round runs once on the worst batch that can be admitted."""

from treetop.engine.device import Device
from treetop.engine.graphs import RoundLauncher
from treetop.engine.rounds import RoundKey
from treetop.types.errors import CheckError
from treetop.types.sampling import Choice


def prove_capacity(device: Device, launcher: RoundLauncher) -> None:
    """Run every shape with all rows as long as they can get, on the null page, and put the state back.

    Memory for that is in the account before: a GPU has tried it (`engine.trial`), a CPU counts it (`step_bytes`).
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
    for shape in layout.shapes:
        device.buffers.rows.copy_(device.buffers.rows.new_tensor(range(layout.max_requests)))
        state.committed[: layout.max_requests] = layout.max_committed
        launcher.launch(RoundKey(layout.max_requests, shape, Choice.GREEDY), layout.max_committed)
    device.probes.raise_if_fired()
    draft = [state.draft.tokens, state.draft.logprob, state.draft.hidden] if state.draft is not None else []
    null_pages = [pool.data[:, : layout.page_size] for pool in device.pools.values()]  # nothing else was written
    for tensor in (state.committed, state.root, *draft, *null_pages):
        tensor.zero_()
    for name, table in state.page_tables.items():
        table.data.copy_(tables[name])
