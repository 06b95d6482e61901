"""Distinct types for the numbers that must never be mixed up.

A page is a unit of allocation, a row a place of a request on the device. What lives in tensors (slots, positions,
target and draft tokens) is named where the tensor is born; only `drafts.protocol.DraftVocab.to_target` crosses from one
vocabulary to the other.
"""

from typing import NewType

PageId = NewType("PageId", int)
Row = NewType("Row", int)
RequestId = NewType("RequestId", int)

GroupName = NewType("GroupName", str)

NULL_PAGE = PageId(0)
"""Reserved in every group: finite scratch that masked reads and dropped writes go to; never owned."""

FULL = GroupName("full")
WINDOW = GroupName("window")
INDEXED = GroupName("indexed")
DRAFT = GroupName("draft")
"""The drafter's; where its layers differ in window or block, the first of several (`draft_group`)."""
EXPERTS = GroupName("experts")
"""No K/V, but which experts each token went to, in pages of their own as K/V are."""
STATE = GroupName("state")
"""Layers that keep a state by row; where they differ in kind, the first of several (`state_group`)."""


def draft_group(index: int) -> GroupName:
    """The name of the drafter's groups, in the order of their first layers."""
    return DRAFT if index == 0 else GroupName(f"{DRAFT}{index}")


def state_group(index: int) -> GroupName:
    """The name of the groups of states, in the order of their first layers."""
    return STATE if index == 0 else GroupName(f"{STATE}{index}")


def is_draft(name: GroupName) -> bool:
    return name.startswith(DRAFT)
