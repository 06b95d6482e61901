"""Level 2: probes on the device. They never synchronise and never kill the context.

A probe that fires writes one record (code, phase, tensor, row, value, low, high); the first writer wins. The record
travels with the round's results and the host raises on reading it. An index probe also redirects what fired, so that
nothing is read or written out of bounds for the rest of the round.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from treetop.types.errors import CheckError, EngineError
from treetop.types.phase import Phase

NAN, OUT_OF_BOUNDS, LATE = 1, 2, 3
"""What a record tells of. LATE is no probe's: exchanges write it, at every level, of a rank `value` that was late."""
_PROBED = 7
RECORD = _PROBED + 1
"""Integers that a step says of itself: the record of the probes, and a digest (`engine.step_digest`)."""
_PHASES = list(Phase)


@dataclass(frozen=True, slots=True)
class Probes:
    """posted: [8] int64 on the device, which travels with results. enabled False makes every probe the identity.

    dummy_row: whose values mean nothing, so that they need not be finite.
    """

    posted: Tensor
    enabled: bool
    dummy_row: int
    names: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, device: torch.device, enabled: bool, dummy_row: int, posted: Tensor | None = None) -> "Probes":
        """posted: what others write into, too; None makes it."""
        new = torch.zeros(RECORD, dtype=torch.int64, device=device) if posted is None else posted
        return cls(new, enabled, dummy_row)

    @property
    def record(self) -> Tensor:
        """[7] int64, all zero while nothing fired."""
        return self.posted[:_PROBED]

    @property
    def digest(self) -> Tensor:
        """[1] int64, of the last step."""
        return self.posted[_PROBED:]

    def nan(self, x: Tensor, name: str, phase: Phase, rows: Tensor) -> None:
        """Fire if x [rows, ...] is not finite in a live row. rows: [rows] int64."""
        if self.enabled and x.numel():
            bad = ~torch.isfinite(x).view(x.shape[0], -1).all(dim=1) & (rows != self.dummy_row)
            self._fire(bad, rows, torch.zeros_like(rows), (NAN, name, phase, 0, 0))

    def index(self, x: Tensor, low: Tensor | int, high: int | Tensor, name: str, phase: Phase, rows: Tensor) -> Tensor:
        """Fire if an index of x [rows, ...] lies outside [low, high); returns x with those redirected to `low`.

        low and high broadcast against x.
        """
        if not self.enabled or not x.numel():
            return x
        bad = (x < low) | (x >= high)
        flat = bad.view(x.shape[0], -1)
        worst = x.reshape(flat.shape).gather(1, flat.to(torch.int8).argmax(dim=1, keepdim=True))[:, 0]
        low_int = int(low) if isinstance(low, int) else -1
        high_int = int(high) if isinstance(high, int) else -1
        self._fire(flat.any(dim=1), rows, worst, (OUT_OF_BOUNDS, name, phase, low_int, high_int))
        return torch.where(bad, low, x)

    def _fire(self, bad: Tensor, rows: Tensor, value: Tensor, what: tuple[int, str, Phase, int, int]) -> None:
        code, name, phase, low, high = what
        if name not in self.names:
            self.names.append(name)
        first = bad.to(torch.int8).argmax(dim=0, keepdim=True)
        known = (code, _PHASES.index(phase), self.names.index(name), low, high)
        code_, phase_, name_, low_, high_ = (rows.new_full((1,), number) for number in known)
        record = torch.cat([code_, phase_, name_, rows.gather(0, first), value.gather(0, first), low_, high_])
        self.record.copy_(torch.where(bad.any() & (self.record[0] == 0), record, self.record))

    def raise_if_fired(self) -> None:
        """Wait for the device, read the record, clear it, and raise CheckError if a probe wrote it."""
        record = self.record.tolist()
        self.record.zero_()
        self.check(record)

    def check(self, record: list[int]) -> None:
        """Raise CheckError if a probe wrote this record; `record` has come to the host, with a step's results.

        Raises EngineError if an exchange wrote it.
        """
        code, phase, name, row, value, low, high = record[:_PROBED]
        if code == LATE:
            raise EngineError(f"rank {value} did not answer others in time; raise --step-timeout if it needs longer")
        if not self.enabled or code == 0:
            return
        where = f"{self.names[name]} in phase {_PHASES[phase]}, row {row}"
        if code == NAN:
            raise CheckError(f"detect_nan: {where}: not finite")
        bounds = f"[{low}, {high})" if high >= 0 else "its row's range"
        raise CheckError(f"detect_oob: {where}: value {value} outside {bounds}")
