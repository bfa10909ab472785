"""`twofold config` and `twofold info`."""

import json
from dataclasses import fields

import pytest
import yaml

from twofold.cli import main
from twofold.spec import PRESETS, DataConfig, ModelConfig, RunConfig, TrainConfig, decode, encode, preset

MIXED = [
    "--set=model.sharing=[qkv, tied-kv, qkv, tied-kv]",
    "--set=model.sliding_window={every: 2, value: null, otherwise: 64}",
    "--set=data.source=C:\\texts\\a b.txt",
    "--set=train.learning_rate=3e-4",
]


def config(capsys, *arguments):
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("explain", [[], ["--explain"]])
def test_the_yaml_reads_back_to_the_same_run(name, explain, capsys):
    data = yaml.safe_load(config(capsys, "--preset", name, *explain))
    assert decode(RunConfig, data) == RunConfig(model=preset(name))


@pytest.mark.parametrize("explain", [[], ["--explain"]])
def test_settings_of_every_kind_survive(explain, capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(config(capsys, "--preset", "gpt-tiny", *MIXED, *explain), encoding="utf-8")
    run = decode(RunConfig, yaml.safe_load(path.read_text(encoding="utf-8")))
    assert run.model.sliding_window == (64, None, 64, None)
    assert run.data.source == "C:\\texts\\a b.txt"
    assert run.train.learning_rate == 3e-4
    assert config(capsys, "--config", str(path), *explain) == path.read_text(encoding="utf-8")


def test_every_setting_is_there_and_explained(capsys):
    lines = config(capsys, "--preset", "gpt-tiny", "--explain").splitlines()
    for config_type in (ModelConfig, DataConfig, TrainConfig):
        for field in fields(config_type):
            place = next(number for number, line in enumerate(lines) if line.startswith(f"  {field.name}:"))
            assert lines[place - 1].startswith("  # "), field.name


def test_json_holds_the_same(capsys):
    run = json.loads(config(capsys, "--preset", "gpt-tiny", "--json", "--set", "train.steps=7"))
    assert run == encode(RunConfig(model=preset("gpt-tiny"), train=TrainConfig(steps=7)))


def test_a_run_that_does_not_fit_is_refused(capsys):
    assert main(["config", "--preset", "gpt-tiny", "--set", "data.sequence_length=1000"]) == 2
    assert "sequence_length 1000 is longer" in capsys.readouterr().err


def test_info_names_versions_threads_and_implementations(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["torch"]
    assert facts["torch"]["threads"] >= 1
    assert set(facts["attention"]) == {"native", "triton", "torch"}
    assert "compile" in facts["linear_layers"]
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "scaled_dot_product_attention" in text
    assert facts["python"] in text
