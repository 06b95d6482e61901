"""How long requests have been: what those that run will still take, and how many rows the pools hold."""

from collections.abc import Callable, Iterable

from treetop.scheduler.request import Request

_REMEMBERED = 256
"""Requests that means are over, about: they change with what clients ask."""
_ENOUGH, _KEEPS = 16, 64
"""Requests before they are believed; after which they are kept again."""


class RequestLengths:
    """Of requests that have ended by themselves: tokens of their output, of all, and of their prompts those that were
    computed here, neither in the prefix cache nor by another worker."""

    def __init__(self, keep: Callable[[float], object] = lambda tokens: None) -> None:
        """keep: told now and then how many tokens a request has had, prompt and output."""
        self._keep, self._count, self._output, self._tokens, self._read = keep, 0, 0.0, 0.0, 0.0

    def note(self, request: Request) -> None:
        """It has ended."""
        self._count += 1
        part = 1 / min(self._count, _REMEMBERED)
        self._output += part * (len(request.output_ids) - self._output)
        self._tokens += part * (request.num_ids - self._tokens)
        computed = len(request.prompt_ids) - request.num_cached_tokens - request.num_imported_tokens
        self._read += part * (computed - self._read)
        if self._count >= _ENOUGH and self._count % _KEEPS in (0, _ENOUGH):
            self._keep(self._tokens)

    def read_per_token(self) -> float:
        """Prompt tokens that were computed for one of output; 0 before enough was seen."""
        return self._read / max(self._output, 1.0) if self._count >= _ENOUGH else 0.0

    def to_come(self, requests: Iterable[Request]) -> float:
        """Tokens that requests will still bring, together; 0 before enough was seen.

        One that has had as many as the mean may go on for as long as half of that.
        """
        if self._count < _ENOUGH:
            return 0.0
        return sum(
            min(each.tokens_left, max(self._output - len(each.output_ids), self._output / 2)) for each in requests
        )
