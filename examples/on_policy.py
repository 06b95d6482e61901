"""On-policy reinforcement learning without a correction: the sampler's log-probabilities are the trainer's, to the bit.

    python examples/on_policy.py
    python examples/on_policy.py --model builtin:smollm2 --draft builtin:smollm2-eagle3 --device cuda --plot ratios.svg

A sampler that rounds otherwise than the trainer makes every step a little off policy: the ratio of a token's two
probabilities is not 1, though nothing was trained between them. With `exactness="bits"` the log-probabilities that
tokens were drawn from, by trees and in a batch, are those of a prefill of prompt and output. Here the sampler
speculates, all rounds by the same tree, the trainer prefills, a step changes the weights, and the sampler goes on with
them. Weights of a GGUF file are sampled once and stay. `--plot` draws the ratio of every token, `ties` beside `bits`
(needs matplotlib).
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from treetop import LLM, RequestOutput, SamplingParams

PROMPTS = [
    "def area(r):\n",
    "import os\n",
    "for i in range(10):\n",
    "class A:\n",
    "The capital of France is",
    "Once upon a time",
]


def ratios(trainer: LLM, outputs: list[RequestOutput]) -> torch.Tensor:
    """p_trainer / p_sampler of every token that was drawn, float64."""
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    prefilled = trainer.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = []
    for output, again in zip(outputs, prefilled, strict=True):
        assert output.logprobs is not None
        assert again.prompt_logprobs is not None
        drawn = torch.tensor([each.logprob for each in output.logprobs], dtype=torch.float64)
        own = [each for each in again.prompt_logprobs[len(output.prompt_token_ids) :] if each is not None]
        found.append((torch.tensor([each.logprob for each in own], dtype=torch.float64) - drawn).exp())
    return torch.cat(found)


def trained(folder: Path, to: Path, step: int) -> Path:
    """A stand-in for a training step: another checkpoint of the same model."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(step)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {n: t + 0.01 * t.std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        file.unlink()
        save_file({name: tensor.to(tensors[name].dtype) for name, tensor in changed.items()}, file)
    return to


def draw(path: Path, found: dict[str, torch.Tensor], title: str) -> None:
    """The ratio of every token, in the order that they were drawn."""
    from matplotlib import pyplot  # noqa: PLC0415  # only here

    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for (exactness, every), colour in zip(reversed(found.items()), ("tab:orange", "tab:blue"), strict=True):
        axes.plot(every, ".", color=colour, markersize=3, label=f"exactness {exactness}")
    axes.set(xlabel="token", ylabel="p of the trainer / p of the sampler", title=title)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="builtin:nestling")
    parser.add_argument("--draft", default="builtin:nestling-eagle3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="of weights and K/V (default: the engine's)")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2, help="of the stand-in for training, and so many samplings")
    parser.add_argument("--plot", type=Path, help="a figure, .svg or .png")
    args = parser.parse_args()
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=1.0, logprobs=0)
    rows, context = len(PROMPTS), args.max_tokens + 64
    options = {"device": args.device, "max_running_requests": rows, "context_length": context}
    options |= {"max_total_tokens": 2 * rows * context}  # both engines lie on one device
    options |= {"dtype": args.dtype} if args.dtype else {}
    found: dict[str, torch.Tensor] = {}
    for exactness in ("bits", "ties"):  # MKL's mode is fixed by a process's first product
        sampler = LLM(args.model, args.draft, exactness=exactness, speculative_policy="fixed", **options)
        trainer = LLM(args.model, None, exactness=exactness, disable_radix_cache=True, **options)
        every, accepted = [], 0.0
        with tempfile.TemporaryDirectory() as scratch:
            for step in range(args.steps):
                outputs = sampler.generate(PROMPTS, sampling)
                every.append(ratios(trainer, outputs))
                accepted = sum(len(o.token_ids) for o in outputs) / max(
                    sum(len(o.metrics.accept_lens) for o in outputs), 1
                )
                farthest = every[-1][(every[-1] - 1).abs().argmax()].item()
                print(
                    f"exactness {exactness}, weights of step {step}: {len(every[-1])} tokens, {accepted:.2f} a round,"
                    f" {int((every[-1] != 1).sum())} ratios other than 1, farthest {farthest!r}"
                )
                if not [*sampler.model_path.glob("*.safetensors")]:
                    print(f"{args.model} has no safetensors file: its weights stay as they are")
                    break
                folder = trained(sampler.model_path, Path(scratch) / str(step), step)
                for engine in (sampler, trainer):
                    engine.update_weights(folder)
        found[exactness] = torch.cat(every)
        sampler.close()
        trainer.close()
    if args.plot is not None:
        draw(args.plot, found, f"{args.model}, trees, temperature 1")


if __name__ == "__main__":
    main()
