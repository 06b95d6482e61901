"""Faults of block heads, put back by name. They change trees and accept lengths, and no token: an oracle tells
(`tests/drafts/test_block_heads.py`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from treetop_debug.faults import Fault
from treetop_debug.patching import Patch


def _of_the_node_behind(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What the target computed for the node behind each of the path, which was rejected or is another's."""
    return lambda path, num_nodes: real((path + 1).clamp(max=num_nodes - 1), num_nodes)


def _other_alignment(real: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *args: not real(*args)


def _other_layer(real: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    """Numbers of layers' outputs taken for those of inputs."""
    return lambda *args: tuple(each - 1 for each in real(*args))


def _own_windows(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A window that is counted from the root, counted from each query."""
    return lambda committed, width, anchored: real(committed, width, anchored=False)


def _without_edges(real: Callable[..., Any]) -> Callable[..., Any]:
    """Every node of a depth has what the block gives, whatever its parent."""
    return lambda self, slot, state, *rest: real(self, slot, torch.zeros_like(state), *rest)


def _along_the_greedy_chain(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """All nodes of a depth are taken for the likeliest one."""
    return lambda self, tokens, slot, parent: real(self, tokens[:, :1].expand_as(tokens), slot, parent)


BLOCK_FAULTS: dict[str, tuple[Fault, str]] = {
    each.name: (each, layout)
    for each, layout in (
        (
            Fault(
                "block-rejected-features",
                "a block's context holds what the target computed for nodes that were rejected",
                (Patch("treetop.kernels.tree.commit:feature_nodes", _of_the_node_behind),),
                "oracle",
                None,
            ),
            "z-lab",
        ),
        (
            Fault(
                "block-alignment",
                "a block's slots are taken to predict their own token where they predict the next, and the other way",
                (Patch("treetop.drafts.block_config:_is_shifted", _other_alignment),),
                "oracle",
                None,
            ),
            "DeepSpec, DFlash",
        ),
        (
            Fault(
                "block-layer-ids",
                "a block head reads the states one layer before those that it was trained on",
                (Patch("treetop.drafts.block_config:_aux_inputs", _other_layer),),
                "oracle",
                None,
            ),
            "z-lab",
        ),
        (
            Fault(
                "block-window-rule",
                "a window that is counted from a block's root is counted from each of its queries",
                (Patch("treetop.engine.tree_growth:block_positions", _own_windows),),
                "oracle",
                None,
            ),
            "speculators, windows",
        ),
        (
            Fault(
                "block-marginals",
                "nodes of a depth all have the block's own proposals where their parents count",
                (Patch("treetop.drafts.block_edges:Markov.propose", _without_edges),),
                "oracle",
                None,
            ),
            "DeepSpec, vanilla",
        ),
        (
            Fault(
                "block-greedy-chain-edges",
                "edges are scored along the likeliest path, for the branches beside it too (vllm-51009)",
                (Patch("treetop.drafts.block_edges:Markov.state", _along_the_greedy_chain),),
                "oracle",
                None,
            ),
            "DeepSpec, gated",
        ),
    )
}
"""Fault, and the layout of `tests/support/block_heads.py` that it harms."""
