"""What tests of bad input share: the error, its kind, and that it is one sentence with the right words."""

import pytest

from treetop import LLM
from treetop.types.errors import UserError


def refused(kind, act, *parts) -> str:
    """The message of the UserError that `act` raises: one line that holds all `parts`."""
    with pytest.raises(kind) as error:
        act()
    assert isinstance(error.value, UserError)
    message = str(error.value)
    assert message
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
    return message


def load(folder, head=None, **options):
    return lambda: LLM(model=str(folder), draft=None if head is None else str(head), **options)


class Bomb:
    """Opens a file when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))
