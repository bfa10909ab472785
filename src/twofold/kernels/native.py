"""The compiled kernel: one pass over the cache for one or a few queries, on the CPU."""

import ctypes
import functools
import sys
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

import twofold
from twofold.kernels.key_value import KeyValue
from twofold.kernels.mask import Mask

MAX_QUERIES = 8
"""Queries up to which one pass over the keys beats torch's matrix products."""
_MAX_ROWS = 1_024
_HEAD_MULTIPLE = 16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Strides = ctypes.c_int64 * 3


class _Arguments(ctypes.Structure):
    """`twofold_decode` of csrc/decode.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "output", "key", "value", "key_scale", "value_scale")),
        *((name, ctypes.c_void_p) for name in ("first", "last")),
        *((name, ctypes.c_int64) for name in ("B", "G", "R", "T", "S", "D")),
        ("key_stride", _Strides),
        ("value_stride", _Strides),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library, or None where the package was installed without a compiler."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    for folder in twofold.__path__:  # an editable install has two: the sources, and what was compiled
        path = Path(folder) / "kernels" / f"libtwofold_kernels{suffix}"
        if path.exists():
            library = ctypes.CDLL(str(path))
            library.twofold_isa.restype = ctypes.c_char_p
            return library
    return None


def instruction_set() -> str | None:
    """What the kernel was compiled for and this machine has: `avx512`, `avx2`, `neon`, `baseline`; None without it."""
    library = load_library()
    return None if library is None else library.twofold_isa().decode()


def why_not(q: Tensor, stored: KeyValue, mask: Mask) -> str | None:
    """Why the kernel cannot do this call, or None when it can."""
    k, v = stored.key, stored.value
    if stored.rotation is not None or stored.rope_key is not None:
        return "keys are rotated"
    if load_library() is None:
        return "it was not compiled"
    if q.device.type != "cpu":
        return f"the tensors are on {q.device.type}"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return "gradients are wanted"
    if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"the dtype is {k.dtype}"
    if q.shape[2] > MAX_QUERIES or q.shape[1] // k.shape[1] * q.shape[2] > _MAX_ROWS:
        return f"there are {q.shape[2]} queries"
    if q.shape[-1] % _HEAD_MULTIPLE or v.shape[-1] != q.shape[-1] or k.stride(-1) != 1 or v.stride(-1) != 1:
        return f"a head of {q.shape[-1]} is laid out in a way that it does not read"
    if mask.given is not None:
        return "the mask is a tensor"
    return None


def attend(q: Float[Tensor, "B H T D"], stored: KeyValue, mask: Mask, scale: float) -> Float[Tensor, "B H T D"]:
    """Softmax attention in float32 arithmetic, whatever the dtype; keys that are the values too are read once.

    Call it only where `why_not` finds nothing. A query that sees no key gets zeros.
    """
    k, v = stored.key, stored.value
    batch, num_heads, num_queries, width = q.shape
    num_groups, num_keys = k.shape[1:3]
    query = q.float().contiguous()
    output = torch.empty_like(query)
    first, last = _ends(mask, batch, num_queries, num_keys)
    arguments = _Arguments(
        query=query.data_ptr(),
        output=output.data_ptr(),
        key=k.data_ptr(),
        value=None if stored.tied else v.data_ptr(),
        first=first.data_ptr(),
        last=last.data_ptr(),
        B=batch,
        G=num_groups,
        R=num_heads // num_groups,
        T=num_queries,
        S=num_keys,
        D=width,
        key_stride=_Strides(*k.stride()[:3]),
        value_stride=_Strides(*v.stride()[:3]),
        scale=scale,
        dtype=_DTYPES[k.dtype],
        threads=torch.get_num_threads(),
    )
    library = load_library()
    assert library is not None
    failed = library.twofold_decode_attention(ctypes.byref(arguments))
    assert not failed, "why_not let an unsupported call through"
    return output.to(q.dtype)


def _ends(mask: Mask, batch: int, num_queries: int, num_keys: int) -> tuple[Tensor, Tensor]:
    if mask.first is not None and mask.last is not None:
        return tuple(end.expand(batch, -1).int().contiguous() for end in (mask.first, mask.last))  # type: ignore[return-value]
    last = torch.full((batch, num_queries), num_keys, dtype=torch.int32)
    if mask.is_causal:
        last = torch.arange(1, num_queries + 1, dtype=torch.int32).repeat(batch, 1)
    return torch.zeros_like(last), last
