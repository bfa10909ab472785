"""Rows as integers: how far they are from what was given, special rows, and the layout of bytes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twofold.cache import Quantized, quantize, spread
from twofold.kernels.key_value import dequantized

DTYPES = ("int8", "int4")
# Numbers below the smallest normal float are multiples of this; scales among them are rounded coarsely.
TINY = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps


def rows(width=8, number=5, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, number, width, generator=generator, dtype=torch.float64).to(dtype)


def read(stored: Quantized) -> torch.Tensor:
    return dequantized(stored.codes, stored.scale, torch.float64)


ROWS = st.builds(
    lambda width, exponent, seed: (rows(2 * width, seed=seed, dtype=torch.float64) / 5 * 10.0**exponent).float(),
    width=st.integers(1, 40),
    exponent=st.integers(-44, 37),
    seed=st.integers(0, 9),
)


@given(x=ROWS)
def test_int8_is_off_by_half_a_scale_at_most(x):
    """For rows of any magnitude that float32 has, the smallest and the largest too."""
    stored = quantize(x, "int8")
    assert stored.scale.shape == (2, 3, 5, 1)
    assert ((read(stored) - x).abs() <= stored.scale.double() * 0.5 * (1 + 1e-5) + 127 * TINY).all()


@given(x=ROWS)
def test_int4_is_never_worse_than_a_seventh_of_the_largest_number(x):
    """In the mean square of each row, of any magnitude."""
    x = x.double()
    step = x.abs().amax(dim=-1, keepdim=True) / 7
    usual = ((x / step).nan_to_num(0).round() * step - x).norm(dim=-1)
    found = (read(quantize(x.float(), "int4")) - x).norm(dim=-1)
    assert (found <= usual + 1e-6 * x.norm(dim=-1) + 12 * x.shape[-1] * TINY).all()


def test_int4_is_better_than_that_for_rows_of_normal_numbers():
    x = rows(64, number=200, dtype=torch.float64)
    step = x.abs().amax(dim=-1, keepdim=True) / 7
    usual = ((x / step).round() * step - x).square().mean()
    assert (read(quantize(x, "int4")) - x).square().mean() < 0.8 * usual


def test_int4_of_a_long_prompt_equals_that_of_its_parts():
    x = rows(number=2_500)
    whole, parts = quantize(x, "int4"), [quantize(part, "int4") for part in x.split(7, dim=2)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts], dim=2))
    assert torch.equal(whole.scale, torch.cat([part.scale for part in parts], dim=2))


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_int8_of_every_float_dtype(given):
    """The largest number of a row is met to rounding, and so is its opposite."""
    x = rows(dtype=given)
    largest = x.abs().amax(dim=-1, keepdim=True)
    stored = quantize(torch.cat((x, largest, -largest), dim=-1), "int8")
    torch.testing.assert_close(read(stored)[..., -2:-1], largest.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(read(stored)[..., -1:], -largest.double(), rtol=1e-6, atol=0)
    assert (read(stored)[..., :-2] - x).abs().max() <= largest.max() / 254 * (1 + 1e-5)


def test_int8_by_hand():
    stored = quantize(torch.tensor([[[[254.0, -1.0, 3.1, -254.0]]]]), "int8")
    assert stored.scale.item() == 2.0
    assert stored.codes.tolist() == [[[[127, 0, 2, -127]]]]


@pytest.mark.parametrize("sign", [1, -1])
def test_int4_by_hand(sign):
    """Channel c of a row is in the low half of byte c, channel c + D/2 in the high half, with 8 added."""
    row = [-8.0, 1.0, 2.0, 7.0, 0.0, -3.0]  # 16 levels with scale 1 meet it exactly
    stored = quantize(sign * torch.tensor([[[row]]]), "int4")
    assert stored.codes.dtype == torch.uint8
    assert stored.codes.tolist() == [[[[0 | 15 << 4, 9 | 8 << 4, 10 | 5 << 4]]]]
    assert stored.scale.item() == sign


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_is_zero(dtype):
    x = rows()
    x[0, 1, 2] = 0
    stored = quantize(x, dtype)
    assert stored.scale[0, 1, 2].item() == 0
    assert (stored.codes[0, 1, 2] == (0 if dtype == "int8" else 0x88)).all()
    assert (read(stored)[0, 1, 2] == 0).all()
    assert read(stored).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_went_wrong_stays_visible_in_its_own_row(dtype, bad):
    x = rows()
    x[1, 0, 3, 5] = bad
    stored = quantize(x, dtype)
    shows = read(stored).isnan()
    assert shows[1, 0, 3].all()
    assert shows.sum() == x.shape[-1]
    assert stored.scale.isnan().sum() == 1


@pytest.mark.parametrize("width", [1, 2, 6, 64, 96])
def test_spreading_is_its_own_inverse_and_keeps_products(width):
    x, y = rows(width, seed=1, dtype=torch.float64), rows(width, seed=2, dtype=torch.float64)
    torch.testing.assert_close(spread(spread(x)), x)
    torch.testing.assert_close((spread(x) * spread(y)).sum(-1), (x * y).sum(-1))


def test_spreading_turns_one_large_channel_into_a_little_of_each():
    x = torch.zeros(1, 1, 1, 64, dtype=torch.float64)
    x[..., 17] = 8.0
    assert torch.equal(spread(x).abs(), torch.ones_like(x))


def test_spread_rows_with_a_large_channel_lose_less_to_4_bits():
    x = rows(64, dtype=torch.float64)
    x[..., 3] += 30.0
    plain = (read(quantize(x, "int4")) - x).square().mean()
    mixed = (spread(read(quantize(spread(x), "int4"))) - x).square().mean()
    assert mixed < plain / 2


def test_a_transform_first_made_for_inference_serves_training_too():
    with torch.inference_mode():
        spread(torch.ones(1, 1, 1, 32, dtype=torch.float64))
    x = torch.ones(1, 1, 1, 32, dtype=torch.float64, requires_grad=True)
    spread(x).sum().backward()
    assert x.grad is not None
