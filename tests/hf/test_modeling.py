"""The forward pass: masks, positions, caches, losses, and what it refuses."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from tests.hf.small import VARIANTS, VOCABULARY, make_config, make_model, make_plain
from tests.tolerances import ABSOLUTE
from twofold.hf import CACHE_NAME, TwofoldForCausalLM, TwofoldModel, to_hf
from twofold.models import LanguageModel
from twofold.spec import ConfigError, DataError, TwofoldError, preset


def tokens(batch=2, length=7):
    torch.manual_seed(2)
    return torch.randint(VOCABULARY, (batch, length))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_plain_module(variant):
    plain = make_plain(variant)
    wrapped = to_hf(plain)
    with torch.no_grad():
        expected = plain(tokens())
        torch.testing.assert_close(wrapped(tokens()).logits, expected, rtol=0, atol=0)
        hidden = wrapped.model(tokens()).last_hidden_state
        torch.testing.assert_close(hidden, plain.decoder(tokens()), rtol=0, atol=0)


def test_wrapping_shares_weights_and_mode():
    plain = make_plain().train()
    wrapped = to_hf(plain)
    assert {id(parameter) for parameter in plain.parameters()} == {id(p) for p in wrapped.parameters()}
    assert wrapped.training
    assert wrapped.lm_head.weight is wrapped.get_input_embeddings().weight
    assert wrapped.config.spec == plain.config
    assert all(buffer.device.type != "meta" for buffer in (*wrapped.parameters(), *wrapped.buffers()))


def test_weights_start_as_in_the_plain_module():
    """The same spread for every matrix, so that a study need not care who made the model."""
    spec = preset("llama-tiny", sharing="Q-K=V", rope_mode="decoupled")
    theirs = AutoModelForCausalLM.from_config(to_hf(LanguageModel(spec)).config)
    assert type(theirs) is TwofoldForCausalLM
    ours = dict(to_hf(LanguageModel(spec)).named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(ours[name].std().item(), rel=0.1), name
        else:
            assert torch.equal(parameter, ours[name]), name


def test_auto_classes_know_it():
    assert type(AutoModel.from_config(make_config())) is TwofoldModel
    assert type(AutoModelForCausalLM.from_config(make_config())) is TwofoldForCausalLM


@pytest.mark.parametrize("as_bool", [True, False])
@pytest.mark.parametrize("variant", ["qkv-rope", "relative", "unrotated", "decoupled", "tied-qkv", "window", "mixed"])
def test_whole_masks(variant, as_bool):
    """A causal mask with left padding, given whole, is the same as the padding, given alone."""
    model, ids = make_model(variant), tokens()
    real = torch.ones_like(ids)
    real[0, :3] = 0
    sees = torch.ones(7, 7).tril().bool() & real[:, None, None, :].bool() | torch.eye(7).bool()
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    mask = sees if as_bool else torch.zeros(2, 1, 7, 7).masked_fill(~sees, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=real).logits
        got = model(ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(got[real == 1], expected[real == 1])
        first = model(ids[:, :4], attention_mask=mask[..., :4, :4], position_ids=positions[:, :4], use_cache=True)
        rest = model(
            ids[:, 4:], attention_mask=mask[..., 4:, :], position_ids=positions[:, 4:], cache=first[CACHE_NAME]
        )
    torch.testing.assert_close(rest.logits, expected[:, 4:])


def test_positions_that_start_anew_are_documents():
    """As packed training batches say it: positions, and no mask."""
    model, ids = make_model("window"), tokens(1, 9)
    with torch.no_grad():
        packed = model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]))
        alone = [model(part).logits for part in ids.split((4, 3, 2), dim=1)]
    torch.testing.assert_close(packed.logits, torch.cat(alone, dim=1))
    assert packed.get(CACHE_NAME) is None  # a later token could not tell the documents apart


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 3), "covers 3 tokens, but 4 are cached and 3 are new; it must cover all 7"),
        (torch.ones(2, 9), "covers 9 tokens"),
        (torch.ones(3, 7), "has 3 rows for a batch of 2"),
        (torch.ones(2, 7, 7), "must have 2 dimensions"),
        (torch.ones(2, 1, 7, 7), "must be .2 or 1, heads or 1, 3, 7."),
        (torch.ones(2, 1, 3, 7, dtype=torch.long), "must be boolean"),
    ],
)
def test_masks_that_do_not_fit(mask, message):
    model = make_model()
    cache = model(tokens(length=4), use_cache=True)[CACHE_NAME]
    with pytest.raises(DataError, match=message) as caught:
        model(tokens(length=3), attention_mask=mask, cache=cache)
    assert "\n" not in str(caught.value)


def test_both_names_of_the_cache():
    model = make_model()
    with torch.no_grad():
        expected = model(tokens()).logits[:, -1:]
        for name in ("cache", "past_key_values"):
            made = model(tokens()[:, :-1])[CACHE_NAME]
            torch.testing.assert_close(model(tokens()[:, -1:], **{name: made}).logits, expected)
        with pytest.raises(TwofoldError, match="not both"):
            model(tokens(), cache=made, past_key_values=made)


def test_when_a_cache_is_made():
    model = make_model()
    assert model(tokens())[CACHE_NAME] is not None
    assert model(tokens(), use_cache=False).get(CACHE_NAME) is None
    model.config.use_cache = False
    assert model(tokens()).get(CACHE_NAME) is None
    model.config.use_cache = True
    assert model.train()(tokens()).get(CACHE_NAME) is None


def test_logits_to_keep():
    model = make_model()
    with torch.no_grad():
        whole = model(tokens()).logits
        torch.testing.assert_close(model(tokens(), logits_to_keep=2).logits, whole[:, -2:])
        chosen = torch.tensor([0, 3])
        torch.testing.assert_close(model(tokens(), logits_to_keep=chosen).logits, whole[:, chosen])


def test_loss():
    model, ids = make_model(), tokens()
    labels = ids.clone()
    labels[0, :3] = -100
    output = model(ids, labels=labels)
    targets = labels[:, 1:].flatten()
    logits = output.logits[:, :-1].flatten(0, 1).float()  # Transformers computes losses in float32
    expected = torch.nn.functional.cross_entropy(logits, targets)
    assert output.loss.item() == pytest.approx(expected.item(), abs=ABSOLUTE[torch.float32])
    summed = model(ids, labels=labels, num_items_in_batch=torch.tensor(5)).loss
    count = (targets != -100).sum().item()
    assert summed.item() == pytest.approx(expected.item() * count / 5, abs=1e-4)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tuples():
    model = make_model()
    loss, logits, *_ = model(tokens(), labels=tokens(), return_dict=False)
    torch.testing.assert_close(logits, model(tokens()).logits)
    assert loss.ndim == 0
    assert isinstance(model.model(tokens(), return_dict=False), tuple)


def test_hidden_states():
    model = make_model("mixed")
    output = model(tokens(), output_hidden_states=True)
    assert len(output.hidden_states) == 1 + 3
    torch.testing.assert_close(output.hidden_states[0], model.get_input_embeddings()(tokens()))
    torch.testing.assert_close(model.lm_head(output.hidden_states[-1]), output.logits)
    assert model(tokens()).hidden_states is None
    generated = model.generate(
        tokens(), max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True, pad_token_id=0
    )
    assert [states[0].shape[1] for states in generated.hidden_states] == [7, 1, 1]


def test_attentions_are_refused():
    model = make_model()
    with pytest.raises(TwofoldError, match="output_attentions"):
        model(tokens(), output_attentions=True)
    with pytest.raises((TwofoldError, ValueError), match="output_attentions"):
        model.generate(tokens(), max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_inputs_that_make_no_sense():
    model = make_model()
    with pytest.raises(TwofoldError, match=r"give input_ids or inputs_embeds$"):
        model()
    with pytest.raises(TwofoldError, match="not both"):
        model(tokens(), inputs_embeds=model.get_input_embeddings()(tokens()))
    with pytest.raises(TypeError, match="token_type_ids"):
        model(tokens(), token_type_ids=tokens())
    with pytest.raises(ConfigError, match="causal"):
        TwofoldForCausalLM(make_config(causal=False))


def test_resizing_the_vocabulary():
    for tied in (True, False):
        model = make_model(tie_word_embeddings=tied)
        before = model(tokens()).logits
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        assert model.config.vocab_size == model.config.spec.vocab_size == VOCABULARY + 5
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        after = model(tokens(), labels=tokens()).logits
        assert after.shape[-1] == VOCABULARY + 5
        torch.testing.assert_close(after[..., :VOCABULARY], before)


def test_half_precision_and_moving():
    model = make_model("decoupled").to(torch.bfloat16)
    output = model.generate(tokens(), max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0)
    assert output[CACHE_NAME].layers[0].keys.dtype == torch.bfloat16
