"""Language modelling as a task for the loop."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twofold.data import IGNORE_INDEX, PackedSequences, PackedTokens, batch_order
from twofold.spec import TrainConfig
from twofold.train.loop import Task


def next_token_loss(module: nn.Module, batch: PackedTokens) -> tuple[Tensor, int]:
    """Sum of cross-entropies in nats over the batch's real targets, and their number.

    Documents packed into one sequence do not see each other. The loss is computed in float32 or wider.
    """
    device = next(module.parameters()).device
    labels = batch["labels"].to(device)
    logits = module(
        batch["input_ids"].to(device),
        positions=batch["positions"].to(device),
        documents=batch["document_ids"].to(device),
    )
    wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return loss, int((labels != IGNORE_INDEX).sum())


def text_task(
    module: nn.Module,
    sequences: PackedSequences,
    config: TrainConfig,
    *,
    evaluate: Callable[[nn.Module], dict[str, float]],
    save_model: Callable[[nn.Module, Path], None],
) -> Task[PackedTokens]:
    """Training of a language model on packed sequences, in an order that the seed alone decides."""
    order = batch_order(len(sequences), config.batch_size, config.seed)
    part = config.batch_size // config.gradient_accumulation

    def batches(step: int) -> Sequence[PackedTokens]:
        indices = order(step)
        return [sequences.batch(indices[start : start + part]) for start in range(0, len(indices), part)]

    return Task(module=module, batches=batches, loss=next_token_loss, evaluate=evaluate, save_model=save_model)
