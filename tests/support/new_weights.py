"""Answers before and after weights are replaced, and the tensors of a folder."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from treetop import LLM, SamplingParams

BITS: dict[str, Any] = {"exactness": "bits", "dtype": "float32"}
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Tokens and log-probabilities of each."""
    return [(output.token_ids, output.logprobs) for output in llm.generate(prompts, PARAMS)]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
