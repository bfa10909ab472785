"""Model folders: from our plain modules to what `from_pretrained` takes, and back."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from twofold.hf.config import TwofoldConfig
from twofold.hf.modeling import TwofoldForCausalLM
from twofold.models import LanguageModel
from twofold.spec import ConfigError, RunFolderError


def to_hf(model: LanguageModel, *, eos_token_id: int | None = None) -> TwofoldForCausalLM:
    """The same model for Transformers. Weights are shared, not copied: training one trains the other.

    Args:
        model: The plain module.
        eos_token_id: Token that ends a text; it begins texts and fills short rows too, as in GPT-2.
    """
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_token_id)
    config = TwofoldConfig.from_spec(model.config, **special)
    with torch.device("meta"):  # no memory for weights that are replaced at once
        wrapped = TwofoldForCausalLM(config)
    wrapped.model.decoder = model.decoder
    wrapped.lm_head = model.lm_head
    wrapped.config.dtype = model.decoder.dtype
    wrapped.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call]
    return wrapped.train(model.training)


def to_plain(model: TwofoldForCausalLM) -> LanguageModel:
    """The inverse of `to_hf`: the plain module, weights shared."""
    with torch.device("meta"):
        plain = LanguageModel(model.config.spec)
    plain.decoder, plain.lm_head = model.model.decoder, model.lm_head
    return plain.train(model.training)


def wrap_tokenizer(tokenizer: Tokenizer, max_length: int, end_of_text: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer for Transformers.

    Args:
        tokenizer: The tokenizer as trained.
        max_length: Longest context of the model in tokens.
        end_of_text: The token that ends texts; it begins them and fills short rows too. None where there is none.

    Raises:
        ConfigError: where the tokenizer does not have that token.
    """
    _end_of_text_id(tokenizer, end_of_text)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), end_of_text) if end_of_text else {}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        padding_side="left",  # so that generation goes on from the last token of every row
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **special,
    )


def save_model(
    model: LanguageModel, folder: Path, tokenizer: Tokenizer | None = None, end_of_text: str | None = None
) -> None:
    """Writes a folder that `from_pretrained` takes: config, weights as safetensors, generation config, tokenizer, stub.

    Programs that never import twofold load it with `trust_remote_code=True`, as long as twofold is installed.

    Args:
        model: The model.
        folder: Where to write; give a temporary folder and rename it, so that no half-written one is ever found.
        tokenizer: Its tokenizer; None where tokens are not text.
        end_of_text: The tokenizer's token that ends texts, where generation stops; None where there is none.

    Raises:
        ConfigError: where the tokenizer does not have that token.
    """
    eos_token_id = None if tokenizer is None else _end_of_text_id(tokenizer, end_of_text)
    with _no_progress_bars():
        to_hf(model, eos_token_id=eos_token_id).save_pretrained(folder)
    if tokenizer is not None:
        wrap_tokenizer(tokenizer, model.config.max_position_embeddings, end_of_text).save_pretrained(folder)


def load_model(folder: Path) -> tuple[TwofoldForCausalLM, PreTrainedTokenizerBase | None]:
    """The model in a folder, ready for inference (`query_depth=2` is folded), and its tokenizer, or None without one.

    Raises:
        RunFolderError: for a folder that is missing, holds no twofold model, or is damaged.
        ConfigError: for a config.json that describes no valid model.
    """
    folder = Path(folder)
    _check_folder(folder)
    try:
        with _no_progress_bars():
            model, report = TwofoldForCausalLM.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from None
    except (SafetensorError, OSError, RuntimeError, ValueError, json.JSONDecodeError) as error:
        raise RunFolderError(f"the weights in {folder} cannot be read: {_one_line(error)}") from error
    _check_complete(folder, report)
    model.fold_queries()
    return model.eval(), _load_tokenizer(folder)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise RunFolderError(f"the tokenizer in {folder} cannot be read: {_one_line(error)}") from error


def _end_of_text_id(tokenizer: Tokenizer, end_of_text: str | None) -> int | None:
    if end_of_text is None:
        return None
    found = tokenizer.token_to_id(end_of_text)
    if found is None:
        raise ConfigError(f"the tokenizer has no token '{end_of_text}', which is to end texts")
    return int(found)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silences Transformers' bars for a single file; the setting is put back."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; give the folder of a saved model")
    config = folder / "config.json"
    if not config.is_file():
        inside = " (its model/ folder is one)" if (folder / "model" / "config.json").is_file() else ""
        raise RunFolderError(f"{folder} is not a model folder: it has no config.json{inside}")
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{config} is not JSON: {_one_line(error)}") from None
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if kind != TwofoldConfig.model_type:
        raise RunFolderError(f"{folder} holds a model of type '{kind}', not a twofold model; convert it first")
    if not any(folder.glob("*.safetensors")):
        pickles = [path.name for path in sorted(folder.glob("*.bin"))]
        found = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        raise RunFolderError(f"{folder} has no safetensors file with weights{found}")


def _check_complete(folder: Path, report: dict[str, Any]) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(problem) or ())
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunFolderError(
                f"the weights in {folder} do not fit its config.json: {problem.replace('_', ' ')} {names[0]}{more}"
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
