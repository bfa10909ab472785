"""Attention by torch's scaled_dot_product_attention."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, said outright: `Mask.full()`, `Mask.causal()` or `Mask.of(tensor)`."""

    tensor: Tensor | None
    """Boolean (True = sees) or additive, broadcastable to (B, H, T, S); None where a rule says it all."""
    is_causal: bool
    """The rule "itself and earlier", for as many queries as keys."""

    @classmethod
    def full(cls) -> "Mask":
        """Every query sees every key."""
        return cls(tensor=None, is_causal=False)

    @classmethod
    def causal(cls) -> "Mask":
        """Query i sees keys 0 to i; there must be as many queries as keys."""
        return cls(tensor=None, is_causal=True)

    @classmethod
    def of(cls, tensor: Bool[Tensor, "..."] | Float[Tensor, "..."]) -> "Mask":
        """What the tensor says: boolean (True = sees) or additive, broadcastable to (B, H, T, S)."""
        return cls(tensor=tensor, is_causal=False)

    def plus(self, bias: Float[Tensor, "#B #H T S"]) -> "Mask":
        """This mask with a bias added to the scores that it lets through."""
        if self.is_causal:
            ones = bias.new_ones(bias.shape[-2:], dtype=bias.dtype).tril().bool()
            return Mask.of(bias.masked_fill(~ones, float("-inf")))
        if self.tensor is None:
            return Mask.of(bias)
        if self.tensor.dtype.is_floating_point:
            return Mask.of(bias + self.tensor)
        return Mask.of(bias.masked_fill(~self.tensor, float("-inf")))


def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T E"]:
    """Softmax attention; k and v may be one tensor, which is then passed once and never copied.

    Query head h reads key/value head h // (H / G). For a single query the heads that share keys become rows of one
    matrix product, so that each key is read once for all of them.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Which keys each query sees.
        scale: Factor on q·k.
        dropout: Probability with which an attention weight is dropped.
    """
    num_heads, num_groups = q.shape[1], k.shape[1]
    if q.shape[2] == 1 and num_groups < num_heads:
        batch, _, _, width = q.shape
        folded = q.reshape(batch, num_groups, num_heads // num_groups, width)  # (B, G, H/G, D)
        visible = mask.tensor
        if visible is not None and visible.shape[1] == num_heads:
            visible = visible.reshape(visible.shape[0], *folded.shape[1:3], visible.shape[-1])  # (B, G, H/G, S)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=visible, dropout_p=dropout, scale=scale)
        return out.reshape(batch, num_heads, 1, v.shape[-1])  # (B, H, 1, E)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask.tensor,
        dropout_p=dropout,
        is_causal=mask.is_causal,
        scale=scale,
        enable_gqa=num_groups < num_heads,
    )
