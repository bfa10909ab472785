"""What a benchmark leaves behind: plain data for programs, and the same as tables for people."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from twofold.bench.peers import PEERS
from twofold.bench.runner import Measured, Row, Spread
from twofold.cost import format_bytes
from twofold.kernels import describe
from twofold.records import cpu_name, describe_environment, num_cores
from twofold.spec import ModelConfig, encode


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table whose first column is text and whose others are figures."""

    title: str
    """A line above it."""
    columns: tuple[str, ...]
    """Headings."""
    rows: tuple[tuple[str, ...], ...]
    """One text for each column."""
    notes: tuple[str, ...] = ()
    """Lines below it."""


def measured_record(measured: Measured, config: ModelConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run as plain data, with machine and versions.

    Args:
        measured: What was found.
        config: The model that the variants were made from.
        settings: What else was asked for: the dtype and so on.
    """
    return {**settings, **asdict(measured), **surroundings(config)}


def surroundings(config: ModelConfig) -> dict[str, Any]:
    """What figures are worth nothing without: model, attention, versions, machine."""
    found = {package: _version(package) for packages in PEERS.values() for package in packages}
    return {
        "model": encode(config),
        "attention": describe(),
        "peers": {package: number for package, number in found.items() if number is not None},
        "environment": describe_environment(),
    }


def measured_tables(measured: Measured, dtype: str) -> list[Table]:
    """A table for each context and batch size."""
    cases = dict.fromkeys((row.context, row.batch_size) for row in measured.rows)
    clock = "CPU time decides" if measured.threads == 1 else "time on the clock decides"
    what = "Decoding after" if measured.task == "decode" else "A prompt of"
    threads = f"{measured.threads} thread{'' if measured.threads == 1 else 's'}"
    bandwidth = f"{measured.read_bandwidth / 1e9:.1f} GB/s (10^9 bytes)"
    rounds = f"Medians of {measured.rounds} rounds in turn (lowest-highest); {clock}."
    notes = (rounds, f"The same run reads {bandwidth}.") if measured.task == "decode" else (rounds,)
    return [
        Table(
            title=f"{what} {context:,} tokens, batch {batch_size}, {dtype}, {threads}",
            columns=_DECODE_COLUMNS if measured.task == "decode" else _PREFILL_COLUMNS,
            rows=tuple(
                _cells(row, measured.task)
                for row in measured.rows
                if (row.context, row.batch_size) == (context, batch_size)
            ),
            notes=(*notes, *measured.notes),
        )
        for context, batch_size in cases
    ]


def markdown(tables: Sequence[Table]) -> str:
    """Tables for a Markdown page."""
    parts = []
    for table in tables:
        aligned = ["---", *["---:"] * (len(table.columns) - 1)]
        lines = [f"**{table.title}**", "", _line(table.columns), _line(aligned), *map(_line, table.rows)]
        parts.append("\n".join(lines))
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def write_result(path: Path, command: str, tables: Sequence[Table], record: Mapping[str, Any]) -> None:
    """Writes a page with the tables, and the data beside it.

    Args:
        path: The page, `.md`; the data's name differs in ending with `.json`.
        command: What was run.
        tables: What to show.
        record: What to keep.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    page = f"# {cpu_name()}, {num_cores()} cores\n\n    {command}\n\n{markdown(tables)}"
    path.write_text(page, encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")


def hardware_slug() -> str:
    """This machine's name for files: `amd-epyc-2-cores`."""
    name = re.sub(r"\(.*?\)|@.*|\d+-core|processor|cpu", " ", cpu_name().casefold())
    return "-".join([*re.findall(r"[a-z0-9.]+", name), str(num_cores()), "cores"])


_DECODE_COLUMNS = (
    "contender",
    "ms/token (CPU)",
    "low-high",
    "ms/token (wall)",
    "low-high",
    "tokens/s",
    "cache",
    "must move",
    "of bandwidth",
)
_PREFILL_COLUMNS = ("contender", "ms (CPU)", "low-high", "ms (wall)", "low-high", "tokens/s", "cache")


def _cells(row: Row, task: str) -> tuple[str, ...]:
    cells = (
        f"{row.contender} · {row.way}" if task == "decode" else row.contender,
        *_spread(row.cpu_ms),
        *_spread(row.wall_ms),
        f"{row.tokens_per_second:,.1f}",
        format_bytes(row.cache_bytes),
    )
    if row.moved_bytes is None or row.bandwidth_share is None:
        return cells
    return (*cells, format_bytes(row.moved_bytes), f"{row.bandwidth_share:.0%}")


def _spread(spread: Spread) -> tuple[str, str]:
    return f"{spread.median:.1f}", f"{spread.low:.1f}-{spread.high:.1f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
