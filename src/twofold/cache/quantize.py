"""Rows of numbers as small integers with one scale a row, and a transform after which they lose less."""

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

CACHE_DTYPES = ("int8", "int4")
"""The dtypes in which a cache can store floats."""

# int4 has the 16 codes -8 to 7. These are the quotients of a row's extreme number and the scales that are tried: at 7
# nothing is clamped; beyond 8 the extreme loses, and all others are rounded more finely.
_INT4_QUOTIENTS = (7.0, 8.0, 8.75, 9.5, 10.5, 12.0)
_INT4_OFFSET = 8
_INT4_TOKENS = 1_024  # that are tried at once, which bounds the memory


class Quantized(NamedTuple):
    """Rows as integers; a row's integers times its scale are the numbers that it stands for."""

    codes: Integer[Tensor, "B heads S _"]
    """int8, as wide as the row; or uint8, two of 4 bits in a byte with 8 added: channel c of a row of D in the low half
    of byte c, channel c + D/2 in its high half."""
    scale: Float[Tensor, "B heads S 1"]
    """float32; NaN for a row that held a NaN or an infinity."""
    recent: Float[Tensor, "B heads r D"] | None = None
    """The last r of the S rows as float32, to be read in place of their codes; None where there are codes only."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and floats."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.recent is None else self.recent.nbytes)


def quantize(x: Float[Tensor, "B heads S D"], dtype: str) -> Quantized:
    """Rounds each row to multiples of its own scale.

    For int8 the scale is the row's largest magnitude divided by 127, and no number is off by more than half of it. For
    int4 it is the one of a few, one seventh of the largest magnitude and finer ones, that is off by least in the mean
    square; it is negative where the largest number is positive, because there is a code -8 but no 8.

    A row of zeros has scale 0. A row with a NaN or an infinity has scale NaN, so that all of it reads as NaN: what
    went wrong stays visible, in its own row only.

    Args:
        x: Rows in any float dtype; the arithmetic is float32.
        dtype: `int8`, or `int4` for rows of even width.
    """
    wide = x.float()
    if dtype == "int4":
        scale = torch.cat([_int4_scale(part) for part in wide.split(_INT4_TOKENS, dim=2)], dim=2)
        low, high = (_codes(wide, scale, -8, 7) + _INT4_OFFSET).to(torch.uint8).chunk(2, dim=-1)
        return Quantized(low | (high << 4), scale)
    scale = _finite_or_nan(wide.abs().amax(dim=-1, keepdim=True) / 127)
    return Quantized(_codes(wide, scale, -127, 127).to(torch.int8), scale)


def spread(x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
    """Mixes the channels of each row by an orthonormal Hadamard transform, which is its own inverse.

    Products of rows stay what they are, while a single large channel becomes a little in all of them: then 4 bits and
    one scale a row suffice (as in QuaRot, arXiv 2404.00456). Where D is no power of two, blocks of the largest one
    that divides it are mixed.
    """
    block = x.shape[-1] & -x.shape[-1]
    matrix = _hadamard(block, x.dtype, x.device)
    return (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


def _int4_scale(x: Float[Tensor, "B heads S D"]) -> Float[Tensor, "B heads S 1"]:
    lowest, highest = torch.aminmax(x, dim=-1, keepdim=True)
    extreme = torch.where(-lowest >= highest, lowest, highest)  # NaN where the row has one
    quotients = -torch.tensor(_INT4_QUOTIENTS, device=x.device).view(-1, 1, 1, 1, 1)
    relative = x / torch.where(extreme == 0, 1, extreme)
    errors = ((relative * quotients).round().clamp(-8, 7) / quotients - relative).square().sum(dim=-1)
    best = quotients.flatten()[errors.argmin(dim=0)]  # (B, heads, S)
    return _finite_or_nan(extreme / best[..., None])


def _codes(x: Tensor, scale: Tensor, lowest: int, highest: int) -> Tensor:
    """Whole numbers, as floats. Tiny rows have coarse scales and so large quotients, which int8 must clamp too."""
    return (x / torch.where(scale == 0, 1, scale)).nan_to_num(0).round().clamp(lowest, highest)


def _finite_or_nan(scale: Tensor) -> Tensor:
    return torch.where(scale.isfinite(), scale, torch.nan)


@functools.cache
def _hadamard(width: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "width width"]:
    with torch.inference_mode(False):  # it is kept, and may be needed with gradients later
        signs = torch.ones(1, 1, dtype=dtype, device=device)
        while signs.shape[0] < width:
            signs = torch.cat((torch.cat((signs, signs), dim=1), torch.cat((signs, -signs), dim=1)))
        return signs * width**-0.5
