"""The check levels: each guard is shown alive, says where, and costs nothing it should not."""

from collections import Counter

import pytest
import torch

from support.engines import build, greedy, sampled, steps, submit
from support.grids import few_of
from support.memory import all_tensors, beside
from treetop import LLM
from treetop.cache.allocator import CACHE, FREE
from treetop.checks.poison import RedZones, poison
from treetop.checks.probes import NAN, OUT_OF_BOUNDS, Probes
from treetop.debug.two_group import write_two_group_pair
from treetop.kernels.kv import commit_tail
from treetop.types.errors import CheckError
from treetop.types.ids import FULL
from treetop.types.messages import RoundPlan
from treetop.types.phase import Phase

SHAPE = (2, 3, 6)
INT_MIN = torch.iinfo(torch.int32).min
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two_group(tmp_path_factory):
    return write_two_group_pair(tmp_path_factory.mktemp("two-group"), window=12)


def build_two_group(pair, **options) -> LLM:
    shape = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    return LLM(str(pair[0]), str(pair[1]), **{"dtype": "float64", "context_length": 128, **shape, **options})


# ---------------------------------------------------------------------------------------------- level 2: probes


def fired(probes) -> str:
    with pytest.raises(CheckError) as error:
        probes.raise_if_fired()
    return str(error.value)


def test_an_index_probe_records_what_where_and_the_range_and_redirects():
    """The record holds code, phase, tensor, row, value, low and high of the first row; its lanes become `low`."""
    probes = Probes.make(CPU, True, 99)
    x = torch.tensor([[0, 3], [1, 9], [-5, 2]])
    out = probes.index(x, 0, 4, "topk_token", Phase.DRAFT, torch.tensor([6, 2, 4]))
    assert out.tolist() == [[0, 3], [1, 0], [0, 2]]
    assert x.tolist() == [[0, 3], [1, 9], [-5, 2]], "the probe wrote to what it looks at"
    assert probes.record.tolist() == [OUT_OF_BOUNDS, list(Phase).index(Phase.DRAFT), 0, 2, 9, 0, 4]
    assert fired(probes) == "detect_oob: topk_token in phase draft, row 2: value 9 outside [0, 4)"


def test_an_index_probe_takes_bounds_of_each_row():
    """Bounds may be tensors, each row redirected to its own low; the message then says whose range it was."""
    probes = Probes.make(CPU, True, 99)
    low = torch.tensor([[0], [10], [20]])
    x = torch.tensor([[9, 0], [10, 19], [9, 30]])
    out = probes.index(x, low, low + 10, "feature_node", Phase.EXTEND, torch.tensor([5, 3, 1]))
    assert out.tolist() == [[9, 0], [10, 19], [20, 20]]
    assert fired(probes) == "detect_oob: feature_node in phase extend, row 1: value 9 outside its row's range"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_nan_probe_names_the_first_row_that_is_not_finite(value):
    """NaN and both infinities count; a finite tensor, however large, does not."""
    probes = Probes.make(CPU, True, 99)
    x = torch.full((3, 2, 2), torch.finfo(torch.float32).max)
    probes.nan(x, "hidden", Phase.VERIFY, torch.tensor([7, 8, 9]))
    probes.raise_if_fired()
    x[1, 1, 0] = value
    x[2] = value
    probes.nan(x, "hidden", Phase.VERIFY, torch.tensor([7, 8, 9]))
    assert probes.record.tolist()[:4] == [NAN, list(Phase).index(Phase.VERIFY), 0, 8]
    assert fired(probes) == "detect_nan: hidden in phase verify, row 8: not finite"


def test_the_first_writer_of_a_record_wins_and_reading_clears_it():
    """What fires later in a round is a consequence; what fires in the next round is news."""
    probes = Probes.make(CPU, True, 99)
    rows = torch.tensor([0])
    probes.index(torch.tensor([[5]]), 0, 5, "root_token", Phase.DRAFT, rows)
    probes.nan(torch.tensor([[float("nan")]]), "features", Phase.EXTEND, rows)
    probes.index(torch.tensor([[-1]]), 0, 5, "tree_token", Phase.VERIFY, rows)
    assert "root_token" in fired(probes)
    probes.raise_if_fired()
    probes.index(torch.tensor([[-1]]), 0, 5, "tree_token", Phase.VERIFY, rows)
    assert "tree_token in phase verify, row 0: value -1 outside [0, 5)" in fired(probes)
    assert probes.record.tolist() == [0] * 7


@pytest.mark.parametrize("enabled", [True, False])
def test_a_probe_that_is_off_or_has_nothing_to_look_at_is_the_identity(enabled):
    """No lanes: nothing fires. Below level 2: the very tensor comes back, whatever it holds."""
    probes = Probes.make(CPU, enabled, 99)
    x = torch.empty((0, 3), dtype=torch.int64) if enabled else torch.tensor([[99]])
    rows = torch.arange(x.shape[0])
    assert probes.index(x, 0, 4, "root_token", Phase.DRAFT, rows) is x
    probes.nan(x.to(torch.float32) * float("inf"), "hidden", Phase.DRAFT, rows)
    assert not probes.record.any()
    probes.raise_if_fired()


def test_a_probe_fires_without_asking_the_device_anything():
    """On the meta device, where every read of a value by the host is an error, probes run: they never synchronise."""
    meta = torch.device("meta")
    probes = Probes.make(meta, True, 99)
    rows = torch.zeros(2, dtype=torch.int64, device=meta)
    x = torch.zeros((2, 3), dtype=torch.int64, device=meta)
    assert probes.index(x, 0, 4, "topk_token", Phase.DRAFT, rows).shape == (2, 3)
    probes.index(x, rows[:, None], rows[:, None] + 3, "feature_node", Phase.EXTEND, rows)
    probes.nan(x.to(torch.float32), "hidden", Phase.DRAFT, rows)
    with pytest.raises((RuntimeError, NotImplementedError)):
        probes.record.tolist()


PLANTS = {
    "root_token": (lambda s, row: s.root[row].fill_(12), "value 12 outside [0, 12)"),
    "committed": (lambda s, row: s.committed[row].fill_(-1), "value -1 outside [0, "),
    "topk_token": (lambda s, row: s.draft.tokens[row, 1].fill_(-7), "value -7 outside [0, 12)"),
    "topk_logprob": (lambda s, row: s.draft.logprob[row, 0].fill_(float("nan")), "not finite"),
    "hidden": (lambda s, row: s.draft.hidden[row, 5].fill_(float("inf")), "not finite"),
}


@pytest.mark.parametrize("graphs", few_of(["off", "sim"], 1))
@pytest.mark.parametrize("name", PLANTS)
def test_state_that_is_wrong_is_reported_by_the_next_round_and_hurts_no_other_row(strong_pair, name, graphs):
    """At level 2 the round runs to its end, the message names tensor, phase and row, and the other rows are as ever."""
    plant, words = PLANTS[name]
    seen = []
    for bad in (False, True):
        llm = build(strong_pair, SHAPE, check_level=2, graphs=graphs, max_running_requests=4)
        submit(llm, strong_pair.prompts([9, 20, 5]), greedy(40))
        run = steps(llm)
        while not isinstance(next(run)[0], RoundPlan):
            pass
        rounds = []
        llm.engine.observer = lambda plan, tree, accepted, rounds=rounds: rounds.append((plan, tree, accepted))
        if not bad:
            next(run)
        else:
            plan = llm.scheduler.plan()
            plant(llm.engine.runner.state, plan.rows[1])
            with pytest.raises(CheckError) as error:
                llm.engine.step(plan)
            for part in (name, "phase draft", f"row {plan.rows[1]}", words):
                assert part in str(error.value)
            llm.engine.runner.probes.raise_if_fired()  # the record was cleared
        seen.append(rounds[0])
    for value, other in zip(seen[0][1:], seen[1][1:], strict=True):
        for field in value.__dataclass_fields__:
            sound, broken = getattr(value, field), getattr(other, field)
            assert torch.equal(sound[0], broken[0]), field
            assert torch.equal(sound[2], broken[2]), field


# ---------------------------------------------------------------------------------------------- level 3: poison


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.bool])
def test_poison_is_a_value_that_shows(dtype):
    x = torch.zeros(3, dtype=dtype)
    poison(x)
    worst = {torch.bool: True, torch.int32: INT_MIN, torch.int64: torch.iinfo(torch.int64).min}
    assert x.isnan().all() if dtype.is_floating_point else x.tolist() == [worst[dtype]] * 3


def observed(llm, prompts, params):
    """Outputs, and every round's trees and paths."""
    rounds = []
    llm.engine.observer = lambda plan, tree, accepted: rounds.append((plan.rows, tree, accepted))
    requests = submit(llm, prompts, params)
    plans = [plan for plan, _ in steps(llm)]
    return [tuple(r.output_ids) for r in requests], rounds, plans


def assert_same_rounds(ours, theirs):
    """Live rows of every round hold the same bits: trees, log-probabilities, paths."""
    for (rows, *values), (other_rows, *others) in zip(ours, theirs, strict=True):
        assert rows == other_rows
        for value, other in zip(values, others, strict=True):
            for name in value.__dataclass_fields__:
                a, b = getattr(value, name)[: len(rows)], getattr(other, name)[: len(rows)]
                assert torch.equal(a, b), name


CROWDED = {"context_length": 128, "max_total_tokens": 192, "page_size": 4, "chunked_prefill_size": 7}


@pytest.mark.pairwise
@pytest.mark.parametrize("radix", [False, True])
@pytest.mark.parametrize("graphs", few_of(["off", "sim"], 1))
def test_poison_changes_no_bit_of_any_round(strong_pair, graphs, radix):
    """Requests that retract each other give the same trees and tokens at levels 0 and 3: nothing poisoned is read."""
    prompts = [*strong_pair.prompts([30, 12, 25, 7]), strong_pair.prompts([30])[0]]
    params = [
        greedy(50, whole=True),
        sampled(1, 50, whole=True),
        sampled(2, 40, top_k=5, whole=True),
        greedy(60, whole=True),
        greedy(30, whole=True),
    ]
    found = []
    for level in (0, 3):
        llm = build(strong_pair, SHAPE, check_level=level, graphs=graphs, disable_radix_cache=not radix, **CROWDED)
        found.append(observed(llm, prompts, params))
        assert llm.scheduler.num_retractions > 0
    assert found[0][0] == found[1][0]
    assert_same_rounds(found[0][1], found[1][1])


@pytest.mark.parametrize("graphs", few_of(["off", "sim"], 1))
def test_poison_changes_no_bit_behind_a_window(two_group, graphs):
    """Pages that left the window are NaN, and no query sees them."""
    prompts = [[(7 * i + 3 * j) % 96 for j in range(n)] for i, n in enumerate((40, 3, 61))]
    found = []
    for level in (0, 3):
        llm = build_two_group(two_group, check_level=level, graphs=graphs, page_size=4, chunked_prefill_size=9)
        found.append(
            observed(llm, prompts, [greedy(40, whole=True), sampled(3, 50, whole=True), greedy(20, whole=True)])
        )
    freed = Counter(group for plan in found[1][2] for group, _ in plan.freed)
    assert freed["window"] > 20, "no page left the window"
    assert found[0][0] == found[1][0]
    assert_same_rounds(found[0][1], found[1][1])


def nothing_but_nan(llm, group, page) -> bool:
    size = llm.engine.layout.page_size
    return bool(llm.engine.runner.pools[group].data[:, page * size : (page + 1) * size].isnan().all())


def test_free_pages_are_nan_and_the_null_page_is_finite(strong_pair):
    """At level 3, from the start and after every step, a page that nobody owns is NaN and page 0 is zero."""
    llm = build(strong_pair, SHAPE, check_level=3, **CROWDED)
    allocators, size = llm.scheduler.rows.kv_cache._allocators, llm.engine.layout.page_size
    for group, pages in llm.engine.layout.num_pages.items():
        assert all(nothing_but_nan(llm, group, page) for page in range(1, pages))
    submit(llm, strong_pair.prompts([30, 12, 25, 7]), greedy(40, whole=True))
    run, checked = steps(llm), 0
    while (plan := llm.scheduler.plan()) is not None:
        result = llm.engine.step(plan)
        for group, allocator in allocators.items():
            pool = llm.engine.runner.pools[group].data
            assert torch.equal(pool[:, :size], torch.zeros_like(pool[:, :size]))
            free = allocator.owned_by(FREE)
            assert all(nothing_but_nan(llm, group, page) for page in free)
            checked += len(free)
            held = [*range(1, llm.engine.layout.num_pages[group])]
            assert not any(nothing_but_nan(llm, group, p) for p in held if allocator.owner_of(p) == CACHE)
        llm.scheduler.commit(plan, result)
    run.close()
    assert checked > 100
    assert llm.scheduler.num_retractions > 0


def test_a_page_is_nan_when_it_comes_to_a_request(strong_pair):
    """At level 3 nobody finds the K/V of a page's last owner, also if the page changed hands between two plans."""
    llm = build(strong_pair, SHAPE, check_level=3, disable_radix_cache=True, **CROWDED)
    submit(llm, strong_pair.prompts([30, 12, 25, 7]), greedy(40, whole=True))
    stale, given = [], 0
    while (plan := llm.scheduler.plan()) is not None:
        for edit in plan.edits:
            given += len(edit.pages)
            doubtful = [page for page in edit.pages if (edit.group, page) not in plan.freed]
            stale += [(edit, page) for page in doubtful if not nothing_but_nan(llm, edit.group, page)]
        llm.scheduler.commit(plan, llm.engine.step(plan))
    assert llm.scheduler.num_retractions > 0
    assert given > 100
    assert stale == []


def test_columns_without_a_page_hold_what_no_page_is(strong_pair):
    """At level 3 a row's table is INT_MIN but where the scheduler wrote a page, also after a longer request in it."""
    llm = build(strong_pair, SHAPE, check_level=3, page_size=4, max_running_requests=2)
    tables, dummy = llm.engine.runner.state.page_tables, llm.engine.layout.dummy_row
    for table in tables.values():
        assert (table.data[:dummy] == INT_MIN).all()
        assert (table.data[dummy] == 0).all()
    llm.generate(strong_pair.prompts([90, 80]), greedy(30))
    requests = submit(llm, strong_pair.prompts([5, 9]), greedy(30))
    for _ in steps(llm):
        for request in requests:
            if request.running is not None:
                row, pages = request.running.row, request.running.lease.pages
                for group, table in tables.items():
                    have = table.data[row].tolist()
                    count = len(pages[group])
                    assert have[:count] == pages[group]
                    assert set(have[count:]) == {INT_MIN}
        for table in tables.values():
            assert (table.data[dummy] == 0).all()


@pytest.mark.parametrize("level", [0, 3])
def test_a_read_of_a_free_page_is_silent_at_level_0_and_shows_at_level_3(strong_pair, level):
    """A table cell that points to a page that was given back: at level 3 the request fails, alone."""
    llm = build(strong_pair, SHAPE, check_level=level, page_size=4)
    llm.generate(strong_pair.prompts([60]), greedy(20))  # leaves its K/V in pages that are free again
    victim, other = submit(llm, strong_pair.prompts([20, 13]), greedy(30))
    run = steps(llm)
    while not isinstance(next(run)[0], RoundPlan):
        pass
    page = llm.scheduler.rows.kv_cache._allocators[FULL].owned_by(FREE)[0]
    llm.engine.runner.state.page_tables[FULL].data[victim.running.row, 1] = page
    plan = llm.scheduler.plan()
    row = victim.running.row
    if level == 0:
        result = llm.engine.step(plan)
        assert all(each.finite for each in result.rows)
        return
    with pytest.raises(CheckError, match=rf"features in phase extend, row {row}: not finite"):
        llm.engine.step(plan)
    assert other.finish_reason is None


# ---------------------------------------------------------------------------------------------- level 3: red zones


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("after", [False, True])
def test_a_write_beside_a_buffer_is_reported_with_its_side_shape_and_dtype(dtype, after):
    zones = RedZones(CPU)
    other, tensor = zones.zeros((2,), torch.int64), zones.zeros((3, 5), dtype)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == dtype
    assert not tensor.any()
    tensor.fill_(1)
    other.fill_(-1)
    zones.check()
    beside(tensor, after).fill_(0)
    with pytest.raises(CheckError, match="red zone") as error:
        zones.check()
    for part in ("after" if after else "before", "(3, 5)", str(dtype)):
        assert part in str(error.value)


def test_every_buffer_of_the_engine_lies_between_red_zones(two_group):
    """State, round buffers and pools: a write beside any of them is reported at the end of the step."""
    llm = build_two_group(two_group, check_level=3, page_size=4, max_running_requests=2)
    tensors = all_tensors(llm)
    assert len(tensors) > 30
    assert {"pool.full", "pool.window", "pool.draft"} <= set(tensors)
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), name
        for after in (False, True):
            cell = beside(tensor, after)
            kept = cell.clone()
            cell.fill_(0)
            with pytest.raises(CheckError, match="red zone"):
                llm.engine._zones.check()
            cell.copy_(kept)
            llm.engine._zones.check()
    submit(llm, [[1, 2, 3]], greedy(4))
    beside(llm.engine.runner.buffers.row_lists, True).fill_(0)
    with pytest.raises(CheckError, match=r"red zone.*\(2, 2\) torch.int64"):
        llm.engine.step(llm.scheduler.plan())


# ---------------------------------------------------------------------------------------------- level 3: readback


def _drop_last(pool, tail, source, slots):
    commit_tail(pool, tail, source[:, :-1], slots[:, :-1])


def _one_lane_off(pool, tail, source, slots):
    commit_tail(pool, tail, source, slots)
    pool[0, slots[0, 0], 1, 0, 0] += 1e-9 * (slots[0, 0] > 0)  # a null page that changes stops the start


@pytest.mark.parametrize("wrong", [_drop_last, _one_lane_off], ids=["last entry dropped", "one number changed"])
@pytest.mark.parametrize("level", [2, 3])
def test_a_commit_that_does_not_store_every_entry_is_reported_at_level_3(strong_pair, monkeypatch, wrong, level):
    """The slots are read back and compared bit for bit; level 2 does not look."""
    monkeypatch.setattr("treetop.kernels.tree.commit.commit_tail", wrong)
    llm = build(strong_pair, SHAPE, check_level=level, page_size=4)
    prompts = strong_pair.prompts([9, 20, 5])
    if level == 3:
        with pytest.raises(CheckError, match="commit: a committed slot"):
            llm.generate(prompts, greedy(40))
    else:
        llm.generate(prompts, greedy(40))


# ---------------------------------------------------------------------------------------------- forced accept lengths


@pytest.mark.parametrize("graphs", ["off", "sim"])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_forced_accept_length_is_that_of_every_round(strong_pair, length, graphs):
    """For measuring speed: each round emits `length` tokens, right or wrong, and no guard of level 3 minds."""
    llm = build(strong_pair, SHAPE, simulate_accept_length=length, graphs=graphs, check_level=3, page_size=4)
    outputs = llm.generate(strong_pair.prompts([9, 20, 5]), greedy(1 + 4 * length, whole=True))
    assert [output.metrics.accept_lens for output in outputs] == [(length - 1,) * 4] * 3
    llm.scheduler.check_integrity()
