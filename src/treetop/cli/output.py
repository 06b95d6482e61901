"""How commands show a completion."""

from collections.abc import Sequence
from typing import Any


def as_json(output: Any) -> dict[str, object]:
    """A result, for `--json`."""
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": len(output.token_ids)},
        "metrics": {
            "accept_length": output.metrics.accept_length,
            "target_forwards": output.metrics.target_forwards,
            "tokens_per_second": output.metrics.tokens_per_second,
        },
    }


def summary(outputs: Sequence[Any], elapsed_s: float) -> str:
    """The line below a completion."""
    tokens = sum(len(output.token_ids) for output in outputs)
    rounds = sum(output.metrics.target_forwards for output in outputs)
    reasons = ", ".join(sorted({output.finish_reason for output in outputs}))
    length = f", accept length {round_tokens(outputs) / rounds:.2f}" if rounds else ""
    return f"[{tokens} tokens, {rounds} target passes{length}, {tokens / elapsed_s:.0f} tokens/s, {reasons}]"


def round_tokens(outputs: Sequence[Any]) -> int:
    """Tokens that came of rounds: all but those that prompts' prefills chose."""
    return sum(output.round_tokens for output in outputs)
