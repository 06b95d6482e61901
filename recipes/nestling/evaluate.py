"""Measure the accept length of nestling with its head: a slow, stateless reference of greedy tree decoding.

Nothing is cached: every forward pass runs over the whole sequence, so that there is no state to get wrong.
The output is compared with plain greedy decoding, token for token.
"""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from common import ASSETS, PROMPTS, machine, replace_section, write_json
from draft import Eagle3Head, Target, load_head
from tqdm import tqdm
from transformers import AutoTokenizer


@dataclass(frozen=True, slots=True)
class TreeShape:
    """num_steps levels of at most topk * topk candidates; num_draft_tokens nodes are verified, root included."""

    num_steps: int
    topk: int
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that might follow. parent: index of a candidate, -1 for the root; score: log-probability of the path."""

    token: int
    parent: int
    score: float
    depth: int


def ancestors(parents: list[int], index: int) -> list[int]:
    """The nodes from `index` up to its oldest ancestor, itself included; -1 ends the way."""
    path = []
    while index >= 0:
        path.append(index)
        index = parents[index]
    return path


def visibility(prefix: int, parents: list[int]) -> torch.Tensor:
    """Who sees whom, [prefix + nodes, prefix + nodes] bool: a causal prefix, then nodes that see their ancestors."""
    total = prefix + len(parents)
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    mask[prefix:, prefix:] = False
    for node in range(len(parents)):
        for ancestor in ancestors(parents, node):
            mask[prefix + node, prefix + ancestor] = True
    return mask


def best_indices(scores: list[float], count: int) -> list[int]:
    """Indices of the highest scores; of equal ones the earlier wins."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def draft_forward(
    head: Eagle3Head, target: Target, hidden: torch.Tensor, tokens: list[int], positions: list[int], mask: torch.Tensor
) -> torch.Tensor:
    """The head's output state of each slot, [n, hidden]; hidden [n, hidden] is each slot's input state."""
    device = hidden.device
    embedding = target.embed(torch.tensor(tokens, device=device))[None]
    residual, q, k, v = head.project(embedding, hidden[None], torch.tensor(positions, device=device))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(device))
    return head.finish(residual, mixed)[0]


def proposals(head: Eagle3Head, states: torch.Tensor, topk: int) -> list[tuple[list[int], list[float]]]:
    """For each state of [n, hidden]: the topk target ids and their log-probabilities, best first."""
    logprobs = head.logits(states).float().log_softmax(-1)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    tokens = head.draft_ids[ids[:, :topk]]
    return list(zip(tokens.tolist(), values[:, :topk].tolist(), strict=True))


def grow(
    head: Eagle3Head, target: Target, aux_hidden: torch.Tensor, tokens: list[int], shape: TreeShape
) -> list[Candidate]:
    """All candidates, level by level. aux_hidden: [committed, 3 * hidden]; tokens: committed ones and the root.

    Committed slot i pairs the feature of position i with token i + 1. A node of depth d runs at
    position committed + d - 1 and takes its parent's output state in place of the feature.
    """
    committed = len(aux_hidden)
    fused = head.start(aux_hidden)
    slots = list(range(committed))
    states = draft_forward(head, target, fused, tokens[1:], slots, visibility(committed, []))
    (ids, logprobs), last = proposals(head, states[-1:], shape.topk)[0], states[-1]
    candidates = [Candidate(token, -1, score, 1) for token, score in zip(ids, logprobs, strict=True)]
    frontier = list(range(shape.topk))  # candidates to expand next
    rows: list[int] = []  # candidates that have a row in the draft, in order of their rows
    inputs = fused
    output_of = {-1: last}
    for _ in range(shape.num_steps - 1):
        inputs = torch.cat([inputs, *(output_of[candidates[c].parent][None] for c in frontier)])
        rows += frontier
        parents = [rows.index(candidates[c].parent) if candidates[c].parent >= 0 else -1 for c in rows]
        positions = slots + [committed + candidates[c].depth - 1 for c in rows]
        row_tokens = tokens[1:] + [candidates[c].token for c in rows]
        states = draft_forward(head, target, inputs, row_tokens, positions, visibility(committed, parents))
        output_of |= {c: states[committed + row] for row, c in enumerate(rows)}
        first = len(candidates)
        for c, (ids, logprobs) in zip(
            frontier, proposals(head, torch.stack([output_of[c] for c in frontier]), shape.topk), strict=True
        ):
            parent = candidates[c]
            candidates += [
                Candidate(token, c, parent.score + logprob, parent.depth + 1)
                for token, logprob in zip(ids, logprobs, strict=True)
            ]
        level = [candidate.score for candidate in candidates[first:]]
        frontier = [first + index for index in best_indices(level, shape.topk)]
    return candidates


def select(candidates: list[Candidate], count: int) -> tuple[list[Candidate], list[int]]:
    """The tree to verify: the best candidates in their order, and each one's parent among them (-1: the root)."""
    kept = sorted(best_indices([candidate.score for candidate in candidates], count))
    parents = [kept.index(candidates[c].parent) if candidates[c].parent >= 0 else -1 for c in kept]
    return [candidates[c] for c in kept], parents


def accept(nodes: list[Candidate], parents: list[int], choice: list[int]) -> tuple[list[int], int]:
    """Follow the target. choice[0] is its token after the root, choice[j + 1] after node j.

    Returns the accepted nodes and the bonus token.
    """
    path, current = [], -1
    while True:
        wanted = choice[current + 1]
        children = [j for j, parent in enumerate(parents) if parent == current and nodes[j].token == wanted]
        if not children:
            return path, wanted
        current = children[0]
        path.append(current)


def decode(
    target: Target, head: Eagle3Head, prompt: list[int], shape: TreeShape, new_tokens: int, end_of_text: int
) -> tuple[list[int], list[int]]:
    """Greedy decoding with drafts. Returns the new tokens, and how many drafts each round accepted."""
    device = target.model.device
    logits, aux = target.run(torch.tensor([prompt], device=device))
    aux_hidden = aux[0]
    tokens = [*prompt, int(logits[0, -1].argmax())]
    accepted = []
    while len(tokens) - len(prompt) < new_tokens and end_of_text not in tokens[len(prompt) :]:
        committed = len(aux_hidden)
        nodes, parents = select(grow(head, target, aux_hidden, tokens, shape), shape.num_draft_tokens - 1)
        ids = torch.tensor([[*tokens, *(node.token for node in nodes)]], device=device)
        positions = [*range(committed + 1), *(committed + node.depth for node in nodes)]
        mask = visibility(committed + 1, parents).to(device)
        bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, float("-inf"))
        logits, aux = target.run(
            ids, position_ids=torch.tensor([positions], device=device), attention_mask=bias[None, None]
        )
        path, bonus = accept(nodes, parents, logits[0, committed:].argmax(-1).tolist())
        rows = [committed, *(committed + 1 + node for node in path)]
        aux_hidden = torch.cat([aux_hidden, aux[0, rows]])
        tokens += [*(nodes[node].token for node in path), bonus]
        accepted.append(len(path))
    return cut(tokens[len(prompt) :], new_tokens, end_of_text), accepted


def cut(tokens: list[int], limit: int, end_of_text: int) -> list[int]:
    """The tokens up to the limit and up to the first end of text, which is kept."""
    tokens = tokens[:limit]
    return tokens[: tokens.index(end_of_text) + 1] if end_of_text in tokens else tokens


@torch.no_grad()
def plain(target: Target, prompt: list[int], new_tokens: int, end_of_text: int) -> list[int]:
    """Greedy decoding without drafts, by the library's own generation."""
    ids = torch.tensor([prompt], device=target.model.device)
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=end_of_text
    )
    return output[0, len(prompt) :].tolist()


def first_repeated(tokens: list[int], longest_period: int = 48) -> int:
    """Where the output begins to repeat itself to its end, at least twice over and for 12 tokens; else its length.

    Small models run into loops under greedy decoding, and loops are easy to draft: they are counted apart.
    """
    first = len(tokens)
    for period in range(1, longest_period + 1):
        start = len(tokens)
        while start > period and tokens[start - 1] == tokens[start - 1 - period]:
            start -= 1
        if len(tokens) - start >= max(12, 2 * period):
            first = min(first, start)
    return first


def rounds_before(accepted: list[int], tokens: int) -> list[int]:
    """The rounds that begin before so many tokens are written; the first token comes from the prompt's own pass."""
    written, kept = 1, []
    for count in accepted:
        if written < tokens:
            kept.append(count)
        written += count + 1
    return kept


def summary(accepted: list[int], shape: TreeShape) -> dict:
    """Accept length (bonus included), and how often a round accepted at least d drafts, d = 1..num_steps.

    `conditional`: of the rounds that accepted d - 1, the share that accepted d.
    """
    reach = [sum(a >= depth for a in accepted) / len(accepted) for depth in range(shape.num_steps + 1)]
    return {
        "shape": {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens},
        "rounds": len(accepted),
        "accept_length": round(1 + sum(accepted) / len(accepted), 3),
        "reached": [round(share, 3) for share in reach[1:]],
        "conditional": [round(b / a, 3) if a else 0.0 for a, b in itertools.pairwise(reach)],
    }


@torch.no_grad()
def measure(
    target: Target,
    head: Eagle3Head,
    prompts: list[list[int]],
    expected: list[list[int]],
    shape: TreeShape,
    new_tokens: int,
    end_of_text: int,
) -> dict:
    """Decode every prompt with drafts; count tokens, rounds and the prompts whose output is not the expected one."""
    accepted, fresh, written, repeated, differing = [], [], 0, 0, 0
    for prompt, right in tqdm(list(zip(prompts, expected, strict=True)), desc=f"topk {shape.topk}", mininterval=5):
        output, rounds = decode(target, head, prompt, shape, new_tokens, end_of_text)
        differing += output != right
        first = first_repeated(output)
        accepted += rounds
        fresh += rounds_before(rounds, first)
        written += len(output)
        repeated += len(output) - first
    return summary(accepted, shape) | {
        "before_loops": summary(fresh, shape),
        "prompts": len(prompts),
        "new_tokens": written,
        "repeated_tokens": repeated,
        "differing_prompts": differing,
    }


def describe(results: list[dict], where: str) -> str:
    """The model card's section."""
    first = results[0]
    lines = [
        f"Greedy, up to {first['limit']} new tokens for each of {first['prompts']} held-out prompts,",
        f"float32 on {where}, by `recipes/nestling/evaluate.py`. Accept length: tokens a target pass, bonus included.",
        f"The target ends in a loop on many prompts ({first['repeated_tokens'] / first['new_tokens']:.0%} of the new tokens), and loops",
        "are easy to draft: the column *before loops* counts the rounds that begin before the output repeats itself.",
        "",
        "| num_steps, topk, num_draft_tokens | accept length | before loops | reached depth 1, 2, ... | differing outputs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        shape = ", ".join(str(value) for value in result["shape"].values())
        reached = ", ".join(f"{share:.2f}" for share in result["reached"])
        lengths = f"{result['accept_length']:.2f} | {result['before_loops']['accept_length']:.2f}"
        lines.append(f"| {shape} | {lengths} | {reached} | {result['differing_prompts']} |")
    return "\n".join(lines)


def main() -> None:
    """Measure tree and chain, write evaluation.json and the section of the head's model card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=ASSETS / "nestling")
    parser.add_argument("--head", type=Path, default=ASSETS / "nestling-eagle3")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    device = torch.device(args.device)
    target, head = Target(args.target, device), load_head(args.head, device)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    stride = max(1, len(lines) // args.prompts)
    prompts = [tokenizer.encode(json.loads(line)["prompt"]) for line in lines[::stride][: args.prompts]]
    end = tokenizer.eos_token_id
    expected = [plain(target, prompt, args.new_tokens, end) for prompt in tqdm(prompts, desc="plain", mininterval=5)]
    results = []
    for shape in (TreeShape(5, 4, 16), TreeShape(5, 1, 6)):
        result = measure(target, head, prompts, expected, shape, args.new_tokens, end)
        results.append(result | {"limit": args.new_tokens})
        print(json.dumps(results[-1]), flush=True)
    write_json(args.head / "evaluation.json", {"machine": machine(device), "results": results})
    replace_section(args.head / "README.md", "Accept length", describe(results, machine(device)))


if __name__ == "__main__":
    main()
