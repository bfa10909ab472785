"""How many bytes a key/value cache needs, exactly.

A plain layer needs tokens x G x D x (2 tensors, or 1 where K = V) x bytes per element, and 4 bytes for the scale of
each row of D where they are quantised; int4 also holds the last tokens as float32. The figures are what the tokens
need, not what an allocator or a pre-sized buffer holds.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

from twofold.spec import RECENT_TOKENS, ConfigError, ModelConfig, ProjectionSharing, did_you_mean

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number in the dtypes of weights."""

CACHE_BITS = {**{name: 8 * size for name, size in DTYPE_BYTES.items()}, "int8": 8, "int4": 4}
"""Bits of one cached element."""

SCALE_BYTES = 4
"""Bytes of the float32 scale of each row of a quantised cache."""

POSITION_BYTES = 4
"""Bytes of the int32 position that rope_mode unrotated keeps beside each token, because it rotates keys when read."""


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """Bytes that the cached tokens of all layers need."""

    tensor_bytes: int
    """Keys and values, or the one tensor that is both."""
    scale_bytes: int = 0
    """Scales of quantised keys and values; 0 for floats."""
    recent_bytes: int = 0
    """The last tokens, which an int4 cache holds as float32 too; 0 for other dtypes."""
    position_bytes: int
    """Positions beside the tensors; 0 unless a layer keeps its keys unrotated."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.tensor_bytes + self.scale_bytes + self.recent_bytes + self.position_bytes


def check_dtype(name: str, known: Collection[str] = tuple(DTYPE_BYTES)) -> None:
    """Raises `ConfigError`, with the nearest name for a typo, unless the name is one of those that are known."""
    if name not in known:
        raise ConfigError(f"dtype '{name}' is unknown{did_you_mean(name, known)} Use one of {', '.join(known)}")


def layer_cache_elements_per_token(config: ModelConfig, layer: int) -> int:
    """Elements that one layer caches for one token: G x D for each tensor, G x D + D_r in rope_mode decoupled."""
    assert config.head_dim is not None
    width = config.layer_num_key_value_heads(layer) * config.head_dim
    if config.layer_rope_mode(layer) == "decoupled":
        assert config.qk_rope_head_dim is not None
        return width + config.qk_rope_head_dim
    return width * config.layer_sharing(layer).num_cached_tensors


def layer_cache_rows_per_token(config: ModelConfig, layer: int) -> int:
    """Rows that one layer caches for one token: G for each tensor, and one for the rotary part of rope_mode decoupled.

    Each of them has a scale where it is quantised.
    """
    groups = config.layer_num_key_value_heads(layer)
    if config.layer_rope_mode(layer) == "decoupled":
        return groups + 1
    return groups * config.layer_sharing(layer).num_cached_tensors


def cache_elements_per_token(config: ModelConfig) -> int:
    """Elements that all layers together cache for a token inside every window."""
    return sum(layer_cache_elements_per_token(config, layer) for layer in range(config.num_hidden_layers))


def cache_elements(config: ModelConfig, tokens: int) -> int:
    """Elements cached after `tokens` tokens of one sequence; a layer with window W holds at most W of them."""
    return sum(
        _tokens_held(config, layer, tokens) * layer_cache_elements_per_token(config, layer)
        for layer in range(config.num_hidden_layers)
    )


def cache_bytes(config: ModelConfig, tokens: int, dtype: str = "bfloat16", batch_size: int = 1) -> CacheSize:
    """Bytes that the cache needs after `tokens` tokens.

    Args:
        config: The model. Only a causal model generates with a cache; for another the figure is arithmetic.
        tokens: Tokens in each sequence. The number may exceed `max_position_embeddings`.
        dtype: Type of the cached elements: float32, bfloat16, float16, int8 or int4.
        batch_size: Sequences, each of that length.

    Raises:
        ConfigError: for an unknown dtype, int4 with rows of odd width, a negative number of tokens, or an empty batch.
    """
    check_dtype(dtype, CACHE_BITS)
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1; got {batch_size}")
    elements, scales, recent, positions = cache_elements(config, tokens), 0, 0, 0
    for layer in range(config.num_hidden_layers):
        held = _tokens_held(config, layer, tokens)
        if dtype not in DTYPE_BYTES:
            scales += held * layer_cache_rows_per_token(config, layer)
        if dtype == "int4":
            recent += min(held, RECENT_TOKENS) * layer_cache_elements_per_token(config, layer)
        if config.layer_rope_mode(layer) == "unrotated":
            positions += held
    if dtype == "int4" and config.head_dim is not None and config.head_dim % 2:
        raise ConfigError(f"an int4 cache puts two numbers in a byte and head_dim is {config.head_dim}; use int8")
    return CacheSize(
        tensor_bytes=batch_size * elements * CACHE_BITS[dtype] // 8,
        scale_bytes=batch_size * scales * SCALE_BYTES,
        recent_bytes=batch_size * recent * DTYPE_BYTES["float32"],
        position_bytes=batch_size * positions * POSITION_BYTES,
    )


def cache_reduction(config: ModelConfig, baseline: ModelConfig, tokens: int = 1, dtype: str = "bfloat16") -> Fraction:
    """The share of the baseline's cache bytes that a model saves, as an exact fraction.

    Tied K = V saves 1/2; one key/value head for 16 query heads saves 15/16; both together save 31/32. The number is
    negative where the model caches more than the baseline.

    Args:
        config: The model.
        baseline: What it is compared to, usually `unshared_baseline(config)`.
        tokens: Tokens in the sequence. The answer depends on it only where windows differ from layer to layer, and
            for int4, of which the last tokens are floats too.
        dtype: Type of the cached elements. The answer depends on it only where positions or scales are cached too.

    Raises:
        ConfigError: when there are no tokens to compare, or for an unknown dtype.
    """
    if tokens < 1:
        raise ConfigError(f"a reduction compares caches with at least 1 token; got {tokens}")
    return 1 - Fraction(cache_bytes(config, tokens, dtype).total, cache_bytes(baseline, tokens, dtype).total)


def unshared_baseline(config: ModelConfig) -> ModelConfig:
    """The same model with three projections and as many key/value heads as query heads."""
    return replace(
        config, sharing=ProjectionSharing.QKV, num_key_value_heads=None, rope_mode=None, qk_rope_head_dim=None
    )


def _tokens_held(config: ModelConfig, layer: int, tokens: int) -> int:
    if tokens < 0:
        raise ConfigError(f"tokens must not be negative; got {tokens}")
    window = config.layer_sliding_window(layer)
    return tokens if window is None else min(tokens, window)
