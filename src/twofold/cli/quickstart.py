"""`twofold quickstart`: the main variants side by side on real text, and the page that compares them."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where runs and report go.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(min=0, help="Seeds weights and data order.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs that train side by side. Default: one a core.")
    ] = None,
) -> None:
    """Train the paper's eight variants and one more on Wikipedia text, measure each cache, write report.html.

    Takes some minutes. Interrupted, it goes on where it was when the same command runs again.
    """
    from twofold.cli.progress import RunProgress
    from twofold.report import write_report
    from twofold.study import quickstart_configs, run_quickstart

    configs = quickstart_configs(seed)
    steps = next(iter(configs.values())).train.steps
    with RunProgress(list(configs), steps) as progress:
        run_quickstart(
            output,
            seed=seed,
            num_workers=workers,
            on_metrics=progress.show,
            on_phase=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(write_report(output))
