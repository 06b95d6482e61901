"""One lifecycle for whatever a row keeps on the device.

    columns -> (one copy to the device) -> move_in      a request moves into a row
    rooted                                              roots are known that no round chose
    accepted                                            a round's paths are known; a captured round has this inside
    forget                                              level 3: what a request must not find

An engine's features are listed when its tables are made (`make_state`). One that is off is not in the list, and no step
asks for it. Shapes say what a feature takes: tables are made on no memory to count them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treetop.kernels.table import Ops
from treetop.kernels.tree.commit import Paths
from treetop.kernels.tree.grow import TreeBuilder
from treetop.types.messages import RowSetup
from treetop.types.phase import Phase
from treetop.types.sampling import SamplingMode
from treetop.types.tree import Accepted, PathPositions


@dataclass(frozen=True, slots=True)
class AcceptedRound:
    """What a round accepted of each row of its batch.

    draft_rows: [rows] int64, the batch's, but the dummy row for those without a draft.
    growth: the tree's candidates; None of a tree of a root alone.
    """

    choice: SamplingMode
    paths: Paths
    draft_rows: Tensor
    places: PathPositions
    accepted: Accepted
    growth: TreeBuilder | None


@dataclass(frozen=True, slots=True)
class PromptLines:
    """Tokens of prompts. rows: [lines] int64, a row may have several. positions, tokens: [lines, n] int64; valid: bool,
    which of them there are.
    """

    rows: Tensor
    positions: Tensor
    tokens: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True)
class NewRoots:
    """Roots that no round chose: of a prefill, and of rows that are handed over.

    rows, at, tokens: [rows] int64: whose they are, where they stand, which they are.
    emitted: [rows] int64, 0 of a root that is the request's first token, -1 of another.
    prompt: a prefill's chunks.
    """

    choice: SamplingMode
    rows: Tensor
    at: Tensor
    tokens: Tensor
    emitted: Tensor
    prompt: PromptLines | None = None


class RowFeature(Protocol):
    """Tables [num_rows, ...], written in place and never rebound. A feature has those of these that it needs."""

    @property
    def tables(self) -> Sequence[Tensor]:
        """What steps write, rows first: zeros at a start, and the dummy row's for ever."""
        return ()

    @property
    def record(self) -> Mapping[str, Tensor]:
        """Those that are handed over with a row, by name; see `RowRecord`."""
        return {}

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Of these, those of which each rank has a share; see `RowRecord`."""
        return {}

    def scratch(self, phase: Phase) -> Sequence[Tensor]:
        """What a phase of a round writes before it reads it: whatever it holds before must not matter."""
        return ()

    def columns(self, setups: Sequence[RowSetup]) -> list[Sequence[int]]:
        """What requests move in with, as columns of integers: as many for as many requests with as long a text."""
        return []

    def move_in(self, rows: Tensor, setups: Sequence[RowSetup], columns: Iterator[Tensor]) -> None:
        """Write the rows [n] int64 of the setups, of which there are some, whatever the rows held before.

        columns: on the device; a feature takes as many as it gave. What rows had committed is still in its table.
        """
        return

    def forget(self, rows: Tensor) -> None:
        """Level 3: fill what rows [n] int64, about to be set up, hold and nobody may read with what shows."""
        return

    def rooted(self, ops: Ops, of: NewRoots) -> None:
        """Roots are known; a drafter has not read them."""
        return

    def accepted(self, ops: Ops, of: AcceptedRound) -> None:
        """A round's paths are known, and not yet committed."""
        return
