"""Options that several verbs share, and the configs that they stand for."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from twofold.spec import (
    PAPER_VARIANTS,
    PRESETS,
    ConfigError,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    apply_overrides,
    decode,
    field_names,
    preset_fields,
    read_yaml,
)

PresetOption = Annotated[
    str | None, typer.Option("--preset", metavar="NAME", help=f"A model by name: {', '.join(PRESETS)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A YAML file that describes a run, or only its model.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, such as model.sharing=tied-kv. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, mps. Default: the best of this machine.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="float32, bfloat16 or float16. Default: as the weights are saved."),
]
CacheDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--cache-dtype", metavar="NAME", help="int8 or int4 for a quantised cache. Default: as the model computes."
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option("--weights", metavar="NAME", help="int8 for quantised linear layers, on the CPU. Default: as saved."),
]
ModelOption = Annotated[
    Path, typer.Option("--model", metavar="FOLDER", help="A run folder, or the model/ folder inside one.")
]

_SECTIONS = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}


def load_model(preset: str | None, config: Path | None, overrides: Sequence[str] | None) -> ModelConfig:
    """The model that `--preset` or `--config`, and `--set`, describe.

    Raises:
        ConfigError: when none or both are given, or when they describe no valid model.
    """
    data, where = _load(preset, config, overrides)
    if set(data) == {"model"} and isinstance(data["model"], Mapping):
        return decode(ModelConfig, data["model"], where)  # a model alone need not fit the default data
    return decode(RunConfig, data, where).model


def load_run(preset: str | None, config: Path | None, overrides: Sequence[str] | None) -> RunConfig:
    """The complete run that `--preset` or `--config`, and `--set`, describe; what they leave out has its default.

    Raises:
        ConfigError: when none or both are given, or when they describe no valid run.
    """
    data, where = _load(preset, config, overrides)
    return decode(RunConfig, data, where)


def variants_of(model: ModelConfig, names: Sequence[str] | None) -> dict[str, ModelConfig]:
    """Models by the name of their row: the variants asked for, or the model as it is and the paper's eight.

    Of the eight, those that the model cannot take are left out, and standard error says so.

    Raises:
        ConfigError: where a variant that was asked for does not fit.
    """
    from twofold.cost import as_variant

    if names:
        return {name: as_variant(model, name) for name in names}
    variants = {}
    for name in PAPER_VARIANTS:
        try:
            variants[name] = as_variant(model, name)
        except ConfigError as error:
            print(f"twofold: left out {error}", file=sys.stderr)
    if model in variants.values():
        return variants
    return {f"{model.label} (as given)": model, **variants}


def _load(preset: str | None, config: Path | None, overrides: Sequence[str] | None) -> tuple[dict[str, Any], str]:
    """Plain data with the sections of a run, and what to call it in messages."""
    if preset is not None and config is not None:
        raise ConfigError("--preset and --config both describe the model; give one of them")
    if config is not None:
        data, where = read_yaml(config), str(config)
        if not set(data) & set(_SECTIONS) and set(data) & {"preset", *field_names()}:
            data = {"model": data}
    elif preset is not None:
        data, where = {"model": preset_fields(preset)}, f"preset {preset}"
    else:
        raise ConfigError(f"which model? Give --preset (one of {', '.join(PRESETS)}) or --config FILE")
    settings = list(overrides or ())
    for setting in settings:
        _check_section(setting)
    return apply_overrides(data, settings), where


def _check_section(setting: str) -> None:
    path = setting.partition("=")[0].strip()
    if path in _SECTIONS or "." in path:
        return
    for section, config_type in _SECTIONS.items():
        if path in (field.name for field in fields(config_type)):
            raise ConfigError(f"--set '{setting}': '{path}' belongs to {section}; write --set {section}.{setting}")
