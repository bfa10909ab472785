"""Attention by torch's scaled_dot_product_attention."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twofold.kernels.mask import Mask


def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T E"]:
    """Softmax attention; see `choice.attend`.

    For a single query the heads that share keys become rows of one matrix product, so that each key is read once for
    all of them.
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
