"""Changes of engines side by side: one that ends between preparing and taking it is followed by one that takes it."""

import asyncio
from types import SimpleNamespace

import pytest

from treetop.distributed.client import EngineProcessClient, has_taken
from treetop.types.changes import LoadLora, Sleep, UnloadLora, UpdateWeights, WakeUp
from treetop.types.errors import ConfigError, EngineError

LOAD = LoadLora("it", "folder")


class Side:
    """An engine that says what it is told to."""

    def __init__(self, fails=(), loras=()):
        self.fails, self.told, self.num_restarts = list(fails), [], 0
        self.links = [SimpleNamespace(info=SimpleNamespace(loras=loras, asleep=()))]

    async def change(self, change, stage):
        self.told.append(stage)
        if self.fails and self.fails[0][0] == stage:
            raise self.fails.pop(0)[1]

    async def another(self, restarts):
        self.told.append("another")


def changed(*sides, change=LOAD):
    client = EngineProcessClient(num_engines=len(sides))
    client.close()
    client.engines = list(sides)
    return asyncio.run(client.change(change))


def test_one_that_ended_before_it_took_it_takes_it_after_the_others():
    first, second = Side([("commit", EngineError("gone"))]), Side()
    changed(first, second)
    assert first.told == ["prepare", "commit", "another", "prepare", "commit"]
    assert second.told == ["prepare", "commit"]


def test_one_that_has_it_already_as_it_starts_is_not_asked_twice():
    first = Side([("commit", EngineError("gone"))], loras=("it",))
    changed(first)
    assert first.told == ["prepare", "commit", "another"]


def test_where_one_refuses_all_drop_it_whatever_dropping_says():
    first, second, third = Side([("drop", EngineError("gone"))]), Side([("prepare", ConfigError("no"))]), Side()
    with pytest.raises(ConfigError, match="no"):
        changed(first, second, third)
    assert (first.told, second.told, third.told) == (["prepare", "drop"], ["prepare", "drop"], [])


def test_what_an_engine_has_taken():
    info = SimpleNamespace(loras=("it",), asleep=("kv_cache",))
    taken = LOAD, Sleep(), WakeUp(("weights",)), UnloadLora("other")
    assert all(has_taken(change, info) for change in taken)
    assert not any(has_taken(change, info) for change in (UnloadLora("it"), WakeUp(None), UpdateWeights()))
