"""Decoding from the cache, in any chunks, against one pass over the whole sequence."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import ABSOLUTE
from twofold.cache import LayerCache
from twofold.models import LanguageModel
from twofold.spec import ModelConfig, ProjectionSharing, preset

HEADS, HEAD_DIM, ROPE_DIM, LENGTH, BATCH = 4, 6, 4, 12, 2
TOLERANCE = ABSOLUTE[torch.float64]

SHARINGS = [
    ("qkv", 4),
    ("qkv", 2),
    ("qkv", 1),
    ("tied-qk", 4),
    ("tied-kv", 4),
    ("tied-kv", 2),
    ("tied-kv", 1),
    ("tied-qkv", 4),
]
LAYOUTS = [
    (sharing, groups, positions, mode)
    for sharing, groups in SHARINGS
    for positions, mode in [
        ("learned", None),
        ("sinusoidal", None),
        ("none", None),
        *(
            [("rope", mode) for mode in ("relative", "unrotated", "decoupled")]
            if ProjectionSharing.parse(sharing).ties_key_value
            else [("rope", None)]
        ),
    ]
]
MASKS = ("causal", "window", "left padding", "documents", "documents in a window")


def make_model(sharing="qkv", groups=HEADS, positions="rope", mode=None, **options):
    """A small float64 model whose every parameter, norms and biases too, is random."""
    torch.manual_seed(0)
    config = ModelConfig(
        **{
            "vocab_size": 23,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": groups,
            "head_dim": HEAD_DIM,
            "intermediate_size": 20,
            "max_position_embeddings": 32,
            "sharing": sharing,
            "positions": positions,
            "rope_mode": mode,
            "rope_theta": 50.0,
            "qk_rope_head_dim": ROPE_DIM if mode == "decoupled" else None,
            **options,
        }
    )
    model = LanguageModel(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (1.0 if "norm" in name else 0.0))
    return model


def make_inputs(mask):
    """Tokens with what a mask kind passes beside them, and which tokens are real."""
    torch.manual_seed(1)
    tokens = torch.randint(23, (BATCH, LENGTH))
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if mask == "left padding":
        real[0, :4] = False
        return tokens, {"padding": real}, real
    if mask.startswith("documents"):
        documents = torch.tensor([[0] * 3 + [1] * 6 + [2] * 3, [0] * 7 + [1] * 5])
        positions = torch.tensor([[*range(3), *range(6), *range(3)], [*range(7), *range(5)]])
        return tokens, {"documents": documents, "positions": positions}, real
    return tokens, {}, real


def decode(model, tokens, inputs, chunks, block=2, dtype=None):
    """Logits of all tokens, computed chunk by chunk, and the cache. A small block makes windows slide early."""
    windows = [model.config.layer_sliding_window(layer) for layer in range(model.config.num_hidden_layers)]
    cache = [LayerCache(window=window, block=block, dtype=dtype) for window in windows]
    logits, start = [], 0
    for chunk in chunks:
        end = start + chunk
        seen = {
            name: tensor[:, start:end] if name == "positions" else tensor[:, :end] for name, tensor in inputs.items()
        }
        logits.append(model(tokens[:, start:end], cache=cache, **seen))
        start = end
    assert start == tokens.shape[1]
    return torch.cat(logits, dim=1), cache


def assert_cached_equals_full(model, mask, chunks):
    tokens, inputs, real = make_inputs(mask)
    with torch.no_grad():
        full = model(tokens, **inputs)
        cached, cache = decode(model, tokens, inputs, chunks)
    assert torch.isfinite(cached).all()
    torch.testing.assert_close(cached[real], full[real], atol=TOLERANCE * full.abs().max().item(), rtol=0)
    for layer, stored in enumerate(cache):
        assert stored.nbytes_used == expected_bytes(model.config, layer, tokens.shape[1])


def expected_bytes(config, layer, num_tokens):
    """What the spec says a layer must store for float64 tokens of a batch."""
    held = min(num_tokens, config.layer_sliding_window(layer) or num_tokens)
    width = config.layer_num_key_value_heads(layer) * config.head_dim * config.layer_sharing(layer).num_cached_tensors
    mode = config.layer_rope_mode(layer)
    positions = 4 if mode == "unrotated" else 0  # int32
    return BATCH * held * ((width + (ROPE_DIM if mode == "decoupled" else 0)) * 8 + positions)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("sharing", "groups", "positions", "mode", "qk_norm"),
    [
        (*layout, qk_norm)
        for layout in LAYOUTS
        for qk_norm in (False, True)
        if not (qk_norm and layout[-1] == "decoupled")  # the mode has a norm of its own
    ],
)
def test_cached_equals_full(sharing, groups, positions, mode, qk_norm, mask):
    window = 3 if "window" in mask else None
    model = make_model(sharing, groups, positions, mode, sliding_window=window, qk_norm=qk_norm)
    assert_cached_equals_full(model, mask, (5, 1, 1, 3, 1, 1))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYOUTS)
def test_int8_token_by_token_equals_one_pass(sharing, groups, positions, mode, mask):
    """A token reads itself as later ones will read it."""
    model = make_model(sharing, groups, positions, mode, sliding_window=3 if "window" in mask else None)
    tokens, inputs, real = make_inputs(mask)
    with torch.no_grad():
        whole, _ = decode(model, tokens, inputs, (LENGTH,), dtype="int8")
        parts, _ = decode(model, tokens, inputs, (4, *[1] * (LENGTH - 4)), dtype="int8")
        floats = model(tokens, **inputs)
    torch.testing.assert_close(parts[real], whole[real], atol=TOLERANCE * whole.abs().max().item(), rtol=0)
    assert 0 < (whole - floats)[real].norm() / floats[real].norm() < 0.05


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYOUTS)
def test_int4_reads_the_last_tokens_as_floats(sharing, groups, positions, mode, mask):
    """All of so few tokens, in any chunks; float32 is all that they lose."""
    model = make_model(sharing, groups, positions, mode, sliding_window=3 if "window" in mask else None)
    tokens, inputs, real = make_inputs(mask)
    with torch.no_grad():
        cached, _ = decode(model, tokens, inputs, (4, 3, *[1] * (LENGTH - 7)), dtype="int4")
        floats = model(tokens, **inputs)
    assert (cached - floats)[real].norm() / floats[real].norm() < 1e-5


@given(
    layout=st.sampled_from(LAYOUTS),
    mask=st.sampled_from(MASKS),
    window=st.integers(1, LENGTH + 2),
    cuts=st.sets(st.integers(1, LENGTH - 1)),
)
@settings(max_examples=100, deadline=None)
def test_any_chunks(layout, mask, window, cuts):
    edges = [0, *sorted(cuts), LENGTH]
    model = make_model(*layout, sliding_window=window if "window" in mask else None)
    assert_cached_equals_full(model, mask, [end - start for start, end in itertools.pairwise(edges)])


@pytest.mark.parametrize("mode", ["relative", "unrotated", "decoupled"])
def test_layers_that_differ(mode):
    """Sharing, heads and window by layer, as in Gemma's layouts."""
    model = make_model(
        ["qkv", "tied-kv", "tied-qkv", "tied-qk", "tied-kv"],
        [2, 1, 4, 4, 2],
        mode=mode,
        num_hidden_layers=5,
        sliding_window=[3, None, 5, 1, None],
    )
    for mask in MASKS:
        assert_cached_equals_full(model, mask, (4, 1, 2, 1, 1, 3))


@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYOUTS)
def test_left_padded_batch_equals_single_runs(sharing, groups, positions, mode):
    model = make_model(sharing, groups, positions, mode)
    tokens, inputs, real = make_inputs("left padding")
    with torch.no_grad():
        batch, _ = decode(model, tokens, inputs, (6, *[1] * 6))
        for row in range(BATCH):
            alone = model(tokens[row : row + 1, real[row]])
            torch.testing.assert_close(
                batch[row, real[row]], alone[0], atol=TOLERANCE * alone.abs().max().item(), rtol=0
            )


@pytest.mark.parametrize(("sharing", "groups", "positions", "mode"), LAYOUTS)
def test_packed_documents_equal_single_runs(sharing, groups, positions, mode):
    model = make_model(sharing, groups, positions, mode)
    tokens, inputs, _ = make_inputs("documents")
    with torch.no_grad():
        packed = model(tokens, **inputs)
        for row, document in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            inside = inputs["documents"][row] == document
            alone = model(tokens[row : row + 1, inside])
            torch.testing.assert_close(packed[row, inside], alone[0], atol=TOLERANCE * alone.abs().max().item(), rtol=0)


@pytest.mark.parametrize(
    ("sharing", "groups", "positions", "mode"),
    [
        (sharing, groups, positions, mode)
        for sharing, groups, positions, mode in LAYOUTS
        if sharing != "qkv" and mode not in ("relative", "decoupled")  # which make something else of the value
    ],
)
def test_tied_equals_copied_weights(sharing, groups, positions, mode):
    """Sharing a projection is having it twice with the same weights."""
    tied = make_model(sharing, groups, positions, mode)
    plain = make_model("qkv", groups, positions)
    copied = dict(tied.state_dict())
    for name, tensor in tied.state_dict().items():
        ties = tied.config.sharing
        if ".q_proj." in name and ties.ties_query_key:
            copied[name.replace("q_proj", "k_proj")] = tensor
        shared = "q_proj" if ties.ties_query_key else "k_proj"
        if f".{shared}." in name and ties.ties_key_value:
            copied[name.replace(shared, "v_proj")] = tensor
    plain.load_state_dict(copied)
    tokens, _, _ = make_inputs("causal")
    with torch.no_grad():
        expected, cache_of_plain = decode(plain, tokens, {}, (7, 1, 4))
        got, cache_of_tied = decode(tied, tokens, {}, (7, 1, 4))
    torch.testing.assert_close(got, expected, atol=TOLERANCE * expected.abs().max().item(), rtol=0)
    if tied.config.sharing.ties_key_value and mode is None:
        for one, two in zip(cache_of_tied, cache_of_plain, strict=True):
            assert 2 * one.nbytes_used == two.nbytes_used


def test_number_of_parameters_of_the_paper():
    with torch.device("meta"):
        model = LanguageModel(preset("gpt-300m"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 305_534_976
