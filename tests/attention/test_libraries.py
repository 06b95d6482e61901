"""Attention libraries as this engine calls them: layouts, padding, empty rows, plans, and whole rounds on each.

The libraries are stand-ins with the vendors' layouts (fake_libraries.py); test_gpu_backends.py has the real ones.
"""

import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support import fake_libraries
from support.engines import accept_lens, greedy, tokens
from support.fake_libraries import BUILDS, FakeFlashInfer, register_fa3
from support.operations import reference_ops
from support.scenes import assert_close, assert_close_lse, dense_answer, scene
from treetop import LLM
from treetop.attention import auto as choosing
from treetop.attention import fa3_backend, fa4_backend, flashinfer_backend
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.contract import RoundExtents
from treetop.attention.fa3_backend import FlashOp
from treetop.attention.flash_pages import FlashPages, PagedCall
from treetop.attention.flashinfer_backend import FlashInferPages, HostPages, workspace_bytes
from treetop.attention.library_backend import LibraryBackend
from treetop.attention.registry import BACKENDS
from treetop.attention.torch_backend import TorchBackend
from treetop.engine.cuda_graphs import plan_host_extents
from treetop.engine.rounds import Eager
from treetop.engine.startup.layer_groups import backend_need
from treetop.kernels.attention.attention import paged_attention_reference
from treetop.kernels.kv import PageTable
from treetop.kernels.profile import TIES
from treetop.kernels.triton_guard import GpuTraits, why_not
from treetop.types.ids import FULL
from treetop.types.layout import SpecShape
from treetop.types.parallel import SINGLE_RANK
from treetop.types.phase import Phase
from treetop_debug.patching import wrapped_runner

CPU = torch.device("cpu")

VARIETY = [
    {},
    {"n": 1, "t": 1, "page_size": 1},
    {"n": 3, "t": 9, "heads": 2, "page_size": 16},
    {"n": 7, "t": 7, "heads": 4, "kv_heads": 4, "dim": 24, "page_size": 64, "max_kv_len": 130},
    {"window": 6},
    {"window": 6, "chunked": True},
]
CAUSAL = [{"n": 1}, {"n": 9, "page_size": 1}, {"n": 12, "page_size": 16, "max_kv_len": 90}, {"n": 12, "window": 5}]


@pytest.fixture(params=BUILDS)
def fa3(request):
    library = register_fa3(request.param)
    operators = getattr(torch.ops, BUILDS[request.param].namespace)
    scheduler = getattr(operators, "get_scheduler_metadata", None)
    yield FlashOp(operators.fwd.default, scheduler and scheduler.default, request.param)
    library._destroy()


def on_fa3(op, dtype=torch.float32):
    pages = FlashPages(op, reference_ops())
    return LibraryBackend("fa3", fa3_backend.CAPABILITIES, pages, TorchBackend(dtype, CPU), reference_ops())


def of_flashinfer(pages, dtype):
    able, windows = flashinfer_backend.CAPABILITIES, TorchBackend(dtype, CPU)
    return LibraryBackend("flashinfer", able, pages, windows, reference_ops())


def on_flashinfer(s):
    need = GroupNeed(FULL, s.q.shape[2], s.tail.data.shape[3], s.q.shape[3])
    return of_flashinfer(FlashInferPages(Need(s.q.dtype, CPU, groups=(need,)), FakeFlashInfer), s.q.dtype)


def usable(s):
    """Where PyTorch serves the windows, what no query sees must be finite: it multiplies it by 0."""
    if s.metadata.window is None:
        return s.metadata, s.kv
    return replace(s.metadata, table=PageTable(FULL, s.clean_table)), s.clean


def check_backend(backend, options):
    """Prefix and tail, with and without a sink, and what the library itself gives: against dense attention."""
    s = scene(**options)
    metadata, kv = usable(s)
    plan = backend.plan(backend.begin(metadata), metadata)
    torch.manual_seed(1)
    for sinks in (None, torch.randn(s.q.shape[2])):
        want = dense_answer(s, with_tail=True, sinks=sinks)[0]
        got = backend.prefix_tail(s.q, kv, plan, s.tail, s.scale, sinks)
        assert_close(got, want, s)
    if s.metadata.window is not None:
        return
    out, lse = plan.attend(s.q, kv, s.scale).normalised()
    want, want_lse = dense_answer(s, with_tail=False)
    assert_close(out, want, s)
    assert_close_lse(lse, want_lse, s)
    assert lse.dtype == torch.float32
    assert (lse[-1] == float("-inf")).all()


def check_causal(backend, options):
    s = scene(**options, causal=True)
    metadata, kv = usable(s)
    plan = backend.plan(backend.begin(metadata), metadata)
    torch.manual_seed(1)
    for sinks in (None, torch.randn(s.q.shape[2])):
        out = backend.causal(s.q, kv, plan, s.scale, sinks)
        want = dense_answer(s, with_tail=False, sinks=sinks)[0]
        assert_close(out[s.real], want[s.real], s)
        if s.metadata.window is None:
            assert not out[~s.real].any(), "padding is 0, whatever the library left there"


# ------------------------------------------------------------------------------------------------- library calls


@pytest.mark.parametrize("options", VARIETY, ids=str)
def test_fa3_prefix_and_tail_equal_dense_attention(fa3, options):
    """Layouts, empty rows, unused columns and slots, grouped heads, pages, windows by the other path."""
    check_backend(on_fa3(fa3), options)


@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_fa3_causal_equals_dense_attention(fa3, options):
    """A padded batch: queries end where `seqused_q` says, and the last one is aligned to the last key."""
    check_causal(on_fa3(fa3), options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "queries", "asked"),
    [
        (16, 2, 3, 33, 138_412_032),
        (32, 8, 32, 32, 132_120_576),
        (32, 8, 64, 4, 148_897_792),
        (32, 8, 64, 16, 199_229_440),
        (32, 8, 64, 64, 400_556_032),
    ],
)
def test_flashinfers_workspace_holds_what_it_was_seen_to_ask_for(heads, kv_heads, rows, queries, asked):
    """Bytes for parts of results with heads of 128, on 132 multiprocessors; log-sum-exps come on top, and lists."""
    need = Need(torch.bfloat16, CPU, 16, (GroupNeed(FULL, heads, kv_heads, 128),), 1, rows, queries)
    assert asked * 129 / 128 < workspace_bytes(need, 132) < asked * 1.2 + (16 << 20)


def test_fa3_reads_pages_in_place_and_one_table_a_phase(fa3):
    """K and V are views of the pool, and two layers of a phase share table and lengths."""
    s = scene()
    backend = on_fa3(fa3)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    fake_libraries.calls.clear()
    for _ in range(2):
        backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    first, second = fake_libraries.calls
    assert first["k"].untyped_storage().data_ptr() == s.kv.data.untyped_storage().data_ptr()
    assert first["v"].data_ptr() - first["k"].data_ptr() == 4 * 2 * 16  # one slot's K, float32
    assert first["page_table"].data_ptr() == second["page_table"].data_ptr()
    assert first["seqused_k"].data_ptr() == second["seqused_k"].data_ptr()
    assert first["max_seqlen_k"] == s.metadata.max_kv_len
    assert first["q"].data_ptr() == s.q.data_ptr()
    assert first["scheduler_metadata"] is second["scheduler_metadata"]
    assert (first["scheduler_metadata"] is None) == (len(fa3.schemas) == 1)


@pytest.mark.parametrize("options", VARIETY, ids=str)
def test_flashinfer_prefix_and_tail_equal_dense_attention(options):
    """A plan from host lengths, base 2, and a row without keys that leaves garbage."""
    check_backend(on_flashinfer(scene(**options)), options)


@pytest.mark.parametrize("options", CAUSAL, ids=str)
def test_flashinfer_causal_equals_dense_attention(options):
    """Queries are packed, and padding comes back as 0."""
    check_causal(on_flashinfer(scene(**options, causal=True)), options)


def test_a_flashinfer_round_is_planned_anew_from_the_lengths_of_its_rows():
    """`plan_round` after lengths and tables have changed gives what a fresh plan would; other phases are left alone."""
    s = scene()
    backend = on_flashinfer(s)
    FakeFlashInfer.made.clear()
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    few = {"positions": s.metadata.positions[:, :2], "mask": s.metadata.mask[:, :2]}
    other = replace(s.metadata, phase=Phase.EXTEND, **few)
    backend.plan(backend.begin(other), other)
    verify, extend = FakeFlashInfer.made
    committed = torch.zeros(4, dtype=torch.long)
    committed[s.metadata.rows] = torch.tensor([3, 0, 17, 0])
    s.metadata.table.data.copy_(s.clean_table)
    backend.plan_round(RoundExtents(s.metadata.rows, committed, {Phase.VERIFY: s.q.shape[1]}))
    assert (verify.plans, extend.plans) == (2, 1)
    fresh = replace(s.metadata, kv_len=committed[s.metadata.rows])
    part = plan.attend(s.q, s.clean, s.scale)
    want, want_lse = paged_attention_reference(s.q, s.clean.data, fresh, None, s.scale)
    out, lse = replace(part, kv_len=fresh.kv_len).normalised()
    assert_close(out, want, s)
    assert_close_lse(lse, want_lse, s)


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
    library = register_fa3("vllm")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setenv(fa3_backend.FA3_FILE, "/some/fa3.so")
    assert fa3_backend.find_fa3().source == "TREETOP_FA3_LIBRARY=/some/fa3.so (torch.ops._vllm_fa3_C.fwd)"
    assert fa3_backend.problem(CPU) is None
    library._destroy()
    monkeypatch.undo()
    wrong = tmp_path / "fa3.so"
    wrong.write_text("no library")
    monkeypatch.setenv(fa3_backend.FA3_FILE, str(wrong))
    assert f"FlashAttention-3 was not found: TREETOP_FA3_LIBRARY={wrong} cannot be used" in fa3_backend.problem(CPU)


def test_fa3_of_the_extra_is_found_and_auto_takes_it_for_prefill_and_wide_trees(monkeypatch, tmp_path):
    """`treetop-llm[fa3]` brings a module that registers its operator when imported; the committed table does the rest.

    As on an H200: few queries stay on Triton, whose kernel takes the tail along. Without the module all do.
    """
    module = "from support.fake_libraries import FA3_WHEEL, register_fa3\nlibrary = register_fa3(FA3_WHEEL)\n"
    monkeypatch.delenv(fa3_backend.FA3_FILE, raising=False)
    for name in ("triton", "fa3"):  # all but what asks for the GPU and its Triton
        probes = tuple(probe for probe in BACKENDS[name].probes if probe is not why_not)
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], probes=probes))
    monkeypatch.setattr(choosing, "gpu_traits", lambda device: GpuTraits(132, True, 227 << 10))
    need = Need(torch.bfloat16, CPU, 16, (GroupNeed(FULL, 32, 8, 128),))
    calls = {
        "plain": (1, 1, 8192, False),
        "a tree": (8, 16, 4096, False),
        "a wide tree": (32, 64, 4096, False),
        "a prefill": (1, 2048, 32768, True),
    }

    def backends():
        backend = choosing.make_backend("auto", need)
        return {what: backend_of(backend, need.groups[0], *call) for what, call in calls.items()}

    assert set(backends().values()) == {"triton"}
    (tmp_path / "flash_attn_interface.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    found = fa3_backend.find_fa3()
    assert found.source == "flash_attn_interface (torch.ops.flash_attn_3.fwd)"
    assert len(found.schemas) == 2
    on_fa3, on_triton = ("a wide tree", "a prefill"), ("plain", "a tree")
    assert backends() == dict.fromkeys(on_triton, "triton") | dict.fromkeys(on_fa3, "fa3")
    sys.modules.pop("flash_attn_interface").library._destroy()


def backend_of(backend, group, rows, n, keys, causal):
    """The name of what `auto` runs a call on."""
    if not isinstance(backend, choosing.AutoBackend):
        return backend.name
    metadata = SimpleNamespace(
        table=SimpleNamespace(group=group.name), window=None, positions=torch.empty(rows, n, device="meta"),
        max_kv_len=keys, causal=causal,
    )  # fmt: skip
    return backend.backend_for(metadata).name


def test_fa3_that_is_not_installed_says_what_was_looked_for(monkeypatch):
    monkeypatch.delenv(fa3_backend.FA3_FILE, raising=False)
    monkeypatch.setattr(fa3_backend.importlib.util, "find_spec", lambda name: None)
    text = fa3_backend.problem(CPU)
    assert "none of flash_attn_interface, sgl_kernel, vllm is installed and TREETOP_FA3_LIBRARY names no file" in text


def test_an_operator_without_what_is_needed_is_refused():
    library = torch.library.Library("treetop_odd", "DEF")
    library.define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool is_causal) -> Tensor[]")
    with pytest.raises(LookupError, match="no operand page_table, seqused_k, seqused_q"):
        FlashOp(torch.ops.treetop_odd.fwd.default, None, "odd")
    library._destroy()


def test_the_probe_of_fa4_believes_results_not_versions(monkeypatch):
    """A right library passes, also one that warns where warnings are errors; a wrong or failing one is refused."""

    def right(call: PagedCall):
        given = {"q": call.q, "k": call.k, "v": call.v, "page_table": call.table, "seqused_k": call.lengths}
        given |= {"seqused_q": None, "softmax_scale": call.scale, "is_causal": False, "max_seqlen_k": call.max_kv_len}
        given |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
        out, lse, *_ = fake_libraries.fa3(given)
        return out, lse

    def wrong(call: PagedCall):
        out, lse = right(replace(call, table=call.table.flip(0)))
        return out, lse

    def warning(call: PagedCall):
        warnings.warn("a compiler's old way", DeprecationWarning, stacklevel=1)
        return right(call)

    def failing(call: PagedCall):
        raise AssertionError("Paged KV not supported on SM 9.0\nmore")

    def importing(name):
        warnings.warn("an old import", DeprecationWarning, stacklevel=1)

    monkeypatch.setattr(fa4_backend.importlib, "import_module", importing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    probe = fa4_backend.problem.__wrapped__
    for attention, want in (
        (right, None),
        (warning, None),
        (wrong, "gives wrong results here"),
        (failing, "failed on compute capability 9.0: AssertionError: Paged KV not supported on SM 9.0"),
    ):
        monkeypatch.setattr(fa4_backend, "_call", attention)
        got = probe(CPU)
        assert got is None if want is None else got.endswith(want) or want in got


# ------------------------------------------------------------------------------------------------- whole rounds


PROMPTS = [(3, 18), (0, 1), (1, 30), (2, 9), (4, 22)]


def generate(pair, make, launcher=None):
    """Five requests through three rows, page size 4, chunks of 7, on the backend that `make` builds for a device."""
    with wrapped_runner(lambda device: replace(device, backend=make(device))):
        llm = LLM(
            str(pair.target),
            str(pair.head),
            dtype="float32",
            page_size=4,
            chunked_prefill_size=7,
            max_running_requests=3,
            context_length=128,
            check_level=3,
        )
    if launcher is not None:
        llm.engine.launcher = launcher(llm.engine.runner)
    prompts = [pair.prompts([length], seed)[0] for seed, length in PROMPTS]
    outputs = llm.generate(prompts, greedy(30))
    llm.scheduler.check_integrity()
    return tokens(outputs), accept_lens(outputs)


def groups_of(device):
    """What `backend_need` says of the device's groups."""
    heads = 4  # of target and head
    return tuple(GroupNeed(g.name, heads, g.kv.heads, g.kv.head_dim, g.window) for g in device.layout.groups)


def test_rounds_on_fa3_give_the_tokens_of_torch(weak_pair, fa3):
    """Prefill in chunks, draft levels, verify and draft extend, ragged and padded batches, poisoned pages."""
    want = generate(weak_pair, lambda device: TorchBackend(torch.float32, CPU))
    assert generate(weak_pair, lambda device: on_fa3(fa3)) == want
    assert max(max(each) for each in want[1]) > 1


def flashinfer_of(device):
    pages = FlashInferPages(Need(torch.float32, CPU, groups=groups_of(device)), FakeFlashInfer)
    return of_flashinfer(pages, torch.float32)


class AsCaptured(Eager):
    """What a captured graph would do to FlashInfer: a key is planned once on dummy rows, then only before a replay."""

    def __init__(self, device):
        super().__init__(device)
        self.device, self.capturing, self.keys = device, False, set()

    def launch(self, key, max_kv_len, host_step=None):
        buffer, dummy = self.device.buffers.rows, self.device.layout.dummy_row
        if key not in self.keys:
            self.keys.add(key)
            rows = buffer.clone()
            buffer.fill_(dummy)
            super().launch(key, self.device.layout.max_context)
            buffer.copy_(rows)
        plan_host_extents(self.device, key)
        self.capturing = True
        super().launch(key, self.device.layout.max_context)
        self.capturing = False  # prefill is not captured


@pytest.mark.slow
def test_rounds_on_flashinfer_give_the_tokens_of_torch(weak_pair, monkeypatch):
    """Eager, planned as phases begin; and as captured, where only `plan_round` knows a round's lengths."""
    want = generate(weak_pair, lambda device: TorchBackend(torch.float32, CPU))
    assert generate(weak_pair, flashinfer_of) == want
    made = []

    def launcher(device):
        made.append(AsCaptured(device))
        return made[0]

    def capturing(device):
        return bool(made) and made[0].capturing

    monkeypatch.setattr(flashinfer_backend, "_capturing", capturing)
    assert generate(weak_pair, flashinfer_of, launcher) == want
    assert len(made[0].keys) > 1


def test_an_engines_need_names_every_group_with_its_heads(weak_pair):
    """Target and draft have their own numbers of heads; the backend is asked about both, and the largest phase."""
    llm = LLM(str(weak_pair.target), str(weak_pair.head), page_size=8, dtype="float32")
    device = llm.engine.runner
    model, draft = llm.engine.spec, llm.engine.draft
    place = type("Place", (), {"dtype": torch.float32, "device": CPU, "parallel": SINGLE_RANK, "profile": TIES})
    need = backend_need(device.layout, model, draft, place)
    assert need.groups == groups_of(device)
    assert (need.page_size, need.dtype) == (8, torch.float32)
    assert {group.heads for group in need.groups} == {4}
    assert need.rows == device.layout.max_requests
    for shape, maximum in [(SpecShape(4, 5, 16), 16), (SpecShape(8, 2, 6), 8), (SpecShape(1, 5, 6), 6)]:
        layout = replace(device.layout, shapes=(shape,))
        assert backend_need(layout, model, draft, place).queries == maximum
