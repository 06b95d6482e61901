"""Faults of requests that go on with another engine, put back by name."""

from collections.abc import Sequence

from treetop.distributed.journal import resumed
from treetop.types.requests import EngineRequest
from treetop_debug.faults import Fault
from treetop_debug.patching import instead


def one_token_short(request: EngineRequest, received: Sequence[int], timeout_s: float | None) -> EngineRequest:
    """The next engine does not know of the last token that the client has."""
    return _real(request, received[:-1], timeout_s)


def none_received(request: EngineRequest, received: Sequence[int], timeout_s: float | None) -> EngineRequest:
    """The next engine begins anew."""
    return _real(request, (), timeout_s)


def one_token_more(request: EngineRequest, received: Sequence[int], timeout_s: float | None) -> EngineRequest:
    """The next engine is told of a token that never reached the client."""
    return _real(request, (*received, *received[-1:]), timeout_s)


_real = resumed
_RESUMED = "treetop.distributed.journal:resumed"
_GUARD = "its client has"

RESUME_FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "repeated-token",
            "a resumed stream repeats the token that came last",
            (instead(_RESUMED, one_token_short),),
            _GUARD,
            None,
        ),
        Fault("begun-anew", "a resumed stream begins again", (instead(_RESUMED, none_received),), _GUARD, None),
        Fault("lost-token", "a resumed stream leaves a token out", (instead(_RESUMED, one_token_more),), _GUARD, None),
    )
}
