"""Every name of treetop that the suite uses, in one place: a name that changes on purpose is one line here."""

import sys
from collections.abc import Sequence
from typing import Any

from treetop import LLM, SamplingParams

COMMAND = (sys.executable, "-m", "treetop.cli")
FAULT_VARIABLE = "TREETOP_FAULT"

ENGINE = {
    "page": "page_size",
    "chunk": "chunked_prefill_size",
    "rows": "max_running_requests",
    "context": "context_length",
    "pool": "max_total_tokens",
    "graphs": "graphs",
    "overlap": "overlap",
    "level": "check_level",
}
SHAPE = ("speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens")
FLAGS = {
    "draft": "--speculative-draft-model-path",
    "topk": "--speculative-eagle-topk",
    "steps": "--speculative-num-steps",
    "nodes": "--speculative-num-draft-tokens",
    "page": "--page-size",
    "context": "--context-length",
    "pool": "--max-total-tokens",
    "rows": "--max-running-requests",
    "level": "--check-level",
    "graphs": "--graphs",
}


def build(model: Any, draft: Any, shape: tuple[int, int, int] | None, options: dict[str, Any]) -> LLM:
    """An engine on the CPU in float64.

    shape: (k, S, T), None without a draft. options: by the names of `ENGINE`, and radix.
    """
    given = {ENGINE[name]: value for name, value in options.items() if name != "radix"}
    given["disable_radix_cache"] = not options.get("radix", False)
    if shape is None:
        return LLM(model, draft=None, dtype="float64", device="cpu", **given)
    return LLM(model, draft, dtype="float64", device="cpu", **dict(zip(SHAPE, shape, strict=True)), **given)


def generate(llm: LLM, prompts: Sequence[Any], params: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """What each prompt gave: [token ids, accepted drafts a round as digits, finish reason, text if there is any].

    Texts come by `stream`; a request's pieces must make up its text.
    """
    outputs: dict[int, Any] = {}
    pieces = [""] * len(prompts)
    for delta in llm.stream(prompts, [SamplingParams(**each) for each in params]):
        pieces[delta.index] += delta.text
        if delta.output is not None:
            outputs[delta.index] = delta.output
    records = []
    for index, prompt in enumerate(prompts):
        output = outputs[index]
        assert output.error is None, output.error
        assert isinstance(prompt, str) or list(output.prompt_token_ids) == list(prompt)
        assert pieces[index] == output.text
        assert output.metrics.target_forwards == len(output.metrics.accept_lens)
        lens = "".join(f"{accepted:x}" for accepted in output.metrics.accept_lens)
        records.append([list(output.token_ids), lens, output.finish_reason, *([output.text] if output.text else [])])
    return records
