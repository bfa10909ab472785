"""The paper's own comparison: its models and variants, what they save here and what was published."""

from collections.abc import Iterator, Mapping
from typing import Any

from twofold.bench import Table
from twofold.report.published import PublishedInference, load_inference

LARGE = "--preset gpt-1.2b --variant QKV --variant Q-K=V --variant Q-MQA"
MODELS = {"gpt-300m": "--preset gpt-300m", "gpt-1.2b": LARGE}
CASES = "--context 2048"
COMMANDS = [f"bench {verb} {model} {CASES}" for model in MODELS.values() for verb in ("memory", "decode --repeats 3")]

COLUMNS = (
    "variant",
    "peak memory",
    "against QKV",
    "paper",
    "tokens/s",
    "against QKV",
    "paper",
    "ms/token",
    "cache saved",
    "paper",
)
NOTES = (
    "Peak memory is that of a generation with the cache that `generate` makes, without the program itself.",
    "Time is that of `generate`, all variants in turn; in ms/token every sequence of the batch gets a token.",
    "The paper measured on an A100, with lengths that we do not know; what is empty was not published.",
)


def tables(records: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each model and batch size.

    Args:
        records: What the commands left, by command.
    """
    published = load_inference()
    for model, options in MODELS.items():
        memory, decode = (
            next(record for command, record in records.items() if f"bench {verb}" in command and options in command)
            for verb in ("memory", "decode")
        )
        peaks = [row for row in memory["rows"] if row["cache"] == "growing"]
        steps = [row for row in decode["rows"] if row["way"] == "generate"]
        for context, size in dict.fromkeys((row["context"], row["batch_size"]) for row in peaks):
            at = [{row["contender"]: row for row in rows if row["batch_size"] == size} for rows in (peaks, steps)]
            yield Table(
                title=f"{model} at {context:,} tokens, batch {size}, {memory['dtype']}",
                columns=COLUMNS,
                rows=tuple(rows(*at, published[model])),
                notes=NOTES,
            )


def rows(
    peaks: Mapping[str, Any], steps: Mapping[str, Any], published: Mapping[str, PublishedInference]
) -> Iterator[tuple[str, ...]]:
    """A row for each variant that both commands measured; QKV is what the others are compared with."""
    needed = {name: peak["peak"] - peak["program"] for name, peak in peaks.items()}
    for name, step in steps.items():
        paper = published.get(name)
        yield (
            name,
            f"{needed[name] / 2**20:,.0f} MiB",
            change(needed[name], needed["QKV"]),
            between(paper and paper.peak_memory),
            f"{step['tokens_per_second']:,.1f}",
            change(step["tokens_per_second"], steps["QKV"]["tokens_per_second"]),
            between(paper and paper.throughput),
            f"{step['cpu_ms']['median']:,.1f}",
            f"{100 * (1 - step['cache_bytes'] / steps['QKV']['cache_bytes']):g} %",
            f"{paper.cache_reduction:g} %" if paper else "",
        )


def change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f} %"


def between(bounds: tuple[float, float] | None) -> str:
    return "" if bounds is None else f"{bounds[0]:+.1f} to {bounds[1]:+.1f} %"
