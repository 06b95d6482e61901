"""Draft trees: growing, selecting, masking and accepting equal slow oracles, ties included."""

import random
from functools import partial
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.operations import reference_ops
from support.oracles import chain, float32, grow, longest_line, select, walk
from support.round_ops import sown_growth
from treetop.drafts.eagle3 import Eagle3Head, Eagle3Norms
from treetop.drafts.protocol import DraftVocab, Nodes, Proposal
from treetop.kernels.sampling.sampling import greedy_reference
from treetop.kernels.tree.accept import accept, force
from treetop.kernels.tree.rows import DraftState, RowTables
from treetop.kernels.tree.tree import ancestor_mask, keyed_topk, next_level_mask, stable_topk
from treetop.speculative.draft import grow_tree
from treetop.speculative.forced import Forced, force_roots
from treetop.types.layout import SpecShape
from treetop.types.tree import DraftTree, PathPositions

PRIME = 2**31 - 1
VOCAB = 50

# Few distinct values, so that ties are common: exact ones, certain children (0.0), and impossible ones.
LEVELS = [0.0, -0.0, float32(-0.1), -0.5, -0.5, -1.0, -2.0, -30.0, float("-inf")]


class ScriptedHead:
    """Stands for the draft head: what it proposes depends on the path of tokens alone, which its state encodes."""

    def __init__(self, seed: int, all_equal: bool = False) -> None:
        self.seed, self.all_equal = seed, all_equal

    def step(self, nodes, positions, attend, lines=None):
        return (nodes.state * 57 + nodes.tokens[..., None] + 1).remainder(PRIME)

    def propose(self, nodes, k, inv_temp=None, lines=None) -> Proposal:
        hidden = nodes.state
        listed = [self.children(int(code), k) for code in hidden.flatten().tolist()]
        shape = (*hidden.shape[:-1], k)
        return Proposal(
            torch.tensor([[token for token, _ in each] for each in listed]).reshape(shape),
            torch.tensor([[score for _, score in each] for each in listed]).reshape(shape),
        )

    def children(self, code: int, k: int):
        rng = random.Random(self.seed * PRIME + code)
        scores = [0.0 if self.all_equal else rng.choice(LEVELS) for _ in range(k)]
        return list(zip(rng.sample(range(VOCAB), k), sorted(scores, reverse=True), strict=True))

    def after(self, start: int, k: int):
        """The same proposals for the oracle, by a node's path."""

        def proposals(node):
            code = start
            for token in node.path:
                code = (code * 57 + token + 1) % PRIME
            return self.children(code, k)

        return proposals


@st.composite
def shapes(draw):
    """Every legal (k, S, T), both bounds of T drawn often."""
    k = draw(st.integers(1, 8))
    num_steps = draw(st.integers(1, 8 if k < 5 else 4))
    if k == 1:
        return SpecShape(1, num_steps, num_steps + 1)
    largest = 1 + k + (num_steps - 1) * k * k
    width = draw(st.one_of(st.just(2), st.just(largest), st.integers(2, largest)))
    return SpecShape(k, num_steps, width)


def grown(head, shape, starts, roots, committed, chains=None):
    """A batch of trees from production code, and the levels it asked attention for. chains: [rows, S], see `Forced`."""
    levels = []
    state = torch.tensor(starts, dtype=torch.float64)[:, None]
    proposal = head.propose(Nodes(torch.tensor(roots), state, 0), shape.topk)
    draft = DraftState(proposal.tokens, proposal.logprob, state)
    tables = RowTables(torch.tensor(committed), torch.tensor(roots), torch.zeros_like(torch.tensor(roots)), draft)
    if chains is not None:
        rows = torch.arange(len(roots))
        force_roots(draft, rows, rows >= 0, shape.topk, chains[:, 0])
        head = Forced(head, chains)
    return planted(head, tables, shape, levels.append)[0], levels


def planted(head, tables, shape, attend, ops=None):
    """Trees and places of all rows of `tables`, from buffers that held something else."""
    ops, n, t = ops or reference_ops(), len(tables.root), shape.num_draft_tokens
    tree = DraftTree(
        *torch.full((3, n, t), -7), torch.ones((n, t, t), dtype=torch.bool), torch.full((n, t), float("nan"))
    )
    places = PathPositions(torch.full((n,), -7), torch.full((n, t), -7), torch.full((n, shape.commit_width), -7))
    growth = sown_growth(shape, n)
    frontier = ops.start(tables, torch.arange(n), growth, tree, places, torch.eye(shape.topk, dtype=torch.bool))
    if shape.num_steps:
        grow_tree(head, growth, frontier, ops, attend)
        ops.select(growth, tree, places)
    return tree, places


@given(shape=shapes(), seed=st.integers(0, 10**6), all_equal=st.booleans(), rows=st.integers(1, 3))
@settings(max_examples=120, deadline=None)
def test_growing_and_selecting_a_tree_equals_the_oracle(shape, seed, all_equal, rows):
    """Tokens, parents, depths, scores and masks of all rows equal those of linked nodes, ties included."""
    head = ScriptedHead(seed, all_equal)
    starts, roots = [seed % 1000 + 7 * row for row in range(rows)], list(range(rows))
    committed = [5 * row for row in range(rows)]
    tree, levels = grown(head, shape, starts, roots, committed)
    assert len(levels) == shape.num_steps - 1
    for row in range(rows):
        root, born, frontiers = grow(roots[row], shape.topk, shape.num_steps, head.after(starts[row], shape.topk))
        assert len(born) == shape.num_candidates
        nodes = select(root, born, shape.num_draft_tokens)
        assert tree.tokens[row].tolist() == [node.token for node in nodes]
        assert tree.depth[row].tolist() == [node.depth for node in nodes]
        assert tree.logprob[row].tolist() == [node.score for node in nodes]
        assert all(node.parent in nodes for node in nodes[1:]), "an orphan was selected"
        assert tree.parent[row].tolist() == [0, *(nodes.index(node.parent) for node in nodes[1:])]
        lines = [[other in node.line() for other in nodes] for node in nodes]
        assert tree.mask[row].tolist() == lines
        for index, level in enumerate(levels):
            earlier = [node for frontier in frontiers[: index + 1] for node in frontier]
            assert level.index == index
            assert level.positions[row].tolist() == [committed[row] + index] * shape.topk
            assert level.mask[row].tolist() == [[e in node.line() for e in earlier] for node in frontiers[index]]


def forced(proposals, must: list[int]):
    """The same proposals of a node, but along a chain that must come: its next token, which nothing else may be."""

    def with_chain(node):
        said, depth = proposals(node), len(node.path)
        if depth == len(must) or [*node.path] != must[:depth]:
            return said
        (first, _), *others = said
        listed = [first if token == must[depth] else token for token, _ in others]
        return [(must[depth], 0.0), *((token, -100.0) for token in listed)]

    return with_chain


@given(shape=shapes(), seed=st.integers(0, 10**6), rows=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_tree_begins_with_what_is_forced_and_goes_on_as_the_drafter_says(shape, seed, rows):
    """Chains of any length up to the tree's depth, beside rows without one: the whole chain is in each tree that has
    room, siblings stay distinct, and the rest is what an oracle grows.
    """
    head, dice = ScriptedHead(seed), random.Random(seed)
    starts, roots = [seed % 1000 + 7 * row for row in range(rows)], list(range(rows))
    chains = [[dice.randrange(VOCAB) for _ in range(dice.randint(0, shape.num_steps))] for _ in range(rows)]
    listed = torch.tensor([[*must, *[-1] * (shape.num_steps + 1 - len(must))] for must in chains], dtype=torch.int32)
    tree, _ = grown(head, shape, starts, roots, [0] * rows, listed)
    for row, must in enumerate(chains):
        said = forced(head.after(starts[row], shape.topk), must)
        root, born, _ = grow(roots[row], shape.topk, shape.num_steps, said)
        nodes = select(root, born, shape.num_draft_tokens)
        assert tree.tokens[row].tolist() == [node.token for node in nodes]
        assert tree.parent[row].tolist() == [0, *(nodes.index(node.parent) for node in nodes[1:])]
        assert tree.logprob[row].tolist() == [node.score for node in nodes]
        for node in nodes:
            assert len({child.token for child in node.children}) == len(node.children)
        at = root
        for token in must[: shape.num_draft_tokens - 1]:
            at = at.children[0]
            assert (at.token, at in nodes) == (token, True)


def test_equal_scores_keep_the_earlier_candidates():
    """With certain children everywhere the tree is the first T - 1 candidates, which have no orphan."""
    tree, _ = grown(ScriptedHead(1, all_equal=True), SpecShape(2, 3, 5), [3], [0], [0])
    assert tree.parent.tolist() == [[0, 0, 0, 1, 1]]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2]]


@given(
    scores=st.lists(st.one_of(st.sampled_from(LEVELS), st.floats(width=32, allow_nan=False)), min_size=1, max_size=40),
    k=st.integers(1, 8),
)
@settings(max_examples=300, deadline=None)
def test_both_top_k_equal_a_stable_sort(scores, k):
    """Largest first, the smaller index first among equals, the two zeros being equal."""
    k = min(k, len(scores))
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    tensor = torch.tensor([scores, scores[::-1]], dtype=torch.float32)
    for function in (stable_topk, keyed_topk):
        values, indices = function(tensor, k)
        assert indices[0].tolist() == expected, function.__name__
        assert values[0].tolist() == [scores[i] for i in expected]
        again = function(tensor[:1], k)[1]
        assert again.tolist() == [expected], "a row depends on the others"


def test_wide_rows_use_the_same_order_as_narrow_ones():
    """Past the width where the method changes, the answer is still a stable sort's."""
    generator = torch.Generator().manual_seed(0)
    for width in (255, 256, 257, 1000):
        scores = torch.randint(-5, 1, (3, width), generator=generator).to(torch.float32) / 4
        expected = [sorted(range(width), key=lambda i: (-row[i], i))[:9] for row in scores.tolist()]
        assert stable_topk(scores, 9)[1].tolist() == expected


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_a_mask_shows_a_node_itself_and_its_ancestors(width, rows, seed):
    """`mask[i, j]` iff a walk from i to the root passes j, for arbitrary trees."""
    rng = random.Random(seed)
    parents = [[0, *(rng.randrange(i) for i in range(1, width))] for _ in range(rows)]
    mask = ancestor_mask(torch.tensor(parents), width)
    for row, parent in enumerate(parents):
        for i in range(width):
            line, at = {i, 0}, i
            while at:
                at = parent[at]
                line.add(at)
            assert mask[row, i].nonzero().flatten().tolist() == sorted(line)


def test_the_next_level_inherits_the_line_of_its_parent_and_not_of_its_neighbour():
    """Rows are permuted by parent; then each node adds itself."""
    previous = torch.tensor([[[True, False], [False, True]]])
    mask = next_level_mask(previous, torch.tensor([[1, 1]]))
    assert mask.tolist() == [[[False, True, True, False], [False, True, False, True]]]


# ---------------------------------------------------------------------------------------------- accepting


@given(width=st.integers(1, 20), rows=st.integers(1, 4), seed=st.integers(0, 10**6), alike=st.booleans())
@settings(max_examples=300, deadline=None)
def test_accepting_equals_a_walk_from_the_root(width, rows, seed, alike):
    """Path, tokens, length, bonus and finiteness equal those of following the target's choices child by child.

    Where siblings are alike there are several walks, and the longest, of several the first, is the path.
    """
    rng = random.Random(seed)
    vocab = 2 if alike else 6
    parents, tokens = [], []
    for _ in range(rows):
        parent, token, taken = [0], [rng.randrange(vocab)], set()
        while len(parent) < width:
            place = (rng.randrange(len(parent)), rng.randrange(vocab))
            if alike or place not in taken:
                taken.add(place)
                parent.append(place[0])
                token.append(place[1])
        parents.append(parent)
        tokens.append(token)
    depth = [[0] * width for _ in range(rows)]
    for row in range(rows):
        for i in range(1, width):
            depth[row][i] = depth[row][parents[row][i]] + 1
    deepest = max(map(max, depth))
    choice = [[rng.choice([*range(vocab), tokens[row][-1]]) for _ in range(width)] for row in range(rows)]
    if alike and rng.random() < 0.3:
        tokens, choice = torch.zeros(2, rows, width, dtype=torch.int64).tolist()
    parent_tensor = torch.tensor(parents)
    tree = DraftTree(
        torch.tensor(tokens),
        parent_tensor,
        torch.tensor(depth),
        ancestor_mask(parent_tensor, deepest),
        torch.zeros(rows, width),
    )
    sound = torch.tensor([[rng.random() < 0.8 for _ in range(width)] for _ in range(rows)])
    accepted = accept(tree, torch.tensor(choice), sound, deepest + 1)
    for row in range(rows):
        path = longest_line(tokens[row], parents[row], choice[row])
        emitted = [choice[row][node] for node in path]
        if not alike:
            assert (path, emitted) == walk(tokens[row], parents[row], choice[row])
        length = len(path)
        assert accepted.accept_len[row] == length - 1
        assert accepted.path[row, :length].tolist() == path
        assert accepted.path[row, length:].tolist() == [0] * (deepest + 1 - length)
        assert accepted.tokens[row, :length].tolist() == emitted
        assert accepted.bonus[row] == emitted[-1]
        assert accepted.finite[row] == all(sound[row, path])


def test_a_forced_path_is_the_first_nodes_in_order():
    """Right or wrong, with their tokens; what counts is whether the logits of these nodes are finite."""
    choice = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    sound = torch.tensor([[True, True, False, False], [True, False, True, True]])
    forced = force(choice, sound, torch.tensor([1, 2]), 3)
    assert forced.path.tolist() == [[0, 1, 0], [0, 1, 2]]
    assert forced.accept_len.tolist() == [1, 2]
    assert forced.tokens[0, :2].tolist() == [5, 6]
    assert forced.tokens[1].tolist() == [1, 2, 3]
    assert forced.bonus.tolist() == [6, 3]
    assert forced.finite.tolist() == [True, False]


def test_greedy_choice_takes_the_first_of_the_largest_and_reports_what_is_not_finite():
    """Ties go to the smaller id; NaN or infinity marks its node and no other."""
    logits = torch.zeros(4, 3, 5)
    logits[0, 1, 3] = logits[0, 1, 4] = 2.0
    logits[1, 2, 0] = float("nan")
    logits[2, 0, 1] = float("inf")
    logits[3] = float("-inf")
    chosen = greedy_reference(logits)
    assert chosen.token[0].tolist() == [0, 3, 0]
    assert chosen.finite.tolist() == [[True] * 3, [True, True, False], [False, True, True], [False] * 3]


# ---------------------------------------------------------------------------------------------- chains


@given(num_steps=st.integers(1, 8), seed=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_with_topk_one_tree_and_acceptance_equal_a_chain(num_steps, seed):
    """k = 1 given the same logits: drafts, accepted length and bonus equal a separate chain decoder's."""
    draft_vocab, vocab, root = 7, 10, 3
    offset = torch.tensor([0, 0, 1, 1, 2, 2, 3])

    def logits(name, path, width):
        rng = random.Random(f"{seed} {name} {path}")
        return [rng.choice([0.0, 1.0, 2.0]) for _ in range(width)]

    def target_logits(ids):  # mostly the draft's own opinion, so that long chains are accepted
        values = logits("draft", list(ids), draft_vocab)
        shown = [-1.0] * vocab
        for token, value in enumerate(values):
            shown[token + int(offset[token])] = value
        if random.Random(f"{seed} {ids}").random() < 0.2:
            shown[int(offset[0])] = 5.0
        return shown

    paths = {0: [root]}  # the head's state is the number of a path

    def lm_head(state):
        rows = [logits("draft", paths[int(code)], draft_vocab) for code in state.flatten().tolist()]
        return torch.tensor(rows).reshape(*state.shape[:-1], draft_vocab)

    def step(nodes, positions, attend, lines=None):
        paths[len(paths)] = [*paths[int(nodes.state)], int(nodes.tokens)]
        return torch.full_like(nodes.state, len(paths) - 1)

    stand_in = SimpleNamespace(
        spec=SimpleNamespace(norms=Eagle3Norms()),
        _logits=lm_head,
        norm=lambda x: x,
        vocab=DraftVocab(offset),
        _ops=reference_ops(),
    )
    stand_in.logits = partial(Eagle3Head.logits, stand_in)
    head = SimpleNamespace(step=step, propose=partial(Eagle3Head.propose, stand_in))
    start = torch.zeros(1, 1)
    proposal = head.propose(Nodes(torch.tensor([root]), start, 0), 1)
    draft = DraftState(proposal.tokens, proposal.logprob, start)
    tables = RowTables(torch.tensor([0]), torch.tensor([root]), torch.tensor([0]), draft)
    tree, _ = planted(head, tables, SpecShape(1, num_steps, num_steps + 1), lambda level: None)
    drafts = tree.tokens[0, 1:].tolist()
    verify = torch.tensor([[target_logits([root, *drafts[:i]]) for i in range(num_steps + 1)]])
    chosen = greedy_reference(verify)
    accepted = accept(tree, chosen.token, chosen.finite, num_steps + 1)

    want_drafts, want_len, want_bonus = chain(
        root, lambda ids: logits("draft", ids, draft_vocab), offset.tolist(), target_logits, num_steps
    )
    assert drafts == want_drafts
    assert tree.parent[0].tolist() == [0, *range(num_steps)]
    assert accepted.accept_len.tolist() == [want_len]
    assert accepted.tokens[0, : want_len + 1].tolist() == [*want_drafts[:want_len], want_bonus]
    assert accepted.bonus.tolist() == [want_bonus]
