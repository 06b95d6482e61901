"""Rows for attention by position: trees behind committed keys, and the same queries as plain rows and as prefills."""

from dataclasses import dataclass

import torch

from treetop.attention.contract import TailKV
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.segment_attention import segment_attention
from treetop.kernels.attention.segment_prefill import segment_prefill
from treetop.kernels.attention.segments import UNIT, block_of, plan_segments
from treetop.kernels.kv import FP8, LARGEST, PagedKV, PageTable
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL
from treetop.types.phase import Phase

SCALE, CPU = 0.29, torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """kv: [length, 2, kv_heads, d], committed. parent: of each node, -1 for a root. tail: [t, 2, kv_heads, d].
    q: [t, heads, d]."""

    kv: torch.Tensor
    parent: list[int]
    tail: torch.Tensor
    q: torch.Tensor

    def path(self, node):
        """The columns from the root to a node."""
        columns = []
        while node >= 0:
            columns.insert(0, node)
            node = self.parent[node]
        return columns

    def plain(self, node):
        """The node as the one query of plain decoding, its ancestors committed."""
        *before, _ = path = self.path(node)
        return Row(torch.cat([self.kv, self.tail[before]]), [-1], self.tail[path[-1:]], self.q[path[-1:]])

    def committed(self, node):
        """Keys of a prefill that ends with the node, and the queries of its path."""
        path = self.path(node)
        return torch.cat([self.kv, self.tail[path]]), self.q[path]

    def turned(self, order):
        """The same tree with its columns in another order."""
        back = {column: i for i, column in enumerate(order)}
        parent = [back.get(self.parent[column], -1) for column in order]
        return Row(self.kv, parent, self.tail[order], self.q[order])

    def seen(self, node, kv_head, window=None, chunked=False):
        """position -> (k, v) of what a node sees."""
        keys, _ = self.committed(node)
        first = 0 if window is None else max(len(keys) - window, 0)
        if chunked:
            first = (len(keys) - 1) // window * window
        return {at: tuple(keys[at, :, kv_head]) for at in range(first, len(keys))}


def tree(k, steps, count, generator):
    """Parents of `count` nodes, at most k of a node and `steps` deep, each after its parent."""
    parent, depth, children = [-1], [0], [0]
    while len(parent) < count:
        open_nodes = [i for i, d in enumerate(depth) if d < steps and children[i] < k]
        draw = float(torch.rand((), generator=generator))
        at = open_nodes[-1 - int(draw * draw * len(open_nodes))]  # deep ones more often
        children[at] += 1
        parent.append(at)
        depth.append(depth[at] + 1)
        children.append(0)
    return parent


def make_row(
    length, parent, *, heads=4, kv_heads=2, dim=16, dtype=torch.float16, seed=0, change=None, planes=2, fp8=False
):  # fmt: skip
    """Normal numbers; change(kv, tail, q): spoils them in place, float32. fp8: keys and values are ones of e4m3."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    t = len(parent)
    kv, tail, q = (
        torch.randn(shape, generator=generator)
        for shape in ((length, planes, kv_heads, dim), (t, planes, kv_heads, dim), (t, heads, dim))
    )
    if change is not None:
        change(kv, tail, q)
    if fp8:
        kv, tail = (each.clamp(-LARGEST, LARGEST).to(FP8).float() for each in (kv, tail))
    return Row(kv.to(dtype), parent, tail.to(dtype), q.to(dtype))


def laid_out(keys, page_size, spare=0, seed=5):
    """Pages of rows' keys in random order, infinite where there is no key; the null page is 0. Returns pages, table."""
    generator = torch.Generator().manual_seed(seed)
    columns = -(-(max(len(each) for each in keys) + spare) // page_size) + 1
    table = (1 + torch.randperm(len(keys) * columns, generator=generator)).view(len(keys), columns).to(torch.int32)
    pages = torch.full(((len(keys) * columns + 1) * page_size, *keys[0].shape[1:]), float("inf"), dtype=keys[0].dtype)
    pages[:page_size] = 0
    for row, each in enumerate(keys):
        at = torch.arange(len(each))
        pages[table[row, at // page_size].long() * page_size + at % page_size] = each
    return pages, table


@dataclass(frozen=True)
class Setting:
    """What all calls of a test share. launch: of decode phases, prefill: of the others; None are chosen. shares: of
    the plan. fp8: K/V are codes of it, which differ by plane and head in what they are scaled by."""

    page_size: int = 16
    window: int | None = None
    chunked: bool = False
    sinks: torch.Tensor | None = None
    block: int | None = None
    unit: int = UNIT
    launch: object = None
    prefill: object = None
    device: torch.device = CPU
    max_kv_len: int = 0
    plan: object = plan_segments
    shares: int = 3
    fp8: bool = False

    def metadata_of(self, rows):
        """A phase of rows, whose trees have equally many nodes."""
        count, t = len(rows), len(rows[0].parent)
        mask = torch.zeros(count, t, t, dtype=torch.bool)
        for i, row in enumerate(rows):
            for node in range(t):
                mask[i, node, row.path(node)] = True
        kv_len = torch.tensor([len(row.kv) for row in rows])
        positions = kv_len[:, None] + mask.sum(dim=2) - 1
        pages, table = laid_out([row.kv for row in rows], self.page_size)
        made = [each.to(self.device) for each in (table, torch.arange(count), kv_len, positions, mask, pages)]
        longest = max(int(kv_len.max()), self.max_kv_len)
        metadata = AttentionMetadata(
            Phase.VERIFY, PageTable(FULL, made[0]), made[1], made[2], longest, self.page_size, made[3],
            self.window, made[3], made[4], chunked=self.chunked,
        )  # fmt: skip
        return metadata, PagedKV(made[5]), TailKV(torch.stack([row.tail for row in rows]).to(self.device))

    def decode(self, rows):
        """[rows, t, heads, d]."""
        metadata, kv, tail = self.metadata_of(rows)
        gpu = gpu_traits(self.device)
        q = torch.stack([row.q for row in rows]).to(self.device)
        return self.attend(q, kv, metadata, tail, gpu).cpu()

    def attend(self, q, kv, metadata, tail, gpu):
        """A decode phase. q: [rows, t, heads, d]."""
        block = self.block or block_of(q.shape[-1], q.element_size())
        plan = self.plan(metadata, self.shares, block, gpu, self.unit)
        pages, columns, scales = self.stored(kv.data), self.stored(tail.data), self.scales(kv.data)
        return segment_attention(q, pages, plan, columns, SCALE, self._sinks(), gpu, self.launch, scales)

    def prefilled(self, keys, q):
        """The last queries of each row, in one chunk. keys: [length, 2, kv_heads, d] and q: [n, heads, d] of each."""
        n = max(len(each) for each in q)
        pages, table = laid_out(keys, self.page_size)
        kv_len = torch.tensor([len(each) for each in keys])
        counts = torch.tensor([len(each) for each in q])
        at = torch.arange(n)
        positions = torch.where(at < counts[:, None], (kv_len - counts)[:, None] + at, 0)
        padded = torch.stack([torch.cat([each, each.new_zeros(n - len(each), *each.shape[1:])]) for each in q])
        made = [each.to(self.device) for each in (table, torch.arange(len(keys)), kv_len, positions, padded, pages)]
        metadata = AttentionMetadata(
            Phase.PREFILL, PageTable(FULL, made[0]), made[1], made[2], max(int(kv_len.max()), self.max_kv_len),
            self.page_size, made[3], self.window, chunked=self.chunked,
        )  # fmt: skip
        out = self.attend_prefill(made[4], made[5], metadata, gpu_traits(self.device)).cpu()
        return [each[: len(asked)] for each, asked in zip(out, q, strict=True)]

    def attend_prefill(self, q, pages, metadata, gpu):
        stored, scales, sinks = self.stored(pages), self.scales(pages), self._sinks()
        return segment_prefill(q, stored, metadata, SCALE, sinks, gpu, self.prefill, scales, self.block, self.unit)

    def stored(self, kv):
        """Codes, where what is infinite is NaN, or numbers as they are."""
        return kv.to(FP8) if self.fp8 else kv

    def scales(self, kv):
        """[planes, kv_heads]. kv: [..., planes, kv_heads, d]."""
        planes, heads = kv.shape[-3:-1]
        made = torch.linspace(0.37, 1.9, planes * heads, device=self.device).view(planes, heads)
        return made if self.fp8 else None

    def _sinks(self):
        return None if self.sinks is None else self.sinks.to(self.device)


def same_bits(a, b):
    """Equal to the bit, NaN and the sign of 0 included."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def nodes_alone(setting, row, got, nodes, chunks):
    """The nodes of a row's tree, each as plain decoding and as the end of prefills in chunks, have these bits."""
    plain = setting.decode([row.plain(node) for node in nodes])
    for i, node in enumerate(nodes):
        assert same_bits(plain[i, 0], got[node]), f"node {node} in a batch of plain rows"
    for chunk in chunks:
        keys, queries = zip(*(row.committed(node) for node in nodes), strict=True)
        ends = setting.prefilled(keys, [each[-chunk:] for each in queries])
        for node, end in zip(nodes, ends, strict=True):
            assert same_bits(end, got[row.path(node)[-chunk:]]), f"a prefill of {chunk} up to node {node}"


def as_plain_and_prefilled(setting, row, got, nodes, chunks=(1, 40)):
    """`nodes_alone`, and the last of them in no batch."""
    nodes_alone(setting, row, got, nodes, chunks)
    assert same_bits(setting.decode([row.plain(nodes[-1])])[0, 0], got[nodes[-1]]), "one plain row"
