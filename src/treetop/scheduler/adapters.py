"""Which adapters there are, and which of them have a slot of the device: the most recently used.

A row that enters has its adapter's slot for as long as it holds its row; a slot whose adapter no row has may be given
to another, the least recently used first. What that takes is told with the next prefill or import, to all ranks alike.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from treetop.types.errors import ConfigError, InputError, shown
from treetop.types.messages import AdapterEdit


@dataclass(slots=True, eq=False)
class Adapter:
    """number: of all that there ever were, 0 of none. version: of those of this name. slot: 0 for none."""

    name: str
    number: int
    version: int = 1
    slot: int = 0
    used: int = 0

    def salt(self, given: str) -> str:
        """What parts the prefix cache, of what a request brings: a name that was given again means other K/V."""
        return given if self.version == 1 else f"{given}\0{self.version}"


NO_ADAPTER = Adapter("", 0)


class AdapterBooks:
    """names: those that a start has read, in their order, as many in slots as there are. most: in all, 0 where none may
    be loaded later. digest_of: the content of one, by its number, by which other workers know it.
    """

    def __init__(
        self, names: Iterable[str], slots: int, most: int, digest_of: Callable[[int], str] = lambda number: ""
    ) -> None:
        self._digest_of = digest_of
        self._slots: list[Adapter | None] = [None] * slots
        self._most, self._versions, self._clock = most, Counter[str](), 0
        self._by_name, self._edits = dict[str, Adapter](), list[AdapterEdit]()
        self.leaving = list[Adapter]()
        """Removed, while requests have them."""
        self._last = 0
        for name in names:
            adapter = self.add(name, self._last + 1)
            if adapter.number <= slots:
                self._slots[adapter.number - 1], adapter.slot = adapter, adapter.number

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def versions(self) -> tuple[int, ...]:
        """Of `names`."""
        return tuple(adapter.version for adapter in self._by_name.values())

    @property
    def known(self) -> dict[str, int]:
        """The last version of every name that there ever was."""
        return dict(self._versions)

    def restore(self, versions: Mapping[str, int]) -> None:
        """What names have meant in the engine before this one, whose adapters these are."""
        self._versions.update(Counter(dict(versions)) - self._versions)
        for name, adapter in self._by_name.items():
            adapter.version = self._versions[name]

    def named(self, name: str, version: int = 0) -> Adapter:
        """Raises InputError for a name that nobody has any more, or another adapter than meant. version: 0 of any."""
        if not name:
            return NO_ADAPTER
        if name not in self._by_name or version not in (0, self._by_name[name].version):
            raise InputError(f"lora: {shown(name)} is no adapter of this engine: it has been unloaded")
        return self._by_name[name]

    def digest(self, adapter: Adapter) -> str:
        """By which other workers know its content; empty for none."""
        return "" if adapter is NO_ADAPTER else self._digest_of(adapter.number)

    def same(self, name: str, digest: str) -> Adapter:
        """The one that another worker means. Raises InputError, in words for that worker's log."""
        mine, load = self._by_name.get(name), f"load {shown(name)} on both, from the same folder"
        if not name:
            return NO_ADAPTER
        if mine is None:
            known = ", ".join(self._by_name) or "none"
            raise InputError(f"adapter {shown(name)} is not loaded on the prefill worker, which has {known}; {load}")
        if self.digest(mine) != digest:
            raise InputError(f"adapter {shown(name)} has other weights on the prefill worker; unload it and {load}")
        return mine

    # ---------------------------------------------------------------- who there is

    def next_number(self, name: str) -> int:
        """Of an adapter that is to be added. Raises InputError for a name that is taken, ConfigError if none may be."""
        if not self._most:
            raise ConfigError(f"lora_name: {shown(name)}: none can be loaded while it runs; start with --enable-lora")
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise InputError(f"lora_name: {shown(name)}: a name is a text without = and NUL, and not empty")
        if name in self._by_name:
            raise InputError(f"lora_name: {shown(name)} has already been loaded; unload it first")
        if len(self._by_name) >= self._most:
            raise ConfigError(
                f"lora_name: {shown(name)}: {len(self._by_name)} adapters are loaded, --max-cpu-loras {self._most} are"
                " the most; unload one or raise it"
            )
        return self._last + 1

    def check_removable(self, name: str) -> None:
        """Raises InputError for a name that nobody has, ConfigError if none may go."""
        if not self._most:
            raise ConfigError(f"lora_name: {shown(name)}: none can be unloaded while it runs; start with --enable-lora")
        if name not in self._by_name:
            known = ", ".join(self._by_name) or "none"
            raise InputError(f"lora_name: {shown(name)} is no adapter of this engine, which has {known}")

    def add(self, name: str, number: int) -> Adapter:
        self._last = number
        self._versions[name] += 1
        adapter = self._by_name[name] = Adapter(name, number, self._versions[name])
        return adapter

    def remove(self, name: str) -> None:
        """Requests that have it go on with it, until `take_left` gives it."""
        self.leaving.append(self._by_name.pop(name))

    def take_left(self, alive: Collection[Adapter]) -> list[Adapter]:
        """Those that have been removed and that nobody has any more. alive: of all requests, and of rows."""
        left = [each for each in self.leaving if each not in alive]
        for adapter in left:
            self.leaving.remove(adapter)
            if adapter.slot:
                self._slots[adapter.slot - 1] = None
            self._edits = [each for each in self._edits if each.number != adapter.number]
        return left

    # ---------------------------------------------------------------- slots

    def place(self, adapter: Adapter, running: Collection[Adapter]) -> bool:
        """A slot for a row that is about to enter; False while other rows hold all of them. running: who has rows."""
        if adapter is NO_ADAPTER:
            return True
        if not adapter.slot:
            if not self.has_room(adapter, running):
                return False
            slot = min(self._free(running), key=self._last_used)
            old = self._slots[slot - 1]
            if old is not None:
                old.slot = 0
            self._slots[slot - 1], adapter.slot = adapter, slot
            self._edits.append(AdapterEdit(slot, adapter.number))
        self._clock += 1
        adapter.used = self._clock
        return True

    def has_room(self, adapter: Adapter, running: Collection[Adapter]) -> bool:
        """Whether `place` would find a slot."""
        return adapter is NO_ADAPTER or bool(adapter.slot or self._free(running))

    @property
    def in_slots(self) -> set[Adapter]:
        return {each for each in self._slots if each is not None}

    def _free(self, running: Collection[Adapter]) -> list[int]:
        return [slot for slot, each in enumerate(self._slots, 1) if each is None or each not in running]

    def _last_used(self, slot: int) -> int:
        held = self._slots[slot - 1]
        return -1 if held is None else held.used

    def take_edits(self) -> tuple[AdapterEdit, ...]:
        """What has changed since the last plan that was told."""
        edits, self._edits = tuple(self._edits), []
        return edits

    def lose_slots(self) -> None:
        """What the device has of them is not known any more."""
        for adapter in (each for each in self._slots if each is not None):
            adapter.slot = 0
        self._slots, self._edits = [None] * len(self._slots), []
