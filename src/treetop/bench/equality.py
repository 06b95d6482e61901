"""How two runs' tokens compare, by the rule of their dtype.

| dtype | greedy | sampled, same seeds |
|---|---|---|
| float64 | equal | equal |
| float32 | equal but for near ties, which are counted | equal |
| bfloat16, float16 | reported with the margin of each first mismatch | reported |

Matrix kernels of different row counts round differently. In float32 that can break a tie of the two best logits; in 16
bits it changes so many logits that a difference proves nothing, and its margin is shown instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treetop.llm import LLM, RequestOutput

NEAR_TIE = 1e-4
"""A float32 mismatch is excused below this top-2 gap, relative to max(1, |logit|)."""
TIES_ALLOWED = 1e-4
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Equality:
    """tokens: compared.
    sequences: in all.
    unequal: sequences that differ and must not.
    margins: of sequences whose first mismatch is excused (float32) or reported (16 bits): the gap of the plain run's
        two best logits there, relative to max(1, |logit|).
    unjudged: sampled sequences that differ in 16 bits, which `half` says.
    """

    tokens: int
    sequences: int
    unequal: int
    margins: tuple[float, ...] = ()
    unjudged: int = 0
    half: bool = False

    @property
    def ok(self) -> bool:
        excusable = self.half or len(self.margins) <= max(1, TIES_ALLOWED * self.tokens)
        return self.unequal == 0 and excusable

    def sentence(self) -> str:
        if self.unequal:
            return f"outputs differ in {self.unequal} of {self.sequences} sequences"
        if self.unjudged:
            return (
                f"sampled outputs differ in {self.unjudged} of {self.sequences} sequences, which 16 bits do not exclude"
            )
        if self.half and self.margins:
            return (
                f"outputs part in {len(self.margins)} of {self.sequences} sequences, as 16 bits may; the two best"
                f" logits were at most {max(self.margins):.2g} of their size apart there"
            )
        if not self.ok:
            return f"too many near ties: {len(self.margins)} sequences in {self.tokens} tokens"
        ties = f", {len(self.margins)} near ties excused" if self.margins else ""
        return f"outputs equal, {self.tokens} tokens{ties}"


def equal_outputs(
    plain: LLM, expected: Sequence[RequestOutput], got: Sequence[RequestOutput], sampled: bool = False
) -> Equality:
    """Compare token for token. plain: gives the logits at a first mismatch. sampled: both drew, by the same seeds."""
    dtype = plain.engine.dtype
    half, unequal, unjudged, margins = dtype in HALF, 0, 0, []
    for want, have in zip(expected, got, strict=True):
        if want.token_ids == have.token_ids:
            continue
        pairs = zip(want.token_ids, have.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None or dtype == torch.float64 or (sampled and not half):
            unequal += 1
        elif sampled:
            unjudged += 1
        else:
            margin = margin_of(plain, [*want.prompt_token_ids, *want.token_ids[:at]])
            if half or margin < NEAR_TIE:
                margins.append(margin)
            else:
                unequal += 1
    tokens = sum(len(output.token_ids) for output in expected)
    return Equality(tokens, len(expected), unequal, tuple(margins), unjudged, half)


def margin_of(llm: LLM, ids: list[int]) -> float:
    """The gap of the two best logits after `ids`, relative to max(1, |best|)."""
    best = llm.next_logits(ids).to(torch.float64).topk(2).values
    return float(best[0] - best[1]) / max(1.0, float(best[0].abs()))
