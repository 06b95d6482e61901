"""Which format a checkpoint's weights are in, by the names of their modules."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import StoredFormat
from treetop.weights.plain import FLOATS


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose names match a glob, such as `model.layers.*.mlp.experts.*`, are in this format.

    After `re:` a pattern is a regular expression that a name begins with.
    """

    pattern: str
    format: StoredFormat

    def matches(self, module: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.match(self.pattern[3:], module) is not None
        return fnmatchcase(module, self.pattern)


@dataclass(frozen=True, slots=True)
class Named:
    """Modules of these names are in this format.

    inside: and all in them.
    ends: and those whose names end so.
    """

    names: frozenset[str]
    format: StoredFormat
    inside: bool = False
    ends: tuple[str, ...] = ()

    def matches(self, module: str) -> bool:
        if module in self.names or module.endswith(self.ends):
            return True
        return self.inside and any(parent in self.names for parent in accumulate(module.split("."), "{}.{}".format))


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """The rules of a folder: the first that matches a module counts, and without one it is plain.

    where: the file that says so; the same rules of another file are equal.
    """

    rules: tuple[Rule | Named, ...] = ()
    where: str = field(default="", compare=False)

    def of(self, module: str) -> StoredFormat:
        """module: the name of a weight's tensor, were it plain, without `.weight`."""
        names = _spellings(module)
        return next((rule.format for rule in self.rules if any(map(rule.matches, names))), FLOATS)


def _spellings(module: str) -> list[str]:
    """A name, and of a language model in a folder with images what other releases of `transformers` call it."""
    for root in ("language_model.model.", "model.language_model."):
        if module.startswith(root):
            inner = module.removeprefix(root)
            return [f"{each}{inner}" for each in ("language_model.model.", "model.language_model.", "model.")]
    return [module, module.removeprefix("language_model.")] if module.startswith("language_model.") else [module]


PLAIN = StoredFormats()


def name_list(config: Mapping[str, Any], key: str, where: Path) -> list[str]:
    """A list of names in a `quantization_config`; empty without one."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: quantization_config: {key} must be a list of names, got {shown(names)}")
    return names


def patterns(names: Sequence[str], format_: StoredFormat, key: str, where: Path) -> tuple[Rule | Named, ...]:
    """Names and, after `re:`, regular expressions, as `compressed-tensors` has them."""
    expressions = [name for name in names if name.startswith("re:")]
    for each in expressions:
        try:
            re.compile(each[3:])
        except re.error as error:
            raise CheckpointError(
                f"{where}: quantization_config: {key}: {shown(each)} is no regular expression: {error}"
            ) from None
    exact = frozenset(name for name in names if not name.startswith("re:"))
    return (*([Named(exact, format_)] if exact else []), *(Rule(each, format_) for each in expressions))


def kept_plain(config: Mapping[str, Any], key: str, where: Path, ends: bool = False) -> tuple[Rule | Named, ...]:
    """The modules that a list of a `quantization_config` leaves as they are: those of these names, and all in them.

    Names may be globs. ends: and modules whose names end so.
    """
    names = name_list(config, key, where)
    exact = frozenset(name for name in names if name and not set(name) & set("*?["))
    globs = (pattern for name in names if name not in exact for pattern in (name, f"{name}.*"))
    named = (Named(exact, FLOATS, inside=True, ends=tuple(exact) if ends else ()),) if exact else ()
    return (*named, *(Rule(pattern, FLOATS) for pattern in globs))
