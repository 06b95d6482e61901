"""Rounds of several shapes, and prompts, on one engine: for models that take long to start.

    python benchmarks/one_engine.py --preset qwen3-next-80b-a3b --quantization w4a16 --out next80.json

Of the preset's shape with random weights: seconds of each part of the start; device milliseconds of rounds of each
shape and batch, on rows of `--context` tokens, beside the floor; and seconds of a prompt's prefill. Then the same
prompts on a dense model whose products do as many operations a token (`dense`: attention in all layers, the same
hidden size, layers and format), which shows what experts and recurrences cost beside them. JSON lines on stdout.
"""

import gc
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from frame import NAMES, end_with, machine_of, parser_of, preset, say
from prefill import time_once
from quantized_cases import CONFIGS
from rounds import in_format

from treetop import LLM
from treetop.bench.experts import distinct_experts
from treetop.bench.machine import measure_machine
from treetop.bench.prompts import prompt_ids
from treetop.bench.roofline import Case, round_floor
from treetop.bench.rounds import device_times_ms, greedy_key, pose
from treetop.engine.startup.weight_copies import packing
from treetop.models.registry import TargetSpec, target_spec
from treetop.types.layout import PLAIN, SpecShape

_SPARE = 64
"""Tokens that rounds may add to a posed row."""


def operations_of(target: TargetSpec, llm: LLM) -> int:
    """Numbers that a prompt's token is multiplied by, the output matrix, which only its last token takes, left out."""
    layers = target.expert_layers(llm.engine.dtype, packing(llm.config))
    experts = sum(each.router.top_k * each.numbers for each in layers)
    return target.streamed + experts - target.config.vocab_size * target.config.hidden_size


def dense_of(config: dict[str, Any], numbers: int) -> dict[str, Any]:
    """A configuration of Qwen3's with about so many numbers, as wide and as deep."""
    hidden, layers, heads, kv_heads, dim = config["hidden_size"], config["num_hidden_layers"], 16, 2, 128
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    inner = max(round((numbers / layers - attention) / (3 * hidden) / 128), 1) * 128
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": inner,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **{each: config[each] for each in ("vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings")},
    }


def start(model: str, draft: str | None, args: Any, rows: int) -> tuple[LLM, float]:
    """An engine of all shapes, or plain without a draft, and the seconds that it took."""
    trees = [shape for shape in args.shapes if SpecShape.parse(shape, "--shapes") != PLAIN]
    shapes: dict[str, Any] = {"speculative_policy": "auto", "speculative_shapes": " ".join(trees)} if draft else {}
    started_s = time.perf_counter()
    llm = LLM(
        model,
        draft,
        load_format="dummy",
        max_running_requests=rows,
        context_length=max(*args.prefill, args.context + _SPARE) + _SPARE,
        max_total_tokens=max(*args.prefill, rows * args.context) + 2 * rows * _SPARE,
        chunked_prefill_size=args.chunk,
        disable_radix_cache=True,
        device=args.device,
        **shapes,
    )
    return llm, time.perf_counter() - started_s


def prefills(llm: LLM, name: str, args: Any) -> None:
    """Say the seconds of each prompt: the better of two turns."""
    for tokens in args.prefill:
        prompts = prompt_ids(llm, 1, tokens)
        seconds = [time_once(llm, prompts)[0] for _ in range(3)][1:]
        say(
            {
                "prefill": name,
                "tokens": tokens,
                "seconds": round(min(seconds), 4),
                "both": [round(s, 4) for s in seconds],
            }
        )


def rounds(llm: LLM, args: Any) -> None:
    """Say the device milliseconds of each shape and batch."""
    engine = llm.engine
    machine = measure_machine(engine.runner.buffers.rows.device, engine.dtype)
    say({"machine": machine.sentence()})
    for batch in args.batches:
        for shape in (SpecShape.parse(text, "--shapes") for text in args.shapes):
            ms = statistics.median(device_times_ms(llm, batch, args.context, args.rounds, shape))
            pose(llm, batch, args.context)
            distinct = distinct_experts(engine.runner, greedy_key(llm, batch, shape), args.context)
            case = Case(shape, batch, args.context, engine.dtype.itemsize, packing=packing(llm.config))
            draft = None if shape == PLAIN else engine.draft
            floor = 1e3 * sum(round_floor(engine.target, draft, case, machine, distinct=distinct).values())
            say(
                {
                    "rows": batch,
                    "shape": [shape.num_steps, shape.topk, shape.num_draft_tokens],
                    "device_ms": round(ms, 3),
                    "floor_ms": round(floor, 3),
                    "over_floor": round(ms / floor, 2),
                    "experts": None if distinct is None else round(statistics.mean(distinct), 1),
                }
            )


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=NAMES, default="qwen3-next-80b-a3b")
    parser.add_argument("--model", metavar="FOLDER", help="a configuration instead of the preset's")
    parser.add_argument("--draft", metavar="FOLDER", help="its head")
    parser.add_argument("--quantization", choices=CONFIGS)
    parser.add_argument("--shapes", nargs="+", default=["0,1,1", "3,1,4", "5,4,16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a row in rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prefill", nargs="+", type=int, default=[8192, 32768], help="tokens of a prompt")
    parser.add_argument("--chunk", type=int, metavar="N", help="tokens of a prefill step; the engine's by default")
    parser.add_argument("--without-dense", action="store_true", help="the preset alone")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    model, draft = preset(args.preset)
    say(machine_of())
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as beside:
        model, draft = args.model or model, args.draft or draft
        model = in_format(model, args.quantization, Path(made)) if args.quantization else model
        llm, seconds = start(model, draft, args, max(args.batches))
        say({"up": args.preset, "start_s": round(seconds, 1), "device_gib": _gib(llm)})
        rounds(llm, args)
        prefills(llm, args.preset, args)
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        dense = dense_of(config, operations_of(target_spec(Path(model)), llm))
        llm.close()
        if args.without_dense:
            return 0
        del llm
        gc.collect()
        (Path(beside) / "config.json").write_text(json.dumps(dense), encoding="utf-8")
        name = in_format(beside, args.quantization, Path(beside)) if args.quantization else beside
        llm, seconds = start(name, None, args, 1)
        say({"up": "dense", "start_s": round(seconds, 1), "intermediate_size": dense["intermediate_size"]})
        prefills(llm, "dense", args)
        llm.close()
    return 0


def _gib(llm: LLM) -> float:
    """Of weights and buffers, as the plan counts them."""
    return round(llm.engine.memory.budget.static / 2**30, 2)


if __name__ == "__main__":
    end_with(main)
