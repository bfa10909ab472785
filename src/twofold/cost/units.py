"""Figures as text. Bytes are binary and say so; what is exact is printed exactly."""

from decimal import Decimal, localcontext
from fractions import Fraction

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_EXACT_DIGITS = 6


def format_count(count: int) -> str:
    """A whole number with thousands separators: `305,534,976`."""
    return f"{count:,}"


def format_decimal(value: Fraction | int) -> str:
    """A number in decimals: exact when six digits after the point suffice, else rounded to three."""
    value = Fraction(value)
    exact = (value * 10**_EXACT_DIGITS).denominator == 1
    with localcontext() as context:
        context.prec = 60
        decimal = round(Decimal(value.numerator) / value.denominator, _EXACT_DIGITS if exact else 3)
    text = f"{decimal:,f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def format_bytes(num_bytes: int | Fraction, unit: str | None = None) -> str:
    """Bytes in binary units: `2.5 KiB`, `80 MiB`.

    Args:
        num_bytes: The number of bytes.
        unit: One of B, KiB, MiB, GiB, TiB, PiB. Default: the largest that leaves at least 1.
    """
    value = Fraction(num_bytes)
    if unit is None:
        exponent = 0
        while exponent + 1 < len(_BINARY_UNITS) and abs(value) >= 1024 ** (exponent + 1):
            exponent += 1
    else:
        exponent = _BINARY_UNITS.index(unit)
    return f"{format_decimal(value / 1024**exponent)} {_BINARY_UNITS[exponent]}"


def format_percent(share: Fraction | int) -> str:
    """A share of one as percent: `96.875 %`, with no digit that rounding invented."""
    return f"{format_decimal(Fraction(share) * 100)} %"
