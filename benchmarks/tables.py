"""Tables of measurements that are committed as JSON: how a run's classes join those of earlier runs."""

import json
from collections.abc import Collection
from typing import Any

Table = dict[str, Any]


def join_backends(old: Table, new: Table, tried: Collection[str]) -> Table:
    """Timings by class and backend: those of `old`, with what this run found for the backends that it tried.

    A class keeps the backends that were not tried. One that was tried and is not in `new` gave wrong results, and goes.
    """
    kept = {name: {each: timing for each, timing in row.items() if each not in tried} for name, row in old.items()}
    return {**old, **{name: {**kept.get(name, {}), **row} for name, row in new.items()}}


def text_of(head: Table, classes: Table) -> str:
    """The file: `head`'s fields, then `classes`, one a line and sorted."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(classes.items()))
    text = json.dumps(head, indent=1)[:-2] + ',\n "classes": {\n' + lines + "\n }\n}\n"
    json.loads(text)
    return text
