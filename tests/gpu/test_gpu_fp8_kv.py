"""K/V in FP8 on a GPU: rounds are captured, a tree changes no token beyond roundings, and pools hold twice the tokens.

What a kernel computes there is in `tests/kernels/test_fp8_attention.py`, which runs on a GPU too.
"""

import gc

import pytest
import torch

from support.drain import held_out
from support.engines import accept_lens, greedy
from support.gpu_pairs import make
from treetop.bench.equality import equal_outputs
from treetop.engine.cuda_graphs import CudaGraphs
from treetop.kernels.attention.attention import widened
from treetop.kernels.kv import FP8
from treetop.kernels.triton_guard import Arg, constexpr, jit, tl
from treetop.types.ids import FULL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

OPTIONS = {"kv_cache_dtype": "fp8_e4m3"}
MAX_TOKENS = 40
ROUNDINGS = 8
"""What a mismatch may span, in roundings of the best logit. A number of K/V that lies between two codes may go to
either, and then a logit moves by more than a rounding of 16 bits: so this is looser than for K/V in 16 bits."""


@pytest.fixture(autouse=True)
def clean():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return held_out(make(None), 12)


@pytest.mark.parametrize(("backend", "graphs"), [("triton", "auto"), ("triton", "off"), ("torch", "off")])
@pytest.mark.parametrize("shape", [(5, 4, 16), (5, 1, 6), (8, 8, 32)])
def test_a_tree_changes_no_token_in_float32(prompts, capsys, shape, backend, graphs):
    """By the rule of the other GPU tests: a mismatch is excused by a near tie alone, and there are hardly any."""
    plain = make(None, **OPTIONS)
    expected = plain.generate(prompts, greedy(MAX_TOKENS))
    llm = make(shape=shape, attention_backend=backend, graphs=graphs, **OPTIONS)
    assert isinstance(llm.engine.launcher, CudaGraphs) == (graphs == "auto")
    assert llm.engine.runner.pools[FULL].data.dtype == FP8
    got = llm.generate(prompts, greedy(MAX_TOKENS))
    llm.scheduler.check_integrity()
    equality = equal_outputs(plain, expected, got)
    if equality.margins:
        with capsys.disabled():
            print(f" [{equality.sentence()}] ", end="")
    assert equality.ok, equality.sentence()
    assert sum(map(sum, accept_lens(got))) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("check_level", [1, 3])
def test_in_bfloat16_captured_rounds_differ_by_roundings_alone(prompts, capsys, check_level):
    options = {"dtype": "bfloat16", **OPTIONS}
    plain = make(None, **options)
    llm = make(graphs="off" if check_level == 3 else "auto", check_level=check_level, **options)
    expected, got = (each.generate(prompts, greedy(MAX_TOKENS)) for each in (plain, llm))
    equality, spans = equal_outputs(plain, expected, got), []
    for want, have, prompt in zip(expected, got, prompts, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(want.token_ids, have.token_ids, strict=False)) if a != b), None)
        if at is not None:
            logits = plain.next_logits([*prompt, *want.token_ids[:at]]).float()
            margin = abs(float(logits[want.token_ids[at]] - logits[have.token_ids[at]]))
            spans.append(margin / (torch.finfo(torch.bfloat16).eps * float(logits.abs().max())))
    with capsys.disabled():
        print(
            f" [{equality.sentence()}; first mismatches span {[round(each, 2) for each in spans]} roundings] ", end=""
        )
    assert all(span <= ROUNDINGS for span in spans)
    assert sum(map(sum, accept_lens(got))) > 0, "nothing was accepted, so nothing was tested"


@jit
def _widen(out: Arg, codes: Arg, packed: constexpr) -> None:
    at = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + at, widened(tl.load(codes + at), at >= 0, tl.float16, packed))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="packed conversions are for 9.0"
)
def test_packed_conversions_give_the_bits_of_single_ones():
    """All 256 codes, NaN and both zeros among them, at each place of a register."""
    codes = torch.arange(2048, device="cuda").mul_(37).add_(torch.arange(2048, device="cuda") // 256).to(torch.uint8)
    assert len(codes.unique()) == 256
    packed, single = (torch.empty(2048, dtype=torch.float16, device="cuda") for _ in range(2))
    _widen[(1,)](packed, codes.view(FP8), packed=True)
    _widen[(1,)](single, codes.view(FP8), packed=False)
    assert torch.equal(packed.view(torch.int16), single.view(torch.int16))
    assert torch.equal(packed.nan_to_num(0.5), codes.view(FP8).to(torch.float16).nan_to_num(0.5))


def test_pools_hold_twice_the_tokens():
    """By what is measured, with all else equal."""
    sizes = []
    for dtype in ("auto", "fp8_e4m3"):
        llm = make(None, dtype="bfloat16", kv_cache_dtype=dtype, max_total_tokens=1 << 16)
        sizes.append(sum(pool.data.nbytes for pool in llm.engine.runner.pools.values()))
        del llm
    assert sizes[0] == 2 * sizes[1]
