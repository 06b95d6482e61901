"""Train a second head of nestling whose confidence is wrong by training, to measure what a calibration is worth.

It goes on from `nestling-eagle3`, on little text of the target, with a temperature in the loss: the head learns logits
that are right after they are multiplied by it, and says too little (or, below 1, too much) before. So, unlike a head whose
weights are scaled, it is wrong as training makes it: by token, context and depth, and not by one factor alone.

A few minutes on a CPU, without the corpus: the target goes on behind passages of this Python's own library.

Run: python recipes/nestling/miscalibrated.py --out build/nestling/nestling-flat [--temperature 2.5] [--steps 120]
Then: treetop bench builtin:nestling --speculative-draft-model-path build/nestling/nestling-flat --sweep heads
"""

import argparse
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from common import ASSETS, REPOSITORY, cosine_with_warmup, machine, parameter_groups, write_json
from corpus import group_of
from draft import Eagle3Head, HeadShape, Target, load_head
from head import chain_losses
from safetensors.torch import save_file

from treetop import LLM, SamplingParams

MODULES = (
    "argparse.py",
    "csv.py",
    "difflib.py",
    "inspect.py",
    "json/decoder.py",
    "shutil.py",
    "textwrap.py",
    "zipfile.py",
)


class Heated(Eagle3Head):
    """A head whose loss sees other logits than those that it will say."""

    temperature = 1.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.temperature * super().logits(hidden)


def written_rows(target: Path, count: int, prompt: int, length: int) -> torch.Tensor:
    """The target's own text: [count, length] int64, each after `prompt` tokens of a module of this Python's library."""
    llm = LLM(str(target), str(ASSETS / "nestling-eagle3"), context_length=length + 32, max_running_requests=16)
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [library / name for name in MODULES if group_of(Path(name)) == "library"]  # none is held out
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    streams = [llm.tokenizer.encode(text) for text in texts]
    starts = [(stream, at) for stream in streams for at in range(0, len(stream) - prompt, prompt)]
    chosen = starts[:: max(len(starts) // count, 1)][:count]
    prompts = [stream[at : at + prompt] for stream, at in chosen]
    params = [
        SamplingParams(max_tokens=length - prompt, temperature=0.0 if i % 5 < 3 else 0.8, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    rows = [[*ids, *each.token_ids] for ids, each in zip(prompts, llm.generate(prompts, params), strict=True)]
    llm.close()
    return torch.tensor(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "nestling" / "nestling-flat")
    parser.add_argument("--temperature", type=float, default=2.5, help="of the loss")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=192, help="of text, of which batches are drawn")
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--row", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--ttt", type=int, default=4, help="steps of the training-time test")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began, source = time.perf_counter(), ASSETS / "nestling-eagle3"
    generator = torch.Generator().manual_seed(args.seed)
    rows = written_rows(ASSETS / "nestling", args.rows, args.prompt, args.row + args.ttt)
    target = Target(ASSETS / "nestling", torch.device("cpu"))
    trained = load_head(source, torch.device("cpu"))
    head = Heated(HeadShape(len(trained.d2t), trained.shape.hidden), trained.draft_ids)
    head.load_state_dict(trained.state_dict())
    head.temperature = args.temperature
    optimizer = torch.optim.AdamW(parameter_groups(head, 0.0), lr=args.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, 8, args.steps, floor=0.05)
    )
    losses = []
    for step in range(args.steps):
        ids = rows[torch.randint(0, len(rows), (args.batch,), generator=generator)]
        logits, aux = target.run(ids)
        loss = chain_losses(head, aux, target.embed(ids), logits, args.ttt)[0].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(round(loss.item(), 4))
        if step % 20 == 19:
            print(f"step {step + 1}: {sum(losses[-20:]) / 20:.4f}, {time.perf_counter() - began:.0f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", args.out / "config.json")
    tensors = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()
        for name, value in head.state_dict().items()
    }
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    told = {name: value for name, value in vars(args).items() if name != "out"}
    seconds = round(time.perf_counter() - began, 1)
    write_json(
        args.out / "training.json", {**told, "seconds": seconds, "machine": machine(ids.device), "losses": losses}
    )
    print(f"{args.out}: {seconds:.0f} s")


if __name__ == "__main__":
    main()
