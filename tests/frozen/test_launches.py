"""Launches of each kernel in a captured round; on the GPU and PyTorch that the golden file names."""

import pytest
import torch

from frozen import golden
from frozen.launches import SHAPES, count_all, machine


@pytest.mark.filterwarnings("ignore:.*rofiler")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(not golden.exists("launches"), reason="not recorded yet: python -m frozen.launches on a GPU")
def test_a_captured_round_launches_what_it_launched():
    """Kernel by kernel, plain and (5, 4, 16)."""
    known = golden.load("launches")
    here = machine()
    if any(known[name] != here[name] for name in here):
        pytest.skip(f"recorded on {known['gpu']} with torch {known['torch']}, this is {here['gpu']}, {here['torch']}")
    assert count_all() == {name: known[name] for name in SHAPES}
