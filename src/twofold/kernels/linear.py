"""Linear layers for decoding: one or a few tokens at a time, bound by reading the weights."""

import ctypes
import functools

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from twofold.kernels.choice import choose
from twofold.kernels.native import instruction_set, load_library

LINEAR_VARIABLE = "TWOFOLD_LINEAR"
"""Environment variable: `auto` (the default), `native` or `torch`."""
_NAMES = ("auto", "native", "torch")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHTS = {torch.float32: (0, 16), torch.bfloat16: (1, 32), torch.float16: (2, 32), torch.int8: (3, 64)}
"""The kernel's number for each dtype, and what the input's width must be a multiple of."""


class _Arguments(ctypes.Structure):
    """`twofold_linear` of csrc/linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "output", "weight", "scale", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "num_outputs")),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def linear(
    x: Float[Tensor, "*n I"],
    weight: Shaped[Tensor, "O I"],
    bias: Float[Tensor, "O"] | None = None,
    scale: Float[Tensor, "O"] | None = None,
) -> Float[Tensor, "*n O"]:
    """The product x · weight^T · scale + bias, in float32 arithmetic where the kernel does it.

    Args:
        x: The input.
        weight: In the dtype of `x`, or int8.
        bias: Added to each output, in the dtype of `x`.
        scale: float32 factor on each output of an int8 weight.
    """
    num_rows = x.numel() // x.shape[-1]
    if (
        num_rows <= max_rows(x.dtype, weight.dtype)
        and why_not_linear(x, weight) is None
        and choose(LINEAR_VARIABLE, _NAMES) != "torch"
    ):
        return _native(x, num_rows, weight, bias, scale)
    if scale is None:
        return F.linear(x, weight, bias)
    if x.dtype == torch.float16:  # whose range products of whole numbers leave
        return F.linear(x, (weight * scale[:, None]).to(x.dtype), bias)
    product = F.linear(x, weight.to(x.dtype)) * scale
    return (product if bias is None else product + bias).to(x.dtype)


def max_rows(dtype: torch.dtype, weight_dtype: torch.dtype) -> int:
    """Tokens up to which reading each weight once beats torch's matrix products, for inputs of a dtype.

    For int8 weights torch's product begins with a copy of them in the dtype of the input.
    """
    if dtype == torch.bfloat16 and _multiplies_bfloat16():
        return 4 if weight_dtype == torch.bfloat16 else 16
    return 64 if weight_dtype == torch.int8 else 16


def why_not_linear(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot multiply a few rows like `x` by this weight, or None when it can."""
    if torch.compiler.is_compiling():
        return "torch compiles it"
    if load_library() is None:
        return "it was not compiled"
    if type(x) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return "the tensors are of a subclass"  # DTensor, fake tensors, quantised weights of other libraries
    if not (x.is_cpu and weight.is_cpu):
        return f"the tensors are on {x.device.type} and {weight.device.type}"
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "gradients are wanted"
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses the dtype"
    if x.dtype not in _FLOATS or weight.dtype not in (x.dtype, torch.int8):
        return f"the dtype is {x.dtype} with {weight.dtype}"
    if weight.shape[1] % _WEIGHTS[weight.dtype][1] or x.shape[-1] != weight.shape[1] or not weight.is_contiguous():
        return f"the weight's rows of {weight.shape[1]} are not whole vectors"
    return None


def describe_linear() -> str:
    """What computes linear layers of a few tokens on this machine, and why."""
    name, isa = choose(LINEAR_VARIABLE, _NAMES), instruction_set()
    if isa is None:
        return "torch: there was no C++ compiler when the package was installed"
    if name == "torch":
        return f"torch: {LINEAR_VARIABLE}=torch"
    floats, narrow, integers = (max_rows(dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8))
    return (
        f"compiled for {isa}, used for up to {floats} tokens ({narrow} in bfloat16, {integers} with int8 weights) "
        "on the CPU without gradients; torch for the rest"
    )


class Linear(nn.Linear):
    """torch's linear layer, and faster for a few tokens on the CPU without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """The input times the weight, plus the bias."""
        return linear(input, self.weight, self.bias)


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16, without which torch's products in it are very slow."""
    capabilities: dict[str, object] = getattr(
        torch.cpu, "get_capabilities", dict
    )()  # not in the oldest torch that is allowed
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def _native(x: Tensor, num_rows: int, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    num_outputs, width = weight.shape
    # What the kernel reads is kept while it runs. Calls that change nothing are spared: every token makes dozens.
    wide = x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
    output = torch.empty(*x.shape[:-1], num_outputs, dtype=torch.float32)
    wide_bias = bias if bias is None or bias.dtype == torch.float32 else bias.float()
    arguments = _Arguments(
        wide.data_ptr(),
        output.data_ptr(),
        weight.data_ptr(),
        None if scale is None else scale.data_ptr(),
        None if wide_bias is None else wide_bias.data_ptr(),
        num_rows,
        width,
        num_outputs,
        _WEIGHTS[weight.dtype][0],
        torch.get_num_threads(),
    )
    library = load_library()
    assert library is not None
    failed = library.twofold_linear_forward(ctypes.byref(arguments))
    assert not failed, "why_not_linear let an unsupported call through"
    return output if x.dtype == torch.float32 else output.to(x.dtype)
