"""Options from the environment: which flag a variable stands for, who has precedence, and what is refused."""

import argparse

import pytest

from treetop.cli import build_parser, main
from treetop.cli.command_line import with_defaults_of_the_place
from treetop.cli.environment import environment_words
from treetop.cli.options import engine_options, given_options
from treetop.cli.serve import serve_options
from treetop.serve_options import ServeOptions
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.options import options_of


def parsed(monkeypatch, environment: dict[str, str], *words: str) -> argparse.Namespace:
    """What a command line means in an environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parser = build_parser()
    return with_defaults_of_the_place(parser.parse_args(words), parser, words)


def test_a_variable_says_what_its_flag_says(monkeypatch):
    """Of every kind: number, choice, text with spaces, switch, switch with two sides, several values, the model."""
    given = {
        "TREETOP_MODEL": "some/folder",
        "TREETOP_MAX_RUNNING_REQUESTS": "7",
        "TREETOP_MEM_FRACTION_STATIC": "0.5",
        "TREETOP_SPECULATIVE_POLICY": "auto",
        "TREETOP_CHAT_TEMPLATE": "{{ a b }}",
        "TREETOP_DISABLE_RADIX_CACHE": "true",
        "TREETOP_ACCESS_LOG": "0",
        "TREETOP_OVERLAP": "off",
        "TREETOP_API_KEY": "one  two",
        "TREETOP_SERVED_MODEL_NAME": "a b",
        "TREETOP_DISAGGREGATION_MODE": "decode",
        "TREETOP_ENGINE_RESTARTS": "",
    }
    args = parsed(monkeypatch, given, "serve")
    assert args.model == "some/folder"
    engine = engine_options(args)
    assert engine == {
        "max_running_requests": 7,
        "mem_fraction_static": 0.5,
        "speculative_policy": "auto",
        "disable_radix_cache": True,
        "overlap": False,
    }
    served = serve_options(args)
    assert served.chat_template == "{{ a b }}"
    assert not served.access_log
    assert served.api_key == ("one", "two")
    assert served.served_model_name == ("a", "b")
    assert served.engine_restarts == ServeOptions().engine_restarts
    assert args.disaggregation_mode == "decode"


def test_the_command_line_comes_before_the_variable_and_that_before_the_file(monkeypatch, tmp_path):
    """Whatever the spelling, and for lists too, which do not add up with the environment's."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: of-file\ncontext-length: 100\nport: 1\nmax-queued-requests: 3\n")
    given = {
        "TREETOP_CONFIG": str(file),
        "TREETOP_MODEL": "of-environment",
        "TREETOP_CONTEXT_LENGTH": "200",
        "TREETOP_PORT": "2",
        "TREETOP_API_KEY": "a",
        "TREETOP_GRAPHS": "sim",
    }
    args = parsed(monkeypatch, given, "serve", "--max-model-len", "300", "--api-key", "b", "--enforce-eager")
    assert (args.model, args.context_length, args.port, args.max_queued_requests) == ("of-environment", 300, 2, 3)
    assert args.api_key == ["b"]
    assert args.graphs == "off"
    assert args.config == str(file)
    assert parsed(monkeypatch, given, "serve", "mine").model == "mine"
    args = parsed(monkeypatch, given, "serve", "--model", "mine")
    assert (args.model, args.model_flag) == (None, "mine")


def test_only_commands_with_an_engine_read_it(monkeypatch):
    assert parsed(monkeypatch, {"TREETOP_MAX_TOKENS": "5", "TREETOP_PORT": "x"}, "generate").max_tokens == 5
    assert parsed(monkeypatch, {"TREETOP_MODEL": "some"}, "bench-serve").model is None


def test_wrong_variables_are_named_all_at_once():
    """Also the one that Kubernetes sets for a service called treetop."""
    args = build_parser().parse_args(["serve"])
    given = {
        "TREETOP_PORT": "tcp://10.0.0.1:8000",
        "TREETOP_TIMEOUT_KEEP_ALIVE": "0",
        "TREETOP_SPECULATIVE_POLICY": "best",
        "TREETOP_ACCESS_LOG": "perhaps",
        "TREETOP_MODEL": "--version",
    }
    with pytest.raises(ConfigError) as told:
        environment_words(args, given)
    for words in (
        "TREETOP_PORT must be an integer, got 'tcp://10.0.0.1:8000'; a service of that name in Kubernetes sets it",
        "TREETOP_TIMEOUT_KEEP_ALIVE must be a number of seconds above 0",
        "TREETOP_SPECULATIVE_POLICY must be one of auto, fixed, got 'best'",
        "TREETOP_ACCESS_LOG must be true or false, got 'perhaps'",
        "TREETOP_MODEL must name a model, got '--version'",
    ):
        assert words in str(told.value)


def test_a_misspelled_variable_is_told_and_those_of_kubernetes_are_not(monkeypatch, capsys):
    monkeypatch.setenv("TREETOP_CONTEXT_LENGHT", "64")
    monkeypatch.setenv("TREETOP_API_SERVICE_HOST", "10.0.0.1")
    assert main(["generate", "--max-tokens", "0"]) == 2
    assert "TREETOP_CONTEXT_LENGHT is no option; did you mean TREETOP_CONTEXT_LENGTH?" in capsys.readouterr().err


def test_every_flag_has_one_variable_of_its_own():
    rows = [row for kind in (EngineConfig, ServeOptions) for row in options_of(kind).values() if row.dest]
    assert len({row.variable for row in rows}) == len(rows) > 80
    args = build_parser().parse_args(["serve"])
    assert {row.dest for row in rows} <= {*vars(args)}
    assert given_options(args, ServeOptions) == {}
