"""What the figures show: points and curves from a quickstart, and their alternatives in words."""

from typing import Any

from twofold.report.charts import Point, quality_against_cache, training_curve
from twofold.report.published import Published
from twofold.report.quickstart import BASELINE, Quickstart, VariantRun
from twofold.report.words import percent, plus_minus, reduction

_MAX_CURVE_POINTS = 150


def main_figures(quickstart: Quickstart, published: Published) -> dict[str, str] | None:
    """The quality-against-cache plot for wide and narrow screens, and its text; None without a finished QKV run."""
    baseline = quickstart.baseline
    if baseline is None or not baseline.cache_bytes:
        return None
    points = [point for run in quickstart.finished if (point := _point(quickstart, run)) is not None]
    points += [
        Point(
            label=row.label,
            share=float(row.cache_share),
            increase=row.increase,
            own=False,
            one_tensor=row.one_tensor,
        )
        for row in published.variants.values()
        if row.label != baseline.label
    ]
    kib = baseline.cache_bytes / 1024
    told = "; ".join(
        f"{run.label} {reduction(quickstart.cache_share(run))} cache, {_cost(quickstart, run)} perplexity"
        for run in quickstart.finished
        if run is not baseline
    )
    return {
        "wide": quality_against_cache(points, kib, width=1080, height=520, name="wide"),
        "narrow": quality_against_cache(points, kib, width=360, height=440, name="narrow"),
        "text": f"Perplexity increase against cache per token, both relative to QKV. {told}.",
    }


def curve_figures(quickstart: Quickstart) -> list[dict[str, Any]]:
    """One small training curve for each variant that has rows, finished or not."""
    runs = [run for run in quickstart.variants if any(row.get("loss") is not None for row in run.metrics)]
    if not runs:
        return []
    steps = max(row["step"] for run in runs for row in run.metrics)
    settled = [
        row["loss"] for run in runs for row in run.metrics if row.get("loss") is not None and row["step"] >= 0.1 * steps
    ]
    settled += [loss for run in runs for loss in _series(run, "validation_loss")[1]]
    if not settled:
        return []
    low, high = min(settled), max(settled)
    margin = 0.05 * (high - low) or 0.5
    limits = (low - margin, high + margin)
    reference = next((run for run in runs if run.slug == BASELINE), None)
    behind = [_series(reference, name) for name in ("loss", "validation_loss")] if reference else []
    return [
        {
            "label": run.label,
            "one_tensor": run.one_tensor,
            "svg": training_curve(
                [_series(run, name) for name in ("loss", "validation_loss")],
                [] if run is reference else behind,
                limits=limits,
                steps=steps,
                one_tensor=run.one_tensor,
                name=f"curve{number}",
            ),
        }
        for number, run in enumerate(runs)
    ]


def _cost(quickstart: Quickstart, run: VariantRun) -> str:
    """What the plot shows in words: the mean of the seeds where there is a record, else this folder's run."""
    interval = quickstart.seed_increase(run)
    return percent(quickstart.increase(run)) if interval is None else plus_minus(interval)


def _point(quickstart: Quickstart, run: VariantRun) -> Point | None:
    share, increase, interval = quickstart.cache_share(run), quickstart.increase(run), quickstart.seed_increase(run)
    if share is None or increase is None:
        return None
    shown = interval is not None and run.slug != BASELINE
    return Point(
        label=run.label,
        share=float(share),
        increase=interval.mean if interval is not None else increase,
        low=interval.low if interval is not None and shown else None,
        high=interval.high if interval is not None and shown else None,
        own=True,
        one_tensor=run.one_tensor,
        comparable=quickstart.comparable(run),
    )


def _series(run: VariantRun, name: str) -> tuple[list[float], list[float]]:
    rows = [(row["step"], row[name]) for row in run.metrics if row.get(name) is not None]
    stride = -(-len(rows) // _MAX_CURVE_POINTS) or 1
    return [step for step, _ in rows[::stride]], [value for _, value in rows[::stride]]
