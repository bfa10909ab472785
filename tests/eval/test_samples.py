"""Samples: seeded, streamed as they are returned, and without a trace in the caller's random state."""

import pytest
import torch
from tokenizers import Tokenizer

from tests.tiny_runs import MODEL
from twofold.data import END_OF_TEXT, build_tokenizer
from twofold.eval import sample_text
from twofold.hf import cache_for, to_hf, wrap_tokenizer
from twofold.models import LanguageModel
from twofold.spec import DataConfig, ModelConfig

NUM_NEW = 40


@pytest.fixture(scope="module")
def tokenizer():
    bytes_only: Tokenizer = build_tokenizer(DataConfig(tokenizer="bytes"), [])
    return wrap_tokenizer(bytes_only, 64, END_OF_TEXT)


@pytest.fixture(scope="module")
def model():
    """Random weights: it writes any bytes, most of which are no whole characters."""
    torch.manual_seed(0)
    config = ModelConfig(**{**MODEL, "max_position_embeddings": 64, "initializer_range": 0.5, "sharing": "tied-kv"})
    plain = LanguageModel(config)
    with torch.no_grad():
        plain.decoder.norm.bias.copy_(plain.lm_head.weight[ord(" ")])  # and often a space
    return to_hf(plain, eos_token_id=256).eval()


def test_the_same_seed_gives_the_same_text_and_another_another(model, tokenizer):
    texts = [sample_text(model, tokenizer, "the", max_new_tokens=NUM_NEW, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0]


def test_temperature_zero_takes_the_likeliest_token(model, tokenizer):
    texts = {sample_text(model, tokenizer, "the", max_new_tokens=NUM_NEW, temperature=0.0, seed=s) for s in range(3)}
    tokens = tokenizer("the", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(NUM_NEW):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
            if tokens[0, -1] == 256:
                break
    assert texts == {tokenizer.decode(tokens[0, 3:], skip_special_tokens=True)}


def test_a_quantised_cache_is_used_where_it_is_asked_for(model, tokenizer, monkeypatch):
    asked = []
    make = cache_for
    monkeypatch.setattr("twofold.eval.samples.cache_for", lambda *args: asked.append(make(*args)) or asked[-1])
    sample_text(model, tokenizer, "the", max_new_tokens=NUM_NEW, cache_dtype="int4")
    assert [layer.layer_cache.dtype for layer in asked[0].layers] == ["int4"] * len(asked[0].layers)
    assert asked[0].get_seq_length() > len("the")


def test_top_k_one_is_the_likeliest_token_too(model, tokenizer):
    greedy = sample_text(model, tokenizer, "the", max_new_tokens=NUM_NEW, temperature=0.0)
    assert sample_text(model, tokenizer, "the", max_new_tokens=NUM_NEW, top_k=1) == greedy


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.3, 1.5])
def test_streamed_pieces_are_the_returned_text(seed, temperature, model, tokenizer):
    pieces = []
    options = {"max_new_tokens": NUM_NEW, "temperature": temperature, "top_k": 0, "seed": seed}
    text = sample_text(model, tokenizer, "the sea", **options, on_text=pieces.append)
    assert "".join(pieces) == text
    assert text == sample_text(model, tokenizer, "the sea", **options)


def test_text_arrives_while_it_is_written(model, tokenizer):
    pieces = []
    for seed in range(8):
        sample_text(model, tokenizer, "a", max_new_tokens=NUM_NEW, top_k=0, seed=seed, on_text=pieces.append)
    assert len([piece for piece in pieces if piece]) > 8


def test_the_global_random_state_is_left_alone(model, tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    sample_text(model, tokenizer, "the", max_new_tokens=5, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_global_random_state_does_not_matter(model, tokenizer):
    texts = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        texts.add(sample_text(model, tokenizer, "the", max_new_tokens=NUM_NEW, seed=1))
    assert len(texts) == 1


def test_no_more_tokens_than_asked_for(model, tokenizer):
    text = sample_text(model, tokenizer, "the", max_new_tokens=3, seed=2)
    assert len(text) <= 3
