"""A budget of nodes on a GPU: captured, eager and on a CPU, chains and trees give plain decoding's tokens.

python -m pytest tests/gpu/test_gpu_node_budget.py -q
"""

import random

import pytest
import torch

from support.engines import greedy, pump, sampled, submit
from support.gpu_pairs import HEAD, make
from treetop.types.messages import RoundPlan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LENGTHS = [9, 130, 1, 70, 200, 44, 13, 95, 160, 30, 61, 5]


def outputs(draft, shape, **options):
    """What requests get, and the drafts that rounds of all rows verified."""
    llm = make(draft, shape, **{"max_running_requests": 8, "chunked_prefill_size": 256, **options})
    dice = random.Random(0)
    prompts = [[dice.randrange(3, 200) for _ in range(length)] for length in LENGTHS]
    requests = submit(
        llm, prompts, [sampled(i, 40, whole=True) if i % 3 else greedy(40, whole=True) for i in range(len(prompts))]
    )
    drafted = []
    for plan, updates in pump(llm):
        if isinstance(plan, RoundPlan) and len(plan.rows) == 8 == len(updates):
            drafted.append(sum(each.num_drafted for each in updates))
    return [tuple(request.output_ids) for request in requests], drafted


@pytest.mark.parametrize(
    ("shape", "budget", "graphs", "level"),
    [
        ((5, 1, 6), 20, "auto", 1),
        ((5, 4, 16), 40, "auto", 3),
        ((5, 4, 16), 40, "off", 2),
        ((3, 1, 4), 8, "auto", 1),
    ],
)
def test_no_bit_depends_on_the_budget(shape, budget, graphs, level):
    """In bfloat16, greedy and drawn, with `--exactness bits`: as plain decoding."""
    exact = {"exactness": "bits", "dtype": "bfloat16"}
    expected, _ = outputs(None, (0, 1, 1), **exact)
    got, drafted = outputs(HEAD, shape, speculative_node_budget=budget, graphs=graphs, check_level=level, **exact)
    assert got == expected
    assert {*drafted} == {budget - 8}


@pytest.mark.parametrize("shape", [(5, 1, 6), (5, 4, 16)])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_tokens_are_those_of_whole_trees(shape, backend):
    """float32, the defaults' path, captured and eager: near ties are few enough to be none here."""
    expected, _ = outputs(HEAD, shape, attention_backend=backend)
    for graphs in ("auto", "off"):
        got, drafted = outputs(HEAD, shape, speculative_node_budget=25, graphs=graphs, attention_backend=backend)
        assert {*drafted} == {25 - 8}
        alike = sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
        assert alike >= len(got) - 1, (got, expected)


def test_tokens_are_those_of_a_cpu():
    expected, _ = outputs(HEAD, (5, 4, 16), speculative_node_budget=25, device="cpu", dtype="float32")
    got, _ = outputs(HEAD, (5, 4, 16), speculative_node_budget=25)
    alike = sum(mine == theirs for mine, theirs in zip(got, expected, strict=True))
    assert alike >= len(got) - 1, (got, expected)
