"""What holds a request's tokens to a structure: its own protocol, and structures that are described by text."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

from treetop.types.errors import InputError, shown

StructureKind = Literal["json_schema", "json_object", "regex", "choice"]
MOST_SPEC = 2**16
"""Characters of a structure's description."""


class TokenConstraint(Protocol):
    """Says which tokens may come next in the output of one request, and of no other."""

    def allowed(self, new_ids: Sequence[int]) -> Iterable[int] | bytes | None:
        """The ids one of which comes next, now that the output has grown by `new_ids`; () before the first token.

        bytes are a mask: bit t % 8 of byte t // 8 stands for token t. None allows any token. If none is allowed the
        output is complete, and the request ends as by a stop. What ends a request otherwise (EOS, stop ids,
        max_tokens) ends it here too, so EOS comes only where it is allowed.
        It is called after each round on the thread that runs the engine; an exception ends the request with an error.
        """
        ...


class SlowConstraint(Protocol):
    """As `TokenConstraint`, for work that takes long: its answers come from another thread."""

    def ask(self, new_ids: Sequence[int]) -> "Future[bytes]":
        """What `allowed` would say of the same. The last question has been answered."""
        ...

    @property
    def overdue(self) -> str | None:
        """Why the question that is open is given up; None while it is not."""
        ...


class StructureLimits(NamedTuple):
    """Of one structure. timeout_s: seconds that checking it may take, and each mask. memory_mib: what its parser may
    take."""

    timeout_s: float = 5.0
    memory_mib: int = 256


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A structure that the output has. spec: a JSON schema, a regular expression, or a JSON list of texts to choose
    from, as `kind` says; "" for json_object. Raises InputError.
    """

    kind: StructureKind
    spec: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructureKind):
            raise InputError(
                f"structured_output: kind must be one of {get_args(StructureKind)}, got {shown(self.kind)}"
            )
        if not isinstance(self.spec, str):
            raise InputError(f"structured_output: spec must be text, got {shown(self.spec)}")
        if not is_utf8(self.spec):
            raise InputError("structured_output: spec must be text that UTF-8 can write")
        if len(self.spec) > MOST_SPEC:
            raise InputError(f"structured_output: {len(self.spec)} characters, at most {MOST_SPEC} are read")


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can write it; not so with half of a surrogate pair, which no output ever has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
