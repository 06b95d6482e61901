"""Runs of `treetop bench serve` as a page: what a user gets against what all get."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import NamedTuple

from treetop.bench.page import COLOURS, Curve, chart, element
from treetop.bench.page import page as html_page
from treetop.bench.serve import LoadReport, Point, point_text


def page(report: LoadReport) -> str:
    """The plot, the figures as text and as JSON."""
    points = [point for point in report.points if point.tokens_per_s_user is not None]
    return html_page(
        "treetop bench serve",
        element("h1", report.model),
        element("p", str(report.options["base_url"])),
        svg({"": marks_of(points)}) if points else "",
        element("pre", "\n".join(point_text(point) for point in report.points)),
        data=asdict(report),
    )


class Mark(NamedTuple):
    """A run: tokens a second of one user, and of all; what is written beside it."""

    user: float
    every: float
    name: str


def marks_of(points: Iterable[Point]) -> list[Mark]:
    """Runs of a server, each with its concurrency."""
    return [
        Mark(each.tokens_per_s_user or 0.0, each.tokens_per_s, str(each.max_concurrency or "all")) for each in points
    ]


def svg(servers: Mapping[str, list[Mark]]) -> str:
    """A line through the runs of each server: tokens a second of one user along x, of all along y."""
    lines = [
        Curve(name, COLOURS[number % len(COLOURS)], [mark[:2] for mark in marks], marks=[mark.name for mark in marks])
        for number, (name, marks) in enumerate(servers.items())
    ]
    return chart(lines, "tokens/s of one user", "tokens/s of all")
