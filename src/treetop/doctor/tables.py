"""Tables as the doctor prints them."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(console: Console, title: str, columns: tuple[str, ...], rows: list[Any]) -> None:
    """columns: their headings; none is shown if all are empty."""
    table = Table(*columns, title=title, title_justify="left", show_header=any(columns))
    for row in rows:
        table.add_row(*row)
    console.print(table)
