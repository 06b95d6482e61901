"""The phases of a step, by name."""

from enum import StrEnum


class Phase(StrEnum):
    """What the engine is doing; a decode round is DRAFT, VERIFY, EXTEND in this order."""

    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"
    EXTEND = "extend"
