"""Models of the Hugging Face hub: an id to a folder of its cache, with the files that are needed and no others.

`huggingface_hub` does the work, so its cache, its token and its variables hold: HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE. Source: its guide "Download files from the Hub".
"""

import re
from functools import cache
from pathlib import Path

from treetop.types.errors import CheckpointError

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
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # takes long to import, and few need it
    from huggingface_hub.errors import (  # noqa: PLC0415  # takes long to load
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = _ID.fullmatch(name)
    assert match is not None, name
    repo, revision = match["repo"], match["revision"]

    def fetched(patterns: list[str]) -> Path:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=_IGNORED))

    try:
        folder = fetched(_FILES)
        return folder if any(folder.glob("*.safetensors")) else fetched(_FILES + _PICKLES)
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
