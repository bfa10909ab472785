"""What Transformers' users pass as masks and positions, in the decoder's terms."""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from twofold.spec import DataError


def read_attention_mask(
    attention_mask: Shaped[Tensor, "..."] | None, embedded: Float[Tensor, "B T C"], num_past: int
) -> tuple[Tensor | None, Tensor | None]:
    """Tells padding from whole masks, and checks that a mask fits.

    Args:
        attention_mask: (B, S), not 0 for real tokens, or (B or 1, H or 1, T, S), boolean or additive.
        embedded: The new tokens.
        num_past: Tokens in the cache.

    Returns:
        padding (B, S), True for real tokens, or None when all are real; and a custom mask in the model's dtype, or
        None.

    Raises:
        DataError: for a mask of another length or kind.
    """
    if attention_mask is None:
        return None, None
    batch, num_new = embedded.shape[:2]
    total = num_past + num_new
    if attention_mask.ndim not in (2, 4):
        raise DataError(
            f"attention_mask must have 2 dimensions (batch, tokens) or 4 (batch, heads, new tokens, tokens); "
            f"got the shape {tuple(attention_mask.shape)}"
        )
    if attention_mask.shape[-1] != total:
        raise DataError(
            f"attention_mask covers {attention_mask.shape[-1]} tokens, but {num_past} are cached and {num_new} are "
            f"new; it must cover all {total}"
        )
    if attention_mask.ndim == 2:
        if attention_mask.shape[0] != batch:
            raise DataError(f"attention_mask has {attention_mask.shape[0]} rows for a batch of {batch}")
        all_real = bool(attention_mask.all())  # the usual case, in which nothing as long as the context is made
        return None if all_real else attention_mask.to(embedded.device) != 0, None
    if attention_mask.shape[-2] != num_new or attention_mask.shape[0] not in (1, batch):
        raise DataError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}; it must be "
            f"({batch} or 1, heads or 1, {num_new}, {total})"
        )
    if attention_mask.dtype.is_floating_point:
        return None, attention_mask.to(device=embedded.device, dtype=embedded.dtype)
    if attention_mask.dtype is torch.bool:
        return None, attention_mask.to(embedded.device)
    raise DataError(
        f"a 4-dimensional attention_mask must be boolean (True = sees) or additive; got {attention_mask.dtype}"
    )


def read_documents(position_ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"] | None:
    """Numbers the documents packed in each row: one begins wherever a position does not follow the one before it.

    None when each row is one document. Transformers reads positions in the same way where it is given no mask.
    """
    breaks = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1  # (B, T)
    return breaks.long().cumsum(dim=-1) if bool(breaks.any()) else None
