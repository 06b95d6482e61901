"""Which format a checkpoint's weights are in, by the names of their modules."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from treetop.types.errors import CheckpointError, shown
from treetop.weights.format import WeightFormat
from treetop.weights.plain import FLOATS


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules whose names match a glob, such as `model.layers.*.mlp.experts.*`, are in this format."""

    pattern: str
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """The rules of a folder: the first that matches a module counts, and without one it is plain.

    where: the file that says so.
    """

    rules: tuple[Rule, ...] = ()
    where: str = ""

    def of(self, module: str) -> WeightFormat:
        """module: the name of a weight's tensor, were it plain, without `.weight`."""
        return next((rule.format for rule in self.rules if fnmatchcase(module, rule.pattern)), FLOATS)


PLAIN = StoredFormats()


def kept_plain(config: Mapping[str, Any], key: str, where: Path) -> tuple[Rule, ...]:
    """The modules that a list of a `quantization_config` leaves as they are: those of these names, and all in them."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: quantization_config: {key} must be a list of names, got {shown(names)}")
    return tuple(Rule(pattern, FLOATS) for name in names for pattern in (name, f"{name}.*"))
