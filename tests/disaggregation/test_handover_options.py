"""Roles on the command line, over HTTP, and what the doctor says of transports."""

import socket
import sys
from pathlib import Path

import pytest

from support.addresses import addresses
from support.serving import Server
from support.waiting import until
from treetop.checkpoints.fingerprint import fingerprint
from treetop.cli.command_line import build_parser, main
from treetop.cli.serve import disaggregation_options
from treetop.disaggregation.connector import check_disaggregation
from treetop.doctor.transport import transport_speeds
from treetop.engine.startup.plan import plan_engine
from treetop.llm import LLM
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.kv_transfer.options import SECRET_VARIABLE, DisaggregationOptions
from treetop.types.sampling import SamplingParams

WRONG = [
    ({"mode": "null", "listen": "127.0.0.1:1"}, "--disaggregation-listen: only with --disaggregation-mode"),
    ({"mode": "null", "lease": 5.0}, "--disaggregation-lease: only with --disaggregation-mode"),
    ({"mode": "prefill"}, "--disaggregation-mode prefill needs --disaggregation-listen"),
    (
        {"mode": "decode"},
        "--disaggregation-mode decode needs --disaggregation-prefill-peers or --disaggregation-registry",
    ),
    ({"mode": "decode", "prefill_peers": ("a:1",), "listen": "b:1"}, "--disaggregation-listen: only with"),
    ({"mode": "other"}, "--disaggregation-mode must be one of null, prefill, decode"),
    ({"mode": "prefill", "listen": "a:1", "lease": 0.0}, "--disaggregation-lease must lie between"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_options_that_cannot_be_together_are_refused_by_their_names(given, message):
    with pytest.raises(ConfigError, match=message):
        DisaggregationOptions(**given)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--disaggregation-slots", "4"], "--disaggregation-slots: only with --disaggregation-mode prefill or decode"),
        (
            [
                "--disaggregation-mode",
                "decode",
                "--disaggregation-prefill-peers",
                "127.0.0.1:1",
                "--disaggregation-slots",
                "0",
            ],
            "decode needs at least 1",
        ),
        (
            ["--disaggregation-mode", "prefill", "--disaggregation-listen", "127.0.0.1:0", "--dp-size", "2"],
            "--dp-size: not with --disaggregation-mode prefill",
        ),
    ],
)
def test_slots_come_with_a_role_and_a_role_with_slots(capsys, flags, message):
    assert main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err


def _given(*flags):
    return disaggregation_options(build_parser().parse_args(["serve", *flags]))


@pytest.mark.parametrize(
    ("today", "before"),
    [
        (["--disaggregation-mode", "null"], ["--role", "both"]),
        (
            ["--disaggregation-mode", "prefill", "--disaggregation-listen", "a:1", "--disaggregation-registry", "b"],
            ["--role", "prefill", "--handover-listen", "a:1", "--peer-registry", "b"],
        ),
        (
            ["--disaggregation-mode", "decode", "--disaggregation-prefill-peers", "a:1", "--disaggregation-lease", "3"],
            ["--role", "decode", "--prefill-peers", "a:1", "--handover-lease", "3"],
        ),
        (
            ["--disaggregation-mode=decode", "--disaggregation-prefill-peers=a:1", "--disaggregation-secret-file=b"],
            ["--role=decode", "--prefill-peers=a:1", "--handover-secret-file=b"],
        ),
    ],
)
def test_flags_and_what_they_were_called_before_mean_the_same(today, before):
    assert _given(*today) == _given(*before)
    slots = ["--disaggregation-slots", "3", "--disaggregation-slot-bytes", "64"]
    old = ["--handover-slots", "3", "--handover-slot-bytes", "64"]
    assert vars(build_parser().parse_args(["serve", *slots])) == vars(build_parser().parse_args(["serve", *old]))


def test_sglangs_bootstrap_port_listens_at_the_host_of_the_server(capsys):
    prefill = ["--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "7000"]
    assert _given(*prefill).listen == "127.0.0.1:7000"
    assert _given(*prefill, "--host", "::1").listen == "[::1]:7000"
    assert main(["serve", *prefill, "--disaggregation-listen", "a:1"]) == 2
    assert "give one of them" in capsys.readouterr().err


def _check(config=None, **given):
    check_disaggregation(config or EngineConfig(), DisaggregationOptions(**given))


def test_what_cannot_work_is_said_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    prefill = {"mode": "prefill", "listen": "127.0.0.1:0"}
    _check(**prefill)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:70: without a secret only addresses of this machine"):
        _check(mode="prefill", listen="10.0.0.1:70")
    with pytest.raises(ConfigError, match="--disaggregation-prefill-peers must be host:port, got 'nonsense'"):
        _check(mode="decode", prefill_peers=("nonsense",))
    with pytest.raises(ConfigError, match="the address that others reach"):
        _check(**prefill, registry=str(tmp_path))
    with pytest.raises(ConfigError, match="there is no such folder"):
        _check(mode="decode", registry=str(tmp_path / "nowhere"))
    monkeypatch.setenv(SECRET_VARIABLE, "of sixteen bytes or more")
    with pytest.raises(ConfigError, match=r"--disaggregation-listen 192\.0\.2\.1:70: Cannot assign requested address"):
        _check(mode="prefill", listen="192.0.2.1:70", registry=str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--disaggregation-listen 127.0.0.1:{port}: Address already in use"):
            _check(mode="prefill", listen=f"127.0.0.1:{port - 1}", config=EngineConfig(ep_size=2))
    _check(mode="prefill", listen=f"127.0.0.1:{port}")
    monkeypatch.setattr("treetop.disaggregation.nixl.PACKAGES", ("not_there",))
    with pytest.raises(ConfigError, match="KV transfer needs NIXL: pip install"):
        _check(**prefill)


def test_a_fingerprint_is_of_what_the_files_hold(tmp_path, strong_pair):
    """Not of where they lie; one number of a weight changes it."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in strong_pair.target.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert fingerprint(copy) == fingerprint(strong_pair.target) != fingerprint(strong_pair.head)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(copy) != fingerprint(strong_pair.target)


def test_large_files_are_read_in_part(tmp_path):
    large = tmp_path / "model.safetensors"
    large.write_bytes(bytes(3_000_000))
    before = fingerprint(tmp_path)
    large.write_bytes(bytes(2_999_999) + b"\x01")
    assert fingerprint(tmp_path) != before
    large.write_bytes(bytes(3_000_001))
    assert fingerprint(tmp_path) != before


@pytest.mark.slow
def test_the_doctor_times_both_ways_or_says_what_is_missing(monkeypatch):
    pytest.importorskip("nixl_cu12", reason="needs NIXL")
    rows = transport_speeds("cpu")
    assert [way for _, way, _ in rows] == ["read", "write"]
    assert all(float(speed.removesuffix(" GB/s")) > 0 for _, _, speed in rows)
    for package in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, package, None)
    assert "pip install" in transport_speeds("cpu")[0][2]


@pytest.mark.slow
def test_two_servers_of_which_one_prefills_and_refuses_requests(tmp_path: Path):
    """The decode worker answers as one engine does, and its metrics say that the request was handed over.

    They find each other in a folder, from which the one that stops is gone.
    """
    pytest.importorskip("nixl_cu12", reason="needs NIXL")
    small = ["--context-length", "512", "--disaggregation-slot-bytes", str(1 << 22), "--dtype", "float32"]
    small += ["--disaggregation-registry", str(tmp_path)]
    prefill = Server(
        *small,
        "--disaggregation-mode",
        "prefill",
        "--disaggregation-listen",
        *addresses(1),
        "--disaggregation-slots",
        "2",
    )
    decode = Server(*small, "--disaggregation-mode", "decode")
    try:
        prefill.up()
        decode.up()
        assert prefill.get("/health").status_code == 200
        body = {"prompt": "def area(radius):\n    return", "max_tokens": 20, "temperature": 0}
        refused = prefill.post("/v1/completions", body)
        assert refused.status_code == 400
        assert "--disaggregation-mode prefill" in refused.json()["error"]["message"]
        until(lambda: decode.metric("treetop:kv_transfer_num_peers") == 1)
        answer = decode.post("/v1/completions", body).json()
        until(lambda: decode.metric("treetop:kv_transfer_num_requests_done") == 1)
        assert decode.metric("treetop:kv_transfer_num_bytes") > 0
        until(lambda: prefill.metric("treetop:kv_transfer_num_requests_done") == 1)
        assert [file.suffix for file in tmp_path.iterdir()] == [".peer"]
        assert prefill.end() == 0
        assert not [*tmp_path.iterdir()]
    finally:
        prefill.kill()
        decode.kill()
    llm = LLM(context_length=512)
    expected = llm.generate(body["prompt"], SamplingParams(max_tokens=20))[0]
    assert answer["choices"][0]["text"] == expected.text
    llm.close()


def test_a_chunk_is_no_longer_than_what_slots_hold(strong_pair):
    def layout(**options):
        return plan_engine(EngineConfig.of(str(strong_pair.target), draft=None, **options)).layout

    slots = {"disaggregation_slots": 3, "disaggregation_slot_bytes": 1 << 15}
    held = layout(**slots)
    assert held.chunk <= 3 * held.slot_tokens < 2 * held.chunk
    assert held.chunk < layout().chunk
    assert layout(**slots, chunked_prefill_size=300).chunk == 300
