"""Every Triton kernel of the table of operations, for what counts, checks or compiles them all."""

from typing import Any

from treetop.kernels.table import operations


def all_kernels() -> dict[str, Any]:
    """By module and name, sorted."""
    found = {place_of(kernel): kernel for op in operations().values() for kernel in op.launches}
    return dict(sorted(found.items()))


def place_of(kernel: Any) -> str:
    """A kernel's module and name; two modules may use one name."""
    function = getattr(kernel, "fn", kernel)
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
