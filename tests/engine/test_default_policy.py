"""What no `--speculative-policy` stands for: shapes are chosen on a GPU, where the load decides what pays."""

import pytest
import torch

from support.refusing import refused
from treetop.engine.startup import default_policy
from treetop.engine.startup.default_policy import with_policy
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.layout import PLAIN

HEAD = {"draft": "builtin:nestling-eagle3"}


def on(auto, monkeypatch, **options):
    """auto: the device that is there."""
    monkeypatch.setattr(default_policy, "compute_device", lambda name: torch.device(auto if name == "auto" else name))
    found = with_policy(EngineConfig.of("builtin:nestling", **options))
    return found.speculative_policy, found.speculative_calibration


@pytest.mark.parametrize(
    ("options", "gpu", "cpu"),
    [
        (HEAD, ("auto", "learn"), ("fixed", "off")),
        ({"speculative_algorithm": "NGRAM"}, ("auto", "learn"), ("fixed", "off")),
        ({"speculative_algorithm": "NONE"}, ("fixed", "off"), ("fixed", "off")),
        ({**HEAD, "device": "cpu"}, ("fixed", "off"), ("fixed", "off")),
        ({**HEAD, "speculative_policy": "fixed"}, ("fixed", "off"), ("fixed", "off")),
        ({**HEAD, "speculative_policy": "auto"}, ("auto", "learn"), ("auto", "learn")),
        ({**HEAD, "speculative_calibration": "off"}, ("auto", "off"), ("fixed", "off")),
        ({**HEAD, "speculative_shapes": "3,1,4"}, ("auto", "learn"), ("auto", "learn")),
    ],
)
def test_the_device_decides_what_is_not_said(options, gpu, cpu, monkeypatch):
    assert on("cuda", monkeypatch, **options) == gpu
    assert on("cpu", monkeypatch, **options) == cpu


def test_shapes_are_those_of_the_policy(monkeypatch):
    monkeypatch.setattr(default_policy, "compute_device", lambda asked: torch.device("cuda"))
    config = EngineConfig.of("builtin:nestling", **HEAD)
    assert config.shapes == (config.shape,)
    assert PLAIN in with_policy(config).shapes


def test_a_folder_for_what_is_learned_is_refused_where_nothing_learns(monkeypatch):
    kept = {**HEAD, "speculative_calibration_dir": "x"}
    refused(ConfigError, lambda: on("cpu", monkeypatch, **kept), "give --speculative-calibration learn")
    assert on("cuda", monkeypatch, **kept) == ("auto", "learn")
