"""Fixtures of the frozen suite: the checkpoints, and what takes long started early, beside the runs."""

import subprocess
from collections.abc import Iterator

import pytest

from frozen.checkpoints import Pair, write_all
from frozen.command_line import FAULTS, start

TABLE_OF_FAULTS = "test_each_fault_is_caught_by_its_guard"


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> dict[str, Pair]:
    return write_all(tmp_path_factory.mktemp("frozen"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The table of faults is asked for last: a process of its own makes it meanwhile."""
    items.sort(key=lambda item: item.name == TABLE_OF_FAULTS)


@pytest.fixture(scope="session", autouse=True)
def doctor(request) -> Iterator[subprocess.Popen[str] | None]:
    """`treetop doctor --faults`, started with the first test of the suite if its table will be asked for."""
    if not any(item.name == TABLE_OF_FAULTS for item in request.session.items):
        yield None
        return
    process = start(FAULTS)
    yield process
    process.kill()
    process.communicate()
