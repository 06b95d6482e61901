"""GGUF files: tensors decode to the library's bits, and hostile heads are errors by name."""

import struct
from pathlib import Path

import pytest
import torch

from treetop.checkpoints.gguf.header import TYPES, read_header
from treetop.checkpoints.gguf.tensors import GgufTensors
from treetop.types.errors import CheckpointError

gguf = pytest.importorskip("gguf")
numpy = pytest.importorskip("numpy")


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(name: str = "x", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def _file(tensors: bytes, count: int, metadata: bytes = b"", entries: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, count, entries) + metadata + tensors
    return head + bytes(-len(head) % 32) + bytes(128)


_LIST = _string("k") + struct.pack("<II", 9, 8)
_HOSTILE = {
    "begin": b"GGML" + bytes(64),
    "version 9": _file(b"", 0, version=9),
    "tensors.*, more than": _file(b"", 2**63),
    "entries of metadata.*, more than": _file(b"", 0, entries=2**40),
    "strings of k": _file(b"", 0, _LIST + struct.pack("<Q", 2**60), 1),
    "a string of": _file(b"", 0, struct.pack("<Q", 2**62), 1),
    "not UTF-8": _file(b"", 0, struct.pack("<Q", 1) + b"\xff", 1),
    "unknown type 77": _file(b"", 0, _string("k") + struct.pack("<I", 77), 1),
    "lists of type 9": _file(b"", 0, _string("k") + struct.pack("<II", 9, 9), 1),
    "general.alignment": _file(b"", 0, _string("general.alignment") + struct.pack("<II", 4, 0), 1),
    "out of bounds": _file(_tensor(shape=(2**33, 2**33)), 1),
    "9 dimensions": _file(_tensor(shape=(1,) * 9), 1),
    "type 99": _file(_tensor(kind=99), 1),
    "no whole blocks": _file(_tensor(shape=(33,), kind=8), 1),
    "ends at byte": _file(_tensor(offset=2**40), 1),
    "no multiple": _file(_tensor(shape=(8,), offset=1), 1),
    "is there twice": _file(_tensor() * 2, 2),
    "overlap": _file(_tensor("x") + _tensor("y"), 2),
    "ends after": b"GGUF" + struct.pack("<I", 3),
    "not readable": b"",
}


@pytest.mark.parametrize("words", _HOSTILE)
def test_a_hostile_head_is_an_error_that_names_the_file_and_the_fault(tmp_path: Path, words: str) -> None:
    """Sizes, counts, offsets and lengths that lie; each file takes no memory before it is refused."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(_HOSTILE[words])
    with pytest.raises(CheckpointError, match=words) as raised:
        read_header(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("number", TYPES)
def test_every_type_decodes_to_the_bits_of_the_library(tmp_path: Path, number: int) -> None:
    """Random blocks, written by the library and read by its own reader too."""
    name, numbers, size = TYPES[number]
    kind = gguf.GGMLQuantizationType[name]
    assert (kind.value, *gguf.GGML_QUANT_SIZES[kind]) == (number, numbers, size)
    raw = numpy.random.default_rng(number).integers(0, 256, (6, 2 * size * 256 // numbers), dtype=numpy.uint8)
    path = tmp_path / "random.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["a", "bc"])
    writer.add_tensor("x", raw.view({"F32": "float32", "F16": "float16"}.get(name, "uint8")), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GgufTensors(path)
    (expected,) = gguf.GGUFReader(path).tensors
    with numpy.errstate(all="ignore"):
        values = gguf.dequantize(expected.data, kind).astype(numpy.float32)
        mine = tensors.get_tensor("x")
    assert tensors.header.metadata["words"] == ("a", "bc")
    assert mine.shape == (6, 512)
    assert mine.dtype == torch.float32
    assert numpy.array_equal(mine.numpy(), values.reshape(6, 512), equal_nan=True)
