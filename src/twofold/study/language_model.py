"""One language-model run from config to result: data, model, training, validation, cache and a sample."""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from twofold.cache import check_cache_dtype
from twofold.cost import cache_bytes
from twofold.data import PackedSequences, TextData, prepare_text
from twofold.eval import Perplexity, measure_perplexity, sample_text
from twofold.hf import load_model, save_model, to_plain
from twofold.kernels import check_weights, quantize_weights
from twofold.models import LanguageModel
from twofold.records import RunFolder
from twofold.spec import ConfigError, DataConfig, DataError, RunConfig
from twofold.train import make_accelerator, resolve_device, resolve_dtype, text_task, train

SAMPLE_PROMPT = "The history of"
_PROBE_TOKENS = 64


def text_cache_folder() -> Path:
    """Where tokenised text is kept between runs: $TWOFOLD_CACHE, or `~/.cache/twofold`."""
    return Path(os.environ.get("TWOFOLD_CACHE") or Path.home() / ".cache" / "twofold")


def train_language_model(
    config: RunConfig,
    output: Path,
    *,
    device: str | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Trains the model that a config describes and returns the result, which is also in the run folder.

    A folder that holds the same run is resumed from its checkpoint; a finished one is returned as it is.

    Args:
        config: The run.
        output: Its run folder.
        device: `cuda`, `mps` or `cpu`; None for the best device of this machine.
        report: Called with every row of metrics.

    Raises:
        ConfigError: for a model that is not causal, a tokenizer that does not fit it, or a device that is not there.
        DataError: for text that cannot be used.
        RunFolderError: where the folder holds something else.
    """
    if not config.model.causal:
        raise ConfigError("a language model predicts the next token, which a model with causal: false has seen")
    accelerator = make_accelerator(resolve_device(device))
    text = prepare_text(config.data, text_cache_folder())
    if text.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {text.vocab_size} tokens and the model a vocabulary of {config.model.vocab_size}; "
            f"set model.vocab_size={text.vocab_size}"
        )
    training = PackedSequences(text.train, config.data.sequence_length)
    validation = PackedSequences(text.validation, config.data.sequence_length, keep_partial=True)
    folder = RunFolder.create(output, config, text.data_sha256)
    if folder.is_finished:
        return folder.result()
    with folder.writing(_device_name(accelerator.device)):
        torch.manual_seed(config.train.seed)
        module = LanguageModel(config.model)

        validations: list[Perplexity] = []

        def evaluate(model: nn.Module) -> dict[str, float]:
            validations.append(measure_perplexity(model, validation, config.train.batch_size))
            return {"validation_loss": validations[-1].loss}

        def save(model: nn.Module, directory: Path) -> None:
            assert isinstance(model, LanguageModel)
            save_model(model, directory, text.tokenizer, text.end_of_text)

        task = text_task(module, training, config.train, evaluate=evaluate, save_model=save)
        trained = train(task, config.train, folder, accelerator=accelerator, report=report)
        folder.write_result(
            {
                "run_id": folder.run_id,
                "label": config.model.label,
                "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                "validation": validations[-1].to_dict(),
                "training": {
                    "steps": config.train.steps,
                    "tokens": int(trained["targets"]),
                    "seconds": trained["seconds"],
                    "tokens_per_second": trained["targets"] / max(trained["seconds"], 1e-9),
                },
                "cache": measure_cache(module, text),
                "sample": {"prompt": SAMPLE_PROMPT, "continuation": _sample(folder.model_path)},
            }
        )
    return folder.result()


def evaluate_language_model(
    model: Path,
    *,
    source: str | None = None,
    batch_size: int = 8,
    device: str | None = None,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    weights: str | None = None,
) -> Perplexity:
    """Perplexity of a saved model over the held-out documents of a text.

    Args:
        model: A run folder, or a model folder.
        source: A text as in `DataConfig.source`. Default: the run's own, or the embedded one outside a run folder.
        batch_size: Sequences in one forward pass.
        device: `cuda`, `mps` or `cpu`; None for the best device of this machine.
        dtype: `float32`, `bfloat16` or `float16`; None for that of the weights.
        cache_dtype: `int8` or `int4` to read keys and values as a cache of that type stores them.
        weights: `int8` to quantise the linear layers, on the CPU; None for the weights as they are.

    Raises:
        ConfigError: for a model without a tokenizer, a device that is not there, int8 weights elsewhere than on the
            CPU, or an unknown dtype.
        DataError: for text that cannot be used, or that has changed since the run.
        RunFolderError: where there is no model.
    """
    check_cache_dtype(cache_dtype)
    check_weights(weights)
    target, precision = resolve_device(device), resolve_dtype(dtype)
    folder = model_folder(model)
    loaded, tokenizer = load_model(folder)
    if tokenizer is None:
        raise ConfigError(f"{folder} has no tokenizer, so it cannot read text")
    spec = loaded.config.spec
    path = next((path for path in (model, model.parent) if RunFolder.exists(path)), None)
    run = None if path is None else RunFolder.open(path)
    data = DataConfig(sequence_length=min(spec.max_position_embeddings, 1_024)) if run is None else run.config.data
    if source is not None or run is None:
        data = replace(data, source=data.source if source is None else source, tokenizer=str(folder))
    text = prepare_text(data, text_cache_folder())
    if source is None and run is not None and text.data_sha256 != run.data_sha256:
        raise DataError(
            f"the text {data.source} is no longer what {run.path} was trained on; name a text with --source"
        )
    validation = PackedSequences(text.validation, data.sequence_length, keep_partial=True)
    loaded.to(device=target, dtype=precision)  # type: ignore[call-arg]
    if weights is not None:
        quantize_weights(loaded)
    module = to_plain(loaded)
    make_cache = None if cache_dtype is None else partial(module.decoder.make_cache, dtype=cache_dtype)
    return measure_perplexity(module, validation, batch_size, make_cache=make_cache)


def model_folder(path: Path) -> Path:
    """The model folder that a user means: the folder itself, or the one inside a run folder."""
    return RunFolder.open(path).model_path if RunFolder.exists(path) else path


@torch.no_grad()
def measure_cache(module: LanguageModel, text: TextData) -> dict[str, Any]:
    """Bytes of the tensors that the model's cache really holds for a token, beside the formula's."""
    parameter = next(module.parameters())
    probe = text.validation.tokens()[: min(_PROBE_TOKENS, module.config.max_position_embeddings)]
    num_tokens = len(probe)
    tokens = torch.from_numpy(probe.astype("int64")).to(parameter.device)[None]
    cache = module.decoder.make_cache()
    module.eval()
    module(tokens, cache=cache, num_logits=1)
    dtype = str(parameter.dtype).removeprefix("torch.")
    formula = cache_bytes(module.config, num_tokens, dtype=dtype)
    return {
        "dtype": dtype,
        "bytes_per_token": formula.total // num_tokens,
        "bytes_per_token_measured": sum(tensor.nbytes for layer in cache for tensor in layer.tensors) / num_tokens,
    }


def _sample(model_path: Path) -> str:
    model, tokenizer = load_model(model_path)
    assert tokenizer is not None  # saved with the model just now
    budget = model.config.spec.max_position_embeddings - len(tokenizer(SAMPLE_PROMPT)["input_ids"])
    if budget < 1:
        return ""  # the positions end within the prompt
    return sample_text(model, tokenizer, SAMPLE_PROMPT, max_new_tokens=min(80, budget))


def _device_name(device: torch.device) -> str | None:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return None if device.type == "cpu" else device.type
