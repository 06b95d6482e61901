"""A sweep as one HTML file that needs nothing else: measured times against their floor, as SVG."""

from collections.abc import Sequence

from treetop.bench.page import COLOURS, Curve, chart, element
from treetop.bench.page import page as html_page
from treetop.bench.rounds import Figures, RoundsReport

STYLES = (("wall", ""), ("device", "7 4"), ("floor", "2 4"))
"""What is drawn of a case, and its line's dashes."""
AXES = {"length": "prompt tokens", "batch": "requests decoded together", "nodes": "nodes verified (T)"}


def page(report: RoundsReport) -> str:
    """The page: what was measured on, the plot, the figures as a table and as JSON."""
    axis = axis_of(report.figures)
    return html_page(
        "treetop bench",
        "<h1>treetop bench</h1>",
        element("p", report.machine.sentence()),
        element("p", report.checked),
        chart(lines_of(report.figures, axis), AXES[axis], "ms a round", logarithmic=True),
        element("pre", "\n".join([Figures.HEADER, *(figures.row() for figures in report.figures)])),
        data=report.as_json(),
    )


def axis_of(figures: Sequence[Figures]) -> str:
    """What varies along x: the prompt length if it does, else the batch if it does, else the number of nodes."""
    for name in ("length", "batch"):
        if len({getattr(each, name) for each in figures}) > 1:
            return name
    return "nodes"


def lines_of(figures: Sequence[Figures], axis: str) -> list[Curve]:
    """Three lines (wall, device, floor) a series; a series is what does not vary along x."""
    series: dict[tuple[object, ...], list[Figures]] = {}
    for each in figures:
        key: tuple[object, ...] = (
            () if axis == "nodes" else (each.shape, each.batch if axis == "length" else each.length)
        )
        series.setdefault(key, []).append(each)
    lines: list[Curve] = []
    for index, (fixed, members) in enumerate(series.items()):
        name = "all shapes" if not fixed else f"{fixed[0]}, {'B' if axis == 'length' else 'input'} {fixed[1]}"
        for kind, dashes in STYLES:
            points = sorted((_x(each, axis), getattr(each, f"{kind}_ms")) for each in members)
            lines.append(Curve(f"{name}: {kind}", COLOURS[index % len(COLOURS)], points, dashes))
    return lines


def _x(figures: Figures, axis: str) -> float:
    return float(figures.shape[2] if axis == "nodes" else getattr(figures, axis))
