"""Tables of what was measured on one kind of GPU: how a kernel is launched, which attention backend is the fastest.

A table is a JSON file beside the code that reads it, written by a benchmark: `num_sms` of its GPU, and what was found,
by class (`classes`, by name) or by key (`entries`, each with the fields of its key). It holds for GPUs like the
measured one; elsewhere, and for what has no entry near, a formula of the caller's serves.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any, Generic, TypeVar

from treetop.kernels.triton_guard import GpuTraits

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class TunedTable(Generic[Found]):
    """num_sms: of the GPU that was measured, which has compute capability 9 or higher.
    date: of the run, "" where the file does not say.
    entries: what was found, by the name of a class or a tuple of an entry's key.
    """

    num_sms: int
    date: str
    entries: dict[Any, Found]

    def holds_for(self, gpu: GpuTraits) -> bool:
        return gpu.can_overlap and gpu.num_sms == self.num_sms

    def find(self, key: object, gpu: GpuTraits) -> Found | None:
        """What was measured on a GPU like this one for this very key; None if nothing was."""
        return self.entries.get(key) if self.holds_for(gpu) else None


def read_table(path: Path, made: Callable[[dict[str, Any]], Found], key: Iterable[str] = ()) -> TunedTable[Found]:
    """The committed table at `path`; without entries if there is no such file.

    made: makes an entry's value of its fields.
    key: the fields that are an entry's key, of a table by key.
    """
    if not path.is_file():
        return TunedTable(0, "", {})
    data = json.loads(path.read_text(encoding="utf-8"))
    named = data.get("classes") or {tuple(each[field] for field in key): each for each in data.get("entries", ())}
    return TunedTable(data["num_sms"], data.get("date", ""), {name: made(each) for name, each in named.items()})


def nearest(wanted: str, measured: Iterable[str], *near: tuple[str, ...]) -> str | None:
    """The class among `measured` that is nearest to `wanted` by powers of two of its sizes; None if none has its rest.

    A class is words, of which some are a size's name and number: `tail h8x4x128e2 rows1 n16 keys2048`.

    near: groups of sizes that may differ; those of a group count alike, an earlier group before a later one. Of
        equally near classes the one with the smallest sizes, in this order. All other words are the same.
    """
    names = [name for group in near for name in group]
    rest, ours = parted(wanted, names)
    alike = {name: theirs for name in measured for same, theirs in [parted(name, names)] if same == rest}

    def distance(name: str) -> tuple[list[float], list[int]]:
        theirs = alike[name]
        return [sum(abs(log2(theirs[each] / ours[each])) for each in group) for group in near], [*theirs.values()]

    return min(alike, key=distance, default=None)


def parted(shape_class: str, names: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """The words of a class that are none of these sizes; and the sizes."""
    words = {word: word.rstrip("0123456789") for word in shape_class.split()}
    stems = {stem: word for word, stem in words.items()}
    sizes = {name: int(stems[name].removeprefix(name)) for name in names}
    return [word for word, stem in words.items() if stem not in sizes], sizes
