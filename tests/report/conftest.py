"""Builds quickstart folders of made-up figures, through the records API."""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from twofold.cost import cache_elements_per_token, count_parameters
from twofold.records import RunFolder, write_json_atomic
from twofold.spec import DataConfig, RunConfig, TrainConfig, encode, preset, variant_fields

DATA_SHA256 = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"
# Slug: the variant, and its made-up loss above QKV in nats.
VARIANTS: dict[str, tuple[str, float]] = {
    "qkv": ("QKV", 0.0),
    "tied-qk": ("Q=K-V", 0.031),
    "tied-kv": ("Q-K=V", 0.024),
    "tied-qkv": ("Q=K=V", 0.162),
    "gqa-4": ("GQA-4", 0.004),
    "mqa": ("MQA", 0.017),
    "q-gqa-4": ("Q-GQA-4", 0.033),
    "q-mqa": ("Q-MQA", 0.047),
    "q-gqa-4-decoupled": ("Q-GQA-4 decoupled", 0.021),
}
STEPS = 1_500


@dataclass(frozen=True)
class Folder:
    """A folder on disk and where its seed record would be."""

    path: Path
    seed_record: Path

    def write_seeds(self, *, spread: float = 0.004, data_sha256: str = DATA_SHA256, **train: Any) -> None:
        """Writes a record that speaks for the runs in the folder, unless data or training settings are given."""
        noise = random.Random(7)
        variants, configs = {}, {}
        for slug, (label, extra) in VARIANTS.items():
            config = _config(slug)
            configs[slug] = encode(replace(config, train=replace(config.train, seed=3, **train)))
            losses = [3.5 + extra + 0.01 * seed + noise.gauss(0, spread) for seed in range(5)]
            bits = [loss / math.log(2) / 3.1 for loss in losses]
            variants[slug] = {"label": label, "loss": losses, "bits_per_byte": bits}
        record = {
            "schema": 1,
            "created": "2026-12-01T08:00:00+00:00",
            "hardware": "a test machine",
            "revision": "f353d52",
            "data_sha256": data_sha256,
            "configs": configs,
            "seeds": [0, 1, 2, 3, 4],
            "variants": variants,
        }
        write_json_atomic(self.seed_record, record)


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Folder]:
    """Makes a folder; `decode=False` leaves the speed out, `unfinished` and `failed` name runs without a result."""

    def make(
        *,
        decode: bool = True,
        unfinished: tuple[str, ...] = (),
        failed: tuple[str, ...] = (),
        absent: tuple[str, ...] = (),
        continuations: Mapping[str, str] = {},
        positions: str = "rope",
    ) -> Folder:
        path = tmp_path / "quickstart"
        path.mkdir()
        speeds = {}
        for slug in VARIANTS:
            if slug in absent:
                continue
            run, per_token = _make_run(path / slug, slug, positions)
            speeds[slug] = _speed(per_token, random.Random(slug))
            if slug in failed:
                run.write_error(MemoryError("no room for <b>this</b>"))
            elif slug not in unfinished:
                run.write_result(_result(run, slug, per_token, continuations.get(slug)))
        quickstart = {
            "schema": 1,
            "created": "2026-12-01T09:00:00+00:00",
            "seed": 0,
            "variants": list(VARIANTS),
            "hardware": "AMD EPYC, 2 cores",
            "decode": _decode(speeds) if decode else None,
        }
        write_json_atomic(path / "quickstart.json", quickstart)
        return Folder(path, tmp_path / "seed_record.json")

    return make


def _config(slug: str, positions: str = "rope") -> RunConfig:
    fields: dict[str, Any] = variant_fields(slug.removesuffix("-decoupled"), 8) | {"positions": positions}
    if slug.endswith("-decoupled"):
        fields |= {"positions": "rope", "rope_mode": "decoupled"}
    return RunConfig(model=preset("gpt-tiny", **fields), data=DataConfig(), train=TrainConfig(steps=STEPS))


def _make_run(path: Path, slug: str, positions: str) -> tuple[RunFolder, int]:
    run = RunFolder.create(path, _config(slug, positions), DATA_SHA256)
    with run.writing():
        pass  # begun, so that there is an environment
    noise, extra = random.Random(slug), VARIANTS[slug][1]
    rows = []
    for step in range(0, STEPS + 1, 10):
        loss = 3.45 + extra + 4.1 * math.exp(-step / 220) + noise.gauss(0, 0.05)
        rows.append({"step": step, "loss": loss, "learning_rate": 1e-3, "tokens_per_second": 21_000.0})
        if step and step % 250 == 0:
            rows.append({"step": step, "validation_loss": 3.5 + extra + 4.1 * math.exp(-step / 220)})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return run, cache_elements_per_token(run.config.model) * 4


def _result(run: RunFolder, slug: str, per_token: int, continuation: str | None) -> dict[str, Any]:
    loss = 3.5 + VARIANTS[slug][1]
    text = " the Roman empire in the first century, when the city of the river was the first of the first of the land."
    return {
        "run_id": run.run_id,
        "label": VARIANTS[slug][0],
        "parameters": count_parameters(run.config.model).total,
        "validation": {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) / 3.1,
            "tokens": 84_211,
            "bytes": 261_054,
        },
        "training": {"steps": STEPS, "tokens": STEPS * 4096, "seconds": 290.0, "tokens_per_second": 21_200.0},
        "cache": {"dtype": "float32", "bytes_per_token": per_token, "bytes_per_token_measured": float(per_token)},
        "sample": {"prompt": "The history of", "continuation": text if continuation is None else continuation},
    }


def _speed(per_token: int, noise: random.Random) -> dict[str, Any]:
    used = per_token * 16_384
    median = 2.1 + used / 17.9e6 * 1.4 + noise.uniform(0, 0.05)
    milliseconds = {"median": median, "low": median * 0.985, "high": median * 1.03}
    tokens = {"median": 1e3 / median, "low": 1e3 / (median * 1.03), "high": 1e3 / (median * 0.985)}
    return {
        "milliseconds_per_token": milliseconds,
        "tokens_per_second": tokens,
        "cache_bytes_used": used,
        "cache_bytes_allocated": used + per_token * 64,
        "peak_memory_bytes": 310 * 1024**2 + used,
    }


def _decode(variants: dict[str, Any]) -> dict[str, Any]:
    return {
        "context": 16_384,
        "batch_size": 1,
        "dtype": "float32",
        "threads": 1,
        "attention": "torch scaled_dot_product_attention",
        "repeats": 7,
        "read_bandwidth_gb_s": 17.9,
        "variants": variants,
    }
