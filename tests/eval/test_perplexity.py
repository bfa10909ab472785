"""Perplexity against a slow computation, one target at a time."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.tiny_runs import MODEL, make_documents, prepare
from twofold.data import PackedSequences
from twofold.eval import measure_perplexity
from twofold.models import LanguageModel
from twofold.spec import ModelConfig

VARIANTS = {
    "qkv": {},
    "tied-qk": {"sharing": "tied-qk"},
    "q-mqa": {"sharing": "tied-kv", "num_key_value_heads": 1},
    "relative": {"sharing": "tied-kv", "positions": "rope"},
}


def make_model(**options):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**{**MODEL, "initializer_range": 0.4, **options})).double()


@pytest.fixture
def sequences(tmp_path):
    """A split whose documents begin and end anywhere in its sequences, the last one padded."""
    split = prepare(tmp_path, make_documents(10, longest=6), validation_fraction=0.4).validation
    sequences = PackedSequences(split, 16, keep_partial=True)
    assert split.num_tokens % 16 > 1
    assert split.num_documents > 2
    return sequences


def slow_losses(module, sequences):
    """The loss of each target in its document's tokens of the same sequence, in NumPy."""
    tokens = sequences.token_file.tokens().tolist()
    starts = set(sequences.token_file.document_starts().tolist())
    losses = {}
    begin = 0
    for index in range(len(tokens) - 1):
        if index in starts or index % sequences.sequence_length == 0:
            begin = index
        if index + 1 in starts:
            continue  # an end of text, which is followed by nothing
        with torch.no_grad():
            logits = module(torch.tensor([tokens[begin : index + 1]]))[0, -1].numpy()
        shifted = logits - logits.max()
        losses[index + 1] = float(np.log(np.exp(shifted).sum()) - shifted[tokens[index + 1]])
    return losses


@pytest.mark.parametrize("variant", VARIANTS)
def test_figures_equal_a_computation_by_hand(variant, sequences):
    module = make_model(**VARIANTS[variant])
    losses = slow_losses(module, sequences)
    found = measure_perplexity(module, sequences, batch_size=3)
    split = sequences.token_file
    assert found.tokens == len(losses) == split.num_tokens - split.num_documents  # each target once, and no padding
    assert found.loss == pytest.approx(sum(losses.values()) / len(losses), rel=1e-10)
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-12)
    assert found.bytes == split.num_bytes
    assert found.bits_per_byte == pytest.approx(sum(losses.values()) / math.log(2) / split.num_bytes, rel=1e-10)
    assert found.to_dict() == {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.tokens,
        "bytes": found.bytes,
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_through_a_cache(variant, sequences, monkeypatch):
    """Of floats it changes nothing; of integers as much as each token's own pass through such a cache does.

    Tokens go one by one: with one float, not 32, an int4 cache shows its integers in sequences as short as these.
    """
    monkeypatch.setattr("twofold.cache.layer_cache.RECENT_TOKENS", 1)
    module = make_model(**VARIANTS[variant])
    without = measure_perplexity(module, sequences, 3)
    found = {
        dtype: measure_perplexity(module, sequences, 3, make_cache=partial(module.decoder.make_cache, dtype=dtype))
        for dtype in (None, "int8", "int4")
    }
    assert found[None].loss == pytest.approx(without.loss, rel=1e-12)
    assert 0 < abs(found["int8"].loss / without.loss - 1) < 0.01
    assert abs(found["int8"].loss / without.loss - 1) < abs(found["int4"].loss / without.loss - 1) < 0.1
    assert found["int4"].tokens == without.tokens
    quantised = slow_losses(partial(through_a_cache, module), sequences)
    assert found["int8"].loss == pytest.approx(sum(quantised.values()) / len(quantised), rel=1e-9)


def through_a_cache(module, tokens):
    return module(tokens, cache=module.decoder.make_cache(dtype="int8"))


def test_bytes_are_those_of_the_text(tmp_path):
    documents = [f"dé {number}" for number in range(5)]
    split = prepare(tmp_path, documents, validation_fraction=0.4).validation
    found = measure_perplexity(make_model(), PackedSequences(split, 16, keep_partial=True), 2)
    assert found.bytes == split.num_documents * 5  # é is two bytes


@pytest.mark.parametrize("batch_size", [1, 2, 5, 1_000])
def test_the_batch_size_does_not_matter(batch_size, sequences):
    module = make_model()
    expected = measure_perplexity(module, sequences, batch_size=3)
    found = measure_perplexity(module, sequences, batch_size=batch_size)
    assert found.tokens == expected.tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_put_back(training, sequences):
    module = make_model(hidden_dropout=0.5).train(training)
    plain = make_model()
    assert measure_perplexity(module, sequences, 4).loss == measure_perplexity(plain, sequences, 4).loss
    assert module.training is training
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_model_that_knows_nothing_is_as_uncertain_as_its_vocabulary(sequences):
    found = measure_perplexity(make_model(initializer_range=1e-9), sequences, 4)
    assert found.perplexity == pytest.approx(257, rel=1e-6)


def test_a_hopeless_model_has_infinite_perplexity_and_a_finite_loss(sequences):
    module = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        module.lm_head.weight.mul_(1e5)
    found = measure_perplexity(module, sequences, 4)
    assert found.perplexity == math.inf
    assert 700 < found.loss < math.inf
