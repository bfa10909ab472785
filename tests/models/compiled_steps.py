"""Decodes token by token, as it is and compiled; run by test_compiled_decoding.py in a process of its own.

There annotations are not checked: torch.compile cannot trace the checks.
"""

import os
import sys

import torch
from torch._dynamo.utils import counters

from twofold.kernels import native
from twofold.models import LanguageModel
from twofold.spec import ModelConfig

PROMPT, STEPS, CAPACITY = 6, 20, 32
GROUPED = {"sharing": "qkv", "num_key_value_heads": 2, "rope_mode": None}
CASES = {  # by backend: attention, dtype of the cache, options of the model, left padding
    "inductor": [
        ("auto", None, {"sliding_window": [None, 10]}, False),
        ("torch", "int8", GROUPED, False),
    ],
    # Torch's own operations one by one, writes into tensors taken out of the graph and put after it: quick.
    "aot_eager": [
        ("auto", None, GROUPED, False),
        ("auto", "int8", {"rope_mode": "unrotated", "qk_norm": True}, False),
        ("auto", "int8", {"rope_mode": "decoupled", "qk_rope_head_dim": 16}, False),
        ("torch", "int4", {"positions": "learned", "rope_mode": None, "head_dim": 32}, False),
        ("auto", None, {"sliding_window": 10}, True),
    ],
}


def make_model(options):
    """A small model whose tokens depend on all that came before."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    kind = {"sharing": "tied-kv", "positions": "rope", "rope_mode": "relative", "initializer_range": 0.3}
    return LanguageModel(ModelConfig(**{**sizes, "max_position_embeddings": 64, **kind, **options})).eval()


def decode(model, step, dtype, is_padded):
    """Tokens and logits; the prompt goes through the model as it is."""
    tokens = torch.arange(2 * PROMPT).view(2, PROMPT) * 5
    real = torch.ones(2, CAPACITY, dtype=torch.bool)
    real[0, :3] = False
    cache = model.decoder.make_cache(capacity=CAPACITY, dtype=dtype)
    chosen, seen, forward = [tokens], [], model
    for num in range(PROMPT, PROMPT + STEPS):
        padding = real[:, :num] if is_padded else None
        seen.append(forward(chosen[-1], cache=cache, padding=padding, num_logits=1))
        chosen.append(seen[-1][:, -1].argmax(dim=-1, keepdim=True))
        forward = step
    return torch.cat(chosen, dim=1), torch.cat(seen, dim=1)


def main(backend):
    attend, calls = native.attend, []
    native.attend = lambda *arguments: (calls.append(None), attend(*arguments))[1]
    for attention, dtype, options, is_padded in CASES[backend]:
        os.environ["TWOFOLD_ATTENTION"] = attention
        torch.compiler.reset()
        counters.clear()
        model = make_model(options)
        expected, logits = decode(model, model, dtype, is_padded)
        calls.clear()
        got, compiled_logits = decode(model, torch.compile(model, backend=backend, fullgraph=True), dtype, is_padded)
        case = f"{attention}, {dtype}, {options}"
        assert torch.equal(got, expected), case
        assert len(expected.unique()) > 10, case  # no token that only repeats
        torch.testing.assert_close(compiled_logits, logits, rtol=1e-4, atol=1e-4, msg=case)
        # One for the first step, one in which numbers of tokens are variables, perhaps one for a window that is full.
        assert counters["stats"]["unique_graphs"] <= 3, case
        by_kernel = native.load_library() is not None and attention == "auto" and not is_padded
        assert (len(calls) >= 2 * (STEPS - 1)) is by_kernel, (case, len(calls))


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1])
