"""A quickstart folder as the report sees it: variants in order, finished or not, and what five seeds say."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from twofold.records import RunFolder, read_json
from twofold.report.statistics import Interval, paired_difference, perplexity_increase, seed_interval
from twofold.spec import ConfigError, RunConfig, RunFolderError, decode

BASELINE = "qkv"
"""Slug of the variant that the others are compared with."""

_RESULT = {
    "": ("parameters",),
    "validation": ("loss", "perplexity", "bits_per_byte", "tokens"),
    "cache": ("dtype", "bytes_per_token", "bytes_per_token_measured"),
    "training": ("steps", "tokens", "seconds", "tokens_per_second"),
    "sample": ("prompt", "continuation"),
}
_DECODE = ("context", "batch_size", "dtype", "threads", "attention", "repeats", "read_bandwidth_gb_s", "variants")
_DECODE_ROW = {
    "": ("cache_bytes_used", "cache_bytes_allocated", "peak_memory_bytes"),
    "milliseconds_per_token": ("median", "low", "high"),
    "tokens_per_second": ("median", "low", "high"),
}


@dataclass(frozen=True, kw_only=True)
class VariantRun:
    """One variant's run and what was measured on it."""

    slug: str
    """Name of its folder."""
    label: str
    """The paper's name."""
    state: str
    """`finished`, or a sentence that says why there is no result."""
    config: RunConfig | None
    """What was trained; None when the run never began."""
    run_id: str
    """The run's id, or an empty text."""
    data_sha256: str
    """Hash of its data, or an empty text."""
    result: dict[str, Any]
    """What the run wrote; empty unless it has finished."""
    metrics: list[dict[str, Any]]
    """Its training curve."""
    environment: dict[str, Any]
    """Versions and machine."""
    decode: dict[str, Any] | None
    """Decode speed and memory, when measured."""

    @property
    def finished(self) -> bool:
        """True when there is a result."""
        return self.state == "finished"

    @property
    def loss(self) -> float | None:
        """Validation loss in nats per token; None when the run has not finished or diverged."""
        loss = self.result["validation"]["loss"] if self.finished else None
        return None if loss is None else float(loss)

    @property
    def cache_bytes(self) -> int | None:
        """Cache bytes per token by formula."""
        return int(self.result["cache"]["bytes_per_token"]) if self.finished else None

    @property
    def one_tensor(self) -> bool:
        """True when K = V in every layer, so that one tensor is cached."""
        if self.config is None:
            return False
        model = self.config.model
        return all(model.layer_sharing(layer).ties_key_value for layer in range(model.num_hidden_layers))


@dataclass(frozen=True, kw_only=True)
class SeedRecord:
    """Losses of every variant over several seeds, from an earlier run on a named machine."""

    configs: dict[str, RunConfig]
    """What ran, by slug; the seed is the first one."""
    data_sha256: str
    """Hash of the data."""
    seeds: list[int]
    """The seeds."""
    hardware: str
    """Where they ran."""
    revision: str
    """Code revision that ran them."""
    created: str
    """When."""
    losses: dict[str, list[float]]
    """Validation losses by slug, in the order of the seeds."""
    bits_per_byte: dict[str, list[float]]
    """The same in bits per byte."""

    def applies_to(self, variants: Sequence[VariantRun]) -> bool:
        """True when all runs that have begun are of the record's data and, whatever their seed, of its configs."""
        return all(
            run.data_sha256 == self.data_sha256 and _with_seed(run.config, recorded.train.seed) == recorded
            for run in variants
            if run.config is not None and (recorded := self.configs.get(run.slug)) is not None
        )

    def increase(self, slug: str, baseline: str = BASELINE) -> Interval | None:
        """Perplexity of a variant above another in percent, paired by seed; None when one of them is not recorded."""
        if slug not in self.losses or baseline not in self.losses:
            return None
        return perplexity_increase(paired_difference(self.losses[slug], self.losses[baseline]))

    def loss_interval(self, slug: str) -> Interval | None:
        """Mean loss with its interval."""
        return seed_interval(self.losses[slug]) if slug in self.losses else None


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Everything that one quickstart measured."""

    path: Path
    """The folder."""
    created: str
    """When it was started."""
    seed: int
    """Seed of its runs."""
    hardware: str
    """The machine in words."""
    variants: list[VariantRun]
    """In display order."""
    decode: dict[str, Any] | None
    """Conditions of the decode measurement; None when it has not been made."""
    seeds: SeedRecord | None
    """The seed record for these settings."""
    other_seeds: SeedRecord | None
    """A seed record for other settings, which must not be mixed in."""

    @property
    def finished(self) -> list[VariantRun]:
        """Variants with a result."""
        return [variant for variant in self.variants if variant.finished]

    @property
    def baseline(self) -> VariantRun | None:
        """The QKV run, when it has finished with a loss."""
        return next((run for run in self.finished if run.slug == BASELINE and run.loss is not None), None)

    def comparable(self, variant: VariantRun) -> bool:
        """True when a variant has QKV's positions, so that sharing and heads alone set it apart."""
        if self.baseline is None or self.baseline.config is None or variant.config is None:
            return False
        return variant.config.model.positions == self.baseline.config.model.positions

    def increase(self, variant: VariantRun) -> float | None:
        """Perplexity above QKV in percent, in this folder's runs."""
        if self.baseline is None or self.baseline.loss is None or variant.loss is None:
            return None
        return 100 * math.expm1(variant.loss - self.baseline.loss)

    def seed_increase(self, variant: VariantRun) -> Interval | None:
        """The same over the seeds of the record, with its interval."""
        return self.seeds.increase(variant.slug) if self.seeds else None

    def cache_share(self, variant: VariantRun) -> Fraction | None:
        """Cache per token as a share of QKV's, by formula."""
        if self.baseline is None or not self.baseline.cache_bytes or variant.cache_bytes is None:
            return None
        return Fraction(variant.cache_bytes, self.baseline.cache_bytes)


def load_quickstart(folder: Path, seed_record: Path) -> Quickstart:
    """Reads a quickstart folder. Runs that have not finished are part of it; they say why.

    Args:
        folder: Folder with quickstart.json and one run folder a variant.
        seed_record: The record of several seeds; it need not exist.

    Raises:
        RunFolderError: where the folder is no quickstart, or a file in it cannot be read.
    """
    path = folder / "quickstart.json"
    if not path.exists():
        reason = "it has no quickstart.json" if folder.exists() else "it does not exist"
        raise RunFolderError(f"{folder} is not a quickstart folder: {reason}; make one with `twofold quickstart`")
    data = read_json(path)
    if data.get("schema") != 1:
        raise RunFolderError(f"{path} has schema {data.get('schema')!r}; this version of twofold reads 1")
    seeds = _load_seeds(seed_record) if seed_record.exists() else None
    try:
        measured = data["decode"]
        rows = measured["variants"] if measured else {}
        if measured:
            _require(path, measured, {"": _DECODE})
            for row in rows.values():
                _require(path, row, _DECODE_ROW)
        variants = [_load_variant(folder / slug, rows.get(slug)) for slug in data["variants"]]
        if all(run.config is None for run in variants):
            seeds = None  # what the folder's runs will be is not known
        matches = seeds is not None and seeds.applies_to(variants)
        return Quickstart(
            path=folder,
            created=data["created"],
            seed=data["seed"],
            hardware=data["hardware"],
            variants=variants,
            decode=measured,
            seeds=seeds if matches else None,
            other_seeds=None if matches else seeds,
        )
    except KeyError as error:
        raise RunFolderError(f"{path} has no {error}") from None


def _load_variant(path: Path, decode: dict[str, Any] | None) -> VariantRun:
    blank: dict[str, Any] = {"config": None, "run_id": "", "data_sha256": "", "result": {}, "metrics": []}
    if not RunFolder.exists(path):
        return VariantRun(slug=path.name, label=path.name, state="not started", environment={}, decode=decode, **blank)
    run = RunFolder.open(path)
    result, state = ({}, "not finished")
    if run.is_finished:
        result, state = run.result(), "finished"
        _require(path / "result.json", result, _RESULT)
    elif error := run.error():
        state = f"failed: {error.get('type')}: {error.get('message')}"
    return VariantRun(
        slug=path.name,
        label=result.get("label", run.config.model.label),
        state=state,
        config=run.config,
        run_id=run.run_id,
        data_sha256=run.data_sha256,
        result=result,
        metrics=run.metrics(),
        environment=run.environment(),
        decode=decode,
    )


def _require(path: Path, data: dict[str, Any], needed: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses a record in which a name is missing; `needed` maps groups to names, and "" to names outside of groups."""
    for group, names in needed.items():
        found = data.get(group, {}) if group else data
        for name in names:
            if name not in found:
                raise RunFolderError(f"{path} has no '{group}{'.' if group else ''}{name}'")


def _load_seeds(path: Path) -> SeedRecord:
    data = read_json(path)
    try:
        return SeedRecord(
            configs={slug: decode(RunConfig, config, f"{path}: {slug}") for slug, config in data["configs"].items()},
            data_sha256=data["data_sha256"],
            seeds=data["seeds"],
            hardware=data["hardware"],
            revision=data["revision"],
            created=data["created"],
            losses={slug: row["loss"] for slug, row in data["variants"].items()},
            bits_per_byte={slug: row["bits_per_byte"] for slug, row in data["variants"].items()},
        )
    except KeyError as error:
        raise RunFolderError(f"{path} has no {error}") from None
    except ConfigError as error:
        raise RunFolderError(f"{error}; it was written by another version of twofold") from None


def _with_seed(config: RunConfig, seed: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=seed))
