"""Positions as sinusoids and as rotations."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def sinusoidal_embedding(
    positions: Int[Tensor, "*n"], width: int, *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*n width"]:
    """Sine and cosine of each position at geometric frequencies.

    Channel 2c is sin(position · 10000^(-2c / width)) and channel 2c + 1 its cosine (Vaswani et al. 2017, section 3.5).
    An odd width ends with a sine.

    Args:
        positions: Token positions.
        width: Number of channels.
        dtype: float32, or float64 to compare with the reference; angles grow with position, so nothing narrower.
    """
    channels = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    angles = positions[..., None].to(dtype) * 10_000.0 ** (-channels / width)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[..., :width]


def rotary_tables(
    positions: Int[Tensor, "B T"], width: int, theta: float, *, dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "B 1 T W"], Float[Tensor, "B 1 T W"]]:
    """Cosines and sines by which `rotate` turns heads of a width.

    Channels c and c + width / 2 form a pair that turns by position · theta^(-2c / width), as in Llama.

    Args:
        positions: Token positions.
        width: Width W of what is rotated, even.
        theta: Base of the frequencies.
        dtype: float32, or float64 to compare with the reference; angles grow with position, so nothing narrower.
    """
    channels = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    angles = positions[:, None, :, None].to(dtype) * theta ** (-channels / width)  # (B, 1, T, W/2)
    angles = torch.cat((angles, angles), dim=-1)  # (B, 1, T, W)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "B heads T W"], cos: Float[Tensor, "B 1 T W"], sin: Float[Tensor, "B 1 T W"]
) -> Float[Tensor, "B heads T W"]:
    """R_j x for the positions of the tables; `rotate(x, cos, -sin)` is its inverse."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)
