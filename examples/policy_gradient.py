"""Policy gradient with rollouts by trees: the policy and its draft head learn, and the engine goes on with both.

    python examples/policy_gradient.py
    python examples/policy_gradient.py --steps 20 --group 16

Each step draws a group of rollouts a prompt at temperature 1 with the log-probabilities that tokens were drawn from,
rewards them, takes one step of policy gradient with advantages within the group (GRPO's, arXiv:2402.03300, without its
clipping and its penalty) and one of the head by training-time test on the same texts, and hands both to the engine. The
ratio of the policy's probabilities to the engine's says that what trains is what draws: it is 1 but for rounding. Needs
`transformers`; the head's network is that of `recipes/nestling`.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from treetop import LLM, RequestOutput, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes" / "nestling"))
from draft import AUX_LAYERS, Eagle3Head, load_head
from head import chain_losses

PROMPTS = ["def area(r):\n", "import os\n", "for i in range(10):\n", "class A:\n"]
_CHAIN = 3
"""Steps of the head's training-time test."""


def reward_of(output: RequestOutput) -> float:
    """The share of lines that are empty or a comment."""
    lines = output.text.split("\n")
    return sum(not line.strip() or line.lstrip().startswith("#") for line in lines) / len(lines)


def accept_length(outputs: list[RequestOutput]) -> float:
    """Tokens that a round gave, the target's own counted."""
    return sum(each.round_tokens for each in outputs) / sum(each.metrics.target_forwards for each in outputs)


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """rewards: [prompts, group]. Within each group, of mean 0."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-4)


def padded(outputs: list[RequestOutput]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [rows, n] int64; drawn [rows, n] bool, which of them were; their log-probabilities as the engine has them."""
    n = max(len(each.prompt_token_ids) + len(each.token_ids) for each in outputs)
    ids, drawn = torch.zeros((len(outputs), n), dtype=torch.int64), torch.zeros((len(outputs), n), dtype=torch.bool)
    logprobs = torch.zeros((len(outputs), n))
    for row, each in enumerate(outputs):
        start, own = len(each.prompt_token_ids), [*each.prompt_token_ids, *each.token_ids]
        ids[row, : len(own)] = torch.tensor(own)
        drawn[row, start : len(own)] = True
        logprobs[row, start : len(own)] = torch.tensor([token.logprob for token in each.logprobs or ()])
    return ids, drawn, logprobs


def learn(
    policy: torch.nn.Module,
    head: Eagle3Head,
    optimizers: list[torch.optim.Optimizer],
    outputs: list[RequestOutput],
    advantages: torch.Tensor,
) -> tuple[float, float]:
    """One step of both. advantages: [rows]. Returns the head's loss, and how far a ratio was from 1."""
    ids, drawn, before = padded(outputs)
    features = list[torch.Tensor]()
    hooks = [
        policy.model.layers[index].register_forward_hook(lambda *given: features.append(given[2]))
        for index in AUX_LAYERS  # what these layers leave, the last before the final norm
    ]
    found = policy(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    now = found.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    drawn, before = drawn[:, 1:], before[:, 1:]
    ratio = torch.where(drawn, (now - before).exp(), 1.0)
    loss = -(ratio * advantages[:, None] * drawn).sum() / drawn.sum()
    aux = torch.cat([each[0] if isinstance(each, tuple) else each for each in features], -1).detach()
    embedding = policy.get_input_embeddings()(ids).detach()
    losses, _ = chain_losses(head, aux, embedding, found.logits.detach(), _CHAIN)
    for optimizer, own in zip(optimizers, (loss, losses.mean()), strict=True):
        optimizer.zero_grad()
        own.backward()
        optimizer.step()
    return float(losses.detach().mean()), float((ratio.detach() - 1).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="rollouts a prompt")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    llm = LLM("builtin:nestling", "builtin:nestling-eagle3", dtype="float32", seed=0)
    policy = AutoModelForCausalLM.from_pretrained(llm.model_path, dtype=torch.float32)
    head = load_head(llm.draft_path, torch.device("cpu")).train()
    optimizers = [torch.optim.Adam(each.parameters(), lr) for each, lr in ((policy, 2e-5), (head, 1e-4))]
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=1.0, logprobs=0)
    asked = [prompt for prompt in PROMPTS for _ in range(args.group)]
    accepted = list[float]()
    for step in range(args.steps):
        outputs = llm.generate(asked, sampling)
        rewards = torch.tensor([reward_of(each) for each in outputs]).view(len(PROMPTS), args.group)
        accepted.append(accept_length(outputs))
        head_loss, farthest = learn(policy, head, optimizers, outputs, advantages_of(rewards).flatten())
        versions = {each.metrics.weight_version for each in outputs}
        print(
            f"step {step}: weights {versions}, reward {rewards.mean():.3f},"
            f" {accepted[-1]:.2f} tokens a round,"
            f" head's loss {head_loss:.3f}, farthest ratio {farthest:.1e} from 1"
        )
        tied = {"lm_head.weight"} if policy.config.tie_word_embeddings else set()
        tensors = {name: tensor for name, tensor in policy.state_dict().items() if name not in tied}
        llm.update_weights(tensors, head.state_dict())
    accepted.append(accept_length(llm.generate(asked, sampling)))
    print(f"{args.steps} steps: {accepted[0]:.2f} tokens a round before, {accepted[-1]:.2f} with the last weights")
    llm.close()


if __name__ == "__main__":
    main()
