"""A model of exchanges by peer memory (`treetop.kernels.comm.peers`), and an explorer of all that can happen in it.

One slot of every rank's mailbox, used again and again. Programs have warps, which go on at any speed; each store is on
its way for any time, and comes in any order with others, until its launch has ended. What a rank does for its use `n`:

    begin   each warp reads the count, and sends its word to the box `count % 2` of every other rank
    look    each warp reads its words of the others, and whether waiting ends
    reduce  all warps together: go on if nothing is missing or one has seen that waiting ends; look again otherwise
    leave   each warp empties its words; the first one stores count + 1; the launch ends when all stores have arrived

Uses are numbered modulo `USES`, so that the states are finite and all of them are seen, however often the slot is used.
Words are tagged with their use: in a sum of the real thing a word says only that it has come.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

USES = 4
"""More than ranks can be apart, and a multiple of the boxes."""
BEGIN, LOOK, REDUCE, LEAVE, DONE = range(5)


class BrokenProtocolError(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Protocol:
    """What is explored. The defaults are the protocol; each of the switches at the end is a way to get it wrong.

    words: of a share, one a warp. numbered: of a gather, whose words come beside the number of their exchange and are
    overwritten; otherwise of a sum, whose boxes are emptied. uses: None for any number; else ranks end after so many.
    deaths: the first rank may die anywhere, and whoever waits may find at any time that it has waited too long.
    """

    ranks: int
    words: int = 1
    numbered: bool = False
    uses: int | None = None
    deaths: bool = False

    boxes: int = 2
    empties: bool = True
    two_look_for_one: bool = False  # more threads than numbers: the second warp looks for the first one's word
    first_counts: tuple[int, ...] = ()
    drains: bool = True  # a launch begins when the stores of the last one have arrived
    leaves_together: bool = True  # warps agree whether one has seen that waiting ends
    agrees: bool = True  # warps agree whether a word is missing
    sends_first: bool = True
    counts: bool = True
    compares: bool = True  # the number of a word
    ends_all: bool = True  # who waited too long says so to its later waits


class Warp(NamedTuple):
    """at: the next step. count: as it read it. missing: a rank that it waits for, or None. ended: what it has seen."""

    at: int = BEGIN
    count: int = 0
    missing: int | None = None
    ended: bool = False


class Rank(NamedTuple):
    """use: of its launch. stores: on their way: ("word", owner, box, word, value), ("count", value), ("ended",).
    late: the use in which it has waited too long."""

    use: int
    count: int
    warps: tuple[Warp, ...]
    stores: frozenset[tuple] = frozenset()
    ended: bool = False
    dead: bool = False
    late: int | None = None


class State(NamedTuple):
    """boxes: by (owner, box, sender, word) the use that a word is of, None where nothing is."""

    ranks: tuple[Rank, ...]
    boxes: tuple[int | None, ...]


class Model:
    """The steps of a protocol, from state to state."""

    def __init__(self, protocol: Protocol) -> None:
        self.p = protocol
        self.warps = protocol.words + protocol.two_look_for_one
        self.modulus = USES if protocol.uses is None else protocol.uses + 1

    def first(self) -> State:
        counts = self.p.first_counts or (0,) * self.p.ranks
        ranks = tuple(Rank(0, count, (Warp(),) * self.warps) for count in counts)
        return State(ranks, (None,) * (self.p.ranks * self.p.boxes * self.p.ranks * self.p.words))

    def cell(self, owner: int, box: int, sender: int, word: int) -> int:
        return ((owner * self.p.boxes + box) * self.p.ranks + sender) * self.p.words + word

    def others(self, rank: int) -> list[int]:
        return [peer for peer in range(self.p.ranks) if peer != rank]

    def is_home(self, state: State) -> bool:
        """All living ranks have ended their uses; without a number of uses: all are about to begin the same one."""
        alive = [rank for rank in state.ranks if not rank.dead]
        if self.p.uses is not None:
            return all(rank.use == self.p.uses for rank in alive)
        fresh = (Warp(),) * self.warps
        return all(rank.use == alive[0].use and not rank.stores and rank.warps == fresh for rank in alive)

    def steps(self, state: State) -> Iterator[State]:
        """All states that one thing leads to. Raises BrokenProtocolError."""
        for index, rank in enumerate(state.ranks):
            for store in rank.stores:
                yield self._arrives(state, index, store)
            if rank.dead or rank.use == self.p.uses:
                continue
            if self.p.deaths and index == 0:
                yield self._with(state, index, rank._replace(dead=True))
            for number, warp in enumerate(rank.warps):
                yield from self._warp(state, index, number, warp)
            if self.p.agrees and all(warp.at == REDUCE for warp in rank.warps):
                yield from self._reduce(state, index, range(self.warps))
            ended = all(warp.at == DONE for warp in rank.warps)
            if ended and not (self.p.drains and rank.stores):
                use = (rank.use + 1) % self.modulus
                yield self._with(state, index, rank._replace(use=use, warps=(Warp(),) * self.warps))

    def _warp(self, state: State, index: int, number: int, warp: Warp) -> Iterator[State]:
        rank = state.ranks[index]
        if warp.at == BEGIN:
            warp, sent = warp._replace(at=LOOK, count=rank.count), ()
            if self.p.sends_first:
                sent = self._sends(index, number, rank)
            yield self._with(state, index, self._moved(rank, number, warp, sent))
        elif warp.at == LOOK:
            missing = self._missing(state, index, number, warp)
            yield self._with(state, index, self._moved(rank, number, Warp(REDUCE, warp.count, missing, rank.ended)))
        elif warp.at == REDUCE and not self.p.agrees:
            yield from self._reduce(state, index, [number])
        elif warp.at == LEAVE:
            stores: tuple[tuple, ...] = () if self.p.sends_first else self._sends(index, number, rank)
            if self.p.empties and not self.p.numbered and number < self.p.words:
                box = warp.count % self.p.boxes
                stores += tuple(("word", index, box, peer, number, None) for peer in self.others(index))
            if number == 0 and self.p.counts:
                stores += (("count", (warp.count + 1) % USES),)
            yield self._with(state, index, self._moved(rank, number, Warp(DONE), stores))

    def _sends(self, index: int, number: int, rank: Rank) -> tuple[tuple, ...]:
        if number >= self.p.words:
            return ()
        box = rank.count % self.p.boxes
        return tuple(("word", peer, box, index, number, rank.use) for peer in self.others(index))

    def _missing(self, state: State, index: int, number: int, warp: Warp) -> int | None:
        """The last rank whose word has not come, as a warp finds it. What has come must be of this use."""
        word, use, missing = min(number, self.p.words - 1), state.ranks[index].use, None
        sound = not any(rank.ended or rank.late is not None for rank in state.ranks)
        for peer in self.others(index):
            came = state.boxes[self.cell(index, warp.count % self.p.boxes, peer, word)]
            if came is None or (self.p.numbered and self.p.compares and came != use):
                missing = peer
            elif sound and came != use:
                raise BrokenProtocolError(f"rank {index} takes a word of use {came} for one of {use}")
        return missing

    def _reduce(self, state: State, index: int, numbers: range | list[int]) -> Iterator[State]:
        """What these warps do when all of them have looked."""
        rank, warps = state.ranks[index], list(state.ranks[index].warps)
        missing = [warps[number].missing for number in numbers if warps[number].missing is not None]
        seen = [number for number in numbers if warps[number].ended]
        if seen and not self.p.leaves_together and len(seen) < len(numbers) and missing:
            for number in seen:  # these go, and the others meet without them
                warps[number] = warps[number]._replace(at=LEAVE)
            yield self._with(state, index, rank._replace(warps=tuple(warps)))
            return
        goes = bool(seen) or not missing
        for number in numbers:
            warps[number] = Warp(LEAVE if goes else LOOK, warps[number].count)
        again = rank._replace(warps=tuple(warps))
        yield self._with(state, index, again)
        if not goes and self.p.deaths:  # or it has waited too long
            stores = rank.stores | {("ended",)} if self.p.ends_all and not rank.ended else rank.stores
            if rank.late not in (None, rank.use):
                raise BrokenProtocolError(f"rank {index} waits in use {rank.use}, though it gave up in use {rank.late}")
            late = rank.use if rank.late is None else rank.late
            yield self._with(state, index, again._replace(stores=stores, late=late))

    def _arrives(self, state: State, index: int, store: tuple) -> State:
        rank = state.ranks[index]
        rank = rank._replace(stores=rank.stores - {store})
        if store[0] == "count":
            return self._with(state, index, rank._replace(count=store[1]))
        if store[0] == "ended":
            return self._with(state, index, rank._replace(ended=True))
        _, owner, box, sender, word, value = store
        cell = self.cell(owner, box, sender, word)
        if not any(each.ended or each.late is not None for each in state.ranks):
            self._check(state, owner, state.boxes[cell], value)
        boxes = (*state.boxes[:cell], value, *state.boxes[cell + 1 :])
        return self._with(state._replace(boxes=boxes), index, rank)

    def _check(self, state: State, owner: int, was: int | None, value: int | None) -> None:
        """A word comes into a box that is empty, or whose word its owner has used up; what is emptied was full."""
        reader = state.ranks[owner]
        waits = was == reader.use and any(warp.at < LEAVE for warp in reader.warps)
        if was is not None and waits:
            raise BrokenProtocolError(f"a word of use {was} goes before rank {owner} has read it")
        if not self.p.numbered and (was is None) == (value is None):
            raise BrokenProtocolError(f"rank {owner}: a box with {was} gets {value}")

    def _moved(self, rank: Rank, number: int, warp: Warp, stores: tuple[tuple, ...] = ()) -> Rank:
        warps = (*rank.warps[:number], warp, *rank.warps[number + 1 :])
        return rank._replace(warps=warps, stores=rank.stores | {*stores})

    @staticmethod
    def _with(state: State, index: int, rank: Rank) -> State:
        return state._replace(ranks=(*state.ranks[:index], rank, *state.ranks[index + 1 :]))


def explore(protocol: Protocol, most: int = 1_000_000) -> int:
    """See every state that a protocol can come to; how many there are.

    Raises BrokenProtocolError if an invariant fails in one, or if from one of them no way leads home: then somebody
    waits for ever.
    """
    model = Model(protocol)
    first = model.first()
    numbers, order = {first: 0}, [first]
    before: list[list[int]] = [[]]
    for at, state in enumerate(order):  # which grows
        for after in model.steps(state):
            number = numbers.get(after)
            if number is None:
                number = numbers[after] = len(order)
                order.append(after)
                before.append([])
                if number > most:
                    raise AssertionError(f"more than {most} states")
            before[number].append(at)
    homes = [number for number, state in enumerate(order) if model.is_home(state)]
    reached = set(homes)
    while homes:
        for number in before[homes.pop()]:
            if number not in reached:
                reached.add(number)
                homes.append(number)
    if len(reached) < len(order):
        stuck = next(state for number, state in enumerate(order) if number not in reached)
        raise BrokenProtocolError(f"no way leads home from {stuck}")
    return len(order)


def wrong(protocol: Protocol, **changes) -> Protocol:
    """The protocol with a mistake."""
    return replace(protocol, **changes)
