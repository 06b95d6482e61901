"""`--exactness auto`: a table says what it is, so that no timing and no process can come to another."""

import pytest
import torch

from support.families import FAMILIES
from treetop.checkpoints.loader import LoadContext
from treetop.distributed.open import open_core
from treetop.engine.startup import exactness_table
from treetop.engine.startup.exactness import whose_sums
from treetop.engine.startup.exactness_table import TABLE, ExactnessRow, kind_of, settled
from treetop.engine.startup.plan import plan_engine
from treetop.kernels.profile import Integers, profile_of
from treetop.models.registry import target_spec
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.weights.cpu_products import Call, ChosenProduct

KINDS = {
    "llama 3": "dense",
    "gemma4 experts": "experts",
    "deepseek v3": "compressed",
    "glm 5": "sparse",
    "qwen3 next": "recurrent",
}


def config_of(pair, **options):
    fixed = {"device": "cpu", "context_length": 64, "exactness": "auto"}
    return EngineConfig.of(str(pair.target), draft=str(pair.head), **{**fixed, **options})


@pytest.fixture
def named(monkeypatch):
    """A CPU of a maker that has a row for dense models with a draft, and none else."""
    monkeypatch.setattr(exactness_table, "_maker", lambda: "Maker")
    monkeypatch.setattr(exactness_table, "TABLE", (ExactnessRow("Maker", "dense", True, "1.0 of the speed"),))


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
    ):
        told = settled(config_of(strong_pair, **options))
        assert told.config.exactness == "ties"
        assert words in told.why
    for asked in ("bits", "ties"):
        assert settled(config_of(strong_pair, exactness=asked, dtype="float64")).config.exactness == asked
    monkeypatch.setattr(exactness_table, "_maker", lambda: "Other Maker")
    assert settled(config_of(strong_pair)).by == "dense.Other-Maker"


def test_a_model_that_bits_refuses_is_ties(tmp_path, named):
    """Else a start without any option about it would be refused where its kind has a row."""
    told = settled(config_of(FAMILIES["falcon 7b"].save(tmp_path).pair))
    assert (told.config.exactness, told.why) == ("ties", "norms that subtract the mean are not exact yet")


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
            return min(number, 0)

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
