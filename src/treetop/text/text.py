"""A request's output as text: stop strings found as they appear, and text that streams without showing one."""

from collections.abc import Sequence

from treetop.text.tokenizer import TokenStream


class IncrementalDetokenizer:
    """Text of the emitted tokens, each decoded once, in pieces, up to the first stop string.

    What might become a stop string waits until it is none, so one that is found lies in what waits.
    """

    def __init__(self, stream: TokenStream, stops: Sequence[str], keeps_stop: bool = False) -> None:
        """keeps_stop: the text ends behind the stop string, not before it."""
        self._stream, self._stops, self._keeps_stop = stream, tuple(stops), keeps_stop
        self._shown: list[str] = []
        self._waiting = ""
        self._stopped = False
        self.stop: str | None = None
        """The stop string that was found."""

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Take emitted ids. Returns the place of the one that completes a stop string; what follows it is not taken."""
        if not self._stops:
            self._waiting += self._stream.push(token_ids)
            return None
        for index, token in enumerate(token_ids):
            self._add(self._stream.push((token,)))
            if self._stopped:
                return index
        return None

    def piece(self) -> str:
        """The text that is safe to show and has not been shown."""
        held_back = _held_back(self._waiting, self._stops) if self._stops and not self._stopped else 0
        end = len(self._waiting) - held_back
        piece, self._waiting = self._waiting[:end], self._waiting[end:]
        self._shown.append(piece)
        return piece

    def finish(self) -> str:
        """The rest, once no more ids come."""
        self._add(self._stream.flush())
        self._stopped = True
        return self.piece()

    def full(self) -> str:
        """All that has been shown."""
        return "".join(self._shown)

    def _add(self, text: str) -> None:
        if not self._stopped:
            self._waiting += text
            found = [(at, len(stop)) for stop in self._stops if (at := self._waiting.find(stop)) >= 0]
            if found:
                at, length = min(found)  # of several at one place the shortest
                self.stop = self._waiting[at : at + length]
                self._waiting = self._waiting[: at + length if self._keeps_stop else at]
                self._stopped = True


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    lengths = [n for stop in stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])]
    return max(lengths, default=0)
