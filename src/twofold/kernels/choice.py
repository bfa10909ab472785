"""Choosing an implementation."""

import os

import torch
from jaxtyping import Float
from torch import Tensor

from twofold.kernels import native, sdpa, traced
from twofold.kernels.key_value import KeyValue
from twofold.kernels.mask import Mask
from twofold.spec import ConfigError, did_you_mean

VARIABLE = "TWOFOLD_ATTENTION"
"""Environment variable: `auto` (the default), `native` or `torch`."""
_NAMES = ("auto", "native", "torch")


def attend(
    query: Float[Tensor, "B H T W"], stored: KeyValue, *, mask: Mask, scale: float, dropout: float = 0.0
) -> Float[Tensor, "B H T D"]:
    """Softmax attention by the fastest implementation that can do it.

    Query head h reads key/value head h // (H / G). A tensor that is key and value is never copied.

    Args:
        query: Queries, as wide as the keys: W = D, or D + D_r where there is a rope key.
        stored: Keys and values.
        mask: Which keys each query sees.
        scale: Factor on q·k.
        dropout: Probability with which an attention weight is dropped.
    """
    if dropout == 0 and implementation(query, stored, mask) == "native":
        if torch.compiler.is_compiling():
            return traced.attend(query, stored, mask, scale)
        return native.attend(query, stored, mask, scale)
    return sdpa.attend(query, stored, mask=mask, scale=scale, dropout=dropout)


def implementation(query: Tensor, stored: KeyValue, mask: Mask) -> str:
    """Which implementation does this call when nothing is dropped: `native` or `torch`."""
    return "native" if wanted() != "torch" and native.why_not(query, stored, mask) is None else "torch"


def wanted(variable: str = VARIABLE) -> str:
    """What the environment asks for; raises `ConfigError` for a name that does not exist, or what was not compiled."""
    name = os.environ.get(variable, "auto")
    if name not in _NAMES:
        raise ConfigError(f"{variable}={name} is unknown{did_you_mean(name, _NAMES)} Use one of {', '.join(_NAMES)}")
    if name == "native" and native.is_missing():
        raise ConfigError(
            f"{variable}=native, but the kernel was not compiled; install a C++ compiler first, or unset it"
        )
    return name


def describe() -> dict[str, str]:
    """The implementations, and for each whether it is used and why."""
    name, isa = wanted(), native.instruction_set()
    if isa is None:
        compiled = "not compiled: there was no C++ compiler when the package was installed"
    elif name == "torch":
        compiled = f"compiled for {isa}, not used: {VARIABLE}=torch"
    else:
        compiled = f"compiled for {isa}, used for up to {native.MAX_QUERIES} queries on the CPU without gradients"
    return {"native": compiled, "torch": "scaled_dot_product_attention, used for all the rest"}
