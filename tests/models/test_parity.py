"""Our QKV decoders against Transformers' Llama and GPT-2 with the same weights."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.tolerances import ABSOLUTE
from twofold.models import LanguageModel
from twofold.spec import ModelConfig

VOCABULARY, HIDDEN, LAYERS, HEADS = 53, 32, 2, 4


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("tied_embeddings", [False, True])
def test_equals_llama(groups, tied_embeddings):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=44,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.3,
        tie_word_embeddings=tied_embeddings,
    )
    # The angles of Transformers are float32 whatever the weights are, so float64 would not agree more closely.
    theirs = randomized(LlamaForCausalLM(config).eval())
    ours = LanguageModel(
        ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=44,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=groups,
            max_position_embeddings=64,
            positions="rope",
            rope_theta=500.0,
            attention_bias=False,
            mlp_bias=False,
            gated_mlp=True,
            activation="silu",
            normalization="rmsnorm",
            norm_eps=1e-5,
            tie_word_embeddings=tied_embeddings,
        )
    ).eval()
    renamed = {
        name.replace("model.", "decoder.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in theirs.state_dict().items()
    }
    ours.load_state_dict(renamed)
    assert_equal_logits(ours, theirs, ABSOLUTE[torch.float32])


def test_equals_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=32,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = randomized(GPT2LMHeadModel(config).eval().double())
    ours = (
        LanguageModel(
            ModelConfig(
                vocab_size=VOCABULARY,
                hidden_size=HIDDEN,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                max_position_embeddings=32,
                activation="gelu_new",
            )
        )
        .eval()
        .double()
    )
    ours.load_state_dict(from_gpt2(theirs.state_dict()))
    assert_equal_logits(ours, theirs, ABSOLUTE[torch.float64])


def from_gpt2(weights):
    """GPT-2's weights under our names: its Conv1D holds matrices transposed, and query, key and value in one."""
    names = {
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    }
    renamed = {
        "decoder.embed_tokens.weight": weights["transformer.wte.weight"],
        "decoder.embed_positions.weight": weights["transformer.wpe.weight"],
        "decoder.norm.weight": weights["transformer.ln_f.weight"],
        "decoder.norm.bias": weights["transformer.ln_f.bias"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        source, target = f"transformer.h.{layer}", f"decoder.layers.{layer}"
        for kind in ("weight", "bias"):
            for old, new in names.items():
                tensor = weights[f"{source}.{old}.{kind}"]
                renamed[f"{target}.{new}.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
            joined = weights[f"{source}.attn.c_attn.{kind}"]
            for name, tensor in zip("qkv", joined.split(HIDDEN, dim=-1), strict=True):
                renamed[f"{target}.self_attn.{name}_proj.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
    return renamed


def randomized(model):
    """Norms and biases too differ from ones and zeros, so that a forgotten one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def assert_equal_logits(ours, theirs, tolerance):
    tokens = torch.randint(VOCABULARY, (3, 17))
    padding = torch.ones(3, 17, dtype=torch.bool)
    padding[1, :5] = False  # on the left
    with torch.no_grad():
        plain = theirs(tokens).logits
        assert plain.abs().max() > 1
        torch.testing.assert_close(ours(tokens), plain, atol=tolerance * plain.abs().max().item(), rtol=0)
        positions = (padding.long().cumsum(-1) - 1).clamp(min=0)
        padded = theirs(tokens, attention_mask=padding.long(), position_ids=positions).logits
        got = ours(tokens, padding=padding)
        torch.testing.assert_close(got[padding], padded[padding], atol=tolerance * plain.abs().max().item(), rtol=0)
