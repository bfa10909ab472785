"""Keys and values in the form in which a cache stores them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from twofold.kernels.rotary import rotary_tables, rotate


@dataclass(frozen=True)
class Rotation:
    """Keys are rotated when they are read: key j is R_j (weight · k_j), where R_j turns pairs of channels."""

    positions: Int[Tensor, "B S"]
    """Position j of each key."""
    frequencies: Float[Tensor, "half"]
    """Angle per position of each pair of channels c and c + D/2; 0 leaves a pair as it is."""
    weight: Float[Tensor, "D"] | None = None
    """Factors on the key's channels before it is rotated."""


@dataclass(frozen=True)
class KeyValue:
    """What the queries read. One tensor may be key and value; no implementation copies what it can read in place.

    Scores are q·k_j; where there is a `rope_key` the query is (B, H, T, D + D_r) and its last D_r channels meet that.
    Integers times their scale are the numbers meant: int8, or two of 4 bits in a byte, stored with 8 added: channel c
    in the low half of byte c and channel c + D/2 in its high half.
    """

    key: Shaped[Tensor, "B G S _"]
    """(B, G, S, D) in floats or int8, or (B, G, S, D/2) in uint8."""
    value: Shaped[Tensor, "B G S _"]
    """The same tensor object where K = V, else another one of its kind."""
    key_scale: Float[Tensor, "B G S 1"] | None = None
    """float32 factor on each integer key."""
    value_scale: Float[Tensor, "B G S 1"] | None = None
    """The same for values."""
    rope_key: Shaped[Tensor, "B 1 S _"] | None = None
    """Further channels D_r of every head's keys, in the dtype of `key`."""
    rope_scale: Float[Tensor, "B 1 S 1"] | None = None
    """float32 factor on an integer `rope_key`."""
    rotation: Rotation | None = None
    """How keys are rotated when they are read; never together with `rope_key`."""
    recent: "KeyValue | None" = None
    """The last rows as float32, to be read in place of what is stored of them here; otherwise of the same form."""

    @property
    def tied(self) -> bool:
        """Whether one tensor is key and value."""
        return self.key is self.value

    def in_floats(self, dtype: torch.dtype) -> "KeyValue":
        """The same with tensors of floats only, in place of integers, their scales and recent rows."""
        new = self.recent
        if self.key_scale is None and new is None:
            return self
        new_key, new_value, new_rope = (None,) * 3 if new is None else (new.key, new.value, new.rope_key)
        key = _completed(self.key, self.key_scale, new_key, dtype)
        value = key if self.tied else _completed(self.value, self.value_scale, new_value, dtype)
        rope_key = self.rope_key
        if rope_key is not None:
            rope_key = _completed(rope_key, self.rope_scale, new_rope, dtype)
        return KeyValue(key, value, rope_key=rope_key, rotation=self.rotation)

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, D + D_r) and values (B, G, S, D) as floats, for implementations that read nothing else.

        They are views, and one and the same where K = V, if there is nothing to scale, to rotate or to add.
        """
        floats = self.in_floats(dtype)
        key, value = floats.key, floats.value
        if self.rotation is not None:
            cos, sin = rotary_tables(self.rotation.positions, self.rotation.frequencies)
            weighted = key if self.rotation.weight is None else key * self.rotation.weight.to(dtype)
            key = rotate(weighted, cos, sin)
        if floats.rope_key is not None:
            key = torch.cat((key, floats.rope_key.expand(-1, key.shape[1], -1, -1)), dim=-1)
        return key, value


def dequantized(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers that integers and their scale stand for; floats are returned as they are."""
    if scale is None:
        return stored
    if stored.dtype == torch.uint8:
        stored = torch.cat((stored & 15, stored >> 4), dim=-1).to(torch.int8) - 8
    return (stored * scale).to(dtype)


def _completed(stored: Tensor, scale: Tensor | None, recent: Tensor | None, dtype: torch.dtype) -> Tensor:
    """All rows as floats; the last of them are not dequantised where they are at hand as floats."""
    if recent is None:
        return dequantized(stored, scale, dtype)
    num_older = stored.shape[2] - recent.shape[2]
    older = dequantized(stored[:, :, :num_older], None if scale is None else scale[:, :, :num_older], dtype)
    return torch.cat((older, recent.to(dtype)), dim=2)
