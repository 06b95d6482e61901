"""What is learned of a draft beside adapters, which it may not fit: by adapter, and never a token's affair."""

import json
from collections import Counter

import pytest
import torch

from support.engines import build, greedy, sampled, steps, submit, tokens
from support.loras import merged, save_lora
from support.refusing import refused
from support.shape_loads import CONTEXT, Load
from support.tiny_models import Pair
from treetop.checkpoints.folder import resolve_folder
from treetop.engine.features.adapter_calibrations import AdapterCalibrations
from treetop.kernels.tree.calibration import make_calibration
from treetop.kernels.tree.learn import PRIOR_NODES
from treetop.scheduler.acceptance_probs import ENOUGH, accept_probs_of, head_of
from treetop.types.costs import HeadAcceptance
from treetop.types.errors import ConfigError
from treetop.types.layout import PLAIN
from treetop.types.messages import AdapterEdit, RoundPlan, RowResult, StepResult
from treetop.types.sampling import CALIBRATED_LORAS, CLASSES, SamplingMode, class_of, num_classes
from treetop_debug.patching import Patch, replaced

LEARN = {"speculative_calibration": "learn"}
NAMES = ["", "wild", "mild"]


@pytest.fixture(scope="module")
def pair():
    """A small model that was trained, and its head."""
    return Pair(resolve_folder("builtin:nestling"), resolve_folder("builtin:nestling-eagle3"))


@pytest.fixture(scope="module")
def adapters(pair, tmp_path_factory):
    """One that makes another model of it, which the head does not fit, and one that hardly changes it."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for name, size in (("wild", 1.0), ("mild", 0.001)):
        lora = save_lora(folder / name, pair.target, 4, 8.0, 5, ("o_proj", "down_proj"), size)
        made.append((name, lora, merged(folder / f"{name}-whole", pair.target, lora, 2.0)))
    return made


def modules(adapters) -> dict:
    return {name: str(folder) for name, folder, _ in adapters}


def texts(llm) -> list[list[int]]:
    lines = (resolve_folder("builtin:nestling").parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [llm.tokenizer.encode(json.loads(line)["prompt"])[:30] for line in lines[:2]]


# ------------------------------------------------------------------------------------------------------------ rounds


def nodes_and_tokens(llm):
    """One request of the base and of each adapter under one budget: nodes of each in the rounds of all from the ninth
    on, and tokens.
    """
    first, second = texts(llm)
    requests = submit(llm, [first, second, first], [greedy(96, whole=True)] * len(NAMES), loras=NAMES)
    nodes, rounds = Counter(), 0
    for plan, result in steps(llm):
        rounds += isinstance(plan, RoundPlan) and len(plan.rows) == len(NAMES)
        if rounds > 8 and len(result.rows) == len(NAMES):
            nodes.update({row.row: row.num_nodes for row in result.rows})
    assert rounds > 18
    return [nodes[row] / (rounds - 8) for row in range(len(NAMES))], [tuple(each.output_ids) for each in requests]


def test_a_row_whose_adapter_the_head_does_not_fit_gets_smaller_trees(pair, adapters):
    """Under one budget of nodes; the base's row and one whose adapter the head fits keep theirs, and have more of the
    budget than where all teach one calibration. Each has the tokens of its own model either way."""
    options = {"speculative_node_budget": 18, "lora_modules": modules(adapters), "max_running_requests": 3, **LEARN}
    llm = build(pair, (3, 4, 12), graphs="sim", **options)
    own, got = nodes_and_tokens(llm)
    by_temperature = [
        Patch(f"treetop.{module}:class_of", lambda real: lambda temperature, lora_slot: real(temperature, 0))
        for module in ("engine.features.sampling", "scheduler.rounds")
    ]
    with replaced(by_temperature):
        shared, same = nodes_and_tokens(build(pair, (3, 4, 12), **options))
    first, second = texts(llm)
    targets = zip((pair.target, *(whole for _, _, whole in adapters)), (first, second, first), strict=True)
    want = [
        tokens(build(Pair(target, None), None).generate([text], greedy(96, whole=True)))[0] for target, text in targets
    ]
    assert got == same == want
    base, wild, mild = own
    assert wild < 0.6 * min(base, mild)
    assert wild < shared[1] - 0.5
    assert min(base - shared[0], mild - shared[2]) > 0.2


@pytest.mark.parametrize("mode", ["learn", "off"])
def test_adapters_under_a_budget_have_the_tokens_of_their_models(pair, adapters, mode):
    """Each node with its row's adapter, sampled too, and rows that come and go."""
    params = [greedy(20), *(sampled(seed, 16) for seed in range(3))]
    prompts = pair.prompts([9, 17, 5, 12])
    llm = build(
        pair, (3, 4, 12), speculative_node_budget=9, lora_modules=modules(adapters), max_running_requests=3,
        speculative_calibration=mode, check_level=3, page_size=4,
    )  # fmt: skip
    asked = [(name, i) for i in range(len(prompts)) for name in NAMES]
    requests = submit(llm, [prompts[i] for _, i in asked], [params[i] for _, i in asked], loras=[n for n, _ in asked])
    for _ in steps(llm):
        pass
    got = {key: tuple(each.output_ids) for key, each in zip(asked, requests, strict=True)}
    for name, target in zip(NAMES, (pair.target, *(whole for _, _, whole in adapters)), strict=True):
        want = tokens(build(Pair(target, None), None).generate(prompts, params))
        assert [got[name, i] for i in range(len(prompts))] == want


# ----------------------------------------------------------------------------------------------------------- classes


def test_rows_are_classes_by_their_adapters_slot_too():
    assert [class_of(0.0, slot) for slot in range(3)] == [0, CLASSES, 2 * CLASSES]
    assert class_of(1.0, 1) == CLASSES + 2
    most = CALIBRATED_LORAS
    assert class_of(0.5, most) == class_of(0.5, 1000) == num_classes(most) - 2 == num_classes(1000) - 2
    assert len({class_of(0.5, slot) for slot in range(most + 1)}) == most + 1
    assert num_classes(0) == CLASSES


def test_rounds_teach_the_adapters_of_their_rows_alone(pair, adapters):
    llm = build(pair, (3, 4, 12), lora_modules=modules(adapters), **LEARN)
    assert len(calibration_of(llm).nodes) == 3 * CLASSES
    llm.generate(pair.prompts([4, 7]), greedy(6), lora="mild")
    assert [*calibration_of(llm).nodes.sum(dim=1).view(3, CLASSES).any(dim=1)] == [False, False, True]


def calibration_of(llm):
    return llm.engine.runner.state.calibration


def known(slots=2):
    """Of an engine that has learned much of the base."""
    calibration = make_calibration(3, 2, lambda size, dtype: torch.zeros(size, dtype=dtype), num_classes(slots))
    base = calibration.of_classes(slice(CLASSES))
    base.inv_temp.fill_(2.0)
    base.logprob_bias.fill_(0.5)
    base.nodes.fill_(8000.0)
    for table, part in ((base.seen, 0.5), (base.chosen, 0.25), (base.predicted, 0.2)):
        table.fill_(8000.0 * part)
    return calibration, AdapterCalibrations(calibration)


def of_slot(calibration, slot):
    return calibration.of_classes(slice(slot * CLASSES, (slot + 1) * CLASSES))


def test_an_adapter_begins_as_the_base_with_little_certainty_and_finds_its_own_again():
    """In whichever slot, and whoever had it meanwhile; one that was unloaded begins anew."""
    calibration, adapters = known()
    adapters.begin()
    adapters.enter(AdapterEdit(1, 7))
    own = of_slot(calibration, 1)
    assert own.inv_temp.eq(2.0).all()
    assert own.logprob_bias.eq(0.5).all()
    assert own.nodes.eq(PRIOR_NODES).all()
    assert own.chosen.eq(0.25 * PRIOR_NODES).all()
    own.chosen.fill_(1.0)  # it has learned
    adapters.enter(AdapterEdit(1, 8))
    assert of_slot(calibration, 1).chosen.eq(0.25 * PRIOR_NODES).all()
    of_slot(calibration, 1).chosen.fill_(3.0)
    adapters.enter(AdapterEdit(2, 7))
    assert of_slot(calibration, 2).chosen.eq(1.0).all()
    for edit in (AdapterEdit(1, 7), AdapterEdit(2, 8)):  # both at once, as after a sleep
        adapters.enter(edit)
    assert of_slot(calibration, 1).chosen.eq(1.0).all()
    assert of_slot(calibration, 2).chosen.eq(3.0).all()
    adapters.enter(AdapterEdit(1, 9))
    for number in (7, 8):
        adapters.forget(number)
    for edit in (AdapterEdit(1, 7), AdapterEdit(2, 8)):
        adapters.enter(edit)
    assert of_slot(calibration, 1).chosen.eq(0.25 * PRIOR_NODES).all()
    assert of_slot(calibration, 2).chosen.eq(0.25 * PRIOR_NODES).all()
    of_slot(calibration, 1).chosen.fill_(1.0)
    calibration.of_classes(slice(CLASSES)).reset()  # another head
    adapters.begin()
    assert not calibration.nodes.any()
    assert not calibration.chosen.any()
    assert calibration.inv_temp.eq(1.0).all()


def test_slots_beyond_the_last_that_is_told_apart_learn_together():
    calibration, adapters = known(CALIBRATED_LORAS + 5)
    adapters.begin()
    together = of_slot(calibration, CALIBRATED_LORAS)
    adapters.enter(AdapterEdit(CALIBRATED_LORAS, 1))
    together.chosen.fill_(1.0)
    adapters.enter(AdapterEdit(CALIBRATED_LORAS + 3, 2))
    adapters.enter(AdapterEdit(1, 1))
    assert together.chosen.eq(1.0).all()
    assert of_slot(calibration, 1).chosen.eq(0.25 * PRIOR_NODES).all()


def test_adapters_that_take_turns_in_a_slot_keep_what_was_learned_of_them(pair, adapters):
    llm = build(pair, (3, 4, 12), lora_modules=modules(adapters), max_loras=1, **LEARN)
    learned = []
    for name in ("wild", "mild", "wild"):
        before = calibration_of(llm).nodes[CLASSES:].sum()
        llm.generate(pair.prompts([9]), greedy(12), lora=name)
        learned.append((float(before), float(calibration_of(llm).nodes[CLASSES:].sum())))
    wild, mild, again = learned
    assert 0 < mild[1] != wild[1]
    assert again[1] > wild[1]
    assert again[1] - wild[1] <= wild[1]


# ----------------------------------------------------------------------------------------------------------- on disk


def test_what_was_learned_of_an_adapter_is_there_after_a_restart(pair, adapters, tmp_path, monkeypatch):
    """By its content, whatever its name and its slot; loaded while it runs, too, and again after it was unloaded. A
    file of before has the base's alone."""
    monkeypatch.setattr("treetop.engine.startup.kept_calibration.EVERY", 1)
    options = {"speculative_calibration_dir": str(tmp_path), **LEARN}
    first, learned = build(pair, (3, 4, 12), lora_modules=modules(adapters), **options), {}
    first.generate(pair.prompts([9]), greedy(12))
    for slot, name in enumerate(modules(adapters), 1):
        first.generate(pair.prompts([9]), greedy(12), lora=name)
        learned[name] = tables_of(first, slot)
    assert len({str(each) for each in [tables_of(first, 0), *learned.values()]}) == 3
    folders = modules(adapters)
    wild, mild = folders
    swapped = build(pair, (3, 4, 12), lora_modules={"x": folders[mild], "y": folders[wild]}, **options)
    assert [tables_of(swapped, slot) for slot in (1, 2)] == [learned[mild], learned[wild]]
    later = build(pair, (3, 4, 12), enable_lora=True, max_loras=1, max_cpu_loras=2, **options)
    for _ in range(2):
        later.load_lora("z", folders[wild])
        nodes = float(calibration_of(later).nodes[CLASSES:].sum())
        later.generate(pair.prompts([9]), greedy(6), lora="z")
        assert float(calibration_of(later).nodes[CLASSES:].sum()) > max(nodes, sum(map(sum, learned[wild][1])))
        later.unload_lora("z")
    (file,) = tmp_path.iterdir()
    whole = json.loads(file.read_text())
    assert len(whole["adapters"]) == 2
    file.write_text(json.dumps({key: value for key, value in whole.items() if key != "adapters"}))
    old = build(pair, (3, 4, 12), lora_modules=modules(adapters), **options)
    assert old.engine.runner.state.calibration.nodes[CLASSES:].max() <= PRIOR_NODES
    assert tables_of(old, 0)[1] == whole["nodes"]
    for wrong in ([], {"x": 3}, {"x": {}}, {"x": {**whole["adapters"].popitem()[1], "nodes": "much"}}):
        file.write_text(json.dumps({**whole, "adapters": wrong}))
        refused(ConfigError, lambda: build(pair, (3, 4, 12), **options), file.name, "damaged", "remove it")


def tables_of(llm, slot):
    """Of an adapter's classes, or the base's."""
    own = of_slot(calibration_of(llm), slot)
    return [own.inv_temp.tolist(), own.nodes.tolist(), own.seen.tolist(), own.chosen.tolist(), own.predicted.tolist()]


def test_as_many_adapters_are_kept_as_have_classes_of_their_own():
    """Those that were used last; of two with one content the later one, and none without a digest."""
    digests = {number: f"digest {number}" for number in range(1, 100)}
    calibration = make_calibration(3, 2, lambda size, dtype: torch.zeros(size, dtype=dtype), num_classes(2))
    adapters = AdapterCalibrations(calibration, digests)
    old = {f"old {i}": calibration.of_classes(slice(CLASSES)).copy() for i in range(CALIBRATED_LORAS)}
    adapters.begin(old)
    assert [*adapters.learned] == [*old]
    for number in range(1, 11):
        adapters.enter(AdapterEdit(1, number))
        of_slot(calibration, 1).chosen.fill_(float(number))
        if number % 2:
            adapters.forget(number)
    kept = adapters.learned
    assert len(kept) == CALIBRATED_LORAS
    assert [*kept][:-10] == [*old][10:]
    assert {*kept} - {*old} == {digests[number] for number in range(1, 11)}
    assert all(kept[digests[number]].chosen.eq(number).all() for number in range(1, 11))
    digests.update({50: "digest 3", 51: "digest 10"})
    adapters.enter(AdapterEdit(1, 50))
    assert of_slot(calibration, 1).chosen.eq(3).all()
    del digests[50]
    adapters.forget(50)
    assert [*adapters.learned] == [*kept]


# ------------------------------------------------------------------------------------------------------------ policy

GOOD, BAD = [0.8, 0.1, 0.02, 0.01], [0.03, 0.02, 0.01, 0.0]


def counts(of_class, nodes=1000.0, depths=5):
    """of_class: rates by rank of each class, None for one that nothing was seen of."""
    seen = [[[nodes * (rates is not None)] * 4] * depths for rates in of_class]
    chosen = [[[nodes * rate for rate in rates or [0.0] * 4]] * depths for rates in of_class]
    return seen, chosen


def test_a_class_that_was_hardly_seen_counts_as_its_adapters_others():
    """And an adapter that was hardly seen as all that there are; the head that is remembered is the base's."""
    found = counts([GOOD, None, None, None, BAD, None])
    best = {kind: accept_probs_of(found, [kind == i for i in range(6)], HeadAcceptance())[0][0] for kind in range(6)}
    assert best == {kind: pytest.approx(0.8 if kind < CLASSES else 0.03, rel=1e-2) for kind in range(6)}
    unseen = counts([GOOD, None, None, None, None, None], 10 * ENOUGH)
    assert accept_probs_of(unseen, [0, 0, 0, 2, 0, 0], HeadAcceptance())[0][0] == pytest.approx(0.8, rel=1e-2)
    assert head_of(counts([GOOD, None, None, BAD, BAD, BAD], 1e6), HeadAcceptance()).at(0) == pytest.approx(
        0.8, rel=1e-2
    )


def test_rows_of_an_adapter_that_the_head_does_not_fit_run_plainly_and_the_bases_speculate():
    """Each batch by its own, within the rounds between two looks, however long the other one ran; in turns."""
    load, told = Load(8), counts([GOOD, None, None, BAD, None, None])
    policy, base, adapter = load.policy, [8, 0, 0, 0, 0, 0], [0, 0, 0, 8, 0, 0]

    def rounds(speculating, rates, count):
        shapes = []
        for _ in range(count):
            shape = policy.choose([CONTEXT] * 8, speculating, 0)
            length = sum(1 for _ in range(shape.num_steps) if load._random.random() < sum(rates))
            rows = tuple(RowResult(row, (0,) * (length + 1), True) for row in range(8))
            plan = RoundPlan((), (), tuple(range(8)), shape, CONTEXT, SamplingMode.GREEDY)
            policy.note(plan, StepResult(rows, proposals=told), load.cost(shape))
            shapes.append(shape)
        return shapes

    rounds(base, GOOD, 100)
    for _ in range(3):
        assert rounds(adapter, BAD, 120)[16:].count(PLAIN) > 95
        assert rounds(base, GOOD, 60)[16:].count(PLAIN) < 5
