"""Several servers under the same load: their reports of `treetop bench serve --json` side by side."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from treetop.bench.columns import Columns
from treetop.bench.page import element
from treetop.bench.page import page as html_page
from treetop.bench.serve import LoadReport, Point
from treetop.bench.serve_plot import marks_of, svg
from treetop.types.errors import InputError


class Figure(NamedTuple):
    """A line of the comparison. of: a run's value, None if it has none."""

    name: str
    of: Callable[[Point], float | None]


def _time(name: str, rank: str) -> Figure:
    return Figure(f"{name} {rank}, ms", lambda point: point.times_ms.get(name, {}).get(rank))


FIGURES = (
    Figure("tokens/s", lambda point: point.tokens_per_s),
    _time("ttft", "p50"),
    _time("ttft", "p99"),
    _time("itl", "p50"),
    _time("itl", "p99"),
    _time("tpot", "mean"),
    Figure("failed", lambda point: point.num_failed),
)


def read_reports(given: list[str]) -> dict[str, LoadReport]:
    """Reports by name, of [NAME=]FILE; a file without a name is called as it is. Raises InputError."""
    reports: dict[str, LoadReport] = {}
    for each in given:
        name, equals, file = each.partition("=")
        path = Path(file if equals else name)
        name = name if equals else path.stem
        if name in reports:
            raise InputError(f"--compare: two reports are called {name}; give them as NAME=FILE")
        reports[name] = _read(path)
    return reports


def _read(path: Path) -> LoadReport:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        points = [Point(**{each.name: point[each.name] for each in fields(Point)}) for point in found["points"]]
        report = LoadReport(dict(found["options"]), str(found["model"]), points)
        table({path.stem: report})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"--compare {path}: no report of `treetop bench serve --json`: {error!r}") from None
    return report


def table(reports: Mapping[str, LoadReport]) -> list[list[str]]:
    """Lines of the comparison, the first its head: for each figure and server the values by clients at a time."""
    most = sorted({point.max_concurrency or 0 for report in reports.values() for point in report.points})
    lines = [["", "", *(str(each) if each else "no limit" for each in most)]]
    for figure in FIGURES:
        for name, report in reports.items():
            # of several runs with as many clients the last: the first may have warmed the server
            by_clients = {point.max_concurrency or 0: figure.of(point) for point in report.points}
            lines.append([figure.name, name, *(_shown(by_clients.get(each)) for each in most)])
    return lines


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def text(reports: Mapping[str, LoadReport]) -> str:
    lines = table(reports)
    columns = Columns.fitting(lines)
    return "\n".join(["clients at a time:", *map(columns.row, lines)])


def page(reports: Mapping[str, LoadReport]) -> str:
    """One HTML file that needs nothing else: what a user gets against what all get, and the table."""
    drawn = {
        name: marks_of(point for point in each.points if point.tokens_per_s_user is not None)
        for name, each in reports.items()
    }
    drawn = {name: points for name, points in drawn.items() if points}
    head, *lines = table(reports)
    heads, *rows = (
        f"<tr>{''.join(element(tag, cell) for cell in line)}</tr>"
        for tag, line in (("th", head), *(("td", line) for line in lines))
    )
    loads = "\n".join(f"{name}: {each.model}, {each.options}" for name, each in reports.items())
    return html_page(
        "treetop bench serve",
        "<h1>Servers under load</h1>",
        svg(drawn) if drawn else "",
        f"<table>{heads}{''.join(rows)}</table>",
        element("pre", loads),
    )
