"""KV events: the hashes, the messages as vLLM documents them, replay, and that they tell what the cache has."""

import random
import struct
import time
from itertools import count

import msgspec
import pytest
import zmq

from support.fake_core import PagedEngine, ask, make_core
from support.serving import mock
from support.waiting import WAIT_S, until
from treetop.core.wire import KVEventsOptions, kv_events_options
from treetop.distributed.kv_events import (
    GPU,
    HOST,
    EventWriter,
    KVEventPublisher,
    MediumWatcher,
    block_hash,
    endpoint_of,
    seed_hash,
)
from treetop.types.config import EngineConfig
from treetop.types.errors import ConfigError
from treetop_debug.offloading_faults import OFFLOADING_FAULTS

SEED = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
"""Of "0"; these and the constants below: `hashlib.sha256(cbor2.dumps(value, canonical=True))` of cbor2 6.2."""


def test_hashes_are_those_of_sha256_cbor():
    """Tokens of every size that CBOR has a head for; a chain; a salt; a list longer than one byte says."""
    assert seed_hash("0").hex() == SEED
    first = block_hash(bytes.fromhex(SEED), (1, 23, 24, 300))
    assert first.hex() == "44dc0b75ed75fca048021f15e9a785aec4062f011e7aae9b0276ad8ab621d6d2"
    second = block_hash(first, (70000, 2**32 - 1, 0, 255))
    assert second.hex() == "7bca3fadc428e506e36f73fd72bce3f8cb838139dad3f7bd72b22a8040cb3e60"
    salted = block_hash(bytes.fromhex(SEED), (1, 2, 3, 4), ["tenant é"])
    assert salted.hex() == "aee474f924dfd5c6c63d7f46a50404559c9f3af1503a6009250cfb771bec06a7"
    long = block_hash(bytes.fromhex(SEED), range(1000, 1064))
    assert long.hex() == "ddbd2646f98e3429b92ad271a9efc30d75baaa9587babc8a4bfe16629b0c22c5"


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The types of vLLM's page on subscribers, as a consumer writes them down."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Consumer:
    """What a router knows: hash -> (parent, tokens)."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.on_host: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.num_batches = 0

    def take(self, payload: bytes) -> None:
        self.num_batches += 1
        for event in msgspec.msgpack.decode(payload, type=Batch).events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.on_host.clear()
                continue
            blocks = {"GPU": self.blocks, "CPU": self.on_host}[event.medium]
            if isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    del blocks[each]
            else:
                parent, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert parent is None or parent in blocks
                for place, each in enumerate(event.block_hashes):
                    assert each not in blocks, "stored twice"
                    blocks[each] = parent, tuple(event.token_ids[place * size : (place + 1) * size])
                    parent = each


def expected(kv_cache, seed: str) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """The blocks that a cache has, from its nodes, each hashed along its path."""
    radix = kv_cache._radix
    found = {}
    for each in radix._nodes.values():
        node, path = each, []
        while node.parent is not None:
            path.append(node.key[1])
            node = node.parent
        digest, shown = seed_hash(seed), None
        for page in reversed(path):
            tokens = page[: radix._page_size]
            digest, parent = block_hash(digest, tokens), shown
            shown = int.from_bytes(digest[-8:], "big")
            found[shown] = parent, tokens
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_consumer_has_what_the_cache_has_after_any_work(seed):
    """Shared prefixes, forks behind a page (one block for a router, two pages with a draft), evictions, failures."""
    core = make_core(PagedEngine, rows=2, pages=24, context=80, host_pages=40)
    assert follow(core, random.Random(seed)) > 20
    assert core.scheduler.load.host_tier.loaded_tokens > 0


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Tokens are worth a load."""
    monkeypatch.setattr("treetop.cache.host_tier.LEAST_TOKENS", 4)


def follow(core, rng) -> int:
    """Batches of events of some work, after each request of which the consumer knows what both media have."""
    changes, consumer = [], Consumer()
    core.scheduler.watch_cache(MediumWatcher(GPU, changes.append), MediumWatcher(HOST, changes.append))
    writer, encoder = EventWriter(4, "0"), msgspec.msgpack.Encoder()
    for number in range(60):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 40))]
        core.add(ask(number, prompt, max_tokens=rng.randrange(1, 12)))
        while core.busy:
            core.step()
            if rng.random() < 0.02:
                core.fail(RuntimeError("a test"))
        events = writer.events(changes)
        changes.clear()
        if events:
            consumer.take(encoder.encode([0.0, events, 0]))
        rows = core.scheduler.rows
        assert consumer.blocks == expected(rows.kv_cache, "0")
        assert consumer.on_host == expected(rows.host._host, "0"), "events of the host"
    return consumer.num_batches


def test_a_router_that_is_told_of_no_eviction_on_the_host_is_noticed():
    fault = OFFLOADING_FAULTS["host-page-told-as-stored"]
    core = make_core(PagedEngine, rows=2, pages=24, context=80, host_pages=24)
    with fault.active(), pytest.raises(AssertionError, match=fault.guard):
        follow(core, random.Random(1))


def test_bytes_are_those_of_the_documented_messages():
    """Built here by hand: msgpack of arrays; a block with two nodes comes once and goes once."""
    writer = EventWriter(2, "0")
    first, second = (block_hash(seed_hash("0"), tokens) for tokens in ((1, 2), (3, 4)))
    inner = block_hash(first, (5, 300))
    changes = [
        ("GPU", None, 0, 0, ()),
        ("GPU", True, 0, 1, (1, 2, 9)),
        ("GPU", True, 1, 2, (5, 300, 7)),
        ("GPU", True, 0, 3, (1, 2, 8)),
        ("GPU", True, 0, 4, (3, 4, 8)),
        ("GPU", False, 0, 2, ()),
        ("GPU", False, 0, 1, ()),
        ("GPU", False, 0, 4, ()),
    ]
    payload = msgspec.msgpack.encode([1.5, writer.events(changes), 3])

    def u64(digest: bytes) -> bytes:
        return b"\xcf" + digest[-8:]

    def text(word: str) -> bytes:
        return bytes([0xA0 + len(word)]) + word.encode()

    stored = b"\x98" + text("BlockStored")
    end = b"\x02\xc0" + text("GPU") + b"\xc0"
    assert payload == b"".join(
        [
            b"\x93\xcb" + struct.pack(">d", 1.5) + b"\x94",
            b"\x91" + text("AllBlocksCleared"),
            stored + b"\x92" + u64(first) + u64(inner) + b"\xc0" + b"\x94\x01\x02\x05\xcd\x01\x2c" + end,
            stored + b"\x91" + u64(second) + b"\xc0" + b"\x92\x03\x04" + end,
            b"\x93" + text("BlockRemoved") + b"\x92" + u64(inner) + u64(second) + text("GPU"),
            b"\x03",
        ]
    )
    assert writer.events([("GPU", False, 0, 3, ())]) == [("BlockRemoved", [int.from_bytes(first[-8:], "big")], "GPU")]


def test_an_adapter_is_a_key_of_all_its_blocks_and_a_salt_of_the_first():
    """As `Whose.salt` says them both; the constants are of cbor2, as those above."""
    pages = [("GPU", True, 0, 1, (1, 2, f"adapter{chr(0)}salt")), ("GPU", True, 1, 2, (3, 4))]
    ((kind, hashes, parent, _, _, _, _, adapter),) = EventWriter(2, "0").events(pages)
    assert (kind, parent, adapter) == ("BlockStored", None, "adapter")
    assert [f"{each:016x}" for each in hashes] == ["e78f17344882b1b6", "d6612103b229d7cd"]
    (salted,) = EventWriter(2, "0").events([("GPU", True, 0, 1, (1, 2, "salt"))])
    assert salted[1] == [int.from_bytes(block_hash(seed_hash("0"), (1, 2), ["salt"])[-8:], "big")]
    assert salted[-1] is None


def test_a_subscriber_that_missed_batches_has_them_told_again():
    context = zmq.Context()
    options = KVEventsOptions(
        True, endpoint="inproc://events", replay_endpoint="inproc://again", buffer_steps=3, topic="kv"
    )
    publisher = KVEventPublisher(options, 2, 0, context)
    sub, req = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        sub.connect("inproc://events")
        sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        req.connect("inproc://again")
        for socket in (sub, req):
            socket.RCVTIMEO = int(1000 * WAIT_S)
        serials, numbers, last = count(1), [], 0

        def tell() -> None:
            nonlocal last
            last = next(serials)
            publisher.gpu.stored(0, last, (last, 2))

        def heard() -> list[list[int]]:
            topic, number, payload = sub.recv_multipart()
            assert topic == b"kv"
            numbers.append(int.from_bytes(number, "big"))
            return [event.token_ids for event in msgspec.msgpack.decode(payload, type=Batch).events]

        tell()
        while not sub.poll(50):  # the first may come before the subscription
            tell()
        while heard()[-1] != [last, 2]:  # and a slow publisher tells of several at once
            pass
        for _ in range(4):
            tell()
            assert heard() == [[last, 2]]
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
        req.send_multipart([b"", b"junk"])  # is no request, and ends nothing
        req.send_multipart([b"", (numbers[-1] - 1).to_bytes(8, "big")])
        told = []
        while not told or told[-1][0] != b"\xff" * 8:
            empty, number, payload = req.recv_multipart()
            assert empty == b""
            told.append((number, payload))
        assert [int.from_bytes(number, "big") for number, _ in told[:-1]] == numbers[-2:]
        assert msgspec.msgpack.decode(told[0][1], type=Batch).ts < time.time()
        assert told[-1][1] == b""
        publisher.gpu.cleared()
        publisher.close()
        _, _, payload = sub.recv_multipart()
        assert msgspec.msgpack.decode(payload, type=Batch).events == [AllBlocksCleared()]
    finally:
        context.destroy(linger=0)


def test_endpoints_count_up_and_those_that_cannot_be_are_refused():
    assert endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert endpoint_of("ipc:///run/kv", 1) == "ipc:///run/kv_dp1"
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    context = zmq.Context()
    with pytest.raises(ConfigError, match="--kv-events-config: tcp://nowhere: "):
        KVEventPublisher(KVEventsOptions(True, endpoint="tcp://nowhere"), 2, 0, context)
    context.destroy(linger=0)


def test_the_configuration_is_vllms():
    config = EngineConfig()
    given = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:1", "topic": "kv@a@b"}'
    options = kv_events_options(given, config)
    assert (options.endpoint, options.topic, options.replay_endpoint) == ("tcp://*:1", "kv@a@b", None)
    assert kv_events_options('{"publisher": "zmq"}', config) is None
    assert kv_events_options(None, config) is None
    for wrong, words in (("{", "--kv-events-config: "), ('{"a": 1}', "unknown field `a`"), ('{"hwm": 0}', "hwm")):
        with pytest.raises(ConfigError, match=words):
            kv_events_options(wrong, config)
    with pytest.raises(ConfigError, match="disable-radix-cache"):
        kv_events_options(given, EngineConfig(disable_radix_cache=True))


def test_a_server_tells_of_the_pages_of_its_prompts(tmp_path):
    """Over sockets of the file system; replayed for whoever came too late."""
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/again",
        "hash_seed": "0",
    }
    flags = ("--page-size", "4", "--kv-events-config", msgspec.json.encode(events).decode())
    with mock(0, "1", *flags) as server:
        prompt = [*range(100, 114)]
        server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})
        context, consumer = zmq.Context(), Consumer()
        req = context.socket(zmq.DEALER)
        req.RCVTIMEO = int(1000 * WAIT_S)
        try:
            req.connect(events["replay_endpoint"])

            def told() -> bool:
                consumer.__init__()
                req.send_multipart([b"", (0).to_bytes(8, "big")])
                while payload := req.recv_multipart()[2]:
                    consumer.take(payload)
                return len(consumer.blocks) >= 3

            until(told)
        finally:
            context.destroy(linger=0)
        parent = seed_hash("0")
        for begin in (0, 4, 8):
            parent = block_hash(parent, prompt[begin : begin + 4])
            assert consumer.blocks[int.from_bytes(parent[-8:], "big")][1] == tuple(prompt[begin : begin + 4])
