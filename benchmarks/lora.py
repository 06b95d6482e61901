"""What adapters cost: captured rounds of a batch whose rows have adapters, beside the same model without any.

    python benchmarks/lora.py                                     32 rows, 8 adapters of rank 16, plain and (5, 4, 16)
    python benchmarks/lora.py --adapters 1 --rank 64 --shapes 0,1,1
    python benchmarks/lora.py --draft-rank 16 --shapes 5,4,16     adapters of the draft head, too

Random weights of a preset and of its EAGLE-3 head, an accept length of 3 that is forced, 1,024 tokens of context. Every
module that an adapter may be beside has one. Three times of each shape, on the device alone, in milliseconds: of an
engine without adapters, of one that has them and whose rows have none, and of rows that have them in turn. Needs a GPU;
one JSON object a line.
"""

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from frame import NAMES, preset
from safetensors.torch import save_file

from treetop import LLM
from treetop.bench.rounds import device_times_ms
from treetop.checkpoints.folder import resolve_folder
from treetop.checkpoints.lora_folder import is_adaptable
from treetop.checkpoints.params import Param
from treetop.drafts.registry import drafter_spec
from treetop.models.registry import target_spec


def save_adapter(folder: Path, params: Iterable[Param], rank: int) -> Path:
    """Random factors of every module that may have some, as PEFT writes them."""
    tensors = {}
    for param in filter(is_adaptable, params):
        for source in param.sources:
            out, width = source.shape
            name = f"base_model.model.{source.module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, width).mul_(width**-0.5).to(torch.bfloat16)
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank).mul_(0.02).to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": rank}))
    return folder


def times_ms(
    model: str, draft: str, shape: str, modules: dict[str, str], options: argparse.Namespace
) -> dict[str, float]:
    """Median of each way that rows may be, by its name."""
    steps, topk, nodes = map(int, shape.split(","))
    tree: dict[str, Any] = {"draft": None}
    if steps:
        tree = {"draft": draft, "speculative_num_steps": steps, "speculative_eagle_topk": topk}
        tree |= {"speculative_num_draft_tokens": nodes, "simulate_accept_length": 3.0}
    llm = LLM(
        model, load_format="dummy", dtype="bfloat16", max_running_requests=options.rows, context_length=2048,
        max_total_tokens=options.rows * 1536, exactness="ties", lora_modules=modules, **tree,
    )  # fmt: skip
    slots, found = llm.engine.runner.state.numbers["adapter"], {}
    ways = {"none": 0, "own": len(modules)} if modules else {"base": 0}
    for way, number in ways.items():
        turn = torch.arange(options.rows, device=slots.device)
        slots[: options.rows] = turn % number + 1 if number else 0 * turn
        found[way] = statistics.median(device_times_ms(llm, options.rows, options.length, options.rounds))
    llm.close()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--draft-rank", type=int, default=0)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", nargs="+", default=["0,1,1", "5,4,16"])
    chosen = parser.parse_args()
    target, head = preset(chosen.preset)
    with tempfile.TemporaryDirectory() as temporary:
        spec = target_spec(resolve_folder(target))
        saved = save_adapter(Path(temporary) / "adapter", spec.params, chosen.rank)
        if chosen.draft_rank:
            of_head = drafter_spec(resolve_folder(head), spec.config, dummy=True).params
            save_adapter(saved / "draft", of_head, chosen.draft_rank)
        named = {f"a{i}": str(saved) for i in range(chosen.adapters)}
        for each in chosen.shapes:
            found = times_ms(target, head, each, {}, chosen)
            gc.collect()
            found |= times_ms(target, head, each, named, chosen)
            gc.collect()
            said = {"shape": each, "rows": chosen.rows, "adapters": chosen.adapters, "rank": chosen.rank}
            said |= {"draft_rank": chosen.draft_rank}
            ms = {f"{way}_ms": round(time, 3) for way, time in found.items()}
            ratios = {"ratio": found["own"] / found["base"], "idle_ratio": found["none"] / found["base"]}
            ms |= {name: round(ratio, 3) for name, ratio in ratios.items()}
            print(json.dumps({**said, **ms, "device": torch.cuda.get_device_name()}), flush=True)
