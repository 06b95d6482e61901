"""One table of options: default, kind, limits, choices, help and aliases of each, said once, where the field is.

The kind and the choices are the field's annotation. Validation here, flags, the configuration file, `docs/options.md`
and the tests of `EngineOptions` all read `options_of`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from treetop.types.errors import UserError, shown


class Kind(NamedTuple):
    """What values a field takes.

    words: for an error.
    fits: whether a value is one.
    plain: the same value in Python's own types, which is all that messages between processes can hold; NumPy's numbers
        are none.
    read: what else will do, brought into shape.
    """

    words: str
    fits: Callable[[Any], bool]
    plain: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None


_ANYTHING = Kind("anything", lambda value: True)


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table; `option` makes it, `options_of` adds name, default, kind and choices.

    help: one line for `--help` and the docs.
    minimum, maximum: inclusive bounds.
    above, below: exclusive ones.
    unit: of the bounds, for errors.
    check: what no bound says.
    must: the words of an error instead of those made from the bounds.
    aliases: other spellings of the flag.
    metavar: what stands for its value.
    several: the flag takes many values.
    """

    help: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    check: Callable[[Any], bool] | None = None
    must: str = ""
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    several: bool = False
    read: Callable[[str], Any] | None = None
    flag: str | None = None
    name: str = ""
    default: Any = None
    kind: Kind = _ANYTHING
    base: Any = None
    optional: bool = False
    choices: tuple[str, ...] = ()

    @property
    def dest(self) -> str | None:
        """What the command line knows the flag by; None without one."""
        return self.flag[2:].replace("-", "_") if self.flag is not None and self.flag.startswith("--") else None

    @property
    def variable(self) -> str:
        """What stands for the flag in the environment; "" without one."""
        return "" if self.dest is None else variable(str(self.flag))

    @property
    def default_words(self) -> str | None:
        """The default for help and docs; None where the help itself says what happens."""
        known = isinstance(self.default, int | float | str) and not isinstance(self.default, bool)
        return str(self.default) if known and self.default != "" else None

    @property
    def bounds(self) -> str:
        """What values must be beyond their kind, for the docs; "" if nothing."""
        bounded = any(each is not None for each in (self.minimum, self.maximum, self.above, self.below, self.check))
        return (self.must or self._bounds(brackets=True)).removeprefix("must be ") if bounded else ""

    def wrong_kind(self, value: Any) -> str | None:
        """What a value of another kind should have been."""
        if (value is None and self.optional) or self.kind.fits(value):
            return None
        words = self.kind.words.replace(" or ", ", ") + " or None" if self.optional else self.kind.words
        return f"must be {words}, got {shown(value)}"

    def outside(self, value: Any, brackets: bool) -> str | None:
        """What a value of the right kind should have been. brackets: write bounds as an interval."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}, got {shown(value)}"
        inside = (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)
        inside = inside and (self.above is None or value > self.above) and (self.below is None or value < self.below)
        inside = inside and (self.check is None or self.check(value))
        return None if inside else f"{self.must or self._bounds(brackets)}, got {shown(value)}"

    def _bounds(self, brackets: bool) -> str:
        low, high = (
            _short(a if a is not None else b) for a, b in ((self.minimum, self.above), (self.maximum, self.below))
        )
        if self.maximum is None and self.below is None:
            return f"must be at least {low}{self.unit}"
        if not brackets:
            return f"must lie between {low} and {high}{self.unit}"
        return f"must be in {'(' if self.minimum is None else '['}{low}, {high}{')' if self.maximum is None else ']'}"


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    check: Callable[[Any], bool] | None = None,
    must: str = "",
    aliases: tuple[str, ...] = (),
    metavar: str | None = None,
    several: bool = False,
    read: Callable[[str], Any] | None = None,
    flag: str | None = None,
) -> Any:
    """A field of a dataclass of options; see `Option`. flag: if it is not the field's name with dashes; "" for none."""
    limits = {
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
        "unit": unit,
        "check": check,
        "must": must,
    }
    row = Option(help, aliases=aliases, metavar=metavar, several=several, read=read, flag=flag, **limits)  # type: ignore[arg-type]
    return field(default=default, metadata={"option": row})


def options_of(kind: Any) -> Mapping[str, Option]:
    """The table of a dataclass of options, by field."""
    return _table(kind)


@lru_cache(maxsize=16)
def _table(kind: Any) -> Mapping[str, Option]:
    hints, table = get_type_hints(kind), {}
    for each in fields(kind):
        hint, row = hints[each.name], each.metadata["option"]
        several = get_args(hint) if NoneType in get_args(hint) else (hint,)
        base = next(part for part in several if part is not NoneType)
        choices = get_args(base) if get_origin(base) is Literal else ()
        base = str if choices else base
        table[each.name] = replace(
            row,
            name=each.name,
            flag=flag(each.name) if row.flag is None else row.flag,
            default=None if each.default is MISSING else each.default,
            kind=_KINDS.get(base) or Kind(f"a {base.__name__}", _is_a(base)),
            base=base,
            optional=NoneType in several,
            choices=choices,
        )
    return table


def validate(
    chosen: Any, error: type[UserError], rules: Callable[[], Iterable[tuple[bool, str]]], brackets: bool = False
) -> None:
    """Check a frozen dataclass of options, and bring its values to Python's own types. Raises `error`, all at once.

    rules: (whether it is broken, the sentence) of what spans options or is not a bound; looked at once kinds are right.
    brackets: errors name fields and write intervals; else they name flags.
    """
    table = options_of(type(chosen)).values()
    for each in table:
        if each.kind.read is not None:
            object.__setattr__(chosen, each.name, each.kind.read(getattr(chosen, each.name)))
    wrong = [(each, each.wrong_kind(getattr(chosen, each.name))) for each in table]
    problems = [f"{each.name if brackets else each.flag} {words}" for each, words in wrong if words]
    if not problems:
        outside = [(each, each.outside(getattr(chosen, each.name), brackets)) for each in table]
        problems = [f"{each.name if brackets else each.flag} {words}" for each, words in outside if words]
        problems += [text for bad, text in rules() if bad]
    if problems:
        raise error("; ".join(problems))
    for each in table:
        if each.kind.plain is not None and (value := getattr(chosen, each.name)) is not None:
            object.__setattr__(chosen, each.name, each.kind.plain(value))


def flag(name: str) -> str:
    """The command-line spelling of an option that has no spelling of its own."""
    return "--" + name.replace("_", "-")


def variable(flag: str) -> str:
    """The name in the environment of what a flag says."""
    return "TREETOP_" + flag.removeprefix("--").replace("-", "_").upper()


def is_finite(value: float) -> bool:
    """Whether a float can hold it."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def is_integer(value: object) -> bool:
    """Of Python's or NumPy's; True and False are none."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> bool:
    """The same for numbers that may have a fraction."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_a(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _listed(values: Any) -> Any:
    return tuple(values) if isinstance(values, list) else values


def _texts(values: Any) -> Any:
    return (values,) if isinstance(values, str) else _listed(values)


def _pairs(values: Any) -> Any:
    return tuple(values.items()) if isinstance(values, Mapping) else values


def _all(kind: Callable[[object], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, tuple) and all(map(kind, values))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and is_integer(value[0]) and is_number(value[1])


_KINDS: dict[Any, Kind] = {
    bool: Kind("True or False", _is_a(bool)),
    int: Kind("an integer", is_integer, int),
    float: Kind("a number", is_number, float),
    str: Kind("text", _is_a(str)),
    tuple[str, ...]: Kind("text or a list of texts", _all(_is_a(str)), read=_texts),
    tuple[int, ...]: Kind("a list of token ids", _all(is_integer), lambda ids: tuple(map(int, ids)), _listed),
    tuple[tuple[int, float], ...]: Kind(
        "a dict of token ids and numbers",
        _all(_is_pair),
        lambda pairs: tuple((int(token), float(bias)) for token, bias in pairs),
        _pairs,
    ),
}


def _short(bound: float | None) -> str:
    """A bound for an error: powers that nobody reads as digits are written as powers."""
    if bound is None:
        return ""
    size = abs(bound)
    if isinstance(size, int) and size >= 2**20 and size & (size - 1) == 0:
        return f"{'-' if bound < 0 else ''}2^{size.bit_length() - 1}"
    return "10^6" if bound == 10**6 else f"{bound:g}" if isinstance(bound, float) else str(bound)
