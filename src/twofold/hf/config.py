"""The spec's `ModelConfig` as a Transformers config."""

import difflib
import os
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from twofold.spec import ConfigError, ModelConfig, decode, encode, field_names, preset

STUB_NAME = "modeling_twofold.py"
"""File in every saved folder through which programs that never import twofold find its classes."""

_STUB = '''"""Loads this model for programs that pass trust_remote_code=True; needs twofold to be installed."""

from twofold.hf import TwofoldConfig, TwofoldForCausalLM, TwofoldModel

__all__ = ["TwofoldConfig", "TwofoldForCausalLM", "TwofoldModel"]
'''
_AUTO_MAP = {
    "AutoConfig": "modeling_twofold.TwofoldConfig",
    "AutoModel": "modeling_twofold.TwofoldModel",
    "AutoModelForCausalLM": "modeling_twofold.TwofoldForCausalLM",
}
_FIELDS = frozenset(field_names())


class TwofoldConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """A `ModelConfig` that Transformers can read, save and pass around.

    `config.spec` is the `ModelConfig`. Its fields read like any other attribute, as the plain values that JSON holds
    (`config.sharing` is a slug, a setting that differs by layer a list); assigning one makes a new spec, checked as
    always. In config.json they stand at the top level under the same names.

    `TwofoldConfig()` without any field describes the preset `gpt-tiny`, because Transformers makes such an instance.

    Raises:
        ConfigError: for fields that do not make a valid `ModelConfig`, and for a misspelt field.
    """

    model_type: ClassVar[str] = "twofold"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    """Outputs that the Trainer does not gather as predictions."""

    use_cache: bool = True
    """Return a key/value cache from forward, outside training, where the caller does not say."""
    bos_token_id: int | None = None
    """Token that begins a text."""
    eos_token_id: int | list[int] | None = None
    """Token, or tokens, that end a text."""
    pad_token_id: int | None = None
    """Token that fills short rows of a batch."""

    def __init__(
        self,
        *,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        given = {name: kwargs.pop(name) for name in field_names() if name in kwargs}
        for name in kwargs:
            _refuse_typo(name)
        kwargs.pop("auto_map", None)  # written anew by `to_dict`; Transformers rewrites the one that it reads
        self._spec = decode(ModelConfig, given) if given else preset("gpt-tiny")
        super().__init__(**kwargs)

    @classmethod
    def from_spec(cls, spec: ModelConfig, **options: Any) -> "TwofoldConfig":
        """The config of a model that a spec describes.

        Args:
            spec: The model's description.
            options: Settings of Transformers' own, for example `eos_token_id`.
        """
        return cls(**encode(spec), **options)

    @property
    def spec(self) -> ModelConfig:
        """The description that this config wraps."""
        return self._spec

    @property
    def layer_types(self) -> list[str]:
        """What Transformers' caches ask for; ours replace their layers and know the windows. Never saved."""
        return ["full_attention"] * self._spec.num_hidden_layers

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain data, the spec's fields at the top level."""
        result = super().to_dict()
        del result["_spec"]
        return {**result, **encode(self._spec), "auto_map": dict(_AUTO_MAP)}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes config.json, and the stub that lets other programs find the classes."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / STUB_NAME).write_text(_STUB, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """Does nothing: Transformers would copy this module into saved folders, which carry the stub already."""

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS and "_spec" in self.__dict__:
            return encode(getattr(self.__dict__["_spec"], name))
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIELDS:
            self._spec = self._spec.with_changes(**{name: value})
        else:
            super().__setattr__(name, value)  # type: ignore[no-untyped-call]


def _refuse_typo(name: str) -> None:
    """Any other name is the base class's to judge, and it takes all; a near miss of ours would vanish there."""
    near = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=0.9)
    if near:
        raise ConfigError(f"unknown setting '{name}'; did you mean '{near[0]}'?")
