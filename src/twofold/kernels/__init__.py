"""Fast attention over one or two tensors.

One implementation stands here today: torch's scaled_dot_product_attention, with the heads of a group folded
together where that is faster. Every implementation has the contract of `attend`, and the attention room calls no other.
"""

from twofold.kernels.sdpa import Mask, attend

__all__ = ["Mask", "attend"]
