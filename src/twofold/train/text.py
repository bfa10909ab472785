"""Language modelling as a task for the loop."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from twofold.data import PackedSequences, PackedTokens, batch_order
from twofold.models import next_token_loss
from twofold.spec import TrainConfig
from twofold.train.loop import Task


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

    return Task(
        module=module,
        batches=batches,
        loss=lambda module, batch: next_token_loss(module, **batch),
        evaluate=evaluate,
        save_model=save_model,
    )
