"""Attention by torch's scaled_dot_product_attention."""

from dataclasses import replace

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twofold.kernels.key_value import KeyValue
from twofold.kernels.mask import Mask


def attend(
    query: Float[Tensor, "B H T W"], stored: KeyValue, *, mask: Mask, scale: float, dropout: float = 0.0
) -> Float[Tensor, "B H T D"]:
    """Softmax attention; see `choice.attend`.

    For a single query the heads that share keys become rows of one matrix product, so that each key is read once for
    all of them.
    """
    stored = stored.in_floats(query.dtype)
    if stored.rope_key is not None and _bias_is_smaller(query, stored):
        rope_key = stored.rope_key
        query, rope_query = query.split((query.shape[-1] - rope_key.shape[-1], rope_key.shape[-1]), dim=-1)
        mask = mask.plus((rope_query @ rope_key.transpose(-1, -2)) * scale)  # (B, H, T, S)
        stored = replace(stored, rope_key=None)
    key, value = stored.plain(query.dtype)
    num_heads, num_groups = query.shape[1], key.shape[1]
    if query.shape[2] == 1 and num_groups < num_heads:
        folded = query.unflatten(1, (num_groups, -1)).squeeze(3)  # (B, G, H/G, D)
        visible = mask.tensor
        if visible is not None and visible.shape[1] == num_heads:
            visible = visible.reshape(visible.shape[0], *folded.shape[1:3], visible.shape[-1])  # (B, G, H/G, S)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=visible, dropout_p=dropout, scale=scale)
        return out.flatten(1, 2).unsqueeze(2)  # (B, H, 1, D)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask.tensor,
        dropout_p=dropout,
        is_causal=mask.is_causal,
        scale=scale,
        enable_gqa=num_groups < num_heads,
    )


def _bias_is_smaller(query: Tensor, stored: KeyValue) -> bool:
    """Whether the scores of `rope_key` take less memory than keys with its channels appended."""
    return query.shape[1] * query.shape[2] < stored.key.shape[1] * query.shape[3]
