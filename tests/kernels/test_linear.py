"""Linear layers against float64, over shapes, dtypes and what can go wrong."""

import math
import multiprocessing
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from twofold.kernels import LINEAR_VARIABLE, Linear, describe_linear, linear, native, why_not_linear
from twofold.spec import ConfigError

needs_kernel = pytest.mark.skipif(native.load_library() is None, reason="the kernel was not compiled")
HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # rounding of the output


def make(rows, width, outputs, dtype, kind=None, seed=0):
    """Input, weight, bias, scale, and the weight that is meant; `kind` int8 for integers."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*size, generator=generator) for size in ((rows, width), (outputs, width), (outputs,))
    )
    x, bias = x.to(dtype), bias.to(dtype)
    if kind != "int8":
        weight = weight.to(dtype)
        return x, weight, bias, None, weight.double()
    codes = (weight * 40).round().clamp(-127, 127).to(torch.int8)
    scale = torch.rand(outputs, generator=generator) / 40
    return x, codes, bias, scale, codes.double() * scale.double()[:, None]


def assert_close(got, x, meant, bias, dtype):
    expected = F.linear(x.double(), meant, None if bias is None else bias.double())
    bound = 1e-5 * math.sqrt(meant.shape[1]) + HALF_STEP[dtype] * expected.abs()
    assert got.dtype == dtype
    assert bool(((got.double() - expected).abs() <= bound).all())


@needs_kernel
@given(
    rows=st.integers(1, 20) | st.just(64),
    width=st.sampled_from([64, 128, 192, 320, 768]),
    outputs=st.sampled_from([1, 5, 15, 16, 17, 33, 200]),
    dtype=st.sampled_from(list(HALF_STEP)),
    kind=st.sampled_from(["float", "int8"]),
    biased=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_kernel_against_float64(rows, width, outputs, dtype, kind, biased, threads):
    x, weight, bias, scale, meant = make(rows, width, outputs, dtype, kind)
    bias = bias if biased else None
    assert why_not_linear(x, weight) is None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = sys.modules[linear.__module__]._native(x, rows, weight, bias, scale)
    finally:
        torch.set_num_threads(before)
    assert_close(got, x, meant, bias, dtype)


@needs_kernel
@pytest.mark.parametrize("width", [16, 48, 80])
def test_narrow_float32(width):
    x, weight, bias, _, meant = make(3, width, 9, torch.float32)
    assert why_not_linear(x, weight) is None
    assert_close(linear(x, weight, bias), x, meant, bias, torch.float32)


@pytest.mark.parametrize("kind", ["float", "int8"])
def test_torch_does_the_rest(kind, monkeypatch):
    monkeypatch.setenv(LINEAR_VARIABLE, "torch")
    x, weight, bias, scale, meant = make(2, 64, 7, torch.float32, kind)
    assert_close(linear(x, weight, bias, scale), x, meant, bias, torch.float32)
    assert_close(linear(x, weight, None, scale), x, meant, None, torch.float32)
    assert describe_linear() == "torch: TWOFOLD_LINEAR=torch" or native.load_library() is None


@needs_kernel
def test_threads_agree():
    """Enough weights for several threads."""
    x, weight, bias, _, meant = make(1, 768, 500, torch.float32)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(linear(x, weight, bias))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
    assert_close(results[0], x, meant, bias, torch.float32)


@needs_kernel
def test_shapes_and_nan():
    x, weight, _, _, _ = make(6, 64, 5, torch.float32)
    spread = x.view(2, 3, 64).transpose(0, 1)  # not contiguous
    torch.testing.assert_close(linear(spread, weight), F.linear(spread, weight), atol=1e-4, rtol=0)
    x[1, 3] = math.nan
    out = linear(x, weight)
    assert out[1].isnan().all()
    assert out[[0, 2, 3, 4, 5]].isfinite().all()
    assert linear(x[:0], weight).shape == (0, 5)


@needs_kernel
def test_what_the_kernel_leaves_to_torch():
    x, weight, _, _, _ = make(1, 64, 5, torch.float32)
    parameter = nn.Parameter(weight)
    assert "gradients" in why_not_linear(x, parameter)
    with torch.no_grad():
        assert why_not_linear(x, parameter) is None
    assert "dtype" in why_not_linear(x.double(), weight.double())
    assert "dtype" in why_not_linear(x.bfloat16(), weight)
    assert "whole vectors" in why_not_linear(x[:, :63], weight[:, :63])
    assert "whole vectors" in why_not_linear(x[:, :48], weight)  # torch has the better message
    assert "meta" in why_not_linear(x.to("meta"), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in why_not_linear(x, weight)

    class Marked(torch.Tensor):
        pass

    assert "subclass" in why_not_linear(x, weight.as_subclass(Marked))


def test_layer_is_torchs_own():
    """The same state, the same start, the same gradients; other libraries find an nn.Linear."""
    torch.manual_seed(0)
    ours = Linear(64, 5)
    torch.manual_seed(0)
    torchs = nn.Linear(64, 5)
    assert torch.equal(ours.weight, torchs.weight)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    x = torch.randn(3, 64)
    for layer in (ours, torchs):
        layer(x).square().sum().backward()
    assert torch.equal(ours.weight.grad, torchs.weight.grad)


COMPILED = """
import torch
from twofold.kernels import Linear

layer = Linear(64, 5).requires_grad_(False)
x = torch.randn(1, 64)
compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
torch.testing.assert_close(compiled, torch.nn.functional.linear(x, layer.weight, layer.bias))
"""


def test_compiled_layer():
    """torch.compile sees torch's own operation. Without the checks of types, which it cannot trace."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=300)


def answer(connection, x, weight, bias):
    connection.send(linear(x, weight, bias).tolist())


@needs_kernel
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_forked_child():
    """After the parent has used two threads, which do not survive a fork, as torch's do not."""
    x, weight, bias, _, _ = make(1, 768, 500, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = linear(x, weight, bias).tolist()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=answer, args=(there, x, weight, bias), daemon=True)
    child.start()
    torch.set_num_threads(before)
    assert here.poll(60)
    assert here.recv() == expected
    child.join(60)


@needs_kernel
@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "float"), ("bfloat16", "float"), ("float32", "int8")])
def test_torch_does_many_tokens(dtype, kind, has_units, monkeypatch):
    """What is many depends on what torch would do: copy integers, or multiply bfloat16 by instructions for that."""
    module = sys.modules[linear.__module__]
    monkeypatch.setattr(module, "_multiplies_bfloat16", lambda: has_units)
    calls = []
    monkeypatch.setattr(module, "_native", lambda x, *_: (calls.append(x.shape[0]), x)[1])
    _, weight, _, scale, _ = make(1, 64, 64, getattr(torch, dtype), kind)
    for rows in (1, 4, 5, 16, 17, 64, 65):
        linear(torch.ones(rows, 64, dtype=getattr(torch, dtype)), weight, None, scale)
    most = {"int8": 64, "float": 4 if has_units and dtype == "bfloat16" else 16}[kind]
    assert calls == [rows for rows in (1, 4, 5, 16, 17, 64, 65) if rows <= most]
    assert f"({4 if has_units else 16} in bfloat16, 64 with int8 weights)" in describe_linear()


def test_environment_variable(monkeypatch):
    monkeypatch.setenv(LINEAR_VARIABLE, "nativ")
    with pytest.raises(ConfigError, match="TWOFOLD_LINEAR=nativ is unknown; did you mean 'native'"):
        describe_linear()
