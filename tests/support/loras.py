"""Low-rank adapters as PEFT writes them, and what a model is with one merged into its weights."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import copy_folder

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(target: Path, kinds=EVERY, within="") -> dict[str, tuple[int, int]]:
    """Modules of a model's layers with these names, and the shapes of their weights. within: what names begin with."""
    tensors = load_file(target / "model.safetensors")
    names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight") and re.match(within, name)]
    return {name: tuple(tensors[f"{name}.weight"].shape) for name in names if name.rpartition(".")[2] in kinds}


def save_lora(
    folder: Path, target: Path, rank=4, alpha=8.0, seed=0, kinds=EVERY, size=0.3, *, within="", **config
) -> Path:
    """Random factors for modules of a target; `config` as in PEFT's file."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, (out, width) in modules_of(target, kinds, within).items():
        at = f"base_model.model.{module}"
        tensors[f"{at}.lora_A.weight"] = torch.randn((rank, width), generator=generator) * width**-0.5
        tensors[f"{at}.lora_B.weight"] = torch.randn((out, rank), generator=generator) * size
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(kinds),
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merged(folder: Path, target: Path, lora: Path, scale: float) -> Path:
    """The target with an adapter in its weights, in float64."""
    weights = load_file(target / "model.safetensors")
    weights = {name: x.double() if x.is_floating_point() else x for name, x in weights.items()}
    factors = load_file(lora / "adapter_model.safetensors")
    for name in list(factors):
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = factors[name.replace("lora_A", "lora_B")].double()
            weights[f"{module}.weight"] += scale * b @ factors[name].double()
    return copy_folder(target, folder, tensors=weights)
