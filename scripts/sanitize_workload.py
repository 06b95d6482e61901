"""What `scripts/sanitize.py` runs under compute-sanitizer: small pairs, a few rounds of every choice.

    python scripts/sanitize_workload.py --mode eager
    python scripts/sanitize_workload.py --mode captured --plant overrun

Eager rounds allocate every buffer by itself (PYTORCH_NO_CUDA_MEMORY_CACHING=1, set by the caller), so that memcheck
knows where each ends. Captured rounds run at check level 3, every engine buffer between red zones. Prints one line of
JSON: the kernels of this package, and which were launched. On a CPU (TRITON_INTERPRET=1, slow, so fewer rounds)
GraphSim stands for captured rounds.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from treetop import LLM, SamplingParams
from treetop.checks.probes import RECORD
from treetop.debug.two_group import write_two_group_pair
from treetop.engine.model_runner import ModelRunner
from treetop.kernels.attention.metadata import AttentionMetadata
from treetop.kernels.attention.pages import gather_table
from treetop.kernels.attention.prefix_part import PrefixPart
from treetop.kernels.attention.tail import tail_and_merge
from treetop.kernels.comm import peers
from treetop.kernels.comm.kv_chunks import ChunkSpan
from treetop.kernels.comm.kv_chunks import pack as pack_piece
from treetop.kernels.comm.kv_chunks import unpack as unpack_piece
from treetop.kernels.gemm.lossless_weights import LosslessLaunch, compress, lossless_gemm
from treetop.kernels.gemm.quantized_weight import QuantizedWeight, QuantScheme
from treetop.kernels.gemm.skinny_gemm import RowsLaunch, gated_rows, skinny_gemm
from treetop.kernels.gemm.tiles import tile
from treetop.kernels.kv import PageTable
from treetop.kernels.moe.experts import Activation, Experts, experts
from treetop.kernels.moe.routes import Router, RouterKind, RouterSpec
from treetop.kernels.moe.routing import route
from treetop.kernels.triton_guard import _probe, gpu_traits, is_compiling_ahead, jit, tl
from treetop.types.config import BUILTIN_DRAFT, BUILTIN_MODEL
from treetop.types.errors import CheckError
from treetop.types.ids import FULL
from treetop.types.phase import Phase
from treetop_debug.kernels import all_kernels, place_of
from treetop_debug.patching import wrapped_runner

MARK = "WORKLOAD "


@jit
def _planted_overrun_kernel(base, count):  # type: ignore[no-untyped-def]  # Triton types them
    tl.store(base + count, 1.0)


@jit
def _planted_unwritten_kernel(base):  # type: ignore[no-untyped-def]  # likewise
    tl.store(base + 1, tl.load(base))


class Plant:
    """A bug in every commit: a kernel writes one element past the first pool, or reads memory that nobody wrote."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._device: ModelRunner | None = None

    def wrap(self, runner: ModelRunner) -> ModelRunner:
        self._device, real = runner, runner.ops.commit

        def commit(*args: Any) -> None:
            real(*args)
            self._harm()

        vars(runner.ops)["commit"] = commit  # these are the device's own
        return runner

    @contextmanager
    def active(self) -> Iterator[None]:
        """Engines that are made and run inside have the bug."""

        with wrapped_runner(self.wrap):
            yield

    def _harm(self) -> None:
        assert self._device is not None
        pool = next(iter(self._device.pools.values())).data
        if self._kind == "overrun":
            _planted_overrun_kernel[(1,)](pool, pool.numel())
        else:
            _planted_unwritten_kernel[(1,)](pool.new_empty(2))


def zero_products() -> None:
    """From now on the library's products write into memory that holds zeros.

    They store by the GPU's tensor-copy engine, which initcheck does not follow: it would call every read of a product
    one of unwritten memory.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_zeros((*x.shape[:-1], weight.shape[0]))
        torch.mm(x.reshape(-1, x.shape[-1]), weight.T, out=out.view(-1, weight.shape[0]))
        return out if bias is None else out.add_(bias)

    F.linear = linear  # type: ignore[assignment]  # for this run


def count_launches() -> Counter[str]:
    """From now on, launches of every Triton kernel, by name; replays and kernels only compiled count for nothing."""
    launched: Counter[str] = Counter()
    kind = type(_probe)
    run: Callable[..., Any] = kind.run

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        if not is_compiling_ahead():
            launched[place_of(self)] += 1
        return run(self, *args, **options)

    kind.run = counting
    return launched


def work(mode: str, device: str) -> None:
    """Prefill in chunks, then rounds: greedy, sampled, filtered; requests of different lengths, so that rows drain."""
    captured = "auto" if device == "cuda" else "sim"
    prompts = [[(7 * i + 3 * n) % 96 for i in range(n)] for n in (1, 5, 23)]
    batches = [
        [SamplingParams(max_tokens=4 + 3 * i, ignore_eos=True) for i in range(3)],
        [SamplingParams(max_tokens=5, temperature=1.0, seed=i, ignore_eos=True) for i in range(3)],
        [SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, seed=i, ignore_eos=True) for i in range(3)],
    ]
    with tempfile.TemporaryDirectory(prefix="treetop-sanitize-") as folder:
        target, head = map(str, write_two_group_pair(Path(folder)))  # windows, and sizes no kernel likes
        cases = [(target, head, "float32")]
        if device == "cuda":  # the embedded pair is wide enough for products of few rows
            cases += [(target, head, "bfloat16"), (BUILTIN_MODEL, BUILTIN_DRAFT, "bfloat16")]
        for model, draft, dtype in cases:
            graphs = captured if mode == "captured" else "off"
            chosen: dict[str, Any] = {"device": device, "dtype": dtype, "graphs": graphs}
            llm = LLM(
                model,
                draft,
                **chosen,
                attention_backend="triton",
                check_level=3 if mode == "captured" else 2,
                page_size=4,
                context_length=64,
                max_running_requests=3,
                max_total_tokens=240,
                chunked_prefill_size=16,
                speculative_num_steps=2,
                speculative_eagle_topk=2,
                speculative_num_draft_tokens=5,
            )
            for params in batches if device == "cuda" else batches[2:]:
                llm.generate(prompts, params)
            llm.scheduler.check_integrity()
    if mode == "eager":
        if device == "cuda":
            products_by_tiles()
        products_of_compressed_weights(torch.device(device))
        experts_of_a_layer(torch.device(device))
        attention_after_a_library(torch.device(device))
        pieces_of_a_request(torch.device(device))
        exchanges_of_a_rank(torch.device(device))
    if device == "cuda":
        torch.cuda.synchronize()


def products_by_tiles() -> None:
    """Products through tile descriptors, whose edges the hardware masks; only large weights get them by themselves."""
    gpu = gpu_traits(torch.device("cuda"))
    weight = torch.ones((200, 256), dtype=torch.bfloat16, device="cuda")
    for rows in (1, 20, 130):
        x = torch.ones((rows, 256), dtype=torch.bfloat16, device="cuda")
        skinny_gemm(x, weight, RowsLaunch(64, 64, 2, 3, 4, 1, True), gpu)
        gated_rows(x, weight[:128], RowsLaunch(64, 64, 1, 3, 4, 1, True), gpu)


def experts_of_a_layer(device: torch.device) -> None:
    """Routing in one program and in several, and both products with weights of 16 bits and in MXFP4, with padding."""
    gpu, dtype = gpu_traits(device), torch.bfloat16 if device.type == "cuda" else torch.float16
    spec = RouterSpec(40, 2, RouterKind.TOPK_SOFTMAX)
    with device:
        router = Router(spec, torch.randn(40, 96).to(dtype), None, None)
        whole = torch.randn(40, 2, 72, 96).to(dtype), torch.randn(40, 96, 72).to(dtype)
        scheme = QuantScheme("e2m1", 32, "e8m0")
        codes = torch.randint(0, 256, (40, 128, 48), dtype=torch.uint8)
        scale = torch.full((40, 128, 3), 120, dtype=torch.uint8)
        for tokens in (3, 70):
            x, live = torch.randn(tokens, 96).to(dtype), torch.arange(tokens) % 3 != 1
            routes = route(x, router, live, gpu)
            experts(x, routes, Experts(*whole, None, None, Activation.SILU), gpu)
            gate_up = tile(QuantizedWeight(scheme, 96, codes, scale))
            packed = gate_up, tile(QuantizedWeight(scheme, 64, codes[:, :96, :32], scale[:, :96, :2]))
            experts(x, routes, Experts(*packed, None, None, Activation.CLAMPED), gpu)


def products_of_compressed_weights(device: torch.device) -> None:
    """Products with weights in 12 bits, outliers among them; by themselves only large weights are kept so."""
    gpu = gpu_traits(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter knows no bfloat16
    whole = torch.randn((192, 256), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole[::7, 3] *= 2.0**-20
    for gated, part, splits in ((False, whole, 2), (True, whole[:128].contiguous(), 1)):
        made = compress(part, gated)
        assert made is not None
        tensors = {
            name: getattr(made, name).to(device) for name in ("words", "scale", "starts", "lines", "columns", "values")
        }
        for rows in (1, 20):
            x = torch.ones((rows, 256), dtype=dtype, device=device)
            launch = LosslessLaunch(128 if gated else 64, splits, 3, 4, 16)
            lossless_gemm(x, replace(made, **tensors), launch, gpu)


def attention_after_a_library(device: torch.device) -> None:
    """What runs beside a library's attention: its page table, then the tail and the merge; no size fits a block."""
    rows, n, kv_heads, dim = 2, 5, 2, 48
    at = torch.arange(n, device=device)
    kv_len = torch.tensor([0, 9], device=device)
    table = torch.ones((3, 7), dtype=torch.int32, device=device)
    gpu = gpu_traits(device)
    gather_table(table, torch.tensor([2, 0], device=device), kv_len, 7, 4, gpu)
    q = torch.ones((rows, n, 3 * kv_heads, dim), device=device)
    prefix = PrefixPart(q.clone(), q.new_zeros((rows, 3 * kv_heads, n)).transpose(1, 2), kv_len)
    positions = kv_len[:, None] + at
    tail, mask = q.new_ones((rows, n, 2, kv_heads, dim)), (at <= at[:, None]).expand(rows, n, n).clone()
    pages, listed = PageTable(FULL, table), torch.tensor([2, 0], device=device)
    for window in (None, 3):
        metadata = AttentionMetadata(Phase.VERIFY, pages, listed, kv_len, 9, 4, positions, window, positions, mask)
        tail_and_merge(q, prefix, tail, metadata, 0.1, q[0, 0, :, 0].clone(), gpu)


def pieces_of_a_request(device: torch.device) -> None:
    """Packing into a slot and unpacking from it; pages are not full, and no size fits a block."""
    gpu, pool = gpu_traits(device), torch.randn((2, 40, 2, 3, 24), device=device)
    table = torch.tensor([5, 2, 7], dtype=torch.int32, device=device)
    stride = 2 * 9 * 2 * 24 * pool.itemsize
    slot = torch.zeros(32 + 3 * stride, dtype=torch.uint8, device=device)
    span = ChunkSpan(1, 9, 4, 32, stride)
    packed, unpacked = torch.zeros((2, 3), dtype=torch.int64, device=device)
    pack_piece(slot, pool, table, span, packed, gpu)
    unpack_piece(slot, torch.zeros_like(pool), table, span, unpacked, gpu)
    assert torch.equal(packed, unpacked)


def exchanges_of_a_rank(device: torch.device) -> None:
    """A sum and a gather of the first of two ranks, to whom the other has written before; both mailboxes are here."""
    gpu, rows, hidden = gpu_traits(device), 3, 48
    boxes = [torch.full((peers.mailbox_bytes(2),), 255, dtype=torch.uint8, device=device) for _ in range(2)]
    record = torch.zeros(RECORD, dtype=torch.int64, device=device)
    mail = peers.Mailboxes.make(0, [each.data_ptr() for each in boxes], device, record)
    mail.control[1] = 10**10
    shares = torch.randn(2, rows, hidden, device=device)
    words = torch.arange(2 * rows * hidden, dtype=torch.int32, device=device).view(rows, 2, hidden)
    boxes[0][: peers.sums_bytes(2)].view(torch.float32).view(2, peers.ROWS, 2, -1)[0, :rows, 1, :hidden] = shares[1]
    pieces = boxes[0][peers.sums_bytes(2) :].view(torch.int64).view(2, peers.CHUNKS, 2, -1)
    pieces[0, 0, 1, : rows * hidden] = 1 << 32 | words[:, 1].flatten().long()
    x, weight, gathered = shares.new_zeros(rows, hidden), shares.new_ones(hidden), torch.zeros_like(words)
    total = peers.add_shares_rms_norm(x, shares[:1], weight, 1e-5, mail, gpu)[0]
    peers.gather(gathered, words[:, 0].contiguous(), mail, gpu)
    assert torch.equal(total, shares[0] + shares[1])
    assert torch.equal(gathered, words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("eager", "captured"), required=True)
    parser.add_argument("--plant", choices=("overrun", "unwritten"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--zero-products", action="store_true", help="for initcheck: see `zero_products`")
    args = parser.parse_args()
    if args.zero_products:
        zero_products()
    launched = count_launches()
    try:
        with Plant(args.plant).active() if args.plant else nullcontext():
            work(args.mode, args.device)
    except CheckError as error:
        print(f"CheckError: {error}", file=sys.stderr)
        return 1
    print(MARK + json.dumps({"kernels": list(all_kernels()), "launched": launched}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
