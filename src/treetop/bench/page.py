"""What pages of `treetop bench` share: one HTML file that needs nothing else, a chart of lines as SVG, the figures."""

import html
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from treetop.types.config import check_writable
from treetop.types.errors import ConfigError

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 460, 80, 220, 30, 50
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b58900", "#2a9d8f", "#8d5524", "#555555")
STYLE = (
    "body{font:14px sans-serif;margin:2em}pre{font-size:12px;white-space:pre-wrap}"
    "td,th{padding:2px 10px;text-align:right}table{border-collapse:collapse}tr{border-bottom:1px solid #ddd}"
)


class Curve(NamedTuple):
    """Points that are joined. name: "" has no entry beside the chart. marks: words beside each point."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashes: str = ""
    marks: Sequence[str] = ()


def check_path(path: Path) -> None:
    """Raise ConfigError, before anything is measured, if the plot cannot be written."""
    if path.suffix != ".html":
        raise ConfigError(f"--plot {path}: the plot is an HTML page; name a file that ends in .html")
    check_writable(path, "--plot")


def page(title: str, *parts: str, data: Any = None, style: str = STYLE, head: str = "") -> str:
    """parts: HTML, one below the other. data: the figures, which go with it as JSON. head: more of the page's head."""
    text = json.dumps(data).replace("<", "\\u003c")
    script = "" if data is None else f"<script type='application/json' id='data'>{text}</script>"
    start = f"<!doctype html><html lang='en'><meta charset='utf-8'>{head}<title>{html.escape(title)}</title>"
    return f"{start}<style>{style}</style>{''.join(parts)}{script}</html>"


def element(tag: str, text: str) -> str:
    return f"<{tag}>{html.escape(text)}</{tag}>"


def chart(lines: Sequence[Curve], across: str, up: str, logarithmic: bool = False) -> str:
    """Lines over an x that starts at 0, or is logarithmic with the values there are as ticks, and a y from 0.

    across, up: what x and y are.
    """
    xs = sorted({x for line in lines for x, _ in line.points})
    ticks = ticks_of(max(y for line in lines for _, y in line.points))
    x_ticks = xs if logarithmic else ticks_of(xs[-1])
    scale: Callable[[float], float] = math.log2 if logarithmic else float
    low, high = scale(x_ticks[0]), scale(x_ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' xmlns='http://www.w3.org/2000/svg' font-size='11'>"]
    for tick in ticks:
        _, y = at(x_ticks[0], tick)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{tick:g}</text>")
    for tick in x_ticks:
        x, bottom = at(tick, 0)
        parts.append(f"<text x='{x:.1f}' y='{bottom + 16:.1f}' text-anchor='middle'>{tick:g}</text>")
    for number, line in enumerate(lines):
        drawn = [at(*point) for point in line.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        stroke = f"stroke='{line.colour}' stroke-dasharray='{line.dashes}' stroke-width='2'"
        parts.append(f"<polyline fill='none' points='{joined}' {stroke}/>")
        parts += [f"<circle r='2.5' cx='{x:.1f}' cy='{y:.1f}' fill='{line.colour}'/>" for x, y in drawn]
        for (x, y), mark in zip(drawn, line.marks, strict=False):
            parts.append(f"<text x='{x + 5:.1f}' y='{y - 5:.1f}'>{html.escape(mark)}</text>")
        if line.name:
            y, left = TOP + 16 * number, WIDTH - RIGHT
            parts.append(f"<line x1='{left + 12}' x2='{left + 40}' y1='{y}' y2='{y}' {stroke}/>")
            parts.append(f"<text x='{left + 46}' y='{y + 4}'>{html.escape(line.name)}</text>")
    parts.append(f"<text x='{(LEFT + WIDTH - RIGHT) / 2:.0f}' y='{HEIGHT - 12}' text-anchor='middle'>{across}</text>")
    middle = f"{HEIGHT / 2:.0f}"
    parts.append(f"<text x='14' y='{middle}' transform='rotate(-90 14 {middle})'>{up}</text></svg>")
    return "".join(parts)


def ticks_of(maximum: float) -> list[float]:
    """Round numbers from 0 to the first that is not below `maximum` > 0; at most seven."""
    power = 10.0 ** math.floor(math.log10(maximum))
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if maximum <= 6 * step)
    return [step * tick for tick in range(math.ceil(maximum / step) + 1)]
