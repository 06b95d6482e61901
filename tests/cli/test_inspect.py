"""`treetop inspect` says what a folder is and whether it fits, and never reads a weight."""

import json
from pathlib import Path

import pytest

from support.command_line import run
from support.tiny_models import copy_folder
from treetop.checkpoints import checkpoint
from treetop.engine.startup import exactness, exactness_table

KEYS = {
    "": "fits problems target draft memory exactness unprobed",
    "target": "folder architecture layers vocab_size hidden_size max_positions tied_embeddings parameters stored dtype"
    " weight_bytes formats activations own_draft own_head",
    "draft": "folder algorithm layout reasons stored parameters layers vocab_size aux_inputs weight_bytes formats",
    "memory": "device total free static kept pools states",
}
"""What programs rely on."""
PAIR = ("--device", "cpu", "--context-length", 128)
DRAFT = "--speculative-draft-model-path"


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch):
    monkeypatch.setattr(checkpoint._Reader, "read", lambda *_: pytest.fail("read a weight"))


def looked(capsys, *argv):
    """The report; the exit code follows it."""
    code, out, err = run(capsys, "inspect", *PAIR, *argv, "--json")
    assert err == ""
    report = json.loads(out)
    assert set(report) == set(KEYS[""].split())
    for name in ("target", "draft", "memory"):
        assert report[name] is None or set(report[name]) == set(KEYS[name].split())
    assert report["fits"] == (report["problems"] == [])
    assert code == (0 if report["fits"] else 2)
    return report


def test_a_pair_that_fits_is_described_by_its_config_and_files(capsys, strong_pair):
    report = looked(capsys, strong_pair.target, DRAFT, strong_pair.head)
    config, target, draft = strong_pair.config, report["target"], report["draft"]
    assert report["fits"]
    assert target["architecture"] == config["architectures"][0]
    assert sum(kind["count"] for kind in target["layers"]) == config["num_hidden_layers"]
    assert {kind["attention"]["num_heads"] for kind in target["layers"]} == {config["num_attention_heads"]}
    assert {kind["feed_forward"]["kind"] for kind in target["layers"]} == {"dense"}
    assert target["parameters"] == sum(target["stored"]["numbers"].values())
    assert target["weight_bytes"] == 4 * target["parameters"]
    assert draft["algorithm"] == "EAGLE3"
    assert draft["reasons"]
    pools = {pool["group"]: pool for pool in report["memory"]["pools"]}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_key_value_heads"] * head_dim * 4
    assert pools["full"]["bytes_per_token"] == config["num_hidden_layers"] * token
    assert pools["draft"]["tokens"] >= 128
    assert report["memory"]["static"] >= target["weight_bytes"] + draft["weight_bytes"]
    out = run(capsys, "inspect", strong_pair.target, DRAFT, strong_pair.head, *PAIR)[1]
    for part in ("target:", "layers: attention", "on disk:", "in memory:", "draft:", "KV pool full", "KV pool draft"):
        assert part in out
    for name in ("ties", "bits"):
        asked = looked(capsys, strong_pair.target, DRAFT, strong_pair.head, "--exactness", name)
        assert (asked["exactness"], asked["unprobed"]) == (name, False)


@pytest.mark.parametrize(("maker", "found"), [("GenuineIntel", "bits"), ("Nobody", "ties")])
def test_what_auto_would_be_is_said_without_a_probe(capsys, strong_pair, monkeypatch, maker, found):
    """A look takes no seconds of processor time; a start may yet find that something is not exact there."""
    for probe in ("suffices", "elementwise_problem", "needs_another", "without_exact_call", "found_once"):
        monkeypatch.setattr(exactness, probe, lambda *_, name=probe: pytest.fail(f"probed {name}"))
    monkeypatch.setattr(exactness_table, "device_name", lambda device: maker)
    argv = (strong_pair.target, DRAFT, strong_pair.head)
    report = looked(capsys, *argv)
    assert (report["fits"], report["exactness"], report["unprobed"]) == (True, found, found == "bits")
    said = run(capsys, "inspect", *argv, *PAIR)[1].splitlines()[-2]
    assert said == f"exactness {found}" + ", if the probes of a start pass" * (found == "bits")


def test_a_draft_alone_is_a_draft(capsys, strong_pair):
    report = looked(capsys, strong_pair.head)
    assert report["target"] is None
    assert (report["draft"]["algorithm"], report["fits"]) == ("EAGLE3", True)


def test_what_does_not_fit_together_is_a_problem_with_its_reason(capsys, strong_pair, tmp_path):
    """A head for another width; a target as a draft; a draft as a target; too large a pool; too long a context."""
    target, head = strong_pair.target, strong_pair.head
    wide = copy_folder(head, tmp_path / "head", target_hidden_size=96, hidden_size=96)
    for argv, part in (
        ((target, DRAFT, wide), "hidden_size"),
        ((target, DRAFT, target), "a target, not a draft head"),
        ((head, DRAFT, head), "a draft head, not a target"),
        ((target, "--max-total-tokens", 10**12), "--max-total-tokens"),
        ((target, "--context-length", 10**6), "--context-length"),
    ):
        assert any(part in problem for problem in looked(capsys, *argv)["problems"]), argv


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_size": 128}, "shape"),
        ({"tensors": {"lm_head.weight": None}}, "lm_head.weight"),
    ],
)
def test_a_broken_folder_is_named(capsys, strong_pair, tmp_path, changes, part):
    (problem,) = looked(capsys, copy_folder(strong_pair.target, tmp_path / "broken", **changes))["problems"]
    assert part in problem


def test_what_is_no_folder_is_named_and_dummy_weights_are_refused(capsys, tmp_path, strong_pair):
    assert "no such folder" in looked(capsys, tmp_path / "nowhere")["problems"][0]
    assert "config.json" in looked(capsys, tmp_path)["problems"][0]
    code, out, err = run(capsys, "inspect", strong_pair.target, "--load-format", "dummy")
    assert (code, out) == (2, "")
    assert "--load-format dummy" in err


def test_a_target_with_draft_layers_of_its_own_says_which_option_uses_them(capsys, strong_pair):
    folder = Path(__file__).parents[1] / "checkpoints" / "nestling-mtp"
    assert looked(capsys, folder)["target"]["own_draft"] == "MTP"
    assert "--speculative-algorithm MTP" in run(capsys, "inspect", folder, *PAIR)[1]
    assert looked(capsys, strong_pair.target)["target"]["own_draft"] is None
