"""Log-probabilities of prompt tokens: of the target's raw logits in the prefill, a few positions at a time.

A chunk's logits at once would take far more memory than the rest of its step. So they are made, read and dropped in
slices of `Layout.prompt_lines` positions, which the worst steps count in (`profile_run.py`, `memory.step_bytes`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treetop.engine.model_runner import ModelRunner
from treetop.engine.staging import listed_logprobs
from treetop.speculative.verify import token_logprobs
from treetop.types.messages import Chunk, PrefillPlan, RowResult
from treetop.types.sampling import MAX_LOGPROBS
from treetop.types.tree import PathLogprobs


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens whose log-probabilities are asked for, and where each is chosen.

    place: [n] int64, the position before it in the batch's flat [rows * n].
    token: [n] int64.
    """

    place: Tensor
    token: Tensor


def num_prompt_tokens(chunk: Chunk) -> int:
    """Prompt tokens whose log-probabilities a chunk gives: those after each of its own, if they are asked for."""
    return 0 if chunk.prompt_logprobs is None else len(chunk.token_ids) - (chunk.next_token is None)


def prompt_columns(plan: PrefillPlan, width: int) -> list[list[int]]:
    """`PromptTokens` of a plan as columns of integers, in the order of its chunks. width: of the padded batch."""
    place, token = list[int](), list[int]()
    for i, chunk in enumerate(plan.chunks):
        count = num_prompt_tokens(chunk)
        place += range(i * width, i * width + count)
        token += [*chunk.token_ids[1:], *(() if chunk.next_token is None else (chunk.next_token,))][:count]
    return [place, token]


def prompt_logprobs(runner: ModelRunner, hidden: Tensor, asked: PromptTokens) -> PathLogprobs:
    """values: [n, 2 + maximum]; ids: [n, maximum]. hidden: [rows, n, hidden], the target's, after its last norm."""
    flat, found = hidden.flatten(0, 1), list[tuple[Tensor, Tensor]]()
    slices = (each.split(runner.layout.prompt_lines) for each in (asked.place, asked.token))
    for place, token in zip(*slices, strict=True):
        logits = runner.target.logits(flat.index_select(0, place)[:, None])[:, 0]
        found.append(token_logprobs(runner.ops, logits, token, min(MAX_LOGPROBS, logits.shape[1])))
    values, ids = zip(*found, strict=True)
    return PathLogprobs(torch.cat(values), torch.cat(ids))


def with_prompt(result: RowResult, plan: PrefillPlan, item: int, got: PathLogprobs) -> RowResult:
    """What a step gave chunk `item`, with its prompt tokens' log-probabilities of all that the step `got`."""
    chunk, before = plan.chunks[item], sum(map(num_prompt_tokens, plan.chunks[:item]))
    if chunk.prompt_logprobs is None:
        return result
    lines = slice(before, before + num_prompt_tokens(chunk))
    values = got.values[lines]
    if bool(values.isnan().any()):
        return result._replace(tokens=(), finite=False)
    return result._replace(prompt_logprobs=listed_logprobs(values, got.ids[lines], chunk.prompt_logprobs))
