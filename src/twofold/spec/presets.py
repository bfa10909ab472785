"""Models and variants by name."""

import re
from typing import Any

from twofold.spec.errors import ConfigError, did_you_mean
from twofold.spec.model import ModelConfig
from twofold.spec.sharing import parse_sharing

# The paper's language models: GPT-2 blocks with biases, exact GELU, learned positions and tied embeddings, which are
# the defaults of ModelConfig. `gpt-tiny` has the same form; `llama-tiny` has Llama's. Narrow models start with wider
# weights: 0.02 suits a width of about a thousand (docs/log.md).
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-tiny": {
        "vocab_size": 2_048,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.05,
    },
    "llama-tiny": {
        "vocab_size": 2_048,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 344,
        "max_position_embeddings": 2_048,
        "positions": "rope",
        "attention_bias": False,
        "mlp_bias": False,
        "gated_mlp": True,
        "activation": "silu",
        "normalization": "rmsnorm",
        "initializer_range": 0.05,
    },
    "gpt-small": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1_024,
    },
    "gpt-300m": {"hidden_size": 1_024, "num_hidden_layers": 20, "num_attention_heads": 16},
    "gpt-1.2b": {"hidden_size": 2_048, "num_hidden_layers": 22, "num_attention_heads": 32},
}

PAPER_VARIANTS = ("QKV", "Q=K-V", "Q-K=V", "Q=K=V", "GQA-4", "MQA", "Q-GQA-4", "Q-MQA")
"""The eight variants of the paper's 300M table."""


def preset_fields(name: str) -> dict[str, Any]:
    """Fields of `ModelConfig` that a preset sets; raises `ConfigError` for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}'{did_you_mean(name, PRESETS)} Use one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])


def preset(name: str, **changes: Any) -> ModelConfig:
    """A model by name, with some fields changed: `preset("gpt-300m", sharing="Q-K=V")`."""
    return ModelConfig(**{**preset_fields(name), **changes})


def variant_fields(name: str, num_attention_heads: int) -> dict[str, Any]:
    """Fields that a variant's name stands for: any sharing, `MHA`, `GQA-4`, `MQA`, `Q-GQA-4`, `Q-MQA`.

    Args:
        name: The name; a "+" adds the paper's score map.
        num_attention_heads: H, the number of key/value heads where the name does not say otherwise.
    """
    folded = name.strip().casefold()
    grouped = re.fullmatch(r"\(?(q-)?(mha|mqa|gqa-?(\d+))\)?(\+?)", folded)
    if grouped:
        slug, plus = "tied-kv" if grouped[1] else "qkv", bool(grouped[4])
        groups = {"mha": num_attention_heads, "mqa": 1}.get(grouped[2]) or int(grouped[3])
    else:
        sharing, plus = parse_sharing(name)
        slug, groups = sharing.slug, num_attention_heads
    fields = {"sharing": slug, "num_key_value_heads": groups}
    return {**fields, "score_map": "paper"} if plus else fields
