"""Progress of one run or of several side by side: bars on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

_LOG_SECONDS = 15.0


class RunProgress:
    """Shows steps, loss and speed of runs, on standard error.

    Use it as a context manager; call `show` with every run's metrics whenever they may have changed.

    Args:
        names: The runs, in order.
        steps: Steps that each of them takes.
    """

    def __init__(self, names: Sequence[str], steps: int) -> None:
        self.names, self.steps = names, steps
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> "RunProgress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self._bars = Progress(*columns, console=Console(stderr=True))
            self._tasks = {name: self._bars.add_task(name, total=self.steps, figures="") for name in self.names}
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Shows where the runs are.

        Args:
            metrics: All rows of metrics of each run, by name.
        """
        if self._bars is not None:
            for name, rows in metrics.items():
                if rows:
                    figures = _figures(rows)
                    self._bars.update(self._tasks[name], completed=rows[-1]["step"], figures=figures)
            return
        now = time.monotonic()
        done = all(rows and rows[-1]["step"] >= self.steps for rows in metrics.values())
        if now - self._logged >= _LOG_SECONDS or (done and self._logged < now):
            self._logged = float("inf") if done else now
            self._log(metrics, now)

    def _log(self, metrics: Mapping[str, Sequence[Mapping[str, Any]]], now: float) -> None:
        steps = sum(rows[-1]["step"] for rows in metrics.values() if rows)
        running = [
            f"{name} {rows[-1]['step']}/{self.steps} {_figures(rows)}"
            for name, rows in metrics.items()
            if rows and (rows[-1]["step"] < self.steps or len(self.names) == 1)
        ]
        share = steps / (self.steps * len(self.names))
        line = f"{now - self._started:5.0f} s  {share:4.0%}  {'; '.join(running)}"
        print(line.rstrip(), file=sys.stderr, flush=True)


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    row = next((row for row in reversed(rows) if "loss" in row), None)
    if row is None:
        return ""
    loss = "diverged" if row["loss"] is None else f"loss {row['loss']:.3f}"
    return f"{loss}, {row['tokens_per_second']:,.0f} tokens/s"
