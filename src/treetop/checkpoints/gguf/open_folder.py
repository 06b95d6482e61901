"""A GGUF file as the model's folder that the rest of the program reads. Needs no PyTorch.

The folder lies in the user's cache: config, tokenizer, chat template and stops as JSON, written once, and a link to the
file, from which the weights are read as they are asked for.
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
from treetop.checkpoints.gguf.header import kept_header
from treetop.checkpoints.gguf.vocabulary import vocabulary
from treetop.types.errors import CheckpointError
from treetop.types.user_cache import user_cache
from treetop.version import __version__

_LINK = "model.gguf"
_LAYOUT = 1
"""Raised where what is written changes between versions."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_BESIDE = ("mmproj", "imatrix")
"""How files begin that hold no language model."""


def gguf_folder(path: Path) -> Path:
    """The folder for a file. Raises CheckpointError for one that is damaged or holds what is not supported."""
    path = path.absolute()
    try:
        found = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return _folder(path, found.st_size, found.st_mtime_ns)


def gguf_of(folder: Path) -> list[Path]:
    """The file that such a folder was made for; [] of any other folder."""
    link = folder / _LINK
    return [link.readlink()] if link.is_symlink() else []


def chosen_file(folder: Path, quant: str | None, shown: str) -> Path | None:
    """The GGUF file of a folder: the only one, or that of a quantization such as Q4_K_M; None if it holds none.

    shown: the model as it was given, for errors. Raises CheckpointError, which names them, if there are several.
    """
    names = sorted(each.name for each in folder.iterdir() if is_gguf(each.name))
    return folder / chosen_name(names, quant, shown) if names else None


def is_gguf(name: str) -> bool:
    """Whether a file of this name holds a language model as GGUF."""
    return name.endswith(".gguf") and not name.startswith(_BESIDE)


def chosen_name(names: list[str], quant: str | None, shown: str) -> str:
    """As `chosen_file`, of files' names."""
    ends = re.compile(rf"(^|[-._]){re.escape(quant or '')}$", re.IGNORECASE)
    fit = [name for name in names if quant is None or ends.search(_PART.sub("", Path(name).stem))]
    if len(fit) == 1 and not _PART.search(Path(fit[0]).stem):
        return fit[0]
    if fit and all(_PART.search(Path(name).stem) for name in fit):
        raise CheckpointError(f"{shown}: {fit[0]}: a GGUF file in parts is not supported; join it by llama-gguf-split")
    listed = ", ".join(names[:32])
    if quant is None:
        raise CheckpointError(f"{shown}: it holds several GGUF files: add :QUANT, such as :Q4_K_M, of {listed}")
    few = "no GGUF file" if not fit else "several GGUF files"
    raise CheckpointError(f"{shown}: {few} of {quant}; there are {listed}")


@lru_cache(maxsize=16)
def _folder(path: Path, size: int, modified: int) -> Path:
    key = hashlib.sha256(f"{path}\n{size}\n{modified}\n{__version__}\n{_LAYOUT}".encode()).hexdigest()[:16]
    folder = user_cache("gguf") / f"{path.stem}-{key}"
    try:
        if (folder / "config.json").is_file():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:  # a cache that cannot be written to: for this process alone
        own = Path(tempfile.mkdtemp(prefix="treetop-gguf-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        _write(path, own)
        return own
    try:
        _write(path, own)
        own.chmod(0o755)
        own.rename(folder)
    except OSError:  # another process was first
        if not (folder / "config.json").is_file():
            raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return folder


def _write(path: Path, folder: Path) -> None:
    header = kept_header(path)
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path}: a GGUF file in parts is not supported; join it by llama-gguf-split")
    config = config_of(header, path)
    words = vocabulary(header.metadata, config["vocab_size"], path)
    ends: dict[str, Any] = {} if not words.stops else {"eos_token_id": list(words.stops)}
    begins = {} if words.bos is None else {"bos_token_id": words.bos}
    (folder / _LINK).symlink_to(path)
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
