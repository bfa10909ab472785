"""What peak memory is made of; the processes themselves are made in tests/cli."""

from dataclasses import replace

import pytest

from tests.tiny_runs import MODEL
from twofold.bench import Case, PeakMemory, measure_memory, memory_tables, users
from twofold.bench.memory import _Generation, available_memory
from twofold.cost import cache_bytes
from twofold.hf import cache_sizes
from twofold.models import LanguageModel
from twofold.spec import ConfigError, ModelConfig, preset

QKV = ModelConfig(**MODEL)
MIB = 2**20
PEAK = PeakMemory(
    contender="QKV",
    cache="fixed",
    context=100,
    batch_size=1,
    peak=900 * MIB,
    program=300 * MIB,
    weight_bytes=200 * MIB,
    cache_bytes=200 * MIB,
    unshared_bytes=400 * MIB,
)


def judged(*rests):
    peaks = [replace(PEAK, peak=PEAK.peak - PEAK.rest + rest * MIB) for rest in rests]
    return memory_tables(peaks, {"QKV": QKV}, "float32", None)[0].notes[0]


def test_the_rest_is_what_nothing_explains():
    assert PEAK.rest == 200 * MIB
    (row,) = memory_tables([PEAK], {"QKV": QKV}, "float32", None)[0].rows
    assert row == ("QKV", "fixed", "900.0 MiB", "300.0 MiB", "200.0 MiB", "200.0 MiB", "200.0 MiB", "50 %")


def test_the_verdict_needs_a_small_and_an_equal_rest():
    assert judged(184, 200).endswith("200 and 16 MiB are allowed: met.")
    assert judged(183, 200).endswith("NOT met.")
    assert judged(201, 201).endswith("NOT met.")


def test_users_share_what_the_weights_leave():
    long = replace(QKV, max_position_embeddings=4_096)  # learned positions for every user's tokens
    left = 4 * 2**30 - 4 * sum(parameter.numel() for parameter in LanguageModel(long).parameters())
    layer_tokens = QKV.num_hidden_layers * 4_096
    assert users(QKV, "float32") == {
        "float32": left // (layer_tokens * 2 * 16 * 4),
        "bfloat16": left // (layer_tokens * 2 * 16 * 2),
        "int8": left // (layer_tokens * 2 * (16 + 4 * 4)),  # scales of four heads
        "int4": left
        // (layer_tokens * 2 * (16 // 2 + 4 * 4) + QKV.num_hidden_layers * 32 * 2 * 16 * 4),  # recent floats
    }
    (row,) = memory_tables([], {"QKV": QKV}, "float32", "int8")[-1].rows
    assert row == ("QKV", *(f"{count:,}" for count in users(QKV, "float32").values()))


def test_no_user_fits_beside_weights_that_do_not():
    large = preset("gpt-1.2b")
    assert set(users(large, "float32").values()) == {0}
    assert users(large, "bfloat16")["int8"] > 0


def test_users_of_heads_of_odd_width_have_no_int4():
    odd = replace(QKV, head_dim=3)
    rows = memory_tables([], {"QKV": QKV, "odd": odd}, "float32", None)[-1].rows
    assert [row[-1] == "none" for row in rows] == [False, True]


def test_a_context_too_short_for_a_generation_is_refused():
    with pytest.raises(ConfigError, match="--context must be larger"):
        measure_memory({"QKV": QKV}, Case(context=8))


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("window", [None, 20])
def test_the_growing_cache_is_one_that_knows_its_length(window, cache_dtype):
    """As `generate` makes it, with the tokens of the context in it after the generation."""
    case = Case(context=1_000, batch_size=2)
    contender = _Generation(replace(QKV, sliding_window=window), case, "float32", cache_dtype, fixed=False)
    contender.build(case.context)
    contender.fill_caches(Case(context=984, batch_size=2))
    held = contender._caches["generate"]
    assert [layer.layer_cache.expected_tokens for layer in held.layers] == [1_000] * len(held.layers)
    assert [layer.layer_cache.dtype for layer in held.layers] == [cache_dtype] * len(held.layers)
    assert held.get_seq_length() == 984
    contender.ways()["generate"](16)
    assert held.get_seq_length() == 984
    rows = 1_024 if window is None else 20 + 2 * 256
    assert cache_sizes(held)[1] <= cache_bytes(QKV, rows, cache_dtype or "float32", 2).total


def test_available_memory_is_a_positive_number_or_unknown():
    available = available_memory()
    assert available is None or available > 0
