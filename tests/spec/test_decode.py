import dataclasses
import datetime
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.spec import (
    PRESETS,
    ConfigError,
    DataConfig,
    ModelConfig,
    ProjectionSharing,
    RunConfig,
    TrainConfig,
    apply_overrides,
    canonical_json,
    decode,
    encode,
    preset,
    read_yaml,
    run_id,
)

RUN = {"model": {"preset": "gpt-tiny"}}


# Building


def test_a_preset_fills_the_model_and_the_rest_wins_over_it():
    config = decode(RunConfig, {"model": {"preset": "gpt-tiny", "sharing": "Q-K=V", "num_hidden_layers": 2}})
    assert config.model == preset("gpt-tiny", sharing="tied-kv", num_hidden_layers=2)
    assert config.data == DataConfig()
    assert config.train == TrainConfig()


def test_a_model_alone_takes_a_preset_too():
    assert decode(ModelConfig, {"preset": "gpt-300m"}) == preset("gpt-300m")


def test_numbers_may_be_text_as_yaml_reads_them():
    config = decode(RunConfig, {**RUN, "train": {"learning_rate": "3e-4", "steps": "20"}})
    assert (config.train.learning_rate, config.train.steps) == (3e-4, 20)


def test_settings_by_layer_are_read():
    sharing = {"every": 2, "value": "tied-kv", "otherwise": "qkv"}
    config = decode(RunConfig, {"model": {"preset": "gpt-tiny", "sharing": sharing, "sliding_window": [None, 8] * 2}})
    assert [layer.slug for layer in config.model.sharing] == ["qkv", "tied-kv"] * 2
    assert config.model.sliding_window == (None, 8, None, 8)


# Mistakes


MISTAKES = [
    ({}, "'model' is missing"),
    ({"model": {"hidden_size": 64, "num_hidden_layers": 2}}, "'model.num_attention_heads' is missing"),
    ({"model": 3}, "model: "),
    ({**RUN, "trian": {}}, "unknown setting 'trian'; did you mean 'train'?"),
    ({"preset": "gpt-tiny"}, "unknown setting 'preset'; allowed: model, data, train"),
    ({**RUN, "train": {"stpes": 3}}, "unknown setting 'train.stpes'; did you mean 'steps'?"),
    ({**RUN, "train": {"zzz": 3}}, "unknown setting 'train.zzz'; allowed: seed, steps,"),
    ({"model": {"presett": "gpt-tiny"}}, "unknown setting 'model.presett'; did you mean 'preset'?"),
    ({"model": {"preset": "gpt-tini"}}, "unknown preset 'gpt-tini'; did you mean 'gpt-tiny'?"),
    ({"model": {"preset": None}}, "unknown preset 'None'"),
    ({"model": {"preset": "gpt-tiny", "n_head": 2}}, "unknown setting 'model.n_head'"),
    ({"model": {"preset": "gpt-tiny", "sharing": "KV"}}, "model: sharing 'KV' has been used both"),
    ({"model": {"preset": "gpt-tiny", "positions": "rotary"}}, "model.positions: "),
    ({"model": {"preset": "gpt-tiny", "hidden_size": "wide"}}, "model.hidden_size: "),
    ({**RUN, "train": {"learning_rate": "fast"}}, "train.learning_rate: "),
    ({**RUN, "train": {"learning_rate": float("inf")}}, "train: learning_rate must be finite and above 0; got inf"),
    ({**RUN, "train": {"learning_rate": 0}}, "train: learning_rate must be finite and above 0; got 0.0"),
    ({**RUN, "train": {"weight_decay": "nan"}}, "train: weight_decay must be finite and at least 0; got nan"),
    ({**RUN, "train": {"max_grad_norm": -1}}, "train: max_grad_norm must be finite and at least 0; got -1.0"),
    ({**RUN, "train": {"min_learning_rate_ratio": 2}}, "min_learning_rate_ratio must lie between 0 and 1; got 2.0"),
    ({**RUN, "train": {"beta2": 1}}, "train: beta2 must be at least 0 and below 1; got 1.0"),
    ({**RUN, "train": {"steps": 0}}, "train: steps must be at least 1; got 0"),
    ({**RUN, "train": {"warmup_steps": -1}}, "train: warmup_steps must be at least 0; got -1"),
    ({**RUN, "train": {"precision": "fp8"}}, "train.precision: "),
    (
        {**RUN, "train": {"batch_size": 16, "gradient_accumulation": 3}},
        "batch_size 16 is not a multiple of gradient_accumulation 3",
    ),
    ({**RUN, "train": {"seed": 2**63}}, "seed must be at most 9223372036854775807; got 9223372036854775808"),
    ({**RUN, "train": {"batch_size": 10**12}}, "batch_size must be at most 1048576; got 1000000000000"),
    ({**RUN, "data": {"validation_fraction": 1}}, "data: validation_fraction must lie between 0 and 1; got 1.0"),
    ({**RUN, "data": {"sequence_length": 1}}, "data: sequence_length must be at least 2; got 1"),
    ({**RUN, "data": {"tokenizer_vocab_size": 256}}, "data: tokenizer_vocab_size must be at least 257; got 256"),
    ({**RUN, "data": {"sequence_length": 512}}, "data.sequence_length 512 is longer than the model's"),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_a_mistake_is_one_line_with_its_path(data, message):
    with pytest.raises(ConfigError) as caught:
        decode(RunConfig, data, where="run.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("run.yaml: ")
    assert "\n" not in str(caught.value)


# YAML files


def test_yaml_becomes_a_config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: gpt-tiny, sharing: Q-K=V}\ntrain: {learning_rate: 3e-4}\n")
    config = decode(RunConfig, read_yaml(path))
    assert config.model.sharing is ProjectionSharing.TIED_KV
    assert config.train.learning_rate == 3e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [("model: [", "is not valid YAML"), ("", "must hold a mapping"), ("- 1", "must hold a mapping"), (b"\xff", "text")],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'no.yaml'} does not exist")):
        read_yaml(tmp_path / "no.yaml")


# Overrides


def test_overrides_apply_in_order_and_read_yaml_values():
    data = {"model": {"preset": "gpt-tiny"}, "train": {"steps": 5}}
    changed = apply_overrides(
        data,
        ["train.steps=7", "train.steps=9", "model.sharing=Q-K=V", "model.sliding_window=[null, 8, null, 8]", "data={}"],
    )
    assert changed == {
        "model": {"preset": "gpt-tiny", "sharing": "Q-K=V", "sliding_window": [None, 8, None, 8]},
        "train": {"steps": 9},
        "data": {},
    }
    assert data == {"model": {"preset": "gpt-tiny"}, "train": {"steps": 5}}
    assert decode(RunConfig, changed).model.sharing is ProjectionSharing.TIED_KV


def test_an_override_keeps_values_that_json_does_not_know():
    data = {"data": {"source": datetime.date(2026, 1, 31)}}  # YAML reads dates
    assert apply_overrides(data, ["train.steps=1"]) == {**data, "train": {"steps": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "must look like train.steps=100"),
        ("=3", "must look like train.steps=100"),
        ("train.steps=[", "'[' is not a YAML value"),
        ("train.steps.more=1", "'steps' is a value and has no settings inside"),
    ],
)
def test_a_bad_override_is_refused(override, message):
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"train": {"steps": 5}}, [override])
    assert message in str(caught.value)
    assert override in str(caught.value)


# Canonical JSON and run ids


def test_canonical_json_is_fixed():
    config = DataConfig(validation_fraction=0.5)
    assert canonical_json(config) == (
        '{"sequence_length":256,"source":"wikipedia","split_seed":0,"text_field":"text","tokenizer":"bpe",'
        '"tokenizer_vocab_size":2048,"validation_fraction":0.5}'
    )


def test_a_run_id_is_fixed_by_config_and_data():
    config = decode(RunConfig, RUN)
    assert re.fullmatch("[0-9a-f]{12}", run_id(config, "0" * 64))
    assert run_id(config, "0" * 64) == run_id(decode(RunConfig, RUN), "0" * 64)
    assert run_id(config, "0" * 64) != run_id(config, "1" * 64)
    other = dataclasses.replace(config, train=TrainConfig(seed=1))
    assert run_id(config, "0" * 64) != run_id(other, "0" * 64)


def test_a_run_id_does_not_see_how_attention_is_computed():
    config = decode(RunConfig, RUN)
    other = decode(RunConfig, {"model": {"preset": "gpt-tiny", "attention_implementation": "torch"}})
    assert other.model.attention_implementation == "torch"
    assert encode(other)["model"]["attention_implementation"] == "torch"
    assert other == config
    assert run_id(other, "") == run_id(config, "") == "52d113a9611e"  # the id of before there was the setting


def test_a_run_id_does_not_see_how_the_config_was_written():
    ids = {
        run_id(decode(RunConfig, data), "")
        for data in (
            {"model": {"preset": "gpt-tiny", "sharing": "Q-K=V"}, "train": {"steps": 3, "learning_rate": 1}},
            {"train": {"learning_rate": "1.0", "steps": "3"}, "model": {"sharing": ["K=V"] * 4, "preset": "gpt-tiny"}},
            {"model": {**PRESETS["gpt-tiny"], "sharing": "tied-kv"}, "train": {"learning_rate": 1.0, "steps": 3}},
        )
    }
    by_hand = RunConfig(model=preset("gpt-tiny", sharing="tied-kv"), train=TrainConfig(steps=3, learning_rate=1))
    assert ids == {run_id(by_hand, "")}


# Round trip, over every kind of valid config


@st.composite
def model_configs(draw):
    layers, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 6]))

    def by_layer(values):
        return draw(st.one_of(values, st.lists(values, min_size=layers, max_size=layers)))

    sharing = by_layer(st.sampled_from(ProjectionSharing))
    kinds = sharing if isinstance(sharing, list) else [sharing]
    positions = draw(st.sampled_from(["learned", "sinusoidal", "rope", "none"]))
    fields = {
        "hidden_size": heads * 2 * draw(st.integers(1, 8)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "sharing": sharing,
        "positions": positions,
        "sliding_window": by_layer(st.one_of(st.none(), st.integers(1, 512))),
        "norm_eps": draw(st.floats(1e-8, 1e-3)),
        "attention_scale": draw(st.one_of(st.none(), st.floats(0.01, 2.0), st.integers(1, 2))),
        "causal": draw(st.booleans()),
    }
    if not any(kind.ties_query_key for kind in kinds):
        fields["num_key_value_heads"] = by_layer(st.sampled_from([g for g in range(1, heads + 1) if heads % g == 0]))
        fields["query_depth"] = draw(st.sampled_from([1, 2]))
    if positions == "rope" and any(kind.ties_key_value for kind in kinds):
        fields["rope_mode"] = draw(st.sampled_from([None, "relative", "unrotated", "decoupled"]))
    if fields.get("rope_mode") != "decoupled":
        fields["qk_norm"] = draw(st.booleans())
    if not fields["causal"]:
        fields["score_map"] = draw(st.sampled_from(["none", "paper", "product"]))
    return ModelConfig(**fields)


@given(model=model_configs(), learning_rate=st.one_of(st.integers(1, 3), st.floats(1e-6, 1.0)))
def test_encode_and_decode_are_inverse(model, learning_rate):
    config = RunConfig(model=model, train=TrainConfig(learning_rate=learning_rate))
    text = canonical_json(config)
    again = decode(RunConfig, json.loads(text))
    assert again == config
    assert canonical_json(again) == text
    assert run_id(again, "") == run_id(config, "")


@given(model=model_configs(), data=st.data())
def test_canonical_json_does_not_see_key_order(model, data):
    fields = encode(model)
    shuffled = {name: fields[name] for name in data.draw(st.permutations(list(fields)))}
    assert canonical_json(shuffled) == canonical_json(fields)
    assert decode(ModelConfig, shuffled) == model
