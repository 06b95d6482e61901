"""Backends of other libraries: what is refused and why, how each library is called, and what `auto` chooses.

The libraries are stand-ins with the vendors' layouts (fake_libraries.py); test_gpu_backends.py has the real ones.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import fake_libraries
from fake_libraries import BUILDS, FakeFlashInfer, register_fa3
from scenes import dense_answer, scene
from treetop import LLM
from treetop.attention import capabilities, libraries
from treetop.attention.auto import AutoBackend, ChoiceTable, Timing, load_table
from treetop.attention.capabilities import CAPABILITIES, Capabilities, GroupNeed, Need, Refusal, refusal, require
from treetop.attention.contract import Queries, RoundExtents
from treetop.attention.flash_pages import FlashPages
from treetop.attention.flashinfer_pages import FlashInferPages, HostPages
from treetop.attention.libraries import FlashOp, PagedCall
from treetop.attention.library_backend import LibraryBackend
from treetop.attention.registry import BACKENDS, make_backend
from treetop.attention.torch_backend import TorchBackend
from treetop.kernels.kv import PageTable
from treetop.kernels.launch import CallShape, launch_table
from treetop.types.config import CHOICES
from treetop.types.errors import ConfigError
from treetop.types.ids import FULL
from treetop.types.phase import Phase

CPU = torch.device("cpu")
GROUP = GroupNeed(FULL, 6, 2, 16)
VARIETY = [
    {},
    {"n": 1, "t": 1, "page_size": 1},
    {"n": 3, "t": 9, "heads": 2, "page_size": 16},
    {"n": 7, "t": 7, "heads": 4, "kv_heads": 4, "dim": 24, "page_size": 64, "bound": 130},
    {"window": 6},
]
CAUSAL = [{"n": 1}, {"n": 9, "page_size": 1}, {"n": 12, "page_size": 16, "bound": 90}, {"n": 12, "window": 5}]


@pytest.fixture(scope="module", params=BUILDS)
def fa3(request):
    library = register_fa3(request.param)
    operators = getattr(torch.ops, request.param)
    scheduler = getattr(operators, "get_scheduler_metadata", None)
    yield FlashOp(operators.fwd.default, scheduler and scheduler.default, request.param)
    library._destroy()


def fa3_backend(op, dtype=torch.float32):
    return LibraryBackend("fa3", FlashPages(op, kernels=False), TorchBackend(dtype, CPU), None)


def flashinfer_backend(s):
    need = GroupNeed(FULL, s.q.shape[2], s.tail.data.shape[3], s.q.shape[3])
    pages = FlashInferPages(s.q.dtype, CPU, (need,), FakeFlashInfer)
    return LibraryBackend("flashinfer", pages, TorchBackend(s.q.dtype, CPU), None)


def usable(s):
    """Where PyTorch serves the windows, what no query sees must be finite: it multiplies it by 0."""
    if s.queries.window is None:
        return s.view, s.kv
    return replace(s.view, table=PageTable(FULL, s.clean_table)), s.clean


def check_backend(backend, options):
    """prefix, prefix_tail with and without a sink: against dense attention."""
    s = scene(**options)
    view, kv = usable(s)
    plan = backend.plan(backend.begin(view), s.queries)
    torch.manual_seed(1)
    for sinks in (None, torch.randn(s.q.shape[2])):
        want = dense_answer(s, with_tail=True, sinks=sinks)[0]
        got = backend.prefix_tail(s.q, kv, plan, s.tail, s.scale, sinks)
        torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
    out, lse = backend.prefix(s.q, kv, plan, s.scale)
    want, want_lse = dense_answer(s, with_tail=False)
    torch.testing.assert_close(out, want, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    assert lse.dtype == torch.float32
    assert (lse[-1] == float("-inf")).all()


def check_causal(backend, options):
    s = scene(**options, causal=True)
    view, kv = usable(s)
    plan = backend.plan_causal(backend.begin(view), s.queries.positions, s.queries.window)
    torch.manual_seed(1)
    for sinks in (None, torch.randn(s.q.shape[2])):
        out = backend.causal(s.q, kv, plan, s.scale, sinks)
        want = dense_answer(s, with_tail=False, sinks=sinks)[0]
        torch.testing.assert_close(out[s.real], want[s.real], atol=3e-6, rtol=0)
        if s.queries.window is None:
            assert not out[~s.real].any(), "padding is 0, whatever the library left there"


# ------------------------------------------------------------------------------------------------- library calls


@pytest.mark.parametrize("options", VARIETY, ids=str)
def test_fa3_prefix_and_tail_equal_dense_attention(fa3, options):
    """Layouts, empty rows, unused columns and slots, grouped heads, pages, windows by the other path."""
    check_backend(fa3_backend(fa3), options)


@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_fa3_causal_equals_dense_attention(fa3, options):
    """A padded batch: queries end where `seqused_q` says, and the last one is aligned to the last key."""
    check_causal(fa3_backend(fa3), options)


def test_fa3_reads_pages_in_place_and_one_table_a_phase(fa3):
    """K and V are views of the pool, and two layers of a phase share table and lengths."""
    s = scene()
    backend = fa3_backend(fa3)
    plan = backend.plan(backend.begin(s.view), s.queries)
    fake_libraries.calls.clear()
    for _ in range(2):
        backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    first, second = fake_libraries.calls
    assert first["k"].untyped_storage().data_ptr() == s.kv.data.untyped_storage().data_ptr()
    assert first["v"].data_ptr() - first["k"].data_ptr() == 4 * 2 * 16  # one slot's K, float32
    assert first["page_table"].data_ptr() == second["page_table"].data_ptr()
    assert first["seqused_k"].data_ptr() == second["seqused_k"].data_ptr()
    assert first["max_seqlen_k"] == s.view.bound
    assert first["q"].data_ptr() == s.q.data_ptr()
    assert first["scheduler_metadata"] is second["scheduler_metadata"]
    assert (first["scheduler_metadata"] is None) == (len(fa3.schemas) == 1)


@pytest.mark.parametrize("options", VARIETY, ids=str)
def test_flashinfer_prefix_and_tail_equal_dense_attention(options):
    """A plan from host lengths, base 2, and a row without keys that leaves garbage."""
    check_backend(flashinfer_backend(scene(**options)), options)


@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_flashinfer_causal_equals_dense_attention(options):
    """Queries are packed, and padding comes back as 0."""
    check_causal(flashinfer_backend(scene(**options, causal=True)), options)


def test_a_flashinfer_round_is_planned_anew_from_the_lengths_of_its_rows():
    """`plan_round` after lengths and tables have changed gives what a fresh plan would; other phases are left alone."""
    s = scene()
    backend = flashinfer_backend(s)
    FakeFlashInfer.made.clear()
    plan = backend.plan(backend.begin(s.view), s.queries)
    other = Queries(s.queries.positions[:, :2], s.queries.tail_positions, s.queries.mask[:, :2])
    backend.plan(backend.begin(replace(s.view, phase=Phase.EXTEND)), other)
    verify, extend = FakeFlashInfer.made
    committed = torch.zeros(4, dtype=torch.long)
    committed[s.view.rows] = torch.tensor([3, 0, 17, 0])
    s.view.table.data.copy_(s.clean_table)
    backend.plan_round(RoundExtents(s.view.rows, committed, {Phase.VERIFY: s.q.shape[1]}))
    assert (verify.plans, extend.plans) == (2, 1)
    fresh = replace(s.view, extent=committed[s.view.rows])
    part = plan.attend(s.q, s.clean, s.scale)
    want, want_lse = TorchBackend(torch.float32, CPU).prefix(
        s.q,
        s.clean,
        TorchBackend(torch.float32, CPU).plan(TorchBackend(torch.float32, CPU).begin(fresh), s.queries),
        s.scale,
    )
    out, lse = replace(part, extent=fresh.extent).normalised()
    torch.testing.assert_close(out, want, atol=3e-6, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


def test_host_pages_are_flashinfers_arrays():
    """indptr over used pages, the pages row by row, and the tokens on the last page: 0 without keys, p when full."""
    pages = HostPages([5, 0, 8, 1], torch.arange(12, dtype=torch.int32).view(4, 3), 4)
    indptr, indices, last = pages.arrays()
    assert indptr.tolist() == [0, 2, 2, 4, 5]
    assert indices.tolist() == [0, 1, 6, 7, 9]
    assert last.tolist() == [1, 0, 4, 1]
    assert indptr.dtype == indices.dtype == last.dtype == torch.int32


# ------------------------------------------------------------------------------------------- finding the libraries


def test_fa3_is_taken_from_the_named_file_first(monkeypatch, tmp_path):
    """The environment variable wins; a file that is none is an error that names it."""
    library = register_fa3("_vllm_fa3_C")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setenv(libraries.FA3_FILE, "/some/fa3.so")
    assert libraries.find_fa3().source == "TREETOP_FA3_LIBRARY=/some/fa3.so (torch.ops._vllm_fa3_C.fwd)"
    assert libraries.fa3_problem(CPU) is None
    library._destroy()
    monkeypatch.undo()
    wrong = tmp_path / "fa3.so"
    wrong.write_text("no library")
    monkeypatch.setenv(libraries.FA3_FILE, str(wrong))
    assert f"FlashAttention-3 was not found: TREETOP_FA3_LIBRARY={wrong} cannot be used" in libraries.fa3_problem(CPU)


def test_fa3_that_is_not_installed_says_what_was_looked_for(monkeypatch):
    monkeypatch.delenv(libraries.FA3_FILE, raising=False)
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    text = libraries.fa3_problem(CPU)
    assert "none of flash_attn_interface, sgl_kernel, vllm is installed and TREETOP_FA3_LIBRARY names no file" in text


def test_an_operator_without_what_is_needed_is_refused():
    library = torch.library.Library("treetop_odd", "DEF")
    library.define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal) -> Tensor[]")
    with pytest.raises(LookupError, match="no operand page_table, seqused_k, seqused_q"):
        FlashOp(torch.ops.treetop_odd.fwd.default, None, "odd")
    library._destroy()


def test_the_probe_of_fa4_believes_results_not_versions(monkeypatch):
    """A right library passes, a wrong or failing one is refused with what happened."""

    def right(call: PagedCall):
        given = {"q": call.q, "k": call.k, "v": call.v, "page_table": call.table, "seqused_k": call.lengths}
        given |= {"seqused_q": None, "softmax_scale": call.scale, "is_causal": False, "max_seqlen_k": call.bound}
        given |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
        out, lse, *_ = fake_libraries.fa3(given)
        return out, lse

    def wrong(call: PagedCall):
        out, lse = right(replace(call, table=call.table.flip(0)))
        return out, lse

    def failing(call: PagedCall):
        raise AssertionError("Paged KV not supported on SM 9.0\nmore")

    monkeypatch.setattr(libraries.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    probe = libraries.fa4_problem.__wrapped__
    for attention, want in (
        (right, None),
        (wrong, "gives wrong results here"),
        (failing, "failed on compute capability 9.0: AssertionError: Paged KV not supported on SM 9.0"),
    ):
        monkeypatch.setattr(libraries, "_call_fa4", attention)
        got = probe(CPU)
        assert got is None if want is None else got.endswith(want) or want in got


# ---------------------------------------------------------------------------------------------------- capabilities


def serve_everywhere(monkeypatch, *names):
    """As if machine and libraries were there."""
    monkeypatch.setattr(capabilities, "_PROBES", {**capabilities._PROBES, **dict.fromkeys(names, ())})


def test_the_option_offers_exactly_the_backends_that_exist():
    assert set(CHOICES["attention_backend"]) == {"auto", *BACKENDS}
    assert set(CAPABILITIES) == set(BACKENDS) == set(capabilities._PROBES)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fa3", {"dtype": torch.float32}, "it computes in bfloat16 and float16, not in float32; use --dtype bfloat16"),
        ("flashinfer", {"dtype": torch.float64}, "not in float64; use --dtype bfloat16 or --attention-backend torch"),
        ("triton", {"dtype": torch.float64}, "not in float64; use --dtype float32 or --attention-backend torch"),
        ("fa3", {"groups": (replace(GROUP, head_dim=20),)}, r"no kernel for heads 20 wide \(KV group full\)"),
        ("flashinfer", {"groups": (GROUP,)}, "no kernel for heads 16 wide"),
        ("triton", {"groups": (replace(GROUP, head_dim=320),)}, "heads 320 wide .*; use --attention-backend torch"),
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
    able = CAPABILITIES[name]
    for dtype in able.dtypes:
        for dim in able.head_dims or (16, 80):
            for page in able.page_sizes or (1, 128):
                need = Need(dtype, CPU, page, (replace(GROUP, head_dim=dim, window=7),))
                assert refusal(name, need) is None


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "torch"])
def test_a_cpu_is_refused_by_every_gpu_backend(name):
    able = CAPABILITIES[name]
    problem = refusal(name, Need(able.dtypes[0], CPU))
    assert isinstance(problem, Refusal)
    assert "CUDA device" in problem.reason or "Triton is not installed" in problem.reason
    assert problem.remedy == "use --attention-backend torch"


def test_other_generations_of_gpus_are_refused_by_fa3(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    probe = capabilities._PROBES["fa3"][1]
    assert "compute capability 9.x, this one has 8.0" in probe(torch.device("cuda"))


def test_an_engine_refuses_before_it_reads_weights(weak_pair, monkeypatch):
    """The error comes before the loader is asked for anything."""
    monkeypatch.setattr("treetop.engine.build.load_target", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(
        ConfigError, match="--attention-backend fa3: it computes in bfloat16 and float16, not in float32"
    ):
        LLM(str(weak_pair.target), None, attention_backend="fa3", device="cpu")


# ------------------------------------------------------------------------------------------------------------ auto


class Named:
    """A backend that says its name."""

    def __init__(self, name):
        self.name, self.begun = name, 0

    def begin(self, view):
        self.begun += 1
        return self.name

    def plan(self, prefix, queries):
        return prefix

    def plan_causal(self, prefix, positions, window):
        return prefix

    def prefix_tail(self, q, kv, plan, tail, scale, sinks=None):
        return plan

    def causal(self, q, kv, plan, scale, sinks=None):
        return plan

    def plan_round(self, round):
        self.round = round


def call_class(s, causal=False):
    heads, kv_heads = s.q.shape[2], s.tail.data.shape[3]
    rows, n, _, dim = s.q.shape
    return CallShape(rows, n, kv_heads, heads // kv_heads, dim, 2, s.view.bound, causal).shape_class


def auto_of(monkeypatch, s, classes, window=None, num_sms=8, serves=("triton", "fa3", "flashinfer")):
    serve_everywhere(monkeypatch, *serves)
    group = GroupNeed(FULL, s.q.shape[2], s.tail.data.shape[3], 64, window)
    made = {}

    def make(name, need):
        made[name] = Named(name)
        return made[name]

    table = ChoiceTable(num_sms, "2026-01-01", classes)
    return AutoBackend(table, Need(torch.bfloat16, CPU, 4, (group,)), make), made


def test_auto_runs_each_class_on_its_fastest_backend(monkeypatch):
    """By phase and shape; with the reason; what was not measured runs on Triton; a phase begins once a backend."""
    s, c = scene(dim=64), scene(dim=64, causal=True, n=9)
    classes = {
        call_class(s): {"triton": Timing(30.0), "fa3": Timing(20.0)},
        call_class(c, causal=True): {"triton": Timing(10.0), "fa3": Timing(20.0)},
    }
    auto, made = auto_of(monkeypatch, s, classes)
    assert set(made) == {"triton", "fa3"}
    prefix = auto.begin(s.view)
    plans = [auto.plan(prefix, s.queries) for _ in range(2)]
    assert [auto.prefix_tail(s.q, s.kv, plan, s.tail, 1.0) for plan in plans] == ["fa3", "fa3"]
    assert made["fa3"].begun == 1
    assert auto.reasons[call_class(s)] == f"{call_class(s)}: fa3 20.0, triton 30.0 us (2026-01-01)"
    plan = auto.plan_causal(auto.begin(c.view), c.queries.positions, None)
    assert auto.causal(c.q, c.kv, plan, 1.0) == "triton"
    wide = scene(dim=64, n=12, t=12)
    plan = auto.plan(auto.begin(wide.view), wide.queries)
    assert auto.prefix_tail(wide.q, wide.kv, plan, wide.tail, 1.0) == "triton"
    assert "not measured" in auto.reasons[call_class(wide)]


def test_auto_never_takes_what_is_refused_or_measured_elsewhere(monkeypatch):
    """A library that is missing, another GPU, and a window: Triton."""
    s = scene(dim=64)
    classes = {call_class(s): {"triton": Timing(30.0), "fa3": Timing(20.0)}}
    for options in ({"serves": ("triton",)}, {"num_sms": 132}, {"window": 5}):
        auto, _ = auto_of(monkeypatch, s, classes, **options)
        queries = replace(s.queries, window=options.get("window"))
        assert auto.plan(auto.begin(s.view), queries).backend.name == "triton"
        monkeypatch.undo()


def test_auto_weighs_the_cost_of_planning_on_the_host(monkeypatch):
    """A backend that is faster in a call but plans for half a millisecond is not worth it; a cheap plan is."""
    s = scene(dim=64)
    dear, cheap = Timing(20.0, plan_us=500.0), Timing(20.0, plan_us=32.0)
    for timing, want in ((dear, "triton"), (cheap, "flashinfer")):
        auto, made = auto_of(monkeypatch, s, {call_class(s): {"triton": Timing(30.0), "flashinfer": timing}})
        assert auto.plan(auto.begin(s.view), s.queries).backend.name == want
        assert auto.capabilities.needs_host_extents == (want == "flashinfer")
        if want == "flashinfer":
            auto.plan_round("round")
            assert made["flashinfer"].round == "round"
        monkeypatch.undo()


def test_the_committed_tables_are_well_formed():
    """Classes that the code can form, times that are positive, backends that exist, launches with every field."""
    for name, timings in load_table().classes.items():
        kind, *rest = name.split()
        assert len(rest) == 4
        assert kind in ("tail", "causal")
        assert "triton" in timings
        assert set(timings) <= set(BACKENDS)
        assert all(timing.us > 0 for timing in timings.values())
    for name, entry in launch_table()["classes"].items():
        assert len(name.split()) == 5
        assert {"block_m", "block_n", "splits", "num_warps", "num_stages", "us"} <= set(entry)
        assert entry["us"] <= entry["formula_us"]
    assert json.dumps(launch_table())


def test_auto_on_a_cpu_is_the_torch_backend():
    assert isinstance(make_backend("auto", Need(torch.float32, CPU)), TorchBackend)


def test_capabilities_are_plain_data():
    """Frozen, and every field a value that can be printed as a table."""
    with pytest.raises(AttributeError):
        CAPABILITIES["fa3"].captures = False
    assert {field.name for field in fields(Capabilities)} >= {"dtypes", "captures", "needs_host_extents", "phases"}


def test_the_documentation_shows_the_capability_table():
    """docs/backends.md has one row a backend, with the values of the code."""
    text = (Path(__file__).parent.parent / "docs" / "backends.md").read_text(encoding="utf-8")
    for name, able in CAPABILITIES.items():
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
