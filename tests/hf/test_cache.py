"""Transformers' caches hold our layers, and say what generation asks of them."""

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import Cache

from tests.hf.small import VARIANTS, VOCABULARY, make_config, make_model
from twofold.cache import CacheError, LayerCache
from twofold.cost import cache_bytes
from twofold.hf import CACHE_NAME, TwofoldCacheLayer, adopt_cache, cache_for, cache_sizes
from twofold.spec import ConfigError

TOKENS = torch.arange(10).reshape(2, 5)


DTYPES = (None, "int8", "int4")


def filled(variant="tied-kv", cache=None, tokens=TOKENS, dtype=None):
    model = make_model(variant)
    if cache is None:
        cache = DynamicCache() if dtype is None else cache_for(model, dtype)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    return model, cache


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_plain_cache_is_adopted_in_place(variant):
    config = make_config(variant)
    for cache in (DynamicCache(), DynamicCache(config=config), StaticCache(config=config, max_cache_len=9)):
        filled(variant, cache)
        assert all(type(layer) is TwofoldCacheLayer for layer in cache.layers)
        assert len(cache.layers) == config.num_hidden_layers
        assert cache.get_seq_length() == 5
        assert cache.get_max_length() == (9 if isinstance(cache, StaticCache) else -1)
        assert cache.batch_size == 2
        assert not cache.is_compileable
        assert cache.is_croppable


def test_tied_cache_is_half_the_bytes():
    """Measured on the memory that the tensors hold, in caches that Transformers made."""
    sizes = {}
    for variant in ("qkv", "tied-kv"):
        output = make_model(variant).generate(TOKENS, max_new_tokens=20, return_dict_in_generate=True, pad_token_id=0)
        cache = output[CACHE_NAME]
        stored = {
            tensor.data_ptr(): tensor for layer in cache.layers for tensor in (layer.keys, layer.values)
        }  # by address, so that one memory counts once
        used = sum(tensor.nbytes for tensor in stored.values())
        allocated = sum(tensor.untyped_storage().nbytes() for tensor in stored.values())
        assert cache_sizes(cache) == (used, allocated)
        sizes[variant] = used, allocated
    assert sizes["qkv"] == (2 * sizes["tied-kv"][0], 2 * sizes["tied-kv"][1])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_caches_have_the_size_of_the_formula(variant, dtype):
    model, cache = filled(variant, dtype=dtype)
    used, allocated = cache_sizes(cache)
    assert used == cache_bytes(model.config.spec, 5, dtype, batch_size=2).total
    assert used <= allocated
    assert cache.layers[0].keys.dtype == (torch.int8 if dtype == "int8" else torch.uint8)
    assert cache.layers[0].keys.shape[:3] == cache.layers[0].values.shape[:3] == (2, cache.layers[0].keys.shape[1], 5)
    assert (cache.layers[0].keys.data_ptr() == cache.layers[0].values.data_ptr()) == (
        model.config.spec.layer_sharing(0).num_cached_tensors == 1
    )


def test_cache_for_takes_memory_at_once_and_twofold_models_only():
    model = make_model("tied-kv")
    cache = cache_for(model, "int8", capacity=7)
    filled("tied-kv", cache)
    assert cache_sizes(cache)[1] == 2 * 2 * 4 * 7 * (8 + 4)  # layers, batch, heads, tokens, head dim and scale
    with torch.no_grad(), pytest.raises(CacheError, match="holds 7 tokens and was given 8"):
        model(TOKENS[:, :3], past_key_values=cache)
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        cache_for(model, "int88")
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(CacheError, match="for twofold models; got a LlamaForCausalLM"):
        cache_for(llama, "int8")


def test_static_cache_takes_its_memory_once():
    config = make_config("tied-kv")
    cache = StaticCache(config=config, max_cache_len=7)
    model, _ = filled("tied-kv", cache)
    before = [layer.keys.untyped_storage().data_ptr() for layer in cache.layers]
    assert cache_sizes(cache)[1] == 2 * 2 * 4 * 7 * 8 * 8  # layers, batch, heads, tokens, head dim, bytes
    with torch.no_grad():
        model(TOKENS[:, :2], past_key_values=cache)
        assert [layer.keys.untyped_storage().data_ptr() for layer in cache.layers] == before
        with pytest.raises(CacheError, match="holds 7 tokens and was given 8"):
            model(TOKENS[:, :1], past_key_values=cache)


def test_values_are_keys_where_tied():
    _, cache = filled("tied-kv")
    assert cache.layers[0].keys.data_ptr() == cache.layers[0].values.data_ptr()
    _, cache = filled("unrotated")
    assert cache.layers[0].values.shape == cache.layers[0].keys.shape  # not the positions, which are stored second
    _, cache = filled("qkv")
    assert cache.layers[0].keys.data_ptr() != cache.layers[0].values.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_operations_move_every_tensor(variant, dtype):
    """Continuing in the new order gives what the new order gives from the start."""
    model, cache = filled(variant, dtype=dtype)
    cache.batch_repeat_interleave(3)  # 0 0 0 1 1 1
    cache.reorder_cache(torch.tensor([5, 0, 1, 3, 2, 4]))  # 1 0 0 1 0 1
    cache.batch_select_indices(torch.tensor([0, 1, 3, 4]))  # 1 0 1 0
    cache.batch_select_indices(torch.tensor([True, True, False, True]))  # 1 0 0
    rows = torch.tensor([1, 0, 0])
    following = torch.arange(3).reshape(3, 1)
    with torch.no_grad():
        got = model(following, past_key_values=cache).logits
        anew = {CACHE_NAME: cache_for(model, dtype)}
        expected = model(torch.cat((TOKENS[rows], following), dim=1), **anew).logits[:, -1:]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_crop_and_go_on(variant, dtype):
    model, cache = filled(variant, dtype=dtype)
    cache.crop(-2)
    assert cache.get_seq_length() == 3
    with torch.no_grad():
        got = model(TOKENS[:, 3:], past_key_values=cache).logits
        torch.testing.assert_close(got, model(TOKENS, **{CACHE_NAME: cache_for(model, dtype)}).logits[:, 3:])
    with pytest.raises(CacheError, match="negative"):
        cache.crop(3)


def test_reset_keeps_the_memory_and_forgets_the_tokens():
    model, cache = filled()
    _, allocated = cache_sizes(cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache_sizes(cache) == (0, allocated)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, past_key_values=cache).logits, model(TOKENS).logits)


def test_copies_are_independent():
    """A prompt's cache is filled once and copied for each of many continuations."""
    model, cache = filled("mixed")
    copied = copy.deepcopy(cache)
    following = torch.tensor([[7], [8]])
    with torch.no_grad():
        model(torch.tensor([[1], [2]]), past_key_values=cache)
        got = model(following, past_key_values=copied).logits
        torch.testing.assert_close(got, model(torch.cat((TOKENS, following), dim=1)).logits[:, -1:])


def test_sliding_layers_keep_what_may_be_taken_back():
    def layer():
        return TwofoldCacheLayer(LayerCache(window=3, block=2), num_cached_tensors=1)

    def append(target, start, stop):
        for token in range(start, stop):
            target.layer_cache.append(torch.full((1, 1, 1, 1), float(token)))

    forgetful, recording = layer(), layer()
    append(forgetful, 0, 12)
    with pytest.raises(CacheError, match="cannot go back"):
        forgetful.crop(-8)
    recording.activate_past_recording()
    assert recording.record_past
    append(recording, 0, 12)
    recording.crop(-8)
    assert recording.keys[..., -2:, :].flatten().tolist() == [2, 3]  # the next token sees these
    assert recording.get_seq_length() == 4
    append(recording, 4, 12)
    assert recording.layer_cache.nbytes_used == 3 * 4  # what the window needs, whatever is kept besides
    recording.crop(-1)
    assert recording.keys[..., -2:, :].flatten().tolist() == [9, 10]
    assert recording.get_seq_length() == 11
    recording.reset()
    recording.record_past = False
    append(recording, 0, 9)
    assert recording.get_mask_sizes(1) == (3, 7)


def test_caches_that_cannot_be_honoured():
    model = make_model()
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
        )
    )
    of_llama = DynamicCache()
    llama(TOKENS, **{CACHE_NAME: of_llama})
    quantized = Cache(layers=[type("QuantizedLayer", (), {})()])  # the real one needs a package of its own
    _, of_other = filled("qkv")
    offloading = DynamicCache()
    offloading.offloading = True  # the constructor needs an accelerator's stream
    for cache, message in (
        (of_llama, "holds tokens that another model"),
        (((TOKENS, TOKENS),), "got tuple"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
        (quantized, "QuantizedLayer"),
        (DynamicCache(config=LlamaConfig(num_hidden_layers=5)), "has 5 layers and the model 2"),
        (of_other, "other layers"),
        (offloading, "does not offload"),
    ):
        with pytest.raises(CacheError, match=message) as caught:
            adopt_cache(cache, model.config.spec)
        assert "\n" not in str(caught.value)
    with pytest.raises(CacheError, match="only a cache that a twofold model has filled"):
        cache_sizes(DynamicCache())
    with pytest.raises(CacheError, match="do not update"):
        of_other.update(torch.ones(1), torch.ones(1), 0)
