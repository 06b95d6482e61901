"""flash-linear-attention in place of our prefill, at Qwen3-Next's widths: needs `pip install flash-linear-attention`.

python -m pytest tests/gpu/test_gpu_fla.py -q
"""

import warnings

import pytest
import torch

from support.recurrent_oracle import random_inputs, random_states
from treetop.kernels.recurrent.fla import prefill_by_fla, why_not_fla
from treetop.kernels.recurrent.states import LayerStates, StateInputs, StateUpdates
from treetop.kernels.table import Ops
from treetop.types.state import StateGroup

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the library imports
    WHY_NOT = why_not_fla()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

NEXT = StateGroup("state", 1, 8192, 4, 32, 16, 128, 128, delta=True, per_channel=False)


@pytest.mark.parametrize("n", [1, 64, 65, 300])
def test_a_chunk_is_as_near_to_the_reference_as_16_bits_are(n):
    """Rows that end earlier, one without a token; the state after it."""
    torch.manual_seed(n)
    of = random_states(NEXT, 4, 2, torch.float32, torch.float32).layer(0)
    inputs, rows = random_inputs(NEXT, 3, n, torch.float32), torch.tensor([2, 3, 0])
    valid = torch.arange(n) < torch.tensor([n, 0, n // 2])[:, None]

    def made(dtype):
        pending = StateUpdates(*(x.cuda().to(dtype) for x in (of.pending.k, of.pending.d, of.pending.g)))
        states = LayerStates(of.conv.cuda(), of.state.cuda().to(dtype), pending, of.count.cuda())
        each = (x.cuda().to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta))
        return states, rows.cuda(), StateInputs(*each), valid.cuda()

    exact, ours = made(torch.float64), made(torch.float32)
    want = Ops.prefill_states.reference(*exact)[valid.cuda()]
    got = prefill_by_fla(*ours, torch.bfloat16)[valid.cuda()]
    for name, one, other in (("output", got, want), ("state", ours[0].state, exact[0].state)):
        error = float((one - other).abs().max() / other.abs().max())
        print(f"{name}: {error:.1e} of the largest")
        assert error < 2e-2
