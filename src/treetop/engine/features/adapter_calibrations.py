"""What was learned of the draft beside each adapter, which may fit it less than the base model.

The classes of a slot are the adapter's that has it (`types.sampling.class_of`). One that leaves its slot takes along
what was learned of it, and finds it again; one that is new begins with what an engine before has learned of it, or else
with what is known of the base, as if of few nodes.
"""

from collections.abc import Mapping
from types import MappingProxyType

from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.learn import PRIOR_NODES
from treetop.types.messages import AdapterEdit
from treetop.types.sampling import CALIBRATED_LORAS, CLASSES


class AdapterCalibrations:
    """Of one engine, in device memory: a few kilobytes an adapter.

    digests: by the numbers of adapters, under which what is learned of them is kept; of those that have one.
    """

    def __init__(self, calibration: Calibration, digests: Mapping[int, str] = MappingProxyType({})) -> None:
        self._all, self._base, self._digests = calibration, calibration.of_classes(slice(CLASSES)), digests
        self._known = dict[str, Calibration]()  # by digest, the last used at the end
        self._in_slot = dict[int, int]()  # slot -> number
        self._parked = dict[int, Calibration]()  # by number, of those that have no slot

    def begin(self, known: Mapping[str, Calibration] = MappingProxyType({})) -> None:
        """What is known of the base is another's: nothing that was learned beside adapters holds any more.

        known: what is, by digest.
        """
        self._parked.clear()
        self._known = dict(known)
        for group in range(1, len(self._all.nodes) // CLASSES):
            self._begin(group, self._in_slot.get(group) if group < CALIBRATED_LORAS else None)

    def enter(self, edit: AdapterEdit) -> None:
        """A slot is another adapter's. Slots that share their classes with others teach and know them together."""
        for slot in [slot for slot, number in self._in_slot.items() if slot == edit.slot or number == edit.number]:
            number = self._in_slot.pop(slot)
            if slot < CALIBRATED_LORAS:
                self._parked[number] = self._of(slot).copy()
        self._in_slot[edit.slot] = edit.number
        if edit.slot >= CALIBRATED_LORAS:
            return
        if edit.number in self._parked:
            self._of(edit.slot).copy_from(self._parked.pop(edit.number))
        else:
            self._begin(edit.slot, edit.number)

    def forget(self, number: int) -> None:
        """An adapter is unloaded, and its number is never another's; it may come again, by its digest."""
        digest = self._digests.get(number, "")
        own = self.learned.get(digest)
        if own is not None:
            self._known.pop(digest, None)
            self._known = dict([*self._known.items(), (digest, own.copy())][-CALIBRATED_LORAS:])
        self._parked.pop(number, None)
        self._in_slot = {slot: each for slot, each in self._in_slot.items() if each != number}

    @property
    def learned(self) -> dict[str, Calibration]:
        """By digest, the last used at the end: of as many adapters at most as have classes of their own."""
        found, own = dict(self._known), dict(self._parked)
        own |= {number: self._of(slot) for slot, number in self._in_slot.items() if slot < CALIBRATED_LORAS}
        for number, calibration in own.items():
            if number in self._digests:
                found.pop(self._digests[number], None)
                found[self._digests[number]] = calibration
        return dict([*found.items()][-CALIBRATED_LORAS:])

    def _of(self, group: int) -> Calibration:
        return self._all.of_classes(slice(group * CLASSES, (group + 1) * CLASSES))

    def _begin(self, group: int, number: int | None) -> None:
        """With what is known of an adapter, or as the base, of so few nodes that what its own rows teach soon outweighs
        them."""
        own, known = self._of(group), None if number is None else self._known.get(self._digests.get(number, ""))
        if known is not None:
            own.copy_from(known)
            return
        own.copy_from(self._base)
        own.sums.zero_()
        few = (PRIOR_NODES / own.nodes.clamp(min=PRIOR_NODES))[:, :, None]
        for table in (own.seen, own.chosen, own.predicted):
            table.mul_(few)
        own.nodes.clamp_(max=PRIOR_NODES)
