"""`--exactness auto`: a table says what it is, so that no timing and no process can come to another."""

import os
from dataclasses import replace

import pytest
import torch

from support.families import FAMILIES
from support.quantized import fp8_blocks, quantized
from support.tiny_models import Pair
from treetop.attention import exact_backend
from treetop.checkpoints.loader import LoadContext
from treetop.distributed.open import open_core
from treetop.distributed.remote_engine import check_alike
from treetop.engine.startup import exactness, exactness_table
from treetop.engine.startup.exactness import whose_sums
from treetop.engine.startup.exactness_table import MOST_COST, TABLE, ExactnessRow, kind_of, settled
from treetop.engine.startup.plan import plan_engine
from treetop.exact import mkl_mode
from treetop.exact.mkl_mode import VARIABLE
from treetop.kernels.profile import Integers, profile_of
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.weights import cpu_products
from treetop.weights.cpu_products import Call, ChosenProduct

KINDS = {
    "llama 3": "dense",
    "gemma4 experts": "experts",
    "deepseek v3": "compressed",
    "glm 5": "sparse",
    "qwen3 next": "recurrent",
}


ROW = ExactnessRow("Maker", "dense", True, 1.0, "1.0 of the speed")


def config_of(pair, **options):
    fixed = {"device": "cpu", "context_length": 64, "exactness": "auto"}
    return EngineConfig.of(str(pair.target), draft=str(pair.head), **{**fixed, **options})


@pytest.fixture
def named(monkeypatch):
    """A CPU of a maker that has a row for dense models with a draft, and none else, in MKL's own mode."""
    monkeypatch.setattr(exactness, "needs_another", lambda suffices: False)
    monkeypatch.setattr(exactness_table, "_maker", lambda: "Maker")
    monkeypatch.setattr(exactness_table, "TABLE", (ROW,))


@pytest.mark.parametrize("family", sorted(KINDS))
def test_a_models_kind_is_its_dearest_mechanism(tmp_path, family):
    assert kind_of(target_spec(FAMILIES[family].save(tmp_path).pair.target).config) == KINDS[family]


def test_a_row_decides_and_what_has_none_is_ties(strong_pair, named, monkeypatch):
    """By device, kind and draft; options that `bits` refuses make it ties, and what is asked for stays."""
    told = settled(config_of(strong_pair))
    assert (told.config.exactness, told.by) == ("bits", "dense.Maker")
    assert "1.0 of the speed" in told.why
    assert settled(told.config).config == told.config
    alone = EngineConfig.of(str(strong_pair.target), device="cpu", exactness="auto")
    assert (settled(alone).config.exactness, settled(alone).why) == (
        "ties",
        "no row for a dense model without a draft on Maker",
    )
    for options, words in (
        ({"dtype": "float64"}, "built for float32"),
        ({"attention_backend": "triton"}, "is not exact"),
        ({"enable_lora": True}, "beside adapters was not measured"),
        ({"exact_sums": "linear"}, "with --exact-sums was not measured"),
        ({"tp_size": 2}, "over ranks was not measured"),
    ):
        told = settled(config_of(strong_pair, **options))
        assert told.config.exactness == "ties"
        assert words in told.why
    looked_up = EngineConfig.of(str(strong_pair.target), device="cpu", speculative_algorithm="NGRAM", exactness="auto")
    assert settled(looked_up).why == "what it costs with drafts that are looked up was not measured"
    for asked in ("bits", "ties"):
        assert settled(config_of(strong_pair, exactness=asked, dtype="float64")).config.exactness == asked
    monkeypatch.setattr(exactness_table, "_maker", lambda: "Other Maker")
    assert settled(config_of(strong_pair)).by == "dense.Other-Maker"


def test_without_the_option_it_is_auto_and_an_option_is_the_way_out(strong_pair, named):
    """`LLM`, and what a server reads of its command line."""
    asked = {"draft": str(strong_pair.head), "device": "cpu", "context_length": 64}
    for options, chosen in (({}, "bits"), ({"exactness": "ties"}, "ties")):
        opened = open_core(EngineConfig.of(str(strong_pair.target), **asked, **options))
        told = opened.info.exactness, opened.info.exactness_by
        opened.close()
        assert told == (chosen, "" if options else "dense.Maker")


def test_a_row_beyond_the_most_is_ties_and_says_its_price(strong_pair, named, monkeypatch):
    for cost, chosen in ((MOST_COST, "bits"), (MOST_COST + 0.01, "ties")):
        monkeypatch.setattr(exactness_table, "TABLE", (replace(ROW, cost=cost),))
        told = settled(config_of(strong_pair))
        assert (told.config.exactness, told.by) == (chosen, "dense.Maker")
        assert "have 1.0 of the speed" in told.why
        assert (f"and {MOST_COST} is the most" in told.why) == (chosen == "ties")


@pytest.fixture
def card(monkeypatch):
    """A GPU that has a row, as far as a machine without one can tell; its probes say what `found` holds."""
    found = {"operations": None, "products": None}
    monkeypatch.setattr(exactness_table, "compute_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(exactness_table, "device_name", lambda device: "Card")
    monkeypatch.setattr(exactness_table, "TABLE", (replace(ROW, device="Card"),))
    monkeypatch.setattr(exactness, "why_not", lambda device: None)
    monkeypatch.setattr(exactness, "exact_backend", lambda need: "segments")
    monkeypatch.setattr(exactness, "_probed_on_a_gpu", lambda *_: found["operations"])

    def products(*_):
        if found["products"]:
            raise ConfigError(f"--exactness bits: {found['products']}; use --exactness ties")

    monkeypatch.setattr(exactness, "probed_products", products)
    return found


UNMEASURED = {
    "in float16": {"dtype": "float16"},
    "over ranks": {"tp_size": 2},
    "with K/V in FP8": {"kv_cache_dtype": "fp8_e4m3"},
    "without copies of weights": {"compress_weights": False},
    "beside adapters": {"enable_lora": True},
}


@pytest.mark.parametrize("words", UNMEASURED)
def test_on_a_gpu_what_no_row_was_measured_with_is_ties(strong_pair, card, words):
    """Nor is a start refused for what `bits` would refuse there, if nobody asked for `bits`."""
    assert settled(config_of(strong_pair)).config.exactness == "bits"
    told = settled(config_of(strong_pair, **UNMEASURED[words]))
    assert (told.config.exactness, told.by) == ("ties", "options")
    assert told.why == f"what it costs {words} was not measured"


def test_on_a_gpu_quantized_weights_have_no_row(strong_pair, tmp_path, card):
    """That stay packed; once decoded they are others' weights."""
    target, _ = quantized(strong_pair.target, tmp_path / "fp8", fp8_blocks(32, 32))
    pair = Pair(target, strong_pair.head)
    assert settled(config_of(pair, dequantize_weights=True)).config.exactness == "bits"
    told = settled(config_of(pair, dequantize_weights=False))
    assert (told.config.exactness, told.why) == ("ties", "what it costs with quantized weights was not measured")


def test_a_row_whose_gpu_fails_a_probe_is_ties(strong_pair, card):
    for name, words, why in (
        ("operations", "a rotation", "on this machine the bits of a rotation depend on the batch"),
        ("products", "no product is exact", "no product is exact"),
    ):
        card.update({"operations": None, "products": None, name: words})
        told = settled(config_of(strong_pair))
        assert (told.config.exactness, told.by, told.why) == ("ties", "probes", why)


def test_a_model_that_bits_refuses_is_ties(tmp_path, named):
    """Else a start without any option about it would be refused where its kind has a row."""
    told = settled(config_of(FAMILIES["falcon 7b"].save(tmp_path).pair))
    assert (told.config.exactness, told.why) == ("ties", "norms that subtract the mean are not exact yet")


@pytest.fixture
def of_probes(monkeypatch, tmp_path):
    """A CPU that has a row, met for the first time: what its probes say is set by name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(exactness, "remedy", lambda suffices: None)

    def say(**found):
        monkeypatch.setattr(exactness, "elementwise_problem", lambda threads: found.get("operations"))
        monkeypatch.setattr(exact_backend, "problem", lambda *_: found.get("attention"))
        exact = lambda shape, call, threads: None if shape == found.get("product") else 1  # noqa: E731
        monkeypatch.setattr(cpu_products, "_least_rows", exact)

    return say


PROBED = {
    "no product": ({"product": (96, 64)}, "a product with a weight [96, 64]"),
    "no attention": ({"attention": "attention's sums with heads of 16"}, "attention's sums with heads of 16"),
    "no other operation": ({"operations": "exp"}, "exp"),
}


@pytest.mark.parametrize("case", PROBED)
def test_a_row_whose_cpu_fails_a_probe_is_ties(strong_pair, named, of_probes, case):
    """Sums of integers would serve, at twice the price and more: no row was measured with them."""
    found, words = PROBED[case]
    config = config_of(strong_pair)
    of_probes(**found)
    told = settled(config)
    assert (told.config.exactness, told.by) == ("ties", "probes")
    assert told.why == f"on this machine the bits of {words} depend on the batch, and sums of integers cost more"
    of_probes()
    assert settled(config) == told, "what was found on this machine holds for all later starts"


def test_mkls_strict_mode_has_no_row(strong_pair, named, monkeypatch):
    """Products are slower in it, and `ties` needs none: no row was measured so."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(exactness, "needs_another", mkl_mode.needs_another)
    monkeypatch.setattr(exactness, "suffices", lambda mode: mode is not None)
    told = settled(config_of(strong_pair))
    assert (told.config.exactness, told.by) == ("ties", "probes")
    assert VARIABLE not in os.environ, "nor is it chosen for what `ties` computes"
    assert told.why.endswith("in MKL's own mode, and its strict one costs more")


def test_sums_of_integers_that_are_asked_for_have_no_row(strong_pair, named):
    told = settled(config_of(strong_pair, exact_sums="integers"))
    assert (told.config.exactness, told.by, told.why) == ("ties", "probes", "sums of integers (--exact-sums) cost more")


def test_where_a_setting_would_help_auto_is_ties_and_names_it(strong_pair, named, of_probes, monkeypatch):
    """A start without options is none that a setting of somebody's may refuse."""
    of_probes(attention="attention's scores with heads of 16")
    monkeypatch.setattr(exactness, "remedy", lambda suffices: "start with a mode")
    told = settled(config_of(strong_pair))
    assert (told.config.exactness, told.by) == ("ties", "probes")
    assert told.why.endswith("attention's scores with heads of 16 depend on the batch; for bits start with a mode")


def test_workers_of_one_request_come_to_the_same(strong_pair, named, monkeypatch):
    """A prefill worker may have no draft where a decode worker has one."""
    slots = {"disaggregation_slots": 2}
    told = settled(config_of(strong_pair, **slots))
    assert (told.config.exactness, told.by) == ("ties", "options")
    assert "may be without a draft" in told.why
    alone = EngineConfig.of(str(strong_pair.target), device="cpu", exactness="auto", **slots)
    assert settled(alone).config.exactness == "ties"
    monkeypatch.setattr(exactness_table, "TABLE", (ROW, replace(ROW, drafted=False)))
    assert {settled(each).config.exactness for each in (alone, config_of(strong_pair, **slots))} == {"bits"}
    monkeypatch.setattr(exactness_table, "TABLE", (ROW, replace(ROW, drafted=False, cost=2.0)))
    assert {settled(each).config.exactness for each in (alone, config_of(strong_pair, **slots))} == {"ties"}


def test_where_rounds_may_be_plain_for_long_both_rows_decide(strong_pair, named, monkeypatch):
    """A head that does not pay leaves plain rounds, whose price no tree hides: a server would be slower than plain."""
    for policy, chosen in (("fixed", "bits"), ("auto", "ties")):
        engine_plan = plan_engine(config_of(strong_pair, speculative_policy=policy))
        assert engine_plan.config.exactness == chosen
    assert plan_engine(config_of(strong_pair)).config.exactness == "bits", "on a CPU the shape is fixed by default"
    told = settled(config_of(strong_pair, speculative_policy="auto"))
    assert (told.config.exactness, told.by) == ("ties", "options")
    assert told.why == (
        "--speculative-policy auto may run plain rounds for long, and without a draft it is ties on Maker"
    )
    for cost, chosen in ((MOST_COST, "bits"), (2.0, "ties")):
        monkeypatch.setattr(exactness_table, "TABLE", (ROW, replace(ROW, drafted=False, cost=cost)))
        assert settled(config_of(strong_pair, speculative_policy="auto")).config.exactness == chosen


def test_an_engine_whose_probe_fails_serves_and_says_so(strong_pair, named, of_probes, caplog):
    """And where another engine's did not, side by side they are refused by what each came to."""
    of_probes(operations="exp")
    with caplog.at_level("INFO", logger="treetop"):
        opened = open_core(config_of(strong_pair))
    info = opened.info
    opened.close()
    assert (info.exactness, info.exactness_by) == ("ties", "probes")
    assert "exactness auto is ties: on this machine the bits of exp depend on the batch" in caplog.text
    other = info._replace(exactness="bits", exactness_by="dense.Maker")
    with pytest.raises(ConfigError, match=r"engine 0 is ties by probes, engine 1 is bits by dense\.Maker"):
        check_alike([("engine 0 is", info), ("engine 1 is", other)])


def test_an_engine_says_which_and_why(strong_pair, named, caplog):
    """In the first line of its log, in what clients are told, and in the configuration that ranks get."""
    with caplog.at_level("INFO", logger="treetop"):
        opened = open_core(config_of(strong_pair))
    try:
        assert (opened.info.exactness, opened.info.exactness_by) == ("bits", "dense.Maker")
        assert opened.engine.config.exactness == "bits"
    finally:
        opened.close()
    first = next(record.getMessage() for record in caplog.records if "exactness" in record.getMessage())
    assert first.startswith("exactness auto is bits: dense models with a draft on Maker have 1.0 of the speed")


def test_ranks_that_come_to_another_are_refused_by_name(strong_pair, named):
    """Of `--ep-size`, each of which looks at its own device."""

    class Other:
        """Another rank came to ties."""

        size, rank = 2, 0

        def minimum(self, number):
            return number if number > 1 else min(number, 0)  # pages are of one size

    with pytest.raises(ConfigError, match="--exactness auto: it is bits here and not so on another rank"):
        plan_engine(config_of(strong_pair), expert_ranks=Other())


def test_the_table_has_no_row_twice():
    keys = [(row.device, row.kind, row.drafted) for row in TABLE]
    assert len(set(keys)) == len(keys)


def test_workers_say_whose_sums_they_have():
    """A schema's words: K/V by other sums are not those of plain decoding here."""
    cpu = torch.device("cpu")
    product = ChosenProduct((8, 4), "float32", 1, (Call.INTEGERS,) * 4, ({},) * 4, exact=True)
    said = {
        attention: whose_sums(LoadContext(torch.float32, cpu, 1, profile=profile_of("bits", cpu, integers)), [product])
        for attention, integers in ((True, Integers(attention=True)), (False, Integers()))
    }
    assert said[True] == ["products by integers in float64", "attention by integers in float64"]
    assert said[False] == ["products by integers in float64", "attention by the library's chains"]
    assert whose_sums(LoadContext(torch.float32, cpu, 1), [product]) == []
