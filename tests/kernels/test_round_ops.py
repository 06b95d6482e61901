"""The fused operations of a round equal the plain ones bit for bit, and write nothing else.

Tests of the kernels run on a GPU or in the interpreted session. Every output
buffer is filled with something else before, and is a part of a larger one.
"""

import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.engines import accept_lens, build, greedy, sampled, tokens
from support.grids import few_of
from support.interpreted import DEVICE, ON_GPU, interpreted, on_gpu_or_interpreted
from support.operations import kernel_ops, reference_ops
from support.round_ops import (
    CPU,
    FEW,
    IN_KERNELS,
    VOCAB,
    Buffers,
    agreeing,
    assert_same,
    identity,
    random_calibration,
    random_children,
    random_tables,
    random_tree,
    shapes,
    sown,
    sown_growth,
)
from treetop.kernels.sampling.sampling import SampledTokens
from treetop.kernels.table import OpContext, Ops, operations
from treetop.kernels.tree.accept import MaskedDrafts
from treetop.kernels.tree.commit import Paths
from treetop.kernels.tree.grow import Children
from treetop.kernels.tree.rows import DraftState, RowTables
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.errors import CheckError, EngineError
from treetop.types.layout import SpecShape
from treetop_debug.faults import FAULTS, fault
from treetop_debug.patching import wrapped_runner
from treetop_debug.visibility import VisibilityWatch


def test_kernels_are_chosen_where_they_serve(monkeypatch):
    """On a GPU, in at most 32 bits; those of a tree where one program holds it, products in 16 bits."""
    monkeypatch.setattr("treetop.kernels.table.why_not", lambda device: None)
    monkeypatch.setattr("treetop.kernels.table.gpu_traits", lambda device: GpuTraits(8, False))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    gpu, tree, every = torch.device("cuda"), (SpecShape(2, 3, 6),), set(operations())

    def kernels(*context) -> set[str]:
        ops = Ops(OpContext(*context))
        return {name for name, op in operations().items() if getattr(ops, name) is not op.reference}

    of_products = {"silu_mul", "gelu_tanh_mul", "skinny_gemm", "gated_rows", "lossless_gemm"}
    of_products |= {
        "quantized_gemm",
        "quantized_gated",
        "decode_tiles",
        "quantize_rows",
        "fp8_rows",
        "add_rms_norm_codes",
    }
    of_trees = {
        "start",
        "grow",
        "select",
        "greedy",
        "accept",
        "learn",
        "say_roots",
        "say_level",
        "choose_drawn",
        "trim",
    }
    assert kernels(gpu, torch.bfloat16, tree) == every
    assert kernels(gpu, torch.float32, tree) == every - of_products
    assert kernels(gpu, torch.float32, (SpecShape(8, 8, 200),)) == every - of_products - of_trees
    assert kernels(gpu, torch.float16, (SpecShape(17, 2, 60),)) == every - of_trees - {"top_logprobs"}
    assert not kernels(gpu, torch.float64, tree)
    assert not kernels(CPU, torch.float32, tree)


@pytest.fixture(autouse=True, scope="module")
def on_device():
    with DEVICE:
        yield


def both() -> list[tuple]:
    return [(reference_ops(), Buffers.make()), (kernel_ops(DEVICE), Buffers.make())]


@on_gpu_or_interpreted
@given(
    shape=shapes(0),
    rows=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    half=st.booleans(),
)
@FEW
def test_growing_and_selecting_equal_the_plain_operations(shape, rows, seed, half):
    """Every frontier, candidate, node and place: ties, -inf, NaN, k = 1, dummy rows, uneven hidden states."""
    dtype = torch.float16 if half else torch.float32
    results = []
    for ops, buffers in both():
        rng = random.Random(seed)
        tables = random_tables(rng, 6, 37, dtype)
        listed = torch.tensor([*rng.sample(range(5), rows), 5])
        tree, places, _ = buffers.of(len(listed), shape)
        calibration = random_calibration(rng, max(1, shape.num_steps), 6)
        growth = sown_growth(shape, len(listed), calibration)
        frontier = ops.start(tables, listed, growth, tree, places, identity(shape))
        frontiers = [frontier] if shape.num_steps else []
        for level in range(shape.num_steps - 1):
            frontier = ops.grow(growth, level, frontier, random_children(rng, len(listed), shape.topk, 37, dtype))
            frontiers.append(frontier)
        if shape.num_steps:
            ops.select(growth, tree, places)
            above = tree.depth.gather(1, tree.parent)
            assert torch.equal(tree.depth[:, 1:], above[:, 1:] + 1)  # no orphans, whatever the scores
        results.append((buffers, frontiers, growth))
    (want, want_levels, want_growth), (got, got_levels, got_growth) = results
    assert_same(got, want)
    for one, other in zip(got_levels, want_levels, strict=True):
        assert_same(one, other)
    if shape.num_steps:
        for name in ("tokens", "scores", "positions", "chosen", "classes"):
            assert torch.equal(getattr(got_growth, name), getattr(want_growth, name)), name


@on_gpu_or_interpreted
@pytest.mark.parametrize("size", [37, 0])
def test_states_of_integers_are_moved_as_they_are(size):
    """A drafter's state may hold token ids, which no 16-bit number can: past 2^24, in any block; or there is none."""
    shape, results = SpecShape(3, 3, 9), []
    for ops, buffers in both():
        rng, generator = random.Random(4), torch.Generator().manual_seed(4)
        tables = random_tables(rng, 6, 37)
        width = (size,)

        def integers(*size, generator=generator):
            return torch.randint(-(2**31), 2**31 - 1, size, generator=generator, device="cpu").int().to(DEVICE)

        tables = replace(tables, draft=replace(tables.draft, hidden=integers(6, *width)))
        listed = torch.tensor([3, 1, 5])
        tree, places, _ = buffers.of(3, shape)
        growth = sown_growth(shape, 3)
        frontier = ops.start(tables, listed, growth, tree, places, identity(shape))
        seen = [frontier.hidden]
        for level in range(shape.num_steps - 1):
            children = replace(random_children(rng, 3, 3, 37), hidden=integers(3, 3, *width))
            frontier = ops.grow(growth, level, frontier, children)
            seen += [frontier.hidden, frontier.tokens, frontier.mask]
        drawn = random_tables(rng, 6, 37).draft
        new = DraftState(drawn.tokens[:3, :3], drawn.logprob[:3, :3], integers(3, *width))
        ops.finish(tables, listed, 5, torch.tensor([0, 2, 1]), torch.tensor([1, 2, 3]), new)
        results.append([*seen, tables.draft.hidden])
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@on_gpu_or_interpreted
@pytest.mark.parametrize("shape", [SpecShape(16, 2, 60), SpecShape(10, 8, 60), SpecShape(8, 4, 128)], ids=str)
def test_large_trees_equal_the_plain_operations(shape):
    """As many branches, candidates and nodes as a program is given."""
    results = []
    for _, buffers in both():
        rng = random.Random(3)
        ops = kernel_ops(DEVICE) if results else reference_ops()
        tables = random_tables(rng, 16, 8)
        tree, places, _ = buffers.of(2, shape)
        growth = sown_growth(shape, 2, random_calibration(rng, shape.num_steps, shape.topk))
        frontier = ops.start(tables, torch.tensor([4, 5]), growth, tree, places, identity(shape))
        for level in range(shape.num_steps - 1):
            frontier = ops.grow(growth, level, frontier, random_children(rng, 2, shape.topk, 8))
        ops.select(growth, tree, places)
        results.append(buffers)
    assert_same(*results)


@on_gpu_or_interpreted
@given(
    shape=shapes(0),
    rows=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["greedy", "drawn", "forced"]),
    alike=st.sampled_from([0, 1, 2]),
)
@FEW
def test_accepting_equals_the_plain_operations(shape, rows, seed, kind, alike):
    """Paths, tokens, bonus and finite, from logits with ties and NaN, from drawn tokens, and by force.

    alike: tokens that siblings are drawn from, with repetition; 0: siblings differ.
    """
    results = []
    for ops, buffers in both():
        rng = random.Random(seed)
        tree = random_tree(rng, rows, shape, buffers, alike or VOCAB, alike > 0)
        choice = agreeing(rng, tree)
        logits = torch.randint(-3, 4, (*choice.shape, VOCAB)) / 2.0
        logits.scatter_(2, choice[:, :, None], 9.0)
        spoilt = rng.choice([None, float("nan"), float("inf"), float("-inf")])
        if spoilt is not None:
            logits[rng.randrange(rows), rng.randrange(shape.num_draft_tokens), :] = spoilt
            logits[0, 0, 3:5] = spoilt
        sound = torch.tensor([[rng.random() < 0.8 for _ in range(choice.shape[1])] for _ in range(rows)])
        chosen = SampledTokens(choice, sound) if kind == "drawn" else ops.greedy(logits)
        longest = min(shape.num_steps + 1, shape.num_draft_tokens)
        lengths = torch.tensor([rng.randrange(longest) for _ in range(rows)])
        forced = lengths if kind == "forced" else None
        out = buffers.of(rows, shape)[2]
        nodes = torch.tensor([[rng.random() < 0.2 for _ in range(choice.shape[1])] for _ in range(rows)])
        picked = torch.tensor(rng.sample(range(rows + 2), rows))
        draft_rows = torch.where(torch.tensor([rng.random() < 0.3 for _ in range(rows)]), rows + 2, picked)
        masked_drafts = MaskedDrafts(picked, draft_rows, rng.choice([None, nodes]))
        ops.accept(chosen, tree, out, forced, rng.choice([None, masked_drafts]))
        assert 0 <= int(out.accept_len.min()) <= int(out.accept_len.max()) <= shape.num_steps
        assert 0 <= int(out.path.min()) <= int(out.path.max()) < shape.num_draft_tokens
        results.append(buffers)
    assert_same(results[1], results[0])


@on_gpu_or_interpreted
@pytest.mark.parametrize("shape", [SpecShape(4, 1, 5), SpecShape(4, 5, 16), SpecShape(6, 2, 40)], ids=str)
def test_a_tree_of_zeros_that_are_all_wanted_is_accepted_along_one_line(shape):
    """What the dummy row may come to: path, features and the state picked lie inside their tensors."""
    paths = []
    for ops, buffers in both():
        tree, places, out = buffers.of(1, shape)
        state = DraftState(torch.zeros(1, shape.topk).long(), torch.zeros(1, shape.topk), torch.zeros(1, 8))
        tables, growth = RowTables(*torch.zeros((3, 1), dtype=torch.int64), state), sown_growth(shape, 1)
        frontier = ops.start(tables, torch.tensor([0]), growth, tree, places, identity(shape))
        for level in range(shape.num_steps - 1):
            zeros = torch.zeros(1, shape.topk, shape.topk)
            frontier = ops.grow(growth, level, frontier, Children(zeros.long(), zeros, torch.zeros(1, shape.topk, 8)))
        ops.select(growth, tree, places)
        nodes = torch.arange(shape.num_draft_tokens, dtype=torch.float32).view(1, -1, 1)
        ops.accept(ops.greedy(torch.zeros(1, shape.num_draft_tokens, VOCAB)), tree, out, None)
        aux_hidden = torch.full((1, shape.commit_width, 1), -1.0)
        ops.path_aux_hidden(aux_hidden, (nodes,), out.path)
        picked = ops.pick(aux_hidden, out.accept_len)
        paths.append((out.path.tolist(), out.accept_len.tolist(), aux_hidden.flatten().tolist(), picked.tolist()))
        line, (length,) = out.path[0].tolist(), out.accept_len.tolist()
        assert tree.parent[0, line[1 : length + 1]].tolist() == line[:length]
        assert length == int(tree.depth.max())
        assert aux_hidden.flatten().tolist() == line
        assert picked.item() == line[length]
    assert paths[0] == paths[1]


@on_gpu_or_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])])
def test_the_first_of_the_largest_logits_wins_across_pieces(dtype):
    """A vocabulary of several pieces, equal largest values in two of them, the two zeros, and a row of -inf."""
    logits = torch.full((2, 3, 9000), -1.0, dtype=dtype)
    logits[0, 0, [4100, 8999, 5000]] = 2.0
    logits[0, 1, 8999] = 7.0
    logits[0, 2], logits[0, 2, 4096], logits[0, 2, 17] = -5.0, 0.0, -0.0
    logits[1, 0] = float("-inf")
    shape, results = SpecShape(1, 2, 3), []
    for ops, buffers in both():
        tree = random_tree(random.Random(0), 2, shape, buffers)
        tree.tokens[0] = torch.tensor([1, 4100, 8999])
        ops.accept(ops.greedy(logits), tree, buffers.of(2, shape)[2], None)
        results.append(buffers)
    assert_same(results[1], results[0])
    assert results[1].accepted.tokens[0, :3].tolist() == [4100, 8999, 17]
    assert results[1].accepted.finite[:2].tolist() == [True, False]


@on_gpu_or_interpreted
@given(
    page_size=st.sampled_from([1, 3, 4]),
    width=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    in_order=st.booleans(),
    planes=st.sampled_from([1, 2]),
)
@FEW
def test_committing_equals_the_plain_copy_and_leaves_the_null_page_alone(page_size, width, seed, in_order, planes):
    """All layers, only columns of the path and live rows; page-table columns past the path hold no page."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers, columns, t = 3, 8, 7
    committed = torch.tensor([rng.randrange(2 * page_size + 1) for _ in range(3)] + [0])
    accept_len = torch.tensor([rng.randrange(width) for _ in range(4)])
    table = (torch.randperm(4 * columns) + 1).to(torch.int32).view(4, columns)
    table[3] = 0
    rows = torch.tensor([2, 0, 3, 1, 3])
    lens = accept_len[rows]
    for row in range(3):
        table[row, (int(committed[row]) + int(accept_len[row])) // page_size + 1 :] = -(2**31)
    pool = torch.randn(layers, (4 * columns + 1) * page_size, planes, 2, 5)
    pool[:, :page_size] = 0
    tail = torch.randn(layers, 6, t, planes, 2, 5)
    node = None if in_order else torch.randint(0, t, (6, width + 2))[:5, :width]
    paths = Paths(rows, committed[rows], lens, width, node, 3)
    got, want = pool.clone(), pool.clone()
    reference_ops().commit(want, tail, table, page_size, paths)
    kernel_ops(DEVICE).commit(got, tail, table, page_size, paths)
    assert torch.equal(got, want)
    assert (got != pool).any()


@on_gpu_or_interpreted
def test_a_live_row_on_the_null_page_writes_nothing():
    """The start-up proof runs all rows on the null page; the fused copy does not touch it."""
    pool, tail = torch.zeros(2, 8, 2, 1, 4), torch.ones(2, 1, 3, 2, 1, 4)
    paths = Paths(torch.tensor([0]), torch.tensor([1]), torch.tensor([2]), 3, None, 1)
    kernel_ops(DEVICE).commit(pool, tail, torch.zeros(2, 4, dtype=torch.int32), 4, paths)
    assert (pool == 0).all()


def of_each_kernel(ops) -> dict[str, Tensor]:
    """What the operations that faults change give: three rows and the dummy, three levels, paths with gaps."""
    rng, buffers, shape = random.Random(7), Buffers.make(), SpecShape(3, 3, 9)
    tables, listed = random_tables(rng, 6, 21), torch.tensor([3, 0, 4, 5])
    tree, places, out = buffers.of(4, shape)
    growth = sown_growth(shape, 4)
    frontier = ops.start(tables, listed, growth, tree, places, identity(shape))
    for level in range(2):
        frontier = ops.grow(growth, level, frontier, random_children(rng, 4, 3, 21))
    ops.select(growth, tree, places)
    torch.manual_seed(1)
    out.path.copy_(torch.tensor([[0, 2, 3, 7], [0, 1, 3, 5], [0, 3, 6, 8], [0, 0, 0, 0]]))
    pool, tail = torch.zeros(2, 80, 2, 1, 4), torch.randn(2, 4, 9, 2, 1, 4)
    table = torch.arange(1, 19, dtype=torch.int32).view(6, 3) * (torch.arange(6) < 5)[:, None]
    paths = Paths(listed, torch.tensor([1, 0, 5, 0]), torch.tensor([3, 3, 2, 0]), 4, out.path, 5)
    ops.commit(pool, tail, table.to(torch.int32), 4, paths)
    aux_hidden = torch.zeros(4, 4, 6)
    ops.path_aux_hidden(aux_hidden, (torch.randn(4, 9, 6),), out.path)
    return {"positions": growth.positions, "mask": frontier.mask, "pool": pool, "features": aux_hidden}


@on_gpu_or_interpreted
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("sgl-25015", "positions"),
        ("column-ancestors", "mask"),
        ("in-place-compaction", "pool"),
        ("sgl-27545", "features"),
    ],
)
def test_a_twin_kernel_does_what_the_twin_of_the_reference_does(name, changed):
    """Both give the same wrong bits, in the operation that the fault is in and in no other."""
    sound = of_each_kernel(kernel_ops(DEVICE))
    with fault(name):
        wrong = [of_each_kernel(reference_ops()), of_each_kernel(kernel_ops(DEVICE))]
    for key, value in sound.items():
        assert torch.equal(wrong[0][key], wrong[1][key]), key
        assert torch.equal(wrong[1][key], value) == (key != changed), key


@on_gpu_or_interpreted
@pytest.mark.parametrize("streams", [1, 3, 4])
@pytest.mark.parametrize("hidden", [24, 1500])
def test_features_of_a_path_equal_the_plain_gather(streams, hidden):
    """Side by side, in a part of a wider buffer; fewer and more streams than a launch takes."""
    torch.manual_seed(0)
    given_streams = tuple(torch.randn(3, 6, hidden) for _ in range(streams))
    path = torch.randint(0, 6, (5, 7))[:3, :4]
    got, want = (sown(torch.float32, 4, 5, streams * hidden) for _ in range(2))
    reference_ops().path_aux_hidden(want[:3, :4], given_streams, path)
    kernel_ops(DEVICE).path_aux_hidden(got[:3, :4], given_streams, path)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_features_of_roots_alone_are_what_the_gather_gives():
    """Of a plain round, whose paths are its roots, beside the same in trees of two nodes."""
    torch.manual_seed(0)
    roots = tuple(torch.randn(5, 1, 12) for _ in range(3))
    trees, path = tuple(torch.cat([each, torch.randn(5, 1, 12)], dim=1) for each in roots), torch.zeros(5, 1).long()
    got, want = (sown(torch.float32, 5, 1, 36) for _ in range(2))
    reference_ops().path_aux_hidden(got, roots, path)
    reference_ops().path_aux_hidden(want, trees, path)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@on_gpu_or_interpreted
@given(seed=st.integers(0, 10**6), k=st.integers(1, 6), with_draft=st.booleans())
@FEW
def test_finishing_equals_the_plain_operations_and_keeps_the_dummy(seed, k, with_draft):
    """Live rows get their committed length, root, proposals and picked state; nothing else changes."""
    results = []
    for ops, buffers in both():
        rng = random.Random(seed)
        tables = random_tables(rng, 6, 21)
        rows = torch.tensor([*rng.sample(range(5), 3), 5, 5])
        accepted = buffers.of(5, SpecShape(1, 3, 4))[2]
        accepted.accept_len.copy_(torch.tensor([rng.randrange(4) for _ in range(5)]))
        accepted.bonus.copy_(torch.tensor([rng.randrange(VOCAB) for _ in range(5)]))
        new, draft = random_tables(rng, 6, 21).draft, None  # seeds the columns below
        if with_draft:
            columns = torch.randn(5, 4, 42)[:, :, :21]
            chosen = ops.pick(columns, accepted.accept_len)
            draft = DraftState(new.tokens[:5, :k], new.logprob[:5, :k], chosen)
        else:
            tables = replace(tables, draft=rng.choice([None, tables.draft]))
        ops.finish(tables, rows, 5, accepted.accept_len, accepted.bonus, draft)
        results.append((tables, tables.draft))
    assert_same(results[1][0], results[0][0])
    if results[0][1] is not None:
        assert_same(results[1][1], results[0][1])


def with_fused(device):
    return replace(device, ops=kernel_ops(CPU))


@interpreted
@pytest.mark.parametrize(
    ("params", "level"),
    few_of(
        [
            pytest.param(greedy(9), 3, id="greedy"),
            pytest.param(sampled(3, 5), 2, id="drawn"),
            pytest.param(sampled(4, 3, top_p=0.8), 1, id="filtered", marks=pytest.mark.slow),
        ],
        1,
    ),
)
def test_an_engine_gives_the_same_rounds_with_either(strong_pair, params, level):
    """Whole rounds with a padded batch: tokens and accepted lengths, guards up to level 3 silent."""
    prompts, seen = strong_pair.prompts([9, 4, 13]), []
    options = {"dtype": "float32", "page_size": 4, "context_length": 64, "max_running_requests": 4}
    options["attention_backend"] = "torch"  # Triton's is interpreted slowly, and has tests of its own
    for fused in (False, True):
        with wrapped_runner(with_fused) if fused else nullcontext():
            llm = build(strong_pair, (2, 3, 6), check_level=level, **options)
        outputs = llm.generate(prompts, params)
        llm.scheduler.check_integrity()
        seen.append((tokens(outputs), accept_lens(outputs)))
    assert seen[0] == seen[1]
    assert max(a for each in seen[0][1] for a in each) > 0


def with_fused_and_watched(device):
    return VisibilityWatch().wrap(with_fused(device))


def generated(pair, level):
    options = {"dtype": "float32", "page_size": 4, "context_length": 64, "max_running_requests": 4}
    with wrapped_runner(with_fused_and_watched):
        llm = build(pair, (2, 3, 6), attention_backend="torch", check_level=level, **options)
    return llm.generate(pair.prompts([9, 4, 13]), greedy(8))


@pytest.mark.slow
@interpreted
def test_no_guard_fires_on_an_engine_with_fused_launches(strong_pair):
    """At level 3, under the visibility decoder, which reads parents where the fused launches record them."""
    assert len(generated(strong_pair, 3)) == 3


@interpreted
@pytest.mark.parametrize("name", IN_KERNELS)
def test_a_fault_inside_a_kernel_is_caught_by_the_guard_that_is_named_for_it(strong_pair, name):
    """On fused launches, as on a GPU: the twin kernel runs in the place of the one that ships."""
    found = FAULTS[name]
    with pytest.raises((CheckError, EngineError), match=found.guard), found.active():
        generated(strong_pair, found.level or 0)
