"""The exception tree.

TreetopError
|-- UserError                what a caller can cause; exit code 2 on the command line
|   |-- ConfigError          an option, or a combination of options, that cannot work
|   |-- ConflictError        a change of the engine while another is being made
|   |-- CapacityError        more was asked for than a dimension holds; names the option to change
|   |-- InputError           a prompt or a sampling parameter
|   |   |-- PromptError      one prompt of a call, by its index
|   |   `-- ContextLengthError  a prompt that leaves no room in the context
|   `-- CheckpointError      a file or tensor of a model folder
`-- EngineError              what went wrong while running; exit code 1
    `-- InvariantError       only a bug of treetop can raise it
        |-- OwnershipError   pages: double owner, lost page, foreign page
        `-- CheckError       a guard of the chosen check level fired
"""

import difflib
import reprlib
from collections.abc import Iterable


class TreetopError(Exception):
    """Root of everything treetop raises on purpose. Its text is bounded, whatever it quotes of a file or a caller."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= _MAX_TEXT:
            return text
        return f"{text[: _MAX_TEXT - 1000]} [...] {text[-900:]}"  # its end may name the option to change


class UserError(TreetopError):
    """Something the caller can change."""


class ConfigError(UserError):
    """An option, or a combination of options, that cannot work."""


class ConflictError(UserError):
    """Another change of the engine is being made: ask again once it is. Over HTTP it is a 409."""

    def __init__(self, message: str = "another change is being made; ask again") -> None:
        super().__init__(message)


class CapacityError(UserError):
    """A quantity exceeds its dimension; the message gives quantity, need, have, formula and option."""


class InputError(UserError):
    """A prompt or sampling parameter that cannot be served. code: what a program may know it by, as OpenAI names it."""

    code: str | None = None


class ContextLengthError(InputError):
    """A prompt that leaves no room for one more token in the context."""

    code = "context_length_exceeded"


class PromptError(InputError):
    """A prompt that cannot be served. index: which of `count` prompts; the message names it if there are several."""

    def __init__(self, index: int, count: int, reason: str, code: str | None = None) -> None:
        super().__init__(index, count, reason, code)  # as it was made, so that it can be pickled
        self.index, self.count, self.reason, self.code = index, count, reason, code

    def __str__(self) -> str:
        return f"prompt {self.index}: {self.reason}" if self.count > 1 else self.reason


class CheckpointError(UserError):
    """A missing, unexpected, misshapen or inconsistent file or tensor."""


class EngineError(TreetopError):
    """A failure at run time."""


class InvariantError(EngineError):
    """An internal invariant is broken: a bug, never the caller's fault."""


class OwnershipError(InvariantError):
    """The pages of a group are not partitioned into free, leased and cached."""


class CheckError(InvariantError):
    """A guard fired; the message names quantity, phase, row, value and range."""


def shown(value: object) -> str:
    """A caller's value for an error: one short line, whatever it is."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = " ".join(_SHORT.repr(value).split())
    except Exception:  # of a list that holds an integer as above, or what cannot be printed
        return f"a {type(value).__name__}"
    half = _MAX_SHOWN // 2
    return text if len(text) <= _MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


def close_name(given: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelled one is likely to mean; None if none is near."""
    return next(iter(difflib.get_close_matches(given, known, 1, 0.75)), None) if len(given) <= _LONGEST_NAME else None


_LONGEST_NAME = 64
_MAX_TEXT = 4000
_MAX_BITS = 256
_MAX_SHOWN = 240
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlong = 80
