"""FlashMLA as this engine calls it: layouts, empty rows, the division of work, whole rounds, and why it is refused.

The library is a stand-in with the vendor's layout (fake_libraries.py); test_gpu_flash_mla.py has the real one.
"""

import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.engines import accept_lens, build, greedy, tokens
from support.fake_libraries import FakeFlashMLA
from support.families import FAMILIES
from support.operations import reference_ops
from support.scenes import assert_close, assert_close_lse, dense_answer, scene
from treetop.attention import auto as choosing
from treetop.attention import flashmla_backend
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.flashmla_backend import CAPABILITIES, FlashMLA, LatentPages
from treetop.attention.library_backend import LibraryBackend, LibraryPlan, OtherPlan
from treetop.attention.registry import BACKENDS, refusal
from treetop.attention.torch_backend import TorchBackend
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.ids import DRAFT, FULL
from treetop_debug.patching import wrapped_runner

CPU = torch.device("cpu")
LATENT, DENSE = GroupNeed(FULL, 4, 1, 576, latent=512), GroupNeed(DRAFT, 4, 2, 16)
SIZES = {"kv_heads": 1, "dim": 26, "latent": 20, "page_size": 8}
VARIETY = [
    {},
    {"n": 1, "t": 1, "heads": 1},
    {"n": 3, "t": 9, "max_kv_len": 64},  # a prefix that ends where a page does
    {"lengths": (1, 8, 9, 0), "n": 2, "t": 4},
]


def on_flash_mla(library, groups=(), dtype=torch.float32):
    pages = LatentPages(FlashMLA(library), reference_ops())
    return LibraryBackend("flashmla", CAPABILITIES, pages, TorchBackend(dtype, CPU), reference_ops(), groups)


def small():
    return FakeFlashMLA(SIZES["page_size"], SIZES["latent"], SIZES["dim"] - SIZES["latent"])


@pytest.mark.parametrize("options", VARIETY, ids=str)
def test_prefix_and_tail_equal_dense_attention(options):
    """NaN in every slot and INT_MIN in every column that no query may see; rows without keys."""
    s = scene(**{**SIZES, **options})
    backend = on_flash_mla(small(), (GroupNeed(FULL, s.q.shape[2], 1, 26, latent=20),))
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    got = backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    assert_close(got, dense_answer(s, with_tail=True)[0], s)
    out, lse = plan.attend(s.q, s.kv, s.scale).normalised()
    want, want_lse = dense_answer(s, with_tail=False)
    assert_close(out, want, s)
    assert_close_lse(lse, want_lse, s)
    assert (lse[-1] == float("-inf")).all()


def test_layers_of_a_phase_share_the_table_and_the_division_of_work():
    """Pages are read in place; the next phase, whose lengths are others, divides its work anew."""
    s, library = scene(**SIZES), small()
    backend = on_flash_mla(library)
    for _ in range(2):
        plan = backend.plan(backend.begin(s.metadata), s.metadata)
        for _ in range(2):
            backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
        s.metadata.kv_len[0] -= 1
    first, second, third, _ = library.calls
    assert first[1].untyped_storage().data_ptr() == s.kv.data.untyped_storage().data_ptr()
    assert first[2] is second[2]
    assert first[3] is second[3]
    assert first[3] is not third[3]


def test_prompts_windows_and_layers_without_compression_run_elsewhere():
    """What the library has no kernel for: it is asked for nothing, and the result is dense attention's."""
    library = small()
    backend = on_flash_mla(library, (GroupNeed(FULL, 6, 2, 16),))
    dense = scene(page_size=8)
    plain = replace(dense.metadata, table=replace(dense.metadata.table, data=dense.clean_table))
    plan = backend.plan(backend.begin(plain), plain)
    assert isinstance(plan, OtherPlan)
    assert_close(
        backend.prefix_tail(dense.q, dense.clean, plan, dense.tail, dense.scale), dense_answer(dense, True)[0], dense
    )
    backend = on_flash_mla(library, (LATENT,))
    for options in ({"causal": True, "n": 9}, {"window": 5}):
        s = scene(**SIZES, **options)
        clean = replace(s.metadata, table=replace(s.metadata.table, data=s.clean_table))
        plan = backend.plan(backend.begin(clean), clean)
        assert isinstance(plan, OtherPlan)
        if "causal" in options:
            got = backend.causal(s.q, s.clean, plan, s.scale)
            assert_close(got[s.real], dense_answer(s, False)[0][s.real], s)
    assert library.calls == []
    s = scene(**SIZES)
    assert isinstance(backend.plan(backend.begin(s.metadata), s.metadata), LibraryPlan)


# ------------------------------------------------------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return FAMILIES["deepseek v3"].save(tmp_path_factory.mktemp("latents"), seed=5).pair


def test_rounds_give_the_tokens_of_torch(pair):
    """Trees of a head without compression over a target with it, chunks, ragged and padded batches, poisoned pages."""
    options = {"dtype": "float32", "page_size": 8, "chunked_prefill_size": 7, "context_length": 128}
    options |= {"check_level": 3, "max_running_requests": 3}
    prompts, libraries = pair.prompts([18, 1, 30, 9, 22]), []

    def served(device):
        groups = tuple(
            GroupNeed(g.name, 4, g.kv.heads, g.kv.head_dim, latent=g.kv.value_dim) for g in device.layout.groups
        )
        libraries.append(small())
        return replace(device, backend=on_flash_mla(libraries[0], groups))

    made = []
    for wrapped in (lambda device: device, served):
        with wrapped_runner(wrapped):
            llm = build(pair, (3, 2, 6), **options)
        outputs = llm.generate(prompts, greedy(16))
        made.append((tokens(outputs), accept_lens(outputs)))
        llm.close()
    assert made[0] == made[1]
    assert {call[0].shape[1] for call in libraries[0].calls} == {6}, "verifying alone is the library's"


# ------------------------------------------------------------------------------------------------- found, and refused


def need_of(*groups, page=64, **changes):
    return Need(**{"dtype": torch.bfloat16, "device": CPU, "page_size": page, "groups": groups, **changes})


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (need_of(LATENT, page=16), "pages of 64 tokens, not of 16; use --page-size 64"),
        (need_of(DENSE), "compressed attention (MLA) alone, and no layer here has that; use --attention-backend"),
        (need_of(replace(LATENT, head_dim=288, latent=256)), "latents 256 wide"),
        (need_of(replace(LATENT, head_dim=640)), "part with RoPE is 128 wide, and it has no kernel"),
        (need_of(replace(LATENT, top_k=2048)), "no kernel for sparse attention"),
        (need_of(LATENT, fp8_kv=True), "no K/V in FP8; use --kv-cache-dtype auto"),
        (need_of(LATENT, dtype=torch.float32), "not in float32; use --dtype bfloat16"),
    ],
)
def test_what_it_has_no_kernel_for_is_refused_by_name(monkeypatch, need, words):
    monkeypatch.setitem(BACKENDS, "flashmla", replace(BACKENDS["flashmla"], probes=()))
    found = refusal("flashmla", need)
    assert words in f"{found.reason}; {found.remedy}"
    assert refusal("flashmla", need_of(LATENT, DENSE)) is None


def test_auto_takes_it_where_it_was_faster_and_pages_hold_64(monkeypatch):
    """As on an H200: all classes of 128 heads, of 16 those of eight rows; with other pages, or without it, Triton."""
    for name in ("triton", "flashmla"):
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], probes=()))
    monkeypatch.setattr(choosing, "gpu_traits", lambda device: GpuTraits(132, True, 227 << 10))
    monkeypatch.setitem(sys.modules, "flash_mla", FakeFlashMLA())

    def name_of(heads, rows, n, page=64, causal=False):
        group = GroupNeed(FULL, heads, 1, 576, latent=512)
        backend = choosing.make_backend("auto", need_of(group, DENSE, page=page))
        if not isinstance(backend, choosing.AutoBackend):
            return backend.name
        metadata = SimpleNamespace(
            table=SimpleNamespace(group=FULL), window=None, positions=torch.empty(rows, n, device="meta"),
            max_kv_len=65536, causal=causal,
        )  # fmt: skip
        return backend.backend_for(metadata).name

    assert {name_of(128, rows, n) for rows in (1, 8, 32) for n in (1, 16)} == {"flashmla"}
    assert (name_of(16, 1, 1), name_of(16, 8, 1)) == ("triton", "flashmla")
    assert name_of(128, 8, 16, page=16) == "triton"
    assert name_of(128, 8, 16, causal=True) == "triton"
    assert name_of(20, 8, 16) == "triton"


def test_a_package_is_believed_by_what_it_computes(monkeypatch):
    """Right results pass; no package, another interface, an error and wrong results are each said."""
    probe = flashmla_backend.problem.__wrapped__

    class Changed(FakeFlashMLA):
        """A package that does `change` to table and lengths first."""

        def __init__(self, change):
            super().__init__()
            self.change = change

        def flash_mla_with_kvcache(  # noqa: PLR0917 - the vendor's
            self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, softmax_scale,
            use_legacy=False, **rest,
        ):  # fmt: skip
            own = self.change(block_table, cache_seqlens)
            shared = {"tile_scheduler_metadata": tile_scheduler_metadata, "use_legacy": use_legacy}
            given = {**shared, "softmax_scale": softmax_scale, **rest}
            return super().flash_mla_with_kvcache(q, k_cache, *own, head_dim_v, **given)

    class OfOneType(FakeFlashMLA):
        """A package that was built without kernels for float16."""

        def flash_mla_with_kvcache(self, q, *given, use_legacy=False, **rest):
            out, lse = super().flash_mla_with_kvcache(q, *given, use_legacy=use_legacy, **rest)
            return out * (q.dtype == torch.bfloat16), lse

        flash_mla_with_kvcache.__signature__ = inspect.signature(FakeFlashMLA.flash_mla_with_kvcache)

    def disturbed(table, lengths):
        return table, torch.where((lengths == 0).any(), lengths.clamp(max=64), lengths)

    def failing(table, lengths):
        raise RuntimeError("Dense decode MLA is only supported on SM90a architecture\nmore")

    def older(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale):
        raise AssertionError

    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert probe(CPU) == "FlashMLA was not found: flash_mla is not installed (pip install sgl-flash-mla)"
    for package, words in (
        (FakeFlashMLA(), None),
        (
            Changed(failing),
            "failed on a small problem: RuntimeError: Dense decode MLA is only supported on SM90a architecture",
        ),
        (Changed(lambda table, lengths: (table.flip(0), lengths)), "gives wrong results here"),
        (Changed(lambda table, lengths: (table, (lengths + 63) // 64 * 64)), "gives wrong results here"),
        (Changed(disturbed), "gives wrong results here"),
        (OfOneType(), "gives wrong results here"),
        (SimpleNamespace(get_mla_metadata=None, flash_mla_with_kvcache=older), "no argument tile_scheduler_metadata"),
        (SimpleNamespace(), "another interface"),
    ):
        monkeypatch.setitem(sys.modules, "flash_mla", package)
        found = probe(CPU)
        assert found is None if words is None else words in found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import math; math.nothing", "flash_mla cannot be imported: AttributeError: module 'math' has no attribute"),
        ("raise ValueError('of another version\\nmore')", "cannot be imported: ValueError: of another version"),
        ("{}['name']", "cannot be imported: KeyError: 'name'"),
        ("import flash_mla_cuda", "cannot be imported: No module named 'flash_mla_cuda'"),
        ("flash_mla_with_kvcache = dict.update; get_mla_metadata = None", "flash_mla has another interface"),
        ("flash_mla_with_kvcache = get_mla_metadata = 1", "flash_mla has another interface"),
    ],
)
def test_a_package_that_is_broken_is_refused(monkeypatch, tmp_path, body, words):
    """Whatever its import raises: a start goes on with another backend, and the report says why."""
    (tmp_path / "flash_mla.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_mla", raising=False)
    found = flashmla_backend.problem.__wrapped__(CPU)
    sys.modules.pop("flash_mla", None)
    assert found is not None
    assert words in found
