"""Which of a step's tokens end a request."""

from collections.abc import Collection, Sequence

from treetop.types.sampling import FinishReason


def first_stop(
    new_ids: Sequence[int], stop_ids: Collection[int], text_stop: int | None, limit: int
) -> tuple[int, FinishReason] | None:
    """The earliest stop among new tokens, as (number of tokens emitted, reason), or None.

    stop_ids: EOS and the request's own. text_stop: index of the token that completes a stop string. limit: tokens that
    max_tokens and the context still allow. At the same token a stop wins over the limit (sgl-33758).
    """
    for index, token in enumerate(new_ids):
        if token in stop_ids or index == text_stop:
            return index + 1, "stop"
        if index + 1 >= limit:
            return index + 1, "length"
    return None
