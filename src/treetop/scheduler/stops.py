"""Which of a step's tokens end a request."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from treetop.types.sampling import FinishReason


def first_stop(new_ids: Sequence[int], stop_ids: AbstractSet[int], limit: int) -> tuple[int, FinishReason] | None:
    """The earliest stop among new tokens, as (number of tokens emitted, reason), or None.

    stop_ids: EOS and the request's own. limit: tokens that max_tokens and the context still allow. At the same token a
    stop wins over the limit (sgl-33758).
    """
    if len(new_ids) < limit and stop_ids.isdisjoint(new_ids):
        return None
    for index, token in enumerate(new_ids):
        if token in stop_ids:
            return index + 1, "stop"
        if index + 1 >= limit:
            return index + 1, "length"
    return None
