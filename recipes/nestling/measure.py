"""Accept lengths of a trained pair at contexts of 512 tokens and more, by treetop itself, on the CPU in float64.

`measure.py prompts` writes passages of the held-out files, `measure.py run` decodes them plainly and with drafts,
compares the tokens, and adds a line to the evaluation.json of the draft's folder.
"""

import argparse
import json
from pathlib import Path

import torch
from common import load_streams, write_json
from transformers import AutoTokenizer
from written import newline_tokens

from treetop import LLM, SamplingParams

SHORTEST, LONGEST = 512, 1500
SHAPES = ((4, 5, 16), (1, 5, 6))  # topk, num_steps, num_draft_tokens


def write_prompts(target: Path, count: int, out: Path) -> None:
    """Passages that end where a line ends, SHORTEST to LONGEST tokens long, spread over the held-out stream."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = load_streams(torch.device("cpu"))["heldout"].ids
    newline = newline_tokens(target, torch.device("cpu"))
    lines = []
    for index, length in enumerate(torch.linspace(SHORTEST, LONGEST, count).round().long().tolist()):
        end = (len(ids) - 1) * (index + 1) // count
        while not newline[ids[end]]:
            end -= 1
        text = tokenizer.decode(ids[end - length : end])
        lines.append(json.dumps({"tokens": len(tokenizer.encode(text)), "prompt": text}))
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(args: argparse.Namespace) -> dict:
    """One line of evaluation.json for each shape."""
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[:: args.stride]
    prompts = [json.loads(line)["prompt"] for line in lines]
    asked = SamplingParams(max_tokens=args.new_tokens, temperature=0.0, ignore_eos=True)
    options = {"dtype": "float64", "device": "cpu", "context_length": LONGEST + 128, "max_running_requests": 2}
    plain = LLM(str(args.target), draft=None, **options).generate(prompts, asked)
    if args.draft:
        drafts = {"draft": str(args.draft)}
    else:
        drafts = {"speculative_algorithm": "MTP", "speculative_mtp_recurrence": args.recurrence}
    results = []
    for topk, num_steps, size in SHAPES:
        shape = {"speculative_eagle_topk": topk, "speculative_num_steps": num_steps}
        llm = LLM(str(args.target), **drafts, **shape, speculative_num_draft_tokens=size, **options)
        outputs = llm.generate(prompts, asked)
        lens = [accepted for output in outputs for accepted in output.metrics.accept_lens]
        differing = sum(a.token_ids != b.token_ids for a, b in zip(plain, outputs, strict=True))
        results.append(
            {
                "shape": [topk, num_steps, size],
                "accept_length": round(1 + sum(lens) / len(lens), 4),
                "rounds": len(lens),
                "differing_prompts": differing,
            }
        )
        print(args.target.name, args.recurrence, results[-1], flush=True)
    return {"prompts": len(prompts), "stride": args.stride, "new_tokens": args.new_tokens, "results": results}


def main() -> None:
    """Write the prompts, or measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("prompts", "run"))
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="file to write or read")
    parser.add_argument("--count", type=int, default=12, help="prompts to write")
    parser.add_argument("--draft", type=Path, help="an EAGLE-3 head; without one, the target's MTP layer")
    parser.add_argument("--recurrence", default="auto", choices=("auto", "before-norm", "after-norm"))
    parser.add_argument("--stride", type=int, default=1, help="take every so many prompts")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--name", default="own", help="under which the figures go into evaluation.json")
    parser.add_argument("--record", type=Path, help="folder of evaluation.json, if not the draft's")
    args = parser.parse_args()
    if args.action == "prompts":
        write_prompts(args.target, args.count, args.prompts)
        return
    figures = run(args)
    file = (args.record or args.draft or args.target) / "evaluation.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write_json(file, known | {args.name: figures})


if __name__ == "__main__":
    main()
