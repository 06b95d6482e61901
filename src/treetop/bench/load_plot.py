"""A sweep of load as a page: what a user gets against what all get, and which shapes."""

from dataclasses import asdict

from treetop.bench.load import AUTO, BatchSweepReport, LoadPoint
from treetop.bench.page import COLOURS, element
from treetop.bench.page import page as html_page
from treetop.bench.serve_plot import Mark, svg

_WIDTH, _HEIGHT = 600, 14


def page(report: BatchSweepReport) -> str:
    """The plot, the shapes of the policy's rounds over time at each batch, the figures as text and as JSON."""
    ways = dict.fromkeys(point.way for point in report.points)
    marks = {
        way: [
            Mark(point.tokens_per_s_user, point.tokens_per_s, str(point.batch))
            for point in report.points
            if point.way == way
        ]
        for way in ways
    }
    return html_page(
        "treetop bench: load",
        element("h1", report.model),
        element("p", f"{report.device}, {report.dtype}. {report.equality}"),
        svg(marks),
        "<h2>Shapes of auto, round by round</h2>",
        strips(report),
        element("pre", report.text()),
        data=asdict(report),
    )


def strips(report: BatchSweepReport) -> str:
    """A bar a batch, its rounds from left to right, each in its shape's colour."""
    automatic = [point for point in report.points if point.way == AUTO]
    shapes = list(dict.fromkeys(shape for point in automatic for shape, _ in point.runs))
    colour = {shape: COLOURS[index % len(COLOURS)] for index, shape in enumerate(shapes)}
    names = "".join(f"<span style='color:{colour[shape]}'>&#9632; {shape}&nbsp; </span>" for shape in shapes)
    return f"<p>{names}</p>" + "".join(_strip(point, colour) for point in automatic)


def _strip(point: LoadPoint, colour: dict[str, str]) -> str:
    total, at, parts = max(sum(count for _, count in point.runs), 1), 0, []
    for shape, count in point.runs:
        left, wide = _WIDTH * at / total, _WIDTH * count / total
        parts.append(f"<rect x='{left:.1f}' width='{wide:.1f}' height='{_HEIGHT}' fill='{colour[shape]}'/>")
        at += count
    bar = f"<svg width='{_WIDTH}' height='{_HEIGHT}' xmlns='http://www.w3.org/2000/svg'>{''.join(parts)}</svg>"
    return f"<div>{bar} batch {point.batch}, {total} rounds</div>"
