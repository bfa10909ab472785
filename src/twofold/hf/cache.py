"""Transformers' caches with our layers in them: one tensor a token where K = V."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from twofold.cache import CacheError, LayerCache, Quantized
from twofold.hf.config import TwofoldConfig
from twofold.spec import ModelConfig

# Layers that say "grow" or "hold this many" and nothing else, which is all that we take over from them.
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)

# Assistants propose some twenty tokens at a time and take back those that the model does not confirm.
_REWIND_TOKENS = 256


class TwofoldCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A `LayerCache` where Transformers expects a layer of its `Cache`.

    The model appends to `layer_cache` itself. This class answers what generation asks: how long the cache is, and to
    crop, reorder or repeat it.

    Args:
        layer_cache: The storage.
        num_cached_tensors: 1 where key and value are one tensor, else 2.
    """

    is_compileable = False  # storage grows, and lengths are numbers rather than tensors
    is_croppable = True
    supports_early_init = False  # memory is taken when the first token comes

    def __init__(self, layer_cache: LayerCache, num_cached_tensors: int) -> None:
        self.layer_cache = layer_cache
        self.num_cached_tensors = num_cached_tensors

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """What is stored first for each token, (B, heads, S, width), its codes if quantised; None before the first."""
        return self._stored(0)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The stored values; the same memory as `keys` where K = V."""
        return self._stored(self.num_cached_tensors - 1)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """True once tokens have been stored."""
        return bool(self.layer_cache.tensors)

    @property
    def is_sliding(self) -> bool:
        """True for a layer that forgets tokens beyond its window."""
        return self.layer_cache.window is not None

    @property
    def batch_size(self) -> int:
        """Rows of the batch; missing before the first token, which is how Transformers tells."""
        keys = self.keys
        if keys is None:
            raise AttributeError("an empty cache has no batch size yet")
        return keys.shape[0]

    @property
    def record_past(self) -> bool:
        """True for a sliding layer that keeps some tokens beyond its window, so that candidates can be taken back."""
        return self.layer_cache.rewind > 0

    @record_past.setter
    def record_past(self, record: bool) -> None:
        self.layer_cache.rewind = _REWIND_TOKENS if record and self.is_sliding else 0

    def activate_past_recording(self) -> None:
        """Keeps some tokens beyond the window from now on: an assistant takes back candidates."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the first append takes the memory."""

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuses: only the model knows what a layer stores."""
        raise CacheError("this cache belongs to a twofold model, which fills it in its forward pass; do not update it")

    def get_seq_length(self) -> int:
        """Tokens seen so far, those that slid out included."""
        return self.layer_cache.num_tokens

    def get_max_length(self) -> int:
        """Tokens that a fixed cache can take; -1 for one that grows."""
        return -1 if self.layer_cache.capacity is None else self.layer_cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that the next queries are given, their own included, and the place of the first of them."""
        held = self.layer_cache.num_held
        return held + query_length, self.layer_cache.num_tokens - held

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the latest `-tokens_to_remove` tokens; Transformers 5 counts them with a negative number."""
        if tokens_to_remove > 0:
            raise CacheError(f"crop takes the number of tokens to remove as a negative number; got {tokens_to_remove}")
        self.layer_cache.crop(self.layer_cache.num_tokens + tokens_to_remove)

    def reset(self) -> None:
        """Forgets every token."""
        self.layer_cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces the batch by the given rows of it, as beam search asks."""
        self.layer_cache.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch."""
        if self.is_initialized:
            self.layer_cache.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given rows of the batch, by number or by a boolean for each."""
        self.layer_cache.select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def _stored(self, index: int) -> Tensor | None:
        if not self.is_initialized:
            return None
        stored = self.layer_cache.tensors[index]
        return stored.codes if isinstance(stored, Quantized) else stored


def cache_for(model: PreTrainedModel, dtype: str | None = None, capacity: int | None = None) -> Cache:
    """An empty cache for one model, for `generate(past_key_values=...)` or `model(..., past_key_values=...)`.

    Args:
        model: A twofold model.
        dtype: `int8` or `int4` to quantise what is stored; None to store what the model computes.
        capacity: Tokens to take memory for at once, when the first one comes; None to grow.

    Raises:
        CacheError: for a model of another kind.
        ConfigError: for another dtype.
    """
    if not isinstance(model.config, TwofoldConfig):
        raise CacheError(f"cache_for makes caches for twofold models; got a {type(model).__name__}")
    spec = model.config.spec
    layers: list[Any] = [_layer(spec, index, capacity=capacity, dtype=dtype) for index in range(spec.num_hidden_layers)]
    return Cache(layers=layers)


def quantized_dtype(options: Mapping[str, Any] | None) -> str:
    """The dtype that `cache_config` of `generate(cache_implementation="quantized")` asks for.

    Args:
        options: `nbits`, 4 (the default, as in Transformers) or 8, and nothing else: ours has no backends or groups,
            and its `residual_length` is not a choice: as many tokens are floats as 4 bits need, and none for 8.

    Raises:
        CacheError: for other options.
    """
    given = {"nbits": 4, **(options or {})}
    bits = given.pop("nbits")
    if given or bits not in (4, 8):
        spelt = ", ".join(f"{name}={value!r}" for name, value in (options or {}).items())
        raise CacheError(
            f"the quantised cache of a twofold model takes nbits=4 or nbits=8 in cache_config, and nothing else; "
            f"got {spelt}"
        )
    return f"int{bits}"


def adopt_cache(cache: Any, spec: ModelConfig) -> list[LayerCache]:
    """Makes a Transformers cache hold our layers, and returns their storage, one a layer.

    An empty cache of any plain kind is taken over in place: what it said about length is kept. So
    every cache that `generate` makes or a user passes stores one tensor a token where K = V.

    Args:
        cache: A `DynamicCache`, a `StaticCache`, or one that `cache_for` made or that was adopted before.
        spec: The model that will fill it.

    Raises:
        CacheError: for a cache of a kind that cannot be honoured, or that another model has filled.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        raise CacheError(
            f"a twofold model takes a DynamicCache or a StaticCache; got {type(cache).__name__}. "
            "Pass one of them, or none to have one made"
        )
    if _our_layers(cache) is None:
        _check_can_adopt(cache, spec)
        layers: list[Any] = list(cache.layers)
        if not layers:  # a DynamicCache without a config has none yet
            layers = [None] * spec.num_hidden_layers
        cache.layers = [_adopted(layer, spec, index) for index, layer in enumerate(layers)]
        cache.layer_class_to_replicate = None
    return _storage_for(cache, spec)


def cache_sizes(cache: Cache) -> tuple[int, int]:
    """Bytes of a cache that a twofold model has filled: those that its tokens need, and those that it holds now.

    Raises:
        CacheError: for a cache that holds other layers than ours.
    """
    layers = _our_layers(cache)
    if layers is None:
        raise CacheError(f"only a cache that a twofold model has filled can be measured; got {cache!r}")
    return (
        sum(layer.layer_cache.nbytes_used for layer in layers),
        sum(layer.layer_cache.nbytes_allocated for layer in layers),
    )


def _our_layers(cache: Cache) -> list[TwofoldCacheLayer] | None:
    ours = [layer for layer in cache.layers if isinstance(layer, TwofoldCacheLayer)]
    return ours if ours and len(ours) == len(cache.layers) else None


def _layer(spec: ModelConfig, index: int, *, capacity: int | None, dtype: str | None) -> TwofoldCacheLayer:
    storage = LayerCache(window=spec.layer_sliding_window(index), capacity=capacity, dtype=dtype)
    return TwofoldCacheLayer(storage, spec.layer_sharing(index).num_cached_tensors)


def _adopted(layer: Any, spec: ModelConfig, index: int) -> TwofoldCacheLayer:
    capacity = layer.max_cache_len if isinstance(layer, StaticLayer) else None
    adopted = _layer(spec, index, capacity=capacity, dtype=None)
    adopted.record_past = getattr(layer, "record_past", False)
    return adopted


def _check_can_adopt(cache: Cache, spec: ModelConfig) -> None:
    if cache.offloading:
        raise CacheError("a twofold model does not offload its cache; leave offloading out")
    for layer in cache.layers:
        if not isinstance(layer, CacheLayerMixin) or type(layer) not in _PLAIN_LAYERS:
            raise CacheError(
                f"a twofold model cannot fill a {type(cache).__name__} with {type(layer).__name__}s; "
                "use a DynamicCache, a StaticCache or twofold.hf.cache_for"
            )
        if int(layer.get_seq_length()) > 0:
            raise CacheError("the cache holds tokens that another model or an older version stored; pass a new one")
    if cache.layers and len(cache.layers) != spec.num_hidden_layers:
        raise CacheError(
            f"the cache has {len(cache.layers)} layers and the model {spec.num_hidden_layers}; "
            "make it with this model's config"
        )


def _storage_for(cache: Cache, spec: ModelConfig) -> list[LayerCache]:
    layers = _our_layers(cache) or []
    expected = [
        (spec.layer_sliding_window(index), spec.layer_sharing(index).num_cached_tensors)
        for index in range(spec.num_hidden_layers)
    ]
    if [(layer.layer_cache.window, layer.num_cached_tensors) for layer in layers] != expected:
        raise CacheError("the cache was filled by a model with other layers; pass a new one")
    return [layer.layer_cache for layer in layers]
