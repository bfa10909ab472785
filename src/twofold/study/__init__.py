"""Runs put together and carried out: one language model from config to result, and the quickstart's side by side."""

from twofold.study.language_model import (
    evaluate_language_model,
    model_folder,
    text_cache_folder,
    train_language_model,
)
from twofold.study.quickstart import StudyError, quickstart_configs, record_seeds, run_quickstart, train_side_by_side

__all__ = [
    "StudyError",
    "evaluate_language_model",
    "model_folder",
    "quickstart_configs",
    "record_seeds",
    "run_quickstart",
    "text_cache_folder",
    "train_language_model",
    "train_side_by_side",
]
