"""The launches that `check_kernels.py` compiles: those of the tables, and those that formulas give for other shapes.

Each is asked for by the function that an engine calls, with the launch that an engine would choose on the card, on
tensors of the shapes that the tables name. Only kinds and multiples of sixteen matter to a kernel, so tensors have no
memory (device "meta"), and a quantized weight has few lines.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from treetop.kernels.attention.attention import paged_attention
from treetop.kernels.attention.attention_config import CallShape
from treetop.kernels.attention.attention_config import load_table as attention_table
from treetop.kernels.attention.index_scores import paged_index_scores
from treetop.kernels.attention.indexer import IndexQuery
from treetop.kernels.attention.latent_attention import latent_attention
from treetop.kernels.attention.latent_gather import chosen_planes_attention
from treetop.kernels.attention.latent_gluon import latent_pages_attention
from treetop.kernels.attention.latent_segments import choose_segments, prefill_latents, segment_latents
from treetop.kernels.attention.metadata import AttentionMetadata, SparseKeys
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.attention.segment_attention import num_splits_of, segment_attention
from treetop.kernels.attention.segment_prefill import segment_prefill
from treetop.kernels.attention.segments import block_of, plan_segments
from treetop.kernels.attention.stream_k import make_arrivals
from treetop.kernels.attention.tail import tail_and_merge
from treetop.kernels.gate import Gate
from treetop.kernels.gemm.adapter_rows import AdapterFactors, RowTiles, expand, expand_gated, shrink, tile_rows
from treetop.kernels.gemm.adapter_sums import AdapterSums
from treetop.kernels.gemm.fp8_rows import Activations, QuantizedRows, choose_fp8, fp8_rows
from treetop.kernels.gemm.heads_rows import heads_rows
from treetop.kernels.gemm.lossless_weights import LosslessWeight, lossless_gemm
from treetop.kernels.gemm.ordered_weights import OrderedWeight, ordered_gemm
from treetop.kernels.gemm.quantized_gemm import choose_product, quantized_gated, quantized_gemm
from treetop.kernels.gemm.quantized_gluon import why_not
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.gemm.quantizing_norm import add_rms_norm_codes
from treetop.kernels.gemm.skinny_gemm import choose_launch, choose_no_split_k, gated_rows, load_table, skinny_gemm
from treetop.kernels.gemm.tiles import TiledWeight, decode_tiles, tile
from treetop.kernels.kv import FP8, PageTable
from treetop.kernels.moe.experts import Activation, Experts, experts
from treetop.kernels.moe.routes import LeftChoice, Router, RouterKind, RouterSpec, Routes, Tiles
from treetop.kernels.moe.routing import route
from treetop.kernels.recurrent.convolution import path_conv, prefill_conv
from treetop.kernels.recurrent.gates import delta_inputs, gated_norm
from treetop.kernels.recurrent.in_turn import prefill_in_turn_kernel, verify_in_turn_kernel
from treetop.kernels.recurrent.keep import fold_states, keep_states
from treetop.kernels.recurrent.prefill import prefill_states
from treetop.kernels.recurrent.states import LinearStates, StateInputs, StateTails, StateUpdates
from treetop.kernels.recurrent.step import DeltaNet, step_delta
from treetop.kernels.recurrent.verify import verify_states
from treetop.kernels.tree.commit import Paths
from treetop.kernels.triton_guard import GpuTraits
from treetop.types.ids import FULL
from treetop.types.phase import Phase
from treetop.types.tree import FlatNodes
from treetop.weights.adapted import Adapters
from treetop.weights.lossless import offers
from treetop.weights.ordered import offers as ordered_offers

META, HALF, LONG, INT = torch.device("meta"), torch.bfloat16, torch.int64, torch.int32


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU. capability: compute capability times ten; gpu: what launches depend on."""

    capability: int
    gpu: GpuTraits

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"

    @property
    def has_fp8(self) -> bool:
        """Whether the engine takes e4m3 there."""
        return self.capability >= 89

    @property
    def measured(self) -> bool:
        """Whether the tables are this card's. Of others, which formulas serve, fewer formats are looked at."""
        return self.gpu.num_sms == load_table().num_sms


CARDS = {
    card.name: card
    for card in (
        Card(80, GpuTraits(108, False, 163 << 10, True)),  # A100
        Card(89, GpuTraits(128, False, 99 << 10, True)),  # RTX 4090
        Card(90, GpuTraits(132, True, 227 << 10, True)),  # H100 and H200, which the tables were measured on
        Card(100, GpuTraits(148, True, 227 << 10, True, True)),  # B200
        Card(120, GpuTraits(170, True, 99 << 10, True)),  # RTX 5090
    )
}
"""Source of multiprocessors and shared memory: CUDA C++ Programming Guide, "Compute Capabilities"; NVIDIA's papers."""

Case = tuple[str, Callable[[], object]]
"""What is launched, in words, and the launch."""


def cases(card: Card) -> Iterator[Case]:
    """All of a card."""
    for some in (_products, _coded, _adapters, _experts, _attention, _latent, _segments, _latent_segments, _recurrent):
        yield from some(card)


def _empty(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


# ------------------------------------------------------------------------------------------------------- of products


def _products(card: Card) -> Iterator[Case]:
    """Of weights in 16 bits, of the shapes in `skinny_gemm.json`, and in 12 and 13 bits."""
    gpu, table = card.gpu, load_table().entries
    for n, k, gated, rows in (
        *(key for key, entry in table.items() if "launch" in entry),
        *(
            (n, k, gated, rows * 3 // 4)
            for (n, k, gated, rows), entry in table.items()
            if rows in (64, 128) and "launch" in entry
        ),
        *((n, k, gated, 512) for (n, k, gated, rows), entry in table.items() if rows == 16 and "whole" in entry),
    ):
        x, weight = _empty(rows, k), _empty(n, k)
        multiply, what = gated_rows if gated else skinny_gemm, f"{n} x {k}{', gated' * gated}, {rows} rows"
        launch, whole = choose_launch(rows, n, k, gated, gpu), choose_no_split_k(rows, n, k, gated, gpu)
        if launch is not None:
            yield f"product {what}", partial(multiply, x, weight, launch, gpu)
        if whole is not None:
            yield f"product uncut {what}", partial(multiply, x, weight, whole, gpu, rounds=True)
    for rows, up in product((16, 512), (_empty(128, 128, 512), _empty(128, 128, 512).transpose(1, 2))):
        x = _empty(rows, 128, up.shape[1])
        yield f"products of 128 heads, {up.shape[1]} x {up.shape[2]}, {rows} rows", partial(heads_rows, x, up, gpu)
    for n, k, gated in dict.fromkeys(key[:3] for key in table):
        for rows, offer in offers(n, k, gated, gpu).items():
            weight_12, launch_12 = _in_12_bits(n, k, gated), offer.launch
            what = f"product in 12 bits {n} x {k}{', gated' * gated}, {rows} rows"
            yield what, partial(lossless_gemm, _empty(rows, k), weight_12, launch_12, gpu)
        for rows, launch_13 in ordered_offers(n, k, gated, gpu).items():
            words = _empty(n // 16, k // 256, 13, 32, 8, dtype=torch.int16)
            whole_at, chunks = _empty(-(-n // 128), dtype=INT), _empty(1, 8, k // 128, 8, 32, 8)
            weight_13 = OrderedWeight(words, _empty(n), whole_at, chunks, gated)
            what = f"product in 13 bits {n} x {k}{', gated' * gated}, {rows} rows"
            yield what, partial(ordered_gemm, _empty(rows, k), weight_13, launch_13, gpu)


def _in_12_bits(n: int, k: int, gated: bool) -> LosslessWeight:
    words, scale = _empty(n // 64, k // 128, 3, 64, 32, dtype=torch.int16), _empty(n, dtype=torch.float32)
    starts, listed, crowd = _empty(n // 64 + 1, dtype=INT), _empty(0, dtype=INT), dict.fromkeys((64, 128, 256), 0)
    return LosslessWeight(words, scale, starts, listed, listed, _empty(0), gated, crowd)


FORMATS = {
    "fp8 by row": QuantScheme("e4m3", 0),
    "fp8 by block": QuantScheme("e4m3", 128),
    "w4a16": QuantScheme("int4", 128),
    "mxfp4": QuantScheme("e2m1", 32, "e8m0"),
    "nvfp4": QuantScheme("e2m1", 16, "e4m3"),
    "nvfp4 (ModelOpt)": QuantScheme("e2m1", 16, "times"),
    "nvfp4 (compressed-tensors)": QuantScheme("e2m1", 16, "over"),
}
"""Of NVFP4 the first has its factor on the sums; the others, where bits are those of decoded weights, in them."""
_OF_TWO_LEVELS = ("nvfp4 (ModelOpt)", "nvfp4 (compressed-tensors)")
_NO_HALVES = {"scales over 4": 4.0, "scales near 0": 2.0**-120}
"""Factors whose scales are not taken as halves: the first take other arithmetic, too."""
_ONE_OF_EACH_KIND = ["fp8 by row", "w4a16", "nvfp4"]
_LLAMA_8B = {"gate_up": (28672, 4096, True), "down": (4096, 14336, False), "qkv": (6144, 4096, False)}


@cache
def _coded_weight(name: str, *shape: int, of_scales: float = 2.0**-12) -> TiledWeight:
    """Of equal numbers, so that its gates and ups may be said to lie in turn.

    of_scales: the factor of scales of two levels. By default such as checkpoints have.
    """
    scheme, (*leading, k) = FORMATS[name], shape
    of_two_levels = {"e4m3": of_scales, "times": of_scales, "over": 1 / of_scales}
    codes = torch.zeros((*leading, scheme.bytes_of(k)), dtype=torch.uint8)
    scale = torch.full((*leading, scheme.groups_of(k)), 2.0**-10)
    if scheme.scales != "float32":
        scale = torch.full_like(scale, 120 if scheme.scales == "e8m0" else 64, dtype=torch.uint8)
    factor = None
    if scheme.scales in of_two_levels:
        factor = torch.full((*leading, 1), of_two_levels[scheme.scales])
    return tile(QuantizedWeight(scheme, k, codes, scale, factor), HALF)


def _coded(card: Card) -> Iterator[Case]:
    """Of quantized weights: in 16 bits of few rows and of more, decoded to memory, and with inputs in e4m3, too."""
    gpu = card.gpu
    formats = [*FORMATS] if card.measured else _ONE_OF_EACH_KIND
    counts = (16, 32, 64, 256) if card.measured else (16, 256)
    for name, (of, (lines, k, gated)), rows in product(formats, _LLAMA_8B.items(), counts):
        multiply, weight = quantized_gated if gated else quantized_gemm, _coded_weight(name, 256, k)
        whole, uncut = replace(weight, shape=(lines, k)), name in _OF_TWO_LEVELS  # which engines have under bits alone
        launch = choose_product(whole, gated, rows, gpu, uncut, why_not(weight, HALF, gpu) is None)
        call = partial(multiply, _empty(rows, k), whole, launch=launch, gpu=gpu)
        yield f"product of {name}, {of}, {rows} rows", call
    lines, k, _ = _LLAMA_8B["gate_up"]
    counts_of_form = (16, 256) if card.measured else ()
    for name, (what, of_scales), rows in product(_OF_TWO_LEVELS, _NO_HALVES.items(), counts_of_form):
        weight = _coded_weight(name, 256, k, of_scales=of_scales)
        assert weight.form == "bytes"
        whole = replace(weight, shape=(lines, k))
        launch = choose_product(whole, True, rows, gpu, True, why_not(weight, HALF, gpu) is None)
        call = partial(quantized_gated, _empty(rows, k), whole, launch=launch, gpu=gpu)
        yield f"product of {name} with {what}, gate_up, {rows} rows", call
    for group, parts in product((0, 128), (1, 4)) if card.has_fp8 else ():
        how = Activations(group)
        norm = partial(add_rms_norm_codes, _empty(16, 4096), _empty(parts, 16, 4096), _empty(4096), 1e-5, how, gpu)
        yield f"norm with codes by {group or 'token'}, {parts} parts", norm
    for name in formats:
        yield f"decoding of {name}", partial(decode_tiles, _coded_weight(name, 256, 4096), 0, 256, HALF, gpu)
    for (of, (lines, k, gated)), group, rows in product(_LLAMA_8B.items(), (0, 128), counts if card.has_fp8 else ()):
        groups = -(-k // group) if group else 1
        kind: Gate | None = "silu" if gated else None
        x = QuantizedRows(_empty(rows, k, dtype=torch.uint8), _empty(groups, rows, dtype=torch.float32).T)
        scale = _empty(groups, lines, dtype=torch.float32).T
        weight_8 = QuantizedWeight(QuantScheme("e4m3", group), k, _empty(lines, k, dtype=torch.uint8), scale)
        launch_8 = choose_fp8((lines, k), group, gated, rows, gpu)
        call = partial(fp8_rows, x, weight_8, None, kind, dtype=HALF, launch=launch_8, gpu=gpu)
        yield f"product in fp8 {'by block' if group else 'by row'}, {of}, {rows} rows", call


_ADAPTED = {"qkv": (4096, (4096, 5120, 6144)), "gate_up": (4096, (14336, 28672)), "down": (14336, (4096,))}
"""Columns, and the ends of what is joined, of a Llama 8B's."""


def _adapters(card: Card) -> Iterator[Case]:
    """Of 8 adapters beside a Llama 8B, of 32 rows with a token and with a tree, of two ranks."""
    for rows, n in ((32, 1), (32, 16)):
        tiles = Adapters({}, 9, _empty(rows, dtype=LONG), _empty(5, rows, dtype=INT)).tiles(rows, n)
        yield f"tiles of adapters, {rows} rows of {n}", partial(tile_rows, tiles, 9, card.gpu)
        for (name, (k, ends)), rank in product(_ADAPTED.items(), (16, 64)):
            x, parts = _empty(rows, n, k), _empty(2, rows, n, ends[-1], dtype=torch.float32)
            a, b = _empty(9, len(ends) * rank, k), _empty(9, ends[-1], rank)
            factors, what = AdapterFactors(a, b, ends, _empty(len(ends) + 1, dtype=INT)), f"adapters of {name}"
            after = expand_gated if name == "gate_up" else expand

            def run(
                x: Tensor = x, parts: Tensor = parts, factors: AdapterFactors = factors, tiles: RowTiles = tiles,
                after: Callable[..., Tensor] = after,
            ) -> None:  # fmt: skip
                after(parts, shrink(x, factors, tiles, card.gpu), factors, tiles, gpu=card.gpu)

            yield f"{what}, rank {rank}, {rows} rows of {n}", run
    for (name, (k, ends)), rank, rows in product(_ADAPTED.items(), (16, 64), (16, 32, 64)):
        tiles = Adapters({}, 9, _empty(rows, dtype=LONG), _empty(5, rows, dtype=INT)).tiles(rows, 1)
        a, b = _empty(9, len(ends) * rank, k), _empty(9, ends[-1], rank)
        sums = AdapterSums(
            _empty(8, rows, 1, len(ends) * rank, dtype=torch.float32),
            AdapterFactors(a, b, ends, _empty(len(ends) + 1, dtype=INT)),
            tiles,
        )
        x, weight, gated = _empty(rows, k), _empty(ends[-1], k), name == "gate_up"
        launch, what = choose_launch(rows, ends[-1], k, gated, card.gpu), f"{name} with adapters"
        if launch is not None:
            multiply = gated_rows if gated else skinny_gemm
            yield f"{what}, rank {rank}, {rows} rows", partial(multiply, x, weight, launch, card.gpu, sums=sums)
        for most, offer in offers(ends[-1], k, gated, card.gpu).items():
            if most == rows:
                call = partial(lossless_gemm, x, _in_12_bits(ends[-1], k, gated), offer.launch, card.gpu, sums=sums)
                yield f"{what} in 12 bits, rank {rank}, {rows} rows", call


def _experts(card: Card) -> Iterator[Case]:
    """Of Qwen3-30B-A3B's sizes, and which tokens come to them: one token, a batch, a long batch and a prefill."""
    hidden, inner = 2048, 768
    spec = RouterSpec(128, 8, RouterKind.SOFTMAX)
    router = Router(spec, _empty(128, hidden), None, None)
    for tokens in (1, 32, 512):
        yield f"routes of {tokens} tokens", partial(route, _empty(tokens, hidden), router, None, card.gpu)
        told = partial(route, _empty(tokens, hidden), router, None, card.gpu, tells=True)
        yield f"routes of {tokens} tokens, told", told
    formats = ("16 bits", "fp8 by block", "w4a16", "mxfp4") if card.measured else ("16 bits", "mxfp4")
    for name, (tokens, rows, tiles) in product(formats, ((1, 16, 8), (32, 16, 64), (512, 64, 64), (2048, 128, 64))):
        sizes = (2, 2 * inner, hidden), (2, hidden, inner)
        gate_up, down = (_coded_weight(name, *size) if name in FORMATS else _empty(*size) for size in sizes)
        listed = (_empty(8 * tokens, dtype=INT), *(_empty(tiles, dtype=INT) for _ in range(3)), _empty(1, dtype=INT))
        routes = Routes(_empty(tokens, 8, dtype=INT), _empty(tokens, 8, dtype=torch.float32), Tiles(rows, *listed))
        made = Experts(gate_up, down, None, None, Activation.SILU)
        yield (
            f"experts of {name}, {tokens} tokens",
            partial(experts, _empty(tokens, hidden), routes, made, card.gpu),
        )
        if tokens == 1:
            left = replace(routes, left=LeftChoice(_empty(8, 1, 128, dtype=torch.float32), None, spec))
            yield f"experts of {name}, chosen there", partial(experts, _empty(1, hidden), left, made, card.gpu)
            if name == "mxfp4" and card.measured:
                left = replace(left, tiles=Tiles(8, *listed))
                yield f"experts of {name}, 8 rows", partial(experts, _empty(1, hidden), left, made, card.gpu)
    yield from _experts_beside_shared(card)


def _experts_beside_shared(card: Card) -> Iterator[Case]:
    """Of Qwen3-Next's sizes: the expert that all tokens take goes with the others."""
    hidden, inner, top_k, spec = 2048, 512, 10, RouterSpec(512, 10, RouterKind.SOFTMAX, renormalise=True)
    router = Router(spec, _empty(513, hidden), None, None, gates_shared=True)
    gate_up, down = (_coded_weight("fp8 by block", *size) for size in ((2, 2 * inner, hidden), (2, hidden, inner)))
    shared = tuple(replace(each, shape=each.shape[1:]) for each in (gate_up, down))
    made = Experts(gate_up, down, None, None, Activation.SILU, (shared[0], shared[1]))
    for tokens, rows, tiles in ((1, 16, 8), (32, 16, 64), (512, 32, 64)):
        x, weights = _empty(tokens, hidden), _empty(tokens, top_k, dtype=torch.float32)
        yield f"routes and a gate of {tokens} tokens", partial(route, x, router, None, card.gpu)
        listed = (
            _empty(top_k * tokens, dtype=INT),
            *(_empty(tiles, dtype=INT) for _ in range(3)),
            _empty(1, dtype=INT),
        )
        routes = Routes(_empty(tokens, top_k, dtype=INT), weights, Tiles(rows, *listed), shared=weights[:, 0].view(-1))
        yield f"experts beside a shared one, {tokens} tokens", partial(experts, x, routes, made, card.gpu)


# ------------------------------------------------------------------------------------------------------ of attention


@dataclass(frozen=True, slots=True)
class _Scene:
    """A call of attention: rows of n queries after `keys` committed ones; n of a prefill are the last of these.

    heads: K/V heads, query heads of each, and their width; element: bytes of a number. fp8: K/V are codes.
    """

    rows: int
    n: int
    keys: int
    heads: tuple[int, int, int] = (8, 4, 128)
    element: int = 2
    causal: bool = False
    window: int | None = None
    fp8: bool = False

    def __str__(self) -> str:
        kv_heads, group, dim = self.heads
        kind = "a prefill's" if self.causal else "a tree's" if self.n > 1 else "plain"
        more = (
            ", float32" * (self.element > 2) + ", K/V in FP8" * self.fp8 + f", window {self.window}" * bool(self.window)
        )
        return f"{kind} {self.rows} x {self.n} queries, {kv_heads} x {group} x {dim} heads, {self.keys} keys{more}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.element > 2 else HALF

    @property
    def metadata(self) -> AttentionMetadata:
        whole, positions = _empty(self.rows, dtype=LONG), _empty(self.rows, self.n, dtype=LONG)
        table = PageTable(FULL, _empty(self.rows + 1, self.keys // 16, dtype=INT))
        tail = () if self.causal else (positions, _empty(self.rows, self.n, self.n, dtype=torch.bool))
        return AttentionMetadata(Phase.VERIFY, table, whole, whole, self.keys, 16, positions, self.window, *tail)

    def tensors(self, planes: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Queries, pages, a tail and scales."""
        kv_heads, group, dim = self.heads
        kept = FP8 if self.fp8 else self.dtype
        q = _empty(self.rows, self.n, kv_heads * group, dim, dtype=self.dtype)
        pages, tail = (_empty(*lead, planes, kv_heads, dim, dtype=kept) for lead in ((4096,), (self.rows, self.n)))
        scales = _empty(planes, kv_heads, dtype=torch.float32) if self.fp8 else None
        return q, pages, None if self.causal else tail, scales

    @property
    def call(self) -> CallShape:
        return CallShape(self.rows, self.n, *self.heads, self.element, self.keys, self.causal)


def _measured() -> Iterator[_Scene]:
    """The classes of `attention_config.json`."""
    pattern = r"(tail|causal) h(\d+)x(\d+)x(\d+)e(\d+) rows(\d+) n(\d+) keys(\d+)"
    for name in attention_table().entries:
        found = re.fullmatch(pattern, name)
        assert found is not None, f"attention_config.json: {name} is no class"
        kv_heads, group, dim, element, rows, n, keys = map(int, found.groups()[1:])
        yield _Scene(rows, n, keys, (kv_heads, group, dim), element, found[1] == "causal")


def _of_heads(*heads: int, element: int = 2, window: int | None = None) -> Iterator[_Scene]:
    """Plain decoding, a tree and a prefill."""
    for rows, n, causal in ((8, 1, False), (8, 16, False), (1, 512, True)):
        yield _Scene(rows, n, 8192, (heads[0], heads[1], heads[2]), element, causal, window)


_OTHERS = (
    *_of_heads(8, 8, 64, window=128),
    *_of_heads(4, 2, 256),
    *_of_heads(2, 8, 512),
    *_of_heads(8, 4, 128, element=4),
)
"""GPT-OSS's, Gemma 3's and Gemma 4's heads, and Llama's in float32."""


def _attention(card: Card) -> Iterator[Case]:
    """Over pages, and of tails beside a library's prefix."""
    arrivals = make_arrivals(META, card.gpu)
    classes = _measured() if card.measured else (_Scene(1, n, 8192) for n in (4, 64))
    scenes = [*classes, *_of_heads(8, 4, 128), *_OTHERS]
    if card.has_fp8:
        scenes += [_Scene(rows, n, 32768, fp8=True) for rows, n in product((1, 8, 32), (1, 16))]
        scenes += [replace(scene, fp8=True) for scene in (_Scene(1, 512, 8192, causal=True), *_OTHERS)]
    for scene in scenes:
        q, pages, tail, scales = scene.tensors(planes=2)
        call: Callable[[], object]
        call = partial(paged_attention, q, pages, scene.metadata, tail, 1.0, None, card.gpu, None, scales, arrivals)
        yield f"attention of {scene}", call
    for scene in (_Scene(32, 4, 8192), _Scene(32, 16, 8192)):
        q, pages, tail, _ = scene.tensors(planes=2)
        assert tail is not None
        by_row, nodes = _empty(scene.rows, dtype=LONG), 2 * scene.rows
        metadata = replace(
            scene.metadata, flat=FlatNodes(by_row, by_row, _empty(nodes, dtype=LONG), scene.metadata.positions)
        )
        q, tail = q.flatten(0, 1)[:nodes, None], tail.flatten(0, 1)[:nodes, None]
        call = partial(paged_attention, q, pages, metadata, tail, 1.0, None, card.gpu, arrivals=arrivals)
        yield f"attention of flat nodes of {scene}", call
    for scene in (_Scene(8, 16, 8192), *_OTHERS):
        q, _, tail, _ = scene.tensors(planes=2)
        if tail is not None and scene.n > 1:
            prefix = PrefixPart(q, _empty(*q.shape[:3], dtype=torch.float32), _empty(len(q), dtype=LONG))
            call = partial(tail_and_merge, q, prefix, tail, scene.metadata, 1.0, None, card.gpu)
            yield f"tail and merge of {scene}", call


def _latent(card: Card) -> Iterator[Case]:
    """Of compressed planes, with sixteen heads and with all of DeepSeek-V3's, and what is chosen of them."""
    arrivals = make_arrivals(META, card.gpu)
    for heads, fp8 in product((16, 128), (False, True) if card.has_fp8 else (False,)):
        for scene in _of_heads(1, heads, 576):
            some = replace(scene, fp8=fp8)
            q, pages, tail, scales = some.tensors(planes=1)
            call = partial(latent_attention, q, pages, some.metadata, tail, 512, 1.0, card.gpu, None, arrivals, scales)
            yield f"compressed attention of {some}", call
    for heads, n in product((16, 128), (1, 16)):
        scene = _Scene(8, n, 8192, (1, heads, 576))
        q, _, tail, _ = scene.tensors(planes=1)
        assert tail is not None
        out, lse = _empty(8, n, heads, 512), _empty(8, n, heads, dtype=torch.float32)
        prefix = PrefixPart(out, lse, _empty(8, dtype=LONG))
        call = partial(tail_and_merge, q, prefix, tail, scene.metadata, 1.0, None, card.gpu, 512)
        yield f"tail and merge of planes of {scene}", call
    if card.capability == 90:
        for rows, n, heads in ((8, 1, 16), (8, 1, 128), (32, 16, 128)):
            scene = _Scene(rows, n, 8192, (1, heads, 576))
            q, pages, tail, _ = scene.tensors(planes=1)
            call = partial(latent_pages_attention, q, pages, replace(scene.metadata, page_size=64), tail, 1.0, card.gpu)
            yield f"compressed attention to pages of 64 of {scene}", call
    for n in (1, 16):
        scene = _Scene(8, n, 8192, (1, 64, 576))
        metadata, (q, pages, tail, _) = scene.metadata, scene.tensors(planes=1)
        chosen = SparseKeys(_empty(8, n, 2048, dtype=INT), _empty(8, n, dtype=INT), metadata.mask)
        narrowed = replace(metadata, chosen=chosen)
        yield f"sparse attention of {scene}", partial(latent_attention, q, pages, narrowed, tail, 512, 1.0, card.gpu)
        if card.capability == 90:
            call = partial(chosen_planes_attention, q, pages, narrowed, tail, 1.0, card.gpu)
            yield f"sparse attention that gathers of {scene}", call
        query = IndexQuery(_empty(8, n, 32, 128), _empty(8, n, 32, dtype=torch.float32), 2048)
        call = partial(paged_index_scores, query, _empty(4096, 128), metadata, _empty(8, n, 128), card.gpu)
        yield f"index scores of {scene}", call


def _segments(card: Card) -> Iterator[Case]:
    """Whose bits depend on a query and its keys alone."""
    scenes = [*_of_heads(8, 4, 128), *_OTHERS]
    if card.has_fp8:
        scenes += [replace(scene, fp8=True) for scene in scenes]
    for scene in scenes:
        q, pages, tail, scales = scene.tensors(planes=2)
        asked = (card.gpu, None, scales)
        if tail is None:
            yield f"segments of {scene}", partial(segment_prefill, q, pages, scene.metadata, 1.0, None, *asked)
        else:
            yield f"segments of {scene}", partial(_attend_by_segments, scene, q, pages, tail, asked)


def _latent_segments(card: Card) -> Iterator[Case]:
    """The same of compressed planes, and of what is chosen of them."""
    gpu = card.gpu
    for heads, fp8 in product((16, 128), (False, True) if card.has_fp8 else (False,)):
        for scene in _of_heads(1, heads, 576):
            some = replace(scene, fp8=fp8)
            q, pages, tail, scales = some.tensors(planes=1)
            name, asked = f"segments of planes of {some}", (512, 1.0, gpu, None, scales)
            if tail is None:
                yield name, partial(prefill_latents, q, pages, some.metadata, *asked)
            else:
                yield name, partial(_attend_by_planes, some, q, pages, tail, asked)
    for scene in _of_heads(1, 64, 576):
        q, pages, tail, _ = scene.tensors(planes=1)
        rows, n, metadata = *q.shape[:2], scene.metadata
        keys = SparseKeys(_empty(rows, n, 2048, dtype=INT), _empty(rows, n, dtype=INT), metadata.mask)
        name = f"segments of chosen planes of {scene}"
        if tail is None:
            yield name, partial(prefill_latents, q, pages, replace(metadata, chosen=keys), 512, 1.0, gpu)
        else:
            yield name, partial(_attend_by_planes, scene, q, pages, tail, (512, 1.0, gpu), keys)


def _attend_by_planes(
    scene: _Scene, q: Tensor, pages: Tensor, tail: Tensor, asked: tuple[Any, ...], keys: SparseKeys | None = None
) -> None:
    call = scene.call
    how = 2 * asked[2].num_sms, block_of(call.head_dim, call.element_bytes), asked[2]
    plan = plan_segments(scene.metadata, *how) if keys is None else choose_segments(scene.metadata, keys, *how)
    segment_latents(q, pages, plan, tail, *asked)


def _attend_by_segments(scene: _Scene, q: Tensor, pages: Tensor, tail: Tensor, asked: tuple[Any, ...]) -> None:
    call, gpu = scene.call, asked[0]
    plan = plan_segments(scene.metadata, num_splits_of(call, gpu), block_of(call.head_dim, call.element_bytes), gpu)
    segment_attention(q, pages, plan, tail, 1.0, None, *asked)


# ------------------------------------------------------------------------------------------------ of recurrent layers


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """Sizes of one model's recurrent layers."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    delta: bool = True
    per_channel: bool = False

    def updates(self, *lead: int) -> StateUpdates:
        wide = torch.float32
        k = _empty(*lead, self.key_heads, self.key_dim, dtype=wide)
        decays = (self.heads, self.key_dim) if self.per_channel else (self.heads,)
        return StateUpdates(
            k, _empty(*lead, self.heads, self.value_dim, dtype=wide), _empty(*lead, *decays, dtype=wide)
        )

    def states(self, layers: int, num_rows: int, width: int, channels: int, before: int) -> LinearStates:
        return LinearStates(
            _empty(layers, num_rows, channels, before),
            _empty(layers, num_rows, self.heads, self.key_dim, self.value_dim, dtype=torch.float32),
            self.updates(layers, num_rows, width),
            _empty(num_rows, dtype=LONG),
        )

    def inputs(self, rows: int, nodes: int) -> StateInputs:
        of = self.updates(rows, nodes)
        rates = _empty(rows, nodes, self.heads, dtype=torch.float32) if self.delta else None
        return StateInputs(of.k, of.k, of.d, of.g, rates)


_OTHER_RECURRENCES = {
    "Kimi-Linear": _Recurrence(32, 32, 128, 128, per_channel=True),
    "Nemotron-3-Nano": _Recurrence(8, 64, 128, 64, delta=False),
    "Falcon-H1": _Recurrence(1, 24, 256, 64, delta=False),
}


def _recurrent(card: Card) -> Iterator[Case]:
    """Of Qwen3-Next's linear layers: verifications of one node, a tree and the largest, a chunk, what is kept.

    Of recurrences of other kinds what differs: the states.
    """
    gpu, layers, rows, num_rows, width = card.gpu, 4, 2, 3, 6
    key_heads, heads, dim, taps = 16, 32, 128, 4
    channels, wide, of_next = (2 * key_heads + heads) * dim, torch.float32, _Recurrence(16, 32, 128, 128)
    states = of_next.states(layers, num_rows, width, channels, taps - 1)
    batch, weight = _empty(rows, dtype=LONG), _empty(channels, taps)
    for nodes in (1, 16, 64):
        inputs = of_next.inputs(rows, nodes)
        parents, windows = _empty(rows, nodes, dtype=LONG), _empty(rows, nodes, taps - 1, dtype=LONG)
        tails = StateTails(_empty(layers, rows, nodes, channels), of_next.updates(layers, rows, nodes))
        x, what = _empty(rows, nodes, channels), f"of {nodes} tokens"
        yield from _states_of(states, inputs, parents, tails.updates.layer(0), what, gpu)
        yield f"convolution along paths {what}", partial(path_conv, states.conv[0], batch, x, windows, weight, gpu=gpu)
        paths = Paths(batch, batch, batch, width, _empty(rows, width, dtype=LONG), 2)
        yield f"keeping of states {what}", partial(keep_states, states, tails, paths, windows, gpu)
        valid = _empty(rows, nodes, dtype=torch.bool)
        yield (
            f"convolution of a chunk {what}",
            partial(prefill_conv, states.conv[0], batch, x, valid, weight, gpu=gpu),
        )
        gates, rate = _empty(rows, nodes, 2 * heads), _empty(heads, dtype=wide)
        yield f"gates of states {what}", partial(delta_inputs, x, gates, rate, rate, key_heads, dim, gpu)
        z = _empty(rows, nodes, heads * dim)
        yield f"norm and gate {what}", partial(gated_norm, inputs.v, z, _empty(dim), 1e-6, gpu)
        if nodes == 1:
            net = DeltaNet(weight, _empty(dim), 1e-6, rate, rate, key_heads, dim)
            stash, kept = tails.updates.layer(0), tails.mixed[0]
            step = partial(step_delta, states.layer(0), batch, x, z, gates, net, kept, stash, 2, gpu)
            yield "a gated delta net's step", step
    yield "folding of states", partial(fold_states, states, batch, gpu)
    for name, other in _OTHER_RECURRENCES.items():
        states = other.states(layers, num_rows, width, 0, 0)
        for nodes in (1, 16, 64):
            parents, what = _empty(rows, nodes, dtype=LONG), f"of {nodes} tokens, {name}"
            stash = other.updates(rows, nodes)
            yield from _states_of(states, other.inputs(rows, nodes), parents, stash, what, gpu)
        yield f"folding of states, {name}", partial(fold_states, states, batch, gpu)


def _states_of(
    states: LinearStates, inputs: StateInputs, parents: Tensor, stash: StateUpdates, what: str, gpu: GpuTraits
) -> Iterator[Case]:
    """Verifications and chunks, each in blocks and in turn."""
    batch, of_layer = _empty(len(parents), dtype=LONG), states.layer(0)
    valid = _empty(*parents.shape, dtype=torch.bool)
    nodes, chunk = (of_layer, batch, inputs, parents, stash, 2, gpu), (of_layer, batch, inputs, valid, gpu)
    yield f"verification of states {what}", partial(verify_states, *nodes)
    yield f"chunk of states {what}", partial(prefill_states, *chunk)
    yield f"verification of states in turn {what}", partial(verify_in_turn_kernel, *nodes)
    yield f"chunk of states in turn {what}", partial(prefill_in_turn_kernel, *chunk)
