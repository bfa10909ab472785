"""What a model and a run are: frozen configs, presets, and their way from and to YAML, JSON and the command line.

This room knows neither torch nor files other than YAML; every other room speaks in its terms.
"""

from twofold.spec.cache import RECENT_TOKENS
from twofold.spec.decode import apply_overrides, canonical_json, decode, encode, read_yaml, run_id
from twofold.spec.errors import ConfigError, DataError, RunFolderError, TwofoldError, did_you_mean
from twofold.spec.model import (
    Activation,
    AttentionImplementation,
    ModelConfig,
    Normalization,
    Positions,
    RopeMode,
    ScoreMap,
    field_names,
)
from twofold.spec.presets import PAPER_VARIANTS, PRESETS, preset, preset_fields, variant_fields
from twofold.spec.run import DataConfig, Precision, RunConfig, TrainConfig
from twofold.spec.sharing import ProjectionSharing

__all__ = [
    "PAPER_VARIANTS",
    "PRESETS",
    "RECENT_TOKENS",
    "Activation",
    "AttentionImplementation",
    "ConfigError",
    "DataConfig",
    "DataError",
    "ModelConfig",
    "Normalization",
    "Positions",
    "Precision",
    "ProjectionSharing",
    "RopeMode",
    "RunConfig",
    "RunFolderError",
    "ScoreMap",
    "TrainConfig",
    "TwofoldError",
    "apply_overrides",
    "canonical_json",
    "decode",
    "did_you_mean",
    "encode",
    "field_names",
    "preset",
    "preset_fields",
    "read_yaml",
    "run_id",
    "variant_fields",
]
