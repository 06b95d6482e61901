"""What the plots share: round numbers along an axis, and where a page may go."""

import math
from pathlib import Path

from treetop.types.config import check_writable
from treetop.types.errors import ConfigError


def check_path(path: Path) -> None:
    """Raise ConfigError, before anything is measured, if the plot cannot be written."""
    if path.suffix != ".html":
        raise ConfigError(f"--plot {path}: the plot is an HTML page; name a file that ends in .html")
    check_writable(path, "--plot")


def ticks_of(maximum: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `maximum` > 0; at most seven."""
    power = 10.0 ** math.floor(math.log10(maximum))
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if maximum <= 6 * step)
    return [step * tick for tick in range(math.ceil(maximum / step) + 1)]
