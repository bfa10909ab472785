"""The paper's figures, as package data."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from twofold.spec import ProjectionSharing, read_yaml, variant_fields

_PATH = Path(__file__).parent / "paper_tables.yaml"


@dataclass(frozen=True, kw_only=True)
class PublishedVariant:
    """One row of the paper's table of 300M language models."""

    label: str
    """The paper's name of the variant."""
    increase: float
    """Perplexity above QKV in percent, as printed there."""
    cache_reduction: float
    """Cache saved against QKV in percent, as printed there, rounded."""
    cache_share: Fraction
    """Cache per token as a share of QKV's, exactly, from heads and sharing."""
    source: str
    """`paper`, `repo` or `secondary`: how directly the figure reached us."""
    one_tensor: bool
    """True when K = V, so that one tensor is cached."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """The paper's 300M table and what one must know to read it."""

    variants: dict[str, PublishedVariant]
    """Rows by label."""
    model: str
    """What was trained on what."""
    num_attention_heads: int
    """Query heads of that model."""
    caveat: str
    """Why only ratios compare."""
    masked_increase: float
    """Perplexity of Q-K=V above QKV in percent in the authors' later pair with padding masked."""
    masked_note: str
    """What that pair is."""
    masked_pair: tuple[float, float]
    """Perplexities of QKV and Q-K=V in that pair."""


@dataclass(frozen=True, kw_only=True)
class PublishedInference:
    """What the paper says that a variant saves in decoding, in percent against QKV."""

    cache_reduction: float
    """Cache saved, as printed there, rounded."""
    peak_memory: tuple[float, float] | None
    """Lowest and highest change of peak memory; None where it was not published."""
    throughput: tuple[float, float] | None
    """Lowest and highest change of tokens a second."""


def load_inference() -> dict[str, dict[str, PublishedInference]]:
    """The paper's figures on decoding: by preset, then by label of the variant."""
    tables = read_yaml(_PATH)
    small = {
        label: PublishedInference(cache_reduction=row["values"][2], peak_memory=None, throughput=None)
        for label, row in tables["lm_300m"]["rows"].items()
    }
    large = {}
    for label, row in tables["inference"]["gpt-1.2b"].items():
        reduction, *bounds = row["values"]
        large[label] = PublishedInference(
            cache_reduction=reduction, peak_memory=(bounds[0], bounds[1]), throughput=(bounds[2], bounds[3])
        )
    return {"gpt-300m": small, "gpt-1.2b": large}


def load_published() -> Published:
    """Reads the figures from the package."""
    table: dict[str, Any] = read_yaml(_PATH)["lm_300m"]
    heads = table["num_attention_heads"]
    variants = {}
    for label, row in table["rows"].items():
        _, increase, reduction = row["values"]
        fields = variant_fields(label, heads)
        one_tensor = ProjectionSharing.parse(fields["sharing"]).ties_key_value
        variants[label] = PublishedVariant(
            label=label,
            increase=increase,
            cache_reduction=reduction,
            cache_share=Fraction(fields["num_key_value_heads"], heads) / (2 if one_tensor else 1),
            source=row["source"],
            one_tensor=one_tensor,
        )
    masked = table["padding_masked"]["rows"]
    return Published(
        variants=variants,
        model=table["model"],
        num_attention_heads=heads,
        caveat=table["caveat"],
        masked_increase=100 * (masked["Q-K=V"] / masked["QKV"] - 1),
        masked_note=table["padding_masked"]["note"],
        masked_pair=(masked["QKV"], masked["Q-K=V"]),
    )
