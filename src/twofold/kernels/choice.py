"""Choosing an implementation."""

import os

import torch
from jaxtyping import Float
from torch import Tensor

from twofold.kernels import native, sdpa, traced, triton_decode
from twofold.kernels.key_value import KeyValue
from twofold.kernels.mask import Mask
from twofold.spec import ConfigError, did_you_mean

VARIABLE = "TWOFOLD_ATTENTION"
"""Environment variable: `auto` (the default), `native`, `triton` or `torch`."""
_NAMES = ("auto", "native", "triton", "torch")


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
    if dropout == 0:
        name = implementation(query, stored, mask)
        if name == "native":
            chosen = traced if torch.compiler.is_compiling() else native
            return chosen.attend(query, stored, mask, scale)
        if name == "triton":
            return triton_decode.attend(query, stored, mask, scale)
    return sdpa.attend(query, stored, mask=mask, scale=scale, dropout=dropout)


def implementation(query: Tensor, stored: KeyValue, mask: Mask) -> str:
    """Which implementation does this call when nothing is dropped: `native`, `triton` or `torch`."""
    name = wanted()
    if name == "triton":
        _require_triton(query.device.type)
    if (name == "triton" or (name == "auto" and query.is_cuda)) and triton_decode.why_not(query, stored, mask) is None:
        return "triton"
    return "native" if name in ("auto", "native") and native.why_not(query, stored, mask) is None else "torch"


def wanted(variable: str = VARIABLE, names: tuple[str, ...] = _NAMES) -> str:
    """What the environment asks for; raises `ConfigError` for a name that does not exist, or what was not compiled."""
    name = os.environ.get(variable, "auto")
    if name not in names:
        raise ConfigError(f"{variable}={name} is unknown{did_you_mean(name, names)} Use one of {', '.join(names)}")
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
    elif name in ("torch", "triton"):
        compiled = f"compiled for {isa}, not used: {VARIABLE}={name}"
    else:
        compiled = f"compiled for {isa}, used for up to {native.MAX_QUERIES} queries on the CPU without gradients"
    return {
        "native": compiled,
        "triton": _describe_triton(name),
        "torch": "scaled_dot_product_attention, used for all the rest",
    }


def _require_triton(device_type: str) -> None:
    lacking = triton_decode.missing(device_type)
    if lacking is not None:
        raise ConfigError(f"{VARIABLE}=triton, but {lacking}; unset it to use what this machine has")


def _describe_triton(name: str) -> str:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "triton":
        _require_triton(device_type)
    found = triton_decode.version()
    if found is None:
        return "not installed; torch for GPUs on Linux brings it along"
    if name in ("torch", "native"):
        return f"Triton {found}, not used: {VARIABLE}={name}"
    if device_type == "cpu":
        if name == "triton":
            return f"Triton {found} in its interpreter on the CPU, which is for tests"
        return f"Triton {found}, not used: there is no CUDA device"
    used = triton_decode.missing(device_type) or (
        f"used for up to {triton_decode.MAX_QUERIES} queries on the GPU without gradients"
    )
    return f"Triton {found}, {used}; not measured on a GPU"
