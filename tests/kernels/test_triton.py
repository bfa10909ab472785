"""The Triton kernel against float64 in Triton's interpreter, and compiled for GPUs that are not there."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import triton_worker
from tests.kernels.exact import ROUNDING, exact, make, store, turned
from tests.tolerances import ABSOLUTE
from twofold.kernels import (
    VARIABLE,
    KeyValue,
    Mask,
    Rotation,
    attend,
    describe,
    implementation,
    rotary_frequencies,
    sdpa,
)
from twofold.kernels import triton_decode as kernel
from twofold.spec import ConfigError

# bfloat16's arithmetic is float32's in the interpreter. In float16, rotated keys and weights are rounded.
TOLERANCE = {
    torch.float32: ABSOLUTE[torch.float32],
    torch.bfloat16: ABSOLUTE[torch.float32],
    torch.float16: 4 * ROUNDING[torch.float16],
}
LEAST_SHARED_MEMORY = 99 * 1_024  # of a program, on GPUs of capability 8.6 and 8.9


@pytest.fixture(scope="module")
def interpreter():
    with triton_worker.interpreter() as process:
        yield process


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    with triton_worker.compiler(tmp_path_factory.mktemp("triton")) as process:
        yield process


def decode(interpreter, *arguments):
    refused, output = interpreter.submit(triton_worker.decode, *arguments).result()
    assert refused is None
    return output


def normal(generator, *shape):
    return torch.randn(shape, generator=generator)


def make_stored(kind, tied, way, shape, rope_width=32, generator=None, jump=0):
    """Keys and values as a cache holds them, keys (with their rope channels) and values in float64."""
    batch, groups, keys, width = shape
    key, key_scale, exact_key = store(normal(generator, *shape), kind)
    value, value_scale, exact_value = key, key_scale, exact_key
    if not tied:
        value, value_scale, exact_value = store(normal(generator, *shape), kind)
    rotation = rope_key = rope_scale = None
    if way == "rope key":
        rope_key, rope_scale, exact_rope = store(normal(generator, batch, 1, keys, rope_width), kind)
        exact_key = torch.cat((exact_key, exact_rope.expand(-1, groups, -1, -1)), dim=-1)
    elif way != "plain":
        positions = 4_000 + torch.arange(keys).repeat(batch, 1)
        positions[:, keys // 3 :] += jump  # where documents meet, positions jump
        weight = normal(generator, width) if way == "rotated and weighted" else None
        rotation = Rotation(positions, rotary_frequencies(width, 10_000.0, dtype=torch.float64), weight)
        exact_key = turned(exact_key * (1 if weight is None else weight), positions, rotation.frequencies)
    stored = KeyValue(key, value, key_scale, value_scale, rope_key, rope_scale, rotation)
    return stored, exact_key, exact_value


@pytest.mark.triton
@pytest.mark.parametrize("way", ["plain", "rotated", "rotated and weighted", "rope key"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
@settings(max_examples=6)
@given(data=st.data())
def test_equals_float64(kind, way, interpreter, data):
    """Over one or two tensors, shapes, strides, positions that jump and intervals."""
    draw = data.draw
    batch, groups, each = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from((1, 3, 5)))
    queries, width = draw(st.integers(1, kernel.MAX_QUERIES)), draw(st.sampled_from((16, 48, 64, 80, 128)))
    keys = draw(st.sampled_from((1, 2, 63, 64, 65, 127, 301)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rope_width = draw(st.sampled_from((16, 32, 48))) if way == "rope key" else 0
    stored, exact_key, exact_value = make_stored(
        kind,
        draw(st.booleans()),
        way,
        (batch, groups, keys, width),
        rope_width,
        generator,
        draw(st.sampled_from((0, 300))),
    )
    dtype = draw(st.sampled_from(list(TOLERANCE))) if kind.startswith("int") else getattr(torch, kind)
    q = normal(generator, batch, queries, groups * each, width + rope_width).to(dtype).transpose(1, 2)
    rule = draw(st.sampled_from(("full", "one interval", "intervals")))
    lines = 1 if rule == "one interval" else batch
    ends = st.lists(st.integers(0, keys), min_size=queries, max_size=queries)
    first, last = (torch.tensor([draw(ends) for _ in range(lines)]) for _ in range(2))
    if rule == "full":
        first, last = torch.zeros_like(first), torch.full_like(last, keys)
    mask = Mask.full() if rule == "full" else Mask.between(first, last, keys)
    scale = width**-0.5
    got = decode(interpreter, q, stored, mask, scale)
    expected = exact(q, exact_key, exact_value, first, last, scale)
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype], atol=TOLERANCE[dtype])


@pytest.mark.triton
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 257, 2_049])
def test_lengths(keys, tied, interpreter):
    """From a part of one block to several parts of several blocks."""
    q, k, v = make(1, 1, 2, 1, keys, 64, torch.float32, tied)
    got = decode(interpreter, q, KeyValue(k, v), Mask.full(), 0.125)
    expected = exact(q, k, v, torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), keys), 0.125)
    assert (got - expected).abs().max() < ABSOLUTE[torch.float32]


@pytest.mark.triton
@pytest.mark.parametrize("jump", [0, 300])
def test_rotations_are_exact_to_float32(jump, interpreter):
    """Scores up to about a hundred, which carry an error of the angle into the weights."""
    generator = torch.Generator().manual_seed(0)
    stored, exact_key, exact_value = make_stored("float32", False, "rotated", (1, 1, 301, 64), 0, generator, jump)
    q = normal(generator, 1, 4, 8, 64)
    got = decode(interpreter, q, stored, Mask.full(), 4.0)
    expected = exact(q, exact_key, exact_value, torch.zeros(1, 8, dtype=torch.long), torch.full((1, 8), 301), 4.0)
    assert (got - expected).abs().max() < 5e-5


@pytest.mark.triton
def test_more_queries_than_one_program_takes(interpreter):
    q, k, v = make(1, 1, 20, 8, 70, 64, torch.float32, True)
    got = decode(interpreter, q, KeyValue(k, v), Mask.full(), 0.125)
    expected = exact(q, k, v, torch.zeros(1, 8, dtype=torch.long), torch.full((1, 8), 70), 0.125)
    assert (got - expected).abs().max() < ABSOLUTE[torch.float32]


@pytest.mark.triton
def test_causal(interpreter):
    q, k, v = make(2, 2, 2, 5, 5, 64, torch.float32, True)
    got = decode(interpreter, q, KeyValue(k, v), Mask.causal(), 0.125)
    expected = exact(q, k, v, torch.zeros(1, 5, dtype=torch.long), torch.arange(1, 6)[None], 0.125)
    assert (got - expected).abs().max() < ABSOLUTE[torch.float32]


@pytest.mark.triton
@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_is_no_worse_than_torch(tied, interpreter):
    q, k, v = make(2, 2, 4, 1, 500, 64, torch.float16, tied)
    reference = exact(q, k, v, torch.zeros(2, 1, dtype=torch.long), torch.full((2, 1), 500), 0.125)
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.125, enable_gqa=True)
    ours = decode(interpreter, q, KeyValue(k, v), Mask.full(), 0.125)
    assert (ours - reference).abs().max() <= 2 * (stock - reference).abs().max() + 1e-6


@pytest.mark.triton
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e4, 1e18])
def test_huge_and_tiny_scores(size, interpreter):
    q, k, v = make(1, 2, 2, 3, 200, 64, torch.float32, False)
    got = decode(interpreter, q * size, KeyValue(k, v), Mask.full(), 1.0)
    expected = exact(q * size, k, v, torch.zeros(1, 3, dtype=torch.long), torch.full((1, 3), 200), 1.0)
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.triton
def test_queries_that_see_nothing_get_zeros(interpreter):
    q, k, v = make(2, 2, 3, 2, 300, 64, torch.float32, True)
    mask = Mask.between(torch.tensor([[0, 5], [300, 9]]), torch.tensor([[300, 5], [300, 3]]), 300)
    got = decode(interpreter, q, KeyValue(k, v), mask, 1.0)
    assert got[0, :, 1].eq(0).all()
    assert got[1].eq(0).all()
    assert got[0, :, 0].ne(0).any()


@pytest.mark.triton
def test_nan_reaches_the_sequences_that_see_it_and_no_other(interpreter):
    q, k, v = make(2, 1, 2, 1, 100, 64, torch.float32, True)
    k[:, 0, 70, 3] = math.nan
    mask = Mask.between(torch.tensor([[0], [0]]), torch.tensor([[70], [100]]), 100)
    got = decode(interpreter, q, KeyValue(k, v), mask, 1.0)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


@pytest.mark.triton
def test_the_environment_chooses_it(interpreter):
    q, k, v = make(2, 2, 2, 3, 90, 64, torch.float32, True)
    got, described = interpreter.submit(triton_worker.by_name, q, KeyValue(k, v), Mask.full(), 0.125).result()
    assert torch.equal(got, decode(interpreter, q, KeyValue(k, v), Mask.full(), 0.125))
    assert "in its interpreter" in described


@pytest.mark.triton
def test_what_the_kernel_leaves_to_torch(monkeypatch):
    monkeypatch.setenv(kernel.INTERPRETER, "1")
    q, k, v = make(1, 2, 2, 1, 30, 64, torch.float32, True)
    full = Mask.full()
    assert kernel.why_not(q, KeyValue(k, v), full) is None
    assert "gradients" in kernel.why_not(q.clone().requires_grad_(), KeyValue(k, v), full)
    assert "dtype" in kernel.why_not(q.double(), KeyValue(k.double(), v.double()), full)
    assert "dtype" in kernel.why_not(q.half(), KeyValue(k, v), full)
    assert "queries" in kernel.why_not(q.expand(-1, -1, kernel.MAX_QUERIES + 1, -1), KeyValue(k, v), full)
    assert "8 and 0 wide" in kernel.why_not(q[..., :8], KeyValue(k[..., :8], v[..., :8]), full)
    wide = torch.zeros(1, 2, 30, 272)
    assert "272 and 0 wide" in kernel.why_not(torch.zeros(1, 4, 1, 272), KeyValue(wide, wide), full)
    assert "together" in kernel.why_not(q, KeyValue(k.mT.contiguous().mT, v), full)
    assert "tensor" in kernel.why_not(q, KeyValue(k, v), Mask.of(torch.ones(1, 1, 1, 30, dtype=torch.bool)))
    monkeypatch.setenv(VARIABLE, "triton")
    mask = Mask.of(torch.ones(1, 1, 1, 30, dtype=torch.bool))
    expected = sdpa.attend(q, KeyValue(k, v), mask=mask, scale=0.125)
    assert torch.equal(attend(q, KeyValue(k, v), mask=mask, scale=0.125), expected)


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "Triton is not installed"), ("3.2.0", "3.3 or newer"), ("3.7.1", "it needs TRITON_INTERPRET=1")],
)
def test_asking_for_it_where_it_cannot_run(found, message, monkeypatch):
    monkeypatch.delenv(kernel.INTERPRETER, raising=False)
    monkeypatch.setattr(kernel, "version", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    q, k, v = make(1, 2, 2, 1, 30, 64, torch.float32, True)
    expected = attend(q, KeyValue(k, v), mask=Mask.full(), scale=0.125)
    assert ("not installed" if found is None else f"{found}, not used: there is no CUDA") in describe()["triton"]
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ConfigError, match=f"TWOFOLD_ATTENTION=triton, but .*{message}"):
        attend(q, KeyValue(k, v), mask=Mask.full(), scale=0.125)
    with pytest.raises(ConfigError, match=message):
        describe()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=f"attention_implementation=triton, but .*{message}"):
        attend(q, KeyValue(k, v), mask=Mask.full(), scale=0.125, wanted="triton")
    monkeypatch.setenv(VARIABLE, "torch")
    assert (attend(q, KeyValue(k, v), mask=Mask.full(), scale=0.125) - expected).abs().max() < 2e-6


def test_a_gpu_has_to_ask_for_it(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(kernel, "version", lambda: "3.7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert describe()["triton"] == (
        "Triton 3.7.1, not used: not measured on a GPU yet; TWOFOLD_ATTENTION=triton uses it"
    )
    monkeypatch.setenv(VARIABLE, "triton")
    assert describe()["triton"] == "Triton 3.7.1, used for up to 8 queries without gradients on the GPU"


@pytest.mark.triton
def test_it_is_used_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(kernel.INTERPRETER, "1")
    q, k, v = make(1, 2, 2, 1, 30, 64, torch.float32, True)
    assert implementation(q, KeyValue(k, v), Mask.full()) != "triton"
    assert implementation(q, KeyValue(k, v), Mask.full(), "triton") == "triton"
    monkeypatch.setenv(VARIABLE, "torch")
    assert implementation(q, KeyValue(k, v), Mask.full(), "triton") == "torch"


def test_importing_twofold_leaves_triton_alone():
    code = "import sys, twofold.kernels, twofold.cli; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, VARIABLE: "auto"})


@pytest.mark.triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int4"])
def test_what_gpus_get(kind, capability, compiler):
    """A shared key and value is loaded once; bfloat16 meets tensor cores, and float32 is not rounded for them."""

    def programs(tied):
        stored, _, _ = make_stored(kind, tied, "plain", (1, 2, 4_096, 64))
        q = torch.randn(1, 8, 1, 64).to(torch.float32 if kind == "float32" else torch.bfloat16)
        return compiler.submit(triton_worker.compiled, capability, q, stored, Mask.full(), 0.125).result()

    one, two = programs(tied=True), programs(tied=False)
    assert len(one) == len(two) == 2
    halves, scales = (1, 1) if kind == "int4" else (2, 0)
    assert two[0][0] - one[0][0] == halves + scales
    assert one[0][0] == 2 + halves + scales  # two halves of the queries
    for _, shared, assembly in (*one, *two):
        assert shared <= LEAST_SHARED_MEMORY
        assert "tf32" not in assembly
    assert ("mma" in one[0][2]) == (kind != "float32")


@pytest.mark.triton
@pytest.mark.parametrize("way", ["rotated and weighted", "rope key"])
@pytest.mark.parametrize(("kind", "width"), [("float32", 256), ("float16", 512), ("int8", 128)])
def test_all_it_takes_compiles_for_the_least_gpu(kind, width, way, compiler):
    stored, exact_key, _ = make_stored(kind, False, way, (1, 1, 700, width))
    dtype = torch.float32 if kind == "int8" else getattr(torch, kind)
    q = torch.zeros(1, 16, 8, exact_key.shape[-1], dtype=dtype)
    mask = Mask.between(torch.zeros(1, 8, dtype=torch.long), torch.full((1, 8), 700), 700)
    made = compiler.submit(triton_worker.compiled, 80, q, stored, mask, 0.125).result()
    assert all(shared <= LEAST_SHARED_MEMORY for _, shared, _ in made)
