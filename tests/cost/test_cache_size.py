"""Cache bytes and reductions, exactly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.cost import (
    CacheSize,
    cache_bytes,
    cache_elements_per_token,
    cache_reduction,
    format_percent,
    layer_cache_elements_per_token,
    unshared_baseline,
)
from twofold.spec import PAPER_VARIANTS, ConfigError, ModelConfig, preset, variant_fields

# Bytes per token in bfloat16 of the 300M model (20 layers, 16 heads of 64), and the share saved.
PAPER = {
    "QKV": (80 * 1024, "0 %"),
    "Q=K-V": (80 * 1024, "0 %"),
    "Q-K=V": (40 * 1024, "50 %"),
    "Q=K=V": (40 * 1024, "50 %"),
    "GQA-4": (20 * 1024, "75 %"),
    "MQA": (5 * 1024, "93.75 %"),
    "Q-GQA-4": (10 * 1024, "87.5 %"),
    "Q-MQA": (2560, "96.875 %"),
}
ROPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "positions": "rope"}


def variant(name, base="gpt-300m", heads=16):
    return preset(base, **variant_fields(name, heads))


@pytest.mark.parametrize("name", PAPER_VARIANTS)
def test_the_papers_eight_variants_at_32768_tokens(name):
    config = variant(name)
    per_token, saved = PAPER[name]
    assert cache_bytes(config, 1).total == per_token
    assert cache_bytes(config, 32_768) == CacheSize(tensor_bytes=32_768 * per_token, position_bytes=0)
    assert format_percent(cache_reduction(config, preset("gpt-300m"))) == saved


def test_reductions_are_exact_at_other_head_counts():
    assert cache_reduction(variant("Q-MQA"), variant("QKV")) == Fraction(31, 32)
    larger = variant("Q-MQA", "gpt-1.2b", 32)
    assert cache_reduction(larger, preset("gpt-1.2b")) == Fraction(63, 64)
    assert format_percent(cache_reduction(larger, preset("gpt-1.2b"))) == "98.4375 %"


def test_a_larger_cache_is_a_negative_reduction():
    assert cache_reduction(variant("QKV"), variant("Q-K=V")) == -1


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_dtype_and_batch(dtype, size):
    config = preset("gpt-tiny", sharing="tied-kv")  # four layers of 128 elements
    assert cache_bytes(config, 10, dtype, batch_size=3).total == 4 * 128 * 10 * 3 * size


@pytest.mark.parametrize(("dtype", "head_bytes"), [("int8", 16 + 4), ("int4", 8 + 4)])
def test_a_quantised_cache_counts_a_scale_for_each_head_and_tensor(dtype, head_bytes):
    config = preset("gpt-tiny", sharing=["qkv", "tied-kv"] * 2, num_key_value_heads=2)  # four layers, heads of 16
    size = cache_bytes(config, 10, dtype, batch_size=3)
    assert size.total - size.recent_bytes == 3 * 10 * (2 * 2 * 2 + 2 * 2) * head_bytes
    assert size.scale_bytes == 3 * 10 * (2 * 2 * 2 + 2 * 2) * 4
    tied = preset("gpt-tiny", sharing="tied-kv")
    assert cache_reduction(tied, unshared_baseline(tied), dtype=dtype) == Fraction(1, 2)


def test_a_quantised_cache_has_a_scale_for_the_rotary_part_and_none_for_positions():
    decoupled = ModelConfig(**ROPE, sharing="tied-kv", rope_mode="decoupled", qk_rope_head_dim=6)
    assert cache_bytes(decoupled, 10, "int4").total == 3 * 10 * (4 * (4 + 4) + (3 + 4) + (32 + 6) * 4)
    unrotated = ModelConfig(**ROPE, sharing="tied-kv", rope_mode="unrotated")
    assert cache_bytes(unrotated, 10, "int8").total == 3 * 10 * (4 * (8 + 4) + 4)


@pytest.mark.parametrize(("tokens", "held"), [(4, 3 * 4), (30, 5 + 30 + 30), (1_000, 5 + 2 * 32)])
def test_int4_counts_its_last_tokens_as_floats_too(tokens, held):
    """Of a layer with a window no more than that, and of no layer more than 32."""
    config = ModelConfig(**ROPE, sharing="tied-kv", rope_mode="relative", sliding_window=[5, None, 40])
    assert cache_bytes(config, tokens, "int4", batch_size=2).recent_bytes == 2 * held * 4 * 8 * 4
    assert cache_bytes(config, tokens, "int8").recent_bytes == cache_bytes(config, tokens).recent_bytes == 0


def test_int4_needs_rows_of_even_width():
    with pytest.raises(ConfigError, match="two numbers in a byte and head_dim is 5; use int8"):
        cache_bytes(preset("gpt-tiny", head_dim=5), 1, "int4")


def test_layers_may_differ():
    config = ModelConfig(**ROPE, sharing=["qkv", "tied-kv", "tied-kv"], num_key_value_heads=[4, 2, 1])
    assert [layer_cache_elements_per_token(config, layer) for layer in range(3)] == [64, 16, 8]
    assert cache_elements_per_token(config) == 88


def test_a_window_bounds_what_a_layer_holds():
    config = ModelConfig(**ROPE, sliding_window=[5, None, 5])
    assert cache_bytes(config, 4).total == 3 * 4 * 64 * 2
    assert cache_bytes(config, 100).total == (5 + 100 + 5) * 64 * 2
    assert cache_bytes(config, 0).total == 0


def test_a_reduction_depends_on_the_context_where_windows_differ():
    config = ModelConfig(**ROPE, sharing=["qkv", "tied-kv", "qkv"], sliding_window=[5, None, 5])
    full = unshared_baseline(config)
    assert cache_reduction(config, full) == Fraction(1, 6)
    assert cache_reduction(config, full, tokens=100) == Fraction(50, 110)


def test_decoupled_rope_caches_its_rotary_part_in_tied_layers():
    config = ModelConfig(**ROPE, sharing=["qkv", "tied-kv", "tied-kv"], rope_mode="decoupled", qk_rope_head_dim=6)
    assert [layer_cache_elements_per_token(config, layer) for layer in range(3)] == [64, 38, 38]


def test_unrotated_keys_keep_a_position_beside_each_token_of_a_tied_layer():
    config = ModelConfig(
        **ROPE, sharing=["qkv", "tied-kv", "tied-kv"], rope_mode="unrotated", sliding_window=[7, 7, None]
    )
    size = cache_bytes(config, 10, batch_size=2)
    assert size.position_bytes == 2 * (7 + 10) * 4
    assert size.tensor_bytes == 2 * (7 * 64 + 7 * 32 + 10 * 32) * 2
    assert size.total == size.tensor_bytes + size.position_bytes


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_reduction_counts_the_positions_too(dtype, size):
    config = ModelConfig(**ROPE, sharing="tied-kv", rope_mode="unrotated")
    expected = 1 - Fraction(32 * size + 4, 64 * size)
    assert cache_reduction(config, unshared_baseline(config), 10, dtype) == expected


def test_relative_mode_keeps_no_positions():
    config = ModelConfig(**ROPE, sharing="tied-kv")
    assert cache_bytes(config, 10) == CacheSize(tensor_bytes=3 * 10 * 32 * 2, position_bytes=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 1, "dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"tokens": 1, "dtype": "int6"}, "Use one of float32, bfloat16, float16, int8, int4"),
        ({"tokens": -1}, "must not be negative; got -1"),
        ({"tokens": 1, "batch_size": 0}, "batch_size must be at least 1; got 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cache_bytes(preset("gpt-tiny"), **arguments)


def test_a_reduction_needs_a_token():
    with pytest.raises(ConfigError, match="at least 1 token"):
        cache_reduction(preset("gpt-tiny"), preset("gpt-tiny"), tokens=0)


@given(
    name=st.sampled_from(PAPER_VARIANTS),
    rope_mode=st.sampled_from(["relative", "unrotated", "decoupled"]),
    window=st.none() | st.integers(1, 300),
    tokens=st.integers(1, 500),
)
def test_more_tokens_never_need_less_and_tying_never_needs_more(name, rope_mode, window, tokens):
    fields = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "positions": "rope"}
    fields |= {"sliding_window": window, **variant_fields(name, 8)}
    if fields["sharing"] in ("tied-kv", "tied-qkv"):
        fields["rope_mode"] = rope_mode
    config = ModelConfig(**fields)
    full = unshared_baseline(config)
    now, later = cache_bytes(config, tokens), cache_bytes(config, tokens + 1)
    assert now.total <= later.total
    assert now.tensor_bytes == cache_bytes(config, tokens, "float32").tensor_bytes // 2
    assert 3 * cache_bytes(config, tokens, batch_size=1).total == cache_bytes(config, tokens, batch_size=3).total
    assert now.total <= cache_bytes(full, tokens).total
    assert 0 <= cache_reduction(config, full, tokens) < 1
    held = tokens if window is None else min(tokens, window)
    assert now.tensor_bytes == held * cache_elements_per_token(config) * 2
