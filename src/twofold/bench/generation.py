"""Contenders whose tokens go through Transformers' `generate`, and its own models among them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from twofold.bench.contender import (
    GATE_PROMPT,
    GATE_TOKENS,
    TOLERANCES,
    Case,
    Traffic,
    relative_error,
    step_traffic,
    torch_dtype,
)
from twofold.cost import DTYPE_BYTES, unshared_baseline
from twofold.spec import ConfigError, ModelConfig


class GenerateContender:
    """A model that `generate` drives, with one or several caches beside each other.

    Args:
        name: What its rows are called.
        config: The shape, in our terms.
        dtype: Type of weights and cache.
    """

    cache_names: tuple[str, ...] = ("generate",)

    def __init__(self, name: str, config: ModelConfig, dtype: str) -> None:
        if not config.causal:
            raise ConfigError("a model with causal: false does not generate, so there is no decoding to measure")
        self.name, self.config, self.dtype = name, config, dtype
        self.tolerance = TOLERANCES[dtype]
        self.model: Any = None
        self.longest = 0
        self._caches: dict[str, Any] = {}
        self._prompt = torch.zeros(0)

    def traffic(self, case: Case) -> Traffic:
        """Bytes that a step must move."""
        return step_traffic(self.config, case, weight_bytes=DTYPE_BYTES[self.dtype], dtype=self.dtype)

    def memory(self, case: Case) -> int:
        """Weights and caches."""
        traffic = self.traffic(case)
        return traffic.weight_bytes + len(self.cache_names) * traffic.cache_bytes

    def build(self, longest: int) -> None:
        """Makes the model."""
        torch.manual_seed(0)
        self.longest = longest
        model = self.make_model(longest).to(torch_dtype(self.dtype)).eval()
        model.generation_config.eos_token_id = None  # all tokens are decoded, whatever they are
        model.generation_config.pad_token_id = 0
        self.model = model

    @torch.no_grad()
    def check(self) -> float:
        """The logits that `generate` decoded, beside one pass over what it generated."""
        vocabulary = self.config.vocab_size
        prompt = torch.randint(vocabulary, (1, GATE_PROMPT), generator=torch.Generator().manual_seed(0))
        errors = []
        for name in self.cache_names:
            output = self._generate(
                prompt, self.make_cache(name), GATE_TOKENS, return_dict_in_generate=True, output_logits=True
            )
            decoded = torch.stack(output.logits, dim=1)
            errors.append(relative_error(decoded, self.whole_pass(output.sequences)[:, GATE_PROMPT - 1 : -1]))
        return max(errors)

    def fill(self, case: Case) -> None:
        """Fills the caches up to the context; what they held is gone first."""
        self.fill_caches(case)

    @torch.no_grad()
    def fill_caches(self, case: Case) -> None:
        """The same without any check, which would need memory of its own."""
        self._caches = {}
        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(
            self.config.vocab_size, (case.batch_size, case.context + 1), generator=generator
        )  # (B, S + 1): `generate` is given the whole text, and finds all but the last token in the cache
        for name in self.cache_names:
            self._caches[name] = self.fill_cache(self.make_cache(name), case)

    def ways(self) -> Mapping[str, Callable[[int], None]]:
        """One way for each kind of cache."""
        return {name: partial(self._decode, name) for name in self.cache_names}

    @torch.no_grad()
    def prefill(self, case: Case) -> None:
        """A prompt through the model, into a new cache."""
        prompt = torch.zeros(case.batch_size, case.context, dtype=torch.long)
        self._generate(prompt, self.make_cache(self.cache_names[0]), 1)

    def close(self) -> None:
        """Drops model and caches."""
        self.model, self._caches = None, {}

    def make_model(self, longest: int) -> Any:
        """An untrained model of the shape."""
        raise NotImplementedError

    def make_cache(self, name: str) -> Any:
        """An empty cache of a kind."""
        raise NotImplementedError

    def fill_cache(self, cache: Any, case: Case) -> Any:
        """Fills an empty cache up to the context."""
        raise NotImplementedError

    def whole_pass(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens in one pass, which those that are decoded one by one are compared with."""
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def _decode(self, name: str, num_tokens: int) -> None:
        self._generate(self._prompt, self._caches[name], num_tokens)
        self._caches[name].crop(-num_tokens)

    @torch.no_grad()
    def _generate(self, prompt: torch.Tensor, cache: Any, num_tokens: int, **options: Any) -> Any:
        from twofold.hf import CACHE_NAME

        mask = torch.ones_like(prompt)
        options |= {CACHE_NAME: cache, "max_new_tokens": num_tokens, "do_sample": False}
        return self.model.generate(prompt, attention_mask=mask, **options)


class Transformers(GenerateContender):
    """A model of Transformers' of the same shape: as many layers, heads and tokens, and as wide.

    Args:
        family: `gpt2` or `llama`.
        config: The shape; keys and values are not shared, whatever it says.
        dtype: Type of weights and cache.
    """

    cache_names = ("DynamicCache", "StaticCache")
    headroom = 64
    """Tokens for which a StaticCache has room beyond the context."""

    def __init__(self, family: str, config: ModelConfig, dtype: str) -> None:
        super().__init__(f"transformers-{family}", peer_shape(config, gated=family == "llama"), dtype)
        self._family = family
        self._capacity = 2 * (GATE_PROMPT + GATE_TOKENS)

    def make_model(self, longest: int) -> Any:
        """GPT-2 or Llama, untrained."""
        import transformers

        config = self.config
        assert config.intermediate_size is not None
        if self._family == "gpt2":
            shape = transformers.GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=longest,
                n_embd=config.hidden_size,
                n_layer=config.num_hidden_layers,
                n_head=config.num_attention_heads,
                n_inner=config.intermediate_size,
                bos_token_id=None,
                eos_token_id=None,
            )
            return transformers.GPT2LMHeadModel(shape)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=config.num_attention_heads,
                max_position_embeddings=longest,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    def make_cache(self, name: str) -> Any:
        """Transformers' own cache."""
        from transformers import DynamicCache, StaticCache

        if name == "DynamicCache":
            return DynamicCache(config=self.model.config)
        return StaticCache(config=self.model.config, max_cache_len=self._capacity)

    def fill(self, case: Case) -> None:
        """Fills both caches."""
        self._capacity = case.context + self.headroom
        super().fill(case)

    def fill_cache(self, cache: Any, case: Case) -> Any:
        """Fills a cache with random keys and values."""
        generator = torch.Generator().manual_seed(0)
        heads, width = self.config.num_attention_heads, self.config.hidden_size // self.config.num_attention_heads
        states = torch.randn(case.batch_size, heads, case.context, width, generator=generator)
        states = states.to(torch_dtype(self.dtype))
        for layer in range(self.config.num_hidden_layers):
            cache.update(states, states.clone(), layer)
        return cache


def peer_shape(config: ModelConfig, *, gated: bool) -> ModelConfig:
    """The unshared model that a peer is, in our terms: GPT-2, or Llama with an MLP of about as many weights."""
    assert config.intermediate_size is not None
    inner = config.intermediate_size
    if gated and not config.gated_mlp:
        inner = max(8, 2 * inner // 3 // 8 * 8)
    if not gated and config.gated_mlp:
        inner = 3 * inner // 2
    return replace(
        unshared_baseline(config),
        head_dim=config.hidden_size // config.num_attention_heads,
        positions="rope" if gated else "learned",
        sliding_window=None,
        score_map="none",
        query_depth=1,
        qk_norm=False,
        gated_mlp=gated,
        activation="silu" if gated else "gelu_new",
        normalization="rmsnorm" if gated else "layernorm",
        attention_bias=not gated,
        mlp_bias=not gated,
        intermediate_size=inner,
        tie_word_embeddings=True,
    )
