"""Runs of `treetop bench serve` as one HTML file that needs nothing else: what a user gets against what all get."""

import html
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import NamedTuple

from treetop.bench.axes import ticks_of
from treetop.bench.serve import LoadReport, Point, point_text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 80, 40, 30, 50
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d68910", "#444444")
STYLE = (
    "body{font:14px sans-serif;margin:2em}pre{font-size:12px;white-space:pre-wrap}"
    "td,th{padding:2px 10px;text-align:right}table{border-collapse:collapse}tr{border-bottom:1px solid #ddd}"
)


def page(report: LoadReport) -> str:
    """The plot, the figures as text and as JSON."""
    points = [point for point in report.points if point.tokens_per_s_user is not None]
    text = "\n".join(point_text(point) for point in report.points)
    data = json.dumps(asdict(report)).replace("<", "\\u003c")
    return (
        "<!doctype html><meta charset='utf-8'><title>treetop bench serve</title>"
        f"<style>{STYLE}</style>"
        f"<h1>{html.escape(report.model)}</h1><p>{html.escape(str(report.options['base_url']))}</p>"
        f"{svg({'': marks_of(points)}) if points else ''}<pre>{html.escape(text)}</pre>"
        f"<script type='application/json' id='data'>{data}</script>"
    )


class Mark(NamedTuple):
    """A run: tokens a second of one user, and of all; what is written beside it."""

    user: float
    every: float
    name: str


def marks_of(points: Iterable[Point]) -> list[Mark]:
    """Runs of a server, each with its concurrency."""
    names: dict[int | None, str] = {None: "all"}
    return [
        Mark(
            each.tokens_per_s_user or 0.0, each.tokens_per_s, names.get(each.max_concurrency, str(each.max_concurrency))
        )
        for each in points
    ]


def svg(servers: Mapping[str, list[Mark]]) -> str:
    """A line through the runs of each server: tokens a second of one user along x, of all along y."""
    marks = [mark for each in servers.values() for mark in each]
    xs, ys = ticks_of(max(mark.user for mark in marks)), ticks_of(max(mark.every for mark in marks))

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
    for number, (server, points) in enumerate(servers.items()):
        colour = COLOURS[number % len(COLOURS)]
        drawn = [at(mark.user, mark.every) for mark in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f"<polyline fill='none' stroke='{colour}' stroke-width='2' points='{line}'/>")
        for (x, y), mark in zip(drawn, points, strict=True):
            parts.append(f"<circle r='3' cx='{x:.1f}' cy='{y:.1f}' fill='{colour}'/>")
            parts.append(f"<text x='{x + 5:.1f}' y='{y - 5:.1f}'>{html.escape(mark.name)}</text>")
        place = f"x='{WIDTH - RIGHT}' y='{TOP + 14 * number}' text-anchor='end'"
        parts.append(f"<text {place} fill='{colour}'>{html.escape(server)}</text>")
    parts.append(f"<text x='{WIDTH / 2:.0f}' y='{HEIGHT - 12}' text-anchor='middle'>tokens/s of one user</text>")
    middle = f"{HEIGHT / 2:.0f}"
    parts.append(f"<text x='14' y='{middle}' transform='rotate(-90 14 {middle})'>tokens/s of all</text></svg>")
    return "".join(parts)
