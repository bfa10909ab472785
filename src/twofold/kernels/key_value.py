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

    @property
    def tied(self) -> bool:
        """Whether one tensor is key and value."""
        return self.key is self.value

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, D + D_r) and values (B, G, S, D) as floats, for implementations that read nothing else.

        They are views, and one and the same where K = V, if there is nothing to scale, to rotate or to add.
        """
        key = dequantized(self.key, self.key_scale, dtype)
        value = key if self.tied else dequantized(self.value, self.value_scale, dtype)
        if self.rotation is not None:
            cos, sin = rotary_tables(self.rotation.positions, self.rotation.frequencies)
            weighted = key if self.rotation.weight is None else key * self.rotation.weight.to(dtype)
            key = rotate(weighted, cos, sin)
        if self.rope_key is not None:
            rope_key = dequantized(self.rope_key, self.rope_scale, dtype)
            key = torch.cat((key, rope_key.expand(-1, key.shape[1], -1, -1)), dim=-1)
        return key, value


def dequantized(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers that integers and their scale stand for; floats are returned as they are."""
    if scale is None:
        return stored
    if stored.dtype == torch.uint8:
        stored = torch.cat((stored & 15, stored >> 4), dim=-1).to(torch.int8) - 8
    return (stored * scale).to(dtype)
