"""What the decoder does beside attending: positions by default, limits, the number of logits, initial weights."""

import pytest
import torch

from tests.tolerances import ABSOLUTE
from twofold.models import LanguageModel, next_token_loss
from twofold.spec import ConfigError, ModelConfig, preset

TOKENS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


def make_model(**changes) -> LanguageModel:
    fields = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**{**fields, "max_position_embeddings": 9, **changes})).double().eval()


@pytest.mark.parametrize(
    ("padding", "documents", "positions"),
    [
        (None, None, [[0, 1, 2, 3, 4, 5, 6, 7, 8]]),
        ([[0, 0, 0, 1, 1, 1, 1, 1, 1]], None, [[0, 0, 0, 0, 1, 2, 3, 4, 5]]),
        (None, [[7, 7, 7, 8, 8, 3, 3, 3, 3]], [[0, 1, 2, 0, 1, 0, 1, 2, 3]]),
        ([[0, 0, 1, 1, 1, 1, 1, 1, 1]], [[0, 0, 0, 0, 0, 1, 1, 1, 1]], [[0, 0, 0, 1, 2, 0, 1, 2, 3]]),
    ],
)
def test_positions_are_counted_over_the_real_tokens_of_each_document(padding, documents, positions):
    model = make_model()
    given = {
        "padding": None if padding is None else torch.tensor(padding, dtype=torch.bool).expand(2, -1),
        "documents": None if documents is None else torch.tensor(documents).expand(2, -1),
    }
    expected = model(TOKENS, positions=torch.tensor(positions).expand(2, -1), **given)
    torch.testing.assert_close(model(TOKENS, **given), expected, rtol=0, atol=0)
    cache = model.decoder.make_cache()
    parts = []
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        seen = {name: value if value is None else value[:, :stop] for name, value in given.items()}
        parts.append(model(TOKENS[:, start:stop], cache=cache, **seen))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=ABSOLUTE[torch.float64])


def test_learned_positions_end_where_they_end():
    model = make_model(max_position_embeddings=5)
    model(TOKENS[:, :5])
    with pytest.raises(ConfigError, match="position 5 lies beyond the 5 learned positions"):
        model(TOKENS[:, :6])


def test_logits_of_the_last_tokens_only():
    model = make_model()
    torch.testing.assert_close(model(TOKENS, num_logits=2), model(TOKENS)[:, -2:], rtol=0, atol=ABSOLUTE[torch.float64])


def test_folded_queries_give_the_same_model():
    model = make_model(query_depth=2, sharing="tied-kv")
    before = model(TOKENS)
    model.fold_queries()
    assert model.config == model.decoder.config == make_model(sharing="tied-kv").config
    torch.testing.assert_close(model(TOKENS), before, rtol=0, atol=ABSOLUTE[torch.float64])
    make_model(sharing="tied-kv").load_state_dict(model.state_dict())


def test_a_cache_needs_a_causal_model():
    model = make_model(causal=False)
    with pytest.raises(ConfigError, match="a cache needs causal: true"):
        model(TOKENS, cache=model.decoder.make_cache())


def test_weights_start_as_the_config_says():
    """Within five standard errors; the matrices that write to the residual stream start smaller."""
    model = LanguageModel(preset("gpt-tiny", initializer_range=0.05, query_depth=2, qk_norm=True))
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            expected = 1.0 if "norm" in name and not name.endswith("bias") else 0.0
            assert torch.equal(parameter, torch.full_like(parameter, expected)), name
            continue
        std = 0.05 / 8**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
        assert parameter.std().item() == pytest.approx(std, rel=5 / (2 * parameter.numel()) ** 0.5), name


def test_loss_counts_real_targets_only():
    model = make_model()
    labels = TOKENS.clone()
    labels[0, 3:] = -100
    batch = {"input_ids": TOKENS, "positions": torch.arange(9).expand(2, -1), "document_ids": torch.zeros(2, 9).long()}
    loss, targets = next_token_loss(model, labels=labels, **batch)
    log_probabilities = model(TOKENS).log_softmax(dim=-1).gather(2, TOKENS[:, :, None])[:, :, 0]
    assert targets == 12
    assert loss.item() == pytest.approx(-(log_probabilities[0, :3].sum() + log_probabilities[1].sum()).item())
