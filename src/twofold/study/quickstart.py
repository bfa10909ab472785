"""Quickstart: the main variants side by side on real text, then what each of their caches costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from twofold.bench import measure_decode, peak_decode_memory
from twofold.data import prepare_text
from twofold.records import RunFolder, describe_environment, exclusive, num_cores, read_json, write_json_atomic
from twofold.spec import (
    ConfigError,
    DataConfig,
    DataError,
    ModelConfig,
    RunConfig,
    RunFolderError,
    TrainConfig,
    TwofoldError,
    encode,
    preset,
    variant_fields,
)
from twofold.study.language_model import text_cache_folder, train_language_model
from twofold.study.workers import WorkerError, run_side_by_side, worker_pool

SCHEMA = 1
DECODE_CONTEXT = 16_384
_SEQUENCE_LENGTH = 128
_DATA = DataConfig(sequence_length=_SEQUENCE_LENGTH, tokenizer_vocab_size=2_048)
_TRAIN = TrainConfig(
    steps=1_200,
    batch_size=4,
    learning_rate=3e-3,
    min_learning_rate_ratio=0.02,
    warmup_steps=100,
    evaluate_every=400,
    checkpoint_every=400,
    log_every=20,
)
# Rotary where the paper has learned positions: after so few steps learned ones decide the order (docs/log.md).
_BASE = preset("gpt-tiny", max_position_embeddings=_SEQUENCE_LENGTH, positions="rope")
_VARIANTS = {
    "qkv": "QKV",
    "tied-qk": "Q=K-V",
    "tied-kv": "Q-K=V",
    "tied-qkv": "Q=K=V",
    "gqa-4": "GQA-4",
    "mqa": "MQA",
    "q-gqa-4": "Q-GQA-4",
    "q-mqa": "Q-MQA",
}


class StudyError(TwofoldError):
    """Runs of a study that failed."""


def quickstart_configs(seed: int = 0) -> dict[str, RunConfig]:
    """The runs of the quickstart by slug: the paper's eight variants of one tiny GPT, and one in decoupled form."""
    models: dict[str, ModelConfig] = {
        slug: replace(_BASE, **variant_fields(name, _BASE.num_attention_heads)) for slug, name in _VARIANTS.items()
    }
    models["q-gqa-4-decoupled"] = replace(
        models["q-gqa-4"], rope_mode="decoupled", qk_rope_head_dim=models["q-gqa-4"].head_dim
    )
    train = replace(_TRAIN, seed=seed)
    return {slug: RunConfig(model=model, data=_DATA, train=train) for slug, model in models.items()}


def run_quickstart(
    output: Path,
    *,
    seed: int = 0,
    num_workers: int | None = None,
    on_metrics: Callable[[Mapping[str, list[dict[str, Any]]]], None] | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> None:
    """Trains every variant with the same data order and seed, then measures decoding; all of it lands in `output`.

    Finished runs are kept and interrupted ones resumed when the same command runs again.

    Args:
        output: The quickstart's folder, with a run folder for each variant inside.
        seed: Seeds weights and data order.
        num_workers: Processes that train side by side. Default: one a core.
        on_metrics: Called about twice a second with all rows of metrics by slug.
        on_phase: Called with a line for each phase.

    Raises:
        RunFolderError: where the folder holds another quickstart or something else, or another process writes to it.
    """
    say = on_phase or (lambda _: None)
    configs = quickstart_configs(seed)
    record_path = output / "quickstart.json"
    if not record_path.exists():
        _refuse_foreign(output)
    say("preparing the text: 104 Wikipedia articles, 2,048 byte pairs")
    prepare_text(_DATA, text_cache_folder())  # once, before the processes that share it
    record = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "variants": list(configs),
        "hardware": hardware(),
        "decode": None,
    }
    record = _open_record(record_path, record)
    with exclusive(output):
        say(f"training {len(configs)} models of {_BASE.num_hidden_layers} layers, {_TRAIN.steps} steps each")
        train_side_by_side(configs, output, num_workers=num_workers or num_cores(), on_metrics=on_metrics)
        if record["decode"] is None:
            models = {slug: config.model for slug, config in configs.items()}
            record["decode"] = measure_in_processes(models, DECODE_CONTEXT, say)
            write_json_atomic(record_path, record)


def train_side_by_side(
    configs: Mapping[str, RunConfig],
    output: Path,
    *,
    num_workers: int,
    on_metrics: Callable[[Mapping[str, list[dict[str, Any]]]], None] | None = None,
) -> None:
    """Trains runs in worker processes with one thread each, every run in its folder `output/slug`.

    A failed run does not stop its neighbours. One whose process was killed is resumed once, alone after the others.

    Raises:
        TwofoldError: when all runs have ended and some have failed: a `StudyError` that names them, or the mistake
            itself where it is one of the user's.
    """

    def show_metrics() -> None:
        if on_metrics is not None:
            on_metrics({slug: _metrics(output / slug) for slug in configs})

    runs = {
        slug: partial(train_language_model, config, output / slug, device="cpu") for slug, config in configs.items()
    }
    errors = run_side_by_side(runs, num_workers, show_metrics)
    for slug, error in errors.items():
        if isinstance(error, WorkerError) and RunFolder.exists(output / slug):
            RunFolder.open(output / slug).write_error(error)  # its process could not
    _raise_failures(errors)


def measure_in_processes(models: Mapping[str, ModelConfig], context: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Decode speed in one process, all variants interleaved on one thread; peak memory in a process for each."""
    say(f"measuring decode speed at {context:,} tokens of context, one thread, all variants in turn")
    with worker_pool(1, fresh=True) as pool:
        decode: dict[str, Any] = pool.submit(measure_decode, dict(models), context=context).result()
    say("measuring peak memory, a fresh process for each variant")
    with worker_pool(num_cores(), fresh=True) as pool:
        peaks = {slug: pool.submit(peak_decode_memory, model, context) for slug, model in models.items()}
        for slug, peak in peaks.items():
            decode["variants"][slug]["peak_memory_bytes"] = peak.result()
    return decode


def record_seeds(output: Path, seeds: Sequence[int], on_phase: Callable[[str], None] = print) -> dict[str, Any]:
    """Trains the quickstart's runs once for each seed and returns their validation figures, variant by variant.

    The configs of the first seed and the hash of the data say which runs the record speaks for.
    """
    for seed in seeds:
        on_phase(f"seed {seed}")
        train_side_by_side(quickstart_configs(seed), output / f"seed-{seed}", num_workers=num_cores())
    first = {slug: RunFolder.open(output / f"seed-{seeds[0]}" / slug) for slug in quickstart_configs()}
    variants: dict[str, Any] = {}
    for slug in first:
        results = [RunFolder.open(output / f"seed-{seed}" / slug).result() for seed in seeds]
        variants[slug] = {
            "label": results[0]["label"],
            "loss": [result["validation"]["loss"] for result in results],
            "bits_per_byte": [result["validation"]["bits_per_byte"] for result in results],
        }
    environment = first["qkv"].environment()
    return {
        "schema": SCHEMA,
        "created": environment["created"],
        "hardware": hardware(),
        "revision": environment["git_revision"],
        "data_sha256": first["qkv"].data_sha256,
        "configs": {slug: encode(run.config) for slug, run in first.items()},
        "seeds": list(seeds),
        "variants": variants,
    }


def hardware() -> str:
    """This machine in words."""
    environment = describe_environment()
    return f"{environment['cpu']}, {environment['cores']} cores"


def _open_record(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, record)
        return record
    found = read_json(path)
    if found.get("seed") != record["seed"]:  # other settings are refused by the run folders inside
        raise RunFolderError(
            f"{path.parent} holds another quickstart (seed {found.get('seed')}, not {record['seed']}); "
            "choose another --output"
        )
    return found


def _refuse_foreign(output: Path) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise RunFolderError(f"{output} is a file; choose another --output")
    found = sorted(entry.name for entry in output.iterdir() if entry.name != ".quickstart.json.tmp")
    if found:
        raise RunFolderError(f"{output} holds files that are no quickstart ({found[0]}, ...); choose another --output")


def _raise_failures(errors: Mapping[str, BaseException]) -> None:
    if not errors:
        return
    slug, first = next(iter(errors.items()))
    if isinstance(first, (ConfigError, DataError, RunFolderError)):
        raise first
    reason = str(first) if isinstance(first, TwofoldError) else f"{type(first).__name__}: {first}"
    others = f" ({', '.join(list(errors)[1:])} failed too)" if len(errors) > 1 else ""
    raise StudyError(f"{slug} failed: {reason}{others}") from first


def _metrics(path: Path) -> list[dict[str, Any]]:
    return RunFolder.open(path).metrics() if RunFolder.exists(path) else []
