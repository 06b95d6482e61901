"""Acceptance does not depend on where a text stands: past the positions a YaRN rotation was trained for, up to 8 times
as far, drafts of the same text are accepted as at the beginning.

All layers have a window, target's and head's, and a rotation counts distances: so what follows a text that is longer
than all windows together is the same at any position, token by token and draft by draft, and nothing is left to noise.
"""

from dataclasses import replace

import pytest

from support.engines import accept_lens, build, greedy, tokens
from support.families import FAMILIES
from support.grids import few_values
from support.tiny_models import EOS
from treetop.drafts import eagle3

ORIGINAL, WINDOW, LENGTH = 64, 6, 48
"""Positions before scaling; of each of four layers and the head's; of a text, more than these five together see."""
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": ORIGINAL}
OPTIONS = {
    "context_length": 9 * ORIGINAL,
    "speculative_draft_window_size": WINDOW,
    "chunked_prefill_size": 128,
    "max_running_requests": 3,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    sizes = {"vocab_size": 12, "sliding_window": WINDOW, "rope_parameters": ROPE, "max_position_embeddings": 1024}
    tiny = replace(FAMILIES["mistral"], config={**FAMILIES["mistral"].config, **sizes})
    return tiny.save(tmp_path_factory.mktemp("yarn"), seed=8).pair


def written(llm, texts, at):
    """Tokens and accept lengths of what follows texts that end at position `at`, or begin there."""
    before = [EOS + 1 + (3 * i * i + i // 7) % (11 - EOS) for i in range(max(at - LENGTH, 0))]
    outputs = llm.generate([before + text for text in texts], greedy(32))
    return tokens(outputs), accept_lens(outputs)


@pytest.mark.parametrize("shape", few_values([(4, 5, 16), (1, 4, 5)], 0), ids=["tree", "chain"])
def test_drafts_are_accepted_far_behind_the_original_positions_as_at_the_beginning(pair, shape, monkeypatch):
    """At 2 and 8 times the original positions; a head whose positions end at the original ones is found out."""
    texts, llm = pair.prompts([LENGTH] * 3, seed=4), build(pair, shape, **OPTIONS)
    fresh = written(llm, texts, LENGTH)
    assert sum(map(sum, fresh[1])) > 0
    assert all(written(llm, texts, far * ORIGINAL) == fresh for far in (2, 8))
    real = eagle3.rotary_at
    monkeypatch.setattr(eagle3, "rotary_at", lambda table, at, ops: real(table, at.clamp(max=ORIGINAL), ops))
    broken = build(pair, shape, **OPTIONS)
    there, accepted = written(broken, texts, 8 * ORIGINAL)
    assert there == fresh[0], "no token depends on a draft"
    assert accepted != fresh[1]
