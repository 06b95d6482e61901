"""A library for compressed attention (MLA) that only this file knows: result and log-sum-exp of a prefix.

It stands for what a vendor brings: it reads pages alone, in its own base, and FP8 K/V in a format of mixed parts. Tail,
merge, drafts and everything else are the engine's.
"""

import sys
from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Literal, get_args

import pytest
import torch

from support.engines import build, greedy, tokens
from support.families import FAMILIES
from support.refusing import refused
from support.scenes import assert_close, dense_answer, scene
from treetop.attention import registry
from treetop.attention.capabilities import Capabilities, GroupNeed, Need
from treetop.attention.contract import BackendSpec
from treetop.attention.library_backend import LibraryBackend
from treetop.attention.registry import BACKENDS, refusal
from treetop.attention.torch_backend import TorchBackend
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.attention.tail import tail_and_merge_reference
from treetop.kernels.kv import KVParts, decoded
from treetop.kernels.table import OpContext, Ops
from treetop.types import options
from treetop.types.config import Backend, EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.ids import DRAFT, FULL
from treetop.types.kv import KVFormat, KVPart, compressed

NAME = "by-latents"
ABLE = Capabilities(
    (torch.float64, torch.float32), latents=None, fp8_kv=True, own_windows=False, own_sinks=False, captures=False
)
phases = []


class LatentLibrary:
    """Row after row over its pages; the log-sum-exp in base 2, and no numbers at all where a row is empty."""

    def begin(self, metadata):
        return metadata

    def plan(self, begun, metadata):
        def attend(q, kv, scale):
            phases.append(metadata.phase)
            width = kv.value_dim or q.shape[-1]
            out = torch.full((*q.shape[:3], width), float("nan"), dtype=q.dtype)
            lse = torch.full(q.shape[:3], float("nan"), dtype=q.dtype)
            for row, (own, length) in enumerate(zip(metadata.rows.tolist(), metadata.kv_len.tolist(), strict=True)):
                if length == 0:
                    continue
                at = torch.arange(length)
                slots = metadata.table.data[own, at // metadata.page_size].long() * metadata.page_size
                stored = decoded(kv.data[slots + at % metadata.page_size], kv.scales, q.dtype, kv.parts)
                group = q.shape[2] // stored.shape[2]
                k, v = (stored[:, plane].repeat_interleave(group, dim=1) for plane in (0, -1))
                scores = torch.einsum("nhd,thd->nht", q[row], k) * scale
                if metadata.causal:
                    scores = scores.masked_fill((at > metadata.positions[row][:, None])[:, None], float("-inf"))
                out[row] = torch.einsum("nht,thd->nhd", scores.softmax(-1), v[..., :width])
                lse[row] = scores.logsumexp(-1) / log(2)
            return PrefixPart(out, lse.float() if q.dtype != torch.float64 else lse, metadata.kv_len, log(2))

        return attend

    def plan_round(self, round):
        raise AssertionError("lengths are read from the batch")


def parts_of(form: KVFormat) -> tuple[KVPart, ...]:
    """The latent in e4m3, a float32 factor for each half, then the part with RoPE in bfloat16."""
    latent = form.value_dim
    return KVPart(latent, "float8_e4m3fn", latent // 2), KVPart(form.head_dim - latent, "bfloat16")


def stores(form: KVFormat) -> KVFormat:
    return replace(form, fp8=False, parts=parts_of(form)) if form.fp8 and form.value_dim else form


def make(need: Need) -> LibraryBackend:
    windows = TorchBackend(need.dtype, need.device)
    return LibraryBackend(NAME, ABLE, LatentLibrary(), windows, Ops(OpContext(need.device, need.dtype)))


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """The file, and the line in the registry."""
    spec = BackendSpec(ABLE, make, stores=stores)
    monkeypatch.setitem(sys.modules, f"treetop.attention.{NAME}_backend", SimpleNamespace(BACKEND=spec))
    monkeypatch.setitem(EngineConfig.__annotations__, "attention_backend", Literal[*get_args(Backend), NAME])
    monkeypatch.setitem(registry.BACKENDS, NAME, registry.load(NAME))
    options._table.cache_clear()
    phases.clear()
    yield
    monkeypatch.undo()
    options._table.cache_clear()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return FAMILIES["deepseek v3"].save(tmp_path_factory.mktemp("latents"), seed=5).pair


# ------------------------------------------------------------------------------------------------------ tail and merge


@pytest.mark.parametrize("fp8", [False, True])
def test_a_tail_of_one_plane_is_merged_by_log_sum_exp(fp8):
    """Dense attention over prefix and tail, for a value that is the first numbers of the key, in any base."""
    s = scene(kv_heads=1, dim=26, latent=20, fp8=fp8)
    backend = make(Need(s.q.dtype, torch.device("cpu")))
    got = backend.prefix_tail(s.q, s.kv, backend.plan(backend.begin(s.metadata), s.metadata), s.tail, s.scale)
    assert got.shape == (*s.q.shape[:3], 20)
    assert_close(got[s.real], dense_answer(s, with_tail=True)[0][s.real], s)


def test_a_prefix_that_was_not_merged_shows():
    """Without the library's part, or with its log-sum-exp in the wrong base, the result is another."""
    s = scene(kv_heads=1, dim=26, latent=20)
    plan = LatentLibrary().plan(s.metadata, s.metadata)
    part = plan(s.q, s.kv, s.scale)
    tail, want = s.tail.planes, dense_answer(s, with_tail=True)[0][s.real]
    good = tail_and_merge_reference(s.q, part, tail, s.metadata, s.scale, value_dim=20)[s.real]
    assert_close(good, want, s)
    empty = replace(part, kv_len=torch.zeros_like(part.kv_len))
    for wrong in (replace(part, unit=1.0), empty):
        got = tail_and_merge_reference(s.q, wrong, tail, s.metadata, s.scale, value_dim=20)[s.real]
        assert float((got - want).abs().max()) > 1e-3


# ------------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("shape", [(3, 2, 6), (1, 3, 4)], ids=str)
def test_trees_on_it_give_what_plain_decoding_gives_elsewhere(pair, shape):
    """All four phases ask it; greedy tokens are those of PyTorch's backend without a draft."""
    prompts = pair.prompts([3, 14, 9])
    plain = build(pair, None, dtype="float64", attention_backend="torch", context_length=64, page_size=4)
    llm = build(pair, shape, dtype="float64", attention_backend=NAME, context_length=64, page_size=4, check_level=3)
    assert llm.engine.runner.backend.name == NAME
    assert llm.engine.layout.group(FULL).kv == compressed(20, 6)
    outputs = llm.generate(prompts, greedy(12))
    assert tokens(outputs) == tokens(plain.generate(prompts, greedy(12)))
    assert {phase.value for phase in phases} == {"prefill", "draft", "verify", "extend"}
    plain.close()
    llm.close()


def test_pages_of_mixed_parts_give_plain_tokens_and_those_of_a_dense_forward(pair):
    """Trees, chunks, a prefix from the cache and poisoned pages: tail and page hold the same bytes."""
    given = {"dtype": "float64", "context_length": 64, "page_size": 4, "kv_cache_dtype": "fp8_e4m3"}
    given |= {"attention_backend": NAME, "chunked_prefill_size": 6, "check_level": 3}
    prompts = pair.prompts([3, 14, 9])
    plain, llm = build(pair, None, **given), build(pair, (3, 2, 6), **given)
    form, pools = llm.engine.layout.group(FULL).kv, llm.engine.runner.pools
    assert (form.width, form.itemsize(8)) == (20 + 2 * 4 + 6 * 2, 1)
    assert pools[FULL].data.dtype == torch.uint8
    assert pools[FULL].data.shape[2:] == llm.engine.runner.buffers.verify_tails[FULL].shape[3:] == (1, 1, 40)
    assert pools[DRAFT].data.dtype == torch.float8_e4m3fn  # of the head, whose K/V are a pair with scales
    outputs = llm.generate(prompts, greedy(12))
    assert tokens(outputs) == tokens(plain.generate(prompts, greedy(12)))
    assert tokens(llm.generate(prompts, greedy(12))) == tokens(outputs)  # behind what the cache has
    for prompt, output in zip(prompts, outputs, strict=True):
        for n, token in enumerate(output.token_ids[:4]):
            assert int(llm.next_logits([*prompt, *output.token_ids[:n]]).argmax()) == token
    plain.close()
    llm.close()


# -------------------------------------------------------------------------------------------------------------- format


def test_a_published_format_takes_the_bytes_that_it_is_said_to_take():
    """FlashMLA's FP8 K/V: 512 codes, four float32 factors, 64 numbers in bfloat16; 656 bytes a token.

    Source: the README of github.com/deepseek-ai/FlashMLA.
    """
    published = KVPart(512, "float8_e4m3fn", 128), KVPart(64, "bfloat16")
    form = replace(compressed(512, 64), parts=published)
    assert (form.width, form.numbers, form.itemsize(2), form.output_dim) == (656, 656, 1, 512)
    parts = KVParts(published, torch.float32)
    x = torch.randn(5, 1, 1, 576, generator=torch.Generator().manual_seed(3))
    x[1] = 0
    data = parts.packed(x)
    assert data.shape == (5, 1, 1, 656)
    factor = x[..., :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448
    assert torch.equal(data[0, 0, 0, 512:528].view(torch.float32), factor[0, 0, 0])
    assert torch.equal(data[..., 528:].contiguous().view(torch.bfloat16), x[..., 512:].to(torch.bfloat16))
    back = parts.unpacked(data)
    assert torch.equal(back[1], x[1])
    step = factor.repeat_interleave(128, -1) * torch.finfo(torch.float8_e4m3fn).smallest_normal
    allowed = (x[..., :512].abs() / 16).maximum(step)  # three bits behind the point
    assert bool(((back - x)[..., :512].abs() <= allowed).all())


def test_a_format_whose_parts_are_not_its_plane_is_none():
    with pytest.raises(AssertionError):
        replace(compressed(20, 6), parts=(KVPart(20, "bfloat16"),))
    with pytest.raises(AssertionError):
        replace(compressed(20, 6), parts=(KVPart(20, "float8_e4m3fn", 3), KVPart(6, "bfloat16")))


# ------------------------------------------------------------------------------------------------------------- refused


def test_what_cannot_be_is_refused_by_name(pair):
    """Bits that depend on no batch, and sparse attention; and the libraries that have no kernel for latents."""
    problem = f"--exactness bits: attention backend {NAME} is not exact; use --attention-backend torch"
    refused(
        ConfigError, lambda: build(pair, (3, 2, 6), attention_backend=NAME, exactness="bits", dtype="float32"), problem
    )
    cpu = torch.device("cpu")
    for sparse, able in ((True, False), (False, True)):
        group = GroupNeed(FULL, 4, 1, 26, latent=20, top_k=9 if sparse else 0)
        found = refusal(NAME, Need(torch.float32, cpu, groups=(group,)))
        assert (found is None) is able
        assert able or "no kernel for sparse attention" in found.reason
    others = [name for name, spec in BACKENDS.items() if spec.capabilities.latents == ()]
    assert {"flashinfer", "fa3"} <= set(others)
