"""The Triton kernel: one pass over the cache for one or a few queries, on the GPU.

Its results are tested in Triton's interpreter on the CPU, and that it compiles for several GPUs is tested too; it was
not measured on a GPU. What it runs there, and what that should cost, is in `triton_program`.
"""

import functools
import math
import os

import torch
from jaxtyping import Float
from torch import Tensor

from twofold.kernels.key_value import KeyValue
from twofold.kernels.mask import Mask

MAX_QUERIES = 8
"""Queries up to which a call is decoding; above, matrix products decide and torch's kernels are better."""
INTERPRETER = "TRITON_INTERPRET"
"""Environment variable of Triton: at 1 it runs its programs on the CPU, to test them."""
_OLDEST = (3, 3)  # the first version in which a program takes strides as tuples
_CAPABILITY = (8, 0)  # tensor cores with bfloat16
_MULTIPLE = 16  # of which widths must be multiples: what a matrix product takes
_MAX_ROW_BYTES = 1_024  # of a stored row in the query's dtype: two tensors' blocks must fit a GPU's shared memory
_BLOCK_BYTES = 16 * 1_024
_PARTS_PER_MERGE_STEP = 16
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def version() -> str | None:
    """Triton's version, or None where it cannot be imported. CUDA builds of torch for Linux bring it along."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def missing(device_type: str) -> str | None:
    """What keeps the kernel from running on a kind of device, or None."""
    found = version()
    if found is None:
        return "Triton is not installed"
    if tuple(map(int, found.split(".")[:2])) < _OLDEST:
        return f"Triton is {found}; {'.'.join(map(str, _OLDEST))} or newer is needed"
    if device_type == "cpu":
        return None if _is_interpreted() else f"on the CPU it needs {INTERPRETER}=1"
    return None if device_type == "cuda" else f"it does not run on {device_type}"


def why_not(query: Tensor, stored: KeyValue, mask: Mask) -> str | None:
    """Why the kernel cannot do this call, or None when it can."""
    key, value, rope_key = stored.key, stored.value, stored.rope_key
    if torch.compiler.is_compiling():
        return "torch compiles it"
    lacking = missing(query.device.type)
    if lacking is not None:
        return lacking
    if stored.recent is not None:
        return "the last keys are floats, the others not"
    if type(query) is not Tensor or type(key) is not Tensor:
        return "the tensors are of a subclass"
    if _device(query.device)[1] < _CAPABILITY:
        return f"the GPU is older than compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients are wanted"
    stores = query.dtype if stored.key_scale is None else key.dtype
    if query.dtype not in _TYPES or not key.dtype == value.dtype == stores:
        return f"the dtype is {query.dtype} over {key.dtype}"
    if query.shape[2] > MAX_QUERIES:
        return f"there are {query.shape[2]} queries"
    width, rope_width = _widths(query, stored)
    if width % _MULTIPLE or rope_width % _MULTIPLE or width * query.element_size() > _MAX_ROW_BYTES:
        return f"the heads are {width} and {rope_width} wide"
    if any(tensor is not None and tensor.stride(-1) != 1 for tensor in (key, value, rope_key)):
        return "the channels of a head do not lie together"
    if mask.given is not None:
        return "the mask is a tensor"
    return None


def attend(query: Float[Tensor, "B H T W"], stored: KeyValue, mask: Mask, scale: float) -> Float[Tensor, "B H T D"]:
    """Softmax attention with sums in float32; keys that are the values too are read once.

    Half-precision queries meet keys, and weights meet values, in half precision, as in torch's kernels on GPUs; weights
    of integers are bfloat16. A query that sees no key gets zeros. A NaN reaches the queries that see it; where queries
    of one head see different keys, it may reach those of them that do not.

    Call it only where `why_not` finds nothing.
    """
    import triton.language as tl

    from twofold.kernels.triton_program import attend_part, merge_parts

    if query.stride(-1) != 1:
        query = query.contiguous()
    batch, num_heads, num_queries, _ = query.shape
    num_groups, num_keys = stored.key.shape[1:3]
    width, rope_width = _widths(query, stored)
    half = _power(width // 2)
    rows = num_heads // num_groups * num_queries
    fitting_rows = _BLOCK_BYTES // (2 * half * query.element_size())
    # float32 products are not done by tensor cores, and take twice the registers.
    block_rows = min(_power(rows), max(16, fitting_rows // (2 if query.dtype == torch.float32 else 1)))
    # Keys are rotated in float32, and a table for the block stays in registers.
    block_keys = max(16, min(64, fitting_rows if stored.rotation is None else _BLOCK_BYTES // (8 * half)))
    fits_twice = block_keys <= fitting_rows
    grid = [batch * num_groups, 1, -(-rows // block_rows)]
    # Twice as many programs as processors, each with a few blocks at least.
    grid[1] = max(1, min(-(-2 * _device(query.device)[0] // (grid[0] * grid[2])), num_keys // (4 * block_keys)))

    dtype, weight_dtype = _arithmetic(query.dtype), _arithmetic(query.dtype)
    if stored.key_scale is not None and dtype == torch.float16:
        weight_dtype = _arithmetic(torch.bfloat16)  # weights times scales may be less than float16 can hold
    output = query.new_empty(batch, num_heads, num_queries, width, dtype=dtype)
    sums, best, total = output, None, None
    if grid[1] > 1:
        sums = query.new_empty(batch, num_heads, num_queries, grid[1], width, dtype=torch.float32)
        best, total = torch.empty_like(sums[..., 0]), torch.empty_like(sums[..., 0])
    rotation = stored.rotation
    position, frequency, weight = (
        (None, None, None)
        if rotation is None
        else (rotation.positions, rotation.frequencies.contiguous(), rotation.weight)
    )
    value = None if stored.tied else stored.value
    value_scale = None if stored.tied else stored.value_scale
    with torch.cuda.device_of(query):
        attend_part[tuple(grid)](
            sums,
            best,
            total,
            query,
            stored.key,
            value,
            stored.key_scale,
            value_scale,
            stored.rope_key,
            stored.rope_scale,
            position,
            frequency,
            None if weight is None else weight.contiguous(),
            mask.first,
            mask.last,
            query.stride()[:3],
            stored.key.stride()[:3],
            _strides(value, 0, 1, 2),
            _strides(stored.key_scale, 0, 1, 2),
            _strides(value_scale, 0, 1, 2),
            _strides(stored.rope_key, 0, 2),
            _strides(stored.rope_scale, 0, 2),
            _strides(position, 0, 1),
            _ends_strides(mask.first),
            _ends_strides(mask.last),
            scale * math.log2(math.e),
            num_keys,
            num_groups,
            CAUSAL=mask.is_causal,
            HEADS=num_heads // num_groups,
            QUERIES=num_queries,
            WIDTH=width,
            HALF=half,
            ROPE_WIDTH=rope_width,
            ROPE_HALF=_power(rope_width // 2),
            NIBBLES=stored.key.dtype == torch.uint8,
            QUERY_TYPE=getattr(tl, str(dtype).removeprefix("torch.")),
            WEIGHT_TYPE=getattr(tl, str(weight_dtype).removeprefix("torch.")),
            ROWS=block_rows,
            KEYS=block_keys,
            num_stages=2 if fits_twice else 1,
        )
        if best is not None:
            merge_parts[(batch * num_heads * num_queries,)](
                output, sums, best, total, grid[1], WIDTH=width, PADDED=2 * half, STEP=_PARTS_PER_MERGE_STEP
            )
    return output.to(query.dtype)


def _is_interpreted() -> bool:
    return os.environ.get(INTERPRETER) == "1"


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The type to round to; in Triton's interpreter not bfloat16, whose bits it multiplies as if they were integers."""
    return torch.float32 if dtype == torch.bfloat16 and _is_interpreted() else dtype


def _widths(query: Tensor, stored: KeyValue) -> tuple[int, int]:
    """Channels of a value, and those that a rope key adds to a key; uint8 holds two in a byte."""
    width = stored.value.shape[-1] * (2 if stored.value.dtype == torch.uint8 else 1)
    return width, 0 if stored.rope_key is None else query.shape[-1] - width


def _power(count: int) -> int:
    """The next power of two, 16 at least: the least that a matrix product on tensor cores takes."""
    return max(16, 1 << (count - 1).bit_length())


def _strides(tensor: Tensor | None, *dimensions: int) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.stride(dimension) for dimension in dimensions)


def _ends_strides(ends: Tensor | None) -> tuple[int, int] | None:
    """Strides of one end of an interval, which may be the same for the whole batch."""
    return None if ends is None else (ends.stride(0) if ends.shape[0] > 1 else 0, ends.stride(1))


@functools.cache
def _device(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Processors of a GPU and its compute capability. In the interpreter, a small GPU's, so that it has parts too."""
    if device.type != "cuda":
        return 16, _CAPABILITY
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)
