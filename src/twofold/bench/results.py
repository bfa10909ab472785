"""What a benchmark leaves behind: plain data for programs, and the same as tables for people."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from twofold.bench.contender import Spread
from twofold.bench.memory import (
    REST_LIMIT,
    REST_SPREAD,
    USERS_MEMORY,
    USERS_TOKENS,
    PeakMemory,
    users,
)
from twofold.bench.peers import PEERS
from twofold.bench.runner import Measured, Row
from twofold.cost import format_bytes, format_percent
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


def memory_record(
    peaks: Sequence[PeakMemory], config: ModelConfig, variants: Mapping[str, ModelConfig], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Peaks as plain data, with machine and versions; see `measured_record`."""
    return {
        **settings,
        "task": "memory",
        "rows": [{**asdict(peak), "rest": peak.rest} for peak in peaks],
        "users": {name: users(variant, settings["dtype"]) for name, variant in variants.items()},
        "rest_limit": REST_LIMIT,
        "rest_spread_limit": REST_SPREAD,
        **surroundings(config),
    }


def memory_tables(
    peaks: Sequence[PeakMemory], variants: Mapping[str, ModelConfig], dtype: str, cache_dtype: str | None
) -> list[Table]:
    """What peaks are made of, for each context and batch size; then how many users fit."""
    tables = []
    kinds = spell_kinds(dtype, cache_dtype)
    for context, batch_size in dict.fromkeys((peak.context, peak.batch_size) for peak in peaks):
        chosen = [peak for peak in peaks if (peak.context, peak.batch_size) == (context, batch_size)]
        tables.append(
            Table(
                title=f"Peak memory of a generation up to {context:,} tokens, batch {batch_size}, {kinds}",
                columns=("variant", "cache", "peak", "program", "weights", "exact cache", "rest", "cache saved"),
                rows=tuple(_memory_cells(peak) for peak in chosen),
                notes=tuple(_judge(chosen)),
            )
        )
    return [*tables, _users_table(variants, dtype)]


def _users_table(variants: Mapping[str, ModelConfig], dtype: str) -> Table:
    counts = {name: users(variant, dtype) for name, variant in variants.items()}
    kinds_of_cache = tuple(dict.fromkeys(kind for count in counts.values() for kind in count))
    return Table(
        title=f"Users with {USERS_TOKENS:,} tokens each that fit in {format_bytes(USERS_MEMORY)} beside the weights "
        f"in {dtype}, by the type of the cache: arithmetic",
        columns=("variant", *kinds_of_cache),
        rows=tuple(
            (name, *(f"{count[kind]:,}" if kind in count else "none" for kind in kinds_of_cache))
            for name, count in counts.items()
        ),
    )


def _memory_cells(peak: PeakMemory) -> tuple[str, ...]:
    sizes = (peak.peak, peak.program, peak.weight_bytes, peak.cache_bytes, peak.rest)
    saved = format_percent(1 - Fraction(peak.cache_bytes, peak.unshared_bytes))
    return (peak.contender, peak.cache, *(f"{size / 2**20:,.1f} MiB" for size in sizes), saved)


def _judge(peaks: Sequence[PeakMemory]) -> Iterator[str]:
    """Whether weights and cache explain the peaks."""
    for kind in dict.fromkeys(peak.cache for peak in peaks):
        rests = [peak.rest for peak in peaks if peak.cache == kind]
        most, apart = max(rests), max(rests) - min(rests)
        verdict = "met" if most <= REST_LIMIT and apart <= REST_SPREAD else "NOT met"
        yield (
            f"{kind} cache: the rest is {most / 2**20:.0f} MiB at most and differs by {apart / 2**20:.0f} MiB; "
            f"{REST_LIMIT >> 20} and {REST_SPREAD >> 20} MiB are allowed: {verdict}."
        )


def surroundings(config: ModelConfig) -> dict[str, Any]:
    """What figures are worth nothing without: model, attention, versions, machine."""
    found = {package: _version(package) for packages in PEERS.values() for package in packages}
    return {
        "model": encode(config),
        "attention": describe(),
        "peers": {package: number for package, number in found.items() if number is not None},
        "environment": describe_environment(),
    }


def measured_tables(measured: Measured, kinds: str) -> list[Table]:
    """A table for each context and batch size.

    Args:
        measured: What was found.
        kinds: The types of weights and cache, for the title.
    """
    cases = dict.fromkeys((row.context, row.batch_size) for row in measured.rows)
    clock = "CPU time decides" if measured.threads == 1 else "time on the clock decides"
    what = "Decoding after" if measured.task == "decode" else "A prompt of"
    threads = f"{measured.threads} thread{'' if measured.threads == 1 else 's'}"
    bandwidth = f"{measured.read_bandwidth_gb_s:.1f} GB/s (10^9 bytes)"
    rounds = f"Medians of {measured.rounds} rounds in turn (lowest-highest); {clock}."
    notes = (rounds, f"The same run reads {bandwidth}.") if measured.task == "decode" else (rounds,)
    return [
        Table(
            title=f"{what} {context:,} tokens, batch {batch_size}, {kinds}, {threads}",
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


def spell_kinds(dtype: str, cache_dtype: str | None, weights: str | None = None) -> str:
    """`float32 with linear layers in int8, a cache in int8`; peers have types of their own where their names say so."""
    narrow = {"linear layers": weights, "a cache": cache_dtype}
    spelled = ", ".join(f"{what} in {kind}" for what, kind in narrow.items() if kind is not None)
    return f"{dtype} with {spelled}" if spelled else dtype


def markdown(tables: Sequence[Table]) -> str:
    """Tables for a Markdown page."""
    parts = []
    for table in tables:
        aligned = ["---", *["---:"] * (len(table.columns) - 1)]
        lines = [f"**{table.title}**", "", _line(table.columns), _line(aligned), *map(_line, table.rows)]
        parts.append("\n".join(lines))
    notes = dict.fromkeys(note for table in tables for note in table.notes)
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def write_result(path: Path, tables: Mapping[str, Sequence[Table]], record: Any) -> None:
    """Writes a page with tables, and the data beside it.

    Args:
        path: The page, `.md`; the data's name differs in ending with `.json`.
        tables: What to show, by the command that was run.
        record: What to keep, as plain data.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"# {cpu_name()}, {num_cores()} cores"]
    parts += [f"    {command}\n\n{markdown(shown)}" for command, shown in tables.items()]
    path.write_text("\n\n".join(parts), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")


def hardware_slug() -> str:
    """This machine's name for files: `amd-epyc-avx512-2-cores`."""
    name = re.sub(r"\(.*?\)|@.*|\d+-core|processor|cpu", " ", cpu_name().casefold())
    vectors = torch.backends.cpu.get_cpu_capability()  # virtual machines call many processors by one name
    return "-".join([*re.findall(r"[a-z0-9.]+", f"{name} {vectors}".casefold()), str(num_cores()), "cores"])


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
