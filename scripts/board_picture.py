"""A picture of docs/grafana.json from what a Prometheus has: each panel's queries, drawn where the board has the panel.

    prometheus --config.file ... &             which scrapes a server's /metrics
    pip install matplotlib
    python scripts/board_picture.py --prometheus http://127.0.0.1:9090 --minutes 8 --out docs/figures/board.png

For where no Grafana is at hand: the queries are the board's, the drawing is not Grafana's.
"""

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parent.parent / "docs" / "grafana.json"
_COLUMNS, _POINTS = 24, 120
_RATE_INTERVAL = "30s"
"""In the place of `$__rate_interval`, which is four times that between two scrapes, at least."""


def fetched(prometheus: str, path: str, **asked: object) -> Any:
    """`data` of an answer of Prometheus' HTTP API."""
    with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(asked)}") as answer:
        return json.load(answer)["data"]


def curves(prometheus: str, target: dict[str, str], model: str, begin: float, end: float) -> dict[str, list[Any]]:
    """(seconds, value) of each curve of a query that has any, by its legend."""
    query = target["expr"].replace("$model_name", model).replace("$__rate_interval", _RATE_INTERVAL)
    step = max((end - begin) / _POINTS, 1.0)
    found = {}
    for series in fetched(prometheus, "query_range", query=query, start=begin, end=end, step=step)["result"]:
        labels = series["metric"]
        name = target["legendFormat"]
        for label in re.findall(r"\{\{(\w+)\}\}", name):
            name = name.replace("{{" + label + "}}", labels.get(label, ""))
        found[name] = [(float(when) - end, float(value)) for when, value in series["values"]]
    return {name: points for name, points in found.items() if any(math.isfinite(value) for _, value in points)}


def is_right(panel: dict[str, Any], name: str) -> str | None:
    """The unit of a curve that the panel puts on its right axis; None for others."""
    for each in panel["fieldConfig"]["overrides"]:
        how, what = each["matcher"]["id"], each["matcher"]["options"]
        if (how == "byName" and what == name) or (how == "byRegexp" and re.search(what.strip("/"), name)):
            return str({entry["id"]: entry["value"] for entry in each["properties"]}["unit"])
    return None


def formatted(axes: Any, unit: str) -> None:
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    elif unit in ("s", "reqps"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} s" if unit == "s" else f"{value:g}/s")


def draw(board: dict[str, Any], prometheus: str, model: str, end: float, minutes: float, out: Path) -> None:
    from matplotlib import pyplot  # noqa: PLC0415  # whoever draws installs it
    from PIL import Image  # noqa: PLC0415  # comes with it

    panels, begin = board["panels"], end - 60 * minutes
    rows = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    pyplot.rcParams.update({"font.size": 6, "axes.spines.top": False, "axes.spines.right": False})
    figure = pyplot.figure(figsize=(12, rows * 12 / _COLUMNS / 2.6), dpi=100)
    grid = figure.add_gridspec(rows, _COLUMNS, hspace=8.0, wspace=6.0, left=0.03, right=0.985, top=0.975, bottom=0.02)
    for panel in panels:
        at, found = panel["gridPos"], dict[str, list[Any]]()
        for target in panel["targets"]:
            found |= curves(prometheus, target, model, begin, end)
        axes = figure.add_subplot(grid[at["y"] : at["y"] + at["h"] - 1, at["x"] : at["x"] + at["w"]])
        axes.set_title(panel["title"], loc="left", fontsize=7, fontweight="bold")
        axes.set_xlim(-minutes, 0)
        axes.grid(alpha=0.3, linewidth=0.4)
        right, lines = None, []
        for number, (name, points) in enumerate(found.items()):
            unit, on = is_right(panel, name), axes
            if unit is not None:
                on = right = right or axes.twinx()
                formatted(on, unit)
                on.tick_params(axis="y", direction="in", pad=-18)  # the next panel begins there
            style = {"linewidth": 0.8, "label": name, "color": f"C{number}", "linestyle": "-" if on is axes else "--"}
            lines += on.plot([x / 60 for x, _ in points], [y for _, y in points], **style)
        formatted(axes, panel["fieldConfig"]["defaults"].get("unit", "short"))
        for each in (axes, right):
            if each is not None:
                each.set_ylim(0, 1.3 * each.get_ylim()[1])  # the legend's room
        if lines:
            axes.legend(handles=lines, loc="upper left", fontsize=4.5, ncols=3, frameon=False)
        else:
            axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color="gray")
        print(f"{panel['title']}: {len(found)} curves")
    figure.savefig(out)
    Image.open(out).convert("RGB").quantize(48).save(out, optimize=True)


def main(arguments: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N", help="before --end")
    parser.add_argument("--end", type=float, default=time.time(), metavar="S", help="seconds since 1970; default: now")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")
    args = parser.parse_args(arguments)
    models = fetched(args.prometheus, "label/model_name/values")
    if not models:
        parser.error("--prometheus: it has scraped no treetop server: no metric has a label model_name")
    draw(json.loads(BOARD.read_text(encoding="utf-8")), args.prometheus, models[0], args.end, args.minutes, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
