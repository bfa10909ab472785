"""Contenders: what they decode, what they cache, what they must move. Never their times."""

import json
import os
from importlib.util import find_spec

import pytest
import torch

from tests.tiny_runs import MODEL
from twofold.attention import Attention
from twofold.bench import (
    PEERS,
    Case,
    Contender,
    CorrectnessError,
    Spread,
    Twofold,
    make_peer,
    measure,
    measured_record,
    measured_tables,
    missing_packages,
)
from twofold.bench import peers as peers_module
from twofold.bench.contender import check, relative_error
from twofold.bench.results import hardware_slug, markdown
from twofold.cost import cache_bytes
from twofold.kernels import LINEAR_VARIABLE, VARIABLE, choice, linear
from twofold.spec import ConfigError, ModelConfig

VARIANTS = {
    "qkv": {},
    "tied-kv": {"sharing": "tied-kv"},
    "q-mqa": {"sharing": "tied-kv", "num_key_value_heads": 1},
    "unrotated": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "unrotated"},
    "decoupled": {"sharing": "tied-kv", "positions": "rope", "rope_mode": "decoupled", "qk_rope_head_dim": 4},
    "window": {"sharing": "tied-kv", "sliding_window": 16},
    "mixed": {"sharing": ["qkv", "tied-kv"], "sliding_window": [8, None]},
}
# Heads and an MLP as wide as blocks of q8_0.
WIDE = ModelConfig(**{**MODEL, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96})


@pytest.fixture(autouse=True)
def no_bandwidth(monkeypatch):
    """A quarter of a gigabyte, summed, is not what these tests are about."""
    monkeypatch.setattr("twofold.bench.runner.read_bandwidth", lambda _: 1.0)


@pytest.fixture
def _linear_layers_off_by_a_tenth(monkeypatch):
    """Where torch does not compute them."""

    def tampered(x, weight, bias=None, scale=None):
        return linear(x, weight, bias, scale) * (1 if os.environ.get(LINEAR_VARIABLE) == "torch" else 1.1)

    monkeypatch.setattr("twofold.kernels.quantized.linear", tampered)


def installed(name):
    """The peer, or a skip where a package is missing."""
    package = {"x-transformers": "x_transformers"}.get(name, "llama_cpp" if name.startswith("llama") else "torch")
    if find_spec(package) is None or missing_packages(name):
        pytest.skip(f"{name} is not installed")
    return make_peer(name, WIDE, "float32", 1)


def variant(name):
    return ModelConfig(**{**MODEL, **VARIANTS[name]})


def held(contender):
    return [layer.num_tokens for layer in contender_layers(contender)]


def contender_layers(contender):
    return [layer.layer_cache for layer in contender._caches["generate"].layers]


@pytest.mark.parametrize("name", list(VARIANTS))
def test_ours_decodes_what_one_pass_computes_and_caches_what_the_formula_says(name):
    contender = Twofold(name, variant(name), "float32")
    contender.build(200)
    assert check(contender) < 1e-4
    for case in (Case(context=40), Case(context=30, batch_size=3)):
        contender.fill(case)
        used = sum(layer.nbytes_used for layer in contender_layers(contender))
        assert used == contender.traffic(case).cache_bytes
        assert used == cache_bytes(variant(name), case.context, "float32", case.batch_size).total


@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
def test_a_quantised_cache_is_checked_and_counted_with_its_scales(cache_dtype):
    contender = Twofold("tied-kv", variant("tied-kv"), "float32", cache_dtype=cache_dtype)
    contender.build(100)
    assert check(contender) < 1e-3
    case = Case(context=40)
    contender.fill_caches(case)  # without a step, which takes the float of a token with it when it is taken back
    used = sum(layer.nbytes_used for layer in contender_layers(contender))
    assert used == contender.traffic(case).cache_bytes == cache_bytes(variant("tied-kv"), 40, cache_dtype).total
    with pytest.raises(ConfigError, match="int9"):
        Twofold("tied-kv", variant("tied-kv"), "float32", cache_dtype="int9")


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}, {"query_depth": 2}])
def test_int8_weights_are_checked_and_counted_with_their_scales(options):
    config = ModelConfig(**{**MODEL, **VARIANTS["tied-kv"], "hidden_size": 64, "intermediate_size": 64, **options})
    floats = Twofold("floats", config, "float32")
    contender = Twofold("tied-kv", config, "float32", cache_dtype="int8", weights="int8")
    for each in (floats, contender):
        each.build(100)
    error = check(contender)
    assert error < 1e-3
    case = Case(context=40)
    contender.fill(case)
    model = contender.model
    looked_up = [model.model.decoder.embed_positions.weight]
    if not config.tie_word_embeddings:
        looked_up.append(model.model.decoder.embed_tokens.weight)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    assert contender.traffic(case).weight_bytes == sum(held.values()) - sum(table.nbytes for table in looked_up)
    tokens = torch.arange(60)[None] % config.vocab_size
    assert relative_error(contender.whole_pass(tokens), floats.whole_pass(tokens)) > error
    with pytest.raises(ConfigError, match="int9"):
        Twofold("tied-kv", config, "float32", weights="int9")


def test_variants_share_int8_weights():
    first, second = (variant(name) for name in ("qkv", "tied-kv"))
    like = Twofold("qkv", first, "float32", weights="int8")
    contender = Twofold("tied-kv", second, "float32", weights="int8", like=like)
    for each in (like, contender):
        each.build(100)
    ours, theirs = (dict(each.model.named_buffers(remove_duplicate=False)) for each in (contender, like))
    assert {ours[name].data_ptr() for name in ours} <= {tensor.data_ptr() for tensor in theirs.values()}
    assert check(contender) < 1e-4


@pytest.mark.usefixtures("_linear_layers_off_by_a_tenth")
def test_linear_layers_that_compute_something_else_are_refused():
    contender = Twofold("qkv", variant("qkv"), "float32", weights="int8")
    contender.build(100)
    with pytest.raises(CorrectnessError, match="qkv: decoded logits are off"):
        check(contender)


@pytest.mark.parametrize("name", ["qkv", "window", "unrotated"])
def test_both_ways_decode_after_the_context_and_take_the_tokens_back(name, monkeypatch):
    contender = Twofold(name, variant(name), "float32")
    contender.build(100)
    contender.fill(Case(context=40))
    lengths = []
    forward = Attention.forward
    monkeypatch.setattr(
        Attention,
        "forward",
        lambda self, x, context, cache=None: (lengths.append(cache.num_tokens), forward(self, x, context, cache))[1],
    )
    assert list(contender.ways()) == ["generate", "loop"]
    for way in contender.ways().values():
        lengths.clear()
        way(3)
        assert lengths == [40, 40, 41, 41, 42, 42]
        assert held(contender) == [40, 40]


def test_generate_and_loop_choose_the_same_tokens():
    contender = Twofold("tied-kv", variant("tied-kv"), "float32")
    contender.build(100)
    contender.fill(Case(context=40))
    seen = []
    contender.model.model.decoder.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].flatten().tolist())
    )
    for way in contender.ways().values():
        way(4)
    assert len(seen) == 8
    assert seen[:4] == seen[4:]


def test_ours_that_decodes_something_else_is_refused(monkeypatch):
    forward = Attention.forward
    monkeypatch.setattr(
        Attention,
        "forward",
        lambda self, x, context, cache=None: forward(self, x, context, cache) * (1 + 0.1 * bool(cache)),
    )
    contender = Twofold("qkv", variant("qkv"), "float32")
    contender.build(100)
    with pytest.raises(CorrectnessError, match="qkv: decoded logits are off"):
        check(contender)


def test_a_quantised_cache_is_compared_with_one_that_is_quantised_too():
    """A check against exact keys would need a tolerance that hides mistakes."""
    contender = Twofold("tied-kv", variant("tied-kv"), "float32", cache_dtype="int4")
    contender.build(100)
    tokens = torch.arange(60)[None] % contender.config.vocab_size
    quantised = contender.whole_pass(tokens)
    exact = contender.model(tokens, use_cache=False).logits
    assert relative_error(quantised, exact) > 3e-4


def test_a_step_that_differs_at_the_context_is_refused(monkeypatch):
    """A kernel that is right about a few tokens may be wrong about many."""
    contender = Twofold("qkv", variant("qkv"), "float32")
    contender.build(600)
    assert check(contender) < 1e-4
    attend = choice.attend

    def tampered(query, stored, **options):
        output = attend(query, stored, **options)
        wrong = os.environ.get(VARIABLE) != "torch" and stored.key.shape[2] > 500
        return output * 1.1 if wrong else output

    monkeypatch.setattr("twofold.attention.layer.attend", tampered)
    contender.fill(Case(context=400))
    with pytest.raises(CorrectnessError, match="qkv at 520 tokens: decoded logits are off"):
        contender.fill(Case(context=520))


def test_torchs_attention_is_asked_for_only_where_it_is_measured(monkeypatch):
    asked = []
    attend = choice.attend
    monkeypatch.setattr(
        "twofold.attention.layer.attend",
        lambda *args, **options: (asked.append(os.environ.get(VARIABLE)), attend(*args, **options))[1],
    )
    monkeypatch.setenv(VARIABLE, "auto")
    for attention, expected in ((None, "auto"), ("torch", "torch")):
        contender = Twofold("qkv", variant("qkv"), "float32", attention=attention)
        contender.build(100)
        check(contender)
        contender.fill(Case(context=40))
        for way in (*contender.ways().values(), lambda _, it=contender: it.prefill(Case(context=40))):
            asked.clear()
            way(2)
            assert set(asked) == {expected}
            assert os.environ[VARIABLE] == "auto"


def test_variants_share_the_weights_that_both_have():
    first = Twofold("qkv", variant("qkv"), "float32")
    second = Twofold("tied-kv", variant("tied-kv"), "float32", like=first)
    first.build(100)
    second.build(100)
    theirs = {parameter.data_ptr() for parameter in first.model.parameters()}
    own = [name for name, parameter in second.model.named_parameters() if parameter.data_ptr() not in theirs]
    assert own == []
    assert check(second) < 1e-4
    assert second.memory(Case(context=8)) < first.memory(Case(context=8))


def test_bytes_that_a_step_moves_by_hand():
    """Width 16, 2 layers, 4 heads of 4, learned positions, biases, a tied table, an MLP of 32."""
    config = variant("q-mqa")
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    attention = (hidden * hidden + hidden) + (hidden * 4 + 4) + (hidden * hidden + hidden)  # query, one head, output
    mlp = (hidden * inner + inner) + (inner * hidden + hidden)
    norms = 2 * 2 * hidden
    weights = 2 * (attention + mlp + norms) + 2 * hidden + vocabulary * hidden
    traffic = Twofold("q-mqa", config, "bfloat16").traffic(Case(context=10, batch_size=3))
    assert traffic.weight_bytes == 2 * weights
    assert traffic.cache_bytes == 3 * 2 * 10 * 4 * 2
    assert traffic.total == traffic.weight_bytes + traffic.cache_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what other libraries use
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", list(PEERS))
def test_peers_pass_their_check_and_are_timed_beside_ours(name, batch_size):
    peer: Contender = installed(name)
    case = Case(context=600, batch_size=batch_size)
    measured = measure([Twofold("qkv", WIDE, "float32"), peer], [case], new_tokens=2, rounds=1)
    rows = [row for row in measured.rows if row.contender == name]
    ways = ["DynamicCache", "StaticCache"] if name.startswith("transformers") else ["loop"]
    assert [row.way for row in rows] == ways
    elements = batch_size * 2 * 600 * WIDE.num_hidden_layers * WIDE.hidden_size
    size = {"llama.cpp-f16": 2, "llama.cpp-q8_0": 34 / 32}.get(name, 4)
    for row in rows:
        assert row.cache_bytes == elements * size
        assert 0 <= row.largest_error <= peer.tolerance
        assert row.cpu_ms.low <= row.cpu_ms.median <= row.cpu_ms.high


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what other libraries use
@pytest.mark.parametrize("name", list(PEERS))
def test_a_prompt_passes_through_every_peer(name):
    cases = [Case(context=40), Case(context=40, batch_size=2)]
    measured = measure([installed(name)], cases, task="prefill", rounds=1)
    assert [row.way for row in measured.rows] == ["prompt"] * 2


@pytest.mark.parametrize("batch_size", [1, 3])
def test_llama_cpp_goes_on_from_its_filled_cache_in_every_sequence(batch_size):
    """A context no longer than what is really decoded: its logits can be compared with a pass over all of it."""
    peer = installed("llama.cpp-f32")
    peer.build(100)
    reference = peer._reference
    check(peer)
    peer.fill(Case(context=30, batch_size=batch_size))
    for _ in range(2):  # the tokens of the first round are taken back
        peer.ways()["loop"](1)
        expected = reference(torch.zeros(1, 31, dtype=torch.long)).logits[0, -1]
        for row in range(batch_size):
            assert relative_error(peer._logits(row), expected) < peer.tolerance
    peer.close()


@pytest.mark.parametrize("name", ["transformers-gpt2", "transformers-llama"])
def test_the_model_of_a_peer_has_the_weights_that_the_formula_counts(name):
    peer = make_peer(name, WIDE, "float32", 1)
    peer.build(WIDE.max_position_embeddings)
    looked_up = peer.config.max_position_embeddings * peer.config.hidden_size if name.endswith("gpt2") else 0
    counted = sum(parameter.numel() for parameter in peer.model.parameters()) - looked_up
    assert peer.traffic(Case(context=1)).weight_bytes == 4 * counted


def test_a_peer_whose_cached_step_differs_is_refused(monkeypatch):
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

    peer = make_peer("transformers-gpt2", WIDE, "float32", 1)
    peer.build(100)
    forward = GPT2LMHeadModel.forward

    def tampered(self, input_ids=None, **options):
        output = forward(self, input_ids, **options)
        if input_ids.shape[1] == 1:
            output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", tampered)
    with pytest.raises(CorrectnessError, match="transformers-gpt2: decoded logits are off"):
        check(peer)


def test_llama_cpp_with_other_weights_is_refused():
    peer = installed("llama.cpp-f32")
    peer.build(100)
    with torch.no_grad():
        peer._reference.transformer.h[0].mlp.c_proj.bias[0] += 1
    with pytest.raises(CorrectnessError, match=r"llama\.cpp-f32: decoded logits are off"):
        check(peer)
    peer.close()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(peers_module, "_is_installed", lambda _: False)
    assert missing_packages("transformers-llama") == []
    assert missing_packages("llama.cpp-f16") == ["llama-cpp-python", "gguf"]
    with pytest.raises(ConfigError, match="run: pip install x-transformers"):
        make_peer("x-transformers", WIDE, "float32", 1)


def test_an_unknown_peer_is_refused():
    with pytest.raises(ConfigError, match=r"unknown peer 'llama.cpp-q8'; did you mean 'llama.cpp-q8_0'"):
        missing_packages("llama.cpp-q8")


def test_heads_that_q8_0_cannot_hold_are_refused(monkeypatch):
    monkeypatch.setattr(peers_module, "_is_installed", lambda _: True)
    with pytest.raises(ConfigError, match="multiples of 32; this model has 4, 16 and 24"):
        make_peer("llama.cpp-q8_0", variant("qkv"), "float32", 1)


def test_a_dtype_that_torch_does_not_compute_in_is_refused():
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        Twofold("qkv", variant("qkv"), "int8").build(100)


def test_a_model_that_does_not_generate_is_refused():
    with pytest.raises(ConfigError, match="does not generate"):
        Twofold("all", ModelConfig(**{**MODEL, "causal": False}), "float32")


def test_an_error_is_a_share_of_the_largest_logit():
    assert relative_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, -5.0])) == 1.5


def test_tables_and_data_say_the_same():
    cases = [Case(context=20), Case(context=30, batch_size=2)]
    measured = measure([Twofold("tied-kv", variant("tied-kv"), "float32")], cases, rounds=2)
    record = json.loads(json.dumps(measured_record(measured, variant("qkv"), {"dtype": "float32"}), allow_nan=False))
    assert [(row["context"], row["way"]) for row in record["rows"]] == [
        (20, "generate"),
        (20, "loop"),
        (30, "generate"),
        (30, "loop"),
    ]
    assert record["environment"]["cpu"]
    tables = measured_tables(measured, "float32")
    assert [table.title.split(",")[0] for table in tables] == ["Decoding after 20 tokens", "Decoding after 30 tokens"]
    page = markdown(tables)
    median = Spread(**record["rows"][0]["cpu_ms"]).median
    assert f"| tied-kv · generate | {median:.1f} |" in page
    assert page.count("Medians of 2 rounds in turn") == 1


def test_the_machines_name_is_fit_for_a_file():
    assert set(hardware_slug()) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert hardware_slug().endswith("-cores")
