"""Runs of `treetop bench serve` as one HTML file that needs nothing else: what a user gets against what all get."""

import html
import json
from dataclasses import asdict

from treetop.bench.axes import ticks_of
from treetop.bench.serve import LoadReport, Point, point_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 80, 40, 30, 50
COLOUR = "#1b6ca8"


def page(report: LoadReport) -> str:
    """The plot, the figures as text and as JSON."""
    points = [point for point in report.points if point.tokens_per_s_user is not None]
    text = "\n".join(point_text(point) for point in report.points)
    data = json.dumps(asdict(report)).replace("<", "\\u003c")
    return (
        "<!doctype html><meta charset='utf-8'><title>treetop bench serve</title>"
        "<style>body{font:14px sans-serif;margin:2em}pre{font-size:12px}</style>"
        f"<h1>{html.escape(report.model)}</h1><p>{html.escape(str(report.options['base_url']))}</p>"
        f"{svg(points) if points else ''}<pre>{html.escape(text)}</pre>"
        f"<script type='application/json' id='data'>{data}</script>"
    )


def svg(points: list[Point]) -> str:
    """A line through the runs: tokens a second of one user along x, of all along y; each with its concurrency."""
    pairs = [(point.tokens_per_s_user or 0.0, point.tokens_per_s) for point in points]
    xs, ys = ticks_of(max(x for x, _ in pairs)), ticks_of(max(y for _, y in pairs))

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = x / xs[-1] * (WIDTH - LEFT - RIGHT), y / ys[-1] * (HEIGHT - TOP - BOTTOM)
        return LEFT + across, HEIGHT - BOTTOM - up

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' xmlns='http://www.w3.org/2000/svg' font-size='11'>"]
    for tick in ys:
        _, y = at(0, tick)
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{tick:g}</text>")
    for tick in xs:
        x, bottom = at(tick, 0)
        parts.append(f"<text x='{x:.1f}' y='{bottom + 16:.1f}' text-anchor='middle'>{tick:g}</text>")
    drawn = [at(*pair) for pair in pairs]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
    parts.append(f"<polyline fill='none' stroke='{COLOUR}' stroke-width='2' points='{line}'/>")
    for (x, y), point in zip(drawn, points, strict=True):
        name = "all" if point.max_concurrency is None else point.max_concurrency
        parts.append(f"<circle r='3' cx='{x:.1f}' cy='{y:.1f}' fill='{COLOUR}'/>")
        parts.append(f"<text x='{x + 5:.1f}' y='{y - 5:.1f}'>{name}</text>")
    parts.append(f"<text x='{WIDTH / 2:.0f}' y='{HEIGHT - 12}' text-anchor='middle'>tokens/s of one user</text>")
    middle = f"{HEIGHT / 2:.0f}"
    parts.append(f"<text x='14' y='{middle}' transform='rotate(-90 14 {middle})'>tokens/s of all</text></svg>")
    return "".join(parts)
