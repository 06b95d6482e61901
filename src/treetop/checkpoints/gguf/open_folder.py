"""A GGUF file as the model's folder that the rest of the program reads. Needs no PyTorch.

The folder lies in the user's cache: config, tokenizer, chat template and stops as JSON, written once, and a link to the
file, from which the weights are read as they are asked for; of a file in parts one to each.
"""

import atexit
import hashlib
import json
import re
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from treetop.checkpoints.gguf.architectures import config_of
from treetop.checkpoints.gguf.parts import File, files_of, kept_header, missing_part, part_names, split_name
from treetop.checkpoints.gguf.vocabulary import vocabulary
from treetop.types.errors import CheckpointError
from treetop.types.user_cache import user_cache
from treetop.version import __version__

_LINK = "model.gguf"
_LAYOUT = 3
"""Raised where what is written changes between versions."""
_BESIDE = ("mmproj", "imatrix")
"""How files begin that hold no language model."""


def gguf_folder(path: Path) -> Path:
    """The folder for a file, or for that whose first part it is.

    Raises CheckpointError for one that is damaged, lacks a part, or holds what is not supported.
    """
    return _folder(files_of(path.absolute()))


def gguf_of(folder: Path) -> list[Path]:
    """The file that such a folder was made for, or its first part; [] of any other folder."""
    link = folder / _LINK
    return [link.readlink()] if link.is_symlink() else []


def chosen_file(folder: Path, quant: str | None, shown: str) -> Path | None:
    """The GGUF file of a folder: the only one, or that of a quantization such as Q4_K_M; None if it holds none.

    Of one in parts the first. shown: the model as it was given, for errors. Raises CheckpointError, which names them,
    if there are several, or if a part is missing.
    """
    names = sorted(each.name for each in folder.iterdir() if is_gguf(each.name))
    return folder / chosen_names(names, quant, shown)[0] if names else None


def is_gguf(name: str) -> bool:
    """Whether a file of this name holds a language model as GGUF."""
    return name.endswith(".gguf") and not name.startswith(_BESIDE)


def chosen_names(names: list[str], quant: str | None, shown: str) -> list[str]:
    """As `chosen_file`, of files' names; of one in parts all of them."""
    ends = re.compile(rf"(^|[-._]){re.escape(quant or '')}$", re.IGNORECASE)
    whole = {(name, count) for name, _, count in (split_name(Path(each).stem) for each in names)}
    fit = [each for each in whole if quant is None or ends.search(each[0])]
    if len(fit) == 1:
        parts = part_names(*fit[0])
        if (missing := missing_part(parts, names)) is not None:
            raise CheckpointError(f"{shown}: {missing} is missing, one of {len(parts)} parts")
        return parts
    listed = ", ".join(names[:32])
    if quant is None:
        raise CheckpointError(f"{shown}: it holds several GGUF files: add :QUANT, such as :Q4_K_M, of {listed}")
    few = "no GGUF file" if not fit else "several GGUF files"
    raise CheckpointError(f"{shown}: {few} of {quant}; there are {listed}")


@lru_cache(maxsize=16)
def _folder(files: tuple[File, ...]) -> Path:
    path = files[0][0]
    key = hashlib.sha256(f"{files}\n{__version__}\n{_LAYOUT}".encode()).hexdigest()[:16]
    folder = user_cache("gguf") / f"{path.stem}-{key}"
    try:
        if (folder / "config.json").is_file():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:  # a cache that cannot be written to: for this process alone
        own = Path(tempfile.mkdtemp(prefix="treetop-gguf-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        _write(files, own)
        return own
    try:
        _write(files, own)
        own.chmod(0o755)
        own.rename(folder)
    except OSError:  # another process was first
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return folder


def _write(files: tuple[File, ...], folder: Path) -> None:
    path, *others = (path for path, _, _ in files)
    header = kept_header(path)
    config = config_of(header, path)
    words = vocabulary(header.metadata, config["vocab_size"], path)
    ends: dict[str, Any] = {} if not words.stops else {"eos_token_id": list(words.stops)}
    begins = {} if words.bos is None else {"bos_token_id": words.bos}
    (folder / _LINK).symlink_to(path)
    for other in others:
        (folder / other.name).symlink_to(other)
    _json(folder / "generation_config.json", {**begins, **ends})
    if words.tokenizer is not None:
        words.tokenizer.save(str(folder / "tokenizer.json"))
        names = {"bos_token": words.bos, "eos_token": words.stops[0] if words.stops else None}
        said = {name: words.tokens[index] for name, index in names.items() if index is not None}
        template = {} if words.chat_template is None else {"chat_template": words.chat_template}
        _json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **said, **template})
    _json(folder / "config.json", {**config, **begins, **ends})


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
