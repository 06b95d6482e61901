"""Where a request ends, decided in token order: the earliest event wins."""

from collections.abc import Collection, Sequence

from treetop.types.sampling import FinishReason

Cut = tuple[int, FinishReason]
"""(number of new tokens emitted, reason)."""


def first_stop(new_ids: Sequence[int], stop_ids: Collection[int], text_stop: int | None, limit: int) -> Cut | None:
    """The earliest stop among new tokens, or None.

    stop_ids: EOS and the request's own. text_stop: index of the token that completes a stop string. limit: tokens that
    max_tokens and the context still allow. At the same token a stop wins over the limit.
    Source: sgl-33758, where a limit hid an EOS.
    """
    for index, token in enumerate(new_ids):
        if token in stop_ids or index == text_stop:
            return index + 1, "stop"
        if index + 1 >= limit:
            return index + 1, "length"
    return None
