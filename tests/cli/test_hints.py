"""A word that the command line does not know gets a hint, and errors stay short."""

from pathlib import Path

import pytest

from support.serving import serving
from treetop.checkpoints.config_fields import require_value
from treetop.cli import build_parser
from treetop.serve.listening import is_for_others
from treetop.serve_options import ServeOptions
from treetop.types.errors import CheckpointError


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serv"], "did you mean serve?"),
        (["serve", "--max-model-lenn", "9"], "did you mean --max-model-len?"),
        (["generate", "--temperatur=1"], "did you mean --temperature?"),
        (["serve", "--lora-paths"], "--lora-modules NAME=FOLDER"),
        (["serve", "--quantization", "fp8"], "treetop quantize"),
        (["generate", "--model", "builtin:nestling"], "treetop generate MODEL"),
        (["serve", "--speculative-ngram-graft", "2"], "--speculative-algorithm NGRAM"),
        (["serve", "--trust-remote-code"], "no code of a model folder is ever run"),
    ],
)
def test_an_unknown_word_is_told_with_what_was_meant(capsys, monkeypatch, words, hint):
    monkeypatch.setattr("treetop.cli.hints.is_read_by_a_person", lambda: True)
    with pytest.raises(SystemExit):
        build_parser().parse_args(words)
    said = capsys.readouterr().err
    assert hint in said
    assert said.count("\n") == 1


def test_a_guess_is_for_people_alone(capsys):
    """What a program reads of an error stays as it was; a reason is no guess."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serv"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("value", ["a" * 100_000, "a " * 50_000])
@pytest.mark.parametrize("words", [["serve", "--port"], ["serve", "--nonsense"], []])
def test_an_error_quotes_a_hundred_thousand_characters_short(capsys, words, value):
    with pytest.raises(SystemExit):
        build_parser().parse_args([*words, value])
    assert len(capsys.readouterr().err) < 2100


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_an_address_that_others_may_reach_is_known(host, local):
    assert is_for_others(ServeOptions(host=host)) is not local
    assert not is_for_others(ServeOptions(host=host, uds="some.sock"))


@pytest.mark.parametrize(("flags", "warns"), [((), True), (("--api-key", "k"), False)])
def test_a_server_that_others_may_reach_without_a_key_warns(flags, warns):
    with serving("--mock-engine", "0,4", "--host", "0.0.0.0", *flags) as server:
        assert any("without --api-key" in line for line in server.said) is warns


def test_a_value_of_a_hundred_thousand_characters_that_is_wanted_is_told_short():
    with pytest.raises(CheckpointError) as error:
        require_value({"num_attention_groups": 1}, "num_attention_groups", "9" * 100_000, Path("config.json"))
    assert len(str(error.value)) < 400
