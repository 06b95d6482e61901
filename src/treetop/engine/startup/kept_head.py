"""How often a head's proposals hold, as numbers by depth: what was learned of a pair here, what the head's folder says,
or a default.

A file has `acceptance`, of the best proposal at depth 1, 2, ..., and `share`, what each further proposal takes of what
those before it leave. Profiles of acceptance have both (`speculative.profile`), so one may lie in a folder as it is.
What is learned goes to the user's cache folder, by target and head: a folder of a model is its publisher's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treetop.checkpoints.json_file import read_object
from treetop.engine.startup.kept_calibration import pair_fingerprint
from treetop.engine.startup.plan import EnginePlan
from treetop.types.cache_files import cache_file, keep, kept
from treetop.types.costs import HeadAcceptance
from treetop.types.errors import CheckError, CheckpointError, shown

FILE = "acceptance.json"
"""In the folder of a head, or of a target whose own layers draft."""


@dataclass(frozen=True, slots=True)
class KeptHead:
    """What is thought of a pair's head at a start. file: where what is learned goes; None keeps nothing."""

    acceptance: HeadAcceptance = field(default_factory=HeadAcceptance)
    pair: str = ""
    file: Path | None = None

    def keep(self, learned: HeadAcceptance) -> None:
        """For the next start of this pair."""
        if self.file is not None:
            numbers = {"chances": learned.best, "share": learned.share}
            keep(self.file, json.dumps({"pair": self.pair, "source": "learned in service", **numbers}))


def kept_head(engine_plan: EnginePlan, writes: bool) -> KeptHead:
    """What an engine that chooses shapes starts with. writes: this one keeps what it learns.

    Raises CheckpointError for a file in the head's folder that is no profile, and CheckError, at check level 1, if what
    was learned is another pair's. A simulated head, or one of random weights, is a head that nobody knows.
    """
    config, draft = engine_plan.config, engine_plan.draft
    if draft is None or config.simulates or engine_plan.place.dummy:
        return KeptHead()
    pair = pair_fingerprint(engine_plan.target.folder, draft)
    file = head_file(pair)
    own = file if writes else None
    learned = kept(file)
    acceptance = _accept_probs_of(learned, "of a head as it was here")
    if acceptance is not None:
        if config.check_level >= 1 and learned["pair"] != pair:
            raise CheckError(f"what is kept of a head's acceptance in {file} is of the pair {shown(learned['pair'])}")
        return KeptHead(acceptance, pair, own)
    published = (draft.folder or engine_plan.target.folder) / FILE
    if not published.exists():
        return KeptHead(HeadAcceptance(), pair, own)
    acceptance = _accept_probs_of({"pair": pair, **read_object(published)}, f"of a head as {FILE} of its folder says")
    if acceptance is None:
        raise CheckpointError(
            f"{published}: no chances of a head: `chances` must be a list of numbers, by depth, and `share` a number,"
            " all above 0 and below 1; correct it or remove it"
        )
    return KeptHead(acceptance, pair, own)


def head_file(pair: str) -> Path:
    """Where what was learned of a pair is kept."""
    return cache_file("acceptance", pair)


def _accept_probs_of(held: Any, source: str) -> HeadAcceptance | None:
    """None for what is no such file."""
    if not isinstance(held, Mapping) or not isinstance(held.get("pair"), str):
        return None
    listed, share = held.get("chances"), held.get("share")
    if not isinstance(listed, list) or not listed:
        return None
    numbers = [float(each) for each in (*listed, share) if isinstance(each, int | float) and 0 < each < 1]
    return HeadAcceptance(tuple(numbers[:-1]), numbers[-1], source) if len(numbers) == len(listed) + 1 else None
