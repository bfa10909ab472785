"""One model in several variants, with what each of them costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from twofold.cost.cache import CacheSize, cache_bytes, cache_reduction, unshared_baseline
from twofold.cost.parameters import MacCount, ParameterCount, count_macs, count_parameters
from twofold.spec import PAPER_VARIANTS, ConfigError, ModelConfig, did_you_mean, variant_fields


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one model costs."""

    config: ModelConfig
    """The model."""
    parameters: ParameterCount
    """Its parameters."""
    macs: dict[int, MacCount]
    """Multiply-accumulates of a forward pass, by sequence length in tokens."""
    cache_per_token: CacheSize | None
    """Cache bytes of each further token; None for a model that is not causal, which generates and caches nothing."""
    cache_at_context: CacheSize | None
    """Cache bytes at the context asked for, with windows honoured; None as above."""
    cache_reduction: Fraction | None
    """Share of cache bytes saved at that context, against the same model unshared; None as above."""


def model_cost(config: ModelConfig, *, context: int, dtype: str, sequence_lengths: Sequence[int]) -> Cost:
    """Everything that this room computes about one model.

    Args:
        config: The model.
        context: Tokens in the cache, at least 1.
        dtype: Type of the cached elements; see `CACHE_BITS`.
        sequence_lengths: Lengths whose forward pass is counted.

    Raises:
        ConfigError: for a context or length below 1, or an unknown dtype.
    """
    at_context = cache_bytes(config, context, dtype)
    reduction = cache_reduction(config, unshared_baseline(config), context, dtype)
    return Cost(
        config=config,
        parameters=count_parameters(config),
        macs={length: count_macs(config, length) for length in sequence_lengths},
        cache_per_token=replace(cache_bytes(config, 1, dtype), recent_bytes=0) if config.causal else None,
        cache_at_context=at_context if config.causal else None,
        cache_reduction=reduction if config.causal else None,
    )


def as_variant(config: ModelConfig, name: str) -> ModelConfig:
    """The model with another projection and head sharing in all its layers, and everything else as it is.

    Args:
        config: The model.
        name: A name that `variant_fields` knows: any sharing, `MHA`, `GQA-4`, `MQA`, `Q-GQA-4`, `Q-MQA`.

    Raises:
        ConfigError: for an unknown name, or a variant that the model cannot take.
    """
    fields = {"score_map": "none", **_fields_of(name, config.num_attention_heads)}
    try:
        unshared = unshared_baseline(replace(config, score_map="none"))
        if fields["sharing"] in ("tied-kv", "tied-qkv"):
            fields |= {"rope_mode": config.rope_mode, "qk_rope_head_dim": config.qk_rope_head_dim}
        return replace(unshared, **fields)
    except ConfigError as error:
        raise ConfigError(f"variant '{name}': {error}") from None


def _fields_of(name: str, num_attention_heads: int) -> dict[str, Any]:
    try:
        return variant_fields(name, num_attention_heads)
    except ConfigError as error:
        near = did_you_mean(name, PAPER_VARIANTS)
        if near == "." or not str(error).startswith("unknown"):
            raise
        raise ConfigError(f"unknown variant '{name}'{near} The paper's are {', '.join(PAPER_VARIANTS)}") from None
