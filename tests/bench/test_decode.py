"""The decode benchmark: its gate, its figures' structure, the caches it fills. Never its times."""

import json
import subprocess
import sys

import pytest
import torch

from tests.tiny_runs import MODEL
from twofold.attention import Attention
from twofold.bench import CorrectnessError, DecodeCase, measure_decode, peak_decode_memory, read_bandwidth
from twofold.cache import LayerCache
from twofold.cost import cache_bytes
from twofold.spec import ConfigError, ModelConfig, TwofoldError

VARIANTS = {
    "qkv": {},
    "tied-qk": {"sharing": "tied-qk"},
    "tied-kv": {"sharing": "tied-kv"},
    "tied-qkv": {"sharing": "tied-qkv"},
    "gqa-2": {"num_key_value_heads": 2},
    "q-mqa": {"sharing": "tied-kv", "num_key_value_heads": 1},
    "rope": {"positions": "rope"},
    "relative": {"sharing": "tied-kv", "positions": "rope"},
    "unrotated": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "unrotated"},
    "decoupled": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "decoupled", "qk_rope_head_dim": 4},
    "window": {"sharing": "tied-kv", "sliding_window": 16},
    "mixed": {"sharing": ["qkv", "tied-kv"], "sliding_window": [8, None]},
}


@pytest.fixture(autouse=True)
def no_bandwidth(monkeypatch):
    """A quarter of a gigabyte, summed, is not what these tests are about."""
    monkeypatch.setattr("twofold.bench.decode.read_bandwidth", lambda: 1.0)


def configs(*names):
    return {name: ModelConfig(**{**MODEL, **VARIANTS[name]}) for name in names}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_structure_and_cache_bytes_of_every_variant(batch_size):
    context, models = 100, configs(*VARIANTS)
    result = measure_decode(models, context=context, batch_size=batch_size, repeats=2)
    json.dumps(result, allow_nan=False)
    assert {name: result[name] for name in ("context", "batch_size", "dtype", "repeats")} == {
        "context": 100,
        "batch_size": batch_size,
        "dtype": "float32",
        "repeats": 2,
    }
    assert result["threads"] == torch.get_num_threads()
    assert result["attention"] == "torch scaled_dot_product_attention"
    assert list(result["variants"]) == list(VARIANTS)
    for name, row in result["variants"].items():
        assert row["cache_bytes_used"] == cache_bytes(models[name], context, "float32", batch_size).total, name
        assert row["cache_bytes_allocated"] >= row["cache_bytes_used"]
        assert 0 <= row["largest_error"] <= 1e-4
        for figure in ("milliseconds_per_token", "tokens_per_second"):
            spread = row[figure]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]


def test_variants_are_timed_in_turn_after_a_warm_up(monkeypatch):
    order = []
    timed = DecodeCase.seconds_per_token
    monkeypatch.setattr(
        DecodeCase, "seconds_per_token", lambda case: (order.append(case.model.config.label), timed(case))[1]
    )
    said = []
    models = configs("qkv", "tied-kv")
    result = measure_decode(models, context=20, repeats=2, report=said.append)
    assert order == ["QKV", "Q-K=V"] * 3  # one round more than is counted
    assert len(said) == 3
    assert result["repeats"] == 2


def scale_what_is_decoded(monkeypatch):
    forward = Attention.forward
    monkeypatch.setattr(
        Attention,
        "forward",
        lambda self, x, context, cache=None: forward(self, x, context, cache) * (1 + 0.1 * bool(cache)),
    )


def forget_the_first_token(monkeypatch):
    append = LayerCache.append

    def tampered(self, *tensors):
        stored = append(self, *tensors)
        for tensor in stored:
            tensor[:, :, 0] = 0
        return stored

    monkeypatch.setattr(LayerCache, "append", tampered)


@pytest.mark.parametrize("tamper", [scale_what_is_decoded, forget_the_first_token])
@pytest.mark.parametrize("name", ["qkv", "tied-kv"])
def test_a_layer_that_decodes_something_else_is_not_timed(name, tamper, monkeypatch):
    def never(_):
        pytest.fail("it was timed")

    tamper(monkeypatch)
    monkeypatch.setattr(DecodeCase, "seconds_per_token", never)
    with pytest.raises(CorrectnessError, match=r"decoding .* is off by .*; nothing was timed"):
        measure_decode(configs(name), context=20)
    assert issubclass(CorrectnessError, TwofoldError)


def test_a_model_that_computes_no_numbers_is_not_timed(monkeypatch):
    forward = Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda *arguments: forward(*arguments) * float("nan"))
    with pytest.raises(CorrectnessError, match="off by nan"):
        measure_decode(configs("qkv"), context=20)


@pytest.mark.parametrize("name", ["qkv", "window", "unrotated"])
def test_steps_leave_the_cache_at_the_context(name):
    case = DecodeCase(configs(name)[name], 300, 2)
    case.fill()
    used = case.nbytes_used
    for _ in range(3):
        case.seconds_per_token()
        assert case.nbytes_used == used
        assert [cache.num_tokens for cache in case.cache] == [300] * 2


def test_a_window_may_slide_during_the_timed_steps():
    """A context a few tokens before the memory of a sliding layer is full."""
    case = DecodeCase(ModelConfig(**{**MODEL, **VARIANTS["window"]}), 16 + 256 - 5, 1)
    case.fill()
    case.seconds_per_token()
    assert case.seconds_per_token() > 0
    assert {cache.num_tokens for cache in case.cache} == {16 + 256 - 5}


def test_a_filled_cache_continues_as_a_real_one():
    """The steps that are timed see every token of the context."""
    case = DecodeCase(configs("tied-kv")["tied-kv"], 50, 1)
    case.fill()
    (held,) = case.cache[0].tensors
    assert held.shape == (1, 4, 50, 4)
    assert held.isfinite().all()
    assert held.std() > 0


def test_a_model_that_does_not_generate_is_refused():
    with pytest.raises(ConfigError, match="does not generate"):
        measure_decode({"all": ModelConfig(**{**MODEL, "causal": False})}, context=8)


def test_bandwidth_is_a_positive_number():
    assert 0.1 < read_bandwidth() < 100_000


PEAK = """
import json, sys
from twofold.bench import peak_decode_memory
from twofold.spec import ModelConfig

print(peak_decode_memory(ModelConfig(**json.loads(sys.argv[1])), int(sys.argv[2])))
"""
WIDE = {**MODEL, "hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 64, "positions": "none"}


def peak(context, **options):
    command = [sys.executable, "-c", PEAK, json.dumps({**WIDE, **options}), str(context)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(finished.stdout)


def test_peak_memory_holds_the_cache_and_grows_with_the_context():
    contexts = (2_048, 12_288)
    sizes = [cache_bytes(ModelConfig(**WIDE), context, "float32").total for context in contexts]
    small, large = (peak(context) for context in contexts)
    assert sizes[1] == 48 * 2**20
    assert small >= sizes[0]
    assert large >= sizes[1]
    assert large - small >= 0.8 * (sizes[1] - sizes[0])
    assert large <= 2 * sizes[1]  # growing never holds two copies of everything
    tied = peak(contexts[1], sharing="tied-kv")
    assert sizes[1] / 2 <= tied <= large - sizes[1] / 4


def test_peak_memory_of_this_process_is_no_error():
    assert peak_decode_memory(configs("qkv")["qkv"], 8) >= 0
