"""Random attention calls with the pages poisoned where no query may look, and their dense answer."""

from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from support.fp8 import rounded
from support.tolerance import attention_errors
from treetop.attention.contract import TailKV
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.kv import PagedKV, PageTable
from treetop.kernels.tree.tree import ancestor_mask
from treetop.types.ids import FULL
from treetop.types.phase import Phase

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Scene:
    """A ragged batch: a full row, an empty one, random ones, and the padding row, each with n queries.

    The page table and kv are poisoned: NaN in every slot and INT_MIN in every column that no query may see. k, v:
    [rows, max_kv_len, kv_heads, dim] dense and clean, tail_k, tail_v the same of the tail; in FP8 what codes stand for.
    seen: [rows, n, max_kv_len] bool.
    """

    q: Tensor
    metadata: AttentionMetadata
    kv: PagedKV
    tail: TailKV
    k: Tensor
    v: Tensor
    tail_k: Tensor
    tail_v: Tensor
    seen: Tensor
    real: Tensor
    clean: PagedKV
    clean_table: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[3] ** -0.5


def scene(  # noqa: PLR0917 - by keyword
    n=5,
    t=7,
    heads=6,
    kv_heads=2,
    dim=16,
    page_size=4,
    max_kv_len=50,
    window=None,
    dtype=torch.float32,
    causal=False,
    seed=0,
    latent=None,
    fp8=False,
    chunked=False,
    lengths=None,
) -> Scene:
    """Random K/V in pages in random order; prefill rows end with padding queries, as the runner pads them.

    latent: of one plane that is key and value, its first numbers that are the value.
    fp8: K/V are in it, with scales that differ by head.
    lengths: of the rows' prefixes in a decode phase; the last, the padding row's, is 0.
    """
    planes = 2 if latent is None else 1
    torch.manual_seed(seed)
    kv_len = torch.tensor(lengths or [max_kv_len, n if causal else 0, int(torch.randint(n, max_kv_len, ())), 0])
    rows, columns = len(kv_len), -(-max_kv_len // page_size)
    # the last is the dummy: null pages, nothing committed
    row_list = torch.tensor([rows - 2, *range(rows - 2), rows - 1])
    num_pages = 1 + (rows - 1) * columns
    table = torch.zeros((rows, columns), dtype=torch.int32)
    table[:-1] = (torch.randperm(num_pages - 1) + 1).view(rows - 1, columns)
    pages = torch.randn(num_pages * page_size, planes, kv_heads, dim).to(dtype)
    pages[:page_size] = 0
    at = torch.arange(max_kv_len)
    slots = table[row_list[:, None], at // page_size].long() * page_size + at % page_size
    scales = torch.rand(planes, kv_heads) + 0.05 if fp8 else None
    pages, numbers = _stored(pages, scales)
    dense = numbers[slots]

    real = torch.ones(rows, n, dtype=torch.bool)
    if causal:
        count = torch.tensor([n, n, max(n // 2, 1), 0])  # queries of a row that are no padding
        real = torch.arange(n) < count[:, None]
        positions = torch.where(real, (kv_len - count)[:, None] + torch.arange(n), 0)
        t = 0
    else:
        tree = ancestor_mask((torch.rand(rows, t) * torch.arange(t)).long(), t)
        tail_positions = kv_len[:, None] + tree.sum(dim=2) - 1
        mask, positions = tree[:, -n:], tail_positions[:, -n:]
    distance = positions[:, :, None] - at
    seen = (at < kv_len[:, None])[:, None] & real[:, :, None]
    seen = seen & near(positions, at[None], window, chunked) & ((distance >= 0) | torch.tensor(not causal))

    spoilt, spoilt_table = pages.clone(), table.clone()
    live = seen.any(dim=1)  # [rows, max_kv_len]
    if causal and window is not None:  # a window's pages are released behind its first query
        live = live | ((at < kv_len[:, None]) & (at >= positions[:, :1] - window + 1))
    keep = torch.zeros(len(pages), dtype=torch.bool)
    keep[slots[live]] = True
    keep[:page_size] = True
    spoilt[~keep] = torch.full_like(spoilt[:1], float("nan"))
    used = torch.zeros_like(table, dtype=torch.bool)
    used[row_list] = (
        torch.nn.functional.pad(live, (0, columns * page_size - max_kv_len)).unflatten(1, (columns, -1)).any(2)
    )
    spoilt_table[~used] = INT_MIN

    q = torch.randn(rows, n, heads + 2 * kv_heads, dim).to(dtype)[:, :, :heads]  # a slice, as the projection leaves it
    # a slice of a larger buffer
    tail, tail_numbers = (x[:, :t] for x in _stored(torch.randn(rows, t + 3, planes, kv_heads, dim).to(dtype), scales))
    return Scene(
        q=q,
        metadata=AttentionMetadata(
            Phase.VERIFY,
            PageTable(FULL, spoilt_table),
            row_list,
            kv_len,
            max_kv_len,
            page_size,
            positions,
            window,
            None if causal else tail_positions,
            None if causal else mask,
            chunked,
        ),
        kv=PagedKV(spoilt, latent, scales=scales),
        tail=TailKV(tail, latent, scales=scales),
        k=dense[:, :, 0],
        v=dense[:, :, -1, :, :latent],
        tail_k=tail_numbers[:, :, 0],
        tail_v=tail_numbers[:, :, -1, :, :latent],
        seen=seen,
        real=real,
        clean=PagedKV(pages, latent, scales=scales),
        clean_table=table,
    )


def _stored(x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """K/V as they are stored, and what that stands for: in float64, of FP8. scales: [planes, kv_heads]."""
    if scales is None:
        return x, x
    each = scales.double()[..., None]
    codes = rounded(x.double() / each)
    return codes.to(torch.float8_e4m3fn), codes * each


def near(positions: Tensor, keys: Tensor, window: int | None, chunked: bool) -> Tensor:
    """Whether keys [rows, m] are within the window, or in the chunk, of queries [rows, n]: [rows, n, m] bool."""
    query, key = positions[:, :, None], keys[:, None]
    if window is None:
        return torch.ones_like(query == key)
    return query // window == key // window if chunked else query - key < window


def dense_answer(s: Scene, with_tail: bool, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention over everything seen, in one dense product in float64, and the log-sum-exp without the sink.

    Nothing of the code under test is used; a sink is one more logit, of a key without a value.
    """
    k, v, seen, tail = s.k, s.v, s.seen, s.metadata
    if with_tail:
        k, v = torch.cat([k, s.tail_k], dim=1), torch.cat([v, s.tail_v], dim=1)
        within = near(tail.positions, tail.tail_positions, tail.window, tail.chunked)
        seen = torch.cat([seen, tail.mask & within], dim=2)
    k, v = (x.double().repeat_interleave(s.q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bnhd,bmhd->bnhm", s.q.double(), k) * s.scale
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks.double()[:, None].expand(*scores.shape[:3], 1)], dim=3)
    shares = torch.where(seen.any(dim=2)[:, :, None, None], torch.softmax(logits, dim=3), 0)[..., : k.shape[1]]
    out = torch.einsum("bnhm,bmhd->bnhd", shares, v)
    return out, torch.logsumexp(scores, dim=3).float()


def assert_close(got: Tensor, want: Tensor, s: Scene) -> None:
    """Outputs of attention over this scene are as near as its sums let them be."""
    torch.testing.assert_close(got.double(), want.double(), atol=_errors(s)[0], rtol=0)


def assert_close_lse(got: Tensor, want: Tensor, s: Scene) -> None:
    """The same for log-sum-exps, which are float32 in every dtype."""
    torch.testing.assert_close(got, want, atol=_errors(s)[1], rtol=0)


def _errors(s: Scene) -> tuple[float, float]:
    k, v = torch.cat([s.k, s.tail_k], dim=1), torch.cat([s.v, s.tail_v], dim=1)
    return attention_errors(s.q, k, v, s.scale)


def moved(value, device: torch.device):
    """A scene, or any dataclass of tensors, on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value):
        return type(value)(**{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value
