"""What a model costs, from its config alone: parameters, multiply-accumulates and exact cache bytes.

Every figure is a formula and is compared in the tests with the modules it describes. This room needs no torch.
"""

from twofold.cost.cache import (
    CACHE_BITS,
    DTYPE_BYTES,
    CacheSize,
    cache_bytes,
    cache_elements,
    cache_elements_per_token,
    cache_reduction,
    check_dtype,
    layer_cache_elements_per_token,
    layer_cache_rows_per_token,
    unshared_baseline,
)
from twofold.cost.comparison import Cost, as_variant, model_cost
from twofold.cost.parameters import MacCount, ParameterCount, count_linears, count_macs, count_parameters
from twofold.cost.units import format_bytes, format_count, format_decimal, format_percent

__all__ = [
    "CACHE_BITS",
    "DTYPE_BYTES",
    "CacheSize",
    "Cost",
    "MacCount",
    "ParameterCount",
    "as_variant",
    "cache_bytes",
    "cache_elements",
    "cache_elements_per_token",
    "cache_reduction",
    "check_dtype",
    "count_linears",
    "count_macs",
    "count_parameters",
    "format_bytes",
    "format_count",
    "format_decimal",
    "format_percent",
    "layer_cache_elements_per_token",
    "layer_cache_rows_per_token",
    "model_cost",
    "unshared_baseline",
]
