"""Rotations of queries and keys by their positions."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotary_frequencies(
    width: int, theta: float, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "half"]:
    """Angles per position, theta^(-2c / width), of the pairs of channels c and c + width / 2, as in Llama."""
    channels = torch.arange(0, width, 2, device=device, dtype=dtype)
    return theta ** (-channels / width)


def rotary_tables(
    positions: Int[Tensor, "B T"], frequencies: Float[Tensor, "half"]
) -> tuple[Float[Tensor, "B 1 T W"], Float[Tensor, "B 1 T W"]]:
    """Cosines and sines by which `rotate` turns heads of W = 2 · half channels, in the frequencies' dtype.

    Channels c and c + half turn by the same angle; the sine's sign is that of what the other one adds.
    """
    angles = positions[:, None, :, None].to(frequencies.dtype) * frequencies  # (B, 1, T, W/2)
    sin = angles.sin()
    return torch.cat((angles.cos(),) * 2, dim=-1), torch.cat((-sin, sin), dim=-1)  # (B, 1, T, W)


def rotate(
    x: Float[Tensor, "B heads T W"], cos: Float[Tensor, "B 1 T W"], sin: Float[Tensor, "B 1 T W"]
) -> Float[Tensor, "B heads T W"]:
    """R_j x for the positions of the tables; `rotate(x, cos, -sin)` is its inverse."""
    return x * cos.to(x.dtype) + x.roll(x.shape[-1] // 2, dims=-1) * sin.to(x.dtype)
