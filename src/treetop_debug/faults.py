"""Named faults: each puts a past bug of the field back, in the place of one ordinary function or inside one kernel.

    with fault("sgl-27360"):
        ...  # engines made and closed here have the bug

A fault holds for the whole process, one at a time, and nothing in production knows of it. `TREETOP_FAULT` names one to
the command line. The identifiers are those of the reports; each row names the guard that catches it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from treetop.debug.two_group import ZERO_AFTER_ZERO
from treetop.types.errors import ConfigError, InvariantError
from treetop_debug import twins
from treetop_debug.patching import Patch, instead, kernel_twin, replaced

ENVIRONMENT = "TREETOP_FAULT"
_one_at_a_time = Lock()


@dataclass(frozen=True, slots=True)
class Fault:
    """A bug put back.

    summary: what goes wrong.
    patches: its twins; which of them runs depends on the device.
    guard: text that the guard's error holds.
    level: the check level whose guard catches it; None if the visibility decoder or a comparison of outputs must.
    options: engine options it needs to do harm.
    seed: of the two-group pair that it needs to do harm; None is the embedded pair.
    scene: what it is run in, of (folder, check level), -1 where nobody is to look: it says what happened, and raises
        what a guard says. None is the scenario that serves most (`provoke`).
    """

    name: str
    summary: str
    patches: tuple[Patch, ...]
    guard: str
    level: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    scene: Callable[[Path, int], str] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hold from before an engine is made until it is closed.

        Raises ConfigError if another fault is active, InvariantError if a target is missing or, at the end, if no twin
        has run: a fault that does nothing shows nothing.
        """
        if not _one_at_a_time.acquire(blocking=False):
            raise ConfigError(f"fault {self.name}: another fault is active; one at a time")
        try:
            with replaced(self.patches) as ran:
                yield
            if self.patches and not ran:
                raise InvariantError(f"fault {self.name}: no twin of it ran")
        finally:
            _one_at_a_time.release()


def fault(name: str) -> AbstractContextManager[None]:
    """A fault as a context, by name. Raises ConfigError listing the known ones."""
    if name not in FAULTS:
        raise ConfigError(f"{ENVIRONMENT}: no fault {name!r}; known are {', '.join(FAULTS)}")
    return FAULTS[name].active()


def environment_fault(environment: Mapping[str, str]) -> AbstractContextManager[None]:
    """The fault that the environment names, which is said loudly; none if it names none."""
    name = environment.get(ENVIRONMENT)
    if not name:
        return nullcontext()
    context = fault(name)
    _announce(name, FAULTS[name].summary)
    return context


@cache
def _announce(name: str, summary: str) -> None:
    """One line on stderr, once a process."""
    print(f"treetop: FAULT {name} IS ACTIVE ({ENVIRONMENT}): {summary}", file=sys.stderr)


_ENTRY = "entry = tl.load(node + item * node_row + column)\n"
_MOVED_ENTRY = """entry = tl.load(node + item * node_row + column)
            seat = column
            for _ in range(width):  # what stands there has come from further back, where it is in the way of the path
                moved = (entry > seat) & (entry < width)
                seat = tl.where(moved, entry, seat)
                entry = tl.where(moved, tl.load(node + item * node_row + seat), entry)
"""


def by_name(*faults: Fault) -> dict[str, Fault]:
    return {each.name: each for each in faults}


FAULTS: dict[str, Fault] = by_name(
    Fault(
        "sgl-27360",
        "each draft level fills the tail S levels wide",
        (instead("treetop.engine.tree_growth:level_tail", twins.all_levels_wide),),
        "tail of phase draft",
        0,
    ),
    Fault(
        "sgl-27338",
        "the draft tail is sized without the factor k",
        (instead("treetop.types.layout:Layout.draft_tail", property(twins.no_topk_factor)),),
        "tail of phase draft",
        0,
    ),
    Fault(
        "sgl-23037-padding",
        "the padding of the row list keeps the rows of an earlier, larger batch",
        (Patch("treetop.engine.engine:pad_rows", twins.stale_padding),),
        "padding of the row list",
        1,
    ),
    Fault(
        "sgl-23037-alias",
        "results are views of buffers that the next round overwrites",
        (
            instead("treetop.engine.staging:copy_out", twins.view),
            instead("treetop.engine.engine:copy_out", twins.view),
        ),
        "shares memory with the round's buffers",
        1,
    ),
    Fault(
        "padding-siblings",
        "acceptance relies on siblings that differ, which the dummy row's do not",
        (
            instead("treetop.kernels.tree.accept:accept", twins.whole_tree),
            kernel_twin(
                "treetop.kernels.tree.accept:_accept_kernel",
                ("length = deepest // block_t\n", "length = tl.sum(agreed.to(tl.int32), 0) - 1\n"),
                (
                    "on_path = tl.load(mask + row * mask_row + last * mask_node + node, mask=real, other=0) != 0\n",
                    "on_path = agreed\n",
                ),
            ),
        ),
        "padded batch",
        1,
        {"speculative_eagle_topk": 4, "speculative_num_steps": 1, "speculative_num_draft_tokens": 5},
        seed=ZERO_AFTER_ZERO,
    ),
    Fault(
        "sgl-24617",
        "window layers read the page table of the full group",
        (instead("treetop.engine.state:RowState.table_of", twins.full_table),),
        "were given the page table of full",
        1,
        seed=0,
    ),
    Fault(
        "sgl-26628-missed",
        "draft extend does not see the tokens it has just written",
        (instead("treetop.engine.buffers:extend_mask", twins.misses_itself),),
        "visibility",
        None,
    ),
    Fault(
        "sgl-26628-twice",
        "draft extend counts its own tokens as committed too",
        (Patch("treetop.engine.model_runner:ModelRunner.metadata", twins.counts_twice),),
        "visibility",
        None,
        {"graphs": "sim"},
    ),
    Fault(
        "sgl-25015",
        "draft positions are one too far",
        (
            instead("treetop.kernels.tree.grow:draft_positions", twins.one_too_far),
            kernel_twin(
                "treetop.kernels.tree.grow:_start_kernel",
                ("node, length + node // k,", "node, length + node // k + 1,"),
            ),
        ),
        "visibility",
        None,
    ),
    Fault(
        "sgl-27545",
        "draft extend finds a row's features with stride S + 1 instead of T",
        (
            instead("treetop.kernels.tree.commit:feature_nodes", twins.stride_of_path),
            instead("treetop.engine.rounds:feature_nodes", twins.stride_of_path),
            kernel_twin(
                "treetop.kernels.tree.commit:_path_features_kernel",
                ("row * num_nodes +", "row * width +"),
            ),
        ),
        "detect_oob: feature_node",
        2,
    ),
    Fault(
        "sgl-26972",
        "page tables have no headroom at the context wall",
        (instead("treetop.types.layout:Layout.page_columns", property(twins.no_headroom)),),
        "page_columns: need",
        1,
    ),
    Fault(
        "column-ancestors",
        "a branch of the draft tree sees its own column instead of its ancestors",
        (
            instead("treetop.kernels.tree.grow:next_level_mask", twins.own_column),
            kernel_twin(
                "treetop.kernels.tree.grow:_grow_kernel",
                ("parent[:, None] * mask_node", "slot[:, None] * mask_node"),
            ),
        ),
        "visibility",
        None,
    ),
    Fault(
        "in-place-compaction",
        "the accepted path is compacted inside the tail, last entry first",
        (
            instead("treetop.kernels.tree.commit:commit_tail", twins.in_place),
            kernel_twin("treetop.kernels.tree.commit:_commit_kernel", (_ENTRY, _MOVED_ENTRY)),
        ),
        "commit: a committed slot",
        3,
    ),
    Fault(
        "unaligned-allocation",
        "a release gives back whole pages only, the last partial page is leaked",
        (Patch("treetop.scheduler.rows:Rows.leave", twins.whole_pages_only),),
        "leased",
        None,
    ),
    Fault(
        "prefix-without-draft",
        "a prefix hit shares the target's pages but not the draft's",
        (Patch("treetop.cache.kv_cache_manager:KVCacheManager._share", twins.target_groups_only),),
        "prefix hit",
        1,
        {"disable_radix_cache": False},
    ),
    Fault(
        "chunk-tail",
        "the draft's last slot of a chunk holds a wrong next token",
        (instead("treetop.scheduler.prefill:next_prompt_token", twins.last_token_again),),
        "promised by the chunk before",
        1,
        {"chunked_prefill_size": 8},
    ),
    Fault(
        "limit-before-stop",
        "max_tokens is checked before EOS in the tokens of one round",
        (instead("treetop.scheduler.committer:first_stop", twins.limit_first),),
        "emitted tokens",
        1,
    ),
)
