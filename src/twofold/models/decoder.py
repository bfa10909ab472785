"""Decoder language models: GPT-style and Llama-style from the same blocks."""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from twofold.attention import AttentionContext, sinusoidal_embedding
from twofold.cache import LayerCache
from twofold.kernels import Linear
from twofold.models.blocks import Block, initialize, make_norm
from twofold.spec import ConfigError, ModelConfig


class Decoder(nn.Module):
    """Token embeddings, positions, blocks and the final norm; everything but the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config)

    def forward(
        self,
        inputs: Int[Tensor, "B T"] | Float[Tensor, "B T C"],
        *,
        positions: Int[Tensor, "B T"] | None = None,
        padding: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B S"] | None = None,
        custom_mask: Tensor | None = None,
        cache: Sequence[LayerCache] | None = None,
    ) -> Float[Tensor, "B T C"]:
        """Hidden states after the final norm.

        Args:
            inputs: Token ids, or embeddings in their place.
            positions: Position of each new token. Default: counted over the real tokens of each document.
            padding: True for real tokens, over the cached and the new ones; None when all are real.
            documents: Document number of each token, cached and new, when documents are packed in one sequence.
            custom_mask: A mask (B or 1, H or 1, T, S) that replaces causality, padding and documents.
            cache: One `LayerCache` a layer (see `make_cache`); the new tokens are appended.

        Raises:
            ConfigError: for a position beyond the learned ones, or a cache in a model that is not causal.
        """
        if cache is not None and not self.config.causal:
            raise ConfigError("a cache needs causal: true; elsewhere earlier tokens change when later ones come")
        embedded = self.embed_tokens(inputs) if inputs.dtype in (torch.int32, torch.int64) else inputs
        batch, num_new = embedded.shape[:2]
        num_past = cache[0].num_tokens if cache is not None else 0
        if positions is None:
            positions = _count_positions(padding, documents, num_past, batch, num_new, embedded.device)
        context = AttentionContext(
            positions,
            causal=self.config.causal,
            rope_theta=self.config.rope_theta,
            num_past=num_past,
            padding=padding,
            documents=documents,
            custom_mask=custom_mask,
            dtype=_table_dtype(embedded.dtype),
        )
        hidden_states = self.dropout(self._add_positions(embedded, positions))
        for layer, block in enumerate(self.layers):
            hidden_states = block(hidden_states, context, None if cache is None else cache[layer])
        normed: Tensor = self.norm(hidden_states)
        return normed

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are computed in; linear layers may keep their weights in another dtype."""
        weight = self.norm.weight
        assert isinstance(weight, Tensor)
        return weight.dtype

    def blocks(self) -> list[Block]:
        """The blocks in order, with their type."""
        return [block for block in self.layers if isinstance(block, Block)]

    def fold_queries(self) -> None:
        """Replaces the two query matrices of `query_depth=2` by their product in every layer, for inference."""
        if self.config.query_depth == 1:
            return
        for block in self.blocks():
            block.self_attn.fold_query()
        self.config = dataclasses.replace(self.config, query_depth=1)

    def make_cache(self, capacity: int | None = None, dtype: str | None = None) -> list[LayerCache]:
        """An empty cache for `forward`, one a layer.

        Args:
            capacity: Tokens to take memory for at once; None to grow. Such a cache never moves, and `torch.compile`
                makes two or three graphs of decoding steps with it, not one a step.
            dtype: `int8` or `int4` to quantise what is stored; None to store what the model computes.

        Raises:
            ConfigError: for another dtype.
        """
        return [
            LayerCache(window=self.config.layer_sliding_window(layer), capacity=capacity, dtype=dtype)
            for layer in range(self.config.num_hidden_layers)
        ]

    def _add_positions(self, embedded: Tensor, positions: Tensor) -> Tensor:
        if self.config.positions == "learned":
            longest = self.config.max_position_embeddings
            if not torch.compiler.is_compiling() and int(positions.max()) >= longest:
                raise ConfigError(
                    f"position {int(positions.max())} lies beyond the {longest} learned positions of this model; "
                    f"keep prompt and new tokens within {longest}"
                )
            return embedded + self.embed_positions(positions)
        if self.config.positions == "sinusoidal":
            waves = sinusoidal_embedding(positions, self.config.hidden_size, dtype=_table_dtype(embedded.dtype))
            return embedded + waves.to(embedded.dtype)
        return embedded


class LanguageModel(nn.Module):
    """A decoder with its output matrix; logits for every token or for the last few."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(lambda module: initialize(module, config))
        if config.tie_word_embeddings:
            self.lm_head.weight = self.decoder.embed_tokens.weight

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "B T"] | None = None,
        padding: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B S"] | None = None,
        cache: Sequence[LayerCache] | None = None,
        num_logits: int | None = None,
    ) -> Float[Tensor, "B K V"]:
        """Logits of the next token; the arguments are those of `Decoder.forward`.

        Args:
            input_ids: Token ids.
            positions: Position of each new token.
            padding: True for real tokens.
            documents: Document number of each token.
            cache: One `LayerCache` a layer.
            num_logits: Compute them for this many last tokens only; None for all.
        """
        hidden_states = self.decoder(input_ids, positions=positions, padding=padding, documents=documents, cache=cache)
        if num_logits is not None:
            hidden_states = hidden_states[:, -num_logits:]
        logits: Tensor = self.lm_head(hidden_states)
        return logits

    def fold_queries(self) -> None:
        """Turns a model trained with `query_depth=2` into the equal one with a single query matrix, in place."""
        self.decoder.fold_queries()
        self.config = self.decoder.config


def _table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Angles are computed in float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _count_positions(
    padding: Tensor | None, documents: Tensor | None, num_past: int, batch: int, num_new: int, device: torch.device
) -> Int[Tensor, "B T"]:
    """Positions 0, 1, ... over the real tokens of each document; padding before them has position 0."""
    if padding is None and documents is None:
        return torch.arange(num_past, num_past + num_new, device=device).expand(batch, -1)
    if padding is None:
        count = torch.arange(num_past + num_new, device=device).expand(batch, -1)  # (B, S)
    else:
        count = (padding.long().cumsum(dim=-1) - 1).clamp(min=0)  # (B, S)
    if documents is not None:
        begins = documents.diff(dim=-1, prepend=documents[:, :1] - 1) != 0  # (B, S)
        count = count - torch.where(begins, count, 0).cummax(dim=-1).values
    return count[:, num_past : num_past + num_new]
