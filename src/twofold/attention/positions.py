"""Positions as sinusoids."""

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
