"""Draws docs/images/decode.png from the results of a machine: time of a token after contexts of several lengths.

.venv/bin/python benchmarks/figure.py benchmarks/results/MACHINE.json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

PICTURE = Path(__file__).parents[1] / "docs/images/decode.png"
OURS, PEERS = ("#c2410c", "#0f766e", "#4338ca"), "#6b7280"
Lines = dict[str, dict[int, tuple[float, float, float]]]


def variants_of(record: dict[str, Any]) -> list[str]:
    """Our own contenders, by our own attention."""
    ours = dict.fromkeys(row["contender"] for row in record["rows"] if row["way"] == "generate")
    return [name for name in ours if not name.endswith("torch attention")]


def lines_of(record: dict[str, Any], peers: Sequence[str]) -> Lines:
    """Milliseconds a token by context, each with its lowest and highest round: ours through `generate`, and others."""
    lines: Lines = {}
    for row in record["rows"]:
        name, way = row["contender"], row["way"]
        if way == "generate" and name in variants_of(record):
            line = name
        elif name in peers:
            line = name if way == "loop" else f"{name} {way}"
        else:
            continue
        time = row["cpu_ms"]
        lines.setdefault(line, {})[row["context"]] = (time["median"], time["low"], time["high"])
    return lines


def draw(axes: Any, title: str, record: dict[str, Any], peers: Sequence[str]) -> None:
    lines, ends = lines_of(record, peers), []
    colors = dict(zip(variants_of(record), OURS, strict=False))
    for name, points in lines.items():
        contexts, times = zip(*sorted(points.items()), strict=True)
        middle, low, high = zip(*times, strict=True)
        color, style = colors.get(name, PEERS), "-" if name in colors else "--"
        around = [
            [m - each for m, each in zip(middle, low, strict=True)],
            [h - m for m, h in zip(middle, high, strict=True)],
        ]
        axes.errorbar(contexts, middle, around, color=color, linestyle=style, marker="o", markersize=4, capsize=2)
        ends.append(
            (contexts[-1], middle[-1], high[-1], f"{name}  {middle[-1]:,.{0 if middle[-1] >= 100 else 1}f}", color)
        )
    axes.set_title(title, loc="left")
    axes.set(xlabel="tokens in the cache", ylabel="ms a token", xscale="log", yscale="log")
    contexts = sorted({context for points in lines.values() for context in points})
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    lowest = min(low for points in lines.values() for _, low, _ in points.values())
    highest = max(high for points in lines.values() for *_, high in points.values())
    ticks = [tick for tick in (5, 10, 20, 50, 100, 200, 500, 1000) if lowest / 1.5 < tick < highest * 1.5]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.grid(visible=True, axis="y", color="#e5e7eb")
    axes.spines[["top", "right"]].set_visible(False)
    place = 0.0
    for context, time, high, label, color in sorted(ends, key=lambda end: end[1]):
        if context < contexts[-1]:  # a line that ends early is labelled above its end
            offset = {"xytext": (0, 6), "ha": "center", "va": "bottom"}
            axes.annotate(label, (context, high), textcoords="offset points", color=color, **offset)
            continue
        place = max(time, place * 1.18)  # labels of neighbours are moved apart
        offset = {"xytext": (8, 0), "va": "center"}
        axes.annotate(label, (context, place), textcoords="offset points", color=color, **offset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    records = json.loads(parser.parse_args().results.read_text(encoding="utf-8"))
    decoding = [record for record in records.values() if record.get("task") == "decode" and record["threads"] == 1]
    exact = [r for r in decoding if r["cache_dtype"] is None and all(row["batch_size"] == 1 for row in r["rows"])]
    together = {**exact[0], "rows": [row for record in exact for row in record["rows"]]}  # contexts, each of its run
    small = next(record for record in decoding if record["cache_dtype"] == "int8")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    draw(left, "float32", together, ("transformers-gpt2", "x-transformers", "llama.cpp-f32"))
    draw(right, "int8 weights and cache; llama.cpp: Q8_0 and q8_0", small, ("llama.cpp-q8_0",))
    figure.suptitle(f"One thread of {together['environment']['cpu']}: 12 layers, 768 wide, 12 heads, batch 1")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
