"""What a round tells of a tree, for requests that ask."""

from typing import NamedTuple


class VerifiedTree(NamedTuple):
    """One row's tree after its round, as host data: what `DraftTree` and `Accepted` say of it.

    tokens, parents, logprobs: of each of its T nodes. logprobs: NaN where the draft gave no number.
    path: nodes from the root to the last accepted.
    bonus: the target's token after it.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...]
    path: tuple[int, ...]
    bonus: int
