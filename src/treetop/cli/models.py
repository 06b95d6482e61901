"""`treetop models`: which architectures load."""

import argparse
import json
from dataclasses import asdict, dataclass

HELP = "which architectures load, what differs in each, which drafts and formats there are"


@dataclass(frozen=True, slots=True)
class ModelRow:
    """An architecture.

    drafts: values of `--speculative-algorithm`.
    formats: of weights, beside plain ones.
    gguf: values of `general.architecture` of GGUF files that are read as it.
    """

    architecture: str
    differs_in: str
    text_only: bool
    drafts: tuple[str, ...]
    formats: tuple[str, ...]
    gguf: tuple[str, ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout; with --refused one object")
    parser.add_argument("--refused", action="store_true", help="instead those that are known and do not load, and why")


def run(args: argparse.Namespace) -> int:
    if args.refused:
        from treetop.models.refused import known_refused

        print(json.dumps(known_refused()) if args.json else refused_as_markdown(), end="\n" if args.json else "")
        return 0
    print(json.dumps([asdict(row) for row in rows()]) if args.json else as_markdown(), end="\n" if args.json else "")
    return 0


def rows() -> list[ModelRow]:
    """By the registries of targets, drafts, formats and GGUF files."""
    from treetop.checkpoints.gguf.architectures import names_of
    from treetop.drafts.registry import DRAFTERS, ONLY_FOR
    from treetop.models.registry import FAMILIES
    from treetop.weights.registry import FORMATS

    drafts, formats = (*DRAFTERS, "NGRAM"), tuple(FORMATS)
    return [
        ModelRow(
            name,
            family.about,
            bool(family.text_of),
            tuple(
                draft
                for draft in (*drafts, *(("MTP",) if family.mtp else ()))
                if name.startswith(ONLY_FOR.get(draft, ""))
            ),
            formats,
            names_of(name),
        )
        for name, family in sorted(FAMILIES.items())
    ]


def as_markdown() -> str:
    """The tables that stand in docs/models.md; drafts are those that not every target may have."""
    from treetop.weights.registry import FORMATS

    lines = ["| architecture | what differs from Llama | own drafts |", "|---|---|---|"]
    common = set.intersection(*(set(row.drafts) for row in rows()))
    for row in rows():
        what = f"{row.differs_in}; images are refused" if row.text_only else row.differs_in
        own = ", ".join(each for each in row.drafts if each not in common)
        lines.append(f"| `{row.architecture}` | {what} | {own} |")
    lines += ["", "| `quant_method` | what is read |", "|---|---|"]
    lines += [f"| `{name}` | {method.about} |" for name, method in FORMATS.items()]
    lines += ["", "| architecture of a GGUF file | read as |", "|---|---|"]
    lines += [f"| `{name}` | `{row.architecture}` |" for row in rows() for name in row.gguf]
    return "\n".join(lines) + "\n"


def refused_as_markdown() -> str:
    """The table of what is refused that stands in docs/models.md."""
    from treetop.models.refused import known_refused

    lines = ["| why it is refused | architectures |", "|---|---|"]
    lines += [f"| {why} | {', '.join(names)} |" for why, names in known_refused().items()]
    return "\n".join(lines) + "\n"
