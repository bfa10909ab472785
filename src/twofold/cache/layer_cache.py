"""The key/value storage of one attention layer."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from twofold.cache.memory import empty_rows
from twofold.cache.quantize import CACHE_DTYPES, Quantized, quantize
from twofold.spec import RECENT_TOKENS, ConfigError, TwofoldError, did_you_mean

Stored: TypeAlias = Tensor | Quantized
"""What is read of one tensor that was appended."""

_AT_ONCE_ON_CPU = 65_536  # tokens


class CacheError(TwofoldError):
    """A cache that is asked for more than it holds, or given what it cannot store."""


class LayerCache:
    """What one layer keeps for each token, in as few tensors as the layer needs.

    A layer with K = V appends one tensor, any other layer two; a layer that rotates keys when it reads them appends
    their positions too. Each tensor has the shape (B, heads, T, width); heads, width and dtype may differ between
    them and are fixed by the first append. Reading gives views, never copies.

    With a `dtype` floats are stored as integers with a scale for each token and head, and read so; tensors of integers
    stay as they are. An int4 cache also holds the last 32 tokens as float32, which are read in place of their codes.

    Growing, fixed and sliding caches differ in values only:

    - By default memory grows by `block` tokens at a time. One tensor is moved at a time, so a model's cache needs,
      while it grows, its own size and one tensor of one layer. Where it is known how many tokens will come,
      `expected_tokens` saves most of the moving, or all.
    - With `capacity` the memory is taken at once and never moves; more tokens raise `CacheError`.
    - With `window` only the tokens that a later query can still see are kept, and up to `block` more; with `rewind`
      also those that it would see once that many have been taken back.

    Args:
        window: Positions that a query sees, itself included; None for all.
        capacity: Number of tokens that a fixed cache can be given; None to grow.
        block: Tokens by which memory grows.
        rewind: Tokens that `crop` can always take back from a sliding cache; it may be changed later.
        dtype: `int8` or `int4` to quantise floats (see `quantize`); None to store them as they are.

    Raises:
        ConfigError: for another dtype.
    """

    def __init__(
        self,
        *,
        window: int | None = None,
        capacity: int | None = None,
        block: int = 256,
        rewind: int = 0,
        dtype: str | None = None,
    ) -> None:
        check_cache_dtype(dtype)
        self.window = window
        self.capacity = capacity
        self.block = block
        self.rewind = rewind
        self.dtype = dtype
        self.num_tokens = 0
        """Tokens appended so far, those that slid out included."""
        self.expected_tokens = 0
        """Tokens that a growing cache is likely to hold in the end; no limit, and sliding caches do without it.

        Memory doubles until a quarter of them is used, then it is taken for all: no more than four times what is used,
        however many were expected, and few moves. On CPUs up to 65,536 tokens are taken at once, because most systems
        back memory with pages only as they are written.
        """
        self._kinds: list[_Kind] = []  # of the tensors that are appended
        self._buffers: list[Tensor] = []  # one for each of them, or codes and scales where they are quantised
        self._recent: list[Tensor] = []  # the last rows of each one that is int4, as float32
        self._start = 0  # first row of the buffers that holds a token
        self._end = 0  # one past the last row that holds a token

    @property
    def num_held(self) -> int:
        """Tokens that the next query can see, before its own are appended."""
        held = self._end - self._start
        return held if self.window is None else min(held, self.window - 1)

    @property
    def tensors(self) -> tuple[Stored, ...]:
        """Views of all tokens that are stored, in the form in which `append` returns them."""
        return self._read(self._start)

    @property
    def nbytes_used(self) -> int:
        """Bytes that the visible tokens need: min(tokens, window) x elements a token x bytes an element.

        Scales are elements too: 4 bytes for each token and head. So are the floats of the last tokens of an int4 cache.
        """
        tokens = self.num_tokens if self.window is None else min(self.num_tokens, self.window)
        recent = sum(min(tokens, rows.shape[2]) * _token_bytes(rows) for rows in self._recent)
        return tokens * sum(_token_bytes(buffer) for buffer in self._buffers) + recent

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of memory that the cache holds now."""
        return sum(buffer.untyped_storage().nbytes() for buffer in (*self._buffers, *self._recent))

    def append(self, *tensors: Tensor) -> tuple[Stored, ...]:
        """Stores new tokens and returns views of every token that they can see, themselves included.

        Args:
            tensors: Each (B, heads, T, width), the same number and kinds at every call.

        Returns:
            For each tensor a view (B, heads, S, width) with S = `num_held` before the call + T; for one that is
            quantised views of its codes and scales. An int8 cache gives back the new tokens too as they are stored, so
            that decoding token by token computes what one pass over all of them does. An int4 cache gives the new
            tokens and up to 32 before them as floats too, to be read in place of their codes: the first pass over a
            prompt is exact, and later tokens see those that are further back rounded.

        Raises:
            CacheError: when a fixed cache is full, for tensors of another kind than those stored, or for int4 with an
                odd width.
        """
        self._check_kinds(tensors)
        num_new = tensors[0].shape[2]
        if self.capacity is not None and self.num_tokens + num_new > self.capacity:
            raise CacheError(
                f"the fixed cache holds {self.capacity} tokens and was given {self.num_tokens + num_new}; "
                "make it larger or generate fewer tokens"
            )
        num_visible = self.num_held + num_new
        rows = [part for tensor in tensors for part in self._to_store(tensor)]
        if not self._buffers:
            self._kinds = [_kind(tensor) for tensor in tensors]
            self._buffers = [part.new_empty(*part.shape[:2], 0, part.shape[3]) for part in rows]
            self._recent = [tensor[:, :, :0] for tensor in self._floats(tensors)]
        if self._end + num_new > self._buffers[0].shape[2]:
            self._make_room(num_new)
        for buffer, part in zip(self._buffers, rows, strict=True):
            buffer[:, :, self._end : self._end + num_new] = part
        self._end += num_new
        self.num_tokens += num_new
        self._recent = [
            torch.cat((held, tensor), dim=2) if held.shape[2] else tensor
            for held, tensor in zip(self._recent, self._floats(tensors), strict=True)
        ]
        seen = self._read(self._end - num_visible)
        self._recent = [rows[:, :, -RECENT_TOKENS:].clone() for rows in self._recent]  # a prompt's memory goes
        return seen

    def crop(self, num_tokens: int) -> None:
        """Forgets the latest tokens, so that `num_tokens` remain of all that were appended.

        Raises:
            CacheError: when a sliding cache has already dropped tokens that the remaining ones would see.
        """
        num_dropped = self.num_tokens - num_tokens
        if num_dropped <= 0:
            return
        remaining = self._end - self._start - num_dropped
        needed = num_tokens if self.window is None else min(num_tokens, self.window - 1)
        if remaining < needed:
            raise CacheError(
                f"a cache with window {self.window} cannot go back {num_dropped} tokens; "
                f"make it with rewind={num_dropped}"
            )
        self._end -= num_dropped
        self.num_tokens = num_tokens
        self._recent = [rows[:, :, : max(0, rows.shape[2] - num_dropped)] for rows in self._recent]

    def select(self, rows: Int[Tensor, "N"]) -> None:
        """Replaces the batch by the given rows of it, in order; a row may come more than once, as in beam search."""
        for index, buffer in enumerate(self._buffers):
            selected = buffer[:, :, self._start : self._end].index_select(0, rows.to(buffer.device))
            if len(rows) != buffer.shape[0]:
                self._buffers[index] = buffer.new_empty(len(rows), *buffer.shape[1:])
            self._buffers[index][:, :, self._start : self._end] = selected
        self._recent = [held.index_select(0, rows.to(held.device)) for held in self._recent]
        self._kinds = [kind._replace(batch=len(rows)) for kind in self._kinds]

    def reset(self) -> None:
        """Forgets every token; the memory is kept."""
        self.num_tokens = self._start = self._end = 0
        self._recent = [rows[:, :, :0] for rows in self._recent]

    def _to_store(self, tensor: Tensor) -> Sequence[Tensor]:
        """What becomes of one tensor: itself, or codes and scales."""
        return quantize(tensor, self.dtype)[:2] if self.dtype and tensor.is_floating_point() else (tensor,)

    def _floats(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of which the last rows are held as float32 too."""
        return [tensor.float() for tensor in tensors if self.dtype == "int4" and tensor.is_floating_point()]

    def _read(self, first: int) -> tuple[Stored, ...]:
        """Views of the rows from `first` on; codes, scales and recent floats together."""
        views = iter([buffer[:, :, first : self._end] for buffer in self._buffers])
        recent = iter([rows[:, :, max(0, rows.shape[2] - (self._end - first)) :] for rows in self._recent])
        return tuple(
            Quantized(next(views), next(views), next(recent, None))
            if self.dtype and kind.dtype.is_floating_point
            else next(views)
            for kind in self._kinds
        )

    def _check_kinds(self, tensors: tuple[Tensor, ...]) -> None:
        """Tensors must go on from those that are stored; an empty cache takes any that it can store."""
        given = [_kind(tensor) for tensor in tensors]
        if self._kinds and given != self._kinds:
            if self.num_tokens > 0:
                raise CacheError(
                    f"the cache holds {_spell(self._kinds)} and was given {_spell(given)}; use a new cache"
                )
            self._kinds, self._buffers, self._recent = [], [], []
        for kind in given:
            if self.dtype == "int4" and kind.dtype.is_floating_point and kind.width % 2:
                raise CacheError(
                    f"an int4 cache puts two numbers in a byte and was given rows of {kind.width}; use int8"
                )

    def _make_room(self, num_new: int) -> None:
        """Drops what no later query sees, then moves what is left into memory with room for `num_new` more."""
        kept = min(self._end - self._start, self.num_held + self.rewind)
        first = self._end - kept
        needed = kept + num_new
        if self.capacity is None:
            allocated = self._rows_for(needed) if self.window is None else needed + self.block
        else:
            allocated = self.capacity if self.window is None else min(self.capacity, needed + self.block)
        for index in range(len(self._buffers)):  # no name may keep the old memory while the next one is taken
            self._buffers[index] = _moved(self._buffers[index], first, kept, needed, allocated, self.block)
        self._start, self._end = 0, kept

    def _rows_for(self, needed: int) -> int:
        """Rows to take when a cache that keeps everything grows; see `expected_tokens`."""
        within = max(4 * needed, _AT_ONCE_ON_CPU if self._buffers[0].device.type == "cpu" else 0)
        ahead = self.expected_tokens if self.expected_tokens <= within else 2 * needed
        return -(-max(needed, ahead) // self.block) * self.block


def check_cache_dtype(name: str | None) -> None:
    """Raises `ConfigError`, with the nearest name for a typo, unless a `LayerCache` takes this dtype."""
    if name is not None and name not in CACHE_DTYPES:
        raise ConfigError(
            f"cache dtype '{name}' is unknown{did_you_mean(name, CACHE_DTYPES)} "
            f"Use {' or '.join(CACHE_DTYPES)}, or leave it out to store what the model computes"
        )


class _Kind(NamedTuple):
    """What must be the same at every append."""

    batch: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device


def _token_bytes(buffer: Tensor) -> int:
    """Bytes of one token of every sequence."""
    batch, heads, _, width = buffer.shape
    return batch * heads * width * buffer.element_size()


def _kind(tensor: Tensor) -> _Kind:
    batch, heads, _, width = tensor.shape
    return _Kind(batch, heads, width, tensor.dtype, tensor.device)


def _spell(kinds: Sequence[_Kind]) -> str:
    return " and ".join(f"batch {k.batch}, heads {k.heads}, width {k.width}, {k.dtype} on {k.device}" for k in kinds)


def _moved(old: Tensor, first: int, kept: int, needed: int, allocated: int, block: int) -> Tensor:
    """The rows `first` to `first + kept` at the front of a buffer of the size that is needed now.

    The same buffer, unless it is too small, or much too large because a long prompt went through a short window.
    """
    held = old[:, :, first : first + kept]
    if needed <= old.shape[2] <= allocated + block:
        old[:, :, :kept] = held.clone()  # the two may overlap
        return old
    new = empty_rows(old, allocated, mostly_used=2 * needed >= allocated)
    new[:, :, :kept] = held
    return new
