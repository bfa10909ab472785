"""Memory for rows that are read from end to end at every token."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LEAST_BYTES = 4 * 2**20  # two large pages; less than that gains nothing


def empty_rows(like: Tensor, num_rows: int, *, mostly_used: bool) -> Tensor:
    """Memory for another number of rows than a tensor's (B, heads, S, D), not initialised.

    What will mostly be used soon comes in large pages on Linux: the processor then looks up one address in 2 MiB, not
    one in 4 KiB. They are taken whole, so memory that may stay empty is left in small ones.

    Args:
        like: Says all but the number of rows.
        num_rows: S of what is returned.
        mostly_used: Whether most of the rows will be written soon.
    """
    batch, heads, _, width = like.shape
    num_bytes = batch * heads * num_rows * width * like.element_size()
    is_plain = type(like) is Tensor and like.device.type == "cpu" and not torch.compiler.is_compiling()
    if not (mostly_used and is_plain and num_bytes >= _LEAST_BYTES and hasattr(mmap, "MADV_HUGEPAGE")):
        return like.new_empty(batch, heads, num_rows, width)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # kernels without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(batch, heads, num_rows, width)
