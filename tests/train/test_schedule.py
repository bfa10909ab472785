"""Learning rate and optimiser."""

import math

import pytest
import torch
from torch import nn

from twofold.models import LanguageModel
from twofold.spec import ModelConfig, TrainConfig
from twofold.train import learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.2),  # a fifth of the warm-up
        (1, 0.4),
        (4, 1.0),  # its last step
        (5, 1.0),  # the cosine begins
        (10, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))),  # a quarter of it
        (15, 0.55),  # half of it
        (20, 0.1 + 0.9 * 0.5 * (1 - math.sqrt(0.5))),
        (25, 0.1),  # one past the last step
        (1_000, 0.1),
    ],
)
def test_rate_at_points_computed_by_hand(step, expected):
    config = TrainConfig(steps=25, warmup_steps=5, learning_rate=1.0, min_learning_rate_ratio=0.1)
    assert learning_rate(step, config) == pytest.approx(expected, rel=1e-12)


def test_without_warm_up_the_first_step_has_the_peak():
    config = TrainConfig(steps=10, warmup_steps=0, learning_rate=0.5)
    assert learning_rate(0, config) == 0.5


def test_a_ratio_of_one_is_constant_after_the_warm_up():
    config = TrainConfig(steps=10, warmup_steps=2, learning_rate=0.5, min_learning_rate_ratio=1.0)
    assert [learning_rate(step, config) for step in range(1, 10)] == [0.5] * 9


def test_a_warm_up_longer_than_the_run_only_rises():
    config = TrainConfig(steps=4, warmup_steps=8, learning_rate=0.8)
    assert [learning_rate(step, config) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("sharing", ["qkv", "tied-kv"])
@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
def test_matrices_decay_and_vectors_do_not(sharing, normalization):
    config = ModelConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        sharing=sharing,
        normalization=normalization,
        qk_norm=True,
    )
    module = LanguageModel(config)
    optimizer = make_optimizer(module, TrainConfig(weight_decay=0.3, beta1=0.8, beta2=0.9))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.named_parameters():
        is_vector = name.endswith("bias") or "norm" in name
        assert decay.pop(id(parameter)) == (0.0 if is_vector else 0.3), name
    assert not decay
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}


def test_decay_is_decoupled_and_in_units_of_the_learning_rate():
    module = nn.Linear(3, 2)
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    optimizer = make_optimizer(module, TrainConfig(learning_rate=0.1, weight_decay=0.5))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), weight * (1 - 0.1 * 0.5))
    assert torch.equal(module.bias, bias)


def test_frozen_parameters_are_left_out():
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    optimizer = make_optimizer(module, TrainConfig())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [module.weight]
