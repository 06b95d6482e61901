"""Every attention backend of this machine in every phase, eager and captured, and in whole captured rounds.

    python benchmarks/backends.py                                   what is installed here; one JSON object a line
    python benchmarks/backends.py --commit ABC1234 --write KNOWN_FAILURES.md   and its table, made of it

phases   a call of each phase of the largest tree (k 8, S 8, T 60) on pages of 2: its error relative to dense attention
         in float32, as it stands, and recorded into a CUDA graph and replayed. Prefill is never captured.
rounds   the embedded pair with that tree and page, captured, against plain decoding on the same backend
no rows  captured rounds of every bucket in which no row is live: they leave state and pages as they were
windows  GPT-OSS's layers (windows of 128 on Triton, sinks, experts) with an EAGLE-3 head and random weights, past the
         window, against plain decoding

In 16 bits products of other row counts round otherwise, so a sequence may leave plain decoding at a near tie: these are
counted, with the largest gap between the two best logits there. In float32 only gaps below 1e-4 are excused.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_cases import TOLERANCE, Backend, Case, build, check, error_of
from attention_shapes import Shape
from frame import DEVICE, end_with, graph_of, machine_of, parser_of, preset, say

from treetop import LLM, SamplingParams
from treetop.attention.auto import make_backend
from treetop.attention.capabilities import Need
from treetop.attention.contract import RoundExtents
from treetop.attention.registry import BACKENDS, refusal
from treetop.bench.equality import equal_outputs
from treetop.bench.prompts import read_prompts
from treetop.engine.rounds import RoundKey
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.sampling import SamplingMode

NAMES = ("triton", "fa3", "flashinfer", "fa4")
K, S, T, PAGE = 8, 8, 60, 2
PHASES = {
    "plain": Shape("plain", 5, 1, 900, 1),
    "draft": Shape("draft", 5, K, 900, K * (S - 1)),
    "verify": Shape("tree", 5, T, 900, T),
    "extend": Shape("draft", 5, S + 1, 900, S + 1),
    "prefill": Shape("prefill", 5, 300, 900, 0),
}
TREE: dict[str, Any] = {
    "speculative_policy": "fixed",
    "speculative_eagle_topk": K,
    "speculative_num_steps": S,
    "speculative_num_draft_tokens": T,
}
BEGIN, END = "<!-- written by benchmarks/backends.py -->", "<!-- until here -->"


def phases(name: str) -> Iterator[dict[str, Any]]:
    """Errors of each phase's call, eager and captured."""
    for phase, plain in PHASES.items():
        shape = replace(plain, page_size=PAGE, ragged=True)
        problem = refusal(name, shape.need)
        if problem is not None:
            yield {"part": "phases", "backend": name, "phase": phase, "refused": problem.reason}
            continue
        torch.manual_seed(0)
        case, backend = build(shape, num_layers=2), make_backend(name, shape.need)
        found: dict[str, Any] = {"eager": check(case, backend)}
        if phase != "prefill":
            found["captured"] = _captured(case, backend)
        limit = TOLERANCE[shape.dtype]
        ok = all(error < limit for error in found.values())
        yield {"part": "phases", "backend": name, "phase": phase, **found, "limit": limit, "ok": ok}


def _captured(case: Case, backend: Backend) -> float:
    """The same on buffers that a replay reads: recorded on a batch of dummy rows, replayed on the case's."""
    metadata, outs = case.metadata, list[torch.Tensor]()
    rows, kv_len = metadata.rows.clone(), metadata.kv_len.clone()
    metadata.rows.fill_(case.shape.rows)
    metadata.kv_len.zero_()

    def work() -> None:
        plan = case.plan(backend)
        outs[:] = [case.call(backend, plan, layer) for layer in (case.layers[0], case.layers[-1])]

    graph = graph_of(work)
    metadata.rows.copy_(rows)
    metadata.kv_len.copy_(kv_len)
    if backend.capabilities.needs_host_extents:
        committed = torch.zeros(case.shape.rows + 1, dtype=torch.int64, device=DEVICE)
        committed[rows] = kv_len
        backend.plan_round(RoundExtents(rows, committed, {metadata.phase: case.shape.n}))  # type: ignore[attr-defined]
    graph.replay()
    torch.cuda.synchronize()
    layers = (case.layers[0], case.layers[-1])
    return max(error_of(case, out, layer) for out, layer in zip(outs, layers, strict=True))


def rounds(name: str, dtype: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    """The embedded pair."""
    options: dict[str, Any] = {"attention_backend": name, "dtype": dtype, "page_size": PAGE, "max_running_requests": 8}
    tree, plain = LLM(BUILTIN_MODEL, BUILTIN_DRAFT, **TREE, **options), LLM(BUILTIN_MODEL, None, **options)
    prompts = read_prompts(None, 16, plain.tokenizer)
    yield {"part": "rounds", "backend": name, "dtype": dtype, **_against_plain(tree, plain, prompts, max_tokens)}
    yield {"part": "no rows", "backend": name, "dtype": dtype, "ok": _rounds_without_rows(tree)}
    tree.close()
    plain.close()


def _against_plain(tree: LLM, plain: LLM, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    got, expected = tree.generate(prompts, params), plain.generate(prompts, params)
    for llm in (tree, plain):
        llm.scheduler.check_integrity()
    found = equal_outputs(plain, expected, got)
    forwards = sum(output.metrics.target_forwards for output in got)
    return {
        "ok": found.ok and type(tree.engine.launcher).__name__ == "CudaGraphs",
        "sequences": found.sequences,
        "tokens": found.tokens,
        "part_at_ties": len(found.margins),
        "largest_gap": max(found.margins, default=0.0),
        "unequal": found.unequal,
        "accept_length": round(sum(len(output.token_ids) - 1 for output in got) / forwards, 2),
    }


def _rounds_without_rows(llm: LLM) -> bool:
    """Whether captured rounds of padding alone, in every bucket, change nothing."""
    runner, layout = llm.engine.runner, llm.engine.layout
    held = [*runner.state.record.tables.values(), *[table.data for table in runner.state.page_tables.values()]]
    held += [pool.data for pool in runner.pools.values()]
    before = [tensor.clone() for tensor in held]
    runner.buffers.row_lists.fill_(layout.dummy_row)
    with torch.inference_mode():
        for bucket in layout.buckets:
            for shape in layout.shapes:
                llm.engine.launcher.launch(RoundKey(bucket, shape, SamplingMode.GREEDY), layout.max_committed)
    torch.cuda.synchronize()
    return all(torch.equal(now, then) for now, then in zip(held, before, strict=True))


def windows(name: str, dtype: str, max_tokens: int) -> dict[str, Any]:
    """GPT-OSS's layers, fewer of them, and few tokens, so that a random head is often right."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for source, changed in zip(preset("gpt-oss-20b"), ({"num_hidden_layers": 4}, {}), strict=True):
            config = json.loads((Path(source) / "config.json").read_text())
            config |= {"vocab_size": 24, "max_position_embeddings": 4096, **changed}
            config |= {"draft_vocab_size": 20} if "draft_vocab_size" in config else {}
            config.pop("quantization_config", None)
            path = Path(folder) / Path(source).name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))
            paths.append(str(path))
        options: dict[str, Any] = {
            "attention_backend": name,
            "dtype": dtype,
            "page_size": PAGE,
            "load_format": "dummy",
            "max_running_requests": 4,
            "context_length": 1024,
        }
        tree, plain = LLM(paths[0], paths[1], **TREE, **options), LLM(paths[0], None, **options)
        prompts = [[(7 * i * i + 3 * j * j + j) % 24 for j in range(100 + 60 * i)] for i in range(6)]
        found = _against_plain(tree, plain, prompts, max_tokens)
        tree.close()
        plain.close()
    return {"part": "windows", "backend": name, "dtype": dtype, **found}


def everything(names: list[str], max_tokens: int) -> Iterator[dict[str, Any]]:
    for name in names:
        problem = refusal(name, Need(torch.bfloat16, DEVICE))
        if problem is not None:
            yield {"part": "absent", "backend": name, "reason": problem.reason}
            continue
        yield from phases(name)
        for dtype in ("bfloat16", "float32"):
            if getattr(torch, dtype) in BACKENDS[name].capabilities.dtypes:
                yield from rounds(name, dtype, max_tokens)
        if name in ("triton", "fa3"):
            yield windows(name, "bfloat16", max_tokens)
        if name == "triton":
            yield windows(name, "float32", max_tokens)


def table(lines: list[dict[str, Any]], commit: str, date: str, machine: str) -> str:
    """The page's table: a row a backend, a column a phase, eager / captured; then whole captured rounds."""
    names = list(dict.fromkeys(line["backend"] for line in lines))
    head = ["backend", *PHASES, "no live row", "rounds, bfloat16", "rounds, float32", "GPT-OSS's layers"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in names:
        mine = [line for line in lines if line["backend"] == name]
        if any(line["part"] == "absent" for line in mine):
            rows.append(f"| {name} | " + " | ".join(["not run"] * (len(head) - 1)) + " |")
            continue
        cells = [_phase_cell(line) for phase in PHASES for line in mine if line.get("phase") == phase]
        cells.append(", ".join(dict.fromkeys(_said(line["ok"]) for line in mine if line["part"] == "no rows")))
        for dtype in ("bfloat16", "float32"):
            cells.append(_round_cell([line for line in mine if line["part"] == "rounds" and line["dtype"] == dtype]))
        cells.append(_round_cell([line for line in mine if line["part"] == "windows"]))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(
        [
            BEGIN,
            f"Last run: {date}, commit {commit}, {machine}. k = {K}, S = {S}, T = {T}, pages of {PAGE}.",
            "",
            *rows,
            END,
        ]
    )


def _said(ok: bool) -> str:
    return "unchanged" if ok else "**changed**"


def _phase_cell(line: dict[str, Any]) -> str:
    if "refused" in line:
        return "refused"
    shown = " / ".join(f"{line[kind]:.1e}" for kind in ("eager", "captured") if kind in line)
    return shown if line["ok"] else f"**wrong: {shown}**"


def _round_cell(lines: list[dict[str, Any]]) -> str:
    """Sequences that part from plain decoding at near ties, of how many; more than one line if there are dtypes."""
    cells = []
    for line in lines:
        parts = f"{line['part_at_ties']} of {line['sequences']} part"
        if line["part_at_ties"]:
            parts += f", gap {line['largest_gap']:.1g}"
        shown = f"{parts}, accept length {line['accept_length']:.2f}"
        cells.append((f"{line['dtype']}: " if len(lines) > 1 else "") + (shown if line["ok"] else f"**{shown}**"))
    return "; ".join(cells) or "not offered"


def write(page: Path, text: str) -> None:
    """Replace the page's table."""
    old = page.read_text(encoding="utf-8")
    before, rest = old.split(BEGIN)
    page.write_text(before + text + rest.split(END)[1], encoding="utf-8")


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--backends", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--max-tokens", type=int, default=160, help="of each request")
    parser.add_argument("--commit", default="unnamed", help="what the table says was run")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose table is replaced")
    args = parser.parse_args(arguments)
    lines = []
    for line in everything(args.backends, args.max_tokens):
        say(line)
        lines.append(line)
    if args.write is not None:
        machine = "{gpu}, torch {torch}".format(**machine_of())
        write(args.write, table(lines, args.commit, time.strftime("%Y-%m-%d"), machine))
    return 0 if all(line.get("ok", True) for line in lines) else 1


if __name__ == "__main__":
    end_with(main)
