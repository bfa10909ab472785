"""Memory of caches: large pages where it will be used, and the same numbers in either."""

import mmap

import pytest
import torch

from twofold.cache import LayerCache, memory

ROW = torch.zeros(1, 8, 1, 64)  # 2 KiB a token


@pytest.fixture
def asked(monkeypatch):
    """Sizes of the mappings for which large pages were asked."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no large pages")
    sizes = []

    class Mapping(mmap.mmap):
        def madvise(self, advice):
            assert advice == mmap.MADV_HUGEPAGE
            sizes.append(len(self))

    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    return sizes


def test_long_prompts_and_what_grows_after_them_lie_in_large_pages(asked):
    cache = LayerCache()
    tokens = torch.randn(1, 8, 4_000, 64)
    (stored,) = cache.append(tokens)
    assert asked == [cache.nbytes_allocated] == [4_096 * 2_048]
    assert torch.equal(stored, tokens)
    for _ in range(97):
        (stored,) = cache.append(ROW + 1)
    assert asked[1:] == [cache.nbytes_allocated] == [4_352 * 2_048]
    assert torch.equal(stored[:, :, :4_000], tokens)
    assert stored[:, :, 4_000:].eq(1).all()


def test_what_may_stay_empty_does_not(asked):
    """Large pages are taken whole: with a little in each head of a long cache they would be many."""
    cache = LayerCache()
    cache.expected_tokens = 10_000
    cache.append(ROW.expand(-1, -1, 100, -1))
    assert cache.nbytes_allocated > 8 * 2**20
    LayerCache(capacity=10_000).append(ROW.expand(-1, -1, 100, -1))
    LayerCache().append(ROW.expand(-1, -1, 1_000, -1))  # 2 MiB
    assert asked == []


def test_a_system_that_has_none_is_no_obstacle(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, _):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Refusing)
    tokens = torch.randn(1, 8, 4_000, 64)
    assert torch.equal(LayerCache().append(tokens)[0], tokens)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(LayerCache().append(tokens)[0], tokens)
