"""Texts on the device, and where they have stood as one ends now. Plain tensor operations, no host sync.

text: [num_rows, width] int32, the token at each position of a row; its last column takes what must go nowhere.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1
"""Stands where a text has no token."""
_SCANNED = 8
"""Tokens by which the places of a match are found; longer matches are told apart among these."""


@dataclass(frozen=True, slots=True)
class PastTexts:
    """The last tokens of the texts that rows held before, one after another; older ones are overwritten.

    tokens: [size + 1] int32, a ring, and one column for nothing; behind each text NOTHING.
    owners: [size + 1] int64, whose text each token is of.
    written: [1] int64, how many were ever written.
    """

    tokens: Tensor
    owners: Tensor
    written: Tensor

    def keep(self, text: Tensor, length: Tensor, owner: Tensor) -> None:
        """Take in a row's text. text: [width] int32. length: [1] int64, of it; 0 for none. owner: [1] int64."""
        size = len(self.tokens) - 1
        column = torch.arange(len(text), device=text.device)
        kept = (column <= length) & (column > length - size) & (length > 0)
        place = torch.where(kept, (self.written + column) % size, size)
        self.tokens[place] = torch.where(column < length, text, NOTHING)
        self.owners[place] = owner.expand(len(place))
        self.written.add_(torch.where(length > 0, length + 1, 0))

    @property
    def in_order(self) -> tuple[Tensor, Tensor]:
        """Tokens [1, size] int32 and their owners [1, size] int64, the oldest first."""
        size = len(self.tokens) - 1
        order = (self.written + torch.arange(size, device=self.tokens.device)) % size
        return self.tokens[order][None], self.owners[order][None]


def remember(text: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, kept: Tensor) -> None:
    """Write tokens of rows where they stand. rows: [rows] int64; positions, tokens: [rows, n] int64; kept: bool."""
    nowhere = text.shape[1] - 1
    place = torch.where(kept, positions, nowhere)
    text[rows[:, None], place] = tokens.to(text.dtype)


def ending(text: Tensor, end: Tensor, count: int) -> Tensor:
    """The last tokens up to `end`, the last first: [rows, count] of text's dtype; -2, which is in no text, before it.

    text: [rows, width] int32. end: [rows] int64, where its last token stands.
    """
    back = end[:, None] - torch.arange(count, device=text.device)
    return torch.where(back >= 0, text.gather(1, back.clamp(min=0)), -2)


def longest_matches(
    text: Tensor, suffix: Tensor, end: Tensor, count: int, among: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Places before `end` up to which a text reads as `suffix`, the longest first, then the latest.

    text: [rows or 1, width] int32.
    suffix: [rows, maximum] int32, as `ending` gives it.
    end: [rows] int64.
    count: places wanted; of those that agree in `_SCANNED` tokens, the latest.
    among: [rows, width] bool, places that count; None for all.

    Returns place [rows, count] int64, where the match ends, and length [rows, count] int64, 0 for none.
    """
    width, maximum = text.shape[1], suffix.shape[1]
    scanned = min(_SCANNED, maximum)
    padded = F.pad(text, (maximum - 1, 0), value=NOTHING)
    position = torch.arange(width, device=text.device)
    alive = position < end[:, None]
    if among is not None:
        alive = alive & among
    length = torch.zeros(alive.shape, dtype=torch.int32, device=text.device)
    for m in range(scanned):
        first = maximum - 1 - m
        alive = alive & (padded[:, first : first + width] == suffix[:, m : m + 1])
        length += alive
    found = min(count, width)
    best = torch.topk(torch.where(length > 0, length.to(torch.int64) << 32 | position, 0), found, dim=1).values
    best = F.pad(best, (0, count - found))
    place, length = best & 0xFFFFFFFF, best >> 32
    if maximum > scanned:
        before = place[:, :, None] + (maximum - 1) - torch.arange(maximum, device=text.device)  # where padded
        read = padded.expand(len(suffix), -1).gather(1, before.flatten(1)).view(before.shape)
        whole = (read == suffix[:, None]).cumprod(dim=2).sum(dim=2)
        length = torch.where(length > 0, whole, 0)
        length, order = length.sort(dim=1, descending=True, stable=True)
        place = place.gather(1, order)
    return place, length


def continued(text: Tensor, end: Tensor, place: Tensor, steps: int) -> Tensor:
    """What follows `place`, as if the text went on as it did there: past its end it begins again after the place.

    place: [rows, count] int64, before end. Returns [rows, count, steps], of text's dtype.
    """
    period = (end[:, None] - place).clamp(min=1)[:, :, None]
    after = place[:, :, None] + 1 + torch.arange(steps, device=text.device) % period
    return text.gather(1, after.flatten(1)).view(after.shape)


def continued_in_past(past: Tensor, place: Tensor, steps: int) -> Tensor:
    """What follows `place` in texts that have ended, and NOTHING from their ends on. past: [1, size] int32.

    place: [rows, count] int64. Returns [rows, count, steps], of past's dtype.
    """
    padded = F.pad(past[0], (0, steps), value=NOTHING)
    after = padded[place[:, :, None] + 1 + torch.arange(steps, device=past.device)]
    return torch.where((after >= 0).cumprod(dim=2) > 0, after, NOTHING)
