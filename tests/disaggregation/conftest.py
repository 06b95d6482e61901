"""For workers of both roles in this process, which may stand still for long."""

import pytest

from treetop.disaggregation import sockets


@pytest.fixture(autouse=True)
def patient_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that was on its way when the process stood still is no end of a session.

    Processes of their own have those of production.
    """
    monkeypatch.setattr(sockets, "HEARTBEAT_TIMEOUT_MS", 60_000)
