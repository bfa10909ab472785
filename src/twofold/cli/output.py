"""What verbs print: tables for people, JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

_UNLIMITED = 10_000


def print_json(data: Any) -> None:
    """Prints plain data as JSON on standard output."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_json_line(data: Any) -> None:
    """Prints plain data as one line of JSON, which programs find last on standard output."""
    print(json.dumps(data, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Prints a table whose first column is text and whose other columns are figures, aligned to the right.

    No figure is cut or broken: a table that is wider than the terminal, the pipe or the log runs over its edge.

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

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    needed = console.measure(table, options=console.options.update(width=_UNLIMITED)).maximum
    console.width = max(console.width, needed)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table, crop=False)
    for note in notes:
        console.print(Text(note), soft_wrap=True)
