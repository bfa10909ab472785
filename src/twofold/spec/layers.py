"""Settings that may differ by layer: one value, a list, or a short pattern."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from twofold.spec.errors import ConfigError, did_you_mean

T = TypeVar("T")
_PATTERN_KEYS = ("every", "value", "otherwise")


def resolve_per_layer(name: str, given: Any, num_layers: int, parse: Callable[[Any], T]) -> T | tuple[T, ...]:
    """Returns one value when all layers agree, else a tuple of `num_layers` values.

    Args:
        name: The field's name, for messages.
        given: One value; a list with one value a layer; or a pattern `{every: 6, value: a, otherwise: b}`, which
            gives `a` to layers 6, 12, ... (counted from one) and `b` to the others, as in Gemma's layouts.
        num_layers: Number of layers.
        parse: Reads and checks one value; raises `ConfigError`.

    Raises:
        ConfigError: for a list of another length or a pattern with other keys.
    """
    if isinstance(given, Mapping):
        values = _expand_pattern(name, given, num_layers)
    elif isinstance(given, list | tuple):
        values = list(given)
    else:
        return parse(given)
    if len(values) != num_layers:
        raise ConfigError(f"{name} lists {len(values)} values for {num_layers} layers; give one a layer or one for all")
    parsed = [parse(value) for value in values]
    return parsed[0] if all(value == parsed[0] for value in parsed) else tuple(parsed)


def of_layer(value: T | tuple[T, ...], layer: int) -> T:
    """The value that a resolved setting has at a layer (counted from zero)."""
    return value[layer] if isinstance(value, tuple) else value


def _expand_pattern(name: str, pattern: Mapping[Any, Any], num_layers: int) -> list[Any]:
    for key in pattern:
        if key not in _PATTERN_KEYS:
            raise ConfigError(
                f"{name}: unknown key '{key}'{did_you_mean(str(key), _PATTERN_KEYS)} "
                "A pattern has the keys every, value, otherwise"
            )
    missing = [key for key in _PATTERN_KEYS if key not in pattern]
    if missing:
        raise ConfigError(f"{name}: the pattern lacks {', '.join(missing)}; it has the keys every, value, otherwise")
    every = pattern["every"]
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"{name}.every must be a whole number of layers, at least 1; got {every!r}")
    return [pattern["value"] if (layer + 1) % every == 0 else pattern["otherwise"] for layer in range(num_layers)]
