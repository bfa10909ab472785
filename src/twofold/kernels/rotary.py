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
    """Cosines and sines by which `rotate` turns heads of W = 2 · half channels, in the frequencies' dtype."""
    angles = positions[:, None, :, None].to(frequencies.dtype) * frequencies  # (B, 1, T, W/2)
    angles = torch.cat((angles, angles), dim=-1)  # (B, 1, T, W)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "B heads T W"], cos: Float[Tensor, "B 1 T W"], sin: Float[Tensor, "B 1 T W"]
) -> Float[Tensor, "B heads T W"]:
    """R_j x for the positions of the tables; `rotate(x, cos, -sin)` is its inverse."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
