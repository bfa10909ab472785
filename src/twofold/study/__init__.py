"""Runs put together and carried out: one language model from config to result, and the quickstart's side by side."""

from twofold.study.language_model import (
    evaluate_language_model,
    model_folder,
    text_cache_folder,
    train_language_model,
)
from twofold.study.quickstart import quickstart_configs, record_seeds, run_quickstart

__all__ = [
    "evaluate_language_model",
    "model_folder",
    "quickstart_configs",
    "record_seeds",
    "run_quickstart",
    "text_cache_folder",
    "train_language_model",
]
