"""Models of the Hugging Face hub: an id to a folder of its cache, with the files that are needed and no others.

`huggingface_hub` does the work, so its cache, its token and its variables hold: HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. Source: its guide "Download files from the Hub".
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from treetop.checkpoints.gguf.open_folder import chosen_names, is_gguf
from treetop.types.errors import CheckpointError

T = TypeVar("T")
Fetched = Callable[[list[str]], Path]
"""The snapshot's folder, with the files of these patterns in it."""
_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?")
_FILES = ["*.json", "*.safetensors", "*.jinja"]
_PICKLES = ["pytorch_model*.bin"]
_IGNORED = ["*/*", "consolidated*"]
"""Folders, and the same weights in their authors' own layout."""


def is_hub_id(name: str) -> bool:
    """Whether this is `org/name` or `org/name@revision`. A folder of that name comes first."""
    return _ID.fullmatch(name) is not None


@cache
def hub_folder(name: str, shown: str) -> Path:
    """The folder of a model's snapshot, downloaded where it is not in the cache; one a process, whoever asks.

    name: for which `is_hub_id` holds. shown: the model or draft as it was given, for errors. Without a network it is
    what the cache has. Raises CheckpointError if that is nothing, or if the hub refuses.
    """

    def folder(fetched: Fetched) -> Path:
        found = fetched(_FILES)
        return found if any(found.glob("*.safetensors")) else fetched(_FILES + _PICKLES)

    return _asked(name, shown, folder)


@cache
def hub_gguf(name: str, quant: str | None, shown: str) -> Path | None:
    """The GGUF file of a model, or its first part: of a quantization such as Q4_K_M, or the only one. Others are left.

    None for a model without any, where no quantization is asked for. Else as `hub_folder`, and as `chosen_names`.
    """
    from huggingface_hub import list_repo_files  # noqa: PLC0415  # takes long to import
    from huggingface_hub.errors import OfflineModeIsEnabled  # noqa: PLC0415  # takes long to import

    def file(fetched: Fetched) -> Path | None:
        try:
            repo, revision = _parts(name)
            there = [each for each in list_repo_files(repo, revision=revision) if "/" not in each]
        except (OfflineModeIsEnabled, OSError):  # what the cache has
            there = [each.name for each in fetched(["*.gguf"]).iterdir()]
        names = sorted(each for each in there if is_gguf(each))
        if not names and quant is None:
            return None
        chosen = chosen_names(names, quant, shown)
        return fetched(chosen) / chosen[0]

    return _asked(name, shown, file)


def _parts(name: str) -> tuple[str, str | None]:
    match = _ID.fullmatch(name)
    assert match is not None, name
    return match["repo"], match["revision"]


def _asked(name: str, shown: str, ask: Callable[[Fetched], T]) -> T:
    """What `ask` makes of what it is given to fetch files by, with the hub's errors as ours."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # takes long to import, and few need it
    from huggingface_hub.errors import (  # noqa: PLC0415  # takes long to load
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, revision = _parts(name)

    def fetched(patterns: list[str]) -> Path:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED))

    try:
        return ask(fetched)
    except CheckpointError:
        raise
    except GatedRepoError:
        reason = "a gated model: accept its terms on its page at the hub, and set HF_TOKEN to a token that may read it"
    except RevisionNotFoundError:
        reason = f"the hub has no revision {revision} of it"
    except RepositoryNotFoundError:
        reason = "no such folder, and no such model on the Hugging Face hub; a private one needs HF_TOKEN"
    except LocalEntryNotFoundError:
        reason = (
            "no such folder, and as a Hugging Face id it is not in the cache and the hub cannot be reached; download it"
            f" where there is a network (`hf download {repo}`), or give the path of a folder"
        )
    except Exception as error:  # of the network: they have no base of their own
        reason = f"the Hugging Face hub: {(str(error).splitlines() or [type(error).__name__])[0]}"
    raise CheckpointError(f"{shown}: {reason}")
