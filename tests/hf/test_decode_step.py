"""What one decoding step takes: no memory that grows with the context."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.hf.small import VARIANTS, VOCABULARY, make_config
from twofold.cache import LayerCache
from twofold.hf import CACHE_NAME, TwofoldForCausalLM, cache_for
from twofold.kernels import VARIABLE, native

CAPACITY = 2_000


class Allocations(TorchDispatchMode):
    """Notes the bytes of every tensor that an operation makes anew; views and what is written in place are not new."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else (result,)
        for output, returned in zip(outputs, func._schema.returns, strict=False):
            if isinstance(output, torch.Tensor) and returned.alias_info is None:
                self.bytes.append(output.untyped_storage().nbytes())
        return result


def step_allocations(model, context, mask, dtype=None):
    """Bytes of each tensor that a step after `context` tokens makes, with all memory of the cache taken before."""
    cache = cache_for(model, dtype, capacity=CAPACITY)
    tokens = torch.arange(2 * (context + 1)).view(2, -1) % model.config.vocab_size
    attention_mask = torch.ones_like(tokens) if mask else None
    with torch.no_grad():
        model(tokens[:, :-1], attention_mask=attention_mask[:, :-1] if mask else None, **{CACHE_NAME: cache})
        with Allocations() as made:
            model(tokens[:, -1:], attention_mask=attention_mask, **{CACHE_NAME: cache})
    return made.bytes


def make_model(variant):
    """A model as wide as the kernel's vectors need it: heads of 16 channels, rotary parts of 16."""
    rotary = {"qk_rope_head_dim": 16} if variant == "decoupled" else {}
    torch.manual_seed(0)
    return TwofoldForCausalLM(make_config(variant, hidden_size=64, max_position_embeddings=CAPACITY, **rotary)).eval()


@pytest.mark.skipif(native.load_library() is None, reason="the kernel was not compiled")
@pytest.mark.parametrize("dtype", [None, "int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_makes_nothing_that_grows_with_the_context(variant, dtype):
    model = make_model(variant)
    for mask in (False, True):  # generate passes one
        short, long = (step_allocations(model, context, mask, dtype) for context in (300, 1_500))
        assert len(short) > 30
        assert short == long


@pytest.mark.skipif(native.load_library() is None, reason="the kernel was not compiled")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_implementation_generates_the_same_from_a_quantised_cache(variant, dtype, monkeypatch):
    """Long enough for an int4 cache to read tokens as floats and others as integers, one row shorter than the other."""
    model = make_model(variant)
    tokens = torch.arange(1, 81).view(2, -1) % VOCABULARY
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    found, attend, calls = {}, native.attend, []
    monkeypatch.setattr(native, "attend", lambda *args: (calls.append(args[1]), attend(*args))[1])
    for name in ("native", "torch"):
        monkeypatch.setenv(VARIABLE, name)
        options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        found[name] = model.generate(tokens, **options, **{CACHE_NAME: cache_for(model, dtype)})
    assert torch.equal(found["native"], found["torch"])
    assert len(calls) == 23 * model.config.num_hidden_layers
    assert all((stored.recent is not None) is (dtype == "int4") for stored in calls)


def test_what_grows_is_seen(monkeypatch):
    """Torch's attention makes floats of an int8 cache, which the test above would notice."""
    monkeypatch.setenv(VARIABLE, "torch")
    model = make_model("tied-kv")
    assert max(step_allocations(model, 1_500, False, "int8")) > max(step_allocations(model, 300, False, "int8"))


def test_a_growing_cache_moves_once_in_a_block():
    cache = LayerCache(block=256)
    row = torch.zeros(1, 2, 1, 16)
    with Allocations() as made:
        for _ in range(1_000):
            cache.append(row)
    whole = [size for size in made.bytes if size >= 256 * row.nbytes]
    assert whole == [256 * row.nbytes * blocks for blocks in (1, 2, 3, 4)]
