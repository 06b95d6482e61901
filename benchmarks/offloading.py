"""What the tier of K/V on the host wins: an agent's next turn after many others, loaded against computed.

    python benchmarks/offloading.py                                   Llama-3.1-8B's shape, random weights
    python benchmarks/offloading.py --turns 20 --others 200 --agents 3

Agents' turns but the last come as one prompt each; then others come, whose K/V evict theirs; then each agent's last
turn, which loads what the host kept, the same again, which the GPU has now, and the same under another salt, which is
computed. Times are from a request's arrival to its first token, with nobody beside. One JSON object. Exit code 1 if a
load failed or brought less than nine tenths of what it could, or if tokens differ with --exactness bits.
"""

import random
import statistics
import time
from itertools import count
from typing import Any

import torch
from frame import add_model, end_with, machine_of, parser_of, preset, say

from treetop import LLM, SamplingParams
from treetop.scheduler.request import Request
from treetop.types.ids import RequestId
from treetop.types.messages import OffloadPlan
from treetop.types.requests import EngineRequest

IDS = count()


def main(given: list[str]) -> int:
    parser = parser_of(__doc__)
    add_model(parser)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-tokens", type=int, default=512, help="that each turn adds")
    parser.add_argument("--others", type=int, default=200)
    parser.add_argument("--other-tokens", type=int, default=512)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--pool-tokens", type=int, default=65536, help="of the GPU, which the others fill")
    parser.add_argument("--host-gib", type=float, default=24.0)
    parser.add_argument("--exactness", default="ties", choices=("bits", "ties"))
    options = parser.parse_args(given)
    model, draft = (options.model, options.draft) if options.model else preset(options.preset)
    last = options.turns * options.turn_tokens
    started_s = time.perf_counter()
    llm = LLM(
        model,
        draft,
        load_format="auto" if options.model else "dummy",
        exactness=options.exactness,
        context_length=last + 256,
        max_running_requests=8,
        max_total_tokens=options.pool_tokens,
        kv_offloading_size=options.host_gib,
        graphs="off",
        speculative_policy="fixed",
        compress_weights=False,
    )
    start_s = time.perf_counter() - started_s
    rng, vocab = random.Random(0), llm.engine.spec.vocab_size
    agents = [[rng.randrange(vocab) for _ in range(last)] for _ in range(options.agents)]
    serve(llm, agents[0][: options.turn_tokens], "warm")
    for agent in agents:
        serve(llm, agent[: last - options.turn_tokens], "")
    for _ in range(options.others):
        add(llm, [rng.randrange(vocab) for _ in range(options.other_tokens)], "")
    saved_s = drain(llm)
    served: dict[str, list[dict[str, Any]]] = {"loaded": [], "kept": [], "computed": []}
    for number, agent in enumerate(agents):
        for name, salt in (("loaded", ""), ("kept", ""), ("computed", f"computed {number}")):
            served[name].append(serve(llm, agent, salt))
            drain(llm)
    host = llm.scheduler.load.host_tier
    assert host is not None
    equal = [one["tokens"] == two["tokens"] for one, two in zip(served["loaded"], served["computed"], strict=True)]
    cached = [each["cached"] for each in served["loaded"]]
    say(
        {
            "what": "first token of an agent's last turn",
            "machine": machine_of(),
            "options": vars(options),
            "start_s": round(start_s, 1),
            "prompt_tokens": last,
            "cached_tokens": cached,
            "first_token_ms": {
                name: {
                    "median": round(statistics.median(each["first_ms"] for each in found), 1),
                    "all": [round(each["first_ms"], 1) for each in found],
                }
                for name, found in served.items()
            },
            "load_gb_s": [
                round(each["bytes"] / each["load_s"] / 1e9, 1) for each in served["loaded"] if each["load_s"]
            ],
            "equal_tokens": equal,
            "others_s": round(saved_s, 2),
            "host_tier": host._asdict(),
            "wall_s": round(time.perf_counter() - started_s, 1),
        }
    )
    wrong = options.exactness == "bits" and not all(equal)
    return int(wrong or host.failed_loads > 0 or min(cached) < 0.9 * (last - options.turn_tokens))


def add(llm: LLM, prompt: list[int], salt: str) -> Request:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return llm.scheduler.add(EngineRequest(RequestId(next(IDS)), tuple(prompt), params, 0, cache_salt=salt))


def serve(llm: LLM, prompt: list[int], salt: str) -> dict[str, Any]:
    """One request, alone, by this thread: its tokens, and ms to the first of them."""
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    began_s, first_s, load_s, moved = time.perf_counter(), 0.0, 0.0, 0
    request = add(llm, prompt, salt)
    sizes = llm.engine.layout.page_bytes(llm.engine.dtype.itemsize)
    out = []
    while request.finish_reason is None:
        while (plan := llm.scheduler.plan()) is not None:
            out.append(llm.engine.launch(plan))
        step = out.pop(0)
        llm.scheduler.commit(step.plan, llm.engine.collect(step))
        if isinstance(step.plan, OffloadPlan) and step.plan.unpacks:
            moved += sum(sizes[each.group] for each in step.plan.unpacks)
            load_s = time.perf_counter() - began_s
        if request.output_ids and not first_s:
            first_s = time.perf_counter() - began_s
    while out:
        step = out.pop(0)
        llm.scheduler.commit(step.plan, llm.engine.collect(step))
    return {
        "tokens": tuple(request.output_ids),
        "first_ms": 1e3 * first_s,
        "cached": request.num_cached_tokens,
        "load_s": load_s,
        "bytes": moved,
    }


def drain(llm: LLM) -> float:
    """Do all that is left, saves too. Returns seconds."""
    began_s = time.perf_counter()
    while (plan := llm.scheduler.plan()) is not None:
        llm.scheduler.commit(plan, llm.engine.step(plan))
    return time.perf_counter() - began_s


if __name__ == "__main__":
    end_with(main)
