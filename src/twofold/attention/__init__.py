"""Attention with shared projections: the layer, its positions, masks and score maps, and the slow reference.

The tensors' letters are the same everywhere: B batch, T query positions, S key positions, H query heads, G key/value
heads, D head dim, C hidden size.
"""

from twofold.attention.context import AttentionContext, visible_pairs
from twofold.attention.layer import Attention
from twofold.attention.positions import sinusoidal_embedding
from twofold.attention.reference import reference_attention, reference_scores
from twofold.attention.score_map import ScoreMapMix

__all__ = [
    "Attention",
    "AttentionContext",
    "ScoreMapMix",
    "reference_attention",
    "reference_scores",
    "sinusoidal_embedding",
    "visible_pairs",
]
