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
