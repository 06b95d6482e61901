"""Time of prompts by the size of prefill steps and the attention backend: an 8B target's shape, random weights.

    python benchmarks/prefill.py --chunks 2048 4096 8192 --backends auto --json prefill.json

For each backend and each size (`--chunked-prefill-size`) one engine is started; 0 is what the engine chooses. The cases
are prompts times tokens. A time is that from the call to the first token of the last prompt, the prompts encoded and
checked before; median of the repeats, after one that is not timed. Decoding plays no part: nothing is captured, and
weights are in 16 bits alone. Greedy first tokens are compared with those of the first engine: with random weights in 16
bits they may differ, and the output says where.
"""

import argparse
import gc
import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from frame import NAMES, end_with, machine_of, parser_of, preset, tell, write_report

from treetop import LLM, SamplingParams
from treetop.attention.auto import AutoBackend
from treetop.attention.registry import BACKENDS
from treetop.bench.prompts import prompt_ids
from treetop.engine.memory import gib
from treetop.types.errors import EngineError, InputError

CASES, REPEATS = ("1x1024", "1x8192", "1x32000", "8x8192"), 5


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of so many tokens each."""

    prompts: int
    tokens: int

    @classmethod
    def of(cls, text: str) -> "Case":
        prompts, _, tokens = text.partition("x")
        if not (prompts.isdigit() and tokens.isdigit() and int(prompts) and int(tokens)):
            raise InputError(f"--cases {text}: a case is PROMPTSxTOKENS, as 8x8192")
        return cls(int(prompts), int(tokens))


@dataclass(frozen=True, slots=True)
class Figures:
    """A case on an engine, in ms. first_tokens: its greedy answers. agree: the first engine gave them too."""

    backend: str
    chunk: int
    prompts: int
    tokens: int
    ms: float
    ms_low: float
    ms_high: float
    tokens_per_s: float
    first_tokens: list[int]
    agree: bool


def time_once(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[int]]:
    """Seconds until every prompt has its first token, and these tokens."""
    stream = llm.stream(prompts, SamplingParams(max_tokens=1, ignore_eos=True))  # encodes and checks at once
    first = [-1] * len(prompts)
    started_s = time.perf_counter()
    for delta in stream:
        if delta.output is not None:
            if delta.output.error is not None:
                raise EngineError(f"a prompt was aborted: {delta.output.error}")
            first[delta.index] = delta.output.token_ids[0]
    return time.perf_counter() - started_s, first


def start(args: argparse.Namespace, cases: list[Case], chunk: int, backend: str) -> LLM:
    """An engine that prefills as any other and starts soon: rounds are eager; steps overlap where they can."""
    plans = backend in BACKENDS and BACKENDS[backend].capabilities.needs_host_extents
    chosen: dict[str, Any] = {"attention_backend": backend, "load_format": args.load_format}
    return LLM(
        args.model or preset(args.preset)[0],
        None,
        **chosen,
        chunked_prefill_size=chunk or None,
        max_running_requests=max(case.prompts for case in cases),
        context_length=max(case.tokens for case in cases) + 1,
        graphs="off",
        overlap=not plans,
        compress_weights=False,
        disable_radix_cache=True,
        device=args.device,
        tp_size=args.tp_size,
    )


def measure(llm: LLM, backend: str, case: Case, repeats: int, expected: list[int] | None) -> Figures:
    prompts = prompt_ids(llm, case.prompts, case.tokens)
    time_once(llm, prompts)
    runs = [time_once(llm, prompts) for _ in range(repeats)]
    times, first = sorted(1e3 * seconds for seconds, _ in runs), runs[0][1]
    ms = statistics.median(times)
    return Figures(
        backend=backend,
        chunk=llm.engine.layout.chunk,
        prompts=case.prompts,
        tokens=case.tokens,
        ms=ms,
        ms_low=times[0],
        ms_high=times[-1],
        tokens_per_s=1e3 * case.prompts * case.tokens / ms,
        first_tokens=first,
        agree=expected in (None, first),
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every case on every engine; a line of text each on stderr."""
    cases = [Case.of(text) for text in args.cases]
    if args.repeats < 1 or min(args.chunks) < 0:
        raise InputError(f"--repeats must be at least 1 and --chunks at least 0, got {args.repeats}, {args.chunks}")
    engines, figures = [], []
    expected: dict[Case, list[int]] = {}
    for backend, chunk in itertools.product(args.backends, args.chunks):
        began_s = time.perf_counter()
        llm = start(args, cases, chunk, backend)
        start_s = time.perf_counter() - began_s
        layout, budget = llm.engine.layout, llm.engine.memory.budget
        tell(f"{backend}, steps of {layout.chunk}: up in {start_s:.1f} s, {gib(budget.allowance)} for activations")
        for case in cases:
            figures.append(measure(llm, backend, case, args.repeats, expected.get(case)))
            expected.setdefault(case, figures[-1].first_tokens)
            tell(line_of(figures[-1]))
        backend_now = llm.engine.runner.backend
        reasons = backend_now.reasons if isinstance(backend_now, AutoBackend) else {}
        engines.append(
            {
                "backend": backend,
                "chunk": layout.chunk,
                "start_s": start_s,
                "activations_bytes": budget.allowance,
                "attends": backend_now.name,
                "reasons": reasons,
            }
        )
        llm.close()
        del llm, backend_now
        gc.collect()  # an engine's memory, before the next one takes its share
    return {"machine": machine_of(), "engines": engines, "figures": [asdict(each) for each in figures]}


def line_of(f: Figures) -> str:
    case = f"{f.prompts} x {f.tokens}"
    differs = "" if f.agree else "  first tokens differ from the first engine's"
    return f"  {case:>10} {f.ms:9.1f} ms ({f.ms_low:.1f} .. {f.ms_high:.1f}) {f.tokens_per_s:9.0f} tokens/s{differs}"


def main(arguments: list[str]) -> int:
    """Lines on stderr, JSON on stdout or in a file."""
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=NAMES, default=NAMES[0])
    parser.add_argument("--model", metavar="FOLDER", help="another target than the preset's")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="dummy")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--chunks", nargs="+", type=int, default=[0], metavar="N", help="sizes of steps; 0: the engine's"
    )
    parser.add_argument("--backends", nargs="+", default=["auto"], metavar="NAME")
    parser.add_argument("--tp-size", type=int, default=1, metavar="N", help="GPUs that share the model")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="PROMPTSxTOKENS")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", metavar="FILE", help="write the results here instead of stdout")
    args = parser.parse_args(arguments)
    write_report(run(args), args.json)
    return 0


if __name__ == "__main__":
    end_with(main)
