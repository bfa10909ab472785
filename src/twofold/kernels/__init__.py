"""Fast attention over one or two tensors: which implementations this machine has, and choosing one.

`native` is compiled: it passes over the cache once, for one or a few queries on the CPU. `sdpa` is torch's
scaled_dot_product_attention, with the heads of a group folded together where that is faster, and does all the rest.
Both have the contract of `attend`, and the attention room calls no other.
"""

from twofold.kernels.choice import VARIABLE, attend, describe, implementation
from twofold.kernels.mask import Mask
from twofold.kernels.native import instruction_set

__all__ = ["VARIABLE", "Mask", "attend", "describe", "implementation", "instruction_set"]
