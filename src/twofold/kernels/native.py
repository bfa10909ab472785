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
_MULTIPLE = 16  # of which widths must be multiples: the widest vectors
_FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPES = {**_FLOATS, torch.int8: 3, torch.uint8: 4}
_Two, _Three = ctypes.c_int64 * 2, ctypes.c_int64 * 3


class _Arguments(ctypes.Structure):
    """`twofold_decode` of csrc/decode.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "output", "key", "value", "key_scale", "value_scale")),
        *((name, ctypes.c_void_p) for name in ("rope_key", "rope_scale", "position", "frequency", "key_weight")),
        *((name, ctypes.c_void_p) for name in ("first", "last", "recent")),
        *((name, ctypes.c_int64) for name in ("B", "G", "R", "T", "S", "D", "rope_width")),
        *((name, _Three) for name in ("key_stride", "value_stride")),
        *((name, _Two) for name in ("rope_stride", "key_scale_stride", "value_scale_stride")),
        *((name, ctypes.c_int64) for name in ("rope_scale_stride", "position_stride")),
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


def is_missing() -> bool:
    """Whether there is no library. While torch.compile traces, none can be loaded, and one is taken to be there."""
    return not torch.compiler.is_compiling() and load_library() is None


def instruction_set() -> str | None:
    """What the kernel was compiled for and this machine has: `avx512`, `avx2`, `neon`, `baseline`; None without it."""
    library = load_library()
    return None if library is None else library.twofold_isa().decode()


def why_not(query: Tensor, stored: KeyValue, mask: Mask) -> str | None:
    """Why the kernel cannot do this call, or None when it can."""
    key, value, rope_key = stored.key, stored.value, stored.rope_key
    if is_missing():
        return "it was not compiled"
    if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
        return "the graph is exported"  # for programs that do not have the kernel
    if torch.compiler.is_compiling() and stored.recent is not None:
        return "torch compiles it and the last keys are floats, the others not"
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients are wanted"
    if query.dtype not in _FLOATS or (stored.key_scale is None and key.dtype != query.dtype):
        return f"the dtype is {query.dtype} over {key.dtype}"
    if key.dtype not in _DTYPES or value.dtype != key.dtype:
        return f"the dtype is {key.dtype}"
    if query.shape[2] > MAX_QUERIES or query.shape[1] // key.shape[1] * query.shape[2] > _MAX_ROWS:
        return f"there are {query.shape[2]} queries"
    rope_width = 0 if rope_key is None else query.shape[-1] - _width(value)
    if _width(key) != _width(value) or _width(value) % _MULTIPLE or rope_width % _MULTIPLE:
        return f"the heads are {_width(key)} and {rope_width} wide"
    if any(tensor is not None and tensor.stride(-1) != 1 for tensor in (key, value, rope_key)):
        return "the channels of a head do not lie together"
    if mask.given is not None:
        return "the mask is a tensor"
    return None


def attend(query: Float[Tensor, "B H T W"], stored: KeyValue, mask: Mask, scale: float) -> Float[Tensor, "B H T D"]:
    """Softmax attention in float32 arithmetic, whatever is stored; keys that are the values too are read once.

    Call it only where `why_not` finds nothing. A query that sees no key gets zeros.
    """
    batch, num_heads, num_queries, query_width = query.shape
    num_groups, num_keys = stored.key.shape[1:3]
    width = _width(stored.value)
    wide = query.float().contiguous()
    output = wide.new_empty(batch, num_heads, num_queries, width)
    first, last = mask.ends(batch, num_queries, num_keys)
    arguments = _Arguments(
        query=wide.data_ptr(),
        output=output.data_ptr(),
        first=first.data_ptr(),
        last=last.data_ptr(),
        B=batch,
        G=num_groups,
        R=num_heads // num_groups,
        T=num_queries,
        D=width,
        rope_width=query_width - width,
        scale=scale,
        threads=torch.get_num_threads(),
    )
    kept = _point_to(arguments, stored)
    if stored.recent is not None:
        recent = _Arguments()
        kept += _point_to(recent, stored.recent)
        arguments.recent = ctypes.addressof(recent)
    library = load_library()
    assert library is not None
    failed = library.twofold_decode_attention(ctypes.byref(arguments))
    assert not failed, "why_not let an unsupported call through"
    return output.to(query.dtype)


def _point_to(arguments: _Arguments, stored: KeyValue) -> list[Tensor]:
    """Fills in what says where keys and values lie; returns the tensors made for that, to be kept during the call."""
    key, value, rotation = stored.key, stored.value, stored.rotation
    arguments.key = key.data_ptr()
    arguments.value = None if stored.tied else value.data_ptr()
    arguments.S = key.shape[2]
    arguments.key_stride, arguments.value_stride = _Three(*key.stride()[:3]), _Three(*value.stride()[:3])
    arguments.dtype = _DTYPES[key.dtype]
    kept: list[Tensor] = []

    def pointer(tensor: Tensor) -> int:
        kept.append(tensor)
        return tensor.data_ptr()

    for name, scales in (("key_scale", stored.key_scale), ("value_scale", stored.value_scale)):
        if scales is not None:
            rows = _rows(scales.squeeze(-1))
            setattr(arguments, name, pointer(rows))
            setattr(arguments, f"{name}_stride", _Two(*rows.stride()[:2]))
    if stored.rope_key is not None:
        arguments.rope_key = stored.rope_key.data_ptr()
        arguments.rope_stride = _Two(stored.rope_key.stride(0), stored.rope_key.stride(2))
    if stored.rope_scale is not None:
        rows = _rows(stored.rope_scale[:, 0, :, 0])
        arguments.rope_scale, arguments.rope_scale_stride = pointer(rows), rows.stride(0)
    if rotation is not None:
        positions = _rows(rotation.positions.int())
        arguments.position, arguments.position_stride = pointer(positions), positions.stride(0)
        arguments.frequency = pointer(rotation.frequencies.double())
        if rotation.weight is not None:
            arguments.key_weight = pointer(rotation.weight.float().contiguous())
    return kept


def _width(stored: Tensor) -> int:
    """Channels of a stored row; uint8 holds two in a byte."""
    return stored.shape[-1] * (2 if stored.dtype == torch.uint8 else 1)


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension contiguous, as the kernel reads scales and positions; seldom a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
