"""Backends of other libraries: what is refused and why, how each library is called, and what `auto` chooses.

The libraries are stand-ins with the vendors' layouts (fake_libraries.py); test_gpu_backends.py has the real ones.
"""

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.scenes import scene
from treetop import LLM
from treetop.attention import auto as choosing
from treetop.attention.auto import AutoBackend, Timing, choose, load_table, make_backend, nearest_measured
from treetop.attention.capabilities import BackendRefusal, Capabilities, GroupNeed, Need
from treetop.attention.registry import BACKENDS, refusal, require
from treetop.attention.torch_backend import TorchBackend
from treetop.kernels.attention import attention_config as launching
from treetop.kernels.attention.attention import most_seen
from treetop.kernels.attention.attention_config import CallShape, Launch, launch_by_formula
from treetop.kernels.gemm import skinny_gemm
from treetop.kernels.triton_guard import GpuTraits, gpu_traits
from treetop.kernels.tuning import TunedTable, nearest
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL
from treetop.types.options import options_of
from treetop.types.phase import Phase

CPU = torch.device("cpu")
GROUP = GroupNeed(FULL, 6, 2, 16)


# ---------------------------------------------------------------------------------------------------- capabilities


def serve_everywhere(monkeypatch, *names):
    """As if machine and libraries were there."""
    for name in names:
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], probes=()))


def test_the_option_offers_exactly_the_backends_that_exist():
    assert set(options_of(EngineConfig)["attention_backend"].choices) == {"auto", *BACKENDS}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fa3", {"dtype": torch.float32}, "it computes in bfloat16 and float16, not in float32; use --dtype bfloat16"),
        ("flashinfer", {"dtype": torch.float64}, "not in float64; use --dtype bfloat16 or --attention-backend torch"),
        ("triton", {"dtype": torch.float64}, "not in float64; use --dtype float32 or --attention-backend torch"),
        ("fa3", {"groups": (replace(GROUP, head_dim=20),)}, r"no kernel for heads 20 wide \(KV group full\)"),
        ("flashinfer", {"groups": (GROUP,)}, "no kernel for heads 16 wide"),
        ("triton", {"groups": (replace(GROUP, head_dim=640),)}, "heads 640 wide .*; use --attention-backend torch"),
        ("triton", {"groups": (GroupNeed(FULL, 6, 1, 832, latent=768),)}, r"\(MLA\) with latents 768 wide .*torch"),
        ("flashinfer", {"groups": (GroupNeed(FULL, 6, 1, 576, latent=512),)}, r"compressed attention \(MLA\) \(KV"),
        ("fa3", {"page_size": 128}, "serves pages of 1, 2, 4, 8, 16, 32, 64 tokens, not of 128; use --page-size 64"),
    ],
)
def test_a_limit_is_refused_with_the_reason_and_the_option(monkeypatch, name, changes, message):
    """Every limit of the table, on a machine that has everything."""
    serve_everywhere(monkeypatch, *BACKENDS)
    need = replace(Need(torch.bfloat16, CPU, 16, (replace(GROUP, head_dim=64),)), **changes)
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: .*{message}"):
        require(name, need)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_the_table_admits_is_not_refused(monkeypatch, name):
    serve_everywhere(monkeypatch, *BACKENDS)
    able = BACKENDS[name].capabilities
    compressed = (GroupNeed(DRAFT, 6, 1, 576, latent=512),) if able.compressed_only else ()
    for dtype in able.dtypes:
        for dim in able.head_dims or (16, 80):
            for page in able.page_sizes or (1, 128):
                need = Need(dtype, CPU, page, (replace(GROUP, head_dim=dim, window=7), *compressed))
                assert refusal(name, need) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "torch"])
def test_a_cpu_is_refused_by_every_gpu_backend(name, dtype):
    """Whatever the dtype: nobody is sent to another one, only to find that it takes a GPU."""
    problem = refusal(name, Need(dtype, CPU))
    assert isinstance(problem, BackendRefusal)
    assert "CUDA device" in problem.reason or "Triton is not installed" in problem.reason
    assert problem.remedy == "use --attention-backend torch"


def test_other_generations_of_gpus_are_refused_by_fa3(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    probe = BACKENDS["fa3"].probes[1]
    assert "compute capability 9.x, this one has 8.0" in probe(torch.device("cuda"))


def test_an_engine_refuses_before_it_reads_weights(weak_pair, monkeypatch):
    """The error comes before the loader is asked for anything."""
    monkeypatch.setattr("treetop.models.registry.TargetSpec.load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"--attention-backend fa3: .*; use --attention-backend torch"):
        LLM(str(weak_pair.target), None, attention_backend="fa3", device="cpu")


# ------------------------------------------------------------------------------------------------------------ auto


class Named:
    """A backend that says its name."""

    def __init__(self, name):
        self.name, self.begun = name, 0

    def begin(self, metadata):
        self.begun += 1
        return self.name

    def plan(self, begun, metadata):
        return begun

    def prefix_tail(self, q, kv, plan, tail, scale, sinks=None):
        return plan

    def causal(self, q, kv, plan, scale, sinks=None):
        return plan

    def plan_round(self, round):
        self.round = round


def call_class(s, causal=False):
    heads, kv_heads = s.q.shape[2], s.tail.data.shape[3]
    rows, n, _, dim = s.q.shape
    return CallShape(rows, n, kv_heads, heads // kv_heads, dim, 2, s.metadata.max_kv_len, causal).shape_class


def auto_of(monkeypatch, s, classes, window=None, num_sms=8, serves=("triton", "fa3", "flashinfer")):
    serve_everywhere(monkeypatch, *serves)
    group = GroupNeed(FULL, s.q.shape[2], s.tail.data.shape[3], 64, window)
    made = {}

    def make(name, need):
        made[name] = Named(name)
        return made[name]

    for name in BACKENDS:
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], make=partial(make, name)))
    monkeypatch.setattr(choosing, "gpu_traits", lambda device: GpuTraits(8, True, 227 << 10))
    return AutoBackend(TunedTable(num_sms, "2026-01-01", classes), Need(torch.bfloat16, CPU, 4, (group,))), made


def test_auto_runs_each_class_on_its_fastest_backend(monkeypatch):
    """By phase and shape; with the reason; other heads run on Triton; a phase begins once a backend."""
    s, c = scene(dim=64), scene(dim=64, causal=True, n=9)
    classes = {
        call_class(s): {"triton": Timing(30.0), "fa3": Timing(20.0)},
        call_class(c, causal=True): {"triton": Timing(10.0), "fa3": Timing(20.0)},
    }
    auto, made = auto_of(monkeypatch, s, classes)
    assert set(made) == {"triton", "fa3"}
    prefix = auto.begin(s.metadata)
    plans = [auto.plan(prefix, s.metadata) for _ in range(2)]
    assert [auto.prefix_tail(s.q, s.kv, plan, s.tail, 1.0) for plan in plans] == ["fa3", "fa3"]
    assert made["fa3"].begun == 1
    assert auto.reasons[call_class(s)] == f"{call_class(s)}: fa3 20.0, triton 30.0 us (2026-01-01)"
    plan = auto.plan(auto.begin(c.metadata), c.metadata)
    assert auto.causal(c.q, c.kv, plan, 1.0) == "triton"
    fewer = scene(dim=64, causal=True, n=3)
    plan = auto.plan(auto.begin(fewer.metadata), fewer.metadata)
    assert plan.backend.name == "triton"
    assert "not measured" in auto.reasons[call_class(fewer, causal=True)]


@pytest.mark.parametrize(
    ("keys", "measured", "want"),
    [
        (2048, (1024, 2048, 8192), 2048),
        (4096, (1024, 2048, 8192), 2048),  # equally near: the smaller
        (16384, (1024, 2048, 8192), 8192),
        (131072, (1024, 2048, 8192), 8192),
        (64, (1024, 2048, 8192), 1024),
        (65536, (2048, 131072), 131072),
        (64, (), None),
    ],
)
def test_keys_that_were_not_measured_take_the_nearest_that_were(keys, measured, want):
    """By powers of two, within the same kind, heads, rows and queries."""
    others = {
        "tail h2x3x64e2 rows4 n8 keys4096",
        "causal h2x3x64e2 rows4 n4 keys65536",
        f"tail h2x3x64e2 rows2 n4 keys{keys}",
    }
    classes = others | {f"tail h2x3x64e2 rows4 n4 keys{each}" for each in measured}
    found = nearest(f"tail h2x3x64e2 rows4 n4 keys{keys}", classes, ("keys",))
    assert found == (want and f"tail h2x3x64e2 rows4 n4 keys{want}")


def test_auto_answers_for_a_class_by_the_nearest_one_and_says_so(monkeypatch):
    """Also for more queries than were measured."""
    s = scene(dim=64)
    near = call_class(s).rsplit(" keys", 1)[0] + " keys8192"
    assert near != call_class(s)
    auto, _ = auto_of(monkeypatch, s, {near: {"triton": Timing(30.0), "fa3": Timing(20.0)}})
    assert auto.plan(auto.begin(s.metadata), s.metadata).backend.name == "fa3"
    assert auto.reasons[call_class(s)] == f"{call_class(s)}: fa3 20.0, triton 30.0 us in {near} (2026-01-01)"
    wide = scene(dim=64, n=12, t=12)
    assert auto.plan(auto.begin(wide.metadata), wide.metadata).backend.name == "fa3"


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("causal h8x4x128e2 rows8 n8192 keys32768", "rows8 n8192 keys32768"),  # measured
        ("causal h8x4x128e2 rows32 n8192 keys131072", "rows8 n8192 keys32768"),  # beyond all that was
        ("causal h8x4x128e2 rows2 n4096 keys8192", "rows1 n1024 keys8192"),  # rows and queries first, both
        ("causal h8x4x128e2 rows4 n8192 keys16384", "rows8 n8192 keys8192"),  # of equal keys the fewer
        ("causal h8x4x128e2 rows8 n1024 keys1024", "rows8 n512 keys1024"),
        ("causal h8x4x128e2 rows8 n256 keys1024", None),  # fewer queries a row than were measured
        ("causal h8x8x128e2 rows8 n8192 keys32768", None),  # other heads
        ("tail h8x4x128e2 rows128 n128 keys2048", "rows64 n64 keys8192"),  # a tree wider than any
        ("tail h8x4x128e2 rows2 n1 keys2048", "rows1 n1 keys2048"),  # of equal rows the fewer
    ],
)
def test_a_class_that_was_not_measured_takes_the_nearest_that_was(wanted, near):
    """By kind and heads; rows and queries count before keys; so the largest classes answer for all beyond them."""
    prefill = ["rows1 n512 keys1024", "rows1 n1024 keys8192", "rows8 n512 keys1024"]
    prefill += ["rows8 n8192 keys8192", "rows8 n8192 keys32768"]
    rounds = ["rows1 n1 keys2048", "rows4 n1 keys2048", "rows64 n64 keys8192"]
    measured = [f"causal h8x4x128e2 {each}" for each in prefill] + [f"tail h8x4x128e2 {each}" for each in rounds]
    found = nearest_measured(wanted, TunedTable(8, "", {name: {} for name in measured}))
    assert found == (near and f"{wanted.split(' rows', maxsplit=1)[0]} {near}")


def test_long_prompts_of_several_rows_run_on_fa3_where_it_is_installed():
    """By the committed table, up to the largest prefills and past them."""
    for sizes in ("rows1 n2048 keys32768", "rows1 n8192 keys32768", "rows8 n1024 keys8192", "rows16 n8192 keys131072"):
        name, why = choose(load_table(), f"causal h8x4x128e2 {sizes}", frozenset({"triton", "fa3"}))
        assert name == "fa3", why


def test_a_prefill_leaves_triton_for_less_than_a_round_does(monkeypatch):
    """Its class goes by the keys that there are, a round's by the most there may be."""
    s, c = scene(dim=64), scene(dim=64, causal=True, n=9)
    near = {"triton": Timing(20.0), "fa3": Timing(19.0)}
    auto, _ = auto_of(monkeypatch, s, {call_class(s): near, call_class(c, causal=True): near})
    assert auto.plan(auto.begin(s.metadata), s.metadata).backend.name == "triton"
    assert auto.plan(auto.begin(c.metadata), c.metadata).backend.name == "fa3"


def test_a_launch_of_the_table_serves_other_context_limits(monkeypatch):
    """What was measured, and its nearest neighbour with no more splits than blocks; the formula for all else."""
    gpu, call = GpuTraits(132, True, 227 << 10), CallShape(1, 16, 8, 4, 128, 2, 2048)
    known = {2048: Launch(64, 32, 16, 4, 3), 131072: Launch(64, 64, 9, 4, 3)}
    classes = {replace(call, max_kv_len=keys).shape_class: launch for keys, launch in known.items()}
    monkeypatch.setattr(launching, "load_table", lambda: TunedTable(132, "", classes))
    monkeypatch.setattr(launching, "_measured", launching._measured.__wrapped__)
    choose = launching.choose_launch.__wrapped__
    for max_kv_len, keys, splits in (
        (2048, 2048, 16),
        (1025, 2048, 16),
        (16384, 2048, 16),
        (16385, 131072, 9),
        (1 << 20, 131072, 9),
        (100, 2048, 4),
        (0, 2048, 1),
    ):
        want = replace(known[keys], splits=splits, overlap=True)
        assert choose(replace(call, max_kv_len=max_kv_len), gpu) == want, max_kv_len
    for other in (replace(call, rows=3), replace(call, n=4), replace(call, head_dim=64), replace(call, causal=True)):
        assert choose(other, gpu) == launch_by_formula(other, gpu)
    elsewhere = replace(gpu, num_sms=84)
    assert choose(call, elsewhere) == launch_by_formula(call, elsewhere)


def test_auto_never_takes_what_is_refused_or_measured_elsewhere(monkeypatch):
    """A library that is missing, another GPU, and a window: Triton."""
    s = scene(dim=64)
    classes = {call_class(s): {"triton": Timing(30.0), "fa3": Timing(20.0)}}
    for options in ({"serves": ("triton",)}, {"num_sms": 132}, {"window": 5}):
        auto, _ = auto_of(monkeypatch, s, classes, **options)
        metadata = replace(s.metadata, window=options.get("window"))
        assert auto.plan(auto.begin(metadata), metadata).backend.name == "triton"
        monkeypatch.undo()


def test_auto_weighs_the_cost_of_planning_on_the_host(monkeypatch):
    """A backend that is faster in a call but plans for half a millisecond is not worth it; a cheap plan is."""
    s = scene(dim=64)
    dear, cheap = Timing(20.0, plan_us=500.0), Timing(20.0, plan_us=32.0)
    for timing, want in ((dear, "triton"), (cheap, "flashinfer")):
        auto, made = auto_of(monkeypatch, s, {call_class(s): {"triton": Timing(30.0), "flashinfer": timing}})
        assert auto.plan(auto.begin(s.metadata), s.metadata).backend.name == want
        assert auto.capabilities.needs_host_extents == (want == "flashinfer")
        assert auto.capabilities.captures_first_call == (want == "triton")
        if want == "flashinfer":
            auto.plan_round("round")
            assert made["flashinfer"].round == "round"
        monkeypatch.undo()


@pytest.mark.parametrize(("fa3_us", "want"), [(19.0, "triton"), (17.0, "fa3")])
def test_auto_leaves_triton_only_for_a_margin(monkeypatch, fa3_us, want):
    """Twenty microseconds on Triton: nineteen are too little a gain, for rows shorter than their class lose it."""
    s = scene(dim=64)
    auto, _ = auto_of(monkeypatch, s, {call_class(s): {"triton": Timing(20.0), "fa3": Timing(fa3_us)}})
    assert auto.plan(auto.begin(s.metadata), s.metadata).backend.name == want
    assert auto.capabilities.captures_first_call  # of both


def test_the_committed_tables_are_well_formed():
    """Classes that the code can form, times that are positive, backends that exist, launches with every field."""
    for name, timings in load_table().entries.items():
        kind, *rest = name.split()
        assert len(rest) == 4
        assert kind in ("tail", "causal")
        assert "triton" in timings
        assert set(timings) <= set(BACKENDS)
        assert all(timing.us > 0 for timing in timings.values())
    classes = json.loads(launching.TABLE.read_text(encoding="utf-8"))["classes"]
    assert len(classes) == len(launching.load_table().entries) > 50
    for name, entry in classes.items():
        assert len(name.split()) == 5
        assert {"block_m", "block_n", "splits", "num_warps", "num_stages", "us"} <= set(entry)
        assert entry["us"] <= entry["formula_us"]


def test_the_committed_launches_of_products_can_be_launched():
    """Shares of k are whole blocks, gated ones have one split, blocks are powers of two, and all fit a Hopper GPU."""
    table = skinny_gemm.load_table()
    assert table.num_sms == 132
    launches = {key: entry["launch"] for key, entry in table.entries.items() if "launch" in entry}
    assert len(launches) > 30
    for (n, k, gated, rows), cut in launches.items():
        launch = cut and skinny_gemm.RowsLaunch(*cut)
        assert rows == skinny_gemm.row_class(rows) <= skinny_gemm.MAX_ROWS
        if launch is not None:
            assert k % (launch.splits * launch.block_k) == 0
            assert launch.splits == 1 or not gated
            assert n % 64 == 0
            assert all(x & (x - 1) == 0 for x in (launch.block_n, launch.block_k, launch.num_warps))
            assert skinny_gemm.shared_bytes(launch, rows, gated) <= 227 << 10


@pytest.mark.parametrize("shared", [48 << 10, 99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("gated", [False, True])
def test_products_fit_the_shared_memory_of_any_gpu(shared, gated):
    """No tiles and nothing from the table on a GPU that was not measured; what does not fit is the vendor's product."""
    gpu = GpuTraits(num_sms=84, can_overlap=False, shared_bytes=shared)
    for rows in (1, 16, 32, 64, 100):
        launch = skinny_gemm.choose_launch(rows, 28672, 4096, gated, gpu)
        assert launch is None or skinny_gemm.shared_bytes(launch, rows, gated) <= shared
        assert launch is None or not launch.tiled
    measured = GpuTraits(132, True, 227 << 10)
    assert skinny_gemm.choose_launch(32, 28672, 4096, True, measured).tiled


@pytest.mark.parametrize(("major", "kib", "queries"), [(8, 99, 16), (12, 99, 16), (9, 227, 64), (10, 227, 16)])
def test_planes_of_codes_fit_the_shared_memory_of_the_card(monkeypatch, major, kib, queries):
    """What its properties say of the card decides: with 99 KiB, or where products keep their sums in a memory of their
    own, fewer queries, and nothing on its way ahead.

    How much each launch takes is in `make check-kernels`.
    """
    card = SimpleNamespace(major=major, multi_processor_count=128, shared_memory_per_block_optin=kib << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", None)
    gpu, call = gpu_traits(torch.device("cuda")), CallShape(8, 16, 1, 16, 576, 2, 8192)
    launch = launching.for_coded_planes(launching.choose_launch(call, gpu), gpu)
    assert (launch.block_m, launch.num_stages) == (queries, 1 if queries == 16 else 2)


def test_blocks_are_for_warp_groups_only_where_the_card_has_them(monkeypatch):
    """Elsewhere operands lie in registers beside the sums, so 64 queries take eight warps; an H100's launches stay."""
    call = CallShape(8, 16, 8, 4, 128, 2, 8192)
    for major, kib, warps in ((8, 163, 8), (8, 99, 8), (12, 99, 8), (9, 227, 4), (10, 227, 4)):
        card = SimpleNamespace(major=major, multi_processor_count=128, shared_memory_per_block_optin=kib << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        monkeypatch.setattr(torch.version, "hip", None)
        launch = launch_by_formula(call, gpu_traits(torch.device("cuda")))
        assert (launch.block_m, launch.num_warps) == (64, warps)


def test_a_launch_of_a_window_is_that_of_the_keys_that_a_query_sees():
    """Of a prefill that of all keys of a row."""
    s = scene(n=3, t=4, max_kv_len=70)
    for window, most in ((None, 70), (16, 16), (400, 70)):
        seen = replace(s.metadata, window=window)
        assert most_seen(seen) == most
        assert most_seen(replace(seen, mask=None, tail_positions=None)) == 70


def test_launches_for_codes_have_room():
    """Half the queries where codes are widened in too few registers, of the widest heads by one block at a time, and no
    product of tensor memory's. An H100's launches of narrow heads keep their queries.

    How much each launch takes is in `make check-kernels`.
    """
    hopper, small = GpuTraits(132, True, 227 << 10, True), GpuTraits(128, False, 99 << 10, True)
    blackwell = GpuTraits(148, True, 227 << 10, True, True)
    for causal, n in ((False, 16), (True, 512)):
        for gpu, dim, block_m, stages in (
            (hopper, 128, 64, {2, 3}),
            (blackwell, 128, 32, {2, 3}),
            (small, 128, 64, {2, 3}),
            (hopper, 256, 64, {2}),
            (blackwell, 256, 32, {2}),
            (small, 256, 32, {2}),
            (hopper, 512, 16, {1}),
            (blackwell, 512, 16, {1}),
            (small, 512, 16, {1}),
        ):
            call = CallShape(8, n, 2, 8, dim, 2, 8192, causal)
            launch = launching.for_codes(launch_by_formula(call, gpu), call, gpu)
            assert launch.block_m == block_m, (gpu, dim)
            assert launch.num_stages in stages, (gpu, dim)


def test_auto_on_a_cpu_is_the_torch_backend():
    assert isinstance(make_backend("auto", Need(torch.float32, CPU)), TorchBackend)


def test_capabilities_are_plain_data():
    """Frozen, and every field a value that can be printed as a table."""
    with pytest.raises(AttributeError):
        BACKENDS["fa3"].capabilities.captures = False
    assert {field.name for field in fields(Capabilities)} >= {"dtypes", "captures", "needs_host_extents", "phases"}


def test_the_documentation_shows_the_capability_table():
    """docs/backends.md has one row a backend, with the values of the code."""
    text = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
    for name, backend in BACKENDS.items():
        able = backend.capabilities
        dims = "any" if able.head_dims is None else ", ".join(str(dim) for dim in able.head_dims)
        if able.head_dims is not None and len(able.head_dims) > 3:
            dims = f"{min(able.head_dims)} to {max(able.head_dims)}"
        cells = [
            name,
            ", ".join(str(dtype).removeprefix("torch.") for dtype in able.dtypes),
            dims,
            "any" if able.page_sizes is None else ", ".join(str(size) for size in able.page_sizes),
            "own" if able.own_windows else "shared",
            "own" if able.own_sinks else "shared",
            "yes" if able.captures else "no",
            "yes" if able.needs_host_extents else "no",
        ]
        assert f"| {' | '.join(cells)} |" in text
        assert able.phases == tuple(Phase)
