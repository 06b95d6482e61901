"""`docs/options.md` is the tables of options, written out by `scripts/reference.py`."""

from collections.abc import Iterator

from treetop.serve_options import ServeOptions
from treetop.types.config import EngineConfig
from treetop.types.kv_transfer.options import DisaggregationOptions
from treetop.types.options import Option, options_of
from treetop.types.sampling import SamplingParams

_HEAD = """\
# Options

Every option, from the tables that check it. On the command line they are flags; in Python they are arguments under the
names in the second column (`LLM(MODEL, page_size=32)`, `SamplingParams(top_p=0.9)`); `treetop serve --config FILE`
reads flags without dashes from YAML.

A variable of the environment stands for each flag: `TREETOP_` and the flag's first name,
`TREETOP_MAX_RUNNING_REQUESTS=32` for `--max-running-requests 32`, for every command with an engine that has the flag.
The command line has precedence over the variable, the variable over `--config FILE`, which may be `TREETOP_CONFIG`.
Several values are divided by white space, switches are `true` or `false`, and an empty variable is none. All wrong
options are reported together, before any work.

This page is written by `src/treetop/cli/options_page.py`, and a test holds it to the tables.
"""
_TABLES = {
    "Engine": ("of every command, `LLM` and `AsyncLLM`", EngineConfig),
    "Sampling": ("`SamplingParams`; flags are those of `treetop generate`", SamplingParams),
    "Server": ("of `treetop serve`", ServeOptions),
    "Prefill and decode in workers of their own": ("of `treetop serve`", DisaggregationOptions),
}


def page() -> str:
    """The whole text."""
    parts = [_HEAD]
    for title, (words, kind) in _TABLES.items():
        rows = "\n".join(_row(each) for each in options_of(kind).values())
        parts.append(
            f"## {title}\n\n{words[0].upper() if words[0] != '`' else '`'}{words[1:]}.\n\n{_COLUMNS}\n{rows}\n"
        )
    return "\n".join(parts)


_COLUMNS = "| flag | Python | variable | values | default | what it does |\n|---|---|---|---|---|---|"


def _row(row: Option) -> str:
    flags = [f"`{flag}`" for flag in (row.flag, *row.aliases) if flag]
    name = "MODEL" if row.name == "model" else ", ".join(flags)
    named = "TREETOP_MODEL" if row.name == "model" else row.variable
    cells = [name, f"`{row.name}`", f"`{named}`" if named else "", " ".join(_values(row)), _default(row), row.help]
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def _values(row: Option) -> Iterator[str]:
    if row.choices:
        yield ", ".join(f"`{each}`" for each in row.choices)
        return
    yield row.kind.words
    bounds = row.bounds
    if bounds:
        yield bounds


def _default(row: Option) -> str:
    return "none" if row.default is None or row.default in ((), "") else f"`{row.default}`"
