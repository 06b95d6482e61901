"""Faults of recurrent layers, put back by name: each leaves rows with states that are not those of their tokens
(`tests/speculative/test_recurrence.py` compares both after each step)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treetop.attention.recurrent import ChunkRecurrence, NodeRecurrence
from treetop.cache.kv_cache_manager import KVCacheManager, Lease
from treetop.engine.features.states import RowStates
from treetop.engine.model_runner import ModelRunner
from treetop.kernels.recurrent.decay import NEVER
from treetop.kernels.tree.commit import Paths
from treetop.types.messages import Chunk
from treetop_debug.faults import Fault, by_name
from treetop_debug.patching import Patch

Keep = Callable[[ModelRunner, NodeRecurrence | None, Paths], None]


def _one_node_more(real: Keep) -> Keep:
    """A path's length taken for its last column: what was rejected behind it is kept too."""

    def keep(runner: ModelRunner, of: NodeRecurrence | None, paths: Paths) -> None:
        real(runner, of, replace(paths, accept_len=(paths.accept_len + 1).clamp(max=paths.width - 1)))

    return keep


def _by_column(real: Keep) -> Keep:
    """The first nodes of a tree taken for those of the path."""
    return lambda runner, of, paths: real(runner, of, replace(paths, node=None))


def _standing_convolution(real: Keep) -> Keep:
    """The state moves on, the convolution does not."""

    def keep(runner: ModelRunner, of: NodeRecurrence | None, paths: Paths) -> None:
        before = {name: states.conv.clone() for name, states in runner.state.states.groups.items()}
        real(runner, of, paths)
        for name, states in runner.state.states.groups.items():
            states.conv.copy_(before[name])

    return keep


def _nothing_pending(real: Keep) -> Keep:
    """What was accepted is folded by nobody."""

    def keep(runner: ModelRunner, of: NodeRecurrence | None, paths: Paths) -> None:
        real(runner, of, paths)
        for states in runner.state.states.groups.values():
            states.count.zero_()

    return keep


def _twice(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda m, pending, count: real(real(m, pending, count), pending, count)


def _by_head(real: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def with_channels(g: Tensor, k: Tensor) -> Tensor:
        each = real(g, k)
        return each.mean(dim=-1, keepdim=True).expand_as(each)

    return with_channels


def _quotients(real: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def path_decays(g: Tensor, parents: Tensor) -> Tensor:
        logs = real(g, parents)
        since_root = logs[:, :, :1].exp()
        quotients = (since_root * (1 / since_root.transpose(1, 2))).log()
        return torch.cat([logs[:, :, :1], torch.where(logs[:, :, 1:] > NEVER, quotients, NEVER)], dim=2)

    return path_decays


def _of_a_chain(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Every node convolved with the columns before its own, whoever its parent is."""

    def windows(parents: Tensor, taps: int) -> Tensor:
        before = (torch.arange(parents.shape[1], device=parents.device) - 1).clamp(min=0)
        return real(before.expand_as(parents), taps)

    return windows


def _as_it_was_left(real: Callable[..., None]) -> Callable[..., None]:
    """A request goes on from the states of the one before it in its row."""

    def begin(self: RowStates, rows: Tensor, *_: Any) -> None:
        for states in self.groups.values():
            states.count[rows] = 0

    return begin


def _with_padding(real: Callable[..., ChunkRecurrence | None]) -> Callable[..., ChunkRecurrence | None]:
    """What stands behind a chunk's tokens counts as tokens, as padding on the left of a prompt would."""

    def chunks(runner: ModelRunner, rows: Tensor, valid: Tensor) -> ChunkRecurrence | None:
        return real(runner, rows, valid | (rows != runner.layout.dummy_row)[:, None])

    return chunks


def _a_page_earlier(real: Callable[..., None]) -> Callable[..., None]:
    """States attached to the node before theirs (sgl-38815)."""

    def place(self: KVCacheManager, lease: Lease, num_tokens: int) -> None:
        if num_tokens in lease.keeps:
            lease.keeps[num_tokens - self._layout.page_size] = lease.keeps.pop(num_tokens)
        real(self, lease, num_tokens - self._layout.page_size)

    return place


def _of_a_row_with_drafts(real: Callable[..., None]) -> Callable[..., None]:
    """What is kept is not the state of its tokens, as one with a draft's folded is not (vllm-43559)."""

    def keep(self: RowStates, chunks: Sequence[Chunk]) -> None:
        real(self, chunks)
        for chunk in chunks:
            if chunk.keep is not None:
                for states in self.checkpoints.values():
                    states.state[:, chunk.keep] *= 0.5
                    states.state[:, chunk.keep] += 1.0

    return keep


def _cut_back(real: Callable[..., Any]) -> Callable[..., Any]:
    """A hit of pages alone: whoever begins behind them begins with no states (lmcache-4247)."""
    return lambda self, lease: None


_KEEP, _GUARD = "treetop.engine.rounds:keep_states", "states of tokens"

RECURRENT_FAULTS = by_name(
    Fault("state-rejected", "a rejected node is folded", (Patch(_KEEP, _one_node_more),), _GUARD, None),
    Fault("state-by-column", "a path's updates are taken by column", (Patch(_KEEP, _by_column),), _GUARD, None),
    Fault(
        "state-conv-stands",
        "states are rolled on after acceptance, convolutions are not (llama.cpp 28123)",
        (Patch(_KEEP, _standing_convolution),),
        _GUARD,
        None,
    ),
    Fault(
        "state-of-the-round-before",
        "a round reads the state of before the drafts that were accepted (vllm-39273)",
        (Patch(_KEEP, _nothing_pending),),
        _GUARD,
        None,
    ),
    Fault(
        "state-twice",
        "pending updates are folded twice",
        (Patch("treetop.kernels.recurrent.verify:folded", _twice),),
        _GUARD,
        None,
    ),
    Fault(
        "state-window-by-column",
        "a node's convolution reads the columns before it instead of its ancestors",
        (Patch("treetop.engine.recurrence:tree_windows", _of_a_chain),),
        _GUARD,
        None,
    ),
    Fault(
        "state-left",
        "a request moves in without its state being zeroed (vllm-metal 488)",
        (Patch("treetop.engine.features.states:RowStates.move_in", _as_it_was_left),),
        _GUARD,
        None,
    ),
    Fault(
        "state-padding",
        "padding of a chunk enters the state (vllm-55178)",
        (Patch("treetop.engine.prefill:chunk_recurrence", _with_padding),),
        _GUARD,
        None,
    ),
)

CHANNEL_FAULTS = by_name(
    Fault(
        "state-decay-by-head",
        "all channels of a key decay alike, by their mean",
        tuple(Patch(f"treetop.kernels.recurrent.{each}:with_channels", _by_head) for each in ("verify", "prefill")),
        _GUARD,
        None,
    ),
    Fault(
        "decay-by-quotient",
        "decays between two nodes are quotients of powers, which float32 has not got",
        (Patch("treetop.kernels.recurrent.verify:path_decays", _quotients),),
        "outputs near those of float64",
        None,
    ),
)
"""Of Kimi delta attention alone."""

CHECKPOINT_FAULTS = by_name(
    Fault(
        "state-of-another-length",
        "states are attached to the page before theirs",
        (Patch("treetop.cache.kv_cache_manager:KVCacheManager.place_checkpoint", _a_page_earlier),),
        "tokens that a row's states are of",
        1,
    ),
    Fault(
        "state-missing",
        "a hit has pages and no states",
        (Patch("treetop.cache.kv_cache_manager:KVCacheManager.checkpoint_of", _cut_back),),
        "without their states",
        1,
    ),
    Fault(
        "state-with-draft",
        "what is kept of a prompt is not the state of its tokens",
        (Patch("treetop.engine.features.states:RowStates.keep", _of_a_row_with_drafts),),
        _GUARD,
        None,
    ),
)
