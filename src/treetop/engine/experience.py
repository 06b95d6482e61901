"""What service teaches an engine, for its next start."""

from dataclasses import dataclass, field
from pathlib import Path

from treetop.engine.startup.default_rows import keep_lengths
from treetop.engine.startup.kept_head import KeptHead
from treetop.types.costs import HeadAcceptance


@dataclass(slots=True)
class Experience:
    """It knows no engine: a scheduler has it, and the engine its scheduler's masks; what is dropped is to go at once.

    head: that drafts now. folder: of the target whose requests' lengths are kept; None keeps none.
    """

    head: KeptHead = field(default_factory=KeptHead)
    folder: Path | None = None

    def keep_head(self, learned: HeadAcceptance) -> None:
        """What was learned of the head."""
        self.head.keep(learned)

    def keep_lengths(self, tokens: float) -> None:
        """How many tokens requests have had, for the next start's rows."""
        if self.folder is not None:
            keep_lengths(self.folder, tokens)
