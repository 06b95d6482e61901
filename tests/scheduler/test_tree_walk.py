"""What a walk knows of a tree is what a constraint says along each path, and the tree it gives back is a tree."""

import random
import time

import pytest

from treetop.scheduler.tree_walk import TreeWalk
from treetop.types.ids import Row
from treetop.types.messages import RowTree

VOCAB, ENDS = 9, 1 << 2


class Rules:
    """A random set behind each path, at times one token, none or an exception; it counts what it was told."""

    def __init__(self, seed: int, takes_back: int = 10**9) -> None:
        self.seed, self.path, self.takes_back = seed, [], takes_back

    def behind(self, path) -> int:
        dice = random.Random(f"{self.seed} {path}")
        way = dice.random()
        if way < 0.45:
            return 1 << dice.randrange(VOCAB)
        return 0 if way < 0.5 else dice.randrange(1, 1 << VOCAB)

    def accept(self, token):
        self.path.append(token)
        found = self.behind(tuple(self.path))
        if found % 7 == 3:
            raise SystemExit(3)
        return found

    def rollback(self) -> bool:
        self.takes_back -= 1
        self.path.pop()
        return self.takes_back >= 0


def known_behind(rules: Rules, path) -> int:
    """0 where an end, a failure or nothing comes; else what may follow."""
    found = rules.behind(path)
    return 0 if found % 7 == 3 or ENDS >> path[-1] & 1 else found


def random_tree(dice: random.Random, count: int, max_depth: int) -> RowTree:
    """Of up to `count` nodes in breadth-first order, siblings distinct."""
    nodes = [(0, 0, dice.randrange(VOCAB))]  # depth, parent, token
    for _ in range(4 * count):
        if len(nodes) == count:
            break
        parent = dice.randrange(len(nodes))
        token = dice.randrange(VOCAB)
        taken = any(each[1:] == (parent, token) for each in nodes[1:])
        if nodes[parent][0] < max_depth and not taken:
            nodes.append((nodes[parent][0] + 1, parent, token))
    order = sorted(range(len(nodes)), key=lambda node: nodes[node][0])
    place = {node: at for at, node in enumerate(order)}
    tokens, parents = ([f(nodes[n]) for n in order] for f in (lambda x: x[2], lambda x: place[x[1]]))
    return RowTree(Row(0), tuple(tokens), tuple(parents), max_depth)


def path_of(tree: RowTree, node: int) -> tuple[int, ...]:
    path = ()
    while node:
        path, node = (tree.tokens[node], *path), tree.parent[node]
    return path


def walked(tree: RowTree, rules: Rules, seconds: float = 60.0) -> TreeWalk:
    walk = TreeWalk(tree)
    walk.visit(rules, rules.behind(()), lambda answer, _: answer, ENDS, time.monotonic() + seconds)
    return walk


def reachable(tree: RowTree, rules: Rules) -> dict[int, int]:
    """By each node's whole path, from first principles."""
    found = {0: rules.behind(())}
    for node in range(1, len(tree.tokens)):
        path, up = path_of(tree, node), tree.parent[node]
        if up in found and found[up] >> path[-1] & 1 and known_behind(rules, path):
            found[node] = known_behind(rules, path)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_a_walk_knows_what_each_path_says(seed):
    dice = random.Random(seed)
    tree, rules = random_tree(dice, dice.randint(1, 30), dice.randint(1, 6)), Rules(seed)
    walk = walked(tree, rules)
    assert walk.allowed == reachable(tree, rules)
    assert rules.path == [], "something was not taken back"
    for node in walk.allowed:
        if node:
            assert walk.child(tree.parent[node], tree.tokens[node]) == node


@pytest.mark.parametrize("seed", range(60))
def test_forced_branches_take_the_place_of_what_nobody_accepts(seed):
    dice = random.Random(seed)
    tree, rules = random_tree(dice, dice.randint(2, 30), dice.randint(1, 6)), Rules(seed)
    walk = walked(tree, rules)
    grown, source = walk.with_branches()
    new, count = grown.tree, len(tree.tokens)
    if not source:
        assert grown is walk
        room = count - len(walk.allowed)
        assert not room or not any(chain for _, chain in walk.forced)
        return
    assert len(new.tokens) == len(new.parent) == len(source) == count
    paths = [path_of(new, node) for node in range(count)]
    assert all(up < node for node, up in enumerate(new.parent[1:], start=1))
    assert [*map(len, paths)] == sorted(map(len, paths)), "not breadth first"
    assert len({(new.parent[node], new.tokens[node]) for node in range(1, count)}) == count - 1, "siblings are alike"
    assert max(map(len, paths)) <= tree.max_depth
    assert grown.allowed == reachable(new, rules)
    assert len(grown.allowed) > len(walk.allowed)
    assert {path_of(tree, node) for node in walk.allowed} <= {paths[node] for node in grown.allowed}
    for node, was in enumerate(source):
        kept = path_of(tree, was)
        assert kept == paths[node][: len(kept)]
        for at in range(len(kept), len(paths[node])):  # each further token was the only one
            assert rules.behind(paths[node][:at]) == 1 << paths[node][at]


@pytest.mark.parametrize("seed", range(20))
def test_a_branch_that_takes_nothing_back_ends_the_walk(seed):
    dice = random.Random(seed)
    tree = random_tree(dice, 25, 5)
    whole = reachable(tree, Rules(seed))
    some = walked(tree, Rules(seed, takes_back=dice.randint(0, 4))).allowed
    assert some.items() <= whole.items()


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_that_is_late_knows_the_root_and_takes_all_back(seed):
    rules = Rules(seed)
    walk = walked(random_tree(random.Random(seed), 25, 5), rules, seconds=-1.0)
    assert [*walk.allowed] == [0]
    assert rules.path == []
