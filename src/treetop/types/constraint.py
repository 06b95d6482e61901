"""What holds a request's tokens to a structure: its own protocol, and structures that are described by text."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

from treetop.types.errors import InputError, shown

StructureKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "lark", "structural_tag", "text"]
JsonWhitespace = Literal["bounded", "fixed", "any"]
"""White space between tokens of JSON: at most one blank or line end; `, ` and `: ` and no other; any."""
MAX_SPEC = 2**16
"""Characters of a structure's description."""
MAX_WHITESPACE = 200
"""Characters of a regular expression of white space."""
MAX_MARK = 200
"""Characters of a text that begins or ends reasoning."""


class TokenConstraint(Protocol):
    """Says which tokens may come next in the output of one request, and of no other.

    One that also has `rollback` is asked along the request's draft trees, whose tokens can then be accepted; see
    `RevocableConstraint`. Without it a round gives its request one token.
    """

    def allowed(self, new_ids: Sequence[int]) -> Iterable[int] | bytes | None:
        """The ids one of which comes next, now that the output has grown by `new_ids`; () before the first token.

        bytes are a mask: bit t % 8 of byte t // 8 stands for token t. None allows any token. If none is allowed the
        output is complete, and the request ends as by a stop. What ends a request otherwise (EOS, stop ids,
        max_tokens) ends it here too, so EOS comes only where it is allowed.
        It is called after each round on the thread that runs the engine; an exception ends the request with an error.
        """
        ...


class RevocableConstraint(TokenConstraint, Protocol):
    """A constraint that can be told of tokens that may not stay: drafts."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last so many ids that `allowed` was told of.

        Along a tree `allowed` is told of one draft at a time, each of which it allowed before, and each is taken back.
        Ids count as told also where `allowed` raised. What it raises of a draft ends nothing: the request meets that
        again if the token comes.
        """
        ...


class Branch(Protocol):
    """A constraint that goes along one path of a draft tree at a time, from the root."""

    def accept(self, token: int) -> Iterable[int] | bytes | None:
        """What `TokenConstraint.allowed` says behind the path and this token, which the path now ends with."""
        ...

    def rollback(self) -> bool:
        """Take the path's last token back, also where `accept` raised. False if that cannot be done."""
        ...


class SlowConstraint(Protocol):
    """As `TokenConstraint`, for work that takes long: its answers come from another thread."""

    def ask(self, new_ids: Sequence[int]) -> "Future[Any]":
        """What `allowed` would say of the same. The last question has been answered."""
        ...

    def walk(self, visit: Callable[[Branch], None]) -> "Future[None] | None":
        """Have a draft tree visited, on the thread that answers: the branch begins behind all that was told.

        The last question has been answered, and the next may be asked before the visit is over. None if there can be
        no branch.
        """
        ...

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens that come next whatever is chosen, as far as they are known. The last question has been answered.

        They shape the draft and decide nothing: what may come is what is answered.
        """
        ...

    @property
    def overdue(self) -> str | None:
        """Why the question that is open is given up; None while it is not."""
        ...


class StructureLimits(NamedTuple):
    """Of one structure.

    timeout_s: seconds of processor time that checking it may take, and seconds for each mask.
    memory_mib: what its parser may take.
    whitespace: what may stand between tokens of JSON, where the structure does not say.
    """

    timeout_s: float = 5.0
    memory_mib: int = 256
    whitespace: JsonWhitespace = "bounded"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What an output may say before its answer, which alone has the structure.

    closes: the text that ends it.
    opens: the text that begins it, if the output begins with that; "" where the output begins inside reasoning.
    budget: tokens behind `opens` after which `closes` is forced, unless it has come; None for no limit. A character
        that the last of them leaves open is completed first.
    also_closes: texts that end it, too, and belong to what follows; only with any text.
    again: (before, name, behind): reasoning begins again where these three come one behind the other, and counts to the
        same budget; once that is spent, no name that begins so comes behind `before`. The structure holds all of the
        output then, reasoning, too.

    Raises InputError.
    """

    closes: str
    opens: str = ""
    budget: int | None = None
    also_closes: tuple[str, ...] = ()
    again: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        for text in (self.closes, self.opens, *self.also_closes, *(self.again or ())):
            if not isinstance(text, str) or len(text) > MAX_MARK or not is_utf8(text):
                raise InputError(f"reasoning: marks are texts of up to {MAX_MARK} characters, got {shown(text)}")
        if not all((self.closes, *self.also_closes, *(self.again or ()))):
            raise InputError("reasoning: what closes it, and what begins it again, must not be empty")
        budget = self.budget
        if budget is not None and not (isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0):
            raise InputError(f"reasoning: budget must be a number of tokens, 0 or more, got {shown(budget)}")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A structure that the output has.

    spec: a JSON schema, a regular expression, a JSON list of texts to choose from, a grammar (Lark's syntax as
        llguidance reads it, or GBNF; with lark no GBNF), or structural tags (JSON, see
        `structured/structural_tags.py`), as `kind` says; "" for json_object, and for text, which is any.
    reasoning: what may come before it; None for nothing.
    whitespace: a regular expression of what may stand between tokens of JSON, or nothing; only with json_schema and
        json_object. None as `--structured-output-whitespace` says.

    Raises InputError.
    """

    kind: StructureKind
    spec: str = ""
    reasoning: Reasoning | None = None
    whitespace: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructureKind):
            raise InputError(
                f"structured_output: kind must be one of {get_args(StructureKind)}, got {shown(self.kind)}"
            )
        if not isinstance(self.spec, str):
            raise InputError(f"structured_output: spec must be text, got {shown(self.spec)}")
        if not is_utf8(self.spec):
            raise InputError("structured_output: spec must be text that UTF-8 can write")
        if len(self.spec) > MAX_SPEC:
            raise InputError(f"structured_output: {len(self.spec)} characters, at most {MAX_SPEC} are read")
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise InputError(f"structured_output: reasoning must be a Reasoning, got {shown(self.reasoning)}")
        if self.whitespace is not None:
            self._check_whitespace(self.whitespace)

    def _check_whitespace(self, pattern: object) -> None:
        if self.kind not in ("json_schema", "json_object"):
            raise InputError(f"structured_output: whitespace: only of JSON, and this is a {self.kind}")
        if not isinstance(pattern, str) or len(pattern) > MAX_WHITESPACE or not is_utf8(pattern):
            raise InputError(
                f"structured_output: whitespace must be a regular expression of up to {MAX_WHITESPACE} characters, got"
                f" {shown(pattern)}"
            )


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can write it; not so with half of a surrogate pair, which no output ever has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
