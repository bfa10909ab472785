"""Models with int8 weights: what they are made of, what they compute, and what is refused."""

import copy
import sys
import weakref

import pytest
import torch
from torch import nn

from twofold.kernels import (
    LINEAR_VARIABLE,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
    linear,
    native,
    quantize_weights,
    quantized,
)
from twofold.spec import ConfigError

needs_kernel = pytest.mark.skipif(native.load_library() is None, reason="the kernel was not compiled")


class Tied(nn.Module):
    """An embedding, a layer and an output matrix, which is the embedding's."""

    def __init__(self, width=64, tokens=33):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(9, width)
        self.inner = Linear(width, width)
        self.head = Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.positions(torch.arange(tokens.shape[-1]))
        return self.head(hidden + self.inner(hidden).tanh())


def make_tied(**sizes):
    torch.manual_seed(0)
    return Tied(**sizes).eval()


def dequantized(layer):
    return layer.weight.double() * layer.scale.double()[:, None]


def with_floats(model, narrow):
    """The float model, with exactly the weights that the integers stand for."""
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        model.inner.weight.copy_(dequantized(narrow.inner))
        model.head.weight.copy_(dequantized(narrow.head))
    return model


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (16, 9)])
def test_a_model_computes_with_its_integers(width, kernel, shape, monkeypatch):
    """Few tokens and many, widths for the kernel and for torch."""
    monkeypatch.setenv(LINEAR_VARIABLE, kernel)
    model = make_tied(width=width)
    narrow = quantize_weights(copy.deepcopy(model))
    tokens = torch.randint(33, shape, generator=torch.Generator().manual_seed(1))
    exact = with_floats(model, narrow)(tokens)
    torch.testing.assert_close(narrow(tokens).double(), exact, atol=1e-5, rtol=1e-5)
    error = (exact - model(tokens)).abs().max() / exact.abs().max()
    assert 0 < error < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_weight_is_off_by_more_than_half_a_step(dtype):
    layer = Linear(64, 2_500, dtype=dtype).eval()
    with torch.no_grad():
        layer.weight[7] = 0
        layer.weight[8] = 1e-7
        layer.weight[9, 3] = 100
    weight, bias = layer.weight.double(), layer.bias
    model = nn.Sequential(layer).eval()
    (narrow,) = quantize_weights(model)
    assert type(narrow) is QuantizedLinear
    assert (narrow.weight.dtype, narrow.scale.dtype) == (torch.int8, torch.float32)
    assert narrow.bias is bias
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert bool(((dequantized(narrow) - weight).abs() <= largest / 254 * (1 + 1e-5)).all())
    assert narrow.weight.abs().amax(dim=1)[largest[:, 0] > 0].eq(127).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_stay_visible(value):
    layer = Linear(64, 3).eval()
    with torch.no_grad():
        layer.weight[1, 5] = value
    model = quantize_weights(nn.Sequential(layer).eval())
    out = model(torch.ones(1, 64))
    assert out[0, 1].isnan()
    assert out[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_half_precision_inputs(kernel, monkeypatch):
    """Products of the integers alone would leave the range of float16."""
    monkeypatch.setenv(LINEAR_VARIABLE, kernel)
    torch.manual_seed(0)
    model = quantize_weights(nn.Sequential(nn.Linear(2_048, 5)).eval())
    x = 50 + torch.rand(3, 2_048)
    weight = dequantized(model[0])
    meant = x.double() @ weight.T + model[0].bias.double()
    for dtype in (torch.float16, torch.bfloat16):
        out = copy.deepcopy(model).to(dtype)(x.to(dtype))
        assert out.dtype == dtype
        rounding = torch.finfo(dtype).eps * (x.double() @ weight.abs().T)
        assert bool(((out.double() - meant).abs() <= rounding).all())


def test_the_output_matrix_and_the_embedding_stay_one():
    model = quantize_weights(make_tied())
    assert type(model.embed) is QuantizedEmbedding
    assert model.embed.weight is model.head.weight
    assert model.embed.scale is model.head.scale
    assert type(model.positions) is nn.Embedding
    tokens = torch.tensor([[3, 0]])
    torch.testing.assert_close(model.embed(tokens).double(), dequantized(model.head)[tokens], atol=1e-7, rtol=1e-6)


def test_the_floats_are_gone_layer_by_layer(monkeypatch):
    model = make_tied()
    floats = sum(parameter.nbytes for parameter in model.parameters())
    freed, freed_before = [], []
    for weight in (model.inner.weight, model.embed.weight):
        weakref.finalize(weight, freed.append, True)
    del weight

    quantize_rows = quantized.quantize_rows
    monkeypatch.setattr(
        quantized, "quantize_rows", lambda weight: (freed_before.append(len(freed)), quantize_rows(weight))[1]
    )
    quantize_weights(model)
    assert (freed_before, len(freed)) == ([0, 1], 2)
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    tables = model.positions.weight.nbytes + model.inner.bias.nbytes
    assert sum(kept.values()) == (floats - tables) // 4 + 4 * (64 + 33) + tables
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_change_of_dtype_is_for_what_is_computed():
    model = quantize_weights(make_tied())
    scale = model.head.scale.clone()
    tokens = torch.tensor([[3, 0, 7]])
    expected = model(tokens)
    narrow = copy.deepcopy(model).bfloat16()
    assert narrow.head.weight is narrow.embed.weight
    assert torch.equal(narrow.head.scale, scale)
    assert narrow(tokens).dtype == torch.bfloat16
    torch.testing.assert_close(narrow(tokens).float(), expected, atol=0.05, rtol=0.05)
    assert torch.equal(narrow.float().head.scale, scale)
    assert narrow(tokens).dtype == torch.float32


def test_state_is_saved_and_loaded():
    model, other = quantize_weights(make_tied()), quantize_weights(Tied().eval())
    tokens = torch.tensor([[3, 0, 7]])
    assert not torch.equal(model(tokens), other(tokens))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), other(tokens))


def test_what_is_int8_already_stays():
    model = quantize_weights(make_tied())
    before = model.head.weight
    assert quantize_weights(model) is model
    assert model.head.weight is before


def test_a_layer_that_is_in_two_places_stays_one():
    layer = Linear(64, 64)
    model = quantize_weights(nn.ModuleList([layer, nn.Sequential(layer), nn.Linear(64, 2)]).eval())
    assert model[0].weight is model[1][0].weight
    assert type(model[2]) is QuantizedLinear


def test_other_peoples_layers_are_left_alone():
    class Special(nn.Linear):
        """With a forward of its own, perhaps."""

    model = quantize_weights(nn.Sequential(Special(64, 64), Linear(64, 64)).eval())
    assert [type(layer) for layer in model] == [Special, QuantizedLinear]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tied(), "training mode.*call model.eval"),
        (nn.Sequential(nn.Embedding(3, 4)).eval(), "Sequential has no linear layers"),
        (nn.Sequential(nn.Linear(64, 3, device="meta")).eval(), "for the CPU, and the model is on meta"),
    ],
)
def test_what_cannot_be_quantised(model, message):
    with pytest.raises(ConfigError, match=message):
        quantize_weights(model)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


@needs_kernel
def test_the_kernel_is_used_without_no_grad(monkeypatch):
    """Nothing of the model wants a gradient, so none is kept from the kernel."""
    model = quantize_weights(make_tied())
    module, calls = sys.modules[linear.__module__], []
    native_call = module._native
    monkeypatch.setattr(module, "_native", lambda *arguments: (calls.append(arguments), native_call(*arguments))[1])
    assert not model(torch.tensor([[3]])).requires_grad
    assert len(calls) == 2
