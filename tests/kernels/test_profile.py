"""The profile of an exactness: what it changes, and that nothing beside it asks which exactness is in force."""

import ast
from pathlib import Path

import pytest
import torch

import treetop
from treetop.kernels.profile import TIES, profile_of
from treetop.kernels.table import OpContext, Ops, operations

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_ties_are_one_profile_on_every_device():
    """What has no exactness has nothing that depends on where it runs."""
    assert profile_of("ties", CPU) is profile_of("ties", GPU) is TIES


def test_bits_take_what_a_device_can_be_held_to():
    """On a CPU functions by element and one call for all rows; on a GPU what was probed. Sums are in order on both."""
    cpu, gpu = profile_of("bits", CPU), profile_of("bits", GPU)
    assert (cpu.products, gpu.products) == ("one call", "probed")
    assert gpu.functions is TIES.functions is not cpu.functions
    for each in (cpu, gpu):
        assert each.exactness == "bits"
        assert all((each.batch_invariant, each.sums_in_order, each.exact_attention))


@pytest.mark.parametrize("exactness", ["ties", "bits"])
def test_operations_take_the_form_that_the_profile_says(exactness):
    """On a CPU by rows wherever an operation has such a form, and never without the profile."""
    ops = Ops(OpContext(CPU, torch.float32, profile=profile_of(exactness, CPU)))
    other = [name for name, op in operations().items() if op.batch_invariant is not None]
    assert other
    for name, op in operations().items():
        wanted = op.batch_invariant if exactness == "bits" and op.batch_invariant is not None else op.reference
        assert getattr(ops, name) is wanted


ASKS = {
    *("kernels/profile.py", "engine/startup/exactness_table.py", "distributed/open.py", "core/mock.py"),
    *("types/config.py", "doctor/report.py", "doctor/exactness.py", "doctor/rank_sums.py", "distributed/client.py"),
    "distributed/remote_engine.py",
}
"""The profile, the option, what `auto` stands for, on every engine alike, and what a doctor prints."""


def test_nobody_else_asks_which_exactness_is_in_force():
    """No comparison of an `exactness`, or with its words, anywhere else in the package."""
    root = Path(treetop.__file__).parent
    found = set[str]()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
                words = {ast.unparse(each) for each in (node.left, *node.comparators)}
                if any(word.endswith(".exactness") or word == "'ties'" for word in words):
                    found.add(str(file.relative_to(root)))
    assert found <= ASKS, sorted(found - ASKS)
    assert "kernels/profile.py" in found or "doctor/report.py" in found, "the search finds nothing at all"
