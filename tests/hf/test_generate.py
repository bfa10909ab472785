"""Every way to generate gives what it gives without a cache."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache, StaticCache, TextStreamer, set_seed

from tests.hf.small import END_OF_TEXT, VARIANTS, VOCABULARY, make_config, make_model, make_tokenizer
from twofold.cache import CacheError, LayerCache
from twofold.hf import CACHE_NAME, TwofoldCacheLayer, cache_for, cache_sizes, wrap_tokenizer
from twofold.kernels import QuantizedLinear, quantize_weights
from twofold.spec import ConfigError, TwofoldError

NEW = 14
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beam": {"num_beams": 3},
    "beam-several": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "chunked-prefill": {"prefill_chunk_size": 3},
}


def prompts(batch=2, length=6):
    torch.manual_seed(3)
    return torch.randint(1, VOCABULARY, (batch, length))


def left_padded_prompts():
    tokens = prompts(3, 8)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, :2] = 0
    tokens[mask == 0] = 0
    return tokens, mask


def generate(model, tokens, **options):
    """Tokens and logits of a run, with a seed, and nothing left to chance."""
    set_seed(5)
    output = model.generate(
        tokens,
        **{
            "max_new_tokens": NEW,
            "min_new_tokens": NEW,
            "pad_token_id": 0,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
            **options,
        },
    )
    return output.sequences, torch.stack(output.logits), output


def assert_same(first, second):
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1], second[1], atol=1e-5, rtol=1e-5)  # generate rounds logits to float32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_no_cache(variant, mode):
    model, tokens = make_model(variant), prompts()
    cached = generate(model, tokens, **MODES[mode])
    without = {name: value for name, value in MODES[mode].items() if name != "prefill_chunk_size"}
    assert_same(cached, generate(model, tokens, use_cache=False, **without))
    assert all(isinstance(layer, TwofoldCacheLayer) for layer in cached[2][CACHE_NAME].layers)


@pytest.mark.parametrize("mode", ["greedy", "several", "beam", "chunked-prefill"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_static_equals_dynamic(variant, mode):
    model, tokens = make_model(variant), prompts()
    static = generate(model, tokens, cache_implementation="static", **MODES[mode])
    assert_same(static, generate(model, tokens, **MODES[mode]))
    assert static[2][CACHE_NAME].get_max_length() >= 6 + NEW - 1


@pytest.mark.parametrize("mode", ["greedy", "beam"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padded_batch_equals_single_runs(variant, mode):
    model = make_model(variant)
    tokens, mask = left_padded_prompts()
    batch = generate(model, tokens, attention_mask=mask, **MODES[mode])
    assert_same(batch, generate(model, tokens, attention_mask=mask, use_cache=False, **MODES[mode]))
    for row in range(3):
        alone, _, _ = generate(model, tokens[row : row + 1, mask[row] == 1], **MODES[mode])
        assert torch.equal(batch[0][row, -NEW:], alone[0, -NEW:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_caches_of_the_user_and_going_on(variant):
    model, tokens = make_model(variant), prompts()
    expected, _, _ = generate(model, tokens)
    config = make_config(variant)
    for cache in (DynamicCache(), DynamicCache(config=config), StaticCache(config=config, max_cache_len=40)):
        first, _, _ = generate(model, tokens, **{CACHE_NAME: cache}, max_new_tokens=6, min_new_tokens=6)
        assert cache.get_seq_length() == 6 + 6 - 1
        second, _, _ = generate(model, first, **{CACHE_NAME: cache}, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(second, expected)


@pytest.mark.parametrize("quantized", [{}, {"cache_implementation": "quantized", "cache_config": {"nbits": 8}}])
def test_the_cache_knows_how_long_the_text_gets_and_goes_on_beyond(quantized, monkeypatch):
    monkeypatch.setattr("twofold.hf.cache.LayerCache", functools.partial(LayerCache, block=2))
    model, tokens = make_model("tied-kv"), prompts()
    expected, _, _ = generate(model, tokens, **quantized)
    first, _, output = generate(model, tokens, max_new_tokens=12, min_new_tokens=12, max_time=0.0, **quantized)
    cache = output[CACHE_NAME]
    used, allocated = cache_sizes(cache)
    assert first.shape[1] == 6 + 1  # stopped after a token, with the memory of
    assert allocated == used // 6 * 18  # 6 + 12 - 1 tokens, in blocks of 2
    second, _, _ = generate(model, first, **{CACHE_NAME: cache}, max_new_tokens=NEW - 1, min_new_tokens=NEW - 1)
    assert torch.equal(second, expected)
    assert cache.get_seq_length() == 6 + NEW - 1 > 18


@pytest.mark.parametrize("variant", VARIANTS)
def test_assisted_decoding_equals_greedy(variant, monkeypatch):
    """With caches that would soon let go of what slides out, were nothing taken back."""
    monkeypatch.setattr("twofold.hf.cache.LayerCache", functools.partial(LayerCache, block=2))
    model, tokens = make_model(variant), prompts(1)
    expected, _, _ = generate(model, tokens)
    unlike = make_model(variant, seed=1)
    like = copy.deepcopy(model)
    with torch.no_grad():
        like.lm_head.weight.add_(torch.randn_like(like.lm_head.weight) * 0.05)
    for options in (
        {"assistant_model": unlike},
        {"assistant_model": like},
        {"assistant_model": copy.deepcopy(model)},
        {"prompt_lookup_num_tokens": 3},
    ):
        got = model.generate(tokens, max_new_tokens=NEW, pad_token_id=0, do_sample=False, **options)
        assert torch.equal(got, expected), options


def test_prefill_computes_one_row_of_logits():
    model, tokens = make_model(), prompts()
    rows = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    generate(model, tokens, max_new_tokens=3, min_new_tokens=3)
    assert rows == [1, 1, 1]


def test_embeddings_as_prompt():
    model, tokens = make_model(), prompts()
    embeddings = model.get_input_embeddings()(tokens)
    got = model.generate(inputs_embeds=embeddings, max_new_tokens=NEW, pad_token_id=0, do_sample=False)
    assert torch.equal(got, generate(model, tokens)[0][:, -NEW:])


def test_streaming(capsys):
    tokenizer = wrap_tokenizer(make_tokenizer(), 96, END_OF_TEXT)
    model = make_model()
    prompt = tokenizer("the cat", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    model.generate(**prompt, max_new_tokens=NEW, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == tokenizer.decode(expected[0, -NEW:]).strip()


def test_beyond_the_learned_positions():
    model, tokens = make_model("qkv"), prompts()
    with pytest.raises(ConfigError, match="lies beyond the 96 learned positions") as caught:
        model.generate(tokens, max_new_tokens=200, pad_token_id=0, eos_token_id=None)
    assert "\n" not in str(caught.value)


def recomputing(model, dtype):
    """The same model, which reads every token from a new quantised cache whenever it runs: `generate` keeps none."""
    model = copy.deepcopy(model)
    forward = model.model.forward
    model.model.forward = lambda **inputs: forward(**{**inputs, "cache": cache_for(model, dtype)})
    return model


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("mode", ["greedy", "beam-several", "chunked-prefill"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_equals_recomputing_everything(variant, mode, dtype):
    model, tokens = make_model(variant), prompts()
    cached = generate(model, tokens, **{CACHE_NAME: cache_for(model, dtype)}, **MODES[mode])
    without = {name: value for name, value in MODES[mode].items() if name != "prefill_chunk_size"}
    assert_same(cached, generate(recomputing(model, dtype), tokens, use_cache=False, **without))
    assert all(layer.layer_cache.dtype == dtype for layer in cached[2][CACHE_NAME].layers)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_with_left_padding_and_beams(variant, dtype):
    model = make_model(variant)
    tokens, mask = left_padded_prompts()
    options = {"attention_mask": mask, "num_beams": 3}
    batch = generate(model, tokens, **{CACHE_NAME: cache_for(model, dtype)}, **options)
    assert_same(batch, generate(recomputing(model, dtype), tokens, use_cache=False, **options))


@pytest.mark.parametrize(("options", "dtype"), [({}, "int4"), ({"nbits": 4}, "int4"), ({"nbits": 8}, "int8")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_quantized_cache_of_transformers_is_ours(variant, options, dtype):
    """Without any backend; `cache_config` may be left out, and is not used up."""
    model, tokens = make_model(variant), prompts()
    config = {"cache_config": dict(options)} if options else {}
    got = generate(model, tokens, cache_implementation="quantized", **config)
    assert_same(got, generate(model, tokens, **{CACHE_NAME: cache_for(model, dtype)}))
    assert [layer.layer_cache.dtype for layer in got[2][CACHE_NAME].layers] == [dtype] * len(got[2][CACHE_NAME].layers)
    assert config.get("cache_config", {}) == options


@pytest.mark.parametrize(
    "options",
    [
        {"nbits": 2},
        {"nbits": 4, "backend": "quanto"},
        {"q_group_size": 64},
        {"nbits": 8, "axis_key": 0},
        {"residual_length": 128},
    ],
)
def test_options_of_backends_are_refused(options):
    with pytest.raises(CacheError, match=r"takes nbits=4 or nbits=8 .* and nothing else; got ") as caught:
        make_model().generate(
            prompts(), max_new_tokens=3, cache_implementation="quantized", cache_config=options, pad_token_id=0
        )
    assert "\n" not in str(caught.value)
    assert all(f"{name}={value!r}" in str(caught.value) for name, value in options.items())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_caches_are_gone_on_with(variant, dtype):
    """Growing and fixed; the second call goes on from the cache that the first one left."""
    model, tokens = make_model(variant), prompts()
    expected, _, _ = generate(model, tokens, **{CACHE_NAME: cache_for(model, dtype)})
    for cache in (cache_for(model, dtype), cache_for(model, dtype, capacity=40)):
        first, _, _ = generate(model, tokens, **{CACHE_NAME: cache}, max_new_tokens=6, min_new_tokens=6)
        second, _, _ = generate(model, first, **{CACHE_NAME: cache}, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(second, expected)
        assert cache.get_max_length() in (-1, 40)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_quantised_assisted_decoding_equals_greedy(variant, dtype, monkeypatch):
    """Candidates are taken back from quantised layers too, sliding ones that would soon let go among them."""
    monkeypatch.setattr("twofold.hf.cache.LayerCache", functools.partial(LayerCache, block=2))
    model, tokens = make_model(variant), prompts(1)
    expected, _, _ = generate(model, tokens, **{CACHE_NAME: cache_for(model, dtype)})
    quantized = {"cache_implementation": "quantized", "cache_config": {"nbits": int(dtype[3:])}}
    for options in (
        {"assistant_model": make_model(variant, seed=1), CACHE_NAME: cache_for(model, dtype)},
        {"prompt_lookup_num_tokens": 3, CACHE_NAME: cache_for(model, dtype)},
        {"assistant_model": copy.deepcopy(model), **quantized},
    ):
        got = model.generate(tokens, max_new_tokens=NEW, pad_token_id=0, do_sample=False, **options)
        assert torch.equal(got, expected), options


def test_continuous_batching_is_refused():
    with pytest.raises(TwofoldError, match="use generate"):
        make_model().generate_batch(prompts().tolist())


def test_sliding_cache_stays_small():
    """The window bounds what the tokens need, however long the text."""
    model = make_model("window")
    _, _, output = generate(model, prompts(1), max_new_tokens=40, min_new_tokens=40)
    assert cache_sizes(output[CACHE_NAME])[0] == 2 * 4 * 4 * 8 * 8  # layers, window, heads, head dim, bytes


@torch.no_grad()
def with_int8_weights(model):
    """The model with int8 weights, and one of floats that are exactly what the integers stand for."""
    narrow = quantize_weights(copy.deepcopy(model))
    for name, layer in narrow.named_modules():
        if isinstance(layer, QuantizedLinear):
            model.get_submodule(name).weight.copy_(layer.weight * layer.scale.double()[:, None])
    return narrow, model


@pytest.mark.parametrize("mode", ["greedy", "beam"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_weights_equal_what_they_stand_for(variant, mode):
    model, tokens = make_model(variant), prompts()
    model.fold_queries()
    narrow, floats = with_int8_weights(model)
    cached = generate(narrow, tokens, **MODES[mode])
    assert_same(cached, generate(floats, tokens, **MODES[mode]))
    assert_same(cached, generate(narrow, tokens, use_cache=False, **MODES[mode]))


def test_int8_weights_with_an_int8_cache_and_left_padding():
    """In float32, where the kernel does it."""
    tokens, mask = left_padded_prompts()
    models = with_int8_weights(make_model("relative", hidden_size=64, intermediate_size=128).float())
    narrow, floats = (
        generate(model, tokens, attention_mask=mask, **{CACHE_NAME: cache_for(model, "int8")})[1] for model in models
    )
    assert (narrow[:2] - floats[:2]).abs().max() < 0.02 * floats.abs().max()  # a rounding may tip in the cache


def test_queries_are_folded_before_weights_become_int8():
    with pytest.raises(ConfigError, match="fold the queries before the weights become int8"):
        quantize_weights(make_model("normed")).fold_queries()
