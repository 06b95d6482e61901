"""Distinct types for the numbers that must never be mixed up.

A page is a unit of allocation, a slot a place for one token's K/V inside one KV group's pool, a
position a place in a request's sequence. Target and draft tokens live in different vocabularies;
only `models.eagle3.DraftVocab.to_target` crosses them.
"""

from typing import NewType

PageId = NewType("PageId", int)
Slot = NewType("Slot", int)
Position = NewType("Position", int)
Row = NewType("Row", int)
TargetToken = NewType("TargetToken", int)
DraftToken = NewType("DraftToken", int)
RequestId = NewType("RequestId", int)

GroupName = NewType("GroupName", str)

NULL_PAGE = PageId(0)
"""Reserved in every group: finite scratch that masked reads and dropped writes go to; never owned."""

FULL = GroupName("full")
WINDOW = GroupName("window")
DRAFT = GroupName("draft")
