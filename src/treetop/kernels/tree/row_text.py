"""The text of each row on the device, and where its end has stood before. Plain tensor operations, no host sync.

text: [num_rows, width] int32, the token at each position of a row; its last column takes what must go nowhere.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def remember(text: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, kept: Tensor) -> None:
    """Write tokens of rows where they stand. rows: [rows] int64; positions, tokens: [rows, n] int64; kept: bool."""
    nowhere = text.shape[1] - 1
    place = torch.where(kept, positions, nowhere)
    text[rows[:, None], place] = tokens.to(text.dtype)


def longest_matches(text: Tensor, end: Tensor, count: int, maximum: int) -> tuple[Tensor, Tensor]:
    """Earlier places whose text is the text's end, the longest first, then the latest.

    text: [rows, width] int32.
    end: [rows] int64, where its last token stands.
    count: places wanted.
    maximum: tokens that are compared.

    Returns place [rows, count] int64, where the match ends, and length [rows, count] int64; 0 for none.
    """
    width = text.shape[1]
    back = end[:, None] - torch.arange(maximum, device=text.device)
    suffix = torch.where(back >= 0, text.gather(1, back.clamp(min=0)), -2)  # -2 is in no text
    padded = F.pad(text, (maximum - 1, 0), value=-1)
    position = torch.arange(width, device=text.device)
    alive = (position < end[:, None]).expand(len(text), -1)
    length = torch.zeros(text.shape, dtype=torch.int64, device=text.device)
    for m in range(maximum):
        alive = alive & (padded[:, maximum - 1 - m : maximum - 1 - m + width] == suffix[:, m : m + 1])
        length += alive
    found = min(count, width)
    best = torch.topk(torch.where(length > 0, length << 32 | position, 0), found, dim=1).values
    best = F.pad(best, (0, count - found))
    return best & 0xFFFFFFFF, best >> 32


def continued(text: Tensor, end: Tensor, place: Tensor, steps: int) -> Tensor:
    """What follows `place`, as if the text went on as it did there: past its end it begins again after the place.

    place: [rows, count] int64, before end. Returns [rows, count, steps], of text's dtype.
    """
    period = (end[:, None] - place).clamp(min=1)[:, :, None]
    after = place[:, :, None] + 1 + torch.arange(steps, device=text.device) % period
    return text.gather(1, after.flatten(1)).view(after.shape)
