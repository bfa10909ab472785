"""Llama checkpoints as plain modules: the same logits."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tolerances import ABSOLUTE
from twofold.hf import from_llama
from twofold.spec import ConfigError

SMALL = {
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 70.0}},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "rms_norm_eps": 0.1},
    ],
)
def test_logits_equal_those_of_transformers(options):
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**{**SMALL, **options})).double().eval()
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        plain = from_llama(llama)
        tokens = torch.randint(41, (2, 30))
        logits = llama(tokens).logits
        # Transformers makes its angles in float32, whatever the model's dtype.
        assert (plain(tokens) - logits).abs().max() < ABSOLUTE[torch.float32] * logits.abs().max()
    assert plain.decoder.blocks()[1].self_attn.k_proj.weight.data_ptr() == (
        llama.model.layers[1].self_attn.k_proj.weight.data_ptr()
    )
    assert not plain.training
    assert plain.config.label == "GQA-2"


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ],
)
def test_what_cannot_be_read_is_one_line(options):
    with pytest.raises(ConfigError, match="only 'default' and 'silu' can be read") as caught:
        from_llama(LlamaForCausalLM(LlamaConfig(**{**SMALL, **options})))
    assert "\n" not in str(caught.value)
