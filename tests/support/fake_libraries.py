"""Attention libraries in plain PyTorch with the vendors' exact layouts, and what they leave where nothing is asked.

FlashAttention-3: an operator with the schema of the compiled build (out [rows, n, heads, d], lse [rows, heads, n]
natural, uninitialised memory where `seqused_q` ends, which is NaN here; lse -inf and out 0 for a row without keys).
FlashInfer: a wrapper whose `run` may only see what `plan` was given on the host (lse [queries, heads], base 2; a row
without keys leaves a large negative number, and an out that must not be used).
"""

import math
from typing import ClassVar

import torch

FA3_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,"
    " int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,"
    " Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,"
    " float softmax_scale, bool is_causal, int window_size_left, int window_size_right, {chunk}float softcap,"
    " bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin"
    "{rest}) -> Tensor[]"
)
BUILDS = {
    "_vllm_fa3_C": {"chunk": "", "rest": ", Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"},
    "flash_attn_3": {"chunk": "int attention_chunk, ", "rest": ""},
    "sgl_kernel": {"chunk": "int attention_chunk, ", "rest": ", Tensor? sinks"},
}
SCHEDULER_SCHEMA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k,"
    " int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new,"
    " bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa,"
    " int sm_margin) -> Tensor"
)
calls = []  # operands of every call, by name, for tests to look at


def register_fa3(namespace):
    """Define torch.ops.<namespace>.fwd; returns the library, which keeps it alive."""
    library = torch.library.Library(namespace, "DEF")
    library.define(FA3_SCHEMA.format(**BUILDS[namespace]))
    names = [a.name for a in getattr(torch.ops, namespace).fwd.default._schema.arguments]

    def fwd(*operands):
        given = dict(zip(names, operands, strict=True))
        calls.append(given)
        return fa3(given)

    library.impl("fwd", fwd, "CPU")
    if namespace != "sgl_kernel":  # one build without it
        library.define(SCHEDULER_SCHEMA)
        library.impl("get_scheduler_metadata", schedule, "CPU")
    return library


def schedule(  # noqa: PLR0917 - the vendor's
    rows, n, max_kv_len, heads, kv_heads, dim, dim_v, dtype, lengths, *rest
):
    """A tensor that says what it was made for."""
    starts, _, _, query_len, _, page_size, new, causal, left, right, softcap, splits, _, _ = rest
    assert (new, left, right, softcap, splits) == (0, -1, -1, False, int(causal))
    assert (starts is not None) == causal
    assert (query_len is not None) == causal
    assert dim == dim_v
    assert lengths.dtype == torch.int32
    return torch.tensor([rows, n, max_kv_len, heads, kv_heads, dim, page_size, int(causal)], dtype=torch.int32)


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
