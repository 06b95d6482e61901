"""A request's output as text: stop strings found as they appear, and text that streams without showing one."""

from collections.abc import Sequence

from treetop.server.tokenizer import TokenStream


class StopStrings:
    """Finds stop strings in a request's growing output. It is fed each emitted token exactly once, in order."""

    def __init__(self, stream: TokenStream, stops: Sequence[str]) -> None:
        self._stream, self._stops = stream, tuple(stops)
        self._longest = max(len(stop) for stop in stops)
        self._recent = ""

    def feed(self, token_ids: Sequence[int]) -> int | None:
        for index, token in enumerate(token_ids):
            self._recent += self._stream.push(token)
            if any(stop in self._recent for stop in self._stops):
                return index
            self._recent = self._recent[-self._longest :]
        return None


class OutputText:
    """Text of the emitted tokens, in pieces. What might become a stop string is held back until it is not."""

    def __init__(self, stream: TokenStream, stops: Sequence[str]) -> None:
        self._stream, self._stops = stream, tuple(stops)
        self._text = ""
        self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add emitted ids; returns the text that is safe to show now."""
        self._text += "".join(self._stream.push(token) for token in token_ids)
        safe = len(_cut(self._text, self._stops))
        if safe == len(self._text):
            safe -= _held_back(self._text, self._stops)
        return self._show(self._text, safe)

    def finish(self) -> str:
        """The rest of the text, once no more ids come."""
        self._text += self._stream.flush()
        full = self.full()
        return self._show(full, len(full))

    def full(self) -> str:
        """The whole text so far, cut before the first stop string."""
        return _cut(self._text, self._stops)

    def _show(self, text: str, end: int) -> str:
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _cut(text: str, stops: Sequence[str]) -> str:
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    lengths = [n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])]
    return max(lengths, default=0)
