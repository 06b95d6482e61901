"""What a published figure must name: versions, and the commit of treetop that gave it."""

import json
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from treetop.version import DISTRIBUTION, __version__

_GIT_TIMEOUT_S = 10


def versions() -> dict[str, str]:
    """Name -> version, of what is there."""
    found = {
        "treetop": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    found["CUDA"] = torch.version.cuda if torch.cuda.is_available() else None
    return {name: version for name, version in found.items() if version is not None}


def commit() -> str | None:
    """Of the clone that this package is imported from, with "-dirty" if files were changed; or that pip installed."""
    folder = Path(__file__).resolve().parent
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is not None:  # its own clone, none around it
        return _git(folder, "describe", "--always", "--dirty", "--exclude=*")
    with suppress(metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        url = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "null")
        return str(url["vcs_info"]["commit_id"])
    return None


def revision(folder: Path) -> str | None:
    """The commit that a folder of the hub's cache holds; None for other folders."""
    return folder.name if folder.parent.name == "snapshots" else None


def _git(folder: Path, *words: str) -> str | None:
    """What git says, None if it is not there or says no."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S
        )
        return done.stdout.strip()
    return None
