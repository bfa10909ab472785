"""What all layers share in one forward pass: positions, and which tokens see which."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from twofold.kernels import Mask, rotary_frequencies, rotary_tables


def visible_pairs(
    query_index: Int[Tensor, "T"], key_index: Int[Tensor, "S"], *, causal: bool, window: int | None
) -> Bool[Tensor, "T S"]:
    """Which keys the order of tokens lets each query see.

    Args:
        query_index: Places of the queries in the sequence.
        key_index: Places of the keys in the same sequence.
        causal: A query sees itself and earlier keys only.
        window: A query sees keys less than this many places away; None for no limit.
    """
    distance = query_index[:, None] - key_index[None, :]  # (T, S)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    return visible


class AttentionContext:
    """Positions and visibility of the tokens in one forward pass; tables and masks are made once for all layers.

    A padding token sees itself, so that every row of attention weights is finite; no real token sees it.

    Args:
        positions: Position of each new token, (B, T). With packed documents they start anew at each document.
        causal: A token sees itself and earlier tokens only.
        rope_theta: Base of the rotary frequencies.
        num_past: Tokens that came before these in the same sequence.
        padding: True for real tokens, (B, S) over past and new tokens, or None when all are real.
        documents: Number of the document that each token belongs to, (B, S); no token sees another document.
        custom_mask: A mask (B or 1, H or 1, T, S) that replaces causality, padding and documents, boolean (True = sees)
            or additive. Windows still hold.
        dtype: Dtype of tables of angles: float64 for a float64 model, else float32.
    """

    def __init__(
        self,
        positions: Int[Tensor, "B T"],
        *,
        causal: bool,
        rope_theta: float = 10_000.0,
        num_past: int = 0,
        padding: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B S"] | None = None,
        custom_mask: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.positions = positions
        self.causal = causal
        self.rope_theta = rope_theta
        self.num_past = num_past
        self.padding = None if padding is None or _surely(padding) else padding
        self.documents = None if documents is None or _surely(documents == documents[:, :1]) else documents
        self.custom_mask = custom_mask
        self.dtype = dtype
        self._masks: dict[int | None, tuple[int, Mask]] = {}
        self._frequencies: dict[int, Tensor] = {}
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def rotary_tables(self, width: int) -> tuple[Float[Tensor, "B 1 T W"], Float[Tensor, "B 1 T W"]]:
        """Cosines and sines of the new tokens' positions for heads of a width."""
        if width not in self._tables:
            self._tables[width] = rotary_tables(self.positions, self.rotary_frequencies(width))
        return self._tables[width]

    def rotary_frequencies(self, width: int) -> Float[Tensor, "half"]:
        """Angles per position for heads of a width."""
        if width not in self._frequencies:
            device = self.positions.device
            self._frequencies[width] = rotary_frequencies(width, self.rope_theta, device=device, dtype=self.dtype)
        return self._frequencies[width]

    def mask(self, num_keys: int, window: int | None) -> Mask:
        """The mask of the new tokens over the latest `num_keys` tokens, for a layer with a window."""
        kept = self._masks.get(window)
        if kept is None or kept[0] != num_keys:  # not a key of the dict, which would make torch.compile fix its value
            kept = self._masks[window] = (num_keys, self._make_mask(num_keys, window))
        return kept[1]

    def _make_mask(self, num_keys: int, window: int | None) -> Mask:
        num_queries = self.positions.shape[1]
        if self.custom_mask is not None:
            return self._windowed(self.custom_mask[..., -num_keys:], window)
        if window is not None and num_keys <= window:
            window = None  # no two of these tokens are that far apart
        if self.padding is None and self.documents is None and window is None:
            if not self.causal or num_queries == 1:
                return Mask.full()
            if num_queries == num_keys:
                return Mask.causal()
        total = self.num_past + num_queries
        device = self.positions.device
        if self.causal and self.documents is None and self._padding_is_left():
            return self._interval_mask(num_keys, window)
        query_index = torch.arange(self.num_past, total, device=device)
        key_index = torch.arange(total - num_keys, total, device=device)
        visible = visible_pairs(query_index, key_index, causal=self.causal, window=window)[None, None]  # (1, 1, T, S)
        if self.documents is not None:
            of_keys = self.documents[:, total - num_keys : total]
            of_queries = self.documents[:, self.num_past : total]
            visible = visible & (of_queries[:, None, :, None] == of_keys[:, None, None, :])  # (B, 1, T, S)
        if self.padding is not None:
            is_self = query_index[:, None] == key_index[None, :]
            visible = visible & (self.padding[:, None, None, total - num_keys : total] | is_self)  # (B, 1, T, S)
        return Mask.of(visible)

    def _windowed(self, custom_mask: Tensor, window: int | None) -> Mask:
        if window is None:
            return Mask.of(custom_mask)
        num_queries, num_keys = custom_mask.shape[-2:]
        index = torch.arange(num_keys, device=custom_mask.device)
        visible = visible_pairs(index[num_keys - num_queries :], index, causal=False, window=window)
        if custom_mask.dtype is torch.bool:
            return Mask.of(custom_mask & visible)
        return Mask.of(custom_mask.masked_fill(~visible, float("-inf")))

    def _interval_mask(self, num_keys: int, window: int | None) -> Mask:
        """The mask of causal attention with nothing but padding in front: each query sees neighbouring keys."""
        num_queries = self.positions.shape[1]
        own = torch.arange(num_keys - num_queries, num_keys, device=self.positions.device)[None]  # (1, T)
        first = torch.zeros_like(own) if window is None else (own - window + 1).clamp(min=0)
        if self.padding is not None:
            num_padding = (~self.padding).sum(dim=-1, keepdim=True) - (self.num_past + num_queries - num_keys)
            first = torch.minimum(torch.maximum(first, num_padding), own)  # (B, T); padding sees itself
        return Mask.between(first, own + 1, num_keys)

    def _padding_is_left(self) -> bool:
        return self.padding is None or _surely(self.padding[:, 1:] >= self.padding[:, :-1])


def _surely(conditions: Bool[Tensor, "..."]) -> bool:
    """Whether all of them hold; False while torch.compile traces: it cannot look, and takes the general way."""
    return not torch.compiler.is_compiling() and bool(conditions.all())
