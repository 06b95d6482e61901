"""A sweep of heads as one HTML file that needs nothing else: what it says, two bar charts, tables, its command."""

import html
from collections.abc import Callable, Sequence

from treetop.bench.heads_report import AGAIN, ALL, ALONE, Family, HeadFigures, HeadsReport, verdict
from treetop.bench.intervals import Interval
from treetop.bench.page import page as html_page
from treetop.bench.page import ticks_of

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 560, 118, 52, 8, 40
BAR, GAP = 13, 9
"""Heights of a bar, and between configurations."""
WORDS: dict[Family, str] = {
    "plain": "plain decoding",
    "n-gram": "n-gram drafts",
    "chain": "chain (k = 1)",
    "tree": "tree",
    "calibrated": "tree, calibration learned",
}
STYLE = """
:root{color-scheme:light dark;--page:#f6f7f5;--card:#fff;--ink:#1d2320;--soft:#56615b;--line:#d5dbd6;
--plain:#8a938e;--n-gram:#8a5fb8;--chain:#c2640a;--tree:#0f8a5f;--calibrated:#2a62d9}
@media(prefers-color-scheme:dark){:root{--page:#141816;--card:#1c211e;--ink:#e4e9e6;--soft:#9faba5;--line:#39423c;
--plain:#7d8781;--n-gram:#b08be0;--chain:#e8923a;--tree:#2fb98a;--calibrated:#8ab0ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:20px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:0 0 8px}p{margin:4px 0}
.soft,figcaption,dt,th{color:var(--soft)}ul{margin:0 0 8px;padding-left:20px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;margin-top:14px}
.charts{display:flex;flex-wrap:wrap;gap:12px}figure{flex:1 1 400px;min-width:0;margin:0}
.legend span{white-space:nowrap;margin-right:16px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
svg{width:100%;height:auto}svg text{fill:var(--ink);font-size:12px}svg .soft{fill:var(--soft)}
.grid{stroke:var(--line)}.one{stroke:var(--ink);stroke-dasharray:3 3}.whisker{stroke:var(--ink);stroke-width:1.3}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px;width:100%}
th,td{padding:4px 10px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);font-weight:400}
th[colspan]{text-align:center}
th:first-child{text-align:left;color:var(--ink);white-space:normal;min-width:110px}
td small{color:var(--soft)}thead th{border-bottom:2px solid var(--line)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 16px;margin:0}dd{margin:0;overflow-wrap:anywhere}
pre{margin:8px 0;padding:10px;border:1px solid var(--line);border-radius:7px;white-space:pre-wrap;
overflow-wrap:anywhere}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page may ask no host for anything."""


def page(report: HeadsReport) -> str:
    """The page, with the figures as JSON in it."""
    draft = report.head or f"{report.algorithm} drafts"
    whole = [each for each in report.figures if each.kind == ALL]
    charts = (
        _figure(whole, "Tokens a round (accept length)", lambda each: each.accept_length, None),
        _figure(whole, "Tokens a second over plain decoding", lambda each: each.over_plain, 1.0),
    )
    return html_page(
        f"treetop bench: {draft}",
        f"<h1>What a draft is worth: {_escaped(draft)} on {_escaped(report.model)}</h1>"
        f"<p class='soft'>{_escaped(_setting(report))}</p>"
        f"<section><h2>What the figures say</h2><ul>{_items(report.remarks())}</ul>{_comparisons(report)}</section>"
        f"<section>{_legend(report)}<div class='charts'>{''.join(charts)}</div></section>"
        f"<section><h2>All prompts</h2>{_table(report)}</section>"
        f"<section><h2>Tokens a round by kind of prompt</h2>{_kinds(report)}</section>"
        f"<section><h2>Are the tokens plain decoding's?</h2>{_equality(report)}</section>"
        f"<section><h2>How this was measured</h2>{_method(report)}</section>",
        data=report.as_json(),
        style=STYLE,
        head="<meta name='viewport' content='width=device-width'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
    )


def svg(
    figures: Sequence[HeadFigures], value: Callable[[HeadFigures], Interval | None], line: float | None, words: str = ""
) -> str:
    """A bar a configuration and temperature, its interval as a whisker. line: a value that is marked."""
    names = list(dict.fromkeys(each.configuration for each in figures))
    temperatures = list(dict.fromkeys(each.temperature for each in figures))
    ticks = ticks_of(max([each.high for figure in figures if (each := value(figure))], default=1.0))
    step = len(temperatures) * BAR + GAP
    height = TOP + len(names) * step + BOTTOM

    def across(x: float) -> float:
        return LEFT + x / ticks[-1] * (WIDTH - LEFT - RIGHT)

    parts = [f"<svg viewBox='0 0 {WIDTH} {height}' role='img' aria-label='{_escaped(words)}'>"]
    foot = height - BOTTOM
    for tick in ticks:
        parts.append(f"<line class='grid' x1='{across(tick):.1f}' x2='{across(tick):.1f}' y1='{TOP}' y2='{foot}'/>")
        place = f"x='{across(tick):.1f}' y='{foot + 16}' text-anchor='middle'"
        parts.append(f"<text class='soft' {place}>{tick:g}</text>")
    for row, name in enumerate(names):
        top = TOP + row * step
        parts.append(f"<text x='{LEFT - 8}' y='{top + step / 2:.1f}' text-anchor='end'>{_escaped(name)}</text>")
        for figure in (each for each in figures if each.configuration == name):
            number = temperatures.index(figure.temperature)
            parts.append(_bar(figure, value(figure), top + GAP / 2 + number * BAR, across, number))
    if line is not None:
        parts.append(f"<line class='one' x1='{across(line):.1f}' x2='{across(line):.1f}' y1='{TOP}' y2='{foot}'/>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f"<text class='soft' x='{middle}' y='{height - 6}' text-anchor='middle'>{_escaped(words)}</text>")
    return "".join([*parts, "</svg>"])


def _bar(figure: HeadFigures, value: Interval | None, y: float, across: Callable[[float], float], number: int) -> str:
    """number: of its temperature; later ones are paler."""
    if value is None:
        return ""
    middle = y + (BAR - 2) / 2
    told = f"{figure.configuration}, temperature {figure.temperature:g}: {value.text()}"
    return (
        f"<rect x='{LEFT}' y='{y:.1f}' width='{across(value.value) - LEFT:.1f}' height='{BAR - 2}' rx='2'"
        f" fill='var(--{figure.family})' opacity='{_opacity(number)}'><title>{_escaped(told)}</title></rect>"
        f"<line class='whisker' x1='{across(value.low):.1f}' x2='{across(value.high):.1f}' y1='{middle:.1f}'"
        f" y2='{middle:.1f}'/>"
        f"<text x='{across(value.high) + 5:.1f}' y='{middle + 4:.1f}'>{value.value:.2f}</text>"
    )


def _opacity(number: int) -> float:
    return max(1 - 0.45 * number, 0.3)


def _figure(
    figures: Sequence[HeadFigures], words: str, value: Callable[[HeadFigures], Interval | None], line: float | None
) -> str:
    return f"<figure><h2>{_escaped(words)}</h2>{svg(figures, value, line, words)}</figure>"


def _comparisons(report: HeadsReport) -> str:
    """A row a pair and temperature: which has more tokens a round, and a second."""
    titles = "".join(f"<th>{title}</th>" for title in ("temperature", "tokens a round", "", "tokens a second", ""))
    rows = [
        (
            f"{each.first} over {each.second}: {each.why}",
            [
                f"{each.temperature:g}",
                *(cell for ratio in (each.accept_length, each.speed) for cell in (_cell(ratio), verdict(ratio))),
            ],
        )
        for each in report.comparisons
    ]
    return _tabulated(f"<tr><th>on the same prompts</th>{titles}</tr>", rows) if rows else ""


def _legend(report: HeadsReport) -> str:
    families = dict.fromkeys(each.family for each in report.figures)
    colours = [f"<span><i style='background:var(--{each})'></i>{WORDS[each]}</span>" for each in families]
    paler = [
        f"<span><i style='background:var(--ink);opacity:{_opacity(number)}'></i>temperature {each:g}</span>"
        for number, each in enumerate(report.temperatures)
    ]
    return f"<p class='legend'>{''.join(colours + paler)}</p><p class='soft'>Whiskers are intervals of 95 %.</p>"


def _table(report: HeadsReport) -> str:
    """A row a configuration, four columns a temperature."""
    columns = ("accept length", "tokens/s", "over plain", "tokens differ")
    heads = "".join(f"<th colspan='{len(columns)}'>temperature {each:g}</th>" for each in report.temperatures)
    titles = "".join(f"<th>{title}</th>" for _ in report.temperatures for title in columns)
    rows = [
        (
            name,
            [
                cell
                for each in at
                for cell in (
                    _cell(each.accept_length),
                    f"{each.tokens_per_s:.1f}",
                    _cell(each.over_plain),
                    "" if name == ALONE else f"{each.differ} of {each.prompts}",
                )
            ],
        )
        for name, at in _whole(report)
    ]
    return _tabulated(f"<tr><th></th>{heads}</tr><tr><th>S, k, T</th>{titles}</tr>", rows)


def _kinds(report: HeadsReport) -> str:
    """A row a configuration, a column a kind and temperature."""
    kinds = list(report.prompts)
    heads = "".join(f"<th colspan='{len(kinds)}'>temperature {each:g}</th>" for each in report.temperatures)
    titles = "".join(f"<th>{_escaped(kind)}</th>" for _ in report.temperatures for kind in kinds)
    by_place = {(each.configuration, each.temperature, each.kind): each.accept_length for each in report.figures}
    rows = [
        (name, [_cell(by_place[name, temperature, kind]) for temperature in report.temperatures for kind in kinds])
        for name, _ in _whole(report)
        if name not in (ALONE, AGAIN)
    ]
    return _tabulated(f"<tr><th></th>{heads}</tr><tr><th>S, k, T</th>{titles}</tr>", rows)


def _whole(report: HeadsReport) -> list[tuple[str, list[HeadFigures]]]:
    """Figures of all prompts, by configuration."""
    figures = [each for each in report.figures if each.kind == ALL]
    names = dict.fromkeys(each.configuration for each in figures)
    return [(name, [each for each in figures if each.configuration == name]) for name in names]


def _tabulated(head: str, rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    body = "".join(
        f"<tr><th>{_escaped(name)}</th>{''.join(f'<td>{c}</td>' for c in cells)}</tr>" for name, cells in rows
    )
    return f"<div class='wide'><table><thead>{head}</thead><tbody>{body}</tbody></table></div>"


def _cell(value: Interval | None) -> str:
    return "-" if value is None else f"{value.value:.2f} <small>{value.low:.2f} to {value.high:.2f}</small>"


def _equality(report: HeadsReport) -> str:
    found: dict[str, list[str]] = {}
    for each in report.checks:
        found.setdefault(each.sentence, []).append(f"{each.configuration} at {each.temperature:g}")
    checks = [f"{sentence}: {'; '.join(places)}" for sentence, places in found.items()]
    why = (
        "Speculative decoding chooses the tokens that plain decoding would. Products of different numbers of rows round"
        " differently, though: in float32 that can break a tie of the two best logits, which is counted; in 16 bits it"
        " changes many logits a little, so that answers part where two tokens are almost as likely, and a difference"
        " proves nothing. The option --exactness bits makes them equal in 16 bits, too."
    )
    return f"<p>{why}</p><ul>{_items(checks)}</ul>"


def _method(report: HeadsReport) -> str:
    source = report.prompts_file or "of the package"
    told = (
        f"Each configuration is an engine of its own, one after another; it answers some of {report.warm_up} other"
        " prompts first, all of them where it learns a calibration. A draw's seed is the number of its prompt. Accept"
        " length: tokens a round, the bonus token included, the first token of an answer not. Tokens a second: of whole"
        " requests, the time of their prompts included. Intervals of 95 %, by drawing prompts (for speed, calls) with"
        " replacement 2,000 times; ratios compare the same prompts. S, k, T: levels, branches of a node, nodes"
        " verified, the root included."
    )
    rows = {
        "machine": report.machine.sentence(),
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "model": _named(report.model, report.revision),
        "head": _named(report.head, report.head_revision) if report.head else str(report.algorithm),
        "prompts": ", ".join(f"{count} {kind}" for kind, count in report.prompts.items()) + f", {source}",
        "chat template": "the model's" if report.chat_template else "none: prompts are plain text",
        "began": report.date,
    }
    listed = "".join(f"<dt>{name}</dt><dd>{_escaped(value)}</dd>" for name, value in rows.items())
    return f"<dl>{listed}</dl><pre>{_escaped(report.command)}</pre><p>{told}</p>"


def _setting(report: HeadsReport) -> str:
    together = "one request at a time" if report.batch_size == 1 else f"{report.batch_size} requests at a time"
    count = sum(report.prompts.values())
    return (
        f"{report.machine.name}, {report.dtype}, {together}, {count} prompts, at most {report.max_tokens} tokens each;"
        f" treetop {report.versions.get('commit', report.versions['treetop'])}"
    )


def _named(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at {revision}"


def _items(sentences: Sequence[str]) -> str:
    return "".join(f"<li>{_escaped(each)}</li>" for each in sentences)


def _escaped(text: str) -> str:
    return html.escape(text)
