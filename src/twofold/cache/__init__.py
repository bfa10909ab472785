"""Key/value storage: one class for one or two tensors; growing, fixed or sliding; quantised or not; exact byte counts.

`LayerCache` knows tensors and tokens only. What a layer puts in, and what it makes of what it reads, is the
attention room's business; Transformers' cache classes are adapters over it in the hf room.
"""

from twofold.cache.layer_cache import CacheError, LayerCache, Stored, check_cache_dtype
from twofold.cache.quantize import Quantized, quantize, spread

__all__ = ["CacheError", "LayerCache", "Quantized", "Stored", "check_cache_dtype", "quantize", "spread"]
