"""TRL's GRPO with rollouts by trees: a `rollout_func` that draws here, and the trainer's weights before each step.

    python examples/trl_rollouts.py

TRL asks for token ids and the log-probabilities that they were drawn with, and gets the version of the weights beside
them. Its interface is experimental (`GRPOTrainer(rollout_func=...)`); tried with TRL 1.13.0. Needs `trl`.
"""

import argparse
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from treetop import LLM, SamplingParams

PROMPTS = ["def area(r):\n", "import os\n", "class A:\n", "for i in range(10):\n"]


class TreeRollouts:
    """A `rollout_func`. Its engine has the trainer's weights of the step that asks."""

    def __init__(self, llm: LLM, sampling: SamplingParams) -> None:
        self._llm, self._sampling, self._step = llm, sampling, 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        if self._step != trainer.state.global_step:
            tied = {"lm_head.weight"} if trainer.model.config.tie_word_embeddings else set()
            tensors = trainer.model.state_dict().items()
            self._llm.update_weights({name: tensor for name, tensor in tensors if name not in tied})
            self._step = trainer.state.global_step
        outputs = self._llm.generate(prompts, self._sampling)
        return {
            "prompt_ids": [[*each.prompt_token_ids] for each in outputs],
            "completion_ids": [[*each.token_ids] for each in outputs],
            "logprobs": [[token.logprob for token in each.logprobs or ()] for each in outputs],
            "weight_version": [each.metrics.weight_version for each in outputs],
        }


def reward(completions: list[str], weight_version: list[int], **_: Any) -> list[float]:
    """Lines. The rest is what `TreeRollouts` gave beside the tokens."""
    print(f"rollouts of weights {set(weight_version)}")
    return [float(text.count("\n")) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output-dir", default="build/trl")
    args = parser.parse_args()
    llm = LLM("builtin:nestling", "builtin:nestling-eagle3", dtype="float32")
    sampling = SamplingParams(max_tokens=16, temperature=1.0, logprobs=0)
    model = AutoModelForCausalLM.from_pretrained(llm.model_path, dtype=torch.float32)
    config = GRPOConfig(
        args.output_dir,
        per_device_train_batch_size=8,
        num_generations=4,
        max_steps=args.steps,
        max_completion_length=16,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model,
        reward,
        config,
        Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(llm.model_path),
        rollout_func=TreeRollouts(llm, sampling),
    )
    trainer.train()
    llm.close()


if __name__ == "__main__":
    main()
