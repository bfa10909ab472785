"""The formulas against the modules that they describe: elements of parameters, counted operations, bytes in caches."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from twofold.cost import cache_bytes, count_linears, count_macs, count_parameters
from twofold.kernels import LINEAR_VARIABLE
from twofold.models import LanguageModel
from twofold.spec import ConfigError, ModelConfig

BASE = {
    "vocab_size": 19,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
SHARINGS = ("qkv", "tied-qk", "tied-kv", "tied-qkv", ("qkv", "tied-kv", "tied-qkv"))
HEADS = ({}, {"num_key_value_heads": 2}, {"num_key_value_heads": (4, 1, 4)}, {"head_dim": 10})
POSITIONS = (
    {},
    {"positions": "sinusoidal"},
    {"positions": "rope"},
    {"positions": "rope", "rope_mode": "unrotated"},
    {"positions": "rope", "rope_mode": "decoupled", "qk_rope_head_dim": 4},
)
OPTIONS = (
    {},
    {"qk_norm": True},
    {"query_depth": 2},
    {"gated_mlp": True, "mlp_bias": False, "attention_bias": False, "normalization": "rmsnorm"},
    {"query_depth": 2, "attention_bias": False, "tie_word_embeddings": False, "intermediate_size": 50},
    {"sliding_window": (3, None, 5)},
    {"causal": False, "score_map": "paper"},
    {"causal": False, "score_map": "product", "qk_norm": True},
)


def models():
    """Every sharing with all positions, and with each of those either other heads or another option."""
    changes = [(heads, {}) for heads in HEADS] + [({}, options) for options in OPTIONS[1:]]
    for sharing, positions, (heads, options) in itertools.product(SHARINGS, POSITIONS, changes):
        try:
            config = ModelConfig(**BASE, sharing=sharing, **heads, **positions, **options)
        except ConfigError:
            continue
        chosen = {**heads, **positions, **options}
        yield pytest.param(config, id="-".join([str(sharing), *(f"{name}={value}" for name, value in chosen.items())]))


MODELS = list(models())


def num_weights(linear):
    return linear.weight.numel()


@pytest.mark.parametrize("config", MODELS)
def test_parameters_and_operations(config, monkeypatch):
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")  # the counter sees torch's operations only
    model = LanguageModel(config)
    assert count_parameters(config).total == sum(parameter.numel() for parameter in model.parameters())
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert count_linears(config) == (sum(map(num_weights, linears)), sum(linear.out_features for linear in linears))
    length, batch = 7, 2
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, length, dtype=torch.long))
    macs = count_macs(config, length)
    unseen = macs.score_map if config.score_map == "paper" else 0  # matrix times vector, which the counter leaves out
    assert counter.get_total_flops() == 2 * batch * (macs.total - unseen)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("config", [model for model in MODELS if model.values[0].causal])
def test_cache_bytes(config, dtype):
    model = LanguageModel(config).bfloat16()
    cache = model.decoder.make_cache(dtype=None if dtype == "bfloat16" else dtype)
    tokens, batch = 40, 2
    with torch.no_grad():
        for part in torch.zeros(batch, tokens, dtype=torch.long).split((36, 3, 1), dim=1):
            model(part, cache=cache)
    assert sum(layer.nbytes_used for layer in cache) == cache_bytes(config, tokens, dtype, batch_size=batch).total


def test_operations_of_the_papers_form_at_a_longer_length():
    config = ModelConfig(**{**BASE, "max_position_embeddings": 128}, sharing="tied-kv", num_key_value_heads=1)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        LanguageModel(config)(torch.zeros(1, 128, dtype=torch.long))
    assert counter.get_total_flops() == 2 * count_macs(config, 128).total
