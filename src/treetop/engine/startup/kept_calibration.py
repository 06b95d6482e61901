"""What was learned of a pair, kept on disk: one file a pair in the folder that an option names.

A file's name and content say of which pair it is. What another pair taught would be believed for thousands of nodes, so
it is refused. What rows with adapters taught stands beside the base's, by digest of the adapter (`LoraFolder.digest`),
of those that were used last. A file of before, without any, is read as it is.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treetop.checkpoints.fingerprint import fingerprint
from treetop.checkpoints.json_file import read_object
from treetop.drafts.protocol import DrafterSpec
from treetop.kernels.tree.calibration import Calibration, make_calibration
from treetop.kernels.tree.learn import logprob_bias_of
from treetop.types.config import EngineConfig
from treetop.types.errors import CheckpointError, ConfigError, shown
from treetop.types.parallel import Parallel
from treetop.types.sampling import CLASSES

EVERY = 256
"""Rounds after which a file is written again."""
_KEPT = {"heat": "inv_temp", "nodes": "nodes", "seen": "seen", "chosen": "chosen", "predicted": "predicted"}
"""Names of tables in a file, and of a calibration's."""
_FORMAT = 3
Tables = dict[str, Tensor]
Learned = Callable[[], Mapping[str, Calibration]]
"""What was learned beside adapters, by digest."""


@dataclass(frozen=True, slots=True)
class KeptCalibration:
    """Of one pair. known: what the file says, by table; {} if there is none yet. adapters: the same by digest, the last
    used at the end. writes: this engine keeps it.
    """

    path: Path
    pair: str
    known: Tables
    adapters: dict[str, Tables]
    writes: bool
    _copied: dict[str, Tables] = field(default_factory=dict)  # on their way to the host, "" of the base

    def restore(self, calibration: Calibration, parallel: Parallel) -> dict[str, Calibration]:
        """Begin with what is known, where tables of the file and of this engine have the same depths and ranks.

        Returns what is known of adapters. All ranks begin with what the first read, or with nothing of adapters where
        one has read another file.
        """
        calibration.reset()
        _put(self.known, calibration)
        for name in _KEPT if parallel.size > 1 else ():
            table = getattr(calibration, _KEPT[name])
            table.copy_(parallel.gather(table)[0])
        calibration.logprob_bias.copy_(logprob_bias_of(calibration))
        adapters = self.adapters if self._is_alike(parallel) else {}
        return {digest: _like(calibration, tables) for digest, tables in adapters.items()}

    def _is_alike(self, parallel: Parallel) -> bool:
        """Whether all ranks know the same of adapters."""
        told = json.dumps({digest: _lists(tables) for digest, tables in self.adapters.items()}).encode()
        number = int.from_bytes(sha256(told).digest()[:6])
        return parallel.minimum(number) == -parallel.minimum(-number)

    def after(self, rounds: int, calibration: Calibration, adapters: Learned = dict) -> None:
        """Write the file, now and then, without a wait for the device: of a GPU, what was copied one time before.

        rounds: so many have ended.
        """
        if not self.writes or rounds % EVERY:
            return
        if self._copied and calibration.inv_temp.is_cuda:
            self._write(self._copied)
        self._copied.clear()
        for digest, tables in _kept_of(calibration, adapters()).items():
            self._copied[digest] = {name: _to_host(table) for name, table in tables.items()}
        if not calibration.inv_temp.is_cuda:
            self._write(self._copied)

    def write(self, calibration: Calibration, adapters: Learned = dict) -> None:
        """Replace the file in one step by what is known now; it waits for the rounds that are out."""
        self._write(_kept_of(calibration, adapters()))

    def _write(self, copied: Mapping[str, Tables]) -> None:
        lists = {digest: _lists(tables) for digest, tables in copied.items()}
        told = {"format": _FORMAT, "pair": self.pair, **lists.pop(""), **({"adapters": lists} if lists else {})}
        new = self.path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(told), encoding="utf-8")
        new.replace(self.path)


def _put(tables: Tables, calibration: Calibration) -> None:
    """Into the first classes, depths and ranks, as far as both have them."""
    for name, values in tables.items():
        table = getattr(calibration, _KEPT[name])
        common = tuple(slice(min(a, b)) for a, b in zip(table.shape, values.shape, strict=True))
        table[common] = values[common].to(table.device)


def _like(calibration: Calibration, tables: Tables) -> Calibration:
    """An adapter's, in memory of its own beside an engine's."""
    _, depths, ranks = calibration.seen.shape
    own = make_calibration(depths, ranks, lambda size, kind: calibration.seen.new_zeros(size, dtype=kind))
    _put(tables, own)
    own.logprob_bias.copy_(logprob_bias_of(own))
    return own


def _lists(tables: Tables) -> dict[str, Any]:
    return {name: tables[name].tolist() for name in _KEPT}


def _kept_of(calibration: Calibration, adapters: Mapping[str, Calibration]) -> dict[str, Tables]:
    """Of the classes without an adapter, and of adapters."""
    every = {"": calibration.of_classes(slice(CLASSES)), **adapters}
    return {digest: {name: getattr(each, table) for name, table in _KEPT.items()} for digest, each in every.items()}


def _to_host(table: Tensor) -> Tensor:
    """A copy that is there once the device has come so far."""
    pinned = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
    return pinned.copy_(table, non_blocking=True)


def kept_calibration(config: EngineConfig, target: Path, draft: DrafterSpec, writes: bool) -> KeptCalibration | None:
    """What is kept of a pair; None where the configuration names no folder.

    Raises ConfigError for a folder that cannot be used, a file that is damaged or of another pair, and for none where
    nothing is to be learned.
    """
    flag, folder = "--speculative-calibration-dir", config.speculative_calibration_dir
    if folder is None:
        return None
    pair = pair_fingerprint(target, draft)
    path, learns = Path(folder) / file_name(pair), config.speculative_calibration == "learn"
    try:
        if learns:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.R_OK | os.X_OK | (os.W_OK if learns else 0)):
            raise ConfigError(f"{flag} {folder}: it cannot be {'written' if learns else 'read'}")
        found = read_object(path) if os.path.lexists(path) else None
    except CheckpointError as error:
        raise ConfigError(f"{flag}: {error}; it is damaged: remove it") from None
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: {error.strerror}") from None
    if found is None and not learns:
        raise ConfigError(f"{flag} {folder}: nothing was learned of this pair; use --speculative-calibration learn")
    known, adapters = ({}, {}) if found is None else (_tables(path, pair, found), _adapters(path, found))
    return KeptCalibration(path, pair, known, adapters, learns and writes)


def pair_fingerprint(target: Path, draft: DrafterSpec) -> str:
    """Of a target, its drafter's weights, if it has any, and how it drafts, if not by their logits alone."""
    parts = [fingerprint(folder) for folder in (target, draft.folder) if folder is not None]
    return "-".join(parts if draft.makes_logits else [*parts, type(draft).__name__])


def file_name(pair: str) -> str:
    return f"{pair}.json"


def _tables(path: Path, pair: str, found: Mapping[str, Any]) -> Tables:
    """The tables of a file. Raises ConfigError unless it is whole, and of this pair."""
    flag = f"--speculative-calibration-dir: {path}"
    if found.get("format") != _FORMAT:
        raise ConfigError(f"{flag} has format {shown(found.get('format'))}, this version reads {_FORMAT}; remove it")
    if found.get("pair") != pair:
        raise ConfigError(f"{flag} was learned of the pair {shown(found.get('pair'))}, and this is {pair}; remove it")
    return _read(path, found)


def _adapters(path: Path, found: Mapping[str, Any]) -> dict[str, Tables]:
    """Those of adapters, by digest. Raises ConfigError unless they are whole."""
    every = found.get("adapters", {})
    if not isinstance(every, dict) or not all(isinstance(each, dict) for each in every.values()):
        raise ConfigError(f"--speculative-calibration-dir: {path} is damaged (adapters); remove it")
    return {digest: _read(path, each) for digest, each in every.items()}


def _read(path: Path, found: Mapping[str, Any]) -> Tables:
    flag = f"--speculative-calibration-dir: {path}"
    try:
        tables = {name: torch.tensor(found[name], dtype=torch.float32) for name in _KEPT}
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"{flag} is damaged ({shown(str(error))[1:-1]}); remove it") from None
    if [table.dim() for table in tables.values()] != [2, 2, 3, 3, 3] or any(
        not bool((table.isfinite() & (table >= 0)).all()) for table in tables.values()
    ):
        raise ConfigError(f"{flag} is damaged (its tables are no counts); remove it")
    return tables
