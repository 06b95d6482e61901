"""Figures as rows of text and as a page: what is drawn, and where numbers stand."""

import json
import re

import pytest

from treetop.bench import page as pages
from treetop.bench import plot, rounds
from treetop.bench.machine import Machine

MACHINE = Machine("H200", "2", "bfloat16", 4.27e12, 790e12)


def figures(shape, batch, length, ms):
    return rounds.Figures(
        shape,
        batch,
        length,
        ms,
        ms,
        ms,
        ms,
        {"draft": 0.0, "verify": ms},
        ms / 2,
        2.0,
        2.0,
        ms / 3,
        3.0,
        1.0,
        1.0,
        9,
        1.0,
    )


def test_a_plot_has_a_line_each_for_wall_device_and_floor_of_every_series():
    grid = [figures((0, 1, 1), b, 64, 3.0 + b) for b in (1, 8, 2)] + [
        figures((5, 4, 16), b, 64, 9.0) for b in (1, 2, 8)
    ]
    assert plot.axis_of(grid) == "batch"
    lines = plot.lines_of(grid, "batch")
    assert len(lines) == 6
    assert lines[0].points == [(1, 4.0), (2, 5.0), (8, 11.0)]
    assert lines[2].points == [(1, 2.0), (2, 2.5), (8, 5.5)]
    report = rounds.RoundsReport(MACHINE, "outputs equal </script>", tuple(grid))
    page = plot.page(report)
    assert page.count("<polyline") == 6
    assert page.count("</script>") == 1
    assert json.loads(re.search(r"id='data'>(.*)</script>", page)[1])["cases"][0]["batch"] == 1
    assert plot.axis_of([figures((0, 1, 1), 1, n, 1.0) for n in (1, 2)]) == "length"
    trees = [figures((3, 1, 4), 1, 64, 1.0), figures((5, 4, 16), 1, 64, 2.0)]
    assert plot.axis_of(trees) == "nodes"
    assert plot.lines_of(trees, "nodes")[0].points == [(4, 1.0), (16, 2.0)]
    assert "<polyline" in pages.chart(plot.lines_of(trees[:1], "nodes"), "T", "ms", logarithmic=True)


@pytest.mark.parametrize(
    ("maximum", "ticks"),
    [
        (30.6, [0, 10, 20, 30, 40]),
        (15.8, [0, 5, 10, 15, 20]),
        (8.0, [0, 2, 4, 6, 8]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.013, [0, 0.005, 0.01, 0.015]),
    ],
)
def test_ticks_are_round_numbers_up_to_the_largest_value(maximum, ticks):
    assert pages.ticks_of(maximum) == pytest.approx(ticks)


def test_figures_stand_below_their_titles():
    """Rows of small and large numbers are as long as the header, and each ends where its title ends."""
    for each in (figures((0, 1, 1), 1, 1024, 0.5), figures((8, 10, 60), 64, 32768, 130.0)):
        row = each.row()
        assert len(row) == len(rounds.Figures.HEADER)
        for title in ("B", "input", "wall ms", "device ms", "extend", "floor  ", "wall/floor", "tokens/s", "accept"):
            end = rounds.Figures.HEADER.index(title) + len(title.rstrip())
            assert row[end - 1] != " "
            assert row[end : end + 1] in ("", " ")


def test_a_plot_that_can_be_written_is_not_written_before_there_is_one(tmp_path):
    pages.check_path(tmp_path / "p.html")
    assert not list(tmp_path.iterdir())
    (tmp_path / "p.html").write_text("old")
    pages.check_path(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text() == "old"
