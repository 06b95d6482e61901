"""What a worker does for others, how they find each other, and what they keep secret."""

import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from treetop.types.errors import ConfigError, shown

Role = Literal["both", "prefill", "decode"]
ROLES: tuple[str, ...] = get_args(Role)
DEFAULT_SLOTS = 8
_LEASE_S = 10.0
SECRET_VARIABLE = "TREETOP_HANDOVER_SECRET"
MIN_SECRET = 16
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds.

    connect_s: for an answer to a handshake. pull_s: for a chunk to arrive, and again for its release. lease_s: without
    a message, after which a decode worker's attempt is given up by the prefill worker, or the prefill worker by the
    decode worker. renew_s: between two messages. progress_s: without a step forward of an attempt, which then goes on
    locally.
    """

    connect_s: float = 2.0
    pull_s: float = 5.0
    lease_s: float = 10.0
    renew_s: float = 2.0
    progress_s: float = 30.0

    @classmethod
    def of(cls, lease_s: float) -> "Deadlines":
        """In their proportions to a lease."""
        return cls(lease_s / 5, lease_s / 2, lease_s, lease_s / 5, 3 * lease_s)


@dataclass(frozen=True, slots=True)
class DisaggregationOptions:
    """Options of handing prefilled requests over, under the flags' names. Raises ConfigError, all problems at once.

    role: a prefill worker computes prompts for decode workers, one that does both serves alone. handover_listen: where
    a prefill worker is reached. prefill_peers: those that a decode worker asks. peer_registry: a folder in which
    prefill workers say where they are. handover_secret_file: what all of them know; else it is the environment's.
    handover_lease: seconds without a word after which a worker is given up.
    """

    role: Role = "both"
    handover_listen: str | None = None
    prefill_peers: tuple[str, ...] = ()
    peer_registry: str | None = None
    handover_secret_file: str | None = None
    handover_lease: float = _LEASE_S

    def __post_init__(self) -> None:
        finds = bool(self.prefill_peers) or self.peer_registry is not None
        given = [name for name, value in self._others() if value]
        rules = [
            (self.role not in ROLES, f"--role must be one of {', '.join(ROLES)}, got {shown(self.role)}"),
            (self.role == "both" and bool(given), f"{', '.join(given)}: only with --role prefill or --role decode"),
            (
                self.role == "prefill" and self.handover_listen is None,
                "--role prefill needs --handover-listen HOST:PORT",
            ),
            (self.role == "prefill" and bool(self.prefill_peers), "--prefill-peers: only with --role decode"),
            (self.role == "decode" and not finds, "--role decode needs --prefill-peers or --peer-registry"),
            (self.role == "decode" and self.handover_listen is not None, "--handover-listen: only with --role prefill"),
        ]
        rules.append(
            (
                not 0.1 <= self.handover_lease <= 3600,
                f"--handover-lease must lie between 0.1 and 3600 seconds, got {shown(self.handover_lease)}",
            )
        )
        problems = [text for bad, text in rules if bad]
        if problems:
            raise ConfigError("; ".join(problems))

    def words(self, num_ranks: int) -> str:
        """For the log. num_ranks: that have a part of their own."""
        if self.role == "prefill":
            last = self.listens(num_ranks)[-1]
            more = "" if num_ranks == 1 else f" to {last}, a rank each"
            found = "" if self.peer_registry is None else f", which it says in {self.peer_registry}"
            return f"role prefill: decode workers ask at {self.handover_listen}{more}{found}"
        asked = [", ".join(self.prefill_peers), f"those in {self.peer_registry}" if self.peer_registry else ""]
        return f"role decode: has prompts prefilled by {' and '.join(each for each in asked if each)}"

    def of_rank(self, rank: int) -> "DisaggregationOptions":
        """Of a rank that has a part of its own: each listens at a port of its own, from the one that is given on."""
        host, _, port = (self.handover_listen or "").rpartition(":")
        return replace(self, handover_listen=f"{host}:{int(port) + rank}") if port not in ("", "0") else self

    def listens(self, num_ranks: int) -> list[str]:
        """Where each rank listens."""
        return [self.of_rank(rank).handover_listen or "" for rank in range(num_ranks)]

    def _others(self) -> list[tuple[str, object]]:
        return [
            ("--handover-listen", self.handover_listen),
            ("--prefill-peers", self.prefill_peers),
            ("--peer-registry", self.peer_registry),
            ("--handover-secret-file", self.handover_secret_file),
            ("--handover-lease", self.handover_lease != _LEASE_S),
        ]


NO_ROLE = DisaggregationOptions()
"""Of a worker that serves without others."""


def read_secret(environment: Mapping[str, str], file: str | None) -> bytes:
    """What both sides know, of a file or of the environment; b"" if neither is given. Raises ConfigError."""
    if file is None:
        secret, source = environment.get(SECRET_VARIABLE, "").encode(), SECRET_VARIABLE
        if not secret:
            return b""
    else:
        source = f"--handover-secret-file {file}"
        try:
            if os.name == "posix" and stat.S_IMODE(Path(file).stat().st_mode) & 0o077:
                raise ConfigError(f"{source}: others may read it; chmod 600 it")
            secret = Path(file).read_bytes().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a path"
            raise ConfigError(f"{source}: {reason}") from None
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"{source}: a secret has at least {MIN_SECRET} bytes, got {len(secret)}")
    return secret


def parse_address(text: str, option: str) -> tuple[str, int]:
    """`host:port` or `[host]:port`. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not int(port) < 2**16:
        raise ConfigError(f"{option} must be host:port, got {shown(text)}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can be there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def zmq_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
