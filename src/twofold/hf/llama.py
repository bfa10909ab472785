"""Llama checkpoints as twofold models with three projections."""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from twofold.models import LanguageModel
from twofold.spec import ConfigError, ModelConfig


def from_llama(model: LlamaForCausalLM) -> LanguageModel:
    """The same model as a plain module: the names of the weights are the same, and they are shared, not copied.

    Args:
        model: A Llama model of Transformers, in evaluation mode or not.

    Raises:
        ConfigError: for a config that no `ModelConfig` describes, such as scaled rotary frequencies.
    """
    plain = LanguageModel(_spec_of(model.config)).to(model.dtype)
    state = {name.replace("model.", "decoder.", 1): weight for name, weight in model.state_dict().items()}
    plain.load_state_dict(state, assign=True)
    if plain.config.tie_word_embeddings:
        plain.lm_head.weight = plain.decoder.embed_tokens.weight
    return plain.train(model.training)


def _spec_of(config: LlamaConfig) -> ModelConfig:
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default" or config.hidden_act != "silu":
        raise ConfigError(
            f"this Llama has rope_type '{rope.get('rope_type')}' and hidden_act '{config.hidden_act}'; "
            "only 'default' and 'silu' can be read"
        )
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        positions="rope",
        rope_theta=rope["rope_theta"],
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        gated_mlp=True,
        activation="silu",
        normalization="rmsnorm",
        norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
    )
