"""What was learned of the draft beside each adapter, which may fit it less than the base model.

The classes of a slot are the adapter's that has it (`types.sampling.class_of`). One that leaves its slot takes along
what was learned of it, and finds it again; one that is new begins with what is known of the base, as if of few nodes.
"""

from treetop.kernels.tree.calibration import Calibration
from treetop.kernels.tree.learn import PRIOR_NODES
from treetop.types.messages import AdapterEdit
from treetop.types.sampling import CALIBRATED_LORAS, CLASSES


class AdapterCalibrations:
    """Of one engine, in device memory: a few kilobytes an adapter."""

    def __init__(self, calibration: Calibration) -> None:
        self._all, self._base = calibration, calibration.of_classes(slice(CLASSES))
        self._in_slot = dict[int, int]()  # slot -> number
        self._parked = dict[int, Calibration]()  # by number, of those that have no slot

    def begin(self) -> None:
        """What is known of the base is another's: nothing that was learned beside adapters holds any more."""
        self._parked.clear()
        for group in range(1, len(self._all.nodes) // CLASSES):
            self._begin_as_base(group)

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
            self._begin_as_base(edit.slot)

    def forget(self, number: int) -> None:
        """An adapter is unloaded, and its number is never another's."""
        self._parked.pop(number, None)
        self._in_slot = {slot: each for slot, each in self._in_slot.items() if each != number}

    def _of(self, group: int) -> Calibration:
        return self._all.of_classes(slice(group * CLASSES, (group + 1) * CLASSES))

    def _begin_as_base(self, group: int) -> None:
        """Of so few nodes that what its own rows teach soon outweighs them."""
        own = self._of(group)
        own.copy_from(self._base)
        own.sums.zero_()
        few = (PRIOR_NODES / own.nodes.clamp(min=PRIOR_NODES))[:, :, None]
        for table in (own.seen, own.chosen, own.predicted):
            table.mul_(few)
        own.nodes.clamp_(max=PRIOR_NODES)
