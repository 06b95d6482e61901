"""What a constraint allows along a draft tree: one set of tokens a node, from the root on."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from treetop.types.constraint import Branch
from treetop.types.messages import RowTree

Bits = Callable[[Iterable[int] | bytes | None, tuple[int, ...]], int]
"""(a constraint's answer, the path behind the root) -> the tokens that may come next, bit t for token t.

Raises whatever makes of the answer an error.
"""


@dataclass(frozen=True, slots=True)
class TreeWalk:
    """A tree, and what may follow its nodes as far as that is known, bit t for token t; never nothing.

    A node that ends the output is never known: the token is as good as a bonus. Nor is one at which the constraint
    fails: the request fails if the token comes, as it would have without a tree.

    forced: chains of tokens that are each the only one allowed and that the tree lacks, behind a known node: (node, the
    tokens with what may follow each).
    """

    tree: RowTree
    allowed: dict[int, int] = field(default_factory=dict)
    forced: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)

    def visit(self, branch: Branch, root: int, bits_of: Bits, ends: int, until_s: float) -> None:
        """Find out, depth first, until a time of `time.monotonic`. It may run beside a reader of `allowed`.

        root: what may follow the root. ends: tokens that end the output.
        """
        self.allowed[0] = root
        children = [list[int]() for _ in self.tree.tokens]
        for node, parent in enumerate(self.tree.parent[1:], start=1):
            children[parent].append(node)

        def below(node: int, path: tuple[int, ...]) -> bool:
            """False: it is given up, and what the branch was told is taken back."""
            may_follow = self.allowed[node] & ~ends
            for child in children[node]:
                token = self.tree.tokens[child]
                if not may_follow >> token & 1:
                    continue
                if time.monotonic() > until_s:
                    return False
                behind = (*path, token)
                found, goes_on = _bits_behind(branch, token, behind, bits_of), True
                if found:
                    self.allowed[child] = found
                    goes_on = below(child, behind)
                if not branch.rollback() or not goes_on:
                    return False
            only = _only(self.allowed[node])
            if only is None or any(self.tree.tokens[child] == only for child in children[node]):
                return True
            return force(node, path)

        def force(node: int, path: tuple[int, ...]) -> bool:
            """What must follow a node. False: as `below`."""
            chain, found, num_taken, goes_on = list[tuple[int, int]](), self.allowed[node], 0, True
            self.forced.append((node, chain))
            while goes_on and len(path) < self.tree.max_depth:
                token = _only(found)
                if token is None or ends >> token & 1:
                    break
                goes_on = time.monotonic() <= until_s
                if goes_on:
                    path, num_taken = (*path, token), num_taken + 1
                    found = _bits_behind(branch, token, path, bits_of)
                    if not found:
                        break
                    chain.append((token, found))
            return all(branch.rollback() for _ in range(num_taken)) and goes_on

        below(0, ())

    def snapshot(self) -> "TreeWalk":
        """What is known by now."""
        return TreeWalk(self.tree, dict(self.allowed), [(node, [*chain]) for node, chain in self.forced])

    def with_branches(self) -> tuple["TreeWalk", tuple[int, ...]]:
        """With forced chains in the place of nodes that nobody accepts, those nearest to the root first.

        Returns the source of each node, too, as `NodeMasks` has it; itself and () if nothing is added.
        """
        tree, count = self.tree, len(self.tree.tokens)
        depth = [0] * count
        for node in range(1, count):
            depth[node] = depth[tree.parent[node]] + 1
        room = [node for node in range(count - 1, 0, -1) if node not in self.allowed]  # children before their parents
        tokens, parent, source = [*tree.tokens], [*tree.parent], [*range(count)]
        allowed = dict(self.allowed)
        for hangs_on, chain in sorted(self.forced, key=lambda each: depth[each[0]]):
            up = hangs_on
            for token, found in chain[: len(room) - (len(tokens) - count)]:
                allowed[len(tokens)] = found
                depth.append(depth[up] + 1)
                tokens.append(token)
                parent.append(up)
                source.append(hangs_on)
                up = len(tokens) - 1
        dropped = {*room[: len(tokens) - count]}
        if not dropped:
            return self, ()
        order = sorted((each for each in range(len(tokens)) if each not in dropped), key=depth.__getitem__)
        place = {node: at for at, node in enumerate(order)}
        grown = RowTree(
            tree.row,
            tuple(tokens[node] for node in order),
            tuple(place[parent[node]] for node in order),
            tree.max_depth,
        )
        known = {place[node]: found for node, found in allowed.items()}
        return TreeWalk(grown, known), tuple(source[node] for node in order)

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that is this token and known."""
        for each in self.allowed:
            if each and self.tree.parent[each] == node and self.tree.tokens[each] == token:
                return each
        return None


def _only(bits: int) -> int | None:
    """The token of a set of one."""
    return bits.bit_length() - 1 if bits and not bits & (bits - 1) else None


def _bits_behind(branch: Branch, token: int, path: tuple[int, ...], bits_of: Bits) -> int:
    """What may follow a draft; 0 if nothing, or if the constraint fails there."""
    try:
        answer: Any = branch.accept(token)
        return bits_of(answer, path)
    except BaseException:  # a caller's own code may exit, a library's may panic
        return 0
