"""Log-probabilities in OpenAI's two shapes.

They are the target's own, before any option changes or warps logits; under vLLM's `processed_logprobs` those that
tokens were drawn with, and the target's own under a name beside them.
"""

from collections.abc import Sequence
from typing import Any

from treetop.outputs import PromptLogprobs, RequestOutput
from treetop.text.tokenizer import Tokenizer
from treetop.types.sampling import LogprobsMode, TokenLogprobs

LEAST = -9999.0
"""What stands for minus infinity, which JSON cannot say."""

Tokens = Sequence[tuple[int, TokenLogprobs]]
PromptTokens = Sequence[tuple[int, TokenLogprobs | None]]


class LogprobWriter:
    """Writes the tokens of one choice as they come. tokenizer: None names tokens by `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer | None, mode: LogprobsMode) -> None:
        self._tokenizer, self._offset, self._processed = tokenizer, 0, mode == "processed_logprobs"

    def completion(self, tokens: PromptTokens, maximum: int) -> dict[str, Any]:
        """Of `/v1/completions`: parallel lists, the best tokens by their text; the chosen one is always among them.

        A prompt's first token has null for both. maximum: of the best, as many are asked for.
        """
        texts, offsets = list[str](), list[int]()
        best = list[dict[str, float] | None]()
        for token_id, logprobs in tokens:
            text = self._text(token_id)
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            if logprobs is None:
                best.append(None)
                continue
            top = {text: _json(self._own(logprobs))}
            for other_id, logprob in logprobs.top[:maximum]:
                top.setdefault(self._text(other_id), _json(logprob))
            best.append(top)
        known = [logprobs for _, logprobs in tokens]
        raw = [None if each is None else _json(each.logprob) for each in known]
        return {
            "tokens": texts,
            "token_logprobs": [None if each is None else _json(self._own(each)) for each in known],
            "top_logprobs": best,
            "text_offset": offsets,
            **({"raw_token_logprobs": raw} if self._processed else {}),
        }

    def chat(self, tokens: Tokens) -> dict[str, Any]:
        """Of `/v1/chat/completions`."""
        content = [
            {
                **self._token(token_id, self._own(logprobs)),
                "top_logprobs": [self._token(other_id, logprob) for other_id, logprob in logprobs.top],
                **({"raw_logprob": _json(logprobs.logprob)} if self._processed else {}),
            }
            for token_id, logprobs in tokens
        ]
        return {"content": content, "refusal": None}

    def prompt(self, ids: Sequence[int], logprobs: PromptLogprobs, maximum: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: of each token of a prompt by token id, null for the first.

        rank: 1 is the best; null for a token that is not among the best that were asked for.
        """
        positions: list[dict[str, Any] | None] = []
        for token_id, each in zip(ids, logprobs, strict=True):
            if each is None:
                positions.append(None)
                continue
            best = each.top[:maximum]
            ranks = {other: rank for rank, (other, _) in enumerate(best, start=1)}
            positions.append(
                {
                    str(other): {
                        "logprob": _json(logprob),
                        "rank": ranks.get(other),
                        "decoded_token": self._text(other),
                    }
                    for other, logprob in dict([(token_id, each.logprob), *best]).items()
                }
            )
        return positions

    def _own(self, logprobs: TokenLogprobs) -> float:
        return logprobs.processed if self._processed else logprobs.logprob

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        made = list(self._bytes(token_id))
        return {"token": self._text(token_id), "logprob": _json(logprob), "bytes": made}

    def _text(self, token_id: int) -> str:
        return self._bytes(token_id).decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        return self._tokenizer.token_bytes(token_id)


def tokens_of(output: RequestOutput) -> Tokens:
    """All of an output, () if they were not asked for."""
    return () if output.logprobs is None else list(zip(output.token_ids, output.logprobs, strict=True))


def _json(logprob: float) -> float:
    return max(logprob, LEAST)
