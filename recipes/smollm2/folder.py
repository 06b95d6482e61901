"""The target as a folder that `transformers` reads: the GGUF file decoded to bfloat16, or to what --dtype says.

python recipes/smollm2/folder.py build/smollm2/target
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from treetop.checkpoints.checkpoint import open_file, tensor_files
from treetop.checkpoints.folder import resolve_folder


def main() -> None:
    """Write the JSON files beside the weights, and the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="builtin:smollm2")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    folder = resolve_folder(args.model)
    args.output.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.json"):
        shutil.copy(file, args.output / file.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (args.output / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {}
    for name, path in tensor_files(folder).items():
        with open_file(path) as stored:
            tensors[name] = stored.get_tensor(name).to(getattr(torch, args.dtype)).contiguous()
    save_file(tensors, args.output / "model.safetensors", metadata={"format": "pt"})
    print(f"{args.output}: {len(tensors)} tensors of {folder}")


if __name__ == "__main__":
    main()
