"""What verbs print: tables for people, JSON for programs."""

import json
import sys
from collections.abc import Sequence
from typing import Any

# A log or a pipe has no width to fit. Rich would assume 80 columns there and break what is longer.
_WIDTH_WITHOUT_TERMINAL = 1_000


def print_json(data: Any) -> None:
    """Prints plain data as JSON on standard output."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Prints a table whose first column is text and whose other columns are figures, aligned to the right.

    Args:
        title: A line above the table.
        columns: Headings.
        rows: One text for each column.
        notes: Lines below the table.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(Text(title, style="bold"))
    console.print(table)
    for note in notes:
        console.print(Text(note))
