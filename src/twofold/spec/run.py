"""The description of a training run: a model, its data, and how it is trained."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from pydantic import ConfigDict

from twofold.spec.errors import ConfigError
from twofold.spec.model import ModelConfig

_LARGEST_SEED = 2**63 - 1  # what torch takes
_LARGEST_BATCH = 2**20

Precision: TypeAlias = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text for a language model: where it comes from and how it becomes tokens."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    source: str = "wikipedia"
    """`wikipedia` (104 articles, in the package), a .txt or .jsonl file (also .gz), or `hf:NAME` for a hub data set."""
    text_field: str = "text"
    """Field that holds the text in JSONL rows and hub data sets."""
    tokenizer: str = "bpe"
    """`bytes`, `bpe` (trained on the training documents), `gpt2`, or a folder that Transformers can load."""
    tokenizer_vocab_size: int = 2_048
    """Vocabulary of a trained `bpe` tokenizer, end-of-text included; other tokenizers bring their own."""
    validation_fraction: float = 0.1
    """Share of the documents that is held out for validation."""
    sequence_length: int = 256
    """Tokens in one packed training sequence."""
    split_seed: int = 0
    """Seed that chooses the held-out documents."""

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(f"validation_fraction must lie between 0 and 1; got {self.validation_fraction}")
        _check_at_least("sequence_length", self.sequence_length, 2)
        _check_at_least("tokenizer_vocab_size", self.tokenizer_vocab_size, 257)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimiser, schedule and rhythm of a run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    seed: int = 0
    """Seeds the initial weights, the order of the data and dropout."""
    steps: int = 1_000
    """Optimiser steps."""
    batch_size: int = 16
    """Sequences in one optimiser step, over all processes and accumulation."""
    gradient_accumulation: int = 1
    """Parts that one batch is split into; the gradient is that of the whole batch."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    min_learning_rate_ratio: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    warmup_steps: int = 100
    """Steps of linear warm-up; a cosine follows."""
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices; vectors have none."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 leaves them."""
    precision: Precision = "fp32"
    """Arithmetic of the forward pass; weights and optimiser stay in float32."""
    evaluate_every: int = 250
    """Steps between validations; the end is always validated."""
    checkpoint_every: int = 250
    """Steps between checkpoints for resuming."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "gradient_accumulation", "evaluate_every", "checkpoint_every", "log_every"):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("warmup_steps", self.warmup_steps, 0)
        _check_at_least("seed", self.seed, 0)
        for name, most in (("seed", _LARGEST_SEED), ("batch_size", _LARGEST_BATCH)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} must be at most {most}; got {getattr(self, name)}")
        if self.batch_size % self.gradient_accumulation:
            raise ConfigError(
                f"batch_size {self.batch_size} is not a multiple of gradient_accumulation {self.gradient_accumulation}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate must be finite and above 0; got {self.learning_rate}")
        if not 0 <= self.min_learning_rate_ratio <= 1:
            raise ConfigError(f"min_learning_rate_ratio must lie between 0 and 1; got {self.min_learning_rate_ratio}")
        for name in ("weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be finite and at least 0; got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, complete."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    model: ModelConfig
    """The model to train."""
    data: DataConfig = field(default_factory=DataConfig)
    """The text it is trained on."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How it is trained."""

    def __post_init__(self) -> None:
        longest = self.model.max_position_embeddings
        if self.data.sequence_length > longest:
            raise ConfigError(
                f"data.sequence_length {self.data.sequence_length} is longer than the model's "
                f"max_position_embeddings {longest}; shorten the one or raise the other"
            )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} must be at least {least}; got {value}")
