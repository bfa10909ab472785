"""Fast attention over one or two tensors: which implementations this machine has, and choosing one.

`native` is compiled: it passes over the cache once, for one or a few queries on the CPU; `traced` is the same as an
operator that torch.compile leaves whole. `triton_decode` does so on GPUs where it is asked for, not measured. `sdpa` is
torch's scaled_dot_product_attention, with the heads of a group folded together where that is faster, and does all the
rest. All have the contract of `attend`, and the attention room calls no other. `KeyValue` is what they read: keys and
values in the form in which a cache stores them. `linear` does the same for linear layers: one pass over the weights for
a few tokens, and torch for all the rest; `quantize_weights` makes these int8.
"""

from twofold.kernels.choice import VARIABLE, attend, describe, implementation
from twofold.kernels.key_value import KeyValue, Rotation
from twofold.kernels.linear import LINEAR_VARIABLE, Linear, describe_linear, linear, why_not_linear
from twofold.kernels.mask import Mask
from twofold.kernels.native import instruction_set
from twofold.kernels.quantized import QuantizedEmbedding, QuantizedLinear, check_weights, quantize_weights
from twofold.kernels.rotary import rotary_frequencies, rotary_tables, rotate

__all__ = [
    "LINEAR_VARIABLE",
    "VARIABLE",
    "KeyValue",
    "Linear",
    "Mask",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "Rotation",
    "attend",
    "check_weights",
    "describe",
    "describe_linear",
    "implementation",
    "instruction_set",
    "linear",
    "quantize_weights",
    "rotary_frequencies",
    "rotary_tables",
    "rotate",
    "why_not_linear",
]
