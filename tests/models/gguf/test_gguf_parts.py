"""A GGUF file in parts is the file that it was cut from; parts that do not fit together are errors by name."""

import struct
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch

from support.command_line import refused
from support.engines import greedy, tokens
from support.tiny_models import save_random_experts
from treetop import LLM
from treetop.checkpoints.checkpoint import open_file, stored_files, tensor_files
from treetop.checkpoints.fingerprint import fingerprint
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.gguf.parts import part_names, split_name
from treetop.checkpoints.hub import hub_folder, hub_gguf
from treetop.types.errors import CheckpointError

gguf = pytest.importorskip("gguf")
from support.gguf_files import write_gguf  # noqa: E402  # needs the library

PER_PART = 20
NAMES = [f"m-Q8_0-{number:05}-of-00005.gguf" for number in range(1, 6)]
OPTIONS = {"dtype": "float64", "device": "cpu", "context_length": 64, "max_running_requests": 1}


@pytest.fixture
def cut(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A model of GPT-OSS as one file, and in five parts: gates and ups of a layer may lie in different ones."""
    hub = save_random_experts(tmp_path / "hub", "gpt_oss", seed=7)
    (tmp_path / "parts").mkdir()
    write_gguf(hub, tmp_path / "parts" / "m-Q8_0.gguf", parts_of=PER_PART)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [each.name for each in parts] == NAMES
    return write_gguf(hub, tmp_path / "one.gguf"), parts


def test_a_file_in_parts_is_the_whole(cut: tuple[Path, list[Path]]) -> None:
    """By the path of its first part, and by its folder: the same tensors to the bit, the same tokens.

    A change of any part is another folder and another fingerprint.
    """
    whole, parts = cut
    made = resolve_folder(str(parts[0]))
    assert made == resolve_folder(str(parts[0].parent)) == resolve_folder(f"{parts[0].parent}:Q8_0")
    assert stored_files(made).tensors == stored_files(resolve_folder(str(whole))).tensors
    with open_file(tensor_files(made).popitem()[1]) as ours, open_file(whole) as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert all(torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in ours.keys())  # noqa: SIM118
    outputs = [LLM(str(each), **OPTIONS).generate([[5, 7, 11, 13]], greedy(8)) for each in (whole, parts[0])]
    assert tokens(outputs[0]) == tokens(outputs[1])
    before = fingerprint(made)
    data = bytearray(parts[2].read_bytes())
    data[-40] ^= 1
    parts[2].write_bytes(data)
    assert resolve_folder(str(parts[0])) != made
    assert fingerprint(resolve_folder(str(parts[0]))) != before


def _metadata(path: Path, key: str, value: int) -> None:
    """Another number of so many bytes as the old."""
    data, at = bytearray(path.read_bytes()), path.read_bytes().index(key.encode()) + len(key)
    kind = "<H" if struct.unpack_from("<I", data, at)[0] == gguf.GGUFValueType.UINT16 else "<i"
    struct.pack_into(kind, data, at + 4, value)
    path.write_bytes(data)


def _fewer(parts: list[Path]) -> None:
    """All but the last, by names that say so."""
    parts[4].unlink()
    for part in parts[:4]:
        part.rename(part.with_name(part.name.replace("of-00005", "of-00004")))


DAMAGES: dict[str, Callable[[list[Path]], object]] = {
    r"m-Q8_0-00003-of-00005\.gguf is missing, one of 5 parts": lambda parts: parts[2].unlink(),
    r"m-Q8_0-00001-of-00005\.gguf is missing": lambda parts: parts[0].unlink(),
    r"several GGUF files": lambda parts: parts[4].rename(parts[4].with_name("m-Q8_0-00005-of-00006.gguf")),
    r"00003-of-00005\.gguf: split\.count 4 and split\.no 2, .* by its name part 3 of 5": lambda parts: _metadata(
        parts[2], "split.count", 4
    ),
    r"00002-of-00005\.gguf: split\.count 5 and split\.no 3": lambda parts: _metadata(parts[1], "split.no", 3),
    r"split\.tensors\.count 77, 79: its parts have 79 tensors": lambda parts: _metadata(
        parts[3], "split.tensors.count", 77
    ),
    r"split\.count 5 and split\.no 0, but by its name part 1 of 4": _fewer,
    r"00003-of-00005\.gguf: tensor '[\w.]+' is also in m-Q8_0-00002-of-00005\.gguf": lambda parts: (
        parts[2].write_bytes(parts[1].read_bytes()),
        _metadata(parts[2], "split.no", 2),
    ),
    r"00004-of-00005\.gguf: damaged or unsupported": lambda parts: parts[3].write_bytes(b"GGUF" + b"\xff" * 60),
    r"00004-of-00005\.gguf: not readable": lambda parts: parts[3].write_bytes(b""),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_parts_that_do_not_fit_are_refused_by_name(cut: tuple[Path, list[Path]], words: str) -> None:
    """Missing, of another count, in another place, there twice, damaged: from headers, before a weight is read."""
    DAMAGES[words](cut[1])
    with pytest.raises(CheckpointError, match=words):
        resolve_folder(str(cut[1][0].parent))


def test_the_first_part_is_given(cut: tuple[Path, list[Path]], capsys: pytest.CaptureFixture[str]) -> None:
    """Another part names the first; a missing one is named; one that has another name is no whole file."""
    _, parts = cut
    refused(capsys, ["generate", str(parts[1]), "--prompt", "a"], "part 2 of 5; give the first", NAMES[0])
    parts[0].rename(parts[0].with_name("m.gguf"))
    refused(capsys, ["generate", str(parts[0].with_name("m.gguf")), "--prompt", "a"], "split.count 5", "part 1 of 1")
    parts[0].with_name("m.gguf").rename(parts[0])
    parts[3].unlink()
    refused(capsys, ["generate", str(parts[0]), "--prompt", "a"], f"{NAMES[3]}: not readable as GGUF: No such file")


@pytest.mark.parametrize("stem", ["m-00001-of-00000", "m-00004-of-00003", "m-00000-of-00003", "m-1-of-3", "m"])
def test_a_name_that_is_no_parts_is_a_files(stem: str) -> None:
    assert split_name(stem) == (stem, 1, 0)
    assert part_names(stem, 0) == [f"{stem}.gguf"]


def test_all_parts_of_a_hubs_model_are_fetched(
    cut: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is, where the hub lacks one."""
    listed = [*NAMES, "m-Q4_0.gguf"]
    asked = []

    def download(repo: str, **options: object) -> str:
        asked.append(options["allow_patterns"])
        return str(cut[1][0].parent)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: listed)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for kept in (hub_folder, hub_gguf):
        kept.cache_clear()
    try:
        assert resolve_folder("an/model:Q8_0") == resolve_folder(str(cut[1][0]))
        assert asked == [NAMES]
        listed.remove(NAMES[3])
        with pytest.raises(CheckpointError, match=f"model an/other:Q8_0: {NAMES[3]} is missing, one of 5 parts"):
            resolve_folder("an/other:Q8_0")
        assert asked == [NAMES]
    finally:
        for kept in (hub_folder, hub_gguf):
            kept.cache_clear()
