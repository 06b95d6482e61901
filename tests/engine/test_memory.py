"""KV pools are sized by one rule: what all rows can use, or what fits; what cannot work is refused with its numbers."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.engines import build, finish, greedy, submit, tokens
from treetop import LLM
from treetop.engine import memory
from treetop.engine.cuda_graphs import num_captured
from treetop.engine.graph_memory import GraphMemory
from treetop.engine.memory import (
    BYTES_PER_GRAPH,
    Budget,
    DeviceMemory,
    MemoryUse,
    activation_allowance,
    bytes_per_token,
    chunk_of_gpu,
    fit,
    out_of_memory_explained,
    pool_bytes,
    state_bytes,
    step_bytes,
)
from treetop.engine.rounds import Eager
from treetop.engine.startup import plan as planning
from treetop.engine.startup.default_rows import allowance_of_a_gpu, keep_lengths, tokens_of_a_row
from treetop.engine.startup.profile_run import worst_prefill
from treetop.models.registry import TargetSpec, target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import CapacityError, ConfigError, EngineError
from treetop.types.ids import DRAFT, FULL, STATE, WINDOW
from treetop.types.kv import paired
from treetop.types.layout import PLAIN, KVGroup, Layout, PrefillCosts, SpecShape
from treetop.types.sampling import SamplingMode
from treetop.types.state import StateGroup

GIB = 2**30
GROUPS = (KVGroup(FULL, 32, paired(8, 128)), KVGroup(DRAFT, 1, paired(8, 128)))
LLAMA = Layout((PLAIN, SpecShape(4, 5, 16)), 16, 8, 8192, 512, GROUPS, 0)
ONE_TOKEN = 2 * 33 * 2 * 8 * 128
"""Bytes of a token in bfloat16: 33 layers of K and V."""


def budget(free, total=80 * GIB, static=17 * GIB, allowance=2 * GIB, fraction=0.88):
    return Budget(DeviceMemory(total, free), static, allowance, fraction)


# ---------------------------------------------------------------------------------------------- arithmetic


def test_a_tokens_bytes_are_all_layers_of_k_and_v():
    assert bytes_per_token(LLAMA, 2) == {FULL: 32 * 2 * 8 * 128 * 2, DRAFT: 2 * 8 * 128 * 2}
    sized = replace(LLAMA, pool_tokens=1600)
    assert pool_bytes(sized, 2) == (1600 + 16) * ONE_TOKEN  # the null page too


def test_pool_bytes_are_those_of_the_tensors_that_are_made(strong_pair):
    """The arithmetic and the allocation agree, windows included."""
    llm = build(strong_pair, page_size=4)
    made = sum(pool.data.nbytes for pool in llm.engine.runner.pools.values())
    assert pool_bytes(llm.engine.layout, 8) == made


def test_with_room_the_pools_hold_what_all_rows_can_use_and_no_more():
    made = fit(LLAMA, 2, budget(free=60 * GIB), None)
    assert made.pool_tokens == 8 * 513 * 16 == LLAMA.tokens_for_all
    assert LLAMA.page_columns == 513


@pytest.mark.parametrize(
    ("free", "fraction", "binds"),
    [(10 * GIB, 0.88, "free"), (60 * GIB, 0.3, "fraction"), (60 * GIB, 0.2875, "fraction")],
)
def test_without_it_they_take_the_smaller_of_the_fractions_share_and_what_is_free(free, fraction, binds):
    """A page more would exceed the bound that binds; what is taken does not."""
    given = budget(free=free, fraction=fraction)
    made = fit(LLAMA, 2, given, None)
    limit = free - 2 * GIB if binds == "free" else int(fraction * 80 * GIB) - 17 * GIB
    assert given.pool_bytes == limit
    assert LLAMA.tokens_per_request <= made.pool_tokens < LLAMA.tokens_for_all
    assert pool_bytes(made, 2) <= limit < pool_bytes(replace(made, pool_tokens=made.pool_tokens + 16), 2)


def test_asked_tokens_override_the_fraction_but_not_the_memory_there_is():
    assert fit(LLAMA, 2, budget(free=60 * GIB, fraction=0.01), 16_000).pool_tokens == 16_000
    with pytest.raises(CapacityError, match=r"pools of 1000000 tokens: need 125\.\d+ GiB.*lower --max-total-tokens"):
        fit(LLAMA, 2, budget(free=60 * GIB), 1_000_000)
    with pytest.raises(CapacityError, match=r"pages\.full: need 514"):
        fit(LLAMA, 2, budget(free=60 * GIB), 16)


def test_too_little_for_one_request_gives_numbers_and_options_that_work():
    """The fraction and the context length that the message names are the first that are accepted."""
    tight = budget(free=60 * GIB, fraction=0.22)
    with pytest.raises(CapacityError) as error:
        fit(LLAMA, 2, tight, None)
    message = str(error.value)
    for part in ("8198 tokens", "full 131072 B + draft 4096 B", "17.00 GiB", "0.22 x total 80.00 GiB", "--page-size"):
        assert part in message
    assert "\n" not in message
    minimum = float(message.split("--mem-fraction-static to ")[1].split(" ", maxsplit=1)[0])
    assert fit(LLAMA, 2, budget(free=60 * GIB, fraction=minimum), None).pool_tokens >= LLAMA.tokens_per_request
    with pytest.raises(CapacityError):
        fit(LLAMA, 2, budget(free=60 * GIB, fraction=minimum - 0.01), None)
    longest = int(message.split("--context-length to ")[1].split(" ", maxsplit=1)[0])
    assert fit(replace(LLAMA, max_context=longest), 2, tight, None)
    with pytest.raises(CapacityError):
        fit(replace(LLAMA, max_context=longest + 16), 2, tight, None)


STATES = StateGroup(STATE, 48, 10240, 4, 48, 16, 128, 128, True, False)
"""Of Qwen3.5-27B: 144 MiB a row in float32."""


def test_states_of_rows_are_named_where_they_are_what_does_not_fit():
    """What a row keeps, of how many, and the option that says so; in words of the start-up log too."""
    hybrid = replace(LLAMA, state_groups=(STATES,), max_requests=64)
    row = STATES.row_bytes(2) + 6 * STATES.pending_bytes(1, 2)
    assert state_bytes(hybrid, 2) == row
    for free in (GIB, 3 * GIB):
        with pytest.raises(CapacityError) as error:
            fit(replace(hybrid, max_context=100_000), 2, budget(free), None)
        for part in (
            f"{row * 65 / GIB:.2f} GiB",
            f"{row / GIB:.2f} GiB a row",
            "--max-running-requests 64",
            "lower --max",
        ):
            assert part in str(error.value)
    (line,) = [each for each in MemoryUse(hybrid, 2, budget(GIB)).lines() if each.startswith("states")]
    assert f"{row / GIB:.2f} GiB a row x 65 rows" in line
    assert not [each for each in MemoryUse(LLAMA, 2, budget(GIB)).lines() if "states" in each]


def test_a_fraction_that_would_not_help_is_not_suggested():
    """Where the memory itself is short, raising the fraction is no way out."""
    with pytest.raises(CapacityError) as error:
        fit(LLAMA, 2, budget(free=int(2.5 * GIB)), None)
    assert "--mem-fraction-static to" not in str(error.value)
    assert "--context-length to" in str(error.value)
    with pytest.raises(CapacityError, match=r"weights, tables and buffers: need 17\.00 GiB.*have 12\.00 GiB free"):
        fit(LLAMA, 2, budget(free=-5 * GIB), None)


def test_a_fraction_that_leaves_a_cpu_nothing_is_what_the_message_would_raise():
    """On a CPU the fraction's rest of what is free counts as kept: the fraction that is named is the first to work."""

    def given(fraction):
        rest = int((1 - fraction) * 60 * GIB)
        return replace(budget(free=60 * GIB, allowance=2 * GIB + rest, fraction=fraction), rest=rest)

    for fraction, words in ((0.01, "beside 61.40 GiB for activations"), (0.2, "KV pools: one request")):
        with pytest.raises(CapacityError, match=words) as error:
            fit(LLAMA, 2, given(fraction), None)
        minimum = float(str(error.value).split("--mem-fraction-static to ")[1].split(" ", maxsplit=1)[0])
        assert fit(LLAMA, 2, given(minimum), None).pool_tokens >= LLAMA.tokens_per_request
        with pytest.raises(CapacityError):
            fit(LLAMA, 2, given(minimum - 0.01), None)


def test_a_windows_pool_is_fixed_and_comes_first():
    """A window's pool holds every request's window; the tokens are counted for the others alone."""
    window = KVGroup(WINDOW, 16, paired(8, 128), window=128)
    made = Layout((PLAIN,), 16, 8, 8192, 512, (KVGroup(FULL, 16, paired(8, 128)), window), 0)
    fixed = pool_bytes(made, 2)
    assert fixed == (16 + (1 + 8 * made.window_pages(128)) * 16) * 16 * 2 * 8 * 128 * 2
    have = fixed + 10_000 * 16 * 2 * 8 * 128 * 2
    given = Budget(DeviceMemory(80 * GIB, have), 0, 0, 0.99)
    assert fit(made, 2, given, None).pool_tokens == 10_000 // 16 * 16
    alone = replace(made, groups=(window,))
    assert pool_bytes(fit(alone, 2, budget(free=60 * GIB), None), 2) == pool_bytes(alone, 2)
    with pytest.raises(CapacityError):
        fit(alone, 2, Budget(DeviceMemory(80 * GIB, pool_bytes(alone, 2) - 1), 0, 0, 0.99), None)


@pytest.mark.parametrize(
    ("rows", "chunk", "context", "worst"),
    [
        (8, 512, 8192, 512),
        (1, 512, 8192, 512),
        (8, 4, 8192, 4),
        (6, 100, 50, 100),
        (2, 100, 20, 38),
        (3, 1, 9, 1),
    ],
)
def test_the_worst_prefill_fills_a_chunk_with_rows_as_long_as_a_prompt_can_be(rows, chunk, context, worst):
    """Tokens of the padded batch: the chunk, or all rows at one token less than the context."""
    made = replace(LLAMA, max_requests=rows, chunk=chunk, max_context=context)
    found = worst_prefill(made)
    assert found[0] * found[1] == worst
    assert found[1] < context
    assert worst_prefill(LLAMA) == (8, 64), "of equal batches not the one with the most logits"


def test_the_allowance_grows_with_the_peak_and_the_graphs():
    assert activation_allowance(5 * GIB, 10) > activation_allowance(5 * GIB, 0) >= 5 * GIB


# ---------------------------------------------------------------------------------------------- what a machine has


def test_a_control_groups_limit_counts_as_the_machines_memory(tmp_path):
    """limit - (current - page cache that can go) is free; `max` is no limit; a larger limit changes nothing."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 900 kB\n")
    machine = memory._ram(meminfo)
    assert machine == DeviceMemory(1000 * 1024, 900 * 1024)
    assert memory._limited(machine, tmp_path) == machine
    for name, text in (("memory.max", "512000"), ("memory.current", "300000"), ("memory.stat", "inactive_file 100000")):
        (tmp_path / name).write_text(text + "\n")
    assert memory._limited(machine, tmp_path) == DeviceMemory(512000, 312000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._limited(machine, tmp_path) == machine
    assert memory._ram(tmp_path / "nothing").free > 0


# ---------------------------------------------------------------------------------------------- prefill steps


@pytest.mark.parametrize(
    ("total", "windows", "chunk"),
    [
        (140 * GIB, (), 8192),
        (79 * GIB, (), 8192),
        (44 * GIB, (), 4096),
        (24 * GIB, (), 2048),
        (2 * GIB, (), 2048),
        (140 * GIB, (4096,), 4096),  # rows x (window + chunk) tokens are what a pool of windows holds
        (24 * GIB, (4096,), 2048),
        (140 * GIB, (1024, 4096), 1024),
        (140 * GIB, (128,), 512),
    ],
)
def test_a_gpus_prefill_steps_go_by_its_memory_and_the_models_windows(total, windows, chunk):
    assert chunk_of_gpu(total, windows) == chunk


@pytest.mark.parametrize(
    ("place", "options", "chunk"),
    [
        ("cpu", {}, 512),
        ("cuda", {}, 8192),
        ("cuda", {"attention_backend": "fa3"}, 8192),
        ("cuda", {"attention_backend": "torch"}, 512),  # masks of chunk x context
        ("cuda", {"chunked_prefill_size": 700}, 700),
        ("cpu", {"chunked_prefill_size": 9000}, 9000),
        ("cuda", {"context_length": 300, "max_running_requests": 2}, 600),  # a step can hold no more
    ],
)
def test_prefill_steps_are_chosen_by_the_device_unless_they_are_given(monkeypatch, place, options, chunk):
    """On a GPU that is not here, of an H200's memory."""
    monkeypatch.setattr(planning, "compute_device", lambda option: torch.device(place))
    monkeypatch.setattr(planning, "fallback", lambda need: "triton")
    monkeypatch.setattr(planning, "memory_of", lambda device: DeviceMemory(140 * GIB, 140 * GIB))
    preset = Path(__file__).parents[2] / "benchmarks" / "presets" / "llama-3.1-8b"
    config = EngineConfig(str(preset), load_format="dummy", **{"max_running_requests": 8, "page_size": 16, **options})
    assert planning.make_layout(config, target_spec(preset).config, None).chunk == chunk


@pytest.mark.parametrize(("asked", "size"), [(None, 64), (8, 8)])
def test_pages_have_the_size_that_is_asked_for_or_that_attention_wants(strong_pair, monkeypatch, asked, size):
    wants = []
    monkeypatch.setattr(planning, "page_size_for", lambda name, need: wants.append((name, need)) or 64)
    config = EngineConfig(str(strong_pair.target), context_length=128, page_size=asked, attention_backend="torch")
    planned = planning.plan_engine(config)
    assert (planned.layout.page_size, planned.config.page_size, planned.need.page_size) == (size, size, size)
    assert [(name, need.page_size, need.groups[0].name) for name, need in wants] == [("torch", None, FULL)][: not asked]


@pytest.mark.parametrize(
    ("place", "total", "options", "rows", "minimum", "usual"),
    [
        ("cuda", 140, {}, 256, 512, 2048),
        ("cuda", 24, {"context_length": 8192}, 16, 512, 2048),  # pools of 50,000 tokens
        ("cuda", 24, {"context_length": 1000}, 32, 512, 2048),  # shorter ones: more of them
        ("cuda", 24, {"context_length": 8192, "max_running_requests": 100}, 100, 512, 2048),
        ("cpu", 64, {"dtype": "bfloat16", "context_length": 2048}, 16, 128, 128),
    ],
)
def test_rows_and_the_tokens_beside_a_round_follow_device_and_memory(
    monkeypatch, place, total, options, rows, minimum, usual
):
    """The plan's configuration says what was chosen, and the layout is made of it. An 8B model's pace is by its shape.

    Its layers have 218.1 million weights, and 4 x 4096 operations for each token that one attends to.
    """
    monkeypatch.setattr(planning, "compute_device", lambda option: torch.device(place))
    monkeypatch.setattr(planning, "fallback", lambda need: "triton")
    monkeypatch.setattr(planning, "memory_of", lambda device: DeviceMemory(total * GIB, total * GIB))
    monkeypatch.setattr(planning, "with_copies", lambda config, place, budget, *rest: budget)
    preset = Path(__file__).parents[2] / "benchmarks" / "presets" / "llama-3.1-8b"
    planned = planning.plan_engine(EngineConfig(str(preset), load_format="dummy", **options))
    assert planned.config.max_running_requests == planned.layout.max_requests == rows
    assert planning.prefill_costs_of(planned.target, planned.place) == PrefillCosts(
        minimum, usual, 26624, 1024 if place == "cuda" else minimum
    )


@pytest.mark.parametrize(
    ("total", "policy", "seen", "rows"),
    [
        (79, "auto", None, 128),
        (79, "fixed", None, 128),
        (140, "auto", None, 256),
        (79, "auto", 1152, 256),  # 1,024 in, 128 out
        (79, "auto", 3000, 64),
        (140, "auto", 3000, 128),
    ],
)
def test_an_8b_engine_has_as_many_rows_as_what_requests_have_been_fills(monkeypatch, total, policy, seen, rows):
    """On a card of 80 and of 141 GB, with weights in 12 bits beside their own; the plan says how many and why.

    Pools and graphs of all rounds that can come fit beside each other, and what they leave is no less than a start asks
    for: `GraphMemory.check` of graphs that take all that is allowed.
    """
    monkeypatch.setattr(planning, "compute_device", lambda option: torch.device("cuda"))
    monkeypatch.setattr(planning, "fallback", lambda need: "triton")
    monkeypatch.setattr(planning, "memory_of", lambda device: DeviceMemory(total * GIB, total * GIB))
    copies = 97 * GIB // 10
    monkeypatch.setattr(
        planning,
        "with_copies",
        lambda config, place, budget, *rest: replace(
            budget,
            copies=copies,
            static=budget.static + copies,
            memory=DeviceMemory(budget.memory.total, budget.memory.free - copies),
        ),
    )
    if seen is not None:
        monkeypatch.setattr(planning, "tokens_of_a_row", lambda folder, dummy: (seen, "as requests have been here"))
    presets = Path(__file__).parents[2] / "benchmarks" / "presets"
    draft = str(presets / "eagle3-llama-3.1-8b")
    fixed = {"load_format": "dummy", "exactness": "ties"}  # `auto` asks the card for its name
    config = EngineConfig(str(presets / "llama-3.1-8b"), draft, speculative_policy=policy, **fixed)
    planned = planning.plan_engine(config)
    layout, model, budget = planned.layout, planned.target.config, planned.use.budget
    assert layout.max_requests == rows
    assert f"{rows} rows: K/V hold " in planned.rows
    room = allowance_of_a_gpu(layout, model.hidden_size, model.vocab_size, True)
    choices, shapes = [*SamplingMode], layout.shapes
    num_rounds = num_captured(layout, choices, True, filters_apart=True)
    assert room - num_rounds * BYTES_PER_GRAPH > GIB, "steps have room, too"
    assert len(shapes) == (6 if policy == "auto" else 1)
    final = fit(layout, 2, replace(budget, allowance=room), None)
    assert final.pool_tokens >= rows * (seen or 2048)
    left = budget.memory.free - pool_bytes(final, 2) - num_rounds * BYTES_PER_GRAPH
    graphs = GraphMemory(num_rounds, num_rounds, num_rounds * BYTES_PER_GRAPH, 0, left)
    graphs.check(replace(budget, allowance=room))


def test_how_long_requests_are_is_kept_by_target(strong_pair, weak_pair, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tokens_of_a_row(strong_pair.target, dummy=False)[0] == 2048
    keep_lengths(strong_pair.target, 700.4)
    assert tokens_of_a_row(strong_pair.target, dummy=False) == (700, "700 tokens each, as requests have been here")
    assert tokens_of_a_row(weak_pair.target, dummy=False)[0] == tokens_of_a_row(strong_pair.target, True)[0] == 2048
    (file,) = (tmp_path / "treetop" / "request-lengths").iterdir()
    for damaged in ("[]", '{"tokens": -1}', '{"tokens": "7"}', "{"):
        file.write_text(damaged)
        assert tokens_of_a_row(strong_pair.target, dummy=False)[0] == 2048


# ---------------------------------------------------------------------------------------------- engines


def with_memory(monkeypatch, total, *free):
    """What is free before loading, and after it."""
    left = list(free)
    monkeypatch.setattr(planning, "memory_of", lambda device: DeviceMemory(total, left.pop(0)))


@pytest.mark.slow
def test_an_engine_with_little_memory_gets_smaller_pools_and_the_same_tokens(strong_pair, monkeypatch):
    """Requests are retracted and resumed; nothing but the speed changes."""
    prompts = strong_pair.prompts([30, 40, 50, 60, 20, 10])
    roomy = build(strong_pair, context_length=128, max_running_requests=6)
    assert roomy.engine.layout.pool_tokens == roomy.engine.layout.tokens_for_all
    sound = tokens(roomy.generate(prompts, greedy(60)))
    use = roomy.engine.memory
    one = pool_bytes(replace(roomy.engine.layout, pool_tokens=roomy.engine.layout.tokens_per_request), 8)
    kept = step_bytes(roomy.engine.layout, roomy.engine.spec.vocab_size, 8)
    free = int((1.7 * one + kept) / 0.88)
    with_memory(monkeypatch, 100 * free, use.budget.static + free, free)
    tight = build(strong_pair, context_length=128, max_running_requests=6)
    assert tight.engine.layout.pool_tokens < 3 * roomy.engine.layout.tokens_per_request
    requests = submit(tight, prompts, greedy(60))
    finish(tight)
    assert tight.scheduler.num_retractions > 0
    assert [tuple(request.output_ids) for request in requests] == sound


def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_read(strong_pair, monkeypatch):
    with_memory(monkeypatch, 2 * GIB, 2**19)
    monkeypatch.setattr(TargetSpec, "load", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(CapacityError, match="weights, tables and buffers"):
        build(strong_pair)


def test_thousands_of_rows_are_counted_before_they_can_exhaust_a_cpus_memory(monkeypatch):
    """The worst step is left free beside the pools: 64 rows fit into 4 GiB; 4096 are refused with the numbers."""
    monkeypatch.setattr(planning, "memory_of", lambda device: DeviceMemory(4 * GIB, 4 * GIB))
    some = LLM(max_running_requests=64, context_length=64, check_level=0, device="cpu").engine
    rest = int(0.12 * 4 * GIB)
    assert some.memory.budget.allowance - rest == pytest.approx(step_bytes(some.layout, 4096, 4), abs=2)
    monkeypatch.setattr(TargetSpec, "load", lambda *args: pytest.fail("weights were read"))
    message = r"need 0\.6\d GiB beside 17\.\d\d GiB for activations.*lower --max-running-requests, --context-length"
    with pytest.raises(CapacityError, match=message):
        LLM(max_running_requests=4096, device="cpu")


def test_a_worst_step_is_its_gathered_contexts_and_masks_or_its_draws():
    """Llama-3.1-8B in float32, 8 rows: K and V of a layer twice, and 16 x 128256 logits to draw from; long prompts."""
    assert step_bytes(replace(LLAMA, max_context=64), 128256, 4) == 8 * 16 * 128256 * 56
    assert step_bytes(LLAMA, 128256, 4) == 8192 * (8 * 2 * 2048 * 4 + 512 * 6)
    assert step_bytes(replace(LLAMA, chunk=64), 128256, 4) == 8192 * (8 * 2 * 2048 * 4 + 8 * 16 * 6)
    assert step_bytes(replace(LLAMA, max_requests=1, max_context=2**17, chunk=8192), 128256, 4) > 8192 * 2**17 * 6


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_proofs_run_the_dummy_row_then_all_rows_and_put_the_state_back(strong_pair, monkeypatch, mode):
    """Also with more rows than a few: a buffer that lacks rows shows only where all are used. Mixed steps likewise."""
    ran = []
    launch = Eager.launch

    def note(self, key, max_kv_len, *between):
        ran.append((key.bucket, key.mixed, self._runner.buffers.rows[: key.bucket].tolist()))
        launch(self, key, max_kv_len, *between)

    monkeypatch.setattr(Eager, "launch", note)
    llm = build(strong_pair, max_running_requests=20, mixed_chunk=mode)
    kinds = [False] if mode == "off" else [False, True]
    assert ran == [(n, mixed, rows) for n, rows in ((1, [20]), (20, list(range(20)))) for mixed in kinds]
    assert not llm.engine.runner.state.committed.any()


def test_absurd_options_are_refused_before_anything_is_allocated(strong_pair):
    """A petabyte of pools is an error of one line, not an allocation; so is a number out of all bounds."""
    with pytest.raises(ConfigError, match="--max-running-requests must lie between 1 and 65536"):
        build(strong_pair, max_running_requests=10**12)
    with pytest.raises(CapacityError, match="--max-total-tokens"):
        build(strong_pair, max_total_tokens=10**12)
    assert build(strong_pair, chunked_prefill_size=10**12).engine.layout.chunk < 10**6


@pytest.mark.parametrize("fraction", [0, 1, -0.5, 1.5, float("nan"), "half", True])
def test_a_fraction_outside_0_to_1_is_refused(strong_pair, fraction):
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        build(strong_pair, mem_fraction_static=fraction)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["torch", "triton", "cpu"],
)
def test_out_of_memory_while_running_gives_the_numbers_and_the_options(strong_pair, monkeypatch, error):
    """An EngineError, hence exit code 1, that names what was free, the pools, and what to lower."""
    from treetop.engine import engine

    def fail(*args):
        raise error

    llm = build(strong_pair)
    monkeypatch.setattr(engine, "prefill", fail)
    with pytest.raises(EngineError) as caught:
        llm.generate([[5, 6]], greedy(4))
    for part in ("out of memory while running", "pool full", "--mem-fraction-static", "--max-running-requests"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_runtime_error_keeps_its_type():
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory_explained("x", torch.device("cpu")):
        raise RuntimeError("shapes do not match")


# ---------------------------------------------------------------------------------------------- the start-up log


def test_starting_logs_one_block_with_model_memory_backend_and_graphs(strong_pair, caplog):
    with caplog.at_level(logging.INFO, logger="treetop"):
        llm = build(strong_pair, graphs="sim")
    (text,) = [r.getMessage() for r in caplog.records if r.name == "treetop" and "pool full" in r.getMessage()]
    for part in ("float64 on cpu", "S=5 k=4 T=16", "attention torch", "; not triton", "graphs simulated", "overlap"):
        assert part in text
    layout = llm.engine.layout
    assert f"pool full: {layout.pool_tokens} tokens" in text
    assert f"pool draft: {layout.pool_tokens} tokens" in text


def test_the_use_adds_up():
    use = MemoryUse(replace(LLAMA, pool_tokens=16_000), 2, budget(free=60 * GIB))
    pools = [line for line in use.lines() if line.startswith("pool ")]
    assert len(pools) == 2
    assert "16000 tokens, 1.96 GiB, 131072 B a token" in pools[0]
    assert "total 80.00 GiB" in use.lines()[-1]


def test_what_a_window_saves_is_said():
    """Of a request of 4,000 tokens and one round: all pages but those that window and chunk touch."""
    window = KVGroup(WINDOW, 12, paired(8, 64), 128)
    layout = replace(
        LLAMA, page_size=16, max_context=4000, chunk=256, groups=(*LLAMA.groups, window), pool_tokens=16_000
    )
    kept = -(-(127 + 256) // 16) + 1
    spared = (-(-(4000 + layout.headroom) // 16) - kept) * 16
    (line,) = [each for each in MemoryUse(layout, 2, budget(60 * GIB)).lines() if each.startswith("pool window")]
    assert (
        f"window of 128 are given back, which saves {spared} tokens or {spared * 12 * 2 * 8 * 64 * 2 / 2**20:.2f} MiB"
        in line
    )


def test_nothing_is_logged_unless_asked_for(capsys):
    """A library is silent by default."""
    LLM(max_running_requests=1).generate("x", greedy(1))
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")
