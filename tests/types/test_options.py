"""The tables of options, and what is made from them: the types that editors see, the public names."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import get_type_hints

import pytest

import treetop
from support.refusing import refused
from support.tiny_models import copy_folder
from treetop import LLM, AsyncLLM, CheckpointError, ConfigError, EngineConfig, EngineError, SamplingParams
from treetop.serve_options import ServeOptions
from treetop.types import errors
from treetop.types.engine_options import EngineOptions
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.options import options_of

TABLES = [EngineConfig, SamplingParams, ServeOptions, DisaggregationOptions]


def test_an_editor_sees_every_option_of_an_engine_with_its_type():
    """But model and draft, which stand before them. Adapters are said by a dict, too."""
    known = get_type_hints(EngineConfig)
    known["lora_modules"] |= Mapping[str, str]
    assert get_type_hints(EngineOptions) == {name: known[name] for name in known if name not in ("model", "draft")}


@pytest.mark.parametrize("kind", TABLES)
def test_every_option_takes_its_default_and_refuses_what_is_no_kind_of_its_own(kind):
    """Its bounds too: the value just outside each of them is refused, and that of the bound itself is not."""
    kind()
    for name, row in options_of(kind).items():
        assert row.help
        assert row.wrong_kind(row.default) is None
        assert row.outside(row.default, brackets=False) is None
        assert row.wrong_kind(object())
        assert row.optional == (row.wrong_kind(None) is None), name
        for bound in (row.minimum, row.maximum):
            if bound is not None and row.check is None:
                assert row.outside(bound, brackets=True) is None, name
        for bound in (row.above, row.below):
            if bound is not None:
                assert row.outside(bound, brackets=True), name
        if row.minimum is not None:
            assert row.outside(row.minimum - 1, brackets=True), name
        if row.maximum is not None:
            assert row.outside(row.maximum + 1, brackets=True), name


def test_no_two_options_of_a_command_have_one_flag():
    """Nor a flag and an alias."""
    flags = [flag for kind in TABLES for row in options_of(kind).values() for flag in (row.flag, *row.aliases) if flag]
    assert len(flags) == len(set(flags))


def test_options_of_the_server_are_of_their_kind():
    """Python may give what a command line cannot."""
    refused(ConfigError, lambda: ServeOptions(port="80"), "--port must be an integer")  # type: ignore[arg-type]
    assert ServeOptions(api_key=["a"]).api_key == ("a",)  # type: ignore[arg-type]  # a list will do


def test_every_error_and_what_calls_return_can_be_imported_from_treetop():
    tree = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert tree | {"TextDelta", "RequestMetrics", "RequestOutput", "EngineConfig"} <= set(treetop.__all__)
    assert all(getattr(treetop, name) is not None for name in treetop.__all__)


def test_importing_treetop_loads_no_torch():
    """Nor does the help of a command."""
    for line in ("import treetop; treetop.EngineConfig", "from treetop.cli import build_parser; build_parser()"):
        subprocess.run([sys.executable, "-c", f"{line}; import sys; assert 'torch' not in sys.modules"], check=True)


# ---------------------------------------------------------------------------------- what a model asks for


def test_default_sampling_params_are_what_the_server_gives_a_request(strong_pair, tmp_path):
    """Of `generation_config.json`; without one temperature 1. Generating without any stays greedy."""
    folder = copy_folder(strong_pair.target, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    llm = LLM(folder, None)
    params = llm.default_sampling_params(max_tokens=4)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 4)
    assert llm.default_sampling_params(temperature=0).greedy
    prompt = [1, 2, 3]
    assert llm.generate(prompt)[0].token_ids == llm.generate(prompt, SamplingParams())[0].token_ids
    (folder / "generation_config.json").write_text(json.dumps({"top_p": 7}))
    refused(CheckpointError, llm.default_sampling_params, "generation_config.json", "top_p")
    llm.close()


def test_an_engine_with_restarts_starts_in_a_with_block_and_its_number_is_checked():
    for wrong in (-1, 1001, "3", True):
        refused(ConfigError, lambda wrong=wrong: AsyncLLM(restarts=wrong), "restarts")
    llm = AsyncLLM(restarts=2)
    llm.close()
    with pytest.raises(EngineError, match="async with"):
        asyncio.run(llm.generate("x"))
