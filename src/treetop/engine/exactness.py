"""Whether speculative decoding can give the bits of plain decoding here.

What `bits` asks of each operation of a target is written down in docs/exactness.md.
"""

import torch

from treetop.attention import exact_backend
from treetop.attention.capabilities import Refusal
from treetop.kernels.exact import elementwise_problem
from treetop.models.loader import Placement
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT
from treetop.types.layout import Layout


def is_exact(config: EngineConfig, layout: Layout, place: Placement) -> bool:
    """Whether a row's bits depend on it alone. Raises ConfigError where `--exactness bits` cannot be honoured."""
    if config.exactness == "ties":
        return False
    problem = why_not_exact(config, layout, place)
    if problem is not None:
        raise ConfigError(f"--exactness bits: {problem.reason}; {problem.remedy}")
    return True


def why_not_exact(config: EngineConfig, layout: Layout, place: Placement) -> Refusal | None:
    """What stands against `--exactness bits`; None if nothing does. Operations are probed once a process."""
    ties, nodes = "use --exactness ties", max(shape.num_draft_tokens for shape in layout.shapes)
    if place.device.type != "cpu":
        return Refusal("it is not built for this device yet", "use --exactness ties or --device cpu")
    if place.dtype != torch.float32:
        return Refusal("it is built for float32", f"{ties} or --dtype float32")
    if config.tp_size > 1 or config.ep_size > 1:
        flag = "--tp-size" if config.tp_size > 1 else "--ep-size"
        return Refusal("sums over ranks are not exact yet", f"{ties} or {flag} 1")
    if config.attention_backend not in ("auto", "torch"):
        return Refusal(f"attention backend {config.attention_backend} is not exact", "use --attention-backend torch")
    if nodes > exact_backend.MOST_NODES:
        most = exact_backend.MOST_NODES
        return Refusal(f"a tree may have {most} nodes", f"lower --speculative-num-draft-tokens {nodes} or {ties}")
    if any(group.kv.value_dim is not None for group in layout.groups if group.name != DRAFT):
        return Refusal("compressed attention (MLA) is not exact yet", ties)
    threads = torch.get_num_threads()
    found = elementwise_problem(threads)
    for group in layout.groups:
        if found is None and group.name != DRAFT:
            found = exact_backend.problem(group.kv.head_dim, threads)
    return None if found is None else Refusal(f"on this machine the bits of {found} depend on the batch", ties)
