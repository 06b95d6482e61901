"""Mixed steps on a GPU: with `--exactness bits` a chunk in a round's forward changes no bit, in its graph or not.

python -m pytest tests/gpu/test_gpu_mixed.py -q
"""

import random
from collections import Counter

import pytest
import torch

from support.engines import greedy, pump, sampled, submit
from support.gpu_pairs import HEAD, make
from treetop.types.messages import MixedPlan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LENGTHS = [9, 130, 1, 70, 200, 44, 13, 95, 160, 30, 61, 5]


def outputs(draft, shape, **options):
    """What requests get whose prompts come in small steps, and the steps of each kind."""
    options = {"max_running_requests": 8, "chunked_prefill_size": 64, "disable_radix_cache": True, **options}
    llm = make(draft, shape, **options)
    dice = random.Random(0)
    prompts = [[dice.randrange(3, 200) for _ in range(length)] for length in LENGTHS]
    requests = submit(llm, prompts, [sampled(i, 40) if i % 3 else greedy(40) for i in range(len(prompts))])
    kinds = Counter(
        "packed" if isinstance(plan, MixedPlan) and plan.prefill.packed else type(plan) for plan, _ in pump(llm)
    )
    return [tuple(request.output_ids) for request in requests], kinds


@pytest.mark.parametrize(
    ("draft", "shape", "graphs", "level"),
    [
        (None, (0, 1, 1), "auto", 1),
        (HEAD, (3, 1, 4), "auto", 1),
        (HEAD, (5, 4, 16), "auto", 3),
        (HEAD, (3, 1, 4), "off", 2),
    ],
)
def test_no_bit_changes_beside_prompts(draft, shape, graphs, level):
    """In bfloat16, greedy and drawn: as without mixed steps, as plain decoding."""
    exact = {"exactness": "bits", "dtype": "bfloat16"}
    expected, _ = outputs(None, (0, 1, 1), **exact)
    got, kinds = outputs(draft, shape, mixed_chunk="on", graphs=graphs, check_level=level, **exact)
    assert kinds["packed" if graphs == "auto" else MixedPlan] > 5
    assert got == expected


def test_no_bit_changes_in_blocks_of_the_largest_size():
    """Batches of 512, 256 and 128 tokens in blocks of 64, as a server's are, in captured rounds of 1, 2 and 4 rows."""
    exact = {"exactness": "bits", "dtype": "bfloat16", "max_running_requests": 4}
    expected, _ = outputs(None, (0, 1, 1), **exact)
    got, kinds = outputs(HEAD, (3, 1, 4), mixed_chunk="on", chunked_prefill_size=512, **exact)
    assert kinds["packed"] > 3
    assert got == expected


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_tokens_are_those_of_steps_apart(backend):
    """float32, the defaults' path: near ties are few enough to be none here."""
    expected, _ = outputs(HEAD, (3, 1, 4), attention_backend=backend)
    got, kinds = outputs(HEAD, (3, 1, 4), mixed_chunk="on", attention_backend=backend)
    assert kinds["packed"] > 5
    alike = sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
    assert alike >= len(got) - 1, (got, expected)
