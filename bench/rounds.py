"""Milliseconds a decode round on a GPU: real shapes, random weights, a forced accept length.

Every round goes through scheduler and engine, host work included, as many in flight as the engine allows: a round's
time is that between two results. A second figure is the GPU's own: the phases replayed between two CUDA events. Prints
JSON lines; the first names the machine.

    python bench/rounds.py --batch 1 8 32 --shapes 0,1,1 5,1,6 5,4,16
"""

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path

import torch

from treetop import LLM, SamplingParams
from treetop.types.messages import RoundPlan
from treetop.types.stopping import NoStop

PRESETS = Path(__file__).parent / "presets"


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a device-to-device copy."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(5):
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / best


def engine(shape: tuple[int, int, int], accept_length: int, batch: int, overlap: bool | None = None) -> LLM:
    """A Llama-3.1-8B target with an EAGLE-3 head of 32k draft vocabulary, or the target alone for S = 0."""
    steps, topk, nodes = shape
    draft = {
        "draft": str(PRESETS / "eagle3-llama-3.1-8b"),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
        "simulate_accept_length": min(accept_length, steps + 1),
    }
    return LLM(
        str(PRESETS / "llama-3.1-8b"),
        **(draft if steps else {}),
        load_format="dummy",
        dtype="bfloat16",
        context_length=2048,
        max_running_requests=batch,
        chunked_prefill_size=4096,
        overlap=overlap,
    )


def measure(llm: LLM, batch: int, length: int, rounds: int) -> dict[str, float]:
    """Median times of a round with `batch` live requests of `length` prompt tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(batch):
        ids = torch.randint(0, 128000, (length,), generator=generator).tolist()
        llm.scheduler.add(ids, SamplingParams(max_tokens=900, ignore_eos=True), 0, NoStop())
    wall, emitted, before_s, tickets = [], 0, None, deque()
    while len(wall) < rounds + 5:
        while (plan := llm.scheduler.plan()) is not None:
            tickets.append(llm.engine.launch(plan))
        last = tickets.popleft()
        updates = llm.scheduler.commit(last.plan, llm.engine.collect(last))
        full, now_s = isinstance(last.plan, RoundPlan) and len(last.plan.rows) == batch, time.perf_counter()
        if full and before_s is not None:
            wall.append(1e3 * (now_s - before_s))
            emitted += sum(len(update.new_ids) for update in updates)
        before_s = now_s if full else None
    wall = wall[5:]
    torch.cuda.synchronize()
    device = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    key = llm.engine.last_key
    for _ in range(rounds):
        start.record()
        llm.engine.launcher.launch(key, last.plan.committed_bound)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end))
    return {
        "round_ms": round(statistics.median(wall), 3),
        "round_ms_low": round(min(wall), 3),
        "round_ms_high": round(max(wall), 3),
        "steps_in_flight": llm.engine.layout.lag,
        "gpu_ms": round(statistics.median(device), 3),
        "tokens_per_row_round": round(emitted / (batch * (rounds + 5)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shapes", nargs="+", default=["0,1,1", "3,1,4", "5,1,6", "5,4,16"], help="S,k,T")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--accept-length", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=None)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_tb_s": round(bandwidth / 1e12, 2)}
    print(json.dumps(machine), flush=True)
    for text in args.shapes:
        steps, topk, nodes = (int(part) for part in text.split(","))
        for batch in args.batch:
            started_s = time.perf_counter()
            llm = engine((steps, topk, nodes), args.accept_length, batch, args.overlap)
            start_s = round(time.perf_counter() - started_s, 1)
            figures = measure(llm, batch, args.length, args.rounds)
            case = {"shape": [steps, topk, nodes], "batch": batch, "start_s": start_s}
            print(json.dumps({**case, **figures}), flush=True)
            del llm
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
