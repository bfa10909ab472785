import dataclasses

import pytest

from twofold.spec import (
    PAPER_VARIANTS,
    PRESETS,
    ConfigError,
    ModelConfig,
    ProjectionSharing,
    preset,
    preset_fields,
    variant_fields,
)

SMALL = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
ROPE_TIED = {"positions": "rope", "sharing": "tied-kv"}


def small(**changes):
    return ModelConfig(**{**SMALL, **changes})


def test_defaults_are_filled_from_the_sizes():
    config = small()
    assert (config.head_dim, config.intermediate_size, config.num_key_value_heads) == (16, 256, 4)
    assert config.sharing is ProjectionSharing.QKV
    assert config.rope_mode is None


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().hidden_size = 32


def test_head_dim_may_differ_from_the_quotient():
    assert small(hidden_size=66, head_dim=24).head_dim == 24


# Settings by layer


def test_a_list_gives_each_layer_its_value():
    config = small(
        sharing=["QKV", "tied-kv"] * 3, num_key_value_heads=[4, 1] * 3, sliding_window=[None, 512] * 3, positions="rope"
    )
    assert config.sharing == (ProjectionSharing.QKV, ProjectionSharing.TIED_KV) * 3
    assert [config.layer_num_key_value_heads(layer) for layer in range(6)] == [4, 1, 4, 1, 4, 1]
    assert [config.layer_sliding_window(layer) for layer in range(6)] == [None, 512] * 3
    assert [config.layer_rope_mode(layer) for layer in range(6)] == [None, "relative"] * 3
    assert config.label == "mixed"


def test_a_pattern_counts_layers_from_one():
    config = small(
        sharing={"every": 3, "value": "Q-K=V", "otherwise": "QKV"},
        sliding_window={"every": 3, "value": None, "otherwise": 512},
    )
    assert [config.layer_sharing(layer).slug for layer in range(6)] == ["qkv", "qkv", "tied-kv"] * 2
    assert config.sliding_window == (512, 512, None) * 2


def test_equal_layers_become_one_value():
    assert small(sharing=["Q-K=V"] * 6, num_key_value_heads=[2] * 6, sliding_window=[8] * 6) == small(
        sharing="tied-kv", num_key_value_heads=2, sliding_window=8
    )


# The "+"


def test_a_plus_sets_the_score_map():
    config = small(sharing="Q=K=V+", causal=False)
    assert config.score_map == "paper"
    assert config.label == "(Q=K=V)+"
    assert config == small(sharing="Q=K=V", score_map="paper", causal=False)


def test_a_plus_keeps_the_score_map_that_is_given():
    assert small(sharing="Q=K=V+", score_map="product", causal=False).score_map == "product"


# Rotary positions


def test_rope_mode_is_relative_where_key_and_value_are_one():
    assert small(**ROPE_TIED).rope_mode == "relative"
    assert small(positions="rope", sharing="tied-qk").rope_mode is None
    assert small(positions="learned", sharing="tied-kv").rope_mode is None


def test_decoupled_fills_its_width_and_frees_the_head_from_pairs():
    config = small(**ROPE_TIED, rope_mode="decoupled", head_dim=15)
    assert (config.qk_rope_head_dim, config.head_dim) == (32, 15)


# Names


@pytest.mark.parametrize(
    ("sharing", "groups", "label"),
    [
        ("qkv", 4, "QKV"),
        ("tied-qk", 4, "Q=K-V"),
        ("tied-kv", 4, "Q-K=V"),
        ("tied-qkv", 4, "Q=K=V"),
        ("qkv", 2, "GQA-2"),
        ("qkv", 1, "MQA"),
        ("tied-kv", 2, "Q-GQA-2"),
        ("tied-kv", 1, "Q-MQA"),
    ],
)
@pytest.mark.parametrize("score_map", ["none", "paper"])
def test_a_label_is_derived_and_names_its_variant(sharing, groups, label, score_map):
    config = small(sharing=sharing, num_key_value_heads=groups, score_map=score_map, causal=False)
    assert config.label == (label if score_map == "none" else f"({label})+")
    assert small(**variant_fields(config.label, 4), causal=False) == config


@pytest.mark.parametrize(
    ("name", "sharing", "groups"),
    [("MHA", "qkv", 16), ("mqa", "qkv", 1), ("gqa4", "qkv", 4), ("Q-GQA-4", "tied-kv", 4), ("K=V", "tied-kv", 16)],
)
def test_variant_names(name, sharing, groups):
    assert variant_fields(name, 16) == {"sharing": sharing, "num_key_value_heads": groups}


def test_the_papers_variants_are_distinct_and_keep_their_names():
    labels = [preset("gpt-300m", **variant_fields(name, 16)).label for name in PAPER_VARIANTS]
    assert labels == list(PAPER_VARIANTS)
    assert len(set(labels)) == 8


def test_an_unknown_variant_is_refused():
    with pytest.raises(ConfigError, match="unknown sharing 'GQX-4'"):
        variant_fields("GQX-4", 16)


# Presets


def test_gpt_300m_is_the_papers_model():
    config = preset("gpt-300m")
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (20, 1024, 16)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 4096, 50_304)
    assert (config.positions, config.activation, config.normalization) == ("learned", "gelu", "layernorm")
    assert (config.attention_bias, config.mlp_bias, config.gated_mlp) == (True, True, False)
    assert (config.tie_word_embeddings, config.causal) == (True, True)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_takes_every_sharing(name):
    for sharing in ProjectionSharing:
        assert preset(name, sharing=sharing).sharing is sharing


def test_a_preset_is_not_changed_by_its_users():
    before = preset("gpt-tiny")
    preset_fields("gpt-tiny")["hidden_size"] = 64
    assert preset("gpt-tiny") == before


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown preset 'gpt-300'; did you mean 'gpt-300m'"):
        preset("gpt-300")


# What cannot be


BAD = [
    ({"hidden_size": 0}, "hidden_size must be a whole number, at least 1; got 0"),
    ({"vocab_size": -1}, "vocab_size must be a whole number, at least 1; got -1"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a whole number, at least 1; got 2.0"),
    ({"num_attention_heads": True}, "num_attention_heads must be a whole number, at least 1; got True"),
    ({"max_position_embeddings": "64"}, "max_position_embeddings must be a whole number, at least 1; got '64'"),
    ({"head_dim": 0}, "head_dim must be a whole number, at least 1; got 0"),
    ({"intermediate_size": 0}, "intermediate_size must be a whole number, at least 1; got 0"),
    ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"num_key_value_heads": 8}, "num_attention_heads 4 is not a multiple of num_key_value_heads 8"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be a whole number, at least 1; got 0"),
    ({"num_key_value_heads": "2"}, "num_key_value_heads must be a whole number, at least 1; got '2'"),
    ({"num_key_value_heads": [4, 4]}, "num_key_value_heads lists 2 values for 6 layers"),
    ({"num_key_value_heads": [4, 4, 4, 4, 4, 3]}, "not a multiple of num_key_value_heads 3"),
    ({"sliding_window": 0}, "sliding_window must be a whole number, at least 1; got 0"),
    ({"sharing": "KV"}, "sharing 'KV' has been used both"),
    ({"sharing": "teid-kv"}, "unknown sharing 'teid-kv'; did you mean 'tied-kv'?"),
    ({"sharing": None}, "sharing must be a name, not None"),
    ({"sharing": ["qkv"] * 5}, "sharing lists 5 values for 6 layers"),
    ({"sharing": ["tied-kv+", *["tied-kv"] * 5], "causal": False}, "sharing has a '+' on some layers only"),
    ({"sharing": {"every": 2, "value": "tied-kv"}}, "sharing: the pattern lacks otherwise"),
    ({"sharing": {"evry": 2}}, "sharing: unknown key 'evry'; did you mean 'every'?"),
    ({"sharing": {"every": 0, "value": "qkv", "otherwise": "qkv"}}, "sharing.every must be a whole number of layers"),
    ({"sharing": {"every": True, "value": "qkv", "otherwise": "qkv"}}, "sharing.every must be a whole number"),
    ({"positions": "rotary"}, "positions 'rotary' is unknown"),
    ({"score_map": "papr", "causal": False}, "score_map 'papr' is unknown; did you mean 'paper'?"),
    ({"normalization": "layer-norm"}, "normalization 'layer-norm' is unknown; did you mean 'layernorm'?"),
    ({"activation": "relu"}, "activation 'relu' is unknown"),
    ({**ROPE_TIED, "rope_mode": "relativ"}, "rope_mode 'relativ' is unknown; did you mean 'relative'?"),
    ({"query_depth": 3}, "query_depth must be 1 or 2; got 3"),
    ({"hidden_dropout": 1.0}, "hidden_dropout must be at least 0 and below 1; got 1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout must be at least 0 and below 1; got -0.1"),
    ({"rope_theta": 0.0}, "rope_theta must be finite and above 0; got 0.0"),
    ({"norm_eps": float("inf")}, "norm_eps must be finite and above 0; got inf"),
    ({"initializer_range": float("nan")}, "initializer_range must be finite and above 0; got nan"),
    ({"attention_scale": 0.0}, "attention_scale must be finite and above 0; got 0.0"),
    ({"rope_mode": "relative"}, "rope_mode 'relative' needs positions 'rope' and a sharing with K = V"),
    ({"positions": "rope", "rope_mode": "unrotated"}, "rope_mode 'unrotated' needs positions 'rope' and a sharing"),
    ({**ROPE_TIED, "qk_rope_head_dim": 8}, "qk_rope_head_dim needs rope_mode 'decoupled'"),
    ({**ROPE_TIED, "rope_mode": "decoupled", "qk_rope_head_dim": 0}, "qk_rope_head_dim must be a whole number"),
    ({**ROPE_TIED, "rope_mode": "decoupled", "qk_rope_head_dim": 7}, "qk_rope_head_dim must be even; got 7"),
    ({**ROPE_TIED, "rope_mode": "decoupled", "qk_norm": True}, "already normalises the cached vector"),
    ({"positions": "rope", "head_dim": 15}, "head_dim must be even; got 15"),
    ({**ROPE_TIED, "head_dim": 15}, "head_dim must be even; got 15"),
    ({"sharing": "tied-qk", "num_key_value_heads": 2}, "num_key_value_heads must equal num_attention_heads 4; got 2"),
    ({"sharing": "tied-qkv", "num_key_value_heads": 1}, "num_key_value_heads must equal num_attention_heads 4; got 1"),
    ({"sharing": ["qkv"] * 5 + ["tied-qk"], "num_key_value_heads": 2}, "must equal num_attention_heads 4; got 2"),
    ({"sharing": "tied-qk", "query_depth": 2}, "query_depth 2 needs its own query; sharing 'tied-qk' ties it"),
    ({"sharing": "tied-qkv", "query_depth": 2}, "query_depth 2 needs its own query; sharing 'tied-qkv' ties it"),
    ({"score_map": "product"}, "score_map 'product' is for non-causal attention; set causal: false"),
    ({"sharing": "Q-K=V+"}, "score_map 'paper' is for non-causal attention; set causal: false"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_combination_is_one_clear_line(changes, message):
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mixed_heads_are_fine_where_only_the_untied_layers_group():
    config = small(sharing=["tied-qk"] + ["qkv"] * 5, num_key_value_heads=[4] + [2] * 5)
    assert config.layer_num_key_value_heads(5) == 2
