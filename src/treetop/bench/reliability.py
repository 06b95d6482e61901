"""A reliability diagram: how often nodes were accepted whose estimated chance to be accepted was such.

Source: M. DeGroot and S. Fienberg, The Statistician 32, 1983; its mean distance is the expected calibration error.
"""

from dataclasses import dataclass, field

from treetop.types.messages import RoundPlan
from treetop.types.tree import Accepted, DraftTree

BINS = 10


@dataclass(frozen=True, slots=True)
class Reliability:
    """By tenths of the estimated chance: nodes, the mean of their estimates, and the share that was accepted."""

    nodes: tuple[int, ...]
    estimated: tuple[float, ...]
    accepted: tuple[float, ...]

    @property
    def error(self) -> float:
        """The mean distance of both, by nodes."""
        each = zip(self.nodes, self.estimated, self.accepted, strict=True)
        return sum(n * abs(a - b) for n, a, b in each) / max(sum(self.nodes), 1)

    def lines(self) -> list[str]:
        """The diagram as text: a line each tenth that has nodes."""
        rows = [f"reliability                 {self.error:.3f} from estimated to accepted, mean over verified nodes"]
        for tenth, (n, a, b) in enumerate(zip(self.nodes, self.estimated, self.accepted, strict=True)):
            if n:
                tenths = f"{tenth / BINS:.1f} to {(tenth + 1) / BINS:.1f}"
                rows.append(f"  {tenths}  {a:.3f} -> {b:.3f}  {n:6d}  {'#' * round(40 * b)}".rstrip())
        return rows


@dataclass(slots=True)
class ReliabilityCounter:
    """An engine's observer: counts each verified node but the roots."""

    nodes: list[int] = field(default_factory=lambda: [0] * BINS)
    estimated: list[float] = field(default_factory=lambda: [0.0] * BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * BINS)

    def __call__(self, plan: RoundPlan, tree: DraftTree, accepted: Accepted) -> None:
        accept_probs = tree.logprob.clamp(max=0).exp().nan_to_num().tolist()
        paths = zip(accepted.path.tolist(), accepted.accept_len.tolist(), strict=True)
        for accept_prob, (path, length) in list(zip(accept_probs, paths, strict=True))[: len(plan.rows)]:
            taken = set(path[1 : length + 1])
            for node, estimate in enumerate(accept_prob[1:], 1):
                tenth = min(int(estimate * BINS), BINS - 1)
                self.nodes[tenth] += 1
                self.estimated[tenth] += estimate
                self.accepted[tenth] += node in taken

    def diagram(self) -> Reliability:
        columns = list(zip(self.nodes, self.estimated, self.accepted, strict=True))
        return Reliability(
            tuple(self.nodes),
            tuple(a / n if n else 0.0 for n, a, _ in columns),
            tuple(b / n if n else 0.0 for n, _, b in columns),
        )
