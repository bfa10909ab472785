"""What the benchmark times, and the check that comes before."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from twofold.attention import AttentionContext
from twofold.cache import LayerCache
from twofold.cost import cache_bytes, cache_elements, check_dtype, count_linears, count_parameters
from twofold.models import Decoder
from twofold.spec import ModelConfig, TwofoldError

GATE_PROMPT = 48  # some of them beyond those that an int4 cache holds as floats
GATE_TOKENS = 8
"""The check decodes this many tokens after the prompt."""

# Largest error of a logit, as a share of the largest logit, that rounding explains. In a quantised cache the last bit
# of a number can tip it to the next integer, layer after layer.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2, "int8": 1e-2, "int4": 1e-1}


class CorrectnessError(TwofoldError):
    """A fast path that does not compute what it should; nothing is timed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point that is measured."""

    context: int
    """Tokens in the cache before the first timed one; for prefill, tokens of the prompt."""
    batch_size: int = 1
    """Sequences together."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The rounds of one figure."""

    median: float
    """The middle round."""
    low: float
    """The lowest."""
    high: float
    """The highest."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of some numbers."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one decoding step must move at least: each weight once, and the cache of the tokens before."""

    weight_bytes: int
    """Matrices and vectors that a step multiplies with; of tables that are looked up, nothing."""
    cache_bytes: int
    """What the cached tokens need, exactly."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weight_bytes + self.cache_bytes


@runtime_checkable  # the tests check annotations
class Contender(Protocol):
    """A model with a cache, and one or more ways to decode with it. It takes no memory before `build`."""

    name: str
    """What its rows are called."""
    tolerance: float
    """Largest error that `check` may find."""

    def traffic(self, case: Case) -> Traffic:
        """Bytes that a step must move, from formulas."""

    def memory(self, case: Case) -> int:
        """Bytes that it needs when built and filled, about."""

    def build(self, longest: int) -> None:
        """Makes the model, for sequences of up to `longest` tokens."""

    def check(self) -> float:
        """Largest error of decoded logits against one pass without a cache, as a share of the largest logit."""

    def fill(self, case: Case) -> None:
        """Fills the cache up to the context."""

    def ways(self) -> Mapping[str, Callable[[int], None]]:
        """Ways to decode, by name: each decodes so many tokens after the context and takes them back."""

    def prefill(self, case: Case) -> None:
        """Passes a prompt through the model, into a new cache, up to the logits of its last token."""

    def close(self) -> None:
        """Gives the memory back."""


def check(contender: Contender) -> float:
    """The contender's error, if rounding explains it.

    Raises:
        CorrectnessError: if not.
    """
    return check_error(contender.name, contender.check(), contender.tolerance)


def check_error(name: str, error: float, tolerance: float) -> float:
    """The error, if it is within the tolerance; raises `CorrectnessError` if not."""
    if not error <= tolerance:  # NaN is no number that may pass
        raise CorrectnessError(
            f"{name}: decoded logits are off by {error:.2g} of the largest one, "
            f"more than the {tolerance:.2g} that rounding explains; nothing was timed"
        )
    return error


@torch.no_grad()
def fill_caches(decoder: Decoder, caches: Sequence[LayerCache], case: Case, *, piece: int) -> None:
    """Fills caches up to the context with what random hidden states project to.

    Args:
        decoder: The model.
        caches: One a layer, empty.
        case: Context and batch size.
        piece: Tokens at a time, as a prompt that is passed in pieces fills it.
    """
    config, dtype = decoder.config, decoder.dtype
    generator = torch.Generator().manual_seed(0)
    for start in range(0, case.context, piece):
        positions = torch.arange(start, min(start + piece, case.context)).expand(case.batch_size, -1)
        hidden_states = torch.randn(*positions.shape, config.hidden_size, generator=generator).to(dtype)
        context = AttentionContext(positions, causal=True, rope_theta=config.rope_theta)
        for block, cache in zip(decoder.blocks(), caches, strict=True):
            cache.append(*block.self_attn.project(hidden_states, context)[1])


def relative_error(decoded: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected number."""
    return ((decoded - expected).abs().max() / expected.abs().max()).item()


def step_traffic(
    config: ModelConfig,
    case: Case,
    *,
    weight_bytes: int | Fraction,
    dtype: str,
    weights: str | None = None,
    cache_element: Fraction | None = None,
) -> Traffic:
    """What a step of a model moves, from its config.

    Tables of tokens and positions are looked up row by row and count nothing; a token table that is the output matrix
    too is multiplied with and counts.

    Args:
        config: The model.
        case: Context and batch size.
        weight_bytes: Bytes of one weight.
        dtype: Type of the cached elements.
        weights: `int8` where the linear layers have such weights, with a float32 scale for each output.
        cache_element: Bytes of one cached element where that is none of torch's types.
    """
    count = count_parameters(config)
    read = count.total - count.positions - (0 if config.tie_word_embeddings else count.embedding)
    read_bytes = read * weight_bytes
    if weights == "int8":
        matrices, outputs = count_linears(config)
        read_bytes = matrices + 4 * outputs + (read - matrices) * weight_bytes
    if cache_element is None:
        cache = cache_bytes(config, case.context, dtype, case.batch_size).total
    else:
        cache = int(case.batch_size * cache_elements(config, case.context) * cache_element)
    return Traffic(weight_bytes=int(read_bytes), cache_bytes=cache)


def torch_dtype(name: str) -> torch.dtype:
    """A type that models are measured in.

    Raises:
        ConfigError: for another name.
    """
    check_dtype(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype
