"""A call of each operation of the table, for `test_operations.py`: small, random, and with its hard places."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from support.interpreted import DEVICE
from support.recurrent_oracle import random_inputs, random_parents, random_states, random_tails
from support.round_ops import (
    Buffers,
    agreeing,
    random_calibration,
    random_children,
    random_tables,
    random_tree,
    sown_growth,
)
from support.scenes import Scene, scene
from treetop.kernels.attention.attention import paged_attention_reference
from treetop.kernels.attention.attention_config import Launch
from treetop.kernels.attention.indexer import IndexNorm, IndexQuery
from treetop.kernels.attention.latent import LatentNorm
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.attention.segments import plan_reference
from treetop.kernels.comm import peers
from treetop.kernels.comm.kv_chunks import ChunkSpan, pack_reference, unpack_reference
from treetop.kernels.comm.peers import Mailboxes
from treetop.kernels.fused import HeadNorms
from treetop.kernels.gemm.adapter_rows import AdapterFactors, shrink_reference, tile_rows_reference
from treetop.kernels.gemm.fp8_rows import Activations, Fp8Launch, QuantizedRows, by_group
from treetop.kernels.gemm.lossless_weights import LosslessLaunch, compress
from treetop.kernels.gemm.quantized_gemm import QuantizedLaunch
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.gemm.skinny_gemm import RowsLaunch
from treetop.kernels.gemm.tiles import in_turn, tile
from treetop.kernels.kv import PageTable
from treetop.kernels.moe.experts import Activation, Experts
from treetop.kernels.moe.routes import Router, RouterKind, RouterSpec
from treetop.kernels.recurrent.convolution import tree_windows
from treetop.kernels.recurrent.states import LinearStates, StateUpdates
from treetop.kernels.recurrent.step import DeltaNet
from treetop.kernels.rope import RopeSpec, RopeTable, rope_table
from treetop.kernels.sampling.process import ONE, LogitsProcessors, mask_words
from treetop.kernels.sampling.sampling import PartialArgmax, RowSamplingParams, SampledTokens, SamplingMetadata
from treetop.kernels.table import operations
from treetop.kernels.tree.calibration import InverseTemperature
from treetop.kernels.tree.commit import Paths
from treetop.kernels.tree.drawn import DrawnNodes, RoundOfRows
from treetop.kernels.tree.grow import Children, Frontier, TreeBuilder
from treetop.kernels.tree.learn import Observed
from treetop.kernels.tree.select import select_reference
from treetop.kernels.triton_guard import gpu_traits
from treetop.types.ids import FULL
from treetop.types.layout import SpecShape
from treetop.types.state import StateGroup
from treetop.types.tree import FlatNodes
from treetop.weights.adapted import Adapters

SHAPE = SpecShape(3, 3, 9)


@dataclass
class Call:
    """One call of an operation. more: arguments that only the kernel takes. compared: what must be equal after it."""

    args: tuple[Any, ...]
    more: dict[str, Any] = field(default_factory=dict)
    compared: Callable[[tuple[Any, ...], Any], Any] = lambda args, result: (result, args)


CASES: dict[str, Callable[[bool], Call]] = {}
"""Operation -> the same random arguments at every call; told whether they are for the kernel."""


def case(make: Callable[[bool], Call]) -> Callable[[bool], Call]:
    CASES[make.__name__] = make
    return make


def only_result(args: tuple[Any, ...], result: Any) -> Any:
    return result


# ------------------------------------------------------------------------------------------------------- of a layer


@case
def add(_: bool) -> Call:
    return Call((torch.randn(2, 3, 48), torch.randn(2, 2, 3, 48)))


@case
def add_rms_norm(_: bool) -> Call:
    return Call((torch.randn(2, 3, 48), torch.randn(3, 2, 3, 48), torch.rand(48), 1e-5))


@case
def add_rms_norm_codes(_: bool) -> Call:
    """Codes are of the norm as rounded, and one that differs by a rounding may have the next code."""
    args = (torch.randn(2, 3, 64), torch.randn(3, 2, 3, 64), torch.rand(64), 1e-5, Activations(32))
    return Call(args, {}, lambda args, result: result[:2])


@case
def embed_and_norm(_: bool) -> Call:
    tokens = torch.randint(0, 30, (3, 5))[:, 1:4]
    return Call((torch.randn(30, 24), tokens, torch.randn(3, 5, 40)[:, :3], torch.rand(40), 1e-5))


@case
def angles(_: bool) -> Call:
    table = rope_table(RopeSpec(24, 10000.0), 50, torch.float32, DEVICE)

    def at_positions(args: tuple[Any, ...], result: Any) -> Any:
        return RopeTable(result[0]).at(result[1]) if isinstance(result, tuple) else result

    return Call((table, torch.randint(0, 50, (3, 4))), compared=at_positions)


@case
def join(_: bool) -> Call:
    return Call((torch.randn(3, 5, 300), torch.float32), compared=only_result)


@case
def rotate_and_write(kernel: bool) -> Call:
    table, positions = rope_table(RopeSpec(24, 10000.0), 50, torch.float32, DEVICE), torch.randint(0, 50, (3, 4))
    given = (table.data, positions) if kernel else table.at(positions)
    slots = (torch.randperm(30)[:12] + 1).view(3, 4)
    slots[0, 1] = slots[2, 0] = 0
    qkv, pages = torch.randn(2, 3, 4, 10, 24), torch.zeros(31, 2, 2, 24)
    norms = HeadNorms(torch.rand(2, 24) + 0.5, 0.1)
    return Call((qkv, given, pages, slots, norms), compared=lambda args, result: (result, args[2]))


@case
def write_latent(kernel: bool) -> Call:
    table, positions = rope_table(RopeSpec(6, 10000.0), 50, torch.float32, DEVICE), torch.randint(0, 50, (3, 4))
    given = (table.data, positions) if kernel else table.at(positions)
    slots = (torch.randperm(30)[:12] + 1).view(3, 4)
    slots[0, 1] = slots[2, 0] = 0
    absorbed = torch.randn(5, 12, 20).transpose(0, 1).unflatten(0, (3, 4))  # as the product of each head leaves it
    turned, down = torch.randn(3, 4, 5, 16)[..., 10:], torch.randn(2, 3, 4, 50)[..., 24:]
    pages = torch.zeros(31, 1, 1, 26)
    return Call(
        (absorbed, turned, down, given, pages, slots, LatentNorm(torch.rand(20) + 0.5, 0.1)),
        compared=lambda args, result: (result, args[4]),
    )


@case
def rotate_index_heads(kernel: bool) -> Call:
    table, positions = rope_table(RopeSpec(6, 10000.0), 50, torch.float32, DEVICE), torch.randint(0, 50, (3, 4))
    given = (table.data, positions) if kernel else table.at(positions)
    return Call((torch.randn(3, 4, 5, 24)[..., :14], given), compared=only_result)


@case
def write_index_keys(kernel: bool) -> Call:
    table, positions = rope_table(RopeSpec(6, 10000.0), 50, torch.float32, DEVICE), torch.randint(0, 50, (3, 4))
    given = (table.data, positions) if kernel else table.at(positions)
    slots = (torch.randperm(30)[:12] + 1).view(3, 4)
    slots[0, 1] = slots[2, 0] = 0
    pages = torch.zeros(31, 1, 1, 34)[..., 20:]
    norm = IndexNorm(torch.rand(14) + 0.5, torch.randn(14), 1e-3)
    return Call(
        (torch.randn(3, 4, 24)[..., 10:] * 5 + 2, norm, given, pages, slots), compared=lambda args, result: args[3]
    )


@case
def heads_rows(_: bool) -> Call:
    """A head's matrix is a part of a stored one, and turned round."""
    weight = torch.randn(3, 90, 70)[:, 10:].transpose(1, 2)
    return Call((torch.randn(20, 3, 100)[..., :70], weight))


@case
def silu_mul(_: bool) -> Call:
    return Call((torch.randn(2, 3, 2 * 1100) * 4,))


@case
def gelu_tanh_mul(_: bool) -> Call:
    return Call((torch.randn(2, 3, 2 * 1100) * 4,))


@case
def skinny_gemm(kernel: bool) -> Call:
    x, weight = torch.randn(19, 128).half(), torch.randn(72, 128).half()
    launch = {"launch": RowsLaunch(block_n=32, block_k=64, splits=2, num_stages=1, num_warps=4)}
    return Call((x, weight) if kernel else (x, weight, 2), launch, only_result)


@case
def gated_rows(_: bool) -> Call:
    x, weight = torch.randn(17, 64).half(), torch.randn(2 * 40, 64).half() / 4
    launch = {"launch": RowsLaunch(block_n=16, block_k=64, splits=1, num_stages=1, num_warps=4)}
    return Call((x, weight), launch, only_result)


@case
def lossless_gemm(_: bool) -> Call:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter knows no bfloat16
    with torch.device("cpu"):
        made = compress(torch.randn(192, 1024).bfloat16(), False)
    assert made is not None
    names = ("words", "scale", "starts", "lines", "columns", "values")
    made = replace(made, **{name: getattr(made, name).to(DEVICE) for name in names})
    launch = {"launch": LosslessLaunch(64, 2, 1, 4, 16)}
    parts = lambda args, result: result if result.dim() == 2 else result.sum(0)  # noqa: E731  # one line
    return Call((torch.randn(5, 1024).to(dtype), made), launch, parts)


def coded_weight(n: int, k: int, scheme: QuantScheme, device: torch.device | str = DEVICE) -> QuantizedWeight:
    """Random codes of every kind, and scales of widely different size; none of them NaN."""
    rows, groups = (n, scheme.bytes_of(k)), (n, scheme.groups_of(k))
    codes = torch.randint(0, 256, rows, dtype=torch.uint8, device=device)
    codes &= 0xFE if scheme.numbers == "e4m3" else 0xFF
    scale, factor = torch.rand(groups, device=device) * 1e-2, None
    if scheme.scales == "e8m0":
        scale = torch.randint(100, 130, groups, dtype=torch.uint8, device=device)
        scale[0, 0] = 0
    elif scheme.scales != "float32":
        scale = torch.randint(0, 0x7F, groups, dtype=torch.uint8, device=device)
        factor = torch.rand((n, 1), device=device) + 0.1
    zero = torch.randint(0, 17, groups, dtype=torch.uint8, device=device) if scheme.zeros else None
    return QuantizedWeight(scheme, k, codes, scale, factor, zero)


def summed(args: tuple[Any, ...], result: Any) -> Any:
    return result.to(torch.float32).sum(0)


@case
def quantized_gemm(_: bool) -> Call:
    weight = tile(coded_weight(72, 256, QuantScheme("int4", 64, zeros=True)))
    launch = {"launch": QuantizedLaunch(64, 2, 1, 4)}
    return Call((torch.randn(19, 256).half(), weight, torch.randn(72).half()), launch, summed)


@case
def quantized_gated(_: bool) -> Call:
    weight = tile(in_turn(coded_weight(80, 96, QuantScheme("e4m3", 32)).halves()))
    return Call((torch.randn(17, 96).half() / 8, weight), {"launch": QuantizedLaunch(64, 1, 1, 4)}, only_result)


@case
def decode_tiles(_: bool) -> Call:
    return Call(
        (tile(coded_weight(150, 200, QuantScheme("e2m1", 16, "over"))), 64, 150, torch.float16), {}, only_result
    )


def e4m3_rows(rows: int, k: int, groups: int) -> QuantizedRows:
    return QuantizedRows(coded_weight(rows, k, QuantScheme("e4m3", 0)).codes, torch.rand(groups, rows).T + 0.1)


@case
def quantize_rows(_: bool) -> Call:
    x = torch.randn(9, 200) * torch.exp2(torch.randint(-20, 20, (9, 200)))
    x[3], x[6, :64] = 0, 1e-43
    return Call((x, Activations(64, powers=True)), {}, only_result)


@case
def fp8_rows(_: bool) -> Call:
    weight = by_group(coded_weight(72, 200, QuantScheme("e4m3", 32)))
    more = {"dtype": torch.float32, "launch": Fp8Launch(64, 2, 1, 4)}
    return Call((e4m3_rows(19, 200, 7), weight, torch.randn(72)), more, summed)


def adapter_case(rows, n, k, ends, rank, slots, parts) -> tuple[Any, ...]:
    """Random factors of rank 16 at most, zeros of no adapter; rows of any slot, some of none; their tiles."""
    listed = torch.randint(0, slots, (rows,))
    a, b = torch.randn(slots, len(ends) * rank, k) * k**-0.5, torch.randn(slots, ends[-1], rank)
    a[0], b[0] = 0, 0
    factors = AdapterFactors(a, b, ends, torch.tensor([0, *ends], dtype=torch.int32))
    adapters = Adapters({}, slots, listed, torch.zeros(5, rows, dtype=torch.int32))
    tiles = adapters.tiles(rows, n)
    tile_rows_reference(tiles, slots)
    return torch.randn(parts, rows, n, ends[-1]), torch.randn(rows, n, k), factors, tiles


@case
def tile_rows(_: bool) -> Call:
    adapters = Adapters({}, 5, torch.randint(0, 5, (37,)), torch.zeros(5, 37, dtype=torch.int32))
    return Call((adapters.tiles(37, 8), 5))


@case
def shrink(_: bool) -> Call:
    _, x, factors, tiles = adapter_case(5, 3, 1100, (100, 132, 164), 24, 4, 2)
    some = (tiles.slots > 0)[:, None, None]  # of the others it means nothing
    return Call((x, factors, tiles), compared=lambda args, result: torch.where(some, result.sum(0), 0))


@case
def expand(_: bool) -> Call:
    parts, x, factors, tiles = adapter_case(5, 3, 136, (100, 132, 164), 24, 4, 2)
    return Call((parts, shrink_reference(x, factors, tiles), factors, tiles), compared=only_result)


@case
def expand_gated(_: bool) -> Call:
    parts, x, factors, tiles = adapter_case(5, 3, 136, (76, 152), 8, 4, 2)
    return Call((parts, shrink_reference(x, factors, tiles), factors, tiles), compared=only_result)


@case
def route(_: bool) -> Call:
    spec = RouterSpec(12, 3, RouterKind.SIGMOID, renormalise=True, scale=1.5, groups=4, top_groups=2)
    router = Router(spec, torch.randn(12, 70), torch.randn(12), torch.randn(12))
    return Call((torch.randn(21, 70), router, torch.rand(21) < 0.8), compared=routed)


def routed(args: tuple[Any, ...], result: Any) -> Any:
    """Experts as 64 bits; of padding the weights count for nothing."""
    padding = result.expert[:, :1] < 0
    return result.expert.long(), torch.where(padding, 0, result.weight)


@case
def experts(kernel: bool) -> Call:
    spec = RouterSpec(6, 2, RouterKind.TOPK_SOFTMAX)
    x, live = torch.randn(19, 96), torch.rand(19) < 0.8
    router = Router(spec, torch.randn(6, 96), None, None)
    routes = operations()["route"].on(gpu_traits(DEVICE))(x, router, live)
    codes, scale = torch.randint(0, 256, (6, 96, 48), dtype=torch.uint8), torch.randint(122, 125, (6, 96, 3))
    gate_up = tile(QuantizedWeight(QuantScheme("e2m1", 32, "e8m0"), 96, codes, scale.to(torch.uint8)))
    made = Experts(gate_up, torch.randn(6, 96, 48) / 7, torch.randn(6, 2, 48), None, Activation.CLAMPED)
    return Call((x, routes, made), compared=lambda args, result: result.float().sum(0))


# ----------------------------------------------------------------------------------------------------- of attention


@case
def paged_attention(_: bool) -> Call:
    s = scene(n=4, t=6, window=9)
    return Call((s.q, s.clean.data, clean(s), s.tail.data, s.scale, None), {"launch": Launch(16, 16, 3, 4, 1)})


def chains(s: Scene) -> AttentionMetadata:
    """Each row's queries are a chain behind its prefix."""
    kv_len, at = s.metadata.kv_len, torch.arange(4)
    positions = kv_len[:, None] + at
    mask = (at[:, None] >= at).expand(len(kv_len), -1, -1)
    return replace(clean(s), positions=positions, tail_positions=positions, mask=mask)


@case
def plan_segments(_: bool) -> Call:
    def used(_: tuple[Any, ...], plan: Any) -> Any:
        return plan.first, plan.offsets, plan.items[: int(plan.offsets[-1])], plan.path

    return Call((chains(scene(n=4, t=4, window=9)), 2, 16), compared=used)


@case
def segment_attention(_: bool) -> Call:
    s = scene(n=4, t=4, window=9)
    return Call((s.q, s.clean.data, plan_reference(chains(s), 2, 64), s.tail.data, s.scale, None))


@case
def segment_prefill(_: bool) -> Call:
    s = scene(n=4, causal=True, window=9)
    return Call((s.q, s.clean.data, clean(s), s.scale, torch.randn(s.q.shape[2])))


@case
def segment_latents(_: bool) -> Call:
    s = scene(n=4, t=4, kv_heads=1, dim=28, latent=20)
    return Call((s.q, s.clean.data, plan_reference(chains(s), 2, 64), s.tail.data, 20, s.scale))


@case
def prefill_latents(_: bool) -> Call:
    s = scene(n=4, causal=True, kv_heads=1, dim=28, latent=20)
    return Call((s.q, s.clean.data, clean(s), 20, s.scale))


@case
def latent_attention(_: bool) -> Call:
    s = scene(n=4, t=6, window=9, kv_heads=1, dim=28, latent=20)
    return Call((s.q, s.clean.data, clean(s), s.tail.data, 20, s.scale), {"launch": Launch(16, 16, 3, 4, 1)})


@case
def paged_index_scores(_: bool) -> Call:
    s = scene(n=4, t=6, kv_heads=1, dim=28, latent=20)
    query = IndexQuery(torch.randn(4, 4, 3, 8), torch.randn(4, 4, 3), 5)

    def seen(args: tuple[Any, ...], result: Any) -> Any:
        metadata = args[2]
        known = torch.arange(metadata.max_kv_len) < metadata.extents[..., None]
        return torch.where(torch.cat([known, torch.ones(metadata.mask.shape, dtype=torch.bool)], dim=2), result, 0)

    args = query, s.clean.data[:, 0, 0, 20:], clean(s), s.tail.data[:, :, 0, 0, 20:]
    return Call(args, compared=seen)


@case
def choose_by_scores(_: bool) -> Call:
    s = scene(n=4, t=6)
    scores = torch.randint(-3, 4, (4, 4, 56)).float()

    def there(args: tuple[Any, ...], result: Any) -> Any:
        known = torch.arange(5) < result.count[..., None]
        return replace(result, positions=torch.where(known, result.positions, 0))

    return Call((scores, clean(s), 5), {"chunk": 16}, there)


@case
def tail_and_merge(_: bool) -> Call:
    s = scene(n=4, t=6, window=9)
    prefix = paged_attention_reference(s.q, s.clean.data, clean(s), None, s.scale)
    part = PrefixPart(*prefix, s.metadata.kv_len)
    return Call((s.q, part, s.tail.data, clean(s), s.scale, torch.randn(s.q.shape[2])))


def clean(s: Scene) -> AttentionMetadata:
    return replace(s.metadata, table=PageTable(FULL, s.clean_table))


@case
def gather_table(_: bool) -> Call:
    return Call((torch.randint(1, 99, (4, 12)).int(), torch.tensor([2, 0, 3]), torch.tensor([36, 0, 17]), 9, 4))


# -------------------------------------------------------------------------------------------------------- of a round


def growing() -> tuple[Buffers, TreeBuilder, Frontier, Children]:
    rng = random.Random(5)
    shape = (4, SHAPE.num_candidates)
    level = torch.tensor([1.0] * 3 + [2.0] * 9 + [3.0] * 9)  # no score rises from parent to child
    tokens, scores = torch.randint(0, 40, shape), -torch.rand(shape) - level
    parents = torch.arange(-1, 9).expand(4, -1).clone()
    parents[:, 4:] = 3 + torch.arange(6)
    growth = sown_growth(SHAPE, 4, random_calibration(rng, 3, 4))
    for table, values in ((growth.tokens, tokens), (growth.scores, scores), (growth.parents, parents)):
        table.copy_(values)
    growth.positions.zero_()
    growth.logprob.copy_(torch.where(torch.rand(shape) < 0.1, float("nan"), -torch.rand(shape) * 3))
    growth.classes.copy_(torch.tensor([0, 2, 1, 0]))
    mask = torch.eye(3, dtype=torch.bool).expand(4, 3, 3)
    frontier = Frontier(tokens[:, :3], scores[:, :3], torch.randn(4, 3, 21), mask)
    return Buffers.make(), growth, frontier, random_children(rng, 4, 3, 21)


@case
def start(_: bool) -> Call:
    buffers, tables = Buffers.make(), random_tables(random.Random(3), 6, 21)
    tree, places, _ = buffers.of(4, SHAPE)
    growth = sown_growth(SHAPE, 4, random_calibration(random.Random(6), 3, 4))
    args = (tables, torch.tensor([3, 0, 4, 5]), growth, tree, places, torch.eye(3, dtype=torch.bool))

    def written(args: tuple[Any, ...], result: Any) -> Any:
        # later levels, and all else of node 0, may be written or not
        level = (
            growth.tokens[:, :3],
            growth.scores[:, :3],
            growth.logprob[:, :3],
            growth.classes,
            growth.positions,
            result,
        )
        return tree.tokens[:, 0], places.committed, places.path, level

    return Call(args, compared=written)


@case
def top_logprobs(_: bool) -> Call:
    logits = torch.randint(-6, 6, (3, 2, 2500)) / 2.0
    inv_temp = InverseTemperature(torch.rand(3) * 3 + 0.1, torch.tensor([2, 0, 1]))
    return Call((logits, 20, torch.randint(0, 5, (2500,)), inv_temp))


@case
def grow(_: bool) -> Call:
    _, growth, frontier, children = growing()
    return Call((growth, 0, frontier, children))


@case
def select(_: bool) -> Call:
    buffers, growth, _, _ = growing()
    tree, places, _ = buffers.of(4, SHAPE)
    buffers.tree.tokens[:, 0], buffers.places.committed[:] = 7, 11
    tree.parent[:, 0], tree.depth[:, 0], tree.logprob[:, 0], tree.mask[:, 0] = 0, 0, 0.0, False
    tree.mask[:, 0, 0], places.nodes[:, 0] = True, 11
    return Call((growth, tree, places), compared=lambda args, result: buffers)


@case
def trim(_: bool) -> Call:
    buffers, growth, _, _ = growing()
    tree, places, _ = buffers.of(4, SHAPE)
    buffers.tree.tokens[:, 0], buffers.places.committed[:] = 7, 11
    tree.parent[:, 0], tree.depth[:, 0], tree.logprob[:, 0] = 0, 0, 0.0
    tree.mask[:, 0, 0] = True
    select_reference(growth, tree, places)
    tree.logprob[1] = 0.0  # all tie
    tree.logprob[2, 5:] = float("nan")
    flat = FlatNodes(*(torch.full(size, -9) for size in ((4,), (4,), (17,), (4, SHAPE.num_draft_tokens))))
    rows = torch.tensor([4, 1, 0, 5])
    written = tree, places, growth.chosen, flat
    return Call((tree, places, growth.chosen, rows, 5, flat), compared=lambda args, result: written)


@case
def greedy(_: bool) -> Call:
    def merged(args: tuple[Any, ...], result: Any) -> Any:
        if not isinstance(result, PartialArgmax):
            return result
        key = result.key.amax(-1)
        ordered = (key >> 32).int()
        value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
        return SampledTokens(0x7FFFFFFF - (key & 0x7FFFFFFF), value.isfinite())

    logits = torch.randint(-9, 9, (2, 3, 9000)) / 2.0
    logits[1, 2, 8000] = float("inf")
    return Call((logits,), compared=merged)


@case
def draw(_: bool) -> Call:
    columns = zip((0.0, 0, 1.0, 0.0), (0.7, 5, 0.8, 0.1), (1.3, 0, 0.6, 0.0), strict=True)
    params = RowSamplingParams(*(torch.tensor(column) for column in columns))
    rows, positions = torch.tensor([2, 0, 1]), torch.randint(0, 10**6, (3, 2))
    return Call(
        (torch.randn(3, 2, 90) * 3, SamplingMetadata(params, torch.randint(0, 2**62, (3,))), rows, positions, True)
    )


def changing_rows(num_rows: int, vocab: int) -> LogitsProcessors:
    """Words with every bit, counts small and large; the last row, and row 1, change nothing."""
    words = torch.where(torch.rand(num_rows, vocab) < 0.5, torch.randint(0, 3, (num_rows, vocab)) * ONE, 0)
    words += torch.randint(0, 4, (num_rows, vocab)) + torch.randint(0, 9, (num_rows, vocab)) * 8
    words[:, ::7] |= 4
    words[0, 3] = -ONE  # as often as can be counted
    biases = torch.cat([torch.zeros(num_rows, 1), torch.randn(num_rows, 511)], dim=1)
    active = torch.arange(num_rows) % 4 != 1
    active[-1] = False
    penalties = torch.randn(num_rows), torch.randn(num_rows), 0.5 + torch.rand(num_rows)
    may_end = torch.tensor([12, 5, 13, 90, 14, 7])
    return LogitsProcessors(words.int(), biases, *penalties, may_end, active)


@case
def process(_: bool) -> Call:
    tree, processors = random_tree(random.Random(4), 4, SHAPE, Buffers.make()), changing_rows(6, 2300)
    tree.tokens[:, 1:] = torch.randint(0, 3, (4, 8)) + 2046  # a token may come again on its path, and at a block's edge
    rows, logits = torch.tensor([3, 0, 1, 5]), torch.randn(4, 9, 2300) * 3
    logits[0, :, 5], logits[1, 2, 9] = float("-inf"), float("nan")
    logits[:, :, 2040:2050] = 4.0
    allowed = torch.randint(-(2**31), 2**31, (6, 11, mask_words(2300)), dtype=torch.int32)[:4, :9]
    allowed[2], allowed[1, 3] = -1, 1 << 5
    return Call((logits, processors, rows, 11 + tree.depth, tree, allowed))


@case
def count(_: bool) -> Call:
    tokens = torch.tensor([[7, 7, 2, 7], [1, 1, 1, 1], [8, 0, 0, 0], [3, 3, 4, 4], [5, 5, 5, 5], [6, 6, 6, 6]])
    rows, num_tokens = torch.tensor([4, 3, 0, 1, 5, 5]), torch.tensor([4, 1, 0, 4, 4, 2])
    return Call((changing_rows(6, 9), rows, tokens, num_tokens))


@case
def accept(_: bool) -> Call:
    rng, buffers = random.Random(1), Buffers.make()
    tree = random_tree(rng, 4, SHAPE, buffers)
    chosen = SampledTokens(agreeing(rng, tree), torch.rand(4, 9) < 0.9)
    return Call((chosen, tree, buffers.of(4, SHAPE)[2], None), compared=lambda args, result: buffers)


@case
def learn(_: bool) -> Call:
    buffers, growth, _, _ = growing()
    rng, calibration, (tree, places, accepted) = (
        random.Random(7),
        random_calibration(random.Random(8), 3, 4),
        buffers.of(4, SHAPE),
    )
    buffers.tree.tokens[:, 0], buffers.places.committed[:] = 7, 11
    select_reference(growth, tree, places)
    accepted.choice.copy_(agreeing(rng, tree))
    accepted.finite.copy_(torch.tensor([True, True, False, True]))
    observed = Observed(torch.tensor([4, 1, 0, 5]), 5, torch.arange(6) == 3, True)
    return Call((calibration, growth, accepted, observed), compared=lambda args, result: calibration)


def drawing() -> tuple[DrawnNodes, RoundOfRows]:
    """Eight nodes of each of three depths for two kinds of requests, four ranks and the others; large seeds, and
    padding.
    """
    logits = torch.sort(torch.randn(3, 16, 5) * 4, dim=2, descending=True).values
    drawn = DrawnNodes(logits, torch.randint(0, 5, (3, 16)), 1000, 37, kinds=2)
    seed = torch.randint(-(2**62), 2**62, (6,))
    committed, classes = torch.arange(6) * 1001, torch.tensor([0, 1, 2, 0, 1, 2])
    return drawn, RoundOfRows(
        seed, committed, classes, torch.tensor([4, 1, 0, 5]), 5, torch.rand(drawn.logits.shape[0], 3) * 3 + 0.1
    )


@case
def say_roots(_: bool) -> Call:
    said = torch.full((6, 4), -7.0)
    return Call((*drawing(), 3, said), compared=lambda args, result: said)


@case
def say_level(_: bool) -> Call:
    return Call((*drawing(), 2, 3))


@case
def choose_drawn(_: bool) -> Call:
    buffers, growth, _, _ = growing()
    tree, places, _ = buffers.of(4, SHAPE)
    buffers.tree.tokens[:, 0], buffers.places.committed[:] = 7, 11
    select_reference(growth, tree, places)
    return Call((*drawing(), growth))


@case
def commit(_: bool) -> Call:
    rows, path = torch.tensor([3, 0, 4, 5]), torch.tensor([[0, 2, 3, 7], [0, 1, 3, 5], [0, 3, 6, 8], [0, 0, 0, 0]])
    table = torch.arange(1, 19, dtype=torch.int32).view(6, 3) * (torch.arange(6) < 5)[:, None]
    paths = Paths(rows, torch.tensor([1, 0, 5, 0]), torch.tensor([3, 1, 2, 0]), 4, path, 5)
    return Call((torch.zeros(2, 80, 2, 1, 4), torch.randn(2, 4, 9, 2, 1, 4), table.int(), 4, paths))


@case
def path_aux_hidden(_: bool) -> Call:
    return Call((torch.zeros(4, 4, 24), tuple(torch.randn(4, 9, 6) for _ in range(4)), torch.randint(0, 9, (4, 4))))


@case
def pick(_: bool) -> Call:
    return Call((torch.randn(4, 5, 42)[:, :, :21], torch.tensor([0, 4, 2, 1])))


@case
def finish(_: bool) -> Call:
    rng = random.Random(2)
    tables, new = random_tables(rng, 6, 21), random_tables(rng, 6, 21)
    assert new.draft is not None
    draft = replace(new.draft, tokens=new.draft.tokens[:4, :3], logprob=new.draft.logprob[:4, :3])
    rows, root = torch.tensor([3, 0, 5, 5]), torch.randint(0, 40, (4,))
    return Call((tables, rows, 5, torch.tensor([0, 3, 1, 2]), root, replace(draft, hidden=new.draft.hidden[:4])))


# ------------------------------------------------------------------------------------------------------- of ranks


def mailboxes(rank: int, ranks: int) -> tuple[Mailboxes, list[Tensor]]:
    """Of ranks that have written what they write for their second exchange, when this one begins its own."""
    boxes = [torch.full((peers.mailbox_bytes(ranks),), 255, dtype=torch.uint8) for _ in range(ranks)]
    mail = Mailboxes.make(rank, [each.data_ptr() for each in boxes], DEVICE, torch.zeros(8, dtype=torch.int64))
    mail.control[1] = 10**9
    mail.counts.fill_(1)
    return mail, boxes


@case
def add_shares_rms_norm(_: bool) -> Call:
    """Two rows of rank 1 of 3, whose own parts have an exact sum: what is sent is compared too."""
    mail, boxes = mailboxes(1, 3)
    sums = peers._sums(mail, 1).view(torch.float32)
    for peer in (0, 2):
        sums[1, :2, peer, :48] = torch.randn(2, 48)
    parts = torch.randint(-8, 9, (3, 2, 48)).float()
    args = torch.randn(2, 48), parts, torch.rand(48), 1e-5, mail
    return Call(args, compared=lambda args, result: (result, boxes, mail.counts, mail.record))


@case
def gather(_: bool) -> Call:
    """Of 1,500 words, so of two slots, in three rows that lie side by side."""
    mail, boxes = mailboxes(0, 2)
    words = torch.randint(-(2**31), 2**31, (2 * peers.CHUNK,))
    peers._pieces(mail, 0)[1, :2, 1] = (2 << 32 | words & 0xFFFFFFFF).view(2, -1)
    piece = torch.randint(-(2**31), 2**31, (3, 500), dtype=torch.int32)
    piece[1, 7] = -1
    out = torch.zeros(3, 2, 500, dtype=torch.int32)
    return Call((out, piece, mail), compared=lambda args, result: (out, boxes, mail.counts))


# ---------------------------------------------------------------------------------------------------- of a hand-over


def moved(run: Callable[..., Any]) -> Call:
    """Nine tokens from the middle of a page on, of heads that are no power of two; the row's third page is missing."""
    kind = torch.float16 if run is pack_reference else torch.float32
    span = ChunkSpan(first=6, count=9, page_size=4, offset=48, stride=2304)
    table = torch.tensor([5, 2, 0, 7, 1], dtype=torch.int32)
    pool, slot = torch.randn(3, 32, 2, 2, 6).to(kind), torch.randint(0, 256, (8192,), dtype=torch.uint8)
    pool[:, :4] = 0
    pool[1, 11, 0, 1, 3] = float("nan")
    sums = torch.tensor([5, -7])
    return Call((slot, pool, table, span, sums), compared=lambda args, _: (args[0], args[1].view(torch.uint8), args[4]))


@case
def pack(_: bool) -> Call:
    return moved(pack_reference)


@case
def unpack(_: bool) -> Call:
    return moved(unpack_reference)


# ------------------------------------------------------------------------------------- of layers with a recurrence

_ROWS = [3, 0, 5, 1, 5]
"""Of a batch, the dummy twice."""
_NODES, _WIDTH = 9, 4


def _state_group() -> StateGroup:
    return StateGroup("state", 2, 84, 4, 4, 2, 16, 5, delta=True, per_channel=False)


def _states() -> LinearStates:
    return random_states(_state_group(), 6, _WIDTH, torch.float32, torch.float32)


def _parents() -> Tensor:
    rng = random.Random(3)
    return torch.tensor([random_parents(_NODES, kind, rng) for kind in ("tree", "chain", "star", "tree", "tree")])


@case
def delta_inputs(_: bool) -> Call:
    return Call((torch.randn(2, 3, 84), torch.randn(2, 3, 8), -torch.rand(4) - 0.1, torch.randn(4), 2, 16))


@case
def gated_norm(_: bool) -> Call:
    return Call((torch.randn(2, 3, 4, 12), torch.randn(2, 3, 80)[..., 20:68], torch.rand(12), 1e-5))


@case
def path_conv(_: bool) -> Call:
    conv, x = _states().conv[0], torch.randn(5, _NODES, 84)
    return Call((conv, torch.tensor(_ROWS), x, tree_windows(_parents(), 4), torch.randn(84, 4), torch.randn(84)))


@case
def prefill_conv(_: bool) -> Call:
    valid = torch.arange(7) < torch.tensor([7, 0, 2])[:, None]
    x = torch.randn(3, 7, 84).masked_fill(~valid[..., None], 9.0)
    return Call((_states().conv[0], torch.tensor([4, 5, 0]), x, valid, torch.randn(84, 4)))


@case
def verify_states(_: bool) -> Call:
    inputs = random_inputs(_state_group(), 5, _NODES, torch.float32)
    stash = random_tails(_state_group(), 6, _NODES + 2, torch.float32, torch.float32).updates.layer(0)
    return Call((_states().layer(0), torch.tensor(_ROWS), inputs, _parents(), stash, 5))


@case
def step_delta(_: bool) -> Call:
    torch.manual_seed(5)
    group = _state_group()
    tails = random_tails(group, 6, 3, torch.float32, torch.float32)
    net = DeltaNet(torch.randn(84, 4), torch.rand(5), 1e-5, -torch.rand(4) - 0.1, torch.randn(4), 2, 16, of_beta=2.0)
    mixed, z, gates = torch.randn(5, 1, 112).split([84, 20, 8], dim=-1)
    kept, updates = tails.mixed[0, :5, :1], tails.updates.layer(0)
    stash = StateUpdates(updates.k[:5, :1], updates.d[:5, :1], updates.g[:5, :1])
    given = (_states().layer(0), torch.tensor(_ROWS), mixed, z, gates, net, kept, stash, 5)
    return Call(given, compared=lambda args, result: (result, args[0], args[6], args[7]))


@case
def keep_states(_: bool) -> Call:
    tails = random_tails(_state_group(), 6, _NODES, torch.float32, torch.float32)
    node, length = torch.randint(0, _NODES, (5, _WIDTH)), torch.tensor([0, 3, 1, 2, 2])
    paths = Paths(torch.tensor(_ROWS), torch.zeros(5, dtype=torch.int64), length, _WIDTH, node, 5)
    return Call((_states(), tails, paths, tree_windows(_parents(), 4)), compared=lambda args, _: args[0])


@case
def fold_states(_: bool) -> Call:
    return Call((_states(), torch.tensor([4, 2, 5])), compared=lambda args, _: args[0])


@case
def prefill_states(_: bool) -> Call:
    valid = torch.arange(70) < torch.tensor([70, 0, 65])[:, None]
    inputs = random_inputs(_state_group(), 3, 70, torch.float32)
    return Call(
        (_states().layer(0), torch.tensor([2, 5, 4]), inputs, valid),
        compared=lambda args, result: (result.masked_fill(~valid[..., None, None], 0), args[0].state),
    )
