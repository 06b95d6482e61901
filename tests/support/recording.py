"""An attention backend that answers as another does and remembers what it was told, and hooks on a drafter."""

from dataclasses import dataclass, field, replace

import torch

from treetop.engine.rounds import Eager
from treetop.kernels.attention.metadata import AttentionMetadata


@dataclass
class Planned:
    """One phase in one KV group: who sees what, and the tail's keys in the first layer."""

    metadata: AttentionMetadata
    inner: object
    tail_keys: torch.Tensor | None = None


@dataclass
class RecordingBackend:
    """Wraps a backend; `plans` holds the phases of a step in their order."""

    inner: object
    name: str = "recording"
    plans: list[Planned] = field(default_factory=list)

    def begin(self, metadata):
        return self.inner.begin(metadata)

    def plan(self, begun, metadata):
        table = replace(metadata.table, data=metadata.table.data.clone())
        frozen = replace(metadata, table=table, kv_len=metadata.kv_len.clone())
        self.plans.append(Planned(frozen, self.inner.plan(begun, metadata)))
        return self.plans[-1]

    def prefix_tail(self, q, kv, plan, tail, scale, sinks=None):
        if plan.tail_keys is None:
            plan.tail_keys = tail.k.clone()
        return self.inner.prefix_tail(q, kv, plan.inner, tail, scale, sinks)

    def causal(self, q, kv, plan, scale, sinks=None):
        return self.inner.causal(q, kv, plan.inner, scale, sinks)


@dataclass
class HeadCalls:
    """What the draft head was asked and answered since the last `clear`."""

    forwards: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # tokens, hidden, out
    proposals: list[tuple[list, list]] = field(default_factory=list)  # tokens, logprob

    def clear(self) -> None:
        self.forwards.clear()
        self.proposals.clear()


def record(llm) -> tuple[RecordingBackend, HeadCalls]:
    """From now on the engine runs on a recording backend and its drafter is watched."""
    device = llm.engine.runner
    backend, calls = RecordingBackend(device.backend), HeadCalls()
    llm.engine.runner = replace(device, backend=backend)
    llm.engine.launcher = Eager(llm.engine.runner)
    drafter = device.drafter
    forward, propose = drafter.forward, drafter.propose

    def recorded_forward(tokens, hidden, positions, attend, last=None):
        out = forward(tokens, hidden, positions, attend)
        calls.forwards.append((tokens.clone(), hidden.clone(), out.clone()))
        return out if last is None else last.of(out)

    def recorded_propose(nodes, k, inv_temp=None, lines=None):
        proposal = propose(nodes, k, inv_temp, lines)
        calls.proposals.append((proposal.tokens.tolist(), proposal.logprob.tolist()))
        return proposal

    drafter.forward, drafter.propose = recorded_forward, recorded_propose
    return backend, calls
