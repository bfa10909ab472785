"""Learning rate and optimiser."""

import math

import torch
from torch import nn

from twofold.spec import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of a step, counted from zero: linear warm-up to the peak, then a cosine down to its share of it."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    low = config.min_learning_rate_ratio
    return config.learning_rate * (low + (1 - low) * cosine)


def make_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW; matrices decay, vectors (biases, norms, score map weights) do not."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
