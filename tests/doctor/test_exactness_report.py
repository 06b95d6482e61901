"""`treetop doctor --exactness bits` says that all is the same, or which operation is not."""

from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from treetop.doctor import exactness, rank_sums
from treetop.doctor.exactness import show_exactness
from treetop.doctor.report import exactness_words
from treetop.engine.startup.operation_probes import operation_probe
from treetop.engine.startup.plan import plan_engine
from treetop.exact.probe import BitProbe, RowCase, of_rows
from treetop.kernels.fused import rms_norm
from treetop.kernels.gemm.fp8_rows import Activations, QuantizedRows
from treetop.kernels.gemm.quantized_weight import QuantScheme
from treetop.kernels.profile import profile_of
from treetop.kernels.table import OpContext, Ops
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.weights.packed import Packed
from treetop.weights.w8a8 import W8A8


@pytest.fixture
def visit(strong_pair, monkeypatch):
    """(exit code, lines) for the options given."""
    monkeypatch.setattr(exactness, "_TREES", ((4, 5, 16), (2, 3, 6)))
    monkeypatch.setattr(exactness, "_MANY", exactness.Amount(4, 60, 12))

    def run(**options):
        given = {"draft": str(strong_pair.head), "dtype": "float32", **options}
        out = StringIO()
        engine_plan = plan_engine(EngineConfig.of(str(strong_pair.target), **given))
        code = show_exactness(Console(file=out, width=200), engine_plan, str(strong_pair.target), given)
        return code, out.getvalue().splitlines()

    return run


@pytest.mark.slow
def test_all_is_the_same_where_bits_were_asked_for(visit):
    code, lines = visit(exactness="bits")
    assert code == 0
    assert lines[-1] == "exactness bits: every bit is that of plain decoding"
    assert sum(line.startswith("same bits") for line in lines) == 8
    assert not any("differs" in line or "DIFFERS" in line for line in lines)


def test_an_operation_that_differs_is_named_with_its_row_counts(visit, monkeypatch):
    """Exit code 1 where bits were promised."""
    monkeypatch.setattr(exactness, "engines", lambda *_: iter(()))
    monkeypatch.setattr(exactness, "rms_norm", lambda x, weight, eps: rms_norm(x, weight, eps) + (len(x) == 5))
    code, lines = visit(exactness="bits")
    assert code == 1
    assert any("norm of 64" in line and "differs at 5" in line for line in lines)
    assert lines[-1] == "exactness bits: not all bits are those of plain decoding"


@pytest.mark.slow
def test_ranks_that_meet_have_one_sum(visit, monkeypatch):
    """Two processes, over gloo."""
    monkeypatch.setattr(exactness, "engines", lambda *_: iter(()))
    code, lines = visit(exactness="bits", tp_size=2)
    assert code == 0
    assert any("sum over 2 ranks, and norm" in line and "same bits" in line for line in lines)


def test_a_sum_over_ranks_that_differs_is_named(visit, monkeypatch):
    """Beside the products of a rank's part of the weights."""
    monkeypatch.setattr(exactness, "engines", lambda *_: iter(()))
    monkeypatch.setattr(rank_sums, "measured_by_ranks", lambda *_: {rank_sums._DIFFER: 33})
    code, lines = visit(exactness="bits", tp_size=2)
    assert code == 1
    assert any("sum over 2 ranks, and norm" in line and "differs at 33" in line for line in lines)
    assert any("product [64, 32]" in line for line in lines), "not of a rank's part"


@pytest.mark.slow
def test_without_a_promise_it_says_what_differs_and_is_no_failure(visit):
    code, lines = visit(exactness="ties")
    assert code == 0
    assert any(line.startswith("DIFFERS    tree (4, 5, 16)") for line in lines)


def test_what_is_compared_is_said_and_less_of_a_large_model_on_a_cpu(visit, monkeypatch):
    """And never more than the context holds."""
    monkeypatch.setattr(exactness, "engines", lambda *_: iter(()))
    monkeypatch.setattr(exactness, "operations", lambda *_: iter(()))
    head = "engines, against plain decoding of one request at a time: "
    assert f"{head}4 prompts of 1 to 60 tokens, 12 tokens each, half of them drawn" in visit()[1]
    assert f"{head}4 prompts of 1 to 7 tokens, 12 tokens each, half of them drawn" in visit(context_length=20)[1]
    monkeypatch.setattr(exactness, "_SMALL", 0)
    assert f"{head}5 prompts of 1 to 140 tokens, 12 tokens each, half of them drawn" in visit()[1]


def test_counts_that_differ_are_found():
    case = RowCase("odd", 6, of_rows(lambda x: x * 2 + (len(x) in (3, 33))))
    probe = BitProbe(lambda _: [case], exactness.COUNTS, max(exactness.COUNTS), 0, torch.float32, torch.device("cpu"))
    assert dict(probe.run()) == {"odd": [3, 33]}


def test_probes_of_a_gpus_operations_name_what_differs(strong_pair):
    """They run anywhere; here by the references that a CPU has with `bits`, one of which is spoilt."""
    config = target_spec(strong_pair.target).config
    ops = Ops(OpContext(torch.device("cpu"), torch.float32, profile=profile_of("bits", torch.device("cpu"))))
    probe = operation_probe(ops, config, (), 20)
    assert probe.problem() is None
    real = ops.silu_mul
    vars(ops)["silu_mul"] = lambda x: real(x) + (len(x) == 5)
    differ = {name: counts for name, counts in probe.run() if counts}
    assert differ == {"silu of a gate": [5]}
    assert probe.problem() == "silu of a gate of 5 rows"


@pytest.mark.parametrize("group", [0, 32])
def test_a_norm_that_writes_codes_is_probed_where_a_product_reads_them(strong_pair, group):
    """Codes that look at the number of rows, and such as the product would not make itself, are named."""
    target = target_spec(strong_pair.target)
    ops = Ops(OpContext(torch.device("cpu"), torch.float32, profile=profile_of("bits", torch.device("cpu"))))
    how = Activations(group)
    params = [
        replace(param, held=W8A8(Packed("fp8", QuantScheme("e4m3", group)), how)) if param.kind == "matrix" else param
        for param in target.params
    ]
    probe = operation_probe(ops, target.config, params, 20)
    name = f"a norm of a sum of 1 parts, in e4m3 {how}"
    assert {each for each, _ in probe.run()} >= {name, f"{name}, prefilled as in a round"}
    assert not any("e4m3" in each for each, _ in operation_probe(ops, target.config, target.params, 20).run())
    assert probe.problem() is None
    real = ops.add_rms_norm_codes

    def spoilt(batch_invariant):
        def made(x, *given):
            total, normed, codes = real(x, *given)
            return (
                total,
                normed,
                QuantizedRows(codes.codes, codes.scale * (2 if len(x) == 5 or not batch_invariant else 1)),
            )

        return made

    vars(ops)["add_rms_norm_codes"] = spoilt(True)
    assert probe.problem() == f"{name} of 5 rows"
    vars(ops)["add_rms_norm_codes"] = spoilt(False)
    assert probe.problem() == f"{name}, prefilled as in a round of 20 rows"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exactness": "bits"}, "exactness bits: every logit is that of plain decoding"),
        ({}, "exactness ties; --exactness bits can serve"),
        ({"dtype": "float64"}, "exactness ties; no bits: it is built for float32"),
    ],
)
def test_every_report_names_what_is_in_force_and_what_could_be(strong_pair, options, words):
    config = EngineConfig.of(str(strong_pair.target), **{"dtype": "float32", "device": "cpu", **options})
    told = exactness_words(plan_engine(config))
    assert told.split("; attention by ")[0] == words
    assert ("; attention by " in told) == (options == {"exactness": "bits"})
