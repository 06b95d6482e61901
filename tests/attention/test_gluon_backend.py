"""The backend of the kernel in Gluon: what goes to it, what does not, what is refused, and when it is believed.

No interpreter runs Gluon, so PyTorch's reference stands for the kernel here; test_gpu_latent_gluon.py has the real one.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from support.engines import build
from support.families import FAMILIES
from support.scenes import assert_close, dense_answer, scene
from treetop.attention import auto, gluon_backend, triton_backend
from treetop.attention.auto import Timing, choose, load_table, make_backend, page_size_for, summary
from treetop.attention.capabilities import BackendRefusal, GroupNeed, Need
from treetop.attention.gluon_backend import GluonBackend
from treetop.attention.registry import BACKENDS, refusal
from treetop.doctor import report
from treetop.engine.startup.layer_groups import group_needs
from treetop.engine.startup.startup_log import attention_words, serving_words
from treetop.kernels import gluon_guard
from treetop.kernels.attention import latent_gather
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention_reference
from treetop.kernels.attention.latent_gluon import RANK, choose_splits
from treetop.kernels.attention.metadata import SparseKeys
from treetop.kernels.triton_guard import GpuTraits
from treetop.kernels.tuning import TunedTable
from treetop.types.ids import DRAFT, FULL

CPU = torch.device("cpu")
LATENT, DENSE = GroupNeed(FULL, 4, 1, 576, latent=512), GroupNeed(DRAFT, 4, 2, 16)
PLANE = {"kv_heads": 1, "dim": 576, "latent": 512, "page_size": 64}


def need_of(*groups, page=64, **changes):
    return Need(**{"dtype": torch.bfloat16, "device": CPU, "page_size": page, "groups": groups, **changes})


def reference(q, pages, metadata, tail, scale, gpu, splits=None):
    return latent_attention_reference(q.float(), pages.float(), metadata, tail.float(), RANK, scale).to(q.dtype)


@pytest.fixture
def calls(monkeypatch):
    """Which kernel was asked for, of each call."""
    asked = []

    def kernel(name, answer):
        return lambda *args, **rest: asked.append(name) or answer(*args)

    monkeypatch.setattr(gluon_backend, "latent_pages_attention", kernel("gluon", reference))
    monkeypatch.setattr(triton_backend, "latent_attention", kernel("triton", lambda *args: None))
    monkeypatch.setattr(triton_backend, "paged_attention", kernel("pairs", lambda *args: (None,)))
    return asked


def test_rounds_of_compressed_attention_go_to_it_and_all_else_to_triton(calls):
    backend = GluonBackend(CPU)

    def serve(s):
        plan = backend.plan(backend.begin(s.metadata), s.metadata)
        if s.metadata.causal:
            return backend.causal(s.q, s.kv, plan, s.scale)
        return backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)

    s = scene(**PLANE, max_kv_len=150)
    assert_close(serve(s), dense_answer(s, True)[0], s)
    serve(scene(**PLANE, max_kv_len=150, t=64))
    assert calls == ["gluon"] * 2
    for options in ({"t": 65}, {"causal": True, "n": 9}, {"window": 5}):
        serve(scene(**PLANE, max_kv_len=150, **options))
    serve(scene(page_size=64, max_kv_len=150))
    assert calls[2:] == ["triton"] * 3 + ["pairs"]


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (need_of(LATENT, page=16), "pages of 64 tokens, not of 16; use --page-size 64"),
        (need_of(DENSE), "compressed attention (MLA) alone, and no layer here has that; use --attention-backend"),
        (need_of(replace(LATENT, head_dim=288, latent=256)), "latents 256 wide"),
        (need_of(replace(LATENT, head_dim=640)), "part with RoPE is 128 wide, and it has no kernel"),
        (need_of(LATENT, fp8_kv=True), "no K/V in FP8; use --kv-cache-dtype auto"),
        (need_of(LATENT, dtype=torch.float32), "not in float32; use --dtype bfloat16"),
    ],
)
def test_what_it_has_no_kernel_for_is_refused_by_name(monkeypatch, need, words):
    monkeypatch.setitem(BACKENDS, "gluon", replace(BACKENDS["gluon"], probes=()))
    found = refusal("gluon", need)
    assert words in f"{found.reason}; {found.remedy}"
    assert refusal("gluon", need_of(LATENT, DENSE)) is None


def test_planes_of_a_model_with_an_indexer_are_served(tmp_path, monkeypatch):
    """What such a model keeps is wider by its index keys than what attention reads."""
    monkeypatch.setitem(BACKENDS, "gluon", replace(BACKENDS["gluon"], probes=()))
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "index_head_dim": 128}
    tiny = FAMILIES["deepseek v32"]
    pair = replace(tiny, config={**tiny.config, **sizes}).save(tmp_path, seed=5).pair
    llm = build(pair, None, device="cpu", dtype="float32", context_length=128, attention_backend="torch")
    (group,) = (each for each in group_needs(llm.engine.spec, llm.engine.draft, 1) if each.latent)
    llm.close()
    assert (group.head_dim, group.index_dim, group.sparse) == (704, 128, True)
    assert refusal("gluon", need_of(group)) is None
    assert "part with RoPE is 192 wide" in refusal("gluon", need_of(replace(group, index_dim=0))).reason


def test_a_start_says_for_which_pages_it_would_serve(monkeypatch):
    monkeypatch.setitem(BACKENDS, "gluon", replace(BACKENDS["gluon"], probes=()))
    assert "; gluon: it serves pages of 64 tokens, not of 16" in attention_words("triton", need_of(LATENT, page=16))
    assert "gluon" not in attention_words("triton", need_of(LATENT))


@pytest.mark.parametrize(
    ("heads", "rows", "n"), [(128, 1, 1), (128, 8, 1), (128, 8, 16), (128, 64, 16), (16, 8, 1), (16, 8, 16)]
)
def test_auto_takes_it_where_it_was_measured_to_be_faster(heads, rows, n):
    """Where FlashMLA is not installed; heads that were not measured keep Triton."""
    shape = f"tail h1x{heads}x576e2 rows{rows} n{n} keys131072"
    assert choose(load_table(), shape, frozenset(("triton", "gluon")))[0] == "gluon"
    assert choose(load_table(), shape, frozenset(("triton",)))[0] == "triton"
    other = "tail h1x20x576e2 rows8 n16 keys131072"
    assert choose(load_table(), other, frozenset(("triton", "gluon")))[0] == "triton"


@pytest.mark.parametrize("heads", [128, 64])
@pytest.mark.parametrize(("rows", "n"), [(1, 16), (8, 4), (8, 16), (32, 1), (32, 16), (64, 16)])
def test_auto_takes_the_gather_of_chosen_keys_where_it_was_measured_to_be_faster(heads, rows, n):
    """As DeepSeek-V3.2 and GLM-5 have them, by a class of their own run; other numbers of chosen keys keep Triton."""
    shape, both = f"tail h1x{heads}x576e2c2048 rows{rows} n{n} keys131072", frozenset(("triton", "gluon"))
    name, why = choose(load_table(), shape, both)
    assert name == "gluon"
    assert f"in tail h1x{heads}x576e2c2048 rows" in why
    assert load_table().date not in why
    assert choose(load_table(), shape.replace("c2048", "c1024"), both)[0] == "triton"


def test_pages_are_of_64_tokens_where_it_is_named_or_taken_and_nothing_is_asked(monkeypatch):
    """Not on a CPU, under bits, for heads for which Triton is as fast, or where it cannot serve."""
    many = replace(LATENT, heads=128)
    need = need_of(many, DENSE, page=None)
    assert page_size_for("auto", need) == page_size_for("triton", need) == page_size_for("fa3", need) == 16
    assert page_size_for("gluon", need) == page_size_for("flashmla", need) == 64
    served = {"triton", "gluon"}
    other = BackendRefusal("it cannot", "take another")
    monkeypatch.setattr(auto, "in_force", lambda table, need: table)
    monkeypatch.setattr(auto, "refusal", lambda name, need: None if name in served else other)
    monkeypatch.setattr(gluon_backend, "problem_of_chosen", lambda device: None)
    monkeypatch.setattr(auto, "fallback", lambda need: "segments" if need.exact else "triton")
    assert page_size_for("auto", need) == 64
    assert page_size_for("auto", replace(need, exact=True)) == 16
    assert page_size_for("auto", need_of(DENSE, page=None)) == 16
    assert page_size_for("auto", need_of(replace(many, top_k=2048), page=None)) == 64
    assert page_size_for("auto", need_of(replace(many, top_k=1024), page=None)) == 16  # no times of so many chosen keys
    served.remove("gluon")
    assert page_size_for("auto", need) == 16


SPARSE = GroupNeed(FULL, 64, 1, 704, latent=512, top_k=2048, index_dim=128)
DENSE_64 = "tail h1x64x576e2 rows8 n16 keys8192"
CHOSEN_64 = "tail h1x64x576e2c2048 rows8 n16 keys8192"


@pytest.fixture
def table(monkeypatch):
    """Times of sparse attention with 64 heads, and of dense attention with as many, for which Triton is faster; on a
    machine that has that GPU, Triton and Gluon. `auto` reads it."""
    slow, fast = Timing(30.0), Timing(20.0, run="2026-01-02, abc")
    made = TunedTable(132, "2026-01-01", {
        CHOSEN_64: {"triton": slow, "gluon": fast},
        CHOSEN_64.replace("n16", "n1"): {"triton": fast, "gluon": slow},
        DENSE_64: {"triton": fast, "gluon": slow},
    })  # fmt: skip
    for name in ("triton", "gluon"):
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], probes=()))
    monkeypatch.setattr(auto, "gpu_traits", lambda device: GpuTraits(132, True, 227 << 10))
    monkeypatch.setattr(auto, "load_table", lambda: made)
    monkeypatch.setattr(gluon_backend, "problem_of_chosen", lambda device: None)
    return made


def backend_of(backend, n=16, rows=8, max_kv_len=8192, columns=None, group=FULL, **changes):
    """The name of the backend of a call."""
    if not isinstance(backend, auto.AutoBackend):
        return backend.name
    metadata = SimpleNamespace(
        table=SimpleNamespace(group=group), window=None, positions=torch.empty(rows, n, device="meta"), causal=False,
        max_kv_len=max_kv_len, mask=torch.empty(rows, n, columns or n, device="meta"),
    )  # fmt: skip
    vars(metadata).update(changes)
    return backend.backend_for(metadata).name


def test_auto_chooses_for_sparse_attention_by_classes_of_its_own(table):
    """By rows and queries; so many keys chosen; the nearest keys. What sees all keys is dense, and so are prompts."""
    backend = make_backend("auto", need_of(SPARSE))
    assert set(backend.parts) == {"triton", "gluon"}
    assert serving_words(backend) == "auto (gluon and triton)"
    assert backend.capabilities == replace(BACKENDS["triton"].capabilities, caps=False)
    assert [backend_of(backend, n) for n in (1, 2, 8, 16, 64)] == ["triton", "triton", "gluon", "gluon", "gluon"]
    assert backend_of(backend, max_kv_len=131072) == "gluon"
    long_name = CHOSEN_64.replace("8192", "131072")
    assert (
        backend.reasons[long_name]
        == f"{long_name}: gluon 20.0, triton 30.0 us in {CHOSEN_64} (2026-01-01, 2026-01-02, abc)"
    )
    assert backend_of(backend, max_kv_len=2048, columns=1) == "gluon"
    assert backend_of(backend, max_kv_len=2032, columns=16) == "triton"
    assert f"us in {DENSE_64} (" in backend.reasons[DENSE_64.replace("8192", "2048")]
    assert backend_of(backend, causal=True, mask=None) == "triton"
    assert page_size_for("auto", need_of(SPARSE, page=None)) == 64


@pytest.mark.parametrize(
    "changes",
    [{"heads": 128}, {"top_k": 1024}, {"top_k": 0, "index_dim": 0, "head_dim": 576}, {"window": 5}],
    ids=str,
)
def test_other_heads_and_other_numbers_of_chosen_keys_stay_as_they_were(table, changes):
    """A dense engine of the same heads among them: one whole choice, and pages of 16."""
    need = need_of(replace(SPARSE, **changes))
    backend = make_backend("auto", need)
    assert {backend_of(backend, n) for n in (1, 16)} == {"triton"}
    assert backend.name == "triton"
    assert page_size_for("auto", replace(need, page_size=None)) == 16


def test_a_dense_engine_chooses_by_the_committed_table_whatever_is_said_of_sparse_attention(table, monkeypatch):
    """128 heads: the same backends and reasons with classes of sparse attention beside them, faster on Triton."""
    dense, found = replace(LATENT, heads=128), []
    beside = {name.replace("x64x", "x128x"): timings for name, timings in table.entries.items() if "c2048" in name}
    for more in ({}, {name: {"triton": Timing(1.0), "gluon": Timing(9.0)} for name in beside}):
        entries = {name: row for name, row in load_table().entries.items() if "c2048" not in name}
        monkeypatch.setattr(auto, "load_table", lambda new={**entries, **more}: replace(table, entries=new))
        backend = make_backend("auto", need_of(dense))
        names = [backend_of(backend, n, rows, keys) for n in (1, 16) for rows in (1, 8) for keys in (2048, 65536)]
        found.append((names, backend.reasons))
    assert found[0] == found[1]
    assert set(found[0][0]) == {"gluon"}


def test_sparse_attention_is_tritons_where_the_table_does_not_hold_or_gluon_is_refused(table, monkeypatch):
    """Another GPU; pages of 16; planes in FP8; a kernel that is wrong; bits, which have another backend."""
    for need in (need_of(SPARSE, page=16), need_of(SPARSE, fp8_kv=True), need_of(SPARSE, dtype=torch.float32)):
        assert make_backend("auto", need).name == "triton"
    assert page_size_for("auto", need_of(SPARSE, page=None, fp8_kv=True)) == 16
    monkeypatch.setitem(BACKENDS, "gluon", replace(BACKENDS["gluon"], probes=(lambda device: "it is wrong",)))
    assert make_backend("auto", need_of(SPARSE)).name == "triton"
    monkeypatch.setitem(BACKENDS, "gluon", replace(BACKENDS["gluon"], probes=()))
    assert make_backend("auto", need_of(SPARSE)).name == "auto"
    with monkeypatch.context() as wrong:
        wrong.setattr(gluon_backend, "problem_of_chosen", lambda device: "its gather is wrong")
        assert make_backend("auto", need_of(SPARSE)).name == "triton"
        assert page_size_for("auto", need_of(SPARSE, page=None)) == 16
    assert page_size_for("auto", need_of(SPARSE, page=None)) == 64
    monkeypatch.setattr(auto, "gpu_traits", lambda device: GpuTraits(84, True, 227 << 10))
    assert serving_words(make_backend("auto", need_of(SPARSE))) == "triton"
    assert page_size_for("auto", need_of(SPARSE, page=None)) == 16


def test_each_group_of_an_engine_has_its_backend(table):
    """A head of another kind beside a sparse target, and one that is sparse with other heads."""
    for draft in (DENSE, replace(SPARSE, name=DRAFT, heads=20)):
        backend = make_backend("auto", need_of(SPARSE, draft))
        assert [backend_of(backend, group=name) for name in (FULL, DRAFT)] == ["gluon", "triton"]


def test_auto_hands_on_what_an_indexer_chooses(table, monkeypatch):
    """To the backend that it has taken for the phase, as its layers ask for it; a choice serves another backend too."""
    asked = []
    narrow = replace(SPARSE, top_k=64)
    entries = {name.replace("c2048", "c64"): row for name, row in table.entries.items()}
    monkeypatch.setattr(auto, "load_table", lambda: replace(table, entries=entries))
    backend = make_backend("auto", need_of(narrow))
    monkeypatch.setattr(gluon_backend, "chosen_planes_attention", lambda *args: asked.append(args[2].chosen))
    monkeypatch.setattr(triton_backend, "latent_attention", lambda *args, **rest: asked.append(args[2].chosen))
    s = scene(**PLANE, max_kv_len=150, heads=64)
    chosen = SparseKeys(torch.arange(64).expand(4, 5, 64).int(), torch.ones(4, 5).int(), s.metadata.mask)
    monkeypatch.setattr(triton_backend, "choose_paged_keys", lambda *args: chosen)
    plan = backend.plan(backend.begin(s.metadata), s.metadata)
    assert plan.backend is backend.parts["gluon"]
    query = IndexQuery(torch.zeros(4, 5, 2, 8), torch.zeros(4, 5, 2), 64)
    assert backend.choose(query, s.kv, plan, s.tail) is chosen
    assert torch.equal(backend.hidden(plan, chosen), -(s.metadata.kv_len > 0).long())  # 0 of a row without keys
    backend.prefix_tail(s.q, s.kv, backend.narrowed(plan, chosen), s.tail, s.scale)
    few = replace(s.metadata, positions=s.metadata.positions[:, :1], mask=s.metadata.mask[:, :1])
    other = backend.plan(backend.begin(few), few)
    assert other.backend is backend.parts["triton"]
    backend.prefix_tail(s.q[:, :1], s.kv, backend.narrowed(other, chosen), s.tail, s.scale)
    assert asked == [chosen, chosen]


def test_doctor_counts_the_classes_of_an_engines_heads(table, monkeypatch):
    both = frozenset(("triton", "gluon"))
    words = (
        "1 on gluon, 1 on triton of 2 classes measured with these heads (2026-01-01, 2026-01-02, abc); triton elsewhere"
    )
    assert summary(table, need_of(SPARSE), both) == words
    assert (
        summary(table, need_of(replace(SPARSE, top_k=9)), both)
        == "triton: no class of calls was measured with these heads"
    )
    monkeypatch.setattr(report, "gpu_traits", auto.gpu_traits)
    plan = SimpleNamespace(need=need_of(SPARSE), config=SimpleNamespace(attention_backend="auto"))
    assert (report.backends(plan)[-1].reason, report.backends(plan)[-1].chosen) == (words, True)
    monkeypatch.setattr(gluon_backend, "problem_of_chosen", lambda device: "its gather is wrong")
    assert report.backends(plan)[-1].reason.startswith("2 on triton of 2 classes")


def test_a_grid_takes_a_thousand_rows_of_64_queries(monkeypatch):
    """A grid's second dimension has 65,535 programs at most, and 1,024 x 64 queries are one more."""
    asked = []

    class Kernel:
        def __getitem__(self, grid):
            asked.append(grid)
            return lambda *args, **rest: None

    monkeypatch.setattr(latent_gather, "_chosen_planes_kernel", Kernel())
    monkeypatch.setattr(latent_gather, "swizzled_tiles", lambda *args: None)
    rows, n, meta = 1024, 64, partial(torch.empty, device="meta")
    ints = {"dtype": torch.int32, "device": "meta"}
    chosen = SparseKeys(torch.empty(rows, n, 64, **ints), torch.empty(rows, n, **ints), None)
    metadata = SimpleNamespace(
        table=SimpleNamespace(data=torch.empty(rows, 8, **ints)), chosen=chosen, window=None, causal=False, flat=None,
        rows=meta(rows), kv_len=meta(rows), max_kv_len=512, page_size=64, mask=meta(rows, n, 64),
        tail_positions=meta(rows, 64),
    )  # fmt: skip
    half = {"dtype": torch.bfloat16}
    q, tail = meta(rows, n, 128, 576, **half), meta(rows, 64, 1, 1, 576, **half)
    out = latent_gather.chosen_planes_attention(
        q, meta(512, 1, 1, 576, **half), metadata, tail, 1.0, GpuTraits(132, True, 227 << 10)
    )
    assert out.shape == (rows, n, 128, 512)
    ((programs, splits),) = asked
    assert (programs, splits) == (2 * rows * n, 1)
    assert rows * n > 65_535 >= splits


def test_without_gluon_it_is_refused(monkeypatch):
    _, why, *_ = BACKENDS["gluon"].probes
    monkeypatch.setattr(gluon_guard, "interpreted", lambda: False)
    monkeypatch.setattr(gluon_guard, "GLUON_PROBLEM", "this Triton (3.4.0) has no Gluon that its kernels know")
    assert why(CPU) == "this Triton (3.4.0) has no Gluon that its kernels know"
    monkeypatch.setattr(gluon_guard, "interpreted", lambda: True)
    assert why(CPU) == "Triton's interpreter runs no Gluon"


def wrong(change):
    """The reference of a call that `change` did something to."""

    def attend(q, pages, metadata, *rest):
        return reference(q, pages, change(metadata), *rest)

    return attend


def whole_pages(metadata):
    return replace(metadata, kv_len=(metadata.kv_len + 63) // 64 * 64)


def other_pages(metadata):
    return replace(metadata, table=replace(metadata.table, data=metadata.table.data.flip(0)))


def without_tail(metadata):
    return replace(metadata, mask=torch.zeros_like(metadata.mask))


def failing(*_):
    raise RuntimeError("wgmma is not there\nmore")


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (reference, None),
        (wrong(whole_pages), "gives wrong results here (relative error inf)"),
        (wrong(other_pages), "gives wrong results here"),
        (wrong(without_tail), "gives wrong results here"),
        (failing, "its kernel failed on a small problem: RuntimeError: wgmma is not there"),
    ],
)
def test_it_is_believed_by_what_it_computes(monkeypatch, kernel, words):
    """A last, partial page read whole; a page of another row or group; a tail that is left out; an error."""
    monkeypatch.setattr(gluon_backend, "latent_pages_attention", kernel)
    found = gluon_backend.problem.__wrapped__(CPU)
    assert found is None if words is None else words in found


def unchosen(metadata):
    return replace(metadata, chosen=None)


def one_less(metadata):
    return replace(metadata, chosen=replace(metadata.chosen, count=metadata.chosen.count - 1))


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (reference, None),
        (wrong(unchosen), "gives wrong results here"),
        (wrong(one_less), "gives wrong results here"),
        (failing, "its kernel failed on a small problem: RuntimeError: wgmma is not there"),
    ],
)
def test_keys_that_are_chosen_are_gathered_if_that_is_right(monkeypatch, caplog, kernel, words):
    """All keys, or not the last that was chosen; then they are Triton's, which is said, and all else is as it was."""
    asked = []
    monkeypatch.setattr(gluon_backend, "chosen_planes_attention", kernel)
    monkeypatch.setattr(gluon_backend, "problem_of_chosen", gluon_backend.problem_of_chosen.__wrapped__)
    backend = BACKENDS["gluon"].make(need_of(replace(LATENT, top_k=2048)))
    monkeypatch.setattr(triton_backend, "latent_attention", lambda *args, **rest: asked.append("triton"))
    s = scene(**PLANE, max_kv_len=150)
    chosen = SparseKeys(torch.arange(64).expand(4, 5, 64).int(), torch.ones(4, 5).int(), s.metadata.mask)
    plan = backend.narrowed(backend.plan(None, s.metadata), chosen)
    monkeypatch.setattr(gluon_backend, "chosen_planes_attention", lambda *args: asked.append("gluon"))
    backend.prefix_tail(s.q, s.kv, plan, s.tail, s.scale)
    assert asked == ["gluon" if words is None else "triton"]
    assert (words or "") in caplog.text
    assert bool(caplog.text) == (words is not None)


def test_splits_fill_the_card_once():
    """Of a program for each multiprocessor; more splits than pages, or than a merge takes, there are never."""
    gpu = GpuTraits(132, True, 227 << 10)
    assert [choose_splits(programs, 2048, gpu) for programs in (16, 64, 256, 1024)] == [8, 2, 1, 1]
    assert choose_splits(1, 2048, gpu) == 64
    assert choose_splits(2, 3, gpu) == 3
    assert choose_splits(300, 0, gpu) == 1
