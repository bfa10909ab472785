"""The report of a quickstart: from its folder to one HTML file that needs nothing else."""

import re
from pathlib import Path
from typing import Any

from twofold.records import write_text_atomic
from twofold.report import words
from twofold.report.figures import curve_figures, main_figures
from twofold.report.published import Published, load_published
from twofold.report.quickstart import BASELINE, Quickstart, VariantRun, load_quickstart
from twofold.report.statistics import seed_interval
from twofold.report.words import DASH, fixed, percent, reduction, signed

SEED_RECORD = Path(__file__).parent / "seed_record.json"
"""Losses over several seeds, measured before the release. The page works without it."""
_KIB, _MIB = 1024, 1024**2
_POSITIONS = {
    "learned": "positions are learned, as in the paper",
    "sinusoidal": "positions are sinusoidal; the paper’s are learned",
    "rope": "positions are rotary; the paper’s are learned",
    "none": "no positions; the paper’s are learned",
}


def write_report(folder: Path, output: Path | None = None, *, seed_record: Path = SEED_RECORD) -> Path:
    """Writes the report of a quickstart folder as one self-contained HTML file.

    Args:
        folder: What `twofold quickstart` made; runs in it may be unfinished.
        output: The file to write. Default: report.html in the folder.
        seed_record: Losses over several seeds, for intervals; the file need not exist.

    Returns:
        The file's path.

    Raises:
        RunFolderError: where the folder is no quickstart, or a file in it cannot be read.
    """
    quickstart = load_quickstart(folder, seed_record)
    html = _render(build_page(quickstart, load_published()))
    output = folder / "report.html" if output is None else output
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(output, html)
    return output


def build_page(quickstart: Quickstart, published: Published) -> dict[str, Any]:
    """Everything that the template prints, as text."""
    models = [run.config.model for run in quickstart.variants if run.config is not None]
    return {
        "headline": words.headline(quickstart),
        "answer": words.answer(quickstart),
        "figures": main_figures(quickstart, published),
        "rows": [_row(quickstart, published, run) for run in quickstart.variants],
        "decode": _decode(quickstart),
        "seeds": _seeds(quickstart),
        "confidence": words.confidence(quickstart),
        "other_positions": words.other_positions(quickstart),
        "published": published,
        "sources": words.sources(published),
        "masked_increase": percent(published.masked_increase),
        "heads": models[0].num_attention_heads if models else None,
        "setup": _setup(quickstart),
        "cache_dtype": next((run.result["cache"]["dtype"] for run in quickstart.finished), ""),
        "curves": curve_figures(quickstart),
        "samples": [{"label": run.label, "one_tensor": run.one_tensor, **_sample(run)} for run in quickstart.finished],
        "provenance": _provenance(quickstart),
        "runs": [(run.label, run.run_id or DASH, run.state) for run in quickstart.variants],
    }


def _render(context: dict[str, Any]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Path(__file__).parent / "templates"
    environment = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    style = (templates / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(style=style, **context)


def _unbroken(text: str) -> Any:
    """Keeps the names of variants, which have hyphens, on one line."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\b((?:Q|GQA)[-=][\w=-]+)", r'<span class="nb">\1</span>', str(escape(text))))


def _row(quickstart: Quickstart, published: Published, run: VariantRun) -> dict[str, Any]:
    row: dict[str, Any] = {"label": run.label, "one_tensor": run.one_tensor, "state": run.state}
    if not run.finished:
        return row
    paper = published.variants.get(run.label)
    validation, cache = run.result["validation"], run.result["cache"]
    share = quickstart.cache_share(run)
    interval = quickstart.seed_increase(run)
    is_baseline = run.slug == BASELINE
    row |= {
        "parameters": f"{run.result['parameters']:,}",
        "perplexity": fixed(validation["perplexity"], 2) if run.loss is not None else "diverged",
        "bits_per_byte": fixed(validation["bits_per_byte"], 3),
        "increase": DASH if is_baseline else signed(quickstart.increase(run)),
        "interval": f"{signed(interval.mean)} ± {fixed(interval.half_width, 1)}"
        if interval and not is_baseline
        else "",
        "paper_increase": DASH if is_baseline or paper is None else signed(paper.increase),
        "cache": _kib(cache["bytes_per_token"]),
        "cache_measured": _kib(cache["bytes_per_token_measured"]),
        "cache_differs": abs(cache["bytes_per_token_measured"] / cache["bytes_per_token"] - 1) > 0.005,
        "share": float(share) if share is not None else None,
        "reduction": DASH if is_baseline else _number(reduction(share)),
        "paper_reduction": DASH if is_baseline or paper is None else _saved(paper.cache_reduction),
    }
    row["decode"] = run.decode and {
        "milliseconds": _spread(run.decode["milliseconds_per_token"], 2),
        "tokens": _spread(run.decode["tokens_per_second"], 1),
        "peak": fixed(run.decode["peak_memory_bytes"] / _MIB, 0),
    }
    return row


def _decode(quickstart: Quickstart) -> dict[str, Any] | None:
    decode = quickstart.decode
    measured = [run for run in quickstart.variants if run.decode is not None]
    if decode is None or not measured:
        return None
    bandwidth = decode["read_bandwidth_gb_s"]
    longest = max(run.decode["milliseconds_per_token"]["high"] for run in measured if run.decode)
    bars = []
    for run in measured:
        assert run.decode is not None
        speed = run.decode["milliseconds_per_token"]
        floor = run.decode["cache_bytes_used"] / (bandwidth * 1e6) if bandwidth else None
        bars.append(
            {
                "label": run.label,
                "one_tensor": run.one_tensor,
                "median": fixed(speed["median"], 2),
                "range": f"{fixed(speed['low'], 2)}–{fixed(speed['high'], 2)}",
                "width": 100 * speed["median"] / longest,
                "low": 100 * speed["low"] / longest,
                "high": 100 * speed["high"] / longest,
                "floor": None if floor is None else min(100.0, 100 * floor / longest),
                "floor_milliseconds": fixed(floor, 2),
                "used": fixed(run.decode["cache_bytes_used"] / _MIB, 1),
                "allocated": fixed(run.decode["cache_bytes_allocated"] / _MIB, 1),
            }
        )
    return {
        **{name: decode[name] for name in ("batch_size", "dtype", "threads", "attention", "repeats")},
        "context": f"{decode['context']:,}",
        "bandwidth": fixed(bandwidth, 1) if bandwidth else None,
        "hardware": quickstart.hardware,
        "bars": bars,
    }


def _seeds(quickstart: Quickstart) -> dict[str, Any] | None:
    record = quickstart.seeds
    if record is None:
        return None
    rows = []
    for run in quickstart.variants:
        loss, increase = record.loss_interval(run.slug), record.increase(run.slug)
        if loss is None or increase is None:
            continue
        bits = seed_interval(record.bits_per_byte[run.slug])
        is_baseline = run.slug == BASELINE
        rows.append(
            {
                "label": run.label,
                "one_tensor": run.one_tensor,
                "loss": f"{fixed(loss.mean, 4)} ± {fixed(loss.half_width, 4)}",
                "bits": f"{fixed(bits.mean, 3)} ± {fixed(bits.half_width, 3)}",
                "increase": DASH if is_baseline else f"{signed(increase.mean)} ± {fixed(increase.half_width, 1)}",
                "range": "" if is_baseline else f"{signed(increase.low)} to {signed(increase.high)}",
                "sentence": "the reference" if is_baseline else words.seed_sentence(increase),
            }
        )
    return {
        "count": words.number_word(len(record.seeds)),
        "seeds": ", ".join(str(seed) for seed in record.seeds),
        "hardware": record.hardware,
        "revision": record.revision,
        "created": words.when(record.created),
        "rows": rows,
        "pairs": [f"{first} and {second}" for first, second in words.indistinguishable_pairs(quickstart)],
    }


def _setup(quickstart: Quickstart) -> str:
    """What was trained, in one line."""
    run = next(iter(quickstart.finished), None)
    if run is None or run.config is None:
        return ""
    model, training = run.config.model, run.result["training"]
    return (
        f"{model.num_hidden_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
        f"about {run.result['parameters'] / 1e6:.1f} M parameters; {training['steps']:,} steps, "
        f"{training['tokens'] / 1e6:.1f} M tokens each; validated on "
        f"{run.result['validation']['tokens']:,} tokens; {_POSITIONS[model.positions]}"
    )


def _provenance(quickstart: Quickstart) -> list[tuple[str, str]]:
    environments = [run.environment for run in quickstart.variants if run.environment]

    def each(values: list[Any]) -> str:
        return "; ".join(dict.fromkeys(str(value) for value in values if value not in (None, ""))) or DASH

    def packages(environment: dict[str, Any]) -> str:
        return ", ".join(f"{name} {version}" for name, version in environment.get("packages", {}).items())

    def revision(environment: dict[str, Any]) -> str:
        found = environment.get("git_revision")
        return f"{found}{' with changes' if environment.get('git_modified') else ''}" if found else ""

    memory = [environment.get("memory_bytes") for environment in environments]
    return [
        ("Started", words.when(quickstart.created)),
        ("Hardware", quickstart.hardware),
        ("Processor", each([f"{found.get('cpu')}, {found.get('cores')} cores" for found in environments])),
        ("Memory", each([f"{bytes_ / 1024**3:.1f} GiB" for bytes_ in memory if bytes_])),
        ("Operating system", each([environment.get("os") for environment in environments])),
        ("Python", each([environment.get("python") for environment in environments])),
        ("twofold", each([environment.get("twofold") for environment in environments])),
        ("Packages", each([packages(environment) for environment in environments])),
        ("Git revision", each([revision(environment) for environment in environments])),
        ("Seed", str(quickstart.seed)),
        ("Data (SHA-256)", each([run.data_sha256 for run in quickstart.variants])),
    ]


def _kib(num_bytes: float) -> str:
    return fixed(num_bytes / _KIB, 2)


def _number(text: str) -> str:
    """A percentage without its sign, for columns that name the unit in their head."""
    return text.replace("%", "").strip()


def _sample(run: VariantRun) -> dict[str, str]:
    """Prompt and continuation; control characters, which bytes of a young model may be, are shown as replaced."""
    sample = run.result["sample"]
    return {name: re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\ufffd", sample[name]) for name in ("prompt", "continuation")}


def _saved(percentage: float) -> str:
    return f"−{percentage:g}" if percentage else "0"


def _spread(values: dict[str, float], digits: int) -> tuple[str, str]:
    return fixed(values["median"], digits), f"{fixed(values['low'], digits)}–{fixed(values['high'], digits)}"
