"""A sweep as one HTML file that needs nothing else: measured times against their floor, as SVG."""

import html
import json
import math
from collections.abc import Sequence

from treetop.bench.axes import ticks_of
from treetop.bench.rounds import Figures, RoundsReport

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 460, 70, 220, 30, 50
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b58900", "#2a9d8f", "#8d5524", "#555555")
STYLES = (("wall", ""), ("device", "7 4"), ("floor", "2 4"))
"""What is drawn of a case, and its line's dashes."""

Line = tuple[str, str, str, list[tuple[float, float]]]
"""Name, colour, dashes, points."""


def page(report: RoundsReport) -> str:
    """The page: what was measured on, the plot, the figures as a table and as JSON."""
    axis = axis_of(report.figures)
    rows = "\n".join([Figures.HEADER, *(figures.row() for figures in report.figures)])
    return (
        "<!doctype html><meta charset='utf-8'><title>treetop bench</title>"
        "<style>body{font:14px sans-serif;margin:2em}pre{font-size:12px}</style>"
        f"<h1>treetop bench</h1><p>{html.escape(report.machine.sentence())}</p><p>{html.escape(report.checked)}</p>"
        f"{svg(lines_of(report.figures, axis), axis)}<pre>{html.escape(rows)}</pre>"
        f"<script type='application/json' id='data'>{json.dumps(report.as_json()).replace('<', chr(92) + 'u003c')}"
        "</script>"
    )


def axis_of(figures: Sequence[Figures]) -> str:
    """What varies along x: the prompt length if it does, else the batch if it does, else the number of nodes."""
    for name in ("length", "batch"):
        if len({getattr(each, name) for each in figures}) > 1:
            return name
    return "nodes"


def lines_of(figures: Sequence[Figures], axis: str) -> list[Line]:
    """Three lines (wall, device, floor) a series; a series is what does not vary along x."""
    series: dict[tuple[object, ...], list[Figures]] = {}
    for each in figures:
        key: tuple[object, ...] = (
            () if axis == "nodes" else (each.shape, each.batch if axis == "length" else each.length)
        )
        series.setdefault(key, []).append(each)
    lines: list[Line] = []
    for index, (fixed, members) in enumerate(series.items()):
        name = "all shapes" if not fixed else f"{fixed[0]}, {'B' if axis == 'length' else 'input'} {fixed[1]}"
        for kind, dashes in STYLES:
            points = sorted((_x(each, axis), getattr(each, f"{kind}_ms")) for each in members)
            lines.append((f"{name}: {kind}", COLOURS[index % len(COLOURS)], dashes, points))
    return lines


def svg(lines: Sequence[Line], axis: str) -> str:
    """Lines over a logarithmic x and a y in milliseconds that starts at 0."""
    xs = sorted({x for *_, points in lines for x, _ in points})
    ticks = ticks_of(max(y for *_, points in lines for _, y in points))
    top = ticks[-1]
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' xmlns='http://www.w3.org/2000/svg' font-size='11'>"]
    for tick in ticks:
        _, y = at(xs[0], tick)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{tick:g}</text>")
    for x in xs:
        left, bottom = at(x, 0)
        parts.append(f"<text x='{left:.1f}' y='{bottom + 16:.1f}' text-anchor='middle'>{x:g}</text>")
    for index, (name, colour, dashes, points) in enumerate(lines):
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        stroke = f"stroke='{colour}' stroke-dasharray='{dashes}'"
        parts.append(f"<polyline fill='none' stroke-width='2' points='{drawn}' {stroke}/>")
        parts += [
            f"<circle r='2.5' cx='{pair.split(',')[0]}' cy='{pair.split(',')[1]}' fill='{colour}'/>"
            for pair in drawn.split()
        ]
        y = TOP + 16 * index
        parts.append(
            f"<line x1='{WIDTH - RIGHT + 12}' x2='{WIDTH - RIGHT + 40}' y1='{y}' y2='{y}' stroke-width='2' {stroke}/>"
        )
        parts.append(f"<text x='{WIDTH - RIGHT + 46}' y='{y + 4}'>{html.escape(name)}</text>")
    words = {"length": "prompt tokens", "batch": "requests decoded together", "nodes": "nodes verified (T)"}[axis]
    parts.append(f"<text x='{(LEFT + WIDTH - RIGHT) / 2:.0f}' y='{HEIGHT - 12}' text-anchor='middle'>{words}</text>")
    parts.append(
        f"<text x='14' y='{HEIGHT / 2:.0f}' transform='rotate(-90 14 {HEIGHT / 2:.0f})'>ms a round</text></svg>"
    )
    return "".join(parts)


def _x(figures: Figures, axis: str) -> float:
    return float(figures.shape[2] if axis == "nodes" else getattr(figures, axis))
