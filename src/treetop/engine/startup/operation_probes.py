"""On a GPU with `--exactness bits`: whether a row of an operation beside products and attention has its bits alone.

A kernel of ours has one row, or a fixed number of them, a program, and adds up what lies in a row as its width says.
But a compiler may lay a block out otherwise for a size that is a multiple of 16, and a library may look at the number
of rows: so each operation of a target runs at its own widths, with all rows and with some, in other places.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from treetop.checkpoints.adapters import make_adapters
from treetop.checkpoints.lora_folder import is_adaptable
from treetop.checkpoints.params import Param
from treetop.engine.startup.probed_products import identity
from treetop.exact.probe import BitProbe, RowCase, of_rows
from treetop.kernels.attention.indexer import IndexNorm
from treetop.kernels.attention.latent import LatentNorm
from treetop.kernels.exact import Functions
from treetop.kernels.fused import HeadNorms
from treetop.kernels.gemm.adapter_rows import AdapterFactors
from treetop.kernels.gemm.fp8_rows import Activations
from treetop.kernels.gemm.quantizing_norm import norms_codes
from treetop.kernels.moe.routes import Router, RouterKind, RouterSpec
from treetop.kernels.recurrent.convolution import tree_windows
from treetop.kernels.recurrent.states import LayerStates, StateInputs, StateUpdates
from treetop.kernels.rope import RopeTable, rope_table
from treetop.kernels.sampling.sampling import RowSamplingParams, SamplingMetadata
from treetop.kernels.table import Ops
from treetop.models.config import (
    AttentionSpec,
    BothSpec,
    DenseSpec,
    ExpertSpec,
    IndexSpec,
    LatentSpec,
    LinearSpec,
    ModelConfig,
    RecurrentKind,
    attention_of_rank,
)
from treetop.types.ids import STATE
from treetop.types.sampling import MAX_LOGPROBS
from treetop.types.state import StateGroup
from treetop.weights.adapted import Adapters
from treetop.weights.format import Biases, HeldFormat, KernelContext, Parts
from treetop.weights.heads_product import HeadsProduct
from treetop.weights.plain import UNQUANTIZED
from treetop.weights.w8a8 import W8A8

_COUNTS = (1, 2, 3, 5, 8, 16, 17, 31, 64, 65, 100, 512, 513, 1000)
MOST = 1100
"""Rows among which a row's bits are compared with those of itself among fewer."""
_POSITIONS = 64
_EXPERTS = 8
"""Of the layer of experts that is tried: which of them there are changes no product."""
_ADAPTERS, _ADAPTED, _TOKENS = 3, 256, 5
"""Adapters that are tried, rows that have one or none, and tokens of each of them, where it has several."""


def operation_probe(ops: Ops, model: ModelConfig, params: Sequence[Param], most: int = MOST, rank: int = 0) -> BitProbe:
    """Of each operation of a target.

    ops, params: of a target, or of a rank of one. most: rows that are tried. rank: of adapters, 0 without.
    """
    cases = partial(_cases, ops, model, params, rank)
    return BitProbe(cases, _COUNTS, most, model.hidden_size, ops.context.dtype, ops.context.device)


def kept_operation_problem(ops: Ops, model: ModelConfig, params: Sequence[Param], rank: int = 0) -> str | None:
    """The first operation whose bits depend on the batch; None where there is none, or was none on this machine.

    rank: of adapters, 0 without.
    """
    layers = {(layer.mixer, layer.feed_forward) for layer in model.layers}
    ranks = ops.parallel.size, ops.expert_ranks.size
    held = _experts_format(params).scheme, _codes_of_norms(model, params)
    what = sorted(map(repr, layers)), model.hidden_size, model.vocab_size, held, str(ops.context.dtype), ranks, rank
    probe = operation_probe(ops, model, params, rank=rank)
    return probe.kept_problem("exact-operations", identity(ops.context.device, *what))


def _cases(
    ops: Ops, model: ModelConfig, params: Sequence[Param], rank: int, generator: torch.Generator
) -> Iterator[RowCase]:
    made, held, codes = set[object](), _experts_format(params), _codes_of_norms(model, params)
    hidden, ranks = model.hidden_size, ops.parallel.size
    parts = {1, ranks, ops.expert_ranks.size}
    parts |= {each.router.top_k + bool(each.shared_inner) for layer in model.layers if (each := layer.experts)}
    for number in sorted(parts):
        name, call = f"a norm of a sum of {number} parts", _norm(ops, hidden, number, model.norm_eps, generator)
        yield RowCase(name, hidden, call)
        for how in codes:
            call = _norm_codes(ops, hidden, number, model.norm_eps, how, generator)
            yield RowCase(f"{name}, in e4m3 {how}", hidden, call, last_are_zero=2)
    for layer in model.layers:
        mixers = (layer.mixer.attention, layer.recurrent) if isinstance(layer.mixer, BothSpec) else (layer.mixer,)
        for spec in (*mixers, layer.feed_forward, layer.experts):
            if spec is None or spec in made:
                continue
            made.add(spec)
            if isinstance(spec, AttentionSpec) and spec.latent is not None:
                yield from _of_latents(ops, attention_of_rank(spec, ranks), spec.latent, hidden, generator)
            elif isinstance(spec, AttentionSpec):
                yield _rotation(ops, attention_of_rank(spec, ranks), model.norm_eps, generator)
            elif isinstance(spec, RecurrentKind):
                own = spec.of_rank(ranks)
                yield _recurrence(ops, own.state(STATE, 1), generator)
                if isinstance(own, LinearSpec):
                    yield _around_delta(ops, own, model.norm_eps, generator)
            elif isinstance(spec, DenseSpec):
                operation = ops.silu_mul if spec.gate == "silu" else ops.gelu_tanh_mul
                width = 2 * (spec.inner_size // ranks)
                yield RowCase(f"{spec.gate} of a gate", width, of_rows(operation))
            elif isinstance(spec, ExpertSpec):
                yield RowCase("routing", hidden, _routing(ops, spec.router, hidden, generator))
                yield RowCase("products with experts", hidden, _experts(ops, spec, hidden, held, generator))
    yield from adapter_cases(ops, params, rank, generator)
    for name in Functions.__dataclass_fields__:
        yield RowCase(name, 1000, of_rows(getattr(ops.functions, name)))
    yield RowCase("log-probabilities", model.vocab_size, _logprobs(ops, model.vocab_size), 128)
    yield RowCase("drawing a token", model.vocab_size, _draws(ops), 128)


def _norm(
    ops: Ops, hidden: int, parts: int, eps: float, generator: torch.Generator
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    weight = _random((hidden,), ops, generator)

    return lambda x, _: ops.add_rms_norm(x[:, None], _parts(x, parts), weight, eps)


def _norm_codes(
    ops: Ops, hidden: int, parts: int, eps: float, how: Activations, generator: torch.Generator
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    weight = _random((hidden,), ops, generator)

    def call(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        """By the norm and by the product itself, which must be the same: a product has the codes of some norms only."""
        total, normed, by_norm = ops.add_rms_norm_codes(x[:, None], _parts(x, parts), weight, eps, how)
        own = ops.quantize_rows(normed[:, 0], how)
        differ = (by_norm.codes != own.codes, by_norm.scale != own.scale)
        return total, normed, by_norm.codes, by_norm.scale, *differ

    return call


def _parts(x: Tensor, parts: int) -> Tensor:
    """What a norm of rows [rows, 1, hidden] adds first [parts, rows, 1, hidden]."""
    wide = x if parts == 1 else x.float()
    return torch.stack([wide.roll(1 + part, -1) * 0.75**part for part in range(parts)])[:, :, None]


def _rotation(ops: Ops, spec: AttentionSpec, eps: float, generator: torch.Generator) -> RowCase:
    kv_heads = spec.kv.heads if spec.kv_sharing_layer is None else 0
    heads, dim = spec.num_heads + 2 * kv_heads, spec.head_dim
    table = rope_table(spec.rope, _POSITIONS, ops.context.dtype, ops.context.device)
    number = 0 if not spec.qk_norm else 3 if spec.value_norm else 2
    norms = HeadNorms(_random((number, dim), ops, generator), eps) if number else None

    def call(x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        """Into a tail and into pages, which must be the same: what is decoded is prefilled again."""
        qkv, positions = x.view(1, len(x), 1, heads, dim), (row % _POSITIONS)[:, None]
        tail = x.new_zeros((len(x), 1, 2, kv_heads, dim))
        pages = x.new_zeros((len(x) + 1, 2, kv_heads, dim))
        slots = torch.arange(1, len(x) + 1, device=x.device)[:, None]
        angles = ops.angles(table, positions)
        into_tail = ops.rotate_and_write(qkv.clone(), angles, tail, None, norms=norms)
        into_pages = ops.rotate_and_write(qkv.clone(), angles, pages, slots, norms=norms)
        return into_tail[:, 0], tail[:, 0], into_pages[:, 0] - into_tail[:, 0], pages[1:] - tail[:, 0]

    return RowCase("rotation and norms of heads", heads * dim, call, last_are_zero=2)


def _of_latents(
    ops: Ops, spec: AttentionSpec, latent: LatentSpec, hidden: int, generator: torch.Generator
) -> Iterator[RowCase]:
    """What stands around compressed attention, and an indexer's weights and keys."""
    heads, rank, nope, rope_dim = spec.num_heads, latent.rank, latent.qk_nope_head_dim, spec.rope.head_dim
    table = rope_table(spec.rope, _POSITIONS, ops.context.dtype, ops.context.device)
    norm = LatentNorm(_random((rank,), ops, generator), latent.norm_eps)
    up = _random((heads, nope + latent.value_dim, rank), ops, generator) * rank**-0.5

    def written(x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        """Into a tail and into pages, which must be the same: what is decoded is prefilled again."""
        plane, absorbed, of_heads = x[:, None].split([rank + rope_dim, heads * rank, heads * rope_dim], dim=-1)
        angles = ops.angles(table, (row % _POSITIONS)[:, None])
        tail, pages = x.new_zeros((len(x), 1, 1, 1, rank + rope_dim)), x.new_zeros((len(x) + 1, 1, 1, rank + rope_dim))
        slots = torch.arange(1, len(x) + 1, device=x.device)[:, None]
        nope_heads, rope_heads = (each.unflatten(-1, (heads, -1)) for each in (absorbed, of_heads))
        into_tail, into_pages = (
            ops.write_latent(nope_heads, rope_heads.clone(), plane[None], angles, target, at, norm)
            for target, at in ((tail, None), (pages, slots))
        )
        return into_tail[:, 0], tail[:, 0], into_pages[:, 0] - into_tail[:, 0], pages[1:] - tail[:, 0]

    width = rank + rope_dim + heads * (rank + rope_dim)
    yield RowCase("latents and their rotation", width, written, most=64, last_are_zero=2)
    for name, weight in (("keys", up[:, :nope]), ("values", up[:, nope:].transpose(1, 2))):
        product = HeadsProduct(weight, ops)
        call = partial(_by_heads, product, heads)
        yield RowCase(f"products of latents' {name}", heads * weight.shape[1], call)
    if spec.index is not None and spec.index.shares is None:
        yield from _of_an_indexer(ops, spec.index, rope_dim, table, hidden, generator)


def _by_heads(product: HeadsProduct, heads: int, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    return (product(x[:, None].unflatten(-1, (heads, -1)))[:, 0],)


def _of_an_indexer(
    ops: Ops, index: IndexSpec, rope_dim: int, table: RopeTable, hidden: int, generator: torch.Generator
) -> Iterator[RowCase]:
    heads, dim = index.num_heads, index.head_dim
    weight = (_random((heads, hidden), ops, generator) * hidden**-0.5).float()
    scale, bias = (_random((dim,), ops, generator).float() for _ in range(2))
    norm = IndexNorm(scale, bias, index.norm_eps)

    def weighed(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        return (ops.profile.linear(x.float(), weight, None),)

    def written(x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        """Into a tail and into pages, as latents are."""
        key, of_heads = x[:, None].split([dim, heads * dim], dim=-1)
        angles = ops.angles(table, (row % _POSITIONS)[:, None])
        tail, pages = x.new_zeros((len(x), 1, 1, 1, dim)), x.new_zeros((len(x) + 1, 1, 1, dim))
        slots = torch.arange(1, len(x) + 1, device=x.device)[:, None]
        asked = ops.rotate_index_heads(of_heads.unflatten(-1, (heads, -1)), angles)
        for target, at in ((tail, None), (pages, slots)):
            ops.write_index_keys(key, norm, angles, target, at)
        return asked[:, 0], tail[:, 0], pages[1:] - tail[:, 0]

    yield RowCase("weights of an indexer's heads", hidden, weighed)
    yield RowCase("an indexer's keys and heads", dim + heads * dim, written, last_are_zero=1)


def _recurrence(ops: Ops, group: StateGroup, generator: torch.Generator) -> RowCase:
    """A token a row, from no state: its convolution and its recurrence, those that the kind has."""
    weight = _random((max(group.channels, 1), group.taps), ops, generator)
    keys, values = group.key_heads * group.key_dim, group.heads * group.value_dim
    widths = [group.channels, keys, keys, values, prod(group.decay_shape), group.heads]

    def states(rows: int) -> LayerStates:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=ops.context.device)

        k, d = zeros(rows, 1, group.key_heads, group.key_dim), zeros(rows, 1, group.heads, group.value_dim)
        pending = StateUpdates(k, d, zeros(rows, 1, *group.decay_shape))
        conv = zeros(rows, *group.conv_shape, dtype=ops.context.dtype)
        return LayerStates(conv, zeros(rows, *group.state_shape), pending, zeros(rows, dtype=torch.int64))

    def call(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        """As a round's root and as a chunk of one token, which must be the same."""
        rows, item = len(x), torch.arange(len(x), device=x.device)
        mixed, *rest = (each[:, None].contiguous() for each in x.split(widths, dim=-1))
        parents, valid = item.new_zeros((rows, 1)), torch.ones((rows, 1), dtype=torch.bool, device=x.device)
        one, two = states(rows), states(rows)
        found, zero = list[Tensor](), list[Tensor]()
        if group.taps > 1:
            first = ops.path_conv(one.conv, item, mixed, tree_windows(parents, group.taps), weight)
            found.append(first)
            zero.append(first - ops.prefill_conv(two.conv, item, mixed, valid, weight))
        if group.heads:
            q, k, v, g, beta = (each.float() for each in rest)
            q, k = (each.unflatten(-1, (group.key_heads, group.key_dim)) for each in map(ops.functions.sigmoid, (q, k)))
            v, g = v.unflatten(-1, (group.heads, -1)), -g.unflatten(-1, group.decay_shape).abs()
            inputs = StateInputs(q, k, v, g, ops.functions.sigmoid(beta) if group.delta else None)
            verified = ops.verify_states(one, item, inputs, parents, one.pending, dummy_row=-1)
            found.append(verified)
            zero.append(verified - ops.prefill_states(two, item, inputs, valid))
        return tuple(each[:, 0] for each in (*found, *zero))

    parts = int(group.taps > 1) + int(group.heads > 0)
    return RowCase("the recurrence of a layer", sum(widths), call, most=64, last_are_zero=parts)


def _around_delta(ops: Ops, spec: LinearSpec, eps: float, generator: torch.Generator) -> RowCase:
    """What a gated delta net has kernels for before and behind its recurrence; other kinds have plain operations."""
    norm = _random((spec.value_dim,), ops, generator)
    rate, bias = (_random((spec.heads,), ops, generator).float().abs() * sign for sign in (-1, 1))
    widths = [sum(spec.widths), 2 * spec.heads, spec.widths[2]]

    def call(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        mixed, gates, z = (each[:, None].contiguous() for each in x.split(widths, dim=-1))
        inputs = ops.delta_inputs(mixed, gates, rate, bias, spec.key_heads, spec.key_dim)
        normed = ops.gated_norm(inputs.v, z, norm, eps)
        made = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, normed)
        return tuple(each[:, 0] for each in made if each is not None)

    return RowCase("what stands around the recurrence of a layer", sum(widths), call, most=64)


def _routing(
    ops: Ops, spec: RouterSpec, hidden: int, generator: torch.Generator
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    number = spec.num_experts
    weight = _random((number, hidden), ops, generator) * hidden**-0.5
    bias, correction, factor = (
        _random((number,), ops, generator).to(kind) if there else None
        for there, kind in ((spec.bias, weight.dtype), (spec.correction, torch.float32), (spec.factors, torch.float32))
    )
    router = Router(spec, weight, bias, correction, None, factor)

    def call(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        routes = ops.route(x, router, None)
        return routes.expert, routes.weight

    return call


def _experts(
    ops: Ops, spec: ExpertSpec, hidden: int, held: HeldFormat, generator: torch.Generator
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    router = Router(
        RouterSpec(_EXPERTS, min(4, spec.router.top_k), RouterKind.SOFTMAX),
        _random((_EXPERTS, hidden), ops, generator) * hidden**-0.5,
        None,
        None,
    )
    inner = spec.inner_size
    shapes = (_EXPERTS, 2, inner, hidden), (_EXPERTS, hidden, inner)
    up, down = (_random_parts(held, shape, ops, generator) for shape in shapes)
    biases: Biases = None, None
    if spec.bias:
        biases = _random((_EXPERTS, 2, inner), ops, generator), _random((_EXPERTS, hidden), ops, generator)
    products = held.experts(up, down, biases, spec.activation, KernelContext(ops))

    def call(x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        return (products(x, ops.route(x, router, None)).transpose(0, 1),)

    return call


def _random_parts(held: HeldFormat, shape: tuple[int, ...], ops: Ops, generator: torch.Generator) -> Parts:
    """With products of about their input's size."""
    found = held.parts(shape, ops.context.dtype).items()
    parts = {part: torch.empty(each.shape, dtype=each.dtype, device=ops.context.device) for part, each in found}
    held.fill_random(parts, generator)
    return parts


def adapter_cases(ops: Ops, params: Sequence[Param], rank: int, generator: torch.Generator) -> Iterator[RowCase]:
    """What adapters add to each product that they may be beside, of rows with and without one. rank: 0 for nothing."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=ops.context.device)

    alike = {(param.shape, len(param.sources)): param for param in params if rank and is_adaptable(param)}
    for param in alike.values():
        modules = {source.module for source in param.sources}
        adapters = make_adapters(modules, rank, _ADAPTERS, [param], _ADAPTED, ops.context.dtype, zeros)
        factors = adapters.factors[param.name]
        width = factors.a.shape[2]
        factors.a[1:] = _random((_ADAPTERS, *factors.a.shape[1:]), ops, generator) * width**-0.5
        factors.b[1:] = _random((_ADAPTERS, *factors.b.shape[1:]), ops, generator) * rank**-0.5 / 64
        name = f"what adapters add to {param.name.rpartition('.')[2]}"
        yield RowCase(name, width, _beside(ops, adapters, factors, param.name.endswith("gate_up")), _ADAPTED, 2)


def _beside(
    ops: Ops, adapters: Adapters, factors: AdapterFactors, gated: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def added(x: Tensor, slots: Tensor) -> Tensor:
        adapters.select(slots, x.shape[1], ops)
        tiles = adapters.tiles(*x.shape[:2])
        parts = (x[None, ..., :1] / 64).repeat(1, 1, 1, factors.b.shape[1])
        given = parts, ops.shrink(x, factors, tiles), factors, tiles
        return ops.expand_gated(*given) if gated else ops.expand(*given)[0]

    def call(x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        """As a row's only token and as one of several, which must be the same."""
        slots = row % (_ADAPTERS + 1)
        one = added(x[:, None], slots)
        several = added(x[:, None].repeat(1, _TOKENS, 1), slots)
        return one[:, 0], several[:, 0] - one[:, 0], several[:, -1] - one[:, 0]

    return call


def _logprobs(ops: Ops, vocab: int) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    return lambda x, _: ops.top_logprobs(x, min(MAX_LOGPROBS, vocab), None)


def _draws(ops: Ops) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """By rows of four kinds: without filters, with each and with all."""
    device = ops.context.device

    def of_rows(*values: float) -> Tensor:
        return torch.tensor(values, device=device)

    top_k = torch.tensor([0, 20, 0, 7], device=device)
    params = RowSamplingParams(of_rows(1, 0.7, 1.3, 1), top_k, of_rows(1, 1, 0.8, 0.95), of_rows(0, 0, 0, 0.01))
    sampler = SamplingMetadata(params, torch.tensor([3, 1 << 40, 5, 7], device=device))

    def call(x: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        chosen = ops.draw((x * 0.01)[:, None], sampler, row % 4, row[:, None], True)
        return chosen.token, chosen.finite

    return call


def _random(shape: tuple[int, ...], ops: Ops, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=ops.context.device).to(ops.context.dtype)


def _experts_format(params: Iterable[Param]) -> HeldFormat:
    """How a target's experts are held, of one that has any."""
    return next((param.held for param in params if param.kind == "experts"), UNQUANTIZED)


def _codes_of_norms(model: ModelConfig, params: Iterable[Param]) -> list[Activations]:
    """How norms write what products with e4m3 inputs read."""
    found = {param.held.activations for param in params if isinstance(param.held, W8A8)}
    return sorted((how for how in found if norms_codes(how, model.hidden_size)), key=str)
