"""The visibility relation: which key each query may see, from first principles, and as the engine told its backend.

A key is named by its request and position if it is committed, and by its node of the draft tree if it is not. What the
engine says, in page tables, extents, positions and masks, is decoded to these names through the leases of the pages.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from support.engines import build, greedy, sampled, submit
from support.oracles import grow, select
from support.recording import record
from treetop.attention.registry import BACKENDS
from treetop.types.ids import DRAFT, FULL
from treetop.types.messages import PrefillPlan
from treetop_debug.visibility import VisibilityWatch, WatchedBackend

CASES = [  # (k, S, T), page size, chunk, prompt lengths
    ((4, 4, 16), 1, 512, [3, 18, 7]),
    ((2, 3, 6), 4, 5, [1, 9, 22, 4, 17]),
    ((3, 5, 25), 16, 7, [16, 15, 33]),
    ((1, 4, 5), 2, 16, [5, 2, 30]),
    ((8, 2, 9), 64, 3, [6, 12, 8, 1]),
    ((4, 1, 5), 4, 512, [9, 14, 6]),
    ((2, 6, 22), 4, 512, [11, 3, 8]),
]


class StepDigest:
    """Knows from the scheduler who owns which page, and decodes slots to (request, position)."""

    def __init__(self, llm, requests):
        self.page_size = llm.engine.layout.page_size
        self.owner = {FULL: {}, DRAFT: {}}
        self.row = {}
        for request in requests:
            if request.running is not None:
                self.row[request.running.row] = request
                for group, pages in request.running.lease.pages.items():
                    for column, page in enumerate(pages):
                        assert page not in self.owner[group], "a page has two owners"
                        self.owner[group][page] = (request, column)

    def named(self, group, slot):
        """The request and position whose K/V a slot holds."""
        request, column = self.owner[group][slot // self.page_size]
        return request, column * self.page_size + slot % self.page_size

    def slot(self, group, request, position):
        pages = request.running.lease.pages[group]
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def prefix(self, group, view, index):
        """Names of the committed keys that row `index` of a view shows, in order."""
        assert int(view.kv_len[index]) <= view.max_kv_len
        assert view.page_size == self.page_size
        names = []
        for position in range(int(view.kv_len[index])):
            page = int(view.table.data[int(view.rows[index]), position // self.page_size])
            names.append(self.named(group, page * self.page_size + position % self.page_size))
        return names


def named_prefix(request, length):
    return [(request, position) for position in range(length)]


def changed_slots(before, after):
    """Slots of a group that a step wrote, apart from the null slot."""
    different = torch.zeros(after[0].kv.k.shape[0], dtype=torch.bool)
    for old, layer in zip(before, after, strict=True):
        for a, b in zip(old, (layer.kv.k, layer.kv.v), strict=True):
            different |= (a != b).flatten(1).any(1)
    different[0] = False
    return set(different.nonzero().flatten().tolist())


@pytest.mark.parametrize(("shape", "page", "chunk", "lengths"), CASES)
def test_every_query_sees_its_committed_prefix_and_its_own_line_of_the_tree(strong_pair, shape, page, chunk, lengths):
    """In every phase, group and row, what the backend is told equals the relation; what is written is the path."""
    llm = build(strong_pair, shape, page_size=page, chunked_prefill_size=chunk, max_running_requests=6)
    backend, calls = record(llm)
    params = [sampled(i, 14 + i) if i % 3 else greedy(20) for i in range(len(lengths))]
    requests = submit(llm, strong_pair.prompts(lengths, seed=page), params)
    pools, state = llm.engine.runner.pools, llm.engine.runner.state
    latest, accepted = {}, 0  # request -> what it will propose after its root
    while (plan := llm.scheduler.plan()) is not None:
        backend.plans.clear()
        calls.clear()
        witness = StepDigest(llm, requests)
        before = {name: [(x.kv.k.clone(), x.kv.v.clone()) for x in pool.layers()] for name, pool in pools.items()}
        hidden_before = state.draft.hidden.clone()
        result = llm.engine.step(plan)
        rows = [witness.row[row.row] for row in result.rows]
        if isinstance(plan, PrefillPlan):
            written = check_prefill(witness, backend, plan, rows)
        else:
            written = check_round(Round(witness, backend, calls, shape, rows, result, latest, hidden_before))
            accepted += sum(len(row.tokens) - 1 for row in result.rows)
        for tokens, scores in calls.proposals[-1:]:  # none where no prompt ends
            latest |= {r: list(zip(tokens[i], scores[i], strict=True)) for i, r in enumerate(rows)}
        for group, pool in pools.items():
            expected = {witness.slot(group, request, position) for request, position in written}
            assert changed_slots(before[group], pool.layers()) == expected
        llm.scheduler.commit(plan, result)
    assert all(request.finish_reason == "length" for request in requests)
    assert accepted > 0, "no draft was accepted: the paths were never longer than the root"


def check_prefill(witness, backend, plan, rows):
    """Each prompt token sees all tokens up to itself, in the target's group and in the draft's."""
    assert len(backend.plans) == 2
    for group, planned in zip((FULL, DRAFT), backend.plans, strict=True):
        assert planned.metadata.causal
        for index, (chunk, request) in enumerate(zip(plan.chunks, rows, strict=True)):
            end = chunk.start + len(chunk.token_ids)
            assert chunk.token_ids == request.ids[chunk.start : end]
            names = witness.prefix(group, planned.metadata, index)
            assert names == named_prefix(request, end)
            for column in range(len(chunk.token_ids)):
                position = int(planned.metadata.positions[index, column])
                seen = [name for name in names if name[1] <= position]  # the meaning of `causal`
                assert seen == named_prefix(request, chunk.start + column + 1)
        for index in range(len(rows), planned.metadata.rows.shape[0]):
            assert witness.prefix(group, planned.metadata, index) == []
    return [
        (request, chunk.start + i)
        for chunk, request in zip(plan.chunks, rows, strict=True)
        for i in range(len(chunk.token_ids))
    ]


@dataclass
class Round:
    """What is known of one round, before and after it. latest: request -> the proposal after its root."""

    witness: StepDigest
    backend: object
    calls: object
    shape: tuple[int, int, int]
    rows: list
    result: object
    latest: dict
    hidden_before: torch.Tensor


def check_round(seen: Round):
    """Draft levels, verify and draft extend see the prefix of L tokens, and in the tail what the tree says."""
    witness, backend, calls, shape, rows = seen.witness, seen.backend, seen.calls, seen.shape, seen.rows
    k, num_steps, width = shape
    drafts, verify, extend = backend.plans[: num_steps - 1], backend.plans[num_steps - 1], backend.plans[num_steps]
    assert len(backend.plans) == num_steps + 1
    own_keys = [planned.tail_keys[:, -k:] for planned in drafts]
    written = []
    for index, (request, row) in enumerate(zip(rows, seen.result.rows, strict=True)):
        length = request.num_ids - 1  # all tokens but the root are committed
        for group, planned in [*((DRAFT, each) for each in drafts), (FULL, verify), (DRAFT, extend)]:
            assert planned.metadata.window is None
            assert witness.prefix(group, planned.metadata, index) == named_prefix(request, length)
        root, born, frontiers = grow(request.ids[-1], k, num_steps, heard(calls, index, seen.latest[request]))
        nodes = select(root, born, width)

        for level, planned in enumerate(drafts):
            columns = [node for frontier in frontiers[: level + 1] for node in frontier]
            queries = frontiers[level]
            tokens, hidden, _ = calls.forwards[level]
            assert tokens[index].tolist() == [node.token for node in queries]
            sources = [
                seen.hidden_before[request.running.row]
                if level == 0
                else calls.forwards[level - 1][2][index, frontiers[level - 1].index(node.parent)]
                for node in queries
            ]
            assert torch.equal(hidden[index], torch.stack(sources)), "a node was grown from another's hidden state"
            assert_tail(planned, index, queries, columns, length - 1)
            assert torch.equal(planned.tail_keys[index], torch.cat([keys[index] for keys in own_keys[: level + 1]]))

        assert_tail(verify, index, nodes, nodes, length)

        count = len(row.tokens)
        tokens = calls.forwards[-1][0]
        assert tokens[index, :count].tolist() == list(row.tokens)
        assert extend.metadata.positions[index].tolist() == [length + j for j in range(num_steps + 1)]
        assert extend.metadata.tail_positions[index].tolist() == [length + j for j in range(num_steps + 1)]
        for j in range(count):
            assert extend.metadata.mask[index, j].nonzero().flatten().tolist() == list(range(j + 1))
        written += [(request, length + j) for j in range(count)]
    for planned in backend.plans:
        for index in range(len(rows), planned.metadata.rows.shape[0]):
            assert int(planned.metadata.kv_len[index]) == 0, "a padding row sees a prefix"
    return written


def heard(calls, index, first):
    """The proposals that the head made for one row, asked for by the nodes of each level in their order."""
    asked = [iter(range(100)) for _ in calls.proposals]

    def proposals(node):
        if node.depth == 0:
            return first
        tokens, scores = calls.proposals[node.depth - 1]
        place = next(asked[node.depth - 1])
        return list(zip(tokens[index][place], scores[index][place], strict=True))

    return proposals


def assert_tail(planned, index, queries, columns, start):
    """Queries and tail stand where their nodes stand, and a query sees itself and its ancestors, nothing else."""
    told = planned.metadata
    assert told.positions[index].tolist() == [start + node.depth for node in queries]
    assert told.tail_positions[index].tolist() == [start + node.depth for node in columns]
    assert told.mask.shape[1:] == (len(queries), len(columns))
    seen = {(node, columns[j]) for i, node in enumerate(queries) for j in told.mask[index, i].nonzero().flatten()}
    assert seen == {(node, key) for node in queries for key in node.line() if key in columns}


def test_a_watched_backend_is_given_rows_of_whole_trees():
    """It has no `flat_prefix_tail`, whatever the backend inside may take."""
    inner = SimpleNamespace(name="inner", capabilities=replace(BACKENDS["triton"].capabilities, flat=True))
    watched = WatchedBackend(inner, None, VisibilityWatch())
    assert not hasattr(watched, "flat_prefix_tail")
    assert (watched.capabilities.flat, watched.capabilities.captures) == (False, False)
