"""Times compressed attention (MLA) and sparse attention over it (DSA) alone on one GPU, against their floors.

    python benchmarks/latent_attention.py [--json FILE]                      all shapes
    python benchmarks/latent_attention.py --heads 16 --lengths 65536         some of them
    python benchmarks/latent_attention.py --kv-cache-dtype fp8_e4m3          planes of a byte a number
    python benchmarks/latent_attention.py --gluon                            our kernels for pages of 64 beside it
    python benchmarks/latent_attention.py --flashinfer                       that library's kernel beside ours
    python benchmarks/latent_attention.py --flashmla                         that backend, prefix and tail, beside ours
    python benchmarks/latent_attention.py --tune --limit-s 400               the best launches of each shape

A shape is B rows of a committed prefix, each with T queries of a tree and its T columns. Times are of captured calls of
many layers, each with pages of its own, so that nothing comes from the L2 cache that an engine would not find there. As
in a captured engine, a launch is made for the context limit (`--bound`), whatever the lengths. Of sparse attention the
indexer's scores, its choice and the attention are timed each by itself, and all of it. Each shape is compared with a
dense float32 reference first. Floor: the bytes that must move once over this machine's own copy bandwidth, or the
operations over its own bf16 matrix rate, whichever is larger.
"""

import argparse
import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from frame import (
    COLD_BYTES,
    DEVICE,
    copy_bytes_per_s,
    end_with,
    machine_of,
    matrix_operations_per_s,
    median_us,
    parser_of,
    tell,
    write_report,
)
from torch import Tensor

from treetop.attention.auto import make_backend
from treetop.attention.capabilities import GroupNeed, Need
from treetop.attention.contract import TailKV
from treetop.attention.triton_backend import TritonBackend
from treetop.kernels.attention.attention_config import CallShape, Launch, choose_launch
from treetop.kernels.attention.index_scores import paged_index_scores
from treetop.kernels.attention.index_topk import choose_by_scores, choose_by_scores_reference
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention, latent_attention_reference
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.attention.stream_k import make_arrivals
from treetop.kernels.kv import PagedKV, PageTable, encoded
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL
from treetop.types.phase import Phase

RANK, PLANE, INDEX, SCALE = 512, 576, 128, 0.05
TOLERANCE = 1.2e-2
"""Relative error of a right result in bfloat16."""


@dataclass(frozen=True)
class Shape:
    """heads, index_heads: of attention and of its indexer. length: of the prefix. T: `queries`. bound: of lengths.
    itemsize: bytes of a plane's number. page: tokens of a page."""

    heads: int
    length: int
    queries: int
    rows: int
    index_heads: int
    top_k: int
    bound: int
    itemsize: int
    page: int

    @property
    def kept(self) -> int:
        return min(self.top_k, self.length + self.queries)

    def dense(self) -> tuple[float, float]:
        """Bytes and operations of attention to all keys."""
        pairs = self.rows * self.queries * (self.length + self.queries)
        return self.rows * self.length * PLANE * self.itemsize + self._io, 2 * pairs * self.heads * (PLANE + RANK)

    def sparse(self) -> tuple[float, float]:
        """Of the indexer over all keys and attention to the chosen ones, which queries of a row may share."""
        pairs = self.rows * self.queries * (self.length + self.queries)
        chosen = self.rows * self.queries * self.kept
        moved = self.rows * (self.length * INDEX + min(self.kept, self.length) * PLANE) * self.itemsize + self._io
        return moved, 2 * pairs * self.index_heads * INDEX + 2 * chosen * self.heads * (PLANE + RANK)

    @property
    def _io(self) -> int:
        return self.rows * self.queries * self.heads * (PLANE + RANK) * 2

    @property
    def num_layers(self) -> int:
        """So many that the sparse call's index keys and planes are cold."""
        return max(2, min(24, COLD_BYTES // (self.rows * self.length * INDEX * self.itemsize)))

    @property
    def layer_bytes(self) -> int:
        return self.rows * self.length * (PLANE + INDEX) * self.itemsize

    def __str__(self) -> str:
        return f"heads {self.heads:<3} L {self.length:<6} T {self.queries:<2} B {self.rows:<2}"


class Case:
    """Random inputs; layers share everything but their pages."""

    def __init__(self, shape: Shape) -> None:
        s, self.shape, self.gpu = shape, shape, gpu_traits(DEVICE)
        columns = -(-s.length // s.page)
        half = torch.bfloat16
        with DEVICE:
            order = torch.randperm(s.rows * columns) + 1
            table = torch.zeros((s.rows, -(-s.bound // s.page)), dtype=torch.int32)
            table[:, :columns] = order.view(s.rows, columns)
            slots = (1 + s.rows * columns) * s.page
            scales = torch.full((1, 1), 0.02) if s.itemsize == 1 else None
            fit = int(0.6 * torch.cuda.mem_get_info()[0] // s.layer_bytes)
            self.layers = [
                PagedKV(encoded(torch.randn(slots, 1, 1, PLANE + INDEX, dtype=half), scales), RANK, INDEX, scales)
                for _ in range(max(1, min(s.num_layers, fit)))
            ]
            t = s.queries
            mask = torch.eye(t, dtype=torch.bool) | torch.tril(torch.rand(s.rows, t, t) < 0.4)
            kv_len = torch.full((s.rows,), s.length)
            spots = kv_len[:, None] + torch.arange(t)
            self.metadata = AttentionMetadata(
                Phase.VERIFY,
                PageTable(FULL, table),
                torch.arange(s.rows),
                kv_len,
                s.bound,
                s.page,
                spots,
                None,
                spots,
                mask,
            )
            tail = encoded(torch.randn(s.rows, t, 1, 1, PLANE + INDEX, dtype=half), scales)
            self.tail = TailKV(tail, RANK, INDEX, scales)
            self.q = torch.randn(s.rows, t, s.heads, PLANE, dtype=half)
            heads = torch.randn(s.rows, t, s.index_heads, INDEX, dtype=half)
            self.query = IndexQuery(heads, torch.randn(s.rows, t, s.index_heads), s.top_k)
        self.backend, self.arrivals = TritonBackend(DEVICE), make_arrivals(DEVICE, self.gpu)

    def dense(self, layer: PagedKV, launch: Launch | None = None) -> Tensor:
        return self.attend(layer, self.metadata, launch)

    def attend(self, layer: PagedKV, metadata: AttentionMetadata, launch: Launch | None = None) -> Tensor:
        return latent_attention(
            self.q, layer.planes, metadata, self.tail.planes, RANK, SCALE, self.gpu, launch, self.arrivals, layer.scales
        )

    def scores(self, layer: PagedKV) -> Tensor:
        return paged_index_scores(self.query, layer.index_keys, self.metadata, self.tail.index_keys, self.gpu)

    def choose(self, scores: Tensor) -> SparseKeys:
        return choose_by_scores(scores, self.metadata, self.shape.top_k, self.gpu)

    @cached_property
    def chosen(self) -> AttentionMetadata:
        """The plan of the first layer's choice."""
        keys = self.choose(self.scores(self.layers[0]))
        return replace(self.metadata, chosen=keys, mask=keys.columns)

    def all_of_it(self, layer: PagedKV) -> Tensor:
        """Sparse attention as an engine calls it."""
        chosen = self.backend.choose(self.query, layer, self.metadata, self.tail)
        return self.attend(layer, self.backend.narrowed(self.metadata, chosen))

    def median_us(self, call: Callable[[PagedKV], object]) -> float:
        """Of a call in a graph of all layers."""
        return median_us([partial(call, layer) for layer in self.layers], 15)

    def time_of(self, metadata: AttentionMetadata, launch: Launch) -> float:
        return self.median_us(lambda layer: self.attend(layer, metadata, launch))

    def flashinfer_us(self) -> float:
        """Of FlashInfer's kernel, over the prefix alone, planned before: it knows no tree."""
        mla = importlib.import_module("flashinfer.mla")

        s, columns, half = self.shape, -(-self.shape.length // self.shape.page), torch.bfloat16
        with DEVICE:
            library = mla.BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.int8))
            each = torch.arange(s.rows + 1, dtype=torch.int32)
        pages = self.metadata.table.data[:, :columns].flatten().contiguous()
        lengths = self.metadata.kv_len.to(torch.int32)
        sizes = s.heads, RANK, PLANE - RANK, s.page
        library.plan(each * s.queries, each * columns, pages, lengths, *sizes, False, SCALE, half, half)
        still, turned = (part.flatten(0, 1).contiguous() for part in self.q.split([RANK, PLANE - RANK], dim=-1))

        def attend(layer: PagedKV) -> Tensor:
            planes = layer.planes[:, 0, 0].unflatten(0, (-1, s.page))
            found: Tensor = library.run(still, turned, planes[..., :RANK], planes[..., RANK:])
            return found

        nothing, seen = self.tail.planes[:, :0], self.metadata
        assert seen.mask is not None
        assert seen.tail_positions is not None
        alone = replace(seen, mask=seen.mask[:, :, :0], tail_positions=seen.tail_positions[:, :0])
        ours = latent_attention(self.q, self.layers[0].planes, alone, nothing, RANK, SCALE, self.gpu)
        error = float((attend(self.layers[0]).view_as(ours).float() - ours.float()).norm() / ours.float().norm())
        assert error < TOLERANCE, f"FlashInfer and ours differ by {error}"
        return self.median_us(attend)

    def gluon_us(self) -> tuple[float, float]:
        """Of our kernels in Gluon, in the place of the Triton kernel: over all keys, and over the chosen ones."""
        group = GroupNeed(FULL, self.shape.heads, 1, PLANE, latent=RANK, top_k=self.shape.top_k)
        backend = make_backend("gluon", Need(torch.bfloat16, DEVICE, self.shape.page, (group,)))
        found = []
        for metadata in (self.metadata, self.chosen):

            def attend(layer: PagedKV, plan: AttentionMetadata = metadata) -> Tensor:
                return backend.prefix_tail(self.q, layer, plan, self.tail, SCALE)

            ours = self.attend(self.layers[0], metadata).float()
            error = float((attend(self.layers[0]).float() - ours).norm() / ours.norm())
            assert error < TOLERANCE, f"the kernels in Gluon and in Triton differ by {error}"
            found.append(self.median_us(attend))
        return found[0], found[1]

    def flashmla_us(self) -> tuple[float, float]:
        """Of FlashMLA's backend, prefix and tail as an engine calls it, and of the library's prefix alone."""
        group = GroupNeed(FULL, self.shape.heads, 1, PLANE, latent=RANK)
        library = make_backend("flashmla", Need(torch.bfloat16, DEVICE, self.shape.page, (group,)))
        layers = [PagedKV(layer.planes.contiguous(), RANK) for layer in self.layers[: -(-len(self.layers) // 2)]]
        tail = TailKV(self.tail.planes, RANK)

        def call(layers: list[PagedKV], attend: Callable[[Any, PagedKV], object]) -> list[Callable[[], object]]:
            """The first layer begins the phase, which the others share."""
            plans: list[Any] = []

            def one(layer: PagedKV, first: bool) -> object:
                if first:
                    plans[:] = [library.plan(library.begin(self.metadata), self.metadata)]
                return attend(plans[0], layer)

            return [partial(one, layer, i == 0) for i, layer in enumerate(layers)]

        def whole(plan: Any, layer: PagedKV) -> Tensor:
            return library.prefix_tail(self.q, layer, plan, tail, SCALE)

        plan = library.plan(library.begin(self.metadata), self.metadata)
        ours, theirs = self.dense(self.layers[0]).float(), whole(plan, layers[0]).float()
        error = float((theirs - ours).norm() / ours.norm())
        assert error < TOLERANCE, f"FlashMLA and ours differ by {error}"
        alone = call(layers, lambda plan, layer: plan.attend(self.q, layer, SCALE))
        return median_us(call(layers, whole), 15), median_us(alone, 15)

    def errors(self) -> dict[str, float]:
        """Of the first row's dense and sparse results, and how many of its choices are not the reference's."""
        one = slice(0, 1)
        layer, sub = (
            self.layers[0],
            replace(
                self.metadata,
                rows=self.metadata.rows[one],
                kv_len=self.metadata.kv_len[one],
                max_kv_len=self.shape.length,
                positions=self.metadata.positions[one],
                tail_positions=self.metadata.tail_positions[one],  # type: ignore[index]  # a tree has them
                mask=self.metadata.mask[one],  # type: ignore[index]
            ),
        )
        scores = self.scores(layer)
        length = self.shape.length
        mine = torch.cat([scores[one, :, :length], scores[one, :, self.shape.bound :]], dim=2)
        want = choose_by_scores_reference(mine, sub, self.shape.top_k)
        keys = self.chosen.chosen
        assert keys is not None
        there = torch.arange(self.shape.top_k, device=DEVICE) < want.count[..., None]
        wrong = (keys.positions[one] != want.positions)[there].sum() + (keys.count[one] != want.count).sum()
        found = {"choice": float(wrong)}
        narrowed = replace(sub, chosen=want, mask=want.columns)
        for name, plan, got in (
            ("dense", sub, self.dense(layer)),
            ("sparse", narrowed, self.attend(layer, self.chosen)),
        ):
            q, tail = self.q[one].float(), self.tail.planes[one]
            tail = tail if layer.scales is not None else tail.float()
            expected = latent_attention_reference(q, layer.planes, plan, tail, RANK, SCALE, layer.scales)
            found[name] = float((got[one].float() - expected).norm() / expected.norm())
        return found


def shapes(options: argparse.Namespace) -> list[Shape]:
    itemsize = 2 if options.kv_cache_dtype == "auto" else 1
    sizes = itertools.product(options.heads, options.lengths, options.queries, options.rows)
    return [
        Shape(
            heads, length, queries, rows, options.index_heads, options.top_k, max(options.bound, length), itemsize,
            64 if options.flashmla or options.gluon else 16,
        )
        for heads, length, queries, rows in sizes
    ]  # fmt: skip


def measured(
    shape: Shape, copy: float, matrix: float, *, gluon: bool, flashinfer: bool, flashmla: bool
) -> dict[str, Any]:
    """All times of a shape in us, and its floors."""
    case = Case(shape)
    errors = case.errors()
    scores = case.scores(case.layers[0])
    times = {
        "dense": case.median_us(case.dense),
        "scores": case.median_us(case.scores),
        "choice": case.median_us(lambda _: case.choose(scores)),
        "attention": case.median_us(lambda layer: case.attend(layer, case.chosen)),
        "sparse": case.median_us(case.all_of_it),
    }
    if gluon:
        times["gluon"], times["gluon attention"] = case.gluon_us()
    if flashinfer:
        times["flashinfer"] = case.flashinfer_us()
    if flashmla:
        times["flashmla"], times["flashmla prefix"] = case.flashmla_us()
    floors = {
        name: 1e6 * max(moved / copy, operations / matrix)
        for name, (moved, operations) in {"dense": shape.dense(), "sparse": shape.sparse()}.items()
    }
    return {**asdict(shape), "us": times, "floor_us": floors, "errors": errors}


def candidates() -> list[Launch]:
    """Launches to try; what does not fit is left out when it fails."""
    sizes = itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (1, 2, 3), (1, 2, 4, 8, 16, 32, 64))
    return [Launch(m, n, splits, warps, stages, True) for m, n, warps, stages, splits in sizes]


def tuned(shape: Shape, end: float) -> dict[str, Any]:
    """The fastest launches of both kinds of attention, and the time of the one that is chosen today."""
    case, best = Case(shape), dict[str, Any]()
    for name, metadata in (("dense", case.metadata), ("attention", case.chosen)):
        s, rows = shape, shape.rows * shape.queries
        call = CallShape(s.rows, s.queries, 1, s.heads, PLANE, 2, s.bound)
        if name == "attention":
            call = CallShape(rows, 1, 1, s.heads, PLANE, 2, min(s.bound, s.top_k))
        now = choose_launch(call, case.gpu)
        found: list[tuple[float, Launch]] = []
        programs = call.rows * -(-call.n * s.heads // 32)
        for launch in candidates():
            if time.monotonic() > end:
                break
            if launch.block_m > max(16, call.n * s.heads) or not 64 <= programs * launch.splits <= 8192:
                continue
            try:
                found.append((case.time_of(metadata, launch), launch))
            except Exception:  # out of shared memory, or what a compiler does not take
                torch.cuda.synchronize()
        us = case.time_of(metadata, now)
        fastest = sorted(found, key=lambda each: each[0])[:3]
        best[name] = {"now": [us, asdict(now)], "best": [[time_us, asdict(launch)] for time_us, launch in fastest]}
    return {**asdict(shape), **best}


def main(arguments: list[str]) -> int:
    """Lines on stderr, JSON on stdout or in a file."""
    parser = parser_of(__doc__)
    for name, usual in (
        ("--heads", [128, 16]),
        ("--lengths", [1024, 8192, 65536]),
        ("--queries", [1, 4, 16]),
        ("--rows", [1, 8, 32]),
    ):
        parser.add_argument(name, type=int, nargs="+", default=usual)
    parser.add_argument("--index-heads", type=int, default=64, help="64 in DeepSeek V3.2, 32 in GLM-5")
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--bound", type=int, default=131072, help="context limit that a launch is made for")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="auto: bfloat16")
    parser.add_argument("--gluon", action="store_true", help="that backend too, in 16 bits, all on pages of 64")
    parser.add_argument("--flashinfer", action="store_true", help="its kernel too, in 16 bits")
    parser.add_argument("--flashmla", action="store_true", help="its backend too, in 16 bits, all on pages of 64")
    parser.add_argument("--tune", action="store_true", help="try launches of both kernels, and write nothing")
    parser.add_argument("--limit-s", type=float, default=1e9, help="begin no shape after this many seconds")
    parser.add_argument("--json", metavar="FILE", help="write the results here instead of stdout")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    end, wrong, results = time.monotonic() + options.limit_s, 0, list[dict[str, Any]]()
    copy, matrix = copy_bytes_per_s(), matrix_operations_per_s()
    tell(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, matrix products {matrix / 1e12:.0f} TFLOP/s")
    for shape in shapes(options):
        if time.monotonic() > end:
            tell("time is up")
            break
        torch.cuda.empty_cache()
        if options.tune:
            results.append(tuned(shape, end))
            tell(f"{shape}  " + "  ".join(f"{name} {results[-1][name]}" for name in ("dense", "attention")))
            continue
        others = {name: getattr(options, name) for name in ("gluon", "flashinfer", "flashmla")}
        row = measured(shape, copy, matrix, **others)
        us, floors, errors = row["us"], row["floor_us"], row["errors"]
        right = errors["choice"] == 0 and max(errors["dense"], errors["sparse"]) < TOLERANCE
        wrong += not right
        results.append(row)
        tell(
            f"{shape}  dense {us['dense']:8.1f} us ({us['dense'] / floors['dense']:.2f} x floor)"
            f"  sparse {us['sparse']:8.1f} ({us['sparse'] / floors['sparse']:.2f} x floor)"
            f" = scores {us['scores']:.1f} + choice {us['choice']:.1f} + attention {us['attention']:.1f}"
            f"  sparse/dense {us['sparse'] / us['dense']:.2f}{'' if right else f'  WRONG {errors}'}"
            + "".join(f"  {name} {us[name]:.1f}" for name in us if name.startswith(("gluon", "flash")))
        )
    write_report({**machine_of(copy), "wrong": wrong, "results": results}, options.json)
    return int(wrong > 0)


if __name__ == "__main__":
    end_with(main)
