"""The text tables of `treetop bench`: rows are told one by one, so widths are known before the first."""

from collections.abc import Sequence
from typing import NamedTuple


class Columns(NamedTuple):
    """widths: of each column to its right edge; a negative one is filled from the left, and 0 ends the row as it is."""

    titles: tuple[str, ...]
    widths: tuple[int, ...]

    @classmethod
    def of(cls, *columns: tuple[str, int]) -> "Columns":
        """columns: title and width of each."""
        titles, widths = zip(*columns, strict=True)
        return cls(titles, widths)

    @classmethod
    def fitting(cls, lines: Sequence[Sequence[str]]) -> "Columns":
        """As wide as the lines, of which the first are the titles, with two spaces between."""
        widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
        return cls(tuple(lines[0]), (widths[0] - 2, *widths[1:]))

    @property
    def head(self) -> str:
        return self.row(self.titles)

    def row(self, cells: Sequence[str]) -> str:
        placed = zip(cells, self.widths, strict=True)
        return "".join(
            f"  {cell}" if not width else cell.rjust(width) if width > 0 else cell.ljust(-width)
            for cell, width in placed
        )
