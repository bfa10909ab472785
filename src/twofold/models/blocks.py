"""The transformer block, and how its weights start."""

import math

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from twofold.attention import Attention, AttentionContext, ScoreMapMix
from twofold.cache import LayerCache
from twofold.kernels import Linear
from twofold.spec import ModelConfig


class MLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.activation
        self.gate_proj = Linear(hidden, inner, bias=bias) if config.gated_mlp else None
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, hidden_states: Float[Tensor, "B T C"]) -> Float[Tensor, "B T C"]:
        """Applies the MLP to each token."""
        up = self.up_proj(hidden_states)
        inner = self._activate(up) if self.gate_proj is None else self._activate(self.gate_proj(hidden_states)) * up
        projected: Tensor = self.down_proj(inner)
        return projected

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_new" else "none")


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, hidden_states: Float[Tensor, "B T C"], context: AttentionContext, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T C"]:
        """Applies the block to the new tokens; see `Attention.forward`."""
        attended = self.self_attn(self.input_layernorm(hidden_states), context, cache)
        hidden_states = hidden_states + self.dropout(attended)
        added: Tensor = self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))
        return hidden_states + added


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm that a config names, over the hidden size."""
    kind = nn.LayerNorm if config.normalization == "layernorm" else nn.RMSNorm
    return kind(config.hidden_size, eps=config.norm_eps)


def initialize(module: nn.Module, config: ModelConfig) -> None:
    """Sets one module's weights to their start; call it on every module, children first (`nn.Module.apply` does).

    Matrices are normal with `initializer_range`, biases zero; the two matrices of a block that write to the residual
    stream are scaled down by sqrt(2 · layers), as in GPT-2.
    """
    std = config.initializer_range
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, ScoreMapMix):
        module.reset_parameters()
    elif isinstance(module, Attention | MLP):
        writer = module.o_proj if isinstance(module, Attention) else module.down_proj
        nn.init.normal_(writer.weight, std=std / math.sqrt(2 * config.num_hidden_layers))
        if isinstance(module, Attention) and module.qk_norm:
            for name in ("q_norm", "k_norm"):
                if hasattr(module, name):
                    nn.init.ones_(getattr(module, name))
