"""Fast attention over one or two tensors: which implementations this machine has, and choosing one.

`native` is compiled: it passes over the cache once, for one or a few queries on the CPU. `sdpa` is torch's
scaled_dot_product_attention, with the heads of a group folded together where that is faster, and does all the rest.
Both have the contract of `attend`, and the attention room calls no other. `KeyValue` is what they read: keys and values
in the form in which a cache stores them.
"""

from twofold.kernels.choice import VARIABLE, attend, describe, implementation
from twofold.kernels.key_value import KeyValue, Rotation
from twofold.kernels.mask import Mask
from twofold.kernels.native import instruction_set
from twofold.kernels.rotary import rotary_frequencies, rotary_tables, rotate

__all__ = [
    "VARIABLE",
    "KeyValue",
    "Mask",
    "Rotation",
    "attend",
    "describe",
    "implementation",
    "instruction_set",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
]
