"""What requests ask for that no answer depends on, and fields that nobody knows: taken, and told in the log.

Agents send both with every request, so each is told once.
"""

import logging
from contextvars import ContextVar

_log = logging.getLogger("treetop.api")
_MOST_TOLD, _LONGEST = 256, 100
_told: set[str] = set()

UNKNOWN_LEFT_OUT: ContextVar[bool] = ContextVar("UNKNOWN_LEFT_OUT", default=False)
"""Whether unknown fields of the body that is being read are left out: `--ignore-unknown-fields`."""


def left_out(what: str, why: str) -> None:
    """Log, once a process, that a request's `what` is without effect. what: cut off where it is long, for a client may
    have chosen it.
    """
    what = what[:_LONGEST]
    if what in _told or len(_told) >= _MOST_TOLD:
        return
    _told.add(what)
    _log.warning("%s: %s; told once", what, why)
