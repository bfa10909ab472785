"""Numbers as text and sentences. What the seeds cannot tell apart is never put in an order."""

from datetime import datetime
from fractions import Fraction

from twofold.cost import format_decimal
from twofold.report.published import Published
from twofold.report.quickstart import BASELINE, Quickstart, VariantRun
from twofold.report.statistics import Interval

DASH = "–"
_SPACE = "\N{NO-BREAK SPACE}"
_SOURCES = {
    "paper": "from the paper",
    "repo": "from the authors’ repository",
    "secondary": "from third parties who quote the paper",
}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def number_word(count: int) -> str:
    """`five` for 5; digits from eleven on."""
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)


def fixed(value: float | None, digits: int) -> str:
    """A figure with a fixed number of decimals and thousands separators; a dash when there is none."""
    if value is None:
        return DASH
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")


def signed(value: float | None, digits: int = 1) -> str:
    """A difference with its sign: `+3.1`, `−0.4`, `0.0`."""
    text = fixed(value, digits)
    return text if value is None or text.startswith("−") or float(text.replace(",", "")) == 0 else f"+{text}"


def percent(value: float | None, digits: int = 1) -> str:
    """A signed difference in percent."""
    return DASH if value is None else f"{signed(value, digits)}{_SPACE}%"


def reduction(share: Fraction | None) -> str:
    """A share of the cache as the reduction it means, exactly: `−93.75 %`; `0 %` where nothing is saved."""
    if share is None:
        return DASH
    saved = 1 - share
    return f"{'−' if saved > 0 else '+' if saved < 0 else ''}{format_decimal(abs(saved) * 100)}{_SPACE}%"


def plus_minus(interval: Interval) -> str:
    """`+2.1 % ± 0.4`."""
    return f"{percent(interval.mean)} ± {fixed(interval.half_width, 1)}"


def seed_sentence(interval: Interval) -> str:
    """What the seeds say about one variant's perplexity against QKV."""
    if not interval.excludes_zero:
        return f"no difference that {number_word(interval.count)} seeds can tell"
    verb = "costs" if interval.mean > 0 else "lowers perplexity by"
    size = f"{fixed(abs(interval.mean), 1)}{_SPACE}% ± {fixed(interval.half_width, 1)}"
    return f"{verb} {size} perplexity" if interval.mean > 0 else f"{verb} {size}"


def when(timestamp: str) -> str:
    """An ISO 8601 time for readers: `2026-12-01 09:00 UTC`."""
    try:
        time = datetime.fromisoformat(timestamp)
    except ValueError:
        return timestamp
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".strip()


def sources(published: Published) -> str:
    """Where the published figures come from: `QKV and Q-K=V from the paper; ...`."""
    labels: dict[str, list[str]] = {}
    for row in published.variants.values():
        labels.setdefault(row.source, []).append(row.label)
    return "; ".join(f"{_listed(names)} {_SOURCES[source]}" for source, names in labels.items())


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def headline(quickstart: Quickstart) -> str:
    """The answer in one sentence, from the numbers."""
    if quickstart.baseline is None:
        return "The reference run QKV has no result yet, so nothing can be compared with it."
    variant = _headline_variant(quickstart)
    if variant is None:
        return "No variant with one cached tensor has finished yet, so the question is still open."
    share = quickstart.cache_share(variant)
    if share == Fraction(1, 2):
        verb = f"halves the KV cache ({reduction(share)})"
    else:
        verb = f"changes the KV cache by {reduction(share)}"
    where = "" if quickstart.seed_increase(variant) else " in this run"
    return f"{variant.label} {verb} {_price(quickstart, variant)}{where}."


def answer(quickstart: Quickstart) -> list[str]:
    """The sentences below the headline: the smallest cache, and decode speed."""
    sentences = []
    priced = [run for run in _comparable(quickstart) if quickstart.increase(run) is not None]
    smallest = min(priced, key=lambda run: run.cache_bytes or 0, default=None)
    first = _headline_variant(quickstart)
    if smallest is not None and smallest is not first and smallest.slug != BASELINE:
        saved = reduction(quickstart.cache_share(smallest))
        sentences.append(f"{smallest.label} has the smallest cache: {saved}, {_price(quickstart, smallest)}.")
    compared = [first, smallest] if smallest is not first else [first]
    speeds = [text for run in compared if run is not None and (text := _speed(quickstart, run))]
    if speeds and quickstart.decode is not None:
        sentences.append(f"At {quickstart.decode['context']:,} tokens of context, {', '.join(speeds)}.")
    return sentences


def confidence(quickstart: Quickstart) -> str:
    """How sure the comparison is, and why an interval is drawn or not."""
    if quickstart.seeds:
        count = number_word(len(quickstart.seeds.seeds))
        return f"Costs are means of {count} seeds with 95 % intervals, paired by seed."
    single = "One seed for each variant, so no interval is drawn; small differences may be noise."
    if (other := quickstart.other_seeds) is not None:
        return (
            f"{single} The packaged record of {number_word(len(other.seeds))} seeds was made with other settings "
            "or data and is not mixed in."
        )
    return single


def other_positions(quickstart: Quickstart) -> str:
    """Says which variants differ from QKV in their positions too, so that their cost is not laid to sharing alone."""
    baseline = quickstart.baseline
    if baseline is None or baseline.config is None:
        return ""
    others = [
        f"{run.label} ({run.config.model.positions})"
        for run in quickstart.finished
        if run.config is not None and not quickstart.comparable(run)
    ]
    if not others:
        return ""
    return (
        f"Other positions than QKV’s ({baseline.config.model.positions}): {', '.join(others)}. "
        "The distance from QKV is then not the price of sharing alone."
    )


def indistinguishable_pairs(quickstart: Quickstart) -> list[tuple[str, str]]:
    """Labels of the pairs of variants whose paired difference includes zero."""
    if quickstart.seeds is None:
        return []
    runs, pairs = quickstart.variants, []
    for index, first in enumerate(runs):
        for second in runs[index + 1 :]:
            interval = quickstart.seeds.increase(first.slug, second.slug)
            if interval is not None and not interval.excludes_zero:
                pairs.append((first.label, second.label))
    return pairs


def _comparable(quickstart: Quickstart) -> list[VariantRun]:
    return [run for run in quickstart.finished if quickstart.comparable(run)]


def _headline_variant(quickstart: Quickstart) -> VariantRun | None:
    shared = [run for run in _comparable(quickstart) if run.one_tensor and quickstart.increase(run) is not None]
    return next((run for run in shared if run.slug == "tied-kv"), shared[0] if shared else None)


def _price(quickstart: Quickstart, variant: VariantRun) -> str:
    interval = quickstart.seed_increase(variant)
    if interval is None:
        return f"for {percent(quickstart.increase(variant))} perplexity"
    if not interval.excludes_zero:
        return f"with {seed_sentence(interval)} in perplexity"
    return f"for {plus_minus(interval)} perplexity"


def _speed(quickstart: Quickstart, variant: VariantRun) -> str:
    baseline = quickstart.baseline
    if baseline is None or variant is baseline or baseline.decode is None or variant.decode is None:
        return ""
    ours, theirs = variant.decode["milliseconds_per_token"], baseline.decode["milliseconds_per_token"]
    if ours["low"] <= theirs["high"] and theirs["low"] <= ours["high"]:
        return f"{variant.label} decodes as fast as QKV within the spread of the repeats"
    ratio = f"{variant.label} decodes {fixed(theirs['median'] / ours['median'], 2)} times as fast as QKV"
    return f"{ratio} ({fixed(theirs['median'], 2)} → {fixed(ours['median'], 2)} ms per token)"
