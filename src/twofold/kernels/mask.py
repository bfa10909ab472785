"""Which keys each query sees."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """What each query sees, said outright: `full`, `causal`, `between` two keys, or `of` a tensor."""

    given: Tensor | None = None
    """Boolean (True = sees) or additive, broadcastable to (B, H, T, S)."""
    is_causal: bool = False
    """The rule "itself and earlier", for as many queries as keys."""
    first: Tensor | None = None
    """Where a query sees neighbouring keys only: the first of them, (B or 1, T)."""
    last: Tensor | None = None
    """One past the last of them."""
    num_keys: int = 0
    """S, where `first` and `last` are given."""
    _tensor: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    _ends: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def full(cls) -> "Mask":
        """Every query sees every key."""
        return cls()

    @classmethod
    def causal(cls) -> "Mask":
        """Query i sees keys 0 to i; there must be as many queries as keys."""
        return cls(is_causal=True)

    @classmethod
    def between(cls, first: Int[Tensor, "#B T"], last: Int[Tensor, "#B T"], num_keys: int) -> "Mask":
        """Query i sees keys `first[i]` to `last[i] - 1` of `num_keys`."""
        return cls(first=first, last=last, num_keys=num_keys)

    @classmethod
    def of(cls, tensor: Bool[Tensor, "..."] | Float[Tensor, "..."]) -> "Mask":
        """What the tensor says: boolean (True = sees) or additive, broadcastable to (B, H, T, S)."""
        return cls(given=tensor)

    @property
    def tensor(self) -> Tensor | None:
        """The mask as a tensor, made once for all layers, or None where a rule says it all."""
        if self.first is None or self.last is None:
            return self.given
        if not self._tensor:  # a cached_property has a lock in Python 3.11, which torch.compile cannot trace
            keys = torch.arange(self.num_keys, device=self.first.device)
            visible = (keys >= self.first[..., None]) & (keys < self.last[..., None])  # (B or 1, T, S)
            self._tensor.append(visible[:, None])  # (B or 1, 1, T, S)
        return self._tensor[0]

    def ends(self, batch: int, num_queries: int, num_keys: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
        """The first key that each query sees and one past the last, made once for all layers; `given` has none."""
        size = (batch, num_queries, num_keys)
        if size not in self._ends:
            if self.first is not None and self.last is not None:
                first, last = (end.expand(batch, -1).int().contiguous() for end in (self.first, self.last))
            else:
                last = torch.full((batch, num_queries), num_keys, dtype=torch.int32)
                if self.is_causal:
                    last = torch.arange(1, num_queries + 1, dtype=torch.int32).repeat(batch, 1)
                first = torch.zeros_like(last)
            self._ends[size] = first, last
        return self._ends[size]

    def plus(self, bias: Float[Tensor, "#B #H T S"]) -> "Mask":
        """This mask with a bias added to the scores that it lets through."""
        if self.is_causal:
            hidden = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
            return Mask.of(bias.masked_fill(hidden, float("-inf")))
        tensor = self.tensor
        if tensor is None:
            return Mask.of(bias)
        if tensor.dtype.is_floating_point:
            return Mask.of(bias + tensor)
        return Mask.of(bias.masked_fill(~tensor, float("-inf")))
