"""Our models as contenders."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from twofold.bench.contender import (
    GATE_PROMPT,
    TOLERANCES,
    Case,
    Traffic,
    check_error,
    fill_caches,
    relative_error,
    step_traffic,
)
from twofold.bench.generation import GenerateContender
from twofold.cache import check_cache_dtype
from twofold.cost import DTYPE_BYTES
from twofold.kernels import LINEAR_VARIABLE, VARIABLE, check_weights, quantize_weights
from twofold.spec import ModelConfig

_FILL_TOKENS = 128  # few, so that what the memory allocator keeps of each piece does not add up


class Twofold(GenerateContender):
    """A model of ours, through `generate` and through a loop over the same modules.

    Args:
        name: What its rows are called.
        config: The model.
        dtype: Type of weights and cache.
        cache_dtype: `int8` or `int4` for a quantised cache; None for the dtype.
        weights: `int8` for quantised linear layers; None for the dtype.
        like: A contender, built before, whose weights of equal shape this one uses too. What a step costs does not
            depend on their values, and models that would not fit in memory together do then.
        capacity: Tokens for which the cache takes memory at once; None to grow.
        attention: `torch` to compute as where there is no compiler; None to let the library choose.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        dtype: str,
        *,
        cache_dtype: str | None = None,
        weights: str | None = None,
        like: "Twofold | None" = None,
        capacity: int | None = None,
        attention: str | None = None,
    ) -> None:
        super().__init__(name, config, dtype)
        check_cache_dtype(cache_dtype)
        check_weights(weights)
        self._cache_dtype, self._like, self._capacity = cache_dtype, like, capacity
        self._weights, self._attention = weights, attention
        self.tolerance = max(self.tolerance, TOLERANCES[cache_dtype or dtype])

    def traffic(self, case: Case) -> Traffic:
        """Bytes that a step must move."""
        size, cached = DTYPE_BYTES[self.dtype], self._cache_dtype or self.dtype
        config = replace(self.config, query_depth=1)  # folded
        return step_traffic(config, case, weight_bytes=size, weights=self._weights, dtype=cached)

    def memory(self, case: Case) -> int:
        """Weights of its own, and the cache."""
        traffic = self.traffic(case)
        return traffic.cache_bytes + (traffic.weight_bytes if self._like is None else traffic.weight_bytes // 5)

    def build(self, longest: int) -> None:
        """Makes the model, with the weights that it is to have."""
        super().build(longest)
        if self._weights is not None:
            quantize_weights(self.model)
        if self._like is not None and self._like.model is not None:
            _share_weights(self.model, self._like.model)

    def make_model(self, longest: int) -> Any:
        """Our model, its query folded."""
        from twofold.hf import TwofoldConfig, TwofoldForCausalLM

        config = replace(self.config, max_position_embeddings=max(longest, self.config.max_position_embeddings))
        model = TwofoldForCausalLM(TwofoldConfig.from_spec(config))
        model.fold_queries()
        return model

    def make_cache(self, name: str) -> Any:  # noqa: ARG002 - there is one kind
        """The cache that our model fills."""
        from twofold.hf import adopt_cache, cache_for

        cache = cache_for(self.model, self._cache_dtype, self._capacity)
        for layer in adopt_cache(cache, self.model.spec):
            if layer.window is not None:
                layer.rewind = self.longest  # the timed tokens are taken back
        return cache

    def fill_cache(self, cache: Any, case: Case) -> Any:
        """Fills the cache with what random hidden states project to, in the form in which each layer keeps it."""
        from twofold.hf import adopt_cache

        fill_caches(self.model.model.decoder, adopt_cache(cache, self.model.spec), case, piece=_FILL_TOKENS)
        return cache

    @torch.no_grad()
    def fill(self, case: Case) -> None:
        """Fills the cache, and compares a step over all of it with the same step by torch alone.

        Raises:
            CorrectnessError: where they differ by more than rounding; the first check saw a few tokens only.
        """
        super().fill(case)
        with computed_by(attention=self._attention):
            step = self._step()
        with computed_by(attention="torch", linear="torch"):
            expected = self._step()
        check_error(f"{self.name} at {case.context:,} tokens", relative_error(step, expected), self.tolerance)

    def ways(self) -> Mapping[str, Callable[[int], None]]:
        """`generate`, and the loop that one would write by hand."""
        return {**super().ways(), "loop": self._loop}

    def whole_pass(self, tokens: torch.Tensor) -> torch.Tensor:
        """By torch alone; with a quantised cache, which changes what is computed, as `generate` passes them."""
        from twofold.hf import CACHE_NAME

        with computed_by(attention="torch", linear="torch"):
            if self._cache_dtype is None:
                return super().whole_pass(tokens)
            cache = {CACHE_NAME: self.make_cache("generate")}
            parts = [tokens[:, :GATE_PROMPT], *tokens[:, GATE_PROMPT:].split(1, dim=1)]
            return torch.cat([self.model(input_ids=part, **cache).logits for part in parts], dim=1)

    @torch.no_grad()
    def _loop(self, num_tokens: int) -> None:
        from twofold.hf import adopt_cache

        cache = self._caches["generate"]
        storage = adopt_cache(cache, self.model.spec)
        token = self._prompt[:, -1:]
        with computed_by(attention=self._attention):
            for _ in range(num_tokens):
                hidden = self.model.model.decoder(token, cache=storage)
                token = self.model.lm_head(hidden[:, -1:]).argmax(dim=-1)
        cache.crop(-num_tokens)

    def _step(self) -> torch.Tensor:
        """Logits of one token after the filled cache, which forgets it again."""
        from twofold.hf import CACHE_NAME

        cache = self._caches["generate"]
        logits: torch.Tensor = self.model(input_ids=self._prompt[:, -1:], **{CACHE_NAME: cache}).logits
        cache.crop(-1)
        return logits

    def _generate(self, prompt: torch.Tensor, cache: Any, num_tokens: int, **options: Any) -> Any:
        with computed_by(attention=self._attention):
            return super()._generate(prompt, cache, num_tokens, **options)


@contextmanager
def computed_by(attention: str | None = None, linear: str | None = None) -> Iterator[None]:
    """Within it these implementations are used; None leaves the choice as it is."""
    chosen = {VARIABLE: attention, LINEAR_VARIABLE: linear}
    before = {variable: os.environ.get(variable) for variable in chosen}
    _set_environment({variable: name for variable, name in chosen.items() if name is not None})
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for variable, value in values.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def _share_weights(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Makes a model use another's weights wherever name and shape agree."""
    theirs = other.state_dict(keep_vars=True)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in theirs and theirs[name].shape == tensor.shape:
            tensor.data = theirs[name].data
