"""A model in several variants."""

from fractions import Fraction

import pytest

from twofold.cost import as_variant, cache_bytes, count_macs, count_parameters, model_cost
from twofold.spec import PAPER_VARIANTS, ConfigError, ModelConfig, preset, variant_fields

ROPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "positions": "rope"}


def test_a_cost_gathers_what_the_formulas_say():
    config = preset("gpt-300m", sharing="tied-kv", num_key_value_heads=1)
    cost = model_cost(config, context=4096, dtype="float16", sequence_lengths=[128, 256])
    assert cost.parameters == count_parameters(config)
    assert cost.macs == {128: count_macs(config, 128), 256: count_macs(config, 256)}
    assert cost.cache_per_token == cache_bytes(config, 1, "float16")
    assert cost.cache_at_context == cache_bytes(config, 4096, "float16")
    assert cost.cache_reduction == Fraction(31, 32)


def test_a_model_that_is_not_causal_has_no_cache():
    cost = model_cost(preset("gpt-tiny", causal=False), context=10, dtype="bfloat16", sequence_lengths=[])
    assert (cost.cache_per_token, cost.cache_at_context, cost.cache_reduction) == (None, None, None)


@pytest.mark.parametrize("name", PAPER_VARIANTS)
def test_a_variant_is_the_preset_with_the_variants_fields(name):
    assert as_variant(preset("gpt-300m"), name) == preset("gpt-300m", **variant_fields(name, 16))


def test_a_variant_keeps_what_it_does_not_name():
    base = ModelConfig(**ROPE, sharing="tied-kv", rope_mode="decoupled", qk_rope_head_dim=6, sliding_window=7)
    assert as_variant(base, "Q-MQA") == ModelConfig(
        **ROPE, sharing="tied-kv", num_key_value_heads=1, rope_mode="decoupled", qk_rope_head_dim=6, sliding_window=7
    )
    assert as_variant(base, "MQA") == ModelConfig(**ROPE, num_key_value_heads=1, sliding_window=7)


def test_a_variant_replaces_what_differs_by_layer():
    base = ModelConfig(**ROPE, sharing=["qkv", "tied-kv", "qkv"], num_key_value_heads=[4, 2, 1])
    assert as_variant(base, "QKV") == ModelConfig(**ROPE)


def test_a_plus_adds_the_score_map_and_its_absence_removes_it():
    base = ModelConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, causal=False, sharing="(Q=K-V)+")
    assert as_variant(base, "(Q=K=V)+").score_map == "paper"
    assert as_variant(base, "Q=K=V").score_map == "none"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MQAA", "unknown variant 'MQAA'; did you mean 'MQA'"),
        ("KV", "has been used both"),
        ("tied-kq", "unknown sharing 'tied-kq'; did you mean 'tied-"),
        ("GQA-3", "variant 'GQA-3': num_attention_heads 16 is not a multiple"),
        ("Q=K-V+", "is for non-causal attention"),
    ],
)
def test_variants_that_cannot_be(name, message):
    with pytest.raises(ConfigError, match=message):
        as_variant(preset("gpt-300m"), name)
