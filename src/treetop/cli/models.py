"""`treetop models`: which architectures load."""

import argparse
import json
from dataclasses import asdict, dataclass

HELP = "which architectures load, what differs in each, which drafts and formats there are"


@dataclass(frozen=True, slots=True)
class Row:
    """An architecture. drafts: values of `--speculative-algorithm`. formats: of weights, beside plain ones."""

    architecture: str
    differs_in: str
    text_only: bool
    drafts: tuple[str, ...]
    formats: tuple[str, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")


def run(args: argparse.Namespace) -> int:
    print(json.dumps([asdict(row) for row in rows()]) if args.json else as_markdown(), end="\n" if args.json else "")
    return 0


def rows() -> list[Row]:
    """By the registries of targets, drafts and formats."""
    from treetop.drafts.registry import DRAFTERS
    from treetop.models.registry import loadable
    from treetop.weights.registry import FORMATS

    drafts, formats = (*DRAFTERS, "NGRAM"), tuple(FORMATS)
    return [
        Row(name, family.about, bool(family.text_of), (*drafts, "MTP") if family.mtp else drafts, formats)
        for name, family in loadable().items()
    ]


def as_markdown() -> str:
    """The table that stands in docs/checkpoints.md."""
    lines = ["| architecture | what differs from Llama | drafts | formats |", "|---|---|---|---|"]
    for row in rows():
        what = f"{row.differs_in}; images are refused" if row.text_only else row.differs_in
        lines.append(f"| `{row.architecture}` | {what} | {', '.join(row.drafts)} | plain, {', '.join(row.formats)} |")
    return "\n".join(lines) + "\n"
