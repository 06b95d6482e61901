"""Random models of every family, by `transformers` and by treetop: the same logits, and the same tokens with trees.

    python scripts/fuzz_families.py --minutes 10 --seed 0

Each case takes a tiny model of `tests/support/families.py`, draws other sizes, windows, experts and factors, and runs
prompts of random lengths in float64: plainly with chunks of a random size, whose logits are compared at each position,
and with a random tree in a batch. A case that fails is printed as a line of JSON, and `--seed SEED --cases 1` with the
same `--only` runs it again. What either side refuses is counted. Exit code 1 if a case failed, 2 for an option that
cannot work.
"""

import argparse
import importlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from treetop import LLM, SamplingParams
from treetop.cli import OneLineParser, exit_code
from treetop.types.errors import InputError, UserError

TESTS = Path(__file__).parent.parent / "tests"
NEAR = 1e-4
"""How far logits may be apart, of the largest: `transformers` norms and turns in float32. Two best ones that are no
further apart may be chosen in either order."""
TOKENS, CONTEXT = 12, 128
"""Tokens that each prompt gets, and the context's length."""
Draw = Callable[[random.Random, Any], Any]


def _of(low: int, high: int) -> Draw:
    return lambda rng, value: rng.randint(low, high) if isinstance(value, int) else value


def _about(rng: random.Random, value: Any) -> Any:
    return value * rng.uniform(0.6, 1.6) if isinstance(value, float) else value


DRAWS: dict[str, Draw] = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), _of(8, 48)),
    **dict.fromkeys(("sliding_window", "index_topk", "attention_chunk_size"), _of(2, 30)),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts"), _of(1, 3)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), _of(4, 24)),
    **dict.fromkeys(("first_k_dense_replace", "max_window_layers"), _of(0, 3)),
    **dict.fromkeys(
        ("routed_scaling_factor", "embedding_multiplier", "attention_multiplier", "logits_scaling"), _about
    ),
    **dict.fromkeys(("residual_multiplier", "final_logit_softcapping", "attn_scale", "llama_4_scaling_beta"), _about),
    "vocab_size": _of(7, 40),
    "rms_norm_eps": lambda rng, value: rng.choice([1e-6, 1e-5, 1e-3]),
    "norm_topk_prob": lambda rng, value: rng.random() < 0.5,
    "tie_word_embeddings": lambda rng, value: rng.random() < 0.5,
}
"""By key of a config: another value for it. Only what a family's config has is drawn."""
TOGETHER = {"vocab_size": ("vocab_size_per_layer_input",)}
"""Keys whose value is another's."""
SPELLED = ("vocab_size", "intermediate_size", "rms_norm_eps")
"""What may be drawn where a test writes the folder's config itself, from the family's usual values."""


def drawn(rng: random.Random, config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What differs from a config: about a third of these keys, of those that it has."""
    changes: dict[str, Any] = {}
    for key in keys:
        if key not in config or rng.random() > 0.35:
            continue
        changes[key] = DRAWS[key](rng, config[key])
        changes |= {other: changes[key] for other in TOGETHER.get(key, ()) if other in config}
    return changes


def case(seed: int, only: str) -> dict[str, Any]:
    """One case. Returns its seed, its family, what was drawn, and `outcome`: equal, refused, or what differs."""
    families = importlib.import_module("support.families")
    rng = random.Random(seed)
    name = rng.choice([each for each in families.FAMILIES if only in each])
    tiny = families.FAMILIES[name]
    written = tiny.finish is not families._as_is
    changes = drawn(rng, {**families.SIZES, **tiny.config}, SPELLED if written else [*DRAWS])
    k, steps = rng.randint(1, 5), rng.randint(1, 5)
    nodes = steps + 1 if k == 1 else rng.randint(2, min(k + (steps - 1) * k * k, 24) + 1)
    shape = {"speculative_eagle_topk": k, "speculative_num_steps": steps, "speculative_num_draft_tokens": nodes}
    options: dict[str, Any] = {"graphs": rng.choice(["off", "sim"]), "overlap": rng.random() < 0.5}
    options |= {"page_size": rng.choice([1, 2, 4, 16]), "chunked_prefill_size": rng.choice([1, 5, 16, 512])}
    lengths = [rng.randint(1, 70) for _ in range(rng.randint(1, 4))]
    told = {"seed": seed, "family": name, "changes": changes, "shape": [k, steps, nodes], "lengths": lengths, **options}
    with tempfile.TemporaryDirectory() as folder:
        try:
            saved = replace(tiny, config={**tiny.config, **changes}).save(Path(folder), seed=seed % 2**31)
        except Exception as error:  # whatever `transformers` says of such a config
            return {**told, "outcome": "refused", "by": "transformers", "why": f"{type(error).__name__}: {error}"[:200]}
        try:
            return {**told, "outcome": compare(saved, lengths, shape, options, seed)}
        except UserError as error:
            return {**told, "outcome": "refused", "by": "treetop", "why": str(error)[:200]}


def compare(saved: Any, lengths: Sequence[int], shape: Mapping[str, Any], options: Mapping[str, Any], seed: int) -> str:
    """`equal`, or in words what differs between `transformers` and treetop."""
    record_logits = importlib.import_module("support.logits").record_logits
    model, prompts = saved.reference(torch.float64), saved.pair.prompts(lengths, seed=seed % 1000)
    same = {"model": str(saved.pair.target), "dtype": "float64", "device": "cpu", "context_length": CONTEXT, **options}
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    plain = LLM(draft=None, **same)
    seen, answers = record_logits(plain), []
    try:
        for number, prompt in enumerate(prompts):
            seen.clear()
            ids = plain.generate([prompt], params)[0].token_ids
            ours = torch.cat([logits[0] for logits in seen])
            theirs = saved.logits(model, [*prompt, *ids[:-1]])
            largest = float(theirs.abs().max())
            off = float((ours - theirs[-len(ours) :]).abs().max()) / largest  # but for pages of an earlier prompt
            if not off <= NEAR:
                return f"logits of prompt {number}: {off:.1e} of the largest apart"
            best = theirs[len(prompt) - 1 :].topk(2, dim=-1).values
            answers.append((ids, [float(gap) <= 2 * NEAR * largest for gap in best[:, 0] - best[:, 1]]))
    finally:
        plain.close()
    tree = LLM(draft=str(saved.pair.head), max_running_requests=4, **shape, **same)
    try:
        outputs = tree.generate(prompts, params)
        tree.scheduler.check_integrity()
    finally:
        tree.close()
    for number, (output, (ids, near)) in enumerate(zip(outputs, answers, strict=True)):
        apart = next((at for at, pair in enumerate(zip(output.token_ids, ids, strict=True)) if len({*pair}) > 1), None)
        if apart is not None and not near[apart]:
            return f"tokens of prompt {number} with a tree: the first that differs is number {apart}"
    return "equal"


def run(args: argparse.Namespace) -> int:
    """Cases until the time is over, or so many. Raises InputError for options that cannot work."""
    if args.minutes <= 0 or (args.cases is not None and args.cases < 1):
        raise InputError("--minutes must be above 0, and --cases at least 1")
    sys.path.insert(0, str(TESTS))
    if not any(args.only in name for name in importlib.import_module("support.families").FAMILIES):
        raise InputError(f"--only {args.only}: no family of tests/support/families.py has such a name")
    torch.set_num_threads(1)
    quiet: Any = importlib.import_module("transformers.utils.logging")
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    outcomes: Counter[str] = Counter()
    end, seed, failed = time.monotonic() + 60 * args.minutes, args.seed, 0
    while time.monotonic() < end and (args.cases is None or seed < args.seed + args.cases):
        found = case(seed, args.only)
        fails = found["outcome"] not in ("equal", "refused")
        outcomes["different" if fails else found["outcome"]] += 1
        failed += fails
        if fails or args.verbose:
            print(json.dumps(found), flush=True)
        seed += 1
    print(json.dumps({"first_seed": args.seed, "cases": seed - args.seed, **outcomes}), flush=True)
    return int(failed > 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        prog="fuzz_families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="no case begins later")
    parser.add_argument("--cases", type=int, help="at most so many; by default only the time counts")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each further one has the next")
    parser.add_argument("--only", default="", help="families whose name holds this")
    parser.add_argument("--verbose", action="store_true", help="print every case, with what was drawn")
    args = parser.parse_args(argv)
    return exit_code("fuzz_families", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
