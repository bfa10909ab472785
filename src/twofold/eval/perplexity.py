"""Perplexity over real targets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from twofold.cache import LayerCache
from twofold.data import PackedSequences
from twofold.models import next_token_loss


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well a language model predicts a split. Padding never counts, and documents do not see each other."""

    loss: float
    """Mean cross-entropy in nats a target."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """Cross-entropy of all targets in bits over the UTF-8 bytes of the split: comparable between tokenizers."""
    tokens: int
    """Targets: every token but the first of each document."""
    bytes: int
    """UTF-8 bytes of the documents."""

    def to_dict(self) -> dict[str, float | int]:
        """The figures by name."""
        return asdict(self)


@torch.no_grad()
def measure_perplexity(
    module: nn.Module,
    sequences: PackedSequences,
    batch_size: int,
    *,
    make_cache: Callable[[], Sequence[LayerCache]] | None = None,
) -> Perplexity:
    """Perplexity of a `LanguageModel` over packed sequences, each target predicted from its own sequence only.

    Args:
        module: The model; it is put into evaluation mode and back.
        sequences: The split, its partial last sequence kept.
        batch_size: Sequences in one forward pass.
        make_cache: Makes an empty cache, such as `module.decoder.make_cache`, with which tokens are decoded one by one;
            a quantised one shows what it costs. Default: none, which is the same as a cache of floats, and faster.
    """
    was_training = module.training
    module.eval()
    loss_sum, num_targets = 0.0, 0
    for start in range(0, len(sequences), batch_size):
        indices = range(start, min(start + batch_size, len(sequences)))
        cache = None if make_cache is None else make_cache()
        loss, targets = next_token_loss(module, **sequences.batch(indices), cache=cache)
        loss_sum += loss.item()
        num_targets += targets
    module.train(was_training)
    mean = loss_sum / num_targets
    return Perplexity(
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        bits_per_byte=loss_sum / math.log(2) / sequences.token_file.num_bytes,
        tokens=num_targets,
        bytes=sequences.token_file.num_bytes,
    )
