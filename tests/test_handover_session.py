"""Sessions of a hand-over: nothing forged, changed, cut, repeated or of another checkpoint gets in."""

import random
from pathlib import Path

import msgspec
import pytest

from treetop.transfer import wire
from treetop.transfer.session import (
    Established,
    Greeting,
    Listener,
    Refusal,
    Session,
    is_loopback,
    parse_address,
    read_secret,
)
from treetop.types.errors import ConfigError
from treetop.types.handover import FirstToken, Piece, Schema, SlotRef
from treetop.types.sampling import SamplingParams, TokenLogprobs

SCHEMA = Schema(1, "target", "draft", "float64", ("full: 2 layers",), ("root",), (4, 5, 16), 1000, 4096)
SECRET = b"of at least sixteen bytes"
MESSAGES = (
    wire.Prefill(1, 2, 3, wire.Prompt((1, 2, 3, 4), SamplingParams(temperature=0.5, logit_bias=((1, 2.0),)), 9), 64),
    wire.Renew(((1, 2), (3, 4))),
    wire.Release(1, 2, SlotRef(0, 7)),
    wire.Abort(1, 2),
)
ANSWERS = (
    wire.Offer(1, 2, SlotRef(0, 7), Piece(0, 4, 4), (2**64 - 1, 5), FirstToken(9, TokenLogprobs(-0.5, ((9, -0.5),)))),
    wire.Released(1, 2, SlotRef(0, 7), True),
    wire.Refused(1, 2, "why"),
    wire.Renewed(),
)


def _meet(listener: Listener, greeting: Greeting, sender: bytes = b"d") -> Session:
    answer = listener.greet(sender, greeting.hello)
    assert answer is not None
    met = greeting.answer(answer)
    assert isinstance(met, Established)
    return met.session


def _pair() -> tuple[Listener, Session]:
    listener = Listener(SECRET, SCHEMA, b"of prefill")
    session = _meet(listener, Greeting(SECRET, SCHEMA, b"of decode"))
    heard = listener.hear(b"d", session.seal(b"first"))
    assert heard is not None
    assert heard[1] == b"first"
    assert heard[2] is not None
    assert heard[2].metadata == b"of decode"
    return listener, session


def test_messages_arrive_as_they_were() -> None:
    for message in MESSAGES:
        assert wire.decode_to_prefill(wire.encode(message)) == message
    for answer in ANSWERS:
        assert wire.decode_to_decode(wire.encode(answer)) == answer
    listener, session = _pair()
    heard = listener.hear(b"d", session.seal(b"body"))
    assert heard is not None
    sealed = listener.seal(heard[0], b"answer")
    assert sealed is not None
    assert sealed[0] == b"d"
    assert session.open(sealed[1]) == b"answer"


def test_what_is_replayed_changed_cut_or_of_another_session_is_dropped() -> None:
    listener, session = _pair()
    frame = session.seal(b"release this slot")
    later = session.seal(b"later")
    rng = random.Random(0)
    for _ in range(300):
        changed = bytearray(frame)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        assert listener.hear(b"d", bytes(changed)) is None
        assert listener.hear(b"d", frame[: rng.randrange(len(frame))]) is None
    assert listener.hear(b"e", frame) is None, "of another sender"
    assert listener.hear(b"d", later) is not None
    assert listener.hear(b"d", later) is None, "replayed"
    assert listener.hear(b"d", frame) is None, "before one that has arrived"
    _, other = _pair()
    assert listener.hear(b"d", other.seal(b"of another session")) is None


def test_a_replayed_hello_ends_no_session() -> None:
    """Only a message under the new key does, and its sender does not know it."""
    listener, greeting = Listener(SECRET, SCHEMA, b""), Greeting(SECRET, SCHEMA, b"")
    session = _meet(listener, greeting)
    first = listener.hear(b"d", session.seal(b"one"))
    assert first is not None
    assert listener.greet(b"d", greeting.hello) is not None
    again = listener.hear(b"d", session.seal(b"two"))
    assert again is not None
    assert again[0] == first[0]
    anew = _meet(listener, Greeting(SECRET, SCHEMA, b""))
    met = listener.hear(b"d", anew.seal(b"three"))
    assert met is not None
    assert met[2] is not None
    assert met[2].before == first[0]
    assert listener.hear(b"d", session.seal(b"of the session before")) is None
    assert listener.seal(first[0], b"") is None


def test_another_secret_is_refused_and_said() -> None:
    listener, greeting = Listener(b"another secret of some length", SCHEMA, b""), Greeting(SECRET, SCHEMA, b"")
    answer = listener.greet(b"d", greeting.hello)
    assert answer is not None
    refusal = greeting.answer(answer)
    assert isinstance(refusal, Refusal)
    assert "secrets differ" in refusal.reason


@pytest.mark.parametrize("field", Schema._fields)
def test_a_schema_that_differs_is_refused_by_the_name_of_its_field(field: str) -> None:
    other = {"wire": 2, "shape": (1, 1, 2), "vocab_size": 7, "slot_bytes": 8192, "groups": (), "record": ()}.get(
        field, "other"
    )
    greeting = Greeting(SECRET, SCHEMA._replace(**{field: other}), b"")
    answer = Listener(SECRET, SCHEMA, b"").greet(b"d", greeting.hello)
    assert answer is not None
    refusal = greeting.answer(answer)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(f"both sides need the same {field}: ")


def test_no_bytes_make_a_reader_raise() -> None:
    """Random bytes, messages with bytes changed, and msgpack of anything, also where a session says them."""
    rng = random.Random(3)
    listener, session = _pair()
    greeting = Greeting(SECRET, SCHEMA, b"")
    bodies = [wire.encode(message) for message in (*MESSAGES, *ANSWERS)]
    for turn in range(3000):
        if turn % 3 == 0:
            junk = rng.randbytes(rng.randrange(80))
        elif turn % 3 == 1:
            changed = bytearray(rng.choice(bodies))
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            junk = bytes(changed)
        else:
            junk = msgspec.msgpack.encode(
                {"type": rng.choice(["Offer", "Prefill", 7]), "request": rng.choice([2**70, None, "x"][1:])}
            )
        for kind in (b"", b"H", b"W", b"S", b"M"):
            greeting.answer(kind + junk)
            listener.greet(b"s", kind + junk)
            assert listener.hear(b"s", kind + junk) is None
        heard = listener.hear(b"d", session.seal(junk))
        assert heard is not None
        wire.decode_to_prefill(heard[1])
        wire.decode_to_decode(heard[1])
    assert wire.decode_to_prefill(wire.encode(MESSAGES[0]).replace(b"max_tokens\xcc\x80", b"max_tokens\x00")) is None


def test_secrets_come_from_a_file_of_its_owner_or_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert read_secret({}, str(file)) == SECRET
    assert read_secret({"TREETOP_HANDOVER_SECRET": "0123456789abcdef"}, None) == b"0123456789abcdef"
    assert read_secret({}, None) == b""
    with pytest.raises(ConfigError, match="at least 16 bytes, got 5"):
        read_secret({"TREETOP_HANDOVER_SECRET": "short"}, None)
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        read_secret({}, str(tmp_path / "nowhere"))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it"):
        read_secret({}, str(file))


def test_addresses() -> None:
    assert parse_address("[::1]:70", "--x") == ("::1", 70)
    assert parse_address("host:65535", "--x") == ("host", 65535)
    for bad in ("host", "host:", ":70", "host:65536", "host:-1", "host:1x", "", "host:²"):
        with pytest.raises(ConfigError, match="--x must be host:port"):
            parse_address(bad, "--x")
    assert [is_loopback(each) for each in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "0.0.0.0", "example.org")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
