"""Attention libraries in plain PyTorch with the vendors' exact layouts, and what they leave where nothing is asked.

FlashAttention-3: an operator with the schema of the compiled build (out [rows, n, heads, d], lse [rows, heads, n]
natural, uninitialised memory where `seqused_q` ends, which is NaN here; lse -inf and out 0 for a row without keys).
FlashInfer: a wrapper whose `run` may only see what `plan` was given on the host (lse [queries, heads], base 2; a row
without keys leaves a large negative number, and an out that must not be used).
FlashMLA: `flash_mla_with_kvcache` over planes that are key and value (lse [rows, heads, n] natural, +inf and out 0 for
a row without keys), and what its first call leaves for those that share its lengths.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch

_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,"
    " int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,"
    " Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,"
    " float softmax_scale, bool is_causal, int window_size_left, int window_size_right, {chunk}float softcap,"
    " bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin"
    "{rest}) -> Tensor[]"
)
_SCHEDULER = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,"
    " int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new,"
    " bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa,"
    " int sm_margin) -> Tensor"
)
_WHEEL_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,"
    " Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None,"
    " Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None,"
    " Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,"
    " float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1,"
    " int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None,"
    " int num_splits=0, bool? pack_gqa=None, int sm_margin=0, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_WHEEL_SCHEDULER = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,"
    " int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None,"
    " int? page_size=None, int max_seqlen_k_new=0, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, int attention_chunk=0, bool has_softcap=False, int num_splits=0,"
    " bool? pack_gqa=None, int sm_margin=0) -> Tensor"
)


@dataclass(frozen=True)
class Build:
    """A compiled FlashAttention-3: its namespace, and the schemas of its operators, of which the second may lack."""

    namespace: str
    fwd: str
    scheduler: str | None = _SCHEDULER


FA3_WHEEL = "tokenspeed-fa3"
"""The extra `fa3`: schemas as tokenspeed-fa3 3.0.0.post20260810 registers them, but for what they say of aliases."""
_OF_VLLM = ", Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
_CHUNK = "int attention_chunk, "
BUILDS = {
    "vllm": Build("_vllm_fa3_C", _FWD.format(chunk="", rest=_OF_VLLM)),
    "hopper": Build("flash_attn_3", _FWD.format(chunk=_CHUNK, rest="")),
    "sgl-kernel": Build("sgl_kernel", _FWD.format(chunk=_CHUNK, rest=", Tensor? sinks"), scheduler=None),
    FA3_WHEEL: Build("flash_attn_3", _WHEEL_FWD, _WHEEL_SCHEDULER),
}
calls = []  # operands of every call, by name, for tests to look at


def register_fa3(name):
    """Define `fwd` of a build, and its scheduler's operator; returns the library, which keeps them alive."""
    build = BUILDS[name]
    library = torch.library.Library(build.namespace, "DEF")
    library.define(build.fwd)
    library.impl("fwd", _by_name(build, "fwd", attend), "CPU")
    if build.scheduler is not None:
        library.define(build.scheduler)
        library.impl("get_scheduler_metadata", _by_name(build, "get_scheduler_metadata", schedule), "CPU")
    return library


def _by_name(build, operator, run):
    """`run` of operands by their names, which a schema gives; the last ones do not come where they are its defaults."""
    schema = getattr(getattr(torch.ops, build.namespace), operator).default._schema
    names, several = [each.name for each in schema.arguments], len(schema.returns) > 1
    defaults = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}

    def call(*operands):
        made = run(defaults | dict(zip(names, operands, strict=False)))
        return tuple(made) if several else made

    return call


def attend(given):
    calls.append(given)
    return fa3(given)


def schedule(given):
    """A tensor that says what it was made for."""
    neutral = {"window_size_left": -1, "window_size_right": -1, "max_seqlen_k_new": 0, "has_softcap": False}
    causal = given["is_causal"]
    assert all(given[name] == value for name, value in neutral.items())
    assert given["num_splits"] == int(causal)
    assert (given["cu_seqlens_q"] is not None) == causal
    assert (given["seqused_q"] is not None) == causal
    assert given["headdim"] == given["headdim_v"]
    assert given["seqused_k"].dtype == torch.int32
    names = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "page_size")
    return torch.tensor([*(given[name] for name in names), int(causal)], dtype=torch.int32)


def fa3(given):
    q, k, v, table = given["q"], given["k"], given["v"], given["page_table"]
    starts = given.get("cu_seqlens_q")
    if starts is not None:  # sequences side by side, here all of one length
        n = given["max_seqlen_q"]
        assert starts.tolist() == list(range(0, len(q) + n, n))
        q = q.unflatten(0, (-1, n))
    rows, n, heads, _ = q.shape
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert table.dtype == given["seqused_k"].dtype == torch.int32
    assert table.shape[0] == rows
    assert (given["window_size_left"], given["window_size_right"], given["softcap"]) == (-1, -1, 0.0)
    assert given.get("cp_world_size", 1) == 1
    if given.get("scheduler_metadata") is not None:
        made_for = [rows, n, given["max_seqlen_k"], heads, k.shape[2], q.shape[3], k.shape[1], int(given["is_causal"])]
        assert given["scheduler_metadata"].tolist() == made_for
    assert int(given["seqused_k"].max()) <= given["max_seqlen_k"] <= table.shape[1] * k.shape[1]
    out, lse = torch.full(q.shape, math.nan, dtype=q.dtype), torch.full((rows, heads, n), math.nan)
    for i in range(rows):
        length = int(given["seqused_k"][i])
        count = n if given["seqused_q"] is None else int(given["seqused_q"][i])
        pages = table[i, : -(-length // k.shape[1])].long()  # what lies past the length is not read
        keys, values = (x[pages].flatten(0, 1)[:length].repeat_interleave(heads // k.shape[2], 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q[i, :count].float(), keys.float()) * given["softmax_scale"]
        if given["is_causal"]:  # aligned to the last key and the last query that is used
            late = torch.arange(length) > torch.arange(count)[:, None] + length - count
            scores = scores.masked_fill(late, -math.inf)
        lse[i, :, :count] = scores.logsumexp(-1)
        out[i, :count] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values.float()).to(q.dtype)
    if starts is not None:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).reshape(heads, -1)
    return [out, lse, torch.empty(0), torch.empty(0)]


class FakeFlashInfer:
    """Stands for BatchPrefillWithPagedKVCacheWrapper."""

    made: ClassVar[list] = []  # every wrapper

    def __init__(self, workspace, layout, *, backend, use_cuda_graph=False, **buffers):
        assert (workspace.dtype, layout, backend) == (torch.uint8, "NHD", "fa2")
        self.static, self.buffers, self.plans = use_cuda_graph, buffers, 0
        FakeFlashInfer.made.append(self)

    def plan(  # noqa: PLR0917 - the vendor's
        self, qo, kv, indices, last, heads, kv_heads, dim, page_size, *, causal, q_data_type, kv_data_type
    ):
        for tensor in (qo, kv, indices, last):
            assert tensor.dtype == torch.int32
            assert tensor.device.type == "cpu"
        assert q_data_type == kv_data_type
        if self.static:
            assert len(qo) == len(self.buffers["qo_indptr_buf"]) == len(self.buffers["paged_kv_indptr_buf"])
            assert len(indices) <= len(self.buffers["paged_kv_indices_buf"])
            assert len(last) == len(self.buffers["paged_kv_last_page_len_buf"])
        self.plans += 1
        self.given = (qo.tolist(), kv.tolist(), indices.clone().long(), last.tolist())
        self.heads = (heads, kv_heads, dim, page_size, causal)

    def run(self, q, kv_cache, *, out, return_lse, q_scale):
        qo, indptr, indices, last = self.given
        heads, kv_heads, dim, page_size, causal = self.heads
        (k, v), total = kv_cache, qo[-1]
        assert q.shape == (total, heads, dim)
        assert k.shape[1:] == v.shape[1:] == (page_size, kv_heads, dim)
        assert k.stride() == v.stride()
        assert return_lse
        lse = torch.full((total, heads), -5e4)
        scale = dim**-0.5 * (q_scale or 1.0)
        for i in range(len(qo) - 1):
            mine, pages = slice(qo[i], qo[i + 1]), indices[indptr[i] : indptr[i + 1]]
            length = max(len(pages) - 1, 0) * page_size + last[i]
            if length == 0:
                out[mine] = math.nan
                continue
            keys, values = (x[pages].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = torch.einsum("nhd,mhd->hnm", q[mine].float(), keys.float()) * scale
            if causal:
                count = qo[i + 1] - qo[i]
                late = torch.arange(length) > torch.arange(count)[:, None] + length - count
                scores = scores.masked_fill(late, -math.inf)
            lse[mine] = scores.logsumexp(-1).T / math.log(2)
            out[mine] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values.float()).to(q.dtype)
        return out, lse


class FakeFlashMLA:
    """Stands for the package `flash_mla`, with kernels for these pages and planes."""

    def __init__(self, page=64, rank=512, rope_dim=64):
        self.sizes, self.calls = (page, rank, rope_dim), []

    def get_mla_metadata(self):
        return SimpleNamespace(of=None), None

    def flash_mla_with_kvcache(  # noqa: PLR0917 - the vendor's
        self, q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, use_legacy=False,
    ):  # fmt: skip
        page, rank, rope_dim = self.sizes
        rows, n, heads, dim = q.shape
        assert (dim, head_dim_v, use_legacy, causal, is_fp8_kvcache) == (rank + rope_dim, rank, True, False, False)
        assert k_cache.shape[1:] == (page, 1, dim)
        assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        assert cache_seqlens.is_contiguous()
        assert len(block_table) == len(cache_seqlens) == rows
        made_for = (*q.shape, *cache_seqlens.tolist())
        assert tile_scheduler_metadata.of in (None, made_for), "work was divided for other lengths"
        tile_scheduler_metadata.of = made_for
        self.calls.append((q, k_cache, block_table, tile_scheduler_metadata))
        out, lse = torch.zeros(rows, n, heads, rank, dtype=q.dtype), torch.full((rows, heads, n), math.inf)
        for i, length in enumerate(cache_seqlens.tolist()):
            k_cache[block_table[i, 0].item()]  # what it reads of a row without keys
            if length == 0:
                continue
            keys = k_cache[block_table[i, : -(-length // page)].long()].flatten(0, 2)[:length]
            scores = torch.einsum("nhd,md->hnm", q[i].float(), keys.float()) * softmax_scale
            lse[i] = scores.logsumexp(-1)
            out[i] = torch.einsum("hnm,md->nhd", scores.softmax(-1), keys[:, :rank].float()).to(q.dtype)
        return out, lse
