"""What a worker does for others, how they find each other, and what they keep secret."""

import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from treetop.types.errors import ConfigError, shown
from treetop.types.options import option, options_of, validate

Mode = Literal["null", "prefill", "decode"]
DEFAULT_SLOTS = 8
SECRET_VARIABLE = "TREETOP_DISAGGREGATION_SECRET"
_OLD_VARIABLE = "TREETOP_HANDOVER_SECRET"
MIN_SECRET = 16
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds.

    connect_s: for an answer to a handshake.
    pull_s: for a chunk to arrive, and again for its release.
    lease_s: without a message, after which a decode worker's attempt is given up by the prefill worker, or the prefill
        worker by the decode worker.
    renew_s: between two messages.
    progress_s: without a step forward of an attempt, which then goes on locally.
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
    """Options of prefill and decode in workers of their own. Raises ConfigError, all problems at once."""

    mode: Mode = option(
        "null",
        "prefill computes prompts for decode workers and serves no requests, decode has them computed, null does both"
        " (docs/scale.md)",
        flag="--disaggregation-mode",
        aliases=("--role",),
        read=lambda word: "null" if word == "both" else word,
    )
    listen: str | None = option(
        None,
        "where a prefill worker is reached by decode workers",
        flag="--disaggregation-listen",
        aliases=("--handover-listen",),
        metavar="HOST:PORT",
    )
    prefill_peers: tuple[str, ...] = option(
        (),
        "prefill workers that a decode worker asks; more after commas",
        flag="--disaggregation-prefill-peers",
        aliases=("--prefill-peers",),
        metavar="HOST:PORT,...",
        read=lambda word: tuple(each.strip() for each in word.split(",") if each.strip()),
    )
    registry: str | None = option(
        None,
        "folder in which prefill workers say where they are, and decode workers look",
        flag="--disaggregation-registry",
        aliases=("--peer-registry",),
        metavar="FOLDER",
    )
    secret_file: str | None = option(
        None,
        f"file with the shared secret; needed beyond this machine (default: ${SECRET_VARIABLE})",
        flag="--disaggregation-secret-file",
        aliases=("--handover-secret-file",),
        metavar="FILE",
    )
    lease: float = option(
        10.0,
        "seconds without a message after which one worker gives another up; a request then goes on locally; a transfer"
        " may take half of it",
        minimum=0.1,
        maximum=3600,
        unit=" seconds",
        flag="--disaggregation-lease",
        aliases=("--handover-lease",),
    )

    def __post_init__(self) -> None:
        validate(self, ConfigError, self._rules)

    def _rules(self) -> list[tuple[bool, str]]:
        flag, finds = "--disaggregation-", bool(self.prefill_peers) or self.registry is not None
        mode = f"{flag}mode"
        given = [str(row.flag) for name, row in options_of(type(self)).items() if getattr(self, name) != row.default]
        return [
            (self.mode == "null" and bool(given), f"{', '.join(given)}: only with {mode} prefill or decode"),
            (self.mode == "prefill" and self.listen is None, f"{mode} prefill needs {flag}listen HOST:PORT"),
            (self.mode == "prefill" and bool(self.prefill_peers), f"{flag}prefill-peers: only with {mode} decode"),
            (self.mode == "decode" and not finds, f"{mode} decode needs {flag}prefill-peers or {flag}registry"),
            (self.mode == "decode" and self.listen is not None, f"{flag}listen: only with {mode} prefill"),
        ]

    def words(self, num_ranks: int) -> str:
        """For the log. num_ranks: that have a part of their own."""
        if self.mode == "prefill":
            last = self.listens(num_ranks)[-1]
            more = "" if num_ranks == 1 else f" to {last}, a rank each"
            found = "" if self.registry is None else f", which it says in {self.registry}"
            return f"disaggregation mode prefill: decode workers ask at {self.listen}{more}{found}"
        asked = [", ".join(self.prefill_peers), f"those in {self.registry}" if self.registry else ""]
        return f"disaggregation mode decode: has prompts prefilled by {' and '.join(each for each in asked if each)}"

    def of_rank(self, rank: int) -> "DisaggregationOptions":
        """Of a rank that has a part of its own: each listens at a port of its own, from the one that is given on."""
        host, _, port = (self.listen or "").rpartition(":")
        return replace(self, listen=f"{host}:{int(port) + rank}") if port not in ("", "0") else self

    def listens(self, num_ranks: int) -> list[str]:
        """Where each rank listens."""
        return [self.of_rank(rank).listen or "" for rank in range(num_ranks)]


def read_secret(environment: Mapping[str, str], file: str | None) -> bytes:
    """What both sides know, of a file or of the environment; b"" if neither is given. Raises ConfigError."""
    if file is None:
        source = SECRET_VARIABLE if SECRET_VARIABLE in environment else _OLD_VARIABLE
        secret = environment.get(source, "").encode()
        if not secret:
            return b""
    else:
        source = f"--disaggregation-secret-file {file}"
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
