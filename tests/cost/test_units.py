"""Figures as text."""

from fractions import Fraction

import pytest

from twofold.cost import format_bytes, format_count, format_decimal, format_percent


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (2560, "2.5 KiB"),
        (80 * 1024 * 32_768, "2.5 GiB"),
        (1024**2 - 1, "1,023.999 KiB"),
        (2**60, "1,024 PiB"),
    ],
)
def test_bytes_are_binary(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_bytes_in_a_given_unit():
    assert format_bytes(2 * 1024**3, "MiB") == "2,048 MiB"
    assert format_bytes(512, "KiB") == "0.5 KiB"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (Fraction(31, 32), "96.875 %"),
        (Fraction(63, 64), "98.4375 %"),
        (Fraction(127, 128), "99.21875 %"),
        (Fraction(2, 3), "66.667 %"),
        (Fraction(-1, 4), "-25 %"),
        (0, "0 %"),
        (1, "100 %"),
    ],
)
def test_percent(share, text):
    assert format_percent(share) == text


def test_rounding_leaves_no_negative_zero():
    assert format_decimal(Fraction(-1, 3_000_000)) == "0"


def test_counts_have_separators():
    assert format_count(305_534_976) == "305,534,976"
