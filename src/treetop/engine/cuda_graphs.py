"""Captured rounds: three CUDA graphs a bucket, shape and choice, replayed back to back without a host sync.

All graphs share one memory pool: what passes between phases lives in `RoundBuffers`, outside it, and nothing that
outlives a replay is a view of it.
"""

from typing import cast

import torch

from treetop.attention.contract import HostPlanned, RoundExtents
from treetop.engine.device import Device
from treetop.engine.rounds import RoundKey, phases_of
from treetop.types.phase import Phase


class CudaGraphs:
    """Captures a key the first time it is asked for, on a batch of dummy rows, which leaves no trace in any state."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[RoundKey, dict[Phase, torch.cuda.CUDAGraph]] = {}

    def launch(self, key: RoundKey, bound: int) -> None:
        assert bound <= self._device.layout.max_committed
        graphs = self._graphs.get(key)
        if graphs is None:
            graphs = self._graphs[key] = self.capture(key)
        plan_host_extents(self._device, key)
        for graph in graphs.values():
            graph.replay()

    def capture(self, key: RoundKey) -> dict[Phase, torch.cuda.CUDAGraph]:
        """Run the phases twice, which compiles and sizes everything, then capture each with the largest bound."""
        device, bound = self._device, self._device.layout.max_committed
        rows = device.buffers.rows.clone()
        device.buffers.rows.fill_(device.layout.dummy_row)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                for function in phases_of(device).values():
                    function(device, key, bound)
        torch.cuda.current_stream().wait_stream(stream)
        graphs = {}
        for phase, function in phases_of(device).items():
            graphs[phase] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[phase], pool=self._pool):
                function(device, key, bound)
        device.buffers.rows.copy_(rows)
        return graphs


def plan_host_extents(device: Device, key: RoundKey) -> None:
    """For a backend that plans on the host: read the lengths of a round about to run, which waits for the device."""
    if device.backend.capabilities.needs_host_extents:
        shape = key.shape
        queries = {
            Phase.DRAFT: shape.topk,
            Phase.VERIFY: shape.num_draft_tokens,
            Phase.EXTEND: shape.commit_width,
        }
        round = RoundExtents(device.buffers.rows[: key.bucket], device.state.committed, queries)
        cast(HostPlanned, device.backend).plan_round(round)
