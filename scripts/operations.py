"""Writes `docs/operations.md` from the table of operations (`kernels/table.py`).

python scripts/operations.py
"""

import inspect
from pathlib import Path

from treetop.kernels.table import Op, operations
from treetop_debug.kernels import place_of

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
HEAD = """# Operations

Written by `python scripts/operations.py` from `src/treetop/kernels/table.py`; a test compares. Every operation has a
reference in plain tensor operations, which runs anywhere, and a kernel. An engine takes the kernel where it serves,
once, when it is made. The tolerance is how far the two may differ in float32, as a share of the largest
value. 0 is equal bits.

| operation | what it does | code | Triton kernels | tolerance | kernel where |
|---|---|---|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(map(_line, operations().values()))


def _line(op: Op) -> str:  # type: ignore[type-arg]  # of any function
    what = _first_sentence(op.reference)
    module = op.kernel.__module__.replace(".", "/")
    launches = ", ".join(f"`{place_of(kernel).rpartition('.')[2]}`" for kernel in op.launches) or "none"
    tolerance = f"{op.tolerance:g}" if op.tolerance else "0"
    return f"| `{op.name}` | {what} | `src/{module}.py` | {launches} | {tolerance} | {_first_sentence(op.applies)} |\n"


def _first_sentence(function: object) -> str:
    """Of a docstring, up to its first full stop that ends a line or is followed by a space."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
