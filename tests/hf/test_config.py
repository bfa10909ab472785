"""The config survives everything that Transformers does to configs."""

import copy
import json

import pytest
from transformers import AutoConfig, DynamicCache, LlamaConfig, PreTrainedConfig

from tests.hf.small import VARIANTS, make_config
from tests.pipes import through_a_pipe
from twofold.hf import TwofoldConfig
from twofold.spec import ConfigError, ModelConfig, encode, field_names, preset


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trips(variant, tmp_path):
    config = make_config(variant, eos_token_id=3)
    config.save_pretrained(tmp_path)
    for again in (
        TwofoldConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        TwofoldConfig.from_dict(config.to_dict()),
        TwofoldConfig(**config.to_diff_dict()),
        copy.deepcopy(config),
        copy.copy(config),
        through_a_pipe(config),
        TwofoldConfig.from_spec(config.spec, eos_token_id=3),
    ):
        assert type(again) is TwofoldConfig
        assert again.spec == config.spec
        assert again.eos_token_id == 3
        assert {**again.to_dict(), "_name_or_path": ""} == config.to_dict()


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_fields_stand_at_the_top_level(variant, tmp_path):
    config = make_config(variant)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "twofold"
    assert {name: saved[name] for name in field_names()} == json.loads(json.dumps(encode(config.spec)))
    assert "layer_types" not in saved
    assert "_spec" not in saved


@pytest.mark.parametrize("variant", VARIANTS)
def test_base_class_reads_it(variant, tmp_path):
    """As the Trainer does when it resumes."""
    make_config(variant).save_pretrained(tmp_path)
    assert PreTrainedConfig.from_pretrained(tmp_path).hidden_size == 32


def test_fields_read_as_plain_values():
    config = make_config("mixed")
    assert config.hidden_size == 32
    assert config.head_dim == 8
    assert config.sharing == ["qkv", "tied-kv", "tied-qkv"]
    assert config.sliding_window == [3, None, 5]
    assert config.layer_types == ["full_attention"] * 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = config.no_such_thing


def test_a_spec_becomes_a_config():
    spec = preset("llama-tiny", sharing="Q-K=V")
    assert TwofoldConfig.from_spec(spec).spec is not None
    assert TwofoldConfig.from_spec(spec).spec == spec


def test_assigning_a_field_makes_a_checked_spec():
    config = make_config()
    config.vocab_size = 70
    assert config.spec.vocab_size == config.vocab_size == 70
    assert isinstance(config.spec, ModelConfig)
    with pytest.raises(ConfigError, match="vocab_size"):
        config.vocab_size = 0
    config.hidden_size *= 2
    assert config.head_dim * config.num_attention_heads == config.hidden_size


def test_settings_of_transformers_are_its_own():
    config = make_config(use_cache=False, dtype="float32", custom="kept")
    again = TwofoldConfig.from_dict(config.to_dict())
    assert again.use_cache is False
    assert str(again.dtype) == "torch.float32"
    assert again.custom == "kept"


def test_without_arguments():
    assert TwofoldConfig().spec == preset("gpt-tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"sharing": "tied-vk"}, "unknown sharing 'tied-vk'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"sliding_window": [1, 2, 3]}, "lists 3 values for 2 layers"),
    ],
)
def test_invalid_saved_config_is_one_line(change, message, tmp_path):
    make_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        AutoConfig.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_typo_and_missing_field():
    with pytest.raises(ConfigError, match="did you mean 'hidden_size'"):
        make_config(hiden_size=3)
    with pytest.raises(ConfigError, match="is missing"):
        TwofoldConfig(hidden_size=32)


def test_transformers_settings_are_no_typos():
    """No setting that another model of Transformers has is mistaken for one of ours."""
    TwofoldConfig(**{name: value for name, value in LlamaConfig().to_dict().items() if name not in field_names()})


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_makes_caches_from_it(variant):
    config = make_config(variant)
    assert len(DynamicCache(config=config).layers) == config.num_hidden_layers
