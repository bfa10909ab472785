"""Small random models and a small tokenizer for the tests of this folder."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from twofold.hf import TwofoldConfig, TwofoldForCausalLM
from twofold.models import LanguageModel

VOCABULARY = 61
END_OF_TEXT = "<|endoftext|>"

# One variant of each kind of cache: two tensors, one, one with positions, one with a rotary part, sliding, mixed.
VARIANTS = {
    "qkv": {"sharing": "qkv", "positions": "learned"},
    "qkv-rope": {"sharing": "qkv", "positions": "rope", "num_key_value_heads": 2},
    "tied-kv": {"sharing": "tied-kv", "positions": "learned"},
    "relative": {"sharing": "tied-kv", "positions": "rope", "num_key_value_heads": 2},
    "unrotated": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "unrotated", "num_key_value_heads": 1},
    "decoupled": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "decoupled", "qk_rope_head_dim": 4},
    "tied-qkv": {"sharing": "tied-qkv", "positions": "sinusoidal"},
    "window": {"sharing": "tied-kv", "positions": "rope", "sliding_window": 4},
    "normed": {"sharing": "tied-kv", "positions": "rope", "qk_norm": True, "query_depth": 2},
    "mixed": {
        "sharing": ["qkv", "tied-kv", "tied-qkv"],
        "positions": "rope",
        "num_key_value_heads": [2, 1, 4],
        "sliding_window": [3, None, 5],
        "num_hidden_layers": 3,
    },
}


def make_config(variant="relative", **options):
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 96,
        "initializer_range": 0.4,  # so that the next token is seldom a close call
    }
    return TwofoldConfig(**{**fields, **VARIANTS[variant], **options})


def make_model(variant="relative", seed=0, **options):
    torch.manual_seed(seed)
    return TwofoldForCausalLM(make_config(variant, **options)).double().eval()


def make_plain(variant="relative", **options):
    torch.manual_seed(0)
    return LanguageModel(make_config(variant, **options).spec).eval()


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = ["the cat sat on the mat and the dog sat on the cat", "a cat and a dog and a mat"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
