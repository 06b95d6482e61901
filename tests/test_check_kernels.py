"""`scripts/check_kernels.py`: what the assembler says is read, and what is slow or does not fit is refused.

What compiles needs Triton 3.6.0 and runs in the environment of `make check-kernels`; the rest runs anywhere.
"""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from treetop.kernels.triton_guard import TRITON_VERSION, Arg, constexpr, interpreted, jit, tl

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def guard():
    sys.path.insert(0, str(SCRIPTS))  # it imports another
    spec = importlib.util.spec_from_file_location("check_kernels", SCRIPTS / "check_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_kernels"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_kernels"]
    sys.path.remove(str(SCRIPTS))


# ------------------------------------------------------------------------------------------------------- what is read

SOUND = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_quantized_kernel' for 'sm_90a'
ptxas info    : Function properties for _quantized_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers
ptxas info    : Compile time = 142.317 ms
"""
SERIALIZED = """\
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining accumulator registers of a wgmma between start and end of the pipeline stage in the function \
'_quantized_kernel'
"""
SPILLED = """\
ptxas info    : Function properties for _latent_attention_kernel
    960 bytes stack frame, 952 bytes spill stores, 1060 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
"""


def test_registers_spills_and_serialized_products_are_read_from_the_assemblers_log(guard):
    assert guard.read_log(SOUND) == {"registers": 80, "spilled": 0, "serialized": False}
    assert guard.read_log(SERIALIZED + SOUND) == {"registers": 80, "spilled": 0, "serialized": True}
    assert guard.read_log(SPILLED) == {"registers": 255, "spilled": 2012, "serialized": False}


LISTING = """\
\t.section\t.text._attention_kernel,"ax",@progbits
.text._attention_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDS R4, [R2] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/                   FADD R5, R5, R4 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   IADD3 R3, R3, 0x1, RZ ;
.L_x_3:
        /*0070*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR8][R10.64] ;
        /*0080*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0090*/              @!P1 BRA `(.L_x_4) ;
.L_x_4:
        /*00a0*/               @P2 BRA `(.L_x_3) ;
        /*00b0*/               @P3 BRA.U `(.L_x_2) ;
        /*00c0*/                   EXIT ;
.L_x_5:
        /*00d0*/                   BRA `(.L_x_5);
"""


def test_the_main_loop_has_a_product_no_loop_inside_and_copies_ahead(guard):
    """Not the longer one without copies, not the one around it, and not the branch to itself at the end. Its product
    of 64 lines by 16 columns takes tensor cores 8 cycles; what a warp multiplies by itself is never waited for.
    """
    read = guard.Code.read
    assert read(LISTING).main_loop() == (4, 8)
    assert read(LISTING.replace("LDGSTS", "STG")).main_loop() == (5, 0)
    assert read(LISTING.replace("HMMA", "FFMA").replace("HGMMA", "FFMA")).main_loop() == (0, 0)
    assert read("").main_loop() == (0, 0)


@pytest.mark.parametrize(
    ("instruction", "spills"),
    [
        ("LDC R1", (0, 72)),  # before all loops: one of 14
        ("FADD R5", (200, 72)),  # one of a loop's five
        ("LDGSTS.E.BYPASS.128 [R6]", (250, 167)),  # one of four, and of the six of the loop around
        ("IADD3 R3", (0, 167)),  # in the loop around alone
    ],
)
def test_spilled_registers_are_counted_in_loops_and_around_them(guard, instruction, spills):
    assert guard.Code.read(LISTING).spills() == (0, 0)
    for spill in ("STL [R1+0x8]", "LDL.64 R2"):
        code = guard.Code.read(LISTING.replace(instruction, spill))
        assert code.spills() == spills


# ------------------------------------------------------------------------------------------------------- the verdict


def test_new_failures_and_listed_ones_that_pass_are_lines(guard, tmp_path):
    """What is listed and fails is none; each other line names the card, the launch, and the number."""
    made = guard.Compiled(shared=100 << 10, registers=80, loop=240)
    found = {
        ("sm_90", "sound"): made,
        ("sm_90", "long"): replace(made, loop=241),
        ("sm_90", "unknown"): made,
        ("sm_90", "waits"): replace(made, serialized=True),
        ("sm_120", "sound"): made,
        ("sm_120", "no loop counted"): replace(made, shared=0, loop=9000),
        ("sm_80", "spills"): replace(made, spilled=8, inner_spills=11, outer_spills=50),
        ("sm_80", "spills around"): replace(made, spilled=16, outer_spills=51),
        ("sm_80", "puts aside"): replace(made, spilled=400, inner_spills=10, outer_spills=50),
        ("sm_80", "breaks"): guard.Compiled(error="PTXASError: no"),
    }
    known = [
        {"what": "serialized", "why": "decoded weights", "launches": {"sm_90": ["waits", "sound"]}},
        {"what": "loop", "why": "selects", "launches": {"sm_90": ["long", "gone"]}},
    ]
    path = tmp_path / "check_kernels.json"
    budgets = {"sound": 240, "long": 240, "waits": 250, "gone too": 3}
    path.write_text(json.dumps({"budgets": budgets, "known": known}))
    table = guard.Table.read(path)
    lines = guard.verdict(found, table, whole=True)
    parts = [
        ("sm_90: sound: serialized: it passes now",),
        ("sm_90: unknown: no budget", "240"),
        ("sm_120: sound: shared memory", "102400", "101376"),
        ("sm_80: spills: spills", "8 bytes", "a loop 11,"),
        ("sm_80: spills around: spills", "16 bytes", "around loops 51"),
        ("sm_80: breaks: compile", "PTXASError: no"),
        ("sm_90: gone: no launch",),
        ("sm_90: gone too: no launch",),
    ]
    assert len(lines) == len(parts)
    assert all(any(all(part in line for part in some) for line in lines) for some in parts)
    assert len(guard.verdict(found, table, whole=False)) == len(lines) - 2
    assert guard.verdict({("sm_90", "long"): made}, table, whole=False) == [
        "sm_90: long: loop: it passes now; take it off the list in check_kernels.json"
    ]


@pytest.mark.parametrize(
    ("change", "stands"),
    [
        ({}, False),  # two lie on a multiprocessor
        ({"shared": 114 << 10}, True),  # one: of 228 KiB a program takes one more than it says
        ({"registers": 136}, True),  # one: 256 threads of 128 registers are half of all
        ({"programs": 132}, True),  # one, for there are as many multiprocessors
        ({"programs": 133}, False),
        ({"warps": 4, "registers": 255}, False),
    ],
    ids=str,
)
def test_waiting_for_products_costs_nothing_where_another_program_works_meanwhile(guard, change, stands):
    made = guard.Compiled(
        serialized=True, shared=113 << 10, registers=128, loop=300, multiplying=256, warps=8, programs=1000
    )
    made, card = replace(made, **change), guard.CARDS["sm_90"]
    assert guard.faults_of(made, card, 300) == ["serialized"] * stands
    assert guard.faults_of(replace(made, serialized=False), card, 300) == []


@pytest.mark.parametrize(
    ("change", "stands"),
    [
        ({}, False),  # 64 KiB for each of 128 take 3,067 cycles, the turn 2,171
        ({"copied": 32 << 10}, True),
        ({"programs": 64}, True),  # each has twice as many bytes a cycle
        ({"programs": 1000}, False),
        ({"reads_alone": False}, True),  # from the L2 cache they may come faster
    ],
    ids=str,
)
def test_waiting_for_products_costs_nothing_where_memory_takes_longer(guard, change, stands):
    made = guard.Compiled(
        serialized=True, shared=208 << 10, registers=255, loop=1147, multiplying=1024, copied=64 << 10, programs=128,
        reads_alone=True,
    )  # fmt: skip
    assert guard.faults_of(replace(made, **change), guard.CARDS["sm_90"], 1147) == ["serialized"] * stands


@pytest.mark.parametrize(
    ("copy", "size"),
    [
        ("LDGSTS.E.BYPASS.128", 16),
        ("LDGSTS.E.BYPASS.LTC128B.128.ZFILL", 16),
        ("LDGSTS.E.LTC128B.64", 8),
        ("LDGSTS.E", 4),
        ("UTMALDG.2D", 0),
    ],
)
def test_bytes_that_a_thread_copies_ahead_are_counted(guard, copy, size):
    assert guard.Code.read(LISTING.replace("LDGSTS.E.BYPASS.128", copy)).copied() == size


def test_budgets_are_written_for_new_loops_and_lowered_but_never_raised(guard):
    table = json.dumps({"budgets": {"shorter": 300, "longer": 200, "gone": 5}, "known": []})
    loops = {"shorter": 240, "longer": 260, "new": 100, "none": 0}
    found = {("sm_90", name): guard.Compiled(loop=loop) for name, loop in loops.items()}
    found["sm_80", "other"] = guard.Compiled(loop=7)
    want = {"shorter": 240, "longer": 200, "new": 100}
    assert json.loads(guard.with_budgets(table, found, whole=True))["budgets"] == want
    assert json.loads(guard.with_budgets(table, found, whole=False))["budgets"] == {**want, "gone": 5}


def test_the_committed_list_says_why(guard):
    table = guard.Table.read(guard.TABLE)
    assert len(table.budgets) > 100
    for (card, _, what), why in table.known.items():
        assert card in guard.CARDS
        assert what in {"serialized", "spills", "loop", "shared memory", "compile"}
        assert len(why) > 20


def test_the_wrong_triton_is_an_error_that_says_what_to_run(guard, monkeypatch, capsys):
    monkeypatch.setattr(guard, "TRITON_VERSION", "3.9.0")
    monkeypatch.setattr(sys, "argv", ["check_kernels.py"])
    assert guard.main() == 2
    assert "make check-kernels" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- what compiles

compiled = pytest.mark.skipif(
    TRITON_VERSION != "3.6.0" or interpreted(),
    reason="needs Triton 3.6.0, whose assembler GPUs have: make check-kernels",
)


@jit
def _product_kernel(out: Arg, x: Arg, y: Arg, k: Arg, block: constexpr, block_k: constexpr) -> None:
    """A block of x @ y.T."""
    line, lane = tl.arange(0, block), tl.arange(0, block_k)
    total = tl.zeros([block, block], tl.float32)
    for i in range(0, k, block_k):
        a = tl.load(x + line[:, None] * k + i + lane[None, :])
        b = tl.load(y + line[:, None] * k + i + lane[None, :])
        total = tl.dot(a, tl.trans(b), total)
    tl.store(out + line[:, None] * block + line[None, :], total)


def product_of(block=64, block_k=64, **options):
    """A launch of `_product_kernel`."""
    x, out = torch.empty(block, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(block, block, device="meta")
    return lambda: _product_kernel[(1,)](out, x, x, 4096, block, block_k, **options)


@compiled
@pytest.mark.parametrize(
    ("launch", "budget", "faults"),
    [
        ({"num_warps": 4, "num_stages": 3}, 200, []),
        ({"num_warps": 4, "num_stages": 3}, 20, ["loop"]),
        ({"num_warps": 4, "num_stages": 3}, None, ["no budget"]),
        ({"block": 128, "block_k": 16, "num_warps": 2, "num_stages": 2}, 9999, ["spills"]),
        ({"block": 128, "num_warps": 8, "num_stages": 3}, 9999, ["serialized"]),
        ({"block": 128, "block_k": 128, "num_warps": 4, "num_stages": 5}, 9999, ["shared memory"]),
    ],
    ids=["sound", "over budget", "no budget", "spills", "serialized", "shared memory"],
)
def test_the_guard_refuses_what_it_is_for(guard, launch, budget, faults):
    """A product as a loop, compiled for sm_90: sound, and made wrong in each way."""
    (asked,) = guard.asked_by(product_of(**launch), 90)
    made = guard.compile_one(asked)
    assert guard.faults_of(made, guard.CARDS["sm_90"], budget) == faults, made
    assert made.loop > 20


@compiled
def test_what_was_compiled_is_kept_by_what_it_depends_on(guard, monkeypatch, tmp_path, capsys):
    """A whole run: a launch that fits sm_90 and not sm_120 fails there, and again without compiling anything."""
    launch = product_of(block=128, num_warps=4, num_stages=5)
    monkeypatch.setattr(guard, "cases", lambda card: [("a product", launch), ("the same", launch)])
    monkeypatch.setattr(guard, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(guard, "TABLE", tmp_path / "table.json")
    guard.TABLE.write_text('{"budgets": {}, "known": []}')
    arguments = ["--cards", "sm_90,sm_120", "--jobs", "1", "--write-budgets"]
    for _ in range(2):
        assert guard.run(guard.parse(arguments)) == 1
        assert "sm_120: a product: shared memory" in capsys.readouterr().out
        assert len([*guard.KEPT.iterdir()]) == 2
        monkeypatch.setattr(guard, "compile_one", None)
    with pytest.raises(guard.UserError, match="--only tail: no launch of sm_90"):
        guard.run(guard.parse(["--only", "tail"]))
    assert [*json.loads(guard.TABLE.read_text())["budgets"]] == ["a product"]


@compiled
def test_planes_of_codes_fit_a_card_of_99_kib(guard):
    """Of a tree, as an engine launches it on compute capability 12.0; with the launch for 16 bits it asked for 122."""
    card = guard.CARDS["sm_120"]
    name = "compressed attention of a tree's 8 x 16 queries, 1 x 128 x 576 heads, 8192 keys, K/V in FP8"
    launch = dict(sys.modules["kernel_launches"]._latent(card))[name]
    made = [guard.compile_one(each) for each in guard.asked_by(launch, 120) if each.kernel == "latent attention"]
    assert [guard.faults_of(each, card, None) for each in made] == [[]]


@compiled
@pytest.mark.parametrize(
    ("card", "cases_of", "name"),
    [
        ("sm_89", "_attention", "attention of a tree's 8 x 16 queries, 8 x 4 x 128 heads, 32768 keys, K/V in FP8"),
        ("sm_120", "_attention", "attention of a prefill's 1 x 512 queries, 8 x 4 x 128 heads, 8192 keys"),
        ("sm_80", "_products", "product uncut 28672 x 4096, gated, 512 rows"),
        ("sm_89", "_experts", "experts of mxfp4, 512 tokens"),
        ("sm_100", "_latent", "compressed attention of a tree's 8 x 16 queries, 1 x 128 x 576 heads, 8192 keys"),
        ("sm_80", "_segments", "segments of plain 8 x 1 queries, 2 x 8 x 512 heads, 8192 keys"),
    ],
)
def test_launches_fit_where_no_warp_group_shares_operands(guard, card, cases_of, name):
    """As an engine launches them. With the launches of an H100, or of four warps, they spilled up to 536 bytes; and on
    compute capability 10.0 planes asked for 345 KiB of shared memory, which has 227.
    """
    some, capability = guard.CARDS[card], guard.CARDS[card].capability
    launch = dict(getattr(sys.modules["kernel_launches"], cases_of)(some))[name]
    made = [guard.compile_one(each) for each in guard.asked_by(launch, capability) if each.kernel not in guard.UNTUNED]
    assert made
    assert [guard.faults_of(each, some, None) for each in made] == [[]] * len(made)
