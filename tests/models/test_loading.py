"""Sharded files, hub ids and memory: what is read is what was stored, once, and hostile files are one clear error."""

import json
import os
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from support.refusing import load, refused
from support.tiny_models import copy_folder
from treetop import LLM
from treetop.checkpoints import checkpoint, hub
from treetop.checkpoints.checkpoint import all_finite, open_tensors, stored_files
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.loader import LoadContext, load_weights
from treetop.checkpoints.params import matrix
from treetop.models.registry import target_spec
from treetop.types.errors import CheckpointError
from treetop.weights import format as reading
from treetop.weights.format import CheckpointTensor, TensorSpec

CPU = torch.device("cpu")
SOURCE = Path(__file__).parents[2] / "src"


def sharded(pair, tmp_path, count=3):
    """The pair's target in `count` files and an index: its folder, and tensor -> file."""
    folder = copy_folder(pair.target, tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{index % count}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, folder / file)
    write_index(folder, places)
    return folder, places


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")


def test_shards_give_what_one_file_gives(strong_pair, tmp_path, monkeypatch):
    """Tensors of a layer lie in several files, and every file is mapped anew again and again."""
    folder, _ = sharded(strong_pair, tmp_path)
    monkeypatch.setattr(checkpoint, "_MAPPED", 1000)
    monkeypatch.setattr(reading, "_PIECE", 500)  # rows of large tensors come in many parts
    place = LoadContext(torch.float32, CPU, 16)
    one, many = target_spec(strong_pair.target), target_spec(folder)
    whole = load_weights(one.folder, one.params, place)
    split = load_weights(folder, many.params, place)
    for name in split.held:
        assert torch.equal(split[name], whole[name])
    assert stored_files(folder).files == 3
    assert stored_files(folder).numbers == stored_files(one.folder).numbers


def test_an_index_that_is_wrong_is_named(strong_pair, tmp_path):
    """A file that is not there, one outside the folder, a tensor where the index does not see it, one that is twice."""
    folder, places = sharded(strong_pair, tmp_path)
    name = next(iter(places))
    for file in ("../model-0.safetensors", "/etc/passwd", "sub/model-0.safetensors", "..", ""):
        write_index(folder, {**places, name: file})
        refused(CheckpointError, load(folder), "index.json", "beside the index")
    write_index(folder, {**places, name: "model-9.safetensors"})
    refused(CheckpointError, load(folder), "model-9.safetensors", "no such file")
    other = next(file for file in places.values() if file != places[name])
    write_index(folder, {**places, name: other})
    refused(CheckpointError, load(folder), "weight_map", name, other)
    write_index(folder, places)
    tensors = load_file(folder / other)
    save_file({**tensors, name: torch.zeros(1)}, folder / other)
    refused(CheckpointError, load(folder), name, "is also in")


@pytest.mark.parametrize("size", [2**63, 2**40, 0, 7])
def test_a_hostile_header_is_one_error(strong_pair, tmp_path, size):
    folder, places = sharded(strong_pair, tmp_path)
    path = folder / places["lm_head.weight"]
    path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])
    refused(CheckpointError, load(folder), path.name, "damaged or truncated")


def test_a_truncated_shard_is_named(strong_pair, tmp_path):
    folder, places = sharded(strong_pair, tmp_path)
    path = folder / places["lm_head.weight"]
    path.write_bytes(path.read_bytes()[:-1])
    refused(CheckpointError, load(folder), path.name, "damaged or truncated")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(tmp_path, dtype, value):
    for at in (0, 100, 4999):
        numbers = torch.ones(5000, dtype=dtype)
        numbers[at] = value
        save_file({"t": numbers}, tmp_path / "model.safetensors")
        expected = {"t": TensorSpec((5000,), ("F64", "F32", "F16", "BF16"))}
        with open_tensors(tmp_path, expected) as fetch, pytest.raises(CheckpointError, match="tensor t holds NaN or"):
            fetch("t", None)


TOO_LARGE = [
    (torch.float64, 1e39, "float32", "float64"),
    (torch.float64, -1e30, "float16", "bfloat16"),
    (torch.float32, 65520.0, "float16", "bfloat16"),
    (torch.bfloat16, -1e20, "float16", "bfloat16"),
    (torch.float32, 3.4e38, "bfloat16", "float32"),
]
"""What is stored, a number of it, the dtype that cannot hold it, and the first that can."""


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(("stored", "value", "dtype", "wider"), TOO_LARGE)
def test_a_number_beyond_the_compute_dtype_is_refused_with_its_tensor(
    strong_pair, tmp_path, stored, value, dtype, wider, suffix
):
    """It would become infinite, and the first request to meet it would end. The option that is named helps."""
    norm = torch.ones(64, dtype=stored)
    norm[7] = value
    name = "model.layers.1.input_layernorm.weight"
    folder = copy_folder(strong_pair.target, tmp_path / "t", tensors={name: norm})
    if suffix == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    message = refused(CheckpointError, lambda: LLM(str(folder), None, dtype=dtype), name, dtype, f"--dtype {wider}")
    assert f"holds {float(norm.abs().max()):.4g}, " in message
    LLM(str(folder), None, dtype=wider).close()


@pytest.mark.parametrize("value", [65504.0, 65519.0])
def test_a_number_that_the_compute_dtype_can_round_to_is_taken(strong_pair, tmp_path, value):
    tensors = {"model.norm.weight": torch.full((64,), value)}
    LLM(str(copy_folder(strong_pair.target, tmp_path / "t", tensors=tensors)), None, dtype="float16").close()


@pytest.mark.parametrize("name", ["fc.weight", "lm_head.weight", "midlayer.mlp.down_proj.weight", "norm.weight"])
def test_a_draft_heads_number_beyond_the_compute_dtype_is_refused(strong_pair, tmp_path, name):
    tensor = load_file(strong_pair.head / "model.safetensors")[name].clone()
    tensor.view(-1)[-1] = 1e6
    head = copy_folder(strong_pair.head, tmp_path / "h", tensors={name: tensor})
    load_both = partial(LLM, str(strong_pair.target), str(head), dtype="float16", speculative_num_steps=2)
    refused(CheckpointError, load_both, name, "1e+06", "--dtype bfloat16")


def test_numbers_are_looked_at_twice_only_where_the_dtype_may_not_hold_them(strong_pair, monkeypatch):
    """A checkpoint in 16 or 32 bits that is held in as many, or more, costs one pass to load."""
    passes = []

    def noted(tensor):
        passes.append(tensor.dtype)
        return all_finite(tensor)

    monkeypatch.setattr("treetop.checkpoints.loader.all_finite", noted)
    for dtype in ("float32", "float64"):
        LLM(str(strong_pair.target), str(strong_pair.head), dtype=dtype).close()
    assert passes == []
    LLM(str(strong_pair.target), None, dtype="bfloat16").close()
    assert set(passes) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_number_of_8_bits_that_is_none_is_found_too(tmp_path, dtype):
    """And the largest is one."""
    numbers = torch.full((4, 5), torch.finfo(dtype).max).to(dtype)
    save_file({"t": numbers}, tmp_path / "model.safetensors")
    expected = {"t": TensorSpec((4, 5), ("F8_E4M3", "F8_E5M2"))}
    with open_tensors(tmp_path, expected) as fetch:
        assert torch.equal(fetch("t", None).view(torch.uint8), numbers.view(torch.uint8))
    numbers.view(torch.uint8)[3, 4] = 0xFF
    save_file({"t": numbers}, tmp_path / "model.safetensors")
    with open_tensors(tmp_path, expected) as fetch, pytest.raises(CheckpointError, match="tensor t holds NaN or"):
        fetch("t", None)


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_weights(tmp_path):
    """Less than 1.15 of 384 MB, in a process of its own, where the parts of a parameter come from three files."""
    for file in range(3):
        tensors = {f"{file}.{n}": torch.zeros(4096, 4096, dtype=torch.bfloat16) for n in range(4)}
        save_file(tensors, tmp_path / f"m-{file}.safetensors")
    code = f"""
from pathlib import Path
import torch
from treetop.checkpoints.loader import LoadContext, load_weights
from treetop.checkpoints.params import matrix
from treetop.weights.format import CheckpointTensor
def status(key):
    return int(next(x for x in open("/proc/self/status") if x.startswith(key)).split()[1]) * 1024
def parts(n):
    return (CheckpointTensor(f"{{file}}.{{n}}", (4096, 4096)) for file in range(3))
params = [matrix(f"w{{n}}", *parts(n)) for n in range(4)]
place = LoadContext(torch.bfloat16, torch.device("cpu"), 1)
torch.zeros(9).bfloat16().aminmax()
before = status("VmRSS")
weights = load_weights(Path({str(tmp_path)!r}), params, place)
print((status("VmHWM") - before) / sum(each.nbytes for each in weights.held.values()))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert 0.9 < float(ended.stdout) < 1.3  # of 0.4 GB, of which 64 MiB and a tensor of 32 MiB are mapped at a time


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MAPPED", 0)
    save_file({"a": torch.ones(4, 4), "b": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    params = [matrix(name, CheckpointTensor(name, (4, 4))) for name in "ab"]
    expected = {name: TensorSpec((4, 4), ("F32",)) for name in "ab"}
    assert len(load_weights(tmp_path, params, LoadContext(torch.float32, CPU, 1)).held) == 2
    with open_tensors(tmp_path, expected) as fetch:
        fetch("a", None)
        save_file({"a": torch.ones(4, 4)}, tmp_path / "new")
        (tmp_path / "new").replace(tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="changed while it was read"):
            fetch("b", None)


# ---------------------------------------------------------------------------------------------- the model's own code


def test_code_of_a_models_own_is_never_run(strong_pair, tmp_path, caplog):
    """A known architecture runs as ours, with a note; an unknown one is refused, and the code is named."""
    code = {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}
    folder = copy_folder(strong_pair.target, tmp_path / "known", auto_map=code)
    (folder / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    target_spec(folder).check()
    assert "modeling_evil" in caplog.text
    assert "never run" in caplog.text
    other = copy_folder(strong_pair.target, tmp_path / "other", architectures=["EvilForCausalLM"], auto_map=code)
    refused(CheckpointError, load(other), "EvilForCausalLM", "modeling_evil", "never run")
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------------------------------------- ids of the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.hub_folder.cache_clear()
    yield tmp_path / "hub"
    hub.hub_folder.cache_clear()


def cached(cache, source, revision="main"):
    """Put a folder into the cache, as `huggingface_hub` lays it out."""
    repo, commit = cache / "models--an--model", "0123456789abcdef0123456789abcdef01234567"
    copy_folder(source, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text(commit, encoding="utf-8")
    return repo / "snapshots" / commit


@pytest.mark.parametrize("revision", ["", "@v1"])
def test_an_id_is_taken_from_the_cache(cache, strong_pair, revision):
    (cache / "models--an--model").mkdir(parents=True)
    folder = cached(cache, strong_pair.target, revision[1:] or "main")
    assert resolve_folder(f"an/model{revision}").samefile(folder)
    assert target_spec(resolve_folder(f"an/model{revision}", "draft")).check() > 0


def test_an_id_that_is_nowhere_says_what_to_do(cache):
    for name in ("an/model", "an/model@v1"):
        parts = (f"model {name}", "not in the cache", "cannot be reached", "hf download an/model")
        refused(CheckpointError, lambda name=name: resolve_folder(name), *parts)
    parts = ("--speculative-draft-model-path an/model", "hf download")
    refused(CheckpointError, lambda: resolve_folder("an/model", "draft"), *parts)


@pytest.mark.parametrize(
    "name", ["a/b/c", "../model", "an/../model", "/an/model", "an", "an/model@", "an/mo del", "-a/b"]
)
def test_what_is_no_id_is_a_folder(cache, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    refused(CheckpointError, lambda: resolve_folder(name), "no such folder")


def test_a_folder_comes_before_an_id(cache, strong_pair, tmp_path, monkeypatch):
    copy_folder(strong_pair.target, tmp_path / "an" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("an/model") == Path("an/model")


def test_only_what_is_needed_is_asked_for(cache, strong_pair, monkeypatch):
    """Weights and JSON of the top folder; pickles only if there is nothing else; the revision is handed on."""
    asked = []

    def download(repo, **options):
        asked.append((repo, options["revision"], options["allow_patterns"]))
        return str(strong_pair.target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("an/model@v1") == strong_pair.target
    assert resolve_folder("an/model@v1") == strong_pair.target
    assert [(repo, revision) for repo, revision, _ in asked] == [("an/model", "v1")]
    assert not [pattern for pattern in asked[0][2] if "bin" in pattern or "py" in pattern]
