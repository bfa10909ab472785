"""The paper's "+": a learned mix of the score map with fixed sinusoids, for non-causal attention.

S'_ij = S_ij Σ_c w_c + Σ_c w_c P_ijc, where P is fixed and w is learned and shared by all heads. In `paper` P holds five
sinusoids of the row i, then five of the column j. In `product` it holds, for each of three frequencies ω, the products
sin·sin, sin·cos, cos·sin, cos·cos of ωi and ωj, which span sin and cos of ω(i - j). P itself is never built.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from twofold.attention.positions import sinusoidal_embedding
from twofold.spec import ScoreMap

_PAPER_WIDTH = 5
_PRODUCT_FREQUENCIES = (1.0, 0.1, 0.01)
NUM_CHANNELS = {"paper": 2 * _PAPER_WIDTH, "product": 4 * len(_PRODUCT_FREQUENCIES)}
"""Channels m of P: 10 in `paper`, 12 in `product`."""


class ScoreMapMix(nn.Module):
    """The learned weights w, 1/m each at the start, which leaves the temperature as it was."""

    def __init__(self, kind: ScoreMap) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(NUM_CHANNELS[kind]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets every weight to 1/m."""
        nn.init.constant_(self.weight, 1 / self.weight.numel())

    def forward(
        self, positions: Int[Tensor, "B T"], dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B 1 T T"]]:
        """The factor Σ_c w_c on the scores and the bias Σ_c w_c P_ijc, without building P."""
        if self.kind == "paper":
            waves = sinusoidal_embedding(positions, _PAPER_WIDTH, dtype=dtype).to(self.weight.dtype)
            row_weight, column_weight = self.weight.split(_PAPER_WIDTH)
            bias = (waves @ row_weight)[:, :, None] + (waves @ column_weight)[:, None, :]  # (B, T, T)
        else:
            waves = _product_waves(positions, dtype).to(self.weight.dtype)
            weight = self.weight.view(len(_PRODUCT_FREQUENCIES), 2, 2)
            bias = torch.einsum("bifx,fxy,bjfy->bij", waves, weight, waves)
        return self.weight.sum(), bias[:, None]  # (B, 1, T, T)


def _product_waves(positions: Int[Tensor, "B T"], dtype: torch.dtype) -> Float[Tensor, "B T F 2"]:
    frequencies = torch.tensor(_PRODUCT_FREQUENCIES, device=positions.device, dtype=dtype)
    angles = positions[..., None].to(dtype) * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1)
