"""Prompts in blocks on a GPU, captured and not: with `--exactness bits` they change no bit.

python -m pytest tests/gpu/test_gpu_captured_prefill.py -q
"""

import random
from collections import Counter

import pytest
import torch

from support.engines import greedy, pump, sampled, submit
from support.gpu_pairs import HEAD, make
from treetop.types.messages import PrefillPlan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LENGTHS = [9, 130, 1, 70, 400, 44, 13, 95, 160, 30, 61, 5]


def outputs(draft, shape, again=False, **options):
    """What requests get, and the sizes of prefill steps. again: the second time, when the prefix cache has prompts."""
    llm = make(draft, shape, **{"max_running_requests": 8, "chunked_prefill_size": 512, **options})
    dice = random.Random(0)
    prompts = [[dice.randrange(3, 200) for _ in range(length)] for length in LENGTHS]
    for _ in range(1 + again):
        requests = submit(llm, prompts, [sampled(i, 40) if i % 3 else greedy(40) for i in range(len(prompts))])
        plans = [plan for plan, _ in pump(llm)]
    sizes = Counter(plan.block for plan in plans if isinstance(plan, PrefillPlan))
    return [tuple(request.output_ids) for request in requests], sizes


@pytest.mark.parametrize(
    ("draft", "shape", "graphs", "level"),
    [
        (None, (0, 1, 1), "auto", 1),
        (HEAD, (3, 1, 4), "auto", 1),
        (HEAD, (5, 4, 16), "auto", 3),
    ],
)
def test_no_bit_changes(draft, shape, graphs, level):
    """In bfloat16, greedy and drawn: as launched kernel by kernel, as plain decoding; wide blocks and narrow ones."""
    exact = {"exactness": "bits", "dtype": "bfloat16"}
    expected, _ = outputs(None, (0, 1, 1), **exact)
    captured = {"prefill_graph_max_tokens": 512, "graphs": graphs, "check_level": level}
    for again, wide in ((False, 32), (True, 8)):
        got, sizes = outputs(draft, shape, again, **captured, **exact)
        assert sizes[wide], sizes
        assert got == expected


@pytest.mark.parametrize("exactness", ["bits", "ties"])
@pytest.mark.parametrize(("draft", "shape"), [(None, (0, 1, 1)), (HEAD, (3, 1, 4)), (HEAD, (5, 4, 16))])
def test_blocks_that_are_not_captured(draft, shape, exactness):
    """As many as prompts take, beside lines: in bfloat16 no bit changes; in float32 no token but near a tie."""
    exact = {"exactness": exactness, "dtype": "bfloat16" if exactness == "bits" else "float32"}
    expected, lines = outputs(None, (0, 1, 1), graphs="off", prefill_graph_max_tokens=0, **exact)
    assert {*lines} == {0}
    for again, block in ((False, 32), (True, 8)):
        got, sizes = outputs(draft, shape, again, prefill_graph_max_tokens=0, **exact)
        assert sizes[block], sizes
        alike = sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
        assert alike >= len(got) - (exactness == "ties"), (got, expected)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_tokens_are_those_of_other_steps(backend):
    """float32, the defaults' path: near ties are few enough to be none here."""
    expected, _ = outputs(HEAD, (3, 1, 4), attention_backend=backend)
    got, sizes = outputs(HEAD, (3, 1, 4), attention_backend=backend, prefill_graph_max_tokens=512)
    assert sizes[32]
    alike = sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
    assert alike >= len(got) - 1, (got, expected)
