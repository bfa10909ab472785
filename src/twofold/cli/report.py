"""`twofold report`: the page of a quickstart, written again from its records."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A quickstart's folder.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html in the folder.")
    ] = None,
) -> None:
    """Write the HTML page of a quickstart from its records; nothing is trained or measured."""
    from twofold.report import write_report

    print(write_report(folder, output))
