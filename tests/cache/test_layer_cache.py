"""Storage: what goes in comes out, in as many bytes as the formula says."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.cache import CacheError, LayerCache, Quantized, Stored, quantize
from twofold.spec import ConfigError

BATCH, GROUPS, WIDTH = 2, 3, 4


def tokens(num: int, start: int = 0, batch: int = BATCH) -> torch.Tensor:
    """(B, G, T, D) in which every token carries its own number."""
    numbers = torch.arange(start, start + num, dtype=torch.float32)[None, None, :, None]
    return numbers + torch.linspace(0, 0.5, batch * GROUPS * WIDTH).view(batch, GROUPS, 1, WIDTH)


def as_stored(cache: LayerCache, tensor: torch.Tensor, num_recent: int | None = None) -> Stored:
    """What a cache should give back of a tensor: rows are quantised one by one, whatever stands beside them.

    Of int4 the last rows are there as floats too: all where the cache has seen no more than 32, or the number given.
    """
    if cache.dtype is None or not tensor.is_floating_point():
        return tensor
    stored = quantize(tensor, cache.dtype)
    if cache.dtype == "int8":
        return stored
    num_recent = tensor.shape[2] if num_recent is None else num_recent
    return stored._replace(recent=tensor[:, :, tensor.shape[2] - num_recent :])


def assert_reads(seen: Stored, expected: Stored) -> None:
    assert isinstance(seen, Quantized) is isinstance(expected, Quantized)
    for got, wanted in zip(seen, expected, strict=True) if isinstance(seen, Quantized) else [(seen, expected)]:
        assert (got is None) is (wanted is None)
        if got is not None:
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


def row_bytes(dtype: str | None, width: int) -> int:
    """Bytes of one row of floats: 4 a number; or 1, or a half, and 4 for the scale."""
    return {None: 4 * width, "int8": width + 4, "int4": width // 2 + 4}[dtype]


DTYPES = (None, "int8", "int4")


@settings(deadline=None, max_examples=200)
@given(
    dtype=st.sampled_from(DTYPES),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    window=st.none() | st.integers(1, 12),
    fixed=st.booleans(),
    block=st.integers(1, 7),
    expected=st.integers(0, 120),
)
def test_reads_what_a_query_can_see(
    dtype: str | None, chunks: list[int], window: int | None, fixed: bool, block: int, expected: int
) -> None:
    """Any chunking, growing or fixed, with or without a window, quantised or not; bytes are counted by the formula.

    However many tokens were expected, or fewer than come.
    """
    cache = LayerCache(window=window, capacity=sum(chunks) if fixed else None, block=block, dtype=dtype)
    cache.expected_tokens = expected
    token_bytes = BATCH * (GROUPS * (row_bytes(dtype, WIDTH) + row_bytes(dtype, 2)) + 4)
    recent_bytes = BATCH * GROUPS * (WIDTH + 2) * 4 if dtype == "int4" else 0
    past = 0
    for num in chunks:
        new = tokens(num, past)
        positions = torch.arange(past, past + num, dtype=torch.int32).expand(BATCH, 1, -1)[..., None]
        seen = cache.append(new, -new[..., :2], positions)
        first = 0 if window is None else max(0, past - window + 1)
        visible = tokens(past + num - first, first)
        numbers = torch.arange(first, past + num, dtype=torch.int32).expand(BATCH, 1, -1)[..., None]
        for got, wanted in zip(seen, (visible, -visible[..., :2], numbers), strict=True):
            assert_reads(got, as_stored(cache, wanted, min(min(past, 32) + num, past + num - first)))
        past += num
        kept = past if window is None else min(past, window)
        assert cache.num_tokens == past
        assert cache.nbytes_used == kept * token_bytes + min(kept, 32) * recent_bytes
        assert cache.nbytes_allocated >= cache.num_held * token_bytes
        assert sum(stored.nbytes for stored in cache.tensors) >= cache.num_held * token_bytes
    if window is None and not fixed:
        most = max(past, expected)
        assert cache.nbytes_allocated < (most + block) * token_bytes + min(past, 32) * recent_bytes


def test_one_tensor_is_half_of_two() -> None:
    tied, plain = LayerCache(), LayerCache()
    tied.append(tokens(300))
    plain.append(tokens(300), tokens(300))
    assert 2 * tied.nbytes_used == plain.nbytes_used == 2 * 300 * BATCH * GROUPS * WIDTH * 4
    assert 2 * tied.nbytes_allocated == plain.nbytes_allocated


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_are_views_and_growth_is_by_blocks(dtype: str | None) -> None:
    cache = LayerCache(block=8, dtype=dtype)
    addresses = set()
    for step in range(64):
        (seen,) = cache.append(tokens(1, step))
        views = seen[:2] if isinstance(seen, Quantized) else (seen,)
        addresses.add(views[0].untyped_storage().data_ptr())
        recent_bytes = min(step + 1, 32) * BATCH * GROUPS * WIDTH * 4 if dtype == "int4" else 0
        assert sum(view.untyped_storage().nbytes() for view in views) == cache.nbytes_allocated - recent_bytes
    assert len(addresses) <= 64 / 8


def test_growing_moves_one_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second tensor moves, the first one's old memory is gone already."""
    cache = LayerCache(block=4)
    cache.append(tokens(4), tokens(4))
    old = [weakref.ref(buffer) for buffer in cache._buffers]
    alive: list[int] = []
    new_empty = torch.Tensor.new_empty

    def counting(self, *size, **options):
        alive.append(sum(reference() is not None for reference in old))
        return new_empty(self, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", counting)
    cache.append(tokens(1, 4), tokens(1, 4))
    assert alive == [2, 1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_that_knows_its_length_moves_seldom(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor stands for one on a GPU; on the CPU this text is too long to be taken at once."""
    monkeypatch.setattr("twofold.cache.layer_cache._AT_ONCE_ON_CPU", 999)
    cache = LayerCache(block=4)
    cache.expected_tokens = 1_000
    moves, allocated = [], 0
    for step in range(1_100):
        cache.append(tokens(1, step).to(device))
        if cache.nbytes_allocated != allocated:
            allocated = cache.nbytes_allocated
            moves.append(cache.num_tokens)
        if step < 1_000:
            assert allocated <= 4 * (step + 1) * BATCH * GROUPS * WIDTH * 4
    early = [num_tokens for num_tokens in moves if num_tokens <= 1_000]
    assert len(early) <= 9  # each time twice as large, in place of 250 blocks
    assert early[-1] <= 500
    assert moves[len(early) :] == list(range(1_001, 1_100, 4))  # beyond what was expected it goes on by blocks
    if device == "cpu":
        assert torch.equal(cache.tensors[0], tokens(1_100))


@pytest.mark.parametrize(("device", "num_taken"), [("cpu", 1_000), ("meta", 4)])
def test_what_costs_nothing_before_it_is_used_is_taken_at_once(device: str, num_taken: int) -> None:
    cache = LayerCache(block=4)
    cache.expected_tokens = 1_000
    cache.append(tokens(1).to(device))
    assert cache.nbytes_allocated == num_taken * BATCH * GROUPS * WIDTH * 4


def test_a_long_prompt_is_given_room_for_all_at_once() -> None:
    cache = LayerCache(block=4)
    cache.expected_tokens = 100
    cache.append(tokens(60).to("meta"))
    assert cache.nbytes_allocated == 100 * BATCH * GROUPS * WIDTH * 4


def test_a_sliding_cache_takes_nothing_ahead() -> None:
    cache = LayerCache(window=16, block=8)
    cache.expected_tokens = 1_000
    for step in range(100):
        cache.append(tokens(1, step))
        assert cache.nbytes_allocated <= (16 + 8) * BATCH * GROUPS * WIDTH * 4


def test_fixed_cache_never_moves_and_says_when_it_is_full() -> None:
    cache = LayerCache(capacity=6)
    cache.append(tokens(2))
    address, allocated = cache.tensors[0].untyped_storage().data_ptr(), cache.nbytes_allocated
    cache.append(tokens(4, 2))
    assert cache.tensors[0].untyped_storage().data_ptr() == address
    assert cache.nbytes_allocated == allocated == cache.nbytes_used
    with pytest.raises(CacheError, match="holds 6 tokens and was given 7"):
        cache.append(tokens(1, 6))
    assert cache.num_tokens == 6


def test_sliding_cache_stays_small() -> None:
    cache = LayerCache(window=16, block=8)
    for step in range(500):
        cache.append(tokens(1, step))
    assert cache.nbytes_used == 16 * BATCH * GROUPS * WIDTH * 4
    assert cache.nbytes_allocated <= (16 + 8) * BATCH * GROUPS * WIDTH * 4


def test_a_long_prompt_does_not_leave_a_sliding_cache_large() -> None:
    cache = LayerCache(window=16, block=8)
    cache.append(tokens(1_000))
    for step in range(40):
        (seen,) = cache.append(tokens(1, 1_000 + step))
    assert torch.equal(seen, tokens(16, 1_024))
    assert cache.nbytes_allocated <= (16 + 2 * 8) * BATCH * GROUPS * WIDTH * 4


def test_refuses_tensors_of_another_kind() -> None:
    cache = LayerCache()
    cache.append(tokens(3))
    for other in ((tokens(1, batch=1),), (tokens(1).double(),), (tokens(1), tokens(1)), (tokens(1)[..., :2],)):
        with pytest.raises(CacheError, match="the cache holds batch 2, heads 3, width 4"):
            cache.append(*other)
    assert torch.equal(cache.tensors[0], tokens(3))
    cache.reset()
    cache.append(tokens(2, batch=1))
    assert cache.tensors[0].shape == (1, GROUPS, 2, WIDTH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_select_repeats_and_reorders_rows(dtype: str | None) -> None:
    cache = LayerCache(dtype=dtype)
    cache.append(tokens(5))
    cache.select(torch.tensor([1, 0, 1]))
    assert_reads(cache.tensors[0], as_stored(cache, tokens(5)[[1, 0, 1]]))
    (seen,) = cache.append(tokens(1, 5)[[1, 0, 1]])
    assert_reads(seen, as_stored(cache, tokens(6)[[1, 0, 1]]))
    addresses = [buffer.data_ptr() for buffer in cache._buffers]
    cache.select(torch.tensor([2, 2, 0]))
    assert_reads(cache.tensors[0], as_stored(cache, tokens(6)[[1, 1, 1]]))
    assert [buffer.data_ptr() for buffer in cache._buffers] == addresses
    with pytest.raises(CacheError, match=r"holds batch 3, .* and was given batch 2"):
        cache.append(tokens(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5])
def test_crop_then_append_equals_never_having_appended(window: int | None, dtype: str | None) -> None:
    cache, straight = (LayerCache(window=window, block=4, dtype=dtype) for _ in range(2))
    cache.append(tokens(9))
    cache.append(tokens(3, 100))
    cache.crop(9)
    straight.append(tokens(9))
    assert_reads(cache.append(tokens(2, 9))[0], straight.append(tokens(2, 9))[0])
    assert cache.num_tokens == straight.num_tokens == 11
    cache.crop(50)
    assert cache.num_tokens == 11


def test_sliding_cache_refuses_to_go_back_further_than_it_remembers() -> None:
    cache = LayerCache(window=4, block=2)
    for step in range(40):
        cache.append(tokens(1, step))
    with pytest.raises(CacheError, match="window 4 cannot go back 30"):
        cache.crop(10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rewind_keeps_what_taking_back_would_show_again(dtype: str | None) -> None:
    """However many steps it took, that many tokens can always go back, and the views are those of the window."""
    cache = LayerCache(window=4, block=2, rewind=10, dtype=dtype)
    for step in range(40):
        (seen,) = cache.append(tokens(1, step))
        assert_reads(seen, as_stored(cache, tokens(min(step + 1, 4), max(0, step - 3))))
    cache.crop(30)
    (seen,) = cache.append(tokens(1, 30))
    assert_reads(seen, as_stored(cache, tokens(4, 27)))
    recent_bytes = 32 * BATCH * GROUPS * WIDTH * 4 if dtype == "int4" else 0
    assert cache.nbytes_allocated <= (4 + 10 + 2) * BATCH * GROUPS * row_bytes(dtype, WIDTH) + recent_bytes


def test_of_a_long_prompt_the_last_32_floats_are_kept() -> None:
    cache = LayerCache(dtype="int4")
    assert_reads(cache.append(tokens(100))[0], as_stored(cache, tokens(100)))
    assert_reads(cache.tensors[0], as_stored(cache, tokens(100), 32))
    (held,) = cache._recent
    assert held.untyped_storage().nbytes() == 32 * BATCH * GROUPS * WIDTH * 4
    assert_reads(cache.append(tokens(3, 100))[0], as_stored(cache, tokens(103), 35))


@pytest.mark.parametrize("dropped", [1, 31, 32, 50])
def test_floats_that_are_taken_back_do_not_come_back_for_older_tokens(dropped: int) -> None:
    cache = LayerCache(dtype="int4")
    cache.append(tokens(100))
    cache.crop(100 - dropped)
    assert_reads(cache.append(tokens(2, 200))[0], as_stored(cache, cropped(dropped), max(0, 32 - dropped) + 2))
    assert cache.nbytes_used == BATCH * GROUPS * (
        (102 - dropped) * row_bytes("int4", WIDTH) + min(32, max(0, 32 - dropped) + 2) * WIDTH * 4
    )


def cropped(num: int) -> torch.Tensor:
    """A hundred tokens without the last few, and two others."""
    return torch.cat((tokens(100 - num), tokens(2, 200)), dim=2)


def test_floats_of_other_dtypes_are_held_as_float32() -> None:
    cache = LayerCache(dtype="int4")
    rows = tokens(40).bfloat16()
    cache.append(rows)
    (seen,) = cache.append(rows[:, :, :1])
    assert isinstance(seen, Quantized)
    assert seen.recent is not None
    assert seen.recent.dtype == torch.float32
    assert torch.equal(seen.recent, torch.cat((rows[:, :, 8:], rows[:, :, :1]), dim=2).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_reset_keeps_the_memory(dtype: str | None) -> None:
    cache = LayerCache(dtype=dtype)
    cache.append(tokens(300))
    allocated = cache.nbytes_allocated
    cache.reset()
    assert (cache.num_tokens, cache.nbytes_used, cache.nbytes_allocated) == (0, 0, allocated)
    assert_reads(cache.append(tokens(2, 7))[0], as_stored(cache, tokens(2, 7)))


def test_int4_refuses_odd_widths() -> None:
    cache = LayerCache(dtype="int4")
    with pytest.raises(CacheError, match="two numbers in a byte and was given rows of 3; use int8"):
        cache.append(tokens(2), tokens(2)[..., :3])
    assert cache.num_tokens == 0
    cache.append(tokens(2), torch.zeros(BATCH, 1, 2, 1, dtype=torch.int32))  # integers are not packed


def test_refuses_unknown_dtypes() -> None:
    with pytest.raises(ConfigError, match="cache dtype 'int44' is unknown; did you mean 'int4'") as caught:
        LayerCache(dtype="int44")
    assert "\n" not in str(caught.value)
