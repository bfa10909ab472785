"""The loss of a language model."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from twofold.cache import LayerCache

IGNORED_LABEL = -100  # torch's own choice for positions without a target


def next_token_loss(
    module: nn.Module,
    *,
    input_ids: Int[Tensor, "B T"],
    labels: Int[Tensor, "B T"],
    positions: Int[Tensor, "B T"],
    document_ids: Int[Tensor, "B T"],
    cache: Sequence[LayerCache] | None = None,
) -> tuple[Tensor, int]:
    """Sum of cross-entropies in nats over real targets, and their number. It is computed in float32 or wider.

    Through a cache tokens go one by one, as in decoding: one pass would read all of them as floats from an int4 cache.

    Args:
        module: A `LanguageModel`, or a wrapper around one.
        input_ids: Tokens.
        labels: The next token at each position, -100 where there is none.
        positions: Positions within the documents.
        document_ids: The document of each token; no token sees another document.
        cache: An empty cache through which keys and values go; None for none.
    """
    device = next(module.parameters()).device
    labels, documents = labels.to(device), document_ids.to(device)
    input_ids, positions = input_ids.to(device), positions.to(device)
    if cache is None:
        logits = module(input_ids, positions=positions, documents=documents)
    else:
        steps = zip(input_ids.split(1, dim=1), positions.split(1, dim=1), strict=True)
        decoded = [
            module(token, positions=position, documents=documents[:, : end + 1], cache=cache)
            for end, (token, position) in enumerate(steps)
        ]
        logits = torch.cat(decoded, dim=1)
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return loss, int((labels != IGNORED_LABEL).sum())
