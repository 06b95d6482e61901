"""The transport over NIXL, and the only module that knows it: UCX between processes and hosts, GPU and CPU memory.

A write is asked for, and its end is told, by NIXL's notifications. A transfer cannot be cancelled (nixl-2067): a handle
is kept until it has ended, since giving one back lets its bytes land all the same.

A writer that dies tells nobody. So once its session has ended it is looked for: a byte is read from it, now and then,
into the range that it was to write. Once the library says that this peer has gone, and `_DRAIN_S` later, the write has
ended. From one that has only stopped the byte does not come, and nothing is known.
"""

import importlib
import importlib.util
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from treetop.types.errors import ConfigError
from treetop.types.kv_transfer.transport import Handle, Memory, PeerId, Range, State, Way
from treetop.version import DISTRIBUTION

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Never the meta package, which brings both."""
_MAX_EARLY = 256
"""Words of peers that are not connected yet."""
_LOOK_S, _DRAIN_S = 0.5, 1.0
"""Seconds between two looks for a writer, and from its death until what it had sent has been taken off the wire."""
_MISSING = f"KV transfer needs NIXL: pip install {DISTRIBUTION}[disaggregation-cu13] (or -cu12)"


class _Reach(msgspec.Struct, frozen=True, array_like=True):
    """What a peer is told of this end."""

    agent: bytes
    address: int
    num_bytes: int
    device: int | None


class _Write(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """Write these of your ranges into those of mine."""

    number: int
    remote: tuple[Range, ...]
    local: tuple[Range, ...]


class _Written(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """A write has ended."""

    number: int
    whole: bool


_decode = msgspec.msgpack.Decoder(_Write | _Written).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True, eq=False)
class _Peer:
    """Of one session: two with the same worker are two peers."""

    agent: str
    memory: Memory


@dataclass(slots=True)
class _Transfer:
    """handle: of a read, or of a write that this end was asked for.
    state: of a write that this end has asked for, into `local`.
    look: for its writer, from look_s on.
    gone_s: when that was found to have gone.
    """

    peer: _Peer
    begun_s: float
    handle: Any = None
    state: State = "busy"
    local: Sequence[Range] = ()
    look: Any = None
    look_s: float = 0.0
    gone_s: float | None = None


def check_installed() -> None:
    """Raise ConfigError that says what is missing, without loading anything."""
    if all(importlib.util.find_spec(package) is None for package in PACKAGES):
        raise ConfigError(_MISSING)


def find_nixl() -> Any:
    """The module. Raises ConfigError that says what is missing."""
    for package in PACKAGES:
        with suppress(ImportError):
            found = importlib.import_module(package)
            words = logging.getLogger("nixl")  # it writes to stdout, which is not its own
            words.handlers.clear()
            words.propagate = True
            words.setLevel(logging.WARNING)
            return found
    raise ConfigError(_MISSING)


class NixlTransport:
    """One agent, one registered memory. Raises ConfigError if NIXL is missing or cannot register the memory."""

    name = "NIXL"

    def __init__(self, memory: Memory) -> None:
        nixl = find_nixl()
        self._memory = memory
        self._agent_name = f"treetop-{uuid.uuid4()}"
        try:
            # Its own thread takes a core, which on a CPU computes: there transfers go on when they are asked for.
            config = nixl.nixl_agent_config(enable_prog_thread=memory.device is not None, backends=["UCX"])
            self._agent = nixl.nixl_agent(self._agent_name, config)
            region = (memory.address, memory.num_bytes, memory.device or 0, "")
            self._registered = self._agent.register_memory([region], mem_type=_kind(memory))
        except Exception as error:  # NIXL names no base class of its errors
            raise ConfigError(f"NIXL cannot register memory for KV transfer: {error}") from error
        reach = _Reach(self._agent.get_agent_metadata(), memory.address, memory.num_bytes, memory.device)
        self.metadata = _encode(reach)
        self.name = f"NIXL ({nixl.__name__}, UCX)"
        self._peers: dict[PeerId, _Peer] = {}
        self._leaving: list[_Peer] = []
        self._transfers: dict[Handle, _Transfer] = {}
        self._writes: dict[tuple[str, int], _Transfer] = {}
        self._early: deque[tuple[str, bytes]] = deque(maxlen=_MAX_EARLY)
        self._numbers = count()

    @property
    def newest_s(self) -> float | None:
        return max((each.begun_s for each in (*self._transfers.values(), *self._writes.values())), default=None)

    def connect(self, peer: PeerId, metadata: bytes) -> bool:
        try:
            reach = msgspec.msgpack.decode(metadata, type=_Reach)
            name = self._agent.add_remote_agent(reach.agent)
        except Exception:  # whatever NIXL makes of them
            return False
        name = name.decode() if isinstance(name, bytes) else str(name)
        self._peers[peer] = _Peer(name, Memory(reach.address, reach.num_bytes, reach.device))
        return True

    def disconnect(self, peer: PeerId) -> None:
        if (found := self._peers.pop(peer, None)) is not None:
            self._leaving.append(found)
            self._forget_agents()

    def pull(self, peer: PeerId, remote: Sequence[Range], local: Sequence[Range], way: Way = "read") -> Handle:
        number = next(self._numbers)
        handle = Handle(number)
        source, now = self._peers.get(peer), time.monotonic()
        if source is None or not source.memory.holds(remote) or len(remote) != len(local):
            self._transfers[handle] = _Transfer(_Peer("", self._memory), now, state="failed")
            return handle
        assert self._memory.holds(local)
        transfer = self._transfers[handle] = _Transfer(source, now, local=tuple(local))
        try:
            if way == "read":
                transfer.handle = self._begin("READ", source, local, remote)
            else:
                self._agent.send_notif(source.agent, _encode(_Write(number, tuple(remote), tuple(local))))
        except Exception:  # the peer has gone; nothing was begun
            transfer.state = "failed"
        return handle

    def poll(self, handle: Handle) -> State:
        transfer = self._transfers[handle]
        if transfer.handle is None and transfer.state == "busy" and transfer.peer in self._leaving:
            self._look_for_writer(transfer, time.monotonic())
        state = transfer.state if transfer.handle is None else self._state(transfer.handle)
        if state in ("done", "failed"):
            del self._transfers[handle]
            self._forget_agents()
        return state

    def progress(self) -> None:
        """Take notifications, and tell of writes that have ended."""
        try:
            notes = self._agent.get_new_notifs()
        except Exception:  # a peer has gone
            notes = {}
        agents = {peer.agent: peer for peer in self._peers.values()}
        said = [*self._early]
        self._early.clear()
        for name, messages in notes.items():
            agent = name.decode() if isinstance(name, bytes) else name
            said += [(agent, message) for message in messages]
        for agent, message in said:
            self._noted(agent, agents.get(agent), message)
        for (agent, number), write in [*self._writes.items()]:
            state = self._state(write.handle)
            if state != "busy":
                del self._writes[agent, number]
                self._notify(agent, _Written(number, state == "done"))

    def close(self) -> None:
        self._transfers.clear()
        self._writes.clear()
        with suppress(Exception):
            self._agent.deregister_memory(self._registered)

    def _noted(self, agent: str, peer: _Peer | None, message: bytes) -> None:
        try:
            word = _decode(message)
        except (msgspec.MsgspecError, ValueError):
            return
        if isinstance(word, _Written):
            transfer = self._transfers.get(Handle(word.number))
            if transfer is not None and transfer.peer.agent == agent and transfer.handle is None:
                transfer.state = "done" if word.whole else "failed"
        elif peer is None:
            self._early.append((agent, message))  # its session comes by another way
        else:
            fits = self._memory.holds(word.remote) and peer.memory.holds(word.local)
            try:
                if not fits:
                    raise ValueError
                handle = self._begin("WRITE", peer, word.remote, word.local)
                self._writes[agent, word.number] = _Transfer(peer, time.monotonic(), handle)
            except Exception:  # out of bounds, or the peer has gone
                self._notify(agent, _Written(word.number, whole=False))

    def _begin(self, operation: str, peer: _Peer, here: Sequence[Range], there: Sequence[Range]) -> Any:
        mine, theirs = (
            self._agent.get_xfer_descs(
                [(memory.address + r.offset, r.num_bytes, memory.device or 0) for r in ranges], _kind(memory)
            )
            for memory, ranges in ((self._memory, here), (peer.memory, there))
        )
        handle = self._agent.initialize_xfer(operation, mine, theirs, peer.agent)
        self._agent.transfer(handle)
        return handle

    def _look_for_writer(self, write: _Transfer, now: float) -> None:
        """Its session has ended: has it died, too, and everything that it had sent come?"""
        if write.gone_s is not None:
            if now - write.gone_s >= _DRAIN_S:
                write.state = "failed"
        elif write.look is not None:
            found = self._state(write.look)
            if found != "busy":
                write.look = None
            if found == "failed":
                write.gone_s = now
        elif now >= write.look_s:
            write.look_s = now + _LOOK_S
            try:
                write.look = self._begin("READ", write.peer, [Range(write.local[0].offset, 1)], [Range(0, 1)])
            except Exception:  # the library knows already that it has gone
                write.gone_s = now

    def _state(self, handle: Any) -> State:
        """UCX ends all operations of an endpoint before it says that it failed."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception:  # nixlRemoteDisconnectError and its kind
            return "failed"
        return {"DONE": "done", "PROC": "busy"}.get(state, "failed")  # type: ignore[return-value]  # of these

    def _notify(self, agent: str, word: _Written) -> None:
        with suppress(Exception):  # it has gone
            self._agent.send_notif(agent, _encode(word))

    def _forget_agents(self) -> None:
        """Of peers that have gone, and have no transfer under way."""
        busy = {id(each.peer) for each in (*self._transfers.values(), *self._writes.values())}
        for peer in [each for each in self._leaving if id(each) not in busy]:
            self._leaving.remove(peer)
            if all(other.agent != peer.agent for other in (*self._peers.values(), *self._leaving)):
                with suppress(Exception):
                    self._agent.remove_remote_agent(peer.agent)


def _kind(memory: Memory) -> str:
    return "DRAM" if memory.device is None else "VRAM"
