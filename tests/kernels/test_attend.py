"""Every implementation of `attend` against float64, over shapes, dtypes, masks and what can go wrong."""

import math
import multiprocessing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.exact import ROUNDING, exact, in_cache, make, store, turned
from twofold.kernels import (
    VARIABLE,
    KeyValue,
    Mask,
    Rotation,
    attend,
    describe,
    native,
    rotary_frequencies,
    sdpa,
    traced,
)
from twofold.spec import ConfigError


def replace_last(stored, meant, new):
    """Floats that take the place of the last rows, of which nothing that is stored may then be read."""
    num_old = stored.shape[2] - new.shape[2]
    stored[:, :, num_old:] = math.nan if stored.dtype.is_floating_point else 77
    meant[:, :, num_old:] = new
    return in_cache(new)


@pytest.mark.kernel
@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_native_equals_float64(data):
    """Over formats, one or two tensors, rotation at read, rope keys, recent floats, shapes, strides and intervals."""
    draw = data.draw
    batch, groups, each = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 7))
    queries, width = draw(st.integers(1, native.MAX_QUERIES)), draw(st.sampled_from((16, 48, 64, 80, 128, 256)))
    keys = draw(st.sampled_from((1, 2, 31, 63, 64, 65, 127, 300, 1031)))
    kind, tied = draw(st.sampled_from(("float32", "bfloat16", "float16", "int8", "int4"))), draw(st.booleans())
    way = draw(st.sampled_from(("plain", "rotated", "rotated and weighted", "rope key")))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    key, key_scale, exact_key = store(normal(batch, groups, keys, width), kind)
    value, value_scale, exact_value = key, key_scale, exact_key
    if not tied:
        value, value_scale, exact_value = store(normal(batch, groups, keys, width), kind)
    rotation = rope_key = rope_scale = exact_rope = None
    rope_width = 0
    if way == "rope key":
        rope_width = draw(st.sampled_from((16, 32, 64)))
        rope_key, rope_scale, exact_rope = store(normal(batch, 1, keys, rope_width), kind)
    recent, num_recent = None, min(keys, draw(st.sampled_from((0, 1, 5, 33, 40))))
    if num_recent:
        new_key = replace_last(key, exact_key, normal(batch, groups, num_recent, width))
        new_value = new_key if tied else replace_last(value, exact_value, normal(batch, groups, num_recent, width))
        recent = KeyValue(new_key, new_value)
        if rope_key is not None:
            new_rope = replace_last(rope_key, exact_rope, normal(batch, 1, num_recent, rope_width))
            recent = replace(recent, rope_key=new_rope)
    if rope_key is not None:
        exact_key = torch.cat((exact_key, exact_rope.expand(-1, groups, -1, -1)), dim=-1)
    elif way != "plain":
        start, gap = draw(st.integers(0, 5000)), draw(st.integers(0, keys))
        positions = start + torch.arange(keys).repeat(batch, 1)
        positions[:, gap:] += draw(st.sampled_from((0, 1, 300)))  # where documents meet, positions jump
        weight = normal(width) if way == "rotated and weighted" else None
        frequencies = rotary_frequencies(width, 10_000.0, dtype=torch.float64)
        rotation = Rotation(positions, frequencies, weight)
        exact_key = turned(exact_key * (1 if weight is None else weight), positions, rotation.frequencies)
        if recent is not None:
            recent = replace(recent, rotation=replace(rotation, positions=positions[:, keys - num_recent :]))

    dtype = getattr(torch, kind) if key_scale is None else torch.float32
    q = normal(batch, groups * each, queries, width + rope_width).to(dtype)
    ends = st.lists(st.integers(0, keys), min_size=queries, max_size=queries)
    first, last = (torch.tensor([draw(ends) for _ in range(batch)]) for _ in range(2))
    if draw(st.booleans()):
        first, last = torch.zeros_like(first), torch.full_like(last, keys)
    mask = Mask.between(first, last, keys)
    stored = KeyValue(key, value, key_scale, value_scale, rope_key, rope_scale, rotation, recent)
    assert native.why_not(q, stored, mask) is None
    scale = width**-0.5  # scores of order one; larger ones carry larger rounding errors into the weights
    got = native.attend(q, stored, mask, scale)
    expected = exact(q, exact_key, exact_value, first, last, scale)
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype], atol=5e-6)
    by_torch = sdpa.attend(q, stored, mask=mask, scale=scale)
    sees = (first < last)[:, None, :, None]  # torch leaves it open what a query gets that sees nothing
    difference = ((by_torch.double() - expected) * sees).nan_to_num(0).abs().max()
    assert difference < (2e-5 if dtype == torch.float32 else 0.06)


@pytest.mark.kernel
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_half_precision_is_no_worse_than_torch(dtype, tied):
    q, k, v = make(2, 2, 4, 1, 500, 64, dtype, tied)
    ends = torch.zeros(2, 1, dtype=torch.long), torch.full((2, 1), 500)
    reference = exact(q, k, v, *ends, 0.125)
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.125, enable_gqa=True)
    ours = native.attend(q, KeyValue(k, v), Mask.full(), 0.125)
    assert (ours - reference).abs().max() <= 2 * (stock - reference).abs().max() + 1e-6


@pytest.mark.kernel
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e4, 1e18])
def test_huge_and_tiny_scores(size):
    q, k, v = make(1, 2, 2, 3, 200, 64, torch.float32, False)
    ends = torch.zeros(1, 3, dtype=torch.long), torch.full((1, 3), 200)
    got = native.attend(q * size, KeyValue(k, v), Mask.full(), 1.0)
    assert (got - exact(q * size, k, v, *ends, 1.0)).abs().max() < 1e-4


@pytest.mark.kernel
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_reaches_the_queries_that_see_it_and_no_other(value):
    q, k, v = make(1, 1, 2, 2, 100, 64, torch.float32, True)
    k[0, 0, 70, 3] = value
    got = native.attend(q, KeyValue(k, v), Mask.between(torch.tensor([[0, 0]]), torch.tensor([[70, 100]]), 100), 1.0)
    assert got[:, :, 0].isfinite().all()
    assert got[:, :, 1, 3].isnan().all() or value == math.inf
    assert not got[:, :, 1].isfinite().all()


@pytest.mark.kernel
def test_queries_that_see_nothing_get_zeros():
    q, k, v = make(2, 2, 3, 2, 80, 64, torch.float32, True)
    mask = Mask.between(torch.tensor([[0, 5], [80, 3]]), torch.tensor([[80, 5], [80, 9]]), 80)
    got = native.attend(q, KeyValue(k, v), mask, 1.0)
    assert got[0, :, 1].eq(0).all()
    assert got[1, :, 0].eq(0).all()
    assert got[0, :, 0].ne(0).any()


@pytest.mark.kernel
@pytest.mark.parametrize("keys", [300, 5_000])
def test_two_threads_and_one_agree(keys):
    q, k, v = make(1, 1, 4, 1, keys, 64, torch.float32, True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = native.attend(q, KeyValue(k, v), Mask.full(), 0.125)
        torch.set_num_threads(2)
        two = native.attend(q, KeyValue(k, v), Mask.full(), 0.125)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(two, one, rtol=0, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("keys", [40, 1_500])
@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_recent_floats_with_two_threads_and_one(kind, keys):
    """Where a part of the keys has no recent ones, and the parts meet."""
    rows = torch.randn(1, 1, keys, 64, generator=torch.Generator().manual_seed(0))
    key, scale, exact_key = store(rows, kind)
    stored = KeyValue(key, key, scale, scale)
    new = replace_last(key, exact_key, torch.randn(1, 1, 33, 64, generator=torch.Generator().manual_seed(1)))
    stored = replace(stored, recent=KeyValue(new, new))
    q = torch.randn(1, 4, 2, 64, generator=torch.Generator().manual_seed(2))
    first, last = torch.tensor([[0, keys - 20]]), torch.tensor([[keys - 1, keys]])
    expected = exact(q, exact_key, exact_key, first, last, 0.125)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            got = native.attend(q, stored, Mask.between(first, last, keys), 0.125)
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-6)
    finally:
        torch.set_num_threads(threads)


def _attend_in_child(queue):
    torch.set_num_threads(1)  # torch's own threads do not survive a fork either
    q, k, v = make(1, 2, 2, 1, 400, 64, torch.float32, True)
    torch.set_num_threads(2)
    queue.put(native.attend(q, KeyValue(k, v), Mask.full(), 0.125).tolist())


@pytest.mark.kernel
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", sorted({"fork", "spawn"} & {*multiprocessing.get_all_start_methods()}))
def test_child_processes_can_use_it(method):
    """After the parent has used two threads, which do not survive a fork."""
    q, k, v = make(1, 2, 2, 1, 400, 64, torch.float32, True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    expected = native.attend(q, KeyValue(k, v), Mask.full(), 0.125)
    torch.set_num_threads(threads)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_attend_in_child, args=(queue,))
    child.start()
    got = torch.tensor(queue.get(timeout=60))
    child.join()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=pytest.mark.kernel)])
def test_implementations_agree(name, groups, queries, monkeypatch):
    monkeypatch.setenv(VARIABLE, name)
    q, k, v = make(2, groups, 4 // groups, queries, 90, 64, torch.float32, True)
    first = torch.tensor([[0] * queries, [40] * queries])
    last = torch.arange(91 - queries, 91).repeat(2, 1)
    got = attend(q, KeyValue(k, v), mask=Mask.between(first, last, 90), scale=0.125)
    assert (got - exact(q, k, v, first, last, 0.125)).abs().max() < 2e-6


@pytest.mark.kernel
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 63])
def test_keys_that_no_query_sees_are_not_read(length, dtype, tied):
    """A weight of 0 times NaN would show."""
    first, last = torch.tensor([[20]]), torch.tensor([[20 + length]])
    q, k, v = make(1, 2, 1, 1, 140, 64, dtype, tied)
    expected = exact(q, k, v, first, last, 0.125)
    for stored in (k, v):
        stored[:, :, :20] = stored[:, :, 20 + length :] = math.nan
    got = native.attend(q, KeyValue(k, v), Mask.between(first, last, 140), 0.125)
    assert (got - expected).abs().max() < (2e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.kernel
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_one_query_of_seven_sees_rotated_keys(dtype, tied):
    """It alone is a row that is read in place, while the tables of the rotation are those of seven."""
    q, k, v = make(2, 1, 1, 7, 130, 64, dtype, tied)
    first, last = torch.zeros(2, 7, dtype=torch.long), torch.tensor([[0] * 6 + [130]]).repeat(2, 1)
    rotation = Rotation(torch.arange(130).repeat(2, 1), rotary_frequencies(64, 10_000.0, dtype=torch.float64))
    got = native.attend(q, KeyValue(k, v, rotation=rotation), Mask.between(first, last, 130), 0.125)
    expected = exact(q, turned(k.double(), rotation.positions, rotation.frequencies), v, first, last, 0.125)
    torch.testing.assert_close(got.double(), expected, rtol=ROUNDING[dtype], atol=5e-6)


@pytest.mark.kernel
def test_what_the_kernel_leaves_to_torch():
    q, k, v = make(1, 2, 2, 1, 30, 64, torch.float32, True)
    full = Mask.full()
    assert native.why_not(q, KeyValue(k, v), full) is None
    assert "gradients" in native.why_not(q.clone().requires_grad_(), KeyValue(k, v), full)
    assert "dtype" in native.why_not(q.double(), KeyValue(k.double(), v.double()), full)
    assert "queries" in native.why_not(q.expand(-1, -1, native.MAX_QUERIES + 1, -1), KeyValue(k, v), full)
    assert "8 and 0 wide" in native.why_not(q[..., :8], KeyValue(k[..., :8], v[..., :8]), full)
    assert "tensor" in native.why_not(q, KeyValue(k, v), Mask.of(torch.ones(1, 1, 1, 30, dtype=torch.bool)))


@pytest.mark.parametrize("way", ["plain", "tied", "rotated", "rope key"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_operator_of_compiled_graphs(kind, way):
    """It gives what the call gives, and is what it says of itself: nothing written to, shape and strides foreseen."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, heads, 40, 64, generator=generator) for heads in (2, 2, 1)]
    (key, key_scale), (value, value_scale), (rope_key, rope_scale) = (store(each, kind)[:2] for each in rows)
    if way != "plain":
        value, value_scale = key, key_scale
    if way != "rope key":
        rope_key = rope_scale = None
    rotation = None
    if way == "rotated":
        rotation = Rotation(torch.arange(40).repeat(2, 1), rotary_frequencies(64, 10_000.0), torch.rand(64))
    query = torch.randn(2, 6, 1, 128 if way == "rope key" else 64, generator=generator)
    query = query.bfloat16() if kind == "bfloat16" else query
    stored = KeyValue(key, value, key_scale, value_scale, rope_key, rope_scale, rotation)
    for mask in (Mask.full(), Mask.between(torch.tensor([[0], [9]]), torch.tensor([[40], [31]]), 40)):
        got = traced.attend(query, stored, mask, 0.125)
        torch.testing.assert_close(got, attend(query, stored, mask=mask, scale=0.125))
        torch.library.opcheck(traced.decode_attention, *traced.arguments(query, stored, mask, 0.125))


class AttendToItself(torch.nn.Module):
    def forward(self, x):
        return attend(x, KeyValue(x, x), mask=Mask.full(), scale=1.0)


def test_exported_graphs_have_torchs_operations_only():
    exported = torch.export.export(AttendToItself(), (torch.randn(1, 2, 1, 64),))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert called == ["aten.scaled_dot_product_attention.default"]


def test_environment_variable(monkeypatch):
    assert set(describe()) == {"native", "triton", "torch"}
    monkeypatch.setenv(VARIABLE, "nativ")
    with pytest.raises(ConfigError, match="TWOFOLD_ATTENTION=nativ is unknown; did you mean 'native'"):
        describe()
    monkeypatch.setenv(VARIABLE, "native")
    monkeypatch.setattr(native, "load_library", lambda: None)
    with pytest.raises(ConfigError, match="was not compiled"):
        describe()
    monkeypatch.setenv(VARIABLE, "auto")
    assert "not compiled" in describe()["native"]
