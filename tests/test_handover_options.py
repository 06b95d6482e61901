"""Roles on the command line, over HTTP, and what the doctor says of transports."""

import socket
import sys
from pathlib import Path

import pytest

from serving import Server
from treetop.cli.command_line import main
from treetop.disaggregation.connector import check_disaggregation
from treetop.disaggregation.options import SECRET_VARIABLE, DisaggregationOptions
from treetop.doctor.transport import transport_speeds
from treetop.engine.build import plan_engine
from treetop.models.fingerprint import fingerprint
from treetop.server.llm import LLM
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop.types.sampling import SamplingParams
from waiting import until

WRONG = [
    ({"role": "both", "handover_listen": "127.0.0.1:1"}, "--handover-listen: only with --role"),
    ({"role": "both", "handover_lease": 5.0}, "--handover-lease: only with --role"),
    ({"role": "prefill"}, "--role prefill needs --handover-listen"),
    ({"role": "decode"}, "--role decode needs --prefill-peers or --peer-registry"),
    ({"role": "decode", "prefill_peers": ("a:1",), "handover_listen": "b:1"}, "--handover-listen: only with"),
    ({"role": "other"}, "--role must be one of both, prefill, decode"),
    ({"role": "prefill", "handover_listen": "a:1", "handover_lease": 0.0}, "--handover-lease must lie between"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_options_that_cannot_be_together_are_refused_by_their_names(given, message):
    with pytest.raises(ConfigError, match=message):
        DisaggregationOptions(**given)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--handover-slots", "4"], "--handover-slots: only with --role prefill or --role decode"),
        (["--role", "decode", "--prefill-peers", "127.0.0.1:1", "--handover-slots", "0"], "decode needs at least 1"),
    ],
)
def test_slots_come_with_a_role_and_a_role_with_slots(capsys, flags, message):
    assert main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err


def _check(config=None, **given):
    check_disaggregation(config or EngineConfig(), DisaggregationOptions(**given))


def test_what_cannot_work_is_said_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    prefill = {"role": "prefill", "handover_listen": "127.0.0.1:0"}
    _check(**prefill)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:70: without a secret only addresses of this machine"):
        _check(role="prefill", handover_listen="10.0.0.1:70")
    with pytest.raises(ConfigError, match="--prefill-peers must be host:port, got 'nonsense'"):
        _check(role="decode", prefill_peers=("nonsense",))
    with pytest.raises(ConfigError, match="the address that others reach"):
        _check(**prefill, peer_registry=str(tmp_path))
    with pytest.raises(ConfigError, match="there is no such folder"):
        _check(role="decode", peer_registry=str(tmp_path / "nowhere"))
    monkeypatch.setenv(SECRET_VARIABLE, "of sixteen bytes or more")
    with pytest.raises(ConfigError, match=r"--handover-listen 192\.0\.2\.1:70: Cannot assign requested address"):
        _check(role="prefill", handover_listen="192.0.2.1:70", peer_registry=str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--handover-listen 127.0.0.1:{port}: Address already in use"):
            _check(role="prefill", handover_listen=f"127.0.0.1:{port - 1}", config=EngineConfig(ep_size=2))
    _check(role="prefill", handover_listen=f"127.0.0.1:{port}")
    monkeypatch.setattr("treetop.disaggregation.nixl.PACKAGES", ("not_there",))
    with pytest.raises(ConfigError, match="needs NIXL: pip install"):
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


def test_the_doctor_times_both_ways_or_says_what_is_missing(monkeypatch):
    pytest.importorskip("nixl_cu12", reason="needs NIXL")
    rows = transport_speeds("cpu")
    assert [way for _, way, _ in rows] == ["read", "write"]
    assert all(float(speed.removesuffix(" GB/s")) > 0 for _, _, speed in rows)
    for package in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, package, None)
    assert "pip install" in transport_speeds("cpu")[0][2]


def test_two_servers_of_which_one_prefills_and_refuses_requests(tmp_path: Path):
    """The decode worker answers as one engine does, and its metrics say that the request was handed over.

    They find each other in a folder, from which the one that stops is gone.
    """
    pytest.importorskip("nixl_cu12", reason="needs NIXL")
    port = _free_port()
    small = ["--context-length", "512", "--handover-slot-bytes", str(1 << 22), "--dtype", "float32"]
    small += ["--peer-registry", str(tmp_path)]
    prefill = Server(*small, "--role", "prefill", "--handover-listen", f"127.0.0.1:{port}", "--handover-slots", "2")
    decode = Server(*small, "--role", "decode")
    try:
        prefill.up()
        decode.up()
        assert prefill.get("/health").status_code == 200
        body = {"prompt": "def area(radius):\n    return", "max_tokens": 20, "temperature": 0}
        refused = prefill.post("/v1/completions", body)
        assert refused.status_code == 400
        assert "--role prefill" in refused.json()["error"]["message"]
        until(lambda: decode.metric("treetop:handover_num_peers") == 1)
        answer = decode.post("/v1/completions", body).json()
        until(lambda: decode.metric("treetop:handover_num_whole") == 1)
        assert decode.metric("treetop:handover_num_bytes") > 0
        until(lambda: prefill.metric("treetop:handover_num_whole") == 1)
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def test_a_chunk_is_no_longer_than_what_slots_hold(strong_pair):
    def layout(**options):
        return plan_engine(EngineConfig.of(str(strong_pair.target), draft=None, **options)).layout

    slots = {"handover_slots": 3, "handover_slot_bytes": 1 << 15}
    held = layout(**slots)
    assert held.chunk <= 3 * held.slot_tokens < 2 * held.chunk
    assert held.chunk < layout().chunk
    assert layout(**slots, chunked_prefill_size=300).chunk == 300
