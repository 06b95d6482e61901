"""What calibration is worth: accept lengths of the embedded pair whose head's logits are scaled, with it and without.

Scaling a head's logits leaves its chains as they are, and changes how its probabilities rank. Prints JSON: for each
scale and shape the tokens a round emits over rounds 200 to 2,200 of one stream of requests, with `learn` and `off`,
and the temperature that was learned.

Run: python benchmarks/calibration.py [--scales 1,0.25,0.4,0.6,2,4] [--shapes 5,4,16 7,4,8] [--rows 1]
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from treetop import LLM, SamplingParams
from treetop.bench.machine import measure_machine
from treetop.bench.prompts import read_prompts
from treetop.checkpoints.folder import resolve_folder
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL

FIRST, LAST = 200, 2200
NEW_TOKENS = 256
"""Of each request: on longer outputs the embedded target repeats itself, which every head foretells."""


def scaled_head(head: Path, scale: float, folder: Path) -> Path:
    """A copy of an EAGLE-3 head whose logits are `scale` times as large: its last norm's weights are."""
    shutil.copytree(head, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["norm.weight"] = (weights["norm.weight"].float() * scale).to(weights["norm.weight"].dtype)
    file.chmod(0o644)
    save_file(weights, file)
    return folder


def accept_length(llm: LLM, prompts: list[list[int]], temperature: float) -> float:
    """Tokens a round over rounds `FIRST` to `LAST`, requests in the order of their prompts."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=1)
    accepted: list[int] = []
    while len(accepted) < LAST:
        for output in llm.generate(prompts, params):
            accepted += output.metrics.accept_lens
    return 1 + sum(accepted[FIRST:LAST]) / (LAST - FIRST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", default=BUILTIN_DRAFT, help="folder of an EAGLE-3 head of the embedded model")
    parser.add_argument("--scales", type=lambda text: [float(each) for each in text.split(",")], default=None)
    parser.add_argument("--shapes", nargs="+", default=["5,4,16", "7,4,8"], help="S,k,T of each")
    parser.add_argument("--modes", nargs="+", default=["off", "learn"])
    parser.add_argument("--rows", type=int, default=1, help="requests decoded at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for scale in args.scales or [1.0, 0.25, 0.4, 0.6, 2.0, 4.0]:
            head = scaled_head(resolve_folder(args.head, "draft"), scale, Path(folder) / str(scale))
            for shape in args.shapes:
                steps, topk, size = map(int, shape.split(","))
                for mode in args.modes:
                    llm = LLM(
                        BUILTIN_MODEL,
                        str(head),
                        speculative_num_steps=steps,
                        speculative_eagle_topk=topk,
                        speculative_num_draft_tokens=size,
                        speculative_calibration=mode,
                        max_running_requests=args.rows,
                        disable_radix_cache=True,
                    )
                    length = accept_length(llm, read_prompts(None, 64, llm.tokenizer), args.temperature)
                    heat = llm.engine.runner.state.calibration.heat.tolist()
                    row = {"scale": scale, "shape": shape, "mode": mode, "accept_length": round(length, 3)}
                    results.append(row | {"temperatures": [round(1 / each, 3) for each in heat]})
                    llm.close()
    machine = asdict(measure_machine(torch.device("cpu"), torch.float32))
    print(json.dumps({"machine": machine, "rows": args.rows, "results": results}, indent=1))


if __name__ == "__main__":
    main()
