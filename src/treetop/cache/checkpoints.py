"""Slots for states of recurrent layers that prompts which begin alike go on from: free, leased by a request whose chunk
fills one, or cached at the node whose tokens it is of.

A state cannot be cut back, so a hit ends at a node that has one. A node may lose its slot and keep its pages; what
loses its pages loses its slot.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from treetop.types.errors import OwnershipError

if TYPE_CHECKING:
    from treetop.cache.prefix_cache import Node


class StateCheckpoints:
    """Slots 0 .. total - 1. What is cached is kept least recently used first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._leased: set[int] = set()
        self._cached: OrderedDict[Node, int] = OrderedDict()

    def lease(self) -> int | None:
        """A slot for a request, if need be the one that was used least recently; None if others lease all."""
        if not self._free and self._cached:
            self.drop(next(iter(self._cached)))
        if not self._free:
            return None
        slot = self._free.pop()
        self._leased.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """A leased slot, of which nothing is to be kept."""
        if slot not in self._leased:
            raise OwnershipError(f"checkpoint {slot} is given back, but nobody leases it")
        self._leased.remove(slot)
        self._free.append(slot)

    def put(self, slot: int, node: "Node") -> None:
        """A leased slot holds a node's states. A node that has some keeps those."""
        if node in self._cached:
            self.give_back(slot)
            return
        if slot not in self._leased:
            raise OwnershipError(f"checkpoint {slot} is to be cached, but nobody leases it")
        self._leased.remove(slot)
        self._cached[node] = slot

    def holds(self, node: "Node") -> bool:
        return node in self._cached

    def read(self, node: "Node") -> int:
        """A node's slot, which is used now."""
        self._cached.move_to_end(node)
        return self._cached[node]

    def drop(self, node: "Node") -> None:
        """A node's slot is free, if it has one."""
        slot = self._cached.pop(node, None)
        if slot is not None:
            self._free.append(slot)

    def check(self, leased: Iterable[int]) -> None:
        """Raise OwnershipError unless free + leased + cached == total, each slot once. leased: of all leases."""
        mine = sorted(leased)
        if mine != sorted(self._leased):
            raise OwnershipError(f"checkpoints {sorted(self._leased)} are leased, and leases hold {mine}")
        slots = sorted([*self._free, *self._leased, *self._cached.values()])
        if slots != list(range(self.total)):
            raise OwnershipError(
                f"checkpoints: {len(self._free)} free + {len(self._leased)} leased + {len(self._cached)} cached !="
                f" {self.total}"
            )

    def nodes(self) -> "Iterable[Node]":
        """That have a slot."""
        return self._cached
