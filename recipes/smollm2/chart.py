"""The figures of `measure.py` as a picture: accept length by configuration, its interval, and speed over plain decoding.

    pip install matplotlib
    python recipes/smollm2/chart.py docs/figures/smollm2_h100.json docs/figures/smollm2_h100.svg

Configurations that learn a calibration are left out; n-gram drafts first, then chains and trees by their nodes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

KINDS = ("chat", "code", "summary", "json")
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94")
WIDTH = 0.19
"""Of a bar; configurations stand 1 apart."""


def bars(axes: Axes, rows: list[dict[str, Any]], names: list[str], value: str, has_interval: bool) -> None:
    """A group of bars a configuration, one of each kind of prompt."""
    of = {(row["configuration"], row["kind"]): row for row in rows}
    for number, (kind, colour) in enumerate(zip(KINDS, COLOURS, strict=True)):
        found = [of[name, kind] for name in names]
        heights = [row[value] for row in found]
        spread = None
        if has_interval:
            spread = [[row[value] - row["low"] for row in found], [row["high"] - row[value] for row in found]]
        places = [place + (number - 1.5) * WIDTH for place in range(len(names))]
        axes.bar(places, heights, WIDTH, color=colour, label=kind, yerr=spread, error_kw={"lw": 0.8, "ecolor": "#444"})
    axes.set_xticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", lw=0.4)
    axes.set_axisbelow(True)


def place(name: str) -> tuple[bool, int, bool]:
    """What a configuration is sorted by: a shape by its nodes, a chain before a tree."""
    numbers = [int(number) for number in name.split(",")] if "," in name else [0, 1, 0]
    return "," in name, numbers[2], numbers[1] > 1


def main() -> None:
    """Draw one file's figures at one temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="what measure.py --json wrote")
    parser.add_argument("picture", type=Path, help="an .svg or .png")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    held = json.loads(args.figures.read_text(encoding="utf-8"))
    rows = [row for row in held["rows"] if row["temperature"] == args.temperature and row["configuration"] != "plain"]
    rows = [row for row in rows if "learn" not in row["configuration"]]
    names = sorted({row["configuration"] for row in rows}, key=place)
    mpl.rcParams |= {"svg.hashsalt": "treetop", "font.size": 9}
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5.4), sharex=True, layout="constrained")
    bars(above, rows, names, "accept_length", True)
    bars(below, rows, names, "over_plain", False)
    above.set_ylabel("accept length\n(tokens a round)")
    below.set_ylabel("tokens/s over plain")
    below.axhline(1, color="#444", lw=0.8)
    below.set_xlabel("n-gram, or shape S,k,T: steps, top-k, draft tokens. k = 1 is a chain")
    above.legend(ncols=4, frameon=False, loc="upper left")
    kind = "greedy" if not args.temperature else f"temperature {args.temperature:g}"
    above.set_title(
        f"SmolLM2-135M-Instruct and its head, {kind}, one request at a time, {held['machine']}", fontsize=10
    )
    figure.savefig(args.picture, metadata={"Date": None} if args.picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
