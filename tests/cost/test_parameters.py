"""Parameters and multiply-accumulates against the paper's table and against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.cost import MacCount, ParameterCount, count_macs, count_parameters
from twofold.spec import PAPER_VARIANTS, ConfigError, ModelConfig, preset, variant_fields

# Published with "Do Transformers Need Three Projections?" (arXiv 2606.04032), 300M model:
# parameters, then MACs of one sequence of 128, 512, 1024, 2048 tokens.
PAPER = {
    "QKV": (305_534_976, 39_476_789_248, 165_960_220_672, 353_395_277_824, 792_689_901_568),
    "Q=K-V": (284_542_976, 36_792_434_688, 155_222_802_432, 331_920_441_344, 749_740_228_608),
    "Q-K=V": (284_542_976, 36_792_434_688, 155_222_802_432, 331_920_441_344, 749_740_228_608),
    "Q=K=V": (263_550_976, 34_108_080_128, 144_485_384_192, 310_445_604_864, 706_790_555_648),
}

# C = 8, H = 2, D = 4, two layers, MLP 32, V = 10, eight positions; then one option is changed at a time.
SMALL = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}
SQUARE = 8 * 8 + 8  # one biased projection, C to H x D
ROPE = {**SMALL, "positions": "rope"}


def small(**changes):
    return ModelConfig(**{**SMALL, **changes})


@pytest.mark.parametrize("sharing", PAPER)
def test_the_papers_table_is_met_to_the_unit(sharing):
    config = preset("gpt-300m", sharing=sharing)
    macs = tuple(count_macs(config, length).total for length in (128, 512, 1024, 2048))
    assert (count_parameters(config).total, *macs) == PAPER[sharing]


def test_every_part_of_a_small_model():
    assert count_parameters(small()) == ParameterCount(
        embedding=10 * 8,
        positions=8 * 8,
        attention=2 * 4 * SQUARE,
        mlp=2 * ((8 * 32 + 32) + (32 * 8 + 8)),
        norms=5 * 2 * 8,
        output=0,
    )
    assert count_macs(small(), 3) == MacCount(
        attention_projections=3 * 2 * 4 * 64,
        scores_and_values=2 * (3 * 3 * 2 * 4) * 2,
        score_map=0,
        mlp=3 * 2 * (2 * 8 * 32),
        output_head=3 * 10 * 8,
    )


@pytest.mark.parametrize(("sharing", "projections"), [("qkv", 4), ("tied-qk", 3), ("tied-kv", 3), ("tied-qkv", 2)])
def test_sharing_drops_projections(sharing, projections):
    config = small(sharing=sharing)
    assert count_parameters(config).attention == 2 * projections * SQUARE
    assert count_macs(config, 1).attention_projections == 2 * projections * 64


def test_sharing_and_heads_by_layer():
    config = small(sharing=["qkv", "tied-kv"], num_key_value_heads=[2, 1])
    assert count_parameters(config).attention == 4 * SQUARE + (2 * SQUARE + 8 * 4 + 4)


def test_grouped_heads_narrow_key_and_value_only():
    config = small(num_key_value_heads=1)
    assert count_parameters(config).attention == 2 * (2 * SQUARE + 2 * (8 * 4 + 4))
    assert count_macs(config, 3).scores_and_values == count_macs(small(), 3).scores_and_values


def test_head_dim_apart_from_hidden_size():
    config = small(head_dim=6)
    assert count_parameters(config).attention == 2 * (3 * (8 * 12 + 12) + (12 * 8 + 8))
    assert count_macs(config, 3).scores_and_values == 2 * 9 * (12 + 12)


def test_gated_mlp_and_its_biases():
    assert count_parameters(small(gated_mlp=True)).mlp == 2 * (2 * (8 * 32 + 32) + (32 * 8 + 8))
    assert count_parameters(small(mlp_bias=False, intermediate_size=20)).mlp == 2 * 2 * 8 * 20
    assert count_macs(small(gated_mlp=True), 1).mlp == 2 * 3 * 8 * 32


def test_attention_without_biases():
    assert count_parameters(small(attention_bias=False)).attention == 2 * 4 * 64


def test_rmsnorm_has_no_bias():
    assert count_parameters(small(normalization="rmsnorm")).norms == 5 * 8


def test_untied_output_is_counted_and_costs_no_further_macs():
    config = small(tie_word_embeddings=False)
    assert count_parameters(config).output == 80
    assert count_macs(config, 3) == count_macs(small(), 3)


@pytest.mark.parametrize("positions", ["sinusoidal", "rope", "none"])
def test_only_learned_positions_are_parameters(positions):
    assert count_parameters(small(positions=positions)).positions == 0


def test_two_query_matrices():
    config = small(query_depth=2, sharing="tied-kv")
    assert count_parameters(config).attention == 2 * (64 + SQUARE + SQUARE + SQUARE)  # q_a has no bias
    assert count_macs(config, 1).attention_projections == 2 * 4 * 64


@pytest.mark.parametrize(
    ("sharing", "rope_mode", "scales"),
    [
        ("qkv", None, 8),
        ("tied-qk", None, 4),
        ("tied-kv", "relative", 4 + 2),
        ("tied-kv", "unrotated", 8),
        ("tied-qkv", "relative", 2),
        ("tied-qkv", "unrotated", 4),
    ],
)
def test_query_and_key_norms(sharing, rope_mode, scales):
    plain = ModelConfig(**ROPE, sharing=sharing, rope_mode=rope_mode)
    normed = ModelConfig(**ROPE, sharing=sharing, rope_mode=rope_mode, qk_norm=True)
    assert count_parameters(normed).attention - count_parameters(plain).attention == 2 * scales


def test_query_and_key_norms_without_rope_keep_every_scale():
    config = small(sharing="tied-kv", qk_norm=True)
    assert count_parameters(config).attention == 2 * (3 * SQUARE + 8)


def test_untied_layer_beside_relative_layers_keeps_every_scale():
    config = ModelConfig(**ROPE, sharing=["qkv", "tied-kv"], qk_norm=True)
    assert count_parameters(config).attention == (4 * SQUARE + 8) + (3 * SQUARE + 6)


@pytest.mark.parametrize(
    ("score_map", "channels", "macs"), [("paper", 10, 3 * (5 + 5)), ("product", 12, 3 * 3 * 2 * 2 + 3 * 3 * 3 * 2)]
)
def test_score_map(score_map, channels, macs):
    config = small(causal=False, score_map=score_map)
    assert count_parameters(config).attention == 2 * (4 * SQUARE + channels)
    assert count_macs(config, 3).score_map == 2 * macs


def test_decoupled_rope_adds_projections_and_a_norm_to_tied_layers_only():
    config = ModelConfig(**ROPE, sharing=["qkv", "tied-kv"], rope_mode="decoupled", qk_rope_head_dim=6)
    rotary = (8 * 12 + 12) + (8 * 6 + 6)
    assert count_parameters(config).attention == 4 * SQUARE + (3 * SQUARE + rotary + 8)
    macs = count_macs(config, 3)
    assert macs.attention_projections == 3 * (4 * 64 + 3 * 64 + 8 * 12 + 8 * 6)
    assert macs.scores_and_values == 9 * 2 * (4 + 4) + 9 * 2 * (4 + 6 + 4)


def test_length_must_be_positive():
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        count_macs(small(), 0)


@given(
    variant=st.sampled_from(PAPER_VARIANTS),
    heads=st.sampled_from([4, 8, 16]),
    layers=st.integers(1, 6),
    length=st.integers(1, 4096),
    gated=st.booleans(),
)
def test_no_variant_costs_more_than_three_projections_and_longer_costs_more(variant, heads, layers, length, gated):
    fields = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_hidden_layers": layers, "gated_mlp": gated}
    full = ModelConfig(**fields)
    config = ModelConfig(**fields, **variant_fields(variant, heads))
    assert count_parameters(config).total <= count_parameters(full).total
    assert count_macs(config, length).total <= count_macs(full, length).total
    assert count_macs(config, length).total < count_macs(config, length + 1).total
