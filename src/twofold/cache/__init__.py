"""Key/value storage: one class for one or two tensors, growing, fixed or sliding, with exact byte counts.

`LayerCache` knows tensors and tokens only. What a layer puts in, and what it makes of what it reads, is the
attention room's business; Transformers' cache classes are adapters over it in the hf room.
"""

from twofold.cache.layer_cache import CacheError, LayerCache

__all__ = ["CacheError", "LayerCache"]
