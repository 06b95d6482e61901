"""Shapes of calls of attention that benchmarks check and time, as engines make such calls."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from frame import DEVICE

from treetop.attention.capabilities import GroupNeed, Need
from treetop.kernels.attention.attention_config import CallShape
from treetop.types.ids import FULL

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    """One call. kind: tree, plain, draft or sparse (prefix and tail), prefix (no tail), prefill (causal, in the pages).

    fp8: K/V are in it. latent: of planes that are key and value, their first numbers. index_dim: what lies beside the
    head_dim numbers of a plane for an indexer; top_k: how many keys it has chosen for each query, each by itself.
    """

    kind: str
    rows: int
    n: int
    prefix_len: int
    tail: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    ragged: bool = False
    max_kv_len: int | None = None
    longest: int | None = None
    fp8: bool = False
    latent: int | None = None
    index_dim: int = 0
    top_k: int = 0

    @property
    def longest_len(self) -> int:
        """Of the one row that has more keys than the others, if there is one."""
        return self.longest or self.prefix_len

    @property
    def capacity(self) -> int:
        """The bound that a launch is made for: a captured graph's is the context limit."""
        return self.max_kv_len or self.longest_len

    @property
    def need(self) -> Need:
        """What an engine with such layers asks of a backend."""
        width, top_k = self.head_dim + self.index_dim, self.top_k
        group = GroupNeed(
            FULL, self.heads, self.kv_heads, width, self.window, self.latent, top_k, index_dim=self.index_dim
        )
        rows, queries = (0, 0) if self.kind == "prefill" else (self.rows, self.n)
        return Need(self.dtype, DEVICE, self.page_size, (group,), rows=rows, queries=queries, fp8_kv=self.fp8)

    @property
    def call(self) -> CallShape:
        group, causal = self.heads // self.kv_heads, self.kind == "prefill"
        size = self.dtype.itemsize
        seen = self.capacity if causal or self.window is None else min(self.capacity, self.window)
        return CallShape(self.rows, self.n, self.kv_heads, group, self.head_dim, size, seen, causal, self.top_k)

    @property
    def planes(self) -> int:
        return 2 if self.latent is None else 1

    @property
    def stored(self) -> int:
        """Keys in the pages of a layer."""
        return self.rows * self.prefix_len + self.longest_len - self.prefix_len

    @property
    def page_bytes(self) -> int:
        """Of the pages of a layer."""
        return self.stored * self.planes * self.kv_heads * (self.head_dim + self.index_dim) * self.kv_itemsize

    @property
    def kv_bytes(self) -> int:
        """K/V of one layer's pages that a call reads: of chosen keys those that any query of a row may have."""
        keys = min(self.stored, self.rows * self.n * self.top_k) if self.top_k else self.stored
        return keys * self.planes * self.kv_heads * self.head_dim * self.kv_itemsize

    @property
    def kv_itemsize(self) -> int:
        return 1 if self.fp8 else self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """What a call must read and write once."""
        queries = self.rows * self.n * self.heads * (self.head_dim + self.value_dim)
        tail = self.planes * self.rows * self.tail * self.kv_heads * self.head_dim
        return self.kv_bytes + queries * self.dtype.itemsize + tail * self.kv_itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products."""
        seen = min(self.prefix_len, self.top_k or self.prefix_len) + self.tail
        if self.kind == "prefill":
            seen = self.prefix_len - (self.n - 1) // 2
        return 2 * self.rows * self.n * seen * self.heads * (self.head_dim + self.value_dim)

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim


def shapes_to_time() -> list[Shape]:
    """The shapes of design.md's table, plain decoding, draft phases and prefill chunks."""
    tree = [(1, 16, 16384), (32, 8, 2048), (32, 16, 4096), (8, 64, 2048), (1, 8, 1024)]
    draft = [(1, 4, 1024, 20), (8, 6, 1024, 6), (32, 4, 1024, 12)]
    prefill = [(1, 512, 512), (1, 512, 8192), (4, 2048, 2048)]
    whole_and_prefix = [
        Shape(kind, rows, n, 2048, tail)
        for rows in (1, 8)
        for n in (8, 16)
        for kind, tail in (("tree", n), ("prefix", 0))
    ]
    return [
        *whole_and_prefix,
        *[Shape("tree", rows, n, length, n) for rows, n, length in tree],
        *[Shape("plain", rows, 1, 1024, 1) for rows in (1, 8, 32)],
        Shape("plain", 8, 1, 32768, 1),
        *[Shape("tree", rows, n, 1024, n, max_kv_len=16384) for rows, n in ((1, 16), (8, 16))],
        *[Shape("plain", rows, 1, 1024, 1, max_kv_len=16384) for rows in (1, 8)],
        *[Shape("draft", rows, n, length, tail) for rows, n, length, tail in draft],
        *[Shape("prefill", rows, n, length, 0) for rows, n, length in prefill],
    ]


PREFILL_QUERIES = (512, 1024, 2048, 4096, 8192)
PREFILL_KEYS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SHORT_PROMPTS = ((4, 512, 1024), (16, 512, 512), (32, 256, 256), (64, 128, 128))


def exact_shapes() -> list[Shape]:
    """Decoding and trees by batch and context, prefill, and a batch of which one row is long."""
    sizes = itertools.product((1, 8, 32), (1024, 8192, 32768), (1, 4, 16))
    decode = [Shape("tree" if n > 1 else "plain", rows, n, length, n) for rows, length, n in sizes]
    prefill = [Shape("prefill", 1, min(length, 8192), length, 0) for length in (1024, 8192, 32768)]
    mixed = [
        Shape("tree" if n > 1 else "plain", 32, n, 1024, n, max_kv_len=32768, longest=longest)
        for n in (1, 16)
        for longest in (None, 8192, 32768)
    ]
    return [*decode, *prefill, *mixed]


def prefill_shapes() -> list[Shape]:
    """Chunks of one prompt and of eight, from the beginning of a prompt to 32k tokens into it; many short prompts.

    The shapes of least work first, so that a run that ends early lacks the fewest.
    """
    sizes = [(rows, n, keys) for rows, n, keys in itertools.product((1, 8), PREFILL_QUERIES, PREFILL_KEYS) if keys >= n]
    shapes = [Shape("prefill", rows, n, keys, 0) for rows, n, keys in [*sizes, *SHORT_PROMPTS]]
    return sorted(shapes, key=lambda shape: shape.operations)


def sparse_shape(heads: int, keys: int, rows: int, n: int) -> Shape:
    """A round of sparse attention (DSA) as DeepSeek-V3.2 (128 heads) and GLM-5 (64) have it."""
    whole = Shape("sparse", rows, n, keys, n, heads, 1, 576, 64)
    return replace(whole, max_kv_len=keys, latent=512, index_dim=128, top_k=2048)


def sparse_shapes() -> list[Shape]:
    """Plain rounds and trees, those of 8k keys first."""
    sizes = itertools.product((8192, 32768), (8, 1, 32), (1, 16, 4), (128, 64))
    return [sparse_shape(heads, keys, rows, n) for keys, rows, n, heads in sizes]


def shapes_to_check() -> Iterator[Shape]:
    """Ragged batches with a padding row, across dtypes, windows, head widths and page sizes; keys that are chosen."""
    base = Shape("tree", 5, 11, 700, 11, ragged=True)
    for dtype in DTYPES:
        for window in (None, 100):
            yield replace(base, dtype=dtype, window=window)
            yield replace(base, dtype=dtype, window=window, kind="prefill", n=150, tail=0)
    yield replace(base, heads=14, kv_heads=2, head_dim=64, page_size=1)
    yield replace(base, heads=4, kv_heads=4, head_dim=80, page_size=64, prefix_len=5000)
    yield replace(base, n=64, tail=64, head_dim=256, heads=8, kv_heads=4)
    yield replace(base, n=1, tail=1, rows=40)
    yield replace(base, kind="prefill", n=300, tail=0, prefix_len=3000, rows=2)
    for heads, n in ((128, 1), (64, 16), (20, 5)):
        for dtype in (torch.bfloat16, torch.float16):
            yield replace(sparse_shape(heads, 3000, 5, n), ragged=True, dtype=dtype)
