"""Draws docs/figures/round_times.svg from the measured table beside it.

    python scripts/chart.py

Bars of a group share a batch size; times are milliseconds, shorter is better. An engine without a bar has no such
round.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
COLOURS = {"treetop": "#1a7f4b", "SGLang": "#d9822b", "vLLM": "#5b7fbd"}
WIDTH, PANEL, LEFT, BAR, GAP = 880, 195, 20, 15, 10
TOP, BASE = 64, 250


def panel(title: str, rounds: dict[str, list[float]], batches: list[int], x0: float) -> list[str]:
    """One kind of round: a group of bars for each batch size, scaled to the panel's slowest."""
    slowest = max(max(times) for times in rounds.values())
    parts = [text(x0 + PANEL / 2, TOP - 14, title, "middle", 13, weight="bold")]
    x = x0 + 6
    for column, batch in enumerate(batches):
        start = x
        for engine, times in rounds.items():
            height = times[column] / slowest * (BASE - TOP - 22)
            box = f'x="{x:.1f}" y="{BASE - height:.1f}" width="{BAR}" height="{height:.1f}"'
            parts.append(f'<rect {box} fill="{COLOURS[engine]}"/>')
            parts.append(text(x + BAR / 2, BASE - height - 4, f"{times[column]:.1f}", "middle", 9))
            x += BAR + 5
        parts.append(text((start + x - 5) / 2, BASE + 15, f"B = {batch}", "middle", 11))
        x += GAP
    return parts


def text(x: float, y: float, words: str, anchor: str, size: int, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
        f' fill="#555">{words}</text>'
    )


def chart(table: dict[str, object]) -> str:
    """The whole picture, on a transparent ground, readable on light and dark pages."""
    rounds, batches = table["rounds"], table["batch"]
    assert isinstance(rounds, dict)
    assert isinstance(batches, list)
    parts = [text(LEFT, 24, "Milliseconds of a round, one H200 (shorter is better)", "start", 15, weight="bold")]
    x = WIDTH - 250.0
    for engine, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 17, 24, engine, "start", 12))
        x += 82
    for index, (title, times) in enumerate(rounds.items()):
        ordered = {engine: times[engine] for engine in COLOURS if engine in times}
        parts += panel(title, ordered, batches, LEFT + index * (PANEL + 20))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 280" width="{WIDTH}" height="280"'
        f' font-family="system-ui, sans-serif">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    table = json.loads((FOLDER / "round_times.json").read_text(encoding="utf-8"))
    (FOLDER / "round_times.svg").write_text(chart(table), encoding="utf-8")
