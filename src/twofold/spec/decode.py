"""From YAML and `--set` to configs, and from configs to canonical JSON and run ids."""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from twofold.spec.errors import ConfigError, did_you_mean
from twofold.spec.model import ModelConfig
from twofold.spec.presets import preset_fields

T = TypeVar("T")
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def decode(config_type: type[T], data: Mapping[str, Any], where: str = "config") -> T:
    """Builds a config from plain data, as YAML and JSON give it. A `preset` inside `model` fills its fields first.

    Args:
        config_type: `RunConfig`, `ModelConfig`, or another dataclass of this room.
        data: Nested mappings. Numbers may be text, because YAML reads `3e-4` as text.
        where: What the data came from, for messages.

    Raises:
        ConfigError: one line that names the path of the first wrong key.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(config_type).validate_python(_with_presets(config_type, data))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(config_type, error)}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping; raises `ConfigError` where the file is missing or is something else."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of settings such as 'model:' at its top level")
    return data


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the data with `a.b=value` settings applied in order; values are read as YAML."""
    import yaml

    result = copy.deepcopy(dict(data))
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise ConfigError(f"--set '{override}' must look like train.steps=100")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set '{override}': '{text}' is not a YAML value") from None
        *parents, last = path.strip().split(".")
        target = result
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set '{override}': '{parent}' is a value and has no settings inside")
        target[last] = value
    return result


def encode(config: Any) -> Any:
    """The inverse of `decode`: plain data that JSON and YAML can hold."""
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: _encode_field(field.type, getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, Enum):
        return config.value
    if isinstance(config, tuple):
        return [encode(item) for item in config]
    return config


def canonical_json(data: Any) -> str:
    """JSON with sorted keys and no spaces: equal data gives equal text."""
    return json.dumps(encode(data), sort_keys=True, separators=(",", ":"), allow_nan=False)


def run_id(config: Any, data_sha256: str) -> str:
    """Twelve hex digits that name a config together with its data; equal configs have the same."""
    text = canonical_json({"config": _encode_compared(config), "data_sha256": data_sha256})
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _encode_field(field_type: Any, value: Any) -> Any:
    if field_type in (float, float | None) and isinstance(value, int):
        return float(value)  # 1 and 1.0 are equal, so they must give the same text
    return encode(value)


def _encode_compared(config: Any) -> Any:
    """`encode` without the fields that leave configs equal: they say how something is computed, not what."""
    if not is_dataclass(config) or isinstance(config, type):
        return encode(config)
    values = [(field, getattr(config, field.name)) for field in fields(config) if field.compare]
    return {
        field.name: _encode_compared(value) if is_dataclass(value) else _encode_field(field.type, value)
        for field, value in values
    }


def _with_presets(config_type: type, data: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(data)
    if config_type is ModelConfig and "preset" in result:
        return {**preset_fields(str(result.pop("preset"))), **result}
    for field in fields(config_type):
        if field.type is ModelConfig and isinstance(result.get(field.name), Mapping):
            result[field.name] = _with_presets(ModelConfig, result[field.name])
    return result


def _first_problem(config_type: type, error: Any) -> str:
    problems = error.errors()
    unknown = [problem for problem in problems if problem["type"] in _UNKNOWN]
    problem = (unknown or problems)[0]  # a misspelt key explains the missing one
    path = ".".join(str(part) for part in problem["loc"])
    prefix = f"{path}: " if path else ""
    if problem["type"] in _UNKNOWN:
        allowed = _allowed_names(config_type, problem["loc"][:-1])
        nearest = did_you_mean(str(problem["loc"][-1]), allowed)
        return f"unknown setting '{path}'{nearest if nearest != '.' else '; allowed: ' + ', '.join(allowed)}"
    if problem["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"'{path}' is missing"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return prefix + message
    return f"{prefix}{message[0].lower()}{message[1:]}; got {problem['input']!r}"


def _allowed_names(config_type: type, path: Sequence[Any]) -> list[str]:
    current: Any = config_type
    for part in path:
        current = next((field.type for field in fields(current) if field.name == part), None)
        if not is_dataclass(current):
            return []
    names = [field.name for field in fields(current)]
    return ["preset", *names] if current is ModelConfig else names
