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
"""Environment variable: `auto`, `native`, `triton` or `torch`; it wins over the model's `attention_implementation`."""
_FIELD = "attention_implementation"
_NAMES = ("auto", "native", "triton", "torch")


def attend(
    query: Float[Tensor, "B H T W"],
    stored: KeyValue,
    *,
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
    wanted: str = "auto",
) -> Float[Tensor, "B H T D"]:
    """Softmax attention by the implementation that is wanted where it can do it, and by torch elsewhere.

    Query head h reads key/value head h // (H / G). A tensor that is key and value is never copied.

    Args:
        query: Queries, as wide as the keys: W = D, or D + D_r where there is a rope key.
        stored: Keys and values.
        mask: Which keys each query sees.
        scale: Factor on q·k.
        dropout: Probability with which an attention weight is dropped.
        wanted: The model's `attention_implementation`; the environment wins over it.

    Raises:
        ConfigError: for an implementation that does not exist, or that this machine lacks.
    """
    name = "torch" if dropout else implementation(query, stored, mask, wanted)
    if name == "native":
        chosen = traced if torch.compiler.is_compiling() else native
        return chosen.attend(query, stored, mask, scale)
    if name == "triton":
        return triton_decode.attend(query, stored, mask, scale)
    return sdpa.attend(query, stored, mask=mask, scale=scale, dropout=dropout)


def implementation(query: Tensor, stored: KeyValue, mask: Mask, wanted: str = "auto") -> str:
    """Which implementation does this call when nothing is dropped: `native`, `triton` or `torch`."""
    name = choose(wanted=wanted, device_type=query.device.type)
    if name in ("auto", "native") and native.why_not(query, stored, mask) is None:
        return "native"
    # auto never means triton, which was not measured on a GPU.
    return "triton" if name == "triton" and triton_decode.why_not(query, stored, mask) is None else "torch"


def choose(
    variable: str = VARIABLE, names: tuple[str, ...] = _NAMES, *, wanted: str = "auto", device_type: str = "cpu"
) -> str:
    """What the environment asks for, else what is wanted; raises `ConfigError` where it is unknown or missing here."""
    name = os.environ.get(variable, wanted)
    if name not in names:
        raise ConfigError(f"{variable}={name} is unknown{did_you_mean(name, names)} Use one of {', '.join(names)}")
    lacking = _lacking(name, device_type)
    if lacking is not None:
        source = variable if variable in os.environ else _FIELD
        raise ConfigError(f"{source}={name}, but {lacking}; auto uses what this machine has")
    return name


def describe() -> dict[str, str]:
    """The implementations, and for each whether it is used and why."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    name, isa = choose(device_type=device_type), native.instruction_set()
    if isa is None:
        compiled = "not compiled: there was no C++ compiler when the package was installed"
    elif name in ("torch", "triton"):
        compiled = f"compiled for {isa}, not used: {VARIABLE}={name}"
    else:
        compiled = f"compiled for {isa}, used for up to {native.MAX_QUERIES} queries on the CPU without gradients"
    return {
        "native": compiled,
        "triton": _describe_triton(name, device_type),
        "torch": "scaled_dot_product_attention, used for all the rest",
    }


def _lacking(name: str, device_type: str) -> str | None:
    if torch.compiler.is_compiling():
        return None  # a graph that is traced cannot look for libraries
    if name == "native" and native.is_missing():
        return "the kernel was not compiled when the package was installed, for want of a C++ compiler"
    return triton_decode.missing(device_type) if name == "triton" else None


def _describe_triton(name: str, device_type: str) -> str:
    found = triton_decode.version()
    if found is None:
        return "not installed; torch for GPUs on Linux brings it along"
    if name == "triton":
        place = "on the GPU" if device_type == "cuda" else "in its interpreter on the CPU, which is for tests"
        return f"Triton {found}, used for up to {triton_decode.MAX_QUERIES} queries without gradients {place}"
    if device_type == "cpu":
        return f"Triton {found}, not used: there is no CUDA device"
    reason = triton_decode.missing(device_type) or f"not measured on a GPU yet; {VARIABLE}=triton uses it"
    return f"Triton {found}, not used: {reason}"
