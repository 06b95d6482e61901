"""The backend of the kernel in Gluon: what goes to it, what does not, what is refused, and when it is believed.

No interpreter runs Gluon, so PyTorch's reference stands for the kernel here; test_gpu_latent_gluon.py has the real one.
"""

from dataclasses import replace

import pytest
import torch

from support.engines import build
from support.families import FAMILIES
from support.scenes import assert_close, dense_answer, scene
from treetop.attention import auto, gluon_backend, triton_backend
from treetop.attention.auto import choose, load_table, page_size_for
from treetop.attention.capabilities import BackendRefusal, GroupNeed, Need
from treetop.attention.gluon_backend import GluonBackend
from treetop.attention.registry import BACKENDS, refusal
from treetop.engine.startup.layer_groups import group_needs
from treetop.engine.startup.startup_log import attention_words
from treetop.kernels import gluon_guard
from treetop.kernels.attention.latent_attention import latent_attention_reference
from treetop.kernels.attention.latent_gluon import RANK, choose_splits
from treetop.kernels.attention.metadata import SparseKeys
from treetop.kernels.triton_guard import GpuTraits
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
    monkeypatch.setattr(auto, "fallback", lambda need: "segments" if need.exact else "triton")
    assert page_size_for("auto", need) == 64
    assert page_size_for("auto", replace(need, exact=True)) == 16
    assert page_size_for("auto", need_of(DENSE, page=None)) == 16
    assert page_size_for("auto", need_of(replace(many, sparse=True), page=None)) == 16  # no times of chosen keys
    served.remove("gluon")
    assert page_size_for("auto", need) == 16


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
    backend = BACKENDS["gluon"].make(need_of(replace(LATENT, sparse=True)))
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
