"""Rows for compressed attention by position, whose queries and planes carry an indexer's heads and keys behind them."""

from dataclasses import dataclass

import torch

from support.segment_rows import SCALE, Setting, make_row
from treetop.attention.contract import TailKV
from treetop.kernels.attention.index_topk import choose_paged_keys
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_segments import choose_segments, prefill_latents, segment_latents
from treetop.kernels.attention.segments import block_of
from treetop.kernels.kv import PagedKV


def make_latent_row(length, parent, setting, *, heads=4, dtype=torch.float16, seed=0, change=None):
    """Normal numbers; where keys are chosen, those of the indexer are small whole ones, so that scores are often equal.

    change: as of `make_row`.
    """

    def spoil(kv, tail, q):
        if change is not None:
            change(kv, tail, q)
        for each in (kv, tail, q):
            each[..., setting.dim :] = each[..., setting.dim :].round().clamp(-1, 1)

    sizes = {"heads": heads, "kv_heads": 1, "dim": setting.dim + setting.index, "planes": 1, "fp8": setting.fp8}
    return make_row(length, parent, dtype=dtype, seed=seed, change=spoil, **sizes)


@dataclass(frozen=True)
class LatentSetting(Setting):
    """rank: of a plane of `dim` numbers, the value. index: numbers of an indexer's key. top_k: keys that a query sees,
    or all."""

    rank: int = 32
    dim: int = 48
    index: int = 16
    top_k: int | None = None

    def attend(self, q, kv, metadata, tail, gpu):
        q, query = self._asked(q)
        pages, columns, scales = self.stored(kv.data), self.stored(tail.data), self.scales(kv.data)
        paged, seen = (
            PagedKV(pages, self.rank, self.index, scales),
            TailKV(columns, self.rank, self.index, scales),
        )
        block = self.block or block_of(self.dim, q.element_size())
        if query is None:
            plan = self.plan(metadata, self.shares, block, gpu, self.unit)
        else:
            keys = choose_paged_keys(query, paged.index_keys, metadata, seen.index_keys, gpu, exact=True)
            plan = choose_segments(metadata, keys, self.shares, block, gpu, self.unit)
        return segment_latents(q, paged.planes, plan, seen.planes, self.rank, SCALE, gpu, self.launch, paged.scales)

    def attend_prefill(self, q, pages, metadata, gpu):
        q, query = self._asked(q)
        kv = PagedKV(self.stored(pages), self.rank, self.index, self.scales(pages))
        block = self.block or block_of(self.dim, q.element_size())
        if query is not None:
            keys = choose_paged_keys(query, kv.index_keys, metadata, None, gpu, exact=True)
            metadata = choose_segments(metadata, keys, self.shares, block, gpu).of(metadata)
        return prefill_latents(q, kv.planes, metadata, self.rank, SCALE, gpu, self.prefill, kv.scales, block, self.unit)

    def _asked(self, q):
        """Queries, and what an indexer asks with, if it does: the heads behind them."""
        own = q[..., : self.dim].contiguous()
        if self.top_k is None:
            return own, None
        return own, IndexQuery(q[..., self.dim :].contiguous(), q[..., self.dim].float().contiguous(), self.top_k)
