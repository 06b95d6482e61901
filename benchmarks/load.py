"""How long a sharded checkpoint takes to load, against the disk's read speed, and how much host memory at most.

    python benchmarks/load.py                               about 1.5 GB, to a CPU
    python benchmarks/load.py --layers 32 --device cuda     the shape of an 8B model, to a GPU

Writes a checkpoint of random bfloat16 weights in shards, reads it as plain bytes, then loads it in a process of its
own, each time after the files have left the page cache (`posix_fadvise`), and once more from the page cache. Peak host
memory is what the process has beyond what it had before loading. One JSON object on stdout. The files are deleted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from treetop.checkpoints.loader import LoadContext, compute_device, load_weights
from treetop.checkpoints.params import stored_tensors
from treetop.cli import OneLineParser, exit_code
from treetop.models.registry import target_spec
from treetop.types.errors import EngineError, InputError
from treetop.weights.format import TensorSpec

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
LARGE_VOCAB = 128256
SHARD = 2**29
"""Bytes."""


def write(folder: Path, layers: int) -> list[Path]:
    """A checkpoint of so many layers; from 32 on with the vocabulary of an 8B model."""
    shape = {**SHAPE, "num_hidden_layers": layers, "vocab_size": LARGE_VOCAB if layers >= 32 else SHAPE["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    shards: list[dict[str, TensorSpec]] = [{}]
    for name, stored in stored_tensors(target_spec(folder).params).items():
        if sum(_bytes(each) for each in shards[-1].values()) > SHARD:
            shards.append({})
        shards[-1][name] = stored
    generator, places, files = torch.Generator().manual_seed(0), {}, []
    for index, shard in enumerate(shards):
        file = folder / f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: _random(stored, generator) for name, stored in shard.items()}, file)
        places.update(dict.fromkeys(shard, file.name))
        files.append(file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    os.sync()
    return files


def _bytes(stored: TensorSpec) -> int:
    return 2 * torch.Size(stored.shape).numel()


def _random(stored: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Random bits of which no number is infinite: the same as a weight's to a disk, and quickly made."""
    bits = torch.randint(-(2**15), 2**15, stored.shape, dtype=torch.int16, generator=generator)
    return (bits & ~0x4000).view(torch.bfloat16)


def forget(files: list[Path]) -> None:
    """Ask the kernel to drop the files from its page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes(files: list[Path]) -> float:
    """Seconds to read all, in pieces of 16 MiB."""
    started, piece = time.perf_counter(), bytearray(2**24)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - started


def load(folder: Path, device: str) -> dict[str, float]:
    """Load in this process. Host memory is of Linux, by /proc."""
    spec, on = target_spec(folder), compute_device(device)
    torch.zeros(1, device=on)  # a device's own start
    before, started = _status("VmRSS"), time.perf_counter()
    weights = load_weights(folder, spec.params, LoadContext(torch.bfloat16, on, 1))
    if on.type == "cuda":
        torch.cuda.synchronize(on)
    taken = time.perf_counter() - started
    return {
        "load_s": taken,
        "weights": sum(each.nbytes for each in weights.held.values()),
        "host": _status("VmHWM") - before,
    }


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def in_own_process(folder: Path, device: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--load", str(folder), "--device", device]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise EngineError(f"loading failed: {(ended.stderr.splitlines() or ['killed'])[-1]}")
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        files = write(folder, args.layers)
        size = sum(path.stat().st_size for path in files)
        forget(files)
        read_s = read_bytes(files)
        forget(files)
        cold = in_own_process(folder, args.device)
        warm = in_own_process(folder, args.device)
    return {
        "bytes": size,
        "files": len(files),
        "device": args.device,
        "disk_gb_per_s": size / read_s / 1e9,
        "load_s": cold["load_s"],
        "load_gb_per_s": size / cold["load_s"] / 1e9,
        "load_over_read": cold["load_s"] / read_s,
        "cached_load_s": warm["load_s"],
        "peak_host_over_weights": max(cold["host"], warm["host"]) / cold["weights"],
        "peak_host_bytes": max(cold["host"], warm["host"]),
    }


def run() -> int:
    parser = OneLineParser(prog="load", description="Load time and peak host memory of a sharded checkpoint.")
    parser.add_argument("--layers", type=int, default=3, help="of 0.44 GB each (default 3); 32 is an 8B model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where weights go (default cpu)")
    parser.add_argument("--folder", metavar="FOLDER", help="on which disk (default: that of temporary files)")
    parser.add_argument("--load", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.layers < 1:
        raise InputError(f"--layers must be at least 1, got {args.layers}")
    print(json.dumps(load(Path(args.load), args.device) if args.load else measure(args)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("load", run))
