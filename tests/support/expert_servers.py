"""Servers whose ranks share experts."""

from support.serving import command_of

OPTIONS = {"graphs": "sim", "overlap": True, "context_length": 256}


def ranks_of(server) -> list[int]:
    """Process ids of its ranks, in their order."""
    ranks = [pid for pid in server.children() if "engine_process" in command_of(pid)]
    assert len(ranks) == 2
    return ranks
