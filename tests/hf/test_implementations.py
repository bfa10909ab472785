"""`generate` gives the same with every implementation of attention, and says what cannot be had."""

import os
from unittest import mock

import pytest
import torch

from tests.hf.small import VARIANTS, VOCABULARY, make_config
from tests.kernels import triton_worker
from twofold.cli import main
from twofold.hf import TwofoldConfig, TwofoldForCausalLM
from twofold.kernels import VARIABLE, native, triton_decode
from twofold.spec import ConfigError

NEW = 12
# Heads and rotary parts as wide as the kernels need them.
WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3, "tie_word_embeddings": False}
CHOSEN = {
    "qkv": {},
    "relative": {},
    "unrotated": {},
    "decoupled": {"qk_rope_head_dim": 16},
    "window": {},
    "mqa": {"num_key_value_heads": 1},
}
KERNELS = {"native": native, "triton": triton_decode}


@pytest.fixture(scope="module")
def interpreter():
    with triton_worker.interpreter() as process:
        yield process


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def generated(variant, padded, implementation):
    """Tokens and logits of a greedy run by the config's word, and how often the kernel of that name ran."""
    options = {**WIDE, **CHOSEN[variant], "attention_implementation": implementation}
    torch.manual_seed(0)
    model = TwofoldForCausalLM(make_config(variant if variant in VARIANTS else "tied-kv", **options)).eval()
    tokens = torch.randint(1, VOCABULARY, (2, 9))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :5] = 0
    kernel = KERNELS.get(implementation, native)
    with (
        mock.patch.object(kernel, "attend", wraps=kernel.attend) as ran,
        mock.patch.dict(os.environ),
    ):
        os.environ.pop(VARIABLE, None)
        output = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return output.sequences[:, tokens.shape[1] :], torch.stack(output.logits), ran.call_count


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("variant", CHOSEN)
@pytest.mark.parametrize(
    "implementation",
    [pytest.param("native", marks=pytest.mark.kernel), pytest.param("triton", marks=pytest.mark.triton)],
)
def test_the_same_tokens_as_by_torch(implementation, variant, padded, request):
    expected, expected_logits, ran = generated(variant, padded, "torch")
    assert ran == 0
    assert len(expected.unique()) > 5  # tokens that could differ
    if implementation == "triton":
        interpreter = request.getfixturevalue("interpreter")
        got, logits, ran = interpreter.submit(generated, variant, padded, implementation).result()
    else:
        got, logits, ran = generated(variant, padded, implementation)
    assert ran >= WIDE["num_hidden_layers"] * (NEW - 1)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)
    assert torch.equal(got, expected)


def test_the_environment_wins_over_the_config(monkeypatch):
    model = TwofoldForCausalLM(make_config("relative", **WIDE, attention_implementation="triton"))
    tokens = torch.ones(1, 3, dtype=torch.long)
    with monkeypatch.context() as patch:
        patch.setattr(triton_decode, "version", lambda: None)
        with pytest.raises(
            ConfigError, match="attention_implementation=triton, but Triton is not installed; auto uses"
        ):
            model(tokens)
        patch.setenv(VARIABLE, "torch")
        model(tokens)


def test_a_kernel_that_was_not_compiled(monkeypatch):
    model = TwofoldForCausalLM(make_config("relative", **WIDE, attention_implementation="native"))
    monkeypatch.setattr(native, "load_library", lambda: None)
    with pytest.raises(ConfigError, match="attention_implementation=native, but the kernel was not compiled"):
        model(torch.ones(1, 3, dtype=torch.long))


def test_the_config_keeps_it(tmp_path):
    model = TwofoldForCausalLM(make_config("relative", attention_implementation="torch"))
    model.save_pretrained(tmp_path)
    assert TwofoldConfig.from_pretrained(tmp_path).attention_implementation == "torch"
    again = TwofoldForCausalLM.from_pretrained(tmp_path)
    assert again.model.decoder.layers[0].self_attn.implementation == "torch"
    other = TwofoldForCausalLM.from_pretrained(tmp_path, attention_implementation="auto")
    assert other.model.decoder.layers[0].self_attn.implementation == "auto"


def test_a_config_of_before_has_auto():
    fields = make_config("relative").to_dict()
    del fields["attention_implementation"]
    assert TwofoldConfig.from_dict(fields).attention_implementation == "auto"


@pytest.mark.parametrize("name", ["eager", "flash_attention_2", "kernels-community/any", "torch"])
def test_transformers_own_argument_is_not_ignored(name, tmp_path):
    """Transformers takes it for a choice between its own implementations, none of which runs here."""
    TwofoldForCausalLM(make_config("relative")).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=f"'{name}' is not for twofold models.* attention_implementation to one of auto"
    ):
        TwofoldForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    TwofoldForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")


def test_the_command_line_sets_it(capsys):
    assert main(["config", "--preset", "gpt-tiny", "--set", "model.attention_implementation=torch"]) == 0
    assert "attention_implementation: torch" in capsys.readouterr().out
    assert main(["config", "--preset", "gpt-tiny", "--set", "model.attention_implementation=tritn"]) == 2
    assert "triton" in capsys.readouterr().err
