"""On-policy reinforcement learning without a correction: the sampler's log-probabilities are the trainer's, to the bit.

    python examples/on_policy.py

A sampler that rounds otherwise than the trainer makes every step a little off policy: the ratio of a token's two
probabilities is not 1, though nothing was trained between them. With `exactness="bits"` the log-probabilities that
tokens were drawn from, by trees and in a batch, are those of a prefill of prompt and output. Here the sampler
speculates, the trainer prefills, a step changes the weights, and the sampler goes on with them.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from treetop import LLM, RequestOutput, SamplingParams

PROMPTS = ["def area(r):\n", "import os\n", "for i in range(10):\n", "class A:\n"]


def largest_ratio(trainer: LLM, outputs: list[RequestOutput]) -> float:
    """Of p_trainer / p_sampler over all tokens that were drawn, the farthest from 1."""
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    prefilled = trainer.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    ratios = [torch.ones(1)]
    for output, again in zip(outputs, prefilled, strict=True):
        assert output.logprobs is not None
        assert again.prompt_logprobs is not None
        drawn = torch.tensor([each.logprob for each in output.logprobs], dtype=torch.float64)
        own = [each for each in again.prompt_logprobs[len(output.prompt_token_ids) :] if each is not None]
        ratios.append((torch.tensor([each.logprob for each in own], dtype=torch.float64) - drawn).exp())
    every = torch.cat(ratios)
    return float(every[(every - 1).abs().argmax()])


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


def main() -> None:
    sampling = SamplingParams(max_tokens=100, temperature=1.0, logprobs=0)
    for exactness in ("ties", "bits"):
        sampler = LLM(exactness=exactness)
        trainer = LLM("builtin:nestling", exactness=exactness, disable_radix_cache=True)
        with tempfile.TemporaryDirectory() as scratch:
            for step in range(2):
                ratio = largest_ratio(trainer, sampler.generate(PROMPTS, sampling))
                print(f"exactness {exactness}, weights of step {step}: farthest ratio {ratio!r}")
                folder = trained(sampler.model_path, Path(scratch) / str(step), step)
                for engine in (sampler, trainer):
                    engine.update_weights(folder)
        sampler.close()
        trainer.close()


if __name__ == "__main__":
    main()
