"""The table of operations: what runs beside the library's products, once as plain tensor operations, once as kernels.

Every row of `Ops` is an operation. An instance of it holds, for one engine, the function of each row that serves there:
nowhere else is a kernel chosen over its reference. `docs/operations.md` is this table, written out.

Four things are chosen elsewhere, for they depend on more than an engine: the attention of a phase, by its backend, the
product with a weight, by its format (`treetop.weights`) and the rows of each call, an exchange between ranks, by its
size and by where they are, and prompts in linear attention, which an option gives to another library. Their kernels
are rows too, to be tested, compiled ahead and checked with the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from treetop.kernels import fused
from treetop.kernels.attention import attention as attending
from treetop.kernels.attention import (
    index_scores,
    index_topk,
    indexer,
    latent,
    latent_segments,
    latent_tail,
    pages,
    segments,
    tail,
)
from treetop.kernels.attention import latent_attention as latent_attending
from treetop.kernels.attention import latent_gluon as latent_pages_attending
from treetop.kernels.attention import segment_attention as segment_attending
from treetop.kernels.attention import segment_prefill as segment_prefilling
from treetop.kernels.comm import kv_chunks, peers
from treetop.kernels.gemm import adapter_rows as adapting
from treetop.kernels.gemm import fp8_rows as fp8
from treetop.kernels.gemm import heads_rows as heads
from treetop.kernels.gemm import lossless_weights, quantizing_norm, tiles
from treetop.kernels.gemm import quantized_gemm as quantized_weight
from treetop.kernels.gemm import skinny_gemm as skinny
from treetop.kernels.kv import FP8_CAPABILITY
from treetop.kernels.moe import experts as expert_products
from treetop.kernels.moe import placing, routes, routing
from treetop.kernels.profile import TIES, Profile
from treetop.kernels.recurrent import convolution, gates, in_turn
from treetop.kernels.recurrent import head as weighing
from treetop.kernels.recurrent import keep as keeping
from treetop.kernels.recurrent import prefill as prefilling
from treetop.kernels.recurrent import step as stepping
from treetop.kernels.recurrent import verify as verifying
from treetop.kernels.recurrent.fla import prefill_by_fla
from treetop.kernels.sampling import draw as drawing
from treetop.kernels.sampling import process as processing
from treetop.kernels.sampling.sampling import draw_reference, greedy_of_ranks, greedy_reference
from treetop.kernels.tree import accept as accepting
from treetop.kernels.tree import commit as committing
from treetop.kernels.tree import drawn as drawing_acceptance
from treetop.kernels.tree import grow as growing
from treetop.kernels.tree import learn as learning
from treetop.kernels.tree import rows as row_state
from treetop.kernels.tree import select as selecting
from treetop.kernels.tree import topk
from treetop.kernels.tree import trim as trimming
from treetop.kernels.triton_guard import GpuTraits, gpu_traits, why_not
from treetop.types.layout import SpecShape
from treetop.types.parallel import SINGLE_RANK, Parallel, Summed

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OpContext:
    """What an engine computes on, and the shapes of its trees; () where no tree is grown.

    profile: the ways that are taken where bits depend on it.
    fla: prompts go through linear attention by `flash-linear-attention`.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[SpecShape, ...] = ()
    profile: Profile = TIES
    fla: bool = False


def on_a_gpu(context: OpContext) -> bool:
    """On a GPU, up to float32"""
    return context.device.type == "cuda" and context.dtype != torch.float64 and why_not(context.device) is None


def on_a_gpu_in_16_bits(context: OpContext) -> bool:
    """On a GPU, in bfloat16 or float16"""
    return on_a_gpu(context) and context.dtype in (torch.float16, torch.bfloat16)


def on_a_gpu_with_fp8(context: OpContext) -> bool:
    """On a GPU of compute capability 8.9, in bfloat16 or float16"""
    return on_a_gpu_in_16_bits(context) and torch.cuda.get_device_capability(context.device) >= FP8_CAPABILITY


def for_few_branches(context: OpContext) -> bool:
    """On a GPU, up to float32 and topk 16"""
    return on_a_gpu(context) and all(shape.topk <= topk.MOST for shape in context.shapes)


def for_trees_of_one_program(context: OpContext) -> bool:
    """On a GPU, up to float32, topk 16, 128 nodes and 2,048 candidates"""
    return on_a_gpu(context) and all(growing.fits(shape) for shape in context.shapes)


@dataclass(frozen=True)
class Op(Generic[F]):
    """An operation. As an attribute of an `Ops` it is the function chosen there.

    reference: plain tensor operations, on any device and in any dtype.
    kernel: the same with an argument `gpu`, and with others if it is called by more than the table.
    tolerance: how far they may differ in float32, as a share of the largest value; 0 is not a bit.
    applies: where the kernel serves.
    launches: the Triton kernels it is made of.
    batch_invariant: what serves instead of a reference whose bits depend on the number of rows, where they must not.
    batch_invariant_kernel: the same of a kernel.
    """

    reference: F
    kernel: Callable[..., Any]
    tolerance: float
    applies: Callable[[OpContext], bool]
    launches: tuple[Any, ...] = ()
    batch_invariant: F | None = None
    batch_invariant_kernel: Callable[..., Any] | None = None
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        object.__setattr__(self, "name", name)

    @overload
    def __get__(self, instance: None, owner: type) -> "Op[F]": ...

    @overload
    def __get__(self, instance: object, owner: type) -> F: ...

    def __get__(self, instance: object | None, owner: type) -> "Op[F] | F":
        """The operation itself, from the class. An instance holds the function it chose under the same name."""
        return self

    def on(self, gpu: GpuTraits, batch_invariant: bool = False) -> F:
        """The kernel on a GPU, called like the reference. batch_invariant: a row's bits depend on no other."""
        kernel = (
            self.batch_invariant_kernel if batch_invariant and self.batch_invariant_kernel is not None else self.kernel
        )
        return cast(F, partial(kernel, gpu=gpu))


class AddRmsNorm(Protocol):
    """`fused.add_rms_norm_reference`, also of a sum over ranks that has yet to be taken."""

    def __call__(self, x: Tensor, delta: Summed | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...


class Add(Protocol):
    """`fused.add_reference`, also of a sum over ranks that has yet to be taken."""

    def __call__(self, x: Tensor, delta: Summed) -> Tensor: ...


def _add_rms_norm_of_ranks(
    own: AddRmsNorm, x: Tensor, delta: Summed | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if delta is None or isinstance(delta, Tensor):
        return own(x, delta, weight, eps)
    return delta.add_rms_norm(x, weight, eps)


def _add_of_ranks(own: Add, x: Tensor, delta: Summed) -> Tensor:
    return own(x, delta) if isinstance(delta, Tensor) else delta.add_rms_norm(x, None, 0.0)[0]


class Ops:
    """The table, and as an instance what was chosen from it.

    parallel: the rank that computes, of a group that shares a model.
    expert_ranks: of one that shares the experts.
    functions: activations where they are plain tensor operations.
    """

    # of a layer
    add = Op(
        cast(Add, fused.add_reference),
        fused.add,
        1e-6,
        on_a_gpu,
        (fused._add_rms_norm_kernel,),
        cast(Add, fused.add_in_order),
    )
    add_rms_norm = Op(
        cast(AddRmsNorm, fused.add_rms_norm_reference),
        fused.add_rms_norm,
        1e-6,
        on_a_gpu,
        (fused._add_rms_norm_kernel,),
        cast(AddRmsNorm, fused.add_rms_norm_in_order),
    )
    join = Op(fused.join_reference, fused.join, 1e-6, on_a_gpu, (fused._join_kernel,))
    embed_and_norm = Op(
        fused.embed_and_norm_reference, fused.embed_and_norm, 1e-6, on_a_gpu, (fused._embed_and_norm_kernel,)
    )
    angles = Op(fused.angles_reference, fused.angles, 0.0, on_a_gpu)
    rotate_and_write = Op(
        fused.rotate_and_write_reference, fused.rotate_and_write, 1e-6, on_a_gpu, (fused._rotate_and_write_kernel,)
    )
    write_latent = Op(
        latent.write_latent_reference, latent.write_latent, 1e-6, on_a_gpu, (latent._write_latent_kernel,)
    )
    rotate_index_heads = Op(
        indexer.rotate_index_heads_reference,
        indexer.rotate_index_heads,
        1e-6,
        on_a_gpu,
        (indexer._rotate_index_heads_kernel,),
    )
    write_index_keys = Op(
        indexer.write_index_keys_reference,
        indexer.write_index_keys,
        1e-6,
        on_a_gpu,
        (indexer._write_index_keys_kernel,),
    )
    silu_mul = Op(fused.silu_mul_reference, fused.silu_mul, 1e-6, on_a_gpu_in_16_bits, (fused._gate_mul_kernel,))
    gelu_tanh_mul = Op(
        fused.gelu_tanh_mul_reference, fused.gelu_tanh_mul, 1e-6, on_a_gpu_in_16_bits, (fused._gate_mul_kernel,)
    )
    skinny_gemm = Op(
        skinny.skinny_gemm_reference, skinny.skinny_gemm, 1e-5, on_a_gpu_in_16_bits, (skinny._skinny_gemm_kernel,)
    )
    gated_rows = Op(
        skinny.gated_rows_reference, skinny.gated_rows, 1e-5, on_a_gpu_in_16_bits, (skinny._skinny_gemm_kernel,)
    )
    heads_rows = Op(heads.heads_rows_reference, heads.heads_rows, 1e-5, on_a_gpu, (heads._heads_rows_kernel,))
    lossless_gemm = Op(
        lossless_weights.lossless_gemm_reference,
        lossless_weights.lossless_gemm,
        1e-5,
        on_a_gpu_in_16_bits,
        (lossless_weights._compressed_kernel,),
    )
    quantized_gemm = Op(
        quantized_weight.quantized_gemm_reference,
        quantized_weight.quantized_gemm,
        1e-5,
        on_a_gpu_in_16_bits,
        (quantized_weight._quantized_kernel,),
    )
    quantized_gated = Op(
        quantized_weight.quantized_gated_reference,
        quantized_weight.quantized_gated,
        1e-5,
        on_a_gpu_in_16_bits,
        (quantized_weight._quantized_kernel,),
    )
    decode_tiles = Op(
        tiles.decode_tiles_reference, tiles.decode_tiles, 0.0, on_a_gpu_in_16_bits, (tiles._decode_tiles_kernel,)
    )
    quantize_rows = Op(fp8.quantize_rows_reference, fp8.quantize_rows, 0.0, on_a_gpu_with_fp8, (fp8._quantize_kernel,))
    add_rms_norm_codes = Op(
        quantizing_norm.add_rms_norm_codes_reference,
        quantizing_norm.add_rms_norm_codes,
        1e-6,
        on_a_gpu_with_fp8,
        (quantizing_norm._norm_codes_kernel,),
        quantizing_norm.add_rms_norm_codes_in_order,
    )
    fp8_rows = Op(fp8.fp8_rows_reference, fp8.fp8_rows, 1e-5, on_a_gpu_with_fp8, (fp8._fp8_kernel,))
    tile_rows = Op(adapting.tile_rows_reference, adapting.tile_rows, 0.0, on_a_gpu, (adapting._tile_rows_kernel,))
    shrink = Op(
        adapting.shrink_reference,
        adapting.shrink,
        1e-5,
        on_a_gpu,
        (adapting._shrink_kernel,),
        adapting.shrink_by_rows,
        partial(adapting.shrink, batch_invariant=True),
    )
    expand = Op(
        adapting.expand_reference,
        adapting.expand,
        1e-5,
        on_a_gpu,
        (adapting._expand_kernel,),
        adapting.expand_by_rows,
        partial(adapting.expand, batch_invariant=True),
    )
    expand_gated = Op(
        adapting.expand_gated_reference,
        adapting.expand_gated,
        1e-5,
        on_a_gpu,
        (adapting._expand_kernel,),
        adapting.expand_gated_by_rows,
        partial(adapting.expand_gated, batch_invariant=True),
    )
    route = Op(
        routes.route_reference,
        routing.route,
        1e-5,
        on_a_gpu,
        (routing._logits_kernel, routing._choose_kernel, placing.place_kernel, placing.place_by_rank_kernel),
        routes.batch_invariant_route,
        partial(routing.route, batch_invariant=True),
    )
    experts = Op(
        expert_products.experts_reference,
        expert_products.experts,
        1e-5,
        on_a_gpu,
        (expert_products._grouped_kernel,),
        expert_products.batch_invariant_experts,
        partial(expert_products.experts, batch_invariant=True),
    )

    # of attention
    paged_attention = Op(
        attending.paged_attention_reference,
        attending.paged_attention,
        1e-5,
        on_a_gpu,
        (attending._attention_kernel, attending._merge_kernel),
    )
    plan_segments = Op(segments.plan_reference, segments.plan_segments, 0.0, on_a_gpu, (segments._plan_kernel,))
    segment_attention = Op(
        segment_attending.segment_attention_reference,
        segment_attending.segment_attention,
        1e-5,
        on_a_gpu,
        (segment_attending._segments_kernel, segment_attending._join_kernel),
    )
    segment_prefill = Op(
        segment_prefilling.segment_prefill_reference,
        segment_prefilling.segment_prefill,
        1e-5,
        on_a_gpu,
        (segment_prefilling._prefill_kernel,),
    )
    segment_latents = Op(
        latent_segments.segment_latents_reference,
        latent_segments.segment_latents,
        1e-5,
        on_a_gpu,
        (latent_segments._latent_segments_kernel, latent_segments._join_latents_kernel),
    )
    prefill_latents = Op(
        latent_segments.prefill_latents_reference,
        latent_segments.prefill_latents,
        1e-5,
        on_a_gpu,
        (latent_segments._latent_prefill_kernel,),
    )
    latent_attention = Op(
        latent_attending.latent_attention_reference,
        latent_attending.latent_attention,
        1e-5,
        on_a_gpu,
        (
            latent_attending._latent_attention_kernel,
            attending._merge_kernel,
            latent_pages_attending._merge_seats_kernel,  # of the backend gluon
        ),
    )
    paged_index_scores = Op(
        index_scores.paged_index_scores_reference,
        index_scores.paged_index_scores,
        1e-5,
        on_a_gpu,
        (index_scores._scores_kernel,),
    )
    choose_by_scores = Op(
        index_topk.choose_by_scores_reference,
        index_topk.choose_by_scores,
        0.0,
        on_a_gpu,
        (index_topk._select_kernel,),
    )
    tail_and_merge = Op(
        tail.tail_and_merge_reference,
        tail.tail_and_merge,
        1e-5,
        on_a_gpu,
        (tail._tail_kernel, latent_tail._latent_tail_kernel),
    )
    gather_table = Op(pages.gather_table_reference, pages.gather_table, 0.0, on_a_gpu, (pages._gather_kernel,))

    # of layers with a recurrence
    delta_inputs = Op(
        gates.delta_inputs_reference,
        gates.delta_inputs,
        1e-5,
        on_a_gpu,
        (gates._inputs_kernel,),
        in_turn.delta_inputs_by_element,
    )
    gated_norm = Op(
        gates.gated_norm_reference,
        gates.gated_norm,
        1e-6,
        on_a_gpu,
        (gates._gated_norm_kernel,),
        in_turn.gated_norm_by_element,
    )
    path_conv = Op(convolution.path_conv_reference, convolution.path_conv, 1e-6, on_a_gpu, (convolution._conv_kernel,))
    prefill_conv = Op(
        convolution.prefill_conv_reference,
        convolution.prefill_conv,
        1e-6,
        on_a_gpu,
        (convolution._conv_kernel, convolution._move_on_kernel),
    )
    verify_states = Op(
        verifying.verify_states_reference,
        verifying.verify_states,
        1e-5,
        on_a_gpu,
        (weighing._pair_kernel, weighing._weigh_kernel, verifying._verify_kernel),
        in_turn.verify_in_turn,
        in_turn.verify_in_turn_kernel,
    )
    step_delta = Op(stepping.step_delta_reference, stepping.step_delta, 1e-5, on_a_gpu, (stepping._step_kernel,))
    keep_states = Op(
        keeping.keep_states_reference,
        keeping.keep_states,
        0.0,
        on_a_gpu,
        (keeping._keep_kernel, keeping._keep_window_kernel),
    )
    fold_states = Op(
        keeping.fold_states_reference,
        keeping.fold_states,
        1e-5,
        on_a_gpu,
        (keeping._fold_kernel, in_turn._walk_kernel),
        in_turn.fold_in_turn,
        in_turn.fold_in_turn_kernel,
    )
    prefill_states = Op(
        prefilling.prefill_states_reference,
        prefilling.prefill_states,
        1e-5,
        on_a_gpu,
        (weighing._pair_kernel, weighing._weigh_kernel, prefilling._prefill_kernel),
        in_turn.prefill_in_turn,
        in_turn.prefill_in_turn_kernel,
    )

    # of a round, in their order
    start = Op(growing.start_reference, growing.start, 0.0, for_trees_of_one_program, (growing._start_kernel,))
    top_logprobs = Op(
        topk.top_logprobs_reference,
        topk.top_logprobs,
        1e-6,
        for_few_branches,
        (topk._pieces_kernel, topk._merge_kernel),
    )
    grow = Op(growing.grow_reference, growing.grow, 0.0, for_trees_of_one_program, (growing._grow_kernel,))
    select = Op(
        selecting.select_reference, selecting.select, 0.0, for_trees_of_one_program, (selecting._select_kernel,)
    )
    trim = Op(
        trimming.trim_reference,
        trimming.trim,
        0.0,
        for_trees_of_one_program,
        (trimming._rank_kernel, trimming._trim_kernel),
    )
    greedy = Op(greedy_reference, accepting.best_of_pieces, 0.0, for_trees_of_one_program, (accepting._pieces_kernel,))
    process = Op(processing.process_reference, processing.process, 1e-6, on_a_gpu, (processing._process_kernel,))
    draw = Op(
        draw_reference,
        drawing.draw_tokens,
        1e-6,
        on_a_gpu,
        (drawing._draw_kernel,),
        batch_invariant_kernel=drawing.draw_wide,
    )
    accept = Op(
        accepting.accept_reference,
        accepting.accept_in_one_launch,
        0.0,
        for_trees_of_one_program,
        (accepting._accept_kernel,),
    )
    learn = Op(
        learning.learn_reference,
        learning.learn,
        1e-6,
        for_trees_of_one_program,
        (learning._add_up_kernel, learning._fold_kernel),
    )
    say_roots = Op(
        drawing_acceptance.say_roots_reference,
        drawing_acceptance.say_roots,
        1e-6,
        for_trees_of_one_program,
        (drawing_acceptance._says_kernel,),
    )
    say_level = Op(
        drawing_acceptance.say_level_reference,
        drawing_acceptance.say_level,
        1e-6,
        for_trees_of_one_program,
        (drawing_acceptance._says_kernel,),
    )
    choose_drawn = Op(
        drawing_acceptance.choose_drawn_reference,
        drawing_acceptance.choose_drawn,
        0.0,
        for_trees_of_one_program,
        (drawing_acceptance._choose_drawn_kernel,),
    )
    count = Op(processing.count_reference, processing.count, 0.0, on_a_gpu, (processing._count_kernel,))
    commit = Op(committing.commit_reference, committing.commit, 0.0, on_a_gpu, (committing._commit_kernel,))
    path_aux_hidden = Op(
        committing.path_aux_hidden_reference,
        committing.path_aux_hidden,
        0.0,
        on_a_gpu,
        (committing._path_features_kernel,),
    )
    pick = Op(row_state.pick_reference, row_state.pick, 0.0, on_a_gpu, (row_state._pick_kernel,))
    finish = Op(row_state.finish_reference, row_state.finish, 0.0, on_a_gpu, (row_state._finish_kernel,))

    # of ranks that reach each other's memory
    add_shares_rms_norm = Op(
        peers.add_shares_rms_norm_reference, peers.add_shares_rms_norm, 1e-6, on_a_gpu, (peers._add_shares_kernel,)
    )
    gather = Op(peers.gather_reference, peers.gather, 0.0, on_a_gpu, (peers._gather_kernel,))

    # of KV transfer
    pack = Op(kv_chunks.pack_reference, kv_chunks.pack, 0.0, on_a_gpu, (kv_chunks._move_kernel,))
    unpack = Op(kv_chunks.unpack_reference, kv_chunks.unpack, 0.0, on_a_gpu, (kv_chunks._move_kernel,))

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part in a forward."""
        return self.parallel.size == self.expert_ranks.size == 1

    def __init__(
        self, context: OpContext, parallel: Parallel = SINGLE_RANK, expert_ranks: Parallel = SINGLE_RANK
    ) -> None:
        self.context, self.parallel, self.expert_ranks = context, parallel, expert_ranks
        self.functions = context.profile.functions
        self._gpu = gpu_traits(context.device) if on_a_gpu(context) else None
        for name, op in operations().items():
            gpu = self.gpu_for(op)
            reference = (
                op.batch_invariant if self.profile.batch_invariant and op.batch_invariant is not None else op.reference
            )
            vars(self)[name] = reference if gpu is None else op.on(gpu, self.profile.batch_invariant)
        if self.profile.integers.products:
            for name in ("shrink", "expand", "expand_gated", "route", "experts"):
                vars(self)[name] = partial(vars(self)[name], linear=self.profile.linear)
        if context.fla:
            vars(self)["prefill_states"] = partial(prefill_by_fla, dtype=context.dtype)
        if parallel.size > 1:
            vars(self)["greedy"] = partial(greedy_of_ranks, self.greedy, parallel)
            vars(self)["add"] = partial(_add_of_ranks, self.add)
            vars(self)["add_rms_norm"] = partial(_add_rms_norm_of_ranks, self.add_rms_norm)

    @property
    def profile(self) -> Profile:
        return self.context.profile

    @property
    def filters_apart(self) -> bool:
        """Whether a draw with filters is other work than one without: the reference sorts the vocabulary."""
        return self.draw is draw_reference

    def gpu_for(self, op: Op[Any]) -> GpuTraits | None:
        """The GPU, where a row's kernel serves; None where its reference does."""
        return self._gpu if op.applies(self.context) else None


def operations() -> dict[str, Op[Any]]:
    """The rows of the table, by name."""
    return {name: row for name, row in vars(Ops).items() if isinstance(row, Op)}
