"""A prompt's chunk by `flash-linear-attention`, where it is installed and asked for; trees are ours.

Its kernels take queries, keys and values in 16 bits, states and decays in float32, and round what a block adds to 16
bits: `tests/gpu/test_gpu_fla.py` has how far that is from the reference. Interface: fla-core 0.6.0, MIT.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from treetop.kernels.recurrent.states import LayerStates, StateInputs

MODULE = "fla.ops.gated_delta_rule"


def why_not_fla() -> str | None:
    """Why it cannot be called in this environment; None if it can."""
    try:
        _chunked()
    except (ImportError, AttributeError) as error:
        return f"flash-linear-attention cannot be imported ({error})"
    return None


def prefill_by_fla(states: LayerStates, rows: Tensor, inputs: StateInputs, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """As `prefill_states_reference`, with decays by head and the delta rule. dtype: of what it is given."""
    assert inputs.beta is not None
    there = valid[..., None]
    q, k, v = (torch.where(there[..., None], x, 0).to(dtype) for x in (inputs.q, inputs.k, inputs.v))
    g, beta = torch.where(there, inputs.g, 0), torch.where(there, inputs.beta, 0)
    out, after = _chunked()(
        q, k, v, g, beta, scale=1.0, initial_state=states.state[rows], output_final_state=True
    )  # queries are scaled already
    states.state[rows] = after.to(states.state.dtype)
    return out.to(inputs.v.dtype)


def _chunked() -> Callable[..., tuple[Tensor, Tensor]]:
    module: Any = import_module(MODULE)
    return cast(Callable[..., tuple[Tensor, Tensor]], module.chunk_gated_delta_rule)
