"""The attention layer against the float64 reference, over the whole product of options."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import ABSOLUTE
from twofold.attention import (
    Attention,
    AttentionContext,
    reference_attention,
    reference_scores,
    sinusoidal_embedding,
    visible_pairs,
)
from twofold.cache import LayerCache, quantize, spread
from twofold.kernels import KeyValue, Mask
from twofold.kernels.key_value import dequantized
from twofold.spec import ModelConfig

HEADS, HIDDEN, LENGTH, BATCH = 4, 24, 7, 2
TIED_ROPE = ("relative", "unrotated", "decoupled")

# Every sharing with every number of key/value heads that it allows, in every position mode.
LAYERS = [
    (sharing, groups, positions, mode)
    for sharing, groups in [
        *(("qkv", groups) for groups in (4, 2, 1)),
        *(("tied-kv", groups) for groups in (4, 2, 1)),
        ("tied-qk", 4),
        ("tied-qkv", 4),
    ]
    for positions, mode in [
        ("none", None),
        *([("rope", mode) for mode in TIED_ROPE] if sharing in ("tied-kv", "tied-qkv") else [("rope", None)]),
    ]
]
MASKS = (
    "plain",
    "window",
    "left padding",
    "right padding",
    "documents",
    "window, left padding",
    "window, right padding, documents",
)


def make_config(sharing: str, groups: int, positions: str, mode: str | None, **options: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=11,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        head_dim=8,
        sharing=sharing,
        positions=positions,
        rope_mode=mode,
        qk_rope_head_dim=6 if mode == "decoupled" else None,
        **options,
    )


def make_layer(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> Attention:
    """A layer whose every parameter, norms and biases too, is random."""
    generator = torch.Generator().manual_seed(seed)
    layer = Attention(config, 0).to(dtype)
    for name, parameter in layer.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        parameter.data = (noise + (1.0 if "norm" in name else 0.0)).to(dtype)
    return layer


def make_context(kind: str, causal: bool, dtype: torch.dtype) -> tuple[AttentionContext, Tensor]:
    """A context of one kind, and what it must let through: (B, T, T), True = sees."""
    index = torch.arange(LENGTH)
    positions = index.expand(BATCH, -1)
    visible = visible_pairs(index, index, causal=causal, window=3 if "window" in kind else None).expand(BATCH, -1, -1)
    padding = documents = None
    if "padding" in kind:
        padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        if "left padding" in kind:
            padding[0, :3] = False
            positions = torch.stack((torch.tensor([0, 0, 0, 0, 1, 2, 3]), index))
        else:
            padding[1, 5:] = False
        visible = visible & (padding[:, None, :] | torch.eye(LENGTH, dtype=torch.bool))
    if "documents" in kind:
        documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [4, 5, 5, 5, 5, 5, 6]])
        positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 0, 1, 2, 3, 4, 0]])
        visible = visible & (documents[:, :, None] == documents[:, None, :])
    context = AttentionContext(positions, causal=causal, padding=padding, documents=documents, dtype=dtype)
    return context, visible


def plain_attend(q: Tensor, stored: KeyValue, *, mask: Mask, scale: float, dropout: float, wanted: str) -> Tensor:
    """Attention as one writes it down in torch, every step in the dtype of the inputs."""
    assert (dropout, wanted) == (0, "auto")
    k, v = stored.plain(q.dtype)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    zeros = torch.zeros(q.shape[0], 1, q.shape[2], k.shape[2], dtype=q.dtype)
    additive = mask.plus(zeros).tensor
    assert additive is not None
    return (q @ k.transpose(-1, -2) * scale + additive).softmax(dim=-1) @ v


def outputs_and_gradients(run: Any, layer: Attention, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output = run(x)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    gradients = torch.autograd.grad((output * weight).sum(), [x, *layer.parameters()])
    return [output.detach(), *gradients]


@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYERS)
def test_layer_equals_reference(sharing: str, groups: int, positions: str, mode: str | None) -> None:
    """Outputs and every gradient, for score maps x masks x query depths x norms x biases."""
    depths = (1, 2) if sharing in ("qkv", "tied-kv") else (1,)
    norms = (False, True) if mode != "decoupled" else (False,)
    views = [(True, "none"), (False, "none"), (False, "paper"), (False, "product")]
    for case, ((causal, score_map), mask, depth, norm) in enumerate(itertools.product(views, MASKS, depths, norms)):
        config = make_config(
            sharing,
            groups,
            positions,
            mode,
            causal=causal,
            score_map=score_map,
            query_depth=depth,
            qk_norm=norm,
            attention_bias=case % 2 == 0,
            attention_scale=0.4 if case % 3 == 0 else None,
            sliding_window=3 if "window" in mask else None,
        )
        layer = make_layer(config, seed=case)
        x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(case), dtype=torch.float64)
        context, visible = make_context(mask, causal, torch.float64)
        weights = dict(layer.named_parameters())
        fast = outputs_and_gradients(lambda x: layer(x, context), layer, x)  # noqa: B023
        slow = outputs_and_gradients(
            lambda x: reference_attention(weights, config, 0, x, context.positions, visible),  # noqa: B023
            layer,
            x,
        )
        for name, ours, theirs in zip(["output", "x", *weights], fast, slow, strict=True):
            error = (ours - theirs).abs().max().item()
            assert error < ABSOLUTE[torch.float64], (causal, score_map, mask, depth, norm, name, error)


@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYERS)
def test_float32_stays_near_the_reference(sharing: str, groups: int, positions: str, mode: str | None) -> None:
    config = make_config(sharing, groups, positions, mode)
    layer = make_layer(config, seed=3, dtype=torch.float32)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0))
    context, visible = make_context("documents", True, torch.float32)
    exact = reference_attention(dict(layer.named_parameters()), config, 0, x.double(), context.positions, visible)
    assert (layer(x, context) - exact).abs().max() < ABSOLUTE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYERS)
def test_half_precision_is_no_worse_than_plain_torch(
    sharing: str, groups: int, positions: str, mode: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most twice the error of attention written out in that precision, both against float64."""
    config = make_config(sharing, groups, positions, mode, qk_norm=mode != "decoupled")
    layer = make_layer(config, seed=4, dtype=dtype)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    context, visible = make_context("left padding", True, torch.float32)
    exact = reference_attention(dict(layer.named_parameters()), config, 0, x.double(), context.positions, visible)
    ours = (layer(x, context) - exact).abs().max()
    monkeypatch.setattr("twofold.attention.layer.attend", plain_attend)
    assert ours <= 2 * (layer(x, context) - exact).abs().max()


@pytest.mark.parametrize("sharing", ["tied-qk", "tied-kv", "tied-qkv"])
@pytest.mark.parametrize("positions", ["none", "rope"])
def test_tied_layer_equals_qkv_layer_with_copied_weights(sharing: str, positions: str) -> None:
    """K = V with rope is excepted in `relative` mode, whose values turn with distance."""
    mode = "unrotated" if positions == "rope" and sharing != "tied-qk" else None
    tied = make_layer(make_config(sharing, HEADS, positions, mode), seed=1)
    plain = Attention(make_config("qkv", HEADS, positions, None), 0).double()
    state = tied.state_dict()
    for role in ("weight", "bias"):
        key = state.get(f"k_proj.{role}", state[f"q_proj.{role}"])
        state[f"v_proj.{role}"] = state.get(f"v_proj.{role}", key)
        state[f"k_proj.{role}"] = key
    plain.load_state_dict(state)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    context, _ = make_context("plain", True, torch.float64)
    assert (tied(x, context) - plain(x, context)).abs().max() < ABSOLUTE[torch.float64]


@pytest.mark.parametrize("sharing", ["tied-qk", "tied-qkv"])
@pytest.mark.parametrize("positions", ["none", "rope"])
@pytest.mark.parametrize("norm", [False, True])
def test_tying_query_and_key_makes_scores_symmetric(sharing: str, positions: str, norm: bool) -> None:
    """Of the layer's own queries and keys, and of the reference; a sharing with its own query is not symmetric."""
    mode = "relative" if positions == "rope" and sharing == "tied-qkv" else None
    config = make_config(sharing, HEADS, positions, mode, qk_norm=norm)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    context, _ = make_context("plain", True, torch.float64)
    layer = make_layer(config, seed=2)
    query, stored = layer.project(x, context)
    key, _ = layer.read(stored, context).plain(torch.float64)
    scores = query @ key.transpose(-1, -2) * layer.scale
    assert (scores - scores.transpose(-1, -2)).abs().max() < ABSOLUTE[torch.float64]
    exact = reference_scores(dict(layer.named_parameters()), config, 0, x, context.positions)
    assert (scores - exact).abs().max() < ABSOLUTE[torch.float64]
    other_config = make_config("tied-kv", HEADS, "none", None)
    other = reference_scores(
        dict(make_layer(other_config, 2).named_parameters()), other_config, 0, x, context.positions
    )
    assert (other - other.transpose(-1, -2)).abs().max() > 0.1


@pytest.mark.parametrize(("positions", "mode"), [("none", None), ("rope", "relative")])
def test_the_tied_tensor_is_passed_once(positions: str, mode: str | None) -> None:
    """Without rotation at read, key and value are one object, in the cache and out of it."""
    layer = make_layer(make_config("tied-kv", 2, positions, mode, qk_norm=True), seed=0)
    context, _ = make_context("plain", True, torch.float64)
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64)
    _, stored = layer.project(x, context)
    key, value = layer.read(stored, context).plain(torch.float64)
    assert len(stored) == 1
    assert key is value
    assert key is stored[0]


@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYERS)
def test_an_int8_cache_is_attention_over_the_numbers_that_it_stores(
    sharing: str, groups: int, positions: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, with padding and norms."""
    layer = make_layer(make_config(sharing, groups, positions, mode, qk_norm=mode != "decoupled"), seed=7)
    context, _ = make_context("left padding", True, torch.float64)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cached, floats = layer(x, context, LayerCache(dtype="int8")), layer(x, context)
    query, new = layer.project(x, context)
    stored = tuple(as_stored(tensor, "int8") for tensor in new)
    monkeypatch.setattr(layer, "project", lambda *_: (query, stored))
    assert (cached - layer(x, context)).abs().max() < ABSOLUTE[torch.float64]
    assert 0 < (cached - floats).norm() / floats.norm() < 0.01


@pytest.mark.parametrize("window", [None, 37, 9])
@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYERS)
def test_an_int4_cache_is_attention_over_its_last_floats_and_numbers_that_it_stores(
    sharing: str, groups: int, positions: str, mode: str | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: a query sees itself and 32 tokens before it as floats, and those before them rounded.

    After a prompt, of which all is seen as floats in its own pass. Spread rows are turned back here before anything is
    scored.
    """
    config = make_config(sharing, groups, positions, mode, qk_norm=mode != "decoupled", sliding_window=window)
    layer, is_spread, length, prompt = make_layer(config, seed=7), mode != "unrotated", 39, 35
    x = torch.randn(BATCH, length, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def context(first: int, end: int) -> AttentionContext:
        at = torch.arange(first, end).expand(BATCH, -1)
        return AttentionContext(at, causal=True, num_past=first, dtype=torch.float64)

    cache = LayerCache(dtype="int4", window=window, block=4)
    with torch.no_grad():
        passed = layer(x[:, :prompt], context(0, prompt), cache)
        steps = [layer(x[:, i : i + 1], context(i, i + 1), cache)[:, 0] for i in range(prompt, length)]
        whole = context(0, length)
        floats = layer(x, whole)
        query, new = layer.project(x, whole)
        held, rounded = (tuple(as_stored(tensor, dtype, is_spread) for tensor in new) for dtype in (None, "int4"))

        def expected(num_rounded: int) -> Tensor:
            pairs = zip(rounded, held, strict=True)
            stored = tuple(torch.cat((old[:, :, :num_rounded], late[:, :, num_rounded:]), dim=2) for old, late in pairs)
            with monkeypatch.context() as patch:
                patch.setattr(layer, "project", lambda *_: (query, stored))
                return layer(x, whole)

        assert (passed - expected(0)[:, :prompt]).abs().max() < ABSOLUTE[torch.float64]
        for token, step in enumerate(steps, start=prompt):
            assert (step - expected(token - 32)[:, token]).abs().max() < ABSOLUTE[torch.float64]
    off = (torch.stack(steps, dim=1) - floats[:, prompt:]).norm() / floats[:, prompt:].norm()
    assert off < 1e-6 if window == 9 else 1e-4 < off < 0.2


def as_stored(tensor: Tensor, dtype: str | None, is_spread: bool = False) -> Tensor:
    """The numbers that are read of a tensor that is stored in a dtype, None for float32, spread over its channels."""
    if not tensor.is_floating_point():
        return tensor
    given = spread(tensor) if is_spread else tensor
    read = given.float().double() if dtype is None else dequantized(*quantize(given, dtype)[:2], torch.float64)
    return spread(read) if is_spread else read


def test_folding_a_deep_query_changes_nothing_but_rounding() -> None:
    layer = make_layer(make_config("tied-kv", 2, "rope", "relative", query_depth=2), seed=5)
    context, _ = make_context("left padding", True, torch.float64)
    x = torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64)
    before = layer(x, context)
    layer.fold_query()
    assert {"q_proj.weight", "q_proj.bias"} <= set(layer.state_dict())
    assert not any(name.startswith(("q_a", "q_b")) for name in layer.state_dict())
    assert (layer(x, context) - before).abs().max() < ABSOLUTE[torch.float64]


def test_initial_score_map_is_the_plain_temperature() -> None:
    """With w = 1/m the factor on the scores is one."""
    layer = Attention(make_config("tied-qk", HEADS, "none", None, causal=False, score_map="product"), 0)
    assert layer.score_map is not None
    factor, _ = layer.score_map(torch.arange(5)[None])
    assert factor.item() == pytest.approx(1.0)


def test_product_score_map_can_tell_left_from_right() -> None:
    """Its span holds sin(ω(i - j)), which no symmetric map has; the paper's has nothing that depends on both."""
    layer = Attention(make_config("tied-qk", HEADS, "none", None, causal=False, score_map="product"), 0).double()
    assert layer.score_map is not None
    layer.score_map.weight.data.zero_()
    layer.score_map.weight.data[1:3] = torch.tensor([1.0, -1.0])  # sin·cos - cos·sin at the first frequency
    positions = torch.arange(6)[None]
    _, bias = layer.score_map(positions, torch.float64)
    distance = (positions[:, :, None] - positions[:, None, :]).double()
    assert (bias[:, 0] - distance.sin()).abs().max() < ABSOLUTE[torch.float64]


@pytest.mark.parametrize("sharing", ["qkv", "tied-qk", "tied-kv", "tied-qkv"])
def test_one_head(sharing: str) -> None:
    config = ModelConfig(hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=1, sharing=sharing)
    layer = make_layer(config, seed=6)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    context, visible = make_context("documents", True, torch.float64)
    exact = reference_attention(dict(layer.named_parameters()), config, 0, x, context.positions, visible)
    assert (layer(x, context) - exact).abs().max() < ABSOLUTE[torch.float64]


def test_sinusoids_by_hand() -> None:
    """sin(p), cos(p), sin(p / 100), cos(p / 100) for four channels; an odd number ends with a sine."""
    waves = sinusoidal_embedding(torch.tensor([0, 3]), 4, dtype=torch.float64)
    by_hand = [[0, 1, 0, 1], [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]]
    torch.testing.assert_close(waves, torch.tensor(by_hand, dtype=torch.float64))
    assert sinusoidal_embedding(torch.tensor([3]), 5).shape == (1, 5)
    assert sinusoidal_embedding(torch.tensor([3]), 5)[0, 4] == pytest.approx(math.sin(3 / 10_000 ** (4 / 5)))
