"""How many rows there are, if `--max-running-requests` does not say: as many as K/V hold of what requests have been.

Graphs of all rounds that can come, and about what the worst steps take, are counted before rows are chosen, so that
many rows do not end a start that fewer would not.
"""

import json
from contextlib import suppress
from pathlib import Path

from treetop.checkpoints.fingerprint import fingerprint
from treetop.engine.cuda_graphs import num_captured
from treetop.engine.memory import TOKENS_OF_A_ROW, activation_allowance
from treetop.types.cache_files import cache_file, keep, kept
from treetop.types.layout import Layout
from treetop.types.sampling import SamplingMode

_KIND = "request-lengths"
_STATES, _LOGITS = 25, 16
"""States of the model in 16 bits that a token of a prefill step takes, about: an 8B model takes 200 kB. Bytes of each
logit of a round's nodes: in float32, with copies."""


def tokens_of_a_row(folder: Path, dummy: bool) -> tuple[int, str]:
    """Tokens that K/V must hold for each row, and where that comes from, in words. folder: of the target."""
    held = None
    with suppress(OSError):  # of a folder whose files cannot be read, which loading says
        held = None if dummy else kept(cache_file(_KIND, fingerprint(folder)))
    tokens = held.get("tokens") if isinstance(held, dict) else None
    if isinstance(tokens, int) and 0 < tokens < 2**40:
        return tokens, f"{tokens} tokens each, as requests have been here"
    return TOKENS_OF_A_ROW, f"{TOKENS_OF_A_ROW} tokens each, for nobody knows how long requests are"


def keep_lengths(folder: Path, tokens: float) -> None:
    """How many tokens requests have had, for the next start of this target."""
    with suppress(OSError):  # a folder may have gone since
        keep(cache_file(_KIND, fingerprint(folder)), json.dumps({"tokens": max(round(tokens), 1)}))


def allowance_of_a_gpu(layout: Layout, hidden: int, vocab_size: int, processes: bool) -> int:
    """Bytes that a start will find to be needed for activations and captured rounds, about, and no graph too few.

    processes: requests may change logits.
    """
    choices = [choice for choice in SamplingMode if choice is not SamplingMode.PROCESS or processes]
    num_rounds = num_captured(layout, choices, processes, filters_apart=True)
    nodes = max(shape.nodes_at(rows) for rows in layout.buckets for shape in layout.shapes_at(rows))
    return activation_allowance(max(layout.chunk * hidden * 2 * _STATES, nodes * vocab_size * _LOGITS), num_rounds)
